"""The topology: delete blanks only (the paper's), or merge repeats first (classical CTC)."""

from collections.abc import Mapping
from typing import Any

from imputer.experiments.lab import How, Lab, Maker, compared, variant
from imputer.experiments.results import Claim, difference, score_rows, table, variants

TITLE = "Topology"
QUESTION = "Does it matter whether repeated tokens are merged?"
DATASET = "libri"
TOPOLOGIES = {"no merging": False, "merging repeats": True}


def expert(merge_repeats: bool) -> Maker:
    """How to make the expert in one of the topologies."""
    return lambda t: t.expert(merge_repeats=merge_repeats)


def run(lab: Lab) -> dict[str, Any]:
    """Expert and DP in both topologies."""
    scores = {
        name: {
            "CTC": lab.score(expert(merge), How(1)),
            "Imputer (DP)": lab.score(variant(model={"merge_repeats": merge}), How(8)),
        }
        for name, merge in TOPOLOGIES.items()
    }
    first, second = TOPOLOGIES
    return {
        "rows": [s.row(f"{model}, {name}") for name, found in scores.items() for model, s in found.items()],
        "comparisons": [
            compared(
                (f"{model}, {first}", scores[first][model]), (f"{model}, {second}", scores[second][model])
            )
            for model in ("CTC", "Imputer (DP)")
        ],
    }


def section(result: Mapping[str, Any]) -> list[str]:
    """Both topologies, both models."""
    lines = table(*score_rows(result["rows"]))
    lines += ["", variants(result), ""]
    return lines + [f"- {one['second']} less no merging: {difference(one)}." for one in result["comparisons"]]


def claims(result: Mapping[str, Any]) -> list[Claim]:
    """The paper calls it a hyperparameter and claims nothing."""
    return []
