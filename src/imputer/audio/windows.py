"""Long recordings: overlapping windows, and how their alignments are joined.

Windows start on a frame, so that the frames of an overlap are the same in both of its windows, and joining means to
choose one frame in it.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TypeVar

import numpy as np

from imputer.decoding import Decoded
from imputer.errors import UsageError

PAUSE_MARGIN_SECONDS = 0.4  # that windows on either side of a pause go beyond its middle

Value = TypeVar("Value")


def in_frames(window: float, overlap: float, frame_seconds: float) -> tuple[int, int]:
    """A window and the way to the next one, in frames, from seconds."""
    if not (math.isfinite(window) and math.isfinite(overlap)):
        raise UsageError(f"window and overlap are numbers of seconds, got {window:g} and {overlap:g}")
    frames, shared = round(window / frame_seconds), round(overlap / frame_seconds)
    if not 0 < shared < frames:
        raise UsageError(
            f"windows of {window:g} s that overlap by {overlap:g} s: the overlap must be at least one frame "
            f"({frame_seconds:g} s) and less than the window"
        )
    return frames, frames - shared


def spans(seconds: float, window: int, hop: int, frame_seconds: float) -> Iterator[tuple[float, float]]:
    """(offset, length) in seconds of every window; the last is longer than its overlap."""
    number, start = 0, 0.0
    while number == 0 or seconds - start > (window - hop) * frame_seconds:
        yield start, min(window * frame_seconds, seconds - start)
        number += 1
        start = number * hop * frame_seconds


def spans_at_pauses(
    seconds: float,
    window: int,
    hop: int,
    frame_seconds: float,
    pause: Callable[[float, float], float | None],
) -> Iterator[tuple[float, float]]:
    """As ``spans``, but two windows meet in a pause where there is one, and share only a little of it.

    ``pause(offset, length)`` is the middle of a pause in this part of the recording, in seconds from its start.
    """
    start, margin = 0, max(1, round(PAUSE_MARGIN_SECONDS / frame_seconds))
    while seconds - start * frame_seconds > window * frame_seconds:
        offset, following, end = start * frame_seconds, start + hop, start + window
        found = pause(following * frame_seconds, (window - hop) * frame_seconds)
        if found is not None:
            middle = following + round(found / frame_seconds)
            following, end = max(following, middle - margin), min(end, middle + margin)
        yield offset, (end - start) * frame_seconds
        start = following
    yield start * frame_seconds, seconds - start * frame_seconds


class Cutter:
    """Cuts blocks of samples, as they come, into the windows that ``spans`` has for the whole recording."""

    def __init__(self, window: int, hop: int) -> None:
        self.window, self.hop = window, hop  # samples
        self.parts: list[np.ndarray] = []
        self.count = 0
        self.first = True  # no window has been cut yet

    def add(self, block: np.ndarray) -> None:
        """The next samples."""
        self.parts.append(block)
        self.count += len(block)

    def complete(self) -> Iterator[np.ndarray]:
        """The windows that are complete; of their samples only the overlap is kept."""
        while self.count >= self.window:
            samples = self.waveform()
            self.parts = [samples[self.hop :]]
            self.count -= self.hop
            self.first = False
            yield samples[: self.window]

    def rest(self) -> Iterator[np.ndarray]:
        """The windows that are left; the last is longer than its overlap with the one before."""
        yield from self.complete()
        if self.first or self.count > self.window - self.hop:
            yield self.waveform()

    def waveform(self) -> np.ndarray:
        """All samples that are kept."""
        if len(self.parts) == 1:
            return self.parts[0]
        return np.concatenate(self.parts) if self.parts else np.empty(0, np.float32)


def join(pieces: Sequence[Decoded], hop: int | Sequence[int], blank: int = 0) -> Decoded:
    """One result out of those of windows ``hop`` frames apart; it took the passes of the slowest.

    Hypotheses are of one window each, so a recording of several has none.
    """
    if len(pieces) == 1:
        return pieces[0]
    parts = kept([piece.alignment for piece in pieces], hop, blank)
    passes = max(piece.passes for piece in pieces)
    greedy = [piece.greedy for piece in pieces if piece.greedy is not None]
    return Decoded(
        _joined([piece.alignment for piece in pieces], parts),
        _joined([piece.confidence for piece in pieces], parts),
        passes,
        _joined_passes([piece.trace for piece in pieces], parts, passes),
        _joined_passes([piece.trace_confidence for piece in pieces], parts, passes),
        join(greedy, hop, blank) if len(greedy) == len(pieces) else None,
        _joined([piece.searched or [False] * len(piece.alignment) for piece in pieces], parts),
    )


def kept(alignments: Sequence[Sequence[int]], hop: int | Sequence[int], blank: int = 0) -> list[slice]:
    """The frames that each window contributes: from where its left neighbour hands over to where its right does."""
    hops = [hop] * (len(alignments) - 1) if isinstance(hop, int) else hop
    pairs = zip(pairwise(alignments), hops, strict=True)
    handovers = [way + _handover(left, right, way, blank) for (left, right), way in pairs]
    starts = [0, *(frame - way for frame, way in zip(handovers, hops, strict=True))]
    return [slice(a, b) for a, b in zip(starts, [*handovers, len(alignments[-1])], strict=True)]


def block_starts(pieces: Sequence[Decoded], hop: int, block_size: int, blank: int = 0) -> list[int]:
    """Frames of the joined result at which a block begins; every window begins one of its own."""
    parts = kept([piece.alignment for piece in pieces], hop, blank)
    slots = _joined([[f % block_size for f in range(len(piece.alignment))] for piece in pieces], parts)
    return [f for f in range(len(slots)) if f == 0 or slots[f] != slots[f - 1] + 1]


def seam(left: Sequence[int], right: Sequence[int], blank: int = 0, *, slack: int = 3) -> int:
    """The frame of an overlap at which the right window takes over from the left.

    A token that both windows have, at most ``slack`` frames apart, must not be written twice or lost: the seam does
    not fall between its two places. Of such seams it takes one whose next tokens on either side are in both windows,
    then the one that has the most silence around it and lies near the middle, where both windows have context on both
    sides.
    """
    a = [(frame, token) for frame, token in enumerate(left) if token != blank]
    b = [(frame, token) for frame, token in enumerate(right) if token != blank]
    pairs = _found_by_both(a, b, slack)
    agreed_left, agreed_right = {i for i, _ in pairs}, {j for _, j in pairs}
    spoken = [frame for frame, _ in a + b]

    def worth(cut: int) -> tuple[int, int, float]:
        broken = sum((a[i][0] < cut) != (b[j][0] < cut) for i, j in pairs)
        before = [i for i, (frame, _) in enumerate(a) if frame < cut][-1:]
        after = [j for j, (frame, _) in enumerate(b) if frame >= cut][:1]
        agreed = sum(i in agreed_left for i in before) + sum(j in agreed_right for j in after)
        silence = min((abs(frame + 0.5 - cut) for frame in spoken), default=float(len(left)))
        off_centre = abs(cut - len(left) / 2) / max(len(left), 1)
        return -broken, agreed, min(silence, 12) - 12 * off_centre

    return max(range(len(left) + 1), key=worth)


def _handover(left: Sequence[int], right: Sequence[int], hop: int, blank: int) -> int:
    overlap = min(len(left) - hop, len(right))
    return seam(left[hop : hop + overlap], right[:overlap], blank)


def _joined(rows: Sequence[Sequence[Value]], parts: Sequence[slice]) -> list[Value]:
    return [value for row, part in zip(rows, parts, strict=True) for value in row[part]]


def _joined_passes(
    traces: Sequence[list[list[Value]] | None], parts: Sequence[slice], passes: int
) -> list[list[Value]] | None:
    """All windows after each pass; a window that finished earlier does not change."""
    known = [trace for trace in traces if trace]
    if len(known) < len(traces):
        return None
    return [
        _joined([trace[min(number, len(trace) - 1)] for trace in known], parts) for number in range(passes)
    ]


def _found_by_both(
    a: Sequence[tuple[int, int]], b: Sequence[tuple[int, int]], slack: int
) -> list[tuple[int, int]]:
    """Pairs of equal tokens at most ``slack`` frames apart, in order: as many as possible, as close as possible."""

    def worth(i: int, j: int) -> float:
        apart = abs(a[i][0] - b[j][0])
        return 1 - apart / (slack + 1) if a[i][1] == b[j][1] and apart <= slack else 0.0

    best = [[0.0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i in reversed(range(len(a))):
        for j in reversed(range(len(b))):
            here = worth(i, j)
            together = here + best[i + 1][j + 1] if here else 0.0
            best[i][j] = max(together, best[i + 1][j], best[i][j + 1])
    pairs, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        if best[i][j] == best[i + 1][j]:
            i += 1
        elif best[i][j] == best[i][j + 1]:
            j += 1
        else:
            pairs.append((i, j))
            i, j = i + 1, j + 1
    return pairs


# Long recordings through encoders whose cost grows with the square of the length.


def in_windows(
    run: Callable[[np.ndarray], np.ndarray],
    samples: np.ndarray,
    frames: int,
    *,
    hop: int,
    span: int,
    window: int,
    overlap: int,
) -> np.ndarray:
    """(frame, feature) of (samples,), run in windows of ``window`` frames.

    ``hop`` samples lie between frames and ``span`` under the first, so that a window starts on a frame and the
    number of frames is what one run would give. ``overlap`` frames at an inner end of a window are only context
    for the others.
    """
    pieces, done = [], 0
    while done < frames:
        first = max(0, done - overlap)
        last = min(frames, first + window)
        upto = frames if last == frames else last - overlap
        end = len(samples) if last == frames else (last - 1) * hop + span
        piece = run(samples[first * hop : end])
        pieces.append(piece[done - first : upto - first])
        done = upto
    return np.concatenate(pieces)
