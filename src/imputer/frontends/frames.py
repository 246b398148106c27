"""Vectors that something else computed: the states of a pretrained encoder, or whatever a file holds.

# DEPARTURE pretrained-front-end: the paper's network starts from filter banks; see PAPER.md.
"""

from typing import Protocol

from torch import Tensor, nn

from imputer import config
from imputer.errors import UsageError
from imputer.frontends.normalisation import Normalisation


class Encoder(Protocol):
    """A frozen network from sound to vectors; ``key`` tells it from every other, for caches."""

    sample_rate: int
    feature_size: int
    frame_seconds: float
    key: str

    def extract(self, waveform: Tensor) -> Tensor:
        """(samples,) -> (frame, feature)."""

    def feature_frames(self, seconds: float) -> int:
        """How many vectors ``seconds`` of sound give."""


class Given:
    """No encoder at all: vectors of a known width and rate come ready-made."""

    sample_rate = 16_000

    def __init__(self, settings: config.FrontEnd) -> None:
        if settings.feature_size < 1 or settings.frame_seconds <= 0:
            raise UsageError(
                "the front end 'frames' needs front_end.feature_size and front_end.frame_seconds, but they are "
                f"{settings.feature_size} and {settings.frame_seconds}"
            )
        self.feature_size, self.frame_seconds = settings.feature_size, settings.frame_seconds
        self.key = f"given-{self.feature_size}-{self.frame_seconds}"

    def extract(self, waveform: Tensor) -> Tensor:
        raise UsageError("a model with the front end 'frames' takes ready vectors, not sound")

    def feature_frames(self, seconds: float) -> int:
        return max(1, round(seconds / self.frame_seconds))


class Frames(nn.Module):
    """Normalise, stack neighbours to lower the rate, project to the model's width."""

    def __init__(self, settings: config.FrontEnd, width: int, encoder: Encoder | None = None) -> None:
        super().__init__()
        self.encoder = encoder or Given(settings)
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

    def forward(self, inputs: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """(batch, frame, feature) -> (batch, frame / stack, width); a partial last stack is filled with zeros."""
        x = self.normalisation(inputs, lengths)
        x = nn.functional.pad(x, (0, 0, 0, -x.shape[1] % self.stack))
        x = self.project(x.unflatten(1, (-1, self.stack)).flatten(2))  # (batch, frame, stack * feature)
        return x, (lengths + self.stack - 1) // self.stack
