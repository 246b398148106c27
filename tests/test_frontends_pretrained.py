"""Pretrained encoders as front ends: how many frames, of what lengths, and what is said when one is missing."""

import importlib.util
import pickle
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from imputer import audio, configs, frontends
from imputer.audio.windows import in_windows
from imputer.errors import ImputerError, UsageError
from imputer.frontends import moonshine as module

has_moonshine = all(importlib.util.find_spec(name) for name in ("moonshine_voice", "onnxruntime"))
has_transformers = importlib.util.find_spec("transformers") is not None
needs_moonshine = pytest.mark.skipif(not has_moonshine, reason="needs the extra [english]")
needs_transformers = pytest.mark.skipif(not has_transformers, reason="needs the extra [huggingface]")


def hide(monkeypatch, *names):
    """Make packages look as if they were not installed."""
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in names else real(name))


def noise(samples, seed=0):
    return 0.1 * torch.randn(samples, generator=torch.Generator().manual_seed(seed))


# Windows.


@pytest.mark.parametrize("samples", [30, 31, 39, 40, 41, 100, 107, 333, 1000])
def test_windows_give_the_frames_of_one_run_when_nothing_is_context(samples):
    hop, span = 4, 7

    def run(sound):  # a moving sum: every frame depends on its own samples only
        frames = (len(sound) - span) // hop + 1
        return np.stack([sound[i * hop : i * hop + span].cumsum() for i in range(frames)])

    sound = np.random.default_rng(samples).standard_normal(samples)
    whole = run(sound)
    pieces = in_windows(run, sound, len(whole), hop=hop, span=span, window=9, overlap=2)
    assert np.array_equal(pieces, whole)


def test_windows_use_context_on_both_sides_of_every_inner_end():
    seen = []

    def run(sound):
        seen.append((sound[0], sound[-1]))
        return sound[:, None]

    result = in_windows(run, np.arange(50.0), 50, hop=1, span=1, window=20, overlap=4)
    assert result[:, 0].tolist() == list(range(50))
    for (_, end), (start, _) in pairwise(seen):
        assert end - start + 1 == 8  # 4 frames of context each way


# Moonshine.


@pytest.fixture(scope="module")
def encoder():
    return module.MoonshineEncoder()


@needs_moonshine
@pytest.mark.parametrize("samples", [895, 1278, 1279, 1662, 1663, 16_000, 16_383, 16_384, 40_001])
def test_moonshine_frames_are_as_many_as_foretold(encoder, samples):
    frames = encoder.extract(noise(samples))
    assert frames.shape == (module.frames_of(samples), 288)
    assert frames.dtype == torch.float32
    assert encoder.feature_frames(samples / 16_000) == len(frames)


@needs_moonshine
@pytest.mark.parametrize("samples", [1, 100, 894])
def test_moonshine_fills_what_is_too_short_with_zeros(encoder, samples):
    sound = noise(samples)
    padded = torch.nn.functional.pad(sound, (0, 895 - samples))
    assert torch.equal(encoder.extract(sound), encoder.extract(padded))
    assert len(encoder.extract(sound)) == 1 == encoder.feature_frames(samples / 16_000)


@needs_moonshine
@pytest.mark.parametrize("shape", [(0,), (1, 16_000)])
def test_moonshine_refuses_what_is_no_sound(encoder, shape):
    with pytest.raises(ImputerError, match="samples"):
        encoder.extract(torch.zeros(shape))


@needs_moonshine
def test_moonshine_runs_long_recordings_in_windows(encoder, monkeypatch):
    monkeypatch.setattr(module, "WHOLE_SECONDS", 3.0)
    monkeypatch.setattr(module, "WINDOW_FRAMES", 100)
    monkeypatch.setattr(module, "OVERLAP_FRAMES", 20)
    speech = torch.from_numpy(audio.read(Path(encoder.path).parents[1] / "two_cities.wav")[: 4 * 16_000])
    frames = encoder.extract(speech)
    assert len(frames) == encoder.feature_frames(4)
    monkeypatch.setattr(module, "WHOLE_SECONDS", 36.0)
    first = encoder.extract(speech[: 99 * module.HOP + module.SHORTEST])
    assert torch.equal(frames[:80], first[:80])
    last = encoder.extract(speech[60 * module.HOP : 159 * module.HOP + module.SHORTEST])
    assert torch.equal(frames[80:140], last[20:80])


@needs_moonshine
def test_moonshine_travels_without_its_session(encoder):
    before = encoder.extract(noise(8000))
    sent = pickle.dumps(encoder)
    assert len(sent) < 2000
    copy = pickle.loads(sent)
    assert copy.key == encoder.key
    assert torch.equal(copy.extract(noise(8000)), before)


@needs_moonshine
def test_moonshine_key_changes_with_the_weights(encoder, tmp_path):
    other = tmp_path / "encoder_model.ort"
    other.write_bytes(encoder.path.read_bytes()[:-1] + b"x")
    assert encoder.key.startswith("moonshine-tiny-en-")
    assert module._key(other) != encoder.key


@needs_moonshine
def test_moonshine_front_end_stacks_and_projects(encoder):
    front_end = frontends.build(configs.FrontEnd(name="moonshine", stack=2), 32)
    features = [front_end.extract(noise(samples, seed=samples)) for samples in (8000, 13_000)]
    lengths = torch.tensor([len(f) for f in features])
    acoustic, frames = front_end(torch.nn.utils.rnn.pad_sequence(features, batch_first=True), lengths)
    assert front_end.frame_seconds == pytest.approx(0.048)
    assert acoustic.shape == (2, frames.max(), 32)
    assert frames.tolist() == [(n + 1) // 2 for n in lengths.tolist()]
    alone, _ = front_end(features[0][None], lengths[:1])
    torch.testing.assert_close(acoustic[:1, : frames[0]], alone)
    assert not [name for name in front_end.state_dict() if "encoder" in name]  # frozen weights do not travel


@pytest.mark.parametrize("package", ["moonshine_voice", "onnxruntime"])
def test_a_missing_moonshine_says_the_command_that_installs_it(monkeypatch, package):
    if package == "onnxruntime" and not has_moonshine:
        pytest.skip("needs moonshine-voice")
    hide(monkeypatch, package)
    with pytest.raises(UsageError, match=r"pip install 'imputer-asr\[english\]'"):
        frontends.build(configs.FrontEnd(name="moonshine"), 8)


@needs_moonshine
def test_a_damaged_moonshine_is_one_line(encoder, tmp_path):
    broken = tmp_path / "encoder_model.ort"
    broken.write_bytes(b"nothing")
    copy = pickle.loads(pickle.dumps(encoder))
    copy.path = broken
    with pytest.raises(ImputerError, match=str(broken)):
        copy.extract(noise(8000))


# transformers: tiny random models, saved as any checkpoint is.


def save_whisper(folder):
    from transformers import WhisperConfig, WhisperModel

    sizes = {
        "d_model": 16,
        "encoder_ffn_dim": 32,
        "decoder_ffn_dim": 32,
        "vocab_size": 60,
        "num_mel_bins": 20,
    }
    layers = {
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
    }
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    WhisperModel(WhisperConfig(**sizes, **layers, **ids)).save_pretrained(folder)


def save_raw(name):
    def save(folder):
        import transformers

        sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
        convolutions = {
            "conv_dim": (8,) * 7,
            "num_conv_pos_embeddings": 16,
            "num_conv_pos_embedding_groups": 2,
        }
        settings = getattr(transformers, f"{name}Config")(**sizes, **convolutions, vocab_size=32)
        getattr(transformers, f"{name}Model")(settings).save_pretrained(folder)
        transformers.Wav2Vec2FeatureExtractor().save_pretrained(folder)

    return save


MODELS = {"whisper": save_whisper, "wav2vec2": save_raw("Wav2Vec2"), "hubert": save_raw("Hubert")}


@pytest.fixture(scope="module", params=MODELS if has_transformers else ())
def checkpoint(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    MODELS[request.param](folder)
    return folder


def front_end_of(folder):
    return frontends.build(configs.FrontEnd(name="huggingface", source=str(folder), stack=2), 24)


@pytest.mark.parametrize("samples", [1, 399, 400, 719, 720, 16_000, 16_123])
def test_huggingface_frames_are_as_many_as_foretold(checkpoint, samples):
    front_end = front_end_of(checkpoint)
    frames = front_end.extract(noise(samples))
    assert frames.shape == (front_end.feature_frames(samples / 16_000), 16)
    assert torch.isfinite(frames).all()
    assert front_end.frame_seconds == pytest.approx(0.04)


def test_huggingface_frames_are_the_last_hidden_states(checkpoint):
    from transformers import AutoModel, Wav2Vec2FeatureExtractor, WhisperFeatureExtractor

    model = AutoModel.from_pretrained(checkpoint).eval()
    sound = noise(12_800)
    if model.config.model_type == "whisper":
        extractor = WhisperFeatureExtractor(feature_size=20)
        inputs = extractor(sound.numpy(), sampling_rate=16_000, return_tensors="pt").input_features
        expected = model.get_encoder()(inputs).last_hidden_state[0, :40]
    else:
        extractor = Wav2Vec2FeatureExtractor()
        inputs = extractor(sound.numpy(), sampling_rate=16_000, return_tensors="pt").input_values
        expected = model(inputs).last_hidden_state[0]
    torch.testing.assert_close(front_end_of(checkpoint).extract(sound), expected)


def test_huggingface_runs_long_recordings_in_windows(checkpoint):
    front_end = front_end_of(checkpoint)
    frames = front_end.extract(noise(35 * 16_000))
    assert len(frames) == front_end.feature_frames(35)
    # Up to the context of the second window frames are those of the first 30 s by themselves.
    first = front_end.extract(noise(35 * 16_000)[: 1499 * 320 + front_end.encoder.span])
    torch.testing.assert_close(frames[:1300], first[:1300])


def test_huggingface_travels_without_weights_and_without_gradients(checkpoint):
    encoder = front_end_of(checkpoint).encoder
    unused = pickle.dumps(encoder)
    before = encoder.extract(noise(8000))
    assert not before.requires_grad
    sent = pickle.dumps(encoder)
    assert len(sent) == len(unused)
    copy = pickle.loads(sent)
    assert copy.key == encoder.key
    torch.testing.assert_close(copy.extract(noise(8000)), before)


def test_huggingface_key_changes_with_the_weights(checkpoint, tmp_path):
    import shutil

    other = shutil.copytree(checkpoint, tmp_path / "other")
    key = front_end_of(checkpoint).encoder.key
    assert front_end_of(other).encoder.key == key
    with open(other / "model.safetensors", "r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x11")
    assert front_end_of(other).encoder.key != key


@needs_transformers
@pytest.mark.parametrize(
    "source, says",
    [
        ("", "front_end.source"),
        ("/no/such/folder", "no such folder: /no/such/folder"),
        ("nobody/has-this-model", "nobody/has-this-model"),
    ],
)
def test_huggingface_says_what_is_wrong_with_a_source(monkeypatch, source, says):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UsageError, match=says):
        front_end_of(source) if source else frontends.build(configs.FrontEnd(name="huggingface"), 8)


@needs_transformers
def test_huggingface_refuses_folders_without_a_speech_encoder(tmp_path):
    with pytest.raises(UsageError, match="not a model of transformers"):
        front_end_of(tmp_path)
    from transformers import BertConfig

    BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="bert"):
        front_end_of(tmp_path)


@needs_transformers
def test_huggingface_refuses_a_folder_without_weights(tmp_path):
    MODELS["hubert"](tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UsageError, match="no weights"):
        front_end_of(tmp_path)


def test_a_missing_transformers_says_the_command_that_installs_it(monkeypatch):
    hide(monkeypatch, "transformers")
    with pytest.raises(UsageError, match=r"pip install 'imputer-asr\[huggingface\]'"):
        front_end_of("openai/whisper-tiny")
