"""The frozen encoder of Moonshine (tiny, English), from the PyPI package moonshine-voice.

# DEPARTURE pretrained-front-end: the paper's network starts from filter banks; see PAPER.md.

Three convolutions (127 samples every 64, then 7 every 3, then 3 every 2) and a self-attention stack give 288
numbers every 384 samples. What was measured, and what follows from it:

- Recordings run one at a time. In a padded batch with the attention mask set, frames differ from those of the
  recording alone (by 7 to 12 % of their mean size; the weights are int8 and their input range is taken over the
  whole batch), and the batch takes four times as long.
- A gain of 0.1 to 3 leaves frames alike (correlation 0.998 and more), 0.01 or 10 still 0.99: no normalisation.
- Attention costs grow with the square of the length, so recordings beyond ``WHOLE_SECONDS`` run in overlapping
  windows; windows start on a frame, so the number of frames is the same either way.
- Frames depend on their position in the recording: the same sound 26 s later gives vectors with a cosine of 0.3 to
  those from the start. Train a model on the lengths that it will decode; every window counts from zero.
"""

import hashlib
import importlib.util
import os
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from imputer import configs
from imputer.audio.windows import in_windows
from imputer.errors import ImputerError, UsageError
from imputer.frontends.frames import Frames, sound_of

INSTALL = "pip install 'imputer-asr[english]'"
HOP = 64 * 3 * 2  # samples from one frame to the next
SHORTEST = 127 + 64 * (6 + 3 * 2)  # samples under the first frame; shorter recordings are padded with zeros
WHOLE_SECONDS = 36.0  # recordings up to here run in one piece
WINDOW_FRAMES, OVERLAP_FRAMES = 1200, 125  # 28.8 s, and 3 s of it on either side are only context


def moonshine(settings: configs.FrontEnd, width: int) -> Frames:
    """The front end ``moonshine``: the frozen encoder, then a learnt projection of stacked frames."""
    return Frames(settings, width, encoder=MoonshineEncoder())


def asset() -> Path:
    """The encoder's file inside moonshine-voice, found without importing that package and its native parts."""
    spec = importlib.util.find_spec("moonshine_voice")
    if spec is None or not spec.origin:
        raise UsageError(f"the front end 'moonshine' needs the package moonshine-voice: {INSTALL}")
    path = Path(spec.origin).parent / "assets" / "tiny-en" / "encoder_model.ort"
    if not path.is_file():
        raise UsageError(f"the installed moonshine-voice has no {path}: {INSTALL}")
    return path


@cache
def _key(path: Path) -> str:
    return "moonshine-tiny-en-" + hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def frames_of(samples: int) -> int:
    """How many frames ``samples`` samples give."""
    windows = (max(samples, SHORTEST) - 127) // 64 + 1
    return ((windows - 7) // 3 + 1 - 3) // 2 + 1


class MoonshineEncoder:
    """Sound to frames by onnxruntime; the session is made on first use in each process."""

    sample_rate = 16_000
    feature_size = 288
    frame_seconds = HOP / sample_rate

    def __init__(self) -> None:
        self.path = asset()
        self.key = _key(self.path)  # identifies these weights
        if importlib.util.find_spec("onnxruntime") is None:
            raise UsageError(f"the front end 'moonshine' needs the package onnxruntime: {INSTALL}")

    def feature_frames(self, seconds: float) -> int:
        """How many frames ``seconds`` of sound give."""
        return frames_of(round(seconds * self.sample_rate))

    def extract(self, waveform: Tensor) -> Tensor:
        """(samples,) at 16 kHz -> (frame, 288); less than 56 ms is padded with zeros to one frame."""
        samples = sound_of(waveform, SHORTEST)
        if len(samples) <= WHOLE_SECONDS * self.sample_rate:
            return torch.from_numpy(self._run(samples))
        shape = {"hop": HOP, "span": SHORTEST, "window": WINDOW_FRAMES, "overlap": OVERLAP_FRAMES}
        return torch.from_numpy(in_windows(self._run, samples, frames_of(len(samples)), **shape))

    def _run(self, samples: np.ndarray) -> np.ndarray:
        inputs = {"input_values": samples[None], "attention_mask": np.ones((1, len(samples)), np.int64)}
        return _session(self.path, os.getpid()).run(None, inputs)[0][0]  # (frame, 288)


@lru_cache(maxsize=1)
def _session(path: Path, process: int) -> Any:
    """The session of a process: one that a parent process made is not used after a fork."""
    return open_session(path, 1)


def open_session(path: Path, threads: int, save_as: Path | None = None) -> Any:
    """An onnxruntime session; ``save_as`` writes its graph as ONNX, without optimisations."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 4  # errors come as exceptions
    if save_as is not None:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.optimized_model_filepath = str(save_as)
        options.add_session_config_entry("session.save_model_format", "ONNX")
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's exceptions share no base class of its own
        raise ImputerError(f"cannot load {path}: {error}; {INSTALL}") from error
