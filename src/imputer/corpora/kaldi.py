"""A Kaldi data folder: wav.scp with plain paths, text, and if present segments and utt2spk."""

from collections.abc import Iterator
from pathlib import Path

from imputer.corpora.common import Dropped, Found, Options, existing_folder, normaliser
from imputer.data.manifest import Utterance
from imputer.data.text import read_lines
from imputer.errors import UsageError


def kaldi(source: Path, options: Options) -> Iterator[Found | Dropped]:
    """Every utterance of ``text``, whole recordings or the slices that ``segments`` cuts."""
    existing_folder(source, "a Kaldi data folder with wav.scp and text")
    for needed in ("wav.scp", "text"):
        if not (source / needed).is_file():
            raise UsageError(f"{source} has no {needed}; a Kaldi data folder has wav.scp and text")
    text_of = normaliser(options, "lower")
    recordings = dict(_pairs(source / "wav.scp"))
    speakers = dict(_pairs(source / "utt2spk")) if (source / "utt2spk").is_file() else {}
    cut = (source / "segments").is_file()
    segments = {key: rest.split() for key, rest in _pairs(source / "segments")} if cut else {}
    for identifier, text in _pairs(source / "text"):
        slice_ = _slice(segments.get(identifier), identifier, source) if cut else (identifier, 0.0, 0.0)
        if isinstance(slice_, Dropped):
            yield slice_
            continue
        recording, offset, duration = slice_
        path = recordings.get(recording)
        if path is None:
            yield Dropped("not in wav.scp", f"{source / 'wav.scp'}: {recording}")
        elif path.endswith(("|", "-")):
            yield Dropped("wav.scp holds a command, not a path", f"{source / 'wav.scp'}: {recording}")
        else:
            yield Found(
                Utterance(
                    identifier,
                    _path(path, source),
                    duration,
                    text_of(text),
                    speakers.get(identifier, ""),
                    offset,
                )
            )


def _pairs(path: Path) -> Iterator[tuple[str, str]]:
    """The first word of each line, and the rest."""
    for _, line in read_lines(path):
        key, _, rest = line.strip().partition(" ")
        yield key.split("\t")[0], (key.partition("\t")[2] + " " + rest).strip()


def _path(path: str, source: Path) -> str:
    """Kaldi's relative paths start where Kaldi ran; paths from the data folder are accepted too."""
    beside = source / path
    return str(beside if beside.is_file() else Path(path).absolute())


def _slice(fields: list[str] | None, identifier: str, source: Path) -> tuple[str, float, float] | Dropped:
    where = f"{source / 'segments'}: {identifier}"
    if fields is None:
        return Dropped("not in segments", where)
    try:
        recording, start, end = fields[0], float(fields[1]), float(fields[2])
    except (ValueError, IndexError):
        return Dropped("segments line is not: id recording start end", where)
    # Kaldi writes -1 for the end of the recording.
    if start < 0 or (end != -1 and end <= start):
        return Dropped("start and end are not in order", where)
    return recording, start, 0.0 if end == -1 else end - start
