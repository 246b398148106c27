"""Roll-ins: noise never loses a token, draws are reproducible, forced imputation keeps the target."""

import itertools
import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from imputer import rollin
from imputer.alignments import collapse, feasible
from imputer.errors import ImputerError, UsageError

PROVENANCE = rollin.Provenance("abc", False, 0.04)


@st.composite
def some_alignment(draw: st.DrawFn) -> tuple[list[int], bool]:
    return draw(st.lists(st.integers(0, 3), min_size=1, max_size=24)), draw(st.booleans())


@settings(deadline=None, derandomize=True, max_examples=200)
@given(case=some_alignment(), seed=st.integers(0, 10_000), noise=st.sampled_from(sorted(rollin.NOISES)))
def test_noise_keeps_the_target_and_moves_nothing_further_than_a_frame(
    case: tuple[list[int], bool], seed: int, noise: str
) -> None:
    alignment, merge = case
    noised = rollin.NOISES[noise](alignment, torch.Generator().manual_seed(seed), merge_repeats=merge)
    assert len(noised) == len(alignment)
    assert collapse(noised, merge_repeats=merge) == collapse(alignment, merge_repeats=merge)
    before = [part.start for part in rollin.segments(alignment, merge_repeats=merge)]
    after = [part.start for part in rollin.segments(noised, merge_repeats=merge)]
    assert all(abs(a - b) <= 1 for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("noise", ["utterance", "token"])
def test_noise_really_moves_both_ways(noise: str) -> None:
    alignment = [0, 0, 1, 0, 0, 2, 0, 0]
    drawn = {
        tuple(rollin.NOISES[noise](alignment, torch.Generator().manual_seed(seed))) for seed in range(60)
    }
    assert {(0, 1, 0, 0, 2, 0, 0, 0), (0, 0, 0, 1, 0, 0, 2, 0), tuple(alignment)} <= drawn
    assert len(drawn) == {"utterance": 3, "token": 9}[noise]


@settings(deadline=None, derandomize=True, max_examples=200)
@given(case=some_alignment(), frames=st.integers(1, 40))
def test_stretching_keeps_the_target_and_fails_only_where_no_alignment_exists(
    case: tuple[list[int], bool], frames: int
) -> None:
    alignment, merge = case
    target = collapse(alignment, merge_repeats=merge)
    stretched = rollin.stretch(alignment, frames, merge_repeats=merge)
    lengths = torch.tensor([frames]), torch.tensor([len(target)])
    fits = feasible(torch.tensor([target], dtype=torch.long), *lengths, merge_repeats=merge)
    assert (stretched is not None) == fits.item()
    if stretched is not None:
        assert len(stretched) == frames
        assert collapse(stretched, merge_repeats=merge) == target


def test_a_tight_fit_is_found() -> None:
    tight = rollin.stretch([2, 2, 2, 2, 2, 3, 1, 1, 0, 1], 5, merge_repeats=True)
    assert tight == [2, 3, 1, 0, 1]


def test_stretching_keeps_proportions() -> None:
    assert rollin.stretch([0, 1, 0, 2], 8) == [0, 0, 0, 1, 0, 0, 0, 2]
    assert rollin.stretch([0, 1, 1, 0, 2], 10, merge_repeats=True) == [0, 0, 1, 1, 1, 1, 0, 0, 2, 2]
    assert rollin.stretch([1, 2, 3], 2) is None


@pytest.mark.parametrize("ratio", [0.8, 0.9, 1.1, 1.25])
def test_stretching_is_early_as_often_as_late(ratio: float) -> None:
    alignment = [0, 0, 1, 0, 0, 0, 2, 0, 0] * 100
    stretched = rollin.stretch(alignment, round(ratio * len(alignment)))
    assert stretched
    before, after = ([i + 0.5 for i, token in enumerate(a) if token] for a in (alignment, stretched))
    late = [there - ratio * here for here, there in zip(before, after, strict=True)]
    assert max(map(abs, late)) <= 0.5 + 1e-9
    assert abs(sum(late)) / len(late) < 0.1


def draw(names: list[str], lengths: list[int], step: int = 3, **changed: object) -> tuple:
    choices = {
        "masking_policy": "block",
        "noise": "token",
        "block_size": 4,
        "seed": 1,
        "step": step,
    } | changed
    expert = {name: [0, 1, 0, 2] * (n // 4) + [0] * (n % 4) for name, n in zip(names, lengths, strict=True)}
    return rollin.draw(expert.__getitem__, names, lengths, **choices)  # type: ignore[arg-type]


def test_a_draw_depends_on_seed_step_and_utterance_only() -> None:
    alone = draw(["b"], [13])
    together = draw(["a", "b", "c"], [20, 13, 7])
    for one, many in zip(alone[:2], together[:2], strict=True):
        assert torch.equal(one[0, :13], many[1, :13])
        assert not many[1, 13:].any()
    assert not torch.equal(draw(["a"], [40])[0], draw(["a"], [40], step=4)[0])
    assert not torch.equal(draw(["a"], [40])[0], draw(["a"], [40], seed=2)[0])


def test_a_share_of_utterances_is_shown_all_masked() -> None:
    names, lengths = [f"u{number}" for number in range(400)], [12] * 400
    plain, some, everything = (draw(names, lengths, all_masked=share) for share in (0.0, 0.5, 1.0))
    assert torch.equal(plain[0], some[0]) and torch.equal(plain[0], everything[0])
    assert not everything[1].any()
    taken = (some[1] != plain[1]).any(1)  # where the policy had committed something, and it was masked out
    assert not some[1][taken].any() and torch.equal(some[1][~taken], plain[1][~taken])
    assert abs(float(taken.sum() / plain[1].any(1).sum()) - 0.5) < 0.1


def test_what_cannot_fit_is_marked() -> None:
    expert = {"short": [1, 2, 3, 4], "long": [1, 0, 0, 0]}
    alignments, committed, usable = rollin.draw(
        expert.__getitem__,
        ["short", "long"],
        [3, 3],
        masking_policy="bernoulli",
        noise="none",
        block_size=2,
        seed=0,
        step=0,
    )
    assert usable == [False, True]
    assert not alignments[0].any()
    assert not committed[0].any()


@settings(deadline=None, derandomize=True, max_examples=40)
@given(seed=st.integers(0, 1000), block_size=st.integers(1, 9), merge=st.booleans())
def test_forced_imputation_collapses_to_the_target(seed: int, block_size: int, merge: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    frame_lengths = torch.tensor([11, 7, 1])
    target_lengths = torch.tensor([4, 0, 1])
    targets = torch.randint(1, 4, (3, 4), generator=generator)
    calls = []

    def step(partial: torch.Tensor) -> torch.Tensor:
        """Posteriors that depend on the partial alignment, as a network's do."""
        calls.append(partial.clone())
        noise = torch.Generator().manual_seed(int(partial.sum()) + seed)
        return torch.randn(3, 11, 4, generator=noise).log_softmax(-1)

    found = rollin.forced_imputation(
        step, targets, frame_lengths, target_lengths, block_size=block_size, mask=4, merge_repeats=merge
    )
    for row, frames, target, tokens in zip(found, frame_lengths, targets, target_lengths, strict=True):
        assert collapse(row[:frames].tolist(), merge_repeats=merge) == target[:tokens].tolist()
    assert len(calls) == min(block_size, 11)
    for before, after in itertools.pairwise(calls):
        assert torch.equal(after[before != 4], before[before != 4])


def test_forced_imputation_in_one_pass_is_the_best_alignment() -> None:
    from imputer.alignments import best_alignment

    log_probs = torch.randn(1, 9, 5, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    lengths = torch.tensor([9]), torch.tensor([3])
    targets = torch.tensor([[1, 1, 4]])
    found = rollin.forced_imputation(lambda partial: log_probs, targets, *lengths, block_size=1, mask=5)
    assert torch.equal(found, best_alignment(log_probs, targets, *lengths)[0])


def test_the_store_gives_back_what_was_written(tmp_path: Path) -> None:
    items = {"a": [0, 1, 0], "spk-1 b": [401, 0], "c": []}
    rollin.write_alignments(tmp_path / "x.alignments", items.items(), PROVENANCE)
    store = rollin.AlignmentStore(tmp_path / "x.alignments")
    assert {name: store(name) for name in items} == items
    assert len(store) == 3
    assert "d" not in store
    store.check(PROVENANCE)


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (
            rollin.Provenance("xyz", False, 0.04),
            "its tokenizer is abc, the model's xyz; .*--vocabulary.tokenizer EXPERT/model/tokenizer.model, or ",
        ),
        (
            rollin.Provenance("abc", True, 0.04),
            "merge_repeats is False, the model's True; set --model.merge_repeats false, or align .*merge_repeats$",
        ),
        (rollin.Provenance("abc", False, 0.048), "frame_seconds is 0.04, the model's 0.048; .*front_end"),
    ],
)
def test_a_store_from_elsewhere_is_refused(tmp_path: Path, other: rollin.Provenance, says: str) -> None:
    rollin.write_alignments(tmp_path / "x", [("a", [0])], PROVENANCE)
    with pytest.raises(UsageError, match=says):
        rollin.AlignmentStore(tmp_path / "x").check(other)


def test_what_is_no_store_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"RIFF not alignments")
    with pytest.raises(UsageError, match="damaged or not an alignment file"):
        rollin.AlignmentStore(tmp_path / "x")
    with pytest.raises(UsageError, match="cannot read alignments"):
        rollin.AlignmentStore(tmp_path / "absent")


def test_no_bit_of_a_store_can_flip_unnoticed(tmp_path: Path) -> None:
    """All but those of the word "checksum", without which it is a file of an older version."""
    path = tmp_path / "x"
    rollin.write_alignments(
        path, [("a", [0, 1, 0]), ("b", [2, 2])], PROVENANCE, fingerprints={"a": (1, 2), "b": (3, 4)}
    )
    content = path.read_bytes()
    word = content.index(b"checksum")
    bits = [bit for bit in range(8 * len(content)) if not word - 1 <= bit // 8 < word + 12]
    for bit in random.Random(0).sample(bits, 300):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << (bit % 8)
        path.write_bytes(flipped)
        with pytest.raises(UsageError, match=r"damaged or not an alignment file|is not an alignment file"):
            rollin.AlignmentStore(path)


@pytest.mark.parametrize(
    ("arrays", "provenance"),
    [
        ({"offsets": np.array([0, 2, 1], np.int64)}, None),
        ({"offsets": np.array([0, 1, 9], np.int64)}, None),
        ({"offsets": np.array([0, 3], np.int64)}, None),
        ({"tokens": np.zeros(3, np.int16)}, None),
        ({}, "{"),
        ({}, '{"tokenizer": "abc"}'),
        ({}, "[" * 100_000),
    ],
)
def test_a_store_that_contradicts_itself_is_refused(
    tmp_path: Path, arrays: dict[str, np.ndarray], provenance: str | None
) -> None:
    """As an older version would have written it, without a checksum."""
    good = {
        "tokens": np.array([0, 1, 2], np.uint16),
        "offsets": np.array([0, 1, 3], np.int64),
        "names": np.frombuffer(b"a\nb", np.uint8),
    }
    metadata = {"kind": "imputer-alignments", "provenance": json.dumps(vars(PROVENANCE))}
    save_file(good, tmp_path / "good", metadata=metadata)
    assert rollin.AlignmentStore(tmp_path / "good")("b") == [1, 2]
    save_file(
        good | arrays, tmp_path / "x", metadata=metadata | ({"provenance": provenance} if provenance else {})
    )
    with pytest.raises(UsageError, match="x is damaged or not an alignment file"):
        rollin.AlignmentStore(tmp_path / "x")


def test_an_utterance_without_alignment_is_named(tmp_path: Path) -> None:
    rollin.write_alignments(tmp_path / "x", [("a", [0])], PROVENANCE)
    with pytest.raises(ImputerError, match="x has no alignment for utterance 'b'"):
        rollin.AlignmentStore(tmp_path / "x")("b")
    with pytest.raises(UsageError, match=r"cannot read alignments .*: Is a directory"):
        rollin.AlignmentStore(tmp_path)
