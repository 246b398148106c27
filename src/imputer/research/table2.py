"""Table 2 (table:librispeech): CTC, Imputer (IM) and Imputer (DP) on read books."""

from collections.abc import Mapping
from typing import Any

from imputer.research import comparison
from imputer.research.comparison import CTC, DP, DP_SCRATCH, IM, IM_SCRATCH, draw, run
from imputer.research.report import Claim

__all__ = ["DATASET", "QUESTION", "TITLE", "claims", "draw", "run", "section"]

TITLE = "Table 2, LibriSpeech"
QUESTION = "Does dynamic programming beat CTC and imitation, with the same network and training steps?"
DATASET = "libri"
PAPER = {CTC: "4.6", IM: "5.5", IM_SCRATCH: "5.5", DP: "4.0", DP_SCRATCH: "4.0"}  # test-clean


def section(result: Mapping[str, Any]) -> list[str]:
    """The table with the paper's test-clean figures beside it."""
    caption = "The paper's column is test-clean after 960 hours (test-other: CTC 13.0, IM 14.6, DP 11.1)."
    return comparison.section(result, PAPER, caption)


def claims(result: Mapping[str, Any]) -> list[Claim]:
    """What table 2 claims."""
    return comparison.claims(
        result,
        comparison.Paper(
            "13 % lower (test-clean), 15 % (test-other)",
            "20 % higher (test-clean), 12 % (test-other)",
            "27 % lower (test-clean), 24 % (test-other)",
        ),
    )
