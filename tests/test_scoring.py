"""Error counts against jiwer and a plain recursion; intervals against what is known of them."""

import functools

import jiwer
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from imputer.evaluation import scoring
from imputer.evaluation.scoring import Errors

sentences = st.lists(st.sampled_from(["a", "b", "c", "the", "cat"]), max_size=8).map(" ".join)


@given(sentences.filter(bool), sentences)
@settings(max_examples=300, deadline=None)
def test_words_agree_with_jiwer(reference, hypothesis):
    ours = scoring.word_errors(reference, hypothesis)
    theirs = jiwer.process_words(reference, hypothesis)
    assert (ours.substitutions, ours.deletions, ours.insertions) == (
        theirs.substitutions,
        theirs.deletions,
        theirs.insertions,
    )
    assert ours.rate == pytest.approx(theirs.wer)


@given(sentences.filter(bool), sentences)
@settings(max_examples=100, deadline=None)
def test_characters_agree_with_jiwer(reference, hypothesis):
    assert scoring.character_errors(reference, hypothesis).rate == pytest.approx(
        jiwer.cer(reference, hypothesis)
    )


def test_a_corpus_agrees_with_jiwer():
    references = ["the cat sat", "a dog", "on the mat today"]
    hypotheses = ["the cat", "a big dog", "in the mat today"]
    errors = [scoring.word_errors(r, h) for r, h in zip(references, hypotheses, strict=True)]
    assert scoring.total(errors) == Errors(1, 1, 1, 9)
    assert scoring.total(errors).rate == pytest.approx(jiwer.wer(references, hypotheses))


def distance(a, b):
    """Edit distance by its definition."""

    @functools.cache
    def at(i, j):
        if not i or not j:
            return i + j
        return min(at(i - 1, j) + 1, at(i, j - 1) + 1, at(i - 1, j - 1) + (a[i - 1] != b[j - 1]))

    return at(len(a), len(b))


@given(sentences, sentences)
@settings(max_examples=200, deadline=None)
def test_totals_and_alignments_by_definition(reference, hypothesis):
    errors = scoring.word_errors(reference, hypothesis)
    assert errors.total == distance(reference.split(), hypothesis.split())
    assert errors.length - errors.deletions + errors.insertions == len(hypothesis.split())
    rows = scoring.word_alignment(reference, hypothesis)
    assert [a for _, a, _ in rows if a] == reference.split()
    assert [b for _, _, b in rows if b] == hypothesis.split()
    assert sum(kind != "equal" for kind, _, _ in rows) == errors.total
    assert all((kind == "equal") == (a == b) for kind, a, b in rows)


def test_no_reference():
    assert scoring.word_errors("", "").rate == 0.0
    assert scoring.word_errors("", "what").rate == float("inf")
    assert np.isnan(scoring.interval([scoring.word_errors("", "")]).low)


def test_the_interval_is_that_of_the_normal_approximation():
    random = np.random.default_rng(1)
    errors = [Errors(int(n), 0, 0, 10) for n in random.binomial(10, 0.2, 500)]
    result = scoring.interval(errors)
    totals = np.array([e.total for e in errors])
    half = 1.96 * totals.std() / np.sqrt(500) / 10
    assert result.value == pytest.approx(totals.sum() / 5000)
    assert result.low == pytest.approx(result.value - half, abs=0.002)
    assert result.high == pytest.approx(result.value + half, abs=0.002)
    assert scoring.interval(errors) == result  # seeded


def test_about_95_of_100_intervals_hold_the_truth():
    random = np.random.default_rng(2)
    held = 0
    for _ in range(200):
        errors = [Errors(int(n), 0, 0, 10) for n in random.binomial(10, 0.3, 100)]
        result = scoring.interval(errors, resamples=500)
        held += result.low <= 0.3 <= result.high
    assert 180 <= held <= 199


def test_comparison_tells_a_real_difference_from_none():
    random = np.random.default_rng(3)
    hard = random.uniform(0, 0.5, 300)  # utterances differ far more than the models do
    first = [Errors(int(random.binomial(20, h)), 0, 0, 20) for h in hard]
    better = [Errors(int(random.binomial(20, h * 0.8)), 0, 0, 20) for h in hard]
    same = [Errors(int(random.binomial(20, h)), 0, 0, 20) for h in hard]
    gain = scoring.compare(first, better)
    assert gain.difference.high < 0 and gain.p_value < 0.01
    assert gain.difference.value == pytest.approx(scoring.total(better).rate - scoring.total(first).rate)
    none = scoring.compare(first, same)
    assert none.difference.low < 0 < none.difference.high and none.p_value > 0.05
    assert scoring.compare(first, first).p_value == 1.0


def test_p_values_of_interchangeable_models_are_even():
    random = np.random.default_rng(4)
    small = 0
    for _ in range(200):
        pairs = random.binomial(10, 0.3, (2, 50))
        first, second = ([Errors(int(n), 0, 0, 10) for n in row] for row in pairs)
        small += scoring.compare(first, second, resamples=300).p_value <= 0.1
    assert 5 <= small <= 35  # 20 expected


def test_comparison_wants_the_same_references():
    with pytest.raises(ValueError, match="same references"):
        scoring.compare([Errors(0, 0, 0, 3)], [Errors(0, 0, 0, 4)])
