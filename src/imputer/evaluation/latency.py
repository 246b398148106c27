"""Accuracy and delay of a stream: word errors of its settled text, and the delay of every word.

The delay of a word counts from the end of the word in the audio to the moment its event is emitted, the computation of
that step included, as if the stream ran alone on this machine.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from imputer.data.batching import read_utterance
from imputer.data.manifest import Utterance
from imputer.errors import ImputerError
from imputer.evaluation import Evaluation, Scored, score
from imputer.recognizer import Recognizer
from imputer.streaming import Event, Stream
from imputer.streaming.live import OPTIONS
from imputer.transcripts import Word

CHUNK_SECONDS = 0.1
# A partial word this close to a settled one, with the same text, is its first appearance.
SAME_WORD_SECONDS = 0.4


@dataclass(frozen=True, slots=True)
class Delays:
    """Seconds from the end of each word to its first partial appearance and to its settled one."""

    partial: list[float]
    settled: list[float]

    def percentiles(self) -> dict[str, float]:
        """The medians and 95th percentiles, in seconds."""
        named = {"partial": self.partial, "settled": self.settled}
        return {
            f"{name}_p{share}": float(np.percentile(values, share)) if values else float("nan")
            for name, values in named.items()
            for share in (50, 95)
        }


def evaluate_stream(
    recognizer: Recognizer,
    utterances: Sequence[Utterance],
    *,
    name: str = "",
    advance: Callable[[float], None] | None = None,
    **options: Any,
) -> tuple[Evaluation, Delays]:
    """Feed every utterance to a stream in chunks of 0.1 s; score the settled text and time its words."""
    scored: list[Scored] = []
    failed: dict[str, ImputerError] = {}
    delays = Delays([], [])
    spent = 0.0
    for utterance in utterances:
        try:
            samples = read_utterance(utterance, recognizer.sample_rate)
        except ImputerError as error:
            failed[utterance.id] = error
            continue
        stream = Stream(recognizer, **options)
        events, seconds = _play(stream, samples)
        spent += seconds
        settled = [event for event, _ in events if event.kind == "settled"]
        scored.append(score(utterance, " ".join(event.text for event in settled), stream.passes))
        _collect(events, delays)
        if advance:
            advance(utterance.duration)
    text = recognizer.text_knowledge(options.get("options") or OPTIONS)
    return Evaluation(name, 0, "streaming", scored, spent, failed, text), delays


def _play(stream: Stream, samples: np.ndarray) -> tuple[list[tuple[Event, float]], float]:
    """Every event with the moment it is emitted, and the processor time of all."""
    size = round(CHUNK_SECONDS * stream.recognizer.sample_rate)
    found: list[tuple[Event, float]] = []
    total = 0.0
    for first in range(0, len(samples) + size, size):
        started = time.process_time()
        chunk = samples[first : first + size]
        events = stream.feed(chunk) if len(chunk) else stream.finish()
        spent = time.process_time() - started
        total += spent
        found += [(event, event.time + spent) for event in events]
    return found, total


def _collect(events: Sequence[tuple[Event, float]], delays: Delays) -> None:
    partials = [(word, moment) for event, moment in events if event.kind == "partial" for word in event.words]
    for event, moment in events:
        if event.kind != "settled":
            continue
        for word in event.words:
            first = min((at for shown, at in partials if _same(shown, word)), default=moment)
            delays.partial.append(min(first, moment) - word.end)
            delays.settled.append(moment - word.end)


def _same(shown: Word, word: Word) -> bool:
    return shown.text == word.text and abs(shown.start - word.start) < SAME_WORD_SECONDS
