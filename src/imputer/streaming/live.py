"""Transcribing a recording while it is being made.

The encoder is not causal, so a window of the last seconds is encoded again every ``hop``. What is settled enters the
new window as commitments: the network reads it as context and imputes only the frames that are still open, in a
few passes. A frame settles when it is older than the look-ahead and two windows in a row agree on it; from
then on it never changes. Windows end at multiples of the hop, counted in samples: the settled text does not depend on
how the samples were cut into chunks.
"""

import math
from collections.abc import Generator, Sequence

import numpy as np
import soxr

from imputer.audio.activity import BLOCK_SECONDS, Gate, levels
from imputer.decoding import Decoded, Options
from imputer.errors import ImputerError, UsageError
from imputer.recognizer import Recognizer
from imputer.streaming.events import Event, Frames, Kind, Window
from imputer.streaming.hypothesis import Hypothesis
from imputer.transcripts import Word, text_of

OPTIONS = Options(4, "adaptive", lm="default")  # four passes at most, about two as a rule
BLANK_PAUSES = 2.5  # blanks for this many pauses count as silence, at any level


Work = Generator[Window, Decoded, None]


class Stream:
    """Takes samples and gives events, in constant time and memory per second of audio.

    options     how to decode windows; the model's own language model decides what imputation is not sure of
    sample_rate of what is fed; the recogniser's own if not given
    window      longest stretch that is encoded at once, in seconds; ``context`` of it stay when it slides
    hop         seconds between two windows
    look_ahead  a frame this old settles if two windows in a row agree on it; at ``patience`` it settles in any case
    gate        tells active blocks from silent ones
    onset       seconds before the first active block that a segment begins with
    pause       silence that ends a segment: everything settles, and the next window begins after it
    carry       False decodes every window afresh, to compare with
    frames      True adds ``Frames`` to the events, one for every window
    """

    def __init__(
        self,
        recognizer: Recognizer,
        *,
        options: Options | None = None,
        sample_rate: int | None = None,
        window: float = 12.0,
        context: float = 6.0,
        hop: float = 0.4,
        look_ahead: float = 0.8,
        patience: float = 2.0,
        gate: Gate | None = None,
        onset: float = 0.3,
        pause: float = 0.8,
        carry: bool = True,
        frames: bool = False,
    ) -> None:
        if not 0 < hop < context < window:
            raise UsageError(
                f"a stream needs 0 < hop < context < window, got {hop:g}, {context:g}, {window:g}"
            )
        if not 0 <= look_ahead <= patience < context:
            raise UsageError(
                "a stream needs 0 <= look_ahead <= patience < context, "
                f"got {look_ahead:g}, {patience:g}, {context:g}"
            )
        self.recognizer = recognizer
        self.options = options or OPTIONS
        self.carry, self.frames = carry, frames
        self.frame = round(recognizer.frame_seconds * recognizer.sample_rate)  # samples
        self.window, self.context, self.hop = (self._frames(s) for s in (window, context, hop))
        self.look_ahead, self.patience = self._frames(look_ahead), self._frames(patience)
        self.onset, self.pause = onset, pause
        self.passes = 0  # of the network so far
        self._resampler = _resampler(sample_rate, recognizer.sample_rate)
        self._new: list[np.ndarray] = []  # chunks since the last window
        self._buffer = np.zeros(
            0, np.float32
        )  # samples from frame ``_hypothesis.first`` on, without ``_new``
        self._hypothesis = Hypothesis(recognizer)
        self._received = 0  # samples
        self._next = self.hop * self.frame  # sample at which the next window ends
        self._gate = gate or Gate()
        self._active_until = -math.inf  # seconds: the end of the last active block
        self._gated = 0  # samples that the gate has seen
        self._emitted = 0  # words of the window that were emitted as settled
        self._speaking = False
        self._wordless = False  # there is sound, but it was taken for silence: words end that, not sound
        self._silent_since = 0.0
        self._partial = ""
        self._events: list[Event | Frames] = []
        self._finished = False

    def _frames(self, seconds: float) -> int:
        return max(1, round(seconds / self.recognizer.frame_seconds))

    def _time(self, frame: int) -> float:
        return round(frame * self.recognizer.frame_seconds, 3)

    def feed(self, samples: np.ndarray) -> list[Event]:
        """Take (samples,), float32 in [-1, 1] or signed integers; returns the new events."""
        return self._run(self.feeding(samples))

    def flush(self) -> list[Event]:
        """Settle everything, and continue with a new window."""
        return self._run(self.flushing())

    def finish(self) -> list[Event]:
        """Settle everything and end the stream."""
        return self._run(self.finishing())

    def clear(self) -> None:
        """Discard everything that is not settled."""
        self._update_gate()
        self._begin_window(0)
        self._speaking = False
        self._active_until = -math.inf

    @property
    def seconds(self) -> float:
        """Position of the stream."""
        return self._received / self.recognizer.sample_rate

    # The same with the network elsewhere: each yields windows, is sent the decoded windows, and returns the events.

    def feeding(self, samples: np.ndarray) -> Generator[Window, Decoded, list[Event]]:
        if self._finished:
            raise UsageError("the stream is finished; make a new one")
        samples = _checked(samples)
        if self._resampler is not None:
            samples = self._resampler.resample_chunk(samples)
        yield from self._add(samples)
        return self._take_events()

    def flushing(self) -> Generator[Window, Decoded, list[Event]]:
        self._update_gate()
        yield from self._end_segment()
        self._begin_window(0)
        return self._take_events()

    def finishing(self) -> Generator[Window, Decoded, list[Event]]:
        if self._finished:
            return []
        if self._resampler is not None:
            yield from self._add(self._resampler.resample_chunk(np.zeros(0, np.float32), last=True))
        self._finished = True
        return (yield from self.flushing())

    def _run(self, work: Generator[Window, Decoded, list[Event]]) -> list[Event]:
        try:
            window = next(work)
            while True:
                result = self.recognizer.decode([window.samples], self.options, starts=[window.start])[0]
                window = work.throw(result) if isinstance(result, ImputerError) else work.send(result)
        except StopIteration as end:
            return end.value

    def _take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events  # type: ignore[return-value]  # Frames only for those who asked for them

    def _emit(self, kind: Kind, start: float = 0.0) -> None:
        self._events.append(Event(kind, self.seconds, start=start))

    def _emit_words(self, kind: Kind, words: Sequence[Word]) -> None:
        self._events.append(Event(kind, self.seconds, text_of(words), tuple(words)))

    def _add(self, samples: np.ndarray) -> Work:
        while len(samples):
            take = min(len(samples), self._next - self._received)
            self._new.append(samples[:take])
            self._received += take
            samples = samples[take:]
            if self._received == self._next:
                self._next += self.hop * self.frame
                yield from self._step()

    def _take_chunks(self) -> None:
        if self._new:
            self._buffer = np.concatenate((self._buffer, *self._new))
            self._new = []

    def _step(self) -> Work:
        """One hop further: decode the window unless there is no speech."""
        self._update_gate()
        if self.seconds - self._active_until >= self.pause:
            if self._hypothesis.tokens:
                yield from self._end_segment()
            self._begin_window(self._frames(self.onset))
            return
        changed = self._hypothesis.settled
        yield from self._decode()
        self._emit_speech()
        now = self._received // self.frame
        self._settle(self._hypothesis.agreed(now - self.patience, now - self.look_ahead))
        self._emit_partial()
        self._emit_frames(changed)
        self._slide()
        self._check_blanks()

    def _update_gate(self) -> None:
        """Update the voice activity with the new samples."""
        self._take_chunks()
        block = round(BLOCK_SECONDS * self.recognizer.sample_rate)
        start = self._gated - (self._received - len(self._buffer))
        new = levels(self._buffer[max(0, start) :], self.recognizer.sample_rate)
        active = np.flatnonzero(self._gate.active(new))
        if len(active):
            self._active_until = (self._gated + (int(active[-1]) + 1) * block) / self.recognizer.sample_rate
        self._gated += len(new) * block

    def _decode(self) -> Work:
        """Impute the open frames of the window, given the settled ones."""
        hypothesis = self._hypothesis
        if len(self._buffer) < self.frame:
            return
        given = hypothesis.tokens[: hypothesis.settled_count] if self.carry else []
        found = yield Window(self._buffer, given)
        self.passes += found.passes
        hypothesis.replace_open(found)

    def _settle(self, border: int) -> None:
        """Settle the frames before ``border``, and emit the words that are complete with it."""
        hypothesis = self._hypothesis
        if border > hypothesis.settled:
            hypothesis.settled = border
            self._emit_settled(hypothesis.complete())

    def _emit_settled(self, count: int) -> None:
        """Emit the words in the first ``count`` frames that have not been emitted."""
        words = self._hypothesis.words(count)
        if len(words) > self._emitted:
            self._emit_words("settled", words[self._emitted :])
            self._emitted = len(words)

    def _emit_partial(self) -> None:
        words = self._hypothesis.words()[self._emitted :]
        text = text_of(words)
        if text != self._partial:
            self._partial = text
            self._emit_words("partial", words)

    def _emit_frames(self, changed: int) -> None:
        if not self.frames:
            return
        hypothesis = self._hypothesis
        place = changed - hypothesis.first
        self._events.append(
            Frames(
                self.seconds,
                changed,
                hypothesis.settled,
                hypothesis.tokens[place:],
                hypothesis.confidence[place:],
            )
        )

    def _emit_speech(self) -> None:
        hypothesis = self._hypothesis
        if self._speaking or (self._wordless and len(hypothesis.words()) <= self._emitted):
            return
        self._speaking, self._wordless = True, False
        self._emit("speech", max(self._time(hypothesis.first), self._silent_since))

    def _emit_silence(self, start: float) -> None:
        if self._speaking:
            self._speaking, self._silent_since = False, start
            self._emit("silence", start)

    def _check_blanks(self) -> None:
        """A long sound without words counts as silence."""
        hypothesis = self._hypothesis
        blanks = hypothesis.blanks()
        if self._speaking and not self._partial and blanks >= self._frames(BLANK_PAUSES * self.pause):
            self._wordless = True
            self._emit_silence(self._time(hypothesis.end - blanks))

    def _end_segment(self) -> Work:
        """The end of speech: settle the whole window."""
        hypothesis = self._hypothesis
        if hypothesis.tokens or self._active_until > hypothesis.first * self.recognizer.frame_seconds:
            changed = hypothesis.settled
            yield from self._decode()
            self._emit_speech()
            hypothesis.settled = hypothesis.end
            self._emit_settled(len(hypothesis.tokens))
            self._emit_frames(changed)
        self._emit_silence(round(min(self.seconds, self._active_until), 3))

    def _begin_window(self, frames: int) -> None:
        """Begin a new window with the last ``frames`` whole frames as its start."""
        whole = (self._received - len(self._buffer)) // self.frame + len(self._buffer) // self.frame
        first = max(self._hypothesis.first, whole - frames)
        self._buffer = self._buffer[(first - self._hypothesis.first) * self.frame :]
        self._hypothesis = Hypothesis(self.recognizer, first, first)
        self._partial = ""
        self._emitted = 0
        self._wordless = False

    def _slide(self) -> None:
        """Drop settled sound from the left of a window that is full, in the longest pause that leaves the context."""
        hypothesis = self._hypothesis
        over = len(hypothesis.tokens) - self.window
        if over <= 0:
            return
        latest = min(hypothesis.complete(), len(hypothesis.tokens) - self.context)
        gaps = [gap for gap in hypothesis.gaps() if over <= gap[0] <= latest]
        cut = max(gaps, key=lambda gap: (gap[1], gap[0]), default=(latest, 0))[0]
        if cut < over:  # one endless word: the window must not grow for it
            cut = over
            self._emit_settled(cut)
        self._emitted -= len(hypothesis.words(cut))
        self._buffer = self._buffer[cut * self.frame :]
        self._hypothesis = hypothesis.cut(cut)


def _resampler(given: int | None, wanted: int) -> soxr.ResampleStream | None:
    if given is None or given == wanted:
        return None
    if given <= 0:
        raise UsageError(f"a sample rate is a positive number, got {given}")
    return soxr.ResampleStream(given, wanted, 1, dtype="float32")


def _checked(samples: np.ndarray) -> np.ndarray:
    array = np.asarray(samples)
    if array.ndim != 1:
        raise UsageError(f"a stream takes (samples,), got shape {array.shape}")
    if np.issubdtype(array.dtype, np.signedinteger):
        array = array / float(np.iinfo(array.dtype).max + 1)
    elif not np.issubdtype(array.dtype, np.floating):
        raise UsageError(f"a stream takes floats or signed integers, got {array.dtype}")
    array = np.ascontiguousarray(array, np.float32)
    if not np.isfinite(array).all():
        raise ImputerError(f"sample {int(np.argmin(np.isfinite(array)))} of the chunk is not finite")
    return array
