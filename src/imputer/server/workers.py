"""The network in processes of its own, each with one pipe to the server.

A worker ends when the pipe or the server does. Between passes it looks for a more urgent batch and for
cancellations, so a long batch does not delay others.
"""

import contextlib
import logging
import multiprocessing
import queue
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from imputer.decoding import Decoded, Options
from imputer.errors import ImputerError
from imputer.recognizer import Recognizer
from imputer.server.jobs import Batch
from imputer.server.runners import DEPTH, Host, Watch, WorkerDied, load, run_windows, warm_up, watch_of
from imputer.server.settings import Settings
from imputer.support.processes import end_with_parent

POLL_SECONDS = 0.02  # how often the server looks for something urgent while a worker is busy
ALIVE_SECONDS = 1.0  # between signs of life from a worker that is busy
START_SECONDS = 300.0

logger = logging.getLogger("imputer.server")

# The server's side.


class ProcessRunner:
    """The network in a process; what it was running when it died is in the WorkerDied that ``run`` raises."""

    def __init__(self, settings: Settings, folders: Mapping[str, Any]) -> None:
        self.settings, self.folders = settings, dict(folders)
        self.process: Any = None
        self.pipe: Connection | None = None
        self.received: queue.SimpleQueue = queue.SimpleQueue()  # messages; None: the worker is gone
        self.sent = 0.0  # start of the running batch

    @property
    def pid(self) -> int:
        return self.process.pid if self.process and self.process.is_alive() else 0

    def start(self) -> None:
        self.close()
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=work, args=(theirs, self.settings, self.folders), name="imputer-worker", daemon=True
        )
        self.process.start()
        theirs.close()
        self.received = queue.SimpleQueue()
        # Always read, or both sides could wait for each other to take a large message.
        reading = threading.Thread(target=_read, args=(self.pipe, self.received), daemon=True)
        reading.start()

    def wait_until_ready(self) -> None:
        try:
            message = self.received.get(timeout=START_SECONDS)
        except queue.Empty:
            raise ImputerError(f"a worker was not ready within {START_SECONDS:g} s") from None
        if message is None:
            self.process.join(10)
            raise ImputerError(f"a worker ended while it loaded ({self.process.exitcode})")
        if message:
            raise ImputerError(f"a worker could not load its models: {message}")

    def close(self) -> None:
        if self.pipe is not None:
            self.pipe.close()
            self.pipe = None
        if self.process is not None:
            self.process.join(10)
            if self.process.is_alive():
                self.process.kill()
                self.process.join()

    def run(self, batch: Batch, host: Host) -> None:
        assert self.pipe is not None
        running: dict[int, Batch] = {}
        cancelled: set[int] = set()
        try:
            self._send(batch, running)
            while running:
                with contextlib.suppress(queue.Empty):
                    self._receive(self.received.get(timeout=POLL_SECONDS), running, host)
                for one in running.values():
                    if one.cancelled and one.number not in cancelled:
                        cancelled.add(one.number)
                        self.pipe.send(("cancel", one.number))
                if len(running) < DEPTH and (other := self._urgent(running, host)):
                    self._send(other, running)
        except (EOFError, OSError):
            self.process.join(1)
            logger.error("worker %s died (%s)", self.process.pid, self.process.exitcode)
            raise WorkerDied(list(running.values())) from None

    def _urgent(self, running: dict[int, Batch], host: Host) -> Batch | None:
        if not running:
            return None
        last = list(running.values())[-1]
        return host.urgent(last, time.monotonic() - self.sent)

    def _send(self, batch: Batch, running: dict[int, Batch]) -> None:
        assert self.pipe is not None
        running[batch.number] = batch
        self.sent = time.monotonic()
        windows = [(window.samples, window.start, window.job.watch is not None) for window in batch.windows]
        self.pipe.send(("batch", batch.number, batch.model, batch.options, windows))

    def _receive(self, message: tuple | None, running: dict[int, Batch], host: Host) -> None:
        if message is None:
            raise EOFError
        kind, number, *rest = message
        batch = running[number]
        if kind == "pass":
            item, *seen = rest
            if watch := watch_of(batch.windows[item]):
                watch(*seen)
        elif kind == "done":
            del running[number]
            results, seconds = rest
            host.deliver(batch, results, seconds)


def _read(pipe: Connection, received: queue.SimpleQueue) -> None:
    with contextlib.suppress(EOFError, OSError):
        while True:
            received.put(pipe.recv())
    received.put(None)


# The worker's side.


def work(pipe: Connection, settings: Settings, folders: Mapping[str, Any]) -> None:
    """The main function of a worker process."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        if hasattr(signal, name):  # signals to the whole group are the server's to handle
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    end_with_parent()
    import torch

    torch.set_num_threads(settings.threads)
    with contextlib.suppress(EOFError, OSError):
        try:
            recognizers = load(settings, folders)
            warm_up(recognizers, settings)
        except Exception as error:
            pipe.send(str(error) or repr(error))
            return
        pipe.send("")
        worker = _Worker(pipe, recognizers)
        while True:
            worker.handle(pipe.recv())


class _Worker:
    def __init__(self, pipe: Connection, recognizers: Mapping[str, Recognizer]) -> None:
        self.pipe, self.recognizers = pipe, recognizers
        self.cancelled: set[int] = set()
        self.said = time.monotonic()

    def handle(self, message: tuple) -> None:
        kind, number, *rest = message
        if kind == "cancel":
            self.cancelled.add(number)
        else:
            self.run(number, *rest)

    def run(
        self,
        number: int,
        model: str,
        options: Options,
        windows: Sequence[tuple[np.ndarray, Sequence[int], bool]],
    ) -> None:
        started, interrupted = time.monotonic(), 0.0

        def between_passes() -> bool:
            nonlocal interrupted
            since = time.monotonic()
            while self.pipe.poll():
                self.handle(self.pipe.recv())
            interrupted += time.monotonic() - since
            if time.monotonic() - self.said > ALIVE_SECONDS:
                self.said = time.monotonic()
                self.pipe.send(("alive", number))
            return number not in self.cancelled

        def watch(item: int) -> Watch:
            return lambda *seen: self.pipe.send(("pass", number, item, *seen))

        samples, starts, watched = zip(*windows, strict=True)
        watches = [watch(item) if wanted else None for item, wanted in enumerate(watched)]
        results = run_windows(self.recognizers[model], options, samples, starts, watches, between_passes)
        self.cancelled.discard(number)
        seconds = time.monotonic() - started - interrupted
        self.pipe.send(("done", number, [_portable(result) for result in results], seconds))


def _portable(result: Decoded | Exception) -> Decoded | Exception:
    """A result that can be sent: exceptions of other libraries may not be."""
    if not isinstance(result, Exception):
        return result
    text = str(result)
    return ImputerError(text) if isinstance(result, ImputerError) else RuntimeError(text or repr(result))
