"""Downloading archives: resumed after an interruption, compared with a checksum, unpacked whole or not at all."""

import hashlib
import http.client
import os
import shutil
import tarfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from imputer.errors import ImputerError
from imputer.support.progress import bar

CHUNK = 1 << 20
SECONDS_WITHOUT_DATA = 60.0
ATTEMPTS = 5  # in a row without a single byte
MEGABYTE = 1e6


def fetch_archive(address: str, md5: str, folder: Path, inside: str, *, wait: float = 1.0) -> None:
    """Fetch a tar archive and unpack it below ``folder``; it must contain ``inside``."""
    archive = folder / address.rpartition("/")[2]
    folder.mkdir(parents=True, exist_ok=True)
    if not archive.is_file():
        fetch(address, archive, md5, wait=wait)
    unpack(archive, folder, inside)
    archive.unlink()


def fetch(address: str, path: Path, md5: str, *, wait: float = 1.0) -> None:
    """Download to ``path``; an interrupted download stays as ``path``.part and is resumed, also by the next call."""
    part = path.with_name(path.name + ".part")
    failures = 0
    while True:
        before = part.stat().st_size if part.exists() else 0
        try:
            _continue(address, part)
            break
        except (OSError, http.client.HTTPException) as error:
            if (
                isinstance(error, urllib.error.HTTPError)
                and error.code < 500
                and error.code not in (408, 429)
            ):
                raise ImputerError(f"{address}: the server says {error.code} {error.reason}") from error
            after = part.stat().st_size if part.exists() else 0
            failures = 0 if after > before else failures + 1
            if failures >= ATTEMPTS:
                raise ImputerError(
                    f"{address}: cannot be fetched ({getattr(error, 'reason', None) or error}); "
                    f"the partial download is {part}, run the same command again to resume"
                ) from error
            time.sleep(wait * 2**failures)
    found = md5_of(part)
    if found != md5:
        part.unlink()
        raise ImputerError(
            f"{address}: the MD5 sum is {found}, not {md5}; removed, run the same command again"
        )
    os.replace(part, path)


def _continue(address: str, part: Path) -> None:
    """Append what is missing to ``part``."""
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(address, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        response = urllib.request.urlopen(request, timeout=SECONDS_WITHOUT_DATA)
    except urllib.error.HTTPError as error:
        if error.code == 416 and have:  # nothing is left to send; the checksum shows whether it is complete
            return
        raise
    with response:
        if response.status != 206:  # a server that cannot resume sends it all again
            have = 0
        length = response.headers.get("Content-Length")
        total = have + int(length) if length else None
        with (
            open(part, "r+b" if have else "wb") as file,
            bar(
                f"Fetching {part.stem}", total and total / MEGABYTE, unit="MB", before=have / MEGABYTE
            ) as advance,
        ):
            file.seek(have)
            done = have + _copy(response.read, file.write, advance)
    if total is not None and done < total:
        raise http.client.IncompleteRead(b"", total - done)


def _copy(
    read: Callable[[int], bytes], write: Callable[[bytes], object], advance: Callable[..., None]
) -> int:
    done = 0
    while chunk := read(CHUNK):
        write(chunk)
        done += len(chunk)
        advance(len(chunk) / MEGABYTE)
    return done


def md5_of(path: Path) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    with (
        open(path, "rb") as file,
        bar(f"Checking {path.stem}", path.stat().st_size / MEGABYTE, unit="MB") as advance,
    ):
        _copy(file.read, digest.update, advance)
    return digest.hexdigest()


def unpack(archive: Path, folder: Path, inside: str) -> None:
    """Unpack into a temporary folder and move the content to its place when it is complete."""
    temporary = folder / f".{archive.name}.{os.getpid()}.part"
    try:
        with tarfile.open(archive) as tar, bar(f"Unpacking {archive.name}", unit="files") as advance:
            for member in tar:
                _extract(tar, member, temporary)
                advance()
        if not (temporary / inside).is_dir():
            raise ImputerError(f"{archive} has no {inside}")
        _merge(temporary, folder, inside)
    except (tarfile.TarError, EOFError, OSError) as error:
        raise ImputerError(f"{archive}: cannot be unpacked ({error})") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _extract(tar: tarfile.TarFile, member: tarfile.TarInfo, folder: Path) -> None:
    """Write a file or folder below ``folder``; anything else is refused, so that no link leads out of it.

    Not ``tar.extract(filter="data")``: Python 3.11 before 3.11.4 has no ``filter``.
    """
    path = folder / member.name
    if ".." in path.parts or not path.is_relative_to(folder):
        raise tarfile.ExtractError(f"{member.name} is outside of the archive's folder")
    content = tar.extractfile(member) if member.isfile() else None
    if content is None and not member.isdir():
        raise tarfile.ExtractError(f"{member.name} is neither a file nor a folder")
    (path if content is None else path.parent).mkdir(parents=True, exist_ok=True)
    if content is not None:
        with content, open(path, "wb") as file:
            shutil.copyfileobj(content, file)


def _merge(temporary: Path, folder: Path, inside: str) -> None:
    """Move the part in one step; the readmes beside it, which all archives hold, only where there are none yet."""
    target = folder / inside
    target.parent.mkdir(parents=True, exist_ok=True)
    for path in (temporary / inside).parent.iterdir():
        if path.name != target.name and not (target.parent / path.name).exists():
            os.replace(path, target.parent / path.name)
    os.replace(temporary / inside, target)
