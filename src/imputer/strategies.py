"""Decoding strategies: which masked frames a pass of ``decoding.impute`` commits (sec:inference, Decoding Strategy).

A strategy is one small function that gets the state of a pass and returns the masked frames to commit in it. To add
one, write the function and put it in ``STRATEGIES``.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial as with_options
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Pass:
    """What a strategy gets. Frames beyond an item's length are never masked."""

    number: int  # of this pass, from 0
    block_size: int  # B
    frame_lengths: Tensor  # (batch,)
    masked: Tensor  # (batch, frame) True where the frame is still to be imputed
    tokens: Tensor  # (batch, frame) the likeliest token of each frame
    scores: Tensor  # (batch, frame) its log probability, finite
    held: Tensor  # (batch, frame) log probability with which a committed frame was committed
    blank: int
    seed: int  # for strategies that draw at random

    @property
    def slots(self) -> Tensor:
        """(frame,) place of each frame in its block, 0 .. B-1."""
        return torch.arange(self.masked.shape[1], device=self.masked.device) % self.block_size


# A strategy returns the frames to commit, or that and the committed frames to mask out again.
Strategy = Callable[[Pass], Tensor | tuple[Tensor, Tensor]]


def block(now: Pass) -> Tensor:
    """The paper's inference: in each block of B frames, the likeliest masked frame. Exactly B passes."""
    return likeliest_per_block(now.scores, now.masked, now.block_size)


def alternate_sub_block(now: Pass) -> Tensor:
    """Even passes take from the left half of each block (rounded up), odd passes from the right half.

    The halves hold as many slots as there are even and odd passes: B passes fill them, odd B included. A partial last
    block has the same halves; where its half is full it commits nothing in that pass, and it is done within the B
    passes of the others. An utterance shorter than B is itself the block that is halved, so it takes as many passes
    as it has frames. Two frames side by side are in one half of one block, which commits one frame per pass, or in
    opposite halves: for B > 1 no two neighbours are committed in one pass.
    """
    half = (now.frame_lengths.clamp(max=now.block_size)[:, None] + 1) // 2  # (batch, 1)
    left = now.slots < half  # (batch, frame)
    return likeliest_per_block(
        now.scores, now.masked & (left if now.number % 2 == 0 else ~left), now.block_size
    )


def right_most_last(now: Pass) -> Tensor:
    """Slot B-1 of each block only in the last pass, so that for B > 1 no two neighbours fall in one pass.

    A partial last block has no slot B-1 and nothing to wait for: it is done before the last pass.
    """
    last_pass = now.number >= now.block_size - 1
    allowed = now.masked & ((now.slots < now.block_size - 1) | last_pass)
    return likeliest_per_block(now.scores, allowed, now.block_size)


def top_k(now: Pass) -> Tensor:
    """The k = ceil(T/B) likeliest masked frames of the utterance, blocks ignored, no two of them neighbours.

    Where fewer than k frames can be chosen without neighbours, fewer are committed; the rest follows in ones and
    twos, so that at most B + 2 passes are taken, and ``Imputation.passes`` says how many. With B = 1
    neighbours are allowed: B = 1 means one pass.
    """
    if now.block_size == 1:
        return now.masked
    k = -(-now.frame_lengths // now.block_size)  # (batch,)
    apart = spread(now.scores, now.masked)
    return apart & (_rank(now.scores, apart) < k[:, None])


def annealing(
    now: Pass,
    *,
    by: Literal["likelihood", "random"] = "likelihood",
    schedule: Callable[[float], float] = lambda progress: 1.0 - progress,
) -> tuple[Tensor, Tensor]:
    """Commit every frame, then delete the least likely commitments, or random ones; fewer each pass.

    ``schedule(progress)`` is the share of an utterance's frames masked out after a pass, progress in (0, 1]
    being the share of its passes done; after the last of the min(B, T) passes nothing is masked out, whatever it says.
    The default falls linearly, as in Mask-Predict.
    """
    likelihood = torch.where(now.masked, now.scores, now.held)
    weakness = -likelihood if by == "likelihood" else _chance(now)
    inside = torch.arange(likelihood.shape[1], device=likelihood.device) < now.frame_lengths[:, None]
    passes = now.frame_lengths.clamp(min=1, max=now.block_size).tolist()
    shares = [schedule((now.number + 1) / p) if now.number + 1 < p else 0.0 for p in passes]
    exact = [share * length for share, length in zip(shares, now.frame_lengths.tolist(), strict=True)]
    count = torch.tensor([math.ceil(x - 1e-6) for x in exact], device=likelihood.device)  # (batch,)
    return now.masked, inside & (_rank(weakness, inside) < count[:, None])


SURE = 0.97  # of both neighbours that are committed in one adaptive pass


# DEPARTURE adaptive: the paper fixes the number of passes beforehand; here the speech decides.
def adaptive(now: Pass, *, threshold: float = 0.8, sure: float | None = None) -> Tensor:
    """Ours: commit every frame with a probability above ``threshold``, and at least one frame per block.

    Two neighbours are committed in one pass only if both are blank or both are above ``sure``: 0.97, or ``threshold``
    if that is higher. Easy speech takes two or three passes, the hardest B. In each block the likeliest frame goes
    whatever its probability; slot B-1 only when it is all the block has left, and not beside the next block's slot 0
    where the two may not go together: it then waits for the next pass. A block thus loses a frame every pass until
    only slot B-1 is left, and by the last pass the block after it has no slot 0 to wait for.
    """
    sure = max(SURE, threshold) if sure is None else sure
    if not 0 < threshold <= sure <= 1:
        raise ValueError(f"adaptive needs 0 < threshold <= sure <= 1, got {threshold} and {sure}")
    fine = now.scores >= math.log(sure)
    quiet = now.tokens == now.blank
    together = (fine[:, 1:] & fine[:, :-1]) | (quiet[:, 1:] & quiet[:, :-1])  # (batch, frame - 1)
    edge = now.slots == now.block_size - 1
    others = now.masked & ~edge
    candidates = others | (now.masked & edge & ~_block_has(others, now.block_size))
    leaders = likeliest_per_block(now.scores, candidates, now.block_size)
    if now.block_size > 1:
        beside = torch.zeros_like(leaders)
        beside[:, :-1] = leaders[:, 1:] & ~together
        leaders = leaders & ~(edge & beside)
    taken = _next_to(leaders, ~together) & ~leaders
    willing = now.masked & ~taken & (now.scores >= math.log(threshold))
    return leaders | spread(now.scores, willing & ~leaders, ~together)


STRATEGIES: dict[str, Strategy] = {
    "block": block,
    "alternate_sub_block": alternate_sub_block,
    "right_most_last": right_most_last,
    "top_k": top_k,
    "annealing": annealing,
    "annealing_random": with_options(annealing, by="random"),
    "adaptive": adaptive,
}


def likeliest_per_block(scores: Tensor, candidates: Tensor, block_size: int) -> Tensor:
    """(batch, frame) True at the likeliest candidate of each block that has one; the earlier of equals."""
    batch, frames = candidates.shape
    size = min(block_size, frames)
    padding = -frames % size
    scores = torch.where(candidates, scores, -torch.inf)
    blocks = torch.nn.functional.pad(scores, (0, padding), value=-torch.inf).view(batch, -1, size)
    winner = blocks.argmax(2, keepdim=True)  # (batch, block, 1)
    chosen = torch.zeros_like(blocks, dtype=torch.bool).scatter_(2, winner, True)
    return chosen.view(batch, -1)[:, :frames] & candidates


def spread(scores: Tensor, candidates: Tensor, conflict: Tensor | None = None) -> Tensor:
    """Candidates taken greedily by score, each unless its neighbour was taken.

    ``conflict`` (batch, frame - 1) says which neighbours exclude each other; without it all do. A candidate
    above all its rivals is taken by the greedy order whatever the others do, so all of those are taken at once,
    their rivals dropped, and again until none is left: a few rounds in place of a walk over the frames.
    """
    place = _rank(scores, candidates)
    taken = torch.zeros_like(candidates)
    conflict = torch.ones_like(candidates[:, 1:]) if conflict is None else conflict
    last = place.shape[1]
    while bool(candidates.any()):
        order = torch.where(candidates, place, last)  # (batch, frame), lower is better
        ahead = torch.where(conflict, order[:, 1:], last)
        behind = torch.where(conflict, order[:, :-1], last)
        rival = torch.full_like(order, last)
        rival[:, :-1] = ahead
        rival[:, 1:] = torch.minimum(rival[:, 1:], behind)
        winners = candidates & (order < rival)
        taken |= winners
        candidates = candidates & ~winners & ~_next_to(winners, conflict)
    return taken


def _next_to(frames: Tensor, conflict: Tensor) -> Tensor:
    """Frames with a neighbour in ``frames`` on the other side of a conflict."""
    beside = torch.zeros_like(frames)
    beside[:, :-1] = frames[:, 1:] & conflict
    beside[:, 1:] |= frames[:, :-1] & conflict
    return beside


def _block_has(frames: Tensor, block_size: int) -> Tensor:
    """(batch, frame) True in every frame of a block with any of ``frames``."""
    batch, count = frames.shape
    size = min(block_size, count)
    blocks = torch.nn.functional.pad(frames, (0, -count % size)).view(batch, -1, size)
    return blocks.any(2).repeat_interleave(size, 1)[:, :count]


def _rank(scores: Tensor, candidates: Tensor) -> Tensor:
    """(batch, frame) 0 for the highest candidate, 1 for the next ...; the earlier of equals first."""
    order = torch.where(candidates, scores, -torch.inf).argsort(dim=1, descending=True, stable=True)
    places = torch.arange(order.shape[1], device=order.device).expand_as(order)
    return torch.empty_like(order).scatter_(1, order, places)


def _chance(now: Pass) -> Tensor:
    """(batch, frame) numbers in [0, 1) from seed, pass and frame alone: the same alone and in a batch."""
    frames = torch.arange(now.masked.shape[1], device=now.masked.device)
    state = (frames + now.seed * 2654435761 + now.number * 2246822519) % 2**31
    for multiplier in (0x27D4EB2F, 0x165667B1, 0x2C1B3C6D):  # 31 bits by 30: no product overflows
        state = ((state ^ (state >> 15)) * multiplier) % 2**31
    return (state / 2**31).expand(now.masked.shape)
