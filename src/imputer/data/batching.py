"""From a manifest to batches: planned by length, read and featurised in worker processes, the same for a seed.

    plan = shard(plan_epoch(lengths, frame_budget=30_000, seed=0, epoch=3), rank, world_size)
    for batch in batches(dataset, plan[done:], workers=2): ...

The plan is a plain list of lists of manifest indices, so an epoch is resumed in its middle by cutting the plan.
What is drawn for an utterance depends on (seed, epoch, index) alone: not on workers, batches or resumption.
"""

import contextlib
import ctypes
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from imputer import audio
from imputer.audio.augmentation import augment_features, augment_waveform
from imputer.configs import NO_AUGMENTATION, Augmentation
from imputer.data import drops
from imputer.data.drops import Dropped
from imputer.data.manifest import Utterance
from imputer.errors import ImputerError
from imputer.features import filterbanks
from imputer.vocabulary import Vocabulary

Plan = list[list[int]]
Extract = Callable[[Utterance, torch.Generator], Tensor]

# Lengths are shaken by this share before sorting: batches differ between epochs, padding hardly grows.
LENGTH_SHAKE = 0.05


def plan_epoch(lengths: Sequence[float] | np.ndarray, *, frame_budget: float, seed: int, epoch: int) -> Plan:
    """Micro-batches of indices of about one length, shuffled: (longest x how many) <= ``frame_budget``.

    ``lengths`` and ``frame_budget`` count in one unit. Every index occurs once; one that is longer than the
    budget makes a batch of its own.
    """
    if not frame_budget > 0:
        raise ValueError(f"frame_budget must be more than 0, got {frame_budget}")
    sizes = np.asarray(lengths, dtype=np.float64)
    random = np.random.default_rng([seed, epoch])
    shaken = sizes * random.uniform(1 - LENGTH_SHAKE, 1 + LENGTH_SHAKE, len(sizes))
    plan: Plan = []
    batch: list[int] = []
    longest = 0.0
    order = np.argsort(shaken, kind="stable")
    for index, size in zip(order.tolist(), sizes[order].tolist(), strict=True):
        longest = max(longest, size)
        if batch and longest * (len(batch) + 1) > frame_budget:
            plan.append(batch)
            batch, longest = [], size
        batch.append(index)
    if batch:
        plan.append(batch)
    return [plan[i] for i in random.permutation(len(plan))]


def shard(plan: Plan, rank: int, world_size: int) -> Plan:
    """The part of a plan for one of ``world_size`` processes: no overlap, no loss, equal numbers of batches.

    Where the batches do not divide evenly the largest are halved. Only if all hold a single utterance do
    some ranks get one batch less.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must lie in 0..{world_size - 1}, got {rank}")
    plan = list(plan)
    for _ in range(-len(plan) % world_size):
        largest = max(range(len(plan)), key=lambda i: len(plan[i]), default=0)
        if not plan or len(plan[largest]) < 2:
            break
        half = len(plan[largest]) // 2
        plan.append(plan[largest][half:])
        plan[largest] = plan[largest][:half]
    return plan[rank::world_size]


@dataclass(frozen=True)
class FilterbankExtract:
    """Utterance -> (frame, 240): read, augment the audio, take filter banks, augment them.

    ``features`` may be another picklable function of (waveform, sample_rate), for another front end.
    """

    sample_rate: int = audio.SAMPLE_RATE
    augmentation: Augmentation = NO_AUGMENTATION
    features: Callable[[Tensor, int], Tensor] = filterbanks

    def __call__(self, utterance: Utterance, generator: torch.Generator) -> Tensor:
        waveform = torch.from_numpy(read_utterance(utterance, self.sample_rate))
        waveform = augment_waveform(waveform, self.sample_rate, self.augmentation, generator)
        return augment_features(self.features(waveform, self.sample_rate), self.augmentation, generator)


def read_utterance(utterance: Utterance, sample_rate: int = audio.SAMPLE_RATE) -> np.ndarray:
    """(samples,) of an utterance: its slice if it is one, else its whole file."""
    # An utterance from the start of a file may still be a slice of it, so the length counts as well.
    return audio.read(
        utterance.audio_filepath,
        sample_rate=sample_rate,
        offset=utterance.offset,
        duration=utterance.duration,
    )


@dataclass
class Batch:
    ids: list[str]
    indices: list[int]  # places in the manifest
    features: Tensor  # (batch, frame, feature) float32, zero padded
    feature_lengths: Tensor  # (batch,)
    targets: Tensor  # (batch, target) padded with 0
    target_lengths: Tensor  # (batch,)
    texts: list[str]
    seconds: float  # of audio
    dropped: dict[str, Dropped]  # by id: the utterances that could not be used

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class _Item:
    utterance: Utterance
    index: int
    features: Tensor  # (frame, feature)
    target: list[int]


@dataclass(frozen=True)
class _Failed:
    id: str
    dropped: Dropped


class SpeechDataset(torch.utils.data.Dataset):
    """Utterances as features and targets. With ``vocabulary=None`` there are no targets (to transcribe).

    ``excluded`` holds, by id, utterances that are known to be unusable; they are dropped without being read.
    """

    def __init__(
        self,
        manifest: Sequence[Utterance],
        vocabulary: Vocabulary | None,
        extract: Extract,
        *,
        seed: int = 0,
        epoch: int = 0,
        strict: bool = False,
        excluded: Mapping[str, Dropped] | None = None,
    ) -> None:
        self.manifest, self.vocabulary, self.extract = manifest, vocabulary, extract
        self.seed, self.epoch, self.strict = seed, epoch, strict
        self.excluded = excluded or {}

    def __len__(self) -> int:
        return len(self.manifest)

    def __getitem__(self, index: int) -> _Item | _Failed:
        utterance = self.manifest[index]
        if utterance.id in self.excluded:
            return _Failed(utterance.id, self.excluded[utterance.id])
        reason = drops.UNKNOWN_TEXT
        try:
            target = self.vocabulary.encode(utterance.text) if self.vocabulary is not None else []
            reason = drops.UNREADABLE
            features = self.extract(utterance, generator_for(self.seed, self.epoch, index))
        except ImputerError as error:
            return _Failed(utterance.id, Dropped(reason, f"utterance {utterance.id!r}: {error}"))
        return _Item(utterance, index, features, target)


def generator_for(seed: int, epoch: int, index: int) -> torch.Generator:
    """Randomness that belongs to one utterance in one epoch."""
    state = np.random.SeedSequence([seed, epoch, index]).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(state >> np.uint64(1)))


def collate(items: Sequence[_Item | _Failed]) -> Batch:
    """Pad items into a batch; failed ones leave only their reason."""
    good = [item for item in items if isinstance(item, _Item)]
    lengths = [len(item.features) for item in good]
    widths = [len(item.target) for item in good]
    depth = good[0].features.shape[1] if good else 0
    features = torch.zeros(len(good), max(lengths, default=0), depth)
    targets = torch.zeros(len(good), max(widths, default=0), dtype=torch.long)
    for row, item in enumerate(good):
        features[row, : lengths[row]] = item.features
        targets[row, : widths[row]] = torch.tensor(item.target, dtype=torch.long)
    return Batch(
        ids=[item.utterance.id for item in good],
        indices=[item.index for item in good],
        features=features,
        feature_lengths=torch.tensor(lengths, dtype=torch.long),
        targets=targets,
        target_lengths=torch.tensor(widths, dtype=torch.long),
        texts=[item.utterance.text for item in good],
        seconds=sum(item.utterance.duration for item in good),
        dropped={item.id: item.dropped for item in items if isinstance(item, _Failed)},
    )


def batches(dataset: SpeechDataset, plan: Plan, *, workers: int = 0) -> Iterator[Batch]:
    """One batch for each entry of the plan, in its order; a batch can be empty if all of it was dropped.

    With ``dataset.strict`` the first utterance that cannot be used is raised instead.
    """
    loader = torch.utils.data.DataLoader(
        dataset,
        batch_sampler=plan,
        num_workers=workers,
        collate_fn=_packed if workers else collate,
        worker_init_fn=partial(_prepare_worker, parent=os.getpid()) if workers else None,
        prefetch_factor=2 if workers else None,
        # Its own, or starting workers would draw from the generator that training draws from.
        generator=torch.Generator().manual_seed(dataset.seed),
    )
    for batch in loader:
        if workers:
            batch = _unpacked(batch)
        if dataset.strict and batch.dropped:
            raise ImputerError(next(iter(batch.dropped.values())).item)
        yield batch


PR_SET_PDEATHSIG = 1
TENSORS = ("features", "feature_lengths", "targets", "target_lengths")


def _packed(items: Sequence[_Item | _Failed]) -> Batch:
    # As arrays a batch goes through a pipe. As tensors it would go through /dev/shm, which containers keep so
    # small that a worker dies of a bus error; the copy costs little beside reading the audio.
    batch = collate(items)
    for name in TENSORS:
        setattr(batch, name, getattr(batch, name).numpy())
    return batch


def _unpacked(batch: Batch) -> Batch:
    for name in TENSORS:
        setattr(batch, name, torch.from_numpy(getattr(batch, name)))
    return batch


def _prepare_worker(worker: int, parent: int) -> None:
    # Workers are the parallelism; threads inside them would only fight over the cores.
    torch.set_num_threads(1)
    # Ctrl-C, and many a scheduler, signal the whole group. That is the parent's to answer; its workers end with it.
    if hasattr(os, "setpgid"):  # on a Unix
        os.setpgid(0, 0)
    # A worker whose parent was killed would wait for ever to hand over its batch: Linux ends it with its parent.
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it had been killed before
        os._exit(1)
