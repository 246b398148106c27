"""What stands before every route: hosts, origins, keys, limits while the body arrives, headers, one log line each."""

import asyncio
import json
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, MutableMapping
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from imputer.server.batcher import Batcher
from imputer.server.failures import Failure, no_space, retry_later, shutting_down
from imputer.server.jobs import Job
from imputer.server.keys import Keys, RateLimit
from imputer.server.logs import FIELDS, REQUESTS
from imputer.server.metrics import Metrics
from imputer.server.settings import Settings

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

logger = logging.getLogger("imputer.server")
request_log = logging.getLogger(REQUESTS)

FORM_BYTES = 1 << 16  # for the other fields of a form, and its boundaries
LINGER_SECONDS = 5.0  # how long to read on after refusing a body, so that the client sees the refusal
ENDPOINTS = {
    "/": "page",
    "/docs": "docs",
    "/openapi.json": "docs",
    "/health": "health",
    "/ready": "ready",
    "/metrics": "metrics",
    "/sample.wav": "sample",
    "/v1/models": "models",
    "/v1/audio/transcriptions": "transcriptions",
    "/v1/audio/translations": "translations",
    "/v1/imputations": "imputations",
}
WORK = ("transcriptions", "translations", "imputations")
OPEN = ("page", "docs", "static", "health", "ready", "sample")  # need no key
SOCKET_KEY = "openai-insecure-api-key."
REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=-]{1,128}")

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


class Guard:
    """ASGI middleware around the whole application."""

    def __init__(
        self,
        app: Application,
        settings: Settings,
        batcher: Batcher,
        metrics: Metrics,
        state: Callable[[], str],  # "loading", "ready", "stalled" or "draining"
    ) -> None:
        self.app, self.settings, self.batcher, self.metrics = app, settings, batcher, metrics
        self.state = state
        self.keys = Keys(settings)
        self.rate = RateLimit(settings.requests_per_minute)
        self.hosts = {host.lower() for host in settings.allow_hosts}
        self.origins = {origin.lower().rstrip("/") for origin in settings.allow_origins}
        self.held_bytes = 0  # of uploads that are being received or decoded

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await self._admit_socket(scope, receive, send)
        elif scope["type"] == "http":
            await Exchange(self, scope, receive, send).run()
        else:
            await self.app(scope, receive, send)

    async def _admit_socket(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The checks of a request that brings work; a refusal is an HTTP answer to the handshake."""
        headers = dict(scope["headers"])
        client = (scope.get("client") or ("", 0))[0]
        try:
            self.check_host(headers.get(b"host"))
            self.check_origin(headers)
            if self.keys:
                client = self.keys.check(headers.get(b"authorization") or socket_key(scope))
            self.check_open()
            self.rate.check(client)
            self.batcher.check_places()
        except Failure as failure:
            await receive()  # the connect event
            await refuse_socket(failure, send)
            return
        await self.app(scope, receive, send)

    def check_open(self) -> None:
        """Refuse work while the server starts or stops."""
        state = self.state()
        if state == "draining":
            raise shutting_down()
        if state == "loading":
            raise retry_later(503, "the server is loading its models", "loading", 2)

    def check_host(self, header: bytes | None) -> None:
        """Refuse names that are not ours: a name that someone points at this address is another site's."""
        if header is None or "*" in self.hosts:
            return
        name = host_name(header.decode("latin-1"))
        if name == "localhost" or name in self.hosts or _is_address(name):
            return
        raise Failure(
            421,
            f"this server is not {name[:80]!r}; if it is, start it with --allow-host {name[:80]}",
            code="unknown_host",
        )

    def allows_origin(self, origin: str) -> bool:
        return "*" in self.origins or origin.lower() in self.origins

    def check_origin(self, headers: dict[bytes, bytes]) -> None:
        """Refuse what a page of another site makes a browser send."""
        origin = headers.get(b"origin", b"").decode("latin-1")
        if origin and self.allows_origin(origin):
            return
        host = headers.get(b"host", b"").decode("latin-1").lower()
        foreign = bool(origin) and urlsplit(origin.lower()).netloc != host
        if foreign or headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin"):
            raise Failure(
                403,
                "pages of other sites may not use this server; allow one with --allow-origin",
                code="cross_origin",
            )


class Exchange:
    """One request and its answer."""

    def __init__(self, guard: Guard, scope: Scope, receive: Receive, send: Send) -> None:
        self.guard, self.scope = guard, scope
        self._receive, self._send = receive, send
        self.headers = headers = dict(scope["headers"])
        self.endpoint = _endpoint(scope["path"])
        given = headers.get(b"x-request-id", b"")
        self.id = given.decode() if REQUEST_ID.fullmatch(given) else secrets.token_hex(8)
        self.has_body = headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers
        self.withheld = b"expect" in headers  # the client waits for leave to send its body
        self.received = 0
        self.whole = not self.has_body
        self.status = 0
        self.answered = False
        self.gone = False  # before it was answered
        self.job: Job | None = None
        self.started = time.monotonic()
        scope["imputer.exchange"] = self

    @property
    def works(self) -> bool:
        return self.endpoint in WORK and self.scope["method"] == "POST"

    async def run(self) -> None:
        try:
            self.check()
            if self.scope["method"] == "OPTIONS" and b"access-control-request-method" in self.headers:
                await self.answer(204, b"", self._preflight())
            else:
                await self.guard.app(self.scope, self.receive, self.send)
        except Failure as failure:
            await self.refuse(failure)
        except OSError as error:
            await self._fail(error, no_space())
        except Exception as error:
            await self._fail(error, Failure(500, "something went wrong in the server", code="internal_error"))
        finally:
            self.leave()

    async def _fail(self, error: Exception, failure: Failure) -> None:
        logger.error("%s %s failed", self.scope["method"], self.endpoint, exc_info=error)
        if self.status:
            raise error  # half an answer is out: closing the connection is all that is left
        await self.refuse(failure)

    def check(self) -> None:
        """Refuse what can be refused before the body is read."""
        guard, headers = self.guard, self.headers
        guard.check_host(headers.get(b"host"))
        if self.scope["method"] not in ("GET", "HEAD", "OPTIONS"):
            guard.check_origin(headers)
        client = (self.scope.get("client") or ("", 0))[0]
        preflight = self.scope["method"] == "OPTIONS"
        if guard.keys and self.endpoint not in OPEN and not preflight:
            client = guard.keys.check(headers.get(b"authorization", b""))
        if self.scope["method"] == "POST":
            self._check_length(headers.get(b"content-length", b"0"))
        if self.works:
            guard.check_open()
            guard.rate.check(client)
            guard.batcher.check_places()

    def _check_length(self, length: bytes) -> None:
        if not length.isdigit():
            raise Failure(400, "Content-Length is not a number", code="invalid_value")
        if int(length[:15]) > self.guard.settings.max_upload_bytes + FORM_BYTES:
            raise too_large(self.guard.settings)

    def leave(self) -> None:
        """However the exchange ended, nothing of it stays in the queue."""
        guard, job = self.guard, self.job
        guard.held_bytes -= self.received
        if job is not None and not job.done.done():
            guard.batcher.cancel(job)
        status = str(self.status or 499)
        if self.gone and self.endpoint in WORK:
            status = "499"
            guard.metrics.abandoned.inc()
        model = job.model if job else ""
        labels = (self.endpoint, status, model)
        seconds = time.monotonic() - self.started
        guard.metrics.requests.labels(*labels).inc()
        if status >= "400":
            guard.metrics.errors.labels(status).inc()
        guard.metrics.request_seconds.labels(*labels).observe(seconds)
        self._log(status, seconds)

    def _log(self, status: str, seconds: float) -> None:
        fields: dict[str, Any] = {
            "request_id": self.id,
            "client": (self.scope.get("client") or ("", 0))[0],
            "status": int(status),
            "duration": round(seconds, 4),
        }
        if self.job is not None:
            fields |= {
                "model": self.job.model,
                "audio_seconds": round(self.job.seconds, 3),
                "work_seconds": round(self.job.work_seconds, 4),
            }
        name = _printable(self.scope["path"])
        request_log.info("%s %s", self.scope["method"], name, extra={FIELDS: fields})

    # The body.

    async def receive(self) -> Message:
        """The next part of the body; too much of it, or too little for too long, is refused."""
        settings = self.guard.settings
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
        if self.guard.held_bytes > settings.max_uploads_bytes and not self.whole:
            raise retry_later(429, "too many large uploads at once", "queue_full", 10)
        return message

    def _patience(self) -> float:
        """Seconds that the next part of the body may take."""
        settings, elapsed = self.guard.settings, time.monotonic() - self.started
        earned = settings.upload_idle_seconds + self.received / settings.upload_bytes_per_second
        return min(settings.upload_idle_seconds, min(earned, settings.upload_total_seconds) - elapsed)

    def _note(self, message: Message) -> None:
        if message["type"] == "http.disconnect":
            self.gone = self.gone or not self.answered
            self.whole = True
        else:
            count = len(message.get("body", b""))
            self.received += count
            self.guard.held_bytes += count
            self.whole = not message.get("more_body", False)

    # The answer.

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = list(message.get("headers", []))
            given = {name.lower() for name, _ in headers}
            extra = HEADERS | {"x-request-id": self.id, "cache-control": "no-store"} | self._cors()
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

    def _cors(self) -> dict[str, str]:
        """Headers that let a page of an allowed origin read the answer."""
        origin = self.headers.get(b"origin", b"").decode("latin-1")
        if not origin or not self.guard.allows_origin(origin):
            return {}
        return {
            "access-control-allow-origin": origin,
            "access-control-expose-headers": "x-request-id, retry-after",
            "cross-origin-resource-policy": "cross-origin",
            "vary": "origin",
        }

    def _preflight(self) -> dict[str, str]:
        if not self._cors():
            return {}
        wanted = self.headers.get(b"access-control-request-headers", b"").decode("latin-1")
        return {
            "access-control-allow-methods": "GET, HEAD, POST, OPTIONS",
            "access-control-allow-headers": wanted or "authorization, content-type",
            "access-control-max-age": "600",
        }

    async def refuse(self, failure: Failure) -> None:
        body = json.dumps(failure.envelope()).encode()
        await self.answer(failure.status, body, {"content-type": "application/json", **failure.headers})

    async def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        headers = headers | ({"content-length": str(len(body))} if status != 204 else {})
        encoded = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]
        await self.send({"type": "http.response.start", "status": status, "headers": encoded})
        await self.send({"type": "http.response.body", "body": body})


def socket_key(scope: Scope) -> bytes:
    """The key as a header; browsers cannot set headers of a WebSocket, so OpenAI's clients name it as a protocol."""
    for name in scope.get("subprotocols", []):
        if name.startswith(SOCKET_KEY):
            return b"Bearer " + name.removeprefix(SOCKET_KEY).encode()
    return b""


async def refuse_socket(failure: Failure, send: Send) -> None:
    """Answer the handshake of a WebSocket with an error."""
    body = json.dumps(failure.envelope()).encode()
    headers = HEADERS | {"content-type": "application/json"} | failure.headers
    encoded = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "websocket.http.response.start", "status": failure.status, "headers": encoded})
    await send({"type": "websocket.http.response.body", "body": body})


def _endpoint(path: str) -> str:
    prefixes = (("/static/", "static"), ("/v1/models/", "models"))
    return ENDPOINTS.get(path) or next((name for start, name in prefixes if path.startswith(start)), "other")


def host_name(header: str) -> str:
    """The name in a Host header, without its port and the brackets of an address."""
    header = header.strip().lower()
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.rpartition(":")[0] if ":" in header else header.rstrip(".")


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _printable(path: str) -> str:
    return "".join(c if c.isprintable() and c != " " else "?" for c in path[:120])


def too_large(settings: Settings) -> Failure:
    """The upload is over the limit."""
    megabytes = settings.max_upload_bytes / (1 << 20)
    return Failure(413, f"the upload is larger than {megabytes:g} MB", code="file_too_large", param="file")
