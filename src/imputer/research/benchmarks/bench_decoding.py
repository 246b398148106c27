"""What decoding costs: passes, block sizes, batches, runtimes. Ratios of processor time in one run, one thread."""

import tempfile
from collections.abc import Callable
from functools import partial as partially
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from imputer import configs, decoding, languagemodel, model, models
from imputer.languagemodel import fusion
from imputer.recognizer import Recognizer
from imputer.research.measuring import least, one_thread, show
from imputer.runtimes import onnx
from imputer.vocabulary import Vocabulary

EIGHT_PASSES_TARGET = 8.3  # single passes of the attention stack
BATCH_TARGET = 1.5  # times the audio per second of batch 1
INT8_TARGET = 1.5  # times the speed of torch eager at batch 1
BEAM_TARGET = 0.01  # seconds of search per second of audio
SHORT_SECONDS = (0.8, 2.2)


def run(quick: bool = False) -> dict[str, Any]:
    """Print and return the figures; competitors interleaved, minimum of several."""
    with one_thread():
        network, vocabulary = _network(quick)
        figures: dict[str, Any] = {
            "parameters": model.parameters(network),
            **_passes(network, rounds=3 if quick else 20),
            **_strategies(network, rounds=3 if quick else 10),
            **_beam(network, vocabulary, rounds=2 if quick else 5),
            **_autoregressive(network, (2.0, 5.0) if quick else (5.0, 15.0, 30.0)),
            **_batching(network, vocabulary, rounds=2 if quick else 10),
            **_runtimes(network, vocabulary, rounds=3 if quick else 12),
        }
    title = f"decoding, one thread, {figures['parameters'] / 1e6:.1f}M parameters"
    show(title, ("figure", "value", "target"), [(name, *cells) for name, cells in _rows(figures).items()])
    return figures


def _rows(figures: dict[str, Any]) -> dict[str, tuple[str, str]]:
    rows = {
        f"8 passes of {seconds:g} s, in single passes of the attention stack": (
            f"{ratio:.2f}",
            f"<= {EIGHT_PASSES_TARGET}",
        )
        for seconds, ratio in figures["eight_passes"].items()
    }
    rows["acoustic part, share of 8 passes with it"] = (f"{100 * figures['acoustic_share']:.0f} %", "")
    for strategy, share in figures["choosing"].items():
        rows[f"choosing frames, {strategy}, share of a pass"] = (f"{100 * share:.1f} %", "")
    rows["beam search with a language model, seconds per second of audio"] = (
        f"{figures['beam']:.4f}",
        f"<= {BEAM_TARGET}",
    )
    rows["beam search with a language model, share of 8 passes"] = (
        f"{100 * figures['beam_share']:.1f} %",
        "",
    )
    for seconds, ratio in figures["autoregressive"].items():
        rows[f"one frame per pass against 8 passes, {seconds:g} s"] = (f"{ratio:.0f}x", "grows with length")
    shortest, longest = SHORT_SECONDS
    rows[f"batches against batch 1, files of {shortest:g} to {longest:g} s, audio per second"] = (
        f"{figures['batching']:.2f}x",
        f">= {BATCH_TARGET}x",
    )
    rows["onnx float32 against torch, batch 1"] = (f"{figures['onnx']:.2f}x", "")
    rows["onnx int8 against torch, batch 1"] = (f"{figures['onnx-int8']:.2f}x", f">= {INT8_TARGET}x")
    return rows


def _network(quick: bool) -> tuple[model.Imputer, Vocabulary]:
    """Untrained, of the size of a model for a laptop: the cost does not depend on the weights."""
    torch.manual_seed(0)
    letters = "abcdefghijklmnopqrstuvwxyz'"
    random = np.random.default_rng(0)
    texts = ["".join(random.choice(list(letters + "    "), 60)) for _ in range(400)] + [letters]
    vocabulary = Vocabulary.train(texts, size=100 if quick else 400)
    shape = configs.Model(
        width=64 if quick else 256, layers=2 if quick else 6, heads=4, filter_size=256 if quick else 1024
    )
    front_end = configs.FrontEnd(channels=4 if quick else 32)
    return model.Imputer(shape, front_end, vocabulary.size).eval(), vocabulary


def _features(network: model.Imputer, seconds: float) -> tuple[Tensor, Tensor]:
    frames = network.front_end.feature_frames(seconds)
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(1, frames, network.front_end.feature_size, generator=generator)
    return features, torch.tensor([frames])


def _decode(network: Any, acoustic: Tensor, frame_lengths: Tensor, **options: Any) -> decoding.Imputation:
    given = {"strategy": "block", "block_size": 8, "mask": network.mask} | options
    return decoding.impute(
        lambda partial: network.impute(acoustic, frame_lengths, partial), frame_lengths, **given
    )


@torch.inference_mode()
def _passes(network: model.Imputer, rounds: int) -> dict[str, Any]:
    """Eight passes with everything around them, in units of one evaluation of the attention stack."""
    ratios, share = {}, 0.0
    for seconds in (5.0, 15.0):
        features, lengths = _features(network, seconds)
        acoustic, frame_lengths = network.encode(features, lengths)
        partial = network.all_masked(acoustic)
        single, eight, encoding = least(
            [
                # Eight times, for the same duration as the other.
                partially(_repeat, 8, network.impute, acoustic, frame_lengths, partial),
                partially(_decode, network, acoustic, frame_lengths),
                partially(network.encode, features, lengths),
            ],
            rounds,
        )
        ratios[seconds], share = 8 * eight / single, encoding / (encoding + eight)
    return {"eight_passes": ratios, "acoustic_share": share}


@torch.inference_mode()
def _strategies(network: model.Imputer, rounds: int) -> dict[str, Any]:
    """The cost of a strategy itself: decoding with a step that takes no time, relative to a pass of the network."""
    acoustic, frame_lengths = network.encode(*_features(network, 15.0))
    partial = network.all_masked(acoustic)
    log_probs = network.impute(acoustic, frame_lengths, partial)
    names = list(decoding.STRATEGIES)
    passes: dict[str, int] = {}

    def only_choosing(name: str) -> None:
        result = decoding.impute(
            lambda _: log_probs, frame_lengths, block_size=8, strategy=name, mask=network.mask
        )
        passes[name] = result.passes

    single, *times = least(
        [
            lambda: network.impute(acoustic, frame_lengths, partial),
            *(partially(only_choosing, name) for name in names),
        ],
        rounds,
    )
    return {"choosing": {n: t / passes[n] / single for n, t in zip(names, times, strict=True)}}


@torch.inference_mode()
def _beam(network: model.Imputer, vocabulary: Vocabulary, rounds: int) -> dict[str, float]:
    """The search without its pass of the network, over frames as confident as those of a trained model."""
    seconds = 15.0
    acoustic, frame_lengths = network.encode(*_features(network, seconds))
    random = np.random.default_rng(0)
    lm = languagemodel.build(["".join(random.choice(list("abcde "), 80)) for _ in range(500)], vocabulary)
    scores = torch.randn(*acoustic.shape[:2], network.mask, generator=torch.Generator().manual_seed(0))
    scores[:, :, network.blank] += 7.0  # then about two thirds of the frames are surer than the threshold
    scores[:, ::5, 1] += 14.0
    scores[:, ::3] *= 0.6
    log_probs = scores.log_softmax(-1)
    settings = configs.LanguageModel()

    def given(_: Tensor) -> Tensor:
        return log_probs

    imputed = decoding.impute(given, frame_lengths, block_size=8, mask=network.mask)
    search, eight = least(
        [
            lambda: fusion.fuse(given, imputed, frame_lengths, lm, settings=settings, mask=network.mask),
            partially(_decode, network, acoustic, frame_lengths),
        ],
        rounds,
    )
    return {"beam": search / seconds, "beam_share": search / eight}


@torch.inference_mode()
def _autoregressive(network: model.Imputer, lengths: tuple[float, ...]) -> dict[str, Any]:
    """The same network, one frame per pass in the likeliest order, against eight passes."""
    ratios = {}
    for seconds in lengths:
        acoustic, frame_lengths = network.encode(*_features(network, seconds))
        frames = int(frame_lengths[0])
        eight, every = least(
            [
                partially(_decode, network, acoustic, frame_lengths),
                partially(_decode, network, acoustic, frame_lengths, block_size=frames),
            ],
            1,
        )
        ratios[seconds] = every / eight
    return {"autoregressive": ratios}


def _batching(network: model.Imputer, vocabulary: Vocabulary, rounds: int) -> dict[str, float]:
    """Short recordings from samples to transcripts: a list, which is batched by length, and one by one."""
    recognizer = Recognizer(network, vocabulary)
    random = np.random.default_rng(0)
    lengths = random.uniform(*SHORT_SECONDS, 48) * recognizer.sample_rate
    waves: list[Any] = [(0.1 * random.standard_normal(int(n))).astype(np.float32) for n in lengths]
    alone, together = least(
        [lambda: [recognizer.transcribe(wave) for wave in waves], lambda: recognizer.transcribe(waves)],
        rounds,
    )
    return {"batching": alone / together}


@torch.inference_mode()
def _runtimes(network: model.Imputer, vocabulary: Vocabulary, rounds: int) -> dict[str, float]:
    """Eight passes and the acoustic part at batch 1, by torch, onnx and int8."""
    with tempfile.TemporaryDirectory() as folder:
        models.save(Path(folder, "model"), network, vocabulary)
        onnx.export(Path(folder, "model"), Path(folder, "onnx"))
        plain, _ = onnx.load(Path(folder, "onnx"))
        small, _ = onnx.load(Path(folder, "onnx"), int8=True)
    features, lengths = _features(network, 8.0)

    def everything(runtime: Any) -> None:
        acoustic, frame_lengths = runtime.encode(features, lengths)
        _decode(runtime, acoustic, frame_lengths)

    times = least([*(partially(everything, r) for r in (network, plain, small))], rounds)
    return {"onnx": times[0] / times[1], "onnx-int8": times[0] / times[2]}


def _repeat(times: int, function: Callable[..., object], *arguments: Any) -> None:
    for _ in range(times):
        function(*arguments)
