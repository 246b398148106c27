"""imputer prepare: a corpus, or a folder of recordings, into manifests."""

from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from imputer.commands.options import FileName
from imputer.errors import UsageError

if TYPE_CHECKING:
    from imputer.corpora.validation import Report, Summary


def prepare(
    corpus: str | None = None,
    source: Path | None = None,
    /,
    *,
    output: Annotated[Path | None, Parameter(alias="-o")] = None,
    split: Annotated[tuple[str, ...], Parameter(negative="", consume_multiple=True)] = (),
    text: str = "",
    tokenizer: Path | None = None,
    frame_seconds: float = 0.04,
    strict: bool = False,
    workers: int = 1,
    seed: int = 0,
    valid: Path | None = None,
    valid_share: float = 0.1,
    download: Annotated[bool, Parameter(group="librispeech")] = False,
    mirror: Annotated[str, Parameter(group="librispeech")] = "",
    strings: Annotated[int, Parameter(group="digits")] = 120,
    longest: Annotated[int, Parameter(group="digits")] = 10,
    speakers_held_out: Annotated[int, Parameter(group="digits")] = 4,
    valid_speakers: Annotated[str, Parameter(group="digits")] = "",
    test_speakers: Annotated[str, Parameter(group="digits")] = "",
    hours: Annotated[float, Parameter(group="synthetic")] = 1.0,
    frames_cache: Annotated[FileName, Parameter(group="synthetic")] = "",
    inspect: Path | None = None,
    root: Path | None = None,
) -> None:
    """Turn a corpus or a folder of recordings into a manifest, or inspect one.

    - imputer prepare folder recordings/ --output data/train.jsonl --valid data/valid.jsonl
    - imputer prepare librispeech data/ --download --split dev-clean --output data/dev-clean.jsonl
    - imputer prepare digits audiomnist/ --output digits.jsonl
    - imputer prepare --inspect mine.jsonl

    Parameters
    ----------
    corpus
        folder, librispeech, wsj, kaldi, digits, lhotse, synthetic, altered (copies of a manifest), or cmudict (letters
        to phonemes).
    source
        The folder or file of the corpus.
    output
        The manifest to write; a corpus with parts writes one manifest per part, NAME-PART.jsonl.
    split
        Only these parts of the corpus; a single one is written to the output itself.
    text
        The form of transcripts: plain (lower case, no punctuation but apostrophes), lower or keep.
    tokenizer
        Count the tokens of this vocabulary, not characters, when dropping texts too long for their frames.
    frame_seconds
        Seconds of audio in one output frame of the model to be trained.
    strict
        Stop at the first utterance that cannot be used instead of dropping it.
    workers
        Processes for corpora that convert audio.
    seed
        Seed of all random choices.
    valid
        A second manifest for validation, split off the first: whole speakers if there are 8 or more, else recordings.
    valid_share
        Share of the speech that goes there.
    download
        Download the official archives of the parts first; an interrupted download is resumed.
    mirror
        Download from this address instead of the official one.
    strings
        Strings to make per speaker.
    longest
        Most digits in a string.
    speakers_held_out
        Number of speakers drawn for validation, and for test as many, where none are named.
    valid_speakers
        Speakers for validation by name, separated by commas; only those that are named are held out.
    test_speakers
        Speakers for test by name, separated by commas; "all" makes a set to test on only.
    hours
        Hours of speech to make; SOURCE is then a text file, one sentence per line.
    frames_cache
        Also encode the speech as it is made: a folder for the frames of the Moonshine encoder (data.frames_cache).
    inspect
        Only print a summary of a manifest and a histogram of its lengths.
    root
        With --inspect: count lines whose audio is outside this folder as bad.
    """
    if inspect is not None:
        _inspect(inspect, strict, root)
        return
    if corpus is None or source is None or output is None:
        raise UsageError("prepare needs a corpus, its folder and --output MANIFEST, or --inspect MANIFEST")
    from imputer.corpora import CORPORA, Options
    from imputer.corpora.validation import split_validation, write_manifests
    from imputer.support import atomic_files
    from imputer.support.progress import bar

    if corpus not in CORPORA:
        raise UsageError(f"no corpus {corpus!r}; there are {', '.join(CORPORA)}")
    _check_positive(
        strings=strings, longest=longest, workers=workers, frame_seconds=frame_seconds, hours=hours
    )
    if not 0 < valid_share < 1:
        raise UsageError(f"--valid-share must be between 0 and 1, got {valid_share:g}")
    if valid is not None:
        if valid.resolve() == output.resolve():
            raise UsageError(
                f"--output and --valid are the same file, {output}: one would overwrite the other"
            )
        atomic_files.probe(valid)
    if min(speakers_held_out, seed) < 0:
        raise UsageError("--speakers-held-out and --seed must be 0 or more")
    if mirror and not mirror.startswith(("http://", "https://")):
        raise UsageError(f"--mirror {mirror} must start with https:// or http://")
    options = Options(
        audio_folder=output.parent / f"{output.stem}-audio",
        splits=split,
        text=text,
        seed=seed,
        workers=workers,
        download=download,
        mirror=mirror,
        strings=strings,
        longest=longest,
        speakers_held_out=speakers_held_out,
        valid_speakers=_names(valid_speakers),
        test_speakers=_names(test_speakers),
        hours=hours,
        frames_cache=frames_cache,
    )
    count = len
    if tokenizer is not None:
        from imputer.vocabulary import Vocabulary

        vocabulary = Vocabulary.load(tokenizer)

        def count(text: str) -> int:  # type: ignore[misc]
            return len(vocabulary.encode(text))

    found = CORPORA[corpus](source, options)
    # Its first item comes after any download, which has a bar of its own.
    first = list(islice(found, 1))
    timed = corpus == "synthetic"  # its total is a number of hours
    shown = (60 * hours, "minutes of speech") if timed else (None, "utterances")
    with bar(f"Preparing {corpus}", shown[0], unit=shown[1]) as advance:
        report = write_manifests(
            chain(first, found),
            output,
            splits=split,
            strict=strict,
            count=count,
            frame_seconds=frame_seconds,
            advance=lambda utterance: advance(utterance.duration / 60 if timed else 1),
        )
    if valid is not None:
        if list(report.manifests) != [output]:
            raise UsageError(f"--valid: {corpus} has parts of its own: {', '.join(sorted(report.splits))}")
        report.manifests = split_validation(output, valid, share=valid_share, seed=seed).manifests
    _print(report)


def _check_positive(**options: float) -> None:
    for name, value in options.items():
        if not 0 < value < float("inf"):
            raise UsageError(f"--{name.replace('_', '-')} must be above 0, got {value:g}")


def _names(listed: str) -> tuple[str, ...]:
    return tuple(name for name in (part.strip() for part in listed.split(",")) if name)


def _inspect(path: Path, strict: bool, root: Path | None) -> None:
    from imputer.corpora.common import Dropped
    from imputer.corpora.validation import Report, Summary
    from imputer.data.manifest import Manifest

    manifest = Manifest(path, strict=strict, root=root)
    report = Report({path: Summary()})
    for utterance in manifest:
        report.manifests[path].add(utterance)
    for problem in manifest.problems:
        report.drop(Dropped("bad line", problem))
    _print(report)
    _histogram(report.manifests[path])


def _print(report: "Report") -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table("manifest", "utterances", "hours", "speakers", "characters", "seconds")
    table.columns[0].overflow = "fold"
    for column in table.columns[1:]:
        column.justify = "right"
        column.no_wrap = True
    for path, summary in sorted(report.manifests.items()):
        table.add_row(str(path), *_row(summary))
    console.print(table)
    if not report.dropped:
        console.print("Nothing was dropped.")
        return
    dropped = Table("dropped because", "items", "the first")
    dropped.columns[1].justify = "right"
    for reason, items in report.dropped.most_common():
        dropped.add_row(reason, f"{items:,}", report.examples[reason])
    console.print(dropped)


def _row(summary: "Summary") -> tuple[str, ...]:
    mean = summary.seconds / summary.utterances
    return (
        f"{summary.utterances:,}",
        f"{summary.seconds / 3600:.2f}",
        f"{len(summary.speakers):,}",
        f"{summary.characters:,}",
        f"{summary.shortest:.1f} - {mean:.1f} - {summary.longest:.1f}",
    )


def _histogram(summary: "Summary") -> None:
    """Lengths in at most twenty bars of whole seconds."""
    from rich.console import Console

    from imputer.corpora.validation import SIZES

    console = Console()
    last = max(summary.lengths)
    width = max(1, -(-(last + 1) // 20))
    bars = [
        sum(summary.lengths[s] for s in range(start, start + width)) for start in range(0, last + 1, width)
    ]
    most = max(bars)
    for start, count in zip(range(0, last + 1, width), bars, strict=True):
        name = f"{start} s and more" if start + width > SIZES else f"{start} to {start + width} s"
        console.print(f"{name:>14} {'█' * round(50 * count / most):<50} {count:,}")
