"""The Wall Street Journal corpora (LDC93S6 and LDC94S13), read as Kaldi's recipe reads them.

    11-13.1/wsj0/doc/indices/train/tr_s_wv1.ndx     one folder per disk, or wsj0/ and wsj1/ merged
    11-1.1/wsj0/si_tr_s/011/011c0201.wv1            SPHERE, mostly compressed by shorten
    11-4.1/wsj0/transcrp/dots/si_tr_s/011/011c0200.dot

The sets are those of the index files. Shorten is slow to decode (about ten times real time), so the audio is
written once as FLAC beside the manifest; ``workers`` processes share the work, and existing files are not made again.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from imputer import audio
from imputer.corpora.common import Dropped, Found, Options, existing_folder, files_under, normaliser
from imputer.data.manifest import Utterance
from imputer.data.text import read_lines
from imputer.errors import ImputerError, UsageError
from imputer.support.processes import in_order


@dataclass(frozen=True)
class Set:
    indices: tuple[str, ...]  # index files, from wsj0/ or wsj1/ on
    folders: tuple[str, ...]  # where the audio lies if there are no index files


SETS = {
    "si284": Set(
        ("wsj1/doc/indices/si_tr_s.ndx", "wsj0/doc/indices/train/tr_s_wv1.ndx"),
        ("wsj0/si_tr_s", "wsj1/si_tr_s"),
    ),
    "si84": Set(("wsj0/doc/indices/train/tr_s_wv1.ndx",), ("wsj0/si_tr_s",)),
    "dev93": Set(("wsj1/doc/indices/h1_p0.ndx",), ("wsj1/si_dt_20",)),
    "eval92": Set(("wsj0/doc/indices/test/nvp/si_et_20.ndx",), ("wsj0/si_et_20",)),
    "eval93": Set(("wsj1/doc/indices/wsj1/eval/h1_p0.ndx",), ("wsj1/si_et_h1",)),
}
ENDINGS = (".wv1", ".wav", ".flac")
DEFAULT_SETS = ("si284", "dev93", "eval92")

# Speaker 401 of si_tr_s: Kaldi's recipe leaves the one on disk 11-2.1 out.
LEFT_OUT = "wsj0/si_tr_s/401/"


def wsj(source: Path, options: Options) -> Iterator[Found | Dropped]:
    """The sets wanted: si284, dev93 and eval92 unless others are named."""
    existing_folder(source, "the WSJ disks, or wsj0 and wsj1")
    wanted = options.splits or DEFAULT_SETS
    unknown = sorted(set(wanted) - set(SETS))
    if unknown:
        raise UsageError(f"WSJ has no set {unknown[0]!r}; there are {', '.join(SETS)}")
    files = _files(source)
    texts = _transcripts(files)
    text_of = normaliser(options, "lower")
    for name in wanted:
        yield from _set(name, files, texts, text_of, options)


def _set(
    name: str, files: dict[str, Path], texts: dict[str, str], text_of: Callable[[str], str], options: Options
) -> Iterator[Found | Dropped]:
    listed = _listed(SETS[name], files)
    if not listed:
        raise UsageError(f"no audio of {name} was found; expected {' and '.join(SETS[name].folders)}")
    jobs: list[tuple[Path, Path]] = []
    usable: list[Utterance] = []
    for place in listed:
        identifier = Path(place).stem
        path = next((files[other] for other in _spellings(place) if other in files), None)
        if path is None:
            yield Dropped("listed in the index, but missing", place)
        elif identifier not in texts:
            yield Dropped("no transcript", place)
        else:
            target = options.audio_folder / identifier[:3] / f"{identifier}.flac"
            text = text_of(normalise_transcript(texts[identifier]))
            jobs.append((path, target))
            usable.append(Utterance(identifier, str(target), 0.0, text, identifier[:3]))
    converted = in_order(_convert, jobs, options.workers)
    for utterance, (_, problem) in zip(usable, converted, strict=True):
        yield Dropped("unreadable audio", problem) if problem else Found(utterance, name)


def _spellings(place: str) -> list[str]:
    """A path as the index gives it, and its names after a conversion of the audio."""
    return [place.removesuffix(".wv1") + ending for ending in ENDINGS]


def _files(source: Path) -> dict[str, Path]:
    """Every file by its path from wsj0 or wsj1 on, in lower case: disks come in both cases, merged or apart."""
    files: dict[str, Path] = {}
    top = source.resolve().name.lower()
    for path in files_under(source):
        parts = [part.lower() for part in path.relative_to(source).parts]
        start = next((i for i, part in enumerate(parts) if part in ("wsj0", "wsj1")), None)
        if start is not None:
            files.setdefault("/".join(parts[start:]), path)
        elif top in ("wsj0", "wsj1"):
            files.setdefault("/".join([top, *parts]), path)
    return files


def _listed(chosen: Set, files: dict[str, Path]) -> list[str]:
    """The audio of a set by its path from wsj0 or wsj1 on, in the order Kaldi sorts it."""
    places: set[str] = set()
    if all(index in files for index in chosen.indices):
        for index in chosen.indices:
            places |= set(_index(files[index]))
    else:
        starts = tuple(f"{folder}/" for folder in chosen.folders)
        places = {
            f"{place.rpartition('.')[0]}.wv1"
            for place in files
            if place.startswith(starts) and place.endswith(ENDINGS)
        }
    return sorted(place for place in places if not place.startswith(LEFT_OUT))


def _index(path: Path) -> Iterator[str]:
    """Paths out of lines such as ``13_16_1:wsj1/si_dt_20/4k0/4k0c0301.wv1``; test sets leave the ending out.

    The disk is not looked at: one of the index files names a wrong one, and a path occurs on one disk only.
    """
    for _, line in read_lines(path):
        if not line.lstrip().startswith(";"):
            place = line.strip().rpartition(":")[2].strip().lstrip("/").lower()
            yield place if place.endswith(".wv1") else f"{place}.wv1"


def _transcripts(files: dict[str, Path]) -> dict[str, str]:
    """Text by utterance, from all .dot files: ``the words (011c0201)`` a line."""
    texts: dict[str, str] = {}
    for place, path in files.items():
        if not place.endswith(".dot"):
            continue
        with open(path, encoding="latin-1") as file:
            for line in file:
                found = re.fullmatch(r"(.*)\((\S+)\)\s*", line.rstrip("\n"))
                if found:
                    texts.setdefault(found[2].lower(), found[1].strip())
    return texts


def normalise_transcript(text: str) -> str:
    """What Kaldi's recipe makes of a .dot transcript, without its noise word, which is not spoken.

    Backslashes go; noises in brackets, truncation ``~`` and pauses ``.`` go; ``<word>`` is said and stays.
    """
    words = []
    for word in text.upper().replace("\\", "").split():
        word = {"%PERCENT": "PERCENT", ".POINT": "POINT", "--DASH": "-DASH"}.get(word, word)
        if word in ("~", ".") or re.search(r"\[<?/?\w+>?/?\]", word):
            continue
        said = re.fullmatch(r"<([\w']+)>", word)
        words.append(said[1] if said else word)
    return " ".join(words)


def _convert(job: tuple[Path, Path]) -> str:
    """Make a FLAC file unless it exists; "" or the error."""
    source, target = job
    try:
        if not target.exists():
            audio.write(target, audio.read(source))
    except ImputerError as error:
        return str(error)
    return ""
