"""A training before its first step: data read, model built, checkpoint loaded."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from imputer import configs, features, models, rollin
from imputer.configs import NO_AUGMENTATION
from imputer.data.manifest import Utterance, Utterances, open_utterances
from imputer.data.ranks import Ranks
from imputer.errors import ImputerError, UsageError
from imputer.masking import POLICIES
from imputer.model import Imputer
from imputer.support import atomic_files, progress
from imputer.training import checkpoints
from imputer.training.batch_loss import OBJECTIVES, BatchLoss
from imputer.training.optimizers import OPTIMIZERS, SCHEDULES
from imputer.training.run import Run
from imputer.training.run_folder import forget_metrics_after, metrics_log, refuse_changes
from imputer.training.stale_copy import stale_path
from imputer.training.stream import OnlyAligned, Stream
from imputer.vocabulary import Vocabulary

MOST_UNALIGNED = 0.01  # of the utterances; more, and the alignments are of another corpus


def prepare(settings: configs.Config, folder: Path, here: Ranks) -> Run:
    """Read the data, build the model, and load the last checkpoint if there is one."""
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
    objective = BatchLoss(model, settings, expert)
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
        OPTIMIZERS[settings.training.optimizer](model, settings.training),
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
    """Check what the types and ranges of the configuration cannot express."""
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
    for key, value, known in (
        ("rollin.masking", settings.rollin.masking, POLICIES),
        ("rollin.noise", settings.rollin.noise, rollin.NOISES),
        ("training.objective", training.objective, OBJECTIVES),
        ("training.schedule", training.schedule, SCHEDULES),
        ("training.optimizer", training.optimizer, OPTIMIZERS),
    ):
        if value not in known:
            raise UsageError(f"{key} = {value!r}, but there are {', '.join(known)}")


def check_augmentation(settings: configs.Config, front_end: Any) -> None:
    """Refuse augmentation of sound where features are computed before training."""
    if settings.augmentation.of_sound and not front_end.augments_sound:
        raise UsageError(
            f"the frames of front_end.name = {settings.front_end.name} are computed before training, so "
            f"augmentation.{settings.augmentation.of_sound[0]} has no effect: make altered copies of the audio "
            "(`imputer prepare altered M.jsonl --output M2.jsonl`), or use augmentation.spec_augment"
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


def start_from(folder: str, model: Imputer, vocabulary: Vocabulary) -> None:
    """Take over the weights of a trained model, usually the CTC expert's, whose tokenizer must be the same."""
    found = Vocabulary.load(Path(folder) / models.TOKENIZER)
    if found.fingerprint != vocabulary.fingerprint:
        raise UsageError(
            f"training.start_from = {folder} has another tokenizer (fingerprint {found.fingerprint}) than this run "
            f"({vocabulary.fingerprint}); set vocabulary.tokenizer to {folder}/{models.TOKENIZER}"
        )
    models.load_weights(model, Path(folder) / models.WEIGHTS)


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
