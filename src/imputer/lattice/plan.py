# mypy: allow-untyped-defs
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
from numba import njit
from torch import Tensor

from imputer.lattice.checks import check_committed, check_integers, check_log_probs

MASKED = -1


@dataclass(frozen=True)
class Plan:
    """A checked batch, on the host; ``survey`` below fills the arrays."""

    shape: tuple[int, int, int]  # of log_probs: (batch, frame, token)
    targets: np.ndarray  # (batch, target)
    frame_lengths: np.ndarray  # (batch,)
    target_lengths: np.ndarray  # (batch,)
    states: np.ndarray  # (batch, frame): the state of a committed frame, MASKED elsewhere
    cells: np.ndarray  # (batch,): (frame, target position) pairs that some alignment can reach
    scratch: np.ndarray  # (batch,): most numbers one run of the item needs to hold a row for each frame
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


FRAMES, TOKENS, TARGET, ALIGNMENT, COLLAPSE, COMMITTED = range(1, 7)


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


@njit(cache=True, nogil=True)
def survey(
    targets, frame_lengths, target_lengths, alignments, committed, forced,
    tokens, blank, merge_repeats, states, cells, scratch,
):  # fmt: skip
    """Check every item and write its states and sizes; return (fault, item, position), fault 0 when sound."""
    for item in range(targets.shape[0]):
        length, size = frame_lengths[item], target_lengths[item]
        if length < 0 or length > states.shape[1]:
            return FRAMES, item, 0
        if size < 0 or size > targets.shape[1]:
            return TOKENS, item, 0
        for position in range(size):
            token = targets[item, position]
            if token < 0 or token >= tokens or token == blank:
                return TARGET, item, position
        states[item] = MASKED
        if forced:
            fault, frame = _force(
                alignments[item], committed[item], length, targets[item], size, tokens, blank, merge_repeats,
                states[item],
            )  # fmt: skip
            if fault:
                return fault, item, frame
        cells[item], scratch[item] = _measure(states[item], length, size, merge_repeats)
    return 0, 0, 0


@njit(cache=True, nogil=True)
def _force(alignment, committed, length, target, size, tokens, blank, merge_repeats, states):
    """Write the states of the committed frames: the state path of the whole alignment, seen where committed."""
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


@njit(cache=True, nogil=True)
def run_end(states, frame, length):
    """The first committed frame at or after ``frame``, or the length."""
    while frame < length and states[frame] == MASKED:
        frame += 1
    return frame


@njit(cache=True, nogil=True)
def token_range(before, after, merge_repeats):
    """(tokens begun on entry, fewest and most begun in the run's last frame) between two committed states."""
    most = (after + 1) // 2 if merge_repeats else after // 2
    return (before + 1) // 2, after // 2, most


@njit(cache=True, nogil=True)
def band(frame, frames, begun, fewest, most):
    """(lowest, highest) number of tokens begun after ``frame`` of ``frames`` of a run."""
    return max(begun, fewest - (frames - frame)), min(begun + frame, most)


@njit(cache=True, nogil=True)
def first_token(before, merge_repeats):
    """The first token a run may emit: the committed one goes on only if repeats merge."""
    return (before + 1) // 2 + (0 if merge_repeats and before % 2 else 1)


@njit(cache=True, nogil=True)
def band_width(frames, begun, fewest, most):
    """The widest row of the band, or 0 when the run cannot get from its entry to its exit."""
    if fewest - begun > frames or most < begun:
        return 0
    return min(most - begun, frames - max(0, fewest - begun)) + 1


@njit(cache=True, nogil=True)
def _measure(states, length, size, merge_repeats):
    cells, scratch = 0, 0
    frame, before = 0, 0
    while frame < length:
        if states[frame] != MASKED:
            before = states[frame]
            cells += before % 2
            frame += 1
            continue
        end = run_end(states, frame, length)
        after = states[end] if end < length else 2 * size
        begun, fewest, most = token_range(before, after, merge_repeats)
        frames = end - frame
        width = band_width(frames, begun, fewest, most)
        scratch = max(scratch, (frames + 1) * (width + 2))
        if width > 0:
            first = first_token(before, merge_repeats)
            for step in range(1, frames + 1):
                lowest, highest = band(step, frames, begun, fewest, most)
                cells += max(0, highest - max(lowest, first) + 1)
        frame = end
    return cells, scratch


@njit(cache=True, nogil=True)
def list_runs(states, frame_lengths, target_lengths, table):
    """Fill ``table`` with the runs of all items as far as it reaches; return how many there are."""
    count = 0
    for item in range(len(frame_lengths)):
        length = frame_lengths[item]
        frame, before = 0, 0
        while frame < length:
            if states[item, frame] != MASKED:
                before = states[item, frame]
                frame += 1
                continue
            end = run_end(states[item], frame, length)
            if count < len(table):
                table[count, 0], table[count, 1], table[count, 2] = item, frame, end - frame
                table[count, 3] = before
                table[count, 4] = states[item, end] if end < length else 2 * target_lengths[item]
            count += 1
            frame = end
    return count
