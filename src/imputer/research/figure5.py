"""Figure 5 (fig:wer_vs_bs_train): block size when training and decoding agree."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from imputer.display import drawings
from imputer.evaluation.trials import LEVEL
from imputer.research.claims import FAILS, HOLDS, OPEN, Claim, points, settled
from imputer.research.results import Result
from imputer.research.tables import markdown, percent, rate, variants
from imputer.research.trainings import Lab, variant, way

TITLE = "Figure 5, the block size of training and decoding"
QUESTION = "Which block size is best when training and decoding use the same?"
DATASET = "libri"
SIZES = (2, 4, 8, 16, 32)
STRATEGIES = ("block", "alternate_sub_block", "right_most_last")
PAPER_BY_SIZE = {
    "alternate_sub_block": dict(zip(SIZES, (14.2, 11.3, 11.3, 11.8, 12.7), strict=True)),
    "right_most_last": dict(zip(SIZES, (14.2, 11.7, 11.4, 11.7, 12.1), strict=True)),
}


def at(strategy: str, size: int) -> str:
    """The name of a row."""
    return f"{strategy.replace('_', ' ')}, {size}"


def run(lab: Lab) -> dict[str, Any]:
    """DP at every block size, decoded at the same one by every strategy."""
    rows = []
    for size in SIZES:
        ways = {at(strategy, size): way(size, strategy) for strategy in STRATEGIES}
        rows += lab.rows(variant(block_size=size), ways, at_most=lab.dataset.many_passes)
    return {
        "rows": rows,
        "pairs": [(at(s, 8), at(s, size)) for s in STRATEGIES for size in SIZES if size != 8],
    }


def by_size(result: Result, paper: Mapping[str, Mapping[int, float]]) -> list[str]:
    """A row per block size, a column per strategy, the paper's beside it."""
    cells = {(row["way"]["strategy"], row["way"]["block_size"]): name for name, row in result.rows.items()}
    strategies = list(dict.fromkeys(strategy for strategy, _ in cells))
    headings = ["block size"]
    for strategy in strategies:
        headings += [strategy.replace("_", " ")] + (["paper"] if strategy in paper else [])
    rows = []
    for size in sorted({size for _, size in cells}):
        row = [str(size)]
        for strategy in strategies:
            row.append(rate(result.rate(cells[strategy, size])) if (strategy, size) in cells else "")
            row += [str(paper[strategy].get(size, ""))] if strategy in paper else []
        rows.append(row)
    return markdown(headings, rows)


def table(result: Result) -> list[str]:
    """WER by block size and strategy."""
    return by_size(result, PAPER_BY_SIZE)


def text(result: Result) -> str:
    """What the figures are."""
    return (
        f"WER % on {len(result['utterances']['ids'])} utterances spread over the test set; the paper's is dev-other. "
        + variants(result)
    )


def claims(result: Result) -> list[Claim]:
    """8 is best: holds if all four others are significantly worse, fails if one is significantly better."""
    found = []
    # Corrected for four comparisons.
    level = 1 - (1 - LEVEL) / (len(SIZES) - 1)
    for strategy in PAPER_BY_SIZE:
        others = {
            size: result.difference(at(strategy, 8), at(strategy, size), level) for size in SIZES if size != 8
        }
        size, best = min(others.items(), key=lambda one: one[1].value)
        verdict = OPEN
        if settled(best):
            worse = all(one.low > 0 for one in others.values())
            verdict = HOLDS if worse else FAILS if any(one.high < 0 for one in others.values()) else OPEN
        found.append(
            Claim(
                f"block size 8 is best when training and decoding agree ({strategy.replace('_', ' ')})",
                "best at 8",
                f"{size} - 8: {points(best)} at {100 * level:.2f} %, one of {len(others)} sizes",
                verdict,
                "block_size" if strategy == "alternate_sub_block" else "",
                f"lowest at {8 if best.value > 0 else size}",
            )
        )
    return found


def draw(result: Result, path: Path) -> None:
    """A line per strategy."""
    draw_sizes(result, path, TITLE.split(", ")[1])


def draw_sizes(result: Result, path: Path, title: str) -> None:
    """WER against block size."""
    rows = [{**row["way"], "wer": vars(result.rate(name))} for name, row in result.rows.items()]
    drawings.save(drawings.wer_by_block_size(rows, title=title), path)


def lowest(result: Result, strategy: str) -> str:
    """The block size with the lowest WER, and that WER."""
    rates = {row["way"]["block_size"]: result.rate(name).value for name, row in result.rows.items()
             if row["way"]["strategy"] == strategy}  # fmt: skip
    size, best = min(rates.items(), key=lambda one: one[1])
    return f"{size} ({percent(best)} %)"
