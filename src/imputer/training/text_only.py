"""Batches without sound: sentences of a text, laid over frames with drawn durations.

The Imputer sees the tokens that the masking policy leaves and is trained, by the same objective, to fill in the rest:
a language model over alignments, in both directions. Text costs nothing to make, speech does.
"""
# DEPARTURE text-only: the paper trains on speech; see PAPER.md.

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from imputer import rollin
from imputer.data.batching import Batch
from imputer.data.text import read_lines
from imputer.errors import UsageError
from imputer.support import progress
from imputer.vocabulary import Vocabulary

CHARACTERS_A_SECOND = 14.0  # read aloud
SPEEDS = (0.8, 1.25)  # of a row, drawn between them
UNEVENNESS = 0.35  # deviation of the logarithm of a token's duration
SECONDS = (4.0, 16.0)  # of the rows of a batch, drawn between them
LINES_AT_ONCE = 10_000


@dataclass
class TextBatch(Batch):
    """Rows of text in place of utterances; features have no numbers, only a length."""

    alignments: dict[str, list[int]]  # by id


class Text:
    """The sentences of text files as tokens, and batches drawn from them."""

    def __init__(self, paths: Sequence[str], vocabulary: Vocabulary) -> None:
        self.lines = 0
        tokens: list[np.ndarray] = []
        for path in paths:
            lines = [line for _, line in read_lines(Path(path))]
            self.lines += len(lines)
            starts = range(0, len(lines), LINES_AT_ONCE)
            for start in progress.track(starts, f"reading {path}", len(starts)):
                encoded = vocabulary.encode_each(lines[start : start + LINES_AT_ONCE])
                tokens += [np.array(one, np.int32) for one in encoded if one]
        if not tokens:
            raise UsageError(f"data.text: {', '.join(paths)} holds no line that the tokenizer can write")
        self.left_out = self.lines - len(tokens)
        self._tokens = np.concatenate(tokens)
        lengths = np.array([len(piece) for piece in vocabulary.pieces(range(1, vocabulary.size + 1))])
        self._characters = np.concatenate([[0], lengths])  # by token
        # Rows start where a line does.
        self._starts = np.cumsum([0, *(len(one) for one in tokens[:-1])])

    def draw(
        self, *key: int | str, seconds: float, frame_seconds: float, merge_repeats: bool = False
    ) -> TextBatch:
        """``seconds`` of rows of equal length; the same for the same ``key``."""
        random = np.random.default_rng(rollin.generator_for("text", *key).initial_seed())
        frames = max(1, round(min(seconds, random.uniform(*SECONDS)) / frame_seconds))
        rows = max(1, int(seconds / frame_seconds / frames))
        ids, targets, alignments = [], [], {}
        for row in range(rows):
            start = int(self._starts[random.integers(len(self._starts))])
            name = "-".join(map(str, ("text", *key, row)))
            alignment = self._laid(self._tokens[start : start + frames], frames, frame_seconds, random)
            ids.append(name)
            alignments[name] = alignment
            targets.append([part.token for part in rollin.segments(alignment, merge_repeats=merge_repeats)])
        widths = [len(target) for target in targets]
        padded = torch.zeros(rows, max(widths), dtype=torch.long)
        for target, line in zip(targets, padded, strict=True):
            line[: len(target)] = torch.tensor(target, dtype=torch.long)
        return TextBatch(
            ids=ids,
            indices=[],
            features=torch.zeros(rows, frames, 0),
            feature_lengths=torch.full((rows,), frames),
            targets=padded,
            target_lengths=torch.tensor(widths),
            texts=[],
            seconds=0.0,
            dropped={},
            alignments=alignments,
        )

    def _laid(
        self, tokens: np.ndarray, frames: int, frame_seconds: float, random: np.random.Generator
    ) -> list[int]:
        """As many of the tokens as fit, each at the first frame of its duration; blank elsewhere."""
        speed = math.exp(random.uniform(*np.log(SPEEDS))) * CHARACTERS_A_SECOND * frame_seconds
        durations = self._characters[tokens] / speed * np.exp(random.normal(0, UNEVENNESS, len(tokens)))
        starts = np.cumsum(np.maximum(1.0, durations)) - np.maximum(1.0, durations)
        starts = (starts + random.uniform(0, 0.5 / frame_seconds)).astype(int)  # a pause before the first
        inside = starts < frames
        alignment = np.zeros(frames, int)
        alignment[starts[inside]] = tokens[inside]
        return alignment.tolist()
