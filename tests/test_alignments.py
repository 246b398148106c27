import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from imputer.alignments import (
    Segment,
    best_alignment,
    collapse,
    compatible_count,
    feasible,
    masked_segments,
    state_path,
)

quick = settings(max_examples=80, deadline=None, derandomize=True)
alignment_lists = st.lists(st.integers(0, 3), max_size=8)


@given(alignment_lists, st.integers(0, 3), st.booleans())
@quick
def test_collapse_equals_the_oracle(alignment, blank, merge):
    expected = list(oracle.collapse(alignment, blank, merge))
    assert collapse(alignment, blank=blank, merge_repeats=merge) == expected
    assert collapse(torch.tensor(alignment, dtype=torch.int32), blank=blank, merge_repeats=merge) == expected


def test_collapse_of_the_paper():
    blank, a, b, c, d = range(5)
    assert collapse([blank, a, b, blank, c, blank, d]) == [a, b, c, d]


def test_collapse_refuses_a_batch():
    with pytest.raises(ValueError, match="one sequence of integers"):
        collapse(torch.zeros(2, 3, dtype=torch.int64))


@given(alignment_lists, st.integers(0, 3), st.booleans())
@quick
def test_state_path_equals_the_oracle(alignment, blank, merge):
    expected = [
        2 * begun - (not is_blank) for begun, is_blank in oracle.states(tuple(alignment), blank, merge)
    ]
    path = state_path(torch.tensor([alignment], dtype=torch.int64), blank=blank, merge_repeats=merge)
    assert path.tolist() == [expected]


def test_masked_segments_of_the_paper():
    # Figure dynamic_programming: a = (A, _, B, _, _, C, D) with three frames masked out.
    alignment, committed = [1, 0, 2, 0, 0, 3, 4], [1, 1, 1, 0, 0, 0, 1]
    assert masked_segments(alignment, committed) == [Segment(start=3, frames=3, tokens=1)]
    assert compatible_count(alignment, committed) == 3


@given(st.data(), alignment_lists.filter(lambda a: len(a) <= 7), st.integers(0, 3), st.booleans())
@settings(max_examples=120, deadline=None, derandomize=True)
def test_compatible_count_counts_what_the_oracle_lists(data, alignment, blank, merge):
    committed = data.draw(st.lists(st.booleans(), min_size=len(alignment), max_size=len(alignment)))
    count = compatible_count(alignment, committed, blank=blank, merge_repeats=merge)
    assert count == len(oracle.compatible(tuple(alignment), committed, blank, merge))


def test_compatible_count_is_an_exact_integer_when_large():
    alignment = [1, 0] * 400
    assert compatible_count(alignment, [False] * 800) == math.comb(800, 400)


def test_committed_must_cover_the_alignment():
    with pytest.raises(ValueError, match="committed has 2 frames, the alignment 3"):
        compatible_count([1, 0, 2], [True, False])


@pytest.mark.parametrize("merge", [False, True])
def test_feasible_is_whether_an_alignment_exists(merge):
    targets = list(itertools.chain.from_iterable(itertools.product((1, 2), repeat=n) for n in range(4)))
    for frames in range(6):
        padded = torch.tensor([[*target, *[1] * (3 - len(target))] for target in targets])
        told = feasible(
            padded,
            torch.full((len(targets),), frames),
            torch.tensor([len(target) for target in targets]),
            merge_repeats=merge,
        )
        assert told.tolist() == [bool(oracle.alignments(target, frames, 0, merge)) for target in targets]


def test_best_alignment_is_maximal_where_a_greedy_aligner_fails():
    # A repeated token with little room: the case in which aligners that forget the forced blank go wrong.
    scores = torch.tensor([[-9.0, -0.1], [-0.2, -0.1], [-9.0, -0.1]], dtype=torch.float64)[None]
    ids, score = best_alignment(
        scores, torch.tensor([[1, 1]]), torch.tensor([3]), torch.tensor([2]), merge_repeats=True
    )
    assert ids.tolist() == [[1, 0, 1]]
    assert score.item() == pytest.approx(-0.4)


@given(
    st.lists(st.tuples(st.lists(st.integers(1, 2), max_size=3), st.integers(0, 6)), min_size=0, max_size=4),
    st.integers(0, 2),
    st.booleans(),
)
@quick
def test_feasible_in_batches_of_any_width(items, room, merge):
    """Empty batches and batches of empty targets (width 0) included."""
    width = max((len(target) for target, _ in items), default=0) + room
    targets = torch.ones(len(items), width, dtype=torch.int64)  # the padding repeats a token
    for item, (target, _) in enumerate(items):
        targets[item, : len(target)] = torch.tensor(target, dtype=torch.int64)
    sizes = torch.tensor([len(target) for target, _ in items], dtype=torch.int64)
    lengths = torch.tensor([frames for _, frames in items], dtype=torch.int64)
    expected = [bool(oracle.alignments(target, frames, 0, merge)) for target, frames in items]
    assert feasible(targets, lengths, sizes, merge_repeats=merge).tolist() == expected


def test_best_alignment_of_an_infeasible_item_is_blank():
    ids, score = best_alignment(
        torch.zeros(1, 2, 3), torch.tensor([[1, 2, 1]]), torch.tensor([2]), torch.tensor([3])
    )
    assert ids.tolist() == [[0, 0]]
    assert score.item() == -math.inf
