"""Configuration: frozen dataclasses read from TOML; a refusal says which key, what it got, what it takes."""

import ast
import dataclasses
import difflib
import inspect
import io
import json
import sys
import tokenize
import tomllib
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from imputer.errors import UsageError

NOISES = ("white", "pink", "babble")
Section = TypeVar("Section")
SHIPPED = Path(__file__).parent


class Range(NamedTuple):
    """The numbers that a key takes, in words and as a test."""

    words: str
    holds: Callable[[float], bool]


Count = Annotated[int, Range("1 or more", lambda n: n >= 1)]
CountOrNone = Annotated[int, Range("0 or more", lambda n: n >= 0)]
Seed = Annotated[int, Range("0 to 2^63 - 1", lambda n: 0 <= n < 2**63)]
Positive = Annotated[float, Range("above 0", lambda x: x > 0)]
PositiveOrNone = Annotated[float, Range("0 or more", lambda x: x >= 0)]
Share = Annotated[float, Range("0 to 1", lambda x: 0 <= x <= 1)]
ShareBelowOne = Annotated[float, Range("0 or more and below 1", lambda x: 0 <= x < 1)]


def check_ranges(section: Any) -> None:
    """Refuse a number outside the range that its field is annotated with; the ``__post_init__`` of every section."""
    for key, kind in _kinds(type(section)).items():
        value = getattr(section, key)
        limited = typing.get_origin(kind) is Annotated
        if limited and not (_finite(value) and kind.__metadata__[0].holds(value)):
            raise ValueError(f"{key} = {value!r}, but it takes {_name(kind)}")


def _finite(number: float) -> bool:
    return abs(number) <= sys.float_info.max


def _kinds(section: type) -> dict[str, Any]:
    """The types of a section's fields, with their ranges."""
    return typing.get_type_hints(section, include_extras=True)


# The comment behind a field explains it to the reader of this file, of `imputer train --list-options` and of
# docs/configuration.md.


@dataclass(frozen=True)
class FrontEnd:
    """From sound to acoustic frames. Which fields matter depends on ``name``."""

    name: str = "filterbank_convolution"  # filterbank_convolution, frames, letters, moonshine or huggingface
    channels: Count = 32  # filterbank_convolution: channels of both convolutions
    stack: Count = 1  # pretrained encoders: this many encoder frames make one acoustic frame
    feature_size: CountOrNone = 0  # frames: numbers in each given vector
    frame_seconds: PositiveOrNone = 0.0  # frames: seconds from one given vector to the next
    source: str = ""  # huggingface: a local folder or a name on the hub

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True)
class Model:
    """The self-attention stack, and how its alignments are read."""

    width: Count = 512  # hidden size, a multiple of twice the heads
    layers: Count = 8  # of self-attention and feed-forward
    heads: Count = 4  # of each self-attention
    filter_size: Count = 2048  # inner width of the feed-forward part
    dropout: ShareBelowOne = 0.2  # share of the activations left out while training
    merge_repeats: bool = False  # false: the paper's topology; true: classical CTC
    block_size: Count = 8  # B: passes of decoding, unless asked for others
    window_seconds: Positive = 24.0  # longest stretch decoded at once: about as long as those trained on

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True)
class Vocabulary:
    """The tokenizer, trained on the transcripts of the training set unless a ready one is named."""

    units: Literal["bpe", "characters"] = "bpe"  # what the tokens are
    size: Count = 400  # how many tokens of bpe; with characters, those that occur
    tokenizer: str = ""  # a ready tokenizer.model
    extra_text: tuple[str, ...] = ()  # files with more text to train it on, one sentence a line

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True)
class Data:
    """What to train and validate on."""

    train: tuple[str, ...] = ()  # manifests
    valid: tuple[str, ...] = ()  # manifests that are not trained on; without any, nothing is validated
    batch_seconds: Positive = 90.0  # audio in one batch, padding included
    workers: CountOrNone = 1  # processes that read audio and compute features; 0 = the training's own
    strict: bool = False  # stop at the first bad utterance instead of dropping and counting it
    frames_cache: str = ""  # folder for the frames of a pretrained encoder; by default in ~/.cache/imputer
    valid_utterances: Count = 200  # at most this many are scored at a validation

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True)
class Augmentation:
    """What may happen to training audio, drawn anew for each utterance and epoch; all off by default."""

    speed: tuple[float, ...] = ()  # factors, one drawn with equal chances: (0.9, 1.0, 1.1)
    gain_db: tuple[float, float] = (0.0, 0.0)  # lowest and highest change of level
    noise: float = 0.0  # probability of added noise
    noise_snr_db: tuple[float, float] = (5.0, 30.0)  # lowest and highest signal-to-noise ratio
    noise_kinds: tuple[str, ...] = ("white", "pink", "babble")  # those to draw from
    telephone: float = 0.0  # probability of a telephone line: 8 kHz, 300 to 3400 Hz
    spec_augment: bool = False  # whether stripes of the features are blotted out
    time_masks: int = 2  # SpecAugment: stripes over time ...
    time_mask_frames: int = 40  # ... of at most so many frames each ...
    time_mask_share: float = 0.2  # ... and of at most this share of the utterance each
    frequency_masks: int = 2  # stripes over the filter banks ...
    frequency_mask_banks: int = 27  # ... of at most so many banks each

    def __post_init__(self) -> None:
        for name in ("noise", "telephone", "time_mask_share"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} must lie in 0..1, got {getattr(self, name)}")
        for name in ("time_masks", "time_mask_frames", "frequency_masks", "frequency_mask_banks"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")
        if any(not 0.25 <= factor <= 4.0 for factor in self.speed):
            raise ValueError(f"speed factors must lie in 0.25..4, got {self.speed}")
        for name in ("gain_db", "noise_snr_db"):
            low_high = getattr(self, name)
            if len(low_high) != 2 or low_high[0] > low_high[1]:
                raise ValueError(f"{name} takes the lowest and the highest value, got {low_high}")
        unknown = set(self.noise_kinds) - set(NOISES)
        if unknown or (self.noise and not self.noise_kinds):
            raise ValueError(f"noise_kinds takes some of {', '.join(NOISES)}, got {self.noise_kinds}")

    @property
    def of_sound(self) -> list[str]:
        """What changes the sound itself, before there are features."""
        asked = {
            "speed": self.speed,
            "gain_db": any(self.gain_db),
            "noise": self.noise,
            "telephone": self.telephone,
        }
        return [name for name, value in asked.items() if value]

    @property
    def longest(self) -> float:
        """By how much the slowest speed stretches an utterance: for frame budgets."""
        return max((1.0 / factor for factor in self.speed), default=1.0)


NO_AUGMENTATION = Augmentation()


@dataclass(frozen=True)
class Rollin:
    """The roll-in policy q x r that draws (a, a~) for an utterance."""

    alignments: str = ""  # file written by `imputer align --store`
    masking: str = "block"  # block, bernoulli, uniform or block_printed: what of the alignment is shown
    block_size: Count = 8  # B: frames in a block of the masking policy
    all_masked: Share = 0.0  # share of utterances shown all masked, on top of what the policy draws
    noise: str = "none"  # none, utterance or token: what the roll-in shifts by up to one frame
    refresh_every: CountOrNone = 0  # steps between refreshes from a stale copy of the model; 0 = never

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True)
class Training:
    """Objective, optimisation and book-keeping."""

    objective: Literal["ctc", "imitation", "dynamic_programming"] = "ctc"  # ctc: an expert; else: an Imputer
    steps: Count = 10_000  # of the optimiser
    batches_per_step: Count = 1  # over all processes together: more ranks, fewer each, same result
    learning_rate: Positive = 1e-3  # at its peak
    warmup_steps: CountOrNone = 500  # in which the learning rate rises to its peak
    optimizer: str = "adamw"  # adamw
    schedule: str = "cosine"  # cosine, inverse_sqrt or constant: the learning rate after its peak
    schedule_steps: CountOrNone = 0  # the cosine's length, to stop before it is down; 0 = as many as steps
    weight_decay: PositiveOrNone = 0.01  # AdamW's, on matrices only
    clip: Positive = 1.0  # largest norm of the gradient; a large number clips nothing
    average: ShareBelowOne = 0.0  # decay of the exponential average of the weights; 0 = none
    start_from: str = ""  # model folder whose weights to start from, e.g. the CTC expert's
    seed: Seed = 0  # of everything random
    validate_every: CountOrNone = 500  # steps between validations; 0 = only after the last
    checkpoint_every: CountOrNone = 500  # steps between checkpoints; 0 = only after the last, or when stopped
    keep_checkpoints: CountOrNone = 2  # the newest that stay; 0 = all
    log_every: CountOrNone = 20  # steps between lines in metrics.jsonl; 0 = only after the last
    nonfinite_limit: CountOrNone = 20  # batches with a loss that is no number, before giving up
    bf16: bool = False  # compute in bfloat16 where it is safe
    compile: bool = False  # let torch.compile fuse the network: a slow start, then faster steps
    tensorboard: bool = False  # also write the metrics for TensorBoard
    threads: CountOrNone = 0  # torch threads; 0 = torch's own choice

    def __post_init__(self) -> None:
        check_ranges(self)


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
    """The configuration in a TOML file, or in one that ships with the package, by name.

    ``overrides`` maps "section.key" to text.
    """
    path = find(path)
    mapping = read_toml(path)
    for name, text in (overrides or {}).items():
        section, _, key = name.partition(".")
        if not key:
            raise UsageError(
                f"--{name}: options of a configuration look like --section.key, e.g. --training.steps"
            )
        keys = mapping.setdefault(section, {})
        if isinstance(keys, dict):  # else it is refused below, by name
            keys[key] = _from_text(text)
    return build(Config, mapping, where=str(path))


def find(path_or_name: Path | str) -> Path:
    """The file of a configuration: a path, or the name of one that ships with the package."""
    path, shipped = Path(path_or_name), SHIPPED / f"{path_or_name}.toml"
    if path.is_file() or path.suffix or len(path.parts) > 1:
        return path
    if not shipped.is_file():
        names = ", ".join(sorted(each.stem for each in SHIPPED.glob("*.toml")))
        raise UsageError(f"no configuration {path}; give a TOML file or one of {names}")
    return shipped


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
    if dataclasses.is_dataclass(kind):
        if isinstance(value, dict):
            return build(typing.cast(type, kind), value, where=where, prefix=f"{key}.")
    elif origin is Literal:
        if value in arguments:
            return value
    elif origin in (types.UnionType, typing.Union):
        for option in arguments:
            try:
                return _convert(value, option, where, key)
            except UsageError:
                continue
    elif origin is tuple:
        if isinstance(value, str | int | float) and arguments[-1] is Ellipsis:
            value = [value]
        fits = arguments[-1] is Ellipsis or (isinstance(value, list) and len(value) == len(arguments))
        if isinstance(value, list) and fits:
            kinds = arguments if arguments[-1] is not Ellipsis else arguments[:1] * len(value)
            return tuple(_convert(v, k, where, key) for v, k in zip(value, kinds, strict=True))
    elif kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        if _finite(value):
            return float(value)
    elif isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return value
    raise UsageError(f"{where}: {key} = {value!r}, but it takes {_name(kind)}")


def _name(kind: Any) -> str:
    """What a key of this type takes, in words."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return "a section"
    if origin is Annotated:
        return f"{_name(arguments[0])}, {arguments[1].words}"
    if origin is Literal:
        return " | ".join(map(str, arguments))
    if origin in (types.UnionType, typing.Union):
        return " or ".join(map(_name, arguments))
    if origin is tuple:
        return "an array" if arguments[-1] is Ellipsis else f"an array of {len(arguments)}"
    names = {str: "a text", int: "a whole number", float: "a finite number", bool: "true or false"}
    return names.get(kind, str(kind))


def _from_text(text: str) -> Any:
    """A value given on the command line: a TOML value if it is one, else the text itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def to_toml(sections: dict[str, Any], *, explained: bool = False) -> str:
    """TOML for a mapping of dataclasses (or plain mappings), readable by ``build``.

    explained: behind every key a comment says what it is for and what it takes.
    """
    parts = []
    for name, section in sections.items():
        items = section if isinstance(section, dict) else vars_of(section)
        keys = keys_of(type(section)) if explained else []
        comments = {key.name: "  # " + f"{key.explanation} ({key.takes})".strip() for key in keys}
        lines = [
            f"{key} = {json.dumps(value, ensure_ascii=False)}{comments.get(key, '')}"
            for key, value in items.items()
            if value is not None
        ]
        parts.append("\n".join([f"[{name}]", *lines]))
    return "\n\n".join(parts) + "\n"


@dataclass(frozen=True)
class Key:
    """What there is to know about one key of a section."""

    name: str
    default: Any
    takes: str
    explanation: str


def keys_of(section: type) -> list[Key]:
    """Every key of a section, as its dataclass has it."""
    comments, defaults = _comments(section), vars_of(section())
    return [
        Key(name, defaults[name], _name(kind), comments.get(name, ""))
        for name, kind in _kinds(section).items()
    ]


def _comments(section: type) -> dict[str, str]:
    """The comment behind each field of a dataclass; none where its source is not at hand."""
    try:
        source = inspect.getsource(section)
    except OSError:
        return {}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {t.start[0]: t.string.lstrip("# ") for t in tokens if t.type == tokenize.COMMENT}
    return {
        node.target.id: comments.get(node.end_lineno or 0, "")
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


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
