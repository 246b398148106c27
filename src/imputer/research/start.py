"""Where an Imputer starts: from scratch, as in the main tables, or from the expert's weights."""

from typing import Any

from imputer.research.comparison import DP, IM, at
from imputer.research.results import Result
from imputer.research.trainings import Lab, Maker, dp, way

TITLE = "Where training starts"
QUESTION = "Is it better to start an Imputer from the weights of its expert, with as many steps in all?"
DATASET = "libri"
SCRATCH, EXPERT = "from scratch", "from the expert"


def makers() -> dict[str, Maker]:
    """Each model from scratch with N + M steps, and with M steps from the expert's N."""
    return {
        f"CTC, {SCRATCH}": lambda t: t.ctc(t.dataset.main_steps),
        f"CTC, {EXPERT}": lambda t: t.ctc(t.dataset.imputer_steps, from_expert=True),
        f"{IM}, {SCRATCH}": lambda t: t.imputer("imitation"),
        f"{IM}, {EXPERT}": lambda t: t.imputer("imitation", t.dataset.imputer_steps, from_expert=True),
        f"{DP}, {SCRATCH}": dp(),
        f"{DP}, {EXPERT}": lambda t: t.imputer(steps=t.dataset.imputer_steps, from_expert=True),
    }


def run(lab: Lab) -> dict[str, Any]:
    """CTC in one pass, the Imputers in one and in eight."""
    rows = []
    for name, make in makers().items():
        ctc = name.startswith("CTC")
        rows += lab.rows(make, {name: way(1)} if ctc else {at(name, n): way(n) for n in (1, 8)})
    return {"rows": rows, "pairs": pairs()}


def pairs() -> list[tuple[str, str]]:
    """From the expert - from scratch, and eight passes - one."""
    both = [(f"CTC, {SCRATCH}", f"CTC, {EXPERT}")]
    both += [(at(f"{name}, {SCRATCH}", 8), at(f"{name}, {EXPERT}", 8)) for name in (IM, DP)]
    return both + [(at(f"{DP}, {where}", 1), at(f"{DP}, {where}", 8)) for where in (SCRATCH, EXPERT)]


def text(result: Result) -> str:
    """What the rows are."""
    return (
        f"Every row has {result['steps']['main']:,} steps in all. Training that continues from the expert begins at "
        f"two thirds of the learning rate. Not comparable: {result.data['not_comparable']}."
    )
