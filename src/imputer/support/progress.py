"""Progress on stderr: a bar with the time left on a terminal, a line every 15 seconds elsewhere."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

Item = TypeVar("Item")

SECONDS_BETWEEN_LINES = 15.0


@contextmanager
def bar(
    title: str, total: float | None = None, *, unit: str = "", before: float = 0
) -> Iterator[Callable[..., None]]:
    """Yield ``advance(amount=1, note="")``; the bar shows done, total, note, elapsed and remaining time.

    before: what was done in an earlier run; it counts as done, but not for the speed.
    """
    if sys.stderr.isatty():
        yield from _terminal_bar(title, total, unit, before)
    else:
        yield from _plain_lines(title, total, unit, before)


def track(items: Iterable[Item], title: str, total: float | None = None) -> Iterator[Item]:
    """Iterate with a bar, one step per item."""
    if total is None and hasattr(items, "__len__"):
        total = len(items)  # type: ignore[arg-type]
    with bar(title, total) as advance:
        for item in items:
            yield item
            advance()


def _terminal_bar(title: str, total: float | None, unit: str, before: float) -> Iterator[Callable[..., None]]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[count]} {task.fields[note]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=4) as progress:
        done, said = before, ""
        task = progress.add_task(title, total=total, note=said, count=_count(done, total, unit))
        progress.update(task, completed=before)

        def advance(amount: float = 1, note: str | None = None) -> None:
            nonlocal done, said
            done, said = _within(done + amount, total), said if note is None else note
            progress.update(task, completed=done, note=said, count=_count(done, total, unit))

        yield advance


def _plain_lines(title: str, total: float | None, unit: str, before: float) -> Iterator[Callable[..., None]]:
    last = time.monotonic()
    started, done, said = 0.0, before, ""

    def advance(amount: float = 1, note: str | None = None) -> None:
        nonlocal started, done, before, last, said
        now = time.monotonic()
        done = _within(done + amount, total)
        if not started and amount:
            started, before = now, done  # the first also waited for whatever had to be loaded or compiled
        said = said if note is None else note
        if now - last < SECONDS_BETWEEN_LINES:
            return
        last = now
        since = done - before
        left = f"{clock((now - started) * (total - done) / since)} left" if total and since else ""
        print(
            f"{title}: {', '.join(filter(None, [_count(done, total, unit), said, left]))}",
            file=sys.stderr,
            flush=True,
        )

    yield advance


def _within(done: float, total: float | None) -> float:
    """A total may be an estimate, from a file's header say: what is done never passes it."""
    return min(done, total) if total else done


def _count(done: float, total: float | None, unit: str) -> str:
    return (f"{done:.0f}/{total:.0f} {unit}" if total else f"{done:.0f} {unit}").strip()


def clock(seconds: float) -> str:
    """Seconds as h:mm:ss."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"
