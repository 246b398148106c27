"""Text files for language models: plain or compressed, in the form that models write.

Lines are sentences, more or less; what is decoded at once is one to several of them. So lines that follow each other
are joined until they have at least ``WORDS`` words, and that is a text with a start and an end. What was measured, on
the transcripts of four speakers of LibriSpeech: perplexity per word 462 with a text a line, 454 with texts of 25 words
or more, 454 with 1,000. Decoding scores the start, and not the end: a window may end anywhere.
"""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from imputer.data.text import TEXTS, Unspeakable, open_text, spell, transcript

WORDS = 25


def spoken(line: str) -> str:
    """A line as it is spoken: numbers and titles in words, no marks; "" if it cannot be spelled out."""
    try:
        return transcript(spell(line.strip()))
    except Unspeakable:
        return ""


FORMS: dict[str, Callable[[str], str]] = {"spoken": spoken, **TEXTS}


def texts(
    paths: Iterable[Path], form: str = "spoken", words: int = WORDS, read: Callable[[int], None] | None = None
) -> Iterator[str]:
    """Texts of at least ``words`` words from the lines of files; ``read(characters)`` is called after every line."""
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
