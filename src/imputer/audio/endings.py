"""Which files are audio, by the ending of their names."""

from pathlib import Path

HEADERLESS = (".pcm", ".raw")  # cannot be read, and are listed so that they are reported

AUDIO_ENDINGS = frozenset(
    {
        *(".wav", ".flac", ".ogg", ".oga", ".opus", ".mp3", ".aif", ".aiff", ".au", ".caf", ".w64"),
        *(".sph", ".nist", ".wv1", ".wv2"),
        *(".aifc", ".snd"),
        # Read by PyAV.
        *(".aac", ".ac3", ".amr", ".ape", ".m4a", ".m4b", ".mka"),
        *(".mp2", ".spx", ".tta", ".weba", ".wma", ".wv"),
        *(".3gp", ".avi", ".flv", ".m4v", ".mkv", ".mov", ".mp4"),
        *(".mpeg", ".mpg", ".ogv", ".webm", ".wmv"),
        *HEADERLESS,
    }
)


def is_audio(path: Path) -> bool:
    return path.suffix.lower() in AUDIO_ENDINGS
