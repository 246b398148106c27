"""What the corpora share: what they yield, their options, and the form of their texts."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from imputer.data.drops import Dropped as Dropped  # every corpus takes it from here
from imputer.data.manifest import Utterance
from imputer.data.text import TEXTS
from imputer.errors import UsageError


@dataclass(frozen=True, slots=True)
class Found:
    """An utterance; ``split`` is the part of the corpus it belongs to, "" if there are no parts.

    A duration of 0 stands for "as long as the file", and is filled in when the file is checked.
    """

    utterance: Utterance
    split: str = ""
    recorded: bool = True  # False: there is no audio to check, only text


@dataclass(frozen=True)
class Options:
    """Options of all corpora; each reads those that concern it."""

    audio_folder: Path = Path("audio")  # where corpora that write audio put it
    splits: tuple[str, ...] = ()  # the parts wanted; () is all
    text: str = ""  # a key of TEXTS; "" is the corpus's own choice
    seed: int = 0
    workers: int = 1
    download: bool = False  # librispeech
    mirror: str = ""  # librispeech: an address instead of the official one
    strings: int = 120  # digits: strings made for each speaker
    longest: int = 10  # digits: most digits in a string
    speakers_held_out: int = 4  # digits: speakers for validation, and as many for test
    valid_speakers: tuple[str, ...] = ()  # digits: these by name instead
    test_speakers: tuple[str, ...] = ()
    hours: float = 1.0  # synthetic: of speech to make
    frames_cache: str = ""  # synthetic: folder for the frames of the Moonshine encoder


def normaliser(options: Options, own: str) -> Callable[[str], str]:
    """The text form asked for, or else the corpus's own."""
    name = options.text or own
    if name not in TEXTS:
        raise UsageError(f"text must be one of {', '.join(TEXTS)}, got {name!r}")
    return TEXTS[name]


def existing_folder(source: Path, what: str) -> Path:
    """``source`` if it is a folder, else a sentence on what was expected there."""
    if not source.is_dir():
        raise UsageError(f"{source}: no such folder; expected {what}")
    return source


def files_under(folder: Path) -> Iterator[Path]:
    """Every file below a folder, in the same order on every machine; hidden ones are left out."""
    for place, folders, names in os.walk(folder, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if not name.startswith("."):
                yield Path(place, name)
