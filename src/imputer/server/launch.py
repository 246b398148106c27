"""Starting the server: the socket, one process or several, and the end."""

import errno
import importlib.util
import multiprocessing
import signal
import socket
import sys
import tempfile
import time
from dataclasses import replace
from multiprocessing.connection import wait
from typing import Any

from imputer import models
from imputer.errors import UsageError
from imputer.server.settings import Settings

GRACE_SECONDS = 60  # after SIGTERM, for what is running
LOOPBACK = ("127.0.0.1", "::1", "localhost")
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
RESTART_SECONDS = 1.0  # before a worker that died is replaced, lest it die in a tight circle


def serve(settings: Settings, *, host: str, port: int, workers: int, quiet: bool = False) -> None:
    """Listen until told to stop, then finish what is running."""
    from imputer.server.app import create_app

    with listen(host, port) as listener:
        # The models are loaded here even if only the workers use them: what is wrong with them is said once.
        app = create_app(settings)
        names = list(app.state.service.folders)
        if workers == 1:
            announce(listener, host, names, settings)
            run(app, listener, quiet)
            return
        del app
        with tempfile.TemporaryDirectory(prefix="imputer-") as folder:
            announce(listener, host, names, settings)
            supervise(replace(settings, metrics_folder=folder), listener, workers, quiet)


def run(app: Any, listener: socket.socket, quiet: bool) -> None:
    """Serve in this process until SIGTERM or Ctrl+C, both of which end well."""
    # uvicorn raises the signal that stopped it once more when all is done; it has been heeded by then.
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: None)
    uvicorn_server(app, quiet).run(sockets=[listener])


def uvicorn_server(app: Any, quiet: bool = False) -> Any:
    """The web server around an application."""
    import uvicorn

    return uvicorn.Server(
        uvicorn.Config(
            app,
            log_level="warning" if quiet else "info",
            access_log=not quiet,
            timeout_graceful_shutdown=GRACE_SECONDS,
            server_header=False,
            ws="none",
        )
    )


def supervise(settings: Settings, listener: socket.socket, workers: int, quiet: bool) -> None:
    """Keep so many processes serving the same socket; one that dies is replaced."""
    context = multiprocessing.get_context("spawn")
    stopping = False

    def stop(*_: Any) -> None:
        nonlocal stopping
        stopping = True

    for number in STOP_SIGNALS:
        signal.signal(number, stop)

    def start() -> Any:
        process = context.Process(target=_work, args=(settings, listener, quiet))
        process.start()
        return process

    processes = [start() for _ in range(workers)]
    while not stopping:
        wait([process.sentinel for process in processes], timeout=0.5)
        for place, process in enumerate(processes):
            if process.exitcode is not None and not stopping:
                print(
                    f"imputer: worker {process.pid} ended ({process.exitcode}), starting another",
                    file=sys.stderr,
                )
                time.sleep(RESTART_SECONDS)
                processes[place] = start()
    for process in processes:
        process.terminate()
    for process in processes:
        process.join()


def _work(settings: Settings, listener: socket.socket, quiet: bool) -> None:
    """A worker process."""
    from imputer.server.app import create_app

    run(create_app(settings), listener, quiet)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket, or a UsageError that says why not."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=1024)
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


def announce(listener: socket.socket, host: str, names: list[str], settings: Settings) -> None:
    """Say where the server is, and what those should know who open it to others."""
    shown = f"[{host}]" if ":" in host else host
    port = listener.getsockname()[1]
    print(f"serving {', '.join(names)} on http://{shown}:{port} (Ctrl+C stops)", flush=True)
    if host not in LOOPBACK and not settings.api_keys:
        print(
            "imputer: others on the network can use this server; give it a key with --api-key-file",
            file=sys.stderr,
            flush=True,
        )


def default_model() -> str:
    """``english`` if what it needs is installed, else ``digits``."""
    needed = ("moonshine_voice", "onnxruntime")
    if (models.SHIPPED / "english").is_dir() and all(importlib.util.find_spec(name) for name in needed):
        return "english"
    return "digits"
