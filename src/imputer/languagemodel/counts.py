# mypy: allow-untyped-defs, disable-error-code="assignment"
"""Counting n-grams in a stream of texts, by sorting.

An n-gram is one integer: its tokens in ``bits`` bits each, the first token highest, so that sorted n-grams of one
context lie side by side and the suffix of an n-gram is its low bits. Token 0, the blank of an alignment, is the
boundary here: at the front of an n-gram it is the start of a text, <s>, at the end of one its end, </s>.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from imputer.errors import ImputerError, UsageError
from imputer.lattice.compilation import entry

MOST_ORDER = 6
CHUNK = 4_000_000  # n-grams that are sorted at once
MOST_NGRAMS = 40_000_000  # distinct ones of the highest order: under 6 GB in all
TEXTS_AT_ONCE = 20_000

Keys = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Order:
    """The n-grams of one length that occur, sorted."""

    keys: Keys
    times: NDArray[np.uint32]  # how often each occurs
    suffix: NDArray[np.uint32]  # its place, without its first token, in the order below


@dataclass(frozen=True, slots=True)
class Counts:
    """All n-grams up to the highest order, shortest first; all single tokens are included, seen or not."""

    size: int  # |V|
    bits: int
    orders: list[Order]


def bits_for(size: int, order: int) -> int:
    """Bits for a token of 0..size; an order whose n-grams do not fit in 64 bits is refused."""
    if isinstance(order, bool) or not isinstance(order, int) or not 1 <= order <= MOST_ORDER:
        raise UsageError(
            f"the order of a language model is a whole number of 1 to {MOST_ORDER}, got {order!r}"
        )
    bits = size.bit_length()
    if bits * order > 64:
        raise UsageError(
            f"a vocabulary of {size} pieces allows an order of at most {64 // bits}, got {order}"
        )
    return bits


def count(texts: Iterable[list[int]], size: int, order: int) -> Counts:
    """Count the n-grams of texts that are given as tokens 1..size; texts without tokens are skipped."""
    bits = bits_for(size, order)
    keys, times = _merged(_windows(texts, bits, order), order)
    if not len(keys):
        raise ImputerError("the text holds no words that the vocabulary can spell; nothing to count")
    return Counts(size, bits, _orders(keys, times, size, bits, order))


def low_bits(bits: int) -> np.uint64:
    return np.uint64((1 << bits) - 1)


def _windows(texts: Iterable[list[int]], bits: int, order: int) -> Iterator[Keys]:
    """For every token and every end of a text, the n-gram that it closes; starts are filled up with boundaries."""
    padding = [0] * max(1, order - 1)
    waiting: list[Keys] = []
    held = 0
    stream = iter(texts)
    while some := list(islice(stream, TEXTS_AT_ONCE)):
        flat = [token for text in some if text for part in (padding, text, (0,)) for token in part]
        tokens = np.array(flat, np.uint64)
        if not len(tokens):
            continue
        keys = tokens.copy()
        for back in range(1, order):
            keys[back:] |= tokens[:-back] << np.uint64(back * bits)
        # A boundary without a token before it is padding, not the end of a text.
        closes = tokens > 0
        closes[1:] |= tokens[:-1] > 0
        waiting.append(keys[closes])
        held += len(waiting[-1])
        if held >= CHUNK:
            yield np.concatenate(waiting)
            waiting, held = [], 0
    if waiting:
        yield np.concatenate(waiting)


def _merged(chunks: Iterable[Keys], order: int) -> tuple[Keys, NDArray[np.uint32]]:
    """Distinct keys and how often each occurs; runs of like size are merged, so each key is moved a few times."""
    runs: list[tuple[Keys, NDArray[np.uint32]]] = []
    for chunk in chunks:
        chunk.sort()
        first = np.flatnonzero(np.concatenate(([True], chunk[1:] != chunk[:-1])))
        runs.append((chunk[first], np.diff(first, append=len(chunk)).astype(np.uint32)))
        while len(runs) > 1 and len(runs[-2][0]) < 2 * len(runs[-1][0]):
            runs.append(_merge(*runs.pop(), *runs.pop()))
        if sum(len(keys) for keys, _ in runs) > MOST_NGRAMS:
            raise ImputerError(
                f"the text holds more than {MOST_NGRAMS:,} distinct n-grams of order {order}, more than memory "
                "is planned for: give a lower order or less text"
            )
    while len(runs) > 1:
        runs.append(_merge(*runs.pop(), *runs.pop()))
    return runs[0] if runs else (np.empty(0, np.uint64), np.empty(0, np.uint32))


@entry
def _merge(keys_a, times_a, keys_b, times_b):
    """Two sorted runs as one; what both hold is added up."""
    keys = np.empty(len(keys_a) + len(keys_b), np.uint64)
    times = np.empty(len(keys), np.uint32)
    a = b = n = 0
    while a < len(keys_a) or b < len(keys_b):
        take_a = b == len(keys_b) or (a < len(keys_a) and keys_a[a] <= keys_b[b])
        take_b = a == len(keys_a) or (b < len(keys_b) and keys_b[b] <= keys_a[a])
        keys[n] = keys_a[a] if take_a else keys_b[b]
        times[n] = 0
        if take_a:
            times[n] += times_a[a]
            a += 1
        if take_b:
            times[n] += times_b[b]
            b += 1
        n += 1
    return keys[:n].copy(), times[:n].copy()


def _orders(keys: Keys, times: NDArray[np.uint32], size: int, bits: int, order: int) -> list[Order]:
    """Every order from the highest: the n-grams below are the distinct suffixes of those above."""
    found: list[Order] = []
    for n in range(order, 0, -1):
        real = _real(keys, bits, n)
        if n == 1:
            found.append(_unigrams(keys, times, size))
            break
        suffixes = keys & low_bits(bits * (n - 1))
        places = np.argsort(suffixes, kind="stable")
        ordered = suffixes[places]
        opens = np.concatenate(([True], ordered[1:] != ordered[:-1]))
        starts = np.flatnonzero(opens)
        below = ordered[starts]
        # Where each n-gram's suffix lies among those of the order below that are kept there.
        kept_below = _real(below, bits, n - 1)
        rank = below if n == 2 else np.cumsum(kept_below) - 1
        suffix = np.empty(len(keys), np.uint32)
        suffix[places] = rank[np.cumsum(opens) - 1]
        found.append(Order(keys[real], times[real], suffix[real]))
        times = np.add.reduceat(times[places], starts, dtype=np.uint32)
        keys = below
    while not len(found[0].keys):  # no text is as long as that
        del found[0]
    return found[::-1]


def _real(keys: Keys, bits: int, n: int) -> NDArray[np.bool_]:
    """False for what has two boundaries in front: a shorter n-gram that was filled up."""
    return (keys >> np.uint64(bits * (n - 2))) > 0 if n > 1 else np.ones(len(keys), bool)


def _unigrams(keys: Keys, times: NDArray[np.uint32], size: int) -> Order:
    every = np.zeros(size + 1, np.uint32)
    every[keys] = times
    return Order(np.arange(size + 1, dtype=np.uint64), every, np.zeros(size + 1, np.uint32))
