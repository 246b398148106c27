"""Simulated annealing decoding: commit everything, delete the least likely or random frames, again."""

from typing import Any

from imputer.evaluation.trials import LEVEL
from imputer.research.claims import Claim, expects, no_better, points
from imputer.research.results import Result
from imputer.research.trainings import Lab, dp, way

TITLE = "Simulated annealing decoding"
QUESTION = "Does it help to revoke commitments, for a model that has converged and for one that has not?"
DATASET = "libri"
WAYS = {"block": way(8), "by likelihood": way(8, "annealing"), "at random": way(8, "annealing_random")}
MODELS = ("unconverged", "converged")


def run(lab: Lab) -> dict[str, Any]:
    """DP after few steps from scratch, and the main table's; block decoding and both ways of annealing."""
    rows = []
    for name, steps in zip(MODELS, (lab.dataset.unconverged_steps, 0), strict=True):
        rows += lab.rows(dp(steps), {f"{name}, {how}": one for how, one in WAYS.items()})
    return {"rows": rows, "pairs": pairs()}


def pairs() -> list[tuple[str, str]]:
    """Annealing - block decoding."""
    return [(f"{name}, block", f"{name}, {how}") for name in MODELS for how in WAYS if how != "block"]


def text(result: Result) -> str:
    """What the rows are."""
    trained = " and ".join(f"*{name}* {result.rows[f'{name}, block']['steps']:,}" for name in MODELS)
    return (
        f"Steps of training: {trained}. *By likelihood* and *at random* say which commitments are revoked. "
        f"Not comparable: {result.data['not_comparable']}; the paper gives no figures here."
    )


def claims(result: Result) -> list[Claim]:
    """Improvements for unconverged models, none for converged ones; the better way of annealing counts."""
    found = []
    for name, wanted in zip(MODELS, (True, False), strict=True):
        level = 1 - (1 - LEVEL) / 2  # corrected for two ways
        both = {
            second: result.difference(first, second, level)
            for first, second in pairs()
            if first.startswith(name)
        }
        which, best = min(both.items(), key=lambda one: one[1].value)
        verdict = expects(best, -1) if wanted else no_better(best)
        says = "helps an unconverged model" if wanted else "does not help a converged model"
        paper = "improvements, no figures given" if wanted else "no improvements"
        found.append(Claim(f"annealing {says}", paper, f"{which}: {points(best)}", verdict))
    return found
