"""Whether an audio file is whole. Decoders read a file that was cut off without an error.

Each function looks at headers and at how the parts of a file follow each other; nothing is decoded.
"""

import os
import re
from typing import BinaryIO

# Size fields with these values mean "not known when the header was written" and do not indicate damage.
UNKNOWN_SIZE = 0x7FFFF000

# Matroska elements whose content is walked through; all others are skipped by their size.
EBML_PARENTS = (0x18538067, 0x1F43B675)  # Segment, Cluster

# MPEG audio, by (version 1?, layer): kbit/s by the header's index, and samples per frame.
MPEG_RATES = {
    (True, 1): (0, 32, 64, 96, 128, 160, 192, 224, 256, 288, 320, 352, 384, 416, 448),
    (True, 2): (0, 32, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384),
    (True, 3): (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    (False, 1): (0, 32, 48, 56, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256),
    (False, 2): (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
    (False, 3): (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
}
MPEG_SAMPLE_RATES = {3: (44100, 48000, 32000), 2: (22050, 24000, 16000), 0: (11025, 12000, 8000)}


def missing_by_log(log: str) -> str:
    """What libsndfile's own log of a file says is missing, or nothing."""
    # The outermost chunk is often a little off in good files; what counts is the one with the samples.
    log = re.sub(r"(RIFF|FORM) : .*", "", log)
    for said, found, there, full in re.findall(
        r"(\d+) \(?should be (\d+)|truncated\. +(\d+) <--> (\d+)", log
    ):
        expected, present = int(said or full), int(found or there)
        if expected < UNKNOWN_SIZE and expected > present + 16:
            return f"its header says {expected} bytes, the file has {present}"
    return ""


def ogg_is_whole(stream: BinaryIO) -> bool:
    """Whether the last Ogg page is complete and marked as the last."""
    size = stream.seek(0, os.SEEK_END)
    stream.seek(max(0, size - (1 << 16)))
    tail = stream.read()
    page = tail.rfind(b"OggS")
    if page < 0 or len(tail) < page + 27:
        return False
    segments = tail[page + 27 : page + 27 + tail[page + 26]]
    complete = page + 27 + tail[page + 26] + sum(segments) <= len(tail)
    return bool(tail[page + 5] & 4) and complete


def mpeg_promise(stream: BinaryIO) -> tuple[int, int]:
    """Bytes of MPEG audio by its Xing header (0 without one), and bytes in the file."""
    stream.seek(0)
    begin = _after_id3(stream)
    size = stream.seek(0, os.SEEK_END)
    stream.seek(begin)
    head = stream.read(4)
    return _xing_bytes(head + stream.read(max(0, mpeg_frame_bytes(head) - 4))), size - begin


def mpeg_is_whole(stream: BinaryIO) -> bool:
    """Whether MPEG audio ends with the end of a frame."""
    stream.seek(0)
    begin = _after_id3(stream)
    stream.seek(begin)
    content = stream.read()  # compressed: some 30 MB an hour
    at = 0
    while length := mpeg_frame_bytes(content[at : at + 4]):
        at += length
    return at <= len(content)  # what follows the last frame is a tag, or junk


def mpeg_frame_bytes(header: bytes) -> int:
    """The length of the MPEG audio frame that begins with these four bytes; 0 if none does."""
    if len(header) < 4 or header[0] != 0xFF or header[1] & 0xE0 != 0xE0:
        return 0
    version, layer = header[1] >> 3 & 3, 4 - (header[1] >> 1 & 3)
    rate_index, sample_index = header[2] >> 4, header[2] >> 2 & 3
    if version == 1 or layer == 4 or not 0 < rate_index < 15 or sample_index == 3:
        return 0
    bits = 1000 * MPEG_RATES[version == 3, layer][rate_index]
    rate = MPEG_SAMPLE_RATES[version][sample_index]
    padding = header[2] >> 1 & 1
    if layer == 1:
        return 4 * (12 * bits // rate + padding)
    slots = 72 if layer == 3 and version != 3 else 144
    return slots * bits // rate + padding


def _after_id3(stream: BinaryIO) -> int:
    """Where audio begins behind an ID3v2 tag."""
    head = stream.read(10)
    if head[:3] != b"ID3" or len(head) < 10:
        return 0
    size = head[6] << 21 | head[7] << 14 | head[8] << 7 | head[9]
    return 10 + size + (10 if head[5] & 0x10 else 0)


def _xing_bytes(frame: bytes) -> int:
    """The bytes of audio that a Xing or Info header states; 0 if there is none."""
    at = max(frame.find(b"Xing"), frame.find(b"Info"))
    if at < 0 or len(frame) < at + 16:
        return 0
    flags = int.from_bytes(frame[at + 4 : at + 8], "big")
    if not flags & 2:
        return 0
    place = at + 8 + (4 if flags & 1 else 0)
    return int.from_bytes(frame[place : place + 4], "big")


def matroska_is_whole(stream: BinaryIO) -> bool:
    """Whether every element of a Matroska or WebM file ends where its size says."""
    end = stream.seek(0, os.SEEK_END)
    place = 0
    while place < end:
        stream.seek(place)
        head = stream.read(12)
        width = _leading(head[:1])
        size_width = _leading(head[width : width + 1]) if width else 0
        if not width or not size_width or width > 4 or len(head) < width + size_width:
            return False
        identity = int.from_bytes(head[:width], "big")
        bits = int.from_bytes(head[width : width + size_width], "big") & ((1 << 7 * size_width) - 1)
        unknown = bits == (1 << 7 * size_width) - 1
        inside = place + width + size_width
        if unknown and identity not in EBML_PARENTS:
            return False
        if not unknown and inside + bits > end:
            return False
        place = inside if unknown or identity == EBML_PARENTS[0] else inside + bits
    return True


def _leading(byte: bytes) -> int:
    """The length of an EBML number, from the leading zeros of its first byte; 0 if invalid."""
    return 9 - byte[0].bit_length() if byte and byte[0] else 0
