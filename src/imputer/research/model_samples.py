"""Training with model samples: roll-ins from a stale copy of the model instead of the CTC expert (q_theta')."""

from collections.abc import Mapping
from typing import Any

from imputer.decoding import Options
from imputer.research.report import Claim, difference, no_better, score_rows, table, variants
from imputer.research.trainings import Lab, compared, variant

TITLE = "Training with model samples"
QUESTION = "Does it help to take roll-in alignments from a stale copy of the model itself?"
DATASET = "libri"
REFRESHES = 4  # in a training


def run(lab: Lab) -> dict[str, Any]:
    """DP on the expert's alignments, and on those of the model, refreshed in the course of training."""
    every = max(1, lab.dataset.analysis_steps // REFRESHES)
    expert = lab.score(variant(), Options(8))
    stale = lab.score(variant(refresh_every=every), Options(8))
    names = ("the expert's alignments", f"a stale copy's, every {every} steps")
    return {
        "rows": [expert.row(names[0]), stale.row(names[1])],
        "comparison": compared((names[0], expert), (names[1], stale)),
    }


def section(result: Mapping[str, Any]) -> list[str]:
    """Both roll-ins."""
    return [
        *table(*score_rows(result["rows"])),
        "",
        f"Difference: {difference(result['comparison'])}. {variants(result)} The paper refreshes every 50,000 of a "
        "million steps and gives no figures.",
    ]


def claims(result: Mapping[str, Any]) -> list[Claim]:
    """No improvement."""
    found = result["comparison"]
    return [
        Claim(
            "roll-ins from a stale copy bring no improvement",
            "none found",
            difference(found),
            no_better(found),
        )
    ]
