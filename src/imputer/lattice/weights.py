# mypy: allow-untyped-defs, disable-error-code="call-arg"
"""The numeric representation of the sum over alignments: a weight is ``m * 2**e``, a float64 and an int64.

Products and sums of such numbers need no exp and no log, do not underflow at any length, and loops over a row of
states vectorise. One exp is computed per emission and one log per run. Mantissas drift by at most a factor of 8 per
frame, so a row is normalised every ``NORMALISE_EVERY`` frames. A forbidden emission is 2**FLOOR instead of zero:
it needs no special case and cannot produce NaN.

Measured against the same recursion in log space, also compiled (`imputer bench arithmetic`, forward + backward, one
thread): 3 to 5.5 times as fast without merging, 3 to 9.6 times with merging. A
whole training step gains about 1 % at most: of 1186 ms (configs/small.toml, fp32) the objective takes 0.4 ms here and
1.4 ms in log space.
"""

import math
from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from imputer.lattice.arguments import HIGHEST
from imputer.lattice.compilation import allocator, part

FLOOR = -(2**45)  # exponent of a forbidden emission: arguments.LOWEST in bits
UNREACHED = -(2**50)  # exponent of a state that no path reaches, below any exponent that counts
NORMALISE_EVERY = 32  # frames; mantissas stay within 2**96 of 1, far inside float64
LOG_2 = math.log(2)
ROUNDER = 1.5 * 2.0**52  # adding it rounds a float64 to an integer and leaves that integer in the low bits
ROUNDER_BITS = int(np.float64(ROUNDER).view(np.int64))
MANTISSA_BITS = 52
BIAS = 1023

ONE = np.uint64(1)  # unsigned indices need no check for negative ones, which would prevent vectorisation

CONTRACT = {"contract"}  # a * b + c in one instruction
REDUCE = {"contract", "reassoc"}  # and sums over a row in several lanes


class Weights(NamedTuple):
    """Rows of weights: mantissas and binary exponents."""

    m: np.ndarray
    e: np.ndarray


@allocator
def new_weights(size):
    return Weights(np.empty(size, np.float64), np.empty(size, np.int64))


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
    bits = FLOOR if bits < FLOOR else bits  # in this form NaN stays NaN
    bits = np.nan if bits > HIGHEST / LOG_2 else bits
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


@part()
def close_row(row, at, width):
    """Mark the cells on both sides of a row as unreached."""
    row.m[at - ONE] = row.m[at + width] = 1.0
    row.e[at - ONE] = row.e[at + width] = UNREACHED


@part()
def clear_row(row, at, width):
    for c in range(at - ONE, at + width + ONE):
        row.m[c] = 1.0
        row.e[c] = UNREACHED


@part()
def normalise_row(row, at, width):
    """Move the binary exponent of every mantissa into its exponent."""
    for c in range(at, at + width):
        shift = (as_bits(row.m[c]) >> MANTISSA_BITS) - BIAS
        row.m[c] *= as_float((BIAS - shift) << MANTISSA_BITS)
        row.e[c] = max(row.e[c] + shift, UNREACHED)


@part()
def copy_rows(b, k, at, to_b, to_k, to, width, merge_repeats):
    """Rows of B and K with the cells on their sides."""
    for c in range(width + ONE + ONE):
        to_b.m[to - ONE + c] = b.m[at - ONE + c]
        to_b.e[to - ONE + c] = b.e[at - ONE + c]
        if merge_repeats:
            to_k.m[to - ONE + c] = k.m[at - ONE + c]
            to_k.e[to - ONE + c] = k.e[at - ONE + c]
