"""ARPA files: the common text form of n-gram models, as KenLM and SRILM write them.

Words are the pieces of a vocabulary. <s> and </s> are the start and the end of a text; n-grams with <unk> are
dropped, and its probability goes to pieces that the file does not list.
"""

import math
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

import numpy as np

from imputer.data.text import open_text
from imputer.errors import ImputerError
from imputer.languagemodel.counts import bits_for
from imputer.languagemodel.kneserney import Table
from imputer.languagemodel.ngrams import LanguageModel
from imputer.support.atomic_files import replacing
from imputer.vocabulary import Vocabulary

START, END, UNKNOWN = "<s>", "</s>", "<unk>"
LOG_10 = math.log(10)
NEVER = -99.0  # log10 of the probability of <s>, which is never scored; as other tools write it
LINES = 100_000  # written at once


def write_arpa(lm: LanguageModel, path: str | Path, vocabulary: Vocabulary) -> None:
    """Write a model as ARPA, with the numbers that it stores."""
    lm.check(vocabulary)
    pieces = [END, *vocabulary.pieces(range(1, vocabulary.size + 1))]
    bits = vocabulary.size.bit_length()
    tables = lm.tables()
    with replacing(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
        file.write("\\data\\\n")
        for n, table in enumerate(tables, 1):
            file.write(f"ngram {n}={len(table.keys) + (n == 1)}\n")
        for n, table in enumerate(tables, 1):
            file.write(f"\n\\{n}-grams:\n")
            if n == 1:
                file.write(f"{NEVER:g}\t{START}\t{table.backoffs[0] / LOG_10:.7g}\n")
            for first in range(0, len(table.keys), LINES):
                part = slice(first, first + LINES)
                file.writelines(_lines(table, part, n, bits, pieces, with_backoffs=n < len(tables)))
        file.write("\n\\end\\\n")


def _lines(
    table: Table, part: slice, n: int, bits: int, pieces: list[str], *, with_backoffs: bool
) -> Iterator[str]:
    keys, probs, backoffs = table.keys[part], table.log_probs[part], table.backoffs[part]
    columns = [
        (keys >> np.uint64(bits * place) & np.uint64((1 << bits) - 1)).tolist()
        for place in range(n - 1, -1, -1)
    ]
    for tokens, prob, backoff in zip(
        zip(*columns, strict=True), probs.tolist(), backoffs.tolist(), strict=True
    ):
        words = " ".join(pieces[token] for token in tokens)
        if n > 1 and tokens[0] == 0:
            words = START + words.removeprefix(END)
        # The end of a text is not a context; the number in its place is that of the start.
        ending = f"\t{backoff / LOG_10:.7g}" if with_backoffs and tokens[-1] != 0 else ""
        yield f"{prob / LOG_10:.7g}\t{words}{ending}\n"


def read_arpa(path: str | Path, vocabulary: Vocabulary) -> LanguageModel:
    """Read a model over the pieces of a vocabulary; probabilities are quantised where there are many."""
    return LanguageModel.from_tables(_Reader(Path(path), vocabulary).tables(), vocabulary)


class _Reader:
    """One pass over the lines, then checks of the whole."""

    def __init__(self, path: Path, vocabulary: Vocabulary) -> None:
        self.path, self.vocabulary = path, vocabulary
        self.ids = {piece: i for i, piece in enumerate(vocabulary.pieces(range(1, vocabulary.size + 1)), 1)}
        self.number = 0
        self.unknown = math.nan

    def fail(self, what: str) -> NoReturn:
        raise ImputerError(f"{self.path}, line {self.number}: {what}")

    def tables(self) -> list[Table]:
        lines = self._lines()
        sizes = self._sizes(lines)
        self.bits = bits_for(self.vocabulary.size, len(sizes))
        found = []
        for n, size in enumerate(sizes, 1):
            found.append(self._table(lines, n, size, last=n == len(sizes)))
        found[0] = self._all_pieces(found[0])
        for below, above in pairwise(found):
            self._check_contexts(below, above)
        return [Table(t.keys, t.log_probs, np.nan_to_num(t.backoffs, nan=0.0)) for t in found]

    def _lines(self) -> Iterator[str]:
        with open_text(self.path) as file:
            for line in file:
                self.number += 1
                if line.strip():
                    yield line.strip()
        self.fail("the file ends before \\end\\")

    def _sizes(self, lines: Iterator[str]) -> list[int]:
        if next(lines) != "\\data\\":
            self.fail("an ARPA file starts with \\data\\")
        sizes: list[int] = []
        for line in lines:
            match = re.fullmatch(r"ngram\s+(\d+)\s*=\s*(\d+)", line)
            if match and int(match[1]) == len(sizes) + 1:
                sizes.append(int(match[2]))
            elif line == "\\1-grams:" and sizes:
                return sizes
            else:
                self.fail(f"expected 'ngram {len(sizes) + 1}=...' or '\\1-grams:', got {line[:60]!r}")
        raise AssertionError("lines end in an error")

    def _table(self, lines: Iterator[str], n: int, size: int, *, last: bool) -> Table:
        """The n-grams of an order; NaN where there is no back-off."""
        keys: list[int] = []
        probs: list[float] = []
        backoffs: list[float] = []
        start_backoff, read = math.nan, 0
        closing = "\\end\\" if last else f"\\{n + 1}-grams:"
        for line in lines:
            if line.startswith("\\"):
                if line != closing:
                    self.fail(f"expected {closing} after the {n}-grams, got {line[:60]!r}")
                break
            fields = line.split()
            if len(fields) not in (n + 1, n + 2):
                self.fail(f"expected a log probability, {n} words and perhaps a back-off, got {line[:60]!r}")
            prob, backoff = self._numbers(fields, n)
            read += 1
            words = fields[1 : n + 1]
            if n == 1 and words[0] == START:
                start_backoff = backoff
            elif UNKNOWN in words:
                self.unknown = prob if n == 1 else self.unknown
            else:
                keys.append(self._key(words))
                probs.append(prob)
                backoffs.append(math.nan if n == 1 and words[0] == END else backoff)
        if read != size:
            self.fail(f"{size} {n}-grams were announced, the file has {read}")
        return self._sorted(keys, probs, backoffs, n, start_backoff)

    def _numbers(self, fields: list[str], n: int) -> tuple[float, float]:
        try:
            prob, backoff = float(fields[0]), float(fields[n + 1]) if len(fields) > n + 1 else math.nan
        except ValueError:
            prob = backoff = math.inf
        if not prob <= 0 or backoff == math.inf:
            self.fail(
                f"a log probability is a number of at most 0 and a back-off finite, got {' '.join(fields)!r}"
            )
        return max(prob, NEVER) * LOG_10, backoff * LOG_10

    def _key(self, words: list[str]) -> int:
        key = 0
        for place, word in enumerate(words):
            boundary = (word == START and place == 0 and len(words) > 1) or (
                word == END and place == len(words) - 1
            )
            token = 0 if boundary else self.ids.get(word)
            if token is None:
                self.fail(f"{word!r} is not a piece of this model: the file is over other pieces")
            key = key << self.bits | token
        return key

    def _sorted(
        self, keys: list[int], probs: list[float], backoffs: list[float], n: int, start_backoff: float
    ) -> Table:
        ids = np.array(keys, np.uint64)
        order = np.argsort(ids, kind="stable")
        ids = ids[order]
        if len(ids) > 1 and bool((ids[1:] == ids[:-1]).any()):
            self.fail(f"a {n}-gram is listed twice")
        table = Table(ids, np.array(probs, np.float32)[order], np.array(backoffs, np.float32)[order])
        if n == 1 and len(ids) and ids[0] == 0:
            table.backoffs[0] = start_backoff
        return table

    def _all_pieces(self, table: Table) -> Table:
        """Every single piece, and the end of a text; what the file does not list has the probability of <unk>."""
        size = self.vocabulary.size + 1
        if not len(table.keys) or table.keys[0] != 0:
            self.fail(f"the 1-grams lack {END}")
        lowest = NEVER * LOG_10 if math.isnan(self.unknown) else self.unknown
        probs, backoffs = np.full(size, lowest, np.float32), np.full(size, np.nan, np.float32)
        places = table.keys.astype(np.int64)
        probs[places], backoffs[places] = table.log_probs, table.backoffs
        return Table(np.arange(size, dtype=np.uint64), probs, backoffs)

    def _check_contexts(self, below: Table, above: Table) -> None:
        contexts = np.unique(above.keys >> np.uint64(self.bits))
        places = np.minimum(np.searchsorted(below.keys, contexts), len(below.keys) - 1)
        absent = below.keys[places] != contexts if len(below.keys) else np.ones(len(contexts), bool)
        if bool(absent.any()):
            named = self._spelled(int(contexts[absent][0]))
            raise ImputerError(f"{self.path}: n-grams start with {named!r}, which is not listed itself")
        without = np.isnan(below.backoffs[places])
        if bool(without.any()):
            named = self._spelled(int(contexts[without][0]))
            raise ImputerError(
                f"{self.path}: the back-off of {named!r} is missing, but longer n-grams need it"
            )

    def _spelled(self, key: int) -> str:
        tokens: list[int] = []
        while key or not tokens:
            tokens.append(key & ((1 << self.bits) - 1))
            key >>= self.bits
        return " ".join(START if token == 0 else self.vocabulary.pieces([token])[0] for token in tokens[::-1])
