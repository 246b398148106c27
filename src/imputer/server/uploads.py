"""From a form to its upload, and from that to samples, block by block, with limits on what it may cost.

Nothing the client sends is ever taken for a path: the reader gets the bytes, and decides by them how to read.
"""

from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import numpy as np
from fastapi import Request
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException

from imputer.audio import AudioError, Limits, Reader
from imputer.server.failures import Failure

FORM_FIELDS, FORM_FIELD_BYTES = 128, 1 << 14
RATE, CHANNELS = 192_000, 8  # the limits
SAMPLES_PER_SECOND = (
    2 * 48_000
)  # of all channels, per second of the longest recording: what decoding may cost
REASONS = {
    "empty": (400, "empty_audio"),
    "unsupported": (415, "unsupported_format"),
    "too_long": (413, "audio_too_long"),
}


async def form(request: Request) -> FormData:
    """A multipart form, received; its files are on the disk."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "multipart/form-data":
        raise Failure(
            415, f"send multipart/form-data, not {kind[:80] or 'a body without a type'}", code="wrong_type"
        )
    try:
        return await request.form(max_files=1, max_fields=FORM_FIELDS, max_part_size=FORM_FIELD_BYTES)
    except HTTPException as error:
        if "maximum size" not in error.detail:
            raise
        limit = f"a field of the form is longer than {FORM_FIELD_BYTES >> 10} kB"
        raise Failure(
            400, f"{limit}; if it is the upload, give it a file name", code="invalid_form"
        ) from error


def file_of(items: list[tuple[str, Any]]) -> UploadFile:
    """The upload in a form."""
    for name, value in items:
        if isinstance(value, UploadFile) and name != "file":
            raise Failure(
                400,
                f"the upload is in the field {name[:80]!r}; it belongs in 'file'",
                code="wrong_field",
                param="file",
            )
        if name == "file" and isinstance(value, str):
            raise Failure(
                400,
                "the field 'file' has no file in it: an upload has a file name",
                code="missing_file",
                param="file",
            )
    found = [value for _, value in items if isinstance(value, UploadFile)]
    if not found:
        names = ", ".join(repr(name[:40]) for name, _ in items[:8]) or "none at all"
        raise Failure(
            400, f"the form has no field 'file'; its fields are {names}", code="missing_file", param="file"
        )
    return found[0]


def plain_name(name: str | None) -> str:
    """The last part of a name, short and printable."""
    last = (name or "").replace("\\", "/").rpartition("/")[2]
    return "".join(c for c in last if c.isprintable())[:80] or "the upload"


def blocks(
    file: BinaryIO,
    name: str,
    *,
    sample_rate: int,
    max_seconds: float,
    check: Callable[[], None] | None = None,
    warn: Callable[[str], None] | None = None,
) -> Iterator[np.ndarray]:
    """(samples,) float32, mono, at ``sample_rate``, part by part; other content is a Failure.

    ``check`` is called before every block and stops the decoding by raising; ``warn`` with what is missing in audio
    that is used all the same.
    """
    _check_start(file, name)
    limits = Limits(max_seconds, SAMPLES_PER_SECOND * max_seconds, RATE, CHANNELS, check, warn)
    try:
        with Reader(file, name=name, limits=limits) as reader:
            yield from reader.blocks(sample_rate)
    except AudioError as error:
        status, code = REASONS.get(error.reason, (400, "invalid_audio"))
        hint = "; send WAV, FLAC, MP3, Ogg, AIFF, M4A or WebM" if status == 415 else ""
        raise Failure(status, f"{error}{hint}", code=code, param="file") from error


def _check_start(file: BinaryIO, name: str) -> None:
    """Refuse empty uploads, and shorten, whose unpacked size is not known beforehand."""
    file.seek(0)
    header = file.read(1024)
    file.seek(0)
    if not header:
        raise Failure(400, f"{name}: the upload is empty (0 bytes)", code="empty_file", param="file")
    if header.startswith(b"NIST_1A") and any(
        packed in header for packed in (b"shorten", b"wavpack", b"shortpack")
    ):
        raise Failure(
            415,
            f"{name}: compressed SPHERE is not accepted; send WAV or FLAC",
            code="unsupported_format",
            param="file",
        )
