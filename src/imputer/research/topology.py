"""The topology: delete blanks only (the paper's), or merge repeats first (classical CTC)."""

from functools import partial
from pathlib import Path
from typing import Any

from imputer.research import plots
from imputer.research.claims import Claim, expects, judged
from imputer.research.comparison import CTC, DP, PASSES, at
from imputer.research.results import Result
from imputer.research.trainings import Lab, Trainings, dp, way

TITLE = "Topology"
QUESTION = (
    "Does it matter whether repeated tokens are merged, and does the main claim hold in both topologies?"
)
DATASET = "libri"
PLAIN, MERGING = "no merging", "merging repeats"
TOPOLOGIES = {PLAIN: False, MERGING: True}


def ctc(t: Trainings, merge: bool) -> Any:
    """CTC of the whole budget in one of the topologies."""
    return t.ctc(t.dataset.budget, **({"merge_repeats": True} if merge else {}))


def run(lab: Lab) -> dict[str, Any]:
    """CTC and DP in both topologies."""
    rows = []
    for name, merge in TOPOLOGIES.items():
        rows += lab.rows(partial(ctc, merge=merge), {f"{CTC}, {name}": way(1)})
        rows += lab.rows(dp(merge_repeats=merge), {at(f"{DP}, {name}", n): way(n) for n in PASSES})
    return {"rows": rows, "pairs": pairs()}


def pairs() -> list[tuple[str, str]]:
    """DP - CTC and eight passes - one in each topology; merging - not merging for each model."""
    found = []
    for name in TOPOLOGIES:
        eight = at(f"{DP}, {name}", 8)
        found += [(f"{CTC}, {name}", eight), (at(f"{DP}, {name}", 1), eight)]
    models = [f"{CTC}, {{}}", *(at(f"{DP}, {{}}", n) for n in (1, 8))]
    return found + [(model.format(PLAIN), model.format(MERGING)) for model in models]


def text(result: Result) -> str:
    """What the rows are."""
    steps = result["steps"]
    return (
        f"CTC has {steps['main'] + steps['expert']:,} steps, the Imputer {steps['main']:,} and its expert "
        f"{steps['expert']:,}. Not comparable: {result.data['not_comparable']}."
    )


def claims(result: Result) -> list[Claim]:
    """The main claim in both topologies; the paper's topology is in the summary where no main table has that claim."""
    found = []
    main = result.data["name"] not in ("libri", "digits")
    for name in TOPOLOGIES:
        beats = result.difference(f"{CTC}, {name}", at(f"{DP}, {name}", 8))
        gains = result.difference(at(f"{DP}, {name}", 1), at(f"{DP}, {name}", 8))
        keys = ("dp_ctc", "passes") if main and name == PLAIN else ("", "")
        paper = "13 to 16 % lower; does not say which topology its tables use"
        found += [
            judged(
                f"DP at 8 passes has a lower WER than CTC, {name}", paper, beats, expects(beats, -1), keys[0]
            ),
            judged(f"8 passes are better than 1, {name}", "Figure 6", gains, expects(gains, -1), keys[1]),
        ]
    return found


def draw(result: Result, path: Path) -> None:
    """WER by passes in both topologies, and where the errors go."""
    models = [(name, [at(f"{DP}, {name}", n) for n in PASSES]) for name in TOPOLOGIES]
    plots.save(path, [plots.by_passes(result), *plots.kinds(result, models)])
