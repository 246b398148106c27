"""Calibrated confidence: of the words with confidence 0.8, 80 % should be right.

The raw confidence of a word is the probability of its least likely token in the pass that committed it. Isotonic
regression on held-out speech maps it to the share of words that are right; the map is stored with the model.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rapidfuzz.distance import Levenshtein

from imputer.evaluation import Scored

BINS = 10
POINTS = 16  # at most, of a stored map
FEWEST_WORDS = 200  # fewer are too few to fit a map


@dataclass(frozen=True, slots=True)
class Bin:
    """Words of similar confidence."""

    low: float
    high: float
    words: int
    confidence: float  # mean
    right: float  # share


def right_words(reference: Sequence[str], hypothesis: Sequence[str]) -> list[bool]:
    """Which words of the hypothesis are in the reference, by the alignment with the fewest errors."""
    right = [False] * len(hypothesis)
    for block in Levenshtein.opcodes(list(reference), list(hypothesis)):
        if block.tag == "equal":
            right[block.dest_start : block.dest_end] = [True] * (block.dest_end - block.dest_start)
    return right


def outcomes(utterances: Sequence[Scored]) -> tuple[list[float], list[bool]]:
    """Every word of the hypotheses: its confidence, and whether it is right."""
    confidence: list[float] = []
    right: list[bool] = []
    for one in utterances:
        words = one.hypothesis.split()
        if len(words) == len(one.confidence):
            confidence += one.confidence
            right += right_words(one.reference.split(), words)
    return confidence, right


def reliability(confidence: Sequence[float], right: Sequence[bool]) -> list[Bin]:
    """Words in bins of equal width by confidence; empty bins are left out."""
    values, hits = np.asarray(confidence, float), np.asarray(right, float)
    places = np.minimum((values * BINS).astype(int), BINS - 1)
    return [
        Bin(
            n / BINS,
            (n + 1) / BINS,
            int(inside.sum()),
            float(values[inside].mean()),
            float(hits[inside].mean()),
        )
        for n in range(BINS)
        if (inside := places == n).any()
    ]


def expected_calibration_error(confidence: Sequence[float], right: Sequence[bool]) -> float:
    """The mean distance between confidence and share of right words over bins, weighted by words."""
    bins = reliability(confidence, right)
    return sum(b.words * abs(b.confidence - b.right) for b in bins) / max(1, sum(b.words for b in bins))


def fit(confidence: Sequence[float], right: Sequence[bool]) -> tuple[tuple[float, float], ...]:
    """Points (raw, calibrated) of a rising, piecewise linear map: isotonic regression by pooling adjacent violators."""
    order = np.argsort(np.asarray(confidence, float), kind="stable")
    values, hits = np.asarray(confidence, float)[order], np.asarray(right, float)[order]
    pools: list[list[float]] = []  # sum of raw, sum of right, words
    # Start from groups of equal size, so that every point rests on enough words.
    for group in np.array_split(np.arange(len(values)), min(4 * POINTS, max(1, len(values) // 25))):
        pools.append([values[group].sum(), hits[group].sum(), len(group)])
        while len(pools) > 1 and pools[-2][1] * pools[-1][2] >= pools[-1][1] * pools[-2][2]:
            last = pools.pop()
            pools[-1] = [a + b for a, b in zip(pools[-1], last, strict=True)]
    points = [(raw / words, hit / words) for raw, hit, words in pools]
    if len(points) > POINTS:
        points = [points[round(i * (len(points) - 1) / (POINTS - 1))] for i in range(POINTS)]
    return tuple((round(raw, 4), round(share, 4)) for raw, share in points)
