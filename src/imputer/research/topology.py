"""The topology: delete blanks only (the paper's), or merge repeats first (classical CTC)."""

from collections.abc import Mapping
from typing import Any

from imputer.decoding import Options
from imputer.research.report import Claim, difference, expects, score_rows, table
from imputer.research.trainings import Lab, Maker, Score, compared, dp

TITLE = "Topology"
QUESTION = (
    "Does it matter whether repeated tokens are merged, and does the main claim hold in both topologies?"
)
DATASET = "libri"
PLAIN, MERGING = "no merging", "merging repeats"
TOPOLOGIES = {PLAIN: False, MERGING: True}
CTC, ONE_PASS, DP = "CTC", "Imputer (DP), 1 pass", "Imputer (DP), 8 passes"


def ctc(steps: int, merge: bool) -> Maker:
    """How to make CTC in one of the topologies."""
    return lambda t: t.ctc(steps, merge_repeats=merge)


def scored(lab: Lab, merge: bool) -> dict[str, Score]:
    """CTC with the whole budget; the main tables' Imputer, the steps of its expert counted."""
    first, more = lab.dataset.expert_steps, lab.dataset.imputer_steps
    one, eight = lab.scores(dp(first + more, model={"merge_repeats": merge}), [Options(1), Options(8)])
    return {CTC: lab.score(ctc(first + more + first, merge), Options(1)), ONE_PASS: one, DP: eight}


def run(lab: Lab) -> dict[str, Any]:
    """CTC and DP in both topologies."""
    found = {name: scored(lab, merge) for name, merge in TOPOLOGIES.items()}
    named = {(model, name): (f"{model}, {name}", s) for name, of in found.items() for model, s in of.items()}
    return {
        "rows": [score.row(name) for name, score in named.values()],
        "merging": [compared(named[model, PLAIN], named[model, MERGING]) for model in (CTC, ONE_PASS, DP)],
        "against_ctc": {name: compared(named[CTC, name], named[DP, name]) for name in TOPOLOGIES},
    }


def section(result: Mapping[str, Any]) -> list[str]:
    """Both topologies; what changes between them, and what holds in each."""
    steps = result["steps"]
    imputer = steps["expert"] + steps["imputer"]
    pairs = [*result["merging"], *result["against_ctc"].values()]
    return [
        *table(*score_rows(result["rows"])),
        "",
        f"CTC has {imputer + steps['expert']:,} steps, the Imputer {imputer:,} and its expert {steps['expert']:,}. "
        f"Not comparable: {result['data']['not_comparable']}.",
        "",
        *(f"- {one['second']} less {one['first']}: {difference(one)}." for one in pairs),
    ]


def claims(result: Mapping[str, Any]) -> list[Claim]:
    """The main claim once more where repeats are merged; without merging too, on a data set without a main table."""
    data = result["data"]["name"]
    return [
        Claim(
            f"DP at 8 passes has a lower WER than CTC, {name} ({data.replace('_', ' ')}, from scratch)",
            "13 to 16 % lower; calls merging a choice, does not say what its tables use",
            difference(found),
            expects(found, -1),
        )
        for name, found in result["against_ctc"].items()
        if name == MERGING or data != DATASET
    ]
