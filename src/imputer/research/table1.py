"""Table 1 (tab:wsj): CTC, Imputer (IM) and Imputer (DP) with the paper's convolutions, trained from filter banks."""

from collections.abc import Mapping
from typing import Any

from imputer.research import comparison
from imputer.research.comparison import CTC, DP, DP_SCRATCH, IM, IM_SCRATCH, draw, run
from imputer.research.report import Claim

__all__ = ["DATASET", "QUESTION", "TITLE", "claims", "draw", "run", "section"]

TITLE = "Table 1, a small corpus from filter banks"
QUESTION = "Does dynamic programming beat CTC and imitation, with the same network and training steps?"
DATASET = "digits"
PAPER = {CTC: "15.2", IM: "16.5", IM_SCRATCH: "16.5", DP: "12.7", DP_SCRATCH: "12.7"}  # WSJ


def section(result: Mapping[str, Any]) -> list[str]:
    """The table with the paper's WSJ figures beside it."""
    caption = "The paper's column is WSJ, 82 hours (CER: CTC 5.6, IM 6.2, DP 4.9)."
    return comparison.section(result, PAPER, caption)


def claims(result: Mapping[str, Any]) -> list[Claim]:
    """What table 1 claims."""
    return comparison.claims(
        result,
        comparison.Paper(
            "16 % lower (WSJ: 12.7 against 15.2)",
            "9 % higher (WSJ: 16.5 against 15.2)",
            "23 % lower (WSJ: 12.7 against 16.5)",
        ),
    )
