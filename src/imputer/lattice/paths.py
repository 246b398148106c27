# mypy: allow-untyped-defs, disable-error-code="call-arg"
"""The best path, compiled: the recursion of ``steps`` with max for + and + for *, run by run.

Two rows of scores are held, and one byte of back pointers per cell. A run with more cells than the table of back
pointers holds is processed in chunks: the first pass saves the scores at the start of every chunk, and the trace back
computes the back pointers of one chunk at a time.
"""

from typing import NamedTuple

import numpy as np

from imputer.lattice.arguments import IMPOSSIBLE, LOWEST, MASKED, UNREACHED
from imputer.lattice.compilation import entry, inlined, part
from imputer.lattice.runs import ZERO, band, band_width, row_length, run_at
from imputer.lattice.scores import Source, lay_out, new_layout, ordered_score, widen
from imputer.lattice.weights import ONE

BLANK_WINS, STAYS = 1, 2  # back pointer of a cell: best state of its token count; best way into the token
U = np.uint64


class PathTables(NamedTuple):
    """Working memory for the best path of one run."""

    b: np.ndarray  # two rows, used alternately: the best score ending in a blank
    k: np.ndarray  # and ending in a token
    scores: np.ndarray  # one row
    pointers: np.ndarray  # rows of the current chunk, its entry first
    saved_b: np.ndarray  # the entry rows of the chunks of a long run
    saved_k: np.ndarray


@part()
def read_row(source, start, lowest, tokens, scores, width):
    """The scores of tokens lowest, lowest + 1, ... of the frame at ``start``; LOWEST where the band has ended."""
    for c in range(tokens):
        scores[c] = widen(source.scores[start + source.places[lowest + c]])
    for c in range(tokens, width):
        scores[c] = LOWEST


@part()
def best_row(b, k, before, at, pointers, pointer, blank_score, scores, distinct, lowest, loop, width):
    """``step_blank`` and ``step_token`` with max for + and + for *; among equals the highest state wins."""
    for c in range(width):
        stay = k[before + c] + loop
        blank_before, token_before = b[before + c - ONE], k[before + c - ONE]
        enter = max(blank_before, token_before) if distinct[lowest + c] else blank_before
        blank = max(b[before + c], k[before + c]) + blank_score
        token = max(stay, enter) + ordered_score(scores[c])
        b[at + c] = blank
        k[at + c] = token
        pointers[pointer + c] = (BLANK_WINS if blank >= token else 0) | (STAYS if stay >= enter else 0)


@inlined
def advance_best(source, run, loop, since, until, stride, tables):
    """Scores and back pointers of the frames after ``since`` up to ``until``; return where the last row is."""
    b, k, pointers = tables.b, tables.k, tables.pointers
    here, there = 1, stride + 1
    for c in range(stride):
        pointers[c] = BLANK_WINS if b[c] >= k[c] else 0
    low, _ = band(since, run.frames, run.begun, run.fewest, run.most)
    for t in range(since + 1, until + 1):
        lowest, highest = band(t, run.frames, run.begun, run.fewest, run.most)
        shift, low = lowest - low, lowest
        frame = U(run.start + (t - 1) * source.frame_stride)
        blank_score = ordered_score(widen(source.scores[frame + U(source.blank)]))
        read_row(source, frame, U(lowest), U(highest - lowest + 1), tables.scores, U(stride - 2))
        best_row(
            b, k, U(here + shift), U(there), pointers, U((t - since) * stride + 1), blank_score,
            tables.scores, source.distinct, U(low), loop, U(stride - 2),
        )  # fmt: skip
        here, there = there, here
    return here


@part()
def best_run(source, run, merge_repeats, target, blank, tables, alignment):
    """The best score of one run; its path goes to ``alignment``."""
    widest = band_width(run.frames, run.begun, run.fewest, run.most)
    if widest == 0:
        return -np.inf
    b, k, distinct = tables.b, tables.k, source.distinct
    loop = 0.0 if merge_repeats else UNREACHED  # of a token to itself
    stride = row_length(widest)
    chunk = min(run.frames, len(tables.pointers) // stride - 1)
    b[: 2 * stride] = UNREACHED
    k[: 2 * stride] = UNREACHED
    if run.before % 2:
        k[1] = 0.0
    else:
        b[1] = 0.0
    chunks = -(-run.frames // chunk)
    here, j, emits_blank, best = 1, ZERO, False, 0.0
    for turn in range(
        2 * chunks
    ):  # forward, then back; in one loop, so that ``advance_best`` is compiled once
        number = min(turn, 2 * chunks - 1 - turn)
        since, until = number * chunk, min(number * chunk + chunk, run.frames)
        place = number * stride + 1
        if 0 < turn < chunks:
            move_rows(b, k, here, b, k, 1, stride)
        if turn < chunks and chunks > 1:
            move_rows(b, k, 1, tables.saved_b, tables.saved_k, place, stride)
        if turn > chunks:
            move_rows(tables.saved_b, tables.saved_k, place, b, k, 1, stride)
        if turn != chunks:
            here = advance_best(source, run, loop, since, until, stride, tables)
        if turn == chunks - 1:
            j, emits_blank, best = last_state(run, b, k, here, distinct, loop)
        if turn >= chunks:
            j, emits_blank = trace_back(
                run, since, until, stride, tables.pointers, distinct, target, blank, alignment, j, emits_blank
            )
    return best


@inlined
def last_state(run, b, k, here, distinct, loop):
    """The best state in a run's last frame, and its score: a step like any other, without an emission."""
    low, _ = band(run.frames, run.frames, run.begun, run.fewest, run.most)
    j = run.after // 2
    cell = here + j - low
    emits_blank, best = b[cell] >= k[cell], max(b[cell], k[cell])
    if run.after % 2:
        if not distinct[j + 1]:
            emits_blank, best = True, b[cell]
        stay = k[cell + 1] + loop
        if stay >= best:
            emits_blank, best, j = False, stay, j + 1
    return j, emits_blank, best


@inlined
def trace_back(run, since, until, stride, pointers, distinct, target, blank, alignment, j, emits_blank):
    """Write the path from its state at frame ``until`` back to ``since + 1``; return its state at ``since``."""
    for t in range(until, since, -1):
        alignment[t - 1] = blank if emits_blank else target[j - 1]
        may_skip = True
        if not emits_blank:
            if pointers[pointer_to(run, since, t, j, stride)] & STAYS:
                continue
            may_skip = distinct[j]
            j -= 1
        emits_blank = not may_skip or pointers[pointer_to(run, since, t - 1, j, stride)] & BLANK_WINS > 0
    return j, emits_blank


@part()
def move_rows(b, k, at, to_b, to_k, to, stride):
    """Copy rows of B and K with the cells on their sides."""
    for c in range(stride):
        to_b[to - 1 + c] = b[at - 1 + c]
        to_k[to - 1 + c] = k[at - 1 + c]


@inlined
def pointer_to(run, since, t, j, stride):
    lowest, _ = band(t, run.frames, run.begun, run.fewest, run.most)
    return (t - since) * stride + 1 + j - lowest


@entry
def best_items(
    start, stop, scores, strides, targets, frame_lengths, target_lengths, states, blank, merge_repeats,
    size, most_cells, totals, alignments,
):  # fmt: skip
    """Best alignments of items start..stop and their scores."""
    places, distinct = new_layout(targets)
    source = Source(scores, strides[1], blank * strides[2], places, distinct)
    longest_row = row_length(targets.shape[1] + 1)
    table = min(size, max(most_cells, 2 * longest_row))
    chunks = states.shape[1] // (table // longest_row - 1) + 1 if table < size else 0
    tables = PathTables(
        b=np.empty(2 * longest_row, np.float64),
        k=np.empty(2 * longest_row, np.float64),
        scores=np.empty(longest_row, np.float64),
        pointers=np.empty(table, np.uint8),
        saved_b=np.empty(chunks * longest_row, np.float64),
        saved_k=np.empty(chunks * longest_row, np.float64),
    )
    for item in range(start, stop):
        length, target_length = frame_lengths[item], target_lengths[item]
        lay_out(targets[item], target_length, blank, strides[2], places, distinct)
        if not merge_repeats:
            distinct[:] = True
        origin = item * strides[0]
        total, is_possible = 0.0 if length > 0 or target_length == 0 else -np.inf, True
        frame, before = ZERO, ZERO
        while frame < length and total != -np.inf:
            if states[item, frame] == MASKED:
                run = run_at(
                    states[item], frame, length, target_length, before, origin, strides[1], merge_repeats
                )
                score = best_run(
                    source, run, merge_repeats, targets[item], blank, tables, alignments[item, frame:]
                )
                frame += run.frames
            else:
                before = states[item, frame]
                token = before % 2
                place = places[(before + 1) // 2] if token else U(source.blank)
                score = ordered_score(widen(scores[U(origin + frame * strides[1]) + place]))
                alignments[item, frame] = targets[item, before // 2] if token else blank
                frame += 1
            total += score
            is_possible = is_possible and score > IMPOSSIBLE
        if total < UNREACHED / 2:  # no alignment exists; otherwise one exists, perhaps of probability 0
            alignments[item, :length] = blank
        totals[item] = total if is_possible else -np.inf
