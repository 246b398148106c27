"""The topology: delete blanks only (the paper's), or merge repeats first (classical CTC)."""

from collections.abc import Mapping
from typing import Any

from imputer.experiments.lab import How, Lab, Maker, Score, compared, dp
from imputer.experiments.results import Claim, difference, expects, score_rows, table

TITLE = "Topology"
QUESTION = (
    "Does it matter whether repeated tokens are merged, and does the main claim hold in both topologies?"
)
DATASET = "libri"
PLAIN, READ, MERGING = "no merging", "no merging, merged when read", "merging repeats"
TRAININGS = {PLAIN: False, READ: False, MERGING: True}  # whether training merges
CTC, ONE_PASS, DP = "CTC", "Imputer (DP), 1 pass", "Imputer (DP), 8 passes"


def ctc(steps: int, merge: bool) -> Maker:
    """How to make CTC in one of the topologies."""
    return lambda t: t.ctc(steps, merge_repeats=merge)


def scored(lab: Lab, topology: str) -> dict[str, Score]:
    """The expert; CTC with the whole budget; the main tables' Imputer, which learns from that expert."""
    first, more, merge = lab.dataset.expert_steps, lab.dataset.imputer_steps, TRAININGS[topology]
    greedy, imputed = (How(size, merged=topology == READ) for size in (1, 8))
    one, eight = lab.scores(dp(first + more, model={"merge_repeats": merge}), [greedy, imputed])
    return {
        "the expert": lab.score(ctc(first, merge), greedy),
        CTC: lab.score(ctc(first + more + first, merge), greedy),
        ONE_PASS: one,
        DP: eight,
    }


def run(lab: Lab) -> dict[str, Any]:
    """CTC and DP in both topologies, each with the same budget, the expert's steps counted."""
    found = {name: scored(lab, name) for name in TRAININGS}
    named = {(model, name): (f"{model}, {name}", s) for name, of in found.items() for model, s in of.items()}
    return {
        "rows": [score.row(name) for name, score in named.values()],
        "read": [compared(named[model, PLAIN], named[model, READ]) for model in (CTC, DP)],
        "trained": [compared(named[model, PLAIN], named[model, MERGING]) for model in (CTC, DP)],
        "against_ctc": {name: compared(named[CTC, name], named[DP, name]) for name in TRAININGS},
    }


def section(result: Mapping[str, Any]) -> list[str]:
    """Both topologies; what changes between them, and what holds in each."""
    steps = result["steps"]
    budget = steps["expert"] + steps["imputer"] + steps["expert"]
    pairs = [*result["read"], *result["trained"], *result["against_ctc"].values()]
    return [
        *table(*score_rows(result["rows"])),
        "",
        f"The expert has {steps['expert']:,} steps, CTC {budget:,}, as many as the expert and the Imputer together. "
        f"Not comparable: {result['data']['not_comparable']}.",
        "",
        *(f"- {one['second']} less {one['first']}: {difference(one)}." for one in pairs),
    ]


def claims(result: Mapping[str, Any]) -> list[Claim]:
    """The main claim once more, where repeats are merged."""
    found, where = result["against_ctc"][MERGING], result["data"]["name"].replace("_", " ")
    return [
        Claim(
            f"DP at 8 passes has a lower WER than CTC, where repeats are merged ({where}, from scratch)",
            "its alignments delete blanks only",
            difference(found),
            expects(found, -1),
        )
    ]
