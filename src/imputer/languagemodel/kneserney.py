"""Interpolated modified Kneser-Ney (Chen and Goodman 1999), and what to leave out so that a model is small.

Below the highest order an n-gram counts once for every token it is seen after. Pruning is Stolcke's (1998), with
contexts weighted by how often they occur, because Kneser-Ney's lower orders do not say that (Chelba et al. 2010).
What was measured: pruned from 68M to 5.4M n-grams (15 MB), a 6-gram of 20M words has 1.4 % more perplexity per
word; handing the counts of what is left out to the order below (Siivola et al. 2007) 3 % more, so it is not done.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from imputer.languagemodel.counts import Counts, Keys

FALLBACK = (0.5, 1.0, 1.5)  # discounts for text so short that counts of counts do not give them; KenLM's
HALVINGS = 40
LEAST = 1e-9  # of a probability that is left over: sums of rounded numbers may fall below 0

Floats = NDArray[np.float32]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Table:
    """The n-grams of one order in a model: sorted keys, log probabilities, and back-offs as contexts, in nats."""

    keys: Keys
    log_probs: Floats
    backoffs: Floats  # 0 where no longer n-gram starts with this one


class _Groups(NamedTuple):
    """N-grams of one context side by side."""

    contexts: Keys
    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]

    def sums(self, values: NDArray[np.generic]) -> NDArray[np.float64]:
        return np.add.reduceat(values, self.starts, dtype=np.float64)

    def each(self, values: NDArray[np.float64]) -> Floats:
        """A value per context, repeated for each of its n-grams."""
        return np.repeat(values.astype(np.float32), self.sizes)


def estimate(counts: Counts) -> list[Table]:
    """The smoothed model over all n-grams, p(w | h) = (c - D(c)) / sum + backoff(h) p(w | h without its first)."""
    tables: list[Table] = []
    for n, (order, adjust) in enumerate(zip(counts.orders, adjusted(counts), strict=True), 1):
        groups = _grouped(order.keys, counts.bits if n > 1 else 64)
        probs = adjust.astype(np.float32)
        probs -= _discount(adjust)
        sums = groups.sums(adjust)
        left = 1 - groups.sums(probs) / sums  # what the order below hands out
        probs /= groups.each(sums)
        share = groups.each(left)
        share *= np.exp(tables[-1].log_probs)[order.suffix] if n > 1 else np.float32(1 / len(order.keys))
        probs += share
        if n > 1:
            _set_backoffs(tables[-1], groups.contexts, left)
        tables.append(Table(order.keys, np.log(probs, out=probs), np.zeros_like(probs)))
    return tables


def adjusted(counts: Counts) -> list[NDArray[np.uint32]]:
    """The counts that probabilities are estimated from, of every order."""
    found = [order.times for order in counts.orders]
    for n in range(len(found) - 1, 0, -1):
        order, above = counts.orders[n - 1], counts.orders[n]
        seen_after = np.bincount(above.suffix, minlength=len(order.keys)).astype(np.uint32)
        if n > 1:  # there is no token before the start of a text
            starts = order.keys >> np.uint64(counts.bits * (n - 1)) == 0
            seen_after[starts] = order.times[starts]
        found[n - 1] = seen_after
    return found


def discounts(adjust: NDArray[np.uint32]) -> tuple[float, float, float]:
    """What is taken off counts of 1, 2, and 3 or more, from how many counts there are of 1 to 4."""
    n1, n2, n3, n4 = (int((adjust == c).sum()) for c in (1, 2, 3, 4))
    if not n1 or not n2 or not n3:
        return FALLBACK
    y = n1 / (n1 + 2 * n2)
    found = 1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3
    return found if all(0 <= d <= c for c, d in enumerate(found, 1)) else FALLBACK


def prune(
    counts: Counts, tables: list[Table], size: Callable[[list[int], int], int], max_bytes: int
) -> list[Table]:
    """Leave out the n-grams whose loss costs least, until the model fits.

    ``size(entries of each order, contexts)`` is the bytes of a model.
    """
    worth = _worths(counts, tables)
    children = [_best_child(counts, worth, n) for n in range(len(worth))]

    def bytes_above(threshold: float) -> int:
        entries = [int((one > threshold).sum()) for one in worth]
        return size(entries, sum(int((one > threshold).sum()) for one in children))

    if bytes_above(-math.inf) <= max_bytes:
        return tables
    low, high = 1e-12, max(float(one[np.isfinite(one)].max(initial=1)) for one in worth)
    for _ in range(HALVINGS):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if bytes_above(middle) <= max_bytes else (middle, high)
    return without(counts, tables, [one > high for one in worth])


def without(counts: Counts, tables: list[Table], kept: Sequence[Flags]) -> list[Table]:
    """The model over the n-grams kept: their probabilities stay, back-offs share out the rest."""
    found: list[Table] = []
    below = np.empty(0, np.float32)  # p(w | h) in the pruned model for all n-grams of the order below
    for n, (order, table, keep) in enumerate(zip(counts.orders, tables, kept, strict=True), 1):
        probs = np.exp(table.log_probs)
        if n > 1:
            groups = _grouped(order.keys, counts.bits)
            shorter = below[order.suffix]
            left = np.maximum(1 - groups.sums(np.where(keep, probs, 0)), LEAST)
            left /= np.maximum(1 - groups.sums(np.where(keep, shorter, 0)), LEAST)
            probs = np.where(keep, probs, groups.each(left) * shorter)
            inner = np.add.reduceat(keep, groups.starts, dtype=np.int64) > 0
            _set_backoffs(found[-1], groups.contexts[inner], left[inner])
        below = probs
        found.append(Table(table.keys[keep], table.log_probs[keep], np.zeros(int(keep.sum()), np.float32)))
    return found


def _worths(counts: Counts, tables: Sequence[Table]) -> list[Floats]:
    """What the text loses in likelihood, in nats, if an n-gram is left out, or if a longer one that needs it is,
    whichever is more. Single tokens are always kept."""
    worth = [np.full(len(table.keys), np.inf, np.float32) for table in tables]
    for n in range(len(tables), 1, -1):
        order, table = counts.orders[n - 1], tables[n - 1]
        groups = _grouped(order.keys, counts.bits)
        probs, shorter = np.exp(table.log_probs), tables[n - 2].log_probs[order.suffix]
        lost = table.log_probs - shorter
        shorter = np.exp(shorter, out=shorter)
        left = np.maximum(1 - groups.sums(probs), LEAST)
        left_shorter = np.maximum(1 - groups.sums(shorter), LEAST)
        shorter += groups.each(left_shorter)
        new_backoff = np.log((groups.each(left) + probs) / shorter, out=shorter)
        lost -= new_backoff
        lost *= probs
        lost += (groups.each(np.log(left / left_shorter)) - new_backoff) * groups.each(left)
        lost *= groups.each(groups.sums(order.times))
        worth[n - 1] = np.maximum(lost, _best_child(counts, worth, n - 1), out=lost)
    return worth


def _best_child(counts: Counts, worth: Sequence[Floats], place: int) -> Floats:
    """For the n-grams at a place in the list of orders, the most that one of their extensions is worth."""
    best = np.full(len(worth[place]), -np.inf, np.float32)
    if place + 1 < len(worth):
        groups = _grouped(counts.orders[place + 1].keys, counts.bits)
        parents = np.searchsorted(counts.orders[place].keys, groups.contexts)
        best[parents] = np.maximum.reduceat(worth[place + 1], groups.starts)
    return best


def _grouped(keys: Keys, bits: int) -> _Groups:
    """Sorted n-grams by context: all but their last ``bits`` bits; single tokens have none."""
    contexts = keys >> np.uint64(bits) if bits < 64 else np.zeros_like(keys)
    starts = np.flatnonzero(np.concatenate(([True], contexts[1:] != contexts[:-1])))
    return _Groups(contexts[starts], starts, np.diff(starts, append=len(contexts)))


def _discount(adjust: NDArray[np.uint32]) -> Floats:
    table = np.array([0, *discounts(adjust)], np.float32)
    return table[np.minimum(adjust, 3)]


def _set_backoffs(table: Table, contexts: Keys, left: NDArray[np.float64]) -> None:
    table.backoffs[np.searchsorted(table.keys, contexts)] = np.log(np.maximum(left, LEAST))
