"""Scoring: word and character error rates, their intervals, and whether two models differ.

Errors are counted by a least-cost edit path (rapidfuzz). Intervals come from resampling utterances with
replacement; two models are compared on the same resampled utterances, so that hard utterances have the same weight.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rapidfuzz.distance import Levenshtein

RESAMPLES = 10_000
CHUNK = 500  # resamples held in memory at a time


@dataclass(frozen=True, slots=True)
class Errors:
    """Edits that turn a reference into a hypothesis, out of ``length`` reference units."""

    substitutions: int
    deletions: int
    insertions: int
    length: int

    @property
    def total(self) -> int:
        return self.substitutions + self.deletions + self.insertions

    @property
    def rate(self) -> float:
        """Errors per reference unit; infinite if there is no reference but there are insertions."""
        if not self.length:
            return float("inf") if self.total else 0.0
        return self.total / self.length

    def __add__(self, other: "Errors") -> "Errors":
        return Errors(
            self.substitutions + other.substitutions,
            self.deletions + other.deletions,
            self.insertions + other.insertions,
            self.length + other.length,
        )


@dataclass(frozen=True, slots=True)
class Interval:
    """A value and the bounds that hold it in 95 of 100 resamples."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """How the second model differs from the first: error rate of the second - that of the first."""

    difference: Interval
    p_value: float  # chance of a difference this large if the two were interchangeable


def word_errors(reference: str, hypothesis: str) -> Errors:
    """Errors in words, separated by whitespace."""
    return count(reference.split(), hypothesis.split())


def character_errors(reference: str, hypothesis: str) -> Errors:
    """Errors in characters; runs of whitespace count as one space."""
    return count(" ".join(reference.split()), " ".join(hypothesis.split()))


def count(reference: Sequence[Any], hypothesis: Sequence[Any]) -> Errors:
    """Substitutions, deletions and insertions of one least-cost edit path."""
    kinds = [edit.tag for edit in Levenshtein.editops(reference, hypothesis)]
    return Errors(kinds.count("replace"), kinds.count("delete"), kinds.count("insert"), len(reference))


def doubled(reference: Sequence[Any], hypothesis: Sequence[Any]) -> int:
    """Insertions of a unit next to the same unit in the hypothesis: a token written twice."""
    edits = Levenshtein.editops(reference, hypothesis)
    return sum(
        hypothesis[edit.dest_pos]
        in (
            *hypothesis[max(0, edit.dest_pos - 1) : edit.dest_pos],
            *hypothesis[edit.dest_pos + 1 : edit.dest_pos + 2],
        )
        for edit in edits
        if edit.tag == "insert"
    )


def fixable(reference: Sequence[str], hypothesis: Sequence[str], score: Callable[[list[str]], float]) -> int:
    """Errors that a language model would fix: with that one undone, ``score`` of the hypothesis rises."""
    before = score(list(hypothesis))
    found = 0
    for edit in Levenshtein.editops(reference, hypothesis):
        right = [] if edit.tag == "insert" else [reference[edit.src_pos]]
        end = edit.dest_pos + (edit.tag != "delete")
        found += score([*hypothesis[: edit.dest_pos], *right, *hypothesis[end:]]) > before
    return found


def total(errors: Sequence[Errors]) -> Errors:
    """The sum over utterances."""
    return sum(errors, Errors(0, 0, 0, 0))


def word_alignment(reference: str, hypothesis: str) -> list[tuple[str, str, str]]:
    """(kind, reference word, hypothesis word) along the edit path; an empty text where a side has no word."""
    spoken, written = reference.split(), hypothesis.split()
    rows: list[tuple[str, str, str]] = []
    for edit in Levenshtein.opcodes(spoken, written):
        left, right = spoken[edit.src_start : edit.src_end], written[edit.dest_start : edit.dest_end]
        width = max(len(left), len(right))
        pairs = zip(left + [""] * (width - len(left)), right + [""] * (width - len(right)), strict=True)
        rows.extend((edit.tag, a, b) for a, b in pairs)
    return rows


def interval(errors: Sequence[Errors], *, resamples: int = RESAMPLES, seed: int = 0) -> Interval:
    """The error rate and its 95 % bootstrap interval over utterances."""
    totals, lengths = _arrays(errors)
    rates = _resampled_rates([totals], lengths, resamples, seed)[0]
    low, high = np.percentile(rates, (2.5, 97.5)) if len(rates) else (np.nan, np.nan)
    return Interval(total(errors).rate, float(low), float(high))


def compare(
    first: Sequence[Errors], second: Sequence[Errors], *, resamples: int = RESAMPLES, seed: int = 0
) -> Comparison:
    """Paired comparison of two models on the same utterances in the same order.

    The interval is a paired bootstrap (Bisani and Ney, 2004). The p-value is a matched-pairs permutation test:
    if the models were interchangeable, every utterance's two error counts could as well change places.
    """
    a, lengths = _arrays(first)
    b, other_lengths = _arrays(second)
    if len(a) != len(b) or not np.array_equal(lengths, other_lengths):
        raise ValueError("two models can only be compared on the same references in the same order")
    rates = _resampled_rates([a, b], lengths, resamples, seed)
    low, high = np.percentile(rates[1] - rates[0], (2.5, 97.5)) if lengths.sum() else (np.nan, np.nan)
    difference = (b.sum() - a.sum()) / max(lengths.sum(), 1)
    return Comparison(
        Interval(float(difference), float(low), float(high)), _permutation_p(b - a, resamples, seed)
    )


def _arrays(errors: Sequence[Errors]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    return np.array([e.total for e in errors], float), np.array([e.length for e in errors], float)


def _resampled_rates(
    totals: list[NDArray[np.float64]], lengths: NDArray[np.float64], resamples: int, seed: int
) -> list[NDArray[np.float64]]:
    """For each model the error rates of ``resamples`` draws of utterances, the same draws for every model."""
    if not lengths.sum():
        return [np.array([]) for _ in totals]
    random = np.random.default_rng(seed)
    rates: list[list[NDArray[np.float64]]] = [[] for _ in totals]
    for start in range(0, resamples, CHUNK):
        shape = (min(CHUNK, resamples - start), len(lengths))
        draws = random.integers(0, len(lengths), shape)  # (resample, utterance)
        words = lengths[draws].sum(1).clip(min=1)
        for rate, errors in zip(rates, totals, strict=True):
            rate.append(errors[draws].sum(1) / words)
    return [np.concatenate(rate) for rate in rates]


def _permutation_p(differences: NDArray[np.float64], resamples: int, seed: int) -> float:
    """Two-sided p-value of the summed differences under random signs."""
    differences = differences[differences != 0]
    if not len(differences):
        return 1.0
    random = np.random.default_rng(seed)
    observed, as_large = abs(differences.sum()), 0
    for start in range(0, resamples, CHUNK):
        signs = random.integers(0, 2, (min(CHUNK, resamples - start), len(differences))) * 2 - 1
        as_large += int((np.abs(signs @ differences) >= observed - 1e-9).sum())
    return (as_large + 1) / (resamples + 1)
