"""One request and its answer: limits while the body arrives, headers of every answer, one form of refusal."""

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from imputer.server.access import Access
from imputer.server.batcher import Batcher
from imputer.server.failures import Failure, no_space, retry_later, shutting_down, unexpected
from imputer.server.metrics import Metrics
from imputer.server.records import LEFT, Record
from imputer.server.settings import Settings

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

FORM_BYTES = 1 << 16  # for the other fields of a form, and its boundaries
LINGER_SECONDS = 5.0  # time to continue reading after refusing a body, so that the client sees the refusal
WORK = ("transcriptions", "translations", "imputations")
OPEN = ("page", "docs", "static", "health", "ready", "sample")  # need no key

HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; media-src 'self' blob:; "
        "connect-src 'self'; worker-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "microphone=(self), camera=(), geolocation=(), payment=(), usb=()",
}

logger = logging.getLogger("imputer.server")


class Intake:
    """What all exchanges share: the limits and their state."""

    def __init__(
        self,
        settings: Settings,
        batcher: Batcher,
        metrics: Metrics,
        state: Callable[[], str],  # "loading", "ready", "stalled" or "draining"
    ) -> None:
        self.settings, self.batcher, self.metrics, self.state = settings, batcher, metrics, state
        self.access = Access(settings)
        self.held_bytes = 0  # of uploads that are being received or decoded

    def check_open(self) -> None:
        """Refuse work while the server starts or stops."""
        state = self.state()
        if state == "draining":
            raise shutting_down()
        if state == "loading":
            raise retry_later(503, "the server is loading its models", "loading", 2)


class Exchange:
    """One request and its answer."""

    def __init__(self, intake: Intake, app: Application, scope: Scope, receive: Receive, send: Send) -> None:
        self.intake, self.app, self.scope = intake, app, scope
        self._receive, self._send = receive, send
        self.record = Record(scope)
        self.method: str = scope["method"]
        self.headers = headers = dict(scope["headers"])
        has_body = headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers
        self.withheld = b"expect" in headers  # the client waits for 100 Continue before it sends its body
        self.received = 0
        self.whole = not has_body
        self.status = 0
        self.answered = False
        self.gone = False  # before it was answered

    async def run(self) -> None:
        try:
            self.check()
            if self.method == "OPTIONS" and b"access-control-request-method" in self.headers:
                await self.answer(204, b"", self.intake.access.preflight(self.headers))
            else:
                await self.app(self.scope, self.receive, self.send)
        except Failure as failure:
            await self.refuse(failure)
        except OSError as error:
            await self._fail(error, no_space())
        except Exception as error:
            await self._fail(error, unexpected())
        finally:
            self.leave()

    async def _fail(self, error: Exception, failure: Failure) -> None:
        logger.error("%s %s failed", self.method, self.record.endpoint, exc_info=error)
        if self.status:
            raise error  # part of the answer is sent: the connection can only be closed
        await self.refuse(failure)

    def check(self) -> None:
        """Refuse what can be refused before the body is read."""
        intake, access, headers, endpoint = (
            self.intake,
            self.intake.access,
            self.headers,
            self.record.endpoint,
        )
        access.check_host(headers.get(b"host"))
        if self.method not in ("GET", "HEAD", "OPTIONS"):
            access.check_origin(headers)
        client = self.record.address
        if endpoint not in OPEN and self.method != "OPTIONS":
            client = access.client(headers.get(b"authorization", b""), client)
        if self.method == "POST":
            self._check_length(headers.get(b"content-length", b"0"))
            if endpoint in WORK:
                intake.check_open()
                access.rate.check(client)
                intake.batcher.check_places()

    def _check_length(self, length: bytes) -> None:
        if not length.isdigit():
            raise Failure(400, "Content-Length is not a number", code="invalid_value")
        digits = length.lstrip(b"0") or b"0"
        if len(digits) > 15 or int(digits) > self.intake.settings.max_upload_bytes + FORM_BYTES:
            raise too_large(self.intake.settings)

    def leave(self) -> None:
        """Remove the exchange from the queue, however it ended."""
        intake, job = self.intake, self.record.job
        intake.held_bytes -= self.received
        if job is not None and not job.done.done():
            intake.batcher.cancel(job)
        status = self.status or LEFT
        if self.gone and self.record.endpoint in WORK:
            status = LEFT
            intake.metrics.abandoned.inc()
        self.record.finish(status, intake.metrics)

    # The body.

    async def receive(self) -> Message:
        """The next part of the body; too much of it, or too little for too long, is refused."""
        settings = self.intake.settings
        self.withheld = False
        if self.whole:
            message = await self._receive()
        else:
            try:
                async with asyncio.timeout(max(0.0, self._patience())):
                    message = await self._receive()
            except TimeoutError:
                raise Failure(408, "the upload took too long", code="upload_timeout") from None
        self._note(message)
        if self.received > settings.max_upload_bytes + FORM_BYTES:
            raise too_large(settings)
        if self.intake.held_bytes > settings.max_uploads_bytes and not self.whole:
            raise retry_later(429, "too many large uploads at once", "queue_full", 10)
        return message

    def _patience(self) -> float:
        """Seconds that the next part of the body may take."""
        settings, elapsed = self.intake.settings, time.monotonic() - self.record.started
        earned = settings.upload_idle_seconds + self.received / settings.upload_bytes_per_second
        return min(settings.upload_idle_seconds, min(earned, settings.upload_total_seconds) - elapsed)

    def _note(self, message: Message) -> None:
        if message["type"] == "http.disconnect":
            self.gone = self.gone or not self.answered
            self.whole = True
        else:
            count = len(message.get("body", b""))
            self.received += count
            self.intake.held_bytes += count
            self.whole = not message.get("more_body", False)

    # The answer.

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = list(message.get("headers", []))
            given = {name.lower() for name, _ in headers}
            extra = (
                HEADERS
                | {"x-request-id": self.record.id, "cache-control": "no-store"}
                | self.intake.access.cors(self.headers)
            )
            headers += [(n.encode(), v.encode()) for n, v in extra.items() if n.encode() not in given]
            message = {**message, "headers": headers}
        elif not message.get("more_body", False) and not self.whole and not self.withheld:
            # If the connection is closed while the client is still sending, its system discards the answer.
            await self._send({**message, "more_body": True})
            self.answered = True
            await self._discard()
            message = {"type": "http.response.body", "body": b"", "more_body": False}
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self.answered = True
        await self._send(message)

    async def _discard(self) -> None:
        try:
            async with asyncio.timeout(LINGER_SECONDS):
                while not self.whole:
                    self._note(await self._receive())
        except TimeoutError:
            pass

    async def refuse(self, failure: Failure) -> None:
        headers, body = refusal(failure)
        await self.answer(failure.status, body, headers)

    async def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        headers = headers | ({"content-length": str(len(body))} if status != 204 else {})
        await self.send({"type": "http.response.start", "status": status, "headers": encoded(headers)})
        await self.send({"type": "http.response.body", "body": body})


def refusal(failure: Failure) -> tuple[dict[str, str], bytes]:
    """Headers and body of an answer that is not the one asked for."""
    return {"content-type": "application/json", **failure.headers}, json.dumps(failure.envelope()).encode()


def encoded(headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    """Headers as ASGI takes them."""
    return [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]


def too_large(settings: Settings) -> Failure:
    """The upload is over the limit."""
    megabytes = settings.max_upload_bytes / (1 << 20)
    return Failure(413, f"the upload is larger than {megabytes:g} MB", code="file_too_large", param="file")
