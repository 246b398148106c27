"""The compiled loops of ``imputer.fused``: one pass over memory each."""

import numba
import numpy as np

u32 = np.uint32
SUMMED = 64  # rows added up in the array's own precision before they join the total


@numba.njit(nogil=True, cache=True)
def masked(base, x, out, threshold, scale, seed, share):  # type: ignore[no-untyped-def]
    """out = share * base + (x * scale where a hash of the position reaches the threshold, else 0)."""
    limit, factor, start, part = u32(threshold), np.float32(scale), u32(seed), np.float32(share)
    for i in range(x.size):
        h = u32(u32(i) * u32(0x9E3779B9) + start)  # then a 32-bit finaliser: every bit of i reaches every bit
        h = u32(u32(h ^ (h >> u32(16))) * u32(0x7FEB352D))
        h = u32(u32(h ^ (h >> u32(15))) * u32(0x846CA68B))
        h = u32(h ^ (h >> u32(16)))
        out[i] = part * base[i] + (x[i] * factor if h >= limit else np.float32(0.0))


@numba.njit(nogil=True, cache=True)
def bias_relu(x, bias):  # type: ignore[no-untyped-def]
    """x = max(x + bias, 0), (row, column), in place."""
    for row in range(x.shape[0]):
        for column in range(x.shape[1]):
            value = x[row, column] + bias[column]
            x[row, column] = value if value > 0 else 0


@numba.njit(nogil=True, cache=True)
def bias_relu_backward(gradient, output, below, total):  # type: ignore[no-untyped-def]
    """below = gradient where output > 0, else 0; total = its sum over rows."""
    rows, columns = gradient.shape
    some = np.empty_like(total)
    for start in range(0, rows, SUMMED):
        some[:] = 0
        for row in range(start, min(rows, start + SUMMED)):
            for column in range(columns):
                value = gradient[row, column] if output[row, column] > 0 else gradient.dtype.type(0)
                below[row, column] = value
                some[column] += value
        total += some


@numba.njit(nogil=True, cache=True)
def bias_rotate(x, bias, cosine, sine):  # type: ignore[no-untyped-def]
    """x += bias, in place; then every pair of its queries and keys is turned by the angle of its frame."""
    frames, half = cosine.shape
    turned = x.shape[1] // 3 * 2
    for row in range(x.shape[0]):
        frame = row % frames
        for start in range(0, turned, 2 * half):
            # Slices, because with sums as indices the loop would not be vectorised.
            low, high = x[row, start : start + half], x[row, start + half : start + 2 * half]
            bias_low, bias_high = bias[start : start + half], bias[start + half : start + 2 * half]
            for i in range(half):
                first, second = low[i] + bias_low[i], high[i] + bias_high[i]
                low[i] = first * cosine[frame, i] - second * sine[frame, i]
                high[i] = second * cosine[frame, i] + first * sine[frame, i]
        for i in range(turned, x.shape[1]):
            x[row, i] += bias[i]


@numba.njit(nogil=True, cache=True)
def bias_rotate_backward(gradient, below, total, cosine, sine):  # type: ignore[no-untyped-def]
    """below = gradient with queries and keys turned back; total = its sum over rows."""
    rows, columns = gradient.shape
    frames, half = cosine.shape
    turned = columns // 3 * 2
    some = np.empty_like(total)
    for begin in range(0, rows, SUMMED):
        some[:] = 0
        for row in range(begin, min(rows, begin + SUMMED)):
            frame = row % frames
            for start in range(0, turned, 2 * half):
                first, second = (
                    gradient[row, start : start + half],
                    gradient[row, start + half : start + 2 * half],
                )
                low, high = below[row, start : start + half], below[row, start + half : start + 2 * half]
                for i in range(half):
                    low[i] = first[i] * cosine[frame, i] + second[i] * sine[frame, i]
                    high[i] = second[i] * cosine[frame, i] - first[i] * sine[frame, i]
            below[row, turned:] = gradient[row, turned:]
            for column in range(columns):
                some[column] += below[row, column]
        total += some
