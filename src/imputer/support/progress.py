"""Progress on stderr: a bar with the time left on a terminal, a line now and then elsewhere."""

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
    """Iterate with a bar, one step an item."""
    if total is None and hasattr(items, "__len__"):
        total = len(items)  # type: ignore[arg-type]
    with bar(title, total) as advance:
        for item in items:
            yield item
            advance()


def _terminal_bar(title: str, total: float | None, unit: str, before: float) -> Iterator[Callable[..., None]]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn(f"{unit} {{task.fields[note]}}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=4) as progress:
        task = progress.add_task(title, total=total, completed=before, note="")  # type: ignore[arg-type]

        def advance(amount: float = 1, note: str | None = None) -> None:
            progress.update(task, advance=amount, **({} if note is None else {"note": note}))  # type: ignore[arg-type]

        yield advance


def _plain_lines(title: str, total: float | None, unit: str, before: float) -> Iterator[Callable[..., None]]:
    last = time.monotonic()
    started, done, said = 0.0, before, ""

    def advance(amount: float = 1, note: str | None = None) -> None:
        nonlocal started, done, before, last, said
        now = time.monotonic()
        done += amount
        if not started and amount:
            started, before = now, done  # the first also waited for whatever had to be loaded or compiled
        said = said if note is None else note
        if now - last < SECONDS_BETWEEN_LINES:
            return
        last = now
        since = done - before
        count = f"{done:g}/{total:g} {unit}" if total else f"{done:g} {unit}"
        left = f"{clock((now - started) * (total - done) / since)} left" if total and since else ""
        print(f"{title}: {', '.join(filter(None, [count.strip(), said, left]))}", file=sys.stderr, flush=True)

    yield advance


def clock(seconds: float) -> str:
    """Seconds as h:mm:ss."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"
