"""Charts for the experiments, in the style of ``imputer.display.drawings``."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from imputer.display import drawings
from imputer.display.drawings import Panel
from imputer.research.results import KINDS, Result


def save(path: Path, panels: Sequence[Panel]) -> None:
    """Draw panels side by side."""
    drawings.save(drawings.charts(panels), path)


def by_passes(result: Result, title: str = "") -> Panel:
    """WER against passes, a line per model; CTC is level. The band is the range over seeds, where there are several."""
    lines: dict[str, list[tuple[float, ...]]] = {}
    for name, row in result.rows.items():
        model, passes = _model_and_passes(name)
        seeds = [100 * rate for rate in result.trials(name).by_seed]
        band = (min(seeds), max(seeds)) if len(seeds) > 1 else ()
        lines.setdefault(model, []).append((passes or row["passes"], sum(seeds) / len(seeds), *band))
    last = max(point[0] for points in lines.values() for point in points)
    for points in lines.values():
        if len(points) == 1:
            points.append((last, *points[0][1:]))
    return Panel("passes", "word error rate, %", lines, title, doubling=True)


def _model_and_passes(name: str) -> tuple[str, int]:
    """The model and the passes in the name of a row; 0 if it names none."""
    found = re.fullmatch(r"(.*), (\d+) pass(?:es)?", name)
    return (found[1], int(found[2])) if found else (name, 0)


def kinds(result: Result, groups: Iterable[tuple[str, Sequence[str]]]) -> list[Panel]:
    """Where the errors go: their kinds per hundred tokens against passes, a panel per model whose kinds are known."""
    found = []
    for model, names in groups:
        rows = [name for name in names if "tokens" in result.rows.get(name, {})]
        if rows:
            lines = {
                kind: [(_model_and_passes(name)[1], 100 * result.rate(name, kind).value) for name in rows]
                for kind in KINDS
            }
            found.append(Panel("passes", "errors per 100 tokens", lines, f"errors of {model}", stacked=True))
    return found


def beside_the_paper(result: Result, paper: Mapping[str, Mapping[int, float]]) -> Panel:
    """Figure 6, ours and the paper's, each divided by its own WER at 8 passes."""
    lines: dict[str, list[tuple[float, ...]]] = {}
    for strategy, theirs in paper.items():
        words = strategy.replace("_", " ")
        ours = {
            row["way"]["block_size"]: result.rate(name).value
            for name, row in result.rows.items()
            if row["way"]["strategy"] == strategy
        }
        lines[f"ours, {words}"] = [(size, wer / ours[8]) for size, wer in ours.items()]
        lines[f"paper, {words}"] = [(size, wer / theirs[8]) for size, wer in theirs.items()]
    return Panel("passes", "WER / WER at 8 passes", lines, "the paper's figure 6 and ours", doubling=True)
