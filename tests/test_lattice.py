"""Both implementations of the lattice against enumeration, and against each other where that is too slow."""

import importlib.util
import io
import math
import shutil
import subprocess
import sys
from pathlib import Path

import numba
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from imputer import lattice, masking
from imputer.alignments import collapse, compatible_count, state_path
from imputer.lattice import compilation, kernel, paths, runs

IMPLEMENTATIONS = ("kernel", "tensors")
TOKENS = 4


@st.composite
def cases(draw, most_frames=6, infeasible=True, forced=None):
    """A batch as plain lists: scores, targets, alignments (None when nothing is committed), committed."""
    merge, blank = draw(st.booleans()), draw(st.integers(0, TOKENS - 1))
    size = draw(st.integers(1, 3))
    forced = draw(st.booleans()) if forced is None else forced
    alignments = [
        draw(st.lists(st.integers(0, TOKENS - 1), min_size=1, max_size=most_frames)) for _ in range(size)
    ]
    committed = [
        draw(st.lists(st.booleans(), min_size=len(a), max_size=len(a))) if forced else [False] * len(a)
        for a in alignments
    ]
    targets = [list(oracle.collapse(a, blank, merge)) for a in alignments]
    if infeasible and not forced and draw(st.booleans()):
        others = [token for token in range(TOKENS) if token != blank]
        targets[0] = draw(st.lists(st.sampled_from(others), min_size=1, max_size=5))
    value = st.one_of(st.floats(-4, 0.5), st.sampled_from([-math.inf, -700.0, -40.0]))
    scores = [
        [[draw(value) for _ in range(TOKENS)] for _ in range(len(alignment))] for alignment in alignments
    ]
    return merge, blank, forced, scores, targets, alignments, committed


def tensors_of(scores, targets, alignments, committed, forced, dtype=torch.float64, room=2):
    """Padded tensors; the padding is nonsense on purpose."""
    frames = max(map(len, alignments)) + room
    width = max(map(len, targets)) + room
    log_probs = torch.full((len(scores), frames, TOKENS), 7.0, dtype=dtype)
    padded = torch.full((len(scores), width), 99)
    ids = torch.full((len(scores), frames), 77)
    kept = torch.zeros(len(scores), frames, dtype=torch.bool)
    for item, rows in enumerate(scores):
        log_probs[item, : len(rows)] = torch.tensor(rows, dtype=dtype)
        padded[item, : len(targets[item])] = torch.tensor(targets[item], dtype=torch.int64)
        ids[item, : len(rows)] = torch.tensor(alignments[item])
        kept[item, : len(rows)] = torch.tensor(committed[item])
    lengths = torch.tensor([len(rows) for rows in scores])
    sizes = torch.tensor([len(target) for target in targets])
    return log_probs, padded, lengths, sizes, ids if forced else None, kept if forced else None


def listed(target, alignment, committed, forced, blank, merge):
    if forced:
        return oracle.compatible(tuple(alignment), committed, blank, merge)
    return oracle.alignments(target, len(alignment), blank, merge)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@given(case=cases())
@settings(max_examples=120, deadline=None, derandomize=True)
def test_total_and_its_gradient_equal_the_enumeration(implementation, case):
    merge, blank, forced, scores, targets, alignments, committed = case
    log_probs, *rest = tensors_of(scores, targets, alignments, committed, forced)
    log_probs.requires_grad_()
    totals = lattice.total(log_probs, *rest, blank=blank, merge_repeats=merge, implementation=implementation)
    (gradient,) = torch.autograd.grad(totals.sum(), log_probs)
    shares = lattice.posteriors(
        log_probs, *rest, blank=blank, merge_repeats=merge, implementation=implementation
    )
    assert torch.equal(shares, gradient)
    for item, rows in enumerate(scores):
        many = listed(targets[item], alignments[item], committed[item], forced, blank, merge)
        assert totals[item].item() == pytest.approx(oracle.log_sum(many, rows), abs=1e-10)
        expected = torch.tensor(oracle.posteriors(many, rows), dtype=torch.float64)
        torch.testing.assert_close(gradient[item, : len(rows)], expected, rtol=1e-9, atol=1e-12)
        assert not gradient[item, len(rows) :].any()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@given(case=cases(infeasible=False))
@settings(max_examples=120, deadline=None, derandomize=True)
def test_best_equals_the_enumeration(implementation, case):
    merge, blank, forced, scores, targets, alignments, committed = case
    # Few distinct whole numbers: sums are exact and ties abound, so the tie rule is put to the test.
    scores = [[[float(round(max(-3.0, score))) for score in row] for row in rows] for rows in scores]
    log_probs, *rest = tensors_of(scores, targets, alignments, committed, forced)
    ids, values = lattice.best(
        log_probs, *rest, blank=blank, merge_repeats=merge, implementation=implementation
    )
    for item, rows in enumerate(scores):
        many = listed(targets[item], alignments[item], committed[item], forced, blank, merge)
        expected = oracle.best(many, rows, blank, merge)
        assert ids[item, : len(rows)].tolist() == list(expected)
        assert values[item].item() == oracle.log_prob(expected, rows)
        assert (ids[item, len(rows) :] == blank).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@given(case=cases(infeasible=False))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_best_among_forbidden_scores_is_still_an_alignment(implementation, case):
    merge, blank, forced, scores, targets, alignments, committed = case
    log_probs, *rest = tensors_of(scores, targets, alignments, committed, forced)
    ids, values = lattice.best(
        log_probs, *rest, blank=blank, merge_repeats=merge, implementation=implementation
    )
    for item, rows in enumerate(scores):
        way = ids[item, : len(rows)].tolist()
        assert collapse(way, blank=blank, merge_repeats=merge) == targets[item]
        many = listed(targets[item], alignments[item], committed[item], forced, blank, merge)
        top = max(oracle.log_prob(one, rows) for one in many)
        assert values[item].item() == pytest.approx(top, abs=1e-10)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@given(case=cases(most_frames=9), most_cells=st.integers(1, 80))
@settings(max_examples=120, deadline=None, derandomize=True)
def test_best_in_bounded_memory_is_the_same(implementation, case, most_cells):
    """Ties, forbidden scores and committed frames included."""
    merge, blank, forced, scores, targets, alignments, committed = case
    scores = [
        [[max(float(round(score)), -4.0) if score > -100 else score for score in row] for row in rows]
        for rows in scores
    ]
    log_probs, *rest = tensors_of(scores, targets, alignments, committed, forced)
    options = {"blank": blank, "merge_repeats": merge, "implementation": implementation}
    ids, values = lattice.best(log_probs, *rest, **options)
    bounded_ids, bounded_values = lattice.best(log_probs, *rest, most_cells=most_cells, **options)
    assert torch.equal(ids, bounded_ids)
    assert torch.equal(values, bounded_values)


@pytest.mark.parametrize("merge", [False, True])
def test_long_runs_of_the_best_path_are_computed_in_chunks(merge):
    log_probs, targets, lengths, sizes, _ = random_batch(14, merge, batch=2, frames=300, most=60)
    whole = lattice.best(log_probs, targets, lengths, sizes, merge_repeats=merge)
    for most_cells in (1, 200, 1000, 10_000):
        for implementation in IMPLEMENTATIONS:
            part = lattice.best(
                log_probs, targets, lengths, sizes, merge_repeats=merge, most_cells=most_cells,
                implementation=implementation,
            )  # fmt: skip
            assert torch.equal(part[0], whole[0])
            torch.testing.assert_close(part[1], whole[1], rtol=1e-12, atol=0)
    with pytest.raises(ValueError, match="most_cells must be at least 1, got 0"):
        lattice.best(log_probs, targets, lengths, sizes, most_cells=0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@given(case=cases(most_frames=12, forced=True))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_zero_scores_count_compatible_alignments(implementation, case):
    merge, blank, _, scores, targets, alignments, committed = case
    _, *rest = tensors_of(scores, targets, alignments, committed, True)
    rest[0] = rest[0].clamp(max=TOKENS - 1)
    counts = lattice.count(*rest, blank=blank, merge_repeats=merge, implementation=implementation).exp()
    for item, alignment in enumerate(alignments):
        expected = compatible_count(alignment, committed[item], blank=blank, merge_repeats=merge)
        assert counts[item].item() == pytest.approx(expected, rel=1e-9)


def random_batch(seed, merge, *, batch=6, frames=90, tokens=12, most=30, sharpness=3.0, dtype=torch.float64):
    """Alignments drawn at random, so that targets repeat tokens and every item is feasible."""
    draw = torch.Generator().manual_seed(seed)
    log_probs = (sharpness * torch.randn(batch, frames, tokens, generator=draw, dtype=dtype)).log_softmax(-1)
    lengths = torch.randint(frames // 2, frames + 1, (batch,), generator=draw)
    alignments = torch.randint(0, tokens, (batch, frames), generator=draw)
    alignments[torch.rand(batch, frames, generator=draw) > most / frames] = 0
    alignments[torch.arange(frames) >= lengths[:, None]] = 0
    targets = [collapse(row, merge_repeats=merge) for row in alignments]
    sizes = torch.tensor([len(target) for target in targets])
    padded = torch.zeros(batch, max(sizes.max(), 1), dtype=torch.int64)
    for item, target in enumerate(targets):
        padded[item, : len(target)] = torch.tensor(target, dtype=torch.int64)
    return log_probs, padded, lengths, sizes, alignments


@pytest.mark.parametrize("policy", ["none", *masking.POLICIES])
@pytest.mark.parametrize("merge", [False, True])
def test_both_implementations_agree_on_longer_inputs(merge, policy):
    log_probs, targets, lengths, sizes, alignments = random_batch(1, merge)
    forcing = {}
    if policy != "none":
        draw = torch.Generator().manual_seed(2)
        kept = masking.POLICIES[policy](lengths, block_size=8, generator=draw, width=log_probs.shape[1])
        forcing = {"alignments": alignments, "committed": kept}
    results = {}
    for implementation in IMPLEMENTATIONS:
        inputs = log_probs.clone().requires_grad_()
        arguments = dict(merge_repeats=merge, implementation=implementation, **forcing)
        totals = lattice.total(inputs, targets, lengths, sizes, **arguments)
        totals.backward(torch.arange(1.0, 7.0, dtype=torch.float64))
        ids, scores = lattice.best(log_probs, targets, lengths, sizes, **arguments)
        results[implementation] = totals.detach(), inputs.grad, ids, scores
    for one, other in zip(*results.values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    ids = results["kernel"][2]
    if forcing:
        states = state_path(ids, merge_repeats=merge)
        assert torch.equal(states[kept], state_path(alignments, merge_repeats=merge)[kept])


@pytest.mark.parametrize("merge", [False, True])
def test_runs_too_long_for_one_table_are_walked_in_chunks(merge):
    log_probs, targets, lengths, sizes, alignments = random_batch(13, merge, batch=2, frames=700, most=150)
    kept = torch.zeros_like(alignments, dtype=torch.bool)
    kept[0, 20] = kept[1, 300] = True  # a long run after a short one, and two of middling length
    results = [
        (
            lattice.total(log_probs, targets, lengths, sizes, alignments, kept, **options),
            lattice.posteriors(log_probs, targets, lengths, sizes, alignments, kept, **options),
        )
        for options in ({"merge_repeats": merge, "implementation": name} for name in IMPLEMENTATIONS)
    ]
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("rate", [None, 0.3])
def test_first_and_second_derivatives(implementation, merge, rate):
    log_probs, targets, lengths, sizes, alignments = random_batch(
        3, merge, batch=2, frames=7, tokens=4, most=3
    )
    forcing = {}
    if rate is not None:
        kept = masking.bernoulli(
            lengths, generator=torch.Generator().manual_seed(4), width=7, probability=rate
        )
        forcing = {"alignments": alignments, "committed": kept}

    def totals(scores):
        return lattice.total(
            scores, targets, lengths, sizes, merge_repeats=merge, implementation=implementation, **forcing
        )

    log_probs.requires_grad_()
    assert torch.autograd.gradcheck(totals, (log_probs,))
    assert torch.autograd.gradgradcheck(totals, (log_probs,))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("frames", [2, 4])
def test_third_derivatives(implementation, merge, frames):
    draw = torch.Generator().manual_seed(15)
    log_probs = torch.randn(1, frames, 3, generator=draw, dtype=torch.float64, requires_grad=True)
    direction = torch.randn(2, 1, frames, 3, generator=draw, dtype=torch.float64)
    arguments = (torch.tensor([[1, 2][: frames // 2]]), torch.tensor([frames]), torch.tensor([frames // 2]))

    def curvature(scores):
        total = lattice.total(scores, *arguments, merge_repeats=merge, implementation=implementation).sum()
        (slope,) = torch.autograd.grad(total, scores, create_graph=True)
        return torch.autograd.grad((slope * direction[0]).sum(), scores, create_graph=True)[0]

    assert torch.autograd.gradcheck(curvature, (log_probs,))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_types_are_summed_as_wide_ones(implementation, merge, dtype):
    log_probs, targets, lengths, sizes, _ = random_batch(5, merge)
    narrow = log_probs.to(dtype).requires_grad_()
    totals = lattice.total(
        narrow, targets, lengths, sizes, merge_repeats=merge, implementation=implementation
    )
    totals.sum().backward()
    wide = narrow.detach().double().requires_grad_()
    expected = lattice.total(wide, targets, lengths, sizes, merge_repeats=merge, implementation="tensors")
    expected.sum().backward()
    assert totals.dtype == torch.float32
    assert narrow.grad.dtype == dtype
    torch.testing.assert_close(totals, expected.float(), rtol=1e-6, atol=0)
    precision = torch.finfo(dtype).eps
    torch.testing.assert_close(narrow.grad.double(), wide.grad, rtol=2 * precision, atol=2 * precision)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_any_strides(implementation):
    log_probs, targets, lengths, sizes, alignments = random_batch(6, False)
    kept = masking.block(lengths, block_size=8, generator=torch.Generator().manual_seed(0), width=90)
    expected = lattice.total(log_probs, targets, lengths, sizes, alignments, kept)
    time_first = log_probs.transpose(0, 1).contiguous().transpose(0, 1)
    sliced = torch.randn(12, 92, 26, dtype=torch.float64)[::2, 1:-1, 1:-1:2]
    sliced.copy_(log_probs)
    for view in (time_first, sliced):
        assert not view.is_contiguous()
        view = view.detach().requires_grad_()
        totals = lattice.total(
            view, targets.t().contiguous().t(), lengths, sizes, alignments.t().contiguous().t(), kept,
            implementation=implementation,
        )  # fmt: skip
        totals.sum().backward()
        torch.testing.assert_close(totals, expected)
        torch.testing.assert_close(
            view.grad, lattice.posteriors(log_probs, targets, lengths, sizes, alignments, kept)
        )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("merge", [False, True])
def test_alone_equals_batched_equals_permuted(implementation, merge):
    log_probs, targets, lengths, sizes, alignments = random_batch(7, merge, dtype=torch.float32)
    kept = masking.block(lengths, block_size=8, generator=torch.Generator().manual_seed(0), width=90)

    def both(order, frames=90):
        chosen = torch.as_tensor(order)
        arguments = [
            part[chosen] for part in (log_probs[:, :frames], targets, lengths, sizes, alignments[:, :frames])
        ]
        arguments.append(kept[chosen, :frames])
        options = {"merge_repeats": merge, "implementation": implementation}
        return lattice.total(*arguments, **options), lattice.posteriors(*arguments, **options)

    totals, shares = both(list(range(6)))
    order = [3, 1, 5, 0, 2, 4]
    permuted_totals, permuted_shares = both(order)
    assert torch.equal(permuted_totals, totals[order])
    assert torch.equal(permuted_shares, shares[order])
    for item in range(6):
        frames = int(lengths[item])
        alone_total, alone_shares = both([item], frames)
        torch.testing.assert_close(alone_total, totals[[item]], rtol=1e-6, atol=0)
        torch.testing.assert_close(alone_shares, shares[[item], :frames], rtol=1e-5, atol=1e-7)


def test_results_do_not_depend_on_threads():
    # Large enough that every part of the work is spread over threads.
    log_probs, targets, lengths, sizes, _ = random_batch(8, True, batch=9, frames=400, most=80, tokens=600)
    threads = torch.get_num_threads()
    results = []
    try:
        for number in (1, 3):
            torch.set_num_threads(number)
            results.append(
                (
                    lattice.total(log_probs, targets, lengths, sizes, merge_repeats=True),
                    lattice.posteriors(log_probs, targets, lengths, sizes, merge_repeats=True),
                    *lattice.best(log_probs, targets, lengths, sizes, merge_repeats=True),
                )
            )
    finally:
        torch.set_num_threads(threads)
    for one, three in zip(*results, strict=True):
        assert torch.equal(one, three)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_underflow_in_long_and_peaked_inputs(implementation, merge, dtype):
    frames, tokens = 3000, 6
    draw = torch.Generator().manual_seed(9)
    path = torch.randint(1, tokens, (frames,), generator=draw)
    path[torch.rand(frames, generator=draw) > 0.05] = 0
    log_probs = torch.full((1, frames, tokens), -300.0, dtype=dtype)
    log_probs[0, torch.arange(frames), path] = 0.0
    target = torch.tensor([collapse(path, merge_repeats=merge)])
    arguments = (target, torch.tensor([frames]), torch.tensor([target.shape[1]]))
    shares = lattice.posteriors(log_probs, *arguments, merge_repeats=merge, implementation=implementation)
    assert lattice.total(log_probs, *arguments, merge_repeats=merge).item() == pytest.approx(0.0, abs=1e-6)
    torch.testing.assert_close(shares[0].argmax(-1), path)
    # The opposite: the only way through is the least likely at every frame, by 300 nats.
    against = torch.full((1, frames, tokens), 0.0, dtype=dtype)
    against[0, torch.arange(frames), path] = -300.0
    everything = torch.ones(1, frames, dtype=torch.bool)
    everything[0, 1500] = False
    totals = lattice.total(
        against, *arguments, path[None], everything, merge_repeats=merge, implementation=implementation
    )
    assert math.isfinite(totals.item())
    assert totals.item() < -2999 * 300 + 1
    # Far apart within one frame: paths that look hopeless at frame 1500 are the only ones left in the end.
    cliff = torch.full((1, frames, 2), 0.0, dtype=dtype)
    cliff[0, :1500, 1] = -2000.0
    cliff[0, 1500:, 1] = -math.inf
    one = (torch.tensor([[1]]), torch.tensor([frames]), torch.tensor([1]))
    total = lattice.total(cliff, *one, merge_repeats=merge, implementation=implementation)
    assert total.item() == pytest.approx(-2000 + math.log(1500), rel=1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("merge", [False, True])
def test_forbidden_columns_leave_finite_gradients(implementation, merge):
    log_probs, targets, lengths, sizes, alignments = random_batch(10, merge)
    kept = torch.zeros_like(alignments, dtype=torch.bool)
    log_probs[:, :, 3] = -math.inf  # a token that some targets need
    log_probs[0, 5] = -math.inf  # a frame that can emit nothing
    log_probs.requires_grad_()
    for forcing in ((), (alignments, kept)):
        totals = lattice.total(
            log_probs, targets, lengths, sizes, *forcing, merge_repeats=merge, implementation=implementation
        )
        weights = torch.where(totals.isfinite(), 1.0, 0.0).double()
        for scales in (weights, torch.ones_like(weights)):
            (gradient,) = torch.autograd.grad(totals, log_probs, scales, retain_graph=True)
            assert gradient.isfinite().all()
            assert not gradient[totals == -math.inf].any()
        assert totals[0] == -math.inf
        assert not totals.isnan().any()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("merge", [False, True])
def test_edges(implementation, merge):
    draw = torch.Generator().manual_seed(11)
    log_probs = torch.randn(6, 3, 4, generator=draw, dtype=torch.float64).log_softmax(-1)
    targets = torch.tensor([[1, 2, 3], [0, 0, 0], [2, 0, 0], [1, 0, 0], [0, 0, 0], [1, 1, 2]])
    lengths, sizes = torch.tensor([3, 3, 1, 0, 0, 3]), torch.tensor([3, 0, 1, 1, 0, 3])
    totals = lattice.total(
        log_probs, targets, lengths, sizes, merge_repeats=merge, implementation=implementation
    )
    full = log_probs[0, 0, 1] + log_probs[0, 1, 2] + log_probs[0, 2, 3]  # |y| = |x|
    silent = log_probs[1, :, 0].sum()  # an empty target
    cramped = -math.inf if merge else (log_probs[5, 0, 1] + log_probs[5, 1, 1] + log_probs[5, 2, 2]).item()
    expected = [full.item(), silent.item(), log_probs[2, 0, 2].item(), -math.inf, 0.0, cramped]
    assert totals.tolist() == pytest.approx(expected)
    ids, scores = lattice.best(
        log_probs, targets, lengths, sizes, merge_repeats=merge, implementation=implementation
    )
    assert scores.tolist() == pytest.approx(expected)
    assert ids[0].tolist() == [1, 2, 3]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_an_empty_batch_and_a_wholly_committed_one(implementation):
    none = torch.zeros(0, dtype=torch.int64)
    empty = lattice.total(torch.zeros(0, 5, 3), none.view(0, 2), none, none, implementation=implementation)
    assert empty.shape == (0,)
    log_probs, targets, lengths, sizes, alignments = random_batch(12, False)
    kept = torch.arange(90) < lengths[:, None]
    totals = lattice.total(
        log_probs, targets, lengths, sizes, alignments, kept, implementation=implementation
    )
    chosen = log_probs.gather(2, alignments[:, :, None])[:, :, 0]
    torch.testing.assert_close(totals, torch.where(kept, chosen, 0.0).sum(1))


EXTREME = [math.nan, math.inf, 1e300, 1e10, 1e8, -1e12, -2e13, -1e14, -1e40, -math.inf]


@given(case=cases(), data=st.data())
@settings(max_examples=300, deadline=None, derandomize=True)
def test_both_implementations_agree_on_extreme_scores(case, data):
    merge, blank, forced, scores, targets, alignments, committed = case
    for _ in range(data.draw(st.integers(1, 4))):
        row = data.draw(st.sampled_from(data.draw(st.sampled_from(scores))))
        row[data.draw(st.integers(0, TOKENS - 1))] = data.draw(st.sampled_from(EXTREME))
    log_probs, *rest = tensors_of(scores, targets, alignments, committed, forced)
    results = []
    for implementation in IMPLEMENTATIONS:
        options = {"blank": blank, "merge_repeats": merge, "implementation": implementation}
        totals = lattice.total(log_probs, *rest, **options)
        shares = lattice.posteriors(log_probs, *rest, **options)
        results.append((totals, shares, *lattice.best(log_probs, *rest, **options)))
    # At 1e12 a float64 resolves 1e-4 nats.
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-2, equal_nan=True)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@given(case=cases(infeasible=False), bad=st.sampled_from([math.nan, math.inf]))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_scores_that_no_alignment_uses_have_no_effect(implementation, case, bad):
    _, blank, forced, scores, _, alignments, committed = case
    targets = [list(oracle.collapse(a, blank, False)) for a in alignments]
    expected = []
    for item, rows in enumerate(scores):
        many = listed(targets[item], alignments[item], committed[item], forced, blank, False)
        expected.append(oracle.log_sum(many, rows))
        for frame, row in enumerate(rows):
            used = {alignment[frame] for alignment in many}
            rows[frame] = [row[token] if token in used else bad for token in range(TOKENS)]
    log_probs, *rest = tensors_of(scores, targets, alignments, committed, forced)
    totals = lattice.total(log_probs, *rest, blank=blank, implementation=implementation)
    assert totals.tolist() == pytest.approx(expected, abs=1e-10)


def test_nan_scores_are_not_hidden():
    for implementation in IMPLEMENTATIONS:
        log_probs = torch.zeros(1, 5, 3)
        log_probs[0, 2] = math.nan
        arguments = (torch.tensor([[1]]), torch.tensor([5]), torch.tensor([1]))
        assert lattice.total(log_probs, *arguments, implementation=implementation).isnan().all()
        ids, score = lattice.best(log_probs, *arguments, implementation=implementation)
        assert collapse(ids[0]) == [1]
        assert score.item() == -math.inf


def sound():
    return {
        "log_probs": torch.zeros(2, 4, 5),
        "targets": torch.tensor([[1, 2], [3, 0]]),
        "frame_lengths": torch.tensor([4, 3]),
        "target_lengths": torch.tensor([2, 1]),
        "alignments": torch.tensor([[1, 0, 0, 2], [0, 3, 0, 0]]),
        "committed": torch.tensor([[True, False, False, False], [False, True, False, False]]),
    }


BAD = {
    "two axes": ({"log_probs": torch.zeros(4, 5)}, r"log_probs must be a tensor .* got \(4, 5\)"),
    "integer scores": ({"log_probs": torch.zeros(2, 4, 5).int()}, r"log_probs must be float32.*torch\.int32"),
    "batch of targets": (
        {"targets": torch.ones(3, 2).long()},
        r"targets must have shape \(2, any\).*\(3, 2\)",
    ),
    "floating targets": ({"targets": torch.ones(2, 2)}, r"targets must hold integers, got torch\.float32"),
    "lengths' shape": ({"frame_lengths": torch.tensor([4])}, r"frame_lengths must have shape \(2\).*\(1,\)"),
    "too many frames": ({"frame_lengths": torch.tensor([4, 5])}, r"frame_lengths\[1\] = 5 is not in 0\.\.4"),
    "negative frames": (
        {"frame_lengths": torch.tensor([-1, 3])},
        r"frame_lengths\[0\] = -1 is not in 0\.\.4",
    ),
    "too many tokens": (
        {"target_lengths": torch.tensor([2, 3])},
        r"target_lengths\[1\] = 3 is not in 0\.\.2",
    ),
    "token too high": ({"targets": torch.tensor([[1, 5], [3, 0]])}, r"targets\[0, 1\] = 5 is not a token"),
    "blank as token": ({"targets": torch.tensor([[1, 0], [3, 0]])}, r"targets\[0, 1\] = 0 is not a token"),
    "negative token": ({"targets": torch.tensor([[1, 2], [-3, 0]])}, r"targets\[1, 0\] = -3 is not a token"),
    "mask in alignment": (
        {"alignments": torch.tensor([[1, 0, 0, 2], [5, 3, 0, 0]])},
        r"alignments\[1, 0\] = 5 is not in 0\.\.4; give the whole alignment",
    ),
    "other target": (
        {"alignments": torch.tensor([[1, 0, 0, 2], [0, 2, 0, 0]])},
        r"alignments\[1\] does not collapse to targets\[1\].*frame 1.*\[0, 2, 0\].*\[3\]",
    ),
    "token missing": (
        {"alignments": torch.tensor([[1, 0, 0, 0], [0, 3, 0, 0]])},
        r"alignments\[0\] does not collapse to targets\[0\]",
    ),
    "committed padding": (
        {"committed": torch.tensor([[True] * 4, [False, False, False, True]])},
        r"committed\[1, 3\] is True, beyond frame_lengths\[1\] = 3",
    ),
    "committed as integers": (
        {"committed": torch.ones(2, 4).long()},
        r"committed must be a bool tensor.*torch\.int64",
    ),
    "committed alone": ({"alignments": None}, "alignments and committed go together"),
    "blank outside": ({"blank": 5}, r"blank must be a token id in 0\.\.4, got 5"),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("function", [lattice.total, lattice.best, lattice.posteriors])
def test_bad_input_is_named(function, name):
    change, message = BAD[name]
    function(**sound())
    with pytest.raises(ValueError, match=message):
        function(**{**sound(), **change})


def test_implementation_is_checked():
    with pytest.raises(ValueError, match="implementation must be"):
        lattice.total(**sound(), implementation="fast")


def test_importing_the_objectives_does_not_import_the_compiler():
    code = "import sys, imputer.objectives, imputer.alignments; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


WITHOUT_NUMBA = """
import sys
sys.modules["numba"] = sys.modules["llvmlite"] = None  # importing either raises ImportError
import torch
from imputer import lattice, objectives
batch = torch.load(sys.argv[1])
scores = batch["log_probs"].requires_grad_()
rest = [batch[name] for name in ("targets", "frame_lengths", "target_lengths", "alignments", "committed")]
total = lattice.total(scores, *rest, merge_repeats=True)
total.sum().backward()
objectives.imitation(scores, batch["alignments"], batch["frame_lengths"])
for call in (
    lambda: lattice.total(scores, *rest, merge_repeats=True, implementation="kernel"),
    lambda: lattice.total(scores, rest[0] * 0, *rest[1:]),
):
    try:
        call()
    except ValueError as error:
        print(error)
found = [total.detach(), scores.grad, *lattice.best(scores, *rest, merge_repeats=True)]
torch.save([*found, lattice.count(*rest, merge_repeats=True)], sys.argv[2])
"""


def test_the_torch_implementation_works_without_numba(tmp_path):
    log_probs, targets, lengths, sizes, alignments = random_batch(16, True)
    kept = masking.block(lengths, block_size=8, generator=torch.Generator().manual_seed(0), width=90)
    forcing = (targets, lengths, sizes, alignments, kept)
    names = ("log_probs", "targets", "frame_lengths", "target_lengths", "alignments", "committed")
    torch.save(dict(zip(names, (log_probs, *forcing), strict=True)), tmp_path / "batch")
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_NUMBA, str(tmp_path / "batch"), str(tmp_path / "found")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert 'implementation "kernel" needs numba' in done.stdout
    assert "targets[0, 0] = 0 is not a token" in done.stdout
    expected = [
        lattice.total(log_probs, *forcing, merge_repeats=True),
        lattice.posteriors(log_probs, *forcing, merge_repeats=True),
        *lattice.best(log_probs, *forcing, merge_repeats=True),
        lattice.count(*forcing, merge_repeats=True),
    ]
    for one, other in zip(torch.load(tmp_path / "found"), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_compiled_code_is_not_reused_after_a_change_in_another_file(tmp_path):
    """The cache of a function must depend on the files it takes constants and inlined functions from."""
    package = tmp_path / "imputer"
    shutil.copytree(
        Path(lattice.__file__).parent, package / "lattice", ignore=shutil.ignore_patterns("*cache*")
    )
    (package / "__init__.py").touch()
    code = (
        "import sys, numpy as np; sys.path.insert(0, sys.argv[1]); from imputer.lattice.runs import list_runs;"
        "states, one = np.array([[-2, -2, 0]], np.int32), np.array([3]);"
        "print(list_runs(states, one, one, np.empty((0, 5), np.int64)))"
    )

    def runs_found():
        command = [sys.executable, "-P", "-c", code, str(tmp_path)]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    assert runs_found() == 0  # -2 is not the state of a masked frame
    arguments = package / "lattice" / "arguments.py"
    arguments.write_text(arguments.read_text().replace("MASKED = -1", "MASKED = -2"))
    assert runs_found() == 1


def test_a_person_is_told_what_the_first_call_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    source = tmp_path / "increment.py"
    source.write_text("def increment(x):\n    return x + 1\n")
    spec = importlib.util.spec_from_file_location("increment", source)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    compilation._announce.cache_clear()
    said = []
    for change in ("", "", "a file that increment may inline from"):  # the second is found in the cache
        (tmp_path / "neighbour.py").write_text(f"# {change}")
        monkeypatch.setattr(sys, "stderr", Terminal())
        assert compilation.entry(module.increment)(1) == 2
        said.append(sys.stderr.getvalue())
        compilation._announce.cache_clear()
    assert ["compiling" in line for line in said] == [True, False, True]


def test_a_part_is_compiled_once_for_all_whole_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """numba has a type for each literal: a loop that starts at a plain 0 compiles what it calls twice."""
    best_items = numba.njit(paths.best_items.py_func)  # without the cache, so that it is compiled here
    monkeypatch.setattr(kernel, "best_items", best_items)
    log_probs = torch.randn(1, 5, 4).log_softmax(-1)
    lattice.best(
        log_probs, torch.tensor([[1, 2]]), torch.tensor([5]), torch.tensor([2]), implementation="kernel"
    )
    assert len(best_items.signatures) == len(runs.run_at.signatures) == 1
