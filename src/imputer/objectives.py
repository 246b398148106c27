"""The objectives, as exact log-likelihoods in nats: (batch,), one number per utterance.

Their gradients treat log_probs as an independent tensor: it need not be the output of a softmax.
An infeasible item gives -inf and a zero gradient; ``imputer.alignments.feasible`` finds these items.
The shapes and types of the arguments are those of ``imputer.lattice``.
"""

import torch
from torch import Tensor

from imputer import lattice


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
    """log p(a | a~, x), eqn:efficient_imitation_learning: the expert's alignment only."""
    from imputer.lattice.arguments import check_imitation

    inside = check_imitation(log_probs, alignments, frame_lengths)
    ids = torch.where(inside, alignments, 0).long()
    scores = log_probs.gather(2, ids[:, :, None])[:, :, 0]  # (batch, frame)
    exact = torch.float32 if log_probs.device.type == "mps" else torch.float64
    totals = torch.where(inside, scores, 0).sum(1, dtype=exact)
    # An alignment of probability zero has a zero gradient.
    totals = torch.where(totals == -torch.inf, totals.detach(), totals)
    return totals.to(torch.float64 if log_probs.dtype == torch.float64 else torch.float32)
