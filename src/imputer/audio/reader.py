"""Reading audio: any container, rate and number of channels, files, streams and uploads, as mono float32.

``Reader`` is an open recording: slices of it, or blocks from its start to its end, in the memory of a block. A stream
is copied to a temporary file first, so that everything is read the same way. ``read`` and ``info`` open and close by
themselves; slices of one file by ``read`` keep it open for the next.
"""

import math
import os
import shutil
import stat
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import soundfile

from imputer.audio.containers import Opened, open_container, plain
from imputer.audio.limits import LOUDEST, NO_LIMITS, AudioError, Limits
from imputer.errors import ImputerError, UsageError

SAMPLE_RATE = 16000
OPEN_FILES = 8
BLOCK = 1 << 16  # samples of all channels, decoded at a time

# A slice that ends this much after its file does ends with the file: times in corpora are rounded, and the
# length of some containers is known only roughly.
SECONDS_OF_GRACE = 0.1

Source = str | Path | BinaryIO


@dataclass(frozen=True, slots=True)
class AudioInfo:
    seconds: float
    sample_rate: int
    channels: int


class Reader:
    """An open recording."""

    def __init__(self, source: Source, *, name: str = "", limits: Limits = NO_LIMITS) -> None:
        self.name = name or _name(source)
        self.limits = limits
        self.file = _file(source, self.name)
        try:
            self.opened: Opened = open_container(self.file, self.name, limits)
        except BaseException:
            self.file.close()
            raise
        self.rate, self.channels, self.frames = (
            self.opened.samplerate,
            self.opened.channels,
            self.opened.frames,
        )

    @property
    def seconds(self) -> float:
        return self.frames / self.rate

    @property
    def repeatable(self) -> bool:
        """Whether a slice is bit-identical, independent of earlier reads."""
        return self.opened.repeatable

    def read(
        self, sample_rate: int = SAMPLE_RATE, *, offset: float = 0.0, duration: float | None = None
    ) -> np.ndarray:
        """(samples,) float32 at ``sample_rate``, channels averaged: all, or ``duration`` seconds from ``offset``."""
        start, count = self._span(offset, duration)
        parts = list(self._mono(start, count))
        return _resampled(np.concatenate(parts), self.rate, sample_rate, self.name)

    def blocks(self, sample_rate: int = SAMPLE_RATE) -> Iterator[np.ndarray]:
        """The whole recording, block by block; a block may be empty. ``limits.check`` is called before each."""
        import soxr

        same = self.rate == sample_rate
        stream = None if same else soxr.ResampleStream(self.rate, sample_rate, 1, dtype="float32")
        for block in self._mono(0, self.frames):
            yield block if stream is None else stream.resample_chunk(block)
        if stream is not None:
            yield stream.resample_chunk(np.zeros(0, np.float32), last=True)

    def check(self) -> None:
        """Read what may be damaged though the header looks right: float samples, and the ends of FLAC and MP3."""
        if self.opened.subtype in ("FLOAT", "DOUBLE"):
            start = 0
        elif self.opened.kind in ("FLAC", "MP3"):
            start = max(0, self.frames - self.rate // 10)
        else:
            return
        for _ in self._mono(start, self.frames - start):
            pass

    def close(self) -> None:
        self.opened.close()
        self.file.close()

    def __del__(self) -> None:
        if hasattr(self, "opened"):
            self.close()

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _span(self, offset: float, duration: float | None) -> tuple[int, int]:
        """First sample and number of samples of a slice."""
        if not offset >= 0 or (duration is not None and not duration > 0):
            raise ImputerError(
                f"{self.name}: a slice needs offset >= 0 and duration > 0, got {offset} and {duration}"
            )
        start = round(offset * self.rate)
        end = self.frames if duration is None else round((offset + duration) * self.rate)
        if start >= self.frames or end > self.frames + SECONDS_OF_GRACE * self.rate:
            raise AudioError(
                f"{self.name}: asked for {start / self.rate:.3f} to {end / self.rate:.3f} s, "
                f"but the file ends at {self.seconds:.3f} s"
            )
        return start, max(1, min(end, self.frames) - start)

    def _mono(self, start: int, count: int) -> Iterator[np.ndarray]:
        """(samples,) at the file's own rate, block by block, checked."""
        end = start + count
        while start < end:
            self.limits.tick()
            wanted = min(end - start, max(1, BLOCK // self.channels))
            block = self._slice(start, wanted)
            if not len(block):
                return
            _check_values(block, start, self.name)
            yield block[:, 0].copy() if self.channels == 1 else block.mean(1, dtype=np.float32)
            start += len(block)

    def _slice(self, start: int, count: int) -> np.ndarray:
        try:
            samples = self.opened.slice(start, count)
        except (soundfile.SoundFileError, RuntimeError) as error:
            raise AudioError(f"{self.name}: the audio is damaged or cut off ({plain(error)})") from error
        roughly = not self.opened.kind and start + len(samples) >= self.frames - SECONDS_OF_GRACE * self.rate
        if len(samples) < count and not (roughly and start + len(samples) > 0):
            raise AudioError(
                f"{self.name}: the audio is cut off: {count} samples expected from sample {start} on, "
                f"got {len(samples)}"
            )
        return samples


def read(
    source: Source, *, sample_rate: int = SAMPLE_RATE, offset: float = 0.0, duration: float | None = None
) -> np.ndarray:
    """(samples,) float32 at ``sample_rate``, channels averaged: all, or ``duration`` seconds from ``offset``."""
    with _reader(source, keep=offset > 0 or duration is not None) as reader:
        return reader.read(sample_rate, offset=offset, duration=duration)


def info(source: Source, *, check: bool = False) -> AudioInfo:
    """Length, rate and channels; ``check`` also reads what may be cut off or not a number."""
    with Reader(source) as reader:
        if check:
            reader.check()
        return AudioInfo(reader.seconds, reader.rate, reader.channels)


def write(path: str | Path, samples: np.ndarray, sample_rate: int = SAMPLE_RATE) -> None:
    """Write mono 16-bit audio in the format of the name's ending, whole or not at all."""
    path = Path(path)
    # Not through support.atomic_files: a corpus is thousands of files, and waiting for the disk at each takes longest.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(temporary, np.clip(samples, -1.0, 1.0), sample_rate, format=path.suffix[1:].upper())
        os.replace(temporary, path)
    except (OSError, soundfile.SoundFileError) as error:
        raise ImputerError(f"cannot write {path}: {plain(error)}") from error
    finally:
        temporary.unlink(missing_ok=True)


def check_peak(peak: float, name: str) -> None:
    """Refuse samples far beyond full scale, whose transcript would be nonsense or NaN."""
    if peak > LOUDEST:
        hint = "; divide 16-bit values by 32768" if peak <= 32768 else ""
        raise AudioError(f"{name}: a sample is {peak:.6g}, but samples lie between -1 and 1{hint}")


def _check_values(samples: np.ndarray, start: int, name: str) -> None:
    """Refuse samples (sample, channel) that are not finite, or far beyond full scale."""
    peak = max(float(samples.max()), -float(samples.min()))
    if not math.isfinite(peak):
        at = int(np.argwhere(~np.isfinite(samples))[0][0])
        raise AudioError(f"{name}: sample {start + at} is not finite")
    check_peak(peak, name)


def _resampled(mono: np.ndarray, rate: int, wanted: int, name: str) -> np.ndarray:
    if rate != wanted:
        import soxr

        mono = soxr.resample(mono, rate, wanted)
        if not len(mono):
            raise AudioError(f"{name}: too short to resample from {rate} to {wanted} Hz", "empty")
    return np.ascontiguousarray(mono, dtype=np.float32)


# Files, and those kept open.


def _name(source: Source) -> str:
    if isinstance(source, str | Path):
        return str(source)
    name = str(getattr(source, "name", "the audio stream"))
    return "standard input" if name == "<stdin>" else name


def _file(source: Source, name: str) -> Any:
    """A real file, open at its start; streams and pipes are copied to one."""
    if not isinstance(source, str | Path):
        return _copied(source, name)
    path = str(source)
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            raise AudioError(f"{name} is a folder, not an audio file")
        if stat.S_ISFIFO(mode):
            with open(path, "rb") as pipe:
                return _copied(pipe, name)
        if not stat.S_ISREG(mode):
            raise AudioError(f"{name} is not a regular file")
        return open(path, "rb", buffering=0)
    except FileNotFoundError:
        raise NoSuchFile(f"{name}: no such file") from None
    except ValueError as error:
        if isinstance(error, ImputerError):
            raise
        raise UsageError(f"{name!r}: not a path ({error})") from None  # a NUL in it
    except OSError as error:
        raise AudioError(f"{name}: cannot be read: {error.strerror or error}") from error


class NoSuchFile(UsageError):
    """The file does not exist."""


def _copied(stream: BinaryIO, name: str) -> Any:
    """A stream, copied to an unnamed temporary file."""
    copy = tempfile.TemporaryFile(prefix="imputer-", buffering=0)  # noqa: SIM115
    try:
        with suppress(OSError, AttributeError, ValueError):  # a pipe has no start to go back to
            stream.seek(0)
        if not isinstance(stream.read(0), bytes):
            raise UsageError(f"{name}: audio is bytes, and this gives text; open it with mode 'rb'")
        shutil.copyfileobj(stream, copy, 1 << 20)
        copy.seek(0)
    except BaseException:
        copy.close()
        raise
    return copy


class _OpenFiles(threading.local):
    """Each thread's open files, by path and identity on disk; the oldest is closed first."""

    def __init__(self) -> None:
        self.files: OrderedDict[tuple, Reader] = OrderedDict()


_kept = _OpenFiles()
# A forked worker must not share file positions with its parent. Not needed on systems without fork.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _kept.files.clear())


@contextmanager
def _reader(source: Source, *, keep: bool) -> Iterator[Reader]:
    """The recording, open; with ``keep`` a file stays open for the next slice."""
    key = _identity(source) if keep else None
    reader = _kept.files.pop(key, None) if key else None
    reader = reader or Reader(source)
    # Taken out while in use: after an error inside a damaged file its position is undefined.
    try:
        yield reader
    except BaseException:
        reader.close()
        raise
    if key is None or not reader.repeatable:
        reader.close()
        return
    _kept.files[key] = reader
    if len(_kept.files) > OPEN_FILES:
        _kept.files.popitem(last=False)[1].close()


def _identity(source: Source) -> tuple | None:
    """The identity of a file on disk: another file under its name has another one."""
    if not isinstance(source, str | Path):
        return None
    try:
        status = os.stat(source)
    except (OSError, ValueError):
        return None
    return str(source), status.st_ino, status.st_size, status.st_mtime_ns
