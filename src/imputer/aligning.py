"""Forced alignment: the best alignment of a known text, for whole corpora and for hour-long recordings."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from imputer import alignments, batching, progress, rollin
from imputer.errors import ImputerError
from imputer.manifest import Utterance
from imputer.model import Imputer
from imputer.ranks import Ranks
from imputer.vocabulary import Vocabulary

# (log_probs given a partial alignment, targets, frame_lengths, target_lengths) -> (batch, frame) ids
Aligner = Callable[[Callable[[Tensor], Tensor], Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Aligned:
    """What ``align_corpus`` did."""

    utterances: int
    left_out: list[str]  # "id: reason"


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

    ``how`` turns posteriors into alignments; the best alignment under the all-masked posteriors
    (eqn:argmax_alignment) unless told otherwise.
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
    here.wait()
    parts = [path.with_name(f"{path.name}.part-{rank}") for rank in range(here.count)]
    count = 0
    if here.first:
        stores = [rollin.AlignmentStore(part) for part in parts]
        count = sum(map(len, stores))
        rollin.write_alignments(
            path, ((name, store(name)) for store in stores for name in store.names), provenance
        )
        for part in parts:
            part.unlink()
    here.wait()
    return Aligned(count, left_out)


def _aligned(
    batches: Iterator[batching.Batch], model: Imputer, how: Aligner, here: Ranks, left_out: list[str]
) -> Iterator[tuple[str, list[int]]]:
    """(id, alignment) for every utterance that fits its frames; the others go to ``left_out``."""
    model.eval()
    for batch in batches:
        left_out += batch.dropped
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
            acoustic, frame_lengths = acoustic[keep], frame_lengths[keep]
            found = how(
                lambda partial, a=acoustic, n=frame_lengths: model.impute(a, n, partial),  # type: ignore[misc]
                batch.targets[keep],
                frame_lengths,
                batch.target_lengths[keep],
            )
        for i, row, frames in zip(keep.tolist(), found.tolist(), frame_lengths.tolist(), strict=True):
            yield batch.ids[i], row[:frames]


def _best(model: Imputer) -> Aligner:
    def best(log_probs_of: Callable[[Tensor], Tensor], targets: Tensor, n: Tensor, m: Tensor) -> Tensor:
        everything_masked = torch.full((len(n), int(n.max())), model.mask, device=n.device)
        log_probs = log_probs_of(everything_masked)
        return alignments.best_alignment(log_probs, targets, n, m, merge_repeats=model.merge_repeats)[0]

    return best


# --- one long recording


def posteriors(
    model: Imputer,
    samples: Callable[[int, int], Tensor],
    total: int,
    *,
    window_seconds: float = 30.0,
    context_seconds: float = 4.0,
) -> Tensor:
    """log_probs (frame, token) of a recording of any length, window by window, all masked.

    ``samples(start, stop)`` reads a slice, so that the recording is never in memory whole. Windows overlap by the
    context on either side, whose frames are dropped again.
    """
    front_end = model.front_end
    hop = round(front_end.frame_seconds * front_end.sample_rate)  # samples from one frame to the next
    window = max(1, int(window_seconds * front_end.sample_rate) // hop)
    context = int(context_seconds * front_end.sample_rate) // hop
    pieces = []
    model.eval()
    with progress.bar("listening", -(-total // (window * hop))) as advance, torch.no_grad():
        for first in range(0, -(-total // hop), window):
            begin = max(0, first - context)
            last = (first + window) * hop >= total
            stop = total if last else (first + window + context) * hop
            features = front_end.extract(samples(begin * hop, stop))
            acoustic, lengths = model.encode(features[None], torch.tensor([len(features)]))
            log_probs = model.impute(acoustic, lengths, model.all_masked(acoustic))[0]
            piece = log_probs[first - begin :] if last else log_probs[first - begin : first - begin + window]
            pieces.append(piece)
            advance()
            if last:
                break
    return torch.cat(pieces)


def align_recording(model: Imputer, log_probs: Tensor, target: Sequence[int]) -> tuple[list[int], float]:
    """The best alignment of ``target`` to one recording, and its log-probability."""
    frames = torch.tensor([len(log_probs)])
    found, score = alignments.best_alignment(
        log_probs[None],
        torch.tensor([target], dtype=torch.long),
        frames,
        torch.tensor([len(target)]),
        merge_repeats=model.merge_repeats,
    )
    if not torch.isfinite(score).all():
        raise ImputerError(
            f"the text has {len(target)} tokens, but the recording holds only {len(log_probs)} frames"
        )
    return found[0].tolist(), float(score[0])
