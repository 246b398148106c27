"""Work in worker processes or threads, its results in order."""

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from itertools import islice
from multiprocessing import get_context, parent_process
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_order(
    work: Callable[[Item], Result],
    items: Iterable[Item],
    workers: int,
    *,
    start: Callable[..., None] | None = None,
    arguments: tuple[Any, ...] = (),
    threads: bool = False,
) -> Iterator[tuple[Item, Result]]:
    """(item, result) for all items, computed a little ahead; every worker first calls ``start(*arguments)``.

    With one worker or none, the work is done in this process, without ``start``. ``threads`` suit work that waits for
    files.
    """
    if workers <= 1:
        for item in items:
            yield item, work(item)
        return
    waiting = iter(items)
    pool: Executor
    if threads:
        pool = ThreadPoolExecutor(workers, initializer=start, initargs=arguments)
    else:  # started afresh: a fork of a process with thread pools can hang
        pool = ProcessPoolExecutor(workers, get_context("spawn"), _begin, (start, arguments))
    with pool:
        ahead = [(item, pool.submit(work, item)) for item in islice(waiting, 4 * workers)]
        try:
            while ahead:
                item, future = ahead.pop(0)
                yield item, future.result()
                ahead += [(item, pool.submit(work, item)) for item in islice(waiting, 1)]
        finally:
            pool.shutdown(cancel_futures=True)


def _begin(start: Callable[..., None] | None, arguments: tuple[Any, ...]) -> None:
    end_with_parent()
    if start:
        start(*arguments)


def end_with_parent() -> None:
    """From now on this worker process ends with the process that started it, even if that one is killed."""
    threading.Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
