"""A lock on a file: one process at a time has it, and the system releases it when that process ends in any way."""

import os
import sys
from pathlib import Path
from typing import IO

from imputer.errors import UsageError

BEYOND = 1 << 30  # where Windows locks a byte: it must not keep others from reading the file itself


def taken(file: IO[str], path: Path) -> bool:
    """Lock an open file until it is closed; False if another process has locked it."""
    try:
        if sys.platform == "win32":
            import msvcrt

            os.lseek(file.fileno(), BEYOND, os.SEEK_SET)
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
            os.lseek(file.fileno(), 0, os.SEEK_SET)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # the second on Windows
        return False
    except OSError as error:
        raise UsageError(
            f"{path} cannot be locked: {error.strerror}; name a folder on another disk"
        ) from error
    return True
