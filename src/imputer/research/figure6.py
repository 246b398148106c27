"""Figure 6 (fig:wer_vs_bs_decode): trained at block size 8, decoded at others."""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from imputer.decoding import Options
from imputer.display import drawings
from imputer.research.figure5 import by_size, lowest
from imputer.research.report import FAILS, HOLDS, OPEN, Claim, alike, difference, sign
from imputer.research.trainings import Lab, Trainings, compared

TITLE = "Figure 6, the block size of decoding"
QUESTION = "What do more passes bring to a model that was trained at block size 8?"
DATASET = "libri"
SIZES = (2, 4, 8, 16, 32, 64, 128, 256)
BLOCK_SIZES = SIZES[:5]  # for plain block decoding; beyond, it hardly differs from Right Most Last
SMALL = 0.05  # of the WER; the paper's Alternate Sub-block gets worse by a third
PAPER = {
    "alternate_sub_block": dict(zip(SIZES, (13.6, 11.4, 11.3, 11.13, 11.4, 12.0, 13.1, 15.0), strict=True)),
    "right_most_last": dict(zip(SIZES, (13.6, 11.8, 11.4, 11.14, 11.1, 11.05, 11.03, 11.0), strict=True)),
}


def run(lab: Lab) -> dict[str, Any]:
    """Decode the main table's DP model at every block size by every strategy."""
    ways = [Options(size) for size in BLOCK_SIZES] + [
        Options(size, strategy) for strategy in PAPER for size in SIZES
    ]
    scores = lab.scores(
        Trainings.main,
        ways,
        at_most=lab.dataset.many_passes,
    )
    named = {(score.options.strategy, score.options.block_size): score for score in scores}
    return {
        "rows": [score.row(f"{strategy}, {size}") for (strategy, size), score in named.items()],
        "next": {
            strategy: [
                compared((str(a), named[strategy, a]), (str(b), named[strategy, b]))
                for a, b in itertools.pairwise(SIZES)
            ]
            for strategy in PAPER
        },
        "last_against_8": {
            strategy: compared(("8", named[strategy, 8]), (str(SIZES[-1]), named[strategy, SIZES[-1]]))
            for strategy in PAPER
        },
    }


def section(result: Mapping[str, Any]) -> list[str]:
    """WER by block size and strategy."""
    return [
        *by_size(result, PAPER),
        "",
        f"WER % on {result['test_utterances_used']} utterances spread over the test set; the paper's is dev-other. "
        f"Not comparable: {result['data']['not_comparable']}. An utterance shorter than a block takes as many "
        f"passes as it has frames. Plain block decoding was run up to {BLOCK_SIZES[-1]}.",
    ]


def claims(result: Mapping[str, Any]) -> list[Claim]:
    """Right Most Last never surely gets worse with a larger block; Alternate Sub-block does in the end."""
    worse = [one for one in result["next"]["right_most_last"] if sign(one, room=0) > 0]
    last = result["last_against_8"]["right_most_last"]
    ends = sign(last, room=0)
    verdict = FAILS if worse or ends > 0 else HOLDS if ends < 0 else OPEN
    alternate = result["last_against_8"]["alternate_sub_block"]
    return [
        Claim(
            "Right Most Last keeps improving with larger decoding blocks",
            "11.4 at 8, 11.0 at 256",
            f"256 less 8: {difference(last)}; lowest at {lowest(result, 'right_most_last')}",
            verdict,
        ),
        Claim(
            "Alternate Sub-block gets worse again with large blocks",
            "11.3 at 8, 15.0 at 256",
            f"256 less 8: {difference(alternate)}; lowest at {lowest(result, 'alternate_sub_block')}",
            HOLDS if sign(alternate, room=0) > 0 else FAILS if alike(alternate, SMALL) == HOLDS else OPEN,
        ),
    ]


def draw(result: Mapping[str, Any], path: Path) -> None:
    """A line a strategy."""
    drawings.save(drawings.wer_by_block_size(result["rows"], title="trained at block size 8"), path)
