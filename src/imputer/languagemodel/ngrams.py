"""A language model in memory or mapped from its file, and how it is built."""

import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from imputer.errors import ImputerError, UsageError
from imputer.languagemodel import counts, kneserney, lexicon, trie
from imputer.languagemodel.kneserney import Table
from imputer.languagemodel.lexicon import TIMES, Lexicon
from imputer.support import mapped_tensors
from imputer.support.atomic_files import replacing
from imputer.vocabulary import Vocabulary

FORMAT = "imputer language model 1"
HEADER_BYTES = 4096  # of the file: names, sizes and tables of contents
TEXTS_AT_ONCE = 10_000
LEXICON = "lexicon_"  # before the names of its arrays in a file


class LanguageModel:
    """An n-gram model over the pieces of a vocabulary. Get one with ``build``, ``load`` or ``read_arpa``.

    A text has a start, <s>, and an end, </s>, which only ``score(end=True)`` scores.
    """

    def __init__(self, found: trie.Trie, fingerprint: str, lexicon: Lexicon | None = None) -> None:
        self.trie, self.fingerprint, self.lexicon = found, fingerprint, lexicon

    @property
    def order(self) -> int:
        return len(self.trie.first_entry) - 1

    @property
    def ngrams(self) -> list[int]:
        """How many n-grams of each order there are, single tokens first."""
        return np.diff(self.trie.first_entry).tolist()

    @property
    def size(self) -> int:
        """|V|: tokens are 1..size."""
        return int(self.trie.first_entry[1]) - 1

    def score(self, tokens: Sequence[int], *, start: bool = True, end: bool = False) -> float:
        """log p(tokens) in nats: of a text from its start, or with nothing known before; with its end if asked."""
        return float(self.score_each(tokens, start=start, end=end).sum())

    def score_each(self, tokens: Sequence[int], *, start: bool = True, end: bool = False) -> Any:
        """The log probability of every token after those before it, (token,)."""
        ids = np.asarray(tokens, np.int64)
        if ids.size and not (ids.min() >= 1 and ids.max() <= self.size):
            raise ValueError(f"token ids lie in 1..{self.size}, got {ids[(ids < 1) | (ids > self.size)][0]}")
        return trie.score(self.trie, np.append(ids, 0) if end else ids, start)

    def check(self, vocabulary: Vocabulary, name: str = "the language model") -> None:
        """Refuse a vocabulary with other pieces than this model's."""
        if self.fingerprint != vocabulary.fingerprint:
            raise UsageError(
                f"{name} is over other pieces (vocabulary {self.fingerprint}) than the model "
                f"({vocabulary.fingerprint}); build one with `imputer lm build TEXT --model MODEL`"
            )

    def save(self, path: str | Path) -> None:
        """Write a file that ``load`` maps."""
        from safetensors.numpy import save_file

        named = self.trie._asdict()
        if self.lexicon is not None:
            named |= {f"{LEXICON}{name}": array for name, array in self.lexicon._asdict().items()}
        arrays = {name: np.ascontiguousarray(array) for name, array in named.items()}
        about = {"format": FORMAT, "vocabulary": self.fingerprint, "checksum": _checksum(arrays)}
        with replacing(path) as temporary:  # one note: of several, safetensors would not keep the order
            save_file(arrays, temporary, {"about": json.dumps(about)})

    @classmethod
    def load(cls, path: str | Path) -> "LanguageModel":
        """Map a file that ``save`` wrote."""
        try:
            metadata, arrays = mapped_tensors.read(path)
            about = json.loads(metadata["about"])
            if about["format"] != FORMAT:
                raise ValueError(f"its format is {about['format']!r}")
        except OSError as error:
            raise UsageError(f"cannot read the language model {path}: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ImputerError(
                f"{path} is not a language model written by `imputer lm build` ({error})"
            ) from error
        damaged = about.get("checksum") != _checksum(arrays)
        spelling = {
            name.removeprefix(LEXICON): arrays.pop(name) for name in list(arrays) if name.startswith(LEXICON)
        }
        whole = set(arrays) == set(trie.Trie._fields) and set(spelling) in (set(), set(Lexicon._fields))
        if damaged or not whole:
            raise ImputerError(
                f"{path} is damaged: its contents do not match its checksum; copy or build it again"
            )
        # Copied, as hotwords may add to them: for arrays that cannot be written the search would be compiled again.
        known = Lexicon(**{name: array.copy() for name, array in spelling.items()}) if spelling else None
        return cls(trie.Trie(**arrays), about["vocabulary"], known)

    def tables(self) -> list[Table]:
        """All n-grams with their probabilities and back-offs, as stored."""
        return trie.tables_of(self.trie)

    @classmethod
    def from_tables(cls, tables: Sequence[Table], vocabulary: Vocabulary) -> "LanguageModel":
        return cls(trie.make(tables, vocabulary.size.bit_length()), vocabulary.fingerprint)

    def __repr__(self) -> str:
        return (
            f"LanguageModel(order {self.order}, {sum(self.ngrams):,} n-grams, vocabulary {self.fingerprint})"
        )


def build(
    texts: Iterable[str],
    vocabulary: Vocabulary,
    order: int = 6,
    max_bytes: int | None = 15_000_000,
    *,
    words: Iterable[str] | None = None,
    skipped: Callable[[str], None] | None = None,
) -> LanguageModel:
    """Count and smooth the n-grams of texts, and leave out what is worth least until the file fits ``max_bytes``.

    Each text is scored from its start to its end, so it should be as long as what is decoded at once, from one to
    a few sentences. Texts with a character that no piece spells are passed to ``skipped``. With ``words`` the model has
    a lexicon (``imputer.languagemodel.lexicon``) of them and of all words that the texts have twice or more.
    """
    times: Counter[str] = Counter()
    if words is not None:
        texts = _counted(texts, times)
    bits = counts.bits_for(vocabulary.size, order)
    if max_bytes is not None and max_bytes < _file_bytes([vocabulary.size + 1] + [0] * (order - 1), 0, bits):
        raise UsageError(f"{max_bytes} bytes cannot hold even the single pieces of a model; ask for more")
    counted = counts.count(_tokens(texts, vocabulary, skipped), vocabulary.size, order)
    known = None
    if words is not None:
        known = lexicon.make({*words, *(word for word, n in times.items() if n >= TIMES)}, vocabulary)
    rest = sum(array.nbytes for array in known) if known else 0
    tables = kneserney.estimate(counted)
    if max_bytes is not None:
        tables = kneserney.prune(
            counted, tables, lambda entries, contexts: rest + _file_bytes(entries, contexts, bits), max_bytes
        )
    found = LanguageModel.from_tables(tables, vocabulary)
    found.lexicon = known
    return found


def _counted(texts: Iterable[str], times: Counter[str]) -> Iterator[str]:
    """The texts, their words counted as they pass."""
    for text in texts:
        times.update(text.split())
        yield text


def _tokens(
    texts: Iterable[str], vocabulary: Vocabulary, skipped: Callable[[str], None] | None
) -> Iterator[list[int]]:
    """The tokens of every text, encoded many at a time because that is ten times faster."""
    from itertools import islice

    stream = iter(texts)
    while some := list(islice(stream, TEXTS_AT_ONCE)):
        for text, tokens in zip(some, vocabulary.encode_each(some), strict=True):
            if tokens is not None:
                yield tokens
            elif skipped:
                skipped(text)


def _file_bytes(entries: list[int], contexts: int, bits: int) -> int:
    return HEADER_BYTES + trie.size_in_bytes(entries, contexts, bits)


def _checksum(arrays: dict[str, Any]) -> str:
    total = 0
    for name in sorted(arrays):
        total = zlib.crc32(arrays[name].reshape(-1).view(np.uint8), zlib.crc32(name.encode(), total))
    return f"{total:08x}"
