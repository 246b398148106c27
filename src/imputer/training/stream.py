"""The data of a training: an endless stream of batches that can start anywhere."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from imputer.data import batching
from imputer.data.drops import Dropped
from imputer.data.manifest import Utterances
from imputer.data.ranks import Ranks
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
    excluded: dict[str, Dropped] = field(default_factory=dict)  # by id: known to be unusable

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
                excluded=self.excluded,
            )
            loaded = batching.batches(dataset, [plan[i] for i in mine], workers=self.workers)
            for index, batch in zip(mine, loaded, strict=True):
                yield epoch, index, batch
            epoch, position = epoch + 1, (mine[-1] + self.ranks.count if mine else position) - len(plan)
