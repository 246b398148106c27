"""The frames of a frozen encoder, kept on disk: computed once, read at full speed by every training after.

A cache is a folder for one encoder:

    encoder.json   whose frames they are, and how many numbers each has
    frames.f16     all frames one after the other, float16, only ever appended to; read by memory-mapping
    index          32 bytes for each recording: which it is, where its frames start, how many, their checksum
    files          32 bytes for each file seen: its path, size and time of change -> its content
    lock           held while somebody writes

A recording is known by the content of its file and by the slice taken from it, so moving or copying files costs
only reading them once more. Frames are written before the index tells of them: if the program is killed, what
the index does not tell of is cut off by the next writer and never seen by a reader. One process writes at a
time; any number read, also meanwhile. Opening reads the two tables and maps the rest: 100 hours are 1.6 MB of
index beside 8.6 GB of frames.
"""

import fcntl
import hashlib
import json
import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import torch
from torch import Tensor

from imputer import audio
from imputer.audio.augmentation import augment_features
from imputer.configs import NO_AUGMENTATION, Augmentation
from imputer.data.manifest import Utterance
from imputer.errors import ImputerError, UsageError
from imputer.support import progress
from imputer.support.atomic_files import replacing

FORMAT = 1
LARGEST = float(np.finfo(np.float16).max)
SPAN = struct.Struct("<QII")  # first frame, number of frames, checksum of their bytes


class Encoder(Protocol):
    """A frozen network from sound to vectors; ``key`` tells it from every other, for caches."""

    sample_rate: int
    feature_size: int
    frame_seconds: float
    key: str

    def extract(self, waveform: Tensor) -> Tensor:
        """(samples,) -> (frame, feature)."""

    def feature_frames(self, seconds: float) -> int:
        """How many vectors ``seconds`` of sound give."""


@dataclass
class Filled:
    """What ``fill`` did."""

    added: int = 0
    present: int = 0
    seconds: float = 0.0  # of audio added
    dropped: list[tuple[str, str]] = field(default_factory=list)  # (id, reason)


class FramesCache:
    """Frames of ``encoder`` in ``folder``; the key of an encoder in its place opens the cache only for reading."""

    def __init__(self, folder: Path | str, encoder: Encoder | str) -> None:
        self.folder = Path(folder)
        self.encoder = None if isinstance(encoder, str) else encoder
        self.key = encoder if isinstance(encoder, str) else encoder.key
        self.feature_size = self._meet()
        self.index = _Table(self.folder / "index")
        self.files = _Table(self.folder / "files")
        self._frames = np.empty((0, self.feature_size), np.float16)

    def _meet(self) -> int:
        """Check whose frames are here, or say whose will be; their width."""
        path = self.folder / "encoder.json"
        if not path.exists():
            if self.encoder is None:
                raise UsageError(f"{self.folder} holds no frames; fill it first")
            mine = {"format": FORMAT, "key": self.key, "feature_size": self.encoder.feature_size}
            with replacing(path) as temporary:
                temporary.write_text(json.dumps(mine) + "\n")
            return self.encoder.feature_size
        try:
            there = json.loads(path.read_text())
            form, key, size = there["format"], there["key"], int(there["feature_size"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ImputerError(
                f"{path} is damaged ({error}); remove {self.folder} and fill it again"
            ) from error
        if form != FORMAT:
            raise UsageError(f"{self.folder} has format {form}, not {FORMAT}; remove it and fill it again")
        if key != self.key:
            raise UsageError(
                f"the frames in {self.folder} were made by the encoder {key}, but {self.key} is asked for; "
                "name another folder (data.frames_cache) or remove this one"
            )
        return size

    def __len__(self) -> int:
        return len(self.index)

    def __contains__(self, utterance: Utterance) -> bool:
        return self._span(utterance) is not None

    def get(self, utterance: Utterance) -> Tensor:
        """(frame, feature) float32."""
        span = self._span(utterance)
        if span is None:
            raise ImputerError(
                f"{utterance.id}: no frames in {self.folder} for {_slice_name(utterance)}; fill the cache first"
            )
        first, count, checksum = span
        frames = self._frames[first : first + count]
        if zlib.crc32(frames.data) != checksum:
            raise ImputerError(
                f"{utterance.id}: its frames in {self.folder} are damaged; remove that folder and fill it again"
            )
        return torch.from_numpy(frames.astype(np.float32))

    @property
    def extract(self) -> "CachedExtract":
        """What a data set calls for an utterance's frames; can be sent to worker processes."""
        return CachedExtract(self.folder, self.key)

    def fill(self, manifest: Iterable[Utterance], workers: int = 1, *, strict: bool = False) -> Filled:
        """Compute and keep what is missing; what cannot be read is dropped and counted, or raised if ``strict``.

        Where nothing is missing nothing is written, so that trainings on full caches never wait for each other.
        """
        filled = Filled()
        missing = list(self._missing(manifest, filled, strict))
        if not missing and not self.files.recent:
            return filled
        if self.encoder is None:
            raise UsageError(f"filling {self.folder} needs the encoder {self.key} itself, not only its key")
        with self._writing() as append, progress.bar("frames", len(missing), unit="utterances") as advance:
            for utterance, key, frames in _encode(iter(missing), self.encoder, workers):
                if isinstance(frames, str):
                    _drop(filled, utterance, frames, strict)
                elif key in self.index:  # twice in this manifest, or written by another process meanwhile
                    filled.present += 1
                else:
                    append(key, frames)
                    filled.added += 1
                    filled.seconds += utterance.duration
                advance(1, f"{filled.seconds / 3600:.2f} h encoded, {len(filled.dropped)} dropped")
        return filled

    def _missing(
        self, manifest: Iterable[Utterance], filled: Filled, strict: bool
    ) -> Iterator[tuple[Utterance, bytes]]:
        for utterance in progress.track(manifest, "looking for frames"):
            try:
                key = _recording(self._content(utterance.audio_filepath), utterance)
            except ImputerError as error:
                _drop(filled, utterance, str(error), strict)
                continue
            if self._span_of(key) is not None:
                filled.present += 1
            else:
                yield utterance, key

    def _span(self, utterance: Utterance) -> tuple[int, int, int] | None:
        return self._span_of(_recording(self._content(utterance.audio_filepath), utterance))

    def _span_of(self, key: bytes) -> tuple[int, int, int] | None:
        """First frame, number and checksum; nothing if the index tells of frames that are not there."""
        value = self.index.get(key)
        if value is None:
            return None
        first, count, checksum = SPAN.unpack(value)
        if first + count > len(self._frames):
            self._map()
        return (first, count, checksum) if first + count <= len(self._frames) else None

    def _content(self, path: str | Path) -> bytes:
        """The digest of a file's bytes, remembered for as long as path, size and time of change stay."""
        path = os.path.abspath(path)
        try:
            status = os.stat(path)
            key = _digest(f"{path}\0{status.st_size}\0{status.st_mtime_ns}".encode())
            content = self.files.get(key)
            if content is None:
                with open(path, "rb") as file:
                    content = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).digest()
                self.files.add(key, content)
        except OSError as error:
            raise ImputerError(f"cannot read {path}: {error.strerror}") from error
        return content

    def _map(self) -> None:
        path = self.folder / "frames.f16"
        rows = path.stat().st_size // (2 * self.feature_size) if path.exists() else 0
        if rows:
            self._frames = np.memmap(path, np.float16, "r", shape=(rows, self.feature_size))

    @contextmanager
    def _writing(self) -> Iterator[Any]:
        """Hold the lock; yield ``append(key, frames)``."""
        with _locked(self.folder / "lock"), open(self.folder / "frames.f16", "ab") as data:
            width = 2 * self.feature_size
            self.index.refresh()
            end = self.index.cut(lambda value: _end(value) * width <= data.tell())
            data.truncate(max(map(_end, end), default=0) * width)
            data.seek(0, os.SEEK_END)

            def append(key: bytes, frames: np.ndarray) -> None:
                first = data.tell() // width
                block = np.ascontiguousarray(frames, np.float16)
                data.write(block.data)
                data.flush()
                self.index.add(key, SPAN.pack(first, len(block), zlib.crc32(block.data)))

            with self.index.appending(), self.files.appending():
                yield append
                os.fsync(data.fileno())

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("a FramesCache stays in its process; give CachedExtract to others")


class CachedExtract:
    """(utterance, generator) -> (frame, feature): the ``extract`` of a data set whose frames are cached.

    Of ``augmentation`` only SpecAugment's stripes reach frames that were made long ago.
    """

    def __init__(
        self, folder: Path | str, encoder_key: str, augmentation: Augmentation = NO_AUGMENTATION
    ) -> None:
        self.folder, self.encoder_key, self.augmentation = Path(folder), encoder_key, augmentation
        self._cache: FramesCache | None = None

    def __call__(self, utterance: Utterance, generator: torch.Generator) -> Tensor:
        if self._cache is None:
            self._cache = FramesCache(self.folder, self.encoder_key)
        return augment_features(self._cache.get(utterance), self.augmentation, generator)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_cache": None}


def _digest(*parts: bytes) -> bytes:
    return hashlib.blake2b(b"\0".join(parts), digest_size=16).digest()


def _recording(content: bytes, utterance: Utterance) -> bytes:
    """What an utterance's sound is: the file's content and the slice, to the millisecond."""
    return _digest(content, f"{utterance.offset:.3f} {utterance.duration:.3f}".encode())


def _slice_name(utterance: Utterance) -> str:
    end = utterance.offset + utterance.duration
    return f"{utterance.audio_filepath}, {utterance.offset:g} to {end:g} s"


def _end(value: bytes) -> int:
    first, count, _ = SPAN.unpack(value)
    return first + count


def _drop(filled: Filled, utterance: Utterance, reason: str, strict: bool) -> None:
    if strict:
        raise ImputerError(f"{utterance.id}: {reason}")
    filled.dropped.append((utterance.id, reason))


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock file; the system lets go of it however the process ends."""
    with open(path, "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            raise UsageError(
                f"{path.parent} is being filled by another process ({holder}); wait for it, or name another folder"
            ) from None
        file.truncate(0)
        file.write(f"process {os.getpid()}\n")
        file.flush()
        yield


# Encoding, here or in worker processes.

Work = tuple[Utterance, bytes]
_worker_encoder: Encoder


def _encode(
    missing: Iterator[Work], encoder: Encoder, workers: int
) -> Iterator[tuple[Utterance, bytes, np.ndarray | str]]:
    """Frames, or the reason there are none, for everything missing, in order."""
    if workers <= 1:
        for utterance, key in missing:
            yield utterance, key, _frames(utterance, encoder)
        return
    # Processes, not threads, and started afresh: a fork of a process with thread pools can hang.
    from concurrent.futures import ProcessPoolExecutor
    from itertools import islice
    from multiprocessing import get_context

    with ProcessPoolExecutor(workers, get_context("spawn"), _start_worker, (encoder,)) as pool:
        ahead = [(work, pool.submit(_work, work[0])) for work in islice(missing, 4 * workers)]
        while ahead:
            (utterance, key), future = ahead.pop(0)
            yield utterance, key, future.result()
            ahead += [(work, pool.submit(_work, work[0])) for work in islice(missing, 1)]


def _start_worker(encoder: Encoder) -> None:
    global _worker_encoder
    torch.set_num_threads(1)
    _worker_encoder = encoder


def _work(utterance: Utterance) -> np.ndarray | str:
    return _frames(utterance, _worker_encoder)


def _frames(utterance: Utterance, encoder: Encoder) -> np.ndarray | str:
    """(frame, feature) float16, or why there are none."""
    try:
        samples = audio.read(
            utterance.audio_filepath,
            sample_rate=encoder.sample_rate,
            offset=utterance.offset,
            duration=utterance.duration,
        )
        frames = encoder.extract(torch.from_numpy(samples)).numpy()
    except ImputerError as error:
        return str(error)
    if not np.isfinite(frames).all():
        return f"the encoder gives numbers that are not finite for {_slice_name(utterance)}"
    return np.clip(frames, -LARGEST, LARGEST).astype(np.float16)


# Append-only tables of 16 bytes -> 16 bytes, read whole, looked up by bisection.

RECORD = np.dtype([("high", ">u8"), ("low", ">u8"), ("value", "V16")])


class _Table:
    """What the file holds, sorted, and what was added since; a lookup that fails looks for new records once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.recent: dict[bytes, bytes] = {}
        self.size = 0
        self.file: BinaryIO | None = None
        self.refresh()

    def refresh(self) -> None:
        """Read the file again; a torn record at its end does not count."""
        whole = self.path.stat().st_size // RECORD.itemsize if self.path.exists() else 0
        records = np.fromfile(self.path, RECORD, whole) if whole else np.empty(0, RECORD)
        self.size = whole
        # Stable: of two records for one thing the first written stands.
        order = np.argsort(records["high"].astype(np.uint64), kind="stable")
        self.records = records[order]
        self.high = self.records["high"].astype(np.uint64)

    def __len__(self) -> int:
        return len(self.records) + len(self.recent)

    def __contains__(self, key: bytes) -> bool:
        return self.get(key) is not None

    def get(self, key: bytes) -> bytes | None:
        if key in self.recent:
            return self.recent[key]
        value = self._find(key)
        if value is None and self.file is None and self._grown():
            self.refresh()
            value = self._find(key)
        return value

    def _grown(self) -> bool:
        return self.path.exists() and self.path.stat().st_size // RECORD.itemsize > self.size

    def _find(self, key: bytes) -> bytes | None:
        high, low = struct.unpack(">QQ", key)
        at = int(np.searchsorted(self.high, np.uint64(high)))
        while at < len(self.high) and int(self.high[at]) == high:
            if int(self.records["low"][at]) == low:
                return self.records["value"][at].tobytes()
            at += 1
        return None

    def add(self, key: bytes, value: bytes) -> None:
        """Remember; while ``appending`` also on disk."""
        self.recent[key] = value
        if self.file is not None:
            self.file.write(key + value)
            self.file.flush()

    def cut(self, good: Any) -> list[bytes]:
        """Forget, also on disk, everything from the first record in the file that is not good; the rest's values."""
        whole = np.fromfile(self.path, RECORD) if self.path.exists() else np.empty(0, RECORD)
        values = [value.tobytes() for value in whole["value"]]
        keep = next((i for i, value in enumerate(values) if not good(value)), len(values))
        if self.path.exists() and self.path.stat().st_size != keep * RECORD.itemsize:
            os.truncate(self.path, keep * RECORD.itemsize)
            self.refresh()
        return values[:keep]

    @contextmanager
    def appending(self) -> Iterator[None]:
        """Keep the file open for ``add``; a torn record at its end goes first."""
        self.refresh()
        with open(self.path, "ab") as self.file:
            self.file.truncate(self.size * RECORD.itemsize)
            self.file.seek(0, os.SEEK_END)
            for item in self.recent.items():
                self.file.write(b"".join(item))
            try:
                yield
            finally:
                self.file.flush()
                self.file = None
                self.recent = {}
                self.refresh()


def frames_folder(named: str, encoder_key: str) -> Path:
    """The folder that is named, or the encoder's own in the user's cache."""
    caches = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache"))
    return Path(named or caches / "imputer" / "frames" / encoder_key).expanduser()
