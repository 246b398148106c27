"""A recording transcribed while it is still being made.

The encoder is not causal, so a window of the last seconds is encoded again every ``hop``. What is settled enters the
new window as commitments: the network reads it as context and imputes only the frames that are still open, in a
few passes. A frame settles when it is older than the look-ahead and two windows in a row agree on it; from
then on it never changes. Windows end at multiples of the hop, counted in samples: the settled text does not depend on
how the samples were cut into chunks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal

import numpy as np
import torch

from imputer import decoding
from imputer.audio.activity import BLOCK_SECONDS, Gate, levels
from imputer.decoding import Decoded, Options
from imputer.errors import ImputerError, UsageError
from imputer.recognizer import Recognizer
from imputer.transcripts import WORD_MARK, Word

PASSES = 4  # at most; "adaptive" takes about two


@dataclass(frozen=True, slots=True)
class Event:
    """Something new about the text. Times are seconds from the start of the stream."""

    kind: Literal["partial", "settled", "silence"]
    time: float  # position of the stream when the event was made
    text: str = ""  # partial: all that is not settled yet; settled: what is new
    words: tuple[Word, ...] = ()


@dataclass(slots=True)
class _Hypothesis:
    """The alignment of the window: tokens and confidences of its frames, settled ones first."""

    first: int = 0  # number of its first frame, counted from the start of the stream
    settled: int = 0  # number of the first frame that is not settled
    tokens: list[int] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.first + len(self.tokens)


class Stream:
    """Takes samples at the recogniser's rate and gives events.

    window      longest stretch that is encoded at once, in seconds; ``context`` of it stay when it slides
    hop         seconds between two windows
    look_ahead  a frame this old settles if two windows in a row agree on it; at ``patience`` it settles in any case
    pause       silence that ends a segment: everything settles, and the next window begins after it
    carry       False decodes every window afresh, to compare with
    """

    def __init__(
        self,
        recognizer: Recognizer,
        *,
        options: Options | None = None,
        window: float = 12.0,
        context: float = 6.0,
        hop: float = 0.4,
        look_ahead: float = 0.8,
        patience: float = 2.0,
        pause: float = 0.8,
        carry: bool = True,
    ) -> None:
        if not 0 < hop < context < window:
            raise UsageError(
                f"a stream needs 0 < hop < context < window, got {hop:g}, {context:g}, {window:g}"
            )
        if not 0 <= look_ahead <= patience:
            raise UsageError(
                f"a stream needs 0 <= look_ahead <= patience, got {look_ahead:g} and {patience:g}"
            )
        self.recognizer = recognizer
        self.options = options or Options(PASSES, "adaptive")
        self.carry = carry
        self.frame = round(recognizer.frame_seconds * recognizer.sample_rate)  # samples
        self.window, self.context, self.hop = (self._frames(s) for s in (window, context, hop))
        self.look_ahead, self.patience = self._frames(look_ahead), self._frames(patience)
        self.pause = pause
        self.passes = 0  # of the network so far
        self._buffer = np.zeros(0, np.float32)  # samples from frame ``_hypothesis.first`` on
        self._hypothesis = _Hypothesis()
        self._received = 0  # samples
        self._next = self.hop * self.frame  # sample at which the next window ends
        self._gate = Gate()
        self._active_until = 0.0  # seconds: the end of the last active block
        self._gated = 0  # samples that the gate has seen
        self._told: list[Word] = []  # words of the window that were given as settled
        self._partial = ""
        self._before: list[int] = []  # tokens of the window before
        self._finished = False

    def _frames(self, seconds: float) -> int:
        return max(1, round(seconds / self.recognizer.frame_seconds))

    def feed(self, samples: np.ndarray) -> list[Event]:
        """Take (samples,) float32 in [-1, 1] at the recogniser's rate; whatever that makes known."""
        if self._finished:
            raise UsageError("the stream is finished; make a new one")
        samples = _checked(samples)
        events: list[Event] = []
        while len(samples):
            take = min(len(samples), self._next - self._received)
            self._buffer = np.concatenate((self._buffer, samples[:take]))
            self._received += take
            samples = samples[take:]
            if self._received == self._next:
                self._next += self.hop * self.frame
                events += self._step()
        return events

    def finish(self) -> list[Event]:
        """Settle everything that is left."""
        if self._finished:
            return []
        self._finished = True
        return [*self._end_segment(), Event("silence", self._seconds)]

    @property
    def _seconds(self) -> float:
        return self._received / self.recognizer.sample_rate

    def _step(self) -> Iterator[Event]:
        """One hop further: decode the window unless nobody speaks."""
        self._listen()
        quiet = self._seconds - self._active_until
        if quiet >= self.pause:
            if self._hypothesis.tokens:
                yield from self._end_segment()
                yield Event("silence", self._seconds)
            self._keep(self._frames(0.3))
            return
        self._decode()
        yield from self._settle(self._agreed())
        yield from self._tell_partial()
        self._slide()

    def _listen(self) -> None:
        """Let the gate look at what is new."""
        block = round(BLOCK_SECONDS * self.recognizer.sample_rate)
        start = self._gated - (self._received - len(self._buffer))
        new = levels(self._buffer[max(0, start) :], self.recognizer.sample_rate)
        active = np.flatnonzero(self._gate.active(new))
        if len(active):
            self._active_until = (self._gated + (int(active[-1]) + 1) * block) / self.recognizer.sample_rate
        self._gated += len(new) * block

    @torch.inference_mode()
    def _decode(self, options: Options | None = None) -> None:
        """Impute the open frames of the window, given the settled ones."""
        hypothesis, network = self._hypothesis, self.recognizer.model
        if len(self._buffer) < self.frame:
            return
        features = network.front_end.extract(torch.from_numpy(self._buffer))
        acoustic, lengths = self.recognizer.encode([features])
        frames = int(lengths[0])
        start = torch.full((1, frames), network.mask, device=acoustic.device)
        committed = min(frames, hypothesis.settled - hypothesis.first) if self.carry else 0
        if committed > 0:
            start[0, :committed] = torch.tensor(hypothesis.tokens[:committed], device=acoustic.device)
        found = decoding.decode(network, acoustic, lengths, options or self.options, start=start)[0]
        if isinstance(found, ImputerError):
            raise found
        self.passes += found.passes
        settled = hypothesis.settled - hypothesis.first
        self._before = hypothesis.tokens
        # Frames that are settled keep their token whatever the window says.
        hypothesis.tokens = hypothesis.tokens[:settled] + found.alignment[settled:]
        hypothesis.confidence = hypothesis.confidence[:settled] + found.confidence[settled:]

    def _agreed(self) -> int:
        """The number of the first frame that stays open.

        Frames settle from the left, as long as they are older than the look-ahead and have the token they had in the
        window before, or are older than the patience.
        """
        hypothesis, before = self._hypothesis, self._before
        now = self._received // self.frame
        oldest, newest = now - self.patience, now - self.look_ahead
        border = max(hypothesis.settled, min(oldest, hypothesis.end))
        for frame in range(hypothesis.settled, min(newest, hypothesis.end)):
            place = frame - hypothesis.first
            if place >= len(before) or before[place] != hypothesis.tokens[place]:
                break
            border = max(border, frame + 1)
        return border

    def _settle(self, border: int) -> Iterator[Event]:
        """Settle the frames in front of ``border``, and tell the words that are complete with it."""
        hypothesis = self._hypothesis
        if border <= hypothesis.settled:
            return
        hypothesis.settled = border
        words = self._words(complete_only=True)
        new = tuple(words[len(self._told) :])
        if new:
            self._told = words
            yield Event("settled", self._seconds, " ".join(word.text for word in new), new)

    def _words(self, *, complete_only: bool) -> list[Word]:
        """Words of the window with times in the stream: all, or those that nothing can be added to any more."""
        hypothesis = self._hypothesis
        count = hypothesis.settled - hypothesis.first if complete_only else len(hypothesis.tokens)
        if complete_only:
            count = self._complete(hypothesis.tokens[:count])
        decoded = Decoded(hypothesis.tokens[:count], hypothesis.confidence[:count], 0)
        offset = hypothesis.first * self.recognizer.frame_seconds
        transcript = self.recognizer.transcript(decoded, count * self.recognizer.frame_seconds)
        return [
            replace(w, start=round(w.start + offset, 3), end=round(w.end + offset, 3))
            for w in transcript.words
        ]

    def _complete(self, tokens: Sequence[int]) -> int:
        """How many settled frames hold whole words: up to the start of the last one, or all if a pause follows it."""
        blank = self.recognizer.model.blank
        spoken = [place for place, token in enumerate(tokens) if token != blank]
        if not spoken or len(tokens) - spoken[-1] > self._frames(0.5):
            return len(tokens)
        pieces = self.recognizer.vocabulary.pieces([tokens[place] for place in spoken])
        starts = [place for place, piece in zip(spoken, pieces, strict=True) if piece.startswith(WORD_MARK)]
        return starts[-1] if starts else 0

    def _gaps(self, tokens: Sequence[int]) -> list[tuple[int, int]]:
        """(frame, length) of the pauses between words: the frame in the middle of each."""
        blank = self.recognizer.model.blank
        spoken = [place for place, token in enumerate(tokens) if token != blank]
        pieces = self.recognizer.vocabulary.pieces([tokens[place] for place in spoken])
        words = [place for place, piece in zip(spoken, pieces, strict=True) if piece.startswith(WORD_MARK)]
        ends = {place: before for before, place in pairwise(spoken)}
        return [((ends[place] + 1 + place) // 2, place - ends[place] - 1) for place in words if place in ends]

    def _tell_partial(self) -> Iterator[Event]:
        words = self._words(complete_only=False)[len(self._told) :]
        text = " ".join(word.text for word in words)
        if text != self._partial:
            self._partial = text
            yield Event("partial", self._seconds, text, tuple(words))

    def _end_segment(self) -> Iterator[Event]:
        """Somebody stopped speaking: settle all of the window and begin a new one."""
        if len(self._buffer) >= self.frame and (self._hypothesis.tokens or self._finished):
            self._decode()
            hypothesis = self._hypothesis
            hypothesis.settled = hypothesis.end
            new = tuple(self._words(complete_only=False)[len(self._told) :])
            if new:
                yield Event("settled", self._seconds, " ".join(word.text for word in new), new)
        self._partial = ""
        self._told = []

    def _keep(self, frames: int) -> None:
        """Begin a new window with the last ``frames`` frames as its start."""
        whole = (self._received - len(self._buffer)) // self.frame + len(self._buffer) // self.frame
        first = max(self._hypothesis.first, whole - frames)
        self._buffer = self._buffer[(first - self._hypothesis.first) * self.frame :]
        self._hypothesis = _Hypothesis(first, first)
        self._before = []

    def _slide(self) -> None:
        """Drop settled sound from the left of a window that is full, in the longest pause that leaves the context."""
        hypothesis = self._hypothesis
        if len(hypothesis.tokens) <= self.window:
            return
        told = self._complete(hypothesis.tokens[: hypothesis.settled - hypothesis.first])
        latest = max(1, min(told, len(hypothesis.tokens) - self.context))
        gaps = [gap for gap in self._gaps(hypothesis.tokens) if gap[0] <= latest]
        cut = max(gaps, key=lambda gap: (gap[1], gap[0]), default=(latest, 0))[0]
        starts = (hypothesis.first + cut) * self.recognizer.frame_seconds
        kept_words = [word for word in self._told if word.start >= starts]
        self._buffer = self._buffer[cut * self.frame :]
        self._hypothesis = _Hypothesis(
            hypothesis.first + cut,
            max(hypothesis.settled, hypothesis.first + cut),
            hypothesis.tokens[cut:],
            hypothesis.confidence[cut:],
        )
        self._told = kept_words


def _checked(samples: np.ndarray) -> np.ndarray:
    array = np.asarray(samples)
    if array.ndim != 1:
        raise UsageError(f"a stream takes (samples,), got shape {array.shape}")
    if np.issubdtype(array.dtype, np.integer):
        array = array / float(np.iinfo(array.dtype).max + 1)
    array = np.ascontiguousarray(array, np.float32)
    if not np.isfinite(array).all():
        raise ImputerError(f"sample {int(np.argmin(np.isfinite(array)))} of the chunk is not a finite number")
    return array
