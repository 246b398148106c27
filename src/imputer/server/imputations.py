"""What the page draws: the passes of an imputation, greedy CTC beside them, texts to download."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from imputer import transcripts
from imputer.decoding import Decoded
from imputer.recognizer import Recognizer
from imputer.server.forms import TranscriptionRequest
from imputer.transcripts import Word

DOWNLOADS = ("txt", "srt", "vtt", "json", "ctm")


def outline(
    recognizer: Recognizer, request: TranscriptionRequest, name: str, waveform: np.ndarray
) -> dict[str, Any]:
    """What is known of an imputation before its first pass; counts of frames are estimates."""
    hop = recognizer.window_frames()[1]
    per_frame = recognizer.sample_rate * recognizer.frame_seconds
    return {
        "object": "imputation",
        "model": request.model,
        "name": name,
        "seconds": round(len(waveform) / recognizer.sample_rate, 3),
        "frame_seconds": recognizer.frame_seconds,
        "frames": max(1, round(len(waveform) / per_frame)),
        "windows": [
            {"first": number * hop, "frames": max(1, round(len(samples) / per_frame))}
            for number, samples in enumerate(recognizer.cut(waveform))
        ],
        "block_size": request.options.block_size,
        "strategy": request.options.strategy,
        "merge_repeats": recognizer.model.merge_repeats,
        "blank": transcripts.BLANK,
        "mask": transcripts.MASK,
    }


def imputation(
    recognizer: Recognizer,
    request: TranscriptionRequest,
    outline: dict[str, Any],
    windows: Sequence[Decoded],
    seconds: float,
) -> dict[str, Any]:
    """The outline completed: the passes as changes, greedy CTC beside them, texts to download."""
    decoded = recognizer.join(windows)
    assert decoded.greedy is not None
    transcript = recognizer.transcript(replace(decoded, trace=None), seconds)
    greedy = recognizer.transcript(decoded.greedy, seconds)
    return outline | {
        "text": transcript.text,
        "seconds": transcript.seconds,
        "frames": len(decoded.alignment),
        "block_starts": recognizer.block_starts(windows, request.options),
        "words": [word(item) for item in transcript.words],
        "passes": list(_changes(recognizer, decoded)),
        "greedy": {
            "text": greedy.text,
            "words": [word(item) for item in greedy.words],
            "symbols": recognizer.symbols(decoded.greedy.alignment),
            "confidence": [round(c, 3) for c in decoded.greedy.confidence],
        },
        "formats": {kind: transcripts.FORMATS[kind](transcript, outline["name"]) for kind in DOWNLOADS},
    }


def word(item: Word) -> dict[str, Any]:
    """A word as plain values."""
    return {"text": item.text, "start": item.start, "end": item.end, "confidence": item.confidence}


def _changes(recognizer: Recognizer, decoded: Decoded) -> Iterator[dict[str, Any]]:
    """The changes of each pass."""
    before: list[int] = [recognizer.model.mask] * len(decoded.alignment)
    for row, confidence in zip(decoded.trace or [], decoded.trace_confidence or [], strict=True):
        yield changes(recognizer, before, row, confidence)
        before = row


def changes(
    recognizer: Recognizer, before: Sequence[int], after: Sequence[int], confidence: Sequence[float]
) -> dict[str, Any]:
    """The frames that a pass changed, and their symbols and confidences after it."""
    frames = [frame for frame, (old, new) in enumerate(zip(before, after, strict=True)) if old != new]
    return {
        "frames": frames,
        "symbols": recognizer.symbols([after[frame] for frame in frames]),
        "confidence": [round(confidence[frame], 3) for frame in frames],
    }
