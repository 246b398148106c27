"""Figure 6 (fig:wer_vs_bs_decode): trained at block size 8, decoded at others."""

import itertools
from pathlib import Path
from typing import Any

from imputer.evaluation.trials import LEVEL
from imputer.research import figure5
from imputer.research.claims import FAILS, HOLDS, OPEN, Claim, alike, points, sign
from imputer.research.figure5 import at, by_size, lowest
from imputer.research.results import Result
from imputer.research.trainings import Lab, dp, way

TITLE = "Figure 6, the block size of decoding"
QUESTION = "How much do more passes gain for a model that was trained at block size 8?"
DATASET = "libri"
SIZES = (2, 4, 8, 16, 32, 64, 128, 256)
BLOCK_SIZES = SIZES[:5]  # for plain block decoding; beyond, it hardly differs from Right Most Last
SMALL = 0.05  # of the WER; the paper's Alternate Sub-block gets worse by a third
ALTERNATE, LAST = "alternate_sub_block", "right_most_last"
PAPER_BY_SIZE = {
    ALTERNATE: dict(zip(SIZES, (13.6, 11.4, 11.3, 11.13, 11.4, 12.0, 13.1, 15.0), strict=True)),
    LAST: dict(zip(SIZES, (13.6, 11.8, 11.4, 11.14, 11.1, 11.05, 11.03, 11.0), strict=True)),
}


def run(lab: Lab) -> dict[str, Any]:
    """Decode the main table's DP model at every block size by every strategy."""
    ways = {at("block", size): way(size) for size in BLOCK_SIZES}
    ways |= {at(strategy, size): way(size, strategy) for strategy in PAPER_BY_SIZE for size in SIZES}
    return {"rows": lab.rows(dp(), ways, at_most=lab.dataset.many_passes), "pairs": pairs()}


def pairs() -> list[tuple[str, str]]:
    """Every size and the next, and the last against 8."""
    return [
        (at(strategy, a), at(strategy, b))
        for strategy in PAPER_BY_SIZE
        for a, b in [*itertools.pairwise(SIZES), (8, SIZES[-1])]
    ]


def table(result: Result) -> list[str]:
    """WER by block size and strategy."""
    return by_size(result, PAPER_BY_SIZE)


def text(result: Result) -> str:
    """What the figures are."""
    return (
        f"WER % on {len(result['utterances']['ids'])} utterances spread over the test set; the paper's is dev-other. "
        f"Not comparable: {result.data['not_comparable']}. An utterance shorter than a block takes as many "
        f"passes as it has frames. Plain block decoding was run up to {BLOCK_SIZES[-1]}."
    )


def claims(result: Result) -> list[Claim]:
    """Right Most Last never gets significantly worse with a larger block; Alternate Sub-block does in the end."""
    level = 1 - (1 - LEVEL) / (len(SIZES) - 1)  # corrected for so many steps
    steps = [result.difference(at(LAST, a), at(LAST, b), level) for a, b in itertools.pairwise(SIZES)]
    last, alternate = (result.difference(at(s, 8), at(s, SIZES[-1])) for s in (LAST, ALTERNATE))
    worse = any(sign(one) > 0 for one in steps) or sign(last) > 0
    return [
        Claim(
            "Right Most Last keeps improving with larger decoding blocks",
            "11.4 at 8, 11.0 at 256",
            f"256 - 8: {points(last)}; lowest at {lowest(result, LAST)}",
            FAILS if worse else HOLDS if sign(last) < 0 else OPEN,
        ),
        Claim(
            "Alternate Sub-block gets worse again with large blocks",
            "11.3 at 8, 15.0 at 256",
            f"256 - 8: {points(alternate)}; lowest at {lowest(result, ALTERNATE)}",
            HOLDS if sign(alternate) > 0 else FAILS if alike(alternate, SMALL) == HOLDS else OPEN,
        ),
    ]


def draw(result: Result, path: Path) -> None:
    """A line per strategy."""
    figure5.draw_sizes(result, path, "trained at block size 8")
