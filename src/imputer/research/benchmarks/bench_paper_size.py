"""The paper's two networks at full size: real steps on generated data, their FLOPs and memory."""

import time
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from imputer import configs, model
from imputer.research.benchmarks.bench_training import ctc_loss, kept_for_backward, made_batch
from imputer.research.measuring import show

# Dense bfloat16 peak as the vendor states it, and the share of it that we assume a training reaches.
GPU, GPU_PEAK, ASSUMED_SHARE = "NVIDIA A100 80 GB", 312e12, 0.35
CORPUS_HOURS = {"wsj": 82, "librispeech": 960}
UTTERANCE_SECONDS = {"wsj": 8, "librispeech": 12}  # about the mean; attention costs more in longer ones
TOKENS = 400
COLUMNS = {
    "GFLOP per second of audio": "gflop_per_second_of_audio",
    "activations, MB per second of audio": "activation_mb_per_second",
    "weights and optimiser, GB": "state_gb",
    "epochs": "epochs",
    f"hours on one {GPU}": "gpu_hours",
}


def run(quick: bool = False) -> dict[str, Any]:
    """Print and return the figures of one or more real steps of each configuration."""
    figures = {name: measure(name, steps=1 if quick else 3) for name in (("wsj",) if quick else CORPUS_HOURS)}
    rows = [
        (name, *cells(f), f"{f['audio_per_second']:.1f}", " ".join(f"{loss:.0f}" for loss in f["losses"]))
        for name, f in figures.items()
    ]
    headings = ("config", "parameters", *COLUMNS, "s of audio per s here", "loss, step by step")
    show("the paper's networks at full size", headings, rows)
    return figures


def cells(figures: dict[str, Any]) -> tuple[str, ...]:
    """The cells of a configuration: its parameters, and the figures of ``COLUMNS``."""
    return f"{figures['parameters'] / 1e6:.1f} M", *(f"{figures[key]:.3g}" for key in COLUMNS.values())


def measure(name: str, steps: int) -> dict[str, Any]:
    """Take real steps with the configuration ``name`` and count what they need."""
    settings = configs.read(name)
    torch.manual_seed(0)
    network = model.Imputer(settings.model, settings.front_end, TOKENS).train()
    data = made_batch(batch=2, seconds=UTTERANCE_SECONDS[name])
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, fused=True)
    losses, start = [], time.perf_counter()
    for _ in range(steps):
        loss = ctc_loss(network, data)
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), settings.training.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(loss.detach()))
    seconds = time.perf_counter() - start
    counter = FlopCounterMode(display=False)
    with sdpa_kernel(SDPBackend.MATH), counter:  # the fused attention of a CPU is not counted
        ctc_loss(network, data).backward()
    gflop = counter.get_total_flops() / data["audio"] / 1e9
    # weights, gradients and two moments in float32
    state = 4 * 4 * model.parameters(network)
    audio = settings.training.steps * settings.training.batches_per_step * settings.data.batch_seconds
    return {
        "parameters": model.parameters(network),
        "gflop_per_second_of_audio": gflop,
        "losses": losses,
        "audio_per_second": steps * data["audio"] / seconds,
        "activation_mb_per_second": kept_for_backward(network, data) / data["audio"],
        "state_gb": state / 1e9,
        "epochs": audio / 3600 / CORPUS_HOURS[name],
        "gpu_hours": audio * gflop * 1e9 / (GPU_PEAK * ASSUMED_SHARE) / 3600,
    }
