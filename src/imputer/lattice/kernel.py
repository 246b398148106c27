"""The compiled implementation, for CPU tensors: passes the arrays of a batch to numba, in threads for large batches."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from imputer.lattice.paths import best_items
from imputer.lattice.plan import Plan
from imputer.lattice.sums import SparsePosteriors, scatter_items, sum_items


class Posteriors(NamedTuple):
    """The posteriors of a batch."""

    sparse: SparsePosteriors
    bases: np.ndarray  # (batch,): where an item starts in sparse.tokens


def total(log_probs: Tensor, plan: Plan, want_posteriors: bool) -> tuple[Tensor, Posteriors | None]:
    """(batch,) float64 log weights, and the posteriors when wanted."""
    batch, frames, _ = plan.shape
    scores, strides = _flat(log_probs)
    exact = np.float64 if log_probs.dtype == torch.float64 else np.float32
    rows = batch * frames if want_posteriors else 0
    cells = int(plan.cells.sum())
    sparse = SparsePosteriors(
        first=np.empty(rows, np.int32),
        counts=np.empty(rows, np.int32),
        blanks=np.empty(rows, exact),
        tokens=np.empty(cells if want_posteriors else 0, exact),
    )
    bases = np.cumsum(plan.cells) - plan.cells
    totals = np.empty(batch)
    _over_items(
        sum_items, batch, cells // _CELLS_PER_THREAD,
        scores, strides, plan.targets, plan.frame_lengths, plan.target_lengths, plan.states, plan.blank,
        plan.merge_repeats, int(plan.table.max(initial=0)), want_posteriors, bases, totals, sparse,
    )  # fmt: skip
    return torch.from_numpy(totals), Posteriors(sparse, bases) if want_posteriors else None


def scatter(posteriors: Posteriors, plan: Plan, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """scales (batch,) times the posteriors, dense: (batch, frame, token)."""
    wide = dtype if dtype in (torch.float32, torch.float64) else torch.float32
    gradient = torch.empty(plan.shape, dtype=wide)
    batch, frames, tokens = plan.shape
    _over_items(
        scatter_items, batch, gradient.numel() // _ZEROS_PER_THREAD,
        gradient.view(-1).numpy(), frames, tokens, plan.targets, plan.frame_lengths, plan.blank,
        posteriors.bases, scales.detach().to(torch.float64).contiguous().numpy(), posteriors.sparse,
    )  # fmt: skip
    return gradient.to(dtype)


def best(log_probs: Tensor, plan: Plan, most_cells: int) -> tuple[Tensor, Tensor]:
    """(batch, frame) best alignments, blank beyond the length, and their (batch,) float64 scores."""
    batch, frames, _ = plan.shape
    scores, strides = _flat(log_probs)
    totals, alignments = np.empty(batch), np.full((batch, frames), plan.blank, np.int64)
    _over_items(
        best_items, batch, int(plan.cells.sum()) // _CELLS_PER_THREAD,
        scores, strides, plan.targets, plan.frame_lengths, plan.target_lengths, plan.states, plan.blank,
        plan.merge_repeats, int(plan.table.max(initial=0)), most_cells, totals, alignments,
    )  # fmt: skip
    return torch.from_numpy(alignments), torch.from_numpy(totals)


def _flat(log_probs: Tensor) -> tuple[np.ndarray, tuple[int, int, int]]:
    """The memory from the first to the last element as one array, and the strides within it."""
    scores = log_probs.detach()
    if scores.dtype == torch.bfloat16:
        scores = scores.view(torch.int16)
    if scores.dtype == torch.float16:
        scores = scores.float()
    strides = (scores.stride(0), scores.stride(1), scores.stride(2))
    reach = sum((size - 1) * stride for size, stride in zip(scores.shape, strides, strict=True)) + 1
    flat = scores.as_strided((reach if scores.numel() else 0,), (1,))
    return flat.numpy(), strides


_CELLS_PER_THREAD = 20_000  # less work does not pay for a thread
_ZEROS_PER_THREAD = 1_000_000
_pool: ThreadPoolExecutor | None = None


def _drop_pool() -> None:
    """Threads do not survive a fork."""
    global _pool
    _pool = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_drop_pool)


def _over_items(work: Callable[..., None], batch: int, most_threads: int, *arguments: object) -> None:
    """Call ``work(start, stop, ...)`` for all items, in at most ``most_threads`` threads and as many as torch uses.

    Items are independent, so the result does not depend on the number of threads.
    """
    global _pool
    threads = min(torch.get_num_threads(), batch, most_threads)
    if threads <= 1:
        work(0, batch, *arguments)
        return
    if _pool is None:
        _pool = ThreadPoolExecutor(max_workers=os.cpu_count(), thread_name_prefix="lattice")
    bounds = [batch * part // threads for part in range(threads + 1)]
    jobs = [_pool.submit(work, start, stop, *arguments) for start, stop in pairwise(bounds)]
    for job in jobs:
        job.result()
