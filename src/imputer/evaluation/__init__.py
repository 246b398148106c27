"""How well and how fast a model decodes a manifest: every utterance's errors, passes, and the time taken."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from imputer.data.batching import read_utterance
from imputer.data.manifest import Utterance
from imputer.decoding import Options
from imputer.errors import ImputerError
from imputer.evaluation import scoring
from imputer.recognizer import Recognizer

if TYPE_CHECKING:
    from imputer.evaluation.baselines import Baseline

Item = TypeVar("Item")
WHOLE_SECONDS = 60.0  # utterances up to here are decoded in one piece, as the paper does with all


@dataclass(frozen=True, slots=True)
class Scored:
    """One utterance: reference, hypothesis and errors."""

    id: str
    reference: str
    hypothesis: str
    seconds: float
    passes: int
    words: scoring.Errors
    characters: scoring.Errors
    confidence: tuple[float, ...] = ()  # of each word of the hypothesis, if the recogniser gives any


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A model on a manifest, decoded one way."""

    name: str
    block_size: int
    strategy: str
    utterances: list[Scored]
    decoding_seconds: float  # by the clock, or the processor's if there is one thread; with reading
    failed: dict[str, ImputerError] = field(default_factory=dict)  # by id
    text: str = ""  # what was known of the text: "lm", "hotwords", "lm + hotwords" or nothing

    @property
    def wer(self) -> scoring.Interval:
        """Word error rate with its 95 % interval."""
        return scoring.interval([one.words for one in self.utterances])

    @property
    def cer(self) -> scoring.Interval:
        """Character error rate with its 95 % interval."""
        return scoring.interval([one.characters for one in self.utterances])

    @property
    def passes(self) -> float:
        """Mean number of passes an utterance took."""
        return sum(one.passes for one in self.utterances) / max(1, len(self.utterances))

    @property
    def real_time_factor(self) -> float:
        """Seconds of processing per second of audio; below 1 is faster than real time."""
        return self.decoding_seconds / max(1e-9, sum(one.seconds for one in self.utterances))

    def worst(self, count: int) -> list[Scored]:
        """The utterances with the most word errors, the shorter first among equals."""
        wrong = [one for one in self.utterances if one.words.total]
        return sorted(wrong, key=lambda one: (-one.words.total, one.words.length, one.id))[:count]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        words = scoring.total([one.words for one in self.utterances])
        characters = scoring.total([one.characters for one in self.utterances])
        return {
            "model": self.name,
            "block_size": self.block_size,
            "strategy": self.strategy,
            "text": self.text,
            "wer": asdict(self.wer),
            "cer": asdict(self.cer),
            "words": asdict(words),
            "characters": asdict(characters),
            "passes": self.passes,
            "real_time_factor": self.real_time_factor,
            "seconds": sum(one.seconds for one in self.utterances),
            "failed": {name: str(error) for name, error in self.failed.items()},
            "utterances": [asdict(one) for one in self.utterances],
        }


def evaluate(
    recognizer: Recognizer,
    utterances: Sequence[Utterance],
    options: Options | None = None,
    *,
    name: str = "",
    advance: Callable[[float], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Evaluation:
    """Decode and score utterances; those that cannot be read are listed with the reason."""
    options = options or Options()
    scored: dict[int, Scored] = {}
    failed: dict[str, ImputerError] = {}
    started = clock()
    for place, result in recognizer.each(utterances, options, advance=advance, window=WHOLE_SECONDS):
        utterance = utterances[place]
        if isinstance(result, ImputerError):
            failed[utterance.id] = result
            continue
        scored[place] = score(
            utterance, result.text, result.passes, [word.confidence for word in result.words]
        )
    return Evaluation(
        name,
        options.passes(recognizer.model),
        str(options.strategy),
        [scored[place] for place in sorted(scored)],
        clock() - started,
        failed,
        recognizer.text_knowledge(options),
    )


def evaluate_baseline(
    baseline: "Baseline", utterances: Sequence[Utterance], advance: Callable[[float], None]
) -> Evaluation:
    """As ``evaluate``, for another recogniser, timed by processor time."""
    scored: list[Scored] = []
    failed: dict[str, ImputerError] = {}
    started = time.process_time()
    for utterance in utterances:
        try:
            scored.append(score(utterance, *baseline.transcribe(read_utterance(utterance))))
        except ImputerError as error:
            failed[utterance.id] = error
        advance(utterance.duration)
    return Evaluation(baseline.name, 0, baseline.strategy, scored, time.process_time() - started, failed)


def score(utterance: Utterance, text: str, passes: int, confidence: Sequence[float] = ()) -> Scored:
    """A hypothesis beside the reference."""
    words, characters = scoring.word_errors, scoring.character_errors
    return Scored(
        *(utterance.id, utterance.text, text, utterance.duration, passes),
        *(words(utterance.text, text), characters(utterance.text, text)),
        tuple(confidence),
    )


def compare(first: Evaluation, second: Evaluation) -> scoring.Comparison:
    """Whether the second model's word error rate differs from the first's, on the utterances both could read."""
    a = {one.id: one.words for one in first.utterances}
    b = {one.id: one.words for one in second.utterances}
    shared = [name for name in a if name in b]
    return scoring.compare([a[name] for name in shared], [b[name] for name in shared])


def spread(utterances: Sequence[Item], limit: int | None) -> list[Item]:
    """At most ``limit`` utterances, taken evenly over all, so that every speaker has a share."""
    count = len(utterances) if limit is None else min(limit, len(utterances))
    return [utterances[i * len(utterances) // count] for i in range(count)]
