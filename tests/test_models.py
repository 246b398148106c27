"""Model folders that are damaged or absurd: one line each, before anything of that size is built."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from imputer import models
from imputer.errors import UsageError
from imputer.runtimes import onnx


@pytest.fixture
def folder(expert: Path, tmp_path: Path) -> Path:
    """A model folder that a test may spoil."""
    shutil.copytree(expert, tmp_path / "model")
    return tmp_path / "model"


def edit(folder: Path, old: str, new: str) -> None:
    path = folder / models.CONFIG
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def test_what_is_loaded_is_what_was_saved(expert: Path) -> None:
    model, _ = models.load(expert)
    saved = load_file(expert / models.WEIGHTS)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in model.state_dict().items())
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert all(parameter.requires_grad for parameter in model.parameters()) and not model.training


def test_half_precision_is_read_as_float32(expert: Path, tmp_path: Path) -> None:
    models.save(tmp_path, *models.load(expert), half=True)
    model, _ = models.load(tmp_path)
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.float32}


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (
            "layers = 2",
            "layers = 1000000000",
            r"model\.layers = 1000000000, but model\.safetensors has 2 layers",
        ),
        ("width = 64", "width = 400000000000", "does not fit the model|cannot be built"),
        ("width = 64", "width = 9223372036854775806", "cannot be built|must be a multiple"),
        ("filter_size = 128", "filter_size = 1000000000000", "does not fit the model"),
        ("channels = 4", "channels = 2000000000", "does not fit the model|cannot be built"),
        ("[model]", "model = 3\n[other]", "model = 3, but it takes a section"),
        (
            "[vocabulary]",
            "vocabulary = [1]\n[other]",
            "vocabulary = .*, but it takes a section|not valid TOML",
        ),
        ("[model]", "[model]\nx = " + "[" * 100_000, "not valid TOML|nested too deeply"),
        ("[model]", "[model]\nx" + ".x" * 100_000 + " = 1", "nested too deeply"),
    ],
)
def test_an_absurd_configuration_is_one_line(folder: Path, old: str, new: str, says: str) -> None:
    if not new.startswith("[model]\nx") and "\n[other]" in new:
        # A plain value must stand before the first section.
        name, _, rest = new.partition("\n")
        edit(folder, old, rest)
        path = folder / models.CONFIG
        path.write_text(f"{name}\n{path.read_text()}")
    else:
        edit(folder, old, new)
    with pytest.raises(UsageError, match=says):
        models.load(folder)


@pytest.mark.parametrize("kind", [torch.int8, torch.bool])
def test_weights_that_are_not_floats_are_named(folder: Path, kind: torch.dtype) -> None:
    weights = load_file(folder / models.WEIGHTS)
    weights["output.bias"] = weights["output.bias"].to(kind)
    save_file(weights, folder / models.WEIGHTS)
    with pytest.raises(UsageError, match=r"output\.bias is stored as (I8|BOOL); weights are one of F16"):
        models.load(folder)


@pytest.mark.parametrize(("name", "size"), [(models.TOKENIZER, 3_000_000_000), (models.CONFIG, 2_000_000)])
def test_a_file_of_gigabytes_is_not_read(folder: Path, name: str, size: int) -> None:
    os.truncate(folder / name, size)  # sparse: it takes no space
    with pytest.raises(UsageError, match=rf"{name} has {size:,} bytes; a "):
        models.load(folder)


def test_weights_that_do_not_fit_into_memory_are_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise MemoryError("Cannot allocate memory (os error 12)")

    monkeypatch.setattr("safetensors.safe_open", full)
    with pytest.raises(UsageError, match=r"cannot read .*model\.safetensors: Cannot allocate memory"):
        models.load(folder)


def test_a_language_model_section_that_is_none_is_named(folder: Path) -> None:
    path = folder / models.CONFIG
    path.write_text("language_model = 3\n" + path.read_text())
    with pytest.raises(UsageError, match=r"config\.toml: language_model = 3, but it takes a section"):
        models.language_model_settings(folder)


def test_an_exported_model_is_checked_alike(folder: Path) -> None:
    for part in onnx.PARTS:
        (folder / f"{part}.onnx").write_bytes(b"")
    path = folder / models.CONFIG
    edit(folder, "[model]", "[other]")
    path.write_text(f"model = 3\n{path.read_text()}")
    with pytest.raises(UsageError, match="model = 3, but it takes a section"):
        onnx.load(folder)


def averaged(*words: str | Path) -> subprocess.CompletedProcess:
    tool = Path(__file__).parent.parent / "tools" / "average_models.py"
    return subprocess.run([sys.executable, str(tool), *map(str, words)], capture_output=True, text=True)


def test_models_are_averaged_by_weight(expert: Path, folder: Path, tmp_path: Path) -> None:
    """The weights that two models share stay bit for bit; of the others it is the weighted mean."""
    first = load_file(expert / models.WEIGHTS)
    second = {
        name: tensor + 1.0 if name.startswith("layers.") else tensor.clone() for name, tensor in first.items()
    }
    save_file(second, folder / models.WEIGHTS)
    done = averaged(tmp_path / "mean", expert, f"{folder}=3")
    assert not done.returncode, done.stderr
    models.load(tmp_path / "mean")
    for name, tensor in load_file(tmp_path / "mean" / models.WEIGHTS).items():
        if name.startswith("layers."):
            torch.testing.assert_close(tensor, first[name] + 0.75)
        else:
            assert torch.equal(tensor, first[name])
    refused = averaged(tmp_path / "none", expert, "english")
    assert refused.returncode == 2 and "has another tokenizer than" in refused.stderr
    assert not (tmp_path / "none").exists()
