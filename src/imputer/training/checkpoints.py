"""Checkpoints: one safetensors file per saved step, written whole or not at all, with a checksum; no pickle."""

import dataclasses
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from imputer.data.ranks import Ranks
from imputer.errors import ImputerError, UsageError
from imputer.support import atomic_files, checksums

PATTERN = "step-*.safetensors"
DAMAGED = ".damaged"  # added to the name of a checkpoint that failed its checks
LARGEST = 1 << 53  # of the numbers in a progress


@dataclass
class Progress:
    """Where a run stands. Random generators have no state here: every draw is seeded by (seed, step, purpose)."""

    step: int = 0  # steps taken
    epoch: int = 0
    position: int = 0  # batches of this epoch already used, over all ranks
    seconds_of_audio: float = 0.0
    skipped: list[list[str]] = field(default_factory=list)  # ids in steps whose loss was not finite
    dropped: int = 0  # utterances that could not be read or do not fit their frames, over all epochs
    empty: int = 0  # steps in which no utterance could be used
    best_loss: float = -1.0  # least loss of a validation, with training.keep_best; -1: none yet
    best_step: int = 0  # where that was
    waited: int = 0  # validations since then

    @property
    def updates(self) -> int:
        """Steps in which the optimiser changed the weights."""
        return self.step - len(self.skipped) - self.empty


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read and passed its checks."""

    path: Path
    progress: Progress
    tensors: dict[str, Tensor]


def save(folder: Path, progress: Progress, tensors: dict[str, Tensor], keep: int) -> Path:
    """Write a checkpoint, then remove all but the newest ``keep``; on failure the older ones stay."""
    from safetensors.torch import save_file

    path = folder / f"step-{progress.step:08d}.safetensors"
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    metadata = {"progress": json.dumps(dataclasses.asdict(progress)), checksums.KEY: checksums.EMPTY}
    with atomic_files.replacing(path) as temporary:
        save_file(whole, temporary, metadata=metadata)
        checksums.stamp(temporary)
    for old in sorted(folder.glob(PATTERN))[:-keep]:
        old.unlink()
    return path


def latest(folder: Path) -> Path | None:
    """The newest checkpoint, if there is one."""
    return max(folder.glob(PATTERN), default=None)


def newest_intact(folder: Path, here: Ranks) -> Checkpoint | None:
    """The newest checkpoint that passes its checks; damaged ones are renamed and reported. None if there is none.

    If all are damaged, that is an error: starting again would silently discard the run.
    """
    if here.first:
        damaged = ""
        while (path := latest(folder)) is not None:
            try:
                load(path)
                break
            except ImputerError as error:
                damaged = str(error)
                path.rename(path.with_name(path.name + DAMAGED))
                here.say(f"{damaged}; renamed to {path.name}{DAMAGED}, looking for the one before")
        if damaged and path is None:
            raise ImputerError(
                f"{damaged}; no checkpoint in {folder} is intact: remove {folder.parent} to start again, or restore one"
            )
        if damaged and path:
            here.say(f"resuming from {path.name}")
    here.wait()
    path = latest(folder)
    if path is None:
        return None
    if not checksums.check(path):
        here.say(f"note: {path} has no checksum (an older version wrote it)")
    return Checkpoint(path, *load(path))


def load(path: Path) -> tuple[Progress, dict[str, Tensor]]:
    """Progress and tensors of a checkpoint; one that is damaged is an error that says how."""
    from safetensors import SafetensorError, safe_open

    try:
        stated = checksums.check(path)
        with safe_open(str(path), framework="pt") as file:
            written = (file.metadata() or {})["progress"]
            progress = _progress(written)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if not stated and '"empty"' in written:  # progress of a version that writes checksums
            raise ValueError("its checksum is missing")
        if path.stem != f"step-{progress.step:08d}":
            raise ValueError(f"its progress says step {progress.step}")
        for name, tensor in tensors.items():
            if re.fullmatch(r"optimizer\.\d+\.step", name) and int(tensor) != progress.updates:
                raise ValueError(
                    f"its progress says {progress.updates} updates of the weights, {name} says {int(tensor)}"
                )
    except KeyError as error:
        raise ImputerError(f"checkpoint {path} is damaged (it has no {error})") from error
    except (SafetensorError, OSError, ValueError, TypeError, RuntimeError) as error:
        raise ImputerError(f"checkpoint {path} is damaged ({error})") from error
    return progress, tensors


def _progress(text: str) -> Progress:
    """Progress from its JSON, every value checked."""
    values = json.loads(text)
    if not isinstance(values, dict):
        raise ValueError(f"its progress is not an object but {type(values).__name__}")
    progress = Progress(**values)
    for name, value in vars(progress).items():
        if name == "skipped":
            good = isinstance(value, list) and all(isinstance(ids, list) for ids in value)
        elif name in ("seconds_of_audio", "best_loss"):
            good = type(value) in (int, float) and abs(value) <= LARGEST
        else:
            good = type(value) is int and 0 <= value <= LARGEST
        if not good:
            raise ValueError(f"its progress has {name} = {value!r}")
    return progress


def pack(model: nn.Module, optimizer: torch.optim.Optimizer, average: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights, optimiser state and averaged weights under one roof of names."""
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    tensors |= {f"average.{name}": tensor for name, tensor in average.items()}
    for index, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{key}": torch.as_tensor(value) for key, value in state.items()}
    return tensors


def refuse_impossible(checkpoint: Checkpoint, batches_per_step: int) -> None:
    """The position in the data cannot be further than the steps taken."""
    now = checkpoint.progress
    for name, value in (("epoch", now.epoch), ("position", now.position)):
        if value > now.step * batches_per_step:
            raise _misfit(checkpoint, f"its progress has {name} = {value} after {now.step} steps")


def restore(checkpoint: Checkpoint, model: nn.Module, prefix: str) -> None:
    """Set the weights whose names begin with ``prefix``; ``unpack`` later refuses a checkpoint that does not fit."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            found = checkpoint.tensors.get(f"model.{name}")
            if name.startswith(prefix) and found is not None and found.shape == parameter.shape:
                parameter.copy_(found)


def unpack(
    checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer, average: dict[str, Tensor]
) -> None:
    """The inverse of ``pack``; names, shapes and types must agree with the run."""
    tensors = checkpoint.tensors
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state: dict[int, dict[str, Any]] = {}
    for name, tensor in _under("optimizer.", tensors).items():
        index, _, key = name.partition(".")
        fits = index.isdigit() and int(index) < len(parameters)
        if not fits or tensor.shape not in (parameters[int(index)].shape, torch.Size()):
            raise _misfit(checkpoint, f"optimizer.{name} of shape {list(tensor.shape)} belongs to no weight")
        state.setdefault(int(index), {})[key] = tensor
    if checkpoint.progress.updates and len(state) != len(parameters):
        missing = next(i for i in range(len(parameters)) if i not in state)
        raise _misfit(checkpoint, f"it has no state of the optimiser for weight {missing}")
    expected = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    expected |= {f"average.{name}": tensor for name, tensor in average.items()}
    found = {name: t for name, t in tensors.items() if not name.startswith("optimizer.")}
    for name in sorted(expected.keys() | found.keys()):
        one, other = (_kind(each[name]) if name in each else "nothing" for each in (found, expected))
        if one != other:
            raise _misfit(checkpoint, f"{name} is {one}, this run has {other}")
    model.load_state_dict(_under("model.", tensors))
    for name, tensor in _under("average.", tensors).items():
        average[name].copy_(tensor)
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _kind(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _misfit(checkpoint: Checkpoint, what: str) -> UsageError:
    return UsageError(
        f"checkpoint {checkpoint.path} does not fit this run: {what}; remove it to resume from the one before"
    )


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
