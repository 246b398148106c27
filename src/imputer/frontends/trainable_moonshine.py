"""The encoder of Moonshine (tiny) as a torch network whose weights are part of the model, and are trained with it.

# DEPARTURE pretrained-front-end: the paper's network starts from filter banks; see PAPER.md.

The same network as in ``moonshine``, where it is frozen and runs in onnxruntime: three convolutions over raw sound, of
which the first is normalised over the whole recording, then six layers of self-attention with rotary positions. A
training starts from the int8 weights inside the PyPI package moonshine-voice, multiplied out; afterwards neither that
package nor onnxruntime is needed. What was measured:

- Frames from the multiplied-out weights and those of onnxruntime correlate 0.9996 on LibriSpeech.
- Padding is left out of the normalisation and of attention, so recordings in a batch have the frames they have alone.
- With training.pretrained_rate = 0 the encoder stays as it is. Its frames are then computed once and cached, and an
  hour of audio costs about 20 s of one core instead of 40.
"""

import hashlib
import importlib.util
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from imputer import configs
from imputer.data.batching import Extract, FilterbankExtract
from imputer.data.frames_cache import CachedExtract, FramesCache, frames_folder
from imputer.data.manifest import Utterance
from imputer.errors import ImputerError, UsageError
from imputer.frontends.attention import attention, hidden_padding, rotary_angles, rotate
from imputer.frontends.moonshine import HOP, asset, frames_of, open_session
from imputer.frontends.normalisation import Normalisation, real_frames

WIDTH, LAYERS, HEADS, FILTER_SIZE, ROTATED = 288, 6, 8, 1152, 32  # of 36 numbers per head, 32 are rotated
EXTRA_ROWS = 2  # rows of HOP samples that the convolutions need beyond one for each frame


class TrainableMoonshine(nn.Module):
    """Raw sound, cut into rows of 384 samples -> the encoder -> stacked frames -> the model's width."""

    sample_rate = 16_000
    feature_size = HOP
    frozen: "FrozenEncoder | None" = None

    def __init__(self, settings: configs.FrontEnd, width: int) -> None:
        super().__init__()
        self.stack = settings.stack
        self.frame_seconds = round(HOP / self.sample_rate * self.stack, 9)
        self.encoder = Encoder()
        self.normalisation = Normalisation(WIDTH)
        self.project = nn.Linear(WIDTH * self.stack, width)

    def start_pretrained(self) -> None:
        """Take the encoder's weights out of moonshine-voice."""
        self.encoder.load_state_dict(pretrained_weights())

    def freeze(self, *, bf16: bool = False) -> None:
        """For training only: ``reader`` gives cached frames of the encoder as it is now, and ``forward`` takes them."""
        self.encoder.requires_grad_(False)
        self.frozen = FrozenEncoder(self.encoder, bf16=bf16)

    @property
    def augments_sound(self) -> bool:
        """Frames that were computed before training cannot be altered as sound."""
        return self.frozen is None

    def extract(self, waveform: Tensor) -> Tensor:
        """(samples,) at 16 kHz -> (row, 384)."""
        return rows_of_sound(waveform, self.sample_rate)

    def feature_frames(self, seconds: float) -> int:
        """How many rows ``seconds`` of sound fill, or how many frames there are of them."""
        if self.frozen:
            return self.frozen.feature_frames(seconds)
        return frames_of(round(seconds * self.sample_rate)) + EXTRA_ROWS

    def reader(
        self, data: configs.Data, augmentation: configs.Augmentation, utterances: Sequence[Utterance]
    ) -> Extract:
        """The sound of an utterance, altered and with stripes of silence as ``augmentation`` says.

        Stripes over frequency are for filter banks. Of a frozen encoder, its cached frames with stripes over time.
        """
        stripes = replace(augmentation, frequency_masks=0)
        if self.frozen:
            cache = FramesCache(frames_folder(data.frames_cache, self.frozen.key), self.frozen)
            cache.fill(utterances)
            return CachedExtract(cache.folder, cache.key, stripes)
        return FilterbankExtract(self.sample_rate, stripes, rows_of_sound)

    def forward(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """(batch, row, 384), or (batch, frame, 288) of a frozen encoder -> (batch, frame / stack, width)."""
        frames = features
        if not self.frozen:
            frames, lengths = self.encoder(features.flatten(1), lengths - EXTRA_ROWS)
        x = self.normalisation(frames, lengths)
        x = functional.pad(x, (0, 0, 0, -x.shape[1] % self.stack))
        x = x.unflatten(1, (-1, self.stack)).flatten(2)  # (batch, frame / stack, 288 * stack)
        return self.project(x), -(-lengths // self.stack)


def rows_of_sound(waveform: Tensor, sample_rate: int) -> Tensor:
    """(samples,) at 16 kHz -> (row, 384): the sound itself, filled up with zeros."""
    if waveform.ndim != 1 or not len(waveform):
        raise ImputerError(f"the encoder takes (samples,) of sound, not {tuple(waveform.shape)}")
    rows = frames_of(len(waveform)) + EXTRA_ROWS
    samples = waveform.detach().float()[: rows * HOP]
    return functional.pad(samples, (0, rows * HOP - len(samples))).view(rows, HOP)


class FrozenEncoder:
    """An encoder that does not change, as the frames cache takes it: sound to frames, one recording at a time."""

    sample_rate = TrainableMoonshine.sample_rate
    feature_size = WIDTH
    frame_seconds = HOP / sample_rate

    def __init__(self, encoder: "Encoder", *, bf16: bool) -> None:
        self.encoder, self.bf16 = encoder, bf16
        digest = hashlib.sha256()
        for name, weight in sorted(encoder.state_dict().items()):
            digest.update(name.encode() + weight.detach().cpu().float().numpy().tobytes())
        self.key = f"trainable-moonshine-{digest.hexdigest()[:12]}{'-bf16' if bf16 else ''}"

    def feature_frames(self, seconds: float) -> int:
        """How many frames ``seconds`` of sound give."""
        return frames_of(round(seconds * self.sample_rate))

    @torch.no_grad()
    def extract(self, waveform: Tensor) -> Tensor:
        """(samples,) at 16 kHz -> (frame, 288)."""
        rows = rows_of_sound(waveform, self.sample_rate)
        device = self.encoder.norm_scale.device
        with torch.autocast(device.type, torch.bfloat16, enabled=self.bf16):
            count = torch.tensor([len(rows) - EXTRA_ROWS], device=device)
            frames, _ = self.encoder(rows.flatten()[None].to(device), count)
        return frames[0].float().cpu()


class Encoder(nn.Module):
    """Sound to 288 numbers every 384 samples."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(1, WIDTH, kernel_size=127, stride=64, bias=False)
        self.norm_scale = nn.Parameter(torch.ones(WIDTH))
        self.norm_shift = nn.Parameter(torch.zeros(WIDTH))
        self.conv2 = nn.Conv1d(WIDTH, 2 * WIDTH, kernel_size=7, stride=3)
        self.conv3 = nn.Conv1d(2 * WIDTH, WIDTH, kernel_size=3, stride=2)
        self.layers = nn.ModuleList(EncoderLayer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH, bias=False)

    def forward(self, samples: Tensor, frame_lengths: Tensor) -> tuple[Tensor, Tensor]:
        """(batch, sample), frames of each -> (batch, frame, 288)."""
        x = torch.tanh(self.conv1(samples[:, None]))  # (batch, 288, step)
        # The windows of the first convolution that lie under real frames: 7 every 3, of those 3 every 2.
        x = self.normalised(x, 6 * frame_lengths + 7)
        x = functional.gelu(self.conv2(x))
        x = functional.gelu(self.conv3(x)).transpose(1, 2)  # (batch, frame, 288)
        rotation = rotary_angles(x.shape[1], ROTATED, x.device, x.dtype)
        hidden = hidden_padding(x.shape[1], frame_lengths, x.dtype)
        for layer in self.layers:
            x = layer(x, rotation, hidden)
        return self.norm(x), frame_lengths

    def normalised(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Mean 0 and variance 1 over all channels and steps of a recording, padding left out; (batch, 288, step)."""
        real = real_frames(x.shape[2], lengths)[:, None, :]
        count = lengths.view(-1, 1, 1) * WIDTH
        masked = x * real
        mean = masked.sum((1, 2), keepdim=True, dtype=torch.float32) / count
        # tanh keeps x within [-1, 1] and its mean near 0: nothing cancels here.
        square = (
            torch.linalg.vector_norm(masked, dim=(1, 2), keepdim=True, dtype=torch.float32).square() / count
        )
        scale = torch.rsqrt(square - mean.square() + 1e-5) * self.norm_scale[:, None]  # (batch, 288, 1)
        shift = self.norm_shift[:, None] - mean * scale
        return torch.addcmul(shift.to(x.dtype), x, scale.to(x.dtype))


class EncoderLayer(nn.Module):
    """Self-attention without biases and a feed-forward part, each normalised before and added after."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH, bias=False)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.attention_output = nn.Linear(WIDTH, WIDTH, bias=False)
        self.filter_norm = nn.LayerNorm(WIDTH, bias=False)
        self.filter_in = nn.Linear(WIDTH, FILTER_SIZE)
        self.filter_out = nn.Linear(FILTER_SIZE, WIDTH)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], hidden: Tensor | None) -> Tensor:
        """(batch, frame, 288) -> the same."""
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, HEADS, -1)).transpose(1, 3)
        query, key, value = qkv.unbind(2)  # (batch, head, frame, 36)
        query, key = _rotate_part(query, rotation), _rotate_part(key, rotation)
        mixed = attention(query, key, value, hidden)
        x = x + self.attention_output(mixed.transpose(1, 2).flatten(2))
        return x + self.filter_out(functional.gelu(self.filter_in(self.filter_norm(x))))


def _rotate_part(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    return torch.cat((rotate(x[..., :ROTATED], rotation), x[..., ROTATED:]), dim=-1)


def pretrained_weights() -> dict[str, Tensor]:
    """The encoder's weights out of the file in moonshine-voice: int8, multiplied out to float32."""
    if importlib.util.find_spec("onnx") is None:
        raise UsageError(
            "reading the weights of moonshine-voice needs the package onnx: pip install 'imputer-asr[english,export]'"
        )
    import onnx
    from onnx import numpy_helper

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "encoder.onnx"
        open_session(asset(), 1, save_as=path)
        graph = onnx.load(path).graph
    stored = {one.name: torch.from_numpy(numpy_helper.to_array(one).copy()) for one in graph.initializer}

    def product(layer: int, name: str) -> Tensor:
        """The weight of a linear map, (output, input)."""
        node = next(n for n in graph.node if n.name == f"/layers.{layer}/{name}/MatMul_quant")
        quantised = next(name for name in node.input if name.endswith("_quantized") and name in stored)
        stem = quantised.removesuffix("_quantized")
        shifted = stored[quantised].float() - stored[f"{stem}_zero_point"].float()
        return (shifted * stored[f"{stem}_scale"].float()).T.contiguous()

    weights = {
        "conv1.weight": stored["conv1.weight_add_tensor"],
        "conv2.weight": stored["conv2.weight_add_tensor"],
        "conv2.bias": stored["conv2.bias"],
        "conv3.weight": stored["conv3.weight_add_tensor"],
        "conv3.bias": stored["conv3.bias"],
        "norm.weight": stored["layer_norm.weight"],
    }
    scale, shift = (
        next(n for n in graph.node if n.name == f"/groupnorm/{kind}").input for kind in ("Mul", "Add")
    )
    weights["norm_scale"] = next(stored[name] for name in scale if name in stored).flatten()
    weights["norm_shift"] = next(stored[name] for name in shift if name in stored).flatten()
    for i in range(LAYERS):
        query, key = (_halves(product(i, f"self_attn/{name}_proj")) for name in "qk")
        weights |= {
            f"layers.{i}.attention_norm.weight": stored[f"layers.{i}.input_layernorm.weight"],
            f"layers.{i}.qkv.weight": torch.cat((query, key, product(i, "self_attn/v_proj"))),
            f"layers.{i}.attention_output.weight": product(i, "self_attn/o_proj"),
            f"layers.{i}.filter_norm.weight": stored[f"layers.{i}.post_attention_layernorm.weight"],
            f"layers.{i}.filter_in.weight": product(i, "mlp/fc1"),
            f"layers.{i}.filter_in.bias": stored[f"layers.{i}.mlp.fc1.bias"],
            f"layers.{i}.filter_out.weight": product(i, "mlp/fc2"),
            f"layers.{i}.filter_out.bias": stored[f"layers.{i}.mlp.fc2.bias"],
        }
    return weights


def _halves(weight: Tensor) -> Tensor:
    """Moonshine rotates the pairs (2i, 2i + 1) of a head, ``rotate`` the pairs (i, i + 16): reorder the outputs."""
    heads = weight.unflatten(0, (HEADS, -1))  # (head, 36, 288)
    parts = (heads[:, 0:ROTATED:2], heads[:, 1:ROTATED:2], heads[:, ROTATED:])
    return torch.cat(parts, dim=1).flatten(0, 1)
