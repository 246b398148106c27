"""Why DP stops improving on letters to phonemes and CTC does not: one change at a time, each training under an hour.

Every training is a run of its own that resumes. `timeout -s INT 55m imputer reproduce letters_ablation` works for 55
minutes and writes the rows that are done; with --add-seeds the same command keeps them, resumes, and adds the others.
The expert is the same for all rows. Row by row, in steps of the main table:

    CTC                       the whole budget, every example all-masked
    CTC, as many all-masked   only as many steps as the base row has all-masked examples: one of eight
    DP                        the base: block masking shows an all-masked example in one of eight roll-ins
    all_masked 0.5            half the examples all-masked, the same steps
    CTC, as many as that      CTC with as many all-masked examples as the row above
    dropout 0.3               of the Imputer, not of its expert
    own roll-ins              alignments of a stale copy, refreshed eight times
    three times the steps
"""

from pathlib import Path
from typing import Any

from imputer.display.drawings import Panel
from imputer.research import plots
from imputer.research.comparison import CTC, DP, at, whole_budget
from imputer.research.results import Result
from imputer.research.trainings import Lab, Maker, Row, curve_of, dp, say, way

TITLE = "Letters to phonemes: what limits DP"
QUESTION = "Which change lets DP keep improving as CTC does?"
DATASET = "cmudict"
BLOCK_SIZE = 8  # block masking commits 0 to 7 frames per block: nothing in one roll-in of eight
HALF = 0.5 + 0.5 / BLOCK_SIZE  # all-masked examples with all_masked = 0.5
CAUSES: dict[str, dict[str, Any]] = {
    DP: {},
    "DP, all_masked 0.5": {"all_masked": 0.5},
    "DP, dropout 0.3": {"model": {"dropout": 0.3}},
    "DP, own roll-ins": {"refresh_every": 8},
    "DP, three times the steps": {"steps": 3},
}


def makers(lab: Lab) -> dict[str, Maker]:
    """The rows, the cheap ones first."""
    main = lab.dataset.main_steps
    found: dict[str, Maker] = {
        CTC: whole_budget,
        "CTC, as many all-masked as DP": lambda t: t.ctc(max(1, main // BLOCK_SIZE)),
        "CTC, as many all-masked as 0.5": lambda t: t.ctc(max(1, round(main * HALF))),
    }
    for name, options in CAUSES.items():
        changed = dict(options)
        steps = main * changed.pop("steps", 1)
        if "refresh_every" in changed:
            changed["refresh_every"] = max(1, steps // changed["refresh_every"])
        found[name] = dp(steps, **changed)
    return found


def run(lab: Lab) -> dict[str, Any]:
    """Every row in one pass, the Imputers also in eight, with the validation curve of the first seed."""
    rows: list[Row] = []
    curves = {}
    for name, make in makers(lab).items():
        ctc = name.startswith(CTC)
        try:
            rows += lab.rows(make, {name: way(1)} if ctc else {at(name, n): way(n) for n in (1, 8)})
        except (KeyboardInterrupt, SystemExit):
            if not rows:
                raise
            say(f"stopped before {name} was done; the rows before it are kept, --add-seeds adds the others")
            break
        curves[name] = curve_of(lab, make(lab.first), name)
    done = {row["name"] for row in rows}
    return {"rows": rows, "pairs": [pair for pair in pairs() if set(pair) <= done], "curves": curves}


def pairs() -> list[tuple[str, str]]:
    """Each change - the base; each Imputer - CTC; in one pass against CTC with as many all-masked examples."""
    changes = [(at(DP, 8), at(name, 8)) for name in CAUSES if name != DP]
    against = [(CTC, at(name, 8)) for name in CAUSES]
    equal = [
        ("CTC, as many all-masked as DP", at(DP, 1)),
        ("CTC, as many all-masked as 0.5", at("DP, all_masked 0.5", 1)),
    ]
    return changes + against + equal


def text(result: Result) -> str:
    """How to read the rows."""
    missing = [name for name in CAUSES if name not in result["curves"]]
    return (
        (f"Not run yet: {'; '.join(missing)}. " if missing else "")
        + "A change is the cause if DP with it is as good as CTC, or if CTC with as many all-masked examples is as bad "
        "as DP in one pass. All Imputers learn from the alignments of the same expert."
    )


def draw(result: Result, path: Path) -> None:
    """One-pass WER on the validation words against steps."""
    lines = {name: [(step, 100 * wer) for step, wer in points] for name, points in result["curves"].items()}
    plots.save(path, [Panel("steps", "validation WER in one pass, %", lines)])
