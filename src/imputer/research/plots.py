"""Charts for the experiments, in the style of ``imputer.display.drawings``."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from imputer.display import drawings
from imputer.display.drawings import COLOURS, INK, MARKERS, dress, sheet
from imputer.research.results import KINDS, Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDE = 3  # from this ratio of the highest to the lowest point on, the axis is logarithmic
OF_MODEL = {"CTC": 0, "IM": 1, "DP": 2}  # one colour for a model in every chart
PAPER = "paper"  # lines that begin with it are dashed


@dataclass(frozen=True)
class Panel:
    """One chart: lines of points (x, y) or (x, y, low, high) by name, or stacked bars of (x, y)."""

    x: str
    y: str
    lines: Mapping[str, Sequence[tuple[float, ...]]]
    title: str = ""
    doubling: bool = False  # whether x goes in powers of two
    stacked: bool = False

    @property
    def logarithmic(self) -> bool:
        heights = [point[1] for points in self.lines.values() for point in points]
        return not self.stacked and min(heights) > 0 and max(heights) > WIDE * min(heights)


def save(path: Path, panels: Sequence[Panel]) -> None:
    """Draw panels side by side, each with its legend."""
    figure = sheet(0.4 + 4.4 * len(panels), 3.7)
    for place, panel in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), place + 1)
        (_bars if panel.stacked else _lines)(axes, panel)
        dress(axes, panel.x, panel.y, panel.title)
        if panel.title or len(panel.lines) > 1:
            axes.legend(frameon=False, fontsize=8, labelcolor=INK)
    figure.tight_layout(w_pad=2.5)
    drawings.save(figure, path)


def _lines(axes: "Axes", panel: Panel) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    heads = [name.split(",")[0] for name in panel.lines]
    for number, (name, points) in enumerate(panel.lines.items()):
        xs, ys, *band = zip(*sorted(points), strict=True)
        place = OF_MODEL.get(heads[number], number) if len(set(heads)) == len(heads) else number
        place = number // 2 if PAPER in heads else place  # beside every line of the paper's is one of ours
        colour = COLOURS[place % len(COLOURS)]
        axes.plot(
            *(xs, ys),
            label=name,
            linewidth=1.6,
            markersize=4,
            color=colour,
            marker=MARKERS[place % len(MARKERS)] if len(set(ys)) > 1 else "",
            linestyle="--" if name.startswith(PAPER) else "-",
        )
        if band:
            axes.fill_between(xs, band[0], band[1], color=colour, alpha=0.15, linewidth=0)
    if panel.doubling:
        every = sorted({point[0] for points in panel.lines.values() for point in points})
        axes.set_xscale("log", base=2)
        axes.set_xticks(every, [f"{x:g}" for x in every])
        axes.xaxis.set_minor_locator(NullLocator())
    if panel.logarithmic:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_locator(NullLocator())


def _bars(axes: "Axes", panel: Panel) -> None:
    names = [f"{x:g}" for x, _ in next(iter(panel.lines.values()))]
    floor = [0.0] * len(names)
    for number, (name, points) in enumerate(panel.lines.items()):
        heights = [point[1] for point in points]
        axes.bar(names, heights, 0.65, bottom=floor, label=name, color=COLOURS[number], alpha=0.85)
        floor = [a + b for a, b in zip(floor, heights, strict=True)]
    axes.set_ylim(0, 1.25 * max(floor))


# --- the charts of the main comparison


def by_passes(result: Result, title: str = "") -> Panel:
    """WER against passes, a line per model; CTC is level. The band is the range over seeds, where there are several."""
    lines: dict[str, list[tuple[float, ...]]] = {}
    for name, row in result.rows.items():
        model, passes = _parted(name)
        seeds = [100 * rate for rate in result.trials(name).by_seed]
        band = (min(seeds), max(seeds)) if len(seeds) > 1 else ()
        lines.setdefault(model, []).append((passes or row["passes"], sum(seeds) / len(seeds), *band))
    last = max(point[0] for points in lines.values() for point in points)
    for points in lines.values():
        if len(points) == 1:
            points.append((last, *points[0][1:]))
    return Panel("passes", "word error rate, %", lines, title, doubling=True)


def _parted(name: str) -> tuple[str, int]:
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
                kind: [(_parted(name)[1], 100 * result.rate(name, kind).value) for name in rows]
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
