# mypy: allow-untyped-defs, disable-error-code="call-arg"
"""The lattice on CPU tensors: compiled loops over the reachable cells of each run, no exp or log inside.

A weight is kept as ``m * 2**e``, a float64 beside an int64: products and sums of such numbers need no
logarithm, never underflow however long the input, and loops over a row of states vectorise. The mantissas
drift slowly, at most by a factor of 8 a frame, so a row is brought back near 1 only now and then.
A forbidden emission is 2**FLOOR, not zero: nothing special is left to handle, and no NaN can arise from it.

X[j] is the weight of all prefixes with j tokens begun. When repeats merge it splits into B[j], the prefixes that
end in a blank, and K[j], those that end in token j. Suffixes have the same letters. See docs/maths.md.
"""

import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, overload
from torch import Tensor

from imputer.lattice.plan import MASKED, Plan, band, band_width, first_token, run_end, token_range

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


# A row holds the band of one frame, cell c for lowest + c tokens begun, between two cells that no path reaches.
# The row of the frame before starts at the same number of tokens or one lower: that is ``shift``.


@njit(cache=True, nogil=True)
def close_row(row, at, width):
    """Mark the cells on both sides of a row as never reached."""
    for c in (at - ONE, at + width):
        row.m[c] = 1.0
        row.e[c] = NEVER


@njit(cache=True, nogil=True)
def clear_row(row, at, width):
    for c in range(at - ONE, at + width + ONE):
        row.m[c] = 1.0
        row.e[c] = NEVER


@njit(cache=True, nogil=True)
def normalise_row(row, at, width):
    """Move the binary exponent of every mantissa into its exponent."""
    for c in range(at, at + width):
        shift = (as_bits(row.m[c]) >> MANTISSA_BITS) - BIAS
        row.m[c] *= as_float((BIAS - shift) << MANTISSA_BITS)
        row.e[c] = max(row.e[c] + shift, NEVER)


@njit(cache=True, nogil=True, fastmath=CONTRACT)
def emit_row(scores, start, places, lowest, width, emissions, at):
    """The emissions of tokens lowest, lowest + 1, ... in one frame."""
    for c in range(width):
        emissions.m[at + c], emissions.e[at + c] = split(widen(scores[start + places[lowest + c]]))
    emissions.m[at + width] = 1.0
    emissions.e[at + width] = 0


@njit(cache=True, nogil=True, fastmath=CONTRACT)
def step_plain(x, before, blank_m, blank_e, emissions, at, width):
    """X'[j] = X[j] p(blank) + X[j-1] p(y_j)."""
    for c in range(width):
        x.m[at + c], x.e[at + c] = plus(
            x.m[before + c] * blank_m,
            x.e[before + c] + blank_e,
            x.m[before + c - ONE] * emissions.m[at + c],
            x.e[before + c - ONE] + emissions.e[at + c],
        )


@njit(cache=True, nogil=True, fastmath=REDUCE)
def step_back_plain(
    suffix, after, blank_m, blank_e, emissions, here, x, at, scale_m, scale_e, width, out, tokens
):
    """X[j] = X'[j] p(blank) + X'[j+1] p(y_{j+1}) over suffixes; the frame's posteriors of tokens, and of blank."""
    blank = 0.0
    for c in range(width):
        m1, e1 = suffix.m[after + c] * blank_m, suffix.e[after + c] + blank_e
        m2 = suffix.m[after + c + ONE] * emissions.m[here + c + ONE]
        e2 = suffix.e[after + c + ONE] + emissions.e[here + c + ONE]
        prefix_m, prefix_e = x.m[at + c] * scale_m, x.e[at + c] + scale_e
        blank += prefix_m * m1 * power_of_two(prefix_e + e1)
        tokens[c] = prefix_m * m2 * power_of_two(prefix_e + e2)
        suffix.m[out + c], suffix.e[out + c] = plus(m1, e1, m2, e2)
    return blank


@njit(cache=True, nogil=True, fastmath=CONTRACT)
def join_row(b, k, at, x, width):
    """X[j] = B[j] + K[j], the cells on both sides included."""
    for c in range(width + ONE + ONE):
        x.m[c], x.e[c] = plus(b.m[at + c - ONE], b.e[at + c - ONE], k.m[at + c - ONE], k.e[at + c - ONE])


@njit(cache=True, nogil=True, fastmath=CONTRACT)
def step_blank(x, before, blank_m, blank_e, b, at, width):
    """B'[j] = X[j] p(blank)."""
    for c in range(width):
        b.m[at + c] = x.m[before + c] * blank_m
        b.e[at + c] = x.e[before + c] + blank_e


@njit(cache=True, nogil=True, fastmath=CONTRACT)
def step_token(x, b, k, before, distinct, lowest, shift, emissions, at, width):
    """K'[j] = (K[j] + X[j-1]) p(y_j), or with B[j-1] in place of X[j-1] where y_j = y_{j-1}."""
    for c in range(width):
        may_skip = distinct[lowest + c]
        m2 = x.m[shift + c] if may_skip else b.m[before + c - ONE]
        e2 = x.e[shift + c] if may_skip else b.e[before + c - ONE]
        m, e = plus(k.m[before + c], k.e[before + c], m2, e2)
        k.m[at + c] = m * emissions.m[at + c]
        k.e[at + c] = e + emissions.e[at + c]


@njit(cache=True, nogil=True, fastmath=REDUCE)
def posterior_row(prefix, at, suffix, here, scale_m, scale_e, width, posteriors):
    """prefix * suffix / total, cell by cell; returns the sum."""
    total = 0.0
    for c in range(width):
        m = prefix.m[at + c] * suffix.m[here + c] * scale_m
        posteriors[c] = m * power_of_two(prefix.e[at + c] + suffix.e[here + c] + scale_e)
        total += posteriors[c]
    return total


@njit(cache=True, nogil=True)
def multiply_row(row, here, emissions, at, width):
    for c in range(width):
        row.m[here + c] *= emissions.m[at + c]
        row.e[here + c] += emissions.e[at + c]


@njit(cache=True, nogil=True, fastmath=CONTRACT)
def step_back_blank(b, k, after, blank_m, blank_e, out, width):
    """B[j] = B'[j] p(blank) + K'[j+1] over suffixes, where K' has its emission already."""
    for c in range(width):
        b.m[out + c], b.e[out + c] = plus(
            b.m[after + c] * blank_m, b.e[after + c] + blank_e, k.m[after + c + ONE], k.e[after + c + ONE]
        )


@njit(cache=True, nogil=True, fastmath=CONTRACT)
def step_back_token(b, k, after, blank_m, blank_e, distinct, lowest, out, width):
    """K[j] = K'[j] + B[j], or with B'[j] p(blank) in place of B[j] where y_{j+1} = y_j."""
    for c in range(width):
        may_skip = distinct[lowest + c + ONE]
        m2 = b.m[out + c] if may_skip else b.m[after + c] * blank_m
        e2 = b.e[out + c] if may_skip else b.e[after + c] + blank_e
        k.m[out + c], k.e[out + c] = plus(k.m[after + c], k.e[after + c], m2, e2)


@njit(cache=True, nogil=True)
def new_weights(size):
    return Weights(np.empty(size, np.float64), np.empty(size, np.int64))


@njit(cache=True, nogil=True)
def weigh(
    scores, start, frame_stride, places, distinct, blank_place, frames, before, after, merge_repeats,
    want_posteriors, x, k, emissions, blanks, suffix_b, suffix_k, joined, row, first, count, blank, tokens,
):  # fmt: skip
    """The log weight of one run, and the posteriors of what its frames emit.

    Per frame: ``first`` target position (from 0) and ``count`` of the tokens it may emit, the posterior of blank;
    the posteriors of the tokens one after the other in ``tokens``. Returns (log weight, length used of tokens).
    """
    begun, fewest, most = token_range(before, after, merge_repeats)
    widest = band_width(frames, begun, fewest, most)
    if widest == 0:
        return -np.inf, 0
    stride = widest + 2
    b = x  # without merging the rows hold X, with merging B beside L
    clear_row(b, ONE, U(1))
    if merge_repeats:
        clear_row(k, ONE, U(1))
    if merge_repeats and before % 2:
        k.e[1] = 0
    else:
        b.e[1] = 0

    low, width, used = begun, 1, 0
    for t in range(1, frames + 1):
        at, source = U(t * stride + 1), U((t - 1) * stride + 1)
        lowest, highest = band(t, frames, begun, fewest, most)
        shift, width_before = lowest - low, width
        low, width = lowest, highest - lowest + 1
        frame_start = U(start + (t - 1) * frame_stride)
        blanks.m[t], blanks.e[t] = split(widen(scores[frame_start + blank_place]))
        emit_row(scores, frame_start, places, U(low), U(width), emissions, at)
        if merge_repeats:
            join_row(b, k, source, joined, U(width_before))
            step_blank(joined, U(1 + shift), blanks.m[t], blanks.e[t], b, at, U(width))
            step_token(joined, b, k, source + U(shift), distinct, U(low), U(shift), emissions, at, U(width))
            close_row(k, at, U(width))
        else:
            step_plain(x, source + U(shift), blanks.m[t], blanks.e[t], emissions, at, U(width))
        close_row(b, at, U(width))
        if t % NORMALISE_EVERY == 0:
            normalise_row(b, at, U(width))
            if merge_repeats:
                normalise_row(k, at, U(width))
        if want_posteriors:
            token = max(low, first_token(before, merge_repeats))
            first[t - 1] = token - 1
            count[t - 1] = max(0, highest - token + 1)
            used += count[t - 1]

    # Suffixes at the last frame: one cell, or two when the next token may go on from itself or from before.
    at = U(frames * stride + 1)
    clear_row(suffix_b, ONE, U(width))
    clear_row(suffix_k, ONE, U(width))
    exit_cell = after // 2 - low  # of the states with every token before the next committed one begun
    if exit_cell >= 0 and exit_cell < width:
        suffix_b.e[exit_cell + 1] = 0
        if merge_repeats and (after % 2 == 0 or distinct[after // 2 + 1]):
            suffix_k.e[exit_cell + 1] = 0
    if merge_repeats and after % 2 and exit_cell + 1 < width:
        suffix_k.e[exit_cell + 2] = 0
    total_m, total_e = 1.0, NEVER
    for c in range(width):
        here = at + U(c)
        m, e = b.m[here] * suffix_b.m[c + 1], b.e[here] + suffix_b.e[c + 1]
        total_m, total_e = plus(total_m, total_e, m, e)
        if merge_repeats:
            m, e = k.m[here] * suffix_k.m[c + 1], k.e[here] + suffix_k.e[c + 1]
            total_m, total_e = plus(total_m, total_e, m, e)
    result = logarithm(total_m, total_e)
    if not want_posteriors or result == -np.inf:
        return result, used

    scale_m, scale_e = 1 / total_m, -total_e
    place = used
    here, there = ONE, U(stride + 1)  # two rows of suffixes, taken in turns
    for t in range(frames, 0, -1):
        at, source = U(t * stride + 1), U((t - 1) * stride + 1)
        lowest, highest = band(t - 1, frames, begun, fewest, most)
        shift, width_before = low - lowest, highest - lowest + 1
        place -= count[t - 1]
        if merge_repeats:
            blank[t - 1] = posterior_row(b, at, suffix_b, here, scale_m, scale_e, U(width), row)
            posterior_row(k, at, suffix_k, here, scale_m, scale_e, U(width), row)
            offset = first[t - 1] + 1 - low
            multiply_row(suffix_k, here, emissions, at, U(width))
            step_back_blank(
                suffix_b, suffix_k, here - U(shift), blanks.m[t], blanks.e[t], there, U(width_before)
            )
            step_back_token(
                suffix_b, suffix_k, here - U(shift), blanks.m[t], blanks.e[t], distinct, U(lowest), there,
                U(width_before),
            )  # fmt: skip
            close_row(suffix_k, there, U(width_before))
        else:
            blank[t - 1] = step_back_plain(
                suffix_b, here - U(shift), blanks.m[t], blanks.e[t], emissions, at - U(shift),
                x, source, scale_m, scale_e, U(width_before), there, row,
            )  # fmt: skip
            offset = first[t - 1] - lowest
        for c in range(count[t - 1]):
            tokens[place + c] = row[c + offset]
        close_row(suffix_b, there, U(width_before))
        if t % NORMALISE_EVERY == 0:
            normalise_row(suffix_b, there, U(width_before))
            if merge_repeats:
                normalise_row(suffix_k, there, U(width_before))
        low, width = lowest, width_before
        here, there = there, here
    return result, used


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
    distinct[size + 1] = False


@njit(cache=True, nogil=True)
def weigh_items(
    start, stop, scores, strides, targets, frame_lengths, target_lengths, states, blank, merge_repeats,
    size, want_posteriors, bases, totals, first, count, blanks, tokens,
):  # fmt: skip
    """Log weights of items start..stop, and the posteriors of what each frame emits (see ``weigh``)."""
    places, distinct = np.empty(targets.shape[1] + 1, np.uint64), np.empty(targets.shape[1] + 2, np.bool_)
    x, emissions = new_weights(size), new_weights(size)
    k = new_weights(size if merge_repeats else 2)
    suffix_b, suffix_k = new_weights(size), new_weights(size)
    joined, row = new_weights(size), np.empty(size, np.float64)
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
                if want_posteriors:
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
                merge_repeats, want_posteriors, x, k, emissions, blank_emissions, suffix_b, suffix_k, joined, row,
                first[item, frame:end], count[item, frame:end], blanks[item, frame:end], tokens[place:],
            )  # fmt: skip
            total += weight
            place += used
            frame = end
        totals[item] = total
        if want_posteriors and total == -np.inf:
            blanks[item, :length] = 0
            count[item, :length] = 0


@njit(cache=True, nogil=True)
def spread_items(
    start, stop, gradient, frames, tokens_in_frame, targets, frame_lengths, blank, bases, scales,
    first, count, blanks, tokens,
):  # fmt: skip
    """Add scale * posterior to a gradient of zeros, laid out flat, touching only what some alignment reaches."""
    places, distinct = np.empty(targets.shape[1] + 1, np.uint64), np.empty(targets.shape[1] + 2, np.bool_)
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


@njit(cache=True, nogil=True)
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
    stride = widest + 2
    here, there = 1, stride + 1  # two rows of scores, taken in turns
    b[:3] = NO_SCORE
    k[:3] = NO_SCORE
    if before % 2:
        k[here] = 0.0
    else:
        b[here] = 0.0
    low, width = begun, 1
    for t in range(1, frames + 1):
        lowest, highest = band(t, frames, begun, fewest, most)
        shift = lowest - low
        low, width = lowest, highest - lowest + 1
        frame_start = U(start + (t - 1) * frame_stride)
        search_row(
            b, k, U(here + shift), U(there), ways, U(t * stride + 1), scores, frame_start,
            score_at(scores, frame_start + blank_place), places, distinct, U(low), loop, U(width),
        )  # fmt: skip
        b[there - 1] = b[there + width] = NO_SCORE
        k[there - 1] = k[there + width] = NO_SCORE
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
    places, distinct = np.empty(targets.shape[1] + 1, np.uint64), np.empty(targets.shape[1] + 2, np.bool_)
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


class Posteriors(NamedTuple):
    """What each frame emits with what probability, kept only where some alignment reaches."""

    first: np.ndarray  # (batch, frame): the first target position the frame may emit
    counts: np.ndarray  # (batch, frame): how many positions from there on
    blanks: np.ndarray  # (batch, frame)
    tokens: np.ndarray  # (cell,): item after item, frame after frame
    bases: np.ndarray  # (batch,): where an item starts in tokens


def total(log_probs: Tensor, plan: Plan, want_posteriors: bool) -> tuple[Tensor, Posteriors | None]:
    """(batch,) float64 log weights, and the posteriors when wanted."""
    batch, frames, _ = plan.shape
    scores, strides = _flat(log_probs)
    exact = np.float64 if log_probs.dtype == torch.float64 else np.float32
    shape = (batch, frames) if want_posteriors else (batch, 0)
    bases = np.cumsum(plan.cells) - plan.cells
    posteriors = Posteriors(
        first=np.empty(shape, np.int32),
        counts=np.empty(shape, np.int32),
        blanks=np.empty(shape, exact),
        tokens=np.empty(int(plan.cells.sum()) if want_posteriors else 0, exact),
        bases=bases,
    )
    totals = np.empty(batch)
    size = int(plan.scratch.max(initial=0)) + 2
    _over_items(
        weigh_items, plan, scores, strides, plan.targets, plan.frame_lengths, plan.target_lengths, plan.states,
        plan.blank, plan.merge_repeats, size, want_posteriors, bases, totals, posteriors.first, posteriors.counts,
        posteriors.blanks, posteriors.tokens,
    )  # fmt: skip
    return torch.from_numpy(totals), posteriors if want_posteriors else None


def spread(posteriors: Posteriors, plan: Plan, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """scales (batch,) times the posteriors, dense: (batch, frame, token)."""
    wide = dtype if dtype in (torch.float32, torch.float64) else torch.float32
    gradient = torch.zeros(plan.shape, dtype=wide)
    _, frames, tokens = plan.shape
    _over_items(
        spread_items, plan, gradient.view(-1).numpy(), frames, tokens, plan.targets, plan.frame_lengths,
        plan.blank, posteriors.bases, scales.detach().to(torch.float64).contiguous().numpy(),
        posteriors.first, posteriors.counts, posteriors.blanks, posteriors.tokens,
    )  # fmt: skip
    return gradient.to(dtype)


def best(log_probs: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
    """(batch, frame) best alignments, blank beyond the length, and their (batch,) float64 scores."""
    batch, frames, _ = plan.shape
    scores, strides = _flat(log_probs)
    totals, alignments = np.empty(batch), np.full((batch, frames), plan.blank, np.int64)
    size = int(plan.scratch.max(initial=0)) + 3
    _over_items(
        search_items, plan, scores, strides, plan.targets, plan.frame_lengths, plan.target_lengths, plan.states,
        plan.blank, plan.merge_repeats, size, totals, alignments,
    )  # fmt: skip
    return torch.from_numpy(alignments), torch.from_numpy(totals)


def _flat(log_probs: Tensor) -> tuple[np.ndarray, tuple[int, int, int]]:
    """All elements from the first to the last as one array, whatever the strides, and the strides."""
    scores = log_probs.detach()
    if scores.dtype == torch.bfloat16:
        scores = scores.view(torch.int16)
    if scores.dtype == torch.float16:
        scores = scores.float()
    strides = (scores.stride(0), scores.stride(1), scores.stride(2))
    reach = sum((size - 1) * stride for size, stride in zip(scores.shape, strides, strict=True)) + 1
    flat = scores.as_strided((reach if scores.numel() else 0,), (1,))
    return flat.numpy(), strides


_CELLS_A_THREAD = 20_000  # less is not worth a thread
_pool: ThreadPoolExecutor | None = None


def _forget_pool() -> None:
    """Threads do not survive a fork."""
    global _pool
    _pool = None


os.register_at_fork(after_in_child=_forget_pool)


def _over_items(work: Callable[..., None], plan: Plan, *arguments: object) -> None:
    """Do ``work(start, stop, ...)`` for all items, in threads when torch may use them; items do not meet."""
    global _pool
    batch = plan.shape[0]
    threads = min(torch.get_num_threads(), batch, int(plan.cells.sum()) // _CELLS_A_THREAD)
    if threads <= 1:
        work(0, batch, *arguments)
        return
    if _pool is None:
        _pool = ThreadPoolExecutor(max_workers=os.cpu_count(), thread_name_prefix="lattice")
    bounds = [batch * part // threads for part in range(threads + 1)]
    jobs = [_pool.submit(work, start, stop, *arguments) for start, stop in pairwise(bounds)]
    for job in jobs:
        job.result()
