"""The keys of a configuration: frozen pydantic dataclasses, each key with its type, range, default and description.

The description is what `imputer train --list-options` and docs/configuration.md show. A key that takes a name from a
registry is a plain text here; `imputer.training.CHOICES` has the names.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, StrictBool
from pydantic.dataclasses import dataclass

# Strict types: a text in quotes is not a number, and 1 is not true.
Count = Annotated[int, Field(strict=True, ge=1)]
CountOrNone = Annotated[int, Field(strict=True, ge=0)]
Seed = Annotated[int, Field(strict=True, ge=0, le=2**63 - 1)]
Finite = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Positive = Annotated[Finite, Field(gt=0)]
PositiveOrNone = Annotated[Finite, Field(ge=0)]
Share = Annotated[Finite, Field(ge=0, le=1)]
ShareBelowOne = Annotated[Finite, Field(ge=0, lt=1)]


def _in_order(bounds: tuple[float, float]) -> tuple[float, float]:
    if bounds[0] > bounds[1]:
        raise ValueError("the lowest value comes first")
    return bounds


def _listed(value: Any) -> Any:
    """One value may be written for an array of one: ``--data.train a.jsonl``."""
    return [value] if isinstance(value, str | int | float) else value


LowHigh = Annotated[tuple[Finite, Finite], AfterValidator(_in_order)]
Texts = Annotated[tuple[str, ...], BeforeValidator(_listed)]
Factors = Annotated[
    tuple[Annotated[Finite, Field(ge=0.25, le=4)], ...],
    BeforeValidator(_listed),
]
Noises = Annotated[
    tuple[Literal["white", "pink", "babble"], ...], BeforeValidator(_listed), Field(min_length=1)
]

NO_OTHERS = ConfigDict(extra="forbid")


def key(default: Any, description: str) -> Any:
    """A key with its default and what help and documentation say about it."""
    return Field(default=default, description=description)


@dataclass(frozen=True, config=NO_OTHERS)
class FrontEnd:
    """From sound to acoustic frames. Which keys matter depends on ``name``."""

    name: str = key("filterbank_convolution", "the front end")
    channels: Count = key(32, "filterbank_convolution: channels of both convolutions")
    stack: Count = key(1, "pretrained encoders: encoder frames in one acoustic frame")
    feature_size: CountOrNone = key(0, "frames: numbers in each given vector")
    frame_seconds: PositiveOrNone = key(0.0, "frames: seconds from one given vector to the next")
    source: str = key("", "huggingface: a local folder or a name on the hub")


@dataclass(frozen=True, config=NO_OTHERS)
class Model:
    """The self-attention stack, and how its alignments are read."""

    width: Count = key(512, "hidden size, a multiple of twice the heads")
    layers: Count = key(8, "layers of self-attention and feed-forward")
    heads: Count = key(4, "heads of each self-attention")
    filter_size: Count = key(2048, "inner width of the feed-forward part")
    dropout: ShareBelowOne = key(0.2, "share of the activations dropped in training")
    merge_repeats: StrictBool = key(False, "false: the paper's topology; true: classical CTC")
    block_size: Count = key(8, "B: passes of decoding, unless asked for others")
    confidence: tuple[tuple[Share, Share], ...] = key(
        (), "map from raw to calibrated word confidence, written by `imputer evaluate --calibrate`"
    )
    window_seconds: Positive = key(24.0, "longest stretch decoded at once: about as long as those trained on")
    token_delay: PositiveOrNone = key(
        0.0, "seconds from the start of a token's sound to its frame, as measured"
    )


@dataclass(frozen=True, config=NO_OTHERS)
class LanguageModel:
    """In the config.toml of a model folder: how to decode with a language model and hotwords. Tuned, not trained."""

    lm_weight: PositiveOrNone = key(0.85, "weight of the language model's log probability")
    token_bonus: Finite = key(3.0, "nats per token, against the language model's preference for few")
    hotword_bonus: PositiveOrNone = key(2.0, "nats per piece of a hotword")
    threshold: Annotated[Finite, Field(ge=0, le=2)] = key(
        0.99, "frames that imputation gave at least this probability are not decided again"
    )
    beam: Count = key(64, "prefixes kept in the search")
    margin: PositiveOrNone = key(12.0, "nats below the best prefix at which others are dropped")
    most_tokens: Count = key(16, "tokens considered per frame")
    least_probability: Share = key(0.001, "of a token that is considered")


@dataclass(frozen=True, config=NO_OTHERS)
class Vocabulary:
    """The tokenizer, trained on the transcripts of the training set unless an existing one is named."""

    units: Literal["bpe", "characters"] = key("bpe", "what the tokens are")
    size: Count = key(400, "number of bpe tokens; with characters, those that occur")
    tokenizer: str = key("", "an existing tokenizer.model")
    extra_text: Texts = key((), "files with more text to train it on, one sentence per line")


@dataclass(frozen=True, config=NO_OTHERS)
class Data:
    """What to train and validate on."""

    train: Texts = key((), "manifests")
    valid: Texts = key((), "manifests that are not trained on; without any, there is no validation")
    text: Texts = key(
        (), "files of text in the form of the transcripts, one sentence per line, for training.text_share"
    )
    batch_seconds: Positive = key(90.0, "audio in one batch, padding included")
    workers: CountOrNone = key(
        1, "processes that read audio and compute features; 0 = the training's own process"
    )
    strict: StrictBool = key(False, "stop at the first bad utterance instead of dropping and counting it")
    unreadable_limit: Share = key(
        0.05, "training stops if more than this share of the utterances is missing or unreadable"
    )
    frames_cache: str = key(
        "", "folder for the frames of a pretrained encoder; by default in ~/.cache/imputer"
    )
    valid_utterances: Count = key(200, "at most this many are scored per validation")


@dataclass(frozen=True, config=NO_OTHERS)
class Augmentation:
    """Changes to the training audio, drawn anew for each utterance and epoch; all off by default."""

    speed: Factors = key((), "speed factors, one drawn with equal probability: [0.9, 1.0, 1.1]")
    gain_db: LowHigh = key((0.0, 0.0), "lowest and highest change of level")
    noise: Share = key(0.0, "probability of added noise")
    noise_snr_db: LowHigh = key((5.0, 30.0), "lowest and highest signal-to-noise ratio")
    noise_kinds: Noises = key(("white", "pink", "babble"), "the kinds to draw from")
    telephone: Share = key(0.0, "probability of a telephone line: 8 kHz, 300 to 3400 Hz")
    spec_augment: StrictBool = key(False, "mask stripes of the features (SpecAugment)")
    time_masks: CountOrNone = key(2, "SpecAugment: stripes over time")
    time_mask_frames: CountOrNone = key(40, "SpecAugment: most frames in a stripe over time")
    time_mask_share: Share = key(0.2, "SpecAugment: largest share of the utterance in a stripe over time")
    frequency_masks: CountOrNone = key(2, "SpecAugment: stripes over the filter banks")
    frequency_mask_banks: CountOrNone = key(27, "SpecAugment: most banks in a stripe over them")

    @property
    def of_sound(self) -> list[str]:
        """The options in use that change the waveform, before features are computed."""
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


@dataclass(frozen=True, config=NO_OTHERS)
class Rollin:
    """The roll-in policy q x r that draws (a, a~) for an utterance."""

    alignments: str = key(
        "",
        "file written by `imputer align --store`; own = the model's best alignment at every step, without an expert",
    )
    masking: str = key("block", "which frames of the alignment are shown")
    block_size: Count = key(8, "B: frames in a block of the masking policy")
    all_masked: Share = key(0.0, "share of utterances shown all masked, on top of what the policy draws")
    noise: str = key("none", "what the roll-in shifts by up to one frame")
    refresh_every: CountOrNone = key(0, "steps between refreshes from a stale copy of the model; 0 = never")


@dataclass(frozen=True, config=NO_OTHERS)
class Training:
    """Objective, optimisation, validation and checkpoints."""

    objective: Literal["ctc", "imitation", "dynamic_programming"] = key(
        "ctc", "ctc: an expert; else: an Imputer"
    )
    text_share: PositiveOrNone = key(
        0.0, "text without sound beside every batch, as a share of data.batch_seconds; 0 = none"
    )
    steps: Count = key(10_000, "steps of the optimiser")
    batches_per_step: Count = key(1, "over all processes together: more ranks, fewer each, same result")
    learning_rate: Positive = key(1e-3, "peak learning rate")
    pretrained_rate: Share = key(
        1.0,
        "share of the learning rate for the weights of a pretrained encoder that is trained with the model; 0 = "
        "frozen, its frames are computed once and cached",
    )
    warmup_steps: CountOrNone = key(500, "steps in which the learning rate rises to its peak")
    optimizer: str = key("adamw", "the optimiser")
    schedule: str = key("cosine", "the learning rate after its peak")
    schedule_steps: CountOrNone = key(
        0, "length of the cosine, where training stops before its end; 0 = the number of steps"
    )
    weight_decay: PositiveOrNone = key(0.01, "of AdamW, on matrices only")
    clip: Positive = key(1.0, "largest norm of the gradient; a large number clips nothing")
    average: ShareBelowOne = key(0.0, "decay of the exponential average of the weights; 0 = none")
    start_from: str = key(
        "",
        "model whose weights to start from: a folder or a shipped name; it may have fewer layers or another tokenizer",
    )
    stay_near: PositiveOrNone = key(
        0.0, "L2 penalty on the distance from the weights of start_from, against forgetting; 0 = none"
    )
    keep_best: StrictBool = key(
        False, "the finished model has the weights of the validation with the least loss, not the last ones"
    )
    patience: CountOrNone = key(
        0, "with keep_best: stop after so many validations without a lower loss; 0 = never"
    )
    seed: Seed = key(0, "seed of all random choices")
    validate_every: CountOrNone = key(500, "steps between validations; 0 = only after the last")
    checkpoint_every: CountOrNone = key(
        500, "steps between checkpoints; 0 = only after the last, or when stopped"
    )
    keep_checkpoints: CountOrNone = key(2, "number of newest checkpoints kept; 0 = all")
    log_every: CountOrNone = key(20, "steps between lines in metrics.jsonl; 0 = only after the last")
    nonfinite_limit: CountOrNone = key(20, "batches with a loss that is not finite, before giving up")
    bf16: StrictBool = key(False, "compute in bfloat16 where it is safe")
    compile: StrictBool = key(False, "use torch.compile: a slow start, then faster steps")
    tensorboard: StrictBool = key(False, "also write the metrics for TensorBoard")
    threads: CountOrNone = key(0, "torch threads; 0 = torch's own choice")


@dataclass(frozen=True, config=NO_OTHERS)
class Config:
    """One training run."""

    front_end: FrontEnd = Field(default_factory=FrontEnd)
    model: Model = Field(default_factory=Model)
    vocabulary: Vocabulary = Field(default_factory=Vocabulary)
    data: Data = Field(default_factory=Data)
    augmentation: Augmentation = Field(default_factory=Augmentation)
    rollin: Rollin = Field(default_factory=Rollin)
    training: Training = Field(default_factory=Training)
