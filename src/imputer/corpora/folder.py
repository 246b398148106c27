"""Your own recordings: audio beside .txt files of the same name, or a CSV or TSV table with a header.

    talk.wav talk.txt                               the text of talk.wav
    manifest.tsv  utt speaker text, audio/UTT.ogg   a table; audio found by id
    segments.tsv  utt file start end text           a table of slices of longer files

Columns are known by their usual names, in any order and case (see ``COLUMNS``); others are ignored.
"""

import csv
from collections.abc import Iterable, Iterator
from pathlib import Path

from imputer.audio.endings import is_audio
from imputer.corpora.common import Dropped, Found, Options, files_under, normaliser
from imputer.data.manifest import Utterance
from imputer.errors import UsageError

COLUMNS = {
    "id": ("id", "utt", "utt_id", "utterance", "utterance_id", "key"),
    "audio": ("audio_filepath", "file", "path", "audio", "wav", "filename", "file_name", "audio_file"),
    "text": ("text", "sentence", "transcript", "transcription", "words"),
    "speaker": ("speaker", "speaker_id", "spk", "client_id"),
    "start": ("start", "begin", "offset", "start_time"),
    "end": ("end", "stop", "end_time"),
    "seconds": ("seconds", "duration", "dur"),
    "split": ("split", "subset"),
}
TABLE_ENDINGS = (".tsv", ".csv")


def folder(source: Path, options: Options) -> Iterator[Found | Dropped]:
    """A folder of recordings with texts, a folder with one table, or a table itself."""
    if is_audio(source) and source.is_file():
        raise UsageError(
            f"{source} is one recording; give the folder that it and its text are in, or a table"
        )
    if source.is_file():
        yield from _table(source, source.parent, options)
        return
    if not source.is_dir():
        raise UsageError(f"{source}: no such folder or table")
    tables = sorted(path for path in source.iterdir() if path.suffix.lower() in TABLE_ENDINGS)
    if len(tables) > 1:
        raise UsageError(
            f"{source} has several tables ({', '.join(path.name for path in tables)}); give one of them as source"
        )
    yield from _table(tables[0], source, options) if tables else _pairs(source, options)


def _pairs(source: Path, options: Options) -> Iterator[Found | Dropped]:
    text_of = normaliser(options, "plain")
    files = list(files_under(source))
    recordings = [path for path in files if is_audio(path)]
    if not recordings:
        raise UsageError(f"{source} has neither audio files nor a .csv or .tsv table")
    texts = {path.with_suffix(""): path for path in files if path.suffix.lower() == ".txt"}
    for path in recordings:
        name = path.relative_to(source)
        beside = texts.get(path.with_suffix(""))
        if beside is None:
            yield Dropped("no text file of the same name", str(path))
            continue
        try:
            text = beside.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError:
            yield Dropped("text file is not UTF-8", str(beside))
            continue
        speaker = name.parts[0] if len(name.parts) > 1 else ""
        identifier = "-".join(name.with_suffix("").parts)
        yield Found(Utterance(identifier, str(path), 0.0, text_of(text), speaker))
    with_audio = {path.with_suffix("") for path in recordings}
    for stem, path in texts.items():
        if stem not in with_audio:
            yield Dropped("no audio file of the same name", str(path))


def _table(table: Path, root: Path, options: Options) -> Iterator[Found | Dropped]:
    text_of = normaliser(options, "plain")
    try:
        with open(table, encoding="utf-8-sig", newline="") as file:
            rows, known = _rows(file, table)
            audio = _Audio(root)
            for number, row in rows:
                where = f"{table}, line {number}"
                value = {role: (row.get(column) or "").strip() for role, column in known.items()}
                try:
                    yield _found(value, where, audio, text_of(value["text"]), options)
                except _Unusable as problem:
                    yield Dropped(problem.reason, f"{where}: {problem.item}")
    except OSError as error:
        raise UsageError(f"cannot read {table}: {error.strerror or error}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{table} is not a UTF-8 table: {error}") from error


class _Unusable(Exception):
    def __init__(self, reason: str, item: str) -> None:
        self.reason, self.item = reason, item


def _rows(file: Iterable[str], table: Path) -> tuple[Iterator[tuple[int, dict[str, str]]], dict[str, str]]:
    """Numbered rows, and the column of each role."""
    tabs = table.suffix.lower() == ".tsv"
    # In a TSV a quotation mark is a character like any other, as Common Voice writes them.
    reader = csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE) if tabs else csv.DictReader(file)
    header = {name.strip().lower(): name for name in reader.fieldnames or ()}
    known = {
        role: next((header[name] for name in names if name in header), "") for role, names in COLUMNS.items()
    }
    known = {role: column for role, column in known.items() if column}
    if "text" not in known or not ("audio" in known or "id" in known):
        raise UsageError(
            f"{table} needs a header with a text column ({', '.join(COLUMNS['text'])}) and an audio or id column "
            f"({', '.join(COLUMNS['audio'] + COLUMNS['id'])}); it has: {', '.join(reader.fieldnames or ())}"
        )
    return ((reader.line_num, row) for row in reader), known


class _Audio:
    """Finds a row's file: by its path, or by its name or id anywhere below the folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._named: dict[str, list[Path]] | None = None

    def __call__(self, path: str, identifier: str) -> Path:
        if path and (self.root / path).is_file():
            return self.root / path
        matches = self._by_name().get(Path(path or identifier).name, [])
        if len(matches) == 1:
            return matches[0]
        if matches:
            raise _Unusable("several audio files of that name", path or identifier)
        raise _Unusable("audio file not found", path or identifier)

    def name(self, path: Path) -> str:
        """The path below the folder with dashes, since two folders may hold files of one name."""
        if path.is_relative_to(self.root):
            return "-".join(path.relative_to(self.root).with_suffix("").parts)
        return path.stem

    def _by_name(self) -> dict[str, list[Path]]:
        if self._named is None:
            self._named = {}
            for path in filter(is_audio, files_under(self.root)):
                for key in {path.name, path.stem}:
                    self._named.setdefault(key, []).append(path)
        return self._named


def _found(value: dict[str, str], where: str, audio: _Audio, text: str, options: Options) -> Found:
    split = value.get("split", "")
    path = audio(value.get("audio", ""), value.get("id", ""))
    start, end, seconds = (_number(value, role) for role in ("start", "end", "seconds"))
    offset = start or 0.0
    if end is not None:
        duration = end - offset
    elif "start" in value and seconds is not None:
        duration = seconds
    else:
        # For a whole file, the length of the file counts, not the table's.
        duration = 0.0
    if offset < 0 or duration < 0 or (end is not None and duration <= 0):
        raise _Unusable("start and end are not in order", f"{start} to {end}")
    identifier = value.get("id") or audio.name(path) + (f"-{offset:g}" if offset or duration else "")
    return Found(Utterance(identifier, str(path), duration, text, value.get("speaker", ""), offset), split)


def _number(value: dict[str, str], role: str) -> float | None:
    if not value.get(role):
        return None
    try:
        return float(value[role])
    except ValueError:
        raise _Unusable(f"{role} is not a number", value[role]) from None
