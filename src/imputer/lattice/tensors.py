"""The lattice in plain torch operations, for every device and floating type; differentiable any number of times.

Runs of masked frames are independent, so runs of similar size are stacked and processed together: one step per frame
of the longest run of the group. Weights are logarithms here; a semiring is one function, ``log_add`` for the sum
over alignments, ``torch.maximum`` for the best of them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from imputer.lattice.arguments import HIGHEST, IMPOSSIBLE, LOWEST, MASKED, UNREACHED
from imputer.lattice.plan import Plan

Semiring = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Group:
    """Runs of similar size, padded to the longest; ``width`` counts tokens begun since the entry, from 0."""

    item: Tensor  # (run,)
    frame: Tensor  # (run, frame): index into log_probs, padding repeats a valid one
    active: Tensor  # (run, frame): False on padding
    token: Tensor  # (run, width): the token that state K[j] emits, padding is blank
    reached: Tensor  # (run, frame, width): whether some alignment may emit token j at this frame
    distinct: Tensor  # (run, width): whether token j differs from token j - 1, or repeats do not merge
    enter_blank: Tensor  # (run, width): log weights on entry
    enter_token: Tensor
    leave_blank: Tensor  # (run, width): whether the run may end in this state
    leave_token: Tensor
    loops: bool  # whether a token may follow itself


@dataclass(frozen=True)
class Rows:
    """Prefix weights before each frame and after the last, B and K, each (run, width); and the emissions."""

    blanks: list[Tensor]
    tokens: list[Tensor]
    blank_scores: Tensor  # (run, frame)
    token_scores: Tensor  # (run, frame, width)


@dataclass(frozen=True)
class Posteriors:
    """Index (item, frame, token) and value of everything some alignment may emit."""

    item: Tensor
    frame: Tensor
    token: Tensor
    value: Tensor


def total(log_probs: Tensor, plan: Plan, want_posteriors: bool) -> tuple[Tensor, Posteriors | None]:
    """(batch,) log weights, and the posteriors when wanted."""
    plus = log_add if log_probs.requires_grad else torch.logaddexp
    walked = [
        (group, _walk(log_probs, group, plan.blank, plus, 0, group.frame.shape[1]))
        for group in _groups(log_probs, plan)
    ]
    items, frames, tokens = _committed(log_probs, plan)
    given = _scores(log_probs, items, frames, tokens)
    start = torch.where(_infeasible(plan, log_probs.device), -torch.inf, 0.0).to(given.dtype)
    weights = [_leave(group, rows).logsumexp(1) for group, rows in walked]
    parts = torch.cat([given, *weights])
    where = torch.cat([items, *(group.item for group, _ in walked)])
    # index_put rather than index_add: the latter adds in any order on a GPU.
    totals = start.index_put((where,), _possible(parts), accumulate=True)
    if not want_posteriors:
        return totals, None
    pieces = [(items, frames, tokens, torch.ones_like(given))]
    for (group, rows), weight in zip(walked, weights, strict=True):
        pieces += _posteriors(plan.blank, group, rows, weight, plus)
    item, frame, token, value = (torch.cat(piece) for piece in zip(*pieces, strict=True))
    return totals, Posteriors(item, frame, token, torch.where(totals[item] == -torch.inf, 0.0, value))


def scatter(posteriors: Posteriors, plan: Plan, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """scales (batch,) times the posteriors, dense: (batch, frame, token)."""
    value = posteriors.value * scales.to(posteriors.value.dtype)[posteriors.item]
    if value.device.type != "cpu":  # on a CPU only float64 is always added in the same order
        value = value.to(torch.promote_types(dtype, torch.float32))
    zeros = torch.zeros(plan.shape, dtype=value.dtype, device=value.device)
    index = (posteriors.item, posteriors.frame, posteriors.token)
    return zeros.index_put(index, value, accumulate=True).to(dtype)


def best(log_probs: Tensor, plan: Plan, most_cells: int) -> tuple[Tensor, Tensor]:
    """(batch, frame) best alignments, blank beyond the length, and their (batch,) scores."""
    log_probs = torch.where(log_probs <= HIGHEST, log_probs, -torch.inf)  # NaN is forbidden too
    items, frames, tokens = _committed(log_probs, plan)
    alignments = torch.full(plan.shape[:2], plan.blank, dtype=torch.int64, device=log_probs.device)
    alignments[items, frames] = tokens
    where, scores = [items], [_scores(log_probs, items, frames, tokens)]
    for group in _groups(log_probs, plan):
        path, score = _best_paths(log_probs, group, plan.blank, most_cells)
        items_of_frames = group.item[:, None].expand_as(group.frame)
        alignments[items_of_frames[group.active], group.frame[group.active]] = path[group.active]
        where.append(group.item)
        scores.append(score)
    infeasible = _infeasible(plan, log_probs.device)
    totals = torch.zeros(plan.shape[0], dtype=scores[0].dtype, device=log_probs.device)
    summed = totals.index_put((torch.cat(where),), torch.cat(scores), accumulate=True)
    alignments[infeasible | (summed < UNREACHED / 2)] = plan.blank
    totals = totals.index_put((torch.cat(where),), _possible(torch.cat(scores)), accumulate=True)
    return alignments, torch.where(infeasible, -torch.inf, totals)


def log_add(a: Tensor, b: Tensor) -> Tensor:
    """log(exp(a) + exp(b)); torch.logaddexp has NaN as second derivative where one side is far below the other."""
    top = torch.maximum(a, b).detach()
    return top + ((a - top).exp() + (b - top).exp()).log()


def _exact(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def _scores(log_probs: Tensor, item: Tensor, frame: Tensor, token: Tensor) -> Tensor:
    """Scores in the range that counts: not below LOWEST, and NaN above HIGHEST."""
    scores = log_probs[item, frame, token].to(_exact(log_probs.device))
    return torch.where(scores > HIGHEST, torch.nan, scores).clamp(min=LOWEST)


def _possible(weights: Tensor) -> Tensor:
    """Log weights of runs or committed frames, -inf where the probability is 0; NaN stays NaN."""
    return torch.where(weights <= IMPOSSIBLE, -torch.inf, weights)


def _infeasible(plan: Plan, device: torch.device) -> Tensor:
    """(batch,): items with more tokens than frames."""
    return torch.from_numpy(plan.target_lengths > plan.frame_lengths).to(device)


def _committed(log_probs: Tensor, plan: Plan) -> tuple[Tensor, Tensor, Tensor]:
    """Index (item, frame, token) of the committed frames."""
    inside = np.arange(plan.shape[1]) < plan.frame_lengths[:, None]
    item, frame = np.nonzero((plan.states != MASKED) & inside)
    state = plan.states[item, frame]
    token = np.full(len(item), plan.blank)
    emits = state % 2 == 1
    token[emits] = plan.targets[item[emits], state[emits] // 2]
    device = log_probs.device
    return tuple(torch.from_numpy(part).to(device) for part in (item, frame, token))  # type: ignore[return-value]


def _groups(log_probs: Tensor, plan: Plan) -> Iterator[Group]:
    """Runs grouped by the powers of two of their frames and tokens, so that padding stays bounded."""
    runs = plan.runs
    runs = runs[plan.target_lengths[runs[:, 0]] <= plan.frame_lengths[runs[:, 0]]]
    if not len(runs):
        return
    begun = (runs[:, 3] + 1) // 2
    width = np.maximum((runs[:, 4] + 1) // 2 - begun, 0) + 1
    size = np.ceil(np.log2(runs[:, 2])).astype(np.int64) * 64 + np.ceil(np.log2(width) / 2).astype(np.int64)
    for key in np.unique(size):
        chosen = size == key
        yield _group(runs[chosen], int(width[chosen].max()), plan, log_probs.device)


def _group(runs: np.ndarray, width: int, plan: Plan, device: torch.device) -> Group:
    item, start, frames, before, after = runs.T[:, :, None]  # (run, 1) each
    merges = plan.merge_repeats
    steps, columns = np.arange(int(frames.max())), np.arange(width)
    begun, size = (before + 1) // 2, plan.target_lengths[item]
    number = begun + columns  # (run, width): tokens begun
    # token j at column j
    padded = np.concatenate([np.full((len(plan.targets), 1), -1), plan.targets], axis=1)
    token = np.where((number >= 1) & (number <= size), padded[item, np.minimum(number, size)], plan.blank)
    previous = np.where(number >= 2, padded[item, np.clip(number - 1, 0, size)], -1)
    leaves_from = number == after // 2
    next_token = padded[item, np.minimum(after // 2 + 1, size)]
    may_skip = (after % 2 == 0) | (not merges) | (next_token != padded[item, after // 2])
    stays = (number == (after + 1) // 2) & (after % 2 == 1) & merges

    def weights(possible: np.ndarray) -> Tensor:
        return torch.from_numpy(np.where(possible, 0.0, UNREACHED)).to(_exact(device)).to(device)

    def index(array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    return Group(
        item=index(item[:, 0]),
        frame=index(start + np.minimum(steps, frames - 1)),
        active=index(steps < frames),
        token=index(token),
        reached=index(_reached(steps, number, frames, before, after, merges)),
        distinct=index((token != previous) | (not merges)),
        enter_blank=weights((columns == 0) & (before % 2 == 0)),
        enter_token=weights((columns == 0) & (before % 2 == 1)),
        leave_blank=index(leaves_from),
        leave_token=index((leaves_from & may_skip) | stays),
        loops=merges,
    )


def _reached(
    steps: np.ndarray,
    number: np.ndarray,
    frames: np.ndarray,
    before: np.ndarray,
    after: np.ndarray,
    merges: bool,
) -> np.ndarray:
    """(run, frame, width): the cells of ``runs.band`` that a token can be emitted in."""
    begun, fewest, most = (before + 1) // 2, after // 2, (after + merges) // 2
    first = begun + np.where(merges & (before % 2 == 1), 0, 1)
    done = steps + 1  # frames of the run, this one included
    lowest = np.maximum(first, fewest - (frames - done))  # (run, frame)
    highest = np.minimum(begun + done, most)
    inside = (number[:, None] >= lowest[..., None]) & (number[:, None] <= highest[..., None])
    return inside & (steps < frames)[..., None]


def _walk(
    log_probs: Tensor,
    group: Group,
    blank: int,
    plus: Semiring,
    since: int,
    until: int,
    entry: tuple[Tensor, Tensor] | None = None,
) -> Rows:
    """Prefix weights of the frames [since, until) from the rows ``entry`` before them.

    B'[j] = (B[j] + K[j]) p(blank);   K'[j] = (K[j] + B[j-1] + K[j-1]) p(y_j), where each topology omits an arc:
    the loop K[j] without merging, the skip K[j-1] with merging where y_j = y_{j-1}.
    """
    item, frame = group.item[:, None], group.frame[:, since:until]
    blank_scores = _scores(log_probs, item, frame, torch.full_like(frame, blank))  # (run, frame)
    # (run, frame, width)
    token_scores = _scores(log_probs, item[..., None], frame[..., None], group.token[:, None, :])
    token_scores = torch.where(group.reached[:, since:until], token_scores, LOWEST)
    b, k = entry or (group.enter_blank, group.enter_token)
    blanks, tokens = [b], [k]
    for t in range(until - since):
        x = plus(b, k)
        enter = torch.where(group.distinct, _up(x), _up(b))
        enter = plus(k, enter) if group.loops else enter
        active = group.active[:, since + t, None]
        b = torch.where(active, x + blank_scores[:, t, None], b)
        k = torch.where(active, enter + token_scores[:, t], k)
        blanks.append(b)
        tokens.append(k)
    return Rows(blanks, tokens, blank_scores, token_scores)


def _walk_back(group: Group, rows: Rows, plus: Semiring) -> tuple[list[Tensor], list[Tensor]]:
    """Suffix weights of every frame, in the order of ``_walk``."""
    b, k = (
        torch.where(leaves, 0.0, UNREACHED).to(rows.blank_scores.dtype)
        for leaves in (group.leave_blank, group.leave_token)
    )
    blanks, tokens = [b], [k]
    distinct_next = torch.nn.functional.pad(group.distinct[:, 1:], (0, 1))
    for t in range(group.frame.shape[1] - 1, -1, -1):
        through_blank, through_token = b + rows.blank_scores[:, t, None], k + rows.token_scores[:, t]
        x = plus(through_blank, _down(through_token))
        leave = torch.where(distinct_next, x, through_blank)
        leave = plus(through_token, leave) if group.loops else x
        active = group.active[:, t, None]
        b, k = torch.where(active, x, b), torch.where(active, leave, k)
        blanks.append(b)
        tokens.append(k)
    return blanks[::-1], tokens[::-1]


def _leave(group: Group, rows: Rows) -> Tensor:
    """(run, 2 * width) weights of the states a run may end in: token and blank of each column."""
    ends = torch.stack([rows.tokens[-1], rows.blanks[-1]], 2)
    leaves = torch.stack([group.leave_token, group.leave_blank], 2)
    return torch.where(leaves, ends, UNREACHED).flatten(1)


def _posteriors(
    blank: int, group: Group, rows: Rows, weight: Tensor, plus: Semiring
) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Index and value of what the runs' frames emit: prefix times suffix over the run's weight."""
    suffix_blanks, suffix_tokens = _walk_back(group, rows, plus)
    whole = weight[:, None, None]

    def share(prefixes: list[Tensor], suffixes: list[Tensor]) -> Tensor:
        product = torch.stack(prefixes[1:], 1) + torch.stack(suffixes[1:], 1)  # (run, frame, width)
        return torch.where(whole <= IMPOSSIBLE, UNREACHED, product - whole).exp()

    active = group.active.nonzero(as_tuple=True)
    item = group.item[active[0]]
    blanks = share(rows.blanks, suffix_blanks).sum(2)[active]
    reached = group.reached.nonzero(as_tuple=True)
    tokens = share(rows.tokens, suffix_tokens)[reached]
    return [
        (item, group.frame[active], torch.full_like(item, blank), blanks),
        (group.item[reached[0]], group.frame[reached[:2]], group.token[reached[0], reached[2]], tokens),
    ]


def _best_paths(log_probs: Tensor, group: Group, blank: int, most_cells: int) -> tuple[Tensor, Tensor]:
    """(run, frame) ids of the best paths and their scores (run,).

    Rows are held for ``most_cells`` cells at a time: the first pass saves the rows before every chunk of frames, and
    the trace back computes the rows of one chunk at a time.
    """
    runs, frames = group.frame.shape
    chunk = max(1, most_cells // (runs * group.token.shape[1]))
    starts = range(0, frames, chunk)
    entries: list[tuple[Tensor, Tensor]] = [(group.enter_blank, group.enter_token)]
    for since in starts:
        until = min(since + chunk, frames)
        rows = _walk(log_probs, group, blank, torch.maximum, since, until, entries[-1])
        entries.append((rows.blanks[-1], rows.tokens[-1]))
    ends = _leave(group, rows)
    state = _last_argmax(ends)  # 2 * column + 1 for a blank, 2 * column for a token
    ids = torch.full_like(group.frame, blank)
    for number, since in reversed(list(enumerate(starts))):
        until = min(since + chunk, frames)
        if until < frames:
            rows = _walk(log_probs, group, blank, torch.maximum, since, until, entries[number])
        state = _trace(group, rows, since, state, ids)
    return ids, ends.amax(1)


def _trace(group: Group, rows: Rows, since: int, state: Tensor, ids: Tensor) -> Tensor:
    """Write the ids of the best path from ``state`` back to frame ``since``; return the state before that frame.

    Among equals the highest state wins.
    """
    for t in range(len(rows.blanks) - 2, -1, -1):
        column, is_blank = state // 2, state % 2 == 1
        active = group.active[:, since + t]
        ids[:, since + t] = torch.where(active & ~is_blank, _pick(group.token, column), ids[:, since + t])
        lower = (column - 1).clamp(min=0)
        b, k = rows.blanks[t], rows.tokens[t]
        loop = 0.0 if group.loops else UNREACHED
        below = column > 0
        skip = torch.where(_pick(group.distinct, column) & below, _pick(k, lower), 2 * UNREACHED)
        from_blank = torch.stack([_pick(k, column), _pick(b, column)], 1)
        from_token = torch.stack(
            [skip, torch.where(below, _pick(b, lower), 2 * UNREACHED), _pick(k, column) + loop], 1
        )
        before = torch.where(
            is_blank, 2 * column + _last_argmax(from_blank), 2 * column - 2 + _last_argmax(from_token)
        )
        state = torch.where(active, before, state)
    return state


def _last_argmax(values: Tensor) -> Tensor:
    """The last of the greatest along dimension 1; torch.argmax does not specify which it returns."""
    order = torch.arange(values.shape[1], device=values.device)
    return torch.where(values == values.amax(1, keepdim=True), order, -1).amax(1)


def _pick(values: Tensor, column: Tensor) -> Tensor:
    return values.gather(1, column[:, None])[:, 0]


def _up(row: Tensor) -> Tensor:
    """Move each state to the next number of tokens."""
    return torch.nn.functional.pad(row[:, :-1], (1, 0), value=UNREACHED)


def _down(row: Tensor) -> Tensor:
    return torch.nn.functional.pad(row[:, 1:], (0, 1), value=UNREACHED)
