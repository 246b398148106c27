"""LibriSpeech: the official folders with FLAC and *.trans.txt, fetched from OpenSLR when asked to.

    LibriSpeech/train-clean-100/SPEAKER/CHAPTER/SPEAKER-CHAPTER-NUMBER.flac
    LibriSpeech/train-clean-100/SPEAKER/CHAPTER/SPEAKER-CHAPTER.trans.txt

The source may be the folder above LibriSpeech, LibriSpeech itself, or one part of it. Each part is a split; so are the
sets of speakers in ``SUBSETS``, on which this project's own figures are trained and scored.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

from imputer.corpora.common import Dropped, Found, Options, normaliser
from imputer.corpora.download import fetch_archive
from imputer.data.manifest import Utterance
from imputer.data.text import read_lines
from imputer.errors import UsageError

ADDRESS = "https://www.openslr.org/resources/12"

# The official archives (https://www.openslr.org/12) and their MD5 sums.
ARCHIVES = {
    "dev-clean": "42e2234ba48799c1f50f24a7926300a1",
    "dev-other": "c8d0bcc9cca99d4f8b62fcc847357931",
    "test-clean": "32fa31d27d2e1cad72775fee3f4849a9",
    "test-other": "fb5a50374b501bb3bac4815ee91d3135",
    "train-clean-100": "2a93770f6d5c6c964bc36631d331a522",
    "train-clean-360": "c0e676e450a7ff2f54aeade5171606fa",
    "train-other-500": "d1a0fd59409feb2c614ce4d30c387708",
}

# The sets of the experiments: (part, its speakers). Train on the first, choose on the second, report on the third.
SUBSETS = {
    "dev-clean-train": ("dev-clean", (
        *("84", "174", "251", "422", "652", "777", "1272", "1462", "1673", "1988", "1993", "2035"),
        *("2078", "2086", "2277", "2428", "2803", "2902", "3000", "3081", "3170", "3536", "3576", "3752"),
        *("3853", "5536", "5694", "6241", "6295", "6313", "6319", "6345", "7850", "7976", "8297", "8842"),
    )),
    "dev-clean-held-out": ("dev-clean", ("1919", "2412", "5338", "5895")),
    "test-clean-a": ("test-clean", (
        *("672", "1089", "1188", "1284", "2830", "2961", "3575", "3729", "4446", "4507"),
        *("4992", "5639", "5683", "6829", "7021", "7176", "8224", "8230", "8455", "8463"),
    )),
}  # fmt: skip


def librispeech(source: Path, options: Options) -> Iterator[Found | Dropped]:
    """Every utterance of the splits wanted; all official parts that exist, if none is named."""
    wanted = {split: SUBSETS.get(split, (split, ())) for split in options.splits}
    if options.download:
        download(
            source, tuple({part: None for part, _ in wanted.values()} or ARCHIVES), options.mirror or ADDRESS
        )
    parts = _parts(source)
    for part, _ in wanted.values():
        if part not in parts:
            there = ", ".join(parts) or "none"
            raise UsageError(f"{source} has no part {part!r} (there: {there}); --download fetches it")
    if not parts:
        raise UsageError(f"{source} has no LibriSpeech part such as dev-clean; --download downloads them")
    text_of = normaliser(options, "lower")
    for split, (part, speakers) in (wanted or {part: (part, ()) for part in parts}).items():
        missing = sorted(set(speakers) - {path.name for path in parts[part].iterdir()}, key=int)
        if missing:
            raise UsageError(f"{parts[part]} lacks speakers of {split}: {', '.join(missing)}")
        for transcript in sorted(parts[part].glob("*/*/*.trans.txt")):
            if not speakers or transcript.parts[-3] in speakers:
                yield from _utterances(transcript, split, text_of)


def _utterances(transcript: Path, split: str, text_of: Callable[[str], str]) -> Iterator[Found | Dropped]:
    for number, line in read_lines(transcript):
        identifier, _, text = line.partition(" ")
        path = transcript.parent / f"{identifier}.flac"
        if identifier.count("-") != 2:
            yield Dropped("transcript line is not: id text", f"{transcript}, line {number}")
            continue
        yield Found(Utterance(identifier, str(path), 0.0, text_of(text), identifier.split("-")[0]), split)


def _parts(source: Path) -> dict[str, Path]:
    """Parts by name, in the order of the official list and then of the alphabet."""
    if any(source.glob("*/*/*.trans.txt")) and not any((source / name).is_dir() for name in ARCHIVES):
        return {source.resolve().name: source}
    found = {}
    for folder in (source / "LibriSpeech", source):
        if folder.is_dir():
            names = sorted((path.name for path in folder.iterdir() if path.is_dir()), key=_order)
            found = {name: folder / name for name in names if any((folder / name).glob("*/*/*.trans.txt"))}
        if found:
            return found
    return {}


def _order(name: str) -> tuple[int, str]:
    return (list(ARCHIVES).index(name) if name in ARCHIVES else len(ARCHIVES), name)


def download(source: Path, parts: tuple[str, ...], address: str = ADDRESS) -> None:
    """Fetch, check and unpack the parts that are not there yet."""
    unknown = sorted(set(parts) - set(ARCHIVES))
    if unknown:
        raise UsageError(f"LibriSpeech has no part {unknown[0]!r}; there are {', '.join(ARCHIVES)}")
    for part in parts:
        if part not in _parts(source):
            fetch_archive(f"{address}/{part}.tar.gz", ARCHIVES[part], source, f"LibriSpeech/{part}")
