"""Any speech encoder of transformers: Whisper's, or wav2vec 2.0, HuBERT, WavLM and others that take raw sound.

# DEPARTURE pretrained-front-end: the paper's network starts from filter banks; see PAPER.md.

``front_end.source`` is a folder as ``save_pretrained`` writes it, or a name on the hub, which is fetched once into
the hub's own cache. Recordings run one at a time, so that padding never changes a frame, and long ones in
overlapping windows. Frames are the encoder's last hidden states.
"""

import hashlib
import importlib.util
import math
import os
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from imputer import configs
from imputer.audio.windows import in_windows
from imputer.errors import ImputerError, UsageError
from imputer.frontends.frames import Frames, sound_of

INSTALL = "pip install 'imputer-asr[huggingface]'"
WINDOW_SECONDS, OVERLAP_SECONDS = 30.0, 3.0
WEIGHTS = ("*.safetensors", "pytorch_model*.bin")


def huggingface(settings: configs.FrontEnd, width: int) -> Frames:
    """The front end ``huggingface``: the frozen encoder, then a learnt projection of stacked frames."""
    return Frames(settings, width, encoder=HuggingFaceEncoder(settings.source))


class HuggingFaceEncoder:
    """Sound to frames by transformers; the weights are loaded on first use in each process."""

    def __init__(self, source: str) -> None:
        if importlib.util.find_spec("transformers") is None:
            raise UsageError(f"the front end 'huggingface' needs the package transformers: {INSTALL}")
        self.folder = find_folder(source)
        self.settings = _settings(self.folder)
        kernels = getattr(self.settings, "conv_kernel", None)
        if self.settings.model_type == "whisper":
            # Two convolutions over a spectrogram every 10 ms, the second of stride 2; always 30 s of it.
            self.feature_size, self.hop, self.span = self.settings.d_model, 320, 320
            self.frames_of: Callable[[int], int] = _whisper_frame_count
        elif kernels:
            strides = list(self.settings.conv_stride)
            self.feature_size, self.hop = self.settings.hidden_size, math.prod(strides)
            self.span = 1
            for kernel, stride in zip(reversed(kernels), reversed(strides), strict=True):
                self.span = (self.span - 1) * stride + kernel
            self.frames_of = _ConvolutionFrameCount(tuple(zip(kernels, strides, strict=True)), self.span)
        else:
            raise UsageError(
                f"front_end.source = {source!r} is a {self.settings.model_type} model; the front end 'huggingface' "
                "takes Whisper, and encoders of raw sound such as wav2vec2, hubert and wavlm"
            )
        self._extractor = _extractor(self.folder, self.settings)
        self.sample_rate = int(self._extractor.sampling_rate)
        self.frame_seconds = self.hop / self.sample_rate
        self.key = f"{self.settings.model_type}-{_digest(self.folder)}"

    def feature_frames(self, seconds: float) -> int:
        """How many frames ``seconds`` of sound give."""
        return self.frames_of(round(seconds * self.sample_rate))

    def extract(self, waveform: Tensor) -> Tensor:
        """(samples,) -> (frame, feature); less than one frame is padded with zeros."""
        samples = sound_of(waveform, self.span)
        frames = self.frames_of(len(samples))
        window, overlap = (round(s / self.frame_seconds) for s in (WINDOW_SECONDS, OVERLAP_SECONDS))
        shape = {"hop": self.hop, "span": self.span, "window": window, "overlap": overlap}
        return torch.from_numpy(in_windows(self._run, samples, frames, **shape))

    @torch.inference_mode()
    def _run(self, samples: np.ndarray) -> np.ndarray:
        inputs = self._extractor(samples, sampling_rate=self.sample_rate, return_tensors="pt")
        name = self._extractor.model_input_names[0]  # input_features of a spectrogram, or input_values
        model = _load(self.folder, self.key, os.getpid())
        states = model(**{name: inputs[name]}).last_hidden_state[0]  # (frame, feature)
        return states[: self.frames_of(len(samples))].float().numpy()


def _whisper_frame_count(samples: int) -> int:
    return max(1, -(-samples // 320))


class _ConvolutionFrameCount:
    """The number of frames that a stack of (kernel, stride) convolutions makes of samples."""

    def __init__(self, layers: tuple[tuple[int, int], ...], shortest: int) -> None:
        self.layers, self.shortest = layers, shortest

    def __call__(self, samples: int) -> int:
        frames = max(samples, self.shortest)
        for kernel, stride in self.layers:
            frames = (frames - kernel) // stride + 1
        return frames


def find_folder(source: str) -> Path:
    """The folder that ``source`` names, fetched from the hub if it is not a local folder."""
    if not source:
        raise UsageError("the front end 'huggingface' needs front_end.source: a folder, or a name on the hub")
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder.resolve()
    if source.startswith((".", "/", "~")) or source.count("/") > 1:
        raise UsageError(f"front_end.source: no such folder: {source}")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(source, allow_patterns=["*.json", *WEIGHTS]))
    except Exception as error:  # the hub raises a dozen kinds, network errors among them
        reason = str(error).strip().splitlines()[0]
        raise UsageError(
            f"front_end.source: {source} is not a local folder, and the hub does not have it ({reason}); "
            "name a folder with config.json and weights"
        ) from error


def _settings(folder: Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UsageError(f"front_end.source: {folder} is not a model of transformers ({reason})") from error


def _extractor(folder: Path, settings: Any) -> Any:
    """The feature extractor of the model; the defaults of its type if the folder has none."""
    from transformers import AutoFeatureExtractor, Wav2Vec2FeatureExtractor, WhisperFeatureExtractor

    if (folder / "preprocessor_config.json").is_file():
        return AutoFeatureExtractor.from_pretrained(folder)
    if settings.model_type == "whisper":
        return WhisperFeatureExtractor(feature_size=settings.num_mel_bins)
    return Wav2Vec2FeatureExtractor()


@lru_cache(maxsize=1)
def _load(folder: Path, key: str, process: int) -> Any:
    """The encoder with the weights of this key; that of a parent process is not used after a fork."""
    from transformers import AutoModel

    try:
        model = AutoModel.from_pretrained(folder, dtype=torch.float32)
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ImputerError(f"front_end.source: cannot load the weights in {folder} ({reason})") from error
    encoder = model.get_encoder() if model.config.is_encoder_decoder else model
    return encoder.eval().requires_grad_(False)


def _digest(folder: Path) -> str:
    """A short hash of everything that determines the frames."""
    weights = sorted(path for pattern in WEIGHTS for path in folder.glob(pattern))
    if not weights:
        raise UsageError(f"front_end.source: {folder} has no weights ({' or '.join(WEIGHTS)})")
    total = hashlib.sha256()
    for path in (folder / "config.json", folder / "preprocessor_config.json", *weights):
        if path.is_file():
            with open(path, "rb") as file:
                total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()[:12]
