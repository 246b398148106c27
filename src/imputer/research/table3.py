"""Table 3 (tab:masking): masking policies."""

from collections.abc import Mapping
from typing import Any

from imputer.decoding import Options
from imputer.research.report import FAILS, HOLDS, OPEN, Claim, alike, difference, score_rows, table, variants
from imputer.research.trainings import Lab, compared, variant

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
    scores = {name: lab.score(variant(masking=policy), Options(8)) for name, policy in POLICIES.items()}
    block = ("Block", scores["Block"])
    return {
        "rows": [score.row(name) for name, score in scores.items()],
        "against_block": [compared(block, (n, s)) for n, s in scores.items() if n != "Block"],
    }


def section(result: Mapping[str, Any]) -> list[str]:
    """The policies, the paper's figures beside them."""
    lines = table(*score_rows(result["rows"], PAPER))
    lines += ["", f"The paper's column is dev-other. {variants(result)}", ""]
    lines += [f"- {one['second']} less Block: {difference(one)}." for one in result["against_block"]]
    return [
        *lines,
        "",
        "*Block, as printed* masks 0 to 7 frames of each block of 8, so that the network never sees the all-masked "
        "start of decoding; *Block* masks 1 to 8 (departure `masking-range`).",
    ]


def claims(result: Mapping[str, Any]) -> list[Claim]:
    """Robust to the choice: no policy differs from Block by more than a few per cent."""
    papers = [one for one in result["against_block"] if one["second"] in PAPER]
    found = {alike(one, SMALL) for one in papers}
    return [
        Claim(
            "the choice of masking policy matters little",
            "11.2 to 11.4",
            "; ".join(f"{one['second']} {difference(one)}" for one in papers),
            FAILS if FAILS in found else OPEN if OPEN in found else HOLDS,
        )
    ]
