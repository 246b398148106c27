"""The network: padding never leaks, the acoustic part is separate, folders round-trip, bad folders are named."""

from pathlib import Path

import pytest
import torch

from imputer import configs, models
from imputer.errors import UsageError
from imputer.frontends.attention import attention, rotary_angles, rotate
from imputer.model import Imputer
from imputer.vocabulary import Vocabulary

SMALL = configs.Model(width=16, layers=2, heads=2, filter_size=24, dropout=0.1)
FRONT_ENDS = [
    configs.FrontEnd(channels=3),
    configs.FrontEnd(name="frames", feature_size=7, frame_seconds=0.02, stack=3),
]


def built(front_end: configs.FrontEnd, vocabulary_size: int = 6) -> Imputer:
    torch.manual_seed(0)
    imputer = Imputer(SMALL, front_end, vocabulary_size).eval()
    normalisation = imputer.front_end.normalisation
    normalisation.fit(torch.randn(normalisation.mean.shape), torch.rand(normalisation.mean.shape) + 0.5)
    return imputer


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary.train(["abc cab", "bca cabba", "a b c"], size=4, units="characters")


@pytest.mark.parametrize("front_end", FRONT_ENDS, ids=lambda f: f.name)
def test_padding_never_leaks(front_end: configs.FrontEnd) -> None:
    imputer = built(front_end)
    lengths = torch.tensor([40, 23, 1])
    features = torch.randn(3, 40, imputer.front_end.feature_size)
    features[1, 23:], features[2, 1:] = 1e4, torch.nan
    partial = torch.randint(0, 8, (3, 40))
    with torch.no_grad():
        acoustic, frame_lengths = imputer.encode(features.nan_to_num(1e4), lengths)
        together = imputer.impute(acoustic, frame_lengths, partial[:, : acoustic.shape[1]])
        for item, n in enumerate(lengths.tolist()):
            one, frames = imputer.encode(features[item : item + 1, :n], lengths[item : item + 1])
            assert frames.tolist() == [frame_lengths[item]]
            alone = imputer.impute(one, frames, partial[item : item + 1, : one.shape[1]])
            assert torch.allclose(together[item, : one.shape[1]], alone[0], atol=1e-5)


def test_frames_are_a_quarter_of_the_filter_banks_rounded_up() -> None:
    imputer = built(FRONT_ENDS[0])
    for n in range(1, 20):
        acoustic, lengths = imputer.encode(torch.randn(1, n, 240), torch.tensor([n]))
        assert acoustic.shape[1] == lengths[0] == -(-n // 4)


def test_the_papers_convolutions() -> None:
    front_end = built(FRONT_ENDS[0]).front_end
    for convolution, channels in ((front_end.first, 3), (front_end.second, 3)):
        assert (convolution.kernel_size, convolution.stride) == ((11, 3), (2, 1))
        assert convolution.in_channels == channels


def test_posteriors_are_normalised_over_blank_and_tokens() -> None:
    imputer = built(FRONT_ENDS[1])
    log_probs, lengths = imputer(torch.randn(2, 9, 7), torch.tensor([9, 5]))
    assert log_probs.shape == (2, 3, 7)
    assert lengths.tolist() == [3, 2]
    assert torch.allclose(log_probs.exp().sum(-1), torch.ones(2, 3))


def test_every_commitment_reaches_every_frame() -> None:
    imputer = built(FRONT_ENDS[1])
    acoustic, lengths = imputer.encode(torch.randn(1, 30, 7), torch.tensor([30]))
    masked = imputer.all_masked(acoustic)
    before = imputer.impute(acoustic, lengths, masked)
    masked[0, 4] = 2
    after = imputer.impute(acoustic, lengths, masked)
    assert ((before - after).abs().amax(-1) > 0).all()


def test_attention_sees_relative_positions_only() -> None:
    """The same frames later in a recording give the same posteriors: rotary positions carry no origin."""
    x = torch.randn(1, 6, 16)
    hidden = torch.tensor([-torch.inf] * 5 + [0.0] * 6)[None, None, None]
    imputer = built(FRONT_ENDS[1])
    moved = torch.cat((torch.randn(1, 5, 16), x), dim=1)
    assert torch.allclose(
        imputer.contextualise(x, None), imputer.contextualise(moved, hidden)[:, 5:], atol=1e-5
    )


def test_a_folder_round_trips(tmp_path: Path, vocabulary: Vocabulary) -> None:
    imputer = built(FRONT_ENDS[0], vocabulary.size)
    models.save(tmp_path / "m", imputer, vocabulary)
    loaded, tokens = models.load(tmp_path / "m")
    features, lengths = torch.randn(1, 33, 240), torch.tensor([33])
    assert torch.equal(loaded(features, lengths)[0], imputer(features, lengths)[0])
    assert tokens.fingerprint == vocabulary.fingerprint
    assert sorted(p.name for p in (tmp_path / "m").iterdir()) == [
        "config.toml",
        "model.safetensors",
        "tokenizer.model",
    ]
    models.save(tmp_path / "half", imputer, vocabulary, half=True)
    assert torch.allclose(
        models.load(tmp_path / "half")[0](features, lengths)[0], imputer(features, lengths)[0], atol=1e-2
    )


@pytest.mark.parametrize("name", ["config.toml", "model.safetensors", "tokenizer.model"])
def test_a_missing_or_damaged_file_is_named(tmp_path: Path, vocabulary: Vocabulary, name: str) -> None:
    folder = tmp_path / "m"
    models.save(folder, built(FRONT_ENDS[0], vocabulary.size), vocabulary)
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole[: len(whole) // 2] if name != "config.toml" else b"[model\n")
    with pytest.raises(UsageError, match=name.replace(".", r"\.")):
        models.load(folder)
    (folder / name).unlink()
    with pytest.raises(UsageError, match=f"{name} is missing"):
        models.load(folder)


def test_weights_of_another_size_are_refused(tmp_path: Path, vocabulary: Vocabulary) -> None:
    folder = tmp_path / "m"
    models.save(folder, built(FRONT_ENDS[0], vocabulary.size), vocabulary)
    text = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(text.replace("filter_size = 24", "filter_size = 32"))
    with pytest.raises(UsageError, match="24x16 in the file, 32x16 in the model"):
        models.load(folder)


def test_another_tokenizer_is_refused(tmp_path: Path, vocabulary: Vocabulary) -> None:
    folder = tmp_path / "m"
    models.save(folder, built(FRONT_ENDS[0], vocabulary.size), vocabulary)
    Vocabulary.train(["xyz zyx"], size=4, units="characters").save(folder / "tokenizer.model")
    with pytest.raises(UsageError, match="not the tokenizer this model was trained with"):
        models.load(folder)


def test_heads_must_divide_the_width() -> None:
    with pytest.raises(UsageError, match=r"model.width = 16 must be a multiple of twice model.heads = 5"):
        Imputer(configs.Model(width=16, heads=5), FRONT_ENDS[0], 3)


def test_attention_in_bfloat16_is_that_of_torch_but_for_rounding() -> None:
    query, key, value = (torch.randn(2, 3, 11, 8) for _ in range(3))
    hidden = torch.zeros(2, 1, 1, 11).masked_fill(
        torch.arange(11) >= torch.tensor([[11], [6]])[:, None, None], -torch.inf
    )
    exact = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=hidden)
    torch.testing.assert_close(attention(query, key, value, hidden), exact)
    rough = attention(query.bfloat16(), key.bfloat16(), value.bfloat16(), hidden.bfloat16())
    torch.testing.assert_close(rough.float(), exact, rtol=0.05, atol=0.05)


def test_rotation_makes_attention_relative() -> None:
    query, key = (torch.randn(1, 8).expand(20, 8) for _ in range(2))
    rotation = rotary_angles(20, 8, torch.device("cpu"), torch.float32)
    scores = rotate(query, rotation) @ rotate(key, rotation).T
    torch.testing.assert_close(scores[0, 0], query[0] @ key[0])
    for distance in range(-19, 20):
        along = torch.diagonal(scores, distance)
        torch.testing.assert_close(along, along[:1].expand_as(along), rtol=1e-4, atol=1e-4)


def test_training_in_bfloat16_gives_finite_gradients() -> None:
    network = Imputer(
        configs.Model(width=16, layers=1, heads=2, filter_size=32), configs.FrontEnd(channels=2), 5
    )
    with torch.autocast("cpu", torch.bfloat16):
        log_probs, _ = network(torch.randn(2, 40, 240), torch.tensor([40, 30]))
    log_probs.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in network.parameters())


def test_attention_stays_in_bfloat16_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotary positions are float32; multiplied with them, queries would leave the fast path."""
    from imputer import model as module

    seen = []

    def spy(*tensors: torch.Tensor | None) -> torch.Tensor:
        seen.extend(one.dtype for one in tensors[:3])
        return attention(*tensors)

    monkeypatch.setattr(module, "attention", spy)
    network = built(FRONT_ENDS[0])
    acoustic = torch.randn(1, 7, 16)
    with torch.autocast("cpu", torch.bfloat16):
        network.impute(acoustic, torch.tensor([7]), network.all_masked(acoustic))
    assert set(seen) == {torch.bfloat16}
