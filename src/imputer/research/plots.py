"""Line charts for the experiments, in the dress of ``imputer.display.drawings``."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from imputer.display import drawings
from imputer.display.drawings import COLOURS, INK, MARKERS, dress, sheet

COLUMNS = 3  # of the legend
WIDE = 3  # from this ratio of the highest to the lowest point on, ratios are drawn


@dataclass(frozen=True)
class Panel:
    """One chart: a line of (x, y) points a name."""

    x: str
    y: str
    lines: Mapping[str, Sequence[tuple[float, float]]]
    title: str = ""
    doubling: bool = False  # whether x goes in powers of two
    ratios: bool = False  # whether equal distances are equal ratios of y, if these are large

    @property
    def logarithmic(self) -> bool:
        heights = [y for points in self.lines.values() for _, y in points]
        return self.ratios and max(heights) > WIDE * min(heights)


def save(path: Path, panels: Sequence[Panel]) -> None:
    """Draw panels side by side, all with the same lines, explained once below them."""
    from matplotlib.ticker import LogLocator, NullLocator

    figure = sheet(0.4 + 4.8 * len(panels), 3.8)
    for place, panel in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), place + 1)
        for number, (name, points) in enumerate(panel.lines.items()):
            xs, ys = zip(*sorted(points), strict=True)
            colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
            axes.plot(xs, ys, label=name, linewidth=1.5, markersize=4, color=colour, marker=marker)
        if panel.doubling:
            every = sorted({x for points in panel.lines.values() for x, _ in points})
            axes.set_xscale("log", base=2)
            axes.set_xticks(every, [f"{x:g}" for x in every])
            axes.xaxis.set_minor_locator(NullLocator())
        if panel.logarithmic:
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_locator(NullLocator())
        dress(axes, panel.x, panel.y, panel.title)
    handles, names = figure.axes[0].get_legend_handles_labels()  # the panels show the same lines
    rows = -(-len(names) // COLUMNS)
    figure.tight_layout(rect=(0, 0.06 * rows, 1, 1))
    figure.legend(
        handles, names, loc="lower center", ncols=COLUMNS, frameon=False, fontsize=8, labelcolor=INK
    )
    drawings.save(figure, path)
