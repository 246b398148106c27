"""Text files for language models: plain or compressed, in the form that models write.

Lines are sentences, more or less; what is decoded at once is one to several of them. So lines that follow each other
are joined until they have at least ``WORDS`` words, and that is a text with a start and an end. What was measured, on
the transcripts of four speakers of LibriSpeech: perplexity per word 462 with a text a line, 454 with texts of 25 words
or more, 454 with 1,000. Decoding scores the start, and not the end: a window may end anywhere.
"""

import bz2
import gzip
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TextIO

from imputer.data.text import TEXTS, Unspeakable, spell, transcript
from imputer.errors import ImputerError, UsageError

WORDS = 25
OPENERS: dict[str, Callable[..., IO[str]]] = {".xz": lzma.open, ".gz": gzip.open, ".bz2": bz2.open}


def spoken(line: str) -> str:
    """What a line of a book sounds like: numbers and titles in words, no marks; "" if it cannot be said."""
    try:
        return transcript(spell(line.strip()))
    except Unspeakable:
        return ""


FORMS: dict[str, Callable[[str], str]] = {"spoken": spoken, **TEXTS}


@contextmanager
def open_text(path: Path) -> Iterator[TextIO]:
    """A text file, unpacked by its ending; what is wrong with it is said in one line."""
    try:
        opener = OPENERS.get(path.suffix.lower(), open)
        with opener(path, "rt", encoding="utf-8-sig") as file:
            yield file
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start})") from error
    except (lzma.LZMAError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ImputerError(f"{path} is damaged: {error}") from error
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error


def texts(
    paths: Iterable[Path], form: str = "spoken", words: int = WORDS, read: Callable[[int], None] | None = None
) -> Iterator[str]:
    """Texts of at least ``words`` words from the lines of files; ``read(characters)`` is told of every line."""
    shaped = FORMS[form]
    for path in paths:
        held: list[str] = []
        count = 0
        with open_text(path) as file:
            for line in file:
                if read:
                    read(len(line))
                said = shaped(line)
                if not said:
                    continue
                held.append(said)
                count += said.count(" ") + 1
                if count >= words:
                    yield " ".join(held)
                    held, count = [], 0
        if held:
            yield " ".join(held)
