"""Simulated annealing decoding: commit everything, delete the least likely or random frames, again."""

from collections.abc import Mapping
from typing import Any

from imputer.decoding import Options
from imputer.research.report import Claim, difference, expects, no_better, score_rows, table
from imputer.research.trainings import Lab, Maker, Trainings, compared, dp

TITLE = "Simulated annealing decoding"
QUESTION = "Does it help to take commitments back, for a model that has converged and for one that has not?"
DATASET = "libri"
WAYS = {
    "block": Options(8),
    "by likelihood": Options(8, "annealing"),
    "at random": Options(8, "annealing_random"),
}


def run(lab: Lab) -> dict[str, Any]:
    """DP after few steps from scratch, and the main table's; block decoding and both ways of annealing."""
    models: dict[str, Maker] = {
        "unconverged": dp(lab.dataset.unconverged_steps),
        "converged": Trainings.main,
    }
    rows, comparisons = [], []
    for name, make in models.items():
        scores = dict(zip(WAYS, lab.scores(make, list(WAYS.values())), strict=True))
        rows += [score.row(f"{name}, {way}") for way, score in scores.items()]
        comparisons += [
            compared((f"{name}, block", scores["block"]), (f"{name}, {way}", scores[way]))
            for way in WAYS
            if way != "block"
        ]
    return {
        "rows": rows,
        "comparisons": comparisons,
        "model_steps": {name: make(lab.first).steps for name, make in models.items()},
    }


def section(result: Mapping[str, Any]) -> list[str]:
    """Both models, all ways."""
    trained = " and ".join(f"*{name}* {steps:,}" for name, steps in result["model_steps"].items())
    return [
        *table(*score_rows(result["rows"])),
        "",
        f"Steps of training: {trained}. *By likelihood* and *at random* say which commitments are taken back. "
        f"Not comparable: {result['data']['not_comparable']}; the paper gives no figures here.",
        "",
    ] + [
        f"- {one['second']} less {one['first'].split(', ')[1]}: {difference(one)}."
        for one in result["comparisons"]
    ]


def claims(result: Mapping[str, Any]) -> list[Claim]:
    """Improvements for unconverged models, none for converged ones; the better way of annealing counts."""
    found = []
    for name, wanted in (("unconverged", True), ("converged", False)):
        mine = [one for one in result["comparisons"] if one["second"].startswith(f"{name},")]
        best = min(mine, key=lambda one: one["difference"]["value"])
        verdict = expects(best, -1, room=0) if wanted else no_better(best)
        text = "helps an unconverged model" if wanted else "does not help a converged model"
        paper = "improvements, no figures given" if wanted else "no improvements"
        found.append(Claim(f"annealing {text}", paper, f"{best['second']}: {difference(best)}", verdict))
    return found
