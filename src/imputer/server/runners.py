"""What runs batches: the interface, and the network in a thread of the server."""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from imputer.decoding import Cancelled, Decoded, OnPass, Options
from imputer.recognizer import Recognizer
from imputer.server.jobs import Batch, Window
from imputer.server.settings import Settings

DEPTH = 3  # batches that interrupt each other

Results = list[Decoded | Exception]
Watch = Callable[[int, list[int], list[float]], None]  # pass, partial alignment, confidence


class Host(Protocol):
    """What a runner needs of the batcher."""

    def urgent(self, running: Batch, elapsed: float) -> Batch | None:
        """A batch to run before ``running`` continues."""

    def deliver(self, batch: Batch, results: Results, seconds: float) -> None:
        """The results of a batch."""


class Runner(Protocol):
    """Runs one batch at a time, and what interrupts it."""

    def start(self) -> None:
        """Begin to load the models."""

    def wait_until_ready(self) -> None:
        """Return when the models are loaded and warm."""

    def run(self, batch: Batch, host: Host) -> None:
        """Run a batch and hand its results to the host."""

    def close(self) -> None:
        """End, with no batch running."""


class WorkerDied(Exception):
    """The process that ran these batches died."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        super().__init__("a worker died")
        self.batches = batches


class LocalRunner:
    """The network in a thread of the server."""

    def __init__(self, recognizers: Mapping[str, Recognizer], settings: Settings) -> None:
        self.recognizers, self.settings = recognizers, settings

    def start(self) -> None:
        pass

    def wait_until_ready(self) -> None:
        warm_up(self.recognizers, self.settings)

    def close(self) -> None:
        pass

    def run(self, batch: Batch, host: Host, depth: int = 1) -> None:
        import torch

        torch.set_num_threads(self.settings.threads)  # of this thread
        started, interrupted = time.monotonic(), 0.0

        def between_passes() -> bool:
            nonlocal interrupted
            if depth < DEPTH:
                while other := host.urgent(batch, time.monotonic() - started - interrupted):
                    since = time.monotonic()
                    self.run(other, host, depth + 1)
                    interrupted += time.monotonic() - since
            return not batch.cancelled

        results = run_windows(
            self.recognizers[batch.model],
            batch.options,
            [window.samples for window in batch.windows],
            [window.start for window in batch.windows],
            [watch_of(window) for window in batch.windows],
            between_passes,
        )
        host.deliver(batch, results, time.monotonic() - started - interrupted)


def run_windows(
    recognizer: Recognizer,
    options: Options,
    samples: Sequence[np.ndarray],
    starts: Sequence[Sequence[int]],
    watches: Sequence[Watch | None],
    between_passes: Callable[[], bool],
) -> Results:
    """One result per window, none if ``between_passes`` stopped it; a window that breaks a batch fails alone."""
    try:
        return list(
            recognizer.decode(
                samples,
                options,
                starts=starts if any(starts) else None,
                on_pass=_on_pass(watches, recognizer.model.mask),
                cancelled=lambda: not between_passes(),
            )
        )
    except Cancelled:
        return []
    except Exception as error:
        if len(samples) == 1:
            return [error]
    results: Results = []
    for one, start, watch in zip(samples, starts, watches, strict=True):
        alone = run_windows(recognizer, options, [one], [start], [watch], between_passes)
        if not alone:
            return []
        results += alone
    return results


def _on_pass(watches: Sequence[Watch | None], mask: int) -> OnPass | None:
    """Tell each watch of its window's passes; of a window that is complete, only a search that changes it."""
    watching = {item: watch for item, watch in enumerate(watches) if watch is not None}
    if not watching:
        return None
    complete: dict[int, tuple[list[int], list[float]]] = {}
    told: Counter[int] = Counter()  # passes of each window, which may have fewer than the batch

    def tell(_: int, partial: list[list[int]], confidence: list[list[float]]) -> None:
        for item, watch in watching.items():
            now = partial[item], confidence[item]
            if partial[item] and now != complete.get(item):
                told[item] += 1
                watch(told[item], *now)
            if mask not in partial[item]:
                complete[item] = now

    return tell


def warm_up(recognizers: Mapping[str, Recognizer], settings: Settings) -> None:
    """Run every model once, so that the first request is not slower than others; n_best makes every model search."""
    options = Options(2, lm=settings.lm, hotwords=settings.hotwords, n_best=2)
    for recognizer in recognizers.values():
        silence = np.zeros(recognizer.sample_rate, np.float32)
        for result in recognizer.decode([silence, silence[:8000]], options):
            if isinstance(result, Exception):
                raise result


def load(settings: Settings, folders: Mapping[str, Any]) -> dict[str, Recognizer]:
    """The models by name."""
    return {
        name: Recognizer.from_pretrained(folder, runtime=settings.runtime, device=settings.device)  # type: ignore[arg-type]
        for name, folder in folders.items()
    }


def watch_of(window: Window) -> Watch | None:
    job = window.job
    if job.watch is None:
        return None

    def tell(number: int, partial: list[int], confidence: list[float]) -> None:
        if not job.cancelled and job.watch is not None:
            job.tell(job.watch, window.number, number, partial, confidence)

    return tell
