"""What torch does on a CPU in several passes over memory, done in one; the parts of a layer between its products.

At width 256 the products are so small that drawing dropout masks, adding biases and turning pairs cost as much as
they do. Each function here has a plain form in torch, for other devices and types, compilation and export; and a
compiled one for training on a CPU, with the same result. Dropout's mask is a hash of (seed, position), which the
backward pass makes again instead of storing it.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


def dropout(x: Tensor, rate: float, training: bool) -> Tensor:
    """Zero every number with probability ``rate`` and scale the others so that the mean stays."""
    if not training or rate == 0.0:
        return x
    if not _on_cpu(x):
        return functional.dropout(x, rate)
    return _Dropout.apply(x, rate, _seed())


def add_dropped(x: Tensor, branch: Tensor, rate: float, training: bool) -> Tensor:
    """x + dropout(branch)."""
    if not training or rate == 0.0:
        return x + branch
    if not _on_cpu(branch):
        return x + functional.dropout(branch, rate)
    return _AddDropped.apply(x, branch, rate, _seed())


def linear_relu(x: Tensor, linear: nn.Linear) -> Tensor:
    """relu(linear(x))."""
    if not (torch.is_grad_enabled() and _on_cpu(x)):
        return functional.relu(linear(x))
    product = functional.linear(x.flatten(0, -2), linear.weight)
    return _BiasRelu.apply(product, linear.bias).view(*x.shape[:-1], -1)


def linear_rotate(x: Tensor, linear: nn.Linear, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """linear(x), (batch, frame, 3 * head * size), with its first two thirds, queries and keys, turned.

    Each pair (y[i], y[i + size/2]) of a head is turned by the angle of its frame (rotary positions): attention then
    depends on relative positions only. ``rotation``: cosines and sines, (frame, size / 2).
    """
    if not (torch.is_grad_enabled() and _on_cpu(x)):
        cosine, sine = (angles[:, None, :] for angles in rotation)  # (frame, 1, size / 2)
        query, key, value = linear(x).chunk(3, dim=-1)
        turned = [_turned(y.unflatten(-1, (-1, 2 * cosine.shape[-1])), cosine, sine) for y in (query, key)]
        return torch.cat((*turned, value), dim=-1)
    product = functional.linear(x.flatten(0, 1), linear.weight)
    return _BiasRotate.apply(product, linear.bias, *rotation).view(*x.shape[:-1], -1)


def _turned(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """(batch, frame, head, size) -> (batch, frame, head * size), every pair turned."""
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1).flatten(2)


def relu_within(x: Tensor, lengths: Tensor) -> Tensor:
    """relu(x), (batch, channel, frame, bin), and zero from frame ``lengths`` on; ``x`` may be overwritten."""
    if torch.is_grad_enabled() and _on_cpu(x):
        return _ReluWithin.apply(x, lengths)
    real = torch.arange(x.shape[2], device=lengths.device) < lengths[:, None]
    return functional.relu(x) * real[:, None, :, None]


def _on_cpu(x: Tensor) -> bool:
    return (
        x.device.type == "cpu"
        and x.dtype in (torch.float32, torch.float64)
        and not torch.is_autocast_enabled("cpu")  # products would come out in bfloat16
        and not torch.compiler.is_compiling()
    )


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
    from imputer import passes

    x = x.contiguous()
    out = torch.empty_like(x)
    base, flat, result = (
        t.view(-1).numpy() for t in (x if added_to is None else added_to.contiguous(), x, out)
    )
    share = 0.0 if added_to is None else 1.0
    passes.masked(base, flat, result, int(rate * 2**32), 1.0 / (1.0 - rate), seed, share)
    return out


class _BiasRelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, product: Tensor, bias: Tensor) -> Tensor:
        from imputer import passes

        passes.bias_relu(product.numpy(), bias.detach().numpy())
        ctx.mark_dirty(product)
        ctx.save_for_backward(product)
        return product

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        from imputer import passes

        (output,) = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        below, total = torch.empty_like(gradient), gradient.new_zeros(gradient.shape[1])
        passes.bias_relu_backward(gradient.numpy(), output.numpy(), below.numpy(), total.numpy())
        return below, total


class _BiasRotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, product: Tensor, bias: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        from imputer import passes

        passes.bias_rotate(product.numpy(), bias.detach().numpy(), cosine.numpy(), sine.numpy())
        ctx.mark_dirty(product)
        ctx.save_for_backward(cosine, sine)
        return product

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        from imputer import passes

        gradient = gradients[0].contiguous()
        below, total = torch.empty_like(gradient), gradient.new_zeros(gradient.shape[1])
        angles = (angle.numpy() for angle in ctx.saved_tensors)
        passes.bias_rotate_backward(gradient.numpy(), below.numpy(), total.numpy(), *angles)
        return below, total, None, None


class _ReluWithin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, lengths: Tensor) -> Tensor:
        x.relu_()
        for item, length in enumerate(lengths.tolist()):
            x[item, :, length:] = 0.0
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (output,) = ctx.saved_tensors  # zero wherever no gradient may pass
        return torch.ops.aten.threshold_backward(gradients[0], output, 0.0), None
