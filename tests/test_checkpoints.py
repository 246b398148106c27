"""Checkpoints under damage: every flipped bit is noticed, and the run falls back to the one before."""

import json
import math
import os
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from imputer import configs, training
from imputer.data.ranks import Ranks
from imputer.errors import ImputerError, UsageError
from imputer.training import checkpoints
from trainings import settings_for


def resumable(corpus: str) -> configs.Config:
    settings = settings_for(corpus, steps=12, checkpoint_every=4, keep_checkpoints=0, validate_every=0)
    return replace(settings, data=replace(settings.data, valid=()))


@pytest.fixture(scope="module")
def whole(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of 12 steps with checkpoints at 4, 8 and 12."""
    folder = tmp_path_factory.mktemp("whole")
    training.train(resumable(corpus), folder)
    return folder


@pytest.fixture
def stopped(whole: Path, tmp_path: Path) -> Path:
    """The same run as if it had been killed after step 8."""
    shutil.copytree(whole, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "model")
    (tmp_path / "run/checkpoints/step-00000012.safetensors").unlink()
    return tmp_path / "run"


def newest(run: Path) -> Path:
    return run / "checkpoints/step-00000008.safetensors"


def rewritten(path: Path, change) -> None:  # type: ignore[no-untyped-def]
    """Write a checkpoint again with changed metadata or tensors, as a version without checksums would have."""
    with safe_open(str(path), framework="pt") as file:
        progress = file.metadata()["progress"].replace(', "empty": 0', "")
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    progress = change(progress, tensors) or progress
    save_file(tensors, path, metadata={"progress": progress})


def same_model(one: Path, other: Path) -> bool:
    return (one / "model/model.safetensors").read_bytes() == (other / "model/model.safetensors").read_bytes()


@pytest.mark.parametrize("place", ["header", "weights", "optimiser", "checksum", "end"])
def test_a_flipped_bit_falls_back_to_the_checkpoint_before(
    corpus: str, whole: Path, stopped: Path, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    path = newest(stopped)
    content = bytearray(path.read_bytes())
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    start = 8 + int.from_bytes(content[:8], "little")
    step_of_optimiser = next(
        name for name in header if name.startswith("optimizer") and name.endswith("step")
    )
    byte = {
        "header": 40,
        "weights": start + header["model.output.weight"]["data_offsets"][0] + 1,
        "optimiser": start + header[step_of_optimiser]["data_offsets"][0] + 2,
        "checksum": content.index(b'"checksum":"') + 14,
        "end": len(content) - 1,
    }[place]
    content[byte] ^= 1
    path.write_bytes(content)
    training.train(resumable(corpus), stopped)
    said = capsys.readouterr().err
    assert f"checkpoint {path} is damaged" in said and "resuming from step-00000004.safetensors" in said
    assert path.with_name(path.name + ".damaged").is_file()
    assert same_model(whole, stopped)


def test_no_bit_of_a_checkpoint_can_flip_unnoticed(tmp_path: Path) -> None:
    tensors = {"model.x": torch.arange(6.0).reshape(2, 3), "optimizer.0.step": torch.tensor(3.0)}
    path = checkpoints.save(tmp_path, checkpoints.Progress(step=3), tensors, keep=1)
    content = path.read_bytes()
    checkpoints.load(path)
    for bit in random.Random(0).sample(range(8 * len(content)), 400):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << (bit % 8)
        path.write_bytes(flipped)
        with pytest.raises(ImputerError, match=f"checkpoint {path} is damaged"):
            checkpoints.load(path)


@pytest.mark.parametrize("length", [0, 5, 100, -1])
def test_a_checkpoint_cut_short_is_damaged(stopped: Path, length: int) -> None:
    path = newest(stopped)
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ImputerError, match="is damaged"):
        checkpoints.load(path)


def test_a_run_without_any_intact_checkpoint_is_refused(corpus: str, stopped: Path) -> None:
    for path in (stopped / "checkpoints").iterdir():
        path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(ImputerError, match=r"no checkpoint in .* is intact: remove"):
        training.train(resumable(corpus), stopped)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda progress, _: "no JSON", "is damaged"),
        (lambda progress, _: "[1, 2]", "its progress is not an object but list"),
        (lambda progress, _: progress.replace('"epoch": ', '"epoch": "x", "epochs": '), "is damaged"),
        (lambda progress, _: json.dumps(json.loads(progress) | {"position": "four"}), "position = 'four'"),
        (lambda progress, _: json.dumps(json.loads(progress) | {"step": 9}), "its progress says step 9"),
        (
            lambda progress, _: progress.replace('"seconds_of_audio": ', '"seconds_of_audio": 1' + 400 * "0"),
            "is damaged",
        ),
        (lambda progress, _: json.dumps(json.loads(progress) | {"epoch": 10**400}), "its progress has epoch"),
        (lambda _, tensors: tensors.update({"optimizer.0.step": torch.tensor(59.0)}), "says 59"),
    ],
)
def test_contradictions_in_a_checkpoint_without_checksum_are_noticed(
    stopped: Path, change, says: str
) -> None:  # type: ignore[no-untyped-def]
    rewritten(newest(stopped), change)
    with pytest.raises(ImputerError, match="is damaged") as raised:
        checkpoints.load(newest(stopped))
    assert says in str(raised.value)


def rename(_: str, tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.exit.weight"] = tensors.pop("model.output.weight")


def transpose(_: str, tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.output.weight"] = tensors["model.output.weight"].T.contiguous()


def transpose_moment(_: str, tensors: dict[str, torch.Tensor]) -> None:
    name = next(
        n for n, t in tensors.items() if n.endswith("exp_avg") and t.dim() == 2 and len(set(t.shape)) == 2
    )
    tensors[name] = tensors[name].T.contiguous()


def narrow(_: str, tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.output.weight"] = tensors["model.output.weight"].to(torch.int8)


def run_ahead(progress: str, _: dict[str, torch.Tensor]) -> str:
    """The stream would look for that batch for hours."""
    return json.dumps(json.loads(progress) | {"position": 10**9})


def lose_moment(_: str, tensors: dict[str, torch.Tensor]) -> None:
    for name in [name for name in tensors if name.startswith("optimizer.0.")]:
        del tensors[name]


@pytest.mark.parametrize("change", [rename, transpose, transpose_moment, lose_moment, narrow, run_ahead])
def test_tensors_of_another_network_are_one_line(corpus: str, stopped: Path, change) -> None:  # type: ignore[no-untyped-def]
    rewritten(newest(stopped), change)
    with pytest.raises(UsageError, match=r"does not fit this run: .*remove it to resume from the one before"):
        training.train(resumable(corpus), stopped)


def test_a_run_folder_of_the_version_before_resumes(
    corpus: str, whole: Path, stopped: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No checksum, no count of empty steps, no fingerprints, no training.optimizer: a note each, the same weights."""
    rewritten(newest(stopped), lambda *_: None)
    (stopped / "data.safetensors").unlink()
    settings = stopped / "config.toml"
    lines = settings.read_text().splitlines()
    kept = [line for line in lines if not line.startswith(("optimizer", "unreadable_limit"))]
    settings.write_text("\n".join(kept).replace('noise = "none"', 'noise = "utterance"') + "\n")
    training.train(resumable(corpus), stopped)
    said = capsys.readouterr().err
    assert "has no checksum" in said and "has no fingerprints" in said
    assert same_model(whole, stopped)


def test_what_killed_writers_left_is_removed(corpus: str, stopped: Path) -> None:
    left = [stopped / "checkpoints/.step-00000012.safetensors.77.part", stopped / ".config.toml.77.part"]
    for path in left:
        path.write_bytes(b"half")
    training.train(resumable(corpus), stopped)
    assert [path for path in stopped.rglob("*") if "part" in path.name] == []


def test_metrics_that_are_not_ours_are_forgotten(corpus: str, whole: Path, stopped: Path) -> None:
    garbage = b'[1]\n3\nnull\n{}\n{"step": "a"}\n\xff\xfe\n' + b"[" * 100_000 + b"\n"
    (stopped / "metrics.jsonl").write_bytes(garbage + b'{"step": 1}\n')
    training.train(resumable(corpus), stopped)
    assert json.loads((stopped / "metrics.jsonl").read_text().splitlines()[0]) == {"step": 1}
    assert same_model(whole, stopped)


def test_weights_that_are_not_finite_are_not_written(
    corpus: str, stopped: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rewritten(
        newest(stopped),
        lambda progress, tensors: (tensors["model.output.weight"].fill_(math.nan), progress)[1],
    )
    with pytest.raises(
        ImputerError, match=r"weights output\.weight are not finite after step 12; no model was written"
    ):
        training.train(resumable(corpus), stopped)
    assert not (stopped / "model").exists()
    assert "4 steps skipped, the loss was not finite, first with tones-0-0" in capsys.readouterr().err


# --- what is kept outside the checkpoints: the weights to stay near, the best model


@pytest.fixture(scope="module")
def tuned(corpus: str, whole: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[configs.Config, Path]:
    settings = settings_for(
        corpus,
        steps=4,
        checkpoint_every=2,
        keep_checkpoints=0,
        validate_every=2,
        start_from=str(whole / "model"),
        stay_near=0.5,
        keep_best=True,
    )
    folder = tmp_path_factory.mktemp("tuned")
    training.train(settings, folder)
    (folder / "checkpoints/step-00000004.safetensors").unlink()
    return settings, folder


def test_damage_to_the_weights_to_stay_near_is_noticed(
    tuned: tuple[configs.Config, Path], tmp_path: Path
) -> None:
    settings, folder = tuned
    path = shutil.copytree(folder, tmp_path / "run") / "start.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 1  # the least bit of a number
    path.write_bytes(content)
    with pytest.raises(
        UsageError, match=r"cannot use .*start\.safetensors, .*stay_near needs \(its checksum is"
    ):
        training.train(settings, tmp_path / "run")
    path.unlink()
    with pytest.raises(UsageError, match=r"cannot use .*start\.safetensors.*No such file"):
        training.train(settings, tmp_path / "run")


def test_a_lost_best_model_is_noticed_before_the_training(
    tuned: tuple[configs.Config, Path], tmp_path: Path
) -> None:
    settings, folder = tuned
    shutil.rmtree(shutil.copytree(folder, tmp_path / "run") / "best")
    with pytest.raises(
        UsageError, match=r"best/model\.safetensors is missing: the model of the best validation"
    ):
        training.train(settings, tmp_path / "run")


def test_metrics_on_a_full_disk_are_named(corpus: str, tmp_path: Path) -> None:
    os.symlink("/dev/full", tmp_path / "metrics.jsonl")
    with pytest.raises(ImputerError, match=r"cannot write .*metrics\.jsonl: No space left on device"):
        training.train(resumable(corpus), tmp_path)


def test_the_first_rank_alone_speaks(capsys: pytest.CaptureFixture[str]) -> None:
    Ranks(0, 2).say("once")
    Ranks(1, 2).say("twice")
    assert capsys.readouterr().err == "once\n"
