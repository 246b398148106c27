"""80 Kaldi filter banks with delta and delta-delta, batched, on any device; and augmentation of training audio.

The conventions are Kaldi's defaults: 16 kHz, 25 ms windows every 10 ms that lie wholly inside the audio
(``snip_edges``), mean of each window removed, pre-emphasis 0.97, Povey window, 512-point power spectrum,
triangular mel filters from 20 Hz to Nyquist, natural logarithm, no dither. Samples are taken at the scale of
16-bit integers, as Kaldi reads them: floating point audio in [-1, 1] is multiplied by 32768.

Audio shorter than one window is padded with zeros to one window, so that a single sample gives one frame.
Everything random takes its ``generator`` from the caller.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
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

# Babble: so many voices, whose loudness is drawn so many times a second.
VOICES = 6
SWELL_RATE = 100


def window_samples(sample_rate: int = SAMPLE_RATE) -> int:
    return int(sample_rate * WINDOW_SECONDS)


def shift_samples(sample_rate: int = SAMPLE_RATE) -> int:
    return int(sample_rate * SHIFT_SECONDS)


def frame_count(samples: int, sample_rate: int = SAMPLE_RATE) -> int:
    """How many frames ``filterbanks`` makes of so many samples; anything but nothing makes at least one."""
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
            f"filterbanks takes (samples,) or (batch, samples), not a shape of {tuple(waveform.shape)}"
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

    As in Kaldi both orders are filters over the static frames: edges are repeated once, not once an order.
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

    These statistics of the training set travel with the model; a feature that never varies gets deviation 1.
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
        raise ValueError("no frames to take statistics of")
    deviation = (squares / count).sqrt()
    # A bank at the energy floor throughout has nothing to scale by.
    deviation = torch.where(deviation > 1e-5, deviation, torch.ones_like(deviation))
    return mean.float(), deviation.float()


# Augmentation. The paper uses none; every option is off unless asked for.


@dataclass(frozen=True)
class Augmentation:
    """What may happen to training audio, drawn anew for each utterance and epoch; all off by default."""

    speed: tuple[float, ...] = ()  # factors, one drawn with equal chances: (0.9, 1.0, 1.1)
    gain_db: tuple[float, float] = (0.0, 0.0)  # lowest and highest change of level
    noise: float = 0.0  # probability of added noise
    noise_snr_db: tuple[float, float] = (5.0, 30.0)  # lowest and highest signal-to-noise ratio
    noise_kinds: tuple[str, ...] = ("white", "pink", "babble")  # those to draw from
    telephone: float = 0.0  # probability of a telephone line: 8 kHz, 300 to 3400 Hz
    spec_augment: bool = False  # whether stripes of the features are blotted out
    time_masks: int = 2  # SpecAugment: stripes over time ...
    time_mask_frames: int = 40  # ... of at most so many frames each ...
    time_mask_share: float = 0.2  # ... and of at most this share of the utterance each
    frequency_masks: int = 2  # stripes over the filter banks ...
    frequency_mask_banks: int = 27  # ... of at most so many banks each

    def __post_init__(self) -> None:
        for name in ("noise", "telephone", "time_mask_share"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} must lie in 0..1, got {getattr(self, name)}")
        for name in ("time_masks", "time_mask_frames", "frequency_masks", "frequency_mask_banks"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")
        if any(not 0.25 <= factor <= 4.0 for factor in self.speed):
            raise ValueError(f"speed factors must lie in 0.25..4, got {self.speed}")
        for name in ("gain_db", "noise_snr_db"):
            low_high = getattr(self, name)
            if len(low_high) != 2 or low_high[0] > low_high[1]:
                raise ValueError(f"{name} takes the lowest and the highest value, got {low_high}")
        unknown = set(self.noise_kinds) - set(NOISES)
        if unknown or (self.noise and not self.noise_kinds):
            raise ValueError(f"noise_kinds takes some of {', '.join(NOISES)}, got {self.noise_kinds}")

    @property
    def of_sound(self) -> list[str]:
        """What changes the sound itself, before there are features."""
        asked = {
            "speed": self.speed,
            "gain_db": any(self.gain_db),
            "noise": self.noise,
            "telephone": self.telephone,
        }
        return [name for name, value in asked.items() if value]

    @property
    def longest(self) -> float:
        """By how much the slowest speed stretches an utterance: for frame budgets."""
        return max((1.0 / factor for factor in self.speed), default=1.0)


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
    return spec_augment(
        features,
        generator=generator,
        time_masks=augmentation.time_masks,
        time_mask_frames=augmentation.time_mask_frames,
        time_mask_share=augmentation.time_mask_share,
        frequency_masks=augmentation.frequency_masks,
        frequency_mask_banks=augmentation.frequency_mask_banks,
    )


def spec_augment(
    features: Tensor,
    *,
    generator: torch.Generator,
    time_masks: int = 2,
    time_mask_frames: int = 40,
    time_mask_share: float = 0.2,
    frequency_masks: int = 2,
    frequency_mask_banks: int = 27,
) -> Tensor:
    """SpecAugment without warping on (frame, feature): random stripes take the utterance's own mean.

    A stripe of banks covers the same banks of static, delta and delta-delta when there are 240 features.
    """
    frames, width = features.shape
    groups = 3 if width == FEATURES else 1
    banks = width // groups
    mean = features.mean(0)  # (feature,)
    result = features.clone()
    stripes = result.view(frames, groups, banks)
    for _ in range(frequency_masks):
        size = _integer(min(frequency_mask_banks, banks) + 1, generator)
        start = _integer(banks - size + 1, generator)
        stripes[..., start : start + size] = mean.view(groups, banks)[:, start : start + size]
    for _ in range(time_masks):
        size = _integer(min(time_mask_frames, int(frames * time_mask_share)) + 1, generator)
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
    """Several voices' worth of noise: the long-term spectrum of speech, swelling at the pace of syllables."""
    steps = 2 + SWELL_RATE * samples // sample_rate
    power = torch.zeros(steps)
    for _ in range(VOICES):
        swell = _shaped(steps, SWELL_RATE, _syllable_spectrum, generator)
        power += (2 * swell / swell.std().clamp_min(1e-12)).clamp_max(4.0).exp()
    # Noises that swell one by one add up to one noise that swells with the sum of their powers.
    envelope = torch.nn.functional.interpolate(power.sqrt()[None, None], size=samples, mode="linear")[0, 0]
    return _coloured(white_noise(samples, sample_rate, generator) * envelope, sample_rate, _speech_spectrum)


NOISES: dict[str, Callable[[int, int, torch.Generator], Tensor]] = {
    "white": white_noise,
    "pink": pink_noise,
    "babble": babble_noise,
}

NO_AUGMENTATION = Augmentation()


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
    """(samples,) as heard over a telephone: 8 kHz, 300 to 3400 Hz, mu-law steps; back at ``sample_rate``."""
    samples = len(waveform)
    narrow = resample(waveform, sample_rate, 8000.0)
    points = (
        1 << (len(narrow) + 511).bit_length()
    )  # room for the filter to ring out instead of wrapping round
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
