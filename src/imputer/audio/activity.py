"""Voice activity by level: where there is speech, and where a recording can be cut.

A block of 20 ms is active when it is well above the noise floor, which follows the quietest recent blocks. The gate
errs on the side of speech: blocks below it are skipped, and blocks above it are decoded.
"""

from collections import deque
from dataclasses import dataclass, field

import numpy as np

BLOCK_SECONDS = 0.02
FLOOR_SECONDS = 10.0  # the noise floor is the quietest tenth of the blocks of this long
ABOVE_FLOOR_DB = 9.0
PAUSE_SECONDS = 0.3  # shortest pause in which a recording is cut
PAUSE_BELOW_DB = 20.0  # the speech around it, the loudest tenth of its blocks
SILENCE_DB = -65.0  # below this level, relative to full scale, nothing is speech
LOUD_DB = -35.0  # above it everything is: speech from the first block on is not taken for the floor


def levels(samples: np.ndarray, sample_rate: int) -> np.ndarray:
    """(block,) root mean square of each whole block of 20 ms, in dB relative to full scale."""
    block = round(BLOCK_SECONDS * sample_rate)
    blocks = samples[: len(samples) // block * block].reshape(-1, block).astype(np.float64)
    return 10 * np.log10(np.mean(blocks**2, axis=1) + 1e-12)


@dataclass
class Gate:
    """Tells active blocks from silent ones as they come."""

    above_floor: float = ABOVE_FLOOR_DB
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=round(FLOOR_SECONDS / BLOCK_SECONDS)))

    def active(self, block_levels: np.ndarray) -> np.ndarray:
        """(block,) True where a block may be speech."""
        self.recent.extend(block_levels.tolist())
        floor = float(np.quantile(np.fromiter(self.recent, float), 0.1)) if self.recent else SILENCE_DB
        threshold = min(max(floor + self.above_floor, SILENCE_DB), LOUD_DB)
        return block_levels > threshold


def pause(samples: np.ndarray, sample_rate: int) -> float | None:
    """Seconds to the middle of the quietest moment, if it is a pause in speech: where to cut."""
    block_levels = levels(samples, sample_rate)
    width = round(PAUSE_SECONDS / BLOCK_SECONDS)
    if len(block_levels) <= width:
        return None
    energy = np.convolve(10 ** (block_levels / 10), np.ones(width) / width, mode="valid")
    quietest = int(energy.argmin())
    if 10 * np.log10(energy[quietest]) > np.quantile(block_levels, 0.9) - PAUSE_BELOW_DB:
        return None
    return (quietest + width / 2) * BLOCK_SECONDS
