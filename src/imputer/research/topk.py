"""Top-k decoding: the likeliest frames of the whole utterance, blocks ignored."""

from collections.abc import Mapping
from typing import Any

from imputer.decoding import Options
from imputer.research.report import Claim, difference, expects, score_rows, table, variants
from imputer.research.trainings import Lab, compared, variant

TITLE = "Top-k decoding"
QUESTION = (
    "Does it matter that every block gets one frame a pass, or may the likeliest frames be taken anywhere?"
)
DATASET = "libri"
PAPER = {"trained with Bernoulli, block": "11.2", "trained with Bernoulli, top k": "11.6"}


def run(lab: Lab) -> dict[str, Any]:
    """The Bernoulli model, as in the paper, and the Block one, decoded both ways in 8 passes."""
    rows, comparisons = [], {}
    for masking in ("bernoulli", "block"):
        block, top = lab.scores(
            variant(masking=masking),
            [Options(8), Options(8, "top_k")],
        )
        names = [f"trained with {masking.title()}, {how}" for how in ("block", "top k")]
        rows += [score.row(name) for name, score in zip(names, (block, top), strict=True)]
        comparisons[masking] = compared((names[0], block), (names[1], top))
    return {"rows": rows, "comparisons": comparisons}


def section(result: Mapping[str, Any]) -> list[str]:
    """Both models, both ways."""
    return [
        *table(*score_rows(result["rows"], PAPER)),
        "",
        f"The paper's column is dev-other. {variants(result)} Frames that would be neighbours in one pass wait, so "
        "top k can take a pass or two more than 8.",
    ]


def claims(result: Mapping[str, Any]) -> list[Claim]:
    """Slightly worse than block decoding."""
    found = result["comparisons"]["bernoulli"]
    return [
        Claim(
            "top-k decoding is slightly worse than block decoding",
            "11.6 against 11.2",
            difference(found),
            expects(found, 1, room=0),
        )
    ]
