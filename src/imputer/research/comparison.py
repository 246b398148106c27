"""CTC, Imputer (IM) and Imputer (DP): one network, one budget of training steps; what tables 1 and 2 share."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from imputer.research import plots
from imputer.research.claims import Claim, expects, judged, no_better
from imputer.research.results import Result
from imputer.research.trainings import Lab, Trainings, way

PASSES = (1, 2, 4, 8, 16)
CTC, IM, DP = "CTC", "IM", "DP"
UNLEARNT = 0.8  # with most words wrong, no claim is decided


def at(model: str, passes: int) -> str:
    """The name of the row of a model decoded in ``passes`` passes."""
    return f"{model}, {passes} pass{'es' if passes > 1 else ''}"


def whole_budget(t: Trainings) -> Any:
    """CTC with the steps of the Imputer and of the expert that aligns its training set."""
    return t.ctc(t.dataset.budget)


def run(lab: Lab) -> dict[str, Any]:
    """CTC of the whole budget; both Imputers from scratch, decoded in 1 to 16 passes."""
    rows = lab.rows(whole_budget, {CTC: way(1)})
    for name, objective in ((IM, "imitation"), (DP, "dynamic_programming")):
        rows += lab.rows(lambda t, o=objective: t.imputer(o), {at(name, n): way(n) for n in PASSES})  # type: ignore[misc]
    eight = (at(IM, 8), at(DP, 8))
    return {"rows": rows, "pairs": [*((CTC, one) for one in eight), eight, (at(DP, 1), at(DP, 8))]}


def claims(result: Result, paper: Mapping[str, str]) -> list[Claim]:
    """DP below CTC, IM not below it, DP below IM, more passes better than one."""
    if result.rate(CTC).value > UNLEARNT:
        return []
    beats, imitates = result.difference(CTC, at(DP, 8)), result.difference(CTC, at(IM, 8))
    leads, gains = result.difference(at(IM, 8), at(DP, 8)), result.difference(at(DP, 1), at(DP, 8))
    return [
        judged(
            "DP at 8 passes has a lower WER than CTC", paper["dp_ctc"], beats, expects(beats, -1), "dp_ctc"
        ),
        judged("IM is no better than CTC", paper["im_ctc"], imitates, no_better(imitates), "im_ctc"),
        judged("DP has a lower WER than IM", paper["dp_im"], leads, expects(leads, -1), "dp_im"),
        judged(
            "DP: 8 passes are better than 1",
            "Figure 6: 13.6 at 2, 11.3 at 8",
            gains,
            expects(gains, -1),
            "passes",
        ),
    ]


def text(result: Result, caption: str) -> str:
    """What the paper's column is, and what the rows are."""
    steps = result["steps"]
    return (
        f"{caption} Not comparable: {result.data['not_comparable']}. Both Imputers start from scratch and take "
        f"{steps['main']:,} steps on the alignments of a CTC expert of {steps['expert']:,} steps; CTC takes "
        f"{steps['main'] + steps['expert']:,}, the sum."
    )


def draw(result: Result, path: Path) -> None:
    """WER against passes; where the errors go, if their kinds were counted."""
    plots.save(path, [plots.by_passes(result), *plots.kinds(result, [(DP, [at(DP, n) for n in PASSES])])])
