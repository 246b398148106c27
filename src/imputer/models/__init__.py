"""Model folders: the models that ship with the package, and reading and writing folders of this form.

model.safetensors   weights
config.toml         network, front end, vocabulary fingerprint
tokenizer.model     vocabulary
lm.bin              language model, if it has one
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from imputer import configs
from imputer.errors import ImputerError, UsageError
from imputer.model import Imputer
from imputer.support import atomic_files
from imputer.vocabulary import Vocabulary

WEIGHTS, CONFIG, TOKENIZER = "model.safetensors", "config.toml", "tokenizer.model"
LANGUAGE_MODEL = "lm.bin"
EXPORTED = "encode*.onnx"  # what the export of a model holds
SHIPPED = Path(__file__).parent


def model_folder(path_or_name: str | Path) -> Path:
    """The folder of a model: a folder itself, or the name of one that comes with the package.

    A folder that only happens to be called as a shipped model does not hide it.
    """
    folder = Path(path_or_name)
    shipped = sorted(path.parent.name for path in SHIPPED.glob("*/config.toml"))
    if str(path_or_name) in shipped and not _holds_model(folder):
        return SHIPPED / str(path_or_name)
    if folder.is_dir():
        return folder
    known = f"; the models that come with the package are {', '.join(shipped)}" if shipped else ""
    raise UsageError(f"no model folder {path_or_name}{known}")


def torch_folder(path_or_name: str | Path) -> Path:
    """The same for torch, which cannot run what `imputer export` wrote."""
    folder = model_folder(path_or_name)
    if not (folder / WEIGHTS).is_file() and any(folder.glob(EXPORTED)):
        raise UsageError(
            f"{folder} holds a model for ONNX, without {WEIGHTS}: add --runtime onnx, or name the folder "
            "that it was exported from"
        )
    return folder


def _holds_model(folder: Path) -> bool:
    return (folder / CONFIG).is_file() and ((folder / WEIGHTS).is_file() or any(folder.glob(EXPORTED)))


def save(folder: Path | str, model: Imputer, vocabulary: Vocabulary, *, half: bool = False) -> None:
    """Write the model folder: weights (float16 if ``half``), configuration, tokenizer; each whole or not at all."""
    from safetensors.torch import save_file

    folder = Path(folder)
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    if half:
        weights = {name: t.half() if t.is_floating_point() else t for name, t in weights.items()}
    text = configs.to_toml(
        {
            "model": model.settings,
            "front_end": model.front_end_settings,
            "vocabulary": {"size": vocabulary.size, "fingerprint": vocabulary.fingerprint},
        }
    )
    with atomic_files.replacing(folder / WEIGHTS) as path:
        save_file(weights, path)
    with atomic_files.replacing(folder / TOKENIZER) as path:
        vocabulary.save(path)
    with atomic_files.replacing(folder / CONFIG) as path:
        path.write_text(text)


def load(folder: Path | str) -> tuple[Imputer, Vocabulary]:
    """Read a model folder; whatever is missing, damaged or does not fit together is named."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UsageError(f"no model folder {folder}")
    for name in (CONFIG, TOKENIZER, WEIGHTS):
        if not (folder / name).is_file():
            raise UsageError(f"{folder} is no model folder: {name} is missing")
    mapping = configs.read_toml(folder / CONFIG)
    where = str(folder / CONFIG)
    settings = configs.build(configs.Model, mapping.get("model", {}), where=where, prefix="model.")
    front_end = configs.build(
        configs.FrontEnd, mapping.get("front_end", {}), where=where, prefix="front_end."
    )
    try:
        vocabulary = Vocabulary.load(folder / TOKENIZER)
    except ImputerError as error:
        raise UsageError(str(error)) from error
    stated = mapping.get("vocabulary", {})
    if stated.get("fingerprint", vocabulary.fingerprint) != vocabulary.fingerprint:
        raise UsageError(
            f"{folder / TOKENIZER} is not the tokenizer this model was trained with: fingerprint "
            f"{vocabulary.fingerprint}, config.toml says {stated['fingerprint']}"
        )
    model = Imputer(settings, front_end, vocabulary.size)
    load_weights(model, folder / WEIGHTS)
    return model.eval(), vocabulary


def load_weights(model: nn.Module, path: Path | str) -> None:
    """Copy the tensors of a safetensors file into ``model``; names and shapes must agree exactly."""
    weights = read_weights(path)
    expected: dict[str, Any] = model.state_dict()
    wrong = [
        f"{name}: {_shape(weights.get(name))} in the file, {_shape(expected.get(name))} in the model"
        for name in sorted(weights.keys() | expected.keys())
        if _shape(weights.get(name)) != _shape(expected.get(name))
    ]
    if wrong:
        more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
        raise UsageError(f"{path} does not fit the model: {'; '.join(wrong[:3])}{more}")
    with torch.no_grad():
        for name, tensor in expected.items():
            tensor.copy_(weights[name])


def read_weights(path: Path | str) -> dict[str, Tensor]:
    """The tensors of a safetensors file."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    except SafetensorError as error:
        raise UsageError(f"{path} is damaged or no safetensors file: {error}") from error


def _shape(tensor: Tensor | None) -> str:
    return "absent" if tensor is None else "x".join(map(str, tensor.shape)) or "a number"
