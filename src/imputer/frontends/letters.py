"""Spelled words instead of sound: an embedding per letter, for letters to phonemes (``imputer.corpora.cmudict``).

# DEPARTURE letters: the paper recognises speech; see PAPER.md.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from imputer import configs
from imputer.configs import Augmentation
from imputer.data.batching import Extract
from imputer.data.manifest import Utterance
from imputer.errors import ImputerError, UsageError

LETTERS = "abcdefghijklmnopqrstuvwxyz'"
HELD = 2  # frames per letter: x is pronounced K S, and an alignment holds one token per frame
FRAME_SECONDS = 0.04  # as long as the paper's, so that manifests need no other unit


def read_letters(utterance: Utterance, generator: torch.Generator) -> Tensor:
    """(frame, 1): the number of each letter, 1 to 27, held for two frames. The spelling is the utterance's id."""
    numbers = [LETTERS.find(letter) + 1 for letter in utterance.id]
    if not all(numbers):
        raise ImputerError(f"{utterance.id!r} is not spelt in a to z and apostrophes")
    return torch.tensor(numbers, dtype=torch.float32).repeat_interleave(HELD)[:, None]


class Letters(nn.Module):
    """Look up an embedding for every letter; 0 is padding."""

    augments_sound = False
    reads_files = False
    sample_rate = 16_000
    feature_size = 1
    frame_seconds = FRAME_SECONDS

    def __init__(self, settings: configs.FrontEnd, width: int) -> None:
        super().__init__()
        self.letters = nn.Embedding(len(LETTERS) + 1, width)

    def extract(self, waveform: Tensor) -> Tensor:
        raise UsageError("a model with the front end 'letters' takes spelled words, not audio")

    def feature_frames(self, seconds: float) -> int:
        """The number of frames of ``seconds`` seconds; a letter lasts 0.08 s."""
        return max(1, round(seconds / FRAME_SECONDS))

    def reader(
        self, data: configs.Data, augmentation: Augmentation, utterances: Sequence[Utterance]
    ) -> Extract:
        """The letters of an utterance."""
        return read_letters

    def forward(self, inputs: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """(batch, frame, 1) -> (batch, frame, width)."""
        return self.letters(inputs[..., 0].long()), lengths
