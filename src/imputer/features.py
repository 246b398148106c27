"""80 Kaldi filter banks with delta and delta-delta, batched, on any device.

The conventions are Kaldi's defaults: 16 kHz, 25 ms windows every 10 ms that lie wholly inside the audio
(``snip_edges``), mean of each window removed, pre-emphasis 0.97, Povey window, 512-point power spectrum,
triangular mel filters from 20 Hz to Nyquist, natural logarithm, no dither. Samples are taken at the scale of
16-bit integers, as Kaldi reads them: floating point audio in [-1, 1] is multiplied by 32768.

Audio shorter than one window is padded with zeros to one window, so that a single sample gives one frame.
"""

import math
from collections.abc import Iterable
from functools import cache

import numpy as np
import torch
from torch import Tensor

SAMPLE_RATE = 16000
BANKS = 80
FEATURES = 3 * BANKS

WINDOW_SECONDS = 0.025
SHIFT_SECONDS = 0.010
PREEMPHASIS = 0.97
LOWEST_HERTZ = 20.0
INTEGER_SCALE = 32768.0
ENERGY_FLOOR = torch.finfo(torch.float32).eps

# Windows worked on at a time: their spectra stay in the second-level cache, worth a third of the speed.
CHUNK = 256

# Kaldi's add-deltas with window 2: the slope over five frames, and that filter applied to itself over nine.
DELTA = {-2: -0.2, -1: -0.1, 1: 0.1, 2: 0.2}
DELTA_DELTA = {-4: 0.04, -3: 0.04, -2: 0.01, -1: -0.04, 0: -0.1, 1: -0.04, 2: 0.01, 3: 0.04, 4: 0.04}
DELTA_REACH = 4


def window_samples(sample_rate: int = SAMPLE_RATE) -> int:
    return int(sample_rate * WINDOW_SECONDS)


def shift_samples(sample_rate: int = SAMPLE_RATE) -> int:
    return int(sample_rate * SHIFT_SECONDS)


def frame_count(samples: int, sample_rate: int = SAMPLE_RATE) -> int:
    """The number of frames that ``filterbanks`` makes of ``samples`` samples: at least one, unless there are none."""
    if samples < 1:
        return 0
    return 1 + max(0, samples - window_samples(sample_rate)) // shift_samples(sample_rate)


@torch.no_grad()
def filterbanks(
    waveform: Tensor,
    sample_rate: int = SAMPLE_RATE,
    *,
    lengths: Tensor | None = None,
    model_rate: int | None = SAMPLE_RATE,
) -> Tensor:
    """80 static, 80 delta and 80 delta-delta log filter banks of (samples,) or (batch, samples): (..., frame, 240).

    ``waveform`` is floating point in [-1, 1] or integers at 16-bit scale. Audio at another rate than
    ``model_rate`` is resampled to it first; ``model_rate=None`` computes at the audio's own rate. ``lengths``
    gives the samples of each row of a padded batch: its frames then equal those of the row alone, and frames
    beyond its end are zero.
    """
    waveform, lengths = _checked(waveform, lengths)
    if model_rate is not None and model_rate != sample_rate:
        if lengths is not None:
            lengths = (lengths * model_rate + sample_rate - 1) // sample_rate
        waveform, sample_rate = resample(waveform, sample_rate, model_rate), model_rate
    single = waveform.dim() == 1
    waveform = waveform[None] if single else waveform  # (batch, samples)
    window = window_samples(sample_rate)
    if waveform.shape[1] < window:
        waveform = torch.nn.functional.pad(waveform, (0, window - waveform.shape[1]))
    features = _static(waveform, sample_rate)  # (batch, frame, 240)
    frames = None if lengths is None else _frame_counts(lengths, sample_rate)
    add_deltas(features, frames)
    return features[0] if single else features


def _checked(waveform: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor | None]:
    if waveform.dim() not in (1, 2):
        raise ValueError(
            f"filterbanks takes (samples,) or (batch, samples), got shape {tuple(waveform.shape)}"
        )
    if waveform.shape[-1] == 0:
        raise ValueError("filterbanks got audio of 0 samples; at least 1 is needed")
    if lengths is not None:
        lengths = torch.as_tensor(lengths, device=waveform.device)
        if waveform.dim() == 1 or lengths.shape != waveform.shape[:1]:
            raise ValueError(
                f"lengths of shape {tuple(lengths.shape)} do not fit waveforms of {tuple(waveform.shape)}"
            )
        if bool((lengths < 1).any()) or bool((lengths > waveform.shape[1]).any()):
            raise ValueError(f"lengths must lie in 1..{waveform.shape[1]} samples, got {lengths.tolist()}")
    scale = INTEGER_SCALE if waveform.is_floating_point() else 1.0
    waveform = waveform.float() * scale
    return waveform, lengths


def _frame_counts(lengths: Tensor, sample_rate: int) -> Tensor:
    beyond_first = (lengths - window_samples(sample_rate)).clamp_min(0)
    return 1 + beyond_first // shift_samples(sample_rate)


def _static(waveform: Tensor, sample_rate: int) -> Tensor:
    """(batch, samples) at integer scale -> (batch, frame, 240), of which the first 80 are filled in."""
    window, shift = window_samples(sample_rate), shift_samples(sample_rate)
    points = 1 << (window - 1).bit_length()
    taper, banks = _taper(window, waveform.device), _banks(sample_rate, points, waveform.device)
    # Removing the window's mean m and then emphasising takes (1 - 0.97) m off the emphasised audio, so the audio
    # is emphasised once and not once per window. Only a window's first sample differs: there the taper is zero.
    emphasised = waveform.clone()
    emphasised[:, 1:] -= PREEMPHASIS * waveform[:, :-1]
    frames = emphasised.unfold(1, window, shift)  # (batch, frame, window), a view
    offsets = (1 - PREEMPHASIS) * waveform.unfold(1, window, shift).mean(2, keepdim=True)  # (batch, frame, 1)
    batch, count = frames.shape[:2]
    chunk = max(1, CHUNK // batch) if waveform.device.type == "cpu" else count
    features = waveform.new_zeros(batch, count, FEATURES)
    padded = waveform.new_zeros(batch, min(chunk, count), points)
    for start in range(0, count, chunk):
        end = min(start + chunk, count)
        rows = padded[:, : end - start]
        torch.sub(frames[:, start:end], offsets[:, start:end], out=rows[..., :window])
        rows[..., :window] *= taper
        # Real and imaginary parts stand side by side and share a weight: the product adds their squares.
        parts = torch.view_as_real(torch.fft.rfft(rows)).flatten(2)[..., :points].square()
        energies = parts @ banks  # (batch, frame, 80)
        features[:, start:end, :BANKS] = energies.clamp_min_(ENERGY_FLOOR).log_()
    return features


@cache
def _taper(window: int, device: torch.device) -> Tensor:
    """The Povey window: a Hann window to the power 0.85, zero at both ends."""
    angle = 2 * math.pi * torch.arange(window, dtype=torch.float64) / (window - 1)
    return (0.5 - 0.5 * angle.cos()).pow(0.85).float().to(device)


@cache
def _banks(sample_rate: int, points: int, device: torch.device) -> Tensor:
    """Triangles on the mel scale, each weight twice: (2 x spectrum bin below Nyquist, 80)."""
    low, high = _mel(torch.tensor([LOWEST_HERTZ, sample_rate / 2], dtype=torch.float64))
    width = (high - low) / (BANKS + 1)
    bins = _mel(torch.arange(points // 2, dtype=torch.float64) * sample_rate / points)[:, None]
    left = low + width * torch.arange(BANKS, dtype=torch.float64)
    weights = torch.minimum((bins - left) / width, (left + 2 * width - bins) / width).clamp_min(0)
    return weights.repeat_interleave(2, 0).float().to(device)


def _mel(hertz: Tensor) -> Tensor:
    return 1127.0 * torch.log1p(hertz / 700.0)


def add_deltas(features: Tensor, frames: Tensor | None = None) -> Tensor:
    """Fill the second and third 80 of (batch, frame, 240) in place from the first, edge frames repeated.

    As in Kaldi both orders are filters over the static frames: edges are repeated once, not once per order.
    """
    batch, count, _ = features.shape
    static = features[..., :BANKS]
    if frames is None:
        last = static[:, -1:].expand(batch, DELTA_REACH, BANKS)
        middle = static
    else:
        # A row's last frame stands in for everything after it, so that padding changes nothing.
        ends = (frames - 1)[:, None]
        positions = torch.arange(count + DELTA_REACH, device=features.device)[None].minimum(ends)
        middle = static.gather(1, positions[..., None].expand(-1, -1, BANKS))
        last = middle[:, :0]
    padded = torch.cat([static[:, :1].expand(batch, DELTA_REACH, BANKS), middle, last], 1)
    _filter(padded, DELTA, features[..., BANKS : 2 * BANKS])
    _filter(padded, DELTA_DELTA, features[..., 2 * BANKS :])
    if frames is not None:
        beyond = torch.arange(count, device=features.device)[None] >= frames[:, None]
        features.masked_fill_(beyond[..., None], 0.0)
    return features


def _filter(padded: Tensor, taps: dict[int, float], out: Tensor) -> None:
    count = out.shape[1]
    total = torch.zeros_like(out, memory_format=torch.contiguous_format)
    for shift, weight in taps.items():
        start = DELTA_REACH + shift
        total.add_(padded[:, start : start + count], alpha=weight)
    out.copy_(total)


def resample(waveform: Tensor, source_rate: float, target_rate: float) -> Tensor:
    """(samples,) or (batch, samples) at another rate, by soxr; the result is on the device it came from."""
    if source_rate == target_rate:
        return waveform
    import soxr

    rows = waveform.detach().cpu().reshape(-1, waveform.shape[-1]).float().numpy()
    done = [soxr.resample(row, source_rate, target_rate) for row in rows]
    result = torch.from_numpy(np.stack(done)).to(waveform.device, torch.float32)
    return result.reshape(*waveform.shape[:-1], -1)


def mean_and_deviation(features: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation per feature over (frame, feature) tensors, in one pass in float64.

    These statistics of the training set are stored in the model; a feature that never varies gets deviation 1.
    """
    count, mean, squares = 0, torch.zeros(()), torch.zeros(())
    for frames in features:
        frames = frames.double().reshape(-1, frames.shape[-1])
        if not len(frames):
            continue
        # Chan's pairwise update: no cancellation, however long the corpus.
        own_mean = frames.mean(0)
        own_squares = (frames - own_mean).square().sum(0)
        if not count:
            count, mean, squares = len(frames), own_mean, own_squares
            continue
        total = count + len(frames)
        difference = own_mean - mean
        mean = mean + difference * (len(frames) / total)
        squares = squares + own_squares + difference.square() * (count * len(frames) / total)
        count = total
    if not count:
        raise ValueError("no frames to compute statistics of")
    deviation = (squares / count).sqrt()
    # A bank at the energy floor throughout has nothing to scale by.
    deviation = torch.where(deviation > 1e-5, deviation, torch.ones_like(deviation))
    return mean.float(), deviation.float()
