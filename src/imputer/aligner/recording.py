"""One recording of any length aligned to its text."""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from imputer import alignments, audio, lattice, models, transcripts
from imputer.data.text import plain
from imputer.errors import ImputerError, UsageError, count
from imputer.model import Imputer
from imputer.support import progress
from imputer.transcripts import Transcript

BLANK = 0


def align_one(path: Path, text: str, model_name: str) -> Transcript:
    """The transcript of a recording whose text is known: its best alignment, with times and confidences."""
    model, vocabulary = models.load(models.torch_folder(model_name))
    target = vocabulary.encode(plain(text))
    if not target:
        raise UsageError("the text is empty once everything but letters and apostrophes is left out")
    rate = model.front_end.sample_rate
    seconds = audio.info(path).seconds

    def samples(start: int, stop: int) -> torch.Tensor:
        return torch.from_numpy(
            audio.read(path, sample_rate=rate, offset=start / rate, duration=(stop - start) / rate)
        )

    log_probs = posteriors(model, samples, round(seconds * rate))
    alignment, _score = align_recording(log_probs, target, merge_repeats=model.merge_repeats)
    confidence = log_probs.gather(1, torch.tensor(alignment)[:, None])[:, 0].exp().tolist()
    return transcripts.from_alignment(
        alignment,
        confidence,
        vocabulary,
        frame_seconds=model.front_end.frame_seconds,
        seconds=seconds,
        passes=1,
        merge_repeats=model.merge_repeats,
    )


def posteriors(
    model: Imputer,
    samples: Callable[[int, int], Tensor],
    total: int,
    *,
    window_seconds: float = 30.0,
    context_seconds: float = 4.0,
) -> Tensor:
    """log_probs (frame, token) of a recording of any length, window by window, all masked.

    ``samples(start, stop)`` reads a slice, so that the recording is never in memory whole. Windows overlap by the
    context on either side, whose frames are dropped again.
    """
    front_end = model.front_end
    hop = round(front_end.frame_seconds * front_end.sample_rate)  # samples from one frame to the next
    window = max(1, int(window_seconds * front_end.sample_rate) // hop)
    context = int(context_seconds * front_end.sample_rate) // hop
    pieces = []
    model.eval()
    with progress.bar("listening", -(-total // (window * hop))) as advance, torch.no_grad():
        for first in range(0, -(-total // hop), window):
            begin = max(0, first - context)
            last = (first + window) * hop >= total
            stop = min(total, (first + window + context) * hop)
            features = front_end.extract(samples(begin * hop, stop))
            acoustic, lengths = model.encode(features[None], torch.tensor([len(features)]))
            log_probs = model.impute(acoustic, lengths, model.all_masked(acoustic))[0]
            piece = log_probs[first - begin :] if last else log_probs[first - begin : first - begin + window]
            pieces.append(piece)
            advance()
            if last:
                break
    return torch.cat(pieces)


def align_recording(
    log_probs: Tensor, target: Sequence[int], *, merge_repeats: bool = False, most_cells: int = 20_000_000
) -> tuple[list[int], float]:
    """The best alignment (frame,) of ``target`` to one recording, and its log-probability. Exact at any length.

    A lattice of more than ``most_cells`` (frames x tokens) is not held whole: a first walk finds where the best
    path passes every some thousand frames, and the stretches between, which are then independent, are
    aligned one after the other.
    """
    frames, tokens = len(log_probs), len(target)
    lengths = torch.tensor([frames]), torch.tensor([tokens])
    y = torch.tensor([list(target)], dtype=torch.long).reshape(1, tokens)
    if not bool(alignments.feasible(y, *lengths, merge_repeats=merge_repeats)):
        raise ImputerError(
            f"the text has {count(tokens, 'token')}, but the recording holds only {count(frames, 'frame')}"
        )
    if frames * tokens <= most_cells:
        path, best = alignments.best_alignment(log_probs[None], y, *lengths, merge_repeats=merge_repeats)
        return path[0].tolist(), float(best[0])
    step = max(2, most_cells // (4 * tokens))
    score, passed = waypoints(log_probs.numpy(), target, step, merge_repeats=merge_repeats)
    found: list[int] = []
    for before, after in itertools.pairwise(passed):
        found[-1:] = _between(log_probs, target, before, after, merge_repeats)  # they share a frame
    return found, score


def waypoints(
    log_probs: np.ndarray, target: Sequence[int], step: int, *, merge_repeats: bool
) -> tuple[float, list[tuple[int, int]]]:
    """The score of the best path, and (frame, state) where it passes every ``step``-th frame, first and last included.

    States are those of ``alignments.state_path``: 2j after j tokens, 2j - 1 while token j is emitted. The walk
    keeps one row of scores, and for every cell of it the state from which it left the last waypoint.
    """
    y = np.asarray(target)
    size = len(y)
    distinct = np.ones(size, bool)
    if merge_repeats:
        distinct[1:] = y[1:] != y[:-1]
    blanks, tokens = np.full(size + 1, -np.inf), np.full(size, -np.inf)
    blanks[0], tokens[:1] = log_probs[0, BLANK], log_probs[0, y[:1]]
    from_blanks, from_tokens = 2 * np.arange(size + 1), 2 * np.arange(size) + 1
    kept = [(0, from_blanks, from_tokens)]
    for frame in range(1, len(log_probs)):
        row = log_probs[frame].astype(np.float64)
        # (score, origin) of whoever may enter: a blank follows a blank or its token; a token follows the blank before
        # it, the token before it if that differs, and with merging itself.
        came = np.concatenate(([-np.inf], np.where(distinct[1:], tokens[:-1], -np.inf)))[:size]
        better = came > blanks[:-1]
        into_tokens = np.where(better, came, blanks[:-1])
        origin_tokens = np.where(better, np.concatenate(([0], from_tokens[:-1]))[:size], from_blanks[:-1])
        if merge_repeats:
            stays = tokens > into_tokens
            into_tokens = np.where(stays, tokens, into_tokens)
            origin_tokens = np.where(stays, from_tokens, origin_tokens)
        after = tokens > blanks[1:]
        blanks[1:][after] = tokens[after]
        from_blanks = from_blanks.copy()
        from_blanks[1:][after] = from_tokens[after]
        blanks += row[BLANK]
        tokens, from_tokens = into_tokens + row[y], origin_tokens
        if frame % step == 0 or frame == len(log_probs) - 1:
            kept.append((frame, from_blanks, from_tokens))
            from_blanks, from_tokens = 2 * np.arange(size + 1), 2 * np.arange(size) + 1
    state = 2 * size if blanks[-1] >= tokens[-1] else 2 * size - 1
    passed = [(kept[-1][0], state)]
    for index in range(len(kept) - 1, 0, -1):
        _, origin_blanks, origin_tokens = kept[index]
        state = int(origin_blanks[state // 2] if state % 2 == 0 else origin_tokens[state // 2])
        passed.append((kept[index - 1][0], state))
    return float(max(blanks[-1], tokens[-1])), passed[::-1]


def _between(
    log_probs: Tensor,
    target: Sequence[int],
    before: tuple[int, int],
    after: tuple[int, int],
    merge_repeats: bool,
) -> list[int]:
    """The best alignment from one waypoint to the next, both included."""
    (first, state), (last, end_state) = before, after
    part = list(target[state // 2 : (end_state + 1) // 2])
    template = _template(part, last - first + 1, state % 2 == 1, end_state % 2 == 1, merge_repeats)
    committed = torch.zeros(1, len(template), dtype=torch.bool)
    committed[0, [0, -1]] = True
    path, _ = lattice.best(
        log_probs[None, first : last + 1],
        torch.tensor([part], dtype=torch.long).reshape(1, len(part)),
        torch.tensor([len(template)]),
        torch.tensor([len(part)]),
        torch.tensor([template]),
        committed,
        merge_repeats=merge_repeats,
    )
    return path[0].tolist()


def _template(
    tokens: list[int], frames: int, starts_in_token: bool, ends_in_token: bool, merge_repeats: bool
) -> list[int]:
    """Any alignment of ``tokens`` that starts and ends as told; it only says which states the two ends have."""
    if merge_repeats and len(tokens) == 1 and starts_in_token and ends_in_token:
        return tokens * frames
    alignment, place = [BLANK] * frames, 0 if starts_in_token else 1
    for index, token in enumerate(tokens):
        if merge_repeats and index and token == tokens[index - 1]:
            place += 1
        if index == len(tokens) - 1 and ends_in_token:
            place = frames - 1
        alignment[place] = token
        place += 1
    return alignment
