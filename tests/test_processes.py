"""Worker processes: order, and no worker outlives its parent."""

import subprocess
import sys
import time
from collections.abc import Callable

from imputer.support.processes import in_order

PARENT = """
import os, sys, time
from imputer.support.processes import in_order

def work(item):
    open(os.path.join(sys.argv[1], f"{os.getpid()}.worker"), "w").close()
    time.sleep(60)

if __name__ == "__main__":
    list(in_order(work, range(4), 2))
"""


def square(item: int) -> int:
    return item * item


def test_results_come_in_order():
    assert list(in_order(square, range(9), 2)) == [(item, item * item) for item in range(9)]


def test_workers_end_with_a_killed_parent(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    parent = subprocess.Popen([sys.executable, script, tmp_path])
    eventually(lambda: len(list(tmp_path.glob("*.worker"))) == 2)
    workers = [int(path.stem) for path in tmp_path.glob("*.worker")]
    parent.kill()
    parent.wait()
    eventually(lambda: not any(map(alive, workers)))


def eventually(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.1)


def alive(process: int) -> bool:
    """Whether a process runs; one that has ended but was not collected does not."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
