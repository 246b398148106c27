"""Model folders: the models that ship with the package, and reading and writing folders of this form.

model.safetensors   weights
config.toml         network, front end, vocabulary fingerprint
tokenizer.model     vocabulary
lm.bin              language model, if it has one
"""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from imputer import configs
from imputer.errors import ImputerError, UsageError, count
from imputer.model import Imputer
from imputer.support import atomic_files
from imputer.vocabulary import Vocabulary

WEIGHTS, CONFIG, TOKENIZER = "model.safetensors", "config.toml", "tokenizer.model"
LANGUAGE_MODEL = "lm.bin"
EXPORTED = "encode*.onnx"  # what the export of a model holds
SHIPPED = Path(__file__).parent
LARGEST_CONFIG, LARGEST_TOKENIZER = 1_000_000, 100_000_000  # bytes
FLOATS = ("F16", "BF16", "F32", "F64")


def model_folder(path_or_name: str | Path) -> Path:
    """The folder of a model: a folder itself, or the name of one that comes with the package.

    A folder with the name of a shipped model takes its place only if it holds a model.
    """
    folder = Path(path_or_name)
    shipped = shipped_names()
    if str(path_or_name) in shipped and not _holds_model(folder):
        return SHIPPED / str(path_or_name)
    if folder.is_dir():
        return folder
    known = f"; the models that come with the package are {', '.join(shipped)}" if shipped else ""
    raise UsageError(f"no model folder {path_or_name}{known}")


def shipped_names() -> list[str]:
    """The models that come with the package."""
    return sorted(path.parent.name for path in SHIPPED.glob("*/config.toml"))


def torch_folder(path_or_name: str | Path) -> Path:
    """As ``model_folder``, but refuses a folder that `imputer export` wrote, which torch cannot run."""
    folder = model_folder(path_or_name)
    if not (folder / WEIGHTS).is_file() and any(folder.glob(EXPORTED)):
        raise UsageError(
            f"{folder} holds a model for ONNX, without {WEIGHTS}: add --runtime onnx, or name the folder "
            "that it was exported from"
        )
    return folder


def _holds_model(folder: Path) -> bool:
    return (folder / CONFIG).is_file() and ((folder / WEIGHTS).is_file() or any(folder.glob(EXPORTED)))


def language_model_file(path_or_name: str | Path) -> Path:
    """The language model in a model folder, which may be called by its name."""
    try:
        folder = model_folder(path_or_name)
    except UsageError:
        raise UsageError(f"no language model {path_or_name}: neither a file nor a model with one") from None
    if not (folder / LANGUAGE_MODEL).is_file():
        raise UsageError(
            f"the model {path_or_name} has no language model ({LANGUAGE_MODEL}); `imputer lm build` makes one"
        )
    return folder / LANGUAGE_MODEL


def language_model_settings(folder: Path | None) -> configs.LanguageModel:
    """How a model decodes with language models and hotwords: the section of its configuration, or the defaults."""
    if folder is None or not (folder / CONFIG).is_file():
        return configs.LanguageModel()
    section = configs.read_toml(folder / CONFIG).get("language_model", {})
    return configs.build(configs.LanguageModel, section, where=str(folder / CONFIG), prefix="language_model.")


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


def copy(source: Path, target: Path) -> None:
    """Copy the files of a model folder, each whole or not at all."""
    for name in (WEIGHTS, TOKENIZER, CONFIG, LANGUAGE_MODEL):
        if name == LANGUAGE_MODEL and not (source / name).is_file():
            continue
        with atomic_files.replacing(target / name) as path:
            shutil.copyfile(source / name, path)


def load(folder: Path | str) -> tuple[Imputer, Vocabulary]:
    """Read a model folder; errors name what is missing, damaged or inconsistent.

    The shapes in the weights file are compared with the configuration before anything of its size is built.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UsageError(f"no model folder {folder}")
    for name in (CONFIG, TOKENIZER, WEIGHTS):
        if not (folder / name).is_file():
            raise UsageError(f"{folder} is not a model folder: {name} is missing")
    settings, front_end = read_settings(folder)
    vocabulary = read_vocabulary(folder)
    shapes = read_shapes(folder / WEIGHTS)
    refuse_other_depth(folder, settings, shapes)
    try:
        with torch.device("meta"):  # takes no memory, whatever the configuration asks for
            model = Imputer(settings, front_end, vocabulary.size)
    except (RuntimeError, OverflowError, MemoryError) as error:
        raise UsageError(f"{folder / CONFIG} describes a network that cannot be built: {error}") from error
    refuse_other_shapes(model, shapes, folder / WEIGHTS)
    weights = read_weights(folder / WEIGHTS)
    expected = model.state_dict()
    model.load_state_dict({n: t.to(expected[n].dtype) for n, t in weights.items()}, assign=True)
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        # A front end may have buffers that are not saved: build it again, now that its size is known to be right.
        model = Imputer(settings, front_end, vocabulary.size)
        load_weights(model, folder / WEIGHTS)
    return model.requires_grad_(True).eval(), vocabulary


def read_settings(folder: Path) -> tuple[configs.Model, configs.FrontEnd]:
    """Network and front end as config.toml describes them."""
    mapping, where = read_config(folder), str(folder / CONFIG)
    return (
        configs.build(configs.Model, mapping["model"], where=where, prefix="model."),
        configs.build(configs.FrontEnd, mapping["front_end"], where=where, prefix="front_end."),
    )


def read_config(folder: Path) -> dict[str, dict[str, Any]]:
    """The sections of config.toml."""
    path = folder / CONFIG
    if not path.is_file():
        raise UsageError(f"{folder} is not a model folder: {CONFIG} is missing")
    _refuse_size(path, LARGEST_CONFIG)
    mapping = configs.read_toml(path)
    sections = {name: mapping.get(name, {}) for name in ("model", "front_end", "vocabulary")}
    for name, section in sections.items():
        if not isinstance(section, dict):
            raise UsageError(f"{path}: {name} = {section!r}, but it takes a section")
    return sections


def read_vocabulary(folder: Path) -> Vocabulary:
    """The tokenizer of a model folder, which must be the one that config.toml states."""
    path = folder / TOKENIZER
    _refuse_size(path, LARGEST_TOKENIZER)
    try:
        vocabulary = Vocabulary.load(path)
    except ImputerError as error:
        raise UsageError(str(error)) from error
    stated = read_config(folder)["vocabulary"].get("fingerprint", vocabulary.fingerprint)
    if stated != vocabulary.fingerprint:
        raise UsageError(
            f"{path} is not the tokenizer this model was trained with: fingerprint {vocabulary.fingerprint}, "
            f"{CONFIG} says {stated}"
        )
    return vocabulary


def _refuse_size(path: Path, largest: int) -> None:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    if size > largest:
        raise UsageError(f"{path} has {size:,} bytes; a {path.name} has at most {largest:,}")


def read_shapes(path: Path | str) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor in a safetensors file, from its header; they must be floating point."""
    from safetensors import safe_open

    with _reading(path), safe_open(str(path), framework="pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        kinds = {name: one.get_dtype() for name, one in slices.items()}
        shapes = {name: tuple(one.get_shape()) for name, one in slices.items()}
    for name, kind in kinds.items():
        if kind not in FLOATS:
            raise UsageError(f"{path}: {name} is stored as {kind}; weights are one of {', '.join(FLOATS)}")
    return shapes


def refuse_other_depth(folder: Path, settings: configs.Model, shapes: dict[str, tuple[int, ...]]) -> None:
    """The number of layers decides how many modules are built, so it is compared first."""
    found = len({name.split(".")[1] for name in shapes if name.startswith("layers.")})
    if found != settings.layers:
        raise UsageError(
            f"{folder / CONFIG}: model.layers = {settings.layers}, but {WEIGHTS} has {count(found, 'layer')}"
        )


def refuse_other_shapes(model: nn.Module, shapes: dict[str, tuple[int, ...]], path: Path | str) -> None:
    """Names and shapes in a weights file must be those of the model."""
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    wrong = [
        f"{name}: {_shape(shapes.get(name))} in the file, {_shape(expected.get(name))} in the model"
        for name in sorted(shapes.keys() | expected.keys())
        if shapes.get(name) != expected.get(name)
    ]
    if wrong:
        more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
        raise UsageError(f"{path} does not fit the model: {'; '.join(wrong[:3])}{more}")


def store_confidence(folder: Path | str, points: Sequence[tuple[float, float]]) -> None:
    """Write the map from raw to calibrated word confidence into the configuration of a model folder."""
    _store(folder, "model", {"confidence": [list(point) for point in points]})


def store_language_model_settings(folder: Path | str, settings: configs.LanguageModel) -> None:
    """Write how to decode with a language model into the configuration of a model folder."""
    _store(folder, "language_model", dict(vars(settings)))


def _store(folder: Path | str, section: str, values: dict[str, Any]) -> None:
    path = Path(folder) / CONFIG
    mapping = configs.read_toml(path)
    mapping.setdefault(section, {}).update(values)
    with atomic_files.replacing(path) as temporary:
        temporary.write_text(configs.to_toml(mapping))


def load_weights(model: nn.Module, path: Path | str) -> None:
    """Copy the tensors of a safetensors file into ``model``; names and shapes must agree exactly."""
    read_shapes(path)
    copy_weights(model, read_weights(path), path)


def copy_weights(model: nn.Module, weights: dict[str, Tensor], path: Path | str) -> None:
    """Copy tensors, read from ``path``, into ``model``; names and shapes must agree exactly."""
    refuse_other_shapes(model, {name: tuple(tensor.shape) for name, tensor in weights.items()}, path)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(weights[name])


def read_weights(path: Path | str) -> dict[str, Tensor]:
    """The tensors of a safetensors file."""
    from safetensors.torch import load_file

    with _reading(path):
        return load_file(path)


@contextmanager
def _reading(path: Path | str) -> Iterator[None]:
    """Errors of safetensors as one line that names the file."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, MemoryError) as error:
        raise UsageError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    except SafetensorError as error:
        raise UsageError(f"{path} is damaged or not a safetensors file: {error}") from error


def _shape(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else "x".join(map(str, shape)) or "a number"
