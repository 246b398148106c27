"""What `imputer evaluate` prints and writes: the table, confidences, comparisons, the worst utterances, JSON."""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from imputer import models
from imputer.display import drawings
from imputer.errors import UsageError, count
from imputer.evaluation import Evaluation, calibration, scoring
from imputer.evaluation.latency import Delays
from imputer.support import atomic_files
from imputer.transcripts import calibrated

# Two evaluations of the same utterances, and how the second differs.
Compared = tuple[Evaluation, Evaluation, scoring.Comparison]


def table(results: Sequence[Sequence[Evaluation]], title: str) -> Table:
    """A row per evaluation; ``results`` are by model."""
    rows = [one for row in results for one in row]
    names = _short([one.name for one in rows])
    heading = title if len(results) > 1 else f"{names[0]} on {title}"
    found = Table(box=box.SIMPLE_HEAD, title=f"{heading}: {count(len(rows[0].utterances), 'utterance')}")
    found.title_justify, found.pad_edge = "left", False
    text = ["text"] if any(one.text for one in rows) else []
    columns = ["strategy", *text, "B", "passes", "WER % (95 %)", "S/D/I", "CER % (95 %)", "RTF"]
    for column in [*(["model"] if len(results) > 1 else []), *columns]:
        found.add_column(
            column, justify="left" if column in ("model", "strategy", "text") else "right", no_wrap=True
        )
    for name, one in zip(names, rows, strict=True):
        words = scoring.total([u.words for u in one.utterances])
        found.add_row(
            *([name] if len(results) > 1 else []),
            one.strategy,
            *([one.text] if text else []),
            str(one.block_size or ""),
            f"{one.passes:.1f}",
            _percent(one.wer),
            f"{words.substitutions}/{words.deletions}/{words.insertions}",
            _percent(one.cer),
            f"{one.real_time_factor:.3f}",
        )
    return found


def print_reliability(console: Console, evaluated: Evaluation, picture: Path | None) -> None:
    """Confidence beside the share of right words, as a table and if asked for as a picture."""
    confidence, right = calibration.outcomes(evaluated.utterances)
    bins = calibration.reliability(confidence, right) if confidence else []
    if not bins:
        return
    table = Table("confidence", "words", "mean", "right %", title="confidence of words", box=None)
    for one in bins:
        span = f"{one.low:.1f} to {one.high:.1f}"
        table.add_row(span, f"{one.words:,}", f"{one.confidence:.2f}", f"{100 * one.right:.0f}")
    console.print(table)
    error = calibration.expected_calibration_error(confidence, right)
    console.print(f"expected calibration error {error:.3f}", highlight=False)
    if picture:
        points = [(one.confidence, one.right, one.words) for one in bins]
        drawings.save(drawings.reliability_diagram(points, title=evaluated.name), picture)


def calibrate(evaluated: Evaluation, model: str) -> str:
    """Fit the map of confidences and store it in the model folder; says what its error is on the words fitted to."""
    confidence, right = calibration.outcomes(evaluated.utterances)
    if len(right) < calibration.FEWEST_WORDS:
        raise UsageError(f"--calibrate needs {calibration.FEWEST_WORDS} words or more, got {len(right)}")
    points = calibration.fit(confidence, right)
    folder = models.model_folder(model)
    models.store_confidence(folder, points)
    after = calibration.expected_calibration_error([calibrated(c, points) for c in confidence], right)
    where = folder / models.CONFIG
    return f"confidences calibrated on {len(right):,} words, error {after:.3f} on them; stored in {where}"


def delay_line(name: str, delays: Delays) -> str:
    """The delays of a stream."""
    found = delays.percentiles()
    return (
        f"{name}, streaming: from the end of a word to its first partial {found['partial_p50']:.2f} s (median), "
        f"{found['partial_p95']:.2f} s (95 %); to its settled text {found['settled_p50']:.2f} s and "
        f"{found['settled_p95']:.2f} s, computing included"
    )


def pairs(
    first: Sequence[Evaluation], second: Sequence[Evaluation]
) -> Iterator[tuple[Evaluation, Evaluation]]:
    """Rows of two models with the same options: without text, and with it if both have such rows."""
    for informed in (False, True):
        a, b = ([row for row in rows if bool(row.text) == informed] for rows in (first, second))
        yield from zip(a, b, strict=False)  # as many of both, or none of one


def verdict(first: Evaluation, second: Evaluation, comparison: scoring.Comparison) -> str:
    """Whether the second model differs from the first."""
    gap = comparison.difference
    sure = "significant" if comparison.p_value < 0.05 else "not significant"
    ours, theirs = _short([first.name, second.name])
    how = ", ".join(filter(None, [first.strategy, f"B = {first.block_size}", first.text]))
    return (
        f"{theirs} against {ours} ({how}): "
        f"{100 * gap.value:+.2f} points of WER, 95 % {100 * gap.low:+.2f} to {100 * gap.high:+.2f}, "
        f"p = {comparison.p_value:.4f}, {sure}"
    )


def print_worst(console: Console, evaluated: Evaluation, count: int) -> None:
    """The utterances with the most errors, word by word."""
    for one in evaluated.worst(count):
        console.print(
            f"\n{one.id}: errors {one.words.total}, words {one.words.length}", markup=False, highlight=False
        )
        rows = scoring.word_alignment(one.reference, one.hypothesis)
        for spoken, written in side_by_side(rows, console.width - 12):
            console.print(f"reference   {spoken}", markup=False, highlight=False, no_wrap=True)
            console.print(f"hypothesis  {written}", markup=False, highlight=False, no_wrap=True)


def side_by_side(rows: Sequence[tuple[str, str, str]], width: int) -> list[tuple[str, str]]:
    """Two lines, word under word; errors in capitals, stars where there is no word; wrapped together."""
    lines: list[tuple[str, str]] = []
    spoken = written = ""
    for kind, reference, hypothesis in rows:
        wrong = kind != "equal"
        a, b = (
            (word.upper() or "*" * len(other)) if wrong else word
            for word, other in ((reference, hypothesis), (hypothesis, reference))
        )
        space = max(len(a), len(b)) + 1
        if spoken and len(spoken) + space > width:
            lines.append((spoken.rstrip(), written.rstrip()))
            spoken = written = ""
        spoken, written = spoken + a.ljust(space), written + b.ljust(space)
    return [*lines, (spoken.rstrip(), written.rstrip())] if spoken else lines


def write_json(
    path: Path, manifest: str, results: Sequence[Sequence[Evaluation]], comparisons: Sequence[Compared]
) -> None:
    """Everything, every utterance included."""
    content = {
        "manifest": manifest,
        "evaluations": [one.to_dict() for row in results for one in row],
        "comparisons": [
            {
                "first": first.name,
                "second": second.name,
                "block_size": first.block_size,
                "strategy": first.strategy,
                **asdict(comparison),
            }
            for first, second, comparison in comparisons
        ],
    }
    atomic_files.write_text(path, json.dumps(content, ensure_ascii=False, indent=1) + "\n")


def _percent(rate: scoring.Interval) -> str:
    return f"{100 * rate.value:.2f} ({100 * rate.low:.2f}-{100 * rate.high:.2f})"


def _short(names: Sequence[str]) -> list[str]:
    """Models by their folders, runs/X/model as X; with the folders above where that is needed to tell them apart."""
    folders = {name: Path(os.path.abspath(name) if os.path.isdir(name) else name) for name in names}
    places = {name: path.parent if path.name == "model" else path for name, path in folders.items()}
    for parts in range(1, 6):
        short = {name: "/".join(place.parts[-parts:]) or name for name, place in places.items()}
        if len(set(short.values())) == len(short):
            return [short[name] for name in names]
    return list(names)
