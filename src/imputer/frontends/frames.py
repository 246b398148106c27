"""Precomputed vectors: the states of a pretrained encoder, or vectors from files.

# DEPARTURE pretrained-front-end: the paper's network starts from filter banks; see PAPER.md.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from imputer import configs
from imputer.configs import Augmentation
from imputer.data.batching import Extract
from imputer.data.frames_cache import CachedExtract, Encoder, FramesCache, frames_folder
from imputer.data.manifest import Utterance
from imputer.errors import ImputerError, UsageError
from imputer.frontends.normalisation import Normalisation


def sound_of(waveform: Tensor, shortest: int) -> np.ndarray:
    """(samples,) as float32, padded with zeros to ``shortest`` samples."""
    if waveform.ndim != 1 or not len(waveform):
        raise ImputerError(f"the encoder takes (samples,) of sound, not {tuple(waveform.shape)}")
    samples = waveform.detach().to("cpu", torch.float32).numpy()
    return np.pad(samples, (0, max(0, shortest - len(samples))))


class PrecomputedVectors:
    """In place of an encoder: precomputed vectors of a known width and rate."""

    sample_rate = 16_000

    def __init__(self, settings: configs.FrontEnd) -> None:
        if settings.feature_size < 1 or settings.frame_seconds <= 0:
            raise UsageError(
                "the front end 'frames' needs front_end.feature_size and front_end.frame_seconds, but they are "
                f"{settings.feature_size} and {settings.frame_seconds}"
            )
        self.feature_size, self.frame_seconds = settings.feature_size, settings.frame_seconds
        self.key = f"given-{self.feature_size}-{self.frame_seconds}"

    def extract(self, waveform: Tensor) -> Tensor:
        raise UsageError("a model with the front end 'frames' takes precomputed vectors, not audio")

    def feature_frames(self, seconds: float) -> int:
        return max(1, round(seconds / self.frame_seconds))


class Frames(nn.Module):
    """Normalise, stack neighbours to lower the rate, project to the model's width."""

    augments_sound = False
    needs_statistics = True

    def __init__(self, settings: configs.FrontEnd, width: int, encoder: Encoder | None = None) -> None:
        super().__init__()
        self.encoder = encoder or PrecomputedVectors(settings)
        self.stack = settings.stack
        self.sample_rate = self.encoder.sample_rate
        self.feature_size = self.encoder.feature_size
        self.frame_seconds = round(
            self.encoder.frame_seconds * self.stack, 9
        )  # 0.072, not 0.07200000000000001
        self.normalisation = Normalisation(self.feature_size)
        self.project = nn.Linear(self.feature_size * self.stack, width)

    def extract(self, waveform: Tensor) -> Tensor:
        """(samples,) -> (frame, feature), by the encoder."""
        return self.encoder.extract(waveform)

    def feature_frames(self, seconds: float) -> int:
        """As many as the encoder gives."""
        return self.encoder.feature_frames(seconds)

    def reader(
        self, data: configs.Data, augmentation: Augmentation, utterances: Sequence[Utterance]
    ) -> Extract:
        """Precomputed vectors from their files, or the encoder's frames from the cache, which is filled first."""
        if isinstance(self.encoder, PrecomputedVectors):
            return read_vectors
        cache = FramesCache(frames_folder(data.frames_cache, self.encoder.key), self.encoder)
        cache.fill(utterances)
        return CachedExtract(cache.folder, cache.key, augmentation)

    def forward(self, inputs: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """(batch, frame, feature) -> (batch, frame / stack, width); a partial last stack is filled with zeros."""
        x = self.normalisation(inputs, lengths)
        x = nn.functional.pad(x, (0, 0, 0, -x.shape[1] % self.stack))
        x = self.project(x.unflatten(1, (-1, self.stack)).flatten(2))  # (batch, frame, stack * feature)
        return x, (lengths + self.stack - 1) // self.stack


def read_vectors(utterance: Utterance, generator: torch.Generator) -> Tensor:
    """Precomputed vectors in a .npy file, (frame, feature)."""
    try:
        return torch.from_numpy(np.load(utterance.audio_filepath).astype(np.float32))
    except (OSError, ValueError) as error:
        raise ImputerError(
            f"{utterance.id}: cannot read vectors {utterance.audio_filepath}: {error}"
        ) from error
