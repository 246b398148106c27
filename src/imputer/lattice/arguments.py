# mypy: allow-untyped-defs
"""The only place where arguments of the lattice and the objectives are checked, for both implementations.

Shapes and types are checked on the tensors, values in one compiled loop (``check_item``) that also derives the
states of committed frames. A ValueError names the argument, the item, the value and what is allowed.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from imputer.lattice.compilation import part

FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)

# The range of scores, the same in both implementations. The limits are finite, so that no difference of infinities
# becomes NaN.
LOWEST = -(2.0**45) * math.log(2)  # replaces any lower score, -inf included; -2.4e13
IMPOSSIBLE = LOWEST / 2  # a run or a committed frame with a lower log weight has probability 0
HIGHEST = 1e9  # a higher score, +inf included, counts as NaN
UNREACHED = -1e35  # log weight of a state that no path reaches; below any sum of LOWEST

MASKED = -1  # the state of a frame that is not committed
FRAME_LENGTH, TARGET_LENGTH, TARGET, ALIGNMENT, COLLAPSE, COMMITTED = range(1, 7)  # faults of an item


def check_log_probs(log_probs: Tensor, blank: int = 0) -> None:
    if not isinstance(log_probs, Tensor) or log_probs.dim() != 3:
        shape = tuple(log_probs.shape) if isinstance(log_probs, Tensor) else type(log_probs).__name__
        raise ValueError(f"log_probs must be a tensor (batch, frame, token), got {shape}")
    if log_probs.dtype not in FLOATING:
        raise ValueError(f"log_probs must be float32, float64, bfloat16 or float16, got {log_probs.dtype}")
    if not 0 <= blank < log_probs.shape[2]:
        raise ValueError(f"blank must be a token id in 0..{log_probs.shape[2] - 1}, got {blank}")


def check_integers(name: str, values: Tensor, shape: tuple[int | None, ...]) -> Tensor:
    """``values`` as a tensor; None in ``shape`` stands for any size."""
    tensor = torch.as_tensor(values)
    if tensor.dtype not in INTEGERS:
        raise ValueError(f"{name} must hold integers, got {tensor.dtype}")
    _check_shape(name, tensor, shape)
    return tensor


def check_committed(committed: Tensor, shape: tuple[int | None, ...]) -> Tensor:
    if not isinstance(committed, Tensor) or committed.dtype != torch.bool:
        kind = committed.dtype if isinstance(committed, Tensor) else type(committed).__name__
        raise ValueError(f"committed must be a bool tensor (batch, frame), got {kind}")
    _check_shape("committed", committed, shape)
    return committed


def _check_shape(name: str, tensor: Tensor, shape: tuple[int | None, ...]) -> None:
    fits = tensor.dim() == len(shape) and all(
        wanted is None or wanted == size for wanted, size in zip(shape, tensor.shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} must have shape ({wanted}) to fit log_probs, got {tuple(tensor.shape)}")


def check_imitation(log_probs: Tensor, alignments: Tensor, frame_lengths: Tensor) -> Tensor:
    """Check the arguments of ``objectives.imitation``; return (batch, frame) bool, True up to the length.

    The values are checked with a single synchronisation of a GPU.
    """
    check_log_probs(log_probs)
    batch, frames, tokens = log_probs.shape
    alignments = check_integers("alignments", alignments, (batch, frames))
    lengths = check_integers("frame_lengths", frame_lengths, (batch,)).to(alignments.device)
    inside = torch.arange(frames, device=alignments.device) < lengths[:, None]
    wrong_length = (lengths < 0) | (lengths > frames)
    wrong_id = inside & ((alignments < 0) | (alignments >= tokens))
    if not (wrong_length.any() | wrong_id.any()).item():
        return inside
    if wrong_length.any():
        item = int(wrong_length.nonzero()[0])
        raise ValueError(
            f"frame_lengths[{item}] = {lengths[item]} is not in 0..{frames}, the frames of log_probs"
        )
    item, frame = wrong_id.nonzero()[0].tolist()
    raise ValueError(f"alignments[{item}, {frame}] = {alignments[item, frame]} is not in 0..{tokens - 1}")


@part()
def check_item(target, length, size, alignment, committed, is_forced, tokens, blank, merge_repeats, states):
    """Check one item and write the states of its committed frames; return (fault or 0, position of the fault)."""
    if length < 0 or length > len(states):
        return FRAME_LENGTH, 0
    if size < 0 or size > len(target):
        return TARGET_LENGTH, 0
    for position in range(size):
        token = target[position]
        if token < 0 or token >= tokens or token == blank:
            return TARGET, position
    states[:] = MASKED
    if is_forced:
        return _write_states(target, length, size, alignment, committed, tokens, blank, merge_repeats, states)
    return 0, 0


@part()
def _write_states(target, length, size, alignment, committed, tokens, blank, merge_repeats, states):
    """The state path of the whole alignment, written where the frame is committed."""
    emitted, previous = 0, blank
    for frame in range(length):
        token = alignment[frame]
        if token < 0 or token >= tokens:
            return ALIGNMENT, frame
        if token != blank and not (merge_repeats and token == previous):
            emitted += 1
            if emitted > size or target[emitted - 1] != token:
                return COLLAPSE, frame
        if committed[frame]:
            states[frame] = 2 * emitted - (token != blank)
        previous = token
    if emitted != size:
        return COLLAPSE, length - 1
    for frame in range(length, len(committed)):
        if committed[frame]:
            return COMMITTED, frame
    return 0, 0


def fault_message(fault: int, item: int, position: int, plan: Any, alignments: np.ndarray) -> str:
    """What is wrong with an item of a ``Plan``, with its values."""
    _, frames, tokens = plan.shape
    length, size = plan.frame_lengths[item], plan.target_lengths[item]
    if fault == FRAME_LENGTH:
        return f"frame_lengths[{item}] = {length} is not in 0..{frames}, the frames of log_probs"
    if fault == TARGET_LENGTH:
        return f"target_lengths[{item}] = {size} is not in 0..{plan.targets.shape[1]}, the width of targets"
    if fault == TARGET:
        return (
            f"targets[{item}, {position}] = {plan.targets[item, position]} is not a token: "
            f"tokens are 0..{tokens - 1} without the blank {plan.blank}"
        )
    if fault == ALIGNMENT:
        return (
            f"alignments[{item}, {position}] = {alignments[item, position]} is not in 0..{tokens - 1}; "
            "give the whole alignment, not the one with mask tokens"
        )
    if fault == COLLAPSE:
        rule = "merging repeats" if plan.merge_repeats else "without merging repeats"
        return (
            f"alignments[{item}] does not collapse to targets[{item}] ({rule}), first seen at frame {position}: "
            f"alignment {_short(alignments[item, :length])}, target {_short(plan.targets[item, :size])}"
        )
    return f"committed[{item}, {position}] is True, beyond frame_lengths[{item}] = {length}"


def _short(ids: np.ndarray, most: int = 24) -> str:
    shown = ", ".join(str(value) for value in ids[:most])
    return f"[{shown}{', ...' if len(ids) > most else ''}] of length {len(ids)}"
