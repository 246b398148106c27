"""Opening audio by its content: libsndfile for what it reads, desphere for packed SPHERE, av for the rest.

Everything comes as a real file, so that libsndfile reads it by its descriptor: nothing is opened twice, and file
names do not decide how a file is read.
"""

import contextlib
import io
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np
import soundfile

from imputer.audio import completeness
from imputer.audio.endings import HEADERLESS
from imputer.audio.limits import AudioError, Limits
from imputer.audio.media import Media, demuxer

# libsndfile reports this length for FLAC that has none, because it was written to a pipe.
MOST_FRAMES = 1 << 48

# libsndfile's code for a file of a known kind with something wrong inside.
MALFORMED = 3

# Its messages that mean its own state, not the file: found in files that are open, with headers that are damaged.
MISLEADING = ("File does not exist", "Internal")

HEADERLESS_HINT = (
    "; samples without a header do not say how to read them: write them as WAV with the program that made them, "
    "or with `ffmpeg -f s16le -ar 16000 -ac 1 -i a.raw a.wav` if they are 16-bit, 16 kHz and mono"
)

# Decoding that starts in the middle of a file of these kinds needs a run-up, in samples.
PREROLL = {"MP3": 10 * 1152}
VORBIS_BLOCK = 8192

# libsndfile shares descriptors with Python on these systems; elsewhere it calls back into Python for every read.
BY_DESCRIPTOR = os.name == "posix"


class Opened(Protocol):
    """An open recording."""

    frames: int
    samplerate: int
    channels: int
    kind: str  # libsndfile's names of container ...
    subtype: str  # ... and encoding
    repeatable: bool  # whether a slice is bit-identical, independent of earlier reads

    def slice(self, start: int, count: int) -> np.ndarray:
        """(sample, channel) float32 from sample ``start`` on; fewer than ``count`` where the audio ends."""

    def close(self) -> None:
        """Release the decoder; the file stays open."""


def open_container(stream: BinaryIO, name: str, limits: Limits) -> Opened:
    """An open recording; refused if it is empty, damaged, cut off, of no known kind, or over the limits."""
    start = stream.read(16)
    if not start:
        raise AudioError(f"{name}: the file is empty (0 bytes)", "empty")
    if start.startswith(b"NIST_1A"):
        opened = _open_sphere(stream, name, limits)
    else:
        opened = _open_sound_file(stream, name, start, limits)
    try:
        if opened.frames < 1:
            raise AudioError(f"{name}: the audio is empty (0 samples)", "empty")
        limits.admit(name, opened.samplerate, opened.channels, opened.frames / opened.samplerate)
    except AudioError:
        opened.close()
        raise
    return opened


def plain(error: Exception) -> str:
    """libsndfile's message without the path, which ours names already."""
    said = str(getattr(error, "error_string", error)).strip().rstrip(".")
    return "its header is damaged" if said.startswith(MISLEADING) else said


def _open_sound_file(stream: BinaryIO, name: str, start: bytes, limits: Limits) -> Opened:
    try:
        opened = _sound_file(stream)
        position = stream.tell()  # libsndfile reads on from there
    except soundfile.SoundFileError as error:
        known = demuxer(start)
        if known in ("", "flac") or getattr(error, "code", 0) == MALFORMED:
            reason = "damaged" if getattr(error, "code", 0) == MALFORMED else "unsupported"
            hint = HEADERLESS_HINT if Path(name).suffix.lower() in HEADERLESS else ""
            raise AudioError(f"{name}: not readable as audio ({plain(error)}){hint}", reason) from error  # type: ignore[arg-type]
        return Media(stream, name, known, limits)
    if opened.frames > MOST_FRAMES or (opened.format == "MP3" and not completeness.mpeg_promise(stream)[0]):
        opened.close()  # libsndfile has no length, or guesses it
        return Media(stream, name, "mp3" if opened.format == "MP3" else "flac", limits)
    try:
        _check_whole(opened, stream, name)
    except AudioError:
        opened.close()
        raise
    stream.seek(position)
    if opened.subtype == "VORBIS":
        return _Vorbis(opened, stream) if BY_DESCRIPTOR else _SoundFile(opened, preroll=opened.frames)
    return _SoundFile(opened, PREROLL.get(opened.format, 0))


def _sound_file(stream: BinaryIO) -> soundfile.SoundFile:
    stream.seek(0)
    return soundfile.SoundFile(stream.fileno() if BY_DESCRIPTOR else stream, closefd=False)


def _check_whole(opened: soundfile.SoundFile, stream: BinaryIO, name: str) -> None:
    """Refuse a file that ends before its own header says."""
    detail = ""
    if opened.format == "OGG":
        detail = "" if completeness.ogg_is_whole(stream) else "its last page is missing"
    elif opened.format == "MP3":
        promised, there = completeness.mpeg_promise(stream)
        detail = f"its header says {promised} bytes, the file has {there}" if promised > there else ""
    else:
        detail = completeness.missing_by_log(opened.extra_info)
    if detail:
        raise AudioError(f"{name}: the audio is cut off: {detail}")


_silence = threading.Lock()
_silenced: list[int] = []  # the descriptor that was standard error, once for each reader inside


@contextlib.contextmanager
def _without_complaints() -> Iterator[None]:
    """Libmpg123 writes to standard error about the bits that it lacks right after a seek; the run-up is for those.

    Standard error belongs to the process, so the last of several threads gives it back.
    """
    if sys.stderr is None:  # it is closed: descriptor 2 is something else
        yield
        return
    with _silence:
        try:
            _silenced.append(_silenced[0] if _silenced else os.dup(2))
        except OSError:  # it is closed
            _silenced.append(-1)
        if len(_silenced) == 1 and _silenced[0] >= 0:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 2)
            os.close(nowhere)
    try:
        yield
    finally:
        with _silence:
            before = _silenced.pop()
            if not _silenced and before >= 0:
                os.dup2(before, 2)
                os.close(before)


class _SoundFile:
    """A file that libsndfile seeks in; MP3 needs a run-up, as its frames borrow bits from the ones before."""

    def __init__(self, file: soundfile.SoundFile, preroll: int = 0) -> None:
        self.file, self.preroll = file, preroll
        self.frames, self.samplerate, self.channels = file.frames, file.samplerate, file.channels
        self.kind, self.subtype = file.format, file.subtype
        self.repeatable = preroll == 0
        self.position = 0

    def slice(self, start: int, count: int) -> np.ndarray:
        # Always: soundfile seeks around every read, which resets the decoder.
        before = min(start, self.preroll)
        with _without_complaints() if before else contextlib.nullcontext():
            if self.position != start - before:
                self.file.seek(start - before)
            samples = self.file.read(before + count, dtype="float32", always_2d=True)[before:]
        self.position = start + len(samples)
        return samples

    def close(self) -> None:
        self.file.close()


class _Vorbis(_SoundFile):
    """Ogg Vorbis, where libsndfile's own seeking misses by up to 50 ms.

    The pages around a slice are decoded behind a copy of the headers, and placed by the position that their last
    page gives for its end: exact, and no more is decoded than needed.
    """

    def __init__(self, file: soundfile.SoundFile, stream: BinaryIO) -> None:
        super().__init__(file)
        self.descriptor = stream.fileno()
        self.pages: tuple[np.ndarray, np.ndarray] | None = None

    def slice(self, start: int, count: int) -> np.ndarray:
        if start == self.position:
            return super().slice(start, count)
        if self.pages is None:
            self.pages = _vorbis_pages(self.descriptor)
        starts, ends = self.pages  # (page,) byte offset of each; (page,) sample at its end
        last = int(np.searchsorted(ends, start + count))
        # Whole blocks before the slice, since the first decoded one lacks what it overlaps with.
        first = int(np.searchsorted(ends, max(0, start - VORBIS_BLOCK), side="right")) - 1
        headers = int(np.flatnonzero(ends > 0)[0]) if (ends > 0).any() else len(ends)
        if first < headers or last >= len(ends):
            return super().slice(0, start + count)[start:]
        content = os.pread(self.descriptor, int(starts[headers]), 0)
        content += os.pread(self.descriptor, int(starts[last + 1] - starts[first]), int(starts[first]))
        samples, _ = soundfile.read(io.BytesIO(content), dtype="float32", always_2d=True)
        begin = start - (int(ends[last]) - len(samples))
        return samples[begin : begin + count]


def _vorbis_pages(descriptor: int) -> tuple[np.ndarray, np.ndarray]:
    """Where the pages of an Ogg file start (and where the last ends), and the sample each one ends at."""
    starts: list[int] = [0]
    ends: list[int] = []
    streams: set[bytes] = set()
    while (head := os.pread(descriptor, 27 + 255, starts[-1])).startswith(b"OggS") and len(head) >= 27:
        table = head[27 : 27 + head[26]]
        starts.append(starts[-1] + 27 + len(table) + sum(table))
        end = int.from_bytes(head[6:14], "little", signed=True)
        # A page on which no packet ends says -1: it belongs to the position before it.
        ends.append(end if end >= 0 else (ends[-1] if ends else 0))
        streams.add(head[14:18])
    if len(streams) > 1:  # recordings in a row, each counting from zero: read from the start
        ends = []
    return np.array(starts), np.array(ends)


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


def _open_sphere(stream: BinaryIO, name: str, limits: Limits) -> Opened:
    """NIST SPHERE: plain samples by libsndfile, which can seek in them; packed ones by desphere."""
    import desphere

    stream.seek(0)
    try:
        content = stream.read()
        header = desphere.SphereHeader.parse(content)
        if "," not in header.sample_coding:
            if len(content) < header.header_size + header.expected_data_bytes:
                raise AudioError(
                    f"{name}: the audio is cut off: its header says {header.expected_data_bytes} bytes, the "
                    f"file has {len(content) - header.header_size}"
                )
            try:
                return _SoundFile(_sound_file(stream))
            except soundfile.SoundFileError:
                pass
        elif limits.samples < float("inf"):  # its unpacked size is not known beforehand
            raise AudioError(f"{name}: compressed SPHERE is not supported; send WAV or FLAC", "unsupported")
        samples, rate = decode_sphere(content)
    except desphere.DesphereError as error:
        raise AudioError(f"{name}: not readable as SPHERE audio ({error})") from error
    if len(samples) < header.sample_count:
        raise AudioError(
            f"{name}: the audio is cut off: its header says {header.sample_count} samples, the file has {len(samples)}"
        )
    return _Decoded(samples[: header.sample_count], rate)


def decode_sphere(content: bytes) -> tuple[np.ndarray, int]:
    """(sample, channel) float32 and the rate of a SPHERE file, compressed by shorten or not."""
    import desphere

    wav = desphere.transcode_bytes(content)
    samples, rate = soundfile.read(io.BytesIO(wav), dtype="float32", always_2d=True)
    return samples, rate
