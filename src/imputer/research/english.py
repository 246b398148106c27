"""The English models: CTC of the whole budget against DP at a low error rate, in both topologies.

The models are trained elsewhere (`imputer train`, hours on a machine of their own) and given as run folders:
`imputer reproduce english --models DIR`, where DIR holds some of ctc, dp, ctc-merging, dp-merging, each with a folder
model. With `--lm FILE` the errors that a language model would fix are counted as well. The same comparison, trained by
this program at a smaller size, is `imputer reproduce topology --on english`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from imputer import configs, models
from imputer.display.drawings import Panel
from imputer.errors import UsageError
from imputer.research import plots, provenance
from imputer.research.claims import Claim, expects, judged
from imputer.research.comparison import CTC, DP, PASSES, at
from imputer.research.results import KINDS, Result
from imputer.research.tables import markdown
from imputer.research.topology import MERGING, PLAIN
from imputer.research.trainings import Lab, Trained, curve, way

TITLE = "English at a low error rate"
QUESTION = (
    "Does DP beat CTC of the same budget at a low error rate, without a language model, in both topologies?"
)
DATASET = "libri"
FOLDERS = {"": PLAIN, "-merging": MERGING}


def run(lab: Lab) -> dict[str, Any]:
    """Decode every model that is there; CTC in one pass, DP in 1 to 16."""
    found = {
        (kind, ending): lab.models / f"{kind}{ending}"
        for ending in FOLDERS
        for kind in ("ctc", "dp")
        if lab.models and (lab.models / f"{kind}{ending}" / "model" / models.CONFIG).is_file()
    }
    if not found:
        raise UsageError(
            "english needs --models DIR with run folders ctc and dp (and ctc-merging, dp-merging) in it"
        )
    rows, described_models, curves = [], {}, {}
    for (kind, ending), folder in found.items():
        model, name = Trained(folder, 0), FOLDERS[ending]
        described_models[folder.name] = described(folder)
        if (folder / "metrics.jsonl").is_file():  # a run folder, not only its model
            points = curve(model)
            passes = max(int(key.removeprefix("wer_")) for key in points[0] if key.startswith("wer_"))
            curves[at(f"{kind.upper()}, {name}", passes)] = [
                (point["step"], point[f"wer_{passes}"]) for point in points
            ]
        ways = (
            {f"{CTC}, {name}": way(1)} if kind == "ctc" else {at(f"{DP}, {name}", n): way(n) for n in PASSES}
        )
        rows += lab.rows(lambda _, model=model: model, ways)  # type: ignore[misc]
    names = {row["name"] for row in rows}
    pairs = [
        (first, at(f"{DP}, {name}", 8))
        for name in FOLDERS.values()
        for first in (f"{CTC}, {name}", at(f"{DP}, {name}", 1))
    ]
    return {
        "rows": rows,
        "pairs": [pair for pair in pairs if set(pair) <= names],
        "models": described_models,
        "curves": curves,
    }


def described(folder: Path) -> dict[str, Any]:
    """What a model folder says of itself: a fingerprint of its weights, its settings, those of its training."""
    found = {
        "weights": provenance.weights(folder / "model"),
        "settings": configs.read_toml(folder / "model" / models.CONFIG),
    }
    if (folder / "config.toml").is_file():  # a run folder, not only its model
        run = configs.read(str(folder / "config.toml"))
        found["training"] = provenance.changed(run)
        found["manifests"] = [Path(path).name for path in run.data.train]
    return found


def text(result: Result) -> str:
    """What the rows are, of how many errors a language model knows better, and the kinds of errors."""
    about = [trained(name, model) for name, model in result["models"].items()]
    lines = [" ".join(["Without a language model.", *filter(None, about)]), ""]
    rows = {name: row for name, row in result.rows.items() if "tokens" in row}
    headings, cells = ["errors per 100 tokens", *KINDS], {}
    for name in rows:
        cells[name] = [f"{100 * result.rate(name, kind).value:.2f}" for kind in KINDS]
    if rows and all("fixable" in row for row in rows.values()):
        headings.append("preferred %")
        for name, row in rows.items():
            share = sum(map(sum, row["fixable"])) / max(1, sum(map(sum, row["words"])))
            cells[name].append(f"{100 * share:.0f}")
        lines[0] += (
            " Preferred are the word errors for which, one at a time, a language model prefers the truth."
        )
    return "\n".join(
        lines + (markdown(headings, [[name, *row] for name, row in cells.items()]) if rows else [])
    )


def trained(name: str, model: Mapping[str, Any]) -> str:
    """One sentence about the training of a model, if its run folder told."""
    if "training" not in model:
        return ""
    made, manifests = model["training"], ", ".join(model["manifests"])
    return f"`{name}`: {made['training.steps']:,} steps of up to {made['data.batch_seconds']:g} s on {manifests}."


def claims(result: Result) -> list[Claim]:
    """The main claim in each topology that is there."""
    found = []
    for first, second in result.pairs:
        if first.startswith(CTC):
            beats = result.difference(first, second)
            text = f"DP at 8 passes has a lower WER than CTC, {first.removeprefix(f'{CTC}, ')}"
            found.append(judged(text, "13 to 16 % lower", beats, expects(beats, -1)))
    return found


def draw(result: Result, path: Path) -> None:
    """WER by passes, where the errors go, and WER on held-out speakers during training."""
    groups = [(name, [at(f"{DP}, {name}", n) for n in PASSES]) for name in FOLDERS.values()]
    lines = {name: [(step, 100 * wer) for step, wer in points] for name, points in result["curves"].items()}
    curves = [Panel("steps", "validation WER, %", lines, "training")] if lines else []
    plots.save(path, [plots.by_passes(result), *plots.kinds(result, groups), *curves])
