"""Windows of sound through the network, watched pass by pass; and windows joined to whole recordings.

``hear`` is the recogniser's decoding of a batch with three things more that a server needs: what is wrong with one
recording stays with it, every pass can be watched with its confidences, and the first pass is kept as what
greedy CTC would have said.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from imputer import decoding
from imputer.audio import windows
from imputer.audio.windows import Piece
from imputer.recognizer import OVERLAP_SECONDS, Recognizer, pieces, step_over
from imputer.transcripts import Transcript

THOUSAND = 1000  # confidences of a trace are kept in thousandths

# Called after every pass with its number, the partial alignment (frame,) and the confidences (frame,).
Watch = Callable[[int, list[int], list[float]], None]


class Abandoned(Exception):
    """Nobody is waiting for this batch any more."""


@dataclass(frozen=True, slots=True)
class Heard:
    """What became of one window."""

    piece: Piece  # with a trace if it was to be kept
    sureties: list[list[int]] | None = None  # after each pass, the confidence of each frame in thousandths
    greedy: Piece | None = None  # the likeliest token of every frame in the first pass


@dataclass(frozen=True, slots=True)
class Trace:
    """How a whole recording was imputed, and what greedy CTC made of it."""

    rows: list[list[int]]  # after each pass, the token of each frame
    sureties: list[list[int]]
    greedy: Piece
    block_starts: list[int]  # frames at which a block begins; windows begin one of their own


def window_frames(recognizer: Recognizer) -> tuple[int, int]:
    """A window and the way to the next one, in frames."""
    return windows.in_frames(
        recognizer.window_seconds,
        min(OVERLAP_SECONDS, recognizer.window_seconds / 4),
        recognizer.frame_seconds,
    )


def cut(waveform: np.ndarray, recognizer: Recognizer) -> list[np.ndarray]:
    """The windows of a recording; a short one is its own only window."""
    rate = recognizer.sample_rate
    spans = windows.spans(len(waveform) / rate, *window_frames(recognizer), recognizer.frame_seconds)
    return [waveform[round(a * rate) : round(a * rate) + max(1, round(b * rate))] for a, b in spans]


@torch.inference_mode()
def hear(
    recognizer: Recognizer,
    waveforms: Sequence[np.ndarray],
    *,
    block_size: int,
    strategy: str,
    watches: Sequence[Watch | None] | None = None,
    keep: Sequence[bool] | None = None,
    wanted: Callable[[], bool] = lambda: True,
) -> list[Heard | Exception]:
    """One result a window: what was heard, or why that one could not be.

    ``keep`` says of which windows to keep trace, sureties and greedy result. ``wanted`` is asked before every
    pass; when it says no, ``Abandoned`` is raised.
    """
    watches = watches or [None] * len(waveforms)
    keep = keep or [False] * len(waveforms)
    results: list[Heard | Exception | None] = [None] * len(waveforms)
    features: list[Tensor] = []
    places: list[int] = []
    for place, waveform in enumerate(waveforms):
        try:
            features.append(recognizer.model.front_end.extract(torch.from_numpy(waveform)))
            places.append(place)
        except Exception as error:
            results[place] = error
    if features:
        heard = _decode(
            recognizer,
            features,
            block_size,
            strategy,
            [watches[place] for place in places],
            [keep[place] for place in places],
            wanted,
        )
        for place, one in zip(places, heard, strict=True):
            results[place] = one
    return [result for result in results if result is not None]


def _decode(
    recognizer: Recognizer,
    features: list[Tensor],
    block_size: int,
    strategy: str,
    watches: list[Watch | None],
    keep: list[bool],
    wanted: Callable[[], bool],
) -> list[Heard]:
    model = recognizer.model
    acoustic, frame_lengths = recognizer.encode(features)
    counts = frame_lengths.tolist()
    recorder = _Recorder(model.mask, counts, watches, keep) if any(keep) or any(watches) else None
    one_pass = step_over(model, acoustic, frame_lengths)

    def step(partial: Tensor) -> Tensor:
        if not wanted():
            raise Abandoned
        log_probs = one_pass(partial)  # (batch, frame, token)
        if recorder is not None:
            recorder.log_probs = log_probs
        return log_probs

    result = decoding.impute(
        step,
        frame_lengths,
        block_size=block_size,
        strategy=strategy,
        mask=model.mask,
        blank=model.blank,
        on_pass=recorder.on_pass if recorder else None,
    )
    return [
        recorder.heard(item, piece) if recorder and keep[item] else Heard(piece)
        for item, piece in enumerate(pieces(result, counts))
    ]


class _Recorder:
    """Sees every pass: which frames were committed in it, and how sure the network was."""

    def __init__(self, mask: int, counts: list[int], watches: list[Watch | None], keep: list[bool]) -> None:
        self.mask, self.counts, self.watches, self.keep = mask, counts, watches, keep
        self.log_probs: Tensor | None = None  # of the pass under way
        self.before: Tensor | None = None  # partial alignment after the last pass
        self.held: Tensor | None = None  # confidence after the last pass
        self.rows: list[list[list[int]]] = [[] for _ in counts]
        self.sureties: list[list[list[int]]] = [[] for _ in counts]
        self.greedy: list[Piece] = []

    def on_pass(self, partial: Tensor, number: int) -> None:
        assert self.log_probs is not None
        if number == 1 and any(self.keep):
            self.greedy = self._greedy()
        tokens = partial.clamp(max=self.log_probs.shape[2] - 1)[:, :, None]
        now = self.log_probs.gather(2, tokens)[:, :, 0].exp()  # (batch, frame)
        if self.before is not None and self.held is not None:
            now = torch.where(partial == self.before, self.held, now)
        now = now.masked_fill(partial == self.mask, 0.0)
        self.before, self.held = partial, now
        rows, confidences = partial.tolist(), now.tolist()
        for item, count in enumerate(self.counts):
            row, confidence = rows[item][:count], confidences[item][:count]
            if self.keep[item]:
                self.rows[item].append(row)
                self.sureties[item].append([round(c * THOUSAND) for c in confidence])
            if (watch := self.watches[item]) is not None:
                watch(number, row, confidence)
                if self.mask not in row:  # done before the longest of the batch
                    self.watches[item] = None

    def heard(self, item: int, piece: Piece) -> Heard:
        """The item's result with all that was kept of its passes."""
        rows, sureties = self.rows[item][: piece.passes], self.sureties[item][: piece.passes]
        return Heard(replace(piece, trace=rows), sureties, self.greedy[item])

    def _greedy(self) -> list[Piece]:
        assert self.log_probs is not None
        scores, tokens = self.log_probs.max(2)
        alignments, confidences = tokens.tolist(), scores.exp().tolist()
        return [
            Piece(alignments[item][:count], confidences[item][:count], 1, None)
            for item, count in enumerate(self.counts)
        ]


def whole(
    recognizer: Recognizer, heard: Sequence[Heard], seconds: float, block_size: int = 1
) -> tuple[Transcript, Trace | None]:
    """The transcript of a recording out of its windows, and how it came about if that was kept."""
    hop, blank = window_frames(recognizer)[1], recognizer.model.blank
    piece = windows.join([one.piece for one in heard], hop, blank)
    trace = None
    if piece.trace is not None:
        # Seams depend on the alignment alone, so whatever else is known of frames is joined as the rows are.
        sureties = _joined(heard, [one.sureties or [] for one in heard], hop, blank)
        slots = [[[frame % block_size for frame in range(len(one.piece.alignment))]] for one in heard]
        (slot,) = _joined(heard, slots, hop, blank)
        starts = [f for f in range(len(slot)) if f == 0 or slot[f] != slot[f - 1] + 1]
        greedy = windows.join([one.greedy for one in heard if one.greedy], hop, blank)
        trace = Trace(piece.trace, sureties, greedy, starts)
    return transcript(recognizer, piece, seconds), trace


def _joined(heard: Sequence[Heard], rows: Sequence[list[list[int]]], hop: int, blank: int) -> list[list[int]]:
    """Rows over the frames of windows as rows over the frames of the recording."""
    pieces = [
        Piece(one.piece.alignment, one.piece.confidence, len(of_one), of_one)
        for one, of_one in zip(heard, rows, strict=True)
    ]
    return windows.join(pieces, hop, blank).trace or []


def transcript(recognizer: Recognizer, piece: Piece, seconds: float) -> Transcript:
    """What an alignment spells; its trace is left behind."""
    return recognizer.transcript(replace(piece, trace=None), seconds)
