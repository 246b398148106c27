"""Reading, writing and altering sound."""

from imputer.audio.reader import SAMPLE_RATE, SECONDS_OF_GRACE, AudioInfo, info, read, write

__all__ = ["SAMPLE_RATE", "SECONDS_OF_GRACE", "AudioInfo", "info", "read", "write"]
