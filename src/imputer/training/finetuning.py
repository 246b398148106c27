"""Fine-tune a model on a few minutes of somebody's recordings without losing what it can do.

What was measured (docs/finetuning.md has the tables), and what follows:

- The whole change overfits: it gains little and makes others much worse. Part of the way from the start to the end of
  a long training gains more and forgets less than a short one (Wortsman et al., arXiv:2109.01903).
- The encoder learns the speakers; the layers above it memorise the few sentences. So half of the encoder's change is
  kept, and less of theirs.
- Sound that is altered anew in every epoch (speed, level, noise) gains about twice as much as SpecAugment alone.
- The validation set is a minute or so: choosing the part, or one of the validations, on it would choose by chance. Both
  are fixed, and the start is kept if the result is worse by more than noise.
"""

import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from imputer import configs, frontends, models
from imputer.corpora import CORPORA, Options
from imputer.corpora.validation import write_manifests
from imputer.data import manifest, text
from imputer.data.drops import Dropped, Tally
from imputer.data.manifest import Manifest, Utterance
from imputer.data.splitting import split_off
from imputer.errors import ImputerError, UsageError, count
from imputer.evaluation import Evaluation, compare, evaluate, scoring
from imputer.recognizer import Recognizer
from imputer.support import atomic_files, progress
from imputer.training.loop import train
from imputer.training.optimizers import PRETRAINED
from imputer.training.starting import OWN
from imputer.vocabulary import Vocabulary

RUN = "finetuning"  # in the output folder: manifests, checkpoints
VALID_SHARE = 0.15  # of the seconds
LEAST_MINUTES = 1.0  # of speech to train on
BATCH_SECONDS = 60.0
EPOCHS, FEWEST_STEPS, MOST_STEPS = 24, 120, 240
LEARNING_RATE = 3e-4
ENCODER_SHARE = 0.5  # of the learning rate
KEPT = 0.5  # of the way from the start weights to the trained ones, of the encoder or a model without one
KEPT_ABOVE = 0.15  # of the layers above an encoder
ALTERED = configs.Augmentation(
    speed=(0.9, 0.95, 1.0, 1.05, 1.1), gain_db=(-6.0, 6.0), noise=0.3, noise_snr_db=(15.0, 40.0)
)
VALIDATIONS = 3  # after the one at step 0


@dataclass(frozen=True)
class Report:
    """Word error rates on the recordings that were split off for validation, before and after."""

    before: scoring.Interval
    after: scoring.Interval
    comparison: scoring.Comparison  # after - before, paired
    model: Path
    minutes: float  # of speech trained on
    recordings: int  # trained on
    valid_recordings: int
    valid_words: int
    split_by: str  # "speaker" or "recording"

    @property
    def worse(self) -> bool:
        """Whether the model lost by more than the noise of its validation set."""
        return self.comparison.difference.low > 0

    @property
    def verdict(self) -> str:
        """What the difference is worth."""
        if self.comparison.difference.high < 0:
            return "better"
        if self.worse:
            return "worse: the new weights are discarded, the model is the one you had"
        return f"too few recordings to tell: {count(self.valid_words, 'word')} were scored; the new weights are kept"

    def __str__(self) -> str:
        gap = self.comparison.difference
        lines = [
            f"{name:<11}{100 * rate.value:6.1f} %  ({100 * rate.low:.1f} to {100 * rate.high:.1f})"
            for name, rate in (("before", self.before), ("after", self.after))
        ]
        spread = f"({100 * gap.low:+.1f} to {100 * gap.high:+.1f})"
        lines += [f"{'difference':<11}{100 * gap.value:+6.1f} points  {spread}"]
        heading = (
            f"Word error rate on {count(self.valid_recordings, 'held-out recording')} (split by {self.split_by}), "
            f"without a language model, 95 % intervals; trained on {self.minutes:.1f} minutes"
        )
        return "\n".join([heading, *lines, self.verdict])


def finetune(
    model: str | Path, recordings: str | Path, output: str | Path, *, minutes: float | None = None
) -> Report:
    """Fine-tune a model (folder or shipped name) on recordings with texts, into the model folder ``output``.

    ``recordings`` is a folder of audio and text files, a CSV or TSV table, or a manifest. ``minutes``: train on at most
    this much speech. The same call resumes an interrupted one.
    """
    start, output = models.torch_folder(model), Path(output)
    if output.resolve() == start.resolve():
        raise UsageError(f"{output} is the model to start from; name another folder for the new one")
    if str(output) in models.shipped_names():
        raise UsageError(
            f"{output} is the name of a model that comes with the package, which the folder would hide; name another"
        )
    if Path(recordings).is_dir() and output.resolve() == Path(recordings).resolve():
        raise UsageError(f"{output} holds the recordings; name another folder for the new model")
    if minutes is not None and not (isinstance(minutes, int | float) and 0 < minutes < float("inf")):
        raise UsageError(f"minutes must be a number above 0, got {minutes!r}")
    folder = output / RUN
    settings, front_end = models.read_settings(start)
    vocabulary = models.read_vocabulary(start)
    train_set, valid_set, unit = split_off(
        list(readable(Path(recordings), vocabulary, folder)), share=VALID_SHARE
    )
    seconds = sum(utterance.duration for utterance in train_set)
    if seconds < 60 * LEAST_MINUTES:
        raise UsageError(
            f"{recordings}: {seconds:.0f} s of speech to train on besides "
            f"{count(len(valid_set), 'held-out recording')}; fine-tuning needs at least {60 * LEAST_MINUTES:.0f} s"
        )
    train_set = first_minutes(train_set, minutes)
    seconds = sum(utterance.duration for utterance in train_set)
    manifest.write(folder / "train.jsonl", train_set)
    manifest.write(folder / "valid.jsonl", valid_set)
    say(
        f"{count(len(train_set), 'recording')} to train on, {seconds / 60:.1f} minutes; "
        f"{count(len(valid_set), 'recording')} held out (split by {unit}) to compare before and after"
    )
    before = scored("before", start, valid_set)
    config = small_data_settings(settings, front_end, start, folder, seconds)
    say(
        "training; the rates on the way are those of the whole change, of which a part will be kept: "
        f"{100 * KEPT:.0f} %, or {100 * KEPT_ABOVE:.0f} % in layers above an encoder"
    )
    write_between(start, trained(config, folder / "run"), output)
    after = scored("after", output, valid_set)
    report = Report(
        before.wer,
        after.wer,
        compare(before, after),
        output,
        seconds / 60,
        len(train_set),
        len(valid_set),
        sum(one.words.length for one in before.utterances),
        unit,
    )
    if report.worse:
        models.copy(start, output)
    return report


def trained(config: configs.Config, run: Path) -> Path:
    """The finished model of the run; one of other recordings in its place is refused."""
    try:
        return train(config, run)
    except UsageError as error:
        if run.is_dir() and (run / "config.toml").is_file():
            reason = str(error).partition(". Restore it, or resume on it")[
                0
            ]  # `imputer train` has an option for it
            raise UsageError(
                f"{reason}. To start again, remove {run} or name another output folder"
            ) from error
        raise


def write_between(start: Path, end: Path, output: Path) -> None:
    """The model ``start`` with its weights moved part of the way to those of ``end``.

    All else stays: calibration, the language model and how to decode with it.
    """
    first, last = (models.read_weights(folder / models.WEIGHTS) for folder in (start, end))
    encoder = {name for name in first if name.startswith(PRETRAINED)} or set(first)
    moved = {
        name: torch.lerp(weight.float(), last[name].float(), KEPT if name in encoder else KEPT_ABOVE)
        for name, weight in first.items()
    }
    models.copy(start, output)
    with atomic_files.replacing(output / models.WEIGHTS) as path:
        save_file({name: weight.to(first[name].dtype) for name, weight in moved.items()}, path)


def small_data_settings(
    model: configs.Model, front_end: configs.FrontEnd, start: Path, folder: Path, seconds: float
) -> configs.Config:
    """A training that fits the recordings closely, of which ``write_between`` keeps a part; docs/finetuning.md."""
    steps = round(min(MOST_STEPS, max(FEWEST_STEPS, EPOCHS * seconds / BATCH_SECONDS)))
    every = -(-steps // VALIDATIONS)
    return configs.Config(
        model=model,
        front_end=front_end,
        vocabulary=configs.Vocabulary(tokenizer=str(start / models.TOKENIZER)),
        data=configs.Data(
            train=(str(folder / "train.jsonl"),),
            valid=(str(folder / "valid.jsonl"),),
            batch_seconds=BATCH_SECONDS,
            workers=0,
        ),
        augmentation=replace(
            ALTERED if frontends.build(front_end, model.width).augments_sound else configs.NO_AUGMENTATION,
            spec_augment=True,
            time_mask_frames=16,
            time_mask_share=0.1,
            frequency_mask_banks=20,
        ),
        rollin=configs.Rollin(alignments=OWN, block_size=model.block_size),
        training=configs.Training(
            objective="dynamic_programming",
            start_from=str(start),
            steps=steps,
            learning_rate=LEARNING_RATE,
            pretrained_rate=ENCODER_SHARE,
            warmup_steps=steps // 10,
            weight_decay=0.0,
            average=0.95,
            validate_every=every,
            checkpoint_every=every,
            keep_checkpoints=2,
            log_every=10,
            bf16=computes_bfloat16(),
        ),
    )


def computes_bfloat16() -> bool:
    """Whether this machine has instructions for bfloat16, which makes training about twice as fast."""
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported()
    if not hasattr(torch.cpu, "get_capabilities"):  # an older torch cannot tell
        return False
    return bool(torch.cpu.get_capabilities().get("avx512_bf16", False))


def readable(recordings: Path, vocabulary: Vocabulary, folder: Path) -> Iterator[Utterance]:
    """The utterances of a folder, table or manifest, their texts in characters that the vocabulary has."""
    path = recordings
    if recordings.suffix != ".jsonl":
        path = folder / "all.jsonl"
        # Texts as they are: what the vocabulary cannot write is changed below, and no more than that.
        found = CORPORA["folder"](recordings, Options(text="keep"))
        report = write_manifests(found, path, count=lambda _: 0)
        for reason, items in report.dropped.items():
            say(f"dropped {items} x {reason}, first: {report.examples[reason]}")
        if len(report.manifests) > 1:
            raise UsageError(
                f"{recordings} has the parts {', '.join(sorted(report.splits))}; give one manifest of them"
            )
    unwritable, usable = Tally(), 0
    for utterance in Manifest(path):
        form = writable(utterance.text, vocabulary)
        if form is None:
            unwritable.add(
                [Dropped("text that the model cannot write", f"{utterance.id}: {utterance.text[:60]!r}")]
            )
        else:
            usable += 1
            yield replace(utterance, text=form)
    if unwritable.counts and not usable:
        raise UsageError(f"{recordings}: nothing is left to train on: {unwritable}")
    if unwritable.counts:
        say(f"dropped {unwritable}")


def writable(words: str, vocabulary: Vocabulary) -> str | None:
    """The text as the vocabulary can write it: as it is, without case and punctuation, or with numbers spelled out."""
    for form in (lambda: words, lambda: text.plain(words), lambda: text.transcript(text.spell(words))):
        with suppress(ImputerError, text.Unspeakable):
            found = form()
            vocabulary.encode(found)
            if found.strip():
                return found
    return None


def first_minutes(utterances: list[Utterance], minutes: float | None) -> list[Utterance]:
    """Utterances, spread over all, of at most so many minutes together."""
    if minutes is None:
        return utterances
    total = sum(utterance.duration for utterance in utterances)
    kept, share, taken, passed = [], min(1.0, 60 * minutes / max(total, 1e-9)), 0.0, 0.0
    for utterance in utterances:
        passed += utterance.duration
        if taken + utterance.duration / 2 <= share * passed:
            kept.append(utterance)
            taken += utterance.duration
    return kept


def scored(when: str, folder: Path, utterances: list[Utterance]) -> Evaluation:
    """A model on the validation set, without a language model: what fine-tuning changes."""
    recognizer = Recognizer.from_pretrained(folder)
    with progress.bar(f"scoring {when}", sum(one.duration for one in utterances), unit="s") as advance:
        result = evaluate(recognizer, utterances, name=folder.name, advance=advance)
    if not result.utterances:
        name, reason = next(iter(result.failed.items()))
        raise ImputerError(f"no recording of the validation set could be read; the first: {name}: {reason}")
    say(f"word error rate {when}: {100 * result.wer.value:.1f} %")
    return result


def say(line: str) -> None:
    """What the command is about to do, or found."""
    print(line, file=sys.stderr, flush=True)
