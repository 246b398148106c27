"""Everything by brute force: alignments are listed one by one, so only small cases fit. Shares no code with src."""

import itertools
import math


def collapse(alignment, blank, merge):
    out, previous = [], None
    for token in alignment:
        if token != blank and not (merge and token == previous):
            out.append(token)
        previous = token
    return tuple(out)


def alignments(target, frames, blank, merge):
    """beta(y): every alignment of the given length that collapses to the target, in lexicographic order."""
    symbols = sorted({blank, *target})
    return [
        alignment
        for alignment in itertools.product(symbols, repeat=frames)
        if collapse(alignment, blank, merge) == tuple(target)
    ]


def states(alignment, blank, merge):
    """Per frame (how many tokens have begun, whether the frame is blank)."""
    return [
        (len(collapse(alignment[: frame + 1], blank, merge)), alignment[frame] == blank)
        for frame in range(len(alignment))
    ]


def compatible(alignment, committed, blank, merge):
    """beta'(a~, a): the alignments of the same target in the same state at every committed frame."""
    target = collapse(alignment, blank, merge)
    given = states(alignment, blank, merge)
    return [
        other
        for other in alignments(target, len(alignment), blank, merge)
        if all(
            mine == theirs
            for mine, theirs, kept in zip(given, states(other, blank, merge), committed, strict=True)
            if kept
        )
    ]


def log_prob(alignment, scores):
    """log p(a) with scores[frame][token]."""
    return math.fsum(scores[frame][token] for frame, token in enumerate(alignment))


def log_sum(many, scores):
    values = [log_prob(alignment, scores) for alignment in many]
    top = max(values, default=-math.inf)
    if top == -math.inf:
        return -math.inf
    return top + math.log(math.fsum(math.exp(value - top) for value in values))


def posteriors(many, scores):
    """gradient of log_sum: share of every (frame, token), as nested lists; zeros when nothing is possible."""
    whole = log_sum(many, scores)
    shares = [[0.0] * len(row) for row in scores]
    if whole == -math.inf:
        return shares
    for alignment in many:
        weight = math.exp(log_prob(alignment, scores) - whole)
        for frame, token in enumerate(alignment):
            shares[frame][token] += weight
    return shares


def best(many, scores, blank, merge):
    """The most probable; among equals the one whose states are highest from the last frame back."""

    def order(alignment):
        heights = [2 * begun + is_blank for begun, is_blank in states(alignment, blank, merge)]
        return log_prob(alignment, scores), heights[::-1]

    return max(many, key=order)
