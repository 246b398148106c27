"""Exported models: any batch, any length, the same text as torch."""

import builtins
import shutil

import numpy as np
import pytest
import torch

import tones
from imputer import decoding, models
from imputer.errors import UsageError
from imputer.recognizer import Recognizer
from imputer.runtimes import onnx as export
from trainings import call


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """``model`` and what the command makes of it, ``onnx``."""
    place = tmp_path_factory.mktemp("export")
    tones.save(place / "model")
    code, out, err = call("export", place / "model", place / "onnx")
    assert (code, err) == (0, "") and "largest difference from torch" in out
    assert all(f"{part}{kind}.onnx" in out for part in export.PARTS for kind in ("", ".int8"))
    return place


@pytest.fixture(scope="module")
def spoken():
    random = np.random.default_rng(8)
    texts = [tones.sentence(random, int(n)) for n in random.integers(1, 9, 12)]
    return texts, [tones.speak(text, 700 + n)[0] for n, text in enumerate(texts)]


@pytest.mark.parametrize("strategy", list(decoding.STRATEGIES))
def test_float32_gives_the_text_of_torch(folders, spoken, strategy):
    theirs = Recognizer.from_pretrained(folders / "onnx", runtime="onnx")
    ours = Recognizer.from_pretrained(folders / "model")
    options = {"block_size": 5, "strategy": strategy}
    for a, b in zip(
        ours.transcribe(spoken[1], **options), theirs.transcribe(spoken[1], **options), strict=True
    ):
        assert a.text == b.text
        if strategy != "top_k":  # where blanks tie but for rounding, their order decides how many it takes
            assert a.passes == b.passes
        assert [(t.piece, t.frame) for t in a.tokens] == [(t.piece, t.frame) for t in b.tokens]


def test_int8_is_another_program_and_still_right(folders, spoken):
    quantised = Recognizer.from_pretrained(folders / "onnx", runtime="onnx-int8")
    texts, samples = spoken
    assert [t.text for t in quantised.transcribe(samples)] == texts
    for part in export.PARTS:
        assert (folders / "onnx" / f"{part}.int8.onnx").stat().st_size < (
            folders / "onnx" / f"{part}.onnx"
        ).stat().st_size


@pytest.mark.parametrize("lengths", [[1], [200], [5, 90, 33, 1], [64] * 9])
def test_any_batch_and_any_length(folders, lengths):
    network, _ = export.load(folders / "onnx")
    ours = tones.trained()
    counts = torch.tensor(lengths)
    features = torch.randn(len(lengths), max(lengths), 240)
    with torch.no_grad():
        acoustic, frame_lengths = ours.encode(features, counts)
        partial = torch.randint(0, ours.mask + 1, acoustic.shape[:2])
        log_probs = ours.impute(acoustic, frame_lengths, partial)
    acoustic2, frame_lengths2 = network.encode(features, counts)
    inside = torch.arange(acoustic.shape[1]) < frame_lengths[:, None]
    assert torch.equal(frame_lengths, frame_lengths2)
    assert torch.allclose(acoustic[inside], acoustic2[inside], atol=1e-4)
    assert torch.allclose(
        log_probs[inside], network.impute(acoustic, frame_lengths, partial)[inside], atol=1e-3
    )


def test_both_topologies_and_other_shapes_export(folders, tmp_path):
    network = tones.untrained(width=32, layers=1, merge_repeats=True)
    models.save(tmp_path / "merging", network, tones.vocabulary())
    differences = export.export(tmp_path / "merging", tmp_path / "out", int8=False)
    assert max(differences.values()) < 1e-4
    loaded, _ = export.load(tmp_path / "out")
    assert loaded.merge_repeats and sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "config.toml",
        "encode.onnx",
        "impute.onnx",
        "tokenizer.model",
    ]
    with pytest.raises(
        UsageError, match=r"has no encode\.int8\.onnx; .*without --no-int8: imputer export MODEL"
    ):
        export.load(tmp_path / "out", int8=True)


def test_bad_folders(folders, tmp_path):
    with pytest.raises(UsageError, match=r"has no encode\.onnx; .* imputer export"):
        export.load(folders / "model")
    for name in ("encode.onnx", "impute.onnx", "tokenizer.model", "config.toml"):
        damaged = tmp_path / name
        shutil.copytree(folders / "onnx", damaged)
        content = (damaged / name).read_bytes()
        # The first half of a configuration may be whole by itself.
        broken = b"[model\n" if name == "config.toml" else content[: len(content) // 2 - 3]
        (damaged / name).write_bytes(broken)
        with pytest.raises(ValueError, match=name):
            export.load(damaged)
        (damaged / name).unlink()
        with pytest.raises(UsageError, match=f"has no {name}"):
            export.load(damaged)


def test_a_missing_extra_says_how_to_get_it(folders, tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *rest, **options):
        if name.partition(".")[0] == "onnxscript":
            raise ModuleNotFoundError("No module named 'onnxscript'", name="onnxscript")
        return real(name, *rest, **options)

    monkeypatch.setattr("importlib.import_module", lambda name: without(name))
    with pytest.raises(UsageError, match=r"onnxscript: pip install 'imputer-asr\[export\]'"):
        export.export(folders / "model", tmp_path / "x")


def test_the_callers_mistakes(tmp_path):
    code, _, err = call("export", "nowhere", tmp_path / "p")
    assert code == 2 and err.startswith("imputer: no model folder nowhere")


def test_an_export_is_no_model_for_torch(folders, tmp_path):
    for words in (
        ("transcribe", "x.wav", "--model", folders / "onnx"),
        ("export", folders / "onnx", tmp_path / "p"),
        ("export", folders / "onnx", tmp_path / "p", "--half"),
    ):
        code, _, err = call(*words)
        assert code == 2 and "add --runtime onnx, or name the folder that it was exported from" in err, err


def test_a_folder_that_cannot_be_made(folders):
    below = folders / "model" / "config.toml"
    for more in ((), ("--half",)):
        code, _, err = call("export", folders / "model", below, *more)
        assert code == 1 and f"{below} is not a directory" in err and len(err.splitlines()) == 1, err


def test_half_the_size_and_the_same_text(folders, spoken, tmp_path):
    code, out, _ = call("export", folders / "model", tmp_path / "half", "--half")
    assert code == 0 and "model.safetensors" in out
    both = (folders / "model", tmp_path / "half")
    whole, half = ((folder / "model.safetensors").stat().st_size for folder in both)
    assert 0.45 < half / whole < 0.6
    texts = [Recognizer.from_pretrained(folder).transcribe(spoken[1][0]).text for folder in both]
    assert texts[0] == texts[1] == spoken[0][0]
