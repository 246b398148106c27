"""The objectives against torch's ctc_loss: time of forward and backward together, and memory beyond the gradient.

One thread, one process, competitors in turns, the least of several times. CPU time, so that other programs on the
machine disturb less. ``limit`` is the time just to read log_probs once and to write a gradient of that size once.
"""

import ctypes
import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from imputer import masking
from imputer.alignments import best_alignment
from imputer.objectives import ctc, dynamic_programming
from imputer.research.measuring import least, one_thread

SHAPES = ((16, 400, 401, 60), (1, 1500, 32, 300), (8, 800, 401, 120))  # batch, frame, token, target
BLOCK_SIZE = 8
TARGETS = {  # how many times faster than ctc_loss, without and with merging
    "all masked": (5, 2.5),
    "block": (15, 15),
    "block, c >= 1": (25, 25),
    "best alignment": (8, 8),
}
Batch = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # log_probs, targets, lengths, sizes, alignments
Block = Callable[[Tensor], None]
MEMORY_TARGET = 5  # per cent of ctc_loss's, for a block roll-in with c >= 1


def run(quick: bool = False) -> dict[str, Any]:
    """Print and return the figures of every shape and topology."""
    from rich.console import Console

    with one_thread():
        results = [
            {
                **measure(shape, merge_repeats, rounds=3 if quick else 15),
                **measure_memory(shape, merge_repeats, times=2 if quick else 8),
            }
            for shape in (SHAPES[:1] if quick else SHAPES)
            for merge_repeats in (False, True)
        ]
    Console().print(_table(results))
    return {"results": results}


def make_batch(shape: tuple[int, int, int, int], merge_repeats: bool) -> Batch:
    """Random log_probs and targets, lengths, and the best alignments as the roll-in's."""
    batch, frames, tokens, size = shape
    draw = torch.Generator().manual_seed(0)
    log_probs = (2 * torch.randn(batch, frames, tokens, generator=draw)).log_softmax(-1)
    targets = torch.randint(1, tokens, (batch, size), generator=draw)
    lengths, sizes = torch.full((batch,), frames), torch.full((batch,), size)
    alignments, _ = best_alignment(log_probs, targets, lengths, sizes, merge_repeats=merge_repeats)
    return log_probs, targets, lengths, sizes, alignments


def roll_ins(lengths: Tensor) -> list[Tensor]:
    """One block roll-in for every c in 0..B-1, as training draws them (c is uniform)."""
    found: dict[int, Tensor] = {}
    seed = 0
    one = lengths[:1]
    while len(found) < BLOCK_SIZE:
        draw = torch.Generator().manual_seed(seed)
        first = masking.block(one, block_size=BLOCK_SIZE, generator=draw)
        number = int(first[0, :BLOCK_SIZE].sum())
        if number not in found:
            rows = [first[0]]
            while len(rows) < len(lengths):
                row = masking.block(one, block_size=BLOCK_SIZE, generator=draw)[0]
                if int(row[:BLOCK_SIZE].sum()) == number:
                    rows.append(row)
            found[number] = torch.stack(rows)
        seed += 1
    return [found[number] for number in range(BLOCK_SIZE)]


def both_ways(batch: Batch, merge_repeats: bool) -> tuple[Callable[[], None], Callable[[], None], Block]:
    """Forward and backward of torch's ctc_loss, of our CTC, and of a block roll-in with given commitments."""
    log_probs, targets, lengths, sizes, alignments = batch
    time_first = log_probs.transpose(0, 1).contiguous().requires_grad_()  # as ctc_loss takes it
    ours = log_probs.clone().requires_grad_()

    def theirs() -> None:
        torch.nn.functional.ctc_loss(time_first, targets, lengths, sizes, reduction="sum").backward()
        time_first.grad = None

    def all_masked() -> None:
        ctc(ours, targets, lengths, sizes, merge_repeats=merge_repeats).sum().backward()
        ours.grad = None

    def block(committed: Tensor) -> None:
        dynamic_programming(
            ours, targets, alignments, committed, lengths, sizes, merge_repeats=merge_repeats
        ).sum().backward()
        ours.grad = None

    return theirs, all_masked, block


def measure(shape: tuple[int, int, int, int], merge_repeats: bool, rounds: int) -> dict[str, Any]:
    """Milliseconds of each competitor, and how many times faster than ctc_loss ours are."""
    batch = make_batch(shape, merge_repeats)
    log_probs, targets, lengths, sizes, _ = batch
    theirs, all_masked, block = both_ways(batch, merge_repeats)

    def best() -> None:
        best_alignment(log_probs, targets, lengths, sizes, merge_repeats=merge_repeats)

    def limit() -> None:
        log_probs.sum()
        torch.zeros_like(log_probs)

    blocks = [partial(block, committed) for committed in roll_ins(lengths)]
    times = least([theirs, all_masked, best, limit, *blocks], rounds)
    theirs_ms, masked_ms, best_ms, limit_ms, *block_ms = (1000 * seconds for seconds in times)
    milliseconds = {
        "all masked": masked_ms,
        "block": fmean(block_ms),
        "block, c >= 1": fmean(block_ms[1:]),
        "best alignment": best_ms,
    }
    return {
        "shape": shape,
        "merge_repeats": merge_repeats,
        "ctc_loss": theirs_ms,
        "limit": limit_ms,
        "milliseconds": milliseconds,
        "faster": {name: theirs_ms / value for name, value in milliseconds.items()},
        "over_limit": {name: value / limit_ms for name, value in milliseconds.items()},
    }


def measure_memory(shape: tuple[int, int, int, int], merge_repeats: bool, times: int) -> dict[str, Any]:
    """Megabytes at the peak of forward and backward beyond inputs and gradient, for one batch.

    Measured with ``times`` as many items, because Linux updates its count of resident pages only now and then.
    """
    batch = make_batch((shape[0] * times, *shape[1:]), merge_repeats)
    theirs, all_masked, block = both_ways(batch, merge_repeats)
    committed = roll_ins(batch[2])[1]  # c = 1 keeps the longest runs of all with c >= 1
    competitors: dict[str, Callable[[], None]] = {
        "ctc_loss": theirs,
        "all masked": all_masked,
        "block, c >= 1": partial(block, committed),
    }
    gradient = batch[0].numel() * batch[0].element_size() / 2**20
    extra = {name: (peak(work) - gradient) / times for name, work in competitors.items()}
    return {
        "megabytes": extra,
        "per_cent": {name: 100 * value / extra["ctc_loss"] for name, value in extra.items()},
    }


def peak(work: Callable[[], None]) -> float:
    """The peak rise of resident memory, in megabytes, while ``work`` runs; NaN where the system does not provide it."""
    clear = Path("/proc/self/clear_refs")
    if not clear.exists():
        return float("nan")
    work()  # compiled code and other one-time allocations exist already
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    clear.write_text("5")  # forget the peak so far
    before = _status("VmRSS")
    work()
    return (_status("VmHWM") - before) / 1024


def _status(field: str) -> int:
    """Kilobytes, from /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1])


def _table(results: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    table = Table(
        "batch, T, C, S, repeats",
        "ms",
        "x faster",
        "wanted",
        "x limit",
        "MB",
        "% of MB",
        title="forward + backward, one thread",
    )
    for column in table.columns[1:]:
        column.justify = "right"
    for result in results:
        topology = "merged" if result["merge_repeats"] else "kept"
        table.add_row(f"[bold]{', '.join(map(str, result['shape']))}, {topology}")
        megabytes, per_cent = result["megabytes"], result["per_cent"]
        table.add_row(
            "ctc_loss", f"{result['ctc_loss']:.2f}", "1", "", "", f"{megabytes['ctc_loss']:.2f}", "100"
        )
        for name, wanted in TARGETS.items():
            faster, goal = result["faster"][name], wanted[result["merge_repeats"]]
            memory = [f"{megabytes[name]:.2f}", f"{per_cent[name]:.1f}"] if name in megabytes else []
            table.add_row(
                name,
                f"{result['milliseconds'][name]:.2f}",
                f"{faster:.1f}" if faster >= goal else f"[red]{faster:.1f}",
                f"{goal:g}",
                f"{result['over_limit'][name]:.1f}",
                *memory,
            )
        table.add_row("limit", f"{result['limit']:.2f}", f"{result['ctc_loss'] / result['limit']:.1f}")
        table.add_section()
    table.caption = (
        "MB: resident memory at the peak beyond inputs and gradient, a batch; of block roll-ins c = 1, the largest. "
        f"Target: below {MEMORY_TARGET} % of ctc_loss's."
    )
    return table
