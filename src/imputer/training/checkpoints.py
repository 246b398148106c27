"""Checkpoints: one safetensors file a step, there whole or not at all; no pickle."""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from imputer.errors import ImputerError
from imputer.support import atomic_files

PATTERN = "step-*.safetensors"


@dataclass
class Progress:
    """Where a run stands. Randomness needs no place here: every draw is seeded by (seed, step, what for)."""

    step: int = 0  # optimiser steps taken
    epoch: int = 0
    position: int = 0  # batches of this epoch already used, over all ranks
    seconds_of_audio: float = 0.0
    skipped: list[list[str]] = field(default_factory=list)  # ids in steps whose loss was no number
    dropped: int = 0  # utterances that could not be read or do not fit their frames


def save(folder: Path, progress: Progress, tensors: dict[str, Tensor], keep: int) -> Path:
    """Write a checkpoint, then remove all but the newest ``keep``; on failure the older ones stay."""
    from safetensors.torch import save_file

    path = folder / f"step-{progress.step:08d}.safetensors"
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with atomic_files.replacing(path) as temporary:
        try:
            save_file(whole, temporary, metadata={"progress": json.dumps(dataclasses.asdict(progress))})
        except OSError:
            raise
        except Exception as error:  # safetensors reports a full disk as its own error
            raise OSError(0, str(error)) from error
    for old in sorted(folder.glob(PATTERN))[:-keep]:
        old.unlink()
    return path


def latest(folder: Path) -> Path | None:
    """The newest checkpoint, if there is one."""
    return max(folder.glob(PATTERN), default=None)


def load(path: Path) -> tuple[Progress, dict[str, Tensor]]:
    """Progress and tensors of a checkpoint."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            progress = Progress(**json.loads(file.metadata()["progress"]))
            return progress, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, KeyError, TypeError) as error:
        raise ImputerError(
            f"checkpoint {path} is damaged ({error}); remove it to go on from the one before"
        ) from error


def pack(model: nn.Module, optimizer: torch.optim.Optimizer, average: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights, optimiser state and averaged weights under one roof of names."""
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    tensors |= {f"average.{name}": tensor for name, tensor in average.items()}
    for index, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{key}": torch.as_tensor(value) for key, value in state.items()}
    return tensors


def unpack(
    tensors: dict[str, Tensor], model: nn.Module, optimizer: torch.optim.Optimizer, average: dict[str, Tensor]
) -> None:
    """The inverse of ``pack``."""
    model.load_state_dict(_under("model.", tensors))
    for name, tensor in _under("average.", tensors).items():
        average[name].copy_(tensor)
    state: dict[int, dict[str, Any]] = {}
    for name, tensor in _under("optimizer.", tensors).items():
        index, _, key = name.partition(".")
        state.setdefault(int(index), {})[key] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
