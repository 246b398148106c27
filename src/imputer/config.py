"""Configuration: frozen dataclasses read from TOML; a refusal says which key, what it got, what it takes."""

import dataclasses
import difflib
import json
import tomllib
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from imputer.errors import UsageError
from imputer.features import Augmentation

Section = TypeVar("Section")


@dataclass(frozen=True)
class FrontEnd:
    """From sound to acoustic frames. Which fields matter depends on ``name``."""

    name: str = "filterbank_convolution"  # or "frames", "letters", "moonshine", "huggingface"
    channels: int = 32  # filterbank_convolution: channels of both convolutions
    stack: int = 1  # pretrained encoders: this many encoder frames make one acoustic frame
    feature_size: int = 0  # frames: numbers in each given vector
    frame_seconds: float = 0.0  # frames: seconds from one given vector to the next
    source: str = ""  # huggingface: a local folder or a name on the hub


@dataclass(frozen=True)
class Model:
    """The self-attention stack, and how its alignments are read."""

    width: int = 512  # hidden size
    layers: int = 8
    heads: int = 4
    filter_size: int = 2048  # inner width of the feed-forward part
    dropout: float = 0.2
    merge_repeats: bool = False  # False: the paper's topology; True: classical CTC
    block_size: int = 8  # default number of passes when decoding
    window_seconds: float = 24.0  # longest stretch decoded at once: about as long as what it was trained on


@dataclass(frozen=True)
class Vocabulary:
    """The tokenizer, trained on the transcripts of the training set unless a ready one is named."""

    units: Literal["bpe", "characters"] = "bpe"
    size: int = 400
    tokenizer: str = ""  # a ready tokenizer.model
    extra_text: tuple[str, ...] = ()  # more text to train it on, one sentence a line


@dataclass(frozen=True)
class Data:
    """What to train and validate on."""

    train: tuple[str, ...] = ()  # manifests
    valid: tuple[str, ...] = ()
    batch_seconds: float = 90.0  # audio in one batch, padding included
    workers: int = 1  # processes that read audio and compute features
    strict: bool = False  # stop at the first bad utterance instead of dropping and counting it
    frames_cache: str = ""  # folder for the frames of a pretrained encoder
    valid_utterances: int = 200  # at most this many are scored at a validation


@dataclass(frozen=True)
class Rollin:
    """The roll-in policy q x r that draws (a, a~) for an utterance."""

    alignments: str = ""  # file written by `imputer align --store`
    masking: str = "block"
    block_size: int = 8
    all_masked: float = 0.0  # share of utterances shown all masked, on top of what the policy draws
    noise: Literal["none", "utterance", "token"] = "utterance"  # shift by up to one frame
    refresh_every: int = 0  # steps between refreshes from a stale copy of the model; 0 = never


@dataclass(frozen=True)
class Training:
    """Objective, optimisation and book-keeping."""

    objective: Literal["ctc", "imitation", "dynamic_programming"] = "ctc"
    steps: int = 10_000
    batches_per_step: int = 1  # over all processes together: more ranks, fewer each, same result
    learning_rate: float = 1e-3
    warmup_steps: int = 500
    schedule: Literal["cosine", "inverse_sqrt", "constant"] = "cosine"
    schedule_steps: int = 0  # the cosine's length, to stop before it is down; 0 = as many as steps
    weight_decay: float = 0.01
    clip: float = 1.0  # largest norm of the gradient
    average: float = 0.0  # decay of the exponential average of the weights; 0 = none
    start_from: str = ""  # model folder whose weights to start from, e.g. the CTC expert's
    seed: int = 0
    validate_every: int = 500
    checkpoint_every: int = 500
    keep_checkpoints: int = 2
    log_every: int = 20
    nonfinite_limit: int = 20  # batches with a loss that is no number, before giving up
    bf16: bool = False
    compile: bool = False
    tensorboard: bool = False
    threads: int = 0  # torch threads; 0 = torch's own choice


@dataclass(frozen=True)
class Config:
    """One training run."""

    front_end: FrontEnd = field(default_factory=FrontEnd)
    model: Model = field(default_factory=Model)
    vocabulary: Vocabulary = field(default_factory=Vocabulary)
    data: Data = field(default_factory=Data)
    augmentation: Augmentation = field(default_factory=Augmentation)
    rollin: Rollin = field(default_factory=Rollin)
    training: Training = field(default_factory=Training)


def read(path: Path | str, overrides: dict[str, str] | None = None) -> Config:
    """The configuration in the TOML file ``path``; ``overrides`` maps "section.key" to text."""
    mapping = read_toml(path)
    for name, text in (overrides or {}).items():
        section, _, key = name.partition(".")
        if not key:
            raise UsageError(
                f"--{name}: options of a configuration look like --section.key, e.g. --training.steps"
            )
        mapping.setdefault(section, {})[key] = _from_text(text)
    return build(Config, mapping, where=str(path))


def read_toml(path: Path | str) -> dict[str, Any]:
    """The mapping in a TOML file, or a UsageError that names the file."""
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not valid TOML: {error}") from error


def build(kind: type[Section], mapping: dict[str, Any], *, where: str, prefix: str = "") -> Section:
    """An instance of the dataclass ``kind`` from a mapping, every key and value checked."""
    hints = typing.get_type_hints(kind)
    values = {}
    for key, value in mapping.items():
        if key not in hints:
            close = difflib.get_close_matches(key, hints, n=1)
            hint = f"; did you mean {prefix}{close[0]}?" if close else f"; there are {', '.join(hints)}"
            raise UsageError(f"{where}: unknown key {prefix}{key}{hint}")
        values[key] = _convert(value, hints[key], where, f"{prefix}{key}")
    try:
        return kind(**values)
    except ValueError as error:  # a section may check more than types
        raise UsageError(f"{where}: {prefix}{error}") from error


def _convert(value: Any, kind: Any, where: str, key: str) -> Any:
    """``value`` as ``kind``; TOML's integers may stand for floats and its arrays for tuples."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        return build(typing.cast(type, kind), value, where=where, prefix=f"{key}.")
    if origin is Literal:
        if value in arguments:
            return value
        takes = " | ".join(map(str, arguments))
    elif origin in (types.UnionType, typing.Union):
        for option in arguments:
            try:
                return _convert(value, option, where, key)
            except UsageError:
                continue
        takes = " or ".join(_name(option) for option in arguments)
    elif origin is tuple:
        if isinstance(value, str | int | float) and arguments[-1] is Ellipsis:
            value = [value]
        fits = arguments[-1] is Ellipsis or (isinstance(value, list) and len(value) == len(arguments))
        if isinstance(value, list) and fits:
            kinds = arguments if arguments[-1] is not Ellipsis else arguments[:1] * len(value)
            return tuple(_convert(v, k, where, key) for v, k in zip(value, kinds, strict=True))
        takes = f"an array of {len(arguments)}" if arguments[-1] is not Ellipsis else "an array"
    elif kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    elif isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return value
    else:
        takes = _name(kind)
    raise UsageError(f"{where}: {key} = {value!r}, but it takes {takes}")


def _name(kind: Any) -> str:
    names = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}
    return names.get(kind, str(kind))


def _from_text(text: str) -> Any:
    """A value given on the command line: a TOML value if it is one, else the text itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def to_toml(sections: dict[str, Any]) -> str:
    """TOML for a mapping of dataclasses (or plain mappings), readable by ``build``."""
    parts = []
    for name, section in sections.items():
        items = section if isinstance(section, dict) else vars_of(section)
        lines = [
            f"{key} = {json.dumps(value, ensure_ascii=False)}"
            for key, value in items.items()
            if value is not None
        ]
        parts.append("\n".join([f"[{name}]", *lines]))
    return "\n\n".join(parts) + "\n"


def vars_of(section: Any) -> dict[str, Any]:
    """The fields of a dataclass as plain values; tuples become lists."""
    return dataclasses.asdict(section)


def differences(old: Config, new: Config, *, ignore: tuple[str, ...] = ()) -> list[str]:
    """What differs between two configurations, as "section.key: old -> new"."""
    lines = []
    for section in dataclasses.fields(Config):
        before, after = (vars_of(getattr(config, section.name)) for config in (old, new))
        for key, value in after.items():
            name = f"{section.name}.{key}"
            if before[key] != value and name not in ignore:
                lines.append(f"{name}: {before[key]!r} -> {value!r}")
    return lines
