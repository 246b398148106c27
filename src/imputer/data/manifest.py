"""Corpora as JSONL manifests: one utterance a line, kept as one block of bytes and parsed on access.

    {"id": "a-1", "audio_filepath": "audio/a-1.flac", "duration": 3.2, "text": "hello", "speaker": "a"}

``offset`` (seconds) makes it a slice of a longer file. A relative path is taken from the manifest's folder.
"""

import codecs
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NotRequired, overload

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from imputer.errors import ImputerError, UsageError
from imputer.support.atomic_files import replacing


@dataclass(frozen=True, slots=True)
class Utterance:
    id: str
    audio_filepath: str
    duration: float  # seconds
    text: str = ""
    speaker: str = ""
    offset: float = 0.0  # seconds into the file


class Manifest(Sequence[Utterance]):
    """The utterances of a manifest file, every line checked once at opening.

    A bad line is left out and kept in ``problems`` as a sentence that names file and line; ``strict`` raises the
    first one instead. ``root`` asks that every audio file lie inside that folder.

    Only the file's bytes and two arrays are held, so worker processes share them and memory stays flat.
    """

    def __init__(self, path: str | Path, *, strict: bool = False, root: str | Path | None = None) -> None:
        self.path = Path(path)
        self.problems: list[str] = []
        self._strict, self._root = strict, None if root is None else os.path.realpath(root)
        self._folder = str(self.path.parent)
        try:
            self._content = self.path.read_bytes().removeprefix(codecs.BOM_UTF8)
        except OSError as error:
            raise UsageError(f"cannot read the manifest {path}: {error.strerror or error}") from error
        self._starts, self.durations = self._scan()  # (utterance,) byte offsets; (utterance,) seconds
        if not len(self.durations):
            because = f"; the first problem: {self.problems[0]}" if self.problems else ""
            raise ImputerError(f"{path}: the manifest holds no usable utterance{because}")

    def _scan(self) -> tuple[np.ndarray, np.ndarray]:
        starts: list[int] = []
        durations: list[float] = []
        seen: dict[str, int] = {}
        start = 0
        for number, line in enumerate(self._content.split(b"\n"), 1):
            if line.strip():
                try:
                    fields = _checked(line)
                    first = seen.setdefault(fields["id"], number)
                    if first != number:
                        raise ValueError(f"id {fields['id']!r} is already on line {first}")
                    if self._root is not None:
                        self._inside(fields["audio_filepath"])
                    starts.append(start)
                    durations.append(float(fields["duration"]))
                except ValueError as error:
                    problem = f"{self.path}, line {number}: {error}"
                    if self._strict:
                        raise ImputerError(problem) from None
                    self.problems.append(problem)
            start += len(line) + 1
        return np.array(starts, np.int64), np.array(durations, np.float64)

    def _inside(self, audio_filepath: str) -> None:
        real = os.path.realpath(os.path.join(self._folder, audio_filepath))
        if os.path.commonpath([real, str(self._root)]) != self._root:
            raise ValueError(f"audio_filepath {audio_filepath!r} lies outside {self._root}")

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> Utterance: ...
    @overload
    def __getitem__(self, index: slice) -> list[Utterance]: ...
    def __getitem__(self, index: int | slice) -> Utterance | list[Utterance]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        start = int(self._starts[index])
        end = self._content.find(b"\n", start)
        fields = json.loads(self._content[start : end if end >= 0 else None])
        return Utterance(
            id=fields["id"],
            audio_filepath=os.path.join(self._folder, fields["audio_filepath"]),
            duration=float(fields["duration"]),
            text=fields.get("text", ""),
            speaker=fields.get("speaker", ""),
            offset=float(fields.get("offset", 0.0)),
        )

    def __iter__(self) -> Iterator[Utterance]:
        return (self[i] for i in range(len(self)))


class _Line(TypedDict):
    """What is checked of a line; other keys are ignored."""

    id: Annotated[str, Field(min_length=1)]
    audio_filepath: Annotated[str, Field(min_length=1)]
    duration: Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
    text: NotRequired[str]
    speaker: NotRequired[str]
    offset: NotRequired[Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]]


_LINE = TypeAdapter(_Line)
_PROBLEMS = {  # by the names that pydantic gives them
    "json_invalid": "not JSON ({error})",
    "dict_type": "not a JSON object but {value!r}",
    "missing": "the key {key!r} is missing",
    "string_type": "{key!r} must be a string, got {value!r}",
    "float_type": "{key!r} must be a number, got {value!r}",
    "string_too_short": "{key!r} must not be empty",
    "finite_number": "{key!r} must be a finite number of seconds, got {value}",
    "greater_than": "{key!r} must be more than 0 seconds, got {value}",
    "greater_than_equal": "{key!r} must be at least 0 seconds, got {value}",
}


def _checked(line: bytes) -> _Line:
    """The fields of one line, or a ValueError that says what is wrong with it."""
    try:
        return _LINE.validate_json(line)
    except ValidationError as refused:
        first = refused.errors()[0]
        message = _PROBLEMS.get(first["type"], "{key!r}: {error}")
        error = first.get("ctx", {}).get("error", first["msg"])
        key = first["loc"][0] if first["loc"] else ""
        raise ValueError(message.format(key=key, value=first["input"], error=error)) from None


def write(path: str | Path, utterances: Iterable[Utterance]) -> None:
    """Write a manifest, whole or not at all; audio inside the manifest's folder is named relative to it."""
    path = Path(path)
    folder = os.path.abspath(path.parent)
    with replacing(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
        for utterance in utterances:
            file.write(line(utterance, folder) + "\n")


def line(utterance: Utterance, folder: str) -> str:
    """One line of a manifest that lies in ``folder``."""
    audio = os.path.abspath(utterance.audio_filepath)
    fields: dict[str, Any] = {
        "id": utterance.id,
        "audio_filepath": os.path.relpath(audio, folder) if audio.startswith(folder + os.sep) else audio,
        "duration": round(utterance.duration, 6),
        "text": utterance.text,
        "speaker": utterance.speaker,
    }
    if utterance.offset:
        fields["offset"] = round(utterance.offset, 6)
    return json.dumps(fields, ensure_ascii=False)


class Utterances(Sequence[Utterance]):
    """Several manifests, one after the other."""

    def __init__(self, paths: Sequence[str], *, strict: bool = False) -> None:
        self.manifests = [Manifest(path, strict=strict) for path in paths]

    def __len__(self) -> int:
        return sum(map(len, self.manifests))

    def __getitem__(self, index: Any) -> Any:
        for manifest in self.manifests:
            if index < len(manifest):
                return manifest[index]
            index -= len(manifest)
        raise IndexError(index)

    def durations(self) -> list[float]:
        """Seconds of each utterance."""
        return [float(seconds) for manifest in self.manifests for seconds in manifest.durations]


def open_utterances(paths: Sequence[str], what: str, *, strict: bool) -> Utterances:
    """The manifests under ``data.train`` or ``data.valid``; without utterances it is an error."""
    utterances = Utterances(paths, strict=strict)
    if not len(utterances):
        raise UsageError(f"{what} names no utterances: {', '.join(paths) or 'it is empty'}")
    return utterances
