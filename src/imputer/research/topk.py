"""Top-k decoding: the k = T / B likeliest frames per pass, wherever they are."""

from typing import Any

from imputer.research.claims import Claim, expects, judged
from imputer.research.results import Result
from imputer.research.tables import variants
from imputer.research.trainings import Lab, variant, way

TITLE = "Top-k decoding"
QUESTION = (
    "Does it matter that every block gets one frame per pass, or may the likeliest frames be taken anywhere?"
)
DATASET = "libri"
MASKINGS = ("bernoulli", "block")
PAPER = {"trained with Bernoulli, block": "11.2", "trained with Bernoulli, top k": "11.6"}


def run(lab: Lab) -> dict[str, Any]:
    """The Bernoulli model, as in the paper, and the Block one, decoded both ways in 8 passes."""
    rows = []
    for masking, (block, top) in zip(MASKINGS, pairs(), strict=True):
        rows += lab.rows(variant(masking=masking), {block: way(8), top: way(8, "top_k")})
    return {"rows": rows, "pairs": pairs()}


def pairs() -> list[tuple[str, str]]:
    """Top k - block decoding."""
    return [(f"trained with {one.title()}, block", f"trained with {one.title()}, top k") for one in MASKINGS]


def text(result: Result) -> str:
    """What the rows are."""
    return (
        f"The paper's column is dev-other. {variants(result)} No two neighbours are committed in one pass, so top k "
        "can take a pass or two more than 8."
    )


def claims(result: Result) -> list[Claim]:
    """Slightly worse than block decoding."""
    found = result.difference(*pairs()[0])
    return [
        judged(
            "top-k decoding is slightly worse than block decoding",
            "11.6 against 11.2",
            found,
            expects(found, 1),
        )
    ]
