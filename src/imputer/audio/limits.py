"""What an audio file may cost, and what is wrong with one."""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from imputer.errors import ImputerError, count

RATES = (1_000, 384_000)  # samples per second
CHANNELS = 32
LOUDEST = 50.0  # full scale is 1; samples meant as 16-bit numbers, or out of range, reach more

Reason = Literal["empty", "unsupported", "damaged", "too_long", "missing"]


class AudioError(ImputerError):
    """Audio that cannot be used, and why."""

    def __init__(self, message: str, reason: Reason = "damaged") -> None:
        super().__init__(message)
        self.reason: Reason = reason


MISSING_END = "the end of the audio is missing"


class AudioWarning(UserWarning):
    """Audio that is used although something is missing."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What reading may cost; without limits an ordinary file of any length is read."""

    seconds: float = math.inf  # of audio
    samples: float = math.inf  # of all channels at the file's own rate, which is what decoding costs
    rate: int = RATES[1]
    channels: int = CHANNELS
    check: Callable[[], None] | None = None  # called before every block; raises to stop
    warn: Callable[[str], None] | None = (
        None  # told what is missing in audio that is used; None is an AudioWarning
    )

    def tick(self) -> None:
        """Stop here if reading has been cancelled."""
        if self.check is not None:
            self.check()

    def missing_end(self, name: str, seconds: float | None = None) -> None:
        """Say that a file ends early, for formats that are often cut off and still usable."""
        if self.warn is not None:
            self.warn(MISSING_END)
            return
        there = "" if seconds is None else f"; {seconds:.1f} s can be read"
        warnings.warn(f"{name}: {MISSING_END}{there}", AudioWarning, stacklevel=2)

    def admit(self, name: str, rate: int, channels: int, seconds: float) -> None:
        """Refuse audio over the limits, by its header or by its decoded length."""
        if not RATES[0] <= rate <= self.rate or not 0 < channels <= self.channels:
            raise AudioError(
                f"{name}: {count(channels, 'channel')} at {rate} Hz; up to {self.channels} channels at {RATES[0]} to "
                f"{self.rate} Hz are read"
            )
        most = min(self.seconds, self.samples / (rate * channels))
        if seconds > most:
            detail = "" if most == self.seconds else f" with {channels} channels at {rate} Hz"
            raise AudioError(f"{name}: longer than the limit of {most:.6g} s{detail}", "too_long")


NO_LIMITS = Limits()
