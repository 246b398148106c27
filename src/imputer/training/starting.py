"""A training before its first step: data read, model built, checkpoint loaded."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from imputer import configs, features, models, rollin
from imputer.configs import NO_AUGMENTATION
from imputer.data.drops import Dropped, Tally
from imputer.data.fingerprints import Fingerprints
from imputer.data.manifest import Utterance, Utterances, open_utterances
from imputer.data.ranks import Ranks
from imputer.errors import ImputerError, UsageError, count
from imputer.frontends import FRONT_ENDS
from imputer.masking import POLICIES
from imputer.model import Imputer
from imputer.support import atomic_files, checksums, progress
from imputer.training import checkpoints
from imputer.training.batch_loss import BatchLoss
from imputer.training.data_checks import (
    DATA,
    bad_lines,
    refuse_changed_data,
    refuse_other_alignments,
    refuse_unusable,
    survey,
)
from imputer.training.optimizers import OPTIMIZERS, PRETRAINED, SCHEDULES
from imputer.training.run import Run
from imputer.training.run_folder import (
    BEST,
    CHECKPOINTS,
    START,
    forget_metrics_after,
    metrics_log,
    refuse_changes,
    remove_leftovers,
)
from imputer.training.stale_copy import stale_path
from imputer.training.stream import Stream
from imputer.training.text_only import Text
from imputer.vocabulary import Vocabulary

OWN = "own"  # rollin.alignments: no expert
LEAST_HOURS = 1.0  # of speech, to train from scratch

# The keys of a configuration that take a name from a registry.
CHOICES: dict[str, Mapping[str, Any]] = {
    "front_end.name": FRONT_ENDS,
    "rollin.masking": POLICIES,
    "rollin.noise": rollin.NOISES,
    "training.schedule": SCHEDULES,
    "training.optimizer": OPTIMIZERS,
}


def prepare(settings: configs.Config, folder: Path, here: Ranks, *, accept_changed_data: bool = False) -> Run:
    """Read the data, build the model, and load the last checkpoint if there is one."""
    check(settings, here)
    resumed = checkpoints.newest_intact(folder / CHECKPOINTS, here)
    if resumed:
        refuse_changes(folder, settings)
        checkpoints.refuse_impossible(resumed, settings.training.batches_per_step)
    utterances = open_utterances(settings.data.train, "data.train", strict=settings.data.strict)
    valid = open_utterances(settings.data.valid, "data.valid", strict=False) if settings.data.valid else None
    fingerprints = Fingerprints.of(utterances)
    if resumed:
        refuse_changed_data(folder, fingerprints, here, accept=accept_changed_data)
    vocabulary = shared_vocabulary(settings, folder, utterances, here, resumed=bool(resumed))
    torch.manual_seed(settings.training.seed)
    try:
        model = Imputer(settings.model, settings.front_end, vocabulary.size)
    except (RuntimeError, MemoryError, OverflowError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"the network of this configuration cannot be built: {reason}") from error
    if not resumed and hasattr(model.front_end, "start_pretrained") and not brings_encoder(settings):
        model.front_end.start_pretrained()
    if not resumed and settings.training.start_from:
        start_from(settings.training.start_from, model, vocabulary)
    if not settings.training.pretrained_rate and hasattr(model.front_end, "freeze"):
        if resumed:  # frames are cached before the other weights are read
            checkpoints.restore(resumed, model, PRETRAINED)
        model.front_end.freeze(bf16=settings.training.bf16)
    check_augmentation(settings, model.front_end)
    excluded = usable_data(settings, model.front_end, vocabulary, utterances, valid, here)
    plain_extract = model.front_end.reader(settings.data, NO_AUGMENTATION, utterances)
    fresh = not resumed and not settings.training.start_from
    if fresh and getattr(model.front_end, "needs_statistics", False):
        statistics = feature_statistics(utterances, plain_extract, seed=settings.training.seed)
        model.front_end.normalisation.fit(*statistics)
    model.to(here.device)
    expert = None
    if settings.training.objective != "ctc" and settings.rollin.alignments != OWN:
        expert = expert_for(settings, model, vocabulary)
        excluded |= refuse_other_alignments(
            expert,
            utterances,
            vocabulary,
            here,
            merge_repeats=model.merge_repeats,
            accept=accept_changed_data,
        )
    report_data(utterances, excluded, here)
    text = text_of(settings, vocabulary, here)
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
        model.front_end.reader(settings.data, settings.augmentation, utterances),
        [model.front_end.feature_frames(seconds * longest) for seconds in utterances.durations()],
        model.front_end.feature_frames(settings.data.batch_seconds),
        settings.training.seed,
        settings.data.workers,
        settings.data.strict,
        here,
        excluded,
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
        text,
        valid,
        checkpoints.Progress(),
        metrics_log(folder, here, tensorboard=settings.training.tensorboard),
    )
    if resumed:
        run.progress = resumed.progress
        refuse_lost_best(run)
        checkpoints.unpack(resumed, model, run.optimizer, average)
        objective.expert = expert_at(folder, run.progress.step, settings.rollin.refresh_every) or expert
    if here.first:
        tidy(run, fingerprints)
    here.wait()
    if settings.training.stay_near:
        run.start = {name: t.to(here.device) for name, t in read_start(folder / START).items()}
    return run


def tidy(run: Run, fingerprints: Fingerprints) -> None:
    """Bring the run folder to the state of the step it starts or resumes at."""
    if not run.progress.step:
        with atomic_files.replacing(run.folder / "config.toml") as path:
            sections = {name: getattr(run.settings, name) for name in vars(run.settings)}
            path.write_text(configs.to_toml(sections))
        if run.settings.training.stay_near:
            save_start(run.folder / START, run.model)
    fingerprints.save(run.folder / DATA)
    steps = [
        int(path.stem.removeprefix("step-")) for path in (run.folder / CHECKPOINTS).glob(checkpoints.PATTERN)
    ]
    refresh = run.settings.rollin.refresh_every or 1
    remove_leftovers(run.folder, min(steps, default=0) // refresh * refresh, run.progress.step)
    forget_metrics_after(run.folder, run.progress.step or -1)  # a new run validates at step 0 again


def refuse_lost_best(run: Run) -> None:
    """The model of the best validation is kept outside the checkpoints."""
    if not (run.settings.training.keep_best and run.progress.best_loss >= 0):
        return
    for name in (models.WEIGHTS, models.TOKENIZER, models.CONFIG):
        path = run.folder / BEST / name
        if not path.is_file():
            raise UsageError(
                f"{path} is missing: the model of the best validation, at step {run.progress.best_step}. Restore it, "
                f"or remove the checkpoints after step {max(0, run.progress.best_step - 1)} to make it again"
            )


def save_start(path: Path, model: Imputer) -> None:
    """Keep the weights to stay near, with a checksum."""
    from safetensors.torch import save_file

    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in model.named_parameters()}
    with atomic_files.replacing(path) as temporary:
        save_file(weights, temporary, metadata={checksums.KEY: checksums.EMPTY})
        checksums.stamp(temporary)


def read_start(path: Path) -> dict[str, Tensor]:
    """The weights to stay near, which must be those that were kept."""
    try:
        checksums.check(path)
        return models.read_weights(path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(
            f"cannot use {path}, the weights of step 0 that training.stay_near needs ({reason}); restore it, or "
            "start again in another folder"
        ) from error


def usable_data(
    settings: configs.Config,
    front_end: Any,
    vocabulary: Vocabulary,
    utterances: Utterances,
    valid: Utterances | None,
    here: Ranks,
) -> dict[str, Dropped]:
    """By id, the training utterances that cannot be used; too many, here or in the validation set, are refused."""
    reads_files = getattr(front_end, "reads_files", True)
    if valid is not None:
        missing = survey(valid, vocabulary, reads_files=reads_files)
        refuse_unusable("data.valid", settings.data, valid, missing)
        if missing or bad_lines(valid):
            here.say(f"validation: dropped {Tally().add([*missing.values(), *bad_lines(valid)])}")
    found = survey(utterances, vocabulary, reads_files=reads_files)
    refuse_unusable("data.train", settings.data, utterances, found)
    return found


def report_data(utterances: Utterances, excluded: dict[str, Dropped], here: Ranks) -> None:
    """Say what the training set holds and what of it is left out."""
    hours = sum(u.duration for u in utterances if u.id not in excluded) / 3600
    dropped = Tally().add([*excluded.values(), *bad_lines(utterances)])
    here.say(
        f"training on {count(len(utterances) - len(excluded), 'utterance')}, {hours:.2f} h; dropped: "
        f"{dropped if dropped.counts else 'none'}"
    )


def text_of(settings: configs.Config, vocabulary: Vocabulary, here: Ranks) -> Text | None:
    """The text to train on without sound, if any; says how much of it is used."""
    if not settings.training.text_share:
        return None
    text = Text(settings.data.text, vocabulary)
    left_out = f"; {count(text.left_out, 'line')} left out, not in the form of the transcripts"
    here.say(f"and on {count(text.lines - text.left_out, 'line')} of text{left_out if text.left_out else ''}")
    return text


def expert_at(folder: Path, step: int, refresh_every: int) -> rollin.AlignmentStore | None:
    """The alignments of the last stale copy before ``step``; None if the stored expert is still in use.

    At a multiple of ``refresh_every`` the loop makes them anew, so they may be missing there.
    """
    if not refresh_every or step < refresh_every or step % refresh_every == 0:
        return None
    taken = step // refresh_every * refresh_every
    path = stale_path(folder, taken)
    if not path.is_file():
        raise UsageError(
            f"{path} is missing: the alignments by the stale copy of step {taken}, which step {step} needs. Restore "
            f"it, or remove the checkpoints after step {taken} to make it again"
        )
    return rollin.AlignmentStore(path)


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
            f"`imputer align --manifest M --model EXPERT --store F`, or set it to {OWN}"
        )
    if training.text_share and (training.objective == "ctc" or not settings.data.text):
        imputer = "an Imputer, training.objective = dynamic_programming: CTC reads no tokens"
        lacking = imputer if settings.data.text else "data.text: files to take it from"
        raise UsageError(f"training.text_share needs {lacking}")
    if training.stay_near and not training.start_from:
        raise UsageError("training.stay_near needs training.start_from: the weights to stay near")
    for name, known in CHOICES.items():
        section, _, key = name.partition(".")
        value = getattr(getattr(settings, section), key)
        if value not in known:
            raise UsageError(f"{name} = {value!r}, but there are {', '.join(known)}")


def warnings(settings: configs.Config) -> list[str]:
    """What is likely to fail although nothing is wrong: one sentence each."""
    if settings.training.start_from or not settings.data.train:
        return []
    hours = sum(open_utterances(settings.data.train, "data.train", strict=False).durations()) / 3600
    if hours >= LEAST_HOURS:
        return []
    training = settings.training
    epochs = training.steps * training.batches_per_step * settings.data.batch_seconds / max(1.0, 3600 * hours)
    return [
        f"{hours:.2f} h of speech is too little to train from scratch ({training.steps} steps read it {epochs:.1f} "
        "times, and a model memorises them instead of learning to recognise others). Fine-tune a model instead: "
        "imputer finetune english RECORDINGS -o my-model"
    ]


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
        return models.read_vocabulary(models.torch_folder(settings.training.start_from))
    texts = [utterance.text for utterance in utterances]
    for path in settings.vocabulary.extra_text:
        try:
            texts += Path(path).read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise UsageError(f"vocabulary.extra_text: cannot read {path}: {error.strerror}") from error
    return Vocabulary.train(texts, size=settings.vocabulary.size, units=settings.vocabulary.units)


def brings_encoder(settings: configs.Config) -> bool:
    """Whether the model to start from has the weights of the encoder, so that nothing else need be installed."""
    if not settings.training.start_from:
        return False
    _, front_end = models.read_settings(models.torch_folder(settings.training.start_from))
    return front_end.name == settings.front_end.name


def start_from(name: str, model: Imputer, vocabulary: Vocabulary) -> None:
    """Copy the weights of a model (a folder or a shipped name).

    Layers that it does not have start as the identity; an encoder that was frozen there keeps the weights it has here.
    With another tokenizer, a piece starts as the mean of the pieces that spell it there.
    """
    folder = models.torch_folder(name)
    weights = models.read_weights(folder / models.WEIGHTS)
    settings, front_end = models.read_settings(folder)
    first_new = settings.layers
    for layer in model.layers[first_new:]:
        layer.pass_through()  # type: ignore[operator]
    new = tuple(f"layers.{number}." for number in range(first_new, model.settings.layers))
    if front_end.name != model.front_end_settings.name:
        new += (PRETRAINED,)
    own = {name: tensor for name, tensor in model.state_dict().items() if name.startswith(new)}
    found = models.read_vocabulary(folder)
    if found.fingerprint != vocabulary.fingerprint:
        weights |= respelled(weights, model, found, vocabulary)
    models.copy_weights(model, own | weights, folder)


def respelled(
    weights: dict[str, Tensor], model: Imputer, theirs: Vocabulary, ours: Vocabulary
) -> dict[str, Tensor]:
    """The rows of their pieces in the embedding and the output, as rows of ours; blank and mask stay."""
    spelling = [theirs.spell(piece) for piece in ours.pieces(range(1, ours.size + 1))]
    made = {}
    for name in (name for name in weights if name.startswith(("embedding.", "output."))):
        old, rows = weights[name], model.state_dict()[name].clone()
        rows[0] = old[0]
        if name.startswith("embedding."):
            rows[ours.mask] = old[theirs.mask]
        for token, tokens in enumerate(spelling, 1):
            if tokens:
                rows[token] = old[tokens].float().mean(0)
        made[name] = rows
    return made


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


def expert_for(settings: configs.Config, model: Imputer, vocabulary: Vocabulary) -> rollin.AlignmentStore:
    """The expert's stored alignments, which must be those of this tokenizer, topology and frame rate."""
    store = rollin.AlignmentStore(settings.rollin.alignments)
    store.check(rollin.Provenance(vocabulary.fingerprint, model.merge_repeats, model.front_end.frame_seconds))
    return store
