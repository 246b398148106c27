# mypy: allow-untyped-defs
"""Runs: stretches of masked frames between two known states, and the cells an alignment can reach in them.

A state is 2j for a blank after j tokens and 2j - 1 for a frame that emits token j, in both topologies. The frame
before the first counts as a committed blank in state 0, the one after the last as a committed blank in state 2S.
"""

from typing import NamedTuple

import numpy as np

from imputer.lattice.arguments import MASKED
from imputer.lattice.compilation import entry, part

ZERO = np.int64(0)  # a plain 0 is a type of its own: what it is passed to would be compiled twice
VECTOR = 16  # cells that one iteration of a compiled loop processes; rows are padded to a multiple of it
NARROW = 8  # rows up to this width are not padded


class Run(NamedTuple):
    """A run of masked frames between the states ``before`` and ``after``."""

    start: int  # offset of its first frame in the scores
    frames: int
    before: int
    after: int
    begun: int  # tokens begun on entry
    fewest: int  # tokens begun in its last frame, at least
    most: int  # and at most


@part()
def run_end(states, frame, length):
    """The first committed frame at or after ``frame``, or the length."""
    while frame < length and states[frame] == MASKED:
        frame += 1
    return frame


@part()
def token_range(before, after, merge_repeats):
    """(tokens begun on entry, fewest and most begun in the run's last frame) between two committed states."""
    most = (after + 1) // 2 if merge_repeats else after // 2
    return (before + 1) // 2, after // 2, most


@part()
def band(frame, frames, begun, fewest, most):
    """(lowest, highest) number of tokens begun after ``frame`` of ``frames`` of a run."""
    return max(begun, fewest - (frames - frame)), min(begun + frame, most)


@part()
def first_token(before, merge_repeats):
    """The first token a run may emit: the token of state ``before`` continues only if repeats merge."""
    return (before + 1) // 2 + (0 if merge_repeats and before % 2 else 1)


@part()
def band_width(frames, begun, fewest, most):
    """The widest row of the band, or 0 when the run cannot get from its entry to its exit."""
    if fewest - begun > frames or most < begun:
        return 0
    return min(most - begun, frames - max(0, fewest - begun)) + 1


@part()
def row_length(width):
    """Cells from row to row: the band, padded to whole vectors unless it is narrow, and one cell on either side."""
    if width <= NARROW:
        return width + 2
    return -(-width // VECTOR) * VECTOR + 2


@part()
def run_at(states, frame, length, size, before, origin, frame_stride, merge_repeats):
    """The run of masked frames that starts at ``frame``."""
    end = run_end(states, frame, length)
    after = states[end] if end < length else 2 * size
    begun, fewest, most = token_range(before, after, merge_repeats)
    return Run(origin + frame * frame_stride, end - frame, before, after, begun, fewest, most)


@part()
def write_single_path(states, frame, end, before, after, merge_repeats):
    """If the run [frame, end) has a single path, write its states, as if committed. Returns whether it has."""
    begun, fewest, _ = token_range(before, after, merge_repeats)
    frames, tokens = end - frame, fewest - begun
    if merge_repeats and before == after:
        states[frame:end] = before
    elif not merge_repeats and tokens == 0:
        states[frame:end] = 2 * begun
    elif not merge_repeats and tokens == frames:
        for t in range(frames):
            states[frame + t] = 2 * (begun + t) + 1
    else:
        return False
    return True


@part()
def measure(states, length, size, merge_repeats):
    """(cells that some alignment reaches, cells in the largest table of rows); writes the states of single paths."""
    cells, table = 0, 0
    frame, before = ZERO, ZERO
    while frame < length:
        if states[frame] == MASKED:
            end = run_end(states, frame, length)
            after = states[end] if end < length else 2 * size
            if not write_single_path(states, frame, end, before, after, merge_repeats):
                begun, fewest, most = token_range(before, after, merge_repeats)
                frames = end - frame
                width = band_width(frames, begun, fewest, most)
                if width > 0:
                    table = max(table, (frames + 1) * row_length(width))
                    first = first_token(before, merge_repeats)
                    for step in range(1, frames + 1):
                        lowest, highest = band(step, frames, begun, fewest, most)
                        cells += max(0, highest - max(lowest, first) + 1)
                frame = end
                continue
        before = states[frame]
        cells += before % 2
        frame += 1
    return cells, table


@entry
def list_runs(states, frame_lengths, target_lengths, table):
    """Fill ``table`` (run, 5) with the runs of all items, as many as fit; return how many there are."""
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
