"""What stands before every route: keys, limits while the body is still arriving, headers, and the count of it all."""

import asyncio
import hmac
import json
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from imputer.server.batcher import Batcher, Job
from imputer.server.failures import Failure, busy
from imputer.server.metrics import Metrics
from imputer.server.settings import Settings

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

logger = logging.getLogger("uvicorn.error")

FORM_BYTES = 1 << 16  # for the other fields of a form, and its boundaries
LINGER_SECONDS = 5.0  # how long to read on and throw away after refusing a body, so that the refusal is heard
ENDPOINTS = {
    "/": "page",
    "/health": "health",
    "/metrics": "metrics",
    "/sample.wav": "sample",
    "/v1/models": "models",
    "/v1/audio/transcriptions": "transcriptions",
    "/v1/imputations": "imputations",
}
WORK = ("transcriptions", "imputations")

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


@dataclass
class Visit:
    """A request that may bring work, from its first byte to the last of its answer."""

    expecting: bool = False  # it has not queued its work yet
    jobs: list[Job] = field(default_factory=list)


class Guard:
    """ASGI middleware around the whole application."""

    def __init__(self, app: Application, settings: Settings, batcher: Batcher, metrics: Metrics) -> None:
        self.app, self.settings, self.batcher, self.metrics = app, settings, batcher, metrics
        self.keys = [key.encode() for key in settings.api_keys]
        self.visits = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        await _Exchange(self, scope, receive, send).run()

    def check(self, scope: Scope, endpoint: str) -> None:
        """Refuse what can be refused before the body is read."""
        headers = dict(scope["headers"])
        if self.keys and endpoint not in ("page", "static", "health", "sample"):
            self._check_key(headers.get(b"authorization", b""))
        if scope["method"] == "POST":
            # A page of another site can make a browser post here; it has no business to.
            if headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin"):
                raise Failure(403, "pages of other sites may not use this server", code="cross_origin")
            length = headers.get(b"content-length", b"0")
            if not length.isdigit():
                raise Failure(400, "Content-Length is no number", code="invalid_value")
            if int(length) > self.settings.max_upload_bytes + FORM_BYTES:
                raise too_large(self.settings)
            if endpoint in WORK and self.visits >= self.settings.max_requests:
                raise busy(self.batcher.retry_seconds())

    def _check_key(self, header: bytes) -> None:
        scheme, _, given = header.partition(b" ")
        # Every key is compared, each in constant time: the time taken tells nothing of any of them.
        fits = [hmac.compare_digest(given.strip(), key) for key in self.keys]
        if scheme.lower() != b"bearer" or not any(fits):
            raise Failure(
                401,
                "a key is needed: send it as 'Authorization: Bearer KEY'"
                if not header
                else "the key is wrong",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )


class _Exchange:
    """One request and its answer."""

    def __init__(self, guard: Guard, scope: Scope, receive: Receive, send: Send) -> None:
        self.guard, self.scope = guard, scope
        self._receive, self._send = receive, send
        path = scope["path"]
        self.endpoint = ENDPOINTS.get(path) or next(
            (
                name
                for start, name in (("/static/", "static"), ("/v1/models/", "models"))
                if path.startswith(start)
            ),
            "other",
        )
        headers = dict(scope["headers"])
        self.has_body = headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers
        self.withheld = b"expect" in headers  # the client waits for leave to send its body
        self.received = 0
        self.whole = not self.has_body
        self.status = 0
        self.answered = False
        self.gone = False  # before it was answered
        self.started = time.monotonic()

    async def run(self) -> None:
        guard, works = self.guard, self.endpoint in WORK and self.scope["method"] == "POST"
        admitted = False
        visit = Visit()
        self.scope["imputer.visit"] = visit
        try:
            guard.check(self.scope, self.endpoint)
            if works:
                guard.visits += 1
                admitted = visit.expecting = True
                guard.batcher.expect(1)
                guard.metrics.set("imputer_requests_in_progress", guard.visits)
            await guard.app(self.scope, self.receive, self.send)
        except Failure as failure:
            await self.refuse(failure)
        except Exception:
            logger.exception("%s %s failed", self.scope["method"], self.endpoint)
            if self.status:
                raise  # half an answer is out: closing the connection is all that is left
            await self.refuse(Failure(500, "something went wrong in the server", code="internal_error"))
        finally:
            if admitted:
                guard.visits -= 1
                guard.metrics.set("imputer_requests_in_progress", guard.visits)
            self.leave(visit)

    def leave(self, visit: Visit) -> None:
        """However the exchange ended, nothing of it stays in the queue."""
        guard = self.guard
        if visit.expecting:
            guard.batcher.expect(-1)
        for job in visit.jobs:
            if not job.done.done():
                guard.batcher.cancel(job)
        status = str(self.status or 499)
        if self.gone and self.endpoint in WORK:
            status = "499"
            guard.metrics.add("imputer_abandoned_total")
        guard.metrics.add("imputer_requests_total", endpoint=self.endpoint, status=status)
        if status >= "400":
            guard.metrics.add("imputer_errors_total", status=status)
        guard.metrics.observe(
            "imputer_request_seconds", time.monotonic() - self.started, endpoint=self.endpoint
        )

    async def receive(self) -> Message:
        """The next part of the body, counted; too much of it, or too little for too long, is refused."""
        settings = self.guard.settings
        self.withheld = False
        if self.whole:
            message = await self._receive()
        else:
            left = self.started + settings.upload_total_seconds - time.monotonic()
            try:
                async with asyncio.timeout(max(0.0, min(settings.upload_idle_seconds, left))):
                    message = await self._receive()
            except TimeoutError:
                raise Failure(408, "the upload took too long", code="upload_timeout") from None
        self._note(message)
        if self.received > settings.max_upload_bytes + FORM_BYTES:
            raise too_large(settings)
        return message

    def _note(self, message: Message) -> None:
        if message["type"] == "http.disconnect":
            self.gone = self.gone or not self.answered
            self.whole = True
        else:
            self.received += len(message.get("body", b""))
            self.whole = not message.get("more_body", False)

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = list(message.get("headers", []))
            given = {name.lower() for name, _ in headers}
            extra = HEADERS | {"x-request-id": secrets.token_hex(8), "cache-control": "no-store"}
            headers += [(n.encode(), v.encode()) for n, v in extra.items() if n.encode() not in given]
            message = {**message, "headers": headers}
        elif not message.get("more_body", False) and not self.whole and not self.withheld:
            # Closing on a client that is still sending makes its system throw the answer away.
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
        body = json.dumps(failure.envelope()).encode()
        headers = {"content-type": "application/json", "content-length": str(len(body)), **failure.headers}
        await self.send(
            {
                "type": "http.response.start",
                "status": failure.status,
                "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
            }
        )
        await self.send({"type": "http.response.body", "body": body})


def too_large(settings: Settings) -> Failure:
    """The upload is over the limit."""
    megabytes = settings.max_upload_bytes / (1 << 20)
    return Failure(413, f"the upload is larger than {megabytes:g} MB", code="file_too_large", param="file")
