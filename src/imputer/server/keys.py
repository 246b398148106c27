"""API keys: from a file that is read again when it changes, compared in constant time; and limits per key."""

import hashlib
import hmac
import logging
import re
import stat
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from imputer.errors import UsageError
from imputer.server.failures import Failure, retry_later
from imputer.server.settings import Settings

LOOK_SECONDS = 1.0  # between two checks whether the file has changed
FORGET_SECONDS = 600.0  # without a request, a client's allowance is full again

logger = logging.getLogger("imputer.server")


def read_keys(path: Path) -> tuple[str, ...]:
    """The keys in a file, one per line; empty lines and comments, from # to the end of a line, do not count."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UsageError(f"cannot read the keys in {path}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not a text file with keys") from None
    lines = [re.sub(r"(^|\s)#.*", "", line).strip() for line in text.splitlines()]
    keys = tuple(line for line in lines if line)
    if not keys:
        raise UsageError(f"{path} has no keys: write one per line")
    return keys


def warn_of_readers(path: Path) -> None:
    """Warn if other users can read the keys."""
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        print(
            f"imputer: other users may read or change the keys in {path}; run: chmod 600 {path}",
            file=sys.stderr,
            flush=True,
        )


class Keys:
    """The keys that are valid now."""

    def __init__(self, settings: Settings) -> None:
        self.keys = [key.encode() for key in settings.api_keys]
        self.path = Path(settings.api_key_file) if settings.api_key_file else None
        self.looked, self.changed = 0.0, -1
        if self.path is not None:
            self.keys = [key.encode() for key in read_keys(self.path)]
            self.looked, self.changed = time.monotonic(), self.path.stat().st_mtime_ns

    def __bool__(self) -> bool:
        return self.path is not None or bool(self.keys)

    def check(self, header: bytes) -> str:
        """A name for the key in an Authorization header, which does not reveal the key; or a Failure."""
        self._look()
        scheme, _, given = header.partition(b" ")
        # Every key is compared, each in constant time: the time taken reveals none of them.
        fits = [hmac.compare_digest(given.strip(), key) for key in self.keys]
        if scheme.lower() != b"bearer" or not any(fits):
            missing = "a key is required: send it as 'Authorization: Bearer KEY'"
            raise Failure(
                401,
                "the key is wrong" if header else missing,
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return hashlib.sha256(given.strip()).hexdigest()[:12]

    def _look(self) -> None:
        """Read the file again if it has changed; with a file that cannot be read, the keys stay as they are."""
        now = time.monotonic()
        if self.path is None or now - self.looked < LOOK_SECONDS:
            return
        self.looked = now
        try:
            changed = self.path.stat().st_mtime_ns
            if changed == self.changed:
                return
            self.keys = [key.encode() for key in read_keys(self.path)]
            self.changed = changed
            logger.info("read %d keys from %s", len(self.keys), self.path)
        except (OSError, UsageError) as error:
            logger.error("the keys stay as they are: %s", error)


@dataclass(slots=True)
class _Allowance:
    left: float
    at: float


class RateLimit:
    """A limit of requests per minute and client; a minute's worth may come at once."""

    def __init__(self, per_minute: float) -> None:
        self.per_minute = per_minute
        self.clients: dict[str, _Allowance] = {}
        self.swept = time.monotonic()

    def check(self, client: str) -> None:
        """Count a request of this client, or refuse it."""
        if not self.per_minute:
            return
        now = time.monotonic()
        self._forget(now)
        most = max(1.0, self.per_minute)
        allowance = self.clients.setdefault(client, _Allowance(most, now))
        allowance.left = min(most, allowance.left + (now - allowance.at) * self.per_minute / 60)
        allowance.at = now
        if allowance.left < 1:
            wait = (1 - allowance.left) * 60 / self.per_minute
            reason = f"more than {self.per_minute:g} requests per minute"
            raise retry_later(429, reason, "rate_limit_exceeded", wait)
        allowance.left -= 1

    def _forget(self, now: float) -> None:
        if now - self.swept > FORGET_SECONDS:
            self.swept = now
            self.clients = {name: one for name, one in self.clients.items() if now - one.at < FORGET_SECONDS}
