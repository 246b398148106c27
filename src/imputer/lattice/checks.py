"""Shapes and types of the arguments; what is wrong with them is said before any work."""

import torch
from torch import Tensor

FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def check_log_probs(log_probs: Tensor, blank: int = 0) -> None:
    if not isinstance(log_probs, Tensor) or log_probs.dim() != 3:
        shape = tuple(log_probs.shape) if isinstance(log_probs, Tensor) else type(log_probs).__name__
        raise ValueError(f"log_probs must be a tensor (batch, frame, token), got {shape}")
    if log_probs.dtype not in FLOATING:
        raise ValueError(f"log_probs must be float32, float64, bfloat16 or float16, got {log_probs.dtype}")
    if not 0 <= blank < log_probs.shape[2]:
        raise ValueError(f"blank must be a token id in 0..{log_probs.shape[2] - 1}, got {blank}")


def check_integers(name: str, given: Tensor, shape: tuple[int | None, ...]) -> Tensor:
    """``given`` as a tensor; None in ``shape`` stands for any size."""
    tensor = torch.as_tensor(given)
    if tensor.dtype not in INTEGERS:
        raise ValueError(f"{name} must hold integers, got {tensor.dtype}")
    _check_shape(name, tensor, shape)
    return tensor


def check_committed(given: Tensor, shape: tuple[int | None, ...]) -> Tensor:
    if not isinstance(given, Tensor) or given.dtype != torch.bool:
        kind = given.dtype if isinstance(given, Tensor) else type(given).__name__
        raise ValueError(f"committed must be a bool tensor (batch, frame), got {kind}")
    _check_shape("committed", given, shape)
    return given


def _check_shape(name: str, tensor: Tensor, shape: tuple[int | None, ...]) -> None:
    fits = tensor.dim() == len(shape) and all(
        wanted is None or wanted == got for wanted, got in zip(shape, tensor.shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} must have shape ({wanted}) to fit log_probs, got {tuple(tensor.shape)}")
