"""From an upload to samples, with a limit on what it may unpack to.

The length is checked against the header first and then again while decoding, block by block: a small file that
unpacks to hours is dropped as soon as it passes the limit. Nothing the client sends is ever taken for a path; what
libsndfile cannot read from a stream goes through a temporary file with a random name. Containers that libsndfile
does not know are read by av, when installed, with the demuxer named here: left to guess, it could take an upload
for a playlist and fetch what that lists.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import IO, Any

import numpy as np
import soundfile
import soxr

from imputer import audio
from imputer.errors import ImputerError
from imputer.server.failures import Failure

BLOCK = 1 << 16  # samples of all channels, decoded at a time
RATES = (1_000, 768_000)
CHANNELS = 32
UNKNOWN = 1 << 48  # frames or more: libsndfile's way to say that the header does not tell
MALFORMED = 3  # libsndfile: a known kind of file, with something wrong inside

# (where, what is there) -> the demuxer for it
MEDIA = {
    (0, b"\x1aE\xdf\xa3"): "matroska",
    (4, b"ftyp"): "mov",
    (0, b"\xff\xf1"): "aac",
    (0, b"\xff\xf9"): "aac",
}


class Upload:
    """A file with the client's name for it, which appears in messages and nowhere else."""

    def __init__(self, file: IO[bytes], name: str | None) -> None:
        self.file = file
        self.name = plain_name(name)

    def read(self, size: int = -1) -> bytes:
        return self.file.read(size)

    def seek(self, offset: int, whence: int = 0) -> int:
        self.file.seek(offset, whence)
        return self.file.tell()

    def tell(self) -> int:
        return self.file.tell()


def plain_name(name: str | None) -> str:
    """The last part of a name, short and printable."""
    last = (name or "").replace("\\", "/").rpartition("/")[2]
    return "".join(c for c in last if c.isprintable())[:80] or "the upload"


def decode(upload: Upload, *, sample_rate: int, max_seconds: float) -> np.ndarray:
    """(samples,) float32, mono, at ``sample_rate``; a Failure says what is wrong with anything else."""
    start = upload.read(16)
    upload.seek(0)
    if not start:
        raise Failure(400, f"{upload.name} is empty (0 bytes)", code="empty_file", param="file")
    if start.startswith(b"NIST_1A"):
        _refuse_packed_sphere(upload)
    with _opened(upload, start) as file:
        if file is None:
            samples = _media(upload, _demuxer(upload, start), sample_rate, max_seconds)
        else:
            samples = _blocks(file, upload.name, sample_rate, max_seconds)
    if not len(samples):
        raise Failure(400, f"{upload.name} holds no sound (0 samples)", code="empty_audio", param="file")
    return samples


@contextmanager
def _opened(upload: Upload, start: bytes) -> Iterator[soundfile.SoundFile | None]:
    """The file open in libsndfile, or None if it is of a kind unknown there."""
    mpeg = start.startswith(b"ID3") or (start[0] == 0xFF and start[1:2] >= b"\xe0")
    with tempfile.NamedTemporaryFile(prefix="imputer-") as copy:
        source: Any = upload
        if mpeg:  # libsndfile knows these by file only
            while block := upload.read(1 << 20):
                copy.write(block)
            copy.flush()
            source = copy.name
        try:
            file = soundfile.SoundFile(source)
        except soundfile.SoundFileError as error:
            if getattr(error, "code", 0) == MALFORMED:
                raise _damaged(f"{upload.name} is not readable as audio") from error
            upload.seek(0)
            yield None
            return
        with file:
            if file.frames < UNKNOWN:
                _check_whole(source, upload)
            yield file


def _check_whole(source: Any, upload: Upload) -> None:
    """Cut-off and empty files, which libsndfile reads without a word, are told from their headers.

    Only for files whose length is known: of others, ``audio.info`` decodes all there is to count it.
    """
    position = upload.tell()
    upload.seek(0)
    try:
        audio.info(source)
    except ImputerError as error:
        raise _damaged(str(error).replace(str(source), upload.name)) from error
    upload.seek(position)


def _blocks(file: soundfile.SoundFile, name: str, sample_rate: int, max_seconds: float) -> np.ndarray:
    rate, channels = file.samplerate, file.channels
    if not RATES[0] <= rate <= RATES[1] or channels > CHANNELS:
        raise _damaged(
            f"{name} has {channels} channels at {rate} Hz; the server takes up to {CHANNELS} channels "
            f"at {RATES[0]} to {RATES[1]} Hz"
        )
    if UNKNOWN > file.frames > max_seconds * rate:
        raise too_long(name, max_seconds)
    resampler = None if rate == sample_rate else soxr.ResampleStream(rate, sample_rate, 1, dtype="float32")
    pieces: list[np.ndarray] = []
    read = 0
    while True:
        block = _read(file, max(1, BLOCK // channels), name)  # (sample, channel)
        read += len(block)
        if read > max_seconds * rate:
            raise too_long(name, max_seconds)
        mono = block[:, 0] if channels == 1 else block.mean(1)
        if not np.isfinite(mono).all():
            raise _damaged(f"{name} has samples that are not finite numbers")
        if resampler is not None:
            mono = resampler.resample_chunk(np.ascontiguousarray(mono), last=not len(block))
        pieces.append(mono)
        if not len(block):
            return np.ascontiguousarray(np.concatenate(pieces), dtype=np.float32)


def _read(file: soundfile.SoundFile, count: int, name: str) -> np.ndarray:
    try:
        return file.read(count, dtype="float32", always_2d=True)
    except (soundfile.SoundFileError, RuntimeError) as error:
        raise _damaged(f"{name} is damaged or cut off") from error


def _demuxer(upload: Upload, start: bytes) -> str:
    for (place, magic), demuxer in MEDIA.items():
        if start[place:].startswith(magic):
            return demuxer
    raise Failure(
        415,
        f"{upload.name} is no audio that the server knows: send WAV, FLAC, MP3, Ogg, AIFF, M4A or WebM",
        code="unsupported_format",
        param="file",
    )


def _media(upload: Upload, demuxer: str, sample_rate: int, max_seconds: float) -> np.ndarray:
    """The first audio stream of a container, by av."""
    try:
        import av
    except ImportError:
        raise Failure(
            415,
            f"{upload.name} is of a kind (m4a, webm, aac) for which the server needs the extra imputer-asr[media]; "
            "send WAV, FLAC, MP3 or Ogg",
            code="unsupported_format",
            param="file",
        ) from None
    pieces: list[np.ndarray] = []
    length = 0
    try:
        options = {"protocol_whitelist": ""}
        with av.open(upload, "r", format=demuxer, options=options) as container:
            if not container.streams.audio:
                raise _damaged(f"{upload.name} has no audio in it")
            resampler = av.AudioResampler(format="flt", layout="mono", rate=sample_rate)
            # One frame at a time, and None at the end for what the resampler still holds.
            for frame in chain(container.decode(container.streams.audio[0]), [None]):
                for part in resampler.resample(frame):
                    samples = part.to_ndarray().reshape(-1)
                    length += len(samples)
                    if length > max_seconds * sample_rate:
                        raise too_long(upload.name, max_seconds)
                    pieces.append(samples)
    except (av.FFmpegError, ValueError) as error:
        raise _damaged(f"{upload.name} is not readable as audio") from error
    samples = np.concatenate(pieces).astype(np.float32) if pieces else np.empty(0, np.float32)
    if not np.isfinite(samples).all():
        raise _damaged(f"{upload.name} has samples that are not finite numbers")
    return samples


def _refuse_packed_sphere(upload: Upload) -> None:
    """Shorten unpacks without saying beforehand to how much, so it is not unpacked for strangers."""
    header = upload.read(1024)
    upload.seek(0)
    if b"shorten" in header or b"wavpack" in header or b"shortpack" in header:
        raise Failure(
            415,
            f"{upload.name} is compressed SPHERE, which the server does not take: send WAV or FLAC",
            code="unsupported_format",
            param="file",
        )


def _damaged(message: str) -> Failure:
    return Failure(400, message, code="invalid_audio", param="file")


def too_long(name: str, max_seconds: float) -> Failure:
    return Failure(
        413,
        f"{name} is longer than the {max_seconds:g} s the server takes",
        code="audio_too_long",
        param="file",
    )
