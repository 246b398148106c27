# mypy: allow-untyped-defs, disable-error-code="call-arg"
"""The compiled part of the lattice: the walk over the reachable cells of each run, no exp or log inside.

All compiled functions live in this file, because numba's cache notices changes in a function's own file only.

A weight is kept as ``m * 2**e``, a float64 beside an int64: products and sums of such numbers need no
logarithm, never underflow however long the input, and loops over a row of states vectorise. The mantissas
drift slowly, at most by a factor of 8 a frame, so a row is brought back near 1 only now and then.
A forbidden emission is 2**FLOOR, not zero: nothing special is left to handle, and no NaN can arise from it.

X[j] is the weight of all prefixes with j tokens begun. When repeats merge it splits into B[j], the prefixes that
end in a blank, and K[j], those that end in token j. Suffixes have the same letters. See docs/maths.md.
"""

import math
from functools import partial
from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, overload

MASKED = -1  # the state of a frame that is free
FRAMES, TOKENS, TARGET, ALIGNMENT, COLLAPSE, COMMITTED = range(1, 7)  # what may be wrong with an item

VECTOR = 16  # numbers that one turn of a compiled loop takes; rows are filled up so that none is left over
NARROW = 8  # rows so short are not worth it
FILL = 16  # frames to fill with zeros at a time
TABLE = 2**15  # cells in a table of rows, half a megabyte: it should stay in the cache next to the processor

FLOOR = -(2**45)  # exponent of a forbidden emission; a log probability below -2.4e13 counts as -inf
NEVER = -(2**50)  # exponent of a state that no path reaches, below any exponent that counts
NORMALISE_EVERY = 32  # frames; mantissas stay within 2**96 of 1, far inside float64
LOG_2 = math.log(2)
ROUNDER = 1.5 * 2.0**52  # adding it rounds a float64 to an integer and leaves that integer in the low bits
ROUNDER_BITS = int(np.float64(ROUNDER).view(np.int64))
MANTISSA_BITS = 52
BIAS = 1023
LOWEST_SCORE = -1e30  # stands for log 0 in the max recursion, so that sums of scores stay ordered
NO_SCORE = -1e35  # a state that no path reaches

# Unsigned indices spare the check for negative ones, which would keep the loops scalar.
U = np.uint64
ONE = np.uint64(1)

CONTRACT = {"contract"}  # a * b + c in one instruction
REDUCE = {"contract", "reassoc"}  # and sums over a row in lanes


# Parts are compiled into their callers and own no arrays: they need neither wrappers nor counts of references.
part = partial(njit, nogil=True, forceinline=True, no_cpython_wrapper=True, no_cfunc_wrapper=True, _nrt=False)


class Weights(NamedTuple):
    """Rows of weights: mantissas and binary exponents."""

    m: np.ndarray
    e: np.ndarray


@intrinsic
def as_float(_context, _bits):
    def code(_, builder, __, arguments):
        return builder.bitcast(arguments[0], ir.DoubleType())

    return types.float64(types.int64), code


@intrinsic
def as_bits(_context, _number):
    def code(_, builder, __, arguments):
        return builder.bitcast(arguments[0], ir.IntType(64))

    return types.int64(types.float64), code


@intrinsic
def from_bfloat16(_context, _bits):
    def code(_, builder, __, arguments):
        wide = builder.shl(builder.zext(arguments[0], ir.IntType(32)), ir.Constant(ir.IntType(32), 16))
        return builder.fpext(builder.bitcast(wide, ir.FloatType()), ir.DoubleType())

    return types.float64(types.int16), code


def widen(number):
    """A stored score as float64; bfloat16 arrives as the int16 of its bits."""
    raise NotImplementedError("for compiled code")


@overload(widen)
def _widen(number):
    if number == types.int16:
        return lambda number: from_bfloat16(number)
    return lambda number: np.float64(number)


@part(fastmath=CONTRACT)
def power_of_two(exponent):
    """2.0**exponent, for exponents up to BIAS; 0 when too small for float64."""
    return as_float((max(exponent, -BIAS) + BIAS) << MANTISSA_BITS)


@part(fastmath=CONTRACT)
def exp_small(x):
    """exp(x) for abs(x) <= log(2) / 2: the Taylor series, whose 14th term is below the last bit."""
    y = x * (1 / 6227020800.0) + 1 / 479001600.0
    y = y * x + 1 / 39916800.0
    y = y * x + 1 / 3628800.0
    y = y * x + 1 / 362880.0
    y = y * x + 1 / 40320.0
    y = y * x + 1 / 5040.0
    y = y * x + 1 / 720.0
    y = y * x + 1 / 120.0
    y = y * x + 1 / 24.0
    y = y * x + 1 / 6.0
    y = y * x + 0.5
    y = y * x + 1.0
    return y * x + 1.0


@part(fastmath=CONTRACT)
def split(score):
    """exp(score) as a mantissa in [0.7, 1.5] and an exponent."""
    bits = score * (1 / LOG_2)
    bits = FLOOR if bits < FLOOR else bits  # written so that a NaN stays one
    rounded = bits + ROUNDER
    return exp_small((bits - (rounded - ROUNDER)) * LOG_2), as_bits(rounded) - ROUNDER_BITS


@part(fastmath=CONTRACT)
def plus(m1, e1, m2, e2):
    e = max(e1, e2)
    return m1 * power_of_two(e1 - e) + m2 * power_of_two(e2 - e), e


@part()
def logarithm(m, e):
    if m != m:
        return np.nan
    return math.log(m) + e * LOG_2 if e > FLOOR // 2 else -np.inf


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


@part()
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
    """The first token a run may emit: the committed one goes on only if repeats merge."""
    return (before + 1) // 2 + (0 if merge_repeats and before % 2 else 1)


@part()
def row_length(width):
    """Numbers from row to row: the band in whole vectors, unless it is narrow, and a cell on either side."""
    if width <= NARROW:
        return width + 2
    return -(-width // VECTOR) * VECTOR + 2


@part()
def chunk_length(frames, stride, keep):
    """How many frames of a run to walk with one table of rows; a sum alone needs but the last row."""
    most = TABLE // stride - 1 if keep else NORMALISE_EVERY
    return min(frames, max(most, NORMALISE_EVERY))


@part()
def band_width(frames, begun, fewest, most):
    """The widest row of the band, or 0 when the run cannot get from its entry to its exit."""
    if fewest - begun > frames or most < begun:
        return 0
    return min(most - begun, frames - max(0, fewest - begun)) + 1


@part()
def _settle(states, frame, end, before, after, merge_repeats):
    """Write the states of a run that has only one way through: as good as committed. Returns whether it has."""
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
def _measure(states, length, size, merge_repeats):
    """(cells to keep, numbers in the largest table of rows), settling on the way what has one way through."""
    cells, scratch = 0, 0
    frame, before = 0, 0
    while frame < length:
        if states[frame] == MASKED:
            end = run_end(states, frame, length)
            after = states[end] if end < length else 2 * size
            if not _settle(states, frame, end, before, after, merge_repeats):
                begun, fewest, most = token_range(before, after, merge_repeats)
                frames = end - frame
                width = band_width(frames, begun, fewest, most)
                if width > 0:
                    scratch = max(scratch, (frames + 1) * row_length(width))
                    first = first_token(before, merge_repeats)
                    for step in range(1, frames + 1):
                        lowest, highest = band(step, frames, begun, fewest, most)
                        cells += max(0, highest - max(lowest, first) + 1)
                frame = end
                continue
        before = states[frame]
        cells += before % 2
        frame += 1
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


# A row holds the band of one frame and what lies above it up to whole vectors: cell c is for lowest + c tokens
# begun. The cells above the band do no harm, since no path leads from them to the run's end. On either side of a
# row is a cell that no path reaches. The row of the frame before starts at the same number of tokens or one lower:
# that is ``shift``.


@part()
def close_row(row, at, width):
    """Mark the cells on both sides of a row as never reached."""
    row.m[at - ONE] = row.m[at + width] = 1.0
    row.e[at - ONE] = row.e[at + width] = NEVER


@part()
def clear_row(row, at, width):
    for c in range(at - ONE, at + width + ONE):
        row.m[c] = 1.0
        row.e[c] = NEVER


@part()
def normalise_row(row, at, width):
    """Move the binary exponent of every mantissa into its exponent."""
    for c in range(at, at + width):
        shift = (as_bits(row.m[c]) >> MANTISSA_BITS) - BIAS
        row.m[c] *= as_float((BIAS - shift) << MANTISSA_BITS)
        row.e[c] = max(row.e[c] + shift, NEVER)


@part(fastmath=CONTRACT)
def step_plain(x, before, blank_m, blank_e, emissions, at, width):
    """X'[j] = X[j] p(blank) + X[j-1] p(y_j)."""
    for c in range(width):
        x.m[at + c], x.e[at + c] = plus(
            x.m[before + c] * blank_m,
            x.e[before + c] + blank_e,
            x.m[before + c - ONE] * emissions.m[at + c],
            x.e[before + c - ONE] + emissions.e[at + c],
        )


@part(fastmath=REDUCE)
def posterior_plain(
    x, before, scale_m, scale_e, suffix, at, blank_m, blank_e, emissions, here, width, tokens
):
    """What a frame emits, prefix * emission * suffix / total: the tokens go out, blank is returned."""
    blank_m, blank_e = blank_m * scale_m, blank_e + scale_e
    blank = 0.0
    for c in range(width):
        prefix_m, prefix_e = x.m[before + c], x.e[before + c]
        blank += prefix_m * suffix.m[at + c] * blank_m * power_of_two(prefix_e + suffix.e[at + c] + blank_e)
        m = suffix.m[at + c + ONE] * emissions.m[here + c + ONE] * scale_m
        e = suffix.e[at + c + ONE] + emissions.e[here + c + ONE] + scale_e
        tokens[c] = prefix_m * m * power_of_two(prefix_e + e)
    return blank


@part(fastmath=CONTRACT)
def step_back_plain(suffix, after, blank_m, blank_e, emissions, here, out, width):
    """X[j] = X'[j] p(blank) + X'[j+1] p(y_{j+1}) over suffixes."""
    for c in range(width):
        suffix.m[out + c], suffix.e[out + c] = plus(
            suffix.m[after + c] * blank_m,
            suffix.e[after + c] + blank_e,
            suffix.m[after + c + ONE] * emissions.m[here + c + ONE],
            suffix.e[after + c + ONE] + emissions.e[here + c + ONE],
        )


@part(fastmath=CONTRACT)
def join_row(b, k, at, x, width):
    """X[j] = B[j] + K[j], the cells on both sides included."""
    for c in range(width + ONE + ONE):
        x.m[c], x.e[c] = plus(b.m[at + c - ONE], b.e[at + c - ONE], k.m[at + c - ONE], k.e[at + c - ONE])


@part(fastmath=CONTRACT)
def step_blank(x, before, blank_m, blank_e, b, at, width):
    """B'[j] = X[j] p(blank)."""
    for c in range(width):
        b.m[at + c] = x.m[before + c] * blank_m
        b.e[at + c] = x.e[before + c] + blank_e


@part(fastmath=CONTRACT)
def step_token(x, b, k, before, distinct, lowest, shift, emissions, at, width):
    """K'[j] = (K[j] + X[j-1]) p(y_j), or with B[j-1] in place of X[j-1] where y_j = y_{j-1}; uses up X."""
    for c in range(width):  # two loops with few arrays each: the compiler leaves one with many scalar
        xm, xe, bm, be = x.m[shift + c], x.e[shift + c], b.m[before + c - ONE], b.e[before + c - ONE]
        may_skip = distinct[lowest + c]
        x.m[shift + c] = xm if may_skip else bm
        x.e[shift + c] = xe if may_skip else be
    for c in range(width):
        m, e = plus(k.m[before + c], k.e[before + c], x.m[shift + c], x.e[shift + c])
        k.m[at + c] = m * emissions.m[at + c]
        k.e[at + c] = e + emissions.e[at + c]


@part(fastmath=REDUCE)
def posterior_row(prefix, at, suffix, here, scale_m, scale_e, width, posteriors):
    """prefix * suffix / total, cell by cell; returns the sum."""
    total = 0.0
    for c in range(width):
        m = prefix.m[at + c] * suffix.m[here + c] * scale_m
        posteriors[c] = m * power_of_two(prefix.e[at + c] + suffix.e[here + c] + scale_e)
        total += posteriors[c]
    return total


@part()
def multiply_row(row, here, emissions, at, width):
    for c in range(width):
        row.m[here + c] *= emissions.m[at + c]
        row.e[here + c] += emissions.e[at + c]


@part(fastmath=CONTRACT)
def step_back_blank(b, k, after, blank_m, blank_e, out, width):
    """B[j] = B'[j] p(blank) + K'[j+1] over suffixes, where K' has its emission already."""
    for c in range(width):
        b.m[out + c], b.e[out + c] = plus(
            b.m[after + c] * blank_m, b.e[after + c] + blank_e, k.m[after + c + ONE], k.e[after + c + ONE]
        )


@part(fastmath=CONTRACT)
def step_back_token(b, k, after, blank_m, blank_e, distinct, lowest, out, width):
    """K[j] = K'[j] + B[j], or with B'[j] p(blank) in place of B[j] where y_{j+1} = y_j."""
    for c in range(width):
        m1, e1 = b.m[out + c], b.e[out + c]
        m2, e2 = b.m[after + c] * blank_m, b.e[after + c] + blank_e
        may_skip = distinct[lowest + c + ONE]
        k.m[out + c] = m1 if may_skip else m2
        k.e[out + c] = e1 if may_skip else e2
    for c in range(width):
        k.m[out + c], k.e[out + c] = plus(k.m[after + c], k.e[after + c], k.m[out + c], k.e[out + c])


@njit(cache=True, nogil=True)
def new_weights(size):
    return Weights(np.empty(size, np.float64), np.empty(size, np.int64))


class Source(NamedTuple):
    """Where an item's scores lie: flat, whatever the strides."""

    scores: np.ndarray
    frame_stride: int
    blank: int  # place of the blank's score within a frame
    places: np.ndarray  # places of the scores of tokens 1, 2, ...
    distinct: np.ndarray  # whether token j differs from token j - 1


class Run(NamedTuple):
    """A run of masked frames between two known states."""

    start: int  # of its first frame in the scores
    frames: int
    before: int
    after: int
    begun: int  # tokens begun on entry
    fewest: int  # tokens begun in its last frame, at least
    most: int  # and at most


class Tables(NamedTuple):
    """Room to walk a run: rows one after the other."""

    b: Weights  # prefixes: X without merging, else B
    k: Weights  # prefixes: K
    emissions: Weights  # the blank's in the cell before each row
    joined: Weights  # one row of X
    suffix_b: Weights  # two rows
    suffix_k: Weights
    saved_b: Weights  # the first rows of the chunks of a long run
    saved_k: Weights
    posteriors: np.ndarray  # one row


class Kept(NamedTuple):
    """What the frames emit with what probability, where some alignment reaches."""

    first: np.ndarray  # per frame: the first target position (from 0) it may emit
    counts: np.ndarray  # per frame: how many from there on
    blanks: np.ndarray  # per frame: the posterior of blank
    tokens: np.ndarray  # the posteriors of the tokens, frame after frame


@njit(cache=True, nogil=True)
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


@part()
def copy_rows(b, k, at, to_b, to_k, to, width, merge_repeats):
    """Rows of B and K with the cells on their sides."""
    for c in range(width + ONE + ONE):
        to_b.m[to - ONE + c] = b.m[at - ONE + c]
        to_b.e[to - ONE + c] = b.e[at - ONE + c]
        if merge_repeats:
            to_k.m[to - ONE + c] = k.m[at - ONE + c]
            to_k.e[to - ONE + c] = k.e[at - ONE + c]


@part()
def enter(before, merge_repeats, b, k, width):
    """Row 0, before a run's first frame: all weight on the known state ``before``."""
    clear_row(b, ONE, width)
    if merge_repeats:
        clear_row(k, ONE, width)
    if merge_repeats and before % 2:
        k.e[1] = 0
    else:
        b.e[1] = 0


@part()
def leave(run, low, merge_repeats, distinct, suffix_b, suffix_k, width):
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
def emit(source, run, since, until, at, stride, emissions):
    """Rows of emissions for the frames after ``since`` up to ``until``; 1 where there is nothing to emit.

    First the scattered reads, then the arithmetic in one go: mixed, neither would be fast.
    """
    cell = at
    for t in range(since + 1, until + 1):
        frame = U(run.start + (t - 1) * source.frame_stride)
        lowest, highest = band(t, run.frames, run.begun, run.fewest, run.most)
        emissions.m[cell - ONE] = widen(source.scores[frame + U(source.blank)])
        tokens = U(highest - lowest + 1)
        for c in range(tokens):
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
    low, _ = band(since, run.frames, run.begun, run.fewest, run.most)
    last = ONE
    for t in range(since + 1, until + 1):
        at = last + U(stride)
        if (t - since) % NORMALISE_EVERY == 1:
            emit(source, run, t - 1, min(t - 1 + NORMALISE_EVERY, until), at, stride, emissions)
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


@part()
def forward(source, run, merge_repeats, stride, chunk, save, tables):
    """Walk the prefixes of a whole run, chunk by chunk; return the place of the last row and its chunk's start."""
    b, k = tables.b, tables.k
    width = U(stride - 2)
    enter(run.before, merge_repeats, b, k, width)
    since, until, last = 0, 0, ONE
    while until < run.frames:
        if until > 0:
            copy_rows(b, k, last, b, k, ONE, width, merge_repeats)
        since, until = until, min(until + chunk, run.frames)
        if save:
            place = U(since // chunk * stride + 1)
            copy_rows(b, k, ONE, tables.saved_b, tables.saved_k, place, width, merge_repeats)
        last = advance(source, run, merge_repeats, since, until, stride, tables)
    return last, since


@part()
def whole(run, low, merge_repeats, at, width, tables):
    """Prefixes times suffixes at the last frame: the weight of the run."""
    b, k, suffix_b, suffix_k = tables.b, tables.k, tables.suffix_b, tables.suffix_k
    total_m, total_e = 1.0, NEVER
    end = run.after // 2 - low + 1
    for c in range(max(end, 1), min(end + 1, width) + 1):  # the only cells a run can end in
        here = at + U(c - 1)
        total_m, total_e = plus(total_m, total_e, b.m[here] * suffix_b.m[c], b.e[here] + suffix_b.e[c])
        if merge_repeats:
            total_m, total_e = plus(total_m, total_e, k.m[here] * suffix_k.m[c], k.e[here] + suffix_k.e[c])
    return total_m, total_e


@part()
def reach(run, merge_repeats, kept, frame):
    """Write which target positions each frame may emit; return how many cells that makes."""
    cells = 0
    earliest = first_token(run.before, merge_repeats)
    for t in range(1, run.frames + 1):
        lowest, highest = band(t, run.frames, run.begun, run.fewest, run.most)
        token = max(lowest, earliest)
        kept.first[frame + t - 1] = token - 1
        kept.counts[frame + t - 1] = max(0, highest - token + 1)
        cells += kept.counts[frame + t - 1]
    return cells


@part()
def backward(source, run, merge_repeats, stride, chunk, since, total_m, total_e, tables, kept, frame, cell):
    """Walk the suffixes back to the run's start, and keep the posteriors: prefix times suffix over the whole.

    ``frame`` is the run's first frame in ``kept``, ``cell`` the end of its tokens there. The prefixes of all chunks
    but the last (from ``since`` on) are found again from their saved first rows.
    """
    b, k, emissions, row = tables.b, tables.k, tables.emissions, tables.posteriors
    suffix_b, suffix_k = tables.suffix_b, tables.suffix_k
    width = U(stride - 2)
    scale_m, scale_e = 1 / total_m, -total_e
    low, _ = band(run.frames, run.frames, run.begun, run.fewest, run.most)
    here, there = ONE, U(stride + 1)  # two rows of suffixes, taken in turns
    for t in range(run.frames, 0, -1):
        if t == since:
            since -= chunk
            place = U(since // chunk * stride + 1)
            copy_rows(tables.saved_b, tables.saved_k, place, b, k, ONE, width, merge_repeats)
            advance(source, run, merge_repeats, since, t, stride, tables)
        at = U((t - since) * stride + 1)
        lowest, _ = band(t - 1, run.frames, run.begun, run.fewest, run.most)
        shift = U(low - lowest)
        blank_m, blank_e = emissions.m[at - ONE], emissions.e[at - ONE]
        first, count = kept.first[frame + t - 1], kept.counts[frame + t - 1]
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
        kept.blanks[frame + t - 1] = blank
        cell -= count
        for c in range(U(count)):
            kept.tokens[U(cell) + c] = row[offset + c]
        if t % NORMALISE_EVERY == 0:
            normalise_row(suffix_b, there, width)
            if merge_repeats:
                normalise_row(suffix_k, there, width)
        low = lowest
        here, there = there, here


@part()
def weigh(source, run, merge_repeats, keep, tables, kept, frame, cell):
    """The log weight of one run; what its frames emit goes to ``kept``, if wanted. Returns it with the cells used.

    A run too long for the tables is walked in chunks, and walked again on the way back.
    """
    widest = band_width(run.frames, run.begun, run.fewest, run.most)
    if widest == 0:
        return -np.inf, 0
    stride = row_length(widest)
    width = U(stride - 2)
    chunk = chunk_length(run.frames, stride, keep)
    save = keep and run.frames > chunk
    last, since = forward(source, run, merge_repeats, stride, chunk, save, tables)
    low, _ = band(run.frames, run.frames, run.begun, run.fewest, run.most)
    leave(run, low, merge_repeats, source.distinct, tables.suffix_b, tables.suffix_k, width)
    total_m, total_e = whole(run, low, merge_repeats, last, width, tables)
    result = logarithm(total_m, total_e)
    if not keep or result == -np.inf:
        return result, 0
    cells = reach(run, merge_repeats, kept, frame)
    backward(
        source, run, merge_repeats, stride, chunk, since, total_m, total_e, tables, kept, frame, cell + cells
    )
    return result, cells


@njit(cache=True, nogil=True)
def new_layout(targets):
    size = targets.shape[1] + 1 + row_length(targets.shape[1] + 1)  # a row may start at the last token
    return np.empty(size, np.uint64), np.empty(size, np.bool_)


@njit(cache=True, nogil=True)
def lay_out(target, size, blank, token_stride, places, distinct):
    """Where the scores of tokens 1..size lie in a frame, and which differ from the token before."""
    places[0] = blank * token_stride
    previous = blank
    for j in range(1, size + 1):
        token = target[j - 1]
        places[j] = token * token_stride
        distinct[j] = token != previous
        previous = token
    places[size + 1 :] = places[0]
    distinct[size + 1 :] = False


@part()
def run_at(states, frame, length, size, before, origin, frame_stride, merge_repeats):
    """The run of masked frames that starts at ``frame``."""
    end = run_end(states, frame, length)
    after = states[end] if end < length else 2 * size
    begun, fewest, most = token_range(before, after, merge_repeats)
    return Run(origin + frame * frame_stride, end - frame, before, after, begun, fewest, most)


@njit(cache=True, nogil=True)
def weigh_items(
    start, stop, scores, strides, targets, frame_lengths, target_lengths, states, blank, merge_repeats,
    size, keep, bases, totals, kept,
):  # fmt: skip
    """Log weights of items start..stop and, if wanted, what each frame emits with what probability."""
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
        frame, before = 0, 0
        while frame < length and total != -np.inf:
            here = item * frames + frame
            if states[item, frame] == MASKED:
                run = run_at(
                    states[item], frame, length, target_length, before, origin, strides[1], merge_repeats
                )
                weight, cells = weigh(source, run, merge_repeats, keep, tables, kept, here, cell)
                total += weight
                cell += cells
                frame += run.frames
                continue
            before = states[item, frame]
            token = before % 2
            place = places[(before + 1) // 2] if token else U(source.blank)
            total += widen(scores[U(origin + frame * strides[1]) + place])
            if keep:
                kept.first[here] = before // 2
                kept.counts[here] = token
                kept.blanks[here] = 1 - token
                if token:
                    kept.tokens[cell] = 1.0
                cell += token
            frame += 1
        totals[item] = total
        if keep and total == -np.inf:
            kept.blanks[item * frames : item * frames + length] = 0
            kept.counts[item * frames : item * frames + length] = 0


@njit(cache=True, nogil=True)
def spread_items(start, stop, gradient, frames, tokens, targets, frame_lengths, blank, bases, scales, kept):
    """Write scale * posterior into a gradient (batch, frame, token) laid out flat, and zeros elsewhere."""
    places, distinct = new_layout(targets)
    for item in range(start, stop):
        lay_out(targets[item], targets.shape[1], blank, 1, places, distinct)
        scale = scales[item]
        cell = U(bases[item])
        for frame in range(frames):
            here = item * frames + frame
            if frame % FILL == 0:  # a stretch that is still in the cache when its few numbers are written
                gradient[here * tokens : (here + min(FILL, frames - frame)) * tokens] = 0
            if frame >= frame_lengths[item]:
                continue
            origin = U(here * tokens)
            gradient[origin + places[0]] = scale * kept.blanks[here]
            position, count = U(kept.first[here] + 1), U(kept.counts[here])
            for c in range(count):
                gradient[origin + places[position + c]] += scale * kept.tokens[cell + c]
            cell += count


BLANK_WINS, STAYS = 1, 2  # how a cell of the max recursion was reached, a bit each


@part(fastmath=CONTRACT)
def score_at(scores, place):
    """A score as float64, never so low that the sums lose their order; nor NaN, so that there is an order."""
    score = widen(scores[place])
    return score if score > LOWEST_SCORE else LOWEST_SCORE


@part()
def search_row(
    b, k, before, at, ways, way, scores, start, blank_score, places, distinct, lowest, loop, width
):
    """``step_blank`` and ``step_token`` with max for + and + for *; among equals the highest state wins."""
    for c in range(width):
        stay = k[before + c] + loop
        blank_before, token_before = b[before + c - ONE], k[before + c - ONE]
        enter = max(blank_before, token_before) if distinct[lowest + c] else blank_before
        blank = max(b[before + c], k[before + c]) + blank_score
        token = max(stay, enter) + score_at(scores, start + places[lowest + c])
        b[at + c] = blank
        k[at + c] = token
        ways[way + c] = (BLANK_WINS if blank >= token else 0) | (STAYS if stay >= enter else 0)


@part()
def search(source, run, merge_repeats, target, blank, b, k, ways, alignment):
    """The best score through one run, the walk of ``weigh`` with another semiring; its way goes to ``alignment``."""
    widest = band_width(run.frames, run.begun, run.fewest, run.most)
    if widest == 0:
        return -np.inf
    distinct = source.distinct
    loop = 0.0 if merge_repeats else NO_SCORE  # of a token to itself
    stride = row_length(widest)
    here, there = 1, stride + 1  # two rows of scores, taken in turns
    b[: 2 * stride] = NO_SCORE
    k[: 2 * stride] = NO_SCORE
    if run.before % 2:
        k[here] = 0.0
    else:
        b[here] = 0.0
    low = run.begun
    for t in range(1, run.frames + 1):
        lowest, _ = band(t, run.frames, run.begun, run.fewest, run.most)
        shift, low = lowest - low, lowest
        frame = U(run.start + (t - 1) * source.frame_stride)
        blank_score = score_at(source.scores, frame + U(source.blank))
        search_row(
            b, k, U(here + shift), U(there), ways, U(t * stride + 1), source.scores, frame, blank_score,
            source.places, distinct, U(low), loop, U(stride - 2),
        )  # fmt: skip
        here, there = there, here

    # The step to the state after the run, as any other but for its emission.
    j = run.after // 2
    cell = here + j - low
    emits_blank, best = b[cell] >= k[cell], max(b[cell], k[cell])
    if run.after % 2:
        if not distinct[j + 1]:
            emits_blank, best = True, b[cell]
        stay = k[cell + 1] + loop
        if stay >= best:
            emits_blank, best, j = False, stay, j + 1

    for t in range(run.frames, 0, -1):
        alignment[t - 1] = blank if emits_blank else target[j - 1]
        may_skip = True
        if not emits_blank:
            if ways[way_to(run, t, j, stride)] & STAYS:
                continue
            may_skip = distinct[j]
            j -= 1
        emits_blank = not may_skip or ways[way_to(run, t - 1, j, stride)] & BLANK_WINS > 0
    return best


@part()
def way_to(run, t, j, stride):
    lowest, _ = band(t, run.frames, run.begun, run.fewest, run.most)
    return t * stride + 1 + j - lowest


@njit(cache=True, nogil=True)
def search_items(
    start, stop, scores, strides, targets, frame_lengths, target_lengths, states, blank, merge_repeats,
    size, totals, alignments,
):  # fmt: skip
    """Best alignments of items start..stop and their scores."""
    places, distinct = new_layout(targets)
    source = Source(scores, strides[1], blank * strides[2], places, distinct)
    rows = 2 * row_length(targets.shape[1] + 1)
    b, k, ways = np.empty(rows, np.float64), np.empty(rows, np.float64), np.zeros(size, np.uint8)
    for item in range(start, stop):
        length, target_length = frame_lengths[item], target_lengths[item]
        lay_out(targets[item], target_length, blank, strides[2], places, distinct)
        if not merge_repeats:
            distinct[:] = True
        origin = item * strides[0]
        total = 0.0 if length > 0 or target_length == 0 else -np.inf
        frame, before = 0, 0
        while frame < length and total != -np.inf:
            if states[item, frame] == MASKED:
                run = run_at(
                    states[item], frame, length, target_length, before, origin, strides[1], merge_repeats
                )
                total += search(
                    source, run, merge_repeats, targets[item], blank, b, k, ways, alignments[item, frame:]
                )
                frame += run.frames
                continue
            before = states[item, frame]
            token = before % 2
            place = places[(before + 1) // 2] if token else U(source.blank)
            total += score_at(scores, U(origin + frame * strides[1]) + place)
            alignments[item, frame] = targets[item, before // 2] if token else blank
            frame += 1
        if total < NO_SCORE / 2:  # no alignment at all, not merely a forbidden one
            alignments[item, :length] = blank
        totals[item] = total if total > LOWEST_SCORE / 2 else -np.inf
