"""The data of a training: an endless stream of batches that can start anywhere."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from imputer.data import batching
from imputer.data.manifest import Utterance, Utterances
from imputer.data.ranks import Ranks
from imputer.errors import ImputerError
from imputer.vocabulary import Vocabulary


@dataclass
class Stream:
    """The endless sequence of this rank's batches, from any position on."""

    utterances: Utterances
    vocabulary: Vocabulary
    extract: batching.Extract
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


@dataclass(frozen=True)
class OnlyAligned:
    """Features of an utterance that has an alignment; the others are dropped and counted like unreadable ones."""

    extract: batching.Extract
    unaligned: frozenset[str]

    def __call__(self, utterance: Utterance, generator: torch.Generator) -> Tensor:
        if utterance.id in self.unaligned:
            raise ImputerError("the expert could not align it")
        return self.extract(utterance, generator)
