"""A checksum over a whole safetensors file, kept in its own header: any flipped bit is detected."""

import hashlib
import re
from pathlib import Path

KEY = "checksum"  # in the metadata
EMPTY = "0" * 32  # in its place while it is computed
LONGEST_HEADER = 100_000_000  # bytes; safetensors has the same limit
STATED = re.compile(rb'"checksum":"(.{32})"', re.DOTALL)


def stamp(path: Path) -> None:
    """Fill in the checksum of a file that was saved with ``EMPTY`` in its metadata."""
    _, found, place = read(path)
    with open(path, "r+b") as file:
        file.seek(place)
        file.write(found.encode())


def read(path: Path | str) -> tuple[str, str, int]:
    """The checksum stated in a file ("" if none), that of the whole file around it, and where it is stated."""
    digest = hashlib.blake2b(digest_size=16)
    with open(path, "rb") as file:
        start = file.read(8)
        size = int.from_bytes(start, "little")
        if size > LONGEST_HEADER:
            raise ValueError(f"its header would take {size} bytes")
        header = file.read(size)
        stated = STATED.search(header)
        if not stated:
            return "", "", 0
        digest.update(start + header[: stated.start(1)] + EMPTY.encode() + header[stated.end(1) :])
        while block := file.read(1 << 20):
            digest.update(block)
    return stated[1].decode(errors="replace"), digest.hexdigest(), 8 + stated.start(1)


def check(path: Path | str) -> bool:
    """Whether a file states a checksum; a ValueError if it is not the file's."""
    stated, found, _ = read(path)
    if stated != found:
        raise ValueError(f"its checksum is {found}, it states {stated}")
    return bool(stated)
