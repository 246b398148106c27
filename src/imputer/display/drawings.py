"""Pictures, as SVG and PNG: the decoding path, and error rate by block size.

Every function draws a matplotlib figure and returns it; ``save`` writes it. A PNG is a white panel; an SVG follows the
reader's light or dark scheme. matplotlib comes with the extra imputer-asr[figures].
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from imputer.display.animation import line_breaks, shown
from imputer.errors import UsageError
from imputer.support import atomic_files
from imputer.transcripts import BLANK, MASK, Transcript

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, FAINT, NEW = "#1f2933", "#a7b0ba", "#2f6fde"
COLOURS = ["#2f6fde", "#d9480f", "#2b8a3e", "#862e9c", "#b08900", "#0b7285", "#c2255c"]
PAPER = "#ffffff"
DARK = {PAPER: "#14181d", INK: "#e3e8ee", FAINT: "#66717d"} | dict(
    zip(COLOURS, ["#74a5ff", "#ff8a5b", "#5fcf7b", "#d08ee4", "#e0b93c", "#4cc3d9", "#f57ba6"], strict=True)
)
MARKERS = "osD^vPX"
WIDE = 3  # from this ratio of the highest to the lowest point on, the axis is logarithmic
PLACES = {"CTC": 0, "IM": 1, "DP": 2}  # of the colour of a model, the same in every chart
PUBLISHED = "paper"  # lines whose names begin with it are dashed
PICTURES = (".svg", ".png", ".pdf")  # endings of files
LINE_WIDTH = 102.0  # characters in a line of the decoding path


def save(figure: "Figure", *paths: Path | str) -> None:
    """Write a figure to files whose endings say how: .svg, .png, .pdf."""
    import matplotlib

    for path in map(Path, paths):
        kind = path.suffix[1:].lower()
        if path.suffix.lower() not in PICTURES:
            raise UsageError(f"cannot draw {path}: the name must end in .svg, .png or .pdf")
        metadata = {"Date": None} if kind == "svg" else {}  # with the salt: the same picture, the same bytes
        with atomic_files.replacing(path) as temporary, matplotlib.rc_context({"svg.hashsalt": "imputer"}):
            figure.savefig(temporary, format=kind, dpi=160, bbox_inches="tight", metadata=metadata)
            if kind == "svg":
                temporary.write_text(
                    _in_both_schemes(temporary.read_text(encoding="utf-8")), encoding="utf-8"
                )


def _in_both_schemes(svg: str) -> str:
    """The picture with other colours for readers who prefer dark pages; each keeps its own background."""
    rules = [
        f'[style*="{part}: {light}"]{{{part}:{dark}!important}}'
        for light, dark in DARK.items()
        for part in ("fill", "stroke")
    ]
    return svg.replace("</style>", f"\n@media (prefers-color-scheme: dark) {{{''.join(rules)}}}</style>", 1)


def decoding_path(transcript: Transcript, *, block_size: int, title: str = "") -> "Figure":
    """The alignment after every pass, like fig:imputation: a row per pass, a column per frame, bars between blocks.

    The transcript needs a trace. What a pass commits stands out in it; long recordings take several lines.
    """
    if not transcript.trace:
        raise ValueError("the transcript has no trace: transcribe with trace=True")
    rows = [[MASK] * len(transcript.trace[-1]), *transcript.trace]
    widths = [max(len(shown(symbol)), 1) + 0.7 for symbol in rows[-1]]
    lines = line_breaks(widths, block_size, LINE_WIDTH)
    longest = max(sum(widths[start:end]) for start, end in lines)
    height = len(lines) * (len(rows) + 1.6)
    figure = sheet(0.11 * (longest + 4) + 0.3, 0.19 * height + (0.4 if title else 0.1))
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_axis_off()
    for number, span in enumerate(lines):
        _draw_line(axes, rows, widths, span, block_size, number * (len(rows) + 1.6))
    axes.set_xlim(-4, longest + 0.5)
    axes.set_ylim(height - 0.4, -2.6 if title else -1.6)
    if title:
        axes.text(0, -2.1, title, fontsize=9, color=INK, va="center", fontweight="bold")
    return figure


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


def charts(panels: Sequence[Panel]) -> "Figure":
    """Panels side by side, each with its legend."""
    figure = sheet(0.4 + 4.4 * len(panels), 3.7)
    for place, panel in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), place + 1)
        (_draw_bars if panel.stacked else _draw_lines)(axes, panel)
        dress(axes, panel.x, panel.y, panel.title)
        if panel.title or len(panel.lines) > 1:
            axes.legend(frameon=False, fontsize=8, labelcolor=INK)
    figure.tight_layout(w_pad=2.5)
    return figure


def _draw_lines(axes: "Axes", panel: Panel) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    heads = [name.split(",")[0] for name in panel.lines]
    for number, (name, points) in enumerate(panel.lines.items()):
        xs, ys, *band = zip(*sorted(points), strict=True)
        place = PLACES.get(heads[number], number) if len(set(heads)) == len(heads) else number
        if PUBLISHED in heads:  # beside every line of the paper's is one of ours
            place = number // 2
        colour = COLOURS[place % len(COLOURS)]
        axes.plot(
            *(xs, ys),
            label=name,
            linewidth=1.6,
            markersize=4,
            color=colour,
            marker=MARKERS[place % len(MARKERS)] if len(set(ys)) > 1 else "",
            linestyle="--" if name.startswith(PUBLISHED) else "-",
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


def _draw_bars(axes: "Axes", panel: Panel) -> None:
    names = [f"{x:g}" for x, _ in next(iter(panel.lines.values()))]
    floor = [0.0] * len(names)
    for number, (name, points) in enumerate(panel.lines.items()):
        heights = [point[1] for point in points]
        axes.bar(names, heights, 0.65, bottom=floor, label=name, color=COLOURS[number], alpha=0.85)
        floor = [a + b for a, b in zip(floor, heights, strict=True)]
    axes.set_ylim(0, 1.25 * max(floor))


def wer_by_block_size(evaluations: Iterable[Mapping[str, Any]], *, title: str = "") -> "Figure":
    """Word error rate against block size, a line per strategy (fig:wer_vs_bs_train, fig:wer_vs_bs_decode).

    ``evaluations`` are those of ``imputer evaluate --json``, or anything with strategy, block_size and wer: a
    number, or value, low and high. If there are several models, there is a line for each model and strategy.
    """
    rows = list(evaluations)
    models = {row.get("model", "") for row in rows}
    lines: dict[str, list[tuple[float, ...]]] = {}
    for row in rows:
        wer = row["wer"]
        rates = [wer[k] for k in ("value", "low", "high")] if isinstance(wer, Mapping) else [wer]
        name = row["strategy"].replace("_", " ") + (f", {row['model']}" if len(models) > 1 else "")
        lines.setdefault(name, []).append((row["block_size"], *(100 * rate for rate in rates)))
    return charts([Panel("block size = passes", "word error rate, %", lines, title, doubling=True)])


def reliability_diagram(points: Sequence[tuple[float, float, int]], *, title: str = "") -> "Figure":
    """(confidence, share of right words, words) of each bin, beside the diagonal that a calibrated model follows."""
    figure = sheet(4.2, 4.2)
    axes = figure.add_subplot()
    axes.plot([0, 1], [0, 1], color=FAINT, linewidth=1)
    axes.plot([p[0] for p in points], [p[1] for p in points], color=COLOURS[0], marker="o", markersize=4)
    for confidence, right, words in points:
        axes.annotate(
            f"{words:,}", (confidence, right), (4, -9), textcoords="offset points", fontsize=7, color=INK
        )
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1.02)
    axes.set_aspect("equal")
    dress(axes, "confidence (with the number of words)", "share of right words", title)
    figure.tight_layout()
    return figure


def sheet(width: float, height: float) -> "Figure":
    """A figure of its own, in no window and no global state."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError(
            "pictures need the package matplotlib: pip install 'imputer-asr[figures]'"
        ) from error
    figure = Figure(figsize=(width, height), facecolor=PAPER)
    FigureCanvasAgg(figure)
    return figure


def dress(axes: "Axes", x: str, y: str, title: str) -> None:
    """Labels, a title, and quiet axes."""
    axes.set_xlabel(x, fontsize=9, color=INK)
    axes.set_ylabel(y, fontsize=9, color=INK)
    axes.tick_params(labelsize=8, colors=INK, length=3)
    if title:
        axes.set_title(title, fontsize=10, color=INK, loc="left")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(FAINT)
    axes.grid(axis="y", color=FAINT, linewidth=0.5, alpha=0.6)
    axes.set_axisbelow(True)


def _draw_line(
    axes: "Axes",
    rows: Sequence[Sequence[str]],
    widths: Sequence[float],
    span: tuple[int, int],
    block_size: int,
    top: float,
) -> None:
    start, end = span
    edges = [0.0]
    for width in widths[start:end]:
        edges.append(edges[-1] + width)
    for number, row in enumerate(rows):
        y = top + number
        axes.text(-1.2, y, str(number), fontsize=7, color=INK, ha="right", va="center")
        before = rows[number - 1] if number else row
        for frame in range(start, end):
            left, width = edges[frame - start], widths[frame]
            new = before[frame] == MASK != row[frame]
            if new:
                axes.fill_between((left, left + width), y - 0.5, y + 0.5, color=NEW, alpha=0.16, linewidth=0)
            quiet = row[frame] in (BLANK, MASK)
            colour = NEW if new else FAINT if quiet else INK
            weight = "bold" if new or not quiet else "normal"
            style: dict[str, Any] = {
                "fontsize": 7,
                "color": colour,
                "fontweight": weight,
                "family": "DejaVu Sans",
            }
            axes.text(left + width / 2, y, shown(row[frame]), ha="center", va="center", **style)
    for frame in range(start, end + 1):
        if frame % block_size == 0 or frame in (start, end):
            x = edges[frame - start]
            axes.plot((x, x), (top - 0.5, top + len(rows) - 0.5), color=INK, linewidth=0.8)
    axes.text(-1.2, top - 0.95, "b", fontsize=7, color=INK, ha="right", va="center", style="italic")
