"""Long recordings through encoders whose cost grows with the square of the length."""

from collections.abc import Callable

import numpy as np


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
