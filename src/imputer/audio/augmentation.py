"""Augmentation of training audio and features. The paper uses none; every option is off unless set.

Everything random takes its ``generator`` from the caller.
"""
# DEPARTURE augmentation: the paper's configurations use none; see PAPER.md.

import math
from collections.abc import Callable

import torch
from torch import Tensor

from imputer.configs import NO_AUGMENTATION, Augmentation
from imputer.features import FEATURES, resample

# Babble: the number of voices, and how many times per second their loudness is drawn.
VOICES = 6
SWELL_RATE = 100


def augment_waveform(
    waveform: Tensor, sample_rate: int, augmentation: Augmentation, generator: torch.Generator
) -> Tensor:
    """(samples,) in [-1, 1] with speed, gain, noise and telephone drawn from ``generator``, in that order."""
    if augmentation.speed:
        choice = _integer(len(augmentation.speed), generator)
        waveform = speed_perturb(waveform, augmentation.speed[choice])
    if any(augmentation.gain_db):
        waveform = waveform * 10 ** (_between(*augmentation.gain_db, generator) / 20)
    if augmentation.noise and _uniform(generator) < augmentation.noise:
        kind = augmentation.noise_kinds[_integer(len(augmentation.noise_kinds), generator)]
        snr_db = _between(*augmentation.noise_snr_db, generator)
        waveform = add_noise(waveform, sample_rate, kind=kind, snr_db=snr_db, generator=generator)
    if augmentation.telephone and _uniform(generator) < augmentation.telephone:
        waveform = telephone(waveform, sample_rate)
    return waveform


def augment_features(features: Tensor, augmentation: Augmentation, generator: torch.Generator) -> Tensor:
    """(frame, 240) with SpecAugment's stripes, if asked for."""
    if not augmentation.spec_augment:
        return features
    return spec_augment(features, augmentation, generator=generator)


def spec_augment(
    features: Tensor, stripes: Augmentation = NO_AUGMENTATION, *, generator: torch.Generator
) -> Tensor:
    """SpecAugment without warping on (frame, feature): random stripes take the utterance's own mean.

    A stripe of banks covers the same banks of static, delta and delta-delta when there are 240 features.
    """
    frames, width = features.shape
    groups = 3 if width == FEATURES else 1
    banks = width // groups
    mean = features.mean(0)  # (feature,)
    result = features.clone()
    by_bank = result.view(frames, groups, banks)
    for _ in range(stripes.frequency_masks):
        size = _integer(min(stripes.frequency_mask_banks, banks) + 1, generator)
        start = _integer(banks - size + 1, generator)
        by_bank[..., start : start + size] = mean.view(groups, banks)[:, start : start + size]
    for _ in range(stripes.time_masks):
        longest = min(stripes.time_mask_frames, int(frames * stripes.time_mask_share))
        size = _integer(longest + 1, generator)
        start = _integer(frames - size + 1, generator)
        result[start : start + size] = mean
    return result


def speed_perturb(waveform: Tensor, factor: float) -> Tensor:
    """Play (samples,) faster by ``factor``: pitch and tempo rise, the length becomes samples / factor."""
    return resample(waveform, factor, 1.0) if factor != 1.0 else waveform


def add_noise(
    waveform: Tensor, sample_rate: int, *, kind: str, snr_db: float, generator: torch.Generator
) -> Tensor:
    """(samples,) with noise of a kind from ``NOISES`` at a signal-to-noise ratio over the whole utterance."""
    level = waveform.square().mean().sqrt()
    noise = NOISES[kind](len(waveform), sample_rate, generator)
    noise = noise / noise.square().mean().sqrt().clamp_min(1e-12)
    return waveform + noise * level * 10 ** (-snr_db / 20)


def white_noise(samples: int, sample_rate: int, generator: torch.Generator) -> Tensor:
    """The same power at every frequency."""
    return torch.randn(samples, generator=generator)


def pink_noise(samples: int, sample_rate: int, generator: torch.Generator) -> Tensor:
    """Power falling as 1/f above 20 Hz: rooms, wind, traffic."""
    return _shaped(samples, sample_rate, lambda hertz: hertz.clamp_min(20.0).rsqrt(), generator)


def babble_noise(samples: int, sample_rate: int, generator: torch.Generator) -> Tensor:
    """Several voices' worth of noise: the long-term spectrum of speech, modulated at the rate of syllables."""
    steps = 2 + SWELL_RATE * samples // sample_rate
    power = torch.zeros(steps)
    for _ in range(VOICES):
        swell = _shaped(steps, SWELL_RATE, _syllable_spectrum, generator)
        power += (2 * swell / swell.std().clamp_min(1e-12)).clamp_max(4.0).exp()
    # The sum of modulated noises is one noise, modulated by the sum of their powers.
    envelope = torch.nn.functional.interpolate(power.sqrt()[None, None], size=samples, mode="linear")[0, 0]
    return _coloured(white_noise(samples, sample_rate, generator) * envelope, sample_rate, _speech_spectrum)


NOISES: dict[str, Callable[[int, int, torch.Generator], Tensor]] = {
    "white": white_noise,
    "pink": pink_noise,
    "babble": babble_noise,
}


def _speech_spectrum(hertz: Tensor) -> Tensor:
    """Flat from 100 to 500 Hz, then 9 dB an octave down: about the long-term average of speech."""
    return (hertz / 100.0).clamp_max(1.0) * (500.0 / hertz.clamp_min(500.0)).pow(1.5)


def _syllable_spectrum(hertz: Tensor) -> Tensor:
    """Modulations around four a second."""
    return (-(((hertz - 4.0) / 2.0) ** 2)).exp()


def _shaped(
    samples: int, sample_rate: int, amplitude: Callable[[Tensor], Tensor], generator: torch.Generator
) -> Tensor:
    """Gaussian noise of (samples,) with an amplitude spectrum."""
    # At least a second, else the slow parts of a spectrum fall between the bins of a short piece.
    noise = torch.randn(max(samples, sample_rate), generator=generator)
    return _coloured(noise, sample_rate, amplitude)[:samples]


def _coloured(noise: Tensor, sample_rate: int, amplitude: Callable[[Tensor], Tensor]) -> Tensor:
    """(samples,) filtered to an amplitude spectrum."""
    # A power of two, since a length with a large prime factor is slow to transform.
    points = 1 << (len(noise) - 1).bit_length()
    hertz = torch.fft.rfftfreq(points, 1 / sample_rate)
    return torch.fft.irfft(torch.fft.rfft(noise, points) * amplitude(hertz), points)[: len(noise)]


def telephone(waveform: Tensor, sample_rate: int) -> Tensor:
    """(samples,) as a telephone line transmits them: 8 kHz, 300 to 3400 Hz, mu-law steps; back at ``sample_rate``."""
    samples = len(waveform)
    narrow = resample(waveform, sample_rate, 8000.0)
    # Room for the filter to ring out instead of wrapping round.
    points = 1 << (len(narrow) + 511).bit_length()
    hertz = torch.fft.rfftfreq(points, 1 / 8000.0)
    band = torch.sigmoid((hertz - 300.0) / 20.0) * torch.sigmoid((3400.0 - hertz) / 40.0)
    narrow = torch.fft.irfft(torch.fft.rfft(narrow, points) * band, points)[: len(narrow)]
    wide = resample(_mu_law_steps(narrow), 8000.0, sample_rate)
    return torch.nn.functional.pad(wide, (0, max(0, samples - len(wide))))[:samples]


def _mu_law_steps(waveform: Tensor) -> Tensor:
    """Rounded to the 256 levels of G.711's mu-law curve."""
    mu = 255.0
    pressed = waveform.sign() * torch.log1p(mu * waveform.abs().clamp_max(1.0)) / math.log1p(mu)
    steps = (pressed * 127).round() / 127
    return steps.sign() * torch.expm1(steps.abs() * math.log1p(mu)) / mu


def _uniform(generator: torch.Generator) -> float:
    return torch.rand((), generator=generator).item()


def _between(low: float, high: float, generator: torch.Generator) -> float:
    return low + (high - low) * _uniform(generator)


def _integer(below: int, generator: torch.Generator) -> int:
    return int(torch.randint(below, (), generator=generator))
