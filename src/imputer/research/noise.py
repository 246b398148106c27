"""Expert noise (eqn:expert_noise): shifting the roll-in alignment by up to a frame."""

from collections.abc import Mapping
from typing import Any

from imputer.decoding import Options
from imputer.research.report import Claim, alike, difference, expects, score_rows, table, variants
from imputer.research.trainings import Lab, compared, variant

TITLE = "Expert noise"
QUESTION = "What does it bring to shift the expert's alignment by up to one frame?"
DATASET = "libri"
NOISES = {"none": "none", "the whole utterance": "utterance", "every token": "token"}
SMALL = 0.02  # of the WER: the paper's 0.2 of about 11


def run(lab: Lab) -> dict[str, Any]:
    """DP with each kind of noise."""
    scores = {name: lab.score(variant(noise=noise), Options(8)) for name, noise in NOISES.items()}
    none = ("none", scores["none"])
    return {
        "rows": [score.row(name) for name, score in scores.items()],
        "against_none": [compared(none, (n, s)) for n, s in scores.items() if n != "none"],
    }


def section(result: Mapping[str, Any]) -> list[str]:
    """The kinds of noise."""
    lines = table(*score_rows(result["rows"]))
    lines += [
        "",
        f"{variants(result)} The paper gains less than 0.2 points of about 11, and has no table.",
        "",
    ]
    return lines + [
        f"- Shifting {one['second']} less none: {difference(one)}." for one in result["against_none"]
    ]


def claims(result: Mapping[str, Any]) -> list[Claim]:
    """An improvement, and a very minor one."""
    found = result["against_none"][0]
    paper = "less than 0.2 points of about 11"
    return [
        Claim("expert noise is an improvement", paper, difference(found), expects(found, -1)),
        Claim("expert noise is not critical", paper, difference(found), alike(found, SMALL)),
    ]
