"""Figure 5 (fig:wer_vs_bs_train): block size when training and decoding agree."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from imputer.decoding import Options
from imputer.display import drawings
from imputer.research.report import FAILS, HOLDS, OPEN, Claim, difference, percent, rate, table, variants
from imputer.research.trainings import Lab, Score, compared, variant

TITLE = "Figure 5, the block size of training and decoding"
QUESTION = "Which block size is best when training and decoding use the same?"
DATASET = "libri"
SIZES = (2, 4, 8, 16, 32)
STRATEGIES = ("block", "alternate_sub_block", "right_most_last")
PAPER = {
    "alternate_sub_block": dict(zip(SIZES, (14.2, 11.3, 11.3, 11.8, 12.7), strict=True)),
    "right_most_last": dict(zip(SIZES, (14.2, 11.7, 11.4, 11.7, 12.1), strict=True)),
}


def run(lab: Lab) -> dict[str, Any]:
    """DP at every block size, decoded at the same one by every strategy."""
    scores: dict[tuple[str, int], Score] = {}
    for size in SIZES:
        found = lab.scores(
            variant(block_size=size),
            [Options(size, strategy) for strategy in STRATEGIES],
            at_most=lab.dataset.many_passes,
        )
        scores |= {(str(score.options.strategy), size): score for score in found}
    return {
        "rows": [score.row(f"{strategy}, {size}") for (strategy, size), score in scores.items()],
        "against_8": {
            strategy: [
                compared(("8", scores[strategy, 8]), (str(b), scores[strategy, b])) for b in SIZES if b != 8
            ]
            for strategy in STRATEGIES
        },
    }


def by_size(result: Mapping[str, Any], paper: Mapping[str, Mapping[int, float]]) -> list[str]:
    """A row a block size, a column a strategy, the paper's in brackets."""
    cells = {(row["strategy"], row["block_size"]): row["wer"] for row in result["rows"]}
    sizes = sorted({size for _, size in cells})
    strategies = list(dict.fromkeys(strategy for strategy, _ in cells))
    headings = ["block size"]
    for strategy in strategies:
        headings += [strategy.replace("_", " ")] + (["paper"] if strategy in paper else [])
    rows = []
    for size in sizes:
        row = [str(size)]
        for strategy in strategies:
            row.append(rate(cells[strategy, size]) if (strategy, size) in cells else "")
            if strategy in paper:
                row.append(str(paper[strategy].get(size, "")))
        rows.append(row)
    return table(headings, rows)


def section(result: Mapping[str, Any]) -> list[str]:
    """WER by block size and strategy."""
    return [
        *by_size(result, PAPER),
        "",
        f"WER % on {result['test_utterances_used']} utterances spread over the test set; the paper's is dev-other. "
        + variants(result),
    ]


def claims(result: Mapping[str, Any]) -> list[Claim]:
    """8 is best: holds if it is, open if the best one is not surely better, as one of four that might have been."""
    found = []
    for strategy in PAPER:
        best = min(result["against_8"][strategy], key=lambda one: one["difference"]["value"])
        is_best, others = best["difference"]["value"] >= 0, len(SIZES) - 1
        found.append(
            Claim(
                f"block size 8 is best when training and decoding agree ({strategy.replace('_', ' ')})",
                "best at 8",
                f"{'8' if is_best else best['second']} is lowest; {best['second']} less 8: {difference(best)}, "
                f"p = {best['p_value']:.3f}, one of {others} sizes",
                HOLDS if is_best else FAILS if best["p_value"] * others < 0.05 else OPEN,
            )
        )
    return found


def draw(result: Mapping[str, Any], path: Path) -> None:
    """A line a strategy."""
    drawings.save(drawings.wer_by_block_size(result["rows"], title=TITLE.split(", ")[1]), path)


def lowest(result: Mapping[str, Any], strategy: str) -> str:
    """The block size with the lowest WER, and that WER."""
    rows = [row for row in result["rows"] if row["strategy"] == strategy]
    best = min(rows, key=lambda row: row["wer"]["value"])
    return f"{best['block_size']} ({percent(best['wer']['value'])} %)"
