"""How fast training is: against a plain implementation, DP against CTC, and against the machine's own peak."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from imputer import configs, objectives, rollin
from imputer.model import Imputer
from imputer.research.measuring import least, one_thread, show

SMALL = configs.Model(width=384, layers=4, heads=4, filter_size=1536, dropout=0.1)  # configs/small.toml
FRONT_END = configs.FrontEnd(channels=16)
TOKENS = 400


def run(quick: bool = False) -> dict[str, Any]:
    """Print and return the figures, one thread, interleaved, minimum of several."""
    with one_thread():
        rounds = 2 if quick else 7
        data = made_batch(batch=4 if quick else 12, seconds=4 if quick else 8)
        figures = compare(data, rounds) | linear_memory(quick)
    rows = [
        ("CTC step, seconds of audio per second", f"{figures['ctc_audio_per_second']:.0f}", ""),
        ("against nn.TransformerEncoder + ctc_loss", f"{figures['against_plain']:.2f}x", ">= 1.5x"),
        ("DP step / CTC step (block-8 roll-ins)", f"{figures['dp_over_ctc']:.2f}", "<= 1.10"),
        ("imitation step / CTC step", f"{figures['imitation_over_ctc']:.2f}", ""),
        ("matmul GFLOP/s achieved in a CTC step", f"{figures['gflops']:.0f}", ""),
        ("share of this machine's matmul peak", f"{100 * figures['share_of_peak']:.0f} %", ">= 60 %"),
        *(
            (f"kept for the backward pass, {size} s of audio", f"{megabytes:.0f} MB", "linear")
            for size, megabytes in figures["memory"].items()
        ),
    ]
    show("training, configs/small.toml, one thread", ("figure", "value", "target"), rows)
    return figures


def compare(data: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Seconds of one whole step (forward, backward, clip, optimiser) of each kind, interleaved."""
    torch.manual_seed(0)
    ours, plain = Imputer(SMALL, FRONT_END, TOKENS), Plain()
    steps = {
        "ctc": stepper(ours, lambda: ctc_loss(ours, data), fused=True),
        "plain": stepper(plain, lambda: plain.loss(data), fused=False),
        "dynamic_programming": stepper(
            ours, lambda: rolled_in_loss(ours, data, "dynamic_programming"), fused=True
        ),
        "imitation": stepper(ours, lambda: rolled_in_loss(ours, data, "imitation"), fused=True),
    }
    peaks: list[float] = []
    times = least([*steps.values(), lambda: peaks.append(matmul_peak())], rounds)
    seconds, peak = dict(zip(steps, times[:-1], strict=True)), max(peaks)
    counter = FlopCounterMode(display=False)
    with counter:
        ctc_loss(ours, data).backward()
    gflops = counter.get_total_flops() / seconds["ctc"] / 1e9
    return {
        "seconds": seconds,
        "ctc_audio_per_second": data["audio"] / seconds["ctc"],
        "against_plain": seconds["plain"] / seconds["ctc"],
        "dp_over_ctc": seconds["dynamic_programming"] / seconds["ctc"],
        "imitation_over_ctc": seconds["imitation"] / seconds["ctc"],
        "gflops": gflops,
        "peak_gflops": peak,
        "share_of_peak": gflops / peak,
    }


def linear_memory(quick: bool) -> dict[str, Any]:
    """Megabytes autograd keeps for the backward pass, at growing batches of equally long recordings."""
    model = Imputer(SMALL, FRONT_END, TOKENS)
    sizes = (2, 4) if quick else (4, 8, 16)
    return {"memory": {8 * n: kept_for_backward(model, made_batch(batch=n, seconds=8)) for n in sizes}}


def kept_for_backward(model: Imputer, data: dict[str, Any]) -> float:
    """Megabytes of activations that a CTC step keeps until its backward pass; weights do not count."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = ctc_loss(model, data)
    for parameter in model.parameters():
        kept.pop(parameter.untyped_storage().data_ptr(), None)
    del loss
    return sum(kept.values()) / 1e6


def made_batch(batch: int, seconds: int) -> dict[str, Any]:
    """Features of slightly different lengths, three tokens per second, and block-8 roll-ins of them."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.full((batch,), 100 * seconds) - 4 * torch.arange(batch)
    target_lengths = torch.full((batch,), 3 * seconds)
    frames = ((lengths + 1) // 2 + 1) // 2
    targets = torch.randint(1, TOKENS + 1, (batch, 3 * seconds), generator=generator)
    expert = {}
    for item, n in enumerate(frames.tolist()):
        alignment = torch.zeros(n, dtype=torch.long)
        alignment[torch.randperm(n, generator=generator)[: 3 * seconds].sort().values] = targets[item]
        expert[str(item)] = alignment.tolist()
    return {
        "features": torch.randn(batch, int(lengths.max()), 240, generator=generator),
        "lengths": lengths,
        "frames": frames,
        "targets": targets,
        "target_lengths": target_lengths,
        "audio": float(lengths.sum()) / 100,
        "expert": expert,
    }


def ctc_loss(model: Imputer, data: dict[str, Any]) -> Tensor:
    """One pass with everything masked, and the CTC objective of the paper's topology."""
    log_probs, frames = model(data["features"], data["lengths"])
    return -objectives.ctc(log_probs, data["targets"], frames, data["target_lengths"]).mean()


def rolled_in_loss(model: Imputer, data: dict[str, Any], objective: str) -> Tensor:
    """Draw block-8 roll-ins as training does, and the objective over them."""
    rolled_in_loss.step += 1  # type: ignore[attr-defined]
    alignments, committed, _ = rollin.draw(
        data["expert"].__getitem__,
        list(data["expert"]),
        data["frames"].tolist(),
        masking_policy="block",
        noise="utterance",
        block_size=8,
        seed=0,
        step=rolled_in_loss.step,  # type: ignore[attr-defined]
    )
    log_probs, frames = model(
        data["features"], data["lengths"], torch.where(committed, alignments, model.mask)
    )
    if objective == "imitation":
        return -objectives.imitation(log_probs, alignments, frames).mean()
    return -objectives.dynamic_programming(
        log_probs, data["targets"], alignments, committed, frames, data["target_lengths"]
    ).mean()


rolled_in_loss.step = 0  # type: ignore[attr-defined]


class Plain(nn.Module):
    """A plain implementation of the same network with torch's own modules."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, FRONT_END.channels, (11, 3), (2, 1), (5, 1))
        self.second = nn.Conv2d(FRONT_END.channels, FRONT_END.channels, (11, 3), (2, 1), (5, 1))
        self.project = nn.Linear(80 * FRONT_END.channels, SMALL.width)
        layer = nn.TransformerEncoderLayer(
            SMALL.width, SMALL.heads, SMALL.filter_size, SMALL.dropout, batch_first=True, norm_first=True
        )
        self.stack = nn.TransformerEncoder(
            layer, SMALL.layers, nn.LayerNorm(SMALL.width), enable_nested_tensor=False
        )
        self.embedding = nn.Embedding(TOKENS + 2, SMALL.width)
        self.output = nn.Linear(SMALL.width, TOKENS + 1)

    def loss(self, data: dict[str, Any]) -> Tensor:
        """torch's CTC loss."""
        x = data["features"].unflatten(-1, (3, 80)).transpose(1, 2)
        x = torch.relu(self.second(torch.relu(self.first(x))))
        x, frames = self.project(x.transpose(1, 2).flatten(2)), data["frames"]
        x = x + self.embedding(torch.full(x.shape[:2], TOKENS + 1))
        padding = torch.arange(x.shape[1]) >= frames[:, None]
        log_probs = self.output(self.stack(x, src_key_padding_mask=padding)).log_softmax(-1)
        return nn.functional.ctc_loss(
            log_probs.transpose(0, 1), data["targets"], frames, data["target_lengths"]
        )


def stepper(model: nn.Module, loss: Callable[[], Tensor], *, fused: bool) -> Callable[[], None]:
    """A function that takes one optimiser step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)
    model.train()

    def step() -> None:
        loss().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def matmul_peak() -> float:
    """GFLOP/s of the best of some large products."""
    best = 0.0
    for rows, inner, columns in ((1024, 1024, 1024), (2400, 256, 1024), (2048, 512, 2048)):
        a, b = torch.randn(rows, inner), torch.randn(inner, columns)
        (fastest,) = least([partial(torch.matmul, a, b)], 3)
        best = max(best, 2 * rows * inner * columns / fastest / 1e9)
    return best
