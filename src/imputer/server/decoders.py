"""Threads that decode uploads, window by window, in fair turns.

A turn ends after a fraction of a second of work, when enough is decoded ahead of the network, or when the client has
left. One thread is kept for uploads that have not cost much yet. So neither a large upload nor a costly one delays the
others or takes more than one core, and an hour of audio takes the memory of a few windows.
"""

import logging
import threading
import time
from collections.abc import Iterator

import numpy as np

from imputer.audio.windows import Cutter
from imputer.recognizer import Recognizer
from imputer.server.batcher import Batcher
from imputer.server.failures import Failure, no_space
from imputer.server.jobs import Job
from imputer.server.metrics import Metrics
from imputer.server.scheduling import FairClock
from imputer.server.settings import Settings

THREADS = 2  # the first only for uploads that have not cost much yet
TURN_SECONDS = 0.1  # of decoding, before another upload has its turn
LIGHT_SECONDS = 0.2  # of decoding: an upload that took less has not cost much
AHEAD_SECONDS = 48.0  # of audio decoded and not yet transcribed, per recording

logger = logging.getLogger("imputer.server")


class Decoders:
    """Uploads that are being decoded."""

    def __init__(self, batcher: Batcher, settings: Settings, metrics: Metrics) -> None:
        self.batcher, self.settings, self.metrics = batcher, settings, metrics
        self.condition = batcher.condition  # one lock for the state of all jobs
        self.idle: dict[Job, Cutter] = {}  # waiting for a turn
        self.clock = FairClock()
        self.stopping = False
        self.threads = [
            threading.Thread(target=self._run, args=(n == 0,), name=f"imputer-decode-{n}", daemon=True)
            for n in range(THREADS)
        ]

    def start(self) -> None:
        for thread in self.threads:
            thread.start()

    def stop(self) -> None:
        with self.condition:
            self.stopping = True
            self.condition.notify_all()
        for thread in self.threads:
            if thread.ident is not None:
                thread.join()
        for job in self.idle:
            job.close()

    def add(self, job: Job, recognizer: Recognizer) -> None:
        """Decode the upload of a job and push its windows to the batcher."""
        with self.condition:
            job.decode_tag = self.clock.now
            job.ahead = max(2, round(AHEAD_SECONDS / recognizer.window_seconds))
            job.frame_seconds = recognizer.frame_seconds
            self.idle[job] = recognizer.cutter()
            self.condition.notify_all()

    def _run(self, light_only: bool) -> None:
        while taken := self._next(light_only):
            job, cutter = taken
            job.turn_began = time.monotonic()
            try:
                over = self._decode(job, cutter)
            except _Left:
                over = True
            except Exception as error:
                self.batcher.fail(job, _failure(error))
                over = True
            self._end_turn(job, cutter, time.monotonic() - job.turn_began, over)
            del job, cutter, taken

    def _next(self, light_only: bool) -> tuple[Job, Cutter] | None:
        with self.condition:
            while not self.stopping:
                ready = [
                    job
                    for job in self.idle
                    if job.cancelled
                    or (_has_room(job) and (job.decode_seconds < LIGHT_SECONDS or not light_only))
                ]
                if ready:
                    job = min(ready, key=lambda job: (job.decode_tag, job.order))
                    return job, self.idle.pop(job)
                self.condition.wait()
            return None

    def check(self, job: Job) -> None:
        """Stop decoding when its client has left or its time is up; called before every block."""
        if job.cancelled:
            raise _Left
        if job.decode_seconds + time.monotonic() - job.turn_began > self.settings.decode_seconds:
            raise Failure(
                413,
                f"decoding the upload takes longer than {self.settings.decode_seconds:g} s",
                code="decode_timeout",
                param="file",
            )

    def _decode(self, job: Job, cutter: Cutter) -> bool:
        """Decode until the turn or the upload is over; True if the upload is."""
        if job.blocks is None:
            job.blocks = job.open(job)
        while True:
            self.check(job)
            block = next(job.blocks, None)
            if block is None:
                self._end(job, cutter)
                return True
            job.seconds += len(block) / job.sample_rate
            cutter.add(block)
            if not job.options.trace:  # else all of the waveform is kept
                self._push(job, cutter.complete())
            if not _has_room(job):
                if not job.admitted.done():
                    self.batcher.admit_long(job)
                    job.admit()
                return False
            if time.monotonic() - job.turn_began > TURN_SECONDS:
                return False

    def _end(self, job: Job, cutter: Cutter) -> None:
        if job.seconds < job.frame_seconds:
            raise Failure(
                400,
                f"the recording is {job.seconds * 1000:.0f} ms long, less than a frame of "
                f"{job.frame_seconds * 1000:.0f} ms",
                code="audio_too_short",
                param="file",
            )
        if job.options.trace:
            job.waveform = cutter.waveform()
        self._push(job, cutter.rest())
        job.admit()
        self.batcher.end_input(job)

    def _push(self, job: Job, windows: Iterator[np.ndarray]) -> None:
        for window in windows:
            self.batcher.push(job, window)

    def _end_turn(self, job: Job, cutter: Cutter, seconds: float, over: bool) -> None:
        job.decode_seconds += seconds
        with self.condition:
            self.clock.charge(seconds, len(self.idle) + 1)
            job.decode_tag += seconds
            if not over:
                self.idle[job] = cutter
                self.condition.notify_all()
        if over:
            self.metrics.decode_seconds.observe(job.decode_seconds)
            if job.blocks is not None:
                job.blocks.close()  # type: ignore[attr-defined]
            job.close()


class _Left(Exception):
    """The client of an upload has left."""


def _failure(error: Exception) -> Failure:
    if isinstance(error, Failure):
        return error
    logger.error("an upload could not be decoded", exc_info=error)
    if isinstance(error, OSError):
        return no_space()
    return Failure(500, "the upload could not be decoded", code="internal_error")


def _has_room(job: Job) -> bool:
    return job.options.trace or job.windows - len(job.results) < job.ahead
