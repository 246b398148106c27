"""The queue in front of the network: recordings take fair turns, and similar windows run as one batch.

A recording is queued as its windows. The window that would end first if all recordings shared the network equally
goes first; windows like it, of equal options and similar length, go along as long as padding stays cheap. One thread
per worker takes batches. Before a long batch and between two of its passes, a worker runs much shorter ones: those
whose turn it is, and others until the long batch has given way for as long as it takes itself.
"""

import logging
import threading
import time
from collections.abc import Sequence

import numpy as np

from imputer.decoding import Decoded
from imputer.errors import ImputerError
from imputer.server.failures import Failure, busy, shutting_down
from imputer.server.jobs import Batch, Job, Window
from imputer.server.metrics import Metrics
from imputer.server.runners import Runner, WorkerDied
from imputer.server.scheduling import FairClock, choose, next_windows
from imputer.server.settings import Settings

URGENT_COST = 0.5  # of a batch's cost: what may go before it out of turn, or interrupt it, costs less
RATE_MEMORY = 0.8  # how slowly the estimate of the network's speed follows what is measured
RESTART_SECONDS = 1.0  # before a worker that died is replaced

logger = logging.getLogger("imputer.server")


class Batcher:
    """The jobs that are admitted, a bounded number, and the threads that run them."""

    def __init__(self, runners: Sequence[Runner], settings: Settings, metrics: Metrics) -> None:
        self.runners, self.settings, self.metrics = runners, settings, metrics
        self.condition = threading.Condition()
        self.jobs: set[Job] = set()
        self.waiting: list[Window] = []
        self.clock = FairClock()
        self.stopping = False
        self.last_size, self.last_end = 1, 0.0
        self.progressed = time.monotonic()
        self.seconds_per_cost = 0.002  # what a unit of ``Job.cost`` takes, as measured lately
        self.threads = [
            threading.Thread(target=self._run, args=(runner,), name=f"imputer-network-{n}", daemon=True)
            for n, runner in enumerate(runners)
        ]

    def start(self) -> None:
        for runner in self.runners:
            runner.start()
        for runner in self.runners:
            runner.wait_until_ready()
        for thread in self.threads:
            thread.start()

    def stop(self) -> None:
        """Finish what is queued, then end the threads and the workers."""
        with self.condition:
            self.stopping = True
            self.condition.notify_all()
        for thread in self.threads:
            if thread.ident is not None:
                thread.join()
        for runner in self.runners:
            runner.close()

    @property
    def alive(self) -> bool:
        return any(thread.is_alive() for thread in self.threads)

    @property
    def stalled(self) -> bool:
        """Whether work is waiting and there has been no progress for too long."""
        with self.condition:
            return bool(self.waiting) and time.monotonic() - self.progressed > self.settings.stall_seconds

    # Jobs.

    def enrol(self, job: Job) -> None:
        """Take a job in, or refuse it because all places are taken."""
        with self.condition:
            if self.stopping:
                raise shutting_down()
            if not job.live:
                self.check_places()
            self.jobs.add(job)
            job.tag = self.clock.now
            self._count()

    def check_places(self) -> None:
        """Refuse an upload if every place is taken."""
        with self.condition:
            taken = sum(not job.live for job in self.jobs)
        if taken >= self.settings.max_requests:
            raise busy(self._backlog_seconds())

    def admit_long(self, job: Job) -> None:
        """Refuse a long recording if half of all places are already taken by long ones."""
        with self.condition:
            long = sum(not other.ended and other.admitted.done() for other in self.jobs if other is not job)
            if 2 * (long + 1) > max(2, self.settings.max_requests):
                raise busy(self._backlog_seconds())

    def push(self, job: Job, samples: np.ndarray, start: Sequence[int] = ()) -> None:
        """Queue the next window of a job, the tokens of its first frames given."""
        now = time.monotonic()
        with self.condition:
            if job.cancelled:
                return
            if not self.waiting:
                self.progressed = now
            if not job.running and not any(window.job is job for window in self.waiting):
                job.tag = self.clock.start(job.tag)
            self.waiting.append(Window(job, job.windows, samples, now, start))
            job.windows += 1
            self._count()
            self.condition.notify_all()

    def end_input(self, job: Job) -> None:
        """The job has no more windows than those pushed."""
        with self.condition:
            job.ended = True
            if job.complete and not job.cancelled:
                self._complete(job)

    def fail(self, job: Job, failure: Failure) -> None:
        self.cancel(job)
        job.fail(failure)

    def cancel(self, job: Job) -> None:
        """Cancel a job: its windows that are not running are dropped."""
        with self.condition:
            job.cancelled = True
            self.waiting = [window for window in self.waiting if window.job is not job]
            self.jobs.discard(job)
            self._count()
            self.condition.notify_all()

    def _complete(self, job: Job) -> None:
        self.jobs.discard(job)
        self.count_work(job)
        self._count()
        job.finish()

    def count_work(self, job: Job) -> None:
        """Add a job that is done to the figures."""
        self.metrics.audio_seconds.labels(job.model).inc(job.seconds)
        self.metrics.work_seconds.labels(job.model).observe(job.work_seconds)

    def _backlog_seconds(self) -> float:
        waiting = sum(window.cost for window in self.waiting)
        return waiting * self.seconds_per_cost / max(1, len(self.runners))

    def _count(self) -> None:
        self.metrics.in_progress.set(sum(not job.live for job in self.jobs))
        self.metrics.queue_depth.set(len(self.waiting))
        self.metrics.queue_seconds.set(sum(window.seconds for window in self.waiting))

    # Batches.

    def _run(self, runner: Runner) -> None:
        while batch := self._next_batch():
            try:
                runner.run(batch, self)
            except WorkerDied as died:
                self._requeue(died.batches)
                self._restart(runner)
            except Exception as error:  # the thread must survive any error
                logger.error("a batch failed", exc_info=error)
                self.deliver(batch, [error] * len(batch.windows), 0.0)
            self.last_end = time.monotonic()
            del batch  # or its audio would stay in memory until the next request

    def _next_batch(self) -> Batch | None:
        """Wait for work and the batching delay, and take a batch; None means stop."""
        with self.condition:
            self._delay_batch()
            while not self.waiting:  # again, if all waiting windows were cancelled meanwhile
                if self.stopping and not self.jobs:
                    return None
                self.condition.wait(1.0 if self.stopping else None)
                self._delay_batch()
            return self._next_turn()

    def _next_turn(self) -> Batch:
        """The batch whose turn it is, or a much cheaper one that it gives way to."""
        windows = self._choose(self.waiting, self.settings.batch_seconds)
        return self._cheaper(Batch(windows), 0.0) or self._take(windows)

    def _choose(self, windows: Sequence[Window], seconds: float) -> list[Window]:
        return choose(windows, self.settings.batch_items, seconds, self.seconds_per_cost)

    def _take(self, windows: list[Window]) -> Batch:
        taken = set(map(id, windows))
        self.waiting = [window for window in self.waiting if id(window) not in taken]
        self.last_size = len(windows)
        self._count()
        now = time.monotonic()
        for window in windows:
            window.job.running += 1
            if window.number == 0 and not window.attempts:
                wait = self.metrics.queue_wait_seconds.labels(window.job.model)
                wait.observe(now - window.job.arrived)
        return Batch(windows)

    def _delay_batch(self) -> None:
        """The batching delay, from the first arrival or the end of the last batch, whose clients may send again."""
        while self.waiting and self._under_load():
            since = max(self.last_end, min(window.arrived for window in self.waiting))
            left = since + self.settings.batch_delay_seconds - time.monotonic()
            if left <= 0:
                return
            self.condition.wait(left)

    def _under_load(self) -> bool:
        """The batching delay costs a single client latency, so it is applied only under concurrent load."""
        if self.stopping or len(self.waiting) >= self.settings.batch_items:
            return False
        arriving = len(self.jobs) > len({window.job for window in self.waiting})
        return arriving or self.last_size > 1

    def urgent(self, running: Batch, elapsed: float) -> Batch | None:
        """A much cheaper batch to run now, after ``running`` has taken ``elapsed`` seconds."""
        self.progressed = time.monotonic()
        if not self.waiting:
            return None
        with self.condition:
            return self._cheaper(running, elapsed)

    def _cheaper(self, batch: Batch, elapsed: float) -> Batch | None:
        """A much cheaper batch that goes before the rest of ``batch``.

        Turns alone are not enough: long recordings that are behind their share would run one after the other, and a
        short request would wait for all of them. So it need not be the cheaper one's turn until ``batch`` has given
        way for as long as it takes itself; that leaves long recordings about half of the network at least.
        """
        first, inside = batch.windows[0], {window.job for window in batch.windows}
        expected = max(elapsed, batch.cost * self.seconds_per_cost)
        end = min(job.tag for job in inside) + expected / len(batch.windows)
        due = [
            window
            for window in next_windows(self.waiting)
            if window.job not in inside
            and window.cost <= URGENT_COST * batch.cost
            and (first.gave_way < expected or window.turn(self.seconds_per_cost)[0] < end)
        ]
        if not due:
            return None
        seconds = min(self.settings.batch_seconds, URGENT_COST * first.seconds)
        cheaper = self._take(self._choose(due, seconds))
        first.gave_way += cheaper.cost * self.seconds_per_cost
        return cheaper

    def deliver(self, batch: Batch, results: Sequence[Decoded | Exception], seconds: float) -> None:
        """Record a batch that took ``seconds``; no results means that it was cancelled."""
        metrics = self.metrics
        with self.condition:
            self._charge(batch, seconds)
        if not results:
            return
        metrics.batch_size.observe(len(batch.windows))
        metrics.batch_seconds.observe(seconds)
        metrics.passes.inc(max((r.passes for r in results if isinstance(r, Decoded)), default=0))
        for window, result in zip(batch.windows, results, strict=True):
            self._deliver_window(window, result)

    def _charge(self, batch: Batch, seconds: float) -> None:
        audio = max(sum(window.seconds for window in batch.windows), 0.01)
        speed = seconds / max(batch.cost, 0.01)
        if seconds:
            self.seconds_per_cost = RATE_MEMORY * self.seconds_per_cost + (1 - RATE_MEMORY) * speed
        self.progressed = time.monotonic()
        # Only jobs with work share the network: not silent sessions, and not uploads that are still being decoded.
        sharers = {window.job for window in (*self.waiting, *batch.windows)}
        sharers |= {job for job in self.jobs if job.running}
        self.clock.charge(seconds, len(sharers))
        for window in batch.windows:
            job = window.job
            share = seconds * window.seconds / audio
            job.running -= 1
            # Giving way puts long recordings behind: of that no more than a window is saved up, or one that comes
            # later would wait until all the others have caught up.
            job.tag = max(job.tag + share, self.clock.now - share)
            job.work_seconds += share

    def _deliver_window(self, window: Window, result: Decoded | Exception) -> None:
        job = window.job
        if isinstance(result, Exception):
            if not job.cancelled:
                self.fail(job, _failure(result))
            return
        with self.condition:
            if job.cancelled:
                return
            job.results[window.number] = result
            if job.on_window is not None:
                job.tell(job.on_window, window.number, result)
            if job.complete:
                self._complete(job)
            self.condition.notify_all()  # the decoders may have waited for room

    def _requeue(self, batches: Sequence[Batch]) -> None:
        """A worker died: what was in it is tried once more, each window alone, by whichever worker is free."""
        with self.condition:
            for window in (window for batch in batches for window in batch.windows):
                window.job.running -= 1
                window.attempts += 1
                if window.attempts > 1:
                    self.fail(
                        window.job, Failure(500, "the recording ended a worker twice", "internal_error")
                    )
                elif not window.job.cancelled:
                    self.waiting.append(window)
            self._count()
            self.condition.notify_all()

    def _restart(self, runner: Runner) -> None:
        self.metrics.worker_restarts.inc()
        while not self.stopping or self.jobs:
            time.sleep(RESTART_SECONDS)
            try:
                runner.start()
                runner.wait_until_ready()
            except Exception as error:
                logger.error("a worker could not be started again: %s", error)
            else:
                return


def _failure(error: Exception) -> Failure:
    """The error for the client: it describes errors in the recording, not in the server."""
    if isinstance(error, ImputerError):
        return Failure(400, str(error), code="invalid_audio", param="file")
    logger.error("a recording could not be decoded", exc_info=error)
    return Failure(500, "the recording could not be decoded", code="internal_error")
