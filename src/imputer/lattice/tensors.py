"""The lattice in plain torch operations, for every device and floating type, differentiable as often as asked.

Runs of masked frames are independent, so runs of like size are stacked and walked together: one step a frame of
the longest run of the group, however long the input. Weights are logarithms here; a semiring is one function,
``torch.logaddexp`` for the sum over alignments, ``torch.maximum`` for the best of them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from imputer.lattice.compiled import MASKED
from imputer.lattice.plan import Plan

LOWEST = -1e30  # stands for log 0: finite, so that no difference of infinities turns into NaN
NEVER = -1e35  # log weight of a state that no path reaches; below any sum of LOWEST
IMPOSSIBLE = LOWEST / 2

Semiring = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Group:
    """Runs of like size, padded to the longest; ``width`` counts tokens begun since the entry, from 0."""

    item: Tensor  # (run,)
    frame: Tensor  # (run, frame): index into log_probs, padding repeats a valid one
    active: Tensor  # (run, frame): False on padding
    token: Tensor  # (run, width): the token that state L[j] emits, padding is blank
    emits: Tensor  # (run, width): whether L[j] exists
    distinct: Tensor  # (run, width): whether token j differs from token j - 1, or repeats do not merge
    enter_blank: Tensor  # (run, width): log weights on entry
    enter_token: Tensor
    leave_blank: Tensor  # (run, width): log weights on leaving
    leave_token: Tensor
    loops: bool  # whether a token may follow itself


@dataclass(frozen=True)
class Posteriors:
    """Index (item, frame, token) and value of everything some alignment may emit."""

    item: Tensor
    frame: Tensor
    token: Tensor
    value: Tensor


def total(log_probs: Tensor, plan: Plan, want_posteriors: bool) -> tuple[Tensor, Posteriors | None]:
    """(batch,) log weights, and the posteriors when wanted."""
    walked = [
        (group, *_walk(log_probs, group, plan.blank, torch.logaddexp)) for group in _groups(log_probs, plan)
    ]
    items, frames, tokens = _committed(log_probs, plan)
    given = _scores(log_probs, items, frames, tokens)
    start = torch.where(_impossible(plan, log_probs.device), NEVER, 0.0).to(given.dtype)
    weights = [_leave(group, blank[-1], token[-1], torch.logaddexp) for group, blank, token, *_ in walked]
    where = torch.cat([items, *(group.item for group, *_ in walked)])
    # index_put rather than index_add: the latter adds in any order on a GPU.
    totals = start.index_put((where,), torch.cat([given, *weights]), accumulate=True)
    possible = ~(totals <= IMPOSSIBLE)  # so put, a NaN stays one
    result = torch.where(possible, totals, -torch.inf)
    if not want_posteriors:
        return result, None
    parts = [(items, frames, tokens, torch.ones_like(given))]
    for walk, weight in zip(walked, weights, strict=True):
        parts += _posteriors(plan.blank, *walk, weight)
    item, frame, token, value = (torch.cat(part) for part in zip(*parts, strict=True))
    return result, Posteriors(item, frame, token, torch.where(possible[item], value, 0.0))


def spread(posteriors: Posteriors, plan: Plan, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """scales (batch,) times the posteriors, dense: (batch, frame, token)."""
    value = posteriors.value * scales.to(posteriors.value.dtype)[posteriors.item]
    if value.device.type != "cpu":  # on a CPU only float64 is surely added in one order
        value = value.to(torch.promote_types(dtype, torch.float32))
    zeros = torch.zeros(plan.shape, dtype=value.dtype, device=value.device)
    index = (posteriors.item, posteriors.frame, posteriors.token)
    return zeros.index_put(index, value, accumulate=True).to(dtype)


def best(log_probs: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
    """(batch, frame) best alignments, blank beyond the length, and their (batch,) scores."""
    log_probs = log_probs.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    items, frames, tokens = _committed(log_probs, plan)
    alignments = torch.full(plan.shape[:2], plan.blank, dtype=torch.int64, device=log_probs.device)
    alignments[items, frames] = tokens
    given = _scores(log_probs, items, frames, tokens)
    totals = torch.where(_impossible(plan, log_probs.device), NEVER, 0.0).to(given.dtype)
    totals = totals.index_put((items,), given, accumulate=True)
    for group in _groups(log_probs, plan):
        blanks, letters, *_ = _walk(log_probs, group, plan.blank, torch.maximum)
        weight = _leave(group, blanks[-1], letters[-1], torch.maximum)
        totals = totals.index_put((group.item,), weight, accumulate=True)
        way = _trace(group, blanks, letters, plan.blank)
        items_of_frames = group.item[:, None].expand_as(group.frame)
        alignments[items_of_frames[group.active], group.frame[group.active]] = way[group.active]
    alignments[totals < NEVER / 2] = plan.blank
    return alignments, torch.where(totals <= IMPOSSIBLE, -torch.inf, totals)


def _exact(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def _scores(log_probs: Tensor, item: Tensor, frame: Tensor, token: Tensor) -> Tensor:
    return log_probs[item, frame, token].to(_exact(log_probs.device)).clamp(min=LOWEST)


def _impossible(plan: Plan, device: torch.device) -> Tensor:
    """Items without frames but with a target: they have no run that could say so."""
    return torch.from_numpy((plan.frame_lengths == 0) & (plan.target_lengths > 0)).to(device)


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
    """Runs grouped by the powers of two their frames and tokens need, so that padding stays bounded."""
    runs = plan.runs
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
    steps, columns = np.arange(int(frames.max())), np.arange(width)
    begun, size = (before + 1) // 2, plan.target_lengths[item]
    number = begun + columns  # (run, width): tokens begun
    emits = (number >= 1) & (number <= size)
    padded = np.concatenate(
        [np.full((len(plan.targets), 1), -1), plan.targets], axis=1
    )  # token j at column j
    token = np.where(emits, padded[item, np.minimum(number, size)], plan.blank)
    previous = np.where(number >= 2, padded[item, np.clip(number - 1, 0, size)], -1)
    distinct = (token != previous) | (not plan.merge_repeats)
    leaves_from = number == after // 2
    next_token = padded[item, np.minimum(after // 2 + 1, size)]
    may_skip = (after % 2 == 0) | (not plan.merge_repeats) | (next_token != padded[item, after // 2])
    stays = (number == (after + 1) // 2) & (after % 2 == 1) & plan.merge_repeats

    def weights(possible: np.ndarray) -> Tensor:
        return torch.from_numpy(np.where(possible, 0.0, NEVER)).to(_exact(device)).to(device)

    def index(array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    return Group(
        item=index(item[:, 0]),
        frame=index(start + np.minimum(steps, frames - 1)),
        active=index(steps < frames),
        token=index(token),
        emits=index(emits),
        distinct=index(distinct),
        enter_blank=weights((columns == 0) & (before % 2 == 0)),
        enter_token=weights((columns == 0) & (before % 2 == 1)),
        leave_blank=weights(leaves_from),
        leave_token=weights((leaves_from & may_skip) | stays),
        loops=plan.merge_repeats,
    )


def _walk(
    log_probs: Tensor, group: Group, blank: int, plus: Semiring
) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor]:
    """Prefix weights of every frame, B and L, each (run, width), the entry first; and the emissions.

    B'[j] = (B[j] + L[j]) p(blank);   L'[j] = (L[j] + B[j-1] + L[j-1]) p(y_j), where a topology takes away arcs:
    the loop L[j] without merging, the skip L[j-1] with merging where y_j = y_{j-1}.
    """
    silence = _scores(log_probs, group.item[:, None], group.frame, torch.full_like(group.frame, blank))
    # (run, frame, width)
    letters = _scores(log_probs, group.item[:, None, None], group.frame[:, :, None], group.token[:, None, :])
    letters = torch.where(group.emits[:, None], letters, LOWEST)
    blanks, tokens = [group.enter_blank], [group.enter_token]
    for t in range(group.frame.shape[1]):
        b, letter = blanks[-1], tokens[-1]
        x = plus(b, letter)
        enter = torch.where(group.distinct, _up(x), _up(b))
        enter = plus(letter, enter) if group.loops else enter
        active = group.active[:, t, None]
        blanks.append(torch.where(active, x + silence[:, t, None], b))
        tokens.append(torch.where(active, enter + letters[:, t], letter))
    return blanks, tokens, silence, letters


def _walk_back(group: Group, silence: Tensor, letters: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Suffix weights of every frame, in the order of ``_walk``."""
    blanks, tokens = [group.leave_blank], [group.leave_token]
    distinct_next = torch.nn.functional.pad(group.distinct[:, 1:], (0, 1))
    for t in range(group.frame.shape[1] - 1, -1, -1):
        b, letter = blanks[-1], tokens[-1]
        through_blank, through_token = b + silence[:, t, None], letter + letters[:, t]
        x = torch.logaddexp(through_blank, _down(through_token))
        leave = torch.where(distinct_next, x, through_blank)
        leave = torch.logaddexp(through_token, leave) if group.loops else x
        active = group.active[:, t, None]
        blanks.append(torch.where(active, x, b))
        tokens.append(torch.where(active, leave, letter))
    return blanks[::-1], tokens[::-1]


def _leave(group: Group, blank: Tensor, token: Tensor, plus: Semiring) -> Tensor:
    """The weight of each run: (run,)."""
    ends = torch.cat([blank + group.leave_blank, token + group.leave_token], dim=1)
    return ends.logsumexp(1) if plus is torch.logaddexp else ends.amax(1)


def _posteriors(
    blank: int,
    group: Group,
    blanks: list[Tensor],
    tokens: list[Tensor],
    silence: Tensor,
    letters: Tensor,
    weight: Tensor,
) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Index and value of what the runs' frames emit: prefix times suffix over the whole."""
    suffix_blanks, suffix_tokens = _walk_back(group, silence, letters)
    whole = weight[:, None, None]
    possible = ~(whole <= IMPOSSIBLE)

    def share(prefixes: list[Tensor], suffixes: list[Tensor]) -> Tensor:
        product = torch.stack(prefixes[1:], 1) + torch.stack(suffixes[1:], 1)  # (run, frame, width)
        return torch.where(possible, product - whole, NEVER).exp()

    active = group.active.nonzero(as_tuple=True)
    item = group.item[active[0]]
    silent = share(blanks, suffix_blanks).sum(2)[active]
    reached = (group.active[:, :, None] & group.emits[:, None]).nonzero(as_tuple=True)
    letter = share(tokens, suffix_tokens)[reached]
    return [
        (item, group.frame[active], torch.full_like(item, blank), silent),
        (group.item[reached[0]], group.frame[reached[:2]], group.token[reached[0], reached[2]], letter),
    ]


def _trace(group: Group, blanks: list[Tensor], tokens: list[Tensor], blank: int) -> Tensor:
    """(run, frame) ids of the best way, from the last frame back; among equals the highest state."""
    ids = torch.full_like(group.frame, blank)
    choices = torch.stack([tokens[-1] + group.leave_token, blanks[-1] + group.leave_blank], 2)
    state = _last_argmax(choices.flatten(1))  # 2 * column + 1 for a blank, 2 * column for a token
    for t in range(group.frame.shape[1] - 1, -1, -1):
        column, is_blank = state // 2, state % 2 == 1
        active = group.active[:, t]
        ids[:, t] = torch.where(active & ~is_blank, _pick(group.token, column), blank)
        lower = (column - 1).clamp(min=0)
        b, letter = blanks[t], tokens[t]
        loop = 0.0 if group.loops else NEVER
        below = column > 0
        skip = torch.where(_pick(group.distinct, column) & below, _pick(letter, lower), 2 * NEVER)
        from_blank = torch.stack([_pick(letter, column), _pick(b, column)], 1)
        from_token = torch.stack(
            [skip, torch.where(below, _pick(b, lower), 2 * NEVER), _pick(letter, column) + loop], 1
        )
        before = torch.where(
            is_blank, 2 * column + _last_argmax(from_blank), 2 * column - 2 + _last_argmax(from_token)
        )
        state = torch.where(active, before, state)
    return ids


def _last_argmax(values: Tensor) -> Tensor:
    """The last of the greatest along dimension 1; torch.argmax does not say which it takes."""
    order = torch.arange(values.shape[1], device=values.device)
    return torch.where(values == values.amax(1, keepdim=True), order, -1).amax(1)


def _pick(values: Tensor, column: Tensor) -> Tensor:
    return values.gather(1, column[:, None])[:, 0]


def _up(row: Tensor) -> Tensor:
    """Move each state to the next number of tokens."""
    return torch.nn.functional.pad(row[:, :-1], (1, 0), value=NEVER)


def _down(row: Tensor) -> Tensor:
    return torch.nn.functional.pad(row[:, 1:], (0, 1), value=NEVER)
