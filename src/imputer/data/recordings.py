"""Every source of audio in one form: a length in seconds, and samples of any slice."""

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from imputer import audio
from imputer.audio.limits import RATES
from imputer.data.manifest import Utterance
from imputer.errors import ImputerError, UsageError

Waveform = Tensor | np.ndarray
Audio = str | Path | BinaryIO | Utterance | Waveform


@dataclass(frozen=True, slots=True)
class Recording:
    """A length, and the way to the samples (offset, seconds) -> (samples,); ``name`` is for messages."""

    name: str
    seconds: float
    samples: Callable[[float, float], np.ndarray]


def open_recording(source: Audio, stack: ExitStack, given_rate: int | None, sample_rate: int) -> Recording:
    """Open a source without reading it; slices come at ``sample_rate``. It stays open for as long as ``stack``.

    ``given_rate`` is that of samples in memory, ``sample_rate`` if None.
    """
    if isinstance(source, Utterance):
        return _slice_of_file(source, sample_rate)
    if isinstance(source, np.ndarray | Tensor):
        return _samples(source, given_rate or sample_rate, sample_rate)
    if not isinstance(source, str | Path) and not hasattr(source, "read"):
        raise UsageError(
            f"unsupported audio type: {type(source).__name__}; give a path, a binary file object, samples "
            "as a numpy array or torch tensor, or a list of these"
        )
    reader = stack.enter_context(audio.Reader(source))

    def read(offset: float, seconds: float) -> np.ndarray:
        return reader.read(sample_rate, offset=offset, duration=seconds)

    return Recording(reader.name, reader.seconds, read)


def check_rate(sample_rate: int | None) -> None:
    """Refuse a sample rate that is not a number, or that no sound has."""
    if sample_rate is None:
        return
    if isinstance(sample_rate, bool) or not isinstance(sample_rate, int | float | np.number):
        raise UsageError(f"sample_rate is a number of samples per second, got {sample_rate!r}")
    if not RATES[0] <= sample_rate <= RATES[1]:
        raise UsageError(
            f"sample_rate is a number of samples per second, {RATES[0]} to {RATES[1]}, got {sample_rate}"
        )


def mono(wave: Waveform) -> np.ndarray:
    """(samples,) or (samples, channels), whole numbers or floats -> (samples,) float32 in [-1, 1]."""
    if isinstance(wave, Tensor):
        if wave.layout != torch.strided or wave.is_meta:
            kind = "device meta" if wave.is_meta else str(wave.layout)
            raise UsageError(f"samples must be a plain tensor, got one of {kind}; give its values")
        wave = wave.detach().cpu()
        array = (wave.to(torch.float32) if wave.is_floating_point() else wave).numpy()
    else:
        array = wave
    if array.ndim not in (1, 2):
        raise UsageError(f"samples must be (samples,) or (samples, channels), got shape {array.shape}")
    if np.issubdtype(array.dtype, np.integer):
        limits = np.iinfo(array.dtype)
        loudest = max(int(array.max()), -int(array.min())) if array.size else 0
        if limits.bits == 64 and 0 < loudest <= 1 << 16:
            raise UsageError(
                f"samples of dtype {array.dtype} reach {loudest} of {limits.max}: give 16-bit values as int16"
            )
        middle = 0 if limits.min else (limits.max + 1) // 2  # unsigned samples have their silence there
        array = (array.astype(np.float64) - middle) / (limits.max + 1 - middle)
    elif not np.issubdtype(array.dtype, np.floating):
        raise UsageError(f"samples must be numbers, got an array of dtype {array.dtype}")
    if array.ndim == 2:
        array = array.mean(1 if array.shape[0] >= array.shape[1] else 0) if array.size else array.reshape(0)
    peak = float(np.abs(array).max()) if array.size else 0.0
    if not math.isfinite(peak):
        raise ImputerError("the samples hold a value that is not finite")
    audio.check_peak(peak, "the samples")
    return np.ascontiguousarray(array, dtype=np.float32)


def _slice_of_file(utterance: Utterance, sample_rate: int) -> Recording:
    path, start = utterance.audio_filepath, utterance.offset

    def read(offset: float, seconds: float) -> np.ndarray:
        # Many utterances may be slices of one file, which audio.read keeps open.
        return audio.read(path, sample_rate=sample_rate, offset=start + offset, duration=seconds)

    return Recording(f"{utterance.id} ({path})", utterance.duration, read)


def _samples(source: Waveform, given_rate: int, sample_rate: int) -> Recording:
    wave = mono(source)
    if not len(wave):
        raise ImputerError("the audio is empty (0 samples)")
    if given_rate != sample_rate:
        import soxr

        wave = soxr.resample(wave, given_rate, sample_rate)

    def read(offset: float, seconds: float) -> np.ndarray:
        first = round(offset * sample_rate)
        return wave[first : first + max(1, round(seconds * sample_rate))]

    return Recording("the samples", len(wave) / sample_rate, read)
