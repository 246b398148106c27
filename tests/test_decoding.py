"""The impute loop and its strategies, over random step functions and against plain walks over the frames."""

import math
from functools import partial as with_options

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from imputer import decoding
from imputer.decoding import STRATEGIES, impute

VOCABULARY = 5
MASK = VOCABULARY + 1
ONCE = ["block", "alternate_sub_block", "right_most_last"]  # exactly min(B, T) passes
KEEPING = [*ONCE, "top_k", "adaptive"]  # commitments never change
APART = ["alternate_sub_block", "right_most_last", "top_k"]  # no two neighbours in one pass
ANNEALING = ["annealing", "annealing_random"]


def random_step(seeds, lengths, *, sharpness=3.0, coarse=False):
    """A step that looks at neighbours and at the whole partial alignment, item by item, padding unseen."""

    def one(seed, length, row):
        generator = torch.Generator().manual_seed(seed)
        base = torch.randn(length, VOCABULARY + 1, generator=generator, dtype=torch.float64)
        table = torch.randn(MASK + 1, VOCABULARY + 1, generator=generator, dtype=torch.float64)
        row = row[:length]
        beside = torch.zeros(length, VOCABULARY + 1, dtype=torch.float64)
        beside[1:] += table[row[:-1]]
        beside[:-1] += table[row[1:]].flip(1)
        logits = sharpness * (base + beside + table[row].mean(0))
        return ((logits * 2).round() / 2 if coarse else logits).log_softmax(-1)

    def step(partial):
        frames = partial.shape[1]
        rows = [one(s, n, row) for s, n, row in zip(seeds, lengths, partial, strict=True)]
        padded = [torch.nn.functional.pad(r, (0, 0, 0, frames - len(r)), value=0.0) for r in rows]
        return torch.stack(padded)

    return step


def run(seeds, lengths, block_size, strategy, **options):
    step = random_step(
        seeds, lengths, coarse=options.pop("coarse", False), sharpness=options.pop("sharpness", 3.0)
    )
    return impute(
        step,
        torch.tensor(lengths),
        block_size=block_size,
        strategy=strategy,
        mask=MASK,
        trace=True,
        **options,
    )


def commits(imputation, item, length):
    """For every pass of an item: the set of frames that became committed in it, and of those masked out again."""
    before = torch.full((length,), MASK)
    for row in imputation.trace:
        after = row[item, :length]
        new = set(((before == MASK) & (after != MASK)).nonzero().flatten().tolist())
        yield before, after, new
        before = after


sizes = st.integers(1, 12)
lengths = st.integers(1, 30)
seeds = st.integers(0, 10_000)


@given(seeds, lengths, sizes, st.sampled_from(ONCE), st.booleans())
@settings(max_examples=120, deadline=None)
def test_passes_are_exactly_the_block_size(seed, length, block_size, strategy, coarse):
    result = run([seed], [length], block_size, strategy, coarse=coarse)
    assert result.passes == min(block_size, length) == len(result.trace)
    assert result.passes_per_item.tolist() == [result.passes]


@pytest.mark.parametrize("strategy", ONCE)
def test_every_length_and_block_size(strategy):
    for length in range(1, 20):
        for block_size in range(1, 22):
            result = run([length], [length], block_size, strategy)
            assert result.passes == min(block_size, length), (length, block_size)
            assert (result.alignment != MASK).all()


@given(st.lists(st.tuples(seeds, lengths), min_size=1, max_size=5), sizes, st.sampled_from(KEEPING))
@settings(max_examples=100, deadline=None)
def test_commitments_never_change(items, block_size, strategy):
    item_seeds, item_lengths = map(list, zip(*items, strict=True))
    result = run(item_seeds, item_lengths, block_size, strategy)
    for item, length in enumerate(item_lengths):
        for before, after, _ in commits(result, item, length):
            assert ((after == before) | (before == MASK)).all()
    assert torch.equal(result.trace[-1], result.alignment)
    assert (result.alignment != MASK).all()


@given(seeds, lengths, st.integers(2, 12), st.sampled_from(APART), st.booleans())
@settings(max_examples=120, deadline=None)
def test_no_two_neighbours_in_one_pass(seed, length, block_size, strategy, coarse):
    result = run([seed], [length], block_size, strategy, coarse=coarse)
    for _, _, new in commits(result, 0, length):
        assert not any(frame + 1 in new for frame in new), (strategy, new)


def test_block_does_commit_neighbours_across_a_boundary():
    """What the two strategies above prevent does happen without them, so the test above can fail."""
    neighbours = 0
    for seed in range(50):
        for _, _, new in commits(run([seed], [24], 4, "block"), 0, 24):
            neighbours += any(frame + 1 in new for frame in new)
    assert neighbours > 10


@given(seeds, lengths, st.integers(2, 12))
@settings(max_examples=100, deadline=None)
def test_alternate_sub_block_keeps_to_its_half(seed, length, block_size):
    half = math.ceil(min(block_size, length) / 2)
    for number, (_, _, new) in enumerate(
        commits(run([seed], [length], block_size, "alternate_sub_block"), 0, length)
    ):
        assert all((frame % block_size < half) == (number % 2 == 0) for frame in new)


@given(seeds, lengths, st.integers(2, 12))
@settings(max_examples=100, deadline=None)
def test_right_most_last_means_slot_b_minus_1(seed, length, block_size):
    result = run([seed], [length], block_size, "right_most_last")
    for number, (_, _, new) in enumerate(commits(result, 0, length)):
        edges = {frame for frame in new if frame % block_size == block_size - 1}
        assert edges == (new if number == block_size - 1 else set())


def test_right_most_last_lets_the_last_frame_of_a_partial_block_go_early():
    """Frame 10 of 11 is slot 2 of a block of 4: it must be able to go in the first pass."""
    log_probs = torch.full((1, 11, VOCABULARY + 1), -5.0)
    log_probs[0, 10, 1] = -0.1
    result = impute(
        lambda _: log_probs,
        torch.tensor([11]),
        block_size=4,
        strategy="right_most_last",
        mask=MASK,
        trace=True,
    )
    assert result.trace[0][0, 10] == 1


@given(
    st.lists(st.tuples(seeds, lengths), min_size=1, max_size=5),
    sizes,
    st.sampled_from(list(STRATEGIES)),
    st.booleans(),
)
@settings(max_examples=120, deadline=None)
def test_batch_equals_alone_and_repeats_itself(items, block_size, strategy, coarse):
    item_seeds, item_lengths = map(list, zip(*items, strict=True))
    together = run(item_seeds, item_lengths, block_size, strategy, coarse=coarse)
    again = run(item_seeds, item_lengths, block_size, strategy, coarse=coarse)
    assert torch.equal(together.alignment, again.alignment) and torch.equal(
        together.confidence, again.confidence
    )
    for item, (seed, length) in enumerate(items):
        alone = run([seed], [length], block_size, strategy, coarse=coarse)
        assert torch.equal(alone.alignment[0], together.alignment[item, :length])
        assert torch.equal(alone.confidence[0], together.confidence[item, :length])
        assert alone.passes == together.passes_per_item[item]
        assert (together.alignment[item, length:] == 0).all() and (
            together.confidence[item, length:] == 0
        ).all()
    assert together.passes == max(together.passes_per_item.tolist())


def plain_walk(seed, length, block_size, strategy):
    """The same strategies for one item, frame by frame, sharing no code."""
    step = random_step([seed], [length])
    partial, passes = [MASK] * length, 0
    while MASK in partial:
        best = [
            max((p, -v) for v, p in enumerate(row))
            for row in step(torch.tensor([partial]))[0].float().tolist()
        ]
        open_frames = [t for t in range(length) if partial[t] == MASK]
        chosen = []
        if strategy == "top_k":
            for t in sorted(open_frames, key=lambda t: (-best[t][0], t)):
                near = block_size > 1 and (t - 1 in chosen or t + 1 in chosen)
                if not near and len(chosen) < math.ceil(length / block_size):
                    chosen.append(t)
        else:
            for start in range(0, length, block_size):
                inside = [t for t in open_frames if start <= t < start + block_size]
                if strategy == "alternate_sub_block":
                    half = math.ceil(min(block_size, length) / 2)
                    inside = [t for t in inside if (t - start < half) == (passes % 2 == 0)]
                if strategy == "right_most_last" and passes < block_size - 1:
                    inside = [t for t in inside if t - start < block_size - 1]
                if inside:
                    chosen.append(max(inside, key=lambda t: (best[t][0], -t)))
        for t in chosen:
            partial[t] = -best[t][1]
        passes += 1
    return partial, passes


@given(seeds, lengths, sizes, st.sampled_from([*ONCE, "top_k"]))
@settings(max_examples=100, deadline=None)
def test_agrees_with_a_plain_walk(seed, length, block_size, strategy):
    result = run([seed], [length], block_size, strategy)
    expected, passes = plain_walk(seed, length, block_size, strategy)
    assert result.alignment[0].tolist() == expected and result.passes == passes


@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_block_size_one_is_greedy_ctc(strategy):
    step = random_step([3, 4], [17, 9])
    result = impute(step, torch.tensor([17, 9]), block_size=1, strategy=strategy, mask=MASK)
    greedy = step(torch.full((2, 17), MASK)).argmax(-1)
    assert result.passes == 1
    assert torch.equal(result.alignment[0], greedy[0]) and torch.equal(result.alignment[1, :9], greedy[1, :9])


@pytest.mark.parametrize("strategy", [*ONCE, "top_k", *ANNEALING])
def test_a_block_as_long_as_the_utterance_is_one_frame_a_pass(strategy):
    result = run([5], [13], 13, strategy)
    assert result.passes == 13
    if strategy not in ANNEALING:
        assert all(len(new) == 1 for _, _, new in commits(result, 0, 13))


def test_the_likeliest_frame_of_all_comes_first_when_the_block_is_the_utterance():
    step = random_step([6], [13])
    first = run([6], [13], 13, "block").trace[0][0]
    assert (first != MASK).nonzero().item() == step(torch.full((1, 13), MASK)).max(-1).values.argmax().item()


@given(seeds, lengths, sizes)
@settings(max_examples=100, deadline=None)
def test_top_k_ends_and_counts_its_passes(seed, length, block_size):
    result = run([seed], [length], block_size, "top_k")
    k = math.ceil(length / block_size)
    new_frames = [len(new) for _, _, new in commits(result, 0, length)]
    assert max(new_frames) <= k and sum(new_frames) == length and all(new_frames)
    assert result.passes >= math.ceil(length / k)
    if block_size > 1:  # once fewer than k can be had, what is left comes in ones and twos
        assert result.passes <= block_size + 2


@given(seeds, lengths, sizes, st.sampled_from(ANNEALING))
@settings(max_examples=80, deadline=None)
def test_annealing_ends_in_block_size_passes_and_deletes_fewer_each_time(seed, length, block_size, strategy):
    result = run([seed], [length], block_size, strategy)
    assert result.passes == min(block_size, length)
    left = [(row[0] == MASK).sum().item() for row in result.trace]
    assert left == sorted(left, reverse=True) and left[-1] == 0 and len(set(left)) == len(left)


def test_annealing_by_likelihood_deletes_the_least_likely():
    step = random_step([11], [20])
    scores = step(torch.full((1, 20), MASK)).max(-1).values[0]
    after = impute(step, torch.tensor([20]), block_size=4, strategy="annealing", mask=MASK, trace=True).trace[
        0
    ][0]
    deleted = (after == MASK).nonzero().flatten()
    assert len(deleted) == 15 and scores[deleted].max() < scores[after != MASK].min()


def test_annealing_at_random_follows_its_generator_and_schedule():
    def decode(seed, **options):
        strategy = with_options(decoding.annealing, by="random", **options)
        return run([1], [40], 6, strategy, generator=torch.Generator().manual_seed(seed))

    first = decode(1)
    assert torch.equal(first.alignment, decode(1).alignment)
    masks = {tuple((decode(seed).trace[0][0] == MASK).tolist()) for seed in range(20)}
    assert len(masks) == 20  # every seed deletes others
    half = decode(1, schedule=lambda progress: 0.5)
    assert [(row == MASK).sum().item() for row in half.trace] == [20] * 5 + [0]
    never = decode(1, schedule=lambda progress: 0.0)
    assert never.passes == 1


def test_random_deletion_is_even_over_frames():
    counts = torch.zeros(40)
    for seed in range(400):
        result = run([1], [40], 2, "annealing_random", generator=torch.Generator().manual_seed(seed))
        counts += result.trace[0][0] == MASK
    assert counts.min() > 140 and counts.max() < 260  # 200 expected, deviation 10


@given(seeds, lengths, st.integers(2, 12), st.floats(1.0, 12.0), st.floats(0.3, 0.95))
@settings(max_examples=120, deadline=None)
def test_adaptive_keeps_its_word(seed, length, block_size, sharpness, threshold):
    sure = (1 + threshold) / 2
    strategy = with_options(decoding.adaptive, threshold=threshold, sure=sure)
    result = run([seed], [length], block_size, strategy, sharpness=sharpness)
    assert result.passes <= min(block_size, length)
    for before, after, new in commits(result, 0, length):
        confidence = result.confidence[0]
        for t in new:
            if t + 1 in new:
                both_blank = after[t] == 0 and after[t + 1] == 0
                assert both_blank or min(confidence[t], confidence[t + 1]) >= sure - 1e-6
        for start in range(0, length, block_size):
            waiting = [t for t in range(start, min(start + block_size, length)) if before[t] == MASK]
            if waiting and not new & set(waiting):  # its only frame left stands beside one that goes now
                assert waiting == [start + block_size - 1] and start + block_size in new
            doubtful = [t for t in waiting if t in new and confidence[t] < threshold - 1e-6]
            assert len(doubtful) <= 1


def test_adaptive_is_quick_where_the_model_is_sure():
    log_probs = torch.full((1, 64, VOCABULARY + 1), 1e-6).log()
    log_probs[0, :, 0] = 0.0
    log_probs[0, ::6, 0], log_probs[0, ::6, 3] = -20.0, 0.0
    result = impute(lambda _: log_probs, torch.tensor([64]), block_size=8, strategy="adaptive", mask=MASK)
    assert result.passes == 1
    unsure = log_probs.clone()
    unsure[0, 20, 3], unsure[0, 20, 0] = math.log(0.5), math.log(0.4)
    unsure[0, 20] = unsure[0, 20].where(unsure[0, 20] > -3, torch.tensor(-3.0))
    result = impute(lambda _: unsure, torch.tensor([64]), block_size=8, strategy="adaptive", mask=MASK)
    assert result.passes == 2


def test_adaptive_takes_a_threshold_above_its_own_for_neighbours():
    step = random_step([8], [16])
    for threshold in (0.5, 0.99, 1.0):
        strategy = with_options(decoding.adaptive, threshold=threshold)
        assert impute(step, torch.tensor([16]), block_size=4, strategy=strategy, mask=MASK).passes <= 4


def test_confidence_is_the_probability_at_commit_time():
    step = random_step([8], [16])
    result = impute(step, torch.tensor([16]), block_size=4, strategy="block", mask=MASK, trace=True)
    partial = torch.full((1, 16), MASK)
    for after in result.trace:
        probabilities = step(partial).exp()[0].float()
        for t in ((partial != after)[0]).nonzero().flatten():
            assert result.confidence[0, t] == pytest.approx(probabilities[t, after[0, t]].item(), abs=1e-6)
        partial = after


def test_on_pass_sees_every_pass_in_order():
    seen = []
    result = run(
        [2], [20], 5, "block", on_pass=lambda partial, _, number: seen.append((number, partial.clone()))
    )
    assert [number for number, _ in seen] == [1, 2, 3, 4, 5]
    assert all(torch.equal(partial, row) for (_, partial), row in zip(seen, result.trace, strict=True))


def test_the_step_is_not_called_once_more_than_needed():
    calls = []
    step = random_step([2, 3], [20, 7])
    result = impute(
        lambda partial: calls.append(1) or step(partial),
        torch.tensor([20, 7]),
        block_size=5,
        strategy="block",
        mask=MASK,
    )
    assert len(calls) == result.passes == 5 and result.trace is None


def test_items_without_frames():
    result = impute(
        random_step([1, 2], [0, 4]), torch.tensor([0, 4]), block_size=3, strategy="block", mask=MASK
    )
    assert result.passes_per_item.tolist() == [0, 3] and result.alignment[0].tolist() == [0] * 4
    nothing = impute(
        lambda _: pytest.fail("called"), torch.tensor([0]), block_size=3, strategy="block", mask=MASK
    )
    assert nothing.passes == 0 and nothing.alignment.shape == (1, 0)


def test_tokens_that_are_impossible_everywhere_still_finish():
    result = impute(
        lambda partial: torch.full((*partial.shape, VOCABULARY + 1), -torch.inf),
        torch.tensor([9]),
        block_size=4,
        strategy="block",
        mask=MASK,
    )
    assert result.passes == 4 and (result.confidence == 0).all()


@pytest.mark.parametrize("block_size", [0, -1, 2.5, True, None])
def test_bad_block_sizes(block_size):
    with pytest.raises(ValueError, match="block size"):
        run([1], [4], block_size, "block")


def test_bad_strategies_and_steps():
    with pytest.raises(ValueError, match="right_most_last"):
        run([1], [4], 2, "left_most_last")
    with pytest.raises(ValueError, match="committed no frame in pass 1"):
        run([1], [4], 2, lambda now: torch.zeros_like(now.masked))
    with pytest.raises(ValueError, match="threshold"):
        run([1], [4], 2, with_options(decoding.adaptive, threshold=0.9, sure=0.8))
    with pytest.raises(ValueError, match="shape"):
        impute(
            lambda p: torch.zeros(1, 4, MASK + 1),
            torch.tensor([4]),
            block_size=2,
            strategy="block",
            mask=MASK,
        )
    with pytest.raises(ValueError, match="NaN in pass 1 for item 0, frame 2"):
        bad = torch.zeros(1, 4, MASK)
        bad[0, 2, 1] = torch.nan
        impute(lambda p: bad, torch.tensor([4]), block_size=2, strategy="block", mask=MASK)


def test_a_strategy_of_ones_own_is_one_function():
    def left_to_right(now):
        earlier = -now.slots.float().expand_as(now.scores)
        return decoding.likeliest_per_block(earlier, now.masked, now.block_size)

    result = run([1], [10], 4, left_to_right)
    order = [sorted(new) for _, _, new in commits(result, 0, 10)]
    assert order == [[0, 4, 8], [1, 5, 9], [2, 6], [3, 7]]
