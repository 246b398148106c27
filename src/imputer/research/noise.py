"""Expert noise (eqn:expert_noise): shifting the roll-in alignment by up to one frame."""

from typing import Any

from imputer.research.claims import Claim, alike, expects, judged
from imputer.research.results import Result
from imputer.research.tables import variants
from imputer.research.trainings import Lab, variant, way

TITLE = "Expert noise"
QUESTION = "Does it help to shift the expert's alignment by up to one frame?"
DATASET = "libri"
NOISES = {"none": "none", "the whole utterance": "utterance", "every token": "token"}
SMALL = 0.02  # of the WER: the paper's 0.2 of about 11


def run(lab: Lab) -> dict[str, Any]:
    """DP with each kind of noise."""
    rows = [lab.row(name, variant(noise=noise), way(8)) for name, noise in NOISES.items()]
    return {"rows": rows, "pairs": [("none", name) for name in NOISES if name != "none"]}


def text(result: Result) -> str:
    """What the rows are."""
    return f"{variants(result)} The paper gains less than 0.2 points of about 11, and has no table."


def claims(result: Result) -> list[Claim]:
    """An improvement, and a very minor one."""
    found = result.difference("none", "the whole utterance")
    paper = "less than 0.2 points of about 11"
    return [
        judged("expert noise is an improvement", paper, found, expects(found, -1)),
        judged("expert noise is not critical", paper, found, alike(found, SMALL)),
    ]
