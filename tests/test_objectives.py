import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from imputer import masking
from imputer.alignments import best_alignment, collapse, compatible_count
from imputer.objectives import ctc, dynamic_programming, imitation


def batch(seed, *, merge, size=4, frames=12, tokens=5, rate=0.5, dtype=torch.float64):
    """log_probs, targets, alignments, committed, frame_lengths, target_lengths."""
    draw = torch.Generator().manual_seed(seed)
    log_probs = (2 * torch.randn(size, frames, tokens, generator=draw, dtype=dtype)).log_softmax(-1)
    lengths = torch.randint(1, frames + 1, (size,), generator=draw)
    alignments = torch.randint(0, tokens, (size, frames), generator=draw)
    alignments[torch.rand(size, frames, generator=draw) > rate] = 0
    alignments[torch.arange(frames) >= lengths[:, None]] = 0
    targets = [collapse(row, merge_repeats=merge) for row in alignments]
    sizes = torch.tensor([len(target) for target in targets])
    padded = torch.zeros(size, max(int(sizes.max()), 1), dtype=torch.int64)
    for item, target in enumerate(targets):
        padded[item, : len(target)] = torch.tensor(target, dtype=torch.int64)
    committed = masking.bernoulli(lengths, generator=draw, width=frames)
    return log_probs, padded, alignments, committed, lengths, sizes


@pytest.mark.parametrize("blank", [0, 2])
@pytest.mark.parametrize("seed", range(3))
def test_all_masked_with_merging_is_torch_ctc_loss(seed, blank):
    log_probs, targets, alignments, _, lengths, sizes = batch(seed, merge=True, rate=0.3, frames=40)
    if blank:  # rename, so that 0 is a token and ``blank`` the blank
        names = torch.arange(5)
        names[0], names[blank] = blank, 0
        targets, alignments = names[targets], names[alignments]
    # torch's gradient is right only behind a log_softmax, hence the logits.
    logits = [log_probs.clone().requires_grad_() for _ in range(3)]
    theirs = torch.nn.functional.ctc_loss(
        logits[0].log_softmax(-1).transpose(0, 1), targets, lengths, sizes, blank=blank, reduction="none"
    )
    ours = ctc(logits[1].log_softmax(-1), targets, lengths, sizes, blank=blank, merge_repeats=True)
    nothing = torch.zeros_like(alignments, dtype=torch.bool)
    forced = dynamic_programming(
        logits[2].log_softmax(-1),
        targets,
        alignments,
        nothing,
        lengths,
        sizes,
        blank=blank,
        merge_repeats=True,
    )
    torch.testing.assert_close(ours, -theirs)
    assert torch.equal(ours, forced)
    for values in (theirs, -ours, -forced):
        values.sum().backward()
    torch.testing.assert_close(logits[1].grad, logits[0].grad)
    assert torch.equal(logits[2].grad, logits[1].grad)


@pytest.mark.parametrize("merge", [False, True])
@given(seed=st.integers(0, 10**6))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_objectives_equal_the_enumeration(merge, seed):
    log_probs, targets, alignments, committed, lengths, sizes = batch(seed, merge=merge, frames=6, size=2)
    inputs = [log_probs.clone().requires_grad_() for _ in range(3)]
    values = (
        ctc(inputs[0], targets, lengths, sizes, merge_repeats=merge),
        dynamic_programming(inputs[1], targets, alignments, committed, lengths, sizes, merge_repeats=merge),
        imitation(inputs[2], alignments, lengths),
    )
    for value in values:
        value.sum().backward()
    for item, length in enumerate(lengths.tolist()):
        scores = log_probs[item, :length].tolist()
        alignment = tuple(alignments[item, :length].tolist())
        sets = (
            oracle.alignments(oracle.collapse(alignment, 0, merge), length, 0, merge),
            oracle.compatible(alignment, committed[item, :length].tolist(), 0, merge),
            [alignment],
        )
        for value, given_scores, many in zip(values, inputs, sets, strict=True):
            assert value[item].item() == pytest.approx(oracle.log_sum(many, scores), abs=1e-11)
            expected = torch.tensor(oracle.posteriors(many, scores), dtype=torch.float64)
            torch.testing.assert_close(given_scores.grad[item, :length], expected)


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("policy", masking.POLICIES)
@given(seed=st.integers(0, 10**6))
@settings(max_examples=10, deadline=None, derandomize=True)
def test_imitation_is_at_most_dynamic_programming_is_at_most_zero(merge, policy, seed):
    log_probs, targets, alignments, _, lengths, sizes = batch(seed, merge=merge, frames=60, tokens=30)
    draw = torch.Generator().manual_seed(seed)
    committed = masking.POLICIES[policy](lengths, block_size=8, generator=draw, width=60)
    low = imitation(log_probs, alignments, lengths)
    middle = dynamic_programming(
        log_probs, targets, alignments, committed, lengths, sizes, merge_repeats=merge
    )
    high = ctc(log_probs, targets, lengths, sizes, merge_repeats=merge)
    room = 1e-10 * low.abs()
    assert (low <= middle + room).all()
    assert (middle <= high + room).all()
    assert (high <= room).all()


def test_committed_states_not_only_symbols_are_forced():
    # y = AB, a~ = (mask, _, mask, mask), a = (A, _, B, _): forcing the symbol alone would also admit (_, _, A, B).
    log_probs = torch.zeros(1, 4, 3, dtype=torch.float64)
    committed = torch.tensor([[False, True, False, False]])
    value = dynamic_programming(
        log_probs,
        torch.tensor([[1, 2]]),
        torch.tensor([[1, 0, 2, 0]]),
        committed,
        torch.tensor([4]),
        torch.tensor([2]),
    )
    assert value.exp().item() == pytest.approx(2)
    assert compatible_count([1, 0, 2, 0], committed[0]) == 2


@pytest.mark.parametrize("merge", [False, True])
def test_dynamic_programming_bounds_the_prior_free_sum(merge):
    """eqn:lowerbound_dynamicprogramming, every expectation taken exactly: J_DP + C <= eqn:lowerbound_marginalization.

    C = E_q[H(r) - E_r log c] + H(q). The model may condition on a~, so every a~ has scores of its own.
    """
    frames, target = 4, (1, 1) if merge else (1, 2)
    draw = torch.Generator().manual_seed(0)
    many = oracle.alignments(target, frames, 0, merge)
    masks = list(itertools.product((False, True), repeat=frames))
    q = torch.rand(len(many), generator=draw, dtype=torch.float64)
    r = torch.rand(len(masks), generator=draw, dtype=torch.float64)
    q, r = q / q.sum(), r / r.sum()
    scores = {}

    def scores_of(alignment, mask):
        partial = tuple(token if kept else "mask" for token, kept in zip(alignment, mask, strict=True))
        if partial not in scores:
            scores[partial] = torch.randn(frames, 3, generator=draw, dtype=torch.float64).log_softmax(-1)
        return scores[partial]

    objective = constant = 0.0
    terms = []
    for alignment, weight in zip(many, q.tolist(), strict=True):
        constant -= weight * math.log(weight)
        for mask, chance in zip(masks, r.tolist(), strict=True):
            model = scores_of(alignment, mask)
            value = dynamic_programming(
                model[None],
                torch.tensor([target]),
                torch.tensor([alignment]),
                torch.tensor([mask]),
                torch.tensor([frames]),
                torch.tensor([len(target)]),
                merge_repeats=merge,
            ).item()
            count = compatible_count(alignment, mask, merge_repeats=merge)
            objective += weight * chance * value
            constant -= weight * chance * (math.log(chance) + math.log(count))
            terms.append(oracle.log_prob(alignment, model.tolist()))
    prior_free = torch.tensor(terms).logsumexp(0).item()
    assert objective + constant <= prior_free


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_types_of_results_and_gradients(dtype):
    log_probs, targets, alignments, committed, lengths, sizes = batch(1, merge=False)
    log_probs = log_probs.to(dtype).requires_grad_()
    for value in (
        ctc(log_probs, targets, lengths, sizes),
        dynamic_programming(log_probs, targets, alignments, committed, lengths, sizes),
        imitation(log_probs, alignments, lengths),
    ):
        assert value.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        (gradient,) = torch.autograd.grad(value.sum(), log_probs)
        assert gradient.dtype == dtype


def test_imitation_of_an_impossible_alignment_has_no_gradient():
    log_probs = torch.zeros(2, 3, 4)
    log_probs[0, 1, 2] = -math.inf
    log_probs.requires_grad_()
    values = imitation(log_probs, torch.tensor([[1, 2, 0], [1, 2, 99]]), torch.tensor([3, 2]))
    values.sum().backward()
    assert values.tolist() == [-math.inf, 0.0]
    assert not log_probs.grad[0].any()
    assert log_probs.grad[1].nonzero().tolist() == [[0, 1], [1, 2]]


def test_imitation_derivatives_and_bad_input():
    log_probs, _, alignments, _, lengths, _ = batch(2, merge=False, size=2, frames=4)
    log_probs.requires_grad_()
    assert torch.autograd.gradcheck(lambda scores: imitation(scores, alignments, lengths), (log_probs,))
    with pytest.raises(ValueError, match=r"alignments\[1, 0\] = 5 is not in 0\.\.4"):
        imitation(log_probs, torch.tensor([[0, 0, 0, 0], [5, 0, 0, 0]]), torch.tensor([4, 1]))
    with pytest.raises(ValueError, match=r"frame_lengths\[1\] = 5 is not in 0\.\.4"):
        imitation(log_probs, alignments, torch.tensor([4, 5]))
    with pytest.raises(ValueError, match=r"alignments must have shape \(2, 4\)"):
        imitation(log_probs, alignments[:, :3], lengths)


def test_infeasible_items_do_not_disturb_the_others():
    log_probs, targets, _, _, lengths, sizes = batch(3, merge=False)
    expected = ctc(log_probs, targets, lengths, sizes)
    crowded = lengths.clone()
    crowded[1] = sizes[1] - 1
    assert crowded[1] >= 0
    log_probs.requires_grad_()
    values = ctc(log_probs, targets, crowded, sizes)
    values.sum().backward()
    assert values[1] == -math.inf
    assert not log_probs.grad[1].any()
    others = [0, 2, 3]
    assert torch.equal(values[others], expected[others])
    assert log_probs.grad.isfinite().all()


@pytest.mark.parametrize("merge", [False, True])
def test_the_best_alignment_is_the_best_to_imitate(merge):
    log_probs, targets, _, _, lengths, sizes = batch(4, merge=merge, frames=50)
    ids, scores = best_alignment(log_probs, targets, lengths, sizes, merge_repeats=merge)
    torch.testing.assert_close(imitation(log_probs, ids, lengths), scores)
    for item in range(4):
        path = ids[item, : lengths[item]]
        assert collapse(path, merge_repeats=merge) == targets[item, : sizes[item]].tolist()
