"""Alignments a: collapse (beta^-1), state paths, masked segments, c(a~, a), feasibility, the best alignment.

An alignment assigns a token of V+ (blank included) to every frame of the input; deleting its blanks gives the target.
With ``merge_repeats`` repeated tokens are first merged, as in classical CTC.
"""

import math
from collections.abc import Iterable
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from imputer import lattice

Ids = Tensor | Iterable[int]


def collapse(alignment: Ids, *, blank: int = 0, merge_repeats: bool = False) -> list[int]:
    """beta^-1(a): the target of one alignment (frame,)."""
    ids = _ids("alignment", alignment)
    if merge_repeats:
        ids = [token for token, _ in groupby(ids)]
    return [token for token in ids if token != blank]


def state_path(alignments: Tensor, *, blank: int = 0, merge_repeats: bool = False) -> Tensor:
    """The lattice state of every frame: 2j for a blank after j tokens, 2j - 1 for a frame that emits token j.

    Works along the last axis, so for (frame,) and for (batch, frame). Blanks as padding do not change other states.
    """
    emits = alignments != blank
    begins = emits.clone()
    if merge_repeats:
        begins[..., 1:] &= alignments[..., 1:] != alignments[..., :-1]
    return 2 * begins.long().cumsum(-1) - emits.long()


class Segment(NamedTuple):
    """A contiguous stretch of masked frames: its start, s_n frames, s_k target tokens begun inside it."""

    start: int
    frames: int
    tokens: int


def masked_segments(
    alignment: Ids, committed: Tensor | Iterable[bool], *, blank: int = 0, merge_repeats: bool = False
) -> list[Segment]:
    """masked_segments(a~): the stretches between committed frames, in order."""
    states, kept = _states(alignment, committed, blank, merge_repeats)
    segments, before, frame = [], 0, 0
    for is_committed, stretch in groupby(kept):
        length = len(list(stretch))
        last = states[frame + length - 1]
        if not is_committed:
            segments.append(Segment(frame, length, (last + 1) // 2 - (before + 1) // 2))
        before = last
        frame += length
    return segments


def compatible_count(
    alignment: Ids, committed: Tensor | Iterable[bool], *, blank: int = 0, merge_repeats: bool = False
) -> int:
    """c(a~, a): the number of alignments that agree with ``alignment`` in the state of every committed frame.

    Without merging it is the paper's product of binomials; with merging, see ``_paths_merging``.
    """
    segments = masked_segments(alignment, committed, blank=blank, merge_repeats=merge_repeats)
    if not merge_repeats:
        return math.prod(math.comb(segment.frames, segment.tokens) for segment in segments)
    states, _ = _states(alignment, committed, blank, merge_repeats)
    target = collapse(alignment, blank=blank, merge_repeats=True)
    return math.prod(
        _paths_merging(
            segment.frames,
            states[segment.start - 1] if segment.start else 0,
            states[end] if (end := segment.start + segment.frames) < len(states) else 2 * len(target),
            target,
        )
        for segment in segments
    )


def _paths_merging(frames: int, before: int, after: int, target: list[int]) -> int:
    """Number of paths of ``frames`` frames from state ``before`` to state ``after`` when repeats merge.

    A path visits m mandatory states and u of o optional states, each for at least one frame, which gives
    sum_u C(o, u) C(n - 1, m + u - 1) = C(n - 1 + o, n - m) paths (Vandermonde). Both ends are optional; in between,
    tokens are mandatory, and so are blanks between equal tokens; other blanks are optional.
    """
    if before == after:
        return 1
    blanks = range(before // 2 + 1, (after + 1) // 2)  # strictly between, blank j lies after token j
    forced = sum(target[j - 1] == target[j] for j in blanks)
    must = (after // 2 - (before + 1) // 2) + forced
    may = 2 + len(blanks) - forced
    return math.comb(frames - 1 + may, frames - must) if frames >= must else 0


def feasible(
    targets: Tensor, frame_lengths: Tensor, target_lengths: Tensor, *, merge_repeats: bool = False
) -> Tensor:
    """(batch,) bool: whether the target fits the frames; with merging, equal neighbours need a blank in between."""
    targets, frames, sizes = (torch.as_tensor(given) for given in (targets, frame_lengths, target_lengths))
    if not merge_repeats:
        return frames >= sizes
    position = torch.arange(targets.shape[1], device=targets.device)[1:]
    repeats = ((targets[:, 1:] == targets[:, :-1]) & (position < sizes[:, None])).sum(1)
    return frames >= sizes + repeats


def best_alignment(
    log_probs: Tensor,
    targets: Tensor,
    frame_lengths: Tensor,
    target_lengths: Tensor,
    *,
    blank: int = 0,
    merge_repeats: bool = False,
) -> tuple[Tensor, Tensor]:
    """argmax_a q(a | x, y), eqn:argmax_alignment: (batch, frame) ids, blank beyond the length, and (batch,) log prob.

    Exact. Of equally probable alignments it returns the one whose state path is highest, compared from the last
    frame back, so tokens come as early as possible. An infeasible item gets blanks and -inf.
    """
    return lattice.best(
        log_probs, targets, frame_lengths, target_lengths, blank=blank, merge_repeats=merge_repeats
    )


def _ids(name: str, given: Ids) -> list[int]:
    ids = given.tolist() if isinstance(given, Tensor) else list(given)
    if ids and not all(isinstance(token, int) for token in ids):
        try:
            return [int(token.__index__()) for token in ids]
        except AttributeError:
            raise ValueError(f"{name} must be one sequence of integers, got {ids[:3]!r} ...") from None
    return ids


def _states(
    alignment: Ids, committed: Tensor | Iterable[bool], blank: int, merge_repeats: bool
) -> tuple[list[int], list[bool]]:
    ids = torch.tensor(_ids("alignment", alignment), dtype=torch.int64)
    kept = [bool(frame) for frame in (committed.tolist() if isinstance(committed, Tensor) else committed)]
    if len(kept) != len(ids):
        raise ValueError(f"committed has {len(kept)} frames, the alignment {len(ids)}")
    return state_path(ids, blank=blank, merge_repeats=merge_repeats).tolist(), kept
