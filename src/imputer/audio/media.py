"""Containers that libsndfile does not read (m4a, mp4, mov, webm, aac, ...), decoded forward by av.

av holds ffmpeg's libraries. The demuxer is named, not guessed: a guess could take a file for a playlist and open
what that lists. Memory is that of the slice being read, whatever the length of the file.
"""

from collections import deque
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np

from imputer.audio.completeness import matroska_is_whole, mpeg_is_whole
from imputer.audio.limits import AudioError, Limits

# (offset, the bytes there) -> the demuxer
SIGNATURES = {
    (0, b"\x1aE\xdf\xa3"): "matroska",
    (4, b"ftyp"): "mov",
    (4, b"moov"): "mov",
    (4, b"mdat"): "mov",
    (4, b"wide"): "mov",
    (0, b"\xff\xf1"): "aac",
    (0, b"\xff\xf9"): "aac",
    (0, b"#!AMR"): "amr",
    (0, b"\x30\x26\xb2\x75\x8e\x66\xcf\x11"): "asf",
    (8, b"AVI "): "avi",
    (0, b"FLV\x01"): "flv",
    (0, b"wvpk"): "wv",
    (0, b"MAC "): "ape",
    (0, b"fLaC"): "flac",  # of unknown length: the others libsndfile reads
    (0, b"ID3"): "mp3",
    (0, b"\xff\xfb"): "mp3",
    (0, b"\xff\xf3"): "mp3",
    (0, b"\xff\xf2"): "mp3",
}

# Formats without an index at hand: whether the last part is complete.
IS_WHOLE = {"matroska": matroska_is_whole, "mp3": mpeg_is_whole}

# Windows overlap: this much decoded audio stays in memory, so that the next window does not start over.
HISTORY_SECONDS = 12.0

# A file is cut off when its index states this many seconds more than the file has.
SECONDS_MISSING = 0.5


def demuxer(start: bytes) -> str:
    """The demuxer for a file that begins with these bytes; empty if there is none."""
    return next((name for (at, magic), name in SIGNATURES.items() if start[at:].startswith(magic)), "")


class Media:
    """The first audio stream of a container. Reading goes forward; going back starts over."""

    kind = subtype = ""
    repeatable = True

    def __init__(self, stream: BinaryIO, name: str, demuxer: str, limits: Limits) -> None:
        self.stream, self.name, self.demuxer, self.limits = stream, name, demuxer, limits
        self.container: Any = None
        seconds = self._measure()
        self._restart()
        first = next(self.parts, None)
        if first is None:
            raise AudioError(f"{name}: the audio is empty (0 samples)", "empty")
        self.channels, self.samplerate = first.shape[1], self.rate
        self.frames = round(seconds * self.samplerate)
        limits.admit(name, self.samplerate, self.channels, seconds)
        self._restart()

    def _open(self) -> Any:
        import av

        self.stream.seek(0)
        try:
            container = av.open(
                self.stream,
                "r",
                format=self.demuxer,
                options={"protocol_whitelist": ""},
                metadata_errors="ignore",
            )
        except (av.FFmpegError, ValueError) as error:
            hint = "; its index is missing, as in a file that is cut off" if self.demuxer == "mov" else ""
            raise AudioError(
                f"{self.name}: not readable as audio ({_plain(error)}){hint}", "damaged"
            ) from error
        if not container.streams.audio:
            container.close()
            raise AudioError(f"{self.name}: the file has no audio", "damaged")
        return container

    def _measure(self) -> float:
        """Seconds of audio, by the durations of packets: nothing is decoded. A file that is cut off is refused."""
        import av

        with self._open() as container:
            audio = container.streams.audio[0]
            promised = float(audio.duration * audio.time_base) if audio.duration else 0.0
            total, end, untold, broken = 0, 0, 0, False
            try:
                for number, packet in enumerate(container.demux(audio)):
                    if number % 1000 == 0:
                        self.limits.tick()
                    if packet.size:
                        untold += not packet.duration
                        total += packet.duration or 0
                        end = max(end, (packet.pts or 0) + (packet.duration or 0))
                        broken = bool(packet.is_corrupt)
            except av.FFmpegError:
                broken = True
            seconds = float((end if untold else total) * audio.time_base)
        if self.demuxer == "mov" and (
            broken or promised - max(seconds, float(end * audio.time_base)) > SECONDS_MISSING
        ):
            raise AudioError(
                f"{self.name}: the audio is cut off: its index says {promised:.1f} s, the file has {seconds:.1f} s",
                "damaged",
            )
        check = IS_WHOLE.get(self.demuxer)
        if check is not None and not check(self.stream):
            self.limits.missing_end(self.name, seconds)
        return seconds

    def _restart(self) -> None:
        self.close()
        self.container = self._open()
        self.parts = self._decoded()
        self.kept: deque[np.ndarray] = deque()  # decoded parts, from sample ``begin`` to ``end``
        self.begin = self.end = 0

    def _decoded(self) -> Iterator[np.ndarray]:
        """(sample, channel) float32, part by part."""
        import av

        resampler: Any = None
        damage: Exception | None = None
        audio = self.container.streams.audio[0]
        try:
            for packet in self.container.demux(audio):
                self.limits.tick()
                if damage is not None and packet.size:
                    raise damage
                try:
                    frames = packet.decode()
                except av.FFmpegError as error:
                    damage = error  # in the last packet it means a missing end
                    continue
                for frame in frames:
                    if resampler is None:
                        self.rate = int(frame.rate)
                        resampler = av.AudioResampler(format="fltp", layout=frame.layout, rate=frame.rate)
                    for part in resampler.resample(frame):
                        yield np.ascontiguousarray(part.to_ndarray().T, dtype=np.float32)
        except (av.FFmpegError, ValueError) as error:
            raise AudioError(f"{self.name}: the audio is damaged ({_plain(error)})", "damaged") from error
        if damage is not None:
            self.limits.missing_end(self.name)

    def slice(self, start: int, count: int) -> np.ndarray:
        """(sample, channel) from sample ``start`` on; fewer than ``count`` where the audio ends."""
        if start < self.begin:
            self._restart()
        history = round(HISTORY_SECONDS * self.samplerate)
        while self.end < start + count and (part := next(self.parts, None)) is not None:
            self.kept.append(part)
            self.end += len(part)
            while self.begin + len(self.kept[0]) <= min(start, self.end - history):
                self.begin += len(self.kept.popleft())
        found, place = [np.zeros((0, self.channels), np.float32)], self.begin
        for part in self.kept:
            found.append(part[max(0, start - place) : max(0, start + count - place)])
            place += len(part)
        return np.concatenate(found)

    def close(self) -> None:
        if self.container is not None:
            self.container.close()
            self.container = None


def _plain(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error).strip()
