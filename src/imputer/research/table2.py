"""Table 2 (table:librispeech): CTC, Imputer (IM) and Imputer (DP) on read books."""

from imputer.research import comparison
from imputer.research.claims import Claim
from imputer.research.comparison import CTC, DP, IM, at, draw, run
from imputer.research.results import Result

__all__ = ["DATASET", "PAPER", "QUESTION", "TITLE", "claims", "draw", "run", "text"]

TITLE = "Table 2, LibriSpeech"
QUESTION = "Does dynamic programming beat CTC and imitation, with the same network and training steps?"
DATASET = "libri"
PAPER = {CTC: "4.6", at(IM, 8): "5.5", at(DP, 8): "4.0"}  # test-clean


def text(result: Result) -> str:
    """What the paper's column is."""
    caption = "The paper's column is test-clean after 960 hours (test-other: CTC 13.0, IM 14.6, DP 11.1)."
    return comparison.text(result, caption)


def claims(result: Result) -> list[Claim]:
    """What table 2 claims."""
    paper = {
        "dp_ctc": "13 % lower (test-clean), 15 % (test-other)",
        "im_ctc": "20 % higher (test-clean), 12 % (test-other)",
        "dp_im": "27 % lower (test-clean), 24 % (test-other)",
    }
    return comparison.claims(result, paper)
