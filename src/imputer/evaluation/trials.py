"""Error rates of repeated trainings, with intervals for other speakers and other seeds.

A training is repeated with S seeds and every model decodes the same utterances. The error rate r (errors e over
reference units w, mean over seeds), or the difference of two such rates, would come out differently with other test
speakers and with other trainings. Its interval contains both:

    r ± t(nu) sqrt(V_speakers + V_seeds)

    V_speakers = C / (C - 1) * sum over the C speakers of (e_c - r w_c)^2 / W^2     C - 1 degrees of freedom
    V_seeds    = variance over seeds of the rate of the whole test set, / S          S - 1 for each model
    nu         = Welch and Satterthwaite's for the sum

V_speakers is the variance of a ratio under resampling of whole speakers (utterances where no speakers are known), the
same on both sides of a difference. A bootstrap over three seeds would draw from three values and cover far less than
95 %; Student's t says what three values say about a variance. ``tests/test_trials.py`` measures the coverage of both.
With one seed V_seeds is unknown and left out: the interval then holds for that one training, and ``seeds`` says so.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

LEVEL = 0.95


@dataclass(frozen=True)
class Trials:
    """Errors of one model, trained with several seeds, on the same utterances."""

    errors: NDArray[np.float64]  # (seed, utterance)
    lengths: NDArray[np.float64]  # (utterance,) reference units
    speakers: Sequence[str]  # one per utterance; an empty name is a speaker of its own

    @property
    def by_seed(self) -> NDArray[np.float64]:
        """The error rate of every training."""
        return self.errors.sum(1) / self.lengths.sum()

    @property
    def rate(self) -> float:
        """The mean over trainings."""
        return float(self.by_seed.mean())


@dataclass(frozen=True)
class Estimate:
    """A rate or a difference of rates with its interval."""

    value: float
    low: float
    high: float
    seeds: int  # trainings per model; with one, the interval does not contain the variation of trainings
    base: float = 0.0  # of a difference: the rate of the first
    paired: bool = False  # whether the two sides of a difference are the same trainings, decoded in two ways

    @property
    def relative(self) -> tuple[float, float, float]:
        """Value, low and high of a difference as shares of the first's rate."""
        base = max(self.base, 1e-9)
        return self.value / base, self.low / base, self.high / base


def rate(trials: Trials, level: float = LEVEL) -> Estimate:
    """The error rate and its interval, which ends at 0."""
    found = _estimate(trials.errors.mean(0), trials, [trials.by_seed], level)
    return replace(found, low=max(0.0, found.low))


def difference(first: Trials, second: Trials, level: float = LEVEL, *, paired: bool = False) -> Estimate:
    """The second's error rate - the first's, on the same utterances, and its interval.

    ``paired``: both are the same trainings in the same order, decoded in two ways. What varies then is each training's
    own difference.
    """
    if not np.array_equal(first.lengths, second.lengths) or list(first.speakers) != list(second.speakers):
        raise ValueError("two models can only be compared on the same utterances in the same order")
    errors = second.errors.mean(0) - first.errors.mean(0)
    rates = [second.by_seed - first.by_seed] if paired else [first.by_seed, second.by_seed]
    return replace(_estimate(errors, first, rates, level), base=first.rate, paired=paired)


def _estimate(
    errors: NDArray[np.float64],
    trials: Trials,
    rates: Sequence[NDArray[np.float64]],
    level: float,
) -> Estimate:
    """The ratio of ``errors`` to the lengths; ``rates`` are those of every training of every model in it."""
    value = float(errors.sum() / trials.lengths.sum())
    parts = [_between_speakers(errors - value * trials.lengths, trials)]  # (variance, degrees of freedom)
    seeds = min(len(one) for one in rates)
    if seeds > 1:
        # One part per model: trainings of one may vary far more than those of another.
        parts += [(float(one.var(ddof=1)) / len(one), len(one) - 1) for one in rates]
    variance = sum(part for part, _ in parts)
    if not variance:
        return Estimate(value, value, value, seeds)
    freedom = variance**2 / sum(part**2 / df for part, df in parts if part)
    room = student(level, freedom) * variance**0.5
    return Estimate(value, value - room, value + room, seeds)


def _between_speakers(residuals: NDArray[np.float64], trials: Trials) -> tuple[float, int]:
    """The variance that other speakers would make, and its degrees of freedom."""
    names = [name or str(place) for place, name in enumerate(trials.speakers)]
    _, speaker = np.unique(names, return_inverse=True)
    sums = np.bincount(speaker, residuals)
    count = len(sums)
    if count < 2:
        return 0.0, 1
    return float(count / (count - 1) * np.square(sums).sum() / trials.lengths.sum() ** 2), count - 1


def student(level: float, freedom: float) -> float:
    """The t that holds ``level`` of Student's distribution between -t and t.

    With x = sqrt(freedom) tan(angle) its density is cos(angle)^(freedom - 1), summed here by the trapezoid rule.
    """
    angles = np.linspace(0, np.pi / 2, 20_001)
    density = np.cos(angles) ** (freedom - 1)
    density[-1] = 0.0 if freedom > 1 else density[-1]
    mass = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    return float(freedom**0.5 * np.tan(np.interp(level, mass / mass[-1], angles)))
