"""The checks that every corpus passes before its manifests are written."""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

from imputer import audio
from imputer.corpora.common import Dropped, Found
from imputer.data import manifest
from imputer.data.splitting import split_off
from imputer.errors import ImputerError, UsageError
from imputer.support.atomic_files import replacing
from imputer.support.processes import in_order

# The paper's network gives a frame each 40 ms, and an alignment holds at most one token per frame. Without a
# tokenizer characters are counted, spaces included: no vocabulary needs more tokens than that.
FRAME_SECONDS = 0.04

SIZES = 60  # bins of the length histograms, one second each


@dataclass
class Summary:
    """What went into one manifest."""

    utterances: int = 0
    seconds: float = 0.0
    characters: int = 0
    shortest: float = float("inf")
    longest: float = 0.0
    speakers: set[str] = field(default_factory=set)
    lengths: Counter[int] = field(default_factory=Counter)  # whole seconds -> utterances

    def add(self, utterance: manifest.Utterance) -> None:
        self.utterances += 1
        self.seconds += utterance.duration
        self.characters += len(utterance.text)
        self.shortest = min(self.shortest, utterance.duration)
        self.longest = max(self.longest, utterance.duration)
        if utterance.speaker:
            self.speakers.add(utterance.speaker)
        self.lengths[min(int(utterance.duration), SIZES)] += 1


@dataclass
class Report:
    """What went where, and what was dropped and why."""

    manifests: dict[Path, Summary] = field(default_factory=dict)
    splits: set[str] = field(default_factory=set)
    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)  # the first item of each reason

    def drop(self, dropped: Dropped) -> None:
        self.dropped[dropped.reason] += 1
        self.examples.setdefault(dropped.reason, dropped.item)


def write_manifests(
    found: Iterable[Found | Dropped],
    output: Path,
    *,
    splits: tuple[str, ...] = (),
    strict: bool = False,
    count: Callable[[str], int] = len,
    frame_seconds: float = FRAME_SECONDS,
    advance: Callable[[manifest.Utterance], None] = lambda _: None,
) -> Report:
    """Check what was found and write a manifest for each split, all of them or none.

    Without splits, or with one split asked for, that is ``output``; else ``output`` with -SPLIT after its name.
    """
    report = Report()
    with ExitStack() as stack:
        files, left_out = {}, set()
        for item in checked(found, count=count, frame_seconds=frame_seconds):
            if isinstance(item, Found) and splits and item.split not in splits:
                left_out.add(item.split)
                continue
            if isinstance(item, Dropped):
                if strict:
                    raise ImputerError(f"{item.reason}: {item.item}")
                report.drop(item)
                continue
            path = split_path(output, item.split, splits)
            if path not in files:
                temporary = stack.enter_context(replacing(path))
                files[path] = stack.enter_context(open(temporary, "w", encoding="utf-8"))
                report.manifests[path] = Summary()
            files[path].write(manifest.line(item.utterance, os.path.abspath(path.parent)) + "\n")
            report.manifests[path].add(item.utterance)
            report.splits.add(item.split)
            advance(item.utterance)
        missing = set(splits) - report.splits
        if left_out and missing:
            there = ", ".join(sorted(filter(None, left_out | report.splits))) or "no parts"
            raise UsageError(f"--split {' '.join(sorted(missing))}: no such part; there are {there}")
        if not files:
            why = (
                "; ".join(f"{reason}: {report.examples[reason]}" for reason in report.dropped)
                or "nothing was found"
            )
            raise ImputerError(f"no utterance is left to write to {output} ({why})")
    return report


def split_validation(output: Path, valid: Path, *, share: float, seed: int) -> Report:
    """Move about ``share`` of the manifest ``output`` to the manifest ``valid``: whole speakers or recordings."""
    train, held_out, _unit = split_off(list(manifest.Manifest(output)), share=share, seed=seed)
    report = Report()
    for path, utterances in ((output, train), (valid, held_out)):
        manifest.write(path, utterances)
        report.manifests[path] = Summary()
        for utterance in utterances:
            report.manifests[path].add(utterance)
    return report


def split_path(output: Path, split: str, splits: tuple[str, ...]) -> Path:
    """Where the manifest of one split is written, if all of them were asked to go to ``output``."""
    if not split or len(splits) == 1:
        return output
    return output.with_name(f"{output.stem}-{split}{output.suffix}")


def checked(
    found: Iterable[Found | Dropped],
    *,
    count: Callable[[str], int] = len,
    frame_seconds: float = FRAME_SECONDS,
) -> Iterator[Found | Dropped]:
    """Each utterance with its length filled in, or the reason why it cannot be used."""
    seen: set[tuple[str, str]] = set()
    threads = min(8, 2 * (os.cpu_count() or 1))
    for _, item in in_order(_measured, found, threads, threads=True):
        if isinstance(item, Found):
            item = _usable(item, seen, count, frame_seconds)
        yield item


def _usable(
    item: Found, seen: set[tuple[str, str]], count: Callable[[str], int], frame_seconds: float
) -> Found | Dropped:
    utterance = item.utterance
    if (item.split, utterance.id) in seen:
        return Dropped("duplicate id", f"{utterance.id} ({utterance.audio_filepath})")
    if not utterance.text:
        return Dropped("empty text", f"{utterance.id} ({utterance.audio_filepath})")
    try:
        tokens = count(utterance.text)
    except ImputerError as error:
        return Dropped("text outside the vocabulary", f"{utterance.id}: {error}")
    frames = int(utterance.duration / frame_seconds)
    if tokens > frames:
        return Dropped("longer than its frames can hold", f"{utterance.id}: {tokens} tokens, {frames} frames")
    seen.add((item.split, utterance.id))
    return item


def _measured(item: Found | Dropped) -> Found | Dropped:
    """With the length that the header of its file states."""
    if isinstance(item, Dropped) or not item.recorded:
        return item
    utterance = item.utterance
    try:
        seconds = _seconds(utterance.audio_filepath)
    except ImputerError as error:
        return Dropped("unreadable audio", str(error))
    end = utterance.offset + utterance.duration
    if utterance.offset >= seconds or end > seconds + audio.SECONDS_OF_GRACE:
        return Dropped(
            "slice beyond the end of its file",
            f"{utterance.id}: {utterance.offset:.3f} to {end:.3f} s of {seconds:.3f} s in {utterance.audio_filepath}",
        )
    # As far as the file goes, whether no length was given or a rounded one.
    duration = min(utterance.duration or seconds, seconds - utterance.offset)
    return replace(item, utterance=replace(utterance, duration=duration))


@lru_cache(maxsize=1024)
def _seconds(path: str) -> float:
    return audio.info(path, check=True).seconds
