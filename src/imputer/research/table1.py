"""Table 1 (tab:wsj): CTC, Imputer (IM) and Imputer (DP) with the paper's convolutions, trained from filter banks."""

from imputer.research import comparison
from imputer.research.claims import Claim
from imputer.research.comparison import CTC, DP, IM, at, draw, run
from imputer.research.results import Result

__all__ = ["DATASET", "PAPER", "QUESTION", "TITLE", "claims", "draw", "run", "text"]

TITLE = "Table 1, a small corpus from filter banks"
QUESTION = "Does dynamic programming beat CTC and imitation, with the same network and training steps?"
DATASET = "digits"
PAPER = {CTC: "15.2", at(IM, 8): "16.5", at(DP, 8): "12.7"}  # WSJ


def text(result: Result) -> str:
    """What the paper's column is."""
    return comparison.text(result, "The paper's column is WSJ, 82 hours (CER: CTC 5.6, IM 6.2, DP 4.9).")


def claims(result: Result) -> list[Claim]:
    """What table 1 claims."""
    paper = {"dp_ctc": "16 % lower (WSJ)", "im_ctc": "9 % higher (WSJ)", "dp_im": "23 % lower (WSJ)"}
    return comparison.claims(result, paper)
