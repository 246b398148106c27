"""Reading audio: any container, any rate, any number of channels, whole files or slices, as mono float32.

soundfile decodes WAV, FLAC, Ogg, MP3, AIFF and the rest of libsndfile's formats; desphere decodes
shorten-compressed SPHERE; av, when installed, what is left (m4a, webm, video). A slice is sought, not decoded up
to; the files last read from stay open, so that slices of one recording do not open it again and again.
"""

import io
import os
import re
import shutil
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np
import soundfile

from imputer.errors import ImputerError

SAMPLE_RATE = 16000
OPEN_FILES = 8

# A slice that ends this much after its file does is taken as far as it goes: times in corpora are rounded.
SECONDS_OF_GRACE = 0.1

# Size fields with these values stand for "not known when the header was written" and are no sign of damage.
UNKNOWN_SIZE = 0x7FFFF000

# libsndfile's code for a file of a known kind with something wrong inside.
MALFORMED = 3

# More samples than anyone has recorded: FLAC that was written to a pipe has no length, and libsndfile says this.
MOST_FRAMES = 1 << 48

PREROLL = {"MP3": 10 * 1152}
VORBIS_BLOCK = 8192

Source = str | Path | BinaryIO


@dataclass(frozen=True, slots=True)
class AudioInfo:
    seconds: float
    sample_rate: int
    channels: int


class _Opened(Protocol):
    """An open recording."""

    frames: int
    samplerate: int
    channels: int
    kind: str  # libsndfile's names of container ...
    subtype: str  # ... and encoding
    repeatable: bool  # whether a slice is the same to the last bit whatever was read before

    def slice(self, start: int, count: int) -> np.ndarray: ...
    def close(self) -> None: ...


def read(
    source: Source,
    *,
    sample_rate: int = SAMPLE_RATE,
    offset: float = 0.0,
    duration: float | None = None,
) -> np.ndarray:
    """(samples,) float32 at ``sample_rate``, channels averaged: all, or ``duration`` seconds from ``offset``."""
    name = _name(source)
    with _opened(source, keep=offset > 0 or duration is not None) as opened:
        samples = _slice(opened, name, offset, duration)  # (sample, channel)
        return _finished(samples, opened.samplerate, sample_rate, name)


def info(source: Source, *, check: bool = False) -> AudioInfo:
    """Length, rate and channels from the header; ``check`` also reads what may be cut off or not a number."""
    name = _name(source)
    with _opened(source, keep=False) as opened:
        if opened.frames < 1:
            raise ImputerError(f"{name}: the audio is empty (0 samples)")
        if check:
            # Only floating point formats can hold a NaN, and only these two kinds tell of a missing end by
            # failing to decode it; the others were asked when the file was opened.
            floats, by_end = opened.subtype in ("FLOAT", "DOUBLE"), opened.kind in ("FLAC", "MP3")
            start = 0 if floats else max(0, opened.frames - (opened.samplerate // 10 if by_end else 1))
            if floats or by_end:
                _finite(_slice_frames(opened, name, start, opened.frames - start), name)
        return AudioInfo(opened.frames / opened.samplerate, opened.samplerate, opened.channels)


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
        raise ImputerError(f"cannot write {path}: {_plain(error)}") from error
    finally:
        temporary.unlink(missing_ok=True)


def _name(source: Source) -> str:
    if isinstance(source, str | Path):
        return str(source)
    return str(getattr(source, "name", "the audio stream"))


def _slice(opened: _Opened, name: str, offset: float, duration: float | None) -> np.ndarray:
    if offset < 0 or (duration is not None and duration <= 0):
        raise ImputerError(f"{name}: a slice needs offset >= 0 and duration > 0, got {offset} and {duration}")
    rate, frames = opened.samplerate, opened.frames
    if frames < 1:
        raise ImputerError(f"{name}: the audio is empty (0 samples)")
    start = round(offset * rate)
    end = frames if duration is None else round((offset + duration) * rate)
    if start >= frames or end > frames + SECONDS_OF_GRACE * rate:
        raise ImputerError(
            f"{name}: asked for {start / rate:.3f} to {end / rate:.3f} s, "
            f"but the file ends at {frames / rate:.3f} s"
        )
    return _slice_frames(opened, name, start, max(1, min(end, frames) - start))


def _slice_frames(opened: _Opened, name: str, start: int, count: int) -> np.ndarray:
    try:
        samples = opened.slice(start, count)
    except (soundfile.SoundFileError, RuntimeError, ValueError) as error:
        raise ImputerError(f"{name}: the audio is damaged or cut off ({_plain(error)})") from error
    if len(samples) < count:
        raise ImputerError(
            f"{name}: the audio is cut off: {count} samples from sample {start} on should be there, "
            f"{len(samples)} are"
        )
    return samples


def _finite(samples: np.ndarray, name: str) -> None:
    # The sum is finite exactly when all is, but for overflow: one cheap pass in the usual case.
    if not np.isfinite(samples.sum(dtype=np.float64)) and not np.isfinite(samples).all():
        at = int(np.argwhere(~np.isfinite(samples))[0][0])
        raise ImputerError(f"{name}: sample {at} is not a finite number")


def _finished(samples: np.ndarray, rate: int, wanted: int, name: str) -> np.ndarray:
    """(sample, channel) -> (sample,) at the wanted rate."""
    _finite(samples, name)
    mono = samples[:, 0] if samples.shape[1] == 1 else samples.mean(1)
    if rate != wanted:
        import soxr

        mono = soxr.resample(mono, rate, wanted)
        if not len(mono):
            raise ImputerError(f"{name}: too short to resample from {rate} to {wanted} Hz")
    return np.ascontiguousarray(mono, dtype=np.float32)


# Opening, and the files kept open.


class _Kept(threading.local):
    """Each thread's open files, by path and identity on disk; the oldest is closed first."""

    def __init__(self) -> None:
        self.files: OrderedDict[tuple, _Opened] = OrderedDict()


_kept = _Kept()
# A forked worker must not share file positions with its parent.
os.register_at_fork(after_in_child=lambda: _kept.files.clear())


@contextmanager
def _opened(source: Source, *, keep: bool) -> Iterator[_Opened]:
    """The recording, open; with ``keep`` a file stays open for the next slice."""
    if not isinstance(source, str | Path):
        with closing(_open_stream(source, _name(source))) as opened:
            yield opened
        return
    name = str(source)
    try:
        status = os.stat(name)
        key = (name, status.st_ino, status.st_size, status.st_mtime_ns)
        kept = _kept.files.pop(key, None) if keep else None
        if kept is None:
            with open(name, "rb") as stream:
                kept = _open_stream(stream, name, path=name)
    except FileNotFoundError:
        raise ImputerError(f"{name}: no such file") from None
    except IsADirectoryError:
        raise ImputerError(f"{name}: is a folder, not an audio file") from None
    except OSError as error:
        raise ImputerError(f"{name}: cannot be read: {error.strerror or error}") from error
    # Taken out while in use: after an error inside a damaged file its position is anyone's guess.
    try:
        yield kept
    except BaseException:
        kept.close()
        raise
    if not keep or not kept.repeatable:
        kept.close()
        return
    _kept.files[key] = kept
    if len(_kept.files) > OPEN_FILES:
        _kept.files.popitem(last=False)[1].close()


def _open_stream(stream: BinaryIO, name: str, path: str | None = None) -> _Opened:
    """An open recording; ``path`` is given for real files, which libsndfile reads faster by itself."""
    start = stream.read(16)
    stream.seek(0)
    if not start:
        raise ImputerError(f"{name}: the file is empty (0 bytes)")
    if start.startswith(b"NIST_1A"):
        return _open_sphere(stream, name, path)
    if path is None and (start.startswith(b"ID3") or (start[0] == 0xFF and start[1] & 0xE0 == 0xE0)):
        return _open_mpeg_stream(stream, name)
    try:
        opened = soundfile.SoundFile(path or stream)
    except soundfile.SoundFileError as error:
        if getattr(error, "code", 0) == MALFORMED:
            raise ImputerError(f"{name}: not readable as audio ({_plain(error)})") from error
        return _open_media(stream, name, error)
    if opened.frames > MOST_FRAMES:
        opened.close()
        return _open_media(stream, name, ValueError("its header does not say how long it is"))
    try:
        _whole(opened, stream, name)
    except ImputerError:
        opened.close()
        raise
    if opened.subtype == "VORBIS":
        return _Vorbis(opened, path) if path is not None else _Backed(opened, preroll=opened.frames)
    return _Backed(opened, PREROLL.get(opened.format, 0))


def _open_mpeg_stream(stream: BinaryIO, name: str) -> "_Opened":
    """libsndfile knows MP3 by file only, so a stream goes through one."""
    with tempfile.NamedTemporaryFile(suffix=".mp3") as file:
        shutil.copyfileobj(stream, file)
        file.flush()
        with open(file.name, "rb") as copy:
            return _open_stream(copy, name, path=file.name)


def _plain(error: Exception) -> str:
    """libsndfile's words without the path, which the message names already."""
    return str(getattr(error, "error_string", error)).strip().rstrip(".")


def _whole(opened: object, stream: BinaryIO, name: str) -> None:
    """Refuse a file that ends before its own header says; libsndfile reads such files without a word."""
    kind: str = opened.format  # type: ignore[attr-defined]
    if kind == "OGG":
        missing = not _ogg_ends(stream)
        detail = "its last page is missing"
    else:
        log: str = opened.extra_info  # type: ignore[attr-defined]
        # The outermost chunk is often a little off in good files; what counts is the one with the samples.
        log = re.sub(r"(RIFF|FORM) : .*", "", log)
        sizes = re.findall(r"(\d+) \(?should be (\d+)|truncated\. +(\d+) <--> (\d+)", log)
        short = [
            (int(said or full), int(found or there))
            for said, found, there, full in sizes
            if int(said or full) < UNKNOWN_SIZE and int(said or full) > int(found or there) + 16
        ]
        missing = bool(short)
        detail = f"its header tells of {short[0][0]} bytes, {short[0][1]} are there" if short else ""
    if missing:
        raise ImputerError(f"{name}: the audio is cut off: {detail}")


def _vorbis_pages(path: str) -> tuple[np.ndarray, np.ndarray]:
    """Where the pages of an Ogg file start (and where the last ends), and the sample each one ends at."""
    starts: list[int] = [0]
    ends: list[int] = []
    streams: set[bytes] = set()
    with open(path, "rb") as stream:
        while len(head := stream.read(27)) == 27 and head.startswith(b"OggS"):
            table = stream.read(head[26])
            stream.seek(sum(table), os.SEEK_CUR)
            starts.append(starts[-1] + 27 + len(table) + sum(table))
            end = int.from_bytes(head[6:14], "little", signed=True)
            # A page on which no packet ends says -1: it belongs to the position before it.
            ends.append(end if end >= 0 else (ends[-1] if ends else 0))
            streams.add(head[14:18])
    if len(streams) > 1:  # recordings in a row, each counting from zero: read from the start
        ends = []
    return np.array(starts), np.array(ends)


def _ogg_ends(stream: BinaryIO) -> bool:
    """Whether the last Ogg page is whole and marked as the last."""
    size = stream.seek(0, os.SEEK_END)
    stream.seek(max(0, size - (1 << 16)))
    tail = stream.read()
    page = tail.rfind(b"OggS")
    if page < 0 or len(tail) < page + 27:
        return False
    segments = tail[page + 27 : page + 27 + tail[page + 26]]
    complete = page + 27 + tail[page + 26] + sum(segments) <= len(tail)
    return bool(tail[page + 5] & 4) and complete


class _Backed:
    """A file that libsndfile seeks in; MP3 needs a run-up, as its frames borrow bits from the ones before."""

    def __init__(self, file: "soundfile.SoundFile", preroll: int = 0) -> None:
        self.file, self.preroll = file, preroll
        self.frames, self.samplerate, self.channels = file.frames, file.samplerate, file.channels
        self.kind, self.subtype = file.format, file.subtype
        self.repeatable = preroll == 0

    def slice(self, start: int, count: int) -> np.ndarray:
        earlier = max(0, start - self.preroll)
        if self.file.tell() != earlier:
            self.file.seek(earlier)
        samples = self.file.read(count + start - earlier, dtype="float32", always_2d=True)
        return samples[start - earlier :]

    def close(self) -> None:
        self.file.close()


class _Vorbis(_Backed):
    """Ogg Vorbis, where libsndfile's own seeking misses by up to 50 ms.

    The pages around a slice are decoded behind a copy of the headers, and placed by the position that their last
    page gives for its end: exact, and no more is decoded than needed.
    """

    def __init__(self, file: "soundfile.SoundFile", path: str) -> None:
        super().__init__(file)
        self.path = path
        self.pages: tuple[np.ndarray, np.ndarray] | None = None

    def slice(self, start: int, count: int) -> np.ndarray:
        if start == 0 == self.file.tell():
            return super().slice(start, count)
        if self.pages is None:
            self.pages = _vorbis_pages(self.path)
        starts, ends = self.pages  # (page,) byte offset of each; (page,) sample at its end
        last = int(np.searchsorted(ends, start + count))
        # Whole blocks before the slice, since the first decoded one lacks what it overlaps with.
        first = int(np.searchsorted(ends, max(0, start - VORBIS_BLOCK), side="right")) - 1
        headers = int(np.flatnonzero(ends > 0)[0]) if (ends > 0).any() else len(ends)
        if first < headers or last >= len(ends):
            self.file.seek(0)
            return super().slice(0, start + count)[start:]
        with open(self.path, "rb") as stream:
            content = stream.read(int(starts[headers]))
            stream.seek(int(starts[first]))
            content += stream.read(int(starts[last + 1] - starts[first]))
        samples, _ = soundfile.read(io.BytesIO(content), dtype="float32", always_2d=True)
        begin = start - (int(ends[last]) - len(samples))
        return samples[begin : begin + count]


class _Decoded:
    """A recording that had to be decoded whole."""

    kind = subtype = ""
    repeatable = True

    def __init__(self, samples: np.ndarray, samplerate: int) -> None:
        self.samples, self.samplerate = samples, samplerate  # (sample, channel) float32
        self.frames, self.channels = samples.shape

    def slice(self, start: int, count: int) -> np.ndarray:
        return self.samples[start : start + count]

    def close(self) -> None:
        pass


def _open_sphere(stream: BinaryIO, name: str, path: str | None) -> _Opened:
    """NIST SPHERE: plain samples by libsndfile, which can seek in them; compressed ones by desphere."""
    import desphere

    try:
        content = stream.read()
        header = desphere.SphereHeader.parse(content)
        stream.seek(0)
        if "," not in header.sample_coding:
            if len(content) < header.header_size + header.expected_data_bytes:
                raise ImputerError(
                    f"{name}: the audio is cut off: its header tells of {header.expected_data_bytes} bytes, "
                    f"{len(content) - header.header_size} are there"
                )
            try:
                return _Backed(soundfile.SoundFile(path or stream))
            except soundfile.SoundFileError:
                stream.seek(0)
        samples, rate = decode_sphere(content)
    except desphere.DesphereError as error:
        raise ImputerError(f"{name}: not readable as SPHERE audio ({error})") from error
    if len(samples) < header.sample_count:
        raise ImputerError(
            f"{name}: the audio is cut off: its header tells of {header.sample_count} samples, "
            f"{len(samples)} are there"
        )
    return _Decoded(samples[: header.sample_count], rate)


def decode_sphere(content: bytes) -> tuple[np.ndarray, int]:
    """(sample, channel) float32 and the rate of a SPHERE file, compressed by shorten or not."""
    import desphere

    wav = desphere.transcode_bytes(content)
    samples, rate = soundfile.read(io.BytesIO(wav), dtype="float32", always_2d=True)
    return samples, rate


def _open_media(stream: BinaryIO, name: str, error: Exception) -> _Opened:
    """What libsndfile does not know, by av (ffmpeg's libraries), an extra."""
    try:
        import av
    except ImportError:
        raise ImputerError(
            f"{name}: not readable as audio ({_plain(error)}); "
            "if it is m4a, webm or video, install the extra imputer-asr[media]"
        ) from error
    stream.seek(0)
    try:
        samples, rate = _decode_media(av.open(stream))
    except (av.FFmpegError, IndexError, ValueError) as media_error:
        raise ImputerError(f"{name}: not readable as audio ({_plain(error)})") from media_error
    return _Decoded(samples, rate)


def _decode_media(container: object) -> tuple[np.ndarray, int]:
    """(sample, channel) float32 of the first audio stream."""
    import av

    with container:  # type: ignore[attr-defined]
        audio = container.streams.audio[0]  # type: ignore[attr-defined]
        resampler: av.AudioResampler | None = None
        pieces: list[np.ndarray] = []
        for frame in container.decode(audio):  # type: ignore[attr-defined]
            resampler = resampler or av.AudioResampler(format="fltp", layout=frame.layout, rate=frame.rate)
            pieces += [part.to_ndarray() for part in resampler.resample(frame)]
        rate = int(audio.rate)
    if not pieces:
        raise ValueError("no audio in it")
    return np.ascontiguousarray(np.concatenate(pieces, 1).T, dtype=np.float32), rate
