"""Mean and variance of the training set, stored with the model's weights."""

import torch
from torch import Tensor, nn


def real_frames(frames: int, lengths: Tensor) -> Tensor:
    """(batch, frame) Bool, True where a frame is not padding."""
    return torch.arange(frames, device=lengths.device) < lengths[:, None]


class Normalisation(nn.Module):
    """(x - mean) / deviation, zero on padding."""

    mean: Tensor
    scale: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("scale", torch.ones(size))

    def fit(self, mean: Tensor, deviation: Tensor) -> None:
        """Take over the statistics of the training set."""
        self.mean.copy_(mean)
        self.scale.copy_(deviation.reciprocal())

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """(batch, frame, feature) -> the same, normalised."""
        return (x - self.mean).mul_(self.scale).mul_(real_frames(x.shape[1], lengths)[..., None])
