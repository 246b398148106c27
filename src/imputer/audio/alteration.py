"""Altered recordings: other speeds, rooms, microphones, noises and levels."""

import numpy as np

from imputer.audio.reader import SAMPLE_RATE

SPEEDS = (0.88, 1.14)


def alter(samples: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """(samples,) at 16 kHz, at another speed and as if recorded elsewhere."""
    return recorded(warped(samples, generator.uniform(*SPEEDS)), generator)


def warped(samples: np.ndarray, factor: float) -> np.ndarray:
    """Played ``factor`` times as fast."""
    import soxr

    return soxr.resample(samples, SAMPLE_RATE * factor, SAMPLE_RATE)


def recorded(samples: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """As a microphone in a room takes it: equalised, often reverberant, mostly a little noisy, at some level."""
    length = len(samples)
    points = 1 << (length + SAMPLE_RATE // 2 - 1).bit_length()
    spectrum = np.fft.rfft(samples, points) * _equaliser(points, generator)
    if generator.random() < 0.45:
        spectrum *= np.fft.rfft(_room(generator), points)
    samples = np.fft.irfft(spectrum, points)[:length]
    samples /= np.sqrt(np.mean(samples**2)) + 1e-9
    if generator.random() < 0.7:
        samples += room_noise(length, generator) * 10 ** (-generator.uniform(15, 50) / 20)
    samples *= 10 ** (generator.uniform(-38, -16) / 20)  # root mean square over full scale
    peak = np.abs(samples).max()
    return (samples * min(1.0, 0.98 / peak)).astype(np.float32)


def _equaliser(points: int, generator: np.random.Generator) -> np.ndarray:
    """A smooth curve of about 4 dB either way, in half of the cases with a tilt, over the bins of a spectrum."""
    knots = np.array([0, 100, 300, 800, 2000, 4000, 6000, 8000])
    decibels = generator.normal(0, 3, len(knots)) + generator.uniform(-1, 1) * np.linspace(-4, 4, len(knots))
    curve = np.interp(np.linspace(0, SAMPLE_RATE / 2, points // 2 + 1), knots, decibels)
    return 10 ** (curve / 20)


def _room(generator: np.random.Generator) -> np.ndarray:
    """An impulse response: the direct sound, then noise that decays by 60 dB in 0.1 to 0.45 s."""
    decay = generator.uniform(0.1, 0.45)
    time = np.arange(round(decay * SAMPLE_RATE)) / SAMPLE_RATE
    tail = generator.standard_normal(len(time)) * 10 ** (-3 * time / decay)
    tail[: round(generator.uniform(0.002, 0.02) * SAMPLE_RATE)] = 0
    response = tail * 10 ** (-generator.uniform(5, 22) / 20) / (np.sqrt(np.sum(tail**2)) + 1e-9)
    response[0] = 1
    return response


def room_noise(length: int, generator: np.random.Generator) -> np.ndarray:
    """Unit noise between white and brown, its level wandering slowly."""
    points = 1 << (length - 1).bit_length()
    slope = generator.uniform(0, 1)
    spectrum = np.fft.rfft(generator.standard_normal(points, np.float32))
    spectrum /= np.maximum(np.arange(len(spectrum)), points * 50 // SAMPLE_RATE + 1) ** slope
    noise = np.fft.irfft(spectrum, points)[:length]
    wander = np.interp(np.arange(length), np.linspace(0, length, 8), 10 ** (generator.normal(0, 2, 8) / 20))
    noise *= wander
    return noise / (np.sqrt(np.mean(noise**2)) + 1e-9)
