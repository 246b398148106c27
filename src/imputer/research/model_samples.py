"""Training with model samples: roll-ins from a stale copy of the model instead of the CTC expert (q_theta')."""

from typing import Any

from imputer.research.claims import Claim, judged, no_better
from imputer.research.results import Result
from imputer.research.tables import variants
from imputer.research.trainings import Lab, variant, way

TITLE = "Training with model samples"
QUESTION = "Does it help to take roll-in alignments from a stale copy of the model itself?"
DATASET = "libri"
REFRESHES = 4  # in a training
EXPERT, STALE = "the expert's alignments", "a stale copy's alignments"


def run(lab: Lab) -> dict[str, Any]:
    """DP on the expert's alignments, and on those of the model, refreshed in the course of training."""
    every = max(1, lab.dataset.analysis_steps // REFRESHES)
    rows = [lab.row(EXPERT, variant(), way(8)), lab.row(STALE, variant(refresh_every=every), way(8))]
    return {"rows": rows, "pairs": [(EXPERT, STALE)]}


def text(result: Result) -> str:
    """What the rows are."""
    return (
        f"{variants(result)} The copy is refreshed {REFRESHES} times; the paper refreshes every 50,000 of a million "
        "steps and gives no figures."
    )


def claims(result: Result) -> list[Claim]:
    """No improvement."""
    found = result.difference(EXPERT, STALE)
    return [judged("roll-ins from a stale copy bring no improvement", "none found", found, no_better(found))]
