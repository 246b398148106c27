# mypy: allow-untyped-defs, disable-error-code="assignment"
"""The words that a search may write without a penalty, as a sorted list of hashes.

Pieces can spell anything, and where the sound is unclear they spell words that do not exist. A language model may know
the words of its text; each other word of a transcript then costs ``UNKNOWN`` nats, once it is complete.

The hash of a word grows piece by piece: h(word + piece) = h(word) * factor(piece) + letters(piece) modulo 2^64, which
does not depend on how the word is cut. Of a mixed h the upper 32 bits are kept: of 180,000 words and as many that are
not, some 8 of the latter are taken for words.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from imputer.vocabulary import WORD_MARK, Vocabulary

# Measured with the novels of `english` and 180,000 words on its held-out speakers; see docs/languagemodels.md.
UNKNOWN = 4.0  # nats
TIMES = 2  # that a word must occur in the text: rarer ones are often misprints

FACTOR, MIXER = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93  # odd
ALL = (1 << 64) - 1
FRAGMENT, EMPTY = 0, 1  # hashes: of a text that begins inside a word, and of a word without letters so far


class Lexicon(NamedTuple):
    """The hashes of all words, and how each piece changes the hash of the word that it continues or starts."""

    words: NDArray[np.uint32]  # sorted
    starts: NDArray[np.uint8]  # (token,) whether the piece starts a word
    factors: NDArray[np.uint64]  # (token,)
    letters: NDArray[np.uint64]  # (token,)


NONE = Lexicon(np.empty(0, np.uint32), np.empty(0, np.uint8), np.empty(0, np.uint64), np.empty(0, np.uint64))


def make(words: Iterable[str], vocabulary: Vocabulary) -> Lexicon:
    """The lexicon of these words over the pieces of a vocabulary."""
    pieces = ["", *vocabulary.pieces(range(1, vocabulary.size + 1))]
    spelled = [_grown(0, piece.removeprefix(WORD_MARK)) for piece in pieces]
    factors = [pow(FACTOR, len(piece.removeprefix(WORD_MARK)), 1 << 64) for piece in pieces]
    return Lexicon(
        hashes(words),
        np.array([piece.startswith(WORD_MARK) for piece in pieces], np.uint8),
        np.array(factors, np.uint64),
        np.array(spelled, np.uint64),
    )


def hashes(words: Iterable[str]) -> NDArray[np.uint32]:
    """The hashes of words, sorted, each once."""
    found = np.fromiter((_grown(EMPTY, word) for word in words), np.uint64)
    return np.unique(_mixed(found)).astype(np.uint32)


def _grown(value: int, letters: str) -> int:
    for letter in letters:
        value = (value * FACTOR + ord(letter)) & ALL
    return value


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = values ^ (values >> np.uint64(32))
    return (values * np.uint64(MIXER)) >> np.uint64(32)


@numba.njit(nogil=True)
def extended(lexicon, word, token):
    """The hash of a word after one more piece."""
    if lexicon.starts[token]:
        return lexicon.factors[token] + lexicon.letters[token]
    if word == np.uint64(FRAGMENT):
        return np.uint64(FRAGMENT)
    return word * lexicon.factors[token] + lexicon.letters[token]


@numba.njit(nogil=True)
def is_known(lexicon, word):
    """Whether a word that is complete is in the lexicon, or is not a whole word."""
    if word <= np.uint64(EMPTY):
        return True
    mixed = ((word ^ (word >> np.uint64(32))) * np.uint64(MIXER)) >> np.uint64(32)
    place = np.searchsorted(lexicon.words, np.uint32(mixed))
    return place < len(lexicon.words) and np.uint64(lexicon.words[place]) == mixed
