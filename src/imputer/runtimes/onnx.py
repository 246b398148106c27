"""A model as ONNX: ``encode``, which runs once per utterance, and ``impute``, which runs once per pass.

Both take any batch and any number of frames. int8 means weights in 8 bits and activations quantised as they come
(dynamic quantisation) in the matrix products with weights; convolutions, attention and softmax stay in float32.
The frozen half of the front end, from sound to features, is not exported.
"""

import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from imputer import configs, frontends, models
from imputer.errors import ImputerError, UsageError
from imputer.model import Imputer
from imputer.support import atomic_files
from imputer.vocabulary import Vocabulary

INSTALL = "pip install 'imputer-asr[export]'"
PARTS = {
    "encode": (("features", "lengths"), ("acoustic", "frame_lengths")),
    "impute": (("acoustic", "frame_lengths", "partial"), ("log_probs",)),
}
TOLERANCE = 1e-3  # in log probability, between torch and ONNX in float32


def export(source: Path | str, target: Path | str, *, int8: bool = True) -> dict[str, float]:
    """Write a model folder's ONNX folder; the largest difference from torch on random input, by part."""
    _require("onnx", "onnxscript", "onnxruntime")
    source, target = Path(source), Path(target)
    network, _vocabulary = models.load(source)
    for name in (models.CONFIG, models.TOKENIZER):
        with atomic_files.replacing(target / name) as path:
            shutil.copyfile(source / name, path)
    differences = {}
    for part in PARTS:
        plain = target / f"{part}.onnx"
        with atomic_files.replacing(plain) as path:
            _export_part(network, part, path)
        differences[part] = _difference(network, part, plain)
        if not differences[part] < TOLERANCE:
            raise ImputerError(
                f"{plain} differs from torch by {differences[part]:.2g}: please report this model"
            )
        if int8:
            with atomic_files.replacing(target / f"{part}.int8.onnx") as path:
                _quantise(plain, path)
    return differences


def load(folder: Path | str, *, int8: bool = False) -> tuple["OnnxImputer", Vocabulary]:
    """Read a folder that ``export`` wrote."""
    folder = Path(folder)
    suffix = ".int8.onnx" if int8 else ".onnx"
    for name in (*(f"{part}{suffix}" for part in PARTS), models.CONFIG, models.TOKENIZER):
        if not (folder / name).is_file():
            raise UsageError(f"{folder} has no {name}; {_way_to_export(folder, name)}")
    settings, front_end = models.read_settings(folder)
    vocabulary = models.read_vocabulary(folder)
    sessions = {part: _session(folder / f"{part}{suffix}") for part in PARTS}
    return OnnxImputer(settings, front_end, vocabulary.size, sessions), vocabulary


def _way_to_export(folder: Path, missing: str) -> str:
    """How to make a missing file: only a model folder can be exported, not an export."""
    if (folder / models.WEIGHTS).is_file():
        return f"make a folder for this runtime with: imputer export {folder} OUTPUT"
    without = ", without --no-int8" if ".int8." in missing else ""
    return f"write it again from its model{without}: imputer export MODEL {folder}"


class OnnxImputer:
    """The interface of ``model.Imputer`` over onnxruntime, for decoding on a CPU."""

    blank = 0

    def __init__(
        self,
        settings: configs.Model,
        front_end: configs.FrontEnd,
        vocabulary_size: int,
        sessions: dict[str, Any],
    ) -> None:
        self.settings, self.vocabulary_size, self.mask = settings, vocabulary_size, vocabulary_size + 1
        self.merge_repeats = settings.merge_repeats
        # For ``extract``; its weights are in encode.
        self.front_end = frontends.build(front_end, settings.width)
        self.sessions = sessions

    def encode(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Acoustic frames, once per utterance."""
        acoustic, frame_lengths = self._run("encode", features, lengths)
        return acoustic, frame_lengths

    def impute(self, acoustic: Tensor, frame_lengths: Tensor, partial: Tensor) -> Tensor:
        """log p(a_i | a~, x), once per pass."""
        return self._run("impute", acoustic, frame_lengths, partial)[0]

    def _run(self, part: str, *inputs: Tensor) -> list[Tensor]:
        return [torch.from_numpy(out) for out in run(self.sessions[part], part, inputs)]


def run(session: Any, part: str, inputs: Sequence[Tensor]) -> list[np.ndarray]:
    """Run a part on tensors in the order of its inputs."""
    names = PARTS[part][0]
    return session.run(
        None, {name: np.ascontiguousarray(t.numpy()) for name, t in zip(names, inputs, strict=True)}
    )


class _Part(nn.Module):
    """One method of a model as a module of its own, which is what the exporter takes."""

    def __init__(self, network: Imputer, part: str) -> None:
        super().__init__()
        self.network, self.part = network, part

    def forward(self, *inputs: Tensor) -> Any:
        return getattr(self.network, self.part)(*inputs)


def _export_part(network: Imputer, part: str, path: Path) -> None:
    inputs = _example(network, part, [61, 50])
    names_in, names_out = PARTS[part]
    free = torch.export.Dim.DYNAMIC
    shapes = tuple({0: free, 1: free} if tensor.ndim > 1 else {0: free} for tensor in inputs)
    with _quiet():
        program = torch.onnx.export(
            _Part(network, part).eval(),
            inputs,
            dynamo=True,
            dynamic_shapes=(shapes,),
            input_names=list(names_in),
            output_names=list(names_out),
            custom_translation_table={torch.ops.aten.scaled_dot_product_attention.default: _attention},
            verbose=False,
        )
        assert program is not None
        program.save(str(path), external_data=False)


def _attention(query: Any, key: Any, value: Any, visible: Any, *_rest: Any, **_options: Any) -> Any:
    """Masked attention in plain ONNX: the exporter's own form also checks for NaN, which costs a sixth of a pass.

    Only a mask that hides every key needs that check; padding never hides the frames of its own item.
    """
    from onnxscript import opset20 as onnx

    scale = onnx.Constant(value_float=query.shape[-1] ** -0.5)
    scores = onnx.MatMul(onnx.Mul(query, scale), onnx.Transpose(key, perm=[0, 1, 3, 2]))
    nothing: Any = onnx.Constant(value_float=0.0)
    hidden: Any = onnx.Constant(value_float=-1e9)
    scores = onnx.Add(scores, onnx.Where(visible, nothing, hidden))
    return onnx.MatMul(onnx.Softmax(scores, axis=-1), value)


def _example(network: Imputer, part: str, lengths: list[int]) -> tuple[Tensor, ...]:
    """Random inputs of a part, padded to the longest."""
    generator = torch.Generator().manual_seed(0)
    if part == "encode":
        shortest = network.front_end.feature_frames(0.0)
        lengths = [max(length, shortest) for length in lengths]
    shape, counts = (len(lengths), max(lengths)), torch.tensor(lengths)
    if part == "encode":
        return torch.randn(*shape, network.front_end.feature_size, generator=generator), counts
    partial = torch.randint(0, network.mask + 1, shape, generator=generator)
    return torch.randn(*shape, network.settings.width, generator=generator), counts, partial


@torch.no_grad()
def _difference(network: Imputer, part: str, path: Path) -> float:
    """The largest difference from torch within the items' lengths, over shapes other than the exported one."""
    session, worst = _session(path), 0.0
    for lengths in ([1], [37], [90, 3, 44]):
        inputs = _example(network, part, lengths)
        expected = getattr(network, part)(*inputs)
        theirs = [torch.from_numpy(out) for out in run(session, part, inputs)]
        ours = list(expected) if isinstance(expected, tuple) else [expected]
        counts = ours[1] if len(ours) > 1 else inputs[1]
        if len(ours) > 1 and not torch.equal(ours[1], theirs[1]):
            return float("inf")
        inside = torch.arange(ours[0].shape[1]) < counts[:, None]
        worst = max(worst, float((ours[0] - theirs[0]).abs()[inside].max()))
    return worst


def _quantise(plain: Path, path: Path) -> None:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with _quiet():
        quantize_dynamic(
            str(plain),
            str(path),
            weight_type=QuantType.QInt8,
            op_types_to_quantize=["MatMul", "Gemm"],
            per_channel=True,
        )


def _session(path: Path) -> Any:
    onnxruntime = _require("onnxruntime")[0]
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.inter_op_num_threads = 1
    options.log_severity_level = 4  # errors come as exceptions
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's exceptions share no base class of its own
        raise UsageError(
            f"{path} is damaged or not an ONNX file; write it again with imputer export"
        ) from error


def _require(*packages: str) -> list[ModuleType]:
    from importlib import import_module

    try:
        return [import_module(package) for package in packages]
    except ImportError as error:
        raise UsageError(f"ONNX needs the package {error.name}: {INSTALL}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the exporters' own messages."""
    import logging

    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
