"""Files that are written whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from imputer.errors import ImputerError, UsageError

UMASK = os.umask(0o077)  # it can only be read by setting it
os.umask(UMASK)


@contextmanager
def replacing(path: Path | str) -> Iterator[Path]:
    """Yield a temporary name beside ``path``; on success it replaces ``path``, on failure it is removed."""
    path = Path(path)
    temporary = _beside(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~UMASK)  # some libraries make files that only their owner can read
        os.replace(temporary, path)
    except OSError as error:
        raise ImputerError(f"cannot write {path}: {_reason(error)}") from error
    except Exception as error:
        # safetensors has its own name for a disk that is full; importing it here would cost every command.
        if type(error).__name__ != "SafetensorError":
            raise
        raise ImputerError(f"cannot write {path}: {error}") from error
    finally:
        with suppress(OSError):  # any error while writing it
            temporary.unlink(missing_ok=True)


def write_text(path: Path | str, text: str) -> None:
    """Write a UTF-8 text file, whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def probe(path: Path | str) -> None:
    """Check that ``path`` can be written, before the work starts."""
    path = Path(path)
    temporary = _beside(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.touch()
        temporary.unlink()
    except OSError as error:
        raise UsageError(f"cannot write {path}: {_reason(error)}") from error
    if path.is_dir():
        raise UsageError(f"cannot write {path}: it is a directory; give the name of a file")


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.part")


def _reason(error: OSError) -> str:
    if isinstance(error, FileExistsError):  # where a folder should be made
        return f"{error.filename} is not a directory"
    return error.strerror or str(error)
