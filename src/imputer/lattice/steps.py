# mypy: allow-untyped-defs, disable-error-code="call-arg"
"""One frame of the sum recursion over a row of states; see docs/maths.md.

X[j] is the weight of all prefixes with j tokens begun. When repeats merge it splits into B[j], the prefixes that
end in a blank, and K[j], those that end in token j. Suffixes use the same letters.

A row holds the band of one frame, padded upwards to whole vectors: cell c is for lowest + c tokens begun. No path
leads from the padding to the run's end, so it changes nothing. The cell on either side of a row is unreached. The
row of the previous frame starts at the same number of tokens or one lower: ``shift``.
"""

from imputer.lattice.compilation import part
from imputer.lattice.weights import CONTRACT, ONE, REDUCE, plus, power_of_two


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
    """Posteriors of a frame, prefix * emission * suffix / total: written to ``tokens``; blank's is returned."""
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
    """K'[j] = (K[j] + X[j-1]) p(y_j), or with B[j-1] in place of X[j-1] where y_j = y_{j-1}; overwrites X."""
    for c in range(width):  # two loops: the compiler does not vectorise one with many arrays
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
    """B[j] = B'[j] p(blank) + K'[j+1] over suffixes, where K' includes its emission."""
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
