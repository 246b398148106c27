# mypy: allow-untyped-defs, disable-error-code="call-arg"
"""The sum over alignments and its posteriors, compiled: prefixes forward, suffixes backward, run by run.

A run too long for the tables is processed in chunks: the first row of every chunk is saved, and the backward pass
computes the other rows again.
"""

from typing import NamedTuple

import numpy as np

from imputer.lattice.arguments import MASKED
from imputer.lattice.compilation import allocator, entry, inlined, part
from imputer.lattice.runs import ZERO, band, band_width, first_token, row_length, run_at
from imputer.lattice.scores import Source, committed_score, lay_out, new_layout, widen
from imputer.lattice.steps import (
    join_row,
    multiply_row,
    posterior_plain,
    posterior_row,
    step_back_blank,
    step_back_plain,
    step_back_token,
    step_blank,
    step_plain,
    step_token,
)
from imputer.lattice.weights import (
    CONTRACT,
    NORMALISE_EVERY,
    ONE,
    UNREACHED,
    Weights,
    clear_row,
    close_row,
    copy_rows,
    logarithm,
    new_weights,
    normalise_row,
    plus,
    split,
)

FILL = 16  # frames of the gradient to set to zero at a time
TABLE = 2**15  # cells in a table of rows, half a megabyte: it fits the second-level cache
U = np.uint64


class Tables(NamedTuple):
    """Working memory for one run: rows one after the other."""

    b: Weights  # prefixes: X without merging, else B
    k: Weights  # prefixes: K
    emissions: Weights  # the blank's is in the cell before each row
    joined: Weights  # one row of X
    suffix_b: Weights  # two rows
    suffix_k: Weights
    saved_b: Weights  # the first rows of the chunks of a long run
    saved_k: Weights
    posteriors: np.ndarray  # one row


class SparsePosteriors(NamedTuple):
    """The probability of what each frame emits, stored only where some alignment reaches."""

    first: np.ndarray  # per frame: the first target position (from 0) it may emit
    counts: np.ndarray  # per frame: the number of positions from there on
    blanks: np.ndarray  # per frame: the posterior of blank
    tokens: np.ndarray  # the posteriors of the tokens, frame after frame


@allocator
def new_tables(size, longest_row, rows_saved, merge_repeats):
    saved = rows_saved * longest_row
    return Tables(
        b=new_weights(size),
        k=new_weights(size if merge_repeats else 0),
        emissions=new_weights(size),
        joined=new_weights(longest_row),
        suffix_b=new_weights(2 * longest_row),
        suffix_k=new_weights(2 * longest_row),
        saved_b=new_weights(saved),
        saved_k=new_weights(saved if merge_repeats else 0),
        posteriors=np.empty(longest_row, np.float64),
    )


@inlined
def chunk_length(frames, stride, keep):
    """How many frames of a run to process with one table of rows; a sum alone needs only the last row."""
    most = TABLE // stride - 1 if keep else NORMALISE_EVERY
    return min(frames, max(most, NORMALISE_EVERY))


@inlined
def enter(before, merge_repeats, b, k, width):
    """Row 0, before a run's first frame: weight 1 on the known state ``before``."""
    clear_row(b, ONE, width)
    if merge_repeats:
        clear_row(k, ONE, width)
    if merge_repeats and before % 2:
        k.e[1] = 0
    else:
        b.e[1] = 0


@inlined
def leave(run, low, distinct, suffix_b, suffix_k, width):
    """The row of suffixes at a run's last frame: weight 1 wherever the known state ``after`` may follow."""
    clear_row(suffix_b, ONE, width)
    clear_row(suffix_k, ONE, width)
    cell = run.after // 2 - low + 1  # every token before the state after the run has begun
    if cell > 0:
        suffix_b.e[cell] = 0
        if run.after % 2 == 0 or distinct[run.after // 2 + 1]:
            suffix_k.e[cell] = 0
    if run.after % 2 and cell < width:
        suffix_k.e[cell + 1] = 0


@part(fastmath=CONTRACT)
def emit(source, run, first, since, until, at, stride, emissions):
    """Rows of emissions for the frames after ``since`` up to ``until``; 1 where there is nothing to emit.

    The scattered reads come first, then the arithmetic in one loop: mixed, the loop would not vectorise.
    """
    cell = at
    for t in range(since + 1, until + 1):
        frame = U(run.start + (t - 1) * source.frame_stride)
        lowest, highest = band(t, run.frames, run.begun, run.fewest, run.most)
        emissions.m[cell - ONE] = widen(source.scores[frame + U(source.blank)])
        emissions.m[cell] = 0.0  # unless overwritten: a token that has begun before the run
        tokens = U(highest - lowest + 1)
        for c in range(U(max(first - lowest, 0)), tokens):
            emissions.m[cell + c] = widen(source.scores[frame + source.places[U(lowest) + c]])
        for c in range(tokens, U(stride - 1)):
            emissions.m[cell + c] = 0.0
        cell += U(stride)
    for c in range(at - ONE, cell - ONE):
        emissions.m[c], emissions.e[c] = split(emissions.m[c])


@part()
def advance(source, run, merge_repeats, since, until, stride, tables):
    """Rows 1, 2, ... of the prefixes, for the frames after ``since`` up to ``until``, from row 0."""
    b, k, emissions, joined = tables.b, tables.k, tables.emissions, tables.joined
    width = U(stride - 2)
    first = first_token(run.before, merge_repeats)
    low, _ = band(since, run.frames, run.begun, run.fewest, run.most)
    last = ONE
    for t in range(since + 1, until + 1):
        at = last + U(stride)
        if (t - since) % NORMALISE_EVERY == 1:
            emit(source, run, first, t - 1, min(t - 1 + NORMALISE_EVERY, until), at, stride, emissions)
        lowest, _ = band(t, run.frames, run.begun, run.fewest, run.most)
        shift, low = U(lowest - low), lowest
        blank_m, blank_e = emissions.m[at - ONE], emissions.e[at - ONE]
        if merge_repeats:
            join_row(b, k, last, joined, width)
            step_blank(joined, ONE + shift, blank_m, blank_e, b, at, width)
            step_token(joined, b, k, last + shift, source.distinct, U(low), shift, emissions, at, width)
            close_row(k, at, width)
        else:
            step_plain(b, last + shift, blank_m, blank_e, emissions, at, width)
        close_row(b, at, width)
        if t % NORMALISE_EVERY == 0:
            normalise_row(b, at, width)
            if merge_repeats:
                normalise_row(k, at, width)
        last = at
    return last


@inlined
def run_weight(run, low, merge_repeats, at, width, tables):
    """Prefixes times suffixes at the last frame: the weight of the run."""
    b, k, suffix_b, suffix_k = tables.b, tables.k, tables.suffix_b, tables.suffix_k
    total_m, total_e = 1.0, UNREACHED
    end = run.after // 2 - low + 1
    for c in range(max(end, 1), min(end + 1, width) + 1):  # the only cells a run can end in
        here = at + U(c - 1)
        if suffix_b.e[c] == 0:
            total_m, total_e = plus(total_m, total_e, b.m[here], b.e[here])
        if merge_repeats and suffix_k.e[c] == 0:
            total_m, total_e = plus(total_m, total_e, k.m[here], k.e[here])
    return total_m, total_e


@inlined
def write_reach(run, merge_repeats, posteriors, frame):
    """Write which target positions each frame may emit; return the number of cells."""
    cells = 0
    earliest = first_token(run.before, merge_repeats)
    for t in range(1, run.frames + 1):
        lowest, highest = band(t, run.frames, run.begun, run.fewest, run.most)
        token = max(lowest, earliest)
        posteriors.first[frame + t - 1] = token - 1
        posteriors.counts[frame + t - 1] = max(0, highest - token + 1)
        cells += posteriors.counts[frame + t - 1]
    return cells


@part()
def clear_posteriors(posteriors, frame, frames):
    posteriors.blanks[frame : frame + frames] = 0
    posteriors.counts[frame : frame + frames] = 0


@inlined
def go_back(
    source, run, merge_repeats, since, until, stride, scale_m, scale_e, tables, posteriors, frame, cell, here
):
    """Suffixes of the frames ``until`` back to ``since + 1``, and the posteriors: prefix times suffix times scale.

    ``frame`` is the run's first frame in ``posteriors``, ``cell`` the end of the tokens of frame ``until`` there,
    ``here`` its row of suffixes. Returns ``cell`` and ``here`` for the frame ``since``.
    """
    b, k, emissions, row = tables.b, tables.k, tables.emissions, tables.posteriors
    suffix_b, suffix_k = tables.suffix_b, tables.suffix_k
    width = U(stride - 2)
    there = U(stride + 2) - here  # two rows of suffixes, used alternately
    low, _ = band(until, run.frames, run.begun, run.fewest, run.most)
    for t in range(until, since, -1):
        at = U((t - since) * stride + 1)
        lowest, _ = band(t - 1, run.frames, run.begun, run.fewest, run.most)
        shift = U(low - lowest)
        blank_m, blank_e = emissions.m[at - ONE], emissions.e[at - ONE]
        first, count = posteriors.first[frame + t - 1], posteriors.counts[frame + t - 1]
        if merge_repeats:
            blank = posterior_row(b, at, suffix_b, here, scale_m, scale_e, width, row)
            posterior_row(k, at, suffix_k, here, scale_m, scale_e, width, row)
            offset = U(first + 1 - low)
            multiply_row(suffix_k, here, emissions, at, width)
            step_back_blank(suffix_b, suffix_k, here - shift, blank_m, blank_e, there, width)
            step_back_token(
                suffix_b, suffix_k, here - shift, blank_m, blank_e, source.distinct, U(lowest), there, width
            )
            close_row(suffix_k, there, width)
        else:
            blank = posterior_plain(
                b, at - U(stride), scale_m, scale_e, suffix_b, here - shift, blank_m, blank_e, emissions,
                at - shift, width, row,
            )  # fmt: skip
            offset = U(first - lowest)
            step_back_plain(suffix_b, here - shift, blank_m, blank_e, emissions, at - shift, there, width)
        close_row(suffix_b, there, width)
        posteriors.blanks[frame + t - 1] = blank
        cell -= count
        for c in range(U(count)):
            posteriors.tokens[U(cell) + c] = row[offset + c]
        if t % NORMALISE_EVERY == 0:
            normalise_row(suffix_b, there, width)
            if merge_repeats:
                normalise_row(suffix_k, there, width)
        low = lowest
        here, there = there, here
    return cell, here


@part()
def sum_run(source, run, merge_repeats, keep, tables, posteriors, frame, cell):
    """(log weight of one run, cells used in ``posteriors``); the posteriors are written if ``keep``.

    The run is walked forward chunk by chunk, and back if ``keep``: each chunk but the last is then computed again
    from its saved first row. All of it is one loop so that ``advance`` is compiled in one place.
    """
    widest = band_width(run.frames, run.begun, run.fewest, run.most)
    if widest == 0:
        return -np.inf, 0
    b, k, saved_b, saved_k = tables.b, tables.k, tables.saved_b, tables.saved_k
    stride = row_length(widest)
    width = U(stride - 2)
    chunk = chunk_length(run.frames, stride, keep)
    chunks = -(-run.frames // chunk)
    enter(run.before, merge_repeats, b, k, width)
    last, suffix, result, cells, scale_m, scale_e = ONE, ONE, 0.0, ZERO, 1.0, ZERO
    for turn in range(2 * chunks if keep else chunks):
        number = min(turn, 2 * chunks - 1 - turn)
        since, until = number * chunk, min(number * chunk + chunk, run.frames)
        place = U(number * stride + 1)
        if 0 < turn < chunks:
            copy_rows(b, k, last, b, k, ONE, width, merge_repeats)
        if turn < chunks and keep and chunks > 1:
            copy_rows(b, k, ONE, saved_b, saved_k, place, width, merge_repeats)
        if turn > chunks:
            copy_rows(saved_b, saved_k, place, b, k, ONE, width, merge_repeats)
        if turn != chunks:
            last = advance(source, run, merge_repeats, since, until, stride, tables)
        if turn == chunks - 1:
            low, _ = band(run.frames, run.frames, run.begun, run.fewest, run.most)
            leave(run, low, source.distinct, tables.suffix_b, tables.suffix_k, width)
            total_m, total_e = run_weight(run, low, merge_repeats, last, width, tables)
            scale_m, scale_e = 1 / total_m, -total_e
            result = logarithm(total_m, total_e)
            if not keep or result == -np.inf:
                break
            cells = write_reach(run, merge_repeats, posteriors, frame)
            cell += cells
        if turn >= chunks:
            cell, suffix = go_back(
                source, run, merge_repeats, since, until, stride, scale_m, scale_e, tables, posteriors, frame,
                cell, suffix,
            )  # fmt: skip
    return result, cells


@entry
def sum_items(
    start, stop, scores, strides, targets, frame_lengths, target_lengths, states, blank, merge_repeats,
    size, keep, bases, totals, posteriors,
):  # fmt: skip
    """Log weights of items start..stop and, if ``keep``, the posteriors of what each frame emits."""
    places, distinct = new_layout(targets)
    source = Source(scores, strides[1], blank * strides[2], places, distinct)
    longest_row = row_length(targets.shape[1] + 1)
    table = min(size, max(TABLE, (NORMALISE_EVERY + 1) * longest_row))
    rows_saved = states.shape[1] // NORMALISE_EVERY + 1 if table < size else 0
    tables = new_tables(table, longest_row, rows_saved, merge_repeats)
    frames = states.shape[1]
    for item in range(start, stop):
        length, target_length = frame_lengths[item], target_lengths[item]
        lay_out(targets[item], target_length, blank, strides[2], places, distinct)
        origin = item * strides[0]
        total = 0.0 if length > 0 or target_length == 0 else -np.inf
        cell = bases[item]
        frame, before = ZERO, ZERO
        while frame < length:
            here = item * frames + frame
            if states[item, frame] == MASKED:
                run = run_at(
                    states[item], frame, length, target_length, before, origin, strides[1], merge_repeats
                )
                weight, cells = sum_run(source, run, merge_repeats, keep, tables, posteriors, here, cell)
                if keep and weight == -np.inf:
                    clear_posteriors(posteriors, here, run.frames)
                total += weight
                cell += cells
                frame += run.frames
                continue
            before = states[item, frame]
            token = before % 2
            place = places[(before + 1) // 2] if token else U(source.blank)
            total += committed_score(widen(scores[U(origin + frame * strides[1]) + place]))
            if keep:
                posteriors.first[here] = before // 2
                posteriors.counts[here] = token
                posteriors.blanks[here] = 1 - token
                if token:
                    posteriors.tokens[cell] = 1.0
                cell += token
            frame += 1
        totals[item] = total
        if keep and total == -np.inf:
            clear_posteriors(posteriors, item * frames, length)


@entry
def scatter_items(
    start, stop, gradient, frames, tokens, targets, frame_lengths, blank, bases, scales, posteriors
):
    """Write scale * posterior into a gradient (batch, frame, token) in a flat array, and zeros elsewhere."""
    places, distinct = new_layout(targets)
    for item in range(start, stop):
        lay_out(targets[item], targets.shape[1], blank, 1, places, distinct)
        scale = scales[item]
        cell = U(bases[item])
        for frame in range(frames):
            here = item * frames + frame
            if frame % FILL == 0:  # a few frames at a time, still cached when their numbers are written
                gradient[here * tokens : (here + min(FILL, frames - frame)) * tokens] = 0
            if frame >= frame_lengths[item]:
                continue
            origin = U(here * tokens)
            gradient[origin + places[0]] = scale * posteriors.blanks[here]
            position, count = U(posteriors.first[here] + 1), U(posteriors.counts[here])
            for c in range(count):
                gradient[origin + places[position + c]] += scale * posteriors.tokens[cell + c]
            cell += count
