"""A recording in the server: its windows, and the batches they are in."""

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from imputer.decoding import Decoded, Options
from imputer.server.failures import Failure

ENCODER_PASSES = 4  # the acoustic encoder costs about as much as this many passes

_numbers = itertools.count()


@dataclass(eq=False)
class Job:
    """One recording. Made in the event loop, decoded by the decoders, filled in by the batcher."""

    model: str
    options: Options  # jobs of equal model and options can share a batch
    sample_rate: int
    open: Callable[["Job"], Iterator[np.ndarray]]  # decodes the upload, block by block
    close: Callable[[], None] = lambda: None  # frees the upload
    live: bool = False  # of a live session: it has no end, and takes no place of uploads
    warnings: list[str] = field(default_factory=list)  # what is missing in the upload
    watch: Callable[[int, int, list[int], list[float]], None] | None = None  # in the event loop, every pass
    on_window: Callable[[int, Decoded], None] | None = None  # in the event loop, every complete window
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    arrived: float = field(default_factory=time.monotonic)
    order: int = field(default_factory=lambda: next(_numbers))

    blocks: Iterator[np.ndarray] | None = None  # while the upload is being decoded
    turn_began: float = 0.0  # the decoders' present one
    admitted: asyncio.Future = field(init=False)  # the upload is readable, and there is room for it
    done: asyncio.Future = field(init=False)  # list[Decoded]
    results: dict[int, Decoded] = field(default_factory=dict)  # of windows
    waveform: np.ndarray | None = None  # of the whole recording, if its trace is kept
    windows: int = 0  # so far
    seconds: float = 0.0  # decoded so far
    frame_seconds: float = 0.0  # of its model: the shortest recording
    ahead: int = 2  # windows that may be decoded before they are transcribed
    ended: bool = False  # all of the upload is decoded
    cancelled: bool = False
    tag: float = 0.0  # in the network's fair clock
    decode_tag: float = 0.0  # in the decoders'
    work_seconds: float = 0.0  # in the network
    decode_seconds: float = 0.0
    running: int = 0  # windows in the network now

    def __post_init__(self) -> None:
        self.admitted = self.loop.create_future()
        self.done = self.loop.create_future()
        for future in (self.admitted, self.done):
            future.add_done_callback(_retrieve)  # the result may never be retrieved

    @property
    def complete(self) -> bool:
        return self.ended and len(self.results) == self.windows

    def cost(self, seconds: float) -> float:
        """The cost of ``seconds`` of its audio, in seconds times passes."""
        return seconds * (ENCODER_PASSES + (self.options.block_size or 1))

    def tell(self, function: Callable[..., None], *arguments: Any) -> None:
        """Have the event loop call ``function``, unless the loop is closed."""
        try:
            self.loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            self.cancelled = True

    def warn(self, message: str) -> None:
        """Note what is missing, once: a file may be looked at twice."""
        if message not in self.warnings:
            self.warnings.append(message)

    def admit(self) -> None:
        self.tell(_set_result, self.admitted, None)

    def finish(self) -> None:
        self.tell(_set_result, self.done, [self.results[number] for number in range(self.windows)])

    def fail(self, failure: Failure) -> None:
        self.tell(_set_exception, self.admitted, failure)
        self.tell(_set_exception, self.done, failure)


@dataclass(eq=False, slots=True)
class Window:
    """A window of a job, waiting for the network or in it."""

    job: Job
    number: int
    samples: np.ndarray
    arrived: float
    start: Sequence[int] = ()  # tokens of its first frames, where they are given
    attempts: int = 0  # after a worker died with it
    gave_way: float = 0.0  # seconds of work on cheaper windows that went before it or interrupted it

    @property
    def seconds(self) -> float:
        return len(self.samples) / self.job.sample_rate

    @property
    def cost(self) -> float:
        return self.job.cost(self.seconds)

    def turn(self, seconds_per_cost: float) -> tuple[float, int, int]:
        """Windows are served in this order: by when they would end if each recording had its share."""
        return self.job.tag + self.cost * seconds_per_cost, self.job.order, self.number


@dataclass(eq=False)
class Batch:
    """Windows that go through the network together."""

    windows: list[Window]
    number: int = field(default_factory=lambda: next(_numbers))

    @property
    def model(self) -> str:
        return self.windows[0].job.model

    @property
    def options(self) -> Options:
        return self.windows[0].job.options

    @property
    def cancelled(self) -> bool:
        return all(window.job.cancelled for window in self.windows)

    @property
    def cost(self) -> float:
        longest = max(window.seconds for window in self.windows)
        return self.windows[0].job.cost(longest * len(self.windows))


def _set_result(future: asyncio.Future, value: Any) -> None:
    if not future.done():
        future.set_result(value)


def _set_exception(future: asyncio.Future, error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


def _retrieve(future: asyncio.Future) -> None:
    if not future.cancelled():
        future.exception()
