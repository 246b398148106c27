"""The input of a stream's network, and the events of a stream."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from imputer.transcripts import Word

Kind = Literal["speech", "partial", "settled", "silence"]


@dataclass(frozen=True, slots=True)
class Event:
    """Something new about the text. Times are seconds from the start of the stream.

    speech   there may be speech from ``start`` on
    partial  ``text`` and ``words`` are all that is not settled yet
    settled  ``text`` and ``words`` are new, and never change again
    silence  there is no speech from ``start`` on; all words before are settled
    """

    kind: Kind
    time: float  # position of the stream when the event was made
    text: str = ""
    words: tuple[Word, ...] = ()
    start: float = 0.0


@dataclass(frozen=True, slots=True)
class Frames:
    """The alignment from the first frame that may have changed on; those before ``settled`` are final."""

    time: float
    first: int
    settled: int
    tokens: list[int]
    confidence: list[float]
    kind: Literal["frames"] = "frames"


@dataclass(frozen=True, slots=True)
class Window:
    """What the network is to decode: samples, and the tokens of their first frames, which are given."""

    samples: np.ndarray
    start: list[int]
