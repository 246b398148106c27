"""Connections: how many, from whom, and how long one may keep the server waiting.

A connection is in one of four stages: waiting for a header, receiving a body, working, or writing. A connection with
work in progress is never closed for another. When there are too many connections, the one that has kept the server
waiting longest in the earliest stage is closed to let the new one in, so a flood of half-sent requests does not lock
others out.
"""

import asyncio
import errno
import logging
import socket
import time
from enum import IntEnum
from ipaddress import ip_address, ip_network
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from imputer.server.metrics import Metrics
from imputer.server.settings import Settings

ACCEPT_AT_ONCE = 32  # connections accepted in a row, before the event loop handles them
RESERVED_FILES = 96  # descriptors for models, libraries, pipes and logs
HEADER_TIMEOUT = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
TOO_MANY = (
    b"HTTP/1.1 429 Too Many Requests\r\nretry-after: 5\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
)

logger = logging.getLogger("imputer.server")


class Stage(IntEnum):
    """In the order in which connections are given up."""

    HEADER = 0
    WRITING = 1  # the client does not take its answer
    BODY = 2
    WORKING = 3


class Connections:
    """All connections of a server, and its limits on them."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self.settings, self.metrics = settings, metrics
        self.open: set[LimitedProtocol] = set()
        self.limit = min(settings.max_connections, affordable_connections())
        self.proxies = [ip_network(proxy, strict=False) for proxy in settings.trusted_proxies]

    @property
    def busy(self) -> bool:
        """A request is being received, worked on or answered."""
        return any(connection.stage > Stage.HEADER for connection in self.open)

    def protocol(self) -> type[H11Protocol]:
        """The protocol class for uvicorn."""
        return type("BoundProtocol", (LimitedProtocol,), {"manager": self})

    def admit(self, connection: "LimitedProtocol") -> bool:
        """Make room for a new connection; False if there is none."""
        same = [other for other in self.open if other.address == connection.address]
        limit = self.settings.max_connections_per_client
        if len(same) >= limit and not self._trusted(connection.address) and not self.give_up_one(same):
            return False
        return len(self.open) < self.limit or self.give_up_one(self.open)

    def give_up_one(self, candidates: Any) -> bool:
        """Close the connection that has kept the server waiting longest, in the earliest stage."""
        waiting = [connection for connection in candidates if connection.stage < Stage.WORKING]
        if not waiting:
            return False
        chosen = min(waiting, key=lambda connection: (connection.stage, connection.since))
        chosen.give_up("crowded out")
        return True

    def sweep(self) -> None:
        """Close connections that have kept the server waiting for too long; called about once a second."""
        for connection in list(self.open):
            connection.check_deadlines()
        self.metrics.connections.set(len(self.open))

    def _trusted(self, address: str) -> bool:
        try:
            return any(ip_address(address) in network for network in self.proxies)
        except ValueError:
            return False


class LimitedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 with deadlines for headers and for clients that do not read."""

    manager: Connections
    address = ""
    since = 0.0  # the present stage began, or the client last took something of its answer
    unsent = 0  # bytes of the answer at the last look
    idle = False  # between two requests: uvicorn's keep-alive deadline runs, not the header's
    closed = False
    upgraded = False  # to a WebSocket: a live session, which looks after its own deadlines

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        self.since = time.monotonic()
        if self.manager.admit(self):
            self.manager.open.add(self)
        else:
            self.manager.metrics.connections_closed.labels("too many").inc()
            transport.write(TOO_MANY)
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self.manager.open.discard(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.closed:
            return
        before = self.stage
        if self.idle:
            self.idle, self.since = False, time.monotonic()  # the first bytes of the next request
        super().data_received(data)
        if self.stage is not before:
            self.since = time.monotonic()

    def handle_websocket_upgrade(self, event: Any) -> None:
        """The connection becomes a WebSocket; it counts as open until it is lost."""
        super().handle_websocket_upgrade(event)
        protocol: Any = self.transport.get_protocol()
        if protocol is self:
            return
        self.upgraded = True
        lost = protocol.connection_lost

        def connection_lost(exc: Exception | None) -> None:
            self.closed = True
            self.manager.open.discard(self)
            lost(exc)

        protocol.connection_lost = connection_lost

    def on_response_complete(self) -> None:
        self.idle, self.since = True, time.monotonic()
        super().on_response_complete()

    @property
    def stage(self) -> Stage:
        if self._is_stuck():
            return Stage.WRITING
        if self.upgraded:
            return Stage.WORKING
        if self.cycle is None or self.cycle.response_complete:
            return Stage.HEADER
        return Stage.BODY if self.cycle.more_body else Stage.WORKING

    def _is_stuck(self) -> bool:
        """There is something to write, and nothing more will be added until the client takes some of it."""
        if self.transport.get_write_buffer_size() == 0:
            return False
        over = self.cycle is None or self.cycle.response_complete or self.transport.is_closing()
        return over or self.flow.write_paused

    def check_deadlines(self) -> None:
        """Close the connection if its deadline is over."""
        settings, now = self.manager.settings, time.monotonic()
        if self._is_stuck():
            left = self.transport.get_write_buffer_size()
            if not self.unsent or left < self.unsent:
                self.since = now
            self.unsent = left
            if now - self.since > settings.write_seconds:
                self.give_up("unread")
            return
        self.unsent = 0
        late = now - self.since > settings.header_seconds
        if self.stage is Stage.HEADER and late and not self.idle:
            self.transport.write(HEADER_TIMEOUT)
            self.give_up("header")

    def give_up(self, reason: str) -> None:
        self.manager.metrics.connections_closed.labels(reason).inc()
        self.manager.open.discard(self)
        self.closed = True
        self.transport.abort()


class Listener(socket.socket):
    """A listening socket that accepts a few connections at a time.

    asyncio accepts all that wait before it looks at any of them, and out of descriptors it logs a stack trace per
    connection. Here the limits are applied in between, and running out of descriptors closes a waiting connection
    instead.
    """

    manager: Connections | None = None
    accepted = 0  # since the event loop last ran

    def accept(self) -> tuple[socket.socket, Any]:
        if self.accepted >= ACCEPT_AT_ONCE:
            raise BlockingIOError
        if self.accepted == 0:
            asyncio.get_running_loop().call_soon(self._begin_again)
        self.accepted += 1
        try:
            return super().accept()
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                raise
            logger.warning("no connection could be accepted: %s", error.strerror)
            if self.manager is None or not self.manager.give_up_one(self.manager.open):
                time.sleep(0.01)  # the loop would try again at once
            self.accepted = ACCEPT_AT_ONCE
            raise BlockingIOError from None

    def _begin_again(self) -> None:
        self.accepted = 0


def affordable_connections() -> int:
    """How many connections the limit of open files allows, with room for a temporary file for each upload."""
    try:
        import resource
    except ImportError:  # not a Unix
        return 1 << 20
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
        except (ValueError, OSError):
            pass
    if soft == resource.RLIM_INFINITY:
        return 1 << 20
    return max(8, (soft - RESERVED_FILES - ACCEPT_AT_ONCE) // 2)
