"""The user's text and what a model can read of it: words keep their case and punctuation, and get times."""

import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from imputer.data.text import TITLES, Unspeakable, plain, spell, transcript
from imputer.errors import ImputerError
from imputer.transcripts import Word
from imputer.vocabulary import Vocabulary

ALONE = {"%": "percent"}  # how a symbol is said that stands alone, as in 7 %


@dataclass(frozen=True, slots=True)
class WrittenText:
    """Words as the user wrote them, and the words that the model reads in each."""

    words: list[str]
    readings: list[list[str]]  # for each word; none where the model cannot read it

    @property
    def readable(self) -> str:
        """What the model aligns."""
        return " ".join(word for reading in self.readings for word in reading)

    def timed(self, found: Sequence[Word]) -> list[Word]:
        """The user's words with the times of their readings.

        What the model cannot read (a dash, a symbol) stays with the word before it, or with the first word.
        """
        if len(found) != sum(map(len, self.readings)):
            raise ImputerError(
                f"the alignment has {len(found)} words, the text {sum(map(len, self.readings))}: the model's "
                "vocabulary does not mark where words start"
            )
        rest = iter(found)
        groups: list[tuple[list[str], list[Word]]] = []
        for word, reading in zip(self.words, self.readings, strict=True):
            if groups and (not reading or not groups[-1][1]):
                groups[-1][0].append(word)
            else:
                groups.append(([word], []))
            groups[-1][1].extend(next(rest) for _ in reading)
        return [
            Word(" ".join(texts), times[0].start, times[-1].end, min(time.confidence for time in times))
            for texts, times in groups
        ]


def read(text: str, vocabulary: Vocabulary) -> WrittenText:
    """Split a text at its spaces and find a reading of every word."""
    words = text.split()
    return WrittenText(words, [_reading(word, vocabulary.alphabet) for word in words])


def _reading(word: str, known: set[str]) -> list[str]:
    for reading in _candidates(word):
        for cased in (reading, reading.upper()):
            if cased and set(cased) <= known:
                return cased.split()
    return []


def _candidates(word: str) -> Iterator[str]:
    """What the model may read for a word, the closest to its spelling first; titles are said in full."""
    if not (plain(word) in TITLES and word.endswith(".")):
        yield plain(word) or ALONE.get(word, "")
    with suppress(Unspeakable):
        yield transcript(spell(word))
    bare = unicodedata.normalize("NFKD", word)
    yield plain("".join(character for character in bare if unicodedata.category(character) != "Mn"))
