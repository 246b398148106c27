"""Masking policies r: which frames of an alignment stay committed in a~ (Section Roll-in Policy).

A policy is ``f(frame_lengths, *, block_size, generator, width=None) -> Bool (batch, frame)``; True = committed,
False = masked out, and False beyond an item's length. The frame axis has the length of the longest item, or ``width``.
``width`` only pads: it does not change what is drawn.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Policy = Callable[..., Tensor]


def bernoulli(
    frame_lengths: Tensor,
    *,
    block_size: int = 1,
    generator: torch.Generator,
    width: int | None = None,
    probability: float = 0.5,
) -> Tensor:
    """Every frame is committed with ``probability``, independently."""
    if not 0 <= probability <= 1:
        raise ValueError(f"probability must be in 0..1, got {probability}")
    draws, inside = _draws(frame_lengths, block_size, generator)
    return _widened((draws < probability) & inside, frame_lengths, width)


def uniform(
    frame_lengths: Tensor, *, block_size: int = 1, generator: torch.Generator, width: int | None = None
) -> Tensor:
    """The number of committed frames is uniform on 0..T; then the frames are drawn uniformly."""
    draws, inside = _draws(frame_lengths, block_size, generator)
    lengths = inside.sum(1)
    share = torch.rand(len(draws), generator=generator, dtype=torch.float64, device=draws.device)
    kept = (share * (lengths + 1)).long().clamp(max=lengths)
    return _widened((_rank(draws) < kept[:, None]) & inside, frame_lengths, width)


def block(
    frame_lengths: Tensor, *, block_size: int, generator: torch.Generator, width: int | None = None
) -> Tensor:
    """c frames of every block are committed, c uniform on 0..B-1, one c for all blocks of an utterance.

    This is the state of decoding after c passes. A last block of n < B frames has min(c, n) committed, because each
    pass commits one frame of every block that has masked frames.
    """
    # DEPARTURE masking-range: the paper masks b in [0, B) tokens of each block, which excludes the all-masked start of
    # decoding and includes complete alignments. We commit c in [0, B), as decoding does. ``block_printed`` has the
    # printed range.
    rank, inside, number = _block_draws(frame_lengths, block_size, generator)
    return _widened((rank < number) & inside, frame_lengths, width)


def block_printed(
    frame_lengths: Tensor, *, block_size: int, generator: torch.Generator, width: int | None = None
) -> Tensor:
    """As printed in the paper: b frames of every block are masked out, b uniform on 0..B-1; min(b, n) if short."""
    rank, inside, number = _block_draws(frame_lengths, block_size, generator)
    return _widened((rank >= number) & inside, frame_lengths, width)


POLICIES: dict[str, Policy] = {
    "bernoulli": bernoulli,
    "uniform": uniform,
    "block": block,
    "block_printed": block_printed,
}


def _draws(frame_lengths: Tensor, block_size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """(batch, frame) uniform draws, 2 beyond the length so that they rank last; and whether a frame is inside."""
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size}")
    lengths = torch.as_tensor(frame_lengths)
    if lengths.dim() != 1 or lengths.is_floating_point():
        raise ValueError(
            f"frame_lengths must be integers (batch,), got {lengths.dtype} {tuple(lengths.shape)}"
        )
    lengths = lengths.to(generator.device)
    longest = int(lengths.max()) if len(lengths) else 0
    if len(lengths) and int(lengths.min()) < 0:
        item = int(lengths.argmin())
        raise ValueError(f"frame_lengths[{item}] = {lengths[item]} is negative")
    draws = torch.rand(
        len(lengths), longest, generator=generator, dtype=torch.float64, device=generator.device
    )
    inside = torch.arange(longest, device=generator.device) < lengths[:, None]
    return draws.masked_fill(~inside, 2.0), inside


def _block_draws(
    frame_lengths: Tensor, block_size: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """(batch, frame) rank of each frame within its block, whether it is inside, and (batch, 1) a number in 0..B-1."""
    draws, inside = _draws(frame_lengths, block_size, generator)
    batch, frames = draws.shape
    number = torch.randint(block_size, (batch, 1), generator=generator, device=draws.device)
    size = max(1, min(block_size, frames))  # a block beyond the frames takes no memory
    padded = torch.nn.functional.pad(draws, (0, -frames % size), value=2.0)
    rank = _rank(padded.view(batch, padded.shape[1] // size, size))
    return rank.flatten(1)[:, :frames], inside, number


def _rank(draws: Tensor) -> Tensor:
    """The rank of each number in ascending order along the last axis."""
    return draws.argsort(dim=-1, stable=True).argsort(dim=-1)


def _widened(committed: Tensor, frame_lengths: Tensor, width: int | None) -> Tensor:
    if width is not None:
        if width < committed.shape[1]:
            raise ValueError(f"width {width} is less than the longest of frame_lengths, {committed.shape[1]}")
        committed = torch.nn.functional.pad(committed, (0, width - committed.shape[1]))
    return committed.to(frame_lengths.device) if isinstance(frame_lengths, Tensor) else committed
