"""The objectives, as exact log-likelihoods in nats: (batch,), one number an utterance.

Their gradients take log_probs as an independent tensor: nothing assumes that it came from a softmax.
An infeasible item gives -inf and a zero gradient; ``imputer.alignments.feasible`` tells which those are.
The shapes and types of the arguments are those of ``imputer.lattice``.
"""

import torch
from torch import Tensor

from imputer import lattice
from imputer.lattice.checks import check_integers, check_log_probs


def ctc(
    log_probs: Tensor,
    targets: Tensor,
    frame_lengths: Tensor,
    target_lengths: Tensor,
    *,
    blank: int = 0,
    merge_repeats: bool = False,
) -> Tensor:
    """log p(y | x) = log sum over a in beta(y) of p(a | x), eqn:ctc_dynamic_programming."""
    return lattice.total(
        log_probs, targets, frame_lengths, target_lengths, blank=blank, merge_repeats=merge_repeats
    )


def dynamic_programming(
    log_probs: Tensor,
    targets: Tensor,
    alignments: Tensor,
    committed: Tensor,
    frame_lengths: Tensor,
    target_lengths: Tensor,
    *,
    blank: int = 0,
    merge_repeats: bool = False,
) -> Tensor:
    """log sum over a' in beta'(a~, a) of p(a' | a~, x), eqn:dynamic_programming.

    beta'(a~, a) holds the alignments that pass every committed frame in the state that ``alignments`` has there.
    Committed frames count in the likelihood, as eqn:factorization runs over all frames.
    """
    return lattice.total(
        log_probs, targets, frame_lengths, target_lengths, alignments, committed,
        blank=blank, merge_repeats=merge_repeats,
    )  # fmt: skip


def imitation(log_probs: Tensor, alignments: Tensor, frame_lengths: Tensor) -> Tensor:
    """log p(a | a~, x), eqn:efficient_imitation_learning: the expert's own alignment and no other."""
    inside = _check_imitation(log_probs, alignments, frame_lengths)
    ids = torch.where(inside, alignments, 0).long()
    scores = log_probs.gather(2, ids[:, :, None])[:, :, 0]  # (batch, frame)
    exact = torch.float32 if log_probs.device.type == "mps" else torch.float64
    totals = torch.where(inside, scores, 0).sum(1, dtype=exact)
    # An alignment of probability zero pulls nowhere.
    totals = torch.where(totals == -torch.inf, totals.detach(), totals)
    return totals.to(torch.float64 if log_probs.dtype == torch.float64 else torch.float32)


def _check_imitation(log_probs: Tensor, alignments: Tensor, frame_lengths: Tensor) -> Tensor:
    """(batch, frame) bool: the frames that count. One look at the values, so one wait for a GPU."""
    check_log_probs(log_probs)
    batch, frames, tokens = log_probs.shape
    alignments = check_integers("alignments", alignments, (batch, frames))
    lengths = check_integers("frame_lengths", frame_lengths, (batch,)).to(alignments.device)
    inside = torch.arange(frames, device=alignments.device) < lengths[:, None]
    wrong_length = (lengths < 0) | (lengths > frames)
    wrong_id = inside & ((alignments < 0) | (alignments >= tokens))
    if not (wrong_length.any() | wrong_id.any()).item():
        return inside
    if wrong_length.any():
        item = int(wrong_length.nonzero()[0])
        raise ValueError(
            f"frame_lengths[{item}] = {lengths[item]} is not in 0..{frames}, the frames of log_probs"
        )
    item, frame = wrong_id.nonzero()[0].tolist()
    raise ValueError(f"alignments[{item}, {frame}] = {alignments[item, frame]} is not in 0..{tokens - 1}")
