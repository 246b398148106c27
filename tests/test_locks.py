"""Locks on files: one process at a time, on every system."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from imputer.errors import UsageError
from imputer.support import locks

HOLD = """
import sys
from pathlib import Path
from imputer.support import locks
with open(sys.argv[1], "a+") as file:
    assert locks.taken(file, Path(sys.argv[1]))
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_a_lock_ends_with_the_process_that_holds_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with holder, open(path, "a+") as file:
        assert holder.stdout is not None and holder.stdout.readline() == "locked\n"
        assert not locks.taken(file, path)
        holder.kill()
        holder.wait()
        assert locks.taken(file, path)


@pytest.mark.parametrize(("error", "taken"), [(None, True), (PermissionError(13, "denied"), False)])
def test_windows_locks_a_byte_beyond_the_file(
    error: Exception | None, taken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def locking(descriptor: int, mode: int, size: int) -> None:
        asked.append((mode, size))
        if error:
            raise error

    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setitem(sys.modules, "msvcrt", SimpleNamespace(locking=locking, LK_NBLCK=2))
    with open(tmp_path / "lock", "a+") as file:
        assert locks.taken(file, tmp_path / "lock") is taken
        file.write("process 1\n")
    assert asked == [(2, 1)] and (tmp_path / "lock").read_text() == "process 1\n"


def test_a_disk_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    def refuse(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with (
        open(tmp_path / "lock", "w") as file,
        pytest.raises(UsageError, match="lock cannot be locked: No locks"),
    ):
        locks.taken(file, tmp_path / "lock")
