"""The paper's two networks at full size: the real commands for a few steps on made data, and what a GPU would need."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from imputer.corpora import tones
from imputer.errors import ImputerError
from imputer.research.benchmarks import bench_paper_size as paper_size
from imputer.research.report import Claim, table
from imputer.research.trainings import Lab, say

TITLE = "The paper's size"
QUESTION = "Do `configs/wsj.toml` and `configs/librispeech.toml` train, and what would the whole of it take?"
DATASET = ""  # made data of its own
UTTERANCES, WORDS = 8, (8, 12)  # of the made language; some five seconds each
BATCH_SECONDS = 12
STEPS = 3
WATCH_SECONDS = 0.05


def run(lab: Lab | None, *, quick: bool = False) -> dict[str, Any]:
    """Each configuration through the commands of a user, then its FLOPs and memory counted."""
    figures = paper_size.run(quick)
    for name in figures:
        say(f"{name}: expert, alignments and Imputer by the commands")
        figures[name]["commands"] = by_the_commands(name, 1 if quick else STEPS)
    return {"figures": figures, "batch_seconds": BATCH_SECONDS}


def by_the_commands(name: str, steps: int) -> dict[str, Any]:
    """`train`, `align`, `train` with a configuration of the paper's: losses, and the most memory the process had."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        speech = tones.make(str(place / "tones"), UTTERANCES, words=WORDS)
        store = place / "tones.alignments"
        train = ["train", "--config", paper_size.CONFIGS / f"{name}.toml"]
        train += ["--data.train", speech, "--data.valid", speech, "--data.batch_seconds", BATCH_SECONDS]
        train += ["--data.workers", 0, "--vocabulary.units", "characters", "--vocabulary.size", 9]
        train += ["--training.steps", steps, "--training.batches_per_step", 1, "--training.log_every", 1]
        train += ["--rollin.alignments", store]
        expert, imputer = place / "expert", place / "imputer"
        dynamic = ["--training.objective", "dynamic_programming", "--training.start_from", expert / "model"]
        found = {"ctc": _memory(*train, "--output", expert)}
        _memory("align", "--manifest", speech, "--model", expert / "model", "--store", store)
        found["dynamic_programming"] = _memory(*train, *dynamic, "--output", imputer)
        losses = {"ctc": _losses(expert), "dynamic_programming": _losses(imputer)}
        return {
            objective: {"losses": losses[objective], "peak_gb": peak} for objective, peak in found.items()
        }


def _memory(*words: Any) -> float:
    """Run a command of ours in a process of its own; returns the most memory it held, in GB (0 without /proc)."""
    command = [sys.executable, "-m", "imputer", *map(str, words)]
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT)
        most = 0.0
        while process.poll() is None:  # getrusage would count what this process held when it made the other
            most = max(most, _high_water(process.pid))
            time.sleep(WATCH_SECONDS)
        if process.returncode:
            said.seek(0)
            raise ImputerError(f"imputer {words[0]} ended with {process.returncode}: {said.read()[-2000:]}")
    return most


def _high_water(pid: int) -> float:
    """The largest resident size of a process so far, in GB."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(float(line.split()[1]) * 1024 / 1e9 for line in lines if line.startswith("VmHWM"))


def _losses(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def section(result: Mapping[str, Any]) -> list[str]:
    """A row a configuration."""
    rows = [
        (
            f"`configs/{name}.toml`",
            f"{f['parameters'] / 1e6:.1f} M",
            f"{f['gflop_per_second_of_audio']:.1f}",
            f"{f['activation_mb_per_second']:.1f}",
            f"{f['state_gb']:.2f}",
            f"{f['epochs']:.0f}",
            f"{f['gpu_hours']:.1f}",
        )
        for name, f in result["figures"].items()
    ]
    headings = (
        "",
        "parameters",
        "GFLOP a second of audio",
        "activations, MB a second of audio",
        "weights and optimiser, GB",
        "epochs",
        f"hours on one {paper_size.GPU}",
    )
    share = round(100 * paper_size.ASSUMED_SHARE)
    losses = ", ".join(
        f"{' → '.join(f'{loss:.0f}' for loss in f['losses'])} ({name})"
        for name, f in result["figures"].items()
    )
    return [
        *table(headings, rows),
        "",
        "Operations and memory are counted in real steps on utterances of the corpus's usual length, with 400 tokens; "
        f"on one such batch the loss, nats an utterance, falls {losses}. The hours assume {share} % of the GPU's peak, "
        "and have not been measured. The expert and the Imputer take as long each.",
        "",
        "The commands themselves, `train`, `align` and `train`, on made data, batches of "
        f"{result['batch_seconds']} s, a vocabulary of its few letters. Every step has another batch and the learning "
        "rate has hardly begun to rise, so these losses show that it runs, not that it learns:",
        "",
        *table(
            ("", "objective", "loss, step by step", "most memory, GB"),
            [
                (
                    f"`configs/{name}.toml`",
                    objective.replace("_", " "),
                    " → ".join(f"{loss:.2f}" for loss in one["losses"]),
                    f"{one['peak_gb']:.1f}" if one["peak_gb"] else "",
                )
                for name, f in result["figures"].items()
                for objective, one in f["commands"].items()
            ],
        ),
    ]


def claims(result: Mapping[str, Any]) -> list[Claim]:
    """Nothing to compare."""
    return []
