"""How fast filter banks and deltas are: frames per second on one thread, against kaldi-native-fbank."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from imputer import features
from imputer.research.measuring import least, one_thread, show

TARGET = 150_000  # frames per second
SECONDS = (1.0, 15.0)  # a command, and a long sentence


def run(quick: bool = False) -> dict[str, Any]:
    """Print and return the figures: one thread, interleaved, least CPU time of several."""
    with one_thread():
        figures = {seconds: _compare(seconds, 5 if quick else 40) for seconds in SECONDS}
    rows = []
    for seconds, speed in figures.items():
        other = speed.get("kaldi_native_fbank")
        theirs = [f"{other:,.0f}", f"{speed['ours'] / other:.1f}x"] if other else ["not installed", ""]
        target = f">= {TARGET:,}" if seconds == SECONDS[-1] else ""
        rows.append([f"{seconds:g} s", f"{speed['ours']:,.0f}", *theirs, target])
    headings = ("audio", "this", "kaldi-native-fbank", "ratio", "target")
    show("240 features, frames per second", headings, rows)
    return {
        "frames_per_second": figures[SECONDS[-1]]["ours"],
        "target": TARGET,
        "by_length": {f"{seconds:g}": speed for seconds, speed in figures.items()},
    }


def _compare(seconds: float, rounds: int) -> dict[str, float]:
    waveform = 0.1 * torch.randn(int(seconds * 16000), generator=torch.Generator().manual_seed(0))
    ways: dict[str, Callable[[], object]] = {"ours": lambda: features.filterbanks(waveform, 16000)}
    try:
        import kaldi_native_fbank  # noqa: F401

        ways["kaldi_native_fbank"] = lambda: _with_kaldi(waveform.numpy())
    except ImportError:
        pass
    frames = features.frame_count(len(waveform))
    times = least(list(ways.values()), rounds)
    return {name: frames / seconds for name, seconds in zip(ways, times, strict=True)}


def _with_kaldi(waveform: np.ndarray) -> np.ndarray:
    """The same features by kaldi-native-fbank, with deltas in numpy."""
    import kaldi_native_fbank

    options = kaldi_native_fbank.FbankOptions()
    options.frame_opts.dither = 0.0
    options.mel_opts.num_bins = features.BANKS
    extractor = kaldi_native_fbank.OnlineFbank(options)
    extractor.accept_waveform(16000, waveform * 32768)
    extractor.input_finished()
    static = np.stack([extractor.get_frame(i) for i in range(extractor.num_frames_ready)])
    padded = np.pad(static, ((features.DELTA_REACH, features.DELTA_REACH), (0, 0)), "edge")
    orders = [
        sum(weight * padded[features.DELTA_REACH + shift :][: len(static)] for shift, weight in taps.items())
        for taps in (features.DELTA, features.DELTA_DELTA)
    ]
    return np.concatenate([static, *orders], 1)
