"""`imputer evaluate`."""

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from imputer.errors import ImputerError, UsageError, count

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from imputer.data.manifest import Utterance
    from imputer.evaluation import Evaluation
    from imputer.evaluation.baselines import Baseline
    from imputer.recognizer import Recognizer


def evaluate(
    manifest: Path,
    *,
    model: str = "english",
    compare: str = "",
    beside: Annotated[list[str] | None, Parameter(consume_multiple=True)] = None,
    block_size: Annotated[list[int] | None, Parameter(consume_multiple=True)] = None,
    strategy: Annotated[list[str] | None, Parameter(consume_multiple=True)] = None,
    lm: str = "default",
    hotwords: str = "",
    runtime: Literal["torch", "onnx", "onnx-int8"] = "torch",
    device: str = "cpu",
    threads: int = 0,
    streaming: bool = False,
    calibrate: bool = False,
    reliability: Path | None = None,
    limit: int | None = None,
    worst: int = 3,
    json: Path | None = None,
) -> None:
    """Score a model on a manifest: word and character error rates with 95 % intervals, passes, speed.

    - imputer evaluate test.jsonl --model runs/mine/model --block-size 1 4 8
    - imputer evaluate test.jsonl --model english --compare runs/mine/model --json scores.json

    Intervals come from resampling utterances. Several block sizes or strategies give a row each. The exit code
    is 1 if some recordings could not be read; the others are scored, if none is left, nothing is scored.

    Parameters
    ----------
    manifest
        Utterances with their texts, as `imputer prepare` writes them.
    model
        A model folder, or the name of a shipped model.
    compare
        A second model to compare with, utterance by utterance.
    beside
        Baselines to score on the same files: moonshine (with its own decoder), whisper-tiny.en or pocketsphinx, on one
        thread; or the folder of a CTC model, decoded greedily.
    block_size
        Passes of the network, one or more: --block-size 1 4 8. The model's own if not given.
    strategy
        What each pass commits, one or more.
    lm
        A language model: default is the one that a model has, if it has one; none; or a file. With one, there is a row
        without it as well.
    hotwords
        Expected words and phrases, separated by commas, or a file with one per line.
    runtime
        onnx and onnx-int8 need a folder written by `imputer export`.
    device
        A torch device: cpu, cuda, mps.
    threads
        Threads of the network; 0 is torch's own choice. With 1, RTF is processor time, whatever else is running.
    streaming
        Also feed every recording to a live stream: word errors of the settled text, and the delay of its words.
    calibrate
        Fit the confidences of words to this speech, which the model must not have been trained on, and store the map in
        the model folder. The decoding options of the last row are fitted.
    reliability
        Draw the share of right words by confidence: .svg, .png or .pdf.
    limit
        Score this many utterances, spread evenly over the manifest.
    worst
        Show this many utterances with the most errors, word by word.
    json
        Also write everything to this file, every utterance included.
    """
    import itertools
    from dataclasses import replace

    from rich.console import Console

    from imputer import evaluation
    from imputer.data.manifest import Manifest
    from imputer.decoding import Options
    from imputer.languagemodel.hotwords import read
    from imputer.recognizer import Recognizer
    from imputer.support import atomic_files

    if limit is not None and limit < 1:
        raise UsageError(f"--limit must be at least 1, got {limit}")
    if threads < 0:
        raise UsageError(f"--threads must be 0 or more, got {threads}")
    if threads:
        import torch

        torch.set_num_threads(threads)
    sizes: list[int | None] = [*block_size] if block_size else [None]
    ways = [Options(size, how) for how, size in itertools.product(strategy or ["block"], sizes)]
    words = tuple(read(hotwords))
    corpus = Manifest(manifest)
    for problem in corpus.problems:
        print(f"imputer: {problem}", file=sys.stderr)
    utterances = [u for u in evaluation.spread(corpus, limit) if u.text.split()]
    if not utterances:
        raise UsageError(f"{manifest} has no texts to score against")
    # Report what is missing before decoding starts.
    if json:
        atomic_files.probe(json)
    if reliability:
        if reliability.suffix.lower() not in (".svg", ".png", ".pdf"):
            raise UsageError(f"--reliability {reliability}: a picture ends in .svg, .png or .pdf")
        atomic_files.probe(reliability)
    models = [
        (name, Recognizer.from_pretrained(name, runtime=runtime, device=device))
        for name in ([model, compare] if compare else [model])
    ]
    if calibrate:  # from raw confidences, not from those of an older map
        network = models[0][1].model
        network.settings = replace(network.settings, confidence=())
    baselines = [(name, _baseline(name, runtime, device)) for name in beside or ()]
    clock = time.process_time if threads == 1 else time.perf_counter
    results: list[list[Evaluation]] = []
    for name, recognizer in models:
        _warn_of_unknown_letters(recognizer, utterances)
        rows = [row for options in ways for row in _with_text(recognizer, options, lm, words)]
        results.append([_measured(recognizer, utterances, options, name, clock) for options in rows])
    delays = []
    if streaming:
        for (name, recognizer), done in zip(models, results, strict=True):
            live, delay = _streamed(recognizer, utterances, name, None if lm == "none" else lm, words)
            done.append(live)
            delays.append((name, delay))
    others = [_beside(name, baseline, utterances, clock) for name, baseline in baselines]
    console = Console() if sys.stdout.isatty() else Console(width=120)
    comparisons = [(a, b, evaluation.compare(a, b)) for a, b in _pairs(*results)] if compare else []
    worst_of = [row for row in results[0] if row.strategy != "streaming"][-1]
    results += [[other] for other in others]
    console.print(_table(results, str(manifest)))
    _print_reliability(console, worst_of, reliability)
    if calibrate:
        console.print(_calibrate(worst_of, model), highlight=False, markup=False, soft_wrap=True)
    for name, delay in delays:
        console.print(_delay_line(name, delay), highlight=False, markup=False, soft_wrap=True)
    for first, second, difference in comparisons:
        console.print(_verdict(first, second, difference), highlight=False, markup=False, soft_wrap=True)
    _print_worst(console, worst_of, worst)
    if json:
        _write_json(json, str(manifest), results, comparisons)
    failed = {name: error for row in results for one in row for name, error in one.failed.items()}
    for error in failed.values():
        print(f"imputer: {error}", file=sys.stderr)
    if failed:
        sys.exit(1)


def _print_reliability(console: Any, evaluated: "Evaluation", picture: Path | None) -> None:
    """Confidence beside the share of right words, as a table and if asked for as a picture."""
    from rich.table import Table

    from imputer.evaluation import calibration

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
        from imputer.display import drawings

        points = [(one.confidence, one.right, one.words) for one in bins]
        drawings.save(drawings.reliability_diagram(points, title=evaluated.name), picture)


def _calibrate(evaluated: "Evaluation", model: str) -> str:
    """Fit the map, store it, and print its error on the words it was fitted to."""
    from imputer import models
    from imputer.evaluation import calibration
    from imputer.transcripts import calibrated

    confidence, right = calibration.outcomes(evaluated.utterances)
    if len(right) < calibration.FEWEST_WORDS:
        raise UsageError(f"--calibrate needs {calibration.FEWEST_WORDS} words or more, got {len(right)}")
    points = calibration.fit(confidence, right)
    folder = models.model_folder(model)
    models.store_confidence(folder, points)
    after = calibration.expected_calibration_error([calibrated(c, points) for c in confidence], right)
    where = folder / models.CONFIG
    return f"confidences calibrated on {len(right):,} words, error {after:.3f} on them; stored in {where}"


def _streamed(
    recognizer: "Recognizer", utterances: list["Utterance"], name: str, lm: str | None, words: tuple[str, ...]
) -> Any:
    from dataclasses import replace

    from imputer.evaluation.latency import evaluate_stream
    from imputer.streaming.live import OPTIONS

    with _bar(f"{name}, streaming", utterances) as advance:
        options = replace(OPTIONS, lm=lm, hotwords=words)
        return evaluate_stream(recognizer, utterances, name=name, advance=advance, options=options)


def _delay_line(name: str, delays: Any) -> str:
    found = delays.percentiles()
    return (
        f"{name}, streaming: from the end of a word to its first partial {found['partial_p50']:.2f} s (median), "
        f"{found['partial_p95']:.2f} s (95 %); to its settled text {found['settled_p50']:.2f} s and "
        f"{found['settled_p95']:.2f} s, computing included"
    )


def _pairs(
    first: list["Evaluation"], second: list["Evaluation"]
) -> Iterator[tuple["Evaluation", "Evaluation"]]:
    """Rows of two models with the same options: without text, and with it if both have such rows."""
    for informed in (False, True):
        a, b = ([row for row in rows if bool(row.text) == informed] for rows in (first, second))
        yield from zip(a, b, strict=False)  # as many of both, or none of one


def _with_text(recognizer: "Recognizer", options: Any, lm: str, words: tuple[str, ...]) -> list[Any]:
    """The same options without and with language model and hotwords."""
    from dataclasses import replace

    informed = replace(options, lm=None if lm == "none" else lm, hotwords=words)
    return [options, informed] if recognizer.search(informed) is not None else [options]


def _measured(
    recognizer: "Recognizer",
    utterances: list["Utterance"],
    options: Any,
    name: str,
    clock: Callable[[], float],
) -> "Evaluation":
    from imputer import evaluation

    title = f"{name}, {options.strategy} {options.passes(recognizer.model)}"
    with _bar(title, utterances) as advance:
        return _scored(
            evaluation.evaluate(recognizer, utterances, options, name=name, advance=advance, clock=clock)
        )


def _bar(title: str, utterances: list["Utterance"]) -> "AbstractContextManager[Callable[..., None]]":
    from imputer.support import progress

    total = round(sum(utterance.duration for utterance in utterances))
    return progress.bar(title, total, unit="s of audio")


def _scored(evaluated: "Evaluation") -> "Evaluation":
    """Refuse an evaluation without a scored utterance."""
    if not evaluated.utterances:
        reasons = list(evaluated.failed.values())
        raise ImputerError(
            f"{evaluated.name} could not be scored: none of {count(len(reasons), 'recording')} could "
            f"be read; the first: {reasons[0]}"
        )
    return evaluated


def _baseline(name: str, runtime: Any, device: str) -> "Recognizer | Baseline":
    """A baseline: another recogniser, or a model folder."""
    from imputer.evaluation.baselines import BASELINES
    from imputer.recognizer import Recognizer

    if name in BASELINES:
        return BASELINES[name]()
    if not Path(name).is_dir():
        raise UsageError(f"--beside {name}: neither {', '.join(BASELINES)} nor a model folder")
    return Recognizer.from_pretrained(name, runtime=runtime, device=device)


def _beside(
    name: str, baseline: "Recognizer | Baseline", utterances: list["Utterance"], clock: Callable[[], float]
) -> "Evaluation":
    from imputer import evaluation
    from imputer.decoding import Options
    from imputer.recognizer import Recognizer

    if isinstance(baseline, Recognizer):
        return _measured(baseline, utterances, Options(1), name, clock)
    with _bar(name, utterances) as advance:
        return _scored(evaluation.evaluate_baseline(baseline, utterances, advance))


def _warn_of_unknown_letters(recognizer: "Recognizer", utterances: list["Utterance"]) -> None:
    """Warn of characters that the model cannot write, such as upper case: every such word counts as wrong."""
    vocabulary = recognizer.vocabulary
    known = set("".join(vocabulary.pieces(range(1, vocabulary.size + 1)))) | {" "}
    strange = sorted({letter for u in utterances for letter in u.text if not letter.isspace()} - known)
    if strange:
        print(
            f"imputer: the texts have characters that are not in the model's vocabulary: {''.join(strange[:20])}",
            file=sys.stderr,
        )


def _table(results: list[list["Evaluation"]], title: str) -> Any:
    from rich import box
    from rich.table import Table

    from imputer.evaluation import scoring

    rows = [one for row in results for one in row]
    names = _short([one.name for one in rows])
    heading = title if len(results) > 1 else f"{names[0]} on {title}"
    table = Table(box=box.SIMPLE_HEAD, title=f"{heading}: {count(len(rows[0].utterances), 'utterance')}")
    table.title_justify, table.pad_edge = "left", False
    text = ["text"] if any(one.text for one in rows) else []
    columns = ["strategy", *text, "B", "passes", "WER % (95 %)", "S/D/I", "CER % (95 %)", "RTF"]
    for column in [*(["model"] if len(results) > 1 else []), *columns]:
        table.add_column(
            column, justify="left" if column in ("model", "strategy", "text") else "right", no_wrap=True
        )
    for name, one in zip(names, rows, strict=True):
        words = scoring.total([u.words for u in one.utterances])
        table.add_row(
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
    return table


def _percent(rate: Any) -> str:
    return f"{100 * rate.value:.2f} ({100 * rate.low:.2f}-{100 * rate.high:.2f})"


def _short(names: list[str]) -> list[str]:
    """Models by their folders, runs/X/model as X; with the folders above where that is needed to tell them apart."""
    places = {name: Path(name).parent if Path(name).name == "model" else Path(name) for name in names}
    for parts in range(1, 6):
        short = {name: "/".join(place.parts[-parts:]) or name for name, place in places.items()}
        if len(set(short.values())) == len(short):
            return [short[name] for name in names]
    return names


def _verdict(first: "Evaluation", second: "Evaluation", comparison: Any) -> str:
    gap = comparison.difference
    sure = "significant" if comparison.p_value < 0.05 else "not significant"
    ours, theirs = _short([first.name, second.name])
    return (
        f"{theirs} against {ours} ({first.strategy}, B = {first.block_size}): "
        f"{100 * gap.value:+.2f} points of WER, 95 % {100 * gap.low:+.2f} to {100 * gap.high:+.2f}, "
        f"p = {comparison.p_value:.4f}, {sure}"
    )


def _print_worst(console: Any, evaluated: "Evaluation", count: int) -> None:
    from imputer.evaluation import scoring

    for one in evaluated.worst(count):
        console.print(
            f"\n{one.id}: errors {one.words.total}, words {one.words.length}", markup=False, highlight=False
        )
        rows = scoring.word_alignment(one.reference, one.hypothesis)
        for spoken, written in _side_by_side(rows, console.width - 12):
            console.print(f"reference   {spoken}", markup=False, highlight=False, no_wrap=True)
            console.print(f"hypothesis  {written}", markup=False, highlight=False, no_wrap=True)


def _side_by_side(rows: list[tuple[str, str, str]], width: int) -> list[tuple[str, str]]:
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


def _write_json(path: Path, manifest: str, results: list[list["Evaluation"]], comparisons: list[Any]) -> None:
    import dataclasses
    import json

    from imputer.support import atomic_files

    content = {
        "manifest": manifest,
        "evaluations": [one.to_dict() for row in results for one in row],
        "comparisons": [
            {
                "first": first.name,
                "second": second.name,
                "block_size": first.block_size,
                "strategy": first.strategy,
                **dataclasses.asdict(comparison),
            }
            for first, second, comparison in comparisons
        ],
    }
    atomic_files.write_text(path, json.dumps(content, ensure_ascii=False, indent=1) + "\n")
