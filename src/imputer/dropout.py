"""Dropout that does not dominate a small network on a CPU.

torch draws its CPU mask with one serial generator, which at width 256 costs as much as the matrix products
around it. Here a counter-based hash of (seed, position) makes the mask inside one vectorised loop, and the
backward pass makes it again instead of storing it.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor


def dropout(x: Tensor, rate: float, training: bool) -> Tensor:
    """Zero every number with probability ``rate`` and scale the others so that the mean stays."""
    if not training or rate == 0.0:
        return x
    if _elsewhere(x):
        return torch.nn.functional.dropout(x, rate)
    return _Dropout.apply(x, rate, _seed())


def add_dropped(x: Tensor, branch: Tensor, rate: float, training: bool) -> Tensor:
    """x + dropout(branch), in one go."""
    if not training or rate == 0.0:
        return x + branch
    if _elsewhere(branch):
        return x + torch.nn.functional.dropout(branch, rate)
    return _AddDropped.apply(x, branch, rate, _seed())


def _elsewhere(x: Tensor) -> bool:
    return x.device.type != "cpu" or x.dtype != torch.float32 or torch.compiler.is_compiling()


def _seed() -> int:
    return int(torch.randint(2**31, ()))


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rate: float, seed: int) -> Tensor:
        ctx.rate, ctx.seed = rate, seed
        return _masked(x, rate, seed)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _masked(gradients[0], ctx.rate, ctx.seed), None, None


class _AddDropped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, branch: Tensor, rate: float, seed: int) -> Tensor:
        ctx.rate, ctx.seed = rate, seed
        return _masked(branch, rate, seed, added_to=x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        return gradients[0], _masked(gradients[0], ctx.rate, ctx.seed), None, None


def _masked(x: Tensor, rate: float, seed: int, added_to: Tensor | None = None) -> Tensor:
    """x, or ``added_to`` + x, with x masked and scaled."""
    x = x.contiguous()
    out = torch.empty_like(x)
    arrays = [t.contiguous().view(-1).numpy() for t in (x if added_to is None else added_to, x, out)]
    _kernel()(*arrays, int(rate * 2**32), 1.0 / (1.0 - rate), seed, float(added_to is not None))
    return out


@cache
def _kernel() -> Callable[..., None]:
    import numba
    import numpy as np

    u32 = np.uint32

    @numba.njit(nogil=True, cache=True)
    def kernel(base: Any, x: Any, out: Any, threshold: int, scale: float, seed: int, share: float) -> None:
        """out = share * base + masked x."""
        limit, factor, start, part = u32(threshold), np.float32(scale), u32(seed), np.float32(share)
        for i in range(x.size):
            h = u32(
                u32(i) * u32(0x9E3779B9) + start
            )  # then a 32-bit finaliser: every bit of i reaches every bit
            h = u32(u32(h ^ (h >> u32(16))) * u32(0x7FEB352D))
            h = u32(u32(h ^ (h >> u32(15))) * u32(0x846CA68B))
            h = u32(h ^ (h >> u32(16)))
            out[i] = part * base[i] + (x[i] * factor if h >= limit else np.float32(0.0))

    return kernel
