"""What a batch asks of the lattice: checked once, as plain arrays, for both implementations.

Every frame of an alignment has a *state*, the same code in both topologies: 2j for a blank after j tokens,
2j - 1 for a frame that emits token j. Committed frames pin their state; ``MASKED`` frames are free. The frame
before the first counts as a committed blank in state 0, the one after the last as a committed blank in state
2S, so that every run of masked frames lies between two known states and is a problem of its own.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from imputer.lattice.checks import check_committed, check_integers, check_log_probs
from imputer.lattice.compiled import ALIGNMENT, COLLAPSE, FRAMES, TARGET, TOKENS, list_runs, survey


@dataclass(frozen=True)
class Plan:
    """A checked batch, on the host; ``survey`` fills the arrays."""

    shape: tuple[int, int, int]  # of log_probs: (batch, frame, token)
    targets: np.ndarray  # (batch, target)
    frame_lengths: np.ndarray  # (batch,)
    target_lengths: np.ndarray  # (batch,)
    states: np.ndarray  # (batch, frame): where it is known, committed or without choice; else MASKED
    cells: np.ndarray  # (batch,): (frame, target position) pairs that some alignment can reach
    scratch: np.ndarray  # (batch,): numbers in the largest table of rows, one row a frame of a run
    blank: int
    merge_repeats: bool

    @cached_property
    def runs(self) -> np.ndarray:
        """(run, 5): item, first frame, number of frames, state before, state after."""
        count = list_runs(self.states, self.frame_lengths, self.target_lengths, np.empty((0, 5), np.int64))
        table = np.empty((count, 5), np.int64)
        list_runs(self.states, self.frame_lengths, self.target_lengths, table)
        return table


def make(
    log_probs: Tensor,
    targets: Tensor,
    frame_lengths: Tensor,
    target_lengths: Tensor,
    alignments: Tensor | None,
    committed: Tensor | None,
    blank: int,
    merge_repeats: bool,
) -> Plan:
    """Check everything before any work; a ValueError names the argument, the item and the values."""
    check_log_probs(log_probs, blank)
    batch, frames, tokens = log_probs.shape
    integers = {
        "targets": check_integers("targets", targets, (batch, None)),
        "frame_lengths": check_integers("frame_lengths", frame_lengths, (batch,)),
        "target_lengths": check_integers("target_lengths", target_lengths, (batch,)),
    }
    if (alignments is None) != (committed is None):
        raise ValueError("alignments and committed go together: give both or neither")
    if alignments is not None and committed is not None:
        integers["alignments"] = check_integers("alignments", alignments, (batch, frames))
        integers["committed"] = check_committed(committed, (batch, frames))
    arrays = _on_host(integers)
    width = frames if alignments is not None else 0
    plan = Plan(
        shape=(batch, frames, tokens),
        targets=arrays["targets"],
        frame_lengths=arrays["frame_lengths"],
        target_lengths=arrays["target_lengths"],
        states=np.empty((batch, frames), np.int32),
        cells=np.empty(batch, np.int64),
        scratch=np.empty(batch, np.int64),
        blank=blank,
        merge_repeats=merge_repeats,
    )
    given = arrays.get("alignments", np.empty((batch, width), np.int64))
    kept = arrays.get("committed", np.empty((batch, width), np.int64))
    fault, item, position = survey(
        plan.targets, plan.frame_lengths, plan.target_lengths, given, kept, alignments is not None,
        tokens, blank, merge_repeats, plan.states, plan.cells, plan.scratch,
    )  # fmt: skip
    if fault:
        raise ValueError(_complaint(fault, item, position, plan, given))
    return plan


def _on_host(tensors: dict[str, Tensor]) -> dict[str, np.ndarray]:
    """int64 arrays on the host; tensors on a GPU come over in one transfer, hence one synchronisation."""
    if any(tensor.device.type != "cpu" for tensor in tensors.values()):
        device = next(tensor.device for tensor in tensors.values() if tensor.device.type != "cpu")
        flat = torch.cat([tensor.reshape(-1).to(device, torch.int64) for tensor in tensors.values()]).cpu()
        parts = flat.split([tensor.numel() for tensor in tensors.values()])
        tensors = {
            name: part.view(tensor.shape) for part, (name, tensor) in zip(parts, tensors.items(), strict=True)
        }
    return {name: tensor.to(torch.int64).contiguous().numpy() for name, tensor in tensors.items()}


def _complaint(fault: int, item: int, position: int, plan: Plan, alignments: np.ndarray) -> str:
    _, frames, tokens = plan.shape
    length, size = plan.frame_lengths[item], plan.target_lengths[item]
    if fault == FRAMES:
        return f"frame_lengths[{item}] = {length} is not in 0..{frames}, the frames of log_probs"
    if fault == TOKENS:
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
