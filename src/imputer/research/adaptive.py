"""Adaptive decoding (ours): commit every frame that is sure enough, at least one frame per block."""

from pathlib import Path
from typing import Any

from imputer.display.drawings import Panel
from imputer.research import plots
from imputer.research.results import Result
from imputer.research.trainings import Lab, dp, way

TITLE = "Adaptive decoding"
QUESTION = "How many passes does it take, if every pass commits all it is sure of?"
DATASET = "libri"
SIZES = (1, 2, 4, 8, 16)
THRESHOLDS = (0.5, 0.7, 0.9, 0.95, 0.99)


def run(lab: Lab) -> dict[str, Any]:
    """The main table's DP model: block decoding at several sizes, adaptive at 8 with several thresholds."""
    ways = {f"block, {size}": way(size) for size in SIZES}
    ways |= {f"adaptive, {limit:g}": way(8, "adaptive", threshold=limit) for limit in THRESHOLDS}
    return {"rows": lab.rows(dp(), ways), "pairs": [("block, 8", "adaptive, 0.9")]}


def text(result: Result) -> str:
    """What the rows are."""
    return "*Adaptive* with its threshold. Not in the paper."


def draw(result: Result, path: Path) -> None:
    """WER against mean passes."""
    lines: dict[str, list[tuple[float, ...]]] = {"block": [], "adaptive": []}
    for name, row in result.rows.items():
        lines[row["way"]["strategy"]].append((row["passes"], 100 * result.rate(name).value))
    plots.save(path, [Panel("passes, mean over utterances", "word error rate, %", lines)])
