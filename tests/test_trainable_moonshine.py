"""The Moonshine encoder in torch: the same network as transformers' and as the frozen one, and trained with a model."""

import importlib.util
import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from imputer import audio, configs, frontends, models, training
from imputer.data.manifest import Manifest
from imputer.errors import UsageError
from imputer.frontends import moonshine
from imputer.frontends import trainable_moonshine as module
from imputer.model import Imputer
from imputer.training import starting
from imputer.training.optimizers import PRETRAINED, adamw
from imputer.vocabulary import Vocabulary

SETTINGS = configs.FrontEnd(name="trainable_moonshine", stack=3)
needs_weights = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("moonshine_voice", "onnxruntime", "onnx")),
    reason="needs the extras [english] and [export]",
)


def speech(seconds, seed=0):
    """Noise that swells and falls, (samples,)."""
    generator = np.random.default_rng(seed)
    samples = round(16_000 * seconds)
    swell = np.interp(np.arange(samples), np.linspace(0, samples, 40), generator.random(40))
    return torch.from_numpy((0.1 * generator.standard_normal(samples) * swell).astype(np.float32))


def batch_of(front_end, sounds):
    rows = [front_end.extract(sound) for sound in sounds]
    lengths = torch.tensor([len(one) for one in rows])
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), lengths


@pytest.fixture(scope="module")
def front_end():
    torch.manual_seed(0)
    return frontends.build(SETTINGS, 16).eval()


@pytest.mark.parametrize("samples", [1, 894, 895, 896, 1278, 1279, 16_000, 48_011])
def test_as_many_frames_as_the_frozen_encoder_gives(front_end, samples):
    rows = front_end.extract(speech(samples / 16_000))
    frames, lengths = front_end.encoder(rows.flatten()[None], torch.tensor([len(rows)]) - module.EXTRA_ROWS)
    assert frames.shape[1] == int(lengths) == moonshine.frames_of(samples)
    assert front_end.feature_frames(samples / 16_000) == len(rows)


@torch.no_grad()
def test_recordings_in_a_batch_have_the_frames_they_have_alone(front_end):
    sounds = [speech(seconds, seed) for seed, seconds in enumerate((0.3, 2.0, 1.1))]
    together, lengths = front_end(*batch_of(front_end, sounds))
    for i, sound in enumerate(sounds):
        alone, length = front_end(*batch_of(front_end, [sound]))
        assert length[0] == lengths[i]
        torch.testing.assert_close(together[i, : lengths[i]], alone[0], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_it_is_the_network_of_transformers(front_end):
    transformers = pytest.importorskip("transformers")
    config = transformers.MoonshineConfig(hidden_size=288, encoder_num_attention_heads=8)
    theirs = transformers.MoonshineModel(config).get_encoder().eval()
    named = dict(theirs.named_parameters())
    weights = {}
    for name in ("conv1.weight", "conv2.weight", "conv2.bias", "conv3.weight", "conv3.bias"):
        weights[name] = named[name]
    weights |= {"norm_scale": named["groupnorm.weight"].normal_(1, 0.1)}
    weights |= {
        "norm_shift": named["groupnorm.bias"].normal_(0, 0.1),
        "norm.weight": named["layer_norm.weight"],
    }
    for i in range(module.LAYERS):
        layer = f"layers.{i}."
        q, k, v = (named[f"{layer}self_attn.{name}_proj.weight"] for name in "qkv")
        weights |= {
            f"{layer}attention_norm.weight": named[f"{layer}input_layernorm.weight"].normal_(1, 0.1),
            f"{layer}qkv.weight": torch.cat((module._halves(q), module._halves(k), v)),
            f"{layer}attention_output.weight": named[f"{layer}self_attn.o_proj.weight"],
            f"{layer}filter_norm.weight": named[f"{layer}post_attention_layernorm.weight"],
        }
        for part, name in (("filter_in", "fc1"), ("filter_out", "fc2")):
            weights |= {
                f"{layer}{part}.{kind}": named[f"{layer}mlp.{name}.{kind}"] for kind in ("weight", "bias")
            }
    ours = module.Encoder().eval()
    ours.load_state_dict(weights)
    rows = front_end.extract(speech(3.0))
    count = len(rows) - module.EXTRA_ROWS
    under_frames = 127 + 64 * (6 * count + 6)  # samples; ours leaves the rest out of its normalisation
    expected = theirs(rows.flatten()[None, :under_frames]).last_hidden_state
    frames, _ = ours(rows.flatten()[None], torch.tensor([count]))
    torch.testing.assert_close(frames, expected, rtol=1e-3, atol=1e-4)


@needs_weights
@torch.no_grad()
def test_the_pretrained_weights_give_the_frozen_frames():
    sound = torch.from_numpy(audio.read(models.SHIPPED / "english" / "sample.wav", sample_rate=16_000))
    ours = frontends.build(SETTINGS, 16).eval()
    ours.start_pretrained()
    rows = ours.extract(sound)
    frames, _ = ours.encoder(rows.flatten()[None], torch.tensor([len(rows)]) - module.EXTRA_ROWS)
    frozen = moonshine.MoonshineEncoder().extract(sound)
    assert np.corrcoef(frames.flatten(), frozen.flatten())[0, 1] > 0.999


def test_in_bfloat16_frames_stay_alike(front_end):
    features, lengths = batch_of(front_end, [speech(2.0), speech(1.0, 1)])
    with torch.no_grad():
        exact, _ = front_end.encoder(features.flatten(1), lengths - module.EXTRA_ROWS)
        with torch.autocast("cpu", torch.bfloat16):
            rough, _ = front_end.encoder(features.flatten(1), lengths - module.EXTRA_ROWS)
    real = slice(0, int(lengths[0]) - module.EXTRA_ROWS)
    assert np.corrcoef(exact[0, real].flatten(), rough[0, real].float().flatten())[0, 1] > 0.99


def test_a_share_of_the_learning_rate_for_the_encoder(front_end):
    holder = torch.nn.Module()
    holder.front_end, holder.output = front_end, torch.nn.Linear(16, 4)
    groups = adamw(holder, configs.Training(pretrained_rate=0.25)).param_groups
    names = {id(p): name for name, p in holder.named_parameters()}
    for group in groups:
        inside = {names[id(p)].startswith(PRETRAINED) for p in group["params"]}
        assert inside == {group["share"] == 0.25}
    assert sum(len(group["params"]) for group in groups) == len(list(holder.parameters()))


@needs_weights
def test_a_model_over_frozen_frames_goes_on_with_the_encoder_trained_and_a_layer_more(tmp_path):
    """At the start the outputs are those of the frozen model; training changes the encoder."""
    sample = models.SHIPPED / "english" / "sample.wav"
    sound = torch.from_numpy(audio.read(sample, sample_rate=16_000))
    text = "have to live with myself and so"
    manifest = tmp_path / "m.jsonl"
    line = {"id": "a", "audio_filepath": str(sample), "duration": len(sound) / 16_000, "text": text}
    manifest.write_text(json.dumps(line) + "\n")
    vocabulary = Vocabulary.train([text], size=20, units="characters")
    shape = configs.Model(width=32, layers=1, heads=2, filter_size=32, dropout=0.0)
    frozen = Imputer(shape, replace(SETTINGS, name="moonshine"), vocabulary.size).eval()
    models.save(tmp_path / "frozen", frozen, vocabulary)

    settings = configs.Config(
        front_end=SETTINGS,
        model=replace(shape, layers=2),
        data=configs.Data(train=(str(manifest),), workers=0, batch_seconds=10),
        rollin=configs.Rollin(alignments="own"),
        training=configs.Training(
            objective="dynamic_programming",
            start_from=str(tmp_path / "frozen"),
            stay_near=0.1,  # which the new layer has nothing to stay near to
            steps=2,
            warmup_steps=0,
            threads=1,
        ),
    )
    start = Imputer(settings.model, SETTINGS, vocabulary.size).eval()
    start.front_end.start_pretrained()
    starting.start_from(str(tmp_path / "frozen"), start, vocabulary)
    with torch.no_grad():
        (expected, _), (found, _) = (one(*batch_of(one.front_end, [sound])) for one in (frozen, start))
    assert np.corrcoef(expected.flatten(), found.flatten())[0, 1] > 0.999

    trained, _ = models.load(training.train(settings, tmp_path / "run"))
    before, after = module.pretrained_weights(), trained.front_end.encoder.state_dict()
    assert all(not torch.equal(before[name], after[name]) for name in before)


def test_weights_that_are_missing_for_another_reason_are_named(tmp_path):
    vocabulary = Vocabulary.train(["abc"], size=4, units="characters")
    shape = configs.Model(width=32, layers=1, heads=2, filter_size=32)
    models.save(tmp_path, Imputer(replace(shape, filter_size=16), SETTINGS, vocabulary.size), vocabulary)
    with pytest.raises(UsageError, match=r"layers.0.filter_in.bias: 16 in the file, 32 in the model"):
        starting.start_from(str(tmp_path), Imputer(shape, SETTINGS, vocabulary.size), vocabulary)


@pytest.fixture
def small_run(tmp_path):
    """A configuration over an encoder of random weights, and the model folder it starts from."""
    sample = models.SHIPPED / "english" / "sample.wav"
    text = "have to live with myself and so"
    manifest = tmp_path / "m.jsonl"
    line = {"id": "a", "audio_filepath": str(sample), "duration": audio.info(sample).seconds, "text": text}
    manifest.write_text(json.dumps(line) + "\n")
    vocabulary = Vocabulary.train([text], size=20, units="characters")
    shape = configs.Model(width=32, layers=1, heads=2, filter_size=32)
    torch.manual_seed(0)
    models.save(tmp_path / "start", Imputer(shape, SETTINGS, vocabulary.size), vocabulary)
    return configs.Config(
        front_end=SETTINGS,
        model=shape,
        data=configs.Data(
            train=(str(manifest),), workers=0, batch_seconds=10, frames_cache=str(tmp_path / "frames")
        ),
        augmentation=configs.Augmentation(spec_augment=True),
        rollin=configs.Rollin(alignments="own"),
        training=configs.Training(
            objective="dynamic_programming",
            start_from=str(tmp_path / "start"),
            pretrained_rate=0.0,
            steps=4,
            warmup_steps=0,
            checkpoint_every=2,
            average=0.9,
            threads=1,
        ),
    )


def test_a_start_that_has_an_encoder_needs_no_other_package(small_run, tmp_path, monkeypatch):
    """Fine-tuning `english` failed where moonshine-voice or onnx was not installed."""
    monkeypatch.setattr(module, "pretrained_weights", lambda: pytest.fail("reads moonshine-voice"))
    rate = replace(small_run.training, pretrained_rate=1.0, steps=1)
    assert training.train(replace(small_run, training=rate), tmp_path / "run").is_dir()


def test_a_frozen_encoder_stays_and_its_frames_are_cached_once(small_run, tmp_path, monkeypatch):
    runs = []
    extract = module.FrozenEncoder.extract
    monkeypatch.setattr(
        module.FrozenEncoder, "extract", lambda self, sound: runs.append(1) or extract(self, sound)
    )
    start, _ = models.load(tmp_path / "start")
    trained, _ = models.load(training.train(small_run, tmp_path / "run"))
    assert len(runs) == 1  # for all steps together
    for name, weight in trained.state_dict().items():
        assert torch.equal(weight, start.state_dict()[name]) == name.startswith(
            (PRETRAINED, "front_end.norm")
        ), name


def test_an_interrupted_run_over_a_frozen_encoder_resumes_bit_exactly(small_run, tmp_path):
    whole = models.read_weights(training.train(small_run, tmp_path / "whole") / models.WEIGHTS)
    first = training.train(small_run, tmp_path / "cut").parent
    shutil.rmtree(first / "model")
    (first / "checkpoints" / "step-00000004.safetensors").unlink()
    # The start may be another model by now: the encoder of the checkpoint counts.
    other, vocabulary = models.load(tmp_path / "start")
    torch.nn.init.zeros_(other.front_end.encoder.norm.weight)
    models.save(tmp_path / "start", other, vocabulary)
    resumed = models.read_weights(training.train(small_run, tmp_path / "cut") / models.WEIGHTS)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


@torch.no_grad()
def test_frozen_frames_are_those_of_the_encoder(small_run, tmp_path):
    model, _ = models.load(tmp_path / "start")
    utterances = list(Manifest(small_run.data.train[0]))
    rows = model.front_end.reader(small_run.data, configs.NO_AUGMENTATION, utterances)(utterances[0], None)
    expected, lengths = model.encode(rows[None], torch.tensor([len(rows)]))
    model.front_end.freeze()
    frames = model.front_end.reader(small_run.data, configs.NO_AUGMENTATION, utterances)(utterances[0], None)
    assert len(frames) == model.front_end.feature_frames(utterances[0].duration)
    found, frozen_lengths = model.encode(frames[None], torch.tensor([len(frames)]))
    assert torch.equal(lengths, frozen_lengths)
    torch.testing.assert_close(found, expected, rtol=0, atol=0.05)  # 8 bits a number
    assert not model.front_end.augments_sound
