# mypy: allow-untyped-defs
"""The numeric representation of the lattice (``m * 2**e``) against the same recursion in log space, both compiled.

Forward and backward of the all-masked sum, one thread, interleaved, minimum of several. The log-space recursion visits
the same cells, but leaves out what the lattice does besides: committed frames, chunks, checks, strides.
"""

import math
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from imputer import lattice
from imputer.research.benchmarks import bench_objectives
from imputer.research.measuring import least, one_thread, show

SHAPES = (
    (12, 200, 401, 24),
    *bench_objectives.SHAPES,
)  # batch, frame, token, target; the first: a training step
NEVER = -1e30


def run(quick: bool = False) -> dict[str, Any]:
    """Print and return milliseconds and ratios of every shape and topology."""
    with one_thread():
        results = [
            compare(shape, merge_repeats, rounds=3 if quick else 15)
            for shape in (SHAPES[:1] if quick else SHAPES)
            for merge_repeats in (False, True)
        ]
    rows = []
    for result in results:
        name = f"{', '.join(map(str, result['shape']))}, {'merged' if result['merge_repeats'] else 'kept'}"
        rows.append((name, f"{result['ours']:.2f}", f"{result['log_space']:.2f}", f"{result['ratio']:.1f}"))
    headings = ("batch, T, C, S, repeats", "m * 2**e, ms", "log space, ms", "ratio")
    show("sum over alignments", headings, rows)
    return {"results": results}


def compare(shape: tuple[int, int, int, int], merge_repeats: bool, rounds: int) -> dict[str, Any]:
    """Milliseconds of forward and backward in both representations, after a check that the results agree."""
    log_probs, targets, lengths, sizes, _ = bench_objectives.make_batch(shape, merge_repeats)
    scores = log_probs.clone().requires_grad_()

    def ours() -> tuple[Tensor, Tensor]:
        totals = lattice.total(scores, targets, lengths, sizes, merge_repeats=merge_repeats)
        return totals.detach(), torch.autograd.grad(totals.sum(), scores)[0]

    def in_log_space() -> tuple[Tensor, Tensor]:
        totals, gradient = np.empty(len(targets)), np.zeros(log_probs.shape, np.float32)
        log_space_items(log_probs.numpy(), targets.numpy(), merge_repeats, totals, gradient)
        return torch.from_numpy(totals).float(), torch.from_numpy(gradient)

    for one, other in zip(ours(), in_log_space(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)
    fast, slow = (1000 * seconds for seconds in least([ours, in_log_space], rounds))
    return {
        "shape": shape, "merge_repeats": merge_repeats, "ours": fast, "log_space": slow, "ratio": slow / fast,
    }  # fmt: skip


@njit(nogil=True, inline="always")
def log_add(a, b):
    top, difference = max(a, b), -abs(a - b)
    return top + math.log1p(math.exp(difference)) if difference > -40.0 else top


@njit(nogil=True)
def log_space_items(scores, targets, merge_repeats, totals, gradient):
    """Totals and gradients of a batch."""
    _, frames, _ = scores.shape
    size = targets.shape[1]
    b, k = np.empty((frames + 1, size + 1)), np.empty((frames + 1, size + 1))
    for item in range(len(scores)):
        y = np.concatenate((np.zeros(1, np.int64), targets[item]))
        b[:] = NEVER
        k[:] = NEVER
        b[0, 0] = 0.0
        forward(scores[item], y, merge_repeats, b, k)
        totals[item] = log_add(b[frames, size], k[frames, size])
        backward(scores[item], y, merge_repeats, b, k, totals[item], gradient[item])


@njit(nogil=True)
def forward(scores, y, merge_repeats, b, k):
    """Prefixes: b ends in a blank, k in a token; without merging b holds both."""
    frames, size = len(scores), len(y) - 1
    for t in range(1, frames + 1):
        blank, row = scores[t - 1, 0], scores[t - 1]
        for j in range(max(0, size - (frames - t)), min(t, size) + 1):
            if not merge_repeats:
                b[t, j] = b[t - 1, j] + blank
                if j > 0:
                    b[t, j] = log_add(b[t, j], b[t - 1, j - 1] + row[y[j]])
                continue
            b[t, j] = log_add(b[t - 1, j], k[t - 1, j]) + blank
            if j > 0:
                enter = b[t - 1, j - 1]
                if y[j] != y[j - 1]:
                    enter = log_add(enter, k[t - 1, j - 1])
                k[t, j] = log_add(k[t - 1, j], enter) + row[y[j]]


@njit(nogil=True)
def backward(scores, y, merge_repeats, b, k, total, gradient):
    """Suffixes, and the posteriors into ``gradient``."""
    frames, size = len(scores), len(y) - 1
    suffix_b, suffix_k = np.full((2, size + 2), NEVER), np.full((2, size + 2), NEVER)
    here, there = 0, 1
    suffix_b[here, size] = suffix_k[here, size] = 0.0
    for t in range(frames, 0, -1):
        blank, row = scores[t - 1, 0], scores[t - 1]
        suffix_b[there] = NEVER
        suffix_k[there] = NEVER
        if merge_repeats:
            for j in range(max(0, size - (frames - t)), min(t, size) + 1):
                gradient[t - 1, 0] += math.exp(b[t, j] + suffix_b[here, j] - total)
                if j > 0:
                    gradient[t - 1, y[j]] += math.exp(k[t, j] + suffix_k[here, j] - total)
        for j in range(max(0, size - (frames - t) - 1), min(t - 1, size) + 1):
            through_blank, through_token = suffix_b[here, j] + blank, NEVER
            if j < size:
                through_token = (suffix_k if merge_repeats else suffix_b)[here, j + 1] + row[y[j + 1]]
            both = log_add(through_blank, through_token)
            suffix_b[there, j] = both
            if not merge_repeats:
                gradient[t - 1, 0] += math.exp(b[t - 1, j] + through_blank - total)
                if j < size:
                    gradient[t - 1, y[j + 1]] += math.exp(b[t - 1, j] + through_token - total)
            elif j > 0:
                leave = both if j < size and y[j + 1] != y[j] else through_blank
                suffix_k[there, j] = log_add(suffix_k[here, j] + row[y[j]], leave)
        here, there = there, here
