"""One recording of any length aligned to its text."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

import torch
from torch import Tensor

from imputer import alignments, lattice
from imputer.aligner import written_text
from imputer.audio import windows
from imputer.data.recordings import Audio, Recording, open_recording
from imputer.decoding import Decoded
from imputer.errors import ImputerError, UsageError, count
from imputer.recognizer import Recognizer
from imputer.support import progress
from imputer.transcripts import Transcript, text_of


def align(recognizer: Recognizer, source: Audio, text: str) -> Transcript:
    """The transcript of a recording whose text is known: every word of the text as it is written, with its times."""
    written = written_text.read(text, recognizer.vocabulary)
    if not written.readable:
        shown = " ".join(written.words[:8]) or "nothing"
        raise UsageError(f"the text holds no word that the model can read: {shown}")
    target = recognizer.vocabulary.encode(written.readable)
    with ExitStack() as stack:
        recording = open_recording(source, stack, None, recognizer.sample_rate)
        log_probs = posteriors(recognizer, recording)
    try:
        alignment, _ = align_recording(log_probs, target, merge_repeats=recognizer.model.merge_repeats)
    except ImputerError as error:
        raise ImputerError(f"{recording.name}: {error}") from error
    confidence = log_probs.gather(1, torch.tensor(alignment)[:, None])[:, 0].exp().tolist()
    # Raw: the calibration is of words that the model chose, not of those that it was given.
    decoded = Decoded(alignment, confidence, passes=1)
    found = recognizer.transcript(decoded, recording.seconds, calibrated=False)
    words = written.timed(found.words)
    return replace(found, text=text_of(words), words=words)


@torch.inference_mode()
def posteriors(
    recognizer: Recognizer,
    recording: Recording,
    *,
    window: float | None = None,
    overlap: float | None = None,
) -> Tensor:
    """log_probs (frame, token) of a recording of any length, all masked, in the windows of the model.

    In an overlap each window contributes the half that lies further from its edge.
    """
    model, (frames, hop) = recognizer.model, recognizer.window_frames(window, overlap)
    spans = list(windows.spans(recording.seconds, frames, hop, recognizer.frame_seconds))
    half = (frames - hop) // 2
    pieces = []
    with progress.bar("aligning", len(spans)) as advance:
        for number, (offset, seconds) in enumerate(spans):
            samples = torch.from_numpy(recording.samples(offset, seconds))
            acoustic, lengths = recognizer.encode([model.front_end.extract(samples)])
            masked = torch.full((1, int(lengths[0])), model.mask, device=recognizer.device)
            log_probs = model.impute(acoustic, lengths, masked)[0].float().cpu()
            first = 0 if number == 0 else half
            pieces.append(log_probs[first:] if number + 1 == len(spans) else log_probs[first : hop + half])
            advance()
    found = torch.cat(pieces)
    if bool(found.isnan().any()):
        raise ImputerError(f"{recording.name}: the network gave NaN (not a number)")
    return found


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
