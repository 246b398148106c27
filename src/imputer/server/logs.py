"""Log lines: plain or JSON, and no more than a few of the same kind per minute."""

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

FIELDS = "request"  # the attribute of a record that holds the fields of a request
REPEATS, REPEAT_SECONDS = 10, 60.0
RELAY_BYTES, RELAY_SHOWN, RELAY_SECONDS = (
    1 << 16,
    2000,
    1.0,
)  # read at once, logged of it; to log the last lines
REQUESTS = "imputer.requests"  # one line per request: never dropped
# uvicorn takes a WebSocket that was refused with an HTTP answer for a fault; the refusal has its own line.
REFUSED = "ASGI callable returned without completing handshake."
LOGGERS = ("imputer.server", REQUESTS, "uvicorn.error", "asyncio")


def configure(*, as_json: bool, quiet: bool) -> None:
    """Send the server's log to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if as_json else PlainFormatter())
    handler.addFilter(Repeats())
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(logging.WARNING if quiet or name == "uvicorn.error" else logging.INFO)


@contextmanager
def relaying() -> Iterator[None]:
    """Meanwhile, what libraries write to stderr themselves becomes lines of the log; to be used before ``configure``.

    libmpg123, for one, writes a line for every damaged frame of an upload.
    """
    if sys.stderr is None:  # it is closed: descriptor 2 is something else
        yield
        return
    before, sys.stderr = sys.stderr, os.fdopen(os.dup(2), "w", buffering=1, errors="backslashreplace")
    reading, writing = os.pipe()
    os.dup2(writing, 2)
    os.close(writing)
    relay = threading.Thread(target=_relay, args=(reading,), name="imputer-stderr", daemon=True)
    relay.start()
    try:
        yield
    finally:
        os.dup2(sys.stderr.fileno(), 2)  # closes the pipe, unless a worker has it too
        relay.join(RELAY_SECONDS)
        sys.stderr = before


def _relay(pipe: int) -> None:
    while written := os.read(pipe, RELAY_BYTES):
        text = written[:RELAY_SHOWN].decode(errors="replace").strip()
        logging.getLogger("imputer.server").warning("a library wrote: %s", text)
        time.sleep(0.1)  # what is written together is one entry


def _time(record: logging.LogRecord) -> str:
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.msecs):03d}Z"


class PlainFormatter(logging.Formatter):
    """time level message, then the fields of a request as name=value."""

    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, FIELDS, {})
        text = "".join(f" {name}={value}" for name, value in fields.items())
        line = f"{_time(record)} {record.levelname} {record.getMessage()}{text}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {"time": _time(record), "level": record.levelname.lower(), "message": record.getMessage()}
        entry |= getattr(record, FIELDS, {})
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


class Repeats(logging.Filter):
    """Drops lines that differ only in their values after the first few, and says how many it dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[tuple[str, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name == REQUESTS:
            return True
        if record.msg == REFUSED:
            return False
        kind = (record.name, str(record.msg).partition("\n")[0][:80])
        since, count = self.seen.get(kind, (record.created, 0))
        if record.created - since > REPEAT_SECONDS:
            dropped, since, count = count - REPEATS, record.created, 0
            if dropped > 0:
                record.msg = f"{record.msg} ({dropped} more like this in {REPEAT_SECONDS:g} s)"
        self.seen[kind] = (since, count + 1)
        return count < REPEATS
