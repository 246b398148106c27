"""Optimisers, learning rates and averaged weights; a new one is a function and a line in a dict."""

import contextlib
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from imputer import configs

PRETRAINED = "front_end.encoder."  # weights of an encoder that is trained with the model


def adamw(model: nn.Module, settings: configs.Training) -> torch.optim.Optimizer:
    """AdamW; weight decay on matrices only, a share of the learning rate for a pretrained encoder."""
    learnt = [(name.startswith(PRETRAINED), p) for name, p in model.named_parameters() if p.requires_grad]
    groups = [
        {
            "params": [p for pretrained, p in learnt if pretrained == inside and (p.dim() > 1) == matrices],
            "weight_decay": settings.weight_decay if matrices else 0.0,
            "share": settings.pretrained_rate if inside else 1.0,
        }
        for inside in (False, True)
        for matrices in (True, False)
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.98), fused=True)


OPTIMIZERS: dict[str, Callable[[nn.Module, configs.Training], torch.optim.Optimizer]] = {"adamw": adamw}


# A schedule is what the peak learning rate is multiplied with after the warm-up; ``step`` counts from 0.


def cosine(settings: configs.Training, step: int) -> float:
    """From 1 down to 0.01 over ``schedule_steps``, or all steps."""
    length = settings.schedule_steps or settings.steps
    done = (step - settings.warmup_steps) / max(1, length - settings.warmup_steps)
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(1.0, max(0.0, done))))


def inverse_sqrt(settings: configs.Training, step: int) -> float:
    """Proportional to 1 / sqrt(step)."""
    return math.sqrt(max(1, settings.warmup_steps) / (step + 1))


def constant(settings: configs.Training, step: int) -> float:
    """1."""
    return 1.0


SCHEDULES: dict[str, Callable[[configs.Training, int], float]] = {
    "cosine": cosine,
    "inverse_sqrt": inverse_sqrt,
    "constant": constant,
}


def learning_rate(settings: configs.Training, step: int) -> float:
    """Linear warm-up to the peak, then the schedule; ``step`` counts from 0."""
    warm = (step + 1) / max(1, settings.warmup_steps)
    return settings.learning_rate * (warm if warm < 1 else SCHEDULES[settings.schedule](settings, step))


def update_average(average: dict[str, Tensor], model: nn.Module, decay: float, step: int) -> None:
    """Move the averaged weights towards the current ones; faster in the first steps, which have little to average."""
    if average:
        decay = min(decay, (1 + step) / (10 + step))
        current = [p.detach() for p in model.parameters()]
        torch._foreach_lerp_(list(average.values()), current, 1 - decay)


@contextlib.contextmanager
def averaged_weights(model: nn.Module, average: dict[str, Tensor]) -> Iterator[None]:
    """Put the averaged weights into the model while inside; no effect if there are none."""
    if not average:
        yield
        return
    kept = {name: p.detach().clone() for name, p in model.named_parameters()}
    copy_into(model, average)
    try:
        yield
    finally:
        copy_into(model, kept)


def copy_into(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Set the parameters of a model to these values."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
