"""Intervals of repeated trainings: their coverage on simulated data, and their parts against what is known."""

import numpy as np
import pytest

from imputer.evaluation import scoring, trials
from imputer.evaluation.trials import Trials

SPEAKERS, UTTERANCES, WORDS = 20, 10, 15


def simulated(
    random: np.random.Generator, seeds: int, gain: float, luck: tuple[float, float] = (0.1, 0.1)
) -> tuple[Trials, Trials]:
    """Two models on the same speakers; speakers and utterances differ in difficulty, trainings in luck."""
    names = np.repeat([f"s{n}" for n in range(SPEAKERS)], UTTERANCES).tolist()
    lengths = random.integers(5, 2 * WORDS, len(names)).astype(float)
    hard = np.repeat(random.normal(0, 0.25, SPEAKERS), UTTERANCES) + random.normal(0, 0.3, len(names))
    tastes = np.repeat(
        random.normal(0, 0.05, SPEAKERS), UTTERANCES
    )  # what one model finds harder than the other
    found = []
    for level, taste, spread in ((0.30, -tastes, luck[0]), (0.30 + gain, tastes, luck[1])):
        lucks = random.normal(0, spread, (seeds, 1))
        chance = np.clip(level * np.exp(lucks + hard + taste), 0, 1)  # (seed, utterance)
        found.append(Trials(random.binomial(lengths.astype(int), chance).astype(float), lengths, names))
    return found[0], found[1]


def bootstrap(first: Trials, second: Trials, random: np.random.Generator) -> tuple[float, float]:
    """The plain alternative: draw seeds and utterances with replacement."""
    rates = []
    for _ in range(200):
        drawn = random.integers(0, len(first.lengths), len(first.lengths))
        sides = [one.errors[random.integers(0, len(one.errors), len(one.errors))] for one in (first, second)]
        means = [side[:, drawn].mean(0).sum() / first.lengths[drawn].sum() for side in sides]
        rates.append(means[1] - means[0])
    low, high = np.percentile(rates, (2.5, 97.5))
    return float(low), float(high)


def test_coverage_where_the_trainings_of_one_model_vary_far_more() -> None:
    """With one variance for the trainings of both models only 91 % of the intervals held the true difference."""
    random, big = np.random.default_rng(7), np.random.default_rng(99)
    luck = (0.2, 0.02)
    truth = np.mean([trials.difference(*simulated(big, 40, 0.0, luck)).value for _ in range(300)])
    found = [trials.difference(*simulated(random, 3, 0.0, luck)) for _ in range(600)]
    share = np.mean([one.low <= truth <= one.high for one in found])
    assert share > 0.92, share


@pytest.mark.parametrize("seeds", [3, 5])
def test_coverage_is_what_it_says(seeds: int) -> None:
    """On 600 simulated tables 95 % of the intervals hold the true difference; of a bootstrap's, far fewer."""
    random = np.random.default_rng(seeds)
    big = np.random.default_rng(99)
    truth = np.mean([trials.difference(*simulated(big, 40, 0.0)).value for _ in range(300)])
    assert truth == pytest.approx(0.0, abs=0.002)  # the two models are alike in distribution
    rounds = 600
    ours = plain = alone = 0
    for number in range(rounds):
        first, second = simulated(random, seeds, 0.0)
        found = trials.difference(first, second)
        ours += found.low <= 0 <= found.high
        if number < rounds // 4:
            low, high = bootstrap(first, second, random)
            plain += low <= 0 <= high
        single = trials.difference(
            *(Trials(one.errors[:1], one.lengths, one.speakers) for one in (first, second))
        )
        alone += single.low <= 0 <= single.high
    assert 0.93 <= ours / rounds <= 0.985
    assert alone / rounds < 0.6  # one seed: the interval of the speakers alone
    if seeds == 3:
        assert plain / (rounds // 4) < 0.92


def test_the_coverage_of_a_rate() -> None:
    random = np.random.default_rng(0)
    truth = np.mean([simulated(random, 10, 0.0)[0].rate for _ in range(400)])
    found = [trials.rate(simulated(random, 3, 0.0)[0]) for _ in range(400)]
    assert 0.92 <= np.mean([one.low <= truth <= one.high for one in found]) <= 0.985


@pytest.mark.parametrize(
    ("freedom", "level", "known"),
    [
        (1, 0.95, 12.706),
        (2, 0.95, 4.303),
        (4, 0.95, 2.776),
        (19, 0.95, 2.093),
        (4, 0.9875, 4.315),
        (1e5, 0.95, 1.960),
    ],
)
def test_students_t_is_that_of_the_tables(freedom: float, level: float, known: float) -> None:
    assert trials.student(level, freedom) == pytest.approx(known, abs=2e-3)


def test_by_hand() -> None:
    """Two speakers, two seeds, one word each: every part is small enough to work out."""
    first = Trials(np.array([[1.0, 0.0], [1.0, 1.0]]), np.array([10.0, 10.0]), ["a", "b"])
    found = trials.rate(first)
    assert found.value == pytest.approx(1.5 / 20) and first.by_seed.tolist() == [0.05, 0.1]
    speakers = 2 * ((1 - 0.75) ** 2 + (0.5 - 0.75) ** 2) / 20**2
    seeds = np.var([0.05, 0.1], ddof=1) / 2
    freedom = (speakers + seeds) ** 2 / (speakers**2 + seeds**2)
    assert found.high - found.value == pytest.approx(
        trials.student(0.95, freedom) * (speakers + seeds) ** 0.5
    )
    same = trials.difference(first, first)
    assert same.value == 0 and same.high == -same.low > 0 and same.base == pytest.approx(0.075)
    alone = Trials(first.errors[:1], first.lengths, ["", ""])
    assert trials.difference(alone, alone) == trials.Estimate(0.0, 0.0, 0.0, 1, 0.05)
    with pytest.raises(ValueError, match="same utterances"):
        trials.difference(first, alone)


def test_doubled_tokens_are_counted() -> None:
    assert scoring.doubled([1, 2, 3], [1, 2, 2, 3]) == 1
    assert scoring.doubled([1, 2, 3], [1, 1, 2, 2, 3, 3]) == 3
    assert scoring.doubled([1, 2, 3], [1, 4, 2, 3]) == 0  # inserted, not doubled
    assert scoring.doubled([1, 1, 2], [1, 1, 2]) == 0  # it was said twice
    assert scoring.doubled([], [1]) == 0


def test_errors_a_language_model_would_fix() -> None:
    likely = {("<s>", "the"), ("the", "cat"), ("cat", "sat"), ("sat", "</s>"), ("the", "mat"), ("mat", "sat")}

    def score(words: list[str]) -> float:
        return sum(pair in likely for pair in zip(["<s>", *words], [*words, "</s>"], strict=True)) - len(
            words
        )

    said = ["the", "cat", "sat"]
    written = {"the kat sat": 1, "the mat sat": 0, "the the cat sat": 1, "the sat": 1, "the cat sat": 0}
    assert {text: scoring.fixable(said, text.split(), score) for text in written} == written


def test_no_error_rate_is_below_0() -> None:
    """Two trainings that differ much gave 2.0 % (-2.9 to 6.9)."""
    errors = np.array([[0.0] * 20, [1.0] * 20])
    found = trials.rate(Trials(errors, np.full(20, 10.0), [""] * 20))
    assert found.low == 0.0 and found.value == pytest.approx(0.05) and found.high > 0.5
