"""Whatever holds sound, made into one thing: a length in seconds, and samples of any slice."""

import shutil
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
from torch import Tensor

from imputer import audio
from imputer.data.manifest import Utterance
from imputer.errors import ImputerError, UsageError

Waveform = Tensor | np.ndarray
Audio = str | Path | BinaryIO | Utterance | Waveform
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Recording:
    """A length, and the way to the samples (offset, seconds) -> (samples,); ``name`` is for messages."""

    name: str
    seconds: float
    samples: Callable[[float, float], np.ndarray]


def open_recording(source: Audio, stack: ExitStack, given_rate: int | None, sample_rate: int) -> Recording:
    """Look at a source without reading it; slices come at ``sample_rate``. Copies of streams live in ``stack``.

    ``given_rate`` is that of samples in memory, ``sample_rate`` if None.
    """
    if isinstance(source, str | Path):
        return _file(str(source), str(source), sample_rate)
    if isinstance(source, Utterance):
        return _slice_of_file(source, sample_rate)
    if isinstance(source, np.ndarray | Tensor):
        return _samples(source, given_rate or sample_rate, sample_rate)
    if not hasattr(source, "read"):
        raise UsageError(
            f"cannot hear a {type(source).__name__}: give a path, a binary file object or samples"
        )
    # A stream may not be seekable and may be long: on disk it is read in slices like any other file.
    copy: Any = stack.enter_context(tempfile.NamedTemporaryFile(prefix="imputer-"))  # noqa: SIM115
    shutil.copyfileobj(source, copy)
    copy.flush()
    name = str(getattr(source, "name", "the audio stream"))
    return _file(copy.name, "standard input" if name == "<stdin>" else name, sample_rate)


def mono(wave: Waveform) -> np.ndarray:
    """(samples,) or (samples, channels), whole numbers or floats -> (samples,) float32 in [-1, 1]."""
    array = wave.detach().cpu().numpy() if isinstance(wave, Tensor) else wave
    if array.ndim not in (1, 2):
        raise UsageError(f"samples must be (samples,) or (samples, channels), got shape {array.shape}")
    if np.issubdtype(array.dtype, np.integer):
        array = array / float(np.iinfo(array.dtype).max + 1)
    if array.ndim == 2:
        array = array.mean(1 if array.shape[0] >= array.shape[1] else 0)
    array = np.ascontiguousarray(array, dtype=np.float32)
    if not np.isfinite(array).all():
        raise ImputerError("the samples hold a value that is not a finite number")
    return array


def _file(path: str, name: str, sample_rate: int) -> Recording:
    def read(offset: float, seconds: float) -> np.ndarray:
        return _named(
            path, name, lambda: audio.read(path, sample_rate=sample_rate, offset=offset, duration=seconds)
        )

    return Recording(name, _named(path, name, lambda: audio.info(path).seconds), read)


def _slice_of_file(utterance: Utterance, sample_rate: int) -> Recording:
    path, start = utterance.audio_filepath, utterance.offset
    name = f"{utterance.id} ({path})"

    def read(offset: float, seconds: float) -> np.ndarray:
        return _named(
            path,
            path,
            lambda: audio.read(path, sample_rate=sample_rate, offset=start + offset, duration=seconds),
        )

    return Recording(name, utterance.duration, read)


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


def _named(path: str, name: str, read: Callable[[], Result]) -> Result:
    """Run ``read``; its complaints speak of ``name``, and a file that is not there is the caller's mistake."""
    try:
        return read()
    except ImputerError as error:
        if not Path(path).exists():
            raise UsageError(f"{name}: no such file") from error
        raise type(error)(str(error).replace(path, name)) from error
