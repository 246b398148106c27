"""What commands that write transcripts share: the format of a file by its ending, and one file per recording."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from imputer.audio.endings import is_audio
from imputer.errors import UsageError
from imputer.transcripts import FORMATS, Transcript

if TYPE_CHECKING:
    Format = str
else:
    Format = Literal[tuple(FORMATS)]  # the choices of --format
ENDINGS = {".TextGrid" if name == "textgrid" else f".{name}": name for name in FORMATS}
_LOWER = {ending.lower(): format for ending, format in ENDINGS.items()}


def names_folder(output: str) -> bool:
    """Whether ``output`` is a folder for transcripts: it exists as one, ends with a /, or has no ending."""
    path = Path(output)
    return path.is_dir() or output.endswith(("/", os.sep)) or not (path.is_file() or path.suffix)


def names_format(path: Path) -> bool:
    """Whether the ending of ``path`` is that of a format."""
    return path.suffix.lower() in _LOWER


def format_of(path: Path, given: Format | None, default: Format) -> Format:
    """The format to write to the file ``path``: by its ending, unless ``--format`` says it."""
    named = _LOWER.get(path.suffix.lower())
    if named is None and path.suffix and given is None:
        raise UsageError(
            f"--output {path}: {path.suffix} is not the ending of a format ({' '.join(ENDINGS)}); add --format"
        )
    if named and given and named != given:
        fitting = path.with_suffix(ending(given))
        raise UsageError(
            f"--output {path} and --format {given} disagree: leave one out, or write to {fitting}"
        )
    return named or given or default


def ending(format: Format) -> str:
    return next(ending for ending, name in ENDINGS.items() if name == format)


def transcript_of(recording: Path, format: Format) -> Path:
    """a.flac -> a.srt; a name without the ending of an audio file is kept whole."""
    stem = recording.with_suffix("") if is_audio(recording) else recording
    return stem.with_name(stem.name + ending(format))


def named(identifier: str, format: Format) -> str:
    """The name of the file of an utterance; an id may hold what a name may not."""
    plain = "".join(c if c.isprintable() and c not in "/\\" else "-" for c in identifier)
    hidden = len(plain) - len(plain.lstrip("."))
    return "-" * hidden + plain[hidden:] + ending(format)


def write(transcript: Transcript, name: str, format: Format, path: Path | None, *, head: str = "") -> None:
    """Write a transcript of the recording ``name`` to a file, or behind ``head`` to standard output."""
    from imputer.support import atomic_files

    written = FORMATS[format](transcript, name)
    if path is None:
        print(f"{head}{written}", end="", flush=True)
    else:
        atomic_files.write_text(path, written)


def refuse_same(targets: Iterable[tuple[str, Path]]) -> None:
    """Two recordings that would be written to one file are an error: only the second would be left."""
    first: dict[Path, str] = {}
    for name, path in targets:
        other = first.get(path)
        first[path] = name
        if other is not None:
            raise UsageError(
                f"{other} and {name} would both be written to {path}: rename one, or write them to different "
                "folders with --output"
            )


def refuse_texts(targets: dict[Path, Path]) -> None:
    """In the folder of the recordings, a.txt is what is said in a.wav: not to be overwritten by what a model writes."""
    for recording, path in targets.items():
        if (
            path.suffix.lower() == ".txt"
            and path.is_file()
            and path.parent.resolve() == recording.parent.resolve()
        ):
            raise UsageError(
                f"{path} exists already, beside {recording}: it may be its text. Write to another folder with "
                "--output, or remove it"
            )
