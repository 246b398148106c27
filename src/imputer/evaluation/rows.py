"""The rows of `imputer evaluate`: models, streams and baselines on the same utterances, each with a progress bar."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from imputer import evaluation
from imputer.data.manifest import Utterance
from imputer.decoding import Options
from imputer.errors import ImputerError, UsageError, count
from imputer.evaluation import Evaluation
from imputer.evaluation.baselines import BASELINES, Baseline
from imputer.evaluation.latency import Delays, evaluate_stream
from imputer.recognizer import Recognizer, Runtime
from imputer.streaming.live import OPTIONS
from imputer.support import progress


def model_row(
    name: str,
    recognizer: Recognizer,
    utterances: list[Utterance],
    options: Options,
    clock: Callable[[], float],
) -> Evaluation:
    """A model, decoded one way."""
    with _bar(f"{name}, {options.strategy} {options.passes(recognizer.model)}", utterances) as advance:
        return _scored(
            evaluation.evaluate(recognizer, utterances, options, name=name, advance=advance, clock=clock)
        )


def with_text(
    recognizer: Recognizer, options: Options, lm: str | None, words: tuple[str, ...]
) -> list[Options]:
    """The same options without and with language model and hotwords."""
    informed = replace(options, lm=lm, hotwords=words)
    return [options, informed] if recognizer.search(informed) is not None else [options]


def stream_row(
    name: str, recognizer: Recognizer, utterances: list[Utterance], lm: str | None, words: tuple[str, ...]
) -> tuple[Evaluation, Delays]:
    """A model, fed with the recordings as they are spoken."""
    with _bar(f"{name}, streaming", utterances) as advance:
        options = replace(OPTIONS, lm=lm, hotwords=words)
        return evaluate_stream(recognizer, utterances, name=name, advance=advance, options=options)


def baseline(name: str, runtime: Runtime, device: str) -> Recognizer | Baseline:
    """A baseline: another recogniser, or a model folder."""
    if name in BASELINES:
        return BASELINES[name]()
    if not Path(name).is_dir():
        raise UsageError(f"--beside {name}: neither {', '.join(BASELINES)} nor a model folder")
    return Recognizer.from_pretrained(name, runtime=runtime, device=device)


def baseline_row(
    name: str, other: Recognizer | Baseline, utterances: list[Utterance], clock: Callable[[], float]
) -> Evaluation:
    """A baseline; a model folder is decoded greedily."""
    if isinstance(other, Recognizer):
        return model_row(name, other, utterances, Options(1), clock)
    with _bar(name, utterances) as advance:
        return _scored(evaluation.evaluate_baseline(other, utterances, advance))


def warn_of_unknown_letters(recognizer: Recognizer, utterances: list[Utterance]) -> None:
    """Warn of characters that the model cannot write, such as upper case: every such word counts as wrong."""
    written = {letter for u in utterances for letter in u.text if not letter.isspace()}
    strange = sorted(written - recognizer.vocabulary.alphabet)
    if strange:
        print(
            f"imputer: the texts have characters that are not in the model's vocabulary: {''.join(strange[:20])}",
            file=sys.stderr,
        )


def _bar(title: str, utterances: list[Utterance]) -> AbstractContextManager[Callable[..., None]]:
    total = round(sum(utterance.duration for utterance in utterances))
    return progress.bar(title, total, unit="s of audio")


def _scored(evaluated: Evaluation) -> Evaluation:
    """Refuse an evaluation without a scored utterance."""
    if not evaluated.utterances:
        reasons = list(evaluated.failed.values())
        raise ImputerError(
            f"{evaluated.name} could not be scored: none of {count(len(reasons), 'recording')} could "
            f"be read; the first: {reasons[0]}"
        )
    return evaluated
