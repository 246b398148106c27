import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from imputer import masking
from imputer.masking import POLICIES


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def many(policy, length, block_size, draws=4000):
    """(draw, frame): many draws of one length."""
    lengths = torch.full((draws,), length)
    return POLICIES[policy](lengths, block_size=block_size, generator=seeded())


def close_to(counts, expected, draws):
    """Within five standard deviations of a binomial."""
    spread = 5 * math.sqrt(draws * expected * (1 - expected)) + 1e-9
    return all(abs(count - draws * expected) <= spread for count in counts)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_block_far_beyond_the_frames_takes_no_memory(policy):
    committed = POLICIES[policy](torch.tensor([5, 3]), block_size=10**15, generator=seeded())
    assert committed.shape == (2, 5)
    assert not committed[1, 3:].any()


@pytest.mark.parametrize("policy", POLICIES)
@given(batch=st.integers(0, 3), block_size=st.integers(1, 9), width=st.sampled_from([None, 0, 5]))
@settings(max_examples=30, deadline=None, derandomize=True)
def test_a_batch_without_frames_commits_nothing(policy, batch, block_size, width):
    lengths = torch.zeros(batch, dtype=torch.int64)
    committed = POLICIES[policy](lengths, block_size=block_size, generator=seeded(), width=width)
    assert committed.shape == (batch, width or 0)
    assert not committed.any()


@pytest.mark.parametrize("policy", POLICIES)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=5),
    block_size=st.integers(1, 12),
    extra=st.integers(0, 3),
    seed=st.integers(0, 1000),
)
@settings(max_examples=40, deadline=None, derandomize=True)
def test_every_policy_keeps_the_contract(policy, lengths, block_size, extra, seed):
    frame_lengths = torch.tensor(lengths)
    width = max(lengths) + extra

    def draw():
        return POLICIES[policy](frame_lengths, block_size=block_size, generator=seeded(seed), width=width)

    committed = draw()
    assert committed.dtype == torch.bool
    assert committed.shape == (len(lengths), width)
    assert not committed[torch.arange(width) >= frame_lengths[:, None]].any()
    assert torch.equal(committed, draw())
    narrow = POLICIES[policy](frame_lengths, block_size=block_size, generator=seeded(seed))
    assert torch.equal(narrow, committed[:, : max(lengths)])


@pytest.mark.parametrize("policy", POLICIES)
def test_seeds_differ(policy):
    lengths = torch.full((4,), 64)
    draws = [POLICIES[policy](lengths, block_size=8, generator=seeded(seed)) for seed in range(2)]
    assert not torch.equal(*draws)


def test_bernoulli_commits_each_frame_on_its_own():
    draws = many("bernoulli", 9, 1)
    assert close_to(draws.sum(0).tolist(), 0.5, 4000)
    pairs = (draws[:, :-1] & draws[:, 1:]).sum(0)
    assert close_to(pairs.tolist(), 0.25, 4000)
    rare = masking.bernoulli(torch.tensor([4000]), generator=seeded(), probability=0.1)
    assert close_to([rare.sum().item()], 0.1, 4000)


def test_uniform_commits_every_number_of_frames_equally_often():
    draws = many("uniform", 5, 1)
    assert close_to(torch.bincount(draws.sum(1), minlength=6).tolist(), 1 / 6, 4000)
    assert close_to(draws.sum(0).tolist(), 0.5, 4000)
    one = draws[draws.sum(1) == 1]
    assert close_to(one.sum(0).tolist(), 0.2, len(one))


def test_block_commits_the_same_number_in_all_blocks_and_sometimes_none():
    draws = many("block", 16, 4)
    number = draws.view(-1, 4, 4).sum(2)
    assert (number == number[:, :1]).all()
    assert close_to(torch.bincount(number[:, 0], minlength=5)[:4].tolist(), 1 / 4, 4000)
    assert number.max() == 3
    one = draws.view(-1, 4, 4)[number[:, 0] == 1]
    assert close_to(one.sum(0).flatten().tolist(), 1 / 4, len(one))
    # Blocks choose their slots independently.
    together = (one[:, 0, 0] & one[:, 1, 0]).sum().item()
    assert close_to([together], 1 / 16, len(one))


def test_a_short_last_block_holds_what_decoding_leaves_there():
    draws = many("block", 10, 4, draws=500)
    full, short = draws[:, :4].sum(1), draws[:, 8:].sum(1)
    assert torch.equal(short, full.clamp(max=2))


def test_the_printed_range_masks_at_most_all_but_one():
    draws = many("block_printed", 10, 4)
    masked = (~draws)[:, :8].view(-1, 2, 4).sum(2)
    assert (masked == masked[:, :1]).all()
    assert close_to(torch.bincount(masked[:, 0], minlength=5)[:4].tolist(), 1 / 4, 4000)
    assert torch.equal((~draws)[:, 8:].sum(1), masked[:, 0].clamp(max=2))


def test_an_item_drawn_alone_depends_on_nothing_else():
    for policy in POLICIES.values():
        alone = policy(torch.tensor([37]), block_size=8, generator=seeded(5))
        padded = policy(torch.tensor([37]), block_size=8, generator=seeded(5), width=100)
        assert torch.equal(alone[0], padded[0, :37])


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="block_size must be at least 1, got 0"):
        masking.block(torch.tensor([3]), block_size=0, generator=seeded())
    with pytest.raises(ValueError, match=r"frame_lengths\[1\] = -2 is negative"):
        masking.uniform(torch.tensor([3, -2]), generator=seeded())
    with pytest.raises(ValueError, match="width 2 is less than the longest"):
        masking.bernoulli(torch.tensor([3]), generator=seeded(), width=2)
    with pytest.raises(ValueError, match="frame_lengths must be integers"):
        masking.bernoulli(torch.tensor([3.0]), generator=seeded())
    with pytest.raises(ValueError, match=r"probability must be in 0\.\.1, got 2"):
        masking.bernoulli(torch.tensor([3]), generator=seeded(), probability=2)
