"""Where errors go as passes rise: the shipped model of a data set, its tokens against those of the reference."""

from pathlib import Path
from typing import Any

from imputer import models
from imputer.research import plots
from imputer.research.comparison import DP, PASSES, at
from imputer.research.english import described
from imputer.research.results import KINDS, Result
from imputer.research.tables import markdown, percent
from imputer.research.trainings import Lab, Maker, Trained, dp, way

TITLE = "Where errors go"
QUESTION = "Which errors do more passes remove: tokens written twice, dropped ones, wrong ones?"
DATASET = "libri"


def run(lab: Lab) -> dict[str, Any]:
    """Decode the test set in 1 to 16 passes with the shipped model, or with the main table's DP where none ships."""
    folder = lab.runs / f"shipped-{lab.dataset.shipped}"
    if lab.dataset.shipped and not (folder / "model").exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model").symlink_to(models.torch_folder(lab.dataset.shipped))
    make: Maker = (lambda _: Trained(folder, 0)) if lab.dataset.shipped else dp()
    rows = lab.rows(make, {at(DP, n): way(n) for n in PASSES})
    used = {lab.dataset.shipped: described(folder)} if lab.dataset.shipped else {}
    return {"rows": rows, "pairs": [(at(DP, 1), at(DP, 8))], "models": used}


def table(result: Result) -> list[str]:
    """Errors per hundred tokens by kind."""
    headings = ("", *KINDS, "all", "WER %")
    cells = []
    for name in result.rows:
        shares = [result.rate(name, kind).value for kind in KINDS]
        cells.append((name, *map(percent, shares), percent(sum(shares)), percent(result.rate(name).value)))
    return markdown(headings, cells)


def text(result: Result) -> str:
    """What the kinds are, and how much of each eight passes remove."""
    first, eight = ({kind: result.rate(at(DP, n), kind).value for kind in KINDS} for n in (1, 8))
    gone = ", ".join(
        f"{percent(1 - eight[kind] / first[kind])} % of the {kind}" for kind in KINDS if first[kind]
    )
    model = "".join(f" The model is the shipped `{name}`." for name in result["models"])
    return (
        "Errors per hundred reference tokens. *Doubled*: inserted beside the same token; *inserted*: other insertions; "
        f"*dropped*: deletions; *wrong*: substitutions. Eight passes instead of one remove {gone} tokens.{model}"
    )


def draw(result: Result, path: Path) -> None:
    """The kinds against passes, and WER."""
    plots.save(path, [plots.by_passes(result), *plots.kinds(result, [(DP, list(result.rows))])])
