"""Starting the server, and ending it: the socket, signals, draining.

One process accepts, parses, decodes and answers; with ``workers`` above 1 the network runs in processes of its own.
That keeps limits, keys, metrics and turns in one place, and a request outlives the worker that ran it.
"""

import asyncio
import errno
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import uvicorn

from imputer.errors import ImputerError, UsageError
from imputer.server import logs
from imputer.server.app import create_app
from imputer.server.connections import Listener
from imputer.server.settings import Settings

LOOPBACK = ("127.0.0.1", "::1", "localhost")
STOP_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP")
BACKLOG = 1024
SOCKET_MESSAGE_BYTES = 8 << 20
SWEEP_TICKS = 10  # of uvicorn's, a tenth of a second each


def serve(settings: Settings, *, host: str, port: int) -> None:
    """Listen until told to stop, then finish what is running."""
    with listen(host, port) as listener, logs.relaying():
        app = create_app(settings)
        logs.configure(as_json=settings.log_json, quiet=settings.quiet)
        address = listener.getsockname()[1]
        server = Server(app, settings, lambda: announce(host, address, app.state.service))
        # uvicorn raises the signal that stopped it again at its end, when it has been handled.
        for name in STOP_SIGNALS:
            if hasattr(signal, name):
                signal.signal(getattr(signal, name), lambda *_: None)
        server.run(sockets=[listener])
        if server.problem is not None:
            raise ImputerError(str(server.problem)) from server.problem


class Server(uvicorn.Server):
    """uvicorn's server with readiness, deadlines for connections, and draining.

    The first SIGTERM, SIGINT or SIGHUP stops new work; the socket stays open, so that /health and /ready answer,
    until running requests are done. The second ends at once.
    """

    def __init__(self, app: Any, settings: Settings, announce: Callable[[], None] = lambda: None) -> None:
        self.app, self.settings, self.announce = app, settings, announce
        self.service = app.state.service
        self.problem: BaseException | None = None  # the error that kept the service from starting
        self.ready = False
        self.drain_until = 0.0
        super().__init__(
            uvicorn.Config(
                app,
                http=self.service.connections.protocol(),
                ws="websockets-sansio",
                ws_max_size=SOCKET_MESSAGE_BYTES,
                ws_per_message_deflate=False,  # a small message must not unpack to a large one
                log_config=None,
                access_log=False,
                server_header=False,
                backlog=BACKLOG,
                proxy_headers=bool(settings.trusted_proxies),
                forwarded_allow_ips=list(settings.trusted_proxies),
                timeout_keep_alive=settings.keep_alive_seconds,  # type: ignore[arg-type]
                timeout_graceful_shutdown=5,  # for answers that are being sent; work is over by then
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        for listener in sockets or []:
            if isinstance(listener, Listener):
                listener.manager = self.service.connections
        if hasattr(signal, "SIGHUP") and self._in_main_thread():
            signal.signal(signal.SIGHUP, self.handle_exit)
        await super().startup(sockets)

    @staticmethod
    def _in_main_thread() -> bool:
        import threading

        return threading.current_thread() is threading.main_thread()

    def handle_exit(self, sig: int, frame: Any) -> None:
        if self.drain_until:
            self.should_exit = self.force_exit = True
        self.drain()

    def drain(self) -> None:
        """Refuse new work, and end when none is left."""
        self.service.draining = True
        self.drain_until = self.drain_until or time.monotonic() + self.settings.drain_seconds

    async def on_tick(self, counter: int) -> bool:
        if counter % SWEEP_TICKS == 0:
            self.service.connections.sweep()
        starting: asyncio.Future = self.app.state.starting
        if starting.done() and not self.ready and not self.problem:
            self.problem = starting.exception()
            self.ready = self.problem is None
            if self.ready:
                self.announce()
        if self.drain_until and self._drained():
            return True
        return self.problem is not None or await super().on_tick(counter)

    def _drained(self) -> bool:
        if time.monotonic() > self.drain_until:
            self.service.refuse_the_rest()
            return True
        return not self.service.connections.busy


def listen(host: str, port: int) -> Listener:
    """A listening socket, or a UsageError that says why not."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        plain = socket.create_server((host, port), family=family, backlog=BACKLOG)
        listener = Listener(plain.family, plain.type, plain.proto, fileno=plain.detach())
        # Inherited by every connection. Without it an answer, sent as head and body, waits 40 ms for the client
        # to acknowledge the head.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        number = getattr(error, "errno", None) or 0
        # Negative where the name of the host is not known: those numbers are getaddrinfo's.
        option = "--host" if number < 0 or number == errno.EADDRNOTAVAIL else "--port"
        raise UsageError(
            f"cannot listen on {host} port {port}: {reason}; choose another with {option}"
        ) from error


def announce(host: str, port: int, service: Any) -> None:
    """Print the address once the server answers, and a warning if it is open to the network without a key."""
    shown = f"[{host}]" if ":" in host else host
    print(f"serving {', '.join(service.folders)} on http://{shown}:{port} (Ctrl+C stops)", flush=True)
    if host not in LOOPBACK and not (service.settings.api_keys or service.settings.api_key_file):
        print(
            "imputer: others on the network can use this server; give it a key with --api-key-file",
            file=sys.stderr,
            flush=True,
        )
