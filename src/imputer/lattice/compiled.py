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
from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, overload

MASKED = -1  # the state of a frame that is free
FRAMES, TOKENS, TARGET, ALIGNMENT, COLLAPSE, COMMITTED = range(1, 7)  # what may be wrong with an item

VECTOR = 16  # numbers that one turn of a compiled loop takes; rows are filled up so that none is left over
NARROW = 8  # rows so short are not worth it

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
def row_length(width):
    """Numbers from row to row: the band in whole vectors, unless it is narrow, and a cell on either side."""
    if width <= NARROW:
        return width + 2
    return -(-width // VECTOR) * VECTOR + 2


@njit(cache=True, nogil=True)
def band_width(frames, begun, fewest, most):
    """The widest row of the band, or 0 when the run cannot get from its entry to its exit."""
    if fewest - begun > frames or most < begun:
        return 0
    return min(most - begun, frames - max(0, fewest - begun)) + 1


@njit(cache=True, nogil=True)
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


@njit(cache=True, nogil=True)
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


@njit(inline="always")
def power_of_two(exponent):
    """2.0**exponent, for exponents up to BIAS; 0 when too small for float64."""
    return as_float((max(exponent, -BIAS) + BIAS) << MANTISSA_BITS)


@njit(inline="always")
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


@njit(inline="always")
def split(score):
    """exp(score) as a mantissa in [0.7, 1.5] and an exponent."""
    bits = score * (1 / LOG_2)
    bits = FLOOR if bits < FLOOR else bits  # written so that a NaN stays one
    rounded = bits + ROUNDER
    return exp_small((bits - (rounded - ROUNDER)) * LOG_2), as_bits(rounded) - ROUNDER_BITS


@njit(inline="always")
def plus(m1, e1, m2, e2):
    e = max(e1, e2)
    return m1 * power_of_two(e1 - e) + m2 * power_of_two(e2 - e), e


@njit(cache=True, nogil=True)
def logarithm(m, e):
    if m != m:
        return np.nan
    return math.log(m) + e * LOG_2 if e > FLOOR // 2 else -np.inf


# A row holds the band of one frame and what lies above it up to whole vectors: cell c is for lowest + c tokens
# begun. The cells above the band do no harm, since no path leads from them to the run's end. On either side of a
# row is a cell that no path reaches. The row of the frame before starts at the same number of tokens or one lower:
# that is ``shift``.


@njit(cache=True, nogil=True, forceinline=True)
def close_row(row, at, width):
    """Mark the cells on both sides of a row as never reached."""
    row.m[at - ONE] = row.m[at + width] = 1.0
    row.e[at - ONE] = row.e[at + width] = NEVER


@njit(cache=True, nogil=True, forceinline=True)
def clear_row(row, at, width):
    for c in range(at - ONE, at + width + ONE):
        row.m[c] = 1.0
        row.e[c] = NEVER


@njit(cache=True, nogil=True, forceinline=True)
def normalise_row(row, at, width):
    """Move the binary exponent of every mantissa into its exponent."""
    for c in range(at, at + width):
        shift = (as_bits(row.m[c]) >> MANTISSA_BITS) - BIAS
        row.m[c] *= as_float((BIAS - shift) << MANTISSA_BITS)
        row.e[c] = max(row.e[c] + shift, NEVER)


@njit(cache=True, nogil=True, forceinline=True, fastmath=CONTRACT)
def emit_row(scores, start, places, lowest, tokens, emissions, at, width):
    """The emissions of so many tokens from the lowest on in one frame, and 1 in the rest of the row."""
    for c in range(tokens):  # a loop of its own: scattered reads would keep the next one scalar
        emissions.m[at + c] = widen(scores[start + places[lowest + c]])
    for c in range(at + tokens, at + width):
        emissions.m[c] = 0.0
    for c in range(at, at + width):
        emissions.m[c], emissions.e[c] = split(emissions.m[c])
    emissions.m[at + width] = 1.0
    emissions.e[at + width] = 0


@njit(cache=True, nogil=True, forceinline=True, fastmath=CONTRACT)
def step_plain(x, before, blank_m, blank_e, emissions, at, width):
    """X'[j] = X[j] p(blank) + X[j-1] p(y_j)."""
    for c in range(width):
        x.m[at + c], x.e[at + c] = plus(
            x.m[before + c] * blank_m,
            x.e[before + c] + blank_e,
            x.m[before + c - ONE] * emissions.m[at + c],
            x.e[before + c - ONE] + emissions.e[at + c],
        )


@njit(cache=True, nogil=True, forceinline=True, fastmath=REDUCE)
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


@njit(cache=True, nogil=True, forceinline=True, fastmath=CONTRACT)
def step_back_plain(suffix, after, blank_m, blank_e, emissions, here, out, width):
    """X[j] = X'[j] p(blank) + X'[j+1] p(y_{j+1}) over suffixes."""
    for c in range(width):
        suffix.m[out + c], suffix.e[out + c] = plus(
            suffix.m[after + c] * blank_m,
            suffix.e[after + c] + blank_e,
            suffix.m[after + c + ONE] * emissions.m[here + c + ONE],
            suffix.e[after + c + ONE] + emissions.e[here + c + ONE],
        )


@njit(cache=True, nogil=True, forceinline=True, fastmath=CONTRACT)
def join_row(b, k, at, x, width):
    """X[j] = B[j] + K[j], the cells on both sides included."""
    for c in range(width + ONE + ONE):
        x.m[c], x.e[c] = plus(b.m[at + c - ONE], b.e[at + c - ONE], k.m[at + c - ONE], k.e[at + c - ONE])


@njit(cache=True, nogil=True, forceinline=True, fastmath=CONTRACT)
def step_blank(x, before, blank_m, blank_e, b, at, width):
    """B'[j] = X[j] p(blank)."""
    for c in range(width):
        b.m[at + c] = x.m[before + c] * blank_m
        b.e[at + c] = x.e[before + c] + blank_e


@njit(cache=True, nogil=True, forceinline=True, fastmath=CONTRACT)
def step_token(x, b, k, before, distinct, lowest, shift, emissions, at, width):
    """K'[j] = (K[j] + X[j-1]) p(y_j), or with B[j-1] in place of X[j-1] where y_j = y_{j-1}."""
    for c in range(width):
        xm, xe, bm, be = x.m[shift + c], x.e[shift + c], b.m[before + c - ONE], b.e[before + c - ONE]
        may_skip = distinct[lowest + c]
        m, e = plus(k.m[before + c], k.e[before + c], xm if may_skip else bm, xe if may_skip else be)
        k.m[at + c] = m * emissions.m[at + c]
        k.e[at + c] = e + emissions.e[at + c]


@njit(cache=True, nogil=True, forceinline=True, fastmath=REDUCE)
def posterior_row(prefix, at, suffix, here, scale_m, scale_e, width, posteriors):
    """prefix * suffix / total, cell by cell; returns the sum."""
    total = 0.0
    for c in range(width):
        m = prefix.m[at + c] * suffix.m[here + c] * scale_m
        posteriors[c] = m * power_of_two(prefix.e[at + c] + suffix.e[here + c] + scale_e)
        total += posteriors[c]
    return total


@njit(cache=True, nogil=True, forceinline=True)
def multiply_row(row, here, emissions, at, width):
    for c in range(width):
        row.m[here + c] *= emissions.m[at + c]
        row.e[here + c] += emissions.e[at + c]


@njit(cache=True, nogil=True, forceinline=True, fastmath=CONTRACT)
def step_back_blank(b, k, after, blank_m, blank_e, out, width):
    """B[j] = B'[j] p(blank) + K'[j+1] over suffixes, where K' has its emission already."""
    for c in range(width):
        b.m[out + c], b.e[out + c] = plus(
            b.m[after + c] * blank_m, b.e[after + c] + blank_e, k.m[after + c + ONE], k.e[after + c + ONE]
        )


@njit(cache=True, nogil=True, forceinline=True, fastmath=CONTRACT)
def step_back_token(b, k, after, blank_m, blank_e, distinct, lowest, out, width):
    """K[j] = K'[j] + B[j], or with B'[j] p(blank) in place of B[j] where y_{j+1} = y_j."""
    for c in range(width):
        m1, e1 = b.m[out + c], b.e[out + c]
        m2, e2 = b.m[after + c] * blank_m, b.e[after + c] + blank_e
        may_skip = distinct[lowest + c + ONE]
        m, e = (m1 if may_skip else m2), (e1 if may_skip else e2)
        k.m[out + c], k.e[out + c] = plus(k.m[after + c], k.e[after + c], m, e)


@njit(cache=True, nogil=True)
def new_weights(size):
    return Weights(np.empty(size, np.float64), np.empty(size, np.int64))


@njit(cache=True, nogil=True)
def weigh(
    scores, start, frame_stride, places, distinct, blank_place, frames, before, after, merge_repeats, keep,
    b, k, emissions, blanks, suffix_b, suffix_k, joined, row, first, count, blank, tokens,
):  # fmt: skip
    """The log weight of one run and, if they are to be kept, the posteriors of what its frames emit.

    Per frame: ``first`` target position (from 0) and ``count`` of the tokens it may emit, the posterior of blank;
    the posteriors of the tokens one after the other in ``tokens``. Returns (log weight, length used of tokens).
    Without merging the rows of ``b`` hold X; with merging B, and those of ``k`` K.
    """
    begun, fewest, most = token_range(before, after, merge_repeats)
    widest = band_width(frames, begun, fewest, most)
    if widest == 0:
        return -np.inf, 0
    stride = row_length(widest)
    rows = frames + 1 if keep else 2  # a sum alone needs no more than the last row
    width = U(stride - 2)
    clear_row(b, ONE, width)
    if merge_repeats:
        clear_row(k, ONE, width)
    if merge_repeats and before % 2:
        k.e[1] = 0
    else:
        b.e[1] = 0

    low, used, at = begun, 0, ONE
    for t in range(1, frames + 1):
        source, at = at, U(t % rows * stride + 1)
        lowest, highest = band(t, frames, begun, fewest, most)
        shift, low = U(lowest - low), lowest
        frame_start = U(start + (t - 1) * frame_stride)
        blank_m, blank_e = split(widen(scores[frame_start + blank_place]))
        emit_row(scores, frame_start, places, U(low), U(highest - low + 1), emissions, at, width)
        if merge_repeats:
            join_row(b, k, source, joined, width)
            step_blank(joined, ONE + shift, blank_m, blank_e, b, at, width)
            step_token(joined, b, k, source + shift, distinct, U(low), shift, emissions, at, width)
            close_row(k, at, width)
        else:
            step_plain(b, source + shift, blank_m, blank_e, emissions, at, width)
        close_row(b, at, width)
        if t % NORMALISE_EVERY == 0:
            normalise_row(b, at, width)
            if merge_repeats:
                normalise_row(k, at, width)
        if keep:
            blanks.m[t], blanks.e[t] = blank_m, blank_e
            token = max(low, first_token(before, merge_repeats))
            first[t - 1] = token - 1
            count[t - 1] = max(0, highest - token + 1)
            used += count[t - 1]

    leave(after, low, merge_repeats, distinct, suffix_b, suffix_k, width)
    total_m, total_e = 1.0, NEVER
    for c in range(
        after // 2 - low + 1, after // 2 - low + 3
    ):  # the only cells the run can end in, if in the row
        if c > 0 and c <= width:
            here = at + U(c - 1)
            m, e = b.m[here] * suffix_b.m[c], b.e[here] + suffix_b.e[c]
            total_m, total_e = plus(total_m, total_e, m, e)
            if merge_repeats:
                m, e = k.m[here] * suffix_k.m[c], k.e[here] + suffix_k.e[c]
                total_m, total_e = plus(total_m, total_e, m, e)
    result = logarithm(total_m, total_e)
    if not keep or result == -np.inf:
        return result, used

    scale_m, scale_e = 1 / total_m, -total_e
    place = used
    here, there = ONE, U(stride + 1)  # two rows of suffixes, taken in turns
    for t in range(frames, 0, -1):
        at, source = U(t * stride + 1), U((t - 1) * stride + 1)
        lowest, _ = band(t - 1, frames, begun, fewest, most)
        shift = U(low - lowest)
        blank_m, blank_e = blanks.m[t], blanks.e[t]
        place -= count[t - 1]
        if merge_repeats:
            blank[t - 1] = posterior_row(b, at, suffix_b, here, scale_m, scale_e, width, row)
            posterior_row(k, at, suffix_k, here, scale_m, scale_e, width, row)
            offset = first[t - 1] + 1 - low
            multiply_row(suffix_k, here, emissions, at, width)
            step_back_blank(suffix_b, suffix_k, here - shift, blank_m, blank_e, there, width)
            step_back_token(
                suffix_b, suffix_k, here - shift, blank_m, blank_e, distinct, U(lowest), there, width
            )
            close_row(suffix_k, there, width)
        else:
            blank[t - 1] = posterior_plain(
                b, source, scale_m, scale_e, suffix_b, here - shift, blank_m, blank_e, emissions, at - shift,
                width, row,
            )  # fmt: skip
            offset = first[t - 1] - lowest
            step_back_plain(suffix_b, here - shift, blank_m, blank_e, emissions, at - shift, there, width)
        close_row(suffix_b, there, width)
        for c in range(count[t - 1]):
            tokens[place + c] = row[c + offset]
        if t % NORMALISE_EVERY == 0:
            normalise_row(suffix_b, there, width)
            if merge_repeats:
                normalise_row(suffix_k, there, width)
        low = lowest
        here, there = there, here
    return result, used


@njit(cache=True, nogil=True)
def leave(after, low, merge_repeats, distinct, suffix_b, suffix_k, width):
    """The row of suffixes at a run's last frame: weight 1 wherever the committed state ``after`` may follow."""
    clear_row(suffix_b, ONE, width)
    clear_row(suffix_k, ONE, width)
    cell = after // 2 - low + 1  # every token before the next committed state begun
    if cell > 0:
        suffix_b.e[cell] = 0
        if after % 2 == 0 or distinct[after // 2 + 1]:
            suffix_k.e[cell] = 0
    if after % 2 and cell < width:
        suffix_k.e[cell + 1] = 0


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


@njit(cache=True, nogil=True)
def weigh_items(
    start, stop, scores, strides, targets, frame_lengths, target_lengths, states, blank, merge_repeats,
    size, keep, bases, totals, first, count, blanks, tokens,
):  # fmt: skip
    """Log weights of items start..stop, and the posteriors of what each frame emits (see ``weigh``)."""
    places, distinct = new_layout(targets)
    longest_row = row_length(targets.shape[1] + 1)
    size = size if keep else 2 * longest_row
    b, emissions = new_weights(size), new_weights(size)
    k = new_weights(size if merge_repeats else 0)
    suffix_b, suffix_k = new_weights(2 * longest_row), new_weights(2 * longest_row)
    joined, row = new_weights(longest_row), np.empty(longest_row, np.float64)
    blank_emissions = new_weights(states.shape[1] + 1)
    blank_place = U(blank * strides[2])
    for item in range(start, stop):
        length = frame_lengths[item]
        lay_out(targets[item], target_lengths[item], blank, strides[2], places, distinct)
        total = 0.0 if length > 0 or target_lengths[item] == 0 else -np.inf
        place = bases[item]
        frame, before = 0, 0
        while frame < length and total != -np.inf:
            origin = item * strides[0] + frame * strides[1]
            if states[item, frame] != MASKED:
                before = states[item, frame]
                token = before % 2
                total += widen(scores[U(origin) + (places[(before + 1) // 2] if token else blank_place)])
                if keep:
                    first[item, frame] = before // 2
                    count[item, frame] = token
                    blanks[item, frame] = 1 - token
                    if token:
                        tokens[place] = 1.0
                    place += token
                frame += 1
                continue
            end = run_end(states[item], frame, length)
            after = states[item, end] if end < length else 2 * target_lengths[item]
            weight, used = weigh(
                scores, origin, strides[1], places, distinct, blank_place, end - frame, before, after,
                merge_repeats, keep, b, k, emissions, blank_emissions, suffix_b, suffix_k, joined, row,
                first[item, frame:end], count[item, frame:end], blanks[item, frame:end], tokens[place:],
            )  # fmt: skip
            total += weight
            place += used
            frame = end
        totals[item] = total
        if keep and total == -np.inf:
            blanks[item, :length] = 0
            count[item, :length] = 0


@njit(cache=True, nogil=True)
def spread_items(
    start, stop, gradient, frames, tokens_in_frame, targets, frame_lengths, blank, bases, scales,
    first, count, blanks, tokens,
):  # fmt: skip
    """Add scale * posterior to a gradient of zeros, laid out flat, touching only what some alignment reaches."""
    places, distinct = new_layout(targets)
    for item in range(start, stop):
        lay_out(targets[item], targets.shape[1], blank, 1, places, distinct)
        scale = scales[item]
        place = U(bases[item])
        for frame in range(frame_lengths[item]):
            origin = U((item * frames + frame) * tokens_in_frame)
            gradient[origin + places[0]] = scale * blanks[item, frame]
            position = U(first[item, frame] + 1)
            for c in range(U(count[item, frame])):
                gradient[origin + places[position + c]] += scale * tokens[place + c]
            place += U(count[item, frame])


BLANK_WINS, STAYS = 1, 2  # how a cell of the max recursion was reached, a bit each


@njit(inline="always")
def score_at(scores, place):
    """A score as float64, never so low that the sums lose their order; nor NaN, so that there is an order."""
    score = widen(scores[place])
    return score if score > LOWEST_SCORE else LOWEST_SCORE


@njit(cache=True, nogil=True, forceinline=True)
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


@njit(cache=True, nogil=True)
def search(
    scores, start, frame_stride, places, distinct, blank_place, frames, before, after, merge_repeats,
    target, blank, b, k, ways, alignment,
):  # fmt: skip
    """The best score through one run, the walk of ``weigh`` with another semiring; its way goes to ``alignment``."""
    begun, fewest, most = token_range(before, after, merge_repeats)
    widest = band_width(frames, begun, fewest, most)
    if widest == 0:
        return -np.inf
    loop = 0.0 if merge_repeats else NO_SCORE  # of a token to itself
    stride = row_length(widest)
    width = stride - 2
    here, there = 1, stride + 1  # two rows of scores, taken in turns
    b[: 2 * stride] = NO_SCORE
    k[: 2 * stride] = NO_SCORE
    if before % 2:
        k[here] = 0.0
    else:
        b[here] = 0.0
    low = begun
    for t in range(1, frames + 1):
        lowest, _ = band(t, frames, begun, fewest, most)
        shift, low = lowest - low, lowest
        frame_start = U(start + (t - 1) * frame_stride)
        search_row(
            b, k, U(here + shift), U(there), ways, U(t * stride + 1), scores, frame_start,
            score_at(scores, frame_start + blank_place), places, distinct, U(low), loop, U(width),
        )  # fmt: skip
        here, there = there, here

    # The step to the committed state after the run, as any other but for its emission.
    cell = here + after // 2 - low
    emits_blank = b[cell] >= k[cell]
    j = after // 2
    best = max(b[cell], k[cell])
    if after % 2:
        if not distinct[j + 1]:
            emits_blank, best = True, b[cell]
        stay = k[cell + 1] + loop
        if stay >= best:
            emits_blank, best, j = False, stay, j + 1

    for t in range(frames, 0, -1):
        lowest, highest = band(t, frames, begun, fewest, most)
        way = ways[t * stride + 1 + min(max(j, lowest), highest) - lowest]
        alignment[t - 1] = blank if emits_blank else target[max(j, 1) - 1]
        may_skip = True
        if not emits_blank:
            if way & STAYS:
                continue
            may_skip = distinct[j]
            j -= 1
        lowest, highest = band(t - 1, frames, begun, fewest, most)
        way = ways[(t - 1) * stride + 1 + min(max(j, lowest), highest) - lowest]
        emits_blank = not may_skip or way & BLANK_WINS > 0
    return best


@njit(cache=True, nogil=True)
def search_items(
    start, stop, scores, strides, targets, frame_lengths, target_lengths, states, blank, merge_repeats,
    size, totals, alignments,
):  # fmt: skip
    """Best alignments of items start..stop and their scores."""
    places, distinct = new_layout(targets)
    b, k, ways = np.empty(size, np.float64), np.empty(size, np.float64), np.empty(size, np.uint8)
    blank_place = U(blank * strides[2])
    for item in range(start, stop):
        length = frame_lengths[item]
        lay_out(targets[item], target_lengths[item], blank, strides[2], places, distinct)
        if not merge_repeats:
            distinct[:] = True
        total = 0.0 if length > 0 or target_lengths[item] == 0 else -np.inf
        frame, before = 0, 0
        while frame < length and total != -np.inf:
            origin = item * strides[0] + frame * strides[1]
            if states[item, frame] != MASKED:
                before = states[item, frame]
                token = before % 2
                total += score_at(scores, U(origin) + (places[(before + 1) // 2] if token else blank_place))
                alignments[item, frame] = targets[item, before // 2] if token else blank
                frame += 1
                continue
            end = run_end(states[item], frame, length)
            after = states[item, end] if end < length else 2 * target_lengths[item]
            total += search(
                scores, origin, strides[1], places, distinct, blank_place, end - frame, before, after,
                merge_repeats, targets[item], blank, b, k, ways, alignments[item, frame:end],
            )  # fmt: skip
            frame = end
        if total < NO_SCORE / 2:  # no alignment at all, not merely a forbidden one
            alignments[item, :length] = blank
        totals[item] = total if total > LOWEST_SCORE / 2 else -np.inf
