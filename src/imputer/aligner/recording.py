"""One recording of any length aligned to its text."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from imputer import alignments, audio, lattice, models, transcripts
from imputer.data.text import plain
from imputer.errors import ImputerError, UsageError, count
from imputer.model import Imputer
from imputer.support import progress
from imputer.transcripts import Transcript


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

    Memory stays bounded: ``lattice.best`` holds back pointers for ``most_cells`` (frame, token) cells at a time.
    """
    frames, tokens = len(log_probs), len(target)
    lengths = torch.tensor([frames]), torch.tensor([tokens])
    y = torch.tensor([list(target)], dtype=torch.long).reshape(1, tokens)
    if not bool(alignments.feasible(y, *lengths, merge_repeats=merge_repeats)):
        raise ImputerError(
            f"the text has {count(tokens, 'token')}, but the recording holds only {count(frames, 'frame')}"
        )
    path, score = lattice.best(
        log_probs[None], y, *lengths, merge_repeats=merge_repeats, most_cells=most_cells
    )
    return path[0].tolist(), float(score[0])
