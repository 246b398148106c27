"""Adaptive decoding (ours): commit whatever is sure enough, at least a frame a block."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from imputer.decoding import Options
from imputer.research import plots
from imputer.research.report import Claim, difference, score_rows, table
from imputer.research.trainings import Lab, Trainings, compared

TITLE = "Adaptive decoding"
QUESTION = "How many passes does it take, if every pass commits all it is sure of?"
DATASET = "libri"
SIZES = (1, 2, 4, 8, 16)
THRESHOLDS = (0.5, 0.7, 0.9, 0.95, 0.99)


def run(lab: Lab) -> dict[str, Any]:
    """The main table's DP model: block decoding at several sizes, adaptive at 8 with several thresholds."""
    fixed = [Options(size) for size in SIZES]
    free = [Options(8, "adaptive", strategy_options=(("threshold", threshold),)) for threshold in THRESHOLDS]
    scores = lab.scores(Trainings.main, [*fixed, *free])
    names = {way: f"block, {way.block_size}" for way in fixed}
    names |= {way: f"adaptive, {dict(way.strategy_options)['threshold']:g}" for way in free}
    by_name = {names[score.options]: score for score in scores}
    return {
        "rows": [score.row(name) for name, score in by_name.items()],
        "comparison": compared(
            ("block, 8", by_name["block, 8"]), ("adaptive, 0.9", by_name["adaptive, 0.9"])
        ),
    }


def section(result: Mapping[str, Any]) -> list[str]:
    """Passes and WER."""
    return [
        *table(*score_rows(result["rows"])),
        "",
        f"Adaptive at its default threshold less block decoding in 8 passes: {difference(result['comparison'])}. "
        "Not in the paper.",
    ]


def claims(result: Mapping[str, Any]) -> list[Claim]:
    """The paper does not have it."""
    return []


def draw(result: Mapping[str, Any], path: Path) -> None:
    """WER against mean passes."""
    lines = {
        strategy: [
            (row["passes"], 100 * row["wer"]["value"])
            for row in result["rows"]
            if row["strategy"] == strategy
        ]
        for strategy in ("block", "adaptive")
    }
    plots.save(path, [plots.Panel("passes, mean over utterances", "word error rate, %", lines)])
