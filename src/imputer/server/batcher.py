"""The queue in front of the network: one thread owns the models and runs what goes together as one batch.

A recording is queued as its windows. The window that is due first is always taken; windows like it, of the same
model and options and of similar length, go along as long as padding stays cheap. Windows of a long recording fall
due one after the other, so that it does not keep short ones waiting, nor they it.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from imputer.decoding import Cancelled, Decoded, OnPass, Options
from imputer.errors import ImputerError
from imputer.recognizer import Recognizer
from imputer.server.failures import Failure, busy
from imputer.server.metrics import Metrics
from imputer.server.settings import Settings

BATCH_COST_SECONDS = 0.7  # of audio: what starting a batch costs, and so what padding may, to save one
TURN_SECONDS = 0.5  # how much later each further window of a recording falls due
RATE_MEMORY = 0.8  # how slowly the estimate of the network's speed follows what is measured

logger = logging.getLogger("uvicorn.error")


@dataclass(eq=False)
class Job:
    """A recording on its way through the network. Made in the event loop, filled in by the worker thread."""

    model: str
    options: Options  # jobs of the same model and options can share a batch
    windows: list[np.ndarray]
    seconds: float  # of the whole recording
    sample_rate: int
    watch: Callable[[int, int, list[int], list[float]], None] | None = (
        None  # in the event loop: window, pass ...
    )
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    done: asyncio.Future = field(init=False)
    results: list[Decoded | None] = field(init=False)
    cancelled: bool = False

    def __post_init__(self) -> None:
        self.done = self.loop.create_future()
        self.results = [None] * len(self.windows)

    def tell(self, function: Callable[..., None], *arguments: Any) -> None:
        """Have the event loop call ``function``, unless it is gone."""
        try:
            self.loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            self.cancelled = True

    def finish(self, result: list[Decoded] | Exception) -> None:
        """Give the answer, in the event loop."""
        if self.done.done():
            return
        if isinstance(result, Exception):
            self.done.set_exception(result)
        else:
            self.done.set_result(result)


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """A window of a job, waiting."""

    job: Job
    number: int
    seconds: float
    arrived: float
    due: float


class Batcher:
    """A bounded queue and the thread that empties it."""

    def __init__(self, recognizers: Mapping[str, Recognizer], settings: Settings, metrics: Metrics) -> None:
        self.recognizers, self.settings, self.metrics = recognizers, settings, metrics
        self.condition = threading.Condition()
        self.waiting: list[Window] = []
        self.stopping = False
        self.expected = 0  # requests that are being received and will queue something soon
        self.last_size, self.last_end = 1, 0.0
        self.seconds_per_second = 0.1  # time the network takes for a second of audio, as measured lately
        self.thread = threading.Thread(target=self._run, name="imputer-network", daemon=True)

    def start(self) -> None:
        self.thread.start()

    def stop(self) -> None:
        """Finish what is queued, then end the thread."""
        with self.condition:
            self.stopping = True
            self.condition.notify_all()
        self.thread.join()

    def submit(self, job: Job) -> None:
        """Queue a job, or refuse it because the queue is full."""
        now = time.monotonic()
        with self.condition:
            if self.stopping:
                raise Failure(503, "the server is shutting down", code="shutting_down")
            backlog = sum(window.seconds for window in self.waiting)
            if self.waiting and backlog + job.seconds > self.settings.max_waiting_seconds:
                raise busy(backlog * self.seconds_per_second)
            for number, samples in enumerate(job.windows):
                seconds = len(samples) / job.sample_rate
                self.waiting.append(Window(job, number, seconds, now, now + number * TURN_SECONDS))
            self._tell_depth()
            self.condition.notify_all()

    def cancel(self, job: Job) -> None:
        """Nobody waits for the job any more: what is not yet running never will."""
        with self.condition:
            job.cancelled = True
            self.waiting = [window for window in self.waiting if window.job is not job]
            self._tell_depth()

    def expect(self, change: int) -> None:
        """A request has begun to arrive, or is queued or refused."""
        with self.condition:
            self.expected += change
            self.condition.notify_all()

    def retry_seconds(self) -> float:
        """How long the queue will take, roughly."""
        with self.condition:
            return sum(window.seconds for window in self.waiting) * self.seconds_per_second

    def _run(self) -> None:
        import torch

        torch.set_num_threads(self.settings.threads)
        while batch := self._next_batch():
            try:
                self._run_batch(batch)
            except Exception as error:  # whatever it is, the thread must live on
                for window in batch:
                    self._deliver(window, error)
            self.last_end = time.monotonic()
            del batch  # or its audio would stay in memory until the next request

    def _next_batch(self) -> list[Window]:
        """Wait for work, a little longer for company, and take what goes together; nothing means stop."""
        with self.condition:
            self._wait_for_company()
            while not self.waiting:  # again, if all that waited is abandoned while it waits for company
                if self.stopping:
                    return []
                self.condition.wait()
                self._wait_for_company()
            batch = choose(self.waiting, self.settings.batch_items, self.settings.batch_seconds)
            taken = set(map(id, batch))
            self.waiting = [window for window in self.waiting if id(window) not in taken]
            self._tell_depth()
            self.last_size = len(batch)
            return batch

    def _wait_for_company(self) -> None:
        """A little from the first arrival, or from the last batch: those it served may well ask again."""
        while self.waiting and self._worth_waiting():
            since = max(self.last_end, min(window.arrived for window in self.waiting))
            left = since + self.settings.patience_seconds - time.monotonic()
            if left <= 0:
                return
            self.condition.wait(left)

    def _worth_waiting(self) -> bool:
        """Patience costs a lone client latency, so there must be a sign of others."""
        if self.stopping or len(self.waiting) >= self.settings.batch_items:
            return False
        return self.expected > 0 or self.last_size > 1

    def _run_batch(self, batch: Sequence[Window]) -> None:
        started = time.monotonic()
        try:
            results: list[Decoded | ImputerError] | list[Exception] = self._decode(batch)
        except Cancelled:
            return
        except Exception as error:
            if len(batch) > 1:  # one of them spoils it for all: each alone, then
                for window in batch:
                    self._run_batch([window])
                return
            results = [error]
        taken = time.monotonic() - started
        self.metrics.observe("imputer_batch_size", len(batch))
        self.metrics.observe("imputer_batch_seconds", taken)
        speed = taken / max(sum(window.seconds for window in batch), 0.01)
        self.seconds_per_second = RATE_MEMORY * self.seconds_per_second + (1 - RATE_MEMORY) * speed
        for window, result in zip(batch, results, strict=True):
            self._deliver(window, result)

    def _decode(self, batch: Sequence[Window]) -> list[Decoded | ImputerError]:
        recognizer = self.recognizers[batch[0].job.model]
        results = recognizer.decode(
            [window.job.windows[window.number] for window in batch],
            batch[0].job.options,
            on_pass=_on_pass(batch, recognizer.model.mask),
            cancelled=lambda: all(window.job.cancelled for window in batch),
        )
        passes = max((result.passes for result in results if isinstance(result, Decoded)), default=0)
        self.metrics.add("imputer_passes_total", passes)
        return results

    def _deliver(self, window: Window, result: Decoded | Exception) -> None:
        job = window.job
        if job.cancelled:
            return
        if isinstance(result, Exception):
            self.cancel(job)
            job.tell(job.finish, _failure(result))
            return
        job.results[window.number] = result
        finished = [one for one in job.results if one is not None]
        if len(finished) == len(job.results):
            self.metrics.add("imputer_audio_seconds_total", job.seconds)
            job.tell(job.finish, finished)

    def _tell_depth(self) -> None:
        self.metrics.set("imputer_queue_depth", len(self.waiting))
        self.metrics.set("imputer_queue_seconds", sum(window.seconds for window in self.waiting))


def choose(waiting: Sequence[Window], items: int, seconds: float) -> list[Window]:
    """The window that is due first, and those that are cheaper to take along than to run after it.

    A window goes along if it adds less padding than a batch of its own would cost; most alike first.
    """
    first = min(waiting, key=lambda window: window.due)
    others = [window for window in waiting if window is not first and _alike(window.job, first.job)]
    others.sort(key=lambda window: (abs(window.seconds - first.seconds), window.due))
    batch, longest = [first], first.seconds
    for window in others:
        if len(batch) >= items:
            break
        stretched = max(longest, window.seconds)
        padded = stretched * (len(batch) + 1)
        added = padded - longest * len(batch) - window.seconds
        if padded <= seconds and added < BATCH_COST_SECONDS:
            batch.append(window)
            longest = stretched
    return batch


def _alike(one: Job, other: Job) -> bool:
    return (one.model, one.options) == (other.model, other.options)


def _on_pass(batch: Sequence[Window], mask: int) -> OnPass | None:
    """Send each pass to the jobs that watch, until their window is complete or has failed."""
    watching = {item: window for item, window in enumerate(batch) if window.job.watch is not None}
    if not watching:
        return None

    def tell(number: int, partial: list[list[int]], confidence: list[list[float]]) -> None:
        for item, window in list(watching.items()):
            job = window.job
            if partial[item] and not job.cancelled and job.watch is not None:
                job.tell(job.watch, window.number, number, partial[item], confidence[item])
            if mask not in partial[item]:
                del watching[item]

    return tell


def _failure(error: Exception) -> Exception:
    """What the client is told; only what is wrong with its recording, not with us."""
    if isinstance(error, ImputerError):
        return Failure(400, str(error), code="invalid_audio", param="file")
    logger.error("a recording could not be decoded", exc_info=error)
    return Failure(500, "the recording could not be decoded", code="internal_error")
