# mypy: allow-untyped-defs, disable-error-code="call-arg"
"""Access to the scores of an item in a flat array, for any strides and floating type."""

from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from imputer.lattice.arguments import HIGHEST, IMPOSSIBLE, LOWEST
from imputer.lattice.compilation import allocator, part
from imputer.lattice.runs import row_length


class Source(NamedTuple):
    """The scores of one item in the flat array."""

    scores: np.ndarray
    frame_stride: int
    blank: int  # place of the blank's score within a frame
    places: np.ndarray  # places of the scores of tokens 1, 2, ...
    distinct: np.ndarray  # whether token j differs from token j - 1


@intrinsic
def from_bfloat16(_context, _bits):
    def code(_, builder, __, arguments):
        wide = builder.shl(builder.zext(arguments[0], ir.IntType(32)), ir.Constant(ir.IntType(32), 16))
        return builder.fpext(builder.bitcast(wide, ir.FloatType()), ir.DoubleType())

    return types.float64(types.int16), code


def widen(number):
    """A stored score as float64; bfloat16 arrives as the int16 of its bits."""
    raise NotImplementedError("only for compiled code")


@overload(widen)
def _widen(number):
    if number == types.int16:
        return lambda number: from_bfloat16(number)
    return lambda number: np.float64(number)


@part()
def committed_score(score):
    """The log weight of a committed frame in a sum: -inf below the range of scores, NaN above it."""
    if score > HIGHEST:
        return np.nan
    return -np.inf if score <= IMPOSSIBLE else score


@part()
def ordered_score(score):
    """A score for the best path: never NaN, and never so low that sums lose their order."""
    score = score if score > LOWEST else LOWEST
    return score if score <= HIGHEST else LOWEST


@allocator
def new_layout(targets):
    size = targets.shape[1] + 1 + row_length(targets.shape[1] + 1)  # a row may start at the last token
    return np.empty(size, np.uint64), np.empty(size, np.bool_)


@allocator
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
