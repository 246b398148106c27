"""A corpus aligned by an expert and stored for training."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from imputer import alignments, configs, models, rollin
from imputer.configs import NO_AUGMENTATION
from imputer.data import batching
from imputer.data.fingerprints import Fingerprints
from imputer.data.manifest import Manifest, Utterance, open_utterances
from imputer.data.ranks import Ranks, joined
from imputer.errors import ImputerError, UsageError, count
from imputer.model import Imputer
from imputer.support import atomic_files, progress
from imputer.vocabulary import Vocabulary

# (log_probs given a partial alignment, targets, frame_lengths, target_lengths) -> (batch, frame) ids
Aligner = Callable[[Callable[[Tensor], Tensor], Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Aligned:
    """What ``align_corpus`` did."""

    aligned: int
    utterances: int
    left_out: list[str]  # "id: reason"
    first_rank: bool  # of several processes, the one that reports


def align_corpus(
    path: Path,
    model: Imputer,
    vocabulary: Vocabulary,
    utterances: Sequence[Utterance],
    extract: Callable[[Utterance, torch.Generator], Tensor],
    here: Ranks,
    *,
    how: Aligner | None = None,
    batch_seconds: float = 120.0,
    workers: int = 0,
) -> Aligned:
    """Align a corpus and store it in one file; every rank aligns its share, the first joins them.

    ``how`` turns posteriors into alignments; by default the best alignment under the
    all-masked posteriors (eqn:argmax_alignment).
    """
    lengths = [model.front_end.feature_frames(u.duration) for u in utterances]
    budget = model.front_end.feature_frames(batch_seconds)
    plan = batching.plan_epoch(lengths, frame_budget=budget, seed=0, epoch=0)
    mine = batching.shard(plan, here.rank, here.count)
    part = path.with_name(f"{path.name}.part-{here.rank}")
    left_out: list[str] = []
    loaded = batching.batches(batching.SpeechDataset(utterances, vocabulary, extract), mine, workers=workers)
    shown = progress.track(loaded, "aligning", len(mine)) if here.first else loaded
    provenance = rollin.Provenance(vocabulary.fingerprint, model.merge_repeats, model.front_end.frame_seconds)
    rollin.write_alignments(part, _aligned(shown, model, how or _best(model), here, left_out), provenance)
    total = round(here.total([len(rollin.AlignmentStore(part))])[0])
    if not total:  # every rank raises it, so none waits for another
        part.unlink()
        because = f"; the first: {left_out[0]}" if left_out else ""
        raise ImputerError(f"none of {count(len(utterances), 'utterance')} could be aligned{because}")
    parts = [path.with_name(f"{path.name}.part-{rank}") for rank in range(here.count)]
    if here.first:
        stores = [rollin.AlignmentStore(part) for part in parts]
        rollin.write_alignments(
            path,
            ((name, store(name)) for store in stores for name in store.names),
            provenance,
            fingerprints=dict(Fingerprints.of(utterances)),
        )
        for part in parts:
            part.unlink()
    here.wait()
    return Aligned(total, len(utterances), left_out, here.first)


def _aligned(
    batches: Iterator[batching.Batch], model: Imputer, how: Aligner, here: Ranks, left_out: list[str]
) -> Iterator[tuple[str, list[int]]]:
    """(id, alignment) for every utterance that fits its frames; the others go to ``left_out``."""
    model.eval()
    for batch in batches:
        left_out += [dropped.item for dropped in batch.dropped.values()]
        if not batch.ids:
            continue
        batch = here.moved(batch)
        with torch.no_grad():
            acoustic, frame_lengths = model.encode(batch.features, batch.feature_lengths)
            fits = alignments.feasible(
                batch.targets, frame_lengths, batch.target_lengths, merge_repeats=model.merge_repeats
            )
            keep = fits.nonzero()[:, 0]
            left_out += [f"{batch.ids[i]}: more tokens than frames" for i in (~fits).nonzero()[:, 0].tolist()]
            if not len(keep):
                continue
            network = _CheckedNetwork(model, acoustic[keep], frame_lengths[keep])
            found = how(
                network.log_probs, batch.targets[keep], network.frame_lengths, batch.target_lengths[keep]
            )
        rows = zip(
            keep.tolist(), found.tolist(), frame_lengths[keep].tolist(), network.nan.tolist(), strict=True
        )
        for i, row, frames, nan in rows:
            if nan:
                left_out.append(f"{batch.ids[i]}: the network gave NaN (not a number)")
            else:
                yield batch.ids[i], row[:frames]


class _CheckedNetwork:
    """The network over a batch; ``nan`` marks the utterances for which it gave NaN."""

    def __init__(self, model: Imputer, acoustic: Tensor, frame_lengths: Tensor) -> None:
        self.model, self.acoustic, self.frame_lengths = model, acoustic, frame_lengths
        self.nan = torch.zeros(len(frame_lengths), dtype=torch.bool, device=frame_lengths.device)

    def log_probs(self, partial: Tensor) -> Tensor:
        """(batch, frame, token) given a partial alignment."""
        found = self.model.impute(self.acoustic, self.frame_lengths, partial)
        real = torch.arange(found.shape[1], device=found.device) < self.frame_lengths[:, None]
        self.nan |= (found.isnan().any(2) & real).any(1)
        return found


def _best(model: Imputer) -> Aligner:
    def best(log_probs_of: Callable[[Tensor], Tensor], targets: Tensor, n: Tensor, m: Tensor) -> Tensor:
        everything_masked = torch.full((len(n), int(n.max())), model.mask, device=n.device)
        log_probs = log_probs_of(everything_masked)
        return alignments.best_alignment(log_probs, targets, n, m, merge_repeats=model.merge_repeats)[0]

    return best


def align_manifests(
    manifests: Sequence[Path | str],
    store: Path,
    model_folder: Path | str,
    *,
    batch_seconds: float = 120.0,
    workers: int = 0,
    frames_cache: str = "",
) -> Aligned:
    """Align manifests with an expert and store the alignments for training; each rank aligns its share."""
    atomic_files.probe(store)
    model, vocabulary = models.load(models.torch_folder(model_folder))
    utterances = open_utterances([str(path) for path in manifests], "--manifest", strict=False)
    if len(manifests) > 1:
        _refuse_duplicate_ids(utterances.manifests)
    extract = model.front_end.reader(configs.Data(frames_cache=frames_cache), NO_AUGMENTATION, utterances)
    with joined() as here:
        model.to(here.device)
        return align_corpus(
            store, model, vocabulary, utterances, extract, here, batch_seconds=batch_seconds, workers=workers
        )


def _refuse_duplicate_ids(manifests: list[Manifest]) -> None:
    """Refuse an id that occurs twice: a store holds one alignment per id."""
    places: dict[str, Path] = {}
    for manifest in manifests:
        for utterance in manifest:
            if utterance.id in places:
                raise UsageError(
                    f"--manifest: the id {utterance.id!r} is in {places[utterance.id]} and again in {manifest.path}; "
                    "an alignment file holds each once, so leave one out or give the other its own --store"
                )
            places[utterance.id] = manifest.path
