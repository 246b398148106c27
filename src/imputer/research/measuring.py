"""What the benchmarks share: one thread, processor time taken in turns, a table."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def least(competitors: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """Each one's least processor time in seconds; they take turns, so that other load affects all of them.

    With several rounds, one more warm-up round comes first and does not count.
    """
    best = [float("inf")] * len(competitors)
    for number in range(rounds + (rounds > 1)):
        for place, competitor in enumerate(competitors):
            started = time.process_time()
            competitor()
            if number or rounds == 1:
                best[place] = min(best[place], time.process_time() - started)
    return best


def show(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table, all but its first column to the right."""
    from rich.console import Console
    from rich.table import Table

    table = Table(*headings, title=title, title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        table.add_row(*row)
    Console().print(table)
