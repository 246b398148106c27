# mypy: allow-untyped-defs
"""A checked batch as plain arrays on the host, for both implementations."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from imputer.lattice.arguments import (
    check_committed,
    check_integers,
    check_item,
    check_log_probs,
    fault_message,
)
from imputer.lattice.compilation import entry
from imputer.lattice.runs import list_runs, measure


@dataclass(frozen=True)
class Plan:
    """Where the masked runs of a batch are and how large they are; ``prepare_items`` fills the arrays."""

    shape: tuple[int, int, int]  # of log_probs: (batch, frame, token)
    targets: np.ndarray  # (batch, target)
    frame_lengths: np.ndarray  # (batch,)
    target_lengths: np.ndarray  # (batch,)
    states: np.ndarray  # (batch, frame): of committed frames and of runs with a single path; else MASKED
    cells: np.ndarray  # (batch,): (frame, target position) pairs that some alignment can reach
    table: np.ndarray  # (batch,): cells in the largest table of rows, one row per frame of a run
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
    """Check every argument before any work, and lay out the runs."""
    check_log_probs(log_probs, blank)
    batch, frames, tokens = log_probs.shape
    integers = {
        "targets": check_integers("targets", targets, (batch, None)),
        "frame_lengths": check_integers("frame_lengths", frame_lengths, (batch,)),
        "target_lengths": check_integers("target_lengths", target_lengths, (batch,)),
    }
    if (alignments is None) != (committed is None):
        raise ValueError("alignments and committed go together: give both or neither")
    is_forced = alignments is not None
    if alignments is not None and committed is not None:
        integers["alignments"] = check_integers("alignments", alignments, (batch, frames))
        integers["committed"] = check_committed(committed, (batch, frames))
    arrays = _on_host(integers)
    nothing = np.empty((batch, 0), np.int64)
    given, kept = arrays.get("alignments", nothing), arrays.get("committed", nothing)
    plan = Plan(
        shape=(batch, frames, tokens),
        targets=arrays["targets"],
        frame_lengths=arrays["frame_lengths"],
        target_lengths=arrays["target_lengths"],
        states=np.empty((batch, frames), np.int32),
        cells=np.empty(batch, np.int64),
        table=np.empty(batch, np.int64),
        blank=blank,
        merge_repeats=merge_repeats,
    )
    fault, item, position = prepare_items(
        plan.targets, plan.frame_lengths, plan.target_lengths, given, kept, is_forced,
        tokens, blank, merge_repeats, plan.states, plan.cells, plan.table,
    )  # fmt: skip
    if fault:
        raise ValueError(fault_message(fault, item, position, plan, given))
    return plan


@entry
def prepare_items(
    targets, frame_lengths, target_lengths, alignments, committed, is_forced,
    tokens, blank, merge_repeats, states, cells, table,
):  # fmt: skip
    """Check every item and write its states and sizes; return (fault, item, position), fault 0 if all are valid."""
    for item in range(targets.shape[0]):
        length, size = frame_lengths[item], target_lengths[item]
        fault, position = check_item(
            targets[item], length, size, alignments[item], committed[item], is_forced, tokens, blank,
            merge_repeats, states[item],
        )  # fmt: skip
        if fault:
            return fault, item, position
        cells[item], table[item] = measure(states[item], length, size, merge_repeats)
    return 0, 0, 0


def _on_host(tensors: dict[str, Tensor]) -> dict[str, np.ndarray]:
    """int64 arrays on the host; tensors on a GPU are copied in one transfer, hence with one synchronisation."""
    if any(tensor.device.type != "cpu" for tensor in tensors.values()):
        device = next(tensor.device for tensor in tensors.values() if tensor.device.type != "cpu")
        flat = torch.cat([tensor.reshape(-1).to(device, torch.int64) for tensor in tensors.values()]).cpu()
        parts = flat.split([tensor.numel() for tensor in tensors.values()])
        tensors = {
            name: part.view(tensor.shape) for part, (name, tensor) in zip(parts, tensors.items(), strict=True)
        }
    return {name: tensor.to(torch.int64).contiguous().numpy() for name, tensor in tensors.items()}
