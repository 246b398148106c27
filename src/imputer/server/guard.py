"""Middleware around every route: an exchange for each request, and the same checks for live sessions."""

from collections.abc import Callable

from imputer.server.access import socket_key
from imputer.server.batcher import Batcher
from imputer.server.exchange import (
    HEADERS,
    Application,
    Exchange,
    Intake,
    Message,
    Receive,
    Scope,
    Send,
    encoded,
    refusal,
)
from imputer.server.failures import Failure
from imputer.server.livesessions import LiveSessions
from imputer.server.metrics import Metrics
from imputer.server.records import Record
from imputer.server.settings import Settings

SWITCHED = 101  # the status of a WebSocket that was accepted


class Guard:
    """ASGI middleware around the whole application."""

    def __init__(
        self,
        app: Application,
        settings: Settings,
        batcher: Batcher,
        sessions: LiveSessions,
        metrics: Metrics,
        state: Callable[[], str],
    ) -> None:
        self.app, self.sessions = app, sessions
        self.intake = Intake(settings, batcher, metrics, state)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await self._live(scope, receive, send)
        elif scope["type"] == "http":
            await Exchange(self.intake, self.app, scope, receive, send).run()
        else:
            await self.app(scope, receive, send)

    async def _live(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A live session; what is refused is refused in the HTTP answer to the handshake."""
        record, status = Record(scope), SWITCHED
        try:
            self._check_live(scope, record)
            await self.app(scope, receive, send)
        except Failure as failure:
            status = failure.status
            await receive()  # the connect event
            await _refuse(failure, record, send)
        finally:
            record.finish(status, self.intake.metrics)

    def _check_live(self, scope: Scope, record: Record) -> None:
        access, headers = self.intake.access, dict(scope["headers"])
        access.check_host(headers.get(b"host"))
        access.check_origin(headers)
        client = access.client(headers.get(b"authorization") or socket_key(scope), record.address)
        self.intake.check_open()
        access.rate.check(client)
        self.sessions.check()


async def _refuse(failure: Failure, record: Record, send: Send) -> None:
    headers, body = refusal(failure)
    headers = HEADERS | headers | {"x-request-id": record.id}
    start: Message = {
        "type": "websocket.http.response.start",
        "status": failure.status,
        "headers": encoded(headers),
    }
    await send(start)
    await send({"type": "websocket.http.response.body", "body": body})
