"""Files that are there whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from imputer.errors import ImputerError

UMASK = os.umask(0o077)  # it can only be read by setting it
os.umask(UMASK)


@contextmanager
def replacing(path: Path | str) -> Iterator[Path]:
    """Yield a temporary name beside ``path``; on success it takes the place of ``path``, on failure it goes."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        with open(temporary, "rb+") as file:
            # Some libraries make files that only their owner can read.
            os.fchmod(file.fileno(), 0o666 & ~UMASK)
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise ImputerError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)
