"""The paper's front end: filter banks with deltas, then two convolutions (fig:imputer)."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from imputer import configs, features
from imputer.data.batching import Extract, FilterbankExtract
from imputer.data.manifest import Utterance
from imputer.frontends.normalisation import Normalisation, real_frames

MEL_BINS, DELTA_ORDERS = 80, 3  # static, delta and delta-delta are the three input channels


class FilterbankConvolution(nn.Module):
    """Two convolutions of 11 frames x 3 bins, stride 2 x 1 each: 100 filter banks per second become 25 frames."""

    augments_sound = True
    needs_statistics = True
    sample_rate = 16_000
    feature_size = MEL_BINS * DELTA_ORDERS
    frame_seconds = 0.04

    def __init__(self, settings: configs.FrontEnd, width: int) -> None:
        super().__init__()
        self.normalisation = Normalisation(self.feature_size)
        convolution = partial(nn.Conv2d, kernel_size=(11, 3), stride=(2, 1), padding=(5, 1))
        self.first = convolution(DELTA_ORDERS, settings.channels)
        self.second = convolution(settings.channels, settings.channels)
        self.project = nn.Linear(settings.channels * MEL_BINS, width)

    def extract(self, waveform: Tensor) -> Tensor:
        """(samples,) at 16 kHz -> (frame, 240)."""
        return features.filterbanks(waveform, self.sample_rate)

    def feature_frames(self, seconds: float) -> int:
        """A 25 ms window every 10 ms."""
        return max(1, 1 + int((seconds - 0.025) / 0.01))

    def reader(
        self, data: configs.Data, augmentation: configs.Augmentation, utterances: Sequence[Utterance]
    ) -> Extract:
        """Filter banks, computed when an utterance is needed; augmentation can still alter its sound."""
        return FilterbankExtract(self.sample_rate, augmentation)

    def forward(self, inputs: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """(batch, frame, 240) -> (batch, frame / 4, width); padding is zeroed before it can leak."""
        x = self.normalisation(inputs, lengths)
        x = x.unflatten(-1, (DELTA_ORDERS, MEL_BINS)).transpose(1, 2)  # (batch, channel, frame, bin)
        x = x.contiguous(
            memory_format=torch.channels_last
        )  # faster on a CPU, and the flattening below is free
        lengths = (lengths + 1) // 2
        x = self.first(x)
        x = x.mul_(real_frames(x.shape[2], lengths)[:, None, :, None]).relu_()
        x = torch.relu_(self.second(x))
        # Beyond the length there are no frames: attention masks them out.
        lengths = (lengths + 1) // 2
        x = x.permute(0, 2, 3, 1).flatten(2)  # (batch, frame, bin * channel)
        return self.project(x), lengths
