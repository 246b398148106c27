"""The waveform and the log-mel picture of a recording, as bytes small enough to send to the page."""

import base64
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from imputer import features

MEL_SECONDS, MEL_BINS, PEAK_SECONDS = 0.02, 40, 0.01
MOST_COLUMNS = 30_000  # ten minutes in full detail; longer recordings get coarser columns
CHUNK_FRAMES = 6_000  # computed at a time, so that an hour takes the memory of a minute


def pictures(waveform: np.ndarray, sample_rate: int) -> dict[str, Any]:
    """Peaks and log-mel of (samples,)."""
    frames = max(1, features.frame_count(len(waveform), sample_rate))
    per_column = max(round(MEL_SECONDS / features.SHIFT_SECONDS), math.ceil(frames / MOST_COLUMNS))
    picture = torch.cat(list(_columns(waveform, sample_rate, frames, per_column)), 1)  # (bin, column)
    low, high = np.percentile(picture.numpy(), (5, 99.5))
    scaled = ((picture - low) / max(high - low, 1e-3)).clamp(0, 1).mul(255).byte().numpy()
    return {
        "mel": {
            "columns": scaled.shape[1],
            "bins": scaled.shape[0],
            "column_seconds": round(per_column * features.SHIFT_SECONDS, 3),
            "data": base64.b64encode(scaled.tobytes()).decode(),
        },
        "peaks": {
            "column_seconds": PEAK_SECONDS,
            "data": base64.b64encode(_peaks(waveform, round(PEAK_SECONDS * sample_rate)).tobytes()).decode(),
        },
    }


def _columns(waveform: np.ndarray, sample_rate: int, frames: int, per_column: int) -> Iterator[Tensor]:
    """The picture in pieces (bin, column); frames are cut so that each is what it is in the whole."""
    shift, window = int(sample_rate * features.SHIFT_SECONDS), features.window_samples(sample_rate)
    chunk = per_column * max(1, CHUNK_FRAMES // per_column)
    for first in range(0, frames, chunk):
        last = min(first + chunk, frames)
        samples = torch.from_numpy(waveform[first * shift : (last - 1) * shift + window])
        banks = features.filterbanks(samples, sample_rate, model_rate=None)[
            :, : features.BANKS
        ]  # (frame, 80)
        banks = torch.nn.functional.pad(banks.T[None], (0, -len(banks) % per_column), mode="replicate")
        yield torch.nn.functional.avg_pool2d(banks, (features.BANKS // MEL_BINS, per_column))[0]


def _peaks(waveform: np.ndarray, hop: int) -> np.ndarray:
    """The largest magnitude of every ``hop`` samples, 0 to 255; without a copy of the waveform."""
    whole = len(waveform) - len(waveform) % hop
    parts = [waveform[:whole].reshape(-1, hop), waveform[whole:][None]]
    peaks = [np.maximum(part.max(1), -part.min(1)) for part in parts if part.size]
    return np.clip(np.concatenate(peaks) * 255, 0, 255).astype(np.uint8)
