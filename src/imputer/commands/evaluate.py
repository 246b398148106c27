"""`imputer evaluate`."""

import itertools
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from imputer.commands.options import FileName
from imputer.errors import UsageError


def evaluate(
    manifest: Path,
    *,
    model: FileName = "english",
    compare: FileName = "",
    beside: Annotated[list[str] | None, Parameter(consume_multiple=True)] = None,
    block_size: Annotated[list[int] | None, Parameter(consume_multiple=True)] = None,
    strategy: Annotated[list[str] | None, Parameter(consume_multiple=True)] = None,
    lm: FileName = "default",
    hotwords: FileName = "",
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
    from rich.console import Console

    from imputer import evaluation
    from imputer.data.manifest import Manifest
    from imputer.decoding import Options
    from imputer.display.drawings import PICTURES
    from imputer.evaluation import reporting, rows
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
    words, known_lm = tuple(read(hotwords)), None if lm == "none" else lm
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
        if reliability.suffix.lower() not in PICTURES:
            raise UsageError(f"--reliability {reliability}: a picture ends in .svg, .png or .pdf")
        atomic_files.probe(reliability)
    models = [
        (name, Recognizer.from_pretrained(name, runtime=runtime, device=device))
        for name in ([model, compare] if compare else [model])
    ]
    if calibrate:  # from raw confidences, not from those of an older map
        network = models[0][1].model
        network.settings = replace(network.settings, confidence=())
    baselines = [(name, rows.baseline(name, runtime, device)) for name in beside or ()]
    clock = time.process_time if threads == 1 else time.perf_counter
    results = []
    for name, recognizer in models:
        rows.warn_of_unknown_letters(recognizer, utterances)
        every = [one for options in ways for one in rows.with_text(recognizer, options, known_lm, words)]
        results.append([rows.model_row(name, recognizer, utterances, one, clock) for one in every])
    delays = []
    if streaming:
        for (name, recognizer), done in zip(models, results, strict=True):
            live, delay = rows.stream_row(name, recognizer, utterances, known_lm, words)
            done.append(live)
            delays.append((name, delay))
    others = [rows.baseline_row(name, other, utterances, clock) for name, other in baselines]
    console = Console() if sys.stdout.isatty() else Console(width=120)
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    comparisons = [(a, b, evaluation.compare(a, b)) for a, b in reporting.pairs(*results)] if compare else []
    worst_of = [row for row in results[0] if row.strategy != "streaming"][-1]
    results += [[other] for other in others]
    console.print(reporting.table(results, str(manifest)))
    reporting.print_reliability(console, worst_of, reliability)
    if calibrate:
        say(reporting.calibrate(worst_of, model))
    for name, delay in delays:
        say(reporting.delay_line(name, delay))
    for first, second, difference in comparisons:
        say(reporting.verdict(first, second, difference))
    reporting.print_worst(console, worst_of, worst)
    if json:
        reporting.write_json(json, str(manifest), results, comparisons)
    failed = {name: error for row in results for one in row for name, error in one.failed.items()}
    for error in failed.values():
        print(f"imputer: {error}", file=sys.stderr)
    if failed:
        sys.exit(1)
