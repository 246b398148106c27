"""Table 3 (tab:masking): masking policies."""

from typing import Any

from imputer.research.claims import FAILS, HOLDS, OPEN, Claim, alike, points
from imputer.research.results import Result
from imputer.research.tables import variants
from imputer.research.trainings import Lab, variant, way

TITLE = "Table 3, masking policies"
QUESTION = "How much does it matter which frames are masked out in training?"
DATASET = "libri"
POLICIES = {
    "Bernoulli": "bernoulli",
    "Uniform": "uniform",
    "Block": "block",
    "Block, as printed": "block_printed",
}
SMALL = 0.05  # of the WER; the paper's differ by 0.02
PAPER = {"Bernoulli": "11.2", "Uniform": "11.4", "Block": "11.4"}  # dev-other


def run(lab: Lab) -> dict[str, Any]:
    """DP with each policy, decoded in 8 passes; and compared with Block."""
    rows = [lab.row(name, variant(masking=policy), way(8)) for name, policy in POLICIES.items()]
    return {"rows": rows, "pairs": [("Block", name) for name in POLICIES if name != "Block"]}


def text(result: Result) -> str:
    """What the rows are."""
    return (
        f"The paper's column is dev-other. {variants(result)} *Block, as printed* masks 0 to 7 frames of each block of "
        "8, so that the network never sees the all-masked start of decoding; *Block* masks 1 to 8 (departure "
        "`masking-range`)."
    )


def claims(result: Result) -> list[Claim]:
    """Robust to the choice: no policy differs from Block by more than a few per cent."""
    papers = {name: result.difference("Block", name) for name in PAPER if name != "Block"}
    found = {alike(one, SMALL) for one in papers.values()}
    return [
        Claim(
            "the choice of masking policy matters little",
            "11.2 to 11.4",
            "; ".join(f"{name} {points(one)}" for name, one in papers.items()),
            FAILS if FAILS in found else OPEN if OPEN in found else HOLDS,
            "masking",
            ", ".join(f"{name} {100 * one.relative[0]:+.0f} %" for name, one in papers.items()),
        )
    ]
