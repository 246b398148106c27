"""Which files are audio, by the ending of their names."""

from pathlib import Path

AUDIO_ENDINGS = frozenset(
    {
        *(".wav", ".flac", ".ogg", ".oga", ".opus", ".mp3", ".aif", ".aiff", ".au", ".caf", ".w64"),
        *(".sph", ".nist", ".wv1", ".wv2"),
        # Read by PyAV.
        *(".aac", ".ac3", ".amr", ".m4a", ".m4b", ".mka", ".mp2", ".weba", ".wma"),
        *(".3gp", ".avi", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".webm"),
    }
)


def is_audio(path: Path) -> bool:
    return path.suffix.lower() in AUDIO_ENDINGS
