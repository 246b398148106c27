"""Layers that attend to the encoder's frames, and their start from Moonshine's decoder."""

import importlib.util
from pathlib import Path

import pytest
import soundfile
import torch
from torch.nn import functional

from imputer import configs, models
from imputer.errors import ImputerError, UsageError
from imputer.frontends import moonshine_decoder
from imputer.layers import REACH, CrossLayer, hidden_from_blocks
from imputer.model import Imputer
from imputer.vocabulary import Vocabulary

SAMPLE = models.SHIPPED / "english" / "sample.wav"
has_weights = all(importlib.util.find_spec(name) for name in ("moonshine_voice", "onnx", "onnxruntime"))
needs_weights = pytest.mark.skipif(not has_weights, reason="needs the extras [english,export]")
NETWORK = configs.Model(width=288, layers=2, heads=8, filter_size=1152, dropout=0.0, cross_attention=True)
FRONT_END = configs.FrontEnd(name="trainable_moonshine", stack=4)


@pytest.fixture(scope="module")
def network() -> Imputer:
    torch.manual_seed(0)
    return Imputer(NETWORK, FRONT_END, 30).eval()


def rows(length: int, seed: int = 0) -> torch.Tensor:
    return 0.1 * torch.randn(1, length, 384, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("frames", [1, 5, REACH, REACH + 1, 3 * REACH - 1])
@pytest.mark.parametrize("stack", [1, 4])
def test_attention_in_blocks_is_dense_attention_with_a_window(frames: int, stack: int) -> None:
    torch.manual_seed(frames)
    settings = configs.Model(width=32, layers=1, heads=4, filter_size=16, dropout=0.0)
    layer = CrossLayer(settings, memory_size=12, stack=stack)
    x, memory = torch.randn(2, frames, 32), torch.randn(2, frames * stack, 12)
    lengths = torch.tensor([frames, max(1, frames - 2)])
    read = layer.read(memory)
    found = layer.attend_memory(x, read, hidden_from_blocks(frames, lengths, stack, x.dtype))

    query = layer.query(x).unflatten(-1, (4, 8)).transpose(1, 2)
    key, value = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in read.chunk(2, dim=-1))
    place = torch.arange(frames) * stack + (stack - 1) / 2
    distance = torch.arange(frames * stack) - place[:, None]
    spread = layer.window_width.exp()[:, None, None]
    window = -0.5 * ((distance - layer.window_centre[:, None, None]) / spread).square()
    window = window.masked_fill(distance.abs() > REACH * stack, -torch.inf)
    for item, length in enumerate(lengths.tolist()):
        scores = query[item] @ key[item].transpose(-1, -2) / 8**0.5 + window
        scores[..., length * stack :] = -torch.inf
        mixed = (scores[:, :length].softmax(-1) @ value[item]).transpose(0, 1).flatten(1)
        expected = functional.linear(mixed, layer.memory_output.weight)
        assert torch.allclose(found[item, :length], expected, atol=1e-5)


def test_a_recording_in_a_batch_is_as_alone(network: Imputer) -> None:
    features = torch.cat((rows(130), rows(130, seed=1)))
    lengths = torch.tensor([130, 75])
    acoustic, frames = network.encode(features, lengths)
    together = network.impute(acoustic, frames, network.all_masked(acoustic))
    acoustic, alone_frames = network.encode(features[1:, :75], lengths[1:])
    alone = network.impute(acoustic, alone_frames, network.all_masked(acoustic))
    assert frames[1] == alone_frames[0]
    assert torch.allclose(together[1, : frames[1]], alone[0], atol=1e-4)


def test_padding_gives_finite_gradients(network: Imputer) -> None:
    acoustic, frames = network.encode(torch.cat((rows(300), rows(300))), torch.tensor([300, 20]))
    network.impute(acoustic, frames, network.all_masked(acoustic))[1, : frames[1], 0].sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in network.parameters())
    network.zero_grad()


def test_committed_tokens_change_what_other_frames_say(network: Imputer) -> None:
    acoustic, frames = network.encode(rows(130), torch.tensor([130]))
    partial = network.all_masked(acoustic)
    before = network.impute(acoustic, frames, partial)
    partial[0, 3] = 7
    after = network.impute(acoustic, frames, partial)
    assert (before[0, 6] - after[0, 6]).abs().max() > 1e-4


def test_a_folder_round_trips_in_every_form(network: Imputer, tmp_path: Path) -> None:
    vocabulary = Vocabulary.train(["the quick brown fox jumps over the lazy dog"] * 3, size=30)
    acoustic, frames = network.encode(rows(60), torch.tensor([60]))
    expected = network.impute(acoustic, frames, network.all_masked(acoustic))
    for store, tolerance in (("float32", 0.0), ("float16", 0.02), ("int8", 0.3)):
        models.save(tmp_path / store, network, vocabulary, store=store)
        loaded, _ = models.load(tmp_path / store)
        acoustic, frames = loaded.encode(rows(60), torch.tensor([60]))
        found = loaded.impute(acoustic, frames, loaded.all_masked(acoustic))
        assert (found - expected).abs().max() <= tolerance, store
    sizes = {store: (tmp_path / store / models.WEIGHTS).stat().st_size for store in ("float32", "int8")}
    assert sizes["int8"] < 0.27 * sizes["float32"]


def test_a_damaged_scale_is_named(network: Imputer, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    vocabulary = Vocabulary.train(["the quick brown fox jumps over the lazy dog"] * 3, size=30)
    models.save(tmp_path, network, vocabulary, store="int8")
    stored = load_file(tmp_path / models.WEIGHTS)
    del stored["layers.0.qkv.weight:scale"]
    save_file(stored, tmp_path / models.WEIGHTS)
    with pytest.raises(UsageError, match=r"layers\.0\.qkv\.weight is stored as I8"):
        models.load(tmp_path)


def test_a_front_end_without_frames_is_refused() -> None:
    with pytest.raises(UsageError, match=r"cross_attention needs a front end.*not filterbank_convolution"):
        Imputer(configs.Model(cross_attention=True), configs.FrontEnd(), 30)


# Moonshine's decoder.


@needs_weights
def test_the_weights_write_what_moonshine_writes() -> None:
    """The multiplied-out weights, run token by token as Moonshine runs them, against onnxruntime."""
    from imputer.evaluation.baselines import MoonshineDecoder, house_form

    samples, _ = soundfile.read(SAMPLE, dtype="float32")
    theirs = MoonshineDecoder()
    memory = theirs.encoder.extract(torch.from_numpy(samples))
    weights = moonshine_decoder.pretrained_weights()
    said = [moonshine_decoder.BEGIN]
    while len(said) < 60 and (token := int(next_token(weights, said, memory).argmax())) != 2:
        said.append(token)
    pieces = moonshine_decoder.read_tokens()
    text = b"".join(pieces[token] for token in said[1:]).decode().replace("▁", " ")
    assert house_form(text) == theirs.transcribe(samples)[0]


def next_token(weights: dict[str, torch.Tensor], said: list[int], memory: torch.Tensor) -> torch.Tensor:
    """One step of the decoder as published: causal self-attention, attention to all frames, gated feed-forward."""

    def heads(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (8, 36)).transpose(0, 1)

    def mix(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor | float) -> torch.Tensor:
        return ((q @ k.transpose(-1, -2) / 6 + hidden).softmax(-1) @ v).transpose(0, 1).flatten(1)

    def turned(x: torch.Tensor) -> torch.Tensor:
        angle = torch.arange(x.shape[1])[:, None] * 10_000.0 ** (-torch.arange(16) / 16)
        a, b = x[..., :16], x[..., 16:32]
        return torch.cat(
            (a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin(), x[..., 32:]), -1
        )

    x = weights["embedding"][said]
    future = torch.full((len(said), len(said)), -1e9).triu(1)
    for i in range(moonshine_decoder.LAYERS):
        at = {name.removeprefix(f"layers.{i}."): t for name, t in weights.items() if f"layers.{i}." in name}
        q, k, v = map(
            heads,
            (functional.layer_norm(x, (288,), at["attention_norm.weight"]) @ at["qkv.weight"].T).chunk(3, -1),
        )
        x = x + mix(turned(q), turned(k), v, future) @ at["attention_output.weight"].T
        q = heads(functional.layer_norm(x, (288,), at["memory_norm.weight"]) @ at["query.weight"].T)
        k, v = map(heads, (memory @ at["keys_values.weight"].T).chunk(2, -1))
        x = x + mix(q, k, v, 0.0) @ at["memory_output.weight"].T
        inner = functional.layer_norm(x, (288,), at["filter_norm.weight"]) @ at["filter_in.weight"].T
        value, gate = (inner + at["filter_in.bias"]).chunk(2, -1)
        x = x + (functional.silu(gate) * value) @ at["filter_out.weight"].T + at["filter_out.bias"]
    return functional.layer_norm(x[-1], (288,), weights["norm"]) @ weights["embedding"].T


@needs_weights
def test_a_start_takes_layers_and_embeddings() -> None:
    vocabulary = moonshine_decoder.vocabulary(["john has the piper's longum"] * 2, 30)
    model = Imputer(NETWORK, FRONT_END, vocabulary.size)
    moonshine_decoder.start(model, vocabulary)
    weights, known = moonshine_decoder.pretrained_weights(), moonshine_decoder.plain_pieces()
    assert torch.equal(model.layers[1].filter_in.weight, weights["layers.1.filter_in.weight"])
    for token, piece in enumerate(vocabulary.pieces(range(1, vocabulary.size + 1)), 1):
        assert torch.equal(model.embedding.weight[token], weights["embedding"][known[piece]]), piece
    with pytest.raises(UsageError, match=r"model\.heads = 4.*need 8"):
        shape = configs.Model(width=288, layers=2, heads=4, filter_size=1152, cross_attention=True)
        moonshine_decoder.start(Imputer(shape, FRONT_END, vocabulary.size), vocabulary)


@needs_weights
def test_the_vocabulary_spells_any_plain_text_with_few_pieces() -> None:
    texts = ["the long pepper is less aromatic than the black"] * 5 + [
        "quizzical jackdaws love my vex'd sphinx of big fjord"
    ]
    vocabulary = moonshine_decoder.vocabulary(texts, 60)
    assert vocabulary.size == 60
    assert vocabulary.pieces(vocabulary.encode("the long black")) == ["▁the", "▁long", "▁black"]
    for text in (texts[-1], "zebra"):
        assert vocabulary.decode(vocabulary.encode(text)) == text
    with pytest.raises(UsageError, match="have 'é'"):
        moonshine_decoder.vocabulary(["café"], 30)
    with pytest.raises(ImputerError, match="no text"):
        moonshine_decoder.vocabulary([" "], 30)


@pytest.mark.skipif(importlib.util.find_spec("onnxscript") is None, reason="needs the extra [export]")
def test_the_export_computes_the_same(network: Imputer, tmp_path: Path) -> None:
    from imputer.runtimes import onnx

    vocabulary = Vocabulary.train(["the quick brown fox jumps over the lazy dog"] * 3, size=30)
    models.save(tmp_path / "torch", network, vocabulary)
    differences = onnx.export(tmp_path / "torch", tmp_path / "onnx", int8=False)
    assert max(differences.values()) < onnx.TOLERANCE
