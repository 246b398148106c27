"""Training: corpus -> batch -> roll-in -> model -> objective; checkpoints and many machines around it.

Everything random is seeded by what it is for (seed, step, batch, utterance), never by history: a run that was
killed goes on from its last checkpoint to the same weights, and N ranks take the same steps as one process.
"""

import contextlib
import ctypes
import fcntl
import json
import math
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from imputer import alignments, configs, features, models, objectives, rollin
from imputer.aligner.corpus import align_corpus
from imputer.configs import NO_AUGMENTATION
from imputer.data import batching
from imputer.data.manifest import Utterance, Utterances, open_utterances
from imputer.data.ranks import Ranks, joined
from imputer.errors import ImputerError, UsageError
from imputer.model import Imputer
from imputer.support import atomic_files, progress
from imputer.training import checkpoints
from imputer.vocabulary import Vocabulary

# A resumed run may differ in these without becoming another run.
CHANGEABLE = (
    "training.validate_every",
    "training.checkpoint_every",
    "training.keep_checkpoints",
    "training.log_every",
    "training.nonfinite_limit",
    "training.tensorboard",
    "training.threads",
    "data.workers",
    "data.frames_cache",
    "data.valid",
    "data.valid_utterances",
)

TRIM_EVERY = 50  # steps
MOST_UNALIGNED = 0.01  # of the utterances; more, and the alignments are of another corpus


# --- data


@dataclass
class Stream:
    """The endless sequence of this rank's batches, from any position on."""

    utterances: Utterances
    vocabulary: Vocabulary
    extract: Callable[[Utterance, torch.Generator], Tensor]
    lengths: list[int]  # feature frames of each utterance
    frame_budget: int
    seed: int
    workers: int
    strict: bool
    ranks: Ranks

    def batches(self, epoch: int, position: int) -> Iterator[tuple[int, int, batching.Batch]]:
        """(epoch, position, batch), from a position that may lie beyond the end of its epoch.

        All ranks together take every batch of every epoch once; this one takes each ``ranks.count``-th.
        """
        position += self.ranks.rank
        while True:
            plan = batching.plan_epoch(
                self.lengths, frame_budget=self.frame_budget, seed=self.seed, epoch=epoch
            )
            mine = range(position, len(plan), self.ranks.count)
            dataset = batching.SpeechDataset(
                self.utterances,
                self.vocabulary,
                self.extract,
                seed=self.seed,
                epoch=epoch,
                strict=self.strict,
            )
            loaded = batching.batches(dataset, [plan[i] for i in mine], workers=self.workers)
            for index, batch in zip(mine, loaded, strict=True):
                yield epoch, index, batch
            epoch, position = epoch + 1, (mine[-1] + self.ranks.count if mine else position) - len(plan)


def vocabulary_for(settings: configs.Config, utterances: Utterances) -> Vocabulary:
    """The tokenizer that is named, or that of the model to start from, or a new one."""
    if settings.vocabulary.tokenizer:
        return Vocabulary.load(settings.vocabulary.tokenizer)
    if settings.training.start_from:
        return models.load(settings.training.start_from)[1]
    texts = [utterance.text for utterance in utterances]
    for path in settings.vocabulary.extra_text:
        try:
            texts += Path(path).read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise UsageError(f"vocabulary.extra_text: cannot read {path}: {error.strerror}") from error
    return Vocabulary.train(texts, size=settings.vocabulary.size, units=settings.vocabulary.units)


@dataclass(frozen=True)
class OnlyAligned:
    """Features of an utterance that the expert could align; the others are dropped and counted, as unreadable ones."""

    extract: Callable[[Utterance, torch.Generator], Tensor]
    unaligned: frozenset[str]

    def __call__(self, utterance: Utterance, generator: torch.Generator) -> Tensor:
        if utterance.id in self.unaligned:
            raise ImputerError("the expert could not align it")
        return self.extract(utterance, generator)


def feature_statistics(
    utterances: Sequence[Utterance], extract: Callable[..., Tensor], *, seed: int, at_most: int = 400
) -> tuple[Tensor, Tensor]:
    """Mean and deviation of every feature over (a sample of) the training set."""
    order = torch.randperm(len(utterances), generator=rollin.generator_for(seed, "statistics"))[:at_most]
    failures: list[ValueError] = []

    def frames() -> Iterator[Tensor]:
        for index in progress.track(order.tolist(), "statistics of the features"):
            try:
                found = extract(utterances[index], rollin.generator_for(seed, index))
            except ImputerError as error:  # the loader will drop and count it
                failures.append(error)
            else:
                yield found[found.isfinite().all(1)]  # one broken vector must not spoil the whole model

    try:
        return features.mean_and_deviation(frames())
    except ValueError as error:
        raise ImputerError(
            f"no utterance of the training set could be read: {[*failures, error][0]}"
        ) from error


# --- one step


class Objective(nn.Module):
    """Batch -> roll-in -> model -> objective: the negative log-likelihood of a batch, summed, in nats."""

    def __init__(
        self, model: Imputer, settings: configs.Config, expert: Callable[[str], list[int]] | None
    ) -> None:
        super().__init__()
        self.model, self.settings, self.expert = model, settings, expert

    def forward(self, batch: batching.Batch, step: int) -> tuple[Tensor, int]:
        """The summed loss, and how many utterances could not count because they do not fit their frames."""
        model, topology = self.model, {"merge_repeats": self.model.merge_repeats}
        if not batch.ids:  # all of it was dropped, but other ranks wait for a gradient
            return torch.stack([p.sum() for p in model.parameters()]).sum() * 0.0, 0
        autocast = torch.autocast(
            batch.features.device.type, torch.bfloat16, enabled=self.settings.training.bf16
        )
        with autocast:
            acoustic, frame_lengths = model.encode(batch.features, batch.feature_lengths)
        usable = alignments.feasible(batch.targets, frame_lengths, batch.target_lengths, **topology)
        if self.settings.training.objective == "ctc":
            drawn, committed = None, None
            partial = model.all_masked(acoustic)
        else:
            drawn, committed, fits = self.roll_in(batch, frame_lengths, step)
            usable = usable & torch.tensor(fits, device=usable.device)
            partial = torch.where(committed, drawn, model.mask)
        with autocast:
            log_probs = model.impute(acoustic, frame_lengths, partial)
        keep = usable.nonzero()[:, 0]
        if not len(keep):
            return log_probs.sum() * 0.0, len(usable)
        if len(keep) < len(usable):
            log_probs, frame_lengths = log_probs[keep], frame_lengths[keep]
            drawn = drawn if drawn is None else drawn[keep]
            committed = committed if committed is None else committed[keep]
        targets, target_lengths = batch.targets[keep], batch.target_lengths[keep]
        likelihood = OBJECTIVES[self.settings.training.objective](
            log_probs, targets, drawn, committed, frame_lengths, target_lengths, **topology
        )
        return -likelihood.sum(), len(usable) - len(keep)

    def roll_in(
        self, batch: batching.Batch, frame_lengths: Tensor, step: int
    ) -> tuple[Tensor, Tensor, list[bool]]:
        """(a, a~) for every utterance of the batch."""
        assert self.expert is not None
        policy = self.settings.rollin
        drawn, committed, usable = rollin.draw(
            self.expert,
            batch.ids,
            frame_lengths.tolist(),
            masking_policy=policy.masking,
            noise=policy.noise,
            block_size=policy.block_size,
            seed=self.settings.training.seed,
            step=step,
            all_masked=policy.all_masked,
            merge_repeats=self.model.merge_repeats,
        )
        device = frame_lengths.device
        return drawn.to(device), committed.to(device), usable


def _ctc(
    log_probs: Tensor, y: Tensor, a: Any, committed: Any, n: Tensor, m: Tensor, **topology: bool
) -> Tensor:
    return objectives.ctc(log_probs, y, n, m, **topology)


def _imitation(
    log_probs: Tensor, y: Tensor, a: Tensor, committed: Any, n: Tensor, m: Tensor, **_: bool
) -> Tensor:
    return objectives.imitation(log_probs, a, n)


OBJECTIVES: dict[str, Callable[..., Tensor]] = {
    "ctc": _ctc,
    "imitation": _imitation,
    "dynamic_programming": objectives.dynamic_programming,
}


def learning_rate(settings: configs.Training, step: int) -> float:
    """Linear warm-up to the peak, then the schedule's decay; ``step`` counts from 0."""
    warm = (step + 1) / max(1, settings.warmup_steps)
    if warm < 1:
        return settings.learning_rate * warm
    if settings.schedule == "constant":
        return settings.learning_rate
    if settings.schedule == "inverse_sqrt":
        return settings.learning_rate * math.sqrt(max(1, settings.warmup_steps) / (step + 1))
    length = settings.schedule_steps or settings.steps
    done = (step - settings.warmup_steps) / max(1, length - settings.warmup_steps)
    return settings.learning_rate * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(1.0, max(0.0, done)))))


# --- the loop


@dataclass
class Run:
    """Everything one training holds."""

    settings: configs.Config
    folder: Path
    ranks: Ranks
    model: Imputer
    vocabulary: Vocabulary
    objective: Objective
    trained: nn.Module  # the objective, wrapped for many ranks
    optimizer: torch.optim.Optimizer
    average: dict[str, Tensor]
    stream: Stream
    plain_extract: Callable[[Utterance, torch.Generator], Tensor]  # features without augmentation
    valid: Utterances | None
    progress: checkpoints.Progress
    log: Callable[[dict[str, Any]], None]


def train(settings: configs.Config, folder: Path) -> Path:
    """Train, or go on with, the run in ``folder``; returns the folder of the finished model."""
    if settings.training.threads:
        torch.set_num_threads(settings.training.threads)
    with joined() as here, _only_run_in(folder, here), _stop_signal() as stop_asked:
        run = prepare(settings, folder, here)
        finished = loop(run, stop_asked)
        if finished and here.first:
            save_model(run)
        here.wait()
    if not finished:
        print(
            f"stopped at step {run.progress.step}; the same command goes on from there",
            file=sys.stderr,
            flush=True,
        )
        raise SystemExit(143)
    return folder / "model"


def prepare(settings: configs.Config, folder: Path, here: Ranks) -> Run:
    """Read the data, build the model, and take up the last checkpoint if there is one."""
    check(settings, here)
    resumed = checkpoints.latest(folder / "checkpoints")
    if resumed:
        refuse_changes(folder, settings)
    utterances = open_utterances(settings.data.train, "data.train", strict=settings.data.strict)
    valid = open_utterances(settings.data.valid, "data.valid", strict=False) if settings.data.valid else None
    vocabulary = shared_vocabulary(settings, folder, utterances, here, resumed=bool(resumed))
    torch.manual_seed(settings.training.seed)
    model = Imputer(settings.model, settings.front_end, vocabulary.size)
    check_augmentation(settings, model.front_end)
    plain_extract = model.front_end.reader(settings.data, NO_AUGMENTATION, utterances)
    if settings.training.start_from and not resumed:
        start_from(settings.training.start_from, model, vocabulary)
    elif not resumed and hasattr(model.front_end, "normalisation"):
        statistics = feature_statistics(utterances, plain_extract, seed=settings.training.seed)
        model.front_end.normalisation.fit(*statistics)
    model.to(here.device)
    expert, unaligned = expert_for(settings, model, vocabulary, utterances)
    objective = Objective(model, settings, expert)
    trained: nn.Module = objective
    if settings.training.compile:
        model.contextualise = torch.compile(model.contextualise, dynamic=True)  # type: ignore[method-assign]
    if here.count > 1:
        trained = nn.parallel.DistributedDataParallel(
            objective, device_ids=[here.device] if here.device.type == "cuda" else None
        )
    longest = settings.augmentation.longest  # slow speech takes more frames than its recording
    stream = Stream(
        utterances,
        vocabulary,
        OnlyAligned(model.front_end.reader(settings.data, settings.augmentation, utterances), unaligned),
        [model.front_end.feature_frames(seconds * longest) for seconds in utterances.durations()],
        model.front_end.feature_frames(settings.data.batch_seconds),
        settings.training.seed,
        settings.data.workers,
        settings.data.strict,
        here,
    )
    average = (
        {n: p.detach().clone() for n, p in model.named_parameters()} if settings.training.average else {}
    )
    run = Run(
        settings,
        folder,
        here,
        model,
        vocabulary,
        objective,
        trained,
        optimiser(model, settings.training),
        average,
        stream,
        plain_extract,
        valid,
        checkpoints.Progress(),
        metrics_log(folder, here, tensorboard=settings.training.tensorboard),
    )
    if resumed:
        run.progress, tensors = checkpoints.load(resumed)
        checkpoints.unpack(tensors, model, run.optimizer, average)
        refreshed = settings.rollin.refresh_every and run.progress.step // settings.rollin.refresh_every
        if refreshed:
            path = stale_path(folder, refreshed * settings.rollin.refresh_every)
            objective.expert = rollin.AlignmentStore(path) if path.is_file() else expert
    elif here.first:
        with atomic_files.replacing(folder / "config.toml") as path:
            path.write_text(configs.to_toml({name: getattr(settings, name) for name in vars(settings)}))
    forget_metrics_after(folder, run.progress.step, here)
    here.wait()
    return run


def check(settings: configs.Config, here: Ranks) -> None:
    """What types and ranges cannot say."""
    training = settings.training
    if training.batches_per_step % here.count:
        raise UsageError(
            f"training.batches_per_step = {training.batches_per_step} is not a multiple of the {here.count} ranks"
        )
    if training.objective != "ctc" and not settings.rollin.alignments:
        raise UsageError(
            f"training.objective = {training.objective} needs rollin.alignments: train a CTC expert first, then "
            "`imputer align --manifest M --model EXPERT --store F`"
        )
    from imputer.masking import POLICIES

    if settings.rollin.masking not in POLICIES:
        raise UsageError(f"rollin.masking = {settings.rollin.masking!r}, but there are {', '.join(POLICIES)}")


def check_augmentation(settings: configs.Config, front_end: Any) -> None:
    """Refuse augmentation of sound where features are computed before training."""
    if settings.augmentation.of_sound and not front_end.augments_sound:
        raise UsageError(
            f"the frames of front_end.name = {settings.front_end.name} are computed before training, so "
            f"augmentation.{settings.augmentation.of_sound[0]} has no effect: make altered copies of the audio "
            "(`imputer prepare altered M.jsonl --output M2.jsonl`), or use augmentation.spec_augment"
        )


def refuse_changes(folder: Path, settings: configs.Config) -> None:
    """A run is gone on with under the configuration it began with."""
    before = configs.read(folder / "config.toml")
    changed = configs.differences(before, settings, ignore=CHANGEABLE)
    if changed:
        raise UsageError(
            f"{folder} began with another configuration: {'; '.join(changed)}. "
            "Give the old values to go on, or another --output for a new training"
        )


def shared_vocabulary(
    settings: configs.Config, folder: Path, utterances: Utterances, here: Ranks, *, resumed: bool
) -> Vocabulary:
    """The run's tokenizer; the first rank makes it, all read the same file.

    A run that has no checkpoint makes it anew: the one in its folder may be of a start that failed.
    """
    path = folder / models.TOKENIZER
    if here.first and not (resumed and path.is_file()):
        vocabulary = vocabulary_for(settings, utterances)
        with atomic_files.replacing(path) as temporary:
            vocabulary.save(temporary)
    here.wait()
    return Vocabulary.load(path)


def start_from(folder: str, model: Imputer, vocabulary: Vocabulary) -> None:
    """Take over the weights of a trained model, usually the CTC expert's, whose tokenizer must be the same."""
    found = Vocabulary.load(Path(folder) / models.TOKENIZER)
    if found.fingerprint != vocabulary.fingerprint:
        raise UsageError(
            f"training.start_from = {folder} has another tokenizer (fingerprint {found.fingerprint}) than this run "
            f"({vocabulary.fingerprint}); set vocabulary.tokenizer to {folder}/{models.TOKENIZER}"
        )
    models.load_weights(model, Path(folder) / models.WEIGHTS)


def expert_for(
    settings: configs.Config, model: Imputer, vocabulary: Vocabulary, utterances: Utterances
) -> tuple[Callable[[str], list[int]] | None, frozenset[str]]:
    """The expert's stored alignments, checked against tokenizer and corpus, and which lack one; None for CTC.

    A few may lack one: with repeats merged, for instance, not every text fits into its frames.
    """
    if settings.training.objective == "ctc":
        return None, frozenset()
    store = rollin.AlignmentStore(settings.rollin.alignments)
    store.check(rollin.Provenance(vocabulary.fingerprint, model.merge_repeats, model.front_end.frame_seconds))
    missing = [u.id for u in utterances if u.id not in store]
    unaligned = frozenset(missing)
    if len(missing) > MOST_UNALIGNED * len(utterances):
        raise UsageError(
            f"{store.path} has no alignment for {len(missing)} of {len(utterances)} utterances, first {missing[0]}; "
            "align this corpus, or drop them from the manifest"
        )
    for utterance in (utterances[0], utterances[len(utterances) // 2], utterances[len(utterances) - 1]):
        if utterance.id in unaligned:
            continue
        target = vocabulary.encode(utterance.text)
        rollin.check_collapses(store(utterance.id), target, utterance.id, merge_repeats=model.merge_repeats)
    return store, unaligned


def optimiser(model: Imputer, settings: configs.Training) -> torch.optim.Optimizer:
    """AdamW; weight decay on matrices only."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.98), fused=True)


def loop(run: Run, stop_asked: Callable[[], bool]) -> bool:
    """Steps until the last or until asked to stop; True if all are done."""
    training, here = run.settings.training, run.ranks
    stream = run.stream.batches(run.progress.epoch, run.progress.position)
    share = training.batches_per_step // here.count
    started, audio_before = time.monotonic(), run.progress.seconds_of_audio
    bar = progress.bar("training", training.steps, before=run.progress.step)
    with bar if here.first else contextlib.nullcontext(_quiet) as advance:
        while run.progress.step < training.steps:
            refresh = run.settings.rollin.refresh_every
            if refresh and run.progress.step and run.progress.step % refresh == 0:
                run.objective.expert = stale_copy(run)
            figures = take_step(run, [next(stream) for _ in range(share)])
            step = run.progress.step
            if figures and due(step, training.log_every, training.steps):
                speed = (run.progress.seconds_of_audio - audio_before) / (time.monotonic() - started)
                figures |= {"audio_seconds_per_second": round(speed, 1)}
                run.log({"step": step, "epoch": run.progress.epoch, **figures})
                advance(
                    0,
                    f"loss {figures['loss']:.3f}, lr {figures['learning_rate']:.1e}, {speed:.0f}x real time",
                )
            advance(1)
            if step % TRIM_EVERY == 0:
                give_back_memory()
            if run.valid and due(step, training.validate_every, training.steps):
                with averaged_weights(run):
                    run.log({"step": step, "valid": validate(run)})
            stopping = bool(run.ranks.total([float(stop_asked())])[0])
            if stopping or due(step, training.checkpoint_every, training.steps):
                save_checkpoint(run)
            if stopping and step < training.steps:
                return False
    return True


def due(step: int, every: int, last: int) -> bool:
    """Whether now is the time for what is done every so many steps and after the last; 0 = only after the last."""
    return step == last or (every > 0 and step % every == 0)


def take_step(run: Run, share: list[tuple[int, int, batching.Batch]]) -> dict[str, float] | None:
    """One optimiser step over this rank's share of batches; None if the loss was no number and it was skipped."""
    training, here, now = run.settings.training, run.ranks, run.progress
    loaded = [here.moved(batch) for _, _, batch in share]
    tokens = here.total([sum(float(batch.target_lengths.sum()) for batch in loaded)])[0]
    rate = learning_rate(training, now.step)
    for group in run.optimizer.param_groups:
        group["lr"] = rate
    run.trained.train()
    loss_sum, unusable = 0.0, 0
    for j, batch in enumerate(loaded):
        seed_for_batch(training.seed, now.step, j * here.count + here.rank)
        more = here.count > 1 and j < len(loaded) - 1
        with run.trained.no_sync() if more else contextlib.nullcontext():  # type: ignore[operator]
            loss, left_out = run.trained(batch, now.step)
            # Ranks average their gradients; the loss is a sum over all of them.
            (loss * (here.count / max(1.0, tokens))).backward()
        loss_sum, unusable = loss_sum + float(loss.detach()), unusable + left_out
    norm = float(nn.utils.clip_grad_norm_(run.model.parameters(), training.clip))
    seconds, dropped = sum(b.seconds for b in loaded), unusable + sum(len(b.dropped) for b in loaded)
    loss_sum, seconds, dropped_all = here.total([loss_sum, seconds, dropped])
    finite = math.isfinite(loss_sum) and math.isfinite(norm)
    if finite:
        run.optimizer.step()
        update_average(run)
    run.optimizer.zero_grad(set_to_none=True)
    now.step, now.epoch = now.step + 1, share[-1][0]
    now.position = share[-1][1] + here.count - here.rank  # the batch after the last rank's last
    now.seconds_of_audio += seconds
    now.dropped += int(dropped_all)
    if not finite:
        skip(run, [name for batch in loaded for name in batch.ids], loss_sum, norm)
        return None
    return {
        "loss": loss_sum / max(1.0, tokens),  # nats per token
        "learning_rate": rate,
        "gradient_norm": norm,
        "dropped": now.dropped,
        "skipped": len(now.skipped),
    }


def skip(run: Run, ids: list[str], loss: float, norm: float) -> None:
    """Count a step whose loss or gradient was no number; give up, naming the utterances, after too many."""
    run.progress.skipped.append(ids)
    run.log({"step": run.progress.step, "skipped": ids, "loss": str(loss), "gradient_norm": str(norm)})
    if len(run.progress.skipped) > run.settings.training.nonfinite_limit:
        save_checkpoint(run)
        names = ", ".join(name for group in run.progress.skipped[-3:] for name in group[:4])
        raise ImputerError(
            f"the loss was no finite number in {len(run.progress.skipped)} steps, more than "
            f"training.nonfinite_limit = {run.settings.training.nonfinite_limit}; last with utterances {names}; "
            "lower training.learning_rate, or look at those recordings"
        )


def seed_for_batch(*key: int) -> None:
    """Dropout of a batch depends on (seed, step, batch) alone."""
    torch.manual_seed(rollin.generator_for("dropout", *key).initial_seed())


def update_average(run: Run) -> None:
    """Move the averaged weights towards the current ones; faster at first, when there is little to average."""
    if run.average:
        decay = min(run.settings.training.average, (1 + run.progress.step) / (10 + run.progress.step))
        current = [p.detach() for _, p in run.model.named_parameters()]
        torch._foreach_lerp_(list(run.average.values()), current, 1 - decay)


@contextlib.contextmanager
def averaged_weights(run: Run) -> Iterator[None]:
    """The model with its averaged weights, while inside."""
    if not run.average:
        yield
        return
    kept = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    _copy_into(run.model, run.average)
    try:
        yield
    finally:
        _copy_into(run.model, kept)


def _copy_into(model: nn.Module, weights: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])


def validate(run: Run) -> dict[str, Any]:
    """Error rates on the validation set, greedy and (for an Imputer) in as many passes as the block size."""
    from imputer import decoding
    from imputer.evaluation import scoring

    assert run.valid is not None
    settings, model = run.settings, run.model
    result: dict[str, float] = {}
    if run.ranks.first:
        model.eval()
        passes = [1] if settings.training.objective == "ctc" else [1, settings.rollin.block_size]
        said: dict[int, list[tuple[str, str]]] = {b: [] for b in passes}
        for acoustic, frame_lengths, batch in encoded(run, run.valid, settings.data.valid_utterances):
            for block_size in passes:
                found = decoding.impute(
                    lambda partial, a=acoustic, n=frame_lengths: model.impute(a, n, partial),  # type: ignore[misc]
                    frame_lengths,
                    block_size=block_size,
                    strategy="block",
                    mask=model.mask,
                )
                for text, row, n in zip(
                    batch.texts, found.alignment.tolist(), frame_lengths.tolist(), strict=True
                ):
                    tokens = alignments.collapse(row[:n], merge_repeats=model.merge_repeats)
                    said[block_size].append((text, run.vocabulary.decode(tokens)))
        for block_size, pairs in said.items():
            words = scoring.total([scoring.word_errors(reference, heard) for reference, heard in pairs])
            characters = scoring.total(
                [scoring.character_errors(reference, heard) for reference, heard in pairs]
            )
            result |= {f"wer_{block_size}": words.rate, f"cer_{block_size}": characters.rate}
        shown = ", ".join(f"{name} {100 * value:.1f} %" for name, value in result.items())
        print(f"step {run.progress.step}: {shown}", file=sys.stderr, flush=True)
    run.ranks.wait()
    return result


def encoded(
    run: Run, utterances: Sequence[Utterance], at_most: int
) -> Iterator[tuple[Tensor, Tensor, batching.Batch]]:
    """Acoustic frames of (at most so many) utterances, without augmentation or gradients."""
    every = -(-len(utterances) // at_most)  # spread over all speakers
    chosen = [utterances[i] for i in range(0, len(utterances), every)]
    extract = run.model.front_end.reader(run.settings.data, NO_AUGMENTATION, chosen)
    dataset = batching.SpeechDataset(chosen, run.vocabulary, extract)
    lengths = [run.model.front_end.feature_frames(utterance.duration) for utterance in chosen]
    plan = batching.plan_epoch(lengths, frame_budget=run.stream.frame_budget, seed=0, epoch=0)
    for batch in batching.batches(dataset, plan):
        if batch.ids:
            batch = run.ranks.moved(batch)
            with torch.no_grad():
                yield *run.model.encode(batch.features, batch.feature_lengths), batch


def stale_copy(run: Run) -> rollin.AlignmentStore:
    """Alignments from the model as it is now, by forced imputation (q_theta'), kept in the run folder."""
    path = stale_path(run.folder, run.progress.step)
    run.model.eval()

    def align(log_probs_of: Callable[[Tensor], Tensor], targets: Tensor, n: Tensor, m: Tensor) -> Tensor:
        return rollin.forced_imputation(
            log_probs_of,
            targets,
            n,
            m,
            block_size=run.settings.rollin.block_size,
            mask=run.model.mask,
            merge_repeats=run.model.merge_repeats,
        )

    align_corpus(
        path, run.model, run.vocabulary, run.stream.utterances, run.plain_extract, run.ranks, how=align
    )
    return rollin.AlignmentStore(path)


def stale_path(folder: Path, step: int) -> Path:
    """Where the alignments of the stale copy taken at ``step`` are kept."""
    return folder / "stale" / f"step-{step:08d}.safetensors"


# --- what stays on disk


def save_checkpoint(run: Run) -> None:
    """The first rank writes; the others wait."""
    if run.ranks.first:
        tensors = checkpoints.pack(run.model, run.optimizer, run.average)
        checkpoints.save(
            run.folder / "checkpoints", run.progress, tensors, run.settings.training.keep_checkpoints
        )
    run.ranks.wait()


def save_model(run: Run) -> None:
    """The model folder, with averaged weights if there are any."""
    with averaged_weights(run):
        models.save(run.folder / "model", run.model, run.vocabulary)


def metrics_log(folder: Path, here: Ranks, *, tensorboard: bool) -> Callable[[dict[str, Any]], None]:
    """A function that appends to metrics.jsonl (and TensorBoard); silent on all ranks but the first."""
    if not here.first:
        return _quiet
    folder.mkdir(parents=True, exist_ok=True)
    writer = _summary_writer(folder) if tensorboard else None

    def log(line: dict[str, Any]) -> None:
        with open(folder / "metrics.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")
        if writer:
            for name, value in {**line, **line.get("valid", {})}.items():
                if isinstance(value, int | float) and name != "step":
                    writer.add_scalar(name, value, line["step"])
            writer.flush()

    return log


def _summary_writer(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UsageError("training.tensorboard needs: pip install 'imputer-asr[tensorboard]'") from error
    return SummaryWriter(str(folder / "tensorboard"))


def forget_metrics_after(folder: Path, step: int, here: Ranks) -> None:
    """What was logged after the checkpoint will be logged again."""
    path = folder / "metrics.jsonl"
    if not here.first or not path.is_file():
        return
    kept = []
    for line in path.read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):  # the last line may be torn
            if json.loads(line)["step"] <= step:
                kept.append(line)
    with atomic_files.replacing(path) as temporary:
        temporary.write_text("".join(f"{line}\n" for line in kept))


def _quiet(*_: Any, **__: Any) -> None:
    """Advance or log nothing."""


def give_back_memory() -> None:
    """Return freed memory to the system; batches of ever different shapes leave the C library's heap full of holes."""
    with contextlib.suppress(OSError, AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)


@contextlib.contextmanager
def _only_run_in(folder: Path, here: Ranks) -> Iterator[None]:
    """Two trainings in one folder would spoil each other."""
    if not here.first:
        yield
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / ".lock", "w")  # noqa: SIM115 - held open for the whole run
    except OSError as error:
        raise UsageError(f"cannot write to the run folder {folder}: {error.strerror}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(f"another process is training in {folder}") from error
        yield


@contextlib.contextmanager
def _stop_signal() -> Iterator[Callable[[], bool]]:
    """A function that says whether SIGTERM or Ctrl-C has come; a second Ctrl-C interrupts at once."""
    asked = False

    def ask(number: int, frame: Any) -> None:
        nonlocal asked
        if asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked = True

    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
