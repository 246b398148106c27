"""Reading, writing and altering sound."""

from imputer.audio.limits import AudioError, AudioWarning, Limits
from imputer.audio.reader import (
    OPEN_FILES,
    SAMPLE_RATE,
    SECONDS_OF_GRACE,
    AudioInfo,
    Reader,
    check_peak,
    info,
    read,
    write,
)

__all__ = [
    "OPEN_FILES",
    "SAMPLE_RATE",
    "SECONDS_OF_GRACE",
    "AudioError",
    "AudioInfo",
    "AudioWarning",
    "Limits",
    "Reader",
    "check_peak",
    "info",
    "read",
    "write",
]
