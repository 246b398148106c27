"""The dynamic programme over alignments: sum, best and count, for both topologies, with committed frames.

One recursion (docs/maths.md), two implementations with one interface: ``kernel`` (compiled with numba, CPU) and
``tensors`` (plain torch, any device, no numba). Both split the lattice at the committed frames into independent runs
and compute only the cells an alignment can reach. Arguments, here and in ``imputer.objectives``:

    log_probs       (batch, frame, token)  float32, float64, bfloat16 or float16; any strides
    targets         (batch, target)        token ids; values beyond target_lengths are ignored
    frame_lengths   (batch,)
    target_lengths  (batch,)
    alignments      (batch, frame)         whole alignments that collapse to their targets
    committed       (batch, frame)         True where the alignment's *state* is given; None: nowhere
    merge_repeats   False: delete blanks (the paper's); True: first merge repeats (classical CTC)

Scores need not be normalised. Below -1.2e13 they count as -inf; above 1e9, +inf included, they count as NaN. Only the
scores of cells that the token counts allow are read: a NaN elsewhere has no effect.
"""

from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor

Implementation = Literal["auto", "kernel", "tensors"]


def total(
    log_probs: Tensor,
    targets: Tensor,
    frame_lengths: Tensor,
    target_lengths: Tensor,
    alignments: Tensor | None = None,
    committed: Tensor | None = None,
    *,
    blank: int = 0,
    merge_repeats: bool = False,
    implementation: Implementation = "auto",
) -> Tensor:
    """(batch,) log of the summed probability of all alignments that agree with the committed states, in nats.

    -inf, with a zero gradient, where there is none; NaN where a NaN score is read. float64 for float64 scores, else
    float32. Differentiable any number of times.
    """
    from imputer.lattice import plan

    batch = plan.make(
        log_probs, targets, frame_lengths, target_lengths, alignments, committed, blank, merge_repeats
    )
    module = _module(implementation, log_probs)
    if log_probs.requires_grad and torch.is_grad_enabled():
        return _Total.apply(log_probs, batch, module)
    totals, _ = module.total(log_probs.detach(), batch, False)
    return totals.to(_result_type(log_probs))


def posteriors(
    log_probs: Tensor,
    targets: Tensor,
    frame_lengths: Tensor,
    target_lengths: Tensor,
    alignments: Tensor | None = None,
    committed: Tensor | None = None,
    *,
    blank: int = 0,
    merge_repeats: bool = False,
    implementation: Implementation = "auto",
) -> Tensor:
    """(batch, frame, token) probability that a frame emits a token, given target and committed states.

    This is the gradient of ``total``. Frames sum to one; those beyond the length, and infeasible items, are zero.
    """
    from imputer.lattice import plan

    batch = plan.make(
        log_probs, targets, frame_lengths, target_lengths, alignments, committed, blank, merge_repeats
    )
    with torch.no_grad():
        module = _module(implementation, log_probs)
        _, shares = module.total(log_probs, batch, True)
        ones = torch.ones(
            batch.shape[0], dtype=torch.float64 if log_probs.device.type == "cpu" else torch.float32
        )
        return module.scatter(shares, batch, ones.to(log_probs.device), log_probs.dtype)


def best(
    log_probs: Tensor,
    targets: Tensor,
    frame_lengths: Tensor,
    target_lengths: Tensor,
    alignments: Tensor | None = None,
    committed: Tensor | None = None,
    *,
    blank: int = 0,
    merge_repeats: bool = False,
    most_cells: int = 20_000_000,
    implementation: Implementation = "auto",
) -> tuple[Tensor, Tensor]:
    """The most probable alignments (batch, frame) that agree with the committed states, and their log
    probabilities (batch,).

    Scores are added in float64. Ties are resolved from the last frame back: the highest state wins, so tokens come
    as early as possible. Frames beyond the length, and items without any alignment (-inf), are blank. If the best
    alignment has probability zero, the result is one with the fewest forbidden frames, and its score is -inf; NaN
    scores count as forbidden.

    ``most_cells`` bounds the memory of long inputs: back pointers are held for that many (frame, token) cells at a
    time. A larger lattice is computed twice, from checkpoints; the result is the same.
    """
    from imputer.lattice import plan

    if most_cells < 1:
        raise ValueError(f"most_cells must be at least 1, got {most_cells}")
    batch = plan.make(
        log_probs, targets, frame_lengths, target_lengths, alignments, committed, blank, merge_repeats
    )
    with torch.no_grad():
        ids, scores = _module(implementation, log_probs).best(log_probs, batch, most_cells)
    return ids, scores.to(_result_type(log_probs))


def count(
    targets: Tensor,
    frame_lengths: Tensor,
    target_lengths: Tensor,
    alignments: Tensor | None = None,
    committed: Tensor | None = None,
    *,
    blank: int = 0,
    merge_repeats: bool = False,
    implementation: Implementation = "auto",
) -> Tensor:
    """(batch,) log number of alignments that agree with the committed states: the sum when every score is zero."""
    lengths = torch.as_tensor(frame_lengths)
    frames = int(lengths.max()) if alignments is None and len(lengths) else 0
    frames = frames if alignments is None else alignments.shape[1]
    tokens = 1 + max(blank, int(targets.max()) if targets.numel() else 0)
    zero = torch.zeros(1, dtype=torch.float64, device=targets.device)
    return total(
        zero.expand(len(lengths), frames, tokens), targets, frame_lengths, target_lengths, alignments, committed,
        blank=blank, merge_repeats=merge_repeats, implementation=implementation,
    )  # fmt: skip


def _module(implementation: Implementation, log_probs: Tensor) -> ModuleType:
    """The requested implementation; "auto" is the compiled one for CPU tensors where numba is installed."""
    from imputer.lattice.compilation import AVAILABLE

    if implementation not in ("auto", "kernel", "tensors"):
        raise ValueError(f'implementation must be "auto", "kernel" or "tensors", got {implementation!r}')
    on_cpu = log_probs.device.type == "cpu"
    if implementation == "kernel" and not on_cpu:
        raise ValueError(f'implementation "kernel" works on CPU tensors, log_probs is on {log_probs.device}')
    if implementation == "kernel" and not AVAILABLE:
        raise ValueError('implementation "kernel" needs numba: pip install numba, or use "tensors"')
    if implementation == "tensors" or not (on_cpu and AVAILABLE):
        from imputer.lattice import tensors

        return tensors
    from imputer.lattice import kernel

    return kernel


def _result_type(log_probs: Tensor) -> torch.dtype:
    return torch.float64 if log_probs.dtype == torch.float64 else torch.float32


class _Total(torch.autograd.Function):
    """Sum over alignments. Its gradient, the posteriors, is computed in the forward pass and stored sparsely."""

    @staticmethod
    def forward(ctx: Any, log_probs: Tensor, plan: Any, module: ModuleType) -> Tensor:
        ctx.save_for_backward(log_probs)
        ctx.plan, ctx.module = plan, module
        totals, ctx.posteriors = module.total(log_probs, plan, True)
        return totals.to(_result_type(log_probs))

    @staticmethod
    def backward(ctx: Any, scales: Tensor) -> tuple[Tensor, None, None]:
        if torch.is_grad_enabled():  # for higher derivatives, autograd differentiates the posteriors
            from imputer.lattice import tensors

            (log_probs,) = ctx.saved_tensors
            _, shares = tensors.total(log_probs, ctx.plan, True)
            assert shares is not None
            return tensors.scatter(shares, ctx.plan, scales, log_probs.dtype), None, None
        dtype = ctx.saved_tensors[0].dtype
        return ctx.module.scatter(ctx.posteriors, ctx.plan, scales, dtype), None, None
