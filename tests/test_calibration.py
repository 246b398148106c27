"""Calibration: against words whose probability of being right is known."""

import numpy as np
import pytest

from imputer.evaluation import calibration
from imputer.transcripts import calibrated


def words(count: int, seed: int, truth) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    raw = random.beta(4, 1, count)
    return raw, random.random(count) < truth(raw)


def test_right_words_are_those_of_the_best_alignment():
    right = calibration.right_words(
        ["the", "cat", "sat", "on", "a", "mat"], ["the", "cut", "sat", "on", "the", "mat", "mat"]
    )
    assert right[:4] == [True, False, True, True]
    assert sum(right) == 4


def test_a_calibrated_model_has_no_error():
    raw, right = words(20_000, 0, lambda x: x)
    assert calibration.expected_calibration_error(raw, right) < 0.02
    bins = calibration.reliability(raw, right)
    assert sum(b.words for b in bins) == 20_000
    assert all(b.low <= b.confidence <= b.high for b in bins)


@pytest.mark.parametrize(
    "truth", [lambda x: x**3, lambda x: 1 - (1 - x) ** 2, lambda x: 0.2 + 0.6 * (x > 0.7)]
)
def test_the_map_recovers_the_truth_on_other_words(truth):
    points = calibration.fit(*words(4000, 1, truth))
    raw, right = words(20_000, 2, truth)
    before = calibration.expected_calibration_error(raw, right)
    after = calibration.expected_calibration_error([calibrated(x, points) for x in raw], right)
    assert after < 0.04 < before
    assert len(points) <= calibration.POINTS
    assert [x for x, _ in points] == sorted(x for x, _ in points)
    assert [y for _, y in points] == sorted(y for _, y in points)


def test_the_map_is_the_isotonic_regression_of_scikit_learn_or_brute_force():
    """Of all rising step functions over the groups, the pools have the least squared error."""
    raw, right = words(200, 3, lambda x: x**2)
    order = np.argsort(raw)
    groups = np.array_split(right[order].astype(float), min(4 * calibration.POINTS, 200 // 25))
    points = calibration.fit(raw, right)
    means, sizes = [g.mean() for g in groups], [len(g) for g in groups]
    best = _isotonic(means, sizes)
    assert sorted({round(x, 4) for x in best}) == [y for _, y in points]


def _isotonic(means, sizes):
    """Max-min formula: the value at i is the largest over starts of the smallest over ends of the mean between them."""
    total = lambda a, b: np.average(means[a : b + 1], weights=sizes[a : b + 1])  # noqa: E731
    n = len(means)
    return [max(min(total(a, b) for b in range(i, n)) for a in range(i + 1)) for i in range(n)]


def test_few_or_equal_confidences_do_no_harm():
    assert calibrated(0.3, ()) == 0.3
    assert calibration.fit([0.5] * 40, [True] * 20 + [False] * 20) == ((0.5, 0.5),)
    assert calibrated(0.9, ((0.5, 0.5),)) == 0.5
    assert calibration.expected_calibration_error([], []) == 0
