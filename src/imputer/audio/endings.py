"""Which files are audio, by the ending of their names."""

from pathlib import Path

HEADERLESS = (".pcm", ".raw")
UNREAD = (*HEADERLESS, ".dss")  # listed so that they are reported

AUDIO_ENDINGS = frozenset(
    {
        *(".wav", ".flac", ".ogg", ".oga", ".opus", ".mp3", ".aif", ".aiff", ".au", ".caf", ".w64"),
        *(".sph", ".nist", ".wv1", ".wv2"),
        *(".aifc", ".snd", ".voc"),
        # Read by PyAV.
        *(".aac", ".ac3", ".amr", ".ape", ".dts", ".eac3", ".f4a", ".gsm", ".m4a", ".m4b", ".m4r", ".mka"),
        *(".mp1", ".mp2", ".mpc", ".mpga", ".ra", ".spx", ".tta", ".weba", ".wma", ".wv"),
        *(".3gp", ".avi", ".f4v", ".flv", ".m2ts", ".m4v", ".mkv", ".mov", ".mp4"),
        *(".mpeg", ".mpg", ".mts", ".ogv", ".qt", ".rm", ".vob", ".webm", ".wmv"),
        *UNREAD,
    }
)


def is_audio(path: Path) -> bool:
    return path.suffix.lower() in AUDIO_ENDINGS
