"""`imputer reproduce`."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from imputer.errors import UsageError

if TYPE_CHECKING:
    from imputer.research.trainings import Lab


def reproduce(
    name: str | None = None,
    /,
    *,
    all: bool = False,
    quick: bool = False,
    on: str = "",
    data: Path = Path("data"),
    runs: Path | None = None,
    output: Path | None = None,
    seeds: int = 1,
    list: bool = False,
    report: bool = False,
) -> None:
    """Regenerate the paper's tables and figures: train what they need, decode, and write JSON, pictures and text.

    - imputer reproduce --list
    - imputer reproduce table2
    - imputer reproduce --all --quick

    Experiments share their trainings. The same command resumes an interrupted run. RESULTS.md, beside the folder of
    results, is made from all of them.

    Parameters
    ----------
    name
        The experiment; --list shows them.
    all
        Run every experiment, one after the other.
    quick
        On made data and in minutes, to see that everything works.
    on
        Another data set than the experiment's own: libri, libri_synthetic, libri_convolution, digits, digits_shifted,
        cmudict or tones.
    data
        Where manifests, or the folders and archives to make them from, lie; made files go there too.
    runs
        Where trainings live: runs/reproduce, or runs/quick with --quick.
    output
        Where results are written: results, or runs/quick/results with --quick.
    seeds
        Repeat every training with so many seeds; error rates are means over them.
    list
        Only show the experiments.
    report
        Only write RESULTS.md and its pictures again from the results that are there.
    """
    from imputer.research import EXPERIMENTS, load
    from imputer.research import report as reports

    output = output or Path("runs/quick/results" if quick else "results")
    if list:
        _list(output)
        return
    if report:
        reports.draw(output)
        print(f"written to {reports.report(output)}")
        return
    if all == bool(name):
        raise UsageError("give the name of an experiment, or --all; --list shows them")
    names = [*EXPERIMENTS] if all else [str(name)]
    if names[0] not in EXPERIMENTS:
        raise UsageError(f"no experiment {name!r}; there are {', '.join(EXPERIMENTS)}")
    if on and name and not load(name).DATASET:
        raise UsageError(f"{name} makes data of its own; leave --on {on} out")
    if seeds < 1:
        raise UsageError(f"--seeds must be at least 1, got {seeds}")
    runs = runs or Path("runs/quick" if quick else "runs/reproduce")
    for number, one in enumerate(names, 1):
        print(f"[{number}/{len(names)}] {one}", file=sys.stderr, flush=True)
        print(f"{one}: written to {_run(one, quick, on, data, runs, output, seeds)}", flush=True)
        together = reports.report(output)  # after each, so that what is done can be read
    print(f"put together in {together}")


def _run(name: str, quick: bool, on: str, data: Path, runs: Path, output: Path, seeds: int) -> Path:
    """One experiment: its figures with where they came from, its picture."""
    from imputer import research
    from imputer.research import report
    from imputer.research.trainings import Lab

    module = research.load(name)
    dataset = on or ("tones" if quick else module.DATASET)
    stem = name if quick or dataset == module.DATASET else f"{name}-{dataset}"
    if not module.DATASET:  # it makes its own data
        lab, figures, stem = None, module.run(None, quick=quick), name
    else:
        lab = Lab(_dataset(dataset, runs if quick else data), runs, tuple(range(seeds)))
        figures = module.run(lab)
    result = {
        "experiment": name,
        "title": module.TITLE,
        "quick": quick,
        "command": _command(name, quick, on, seeds),
    }
    result |= {
        "seeds": [*range(seeds)],
        "hardware": report.hardware(),
        **_provenance(lab, dataset, figures),
        **figures,
    }
    path = report.write(output, stem, result)
    if hasattr(module, "draw"):
        module.draw(result, output / f"{stem}.svg")
    return path


def _dataset(name: str, folder: Path) -> Any:
    from imputer.research.datasets import DATASETS

    if name not in DATASETS:
        raise UsageError(f"no data set {name!r}; there are {', '.join(DATASETS)}")
    return DATASETS[name](folder)


def _command(name: str, quick: bool, on: str, seeds: int) -> str:
    """The command that leads to these figures, without the folders of this machine."""
    words = ["imputer", "reproduce", name, *(["--quick"] if quick else []), *(["--on", on] if on else [])]
    return shlex.join([*words, *(["--seeds", str(seeds)] if seeds > 1 else [])])


def _provenance(lab: "Lab | None", name: str, figures: dict[str, Any]) -> dict[str, Any]:
    """The data, by the name they were asked for, and what was spent on the trainings that were used."""
    if lab is None:
        return {"training_steps": 0, "training_seconds": 0.0}
    from imputer.data.manifest import Manifest
    from imputer.research.datasets import hours

    dataset = lab.dataset
    scored = len(figures["rows"][0]["word_errors"]) if "rows" in figures else None
    spent = [(t.steps - (t.start.steps if t.start else 0), t.seconds) for t in lab.used.values()]
    return {
        "data": {
            "name": name,
            "about": dataset.about,
            "not_comparable": dataset.not_comparable,
            "amount": dataset.amount,
            "train_hours": hours(dataset.train),
            "test_hours": hours(dataset.test),
            "test_utterances": len(Manifest(dataset.test)),
        },
        "test_utterances_used": scored,
        "steps": {
            "expert": dataset.expert_steps,
            "imputer": dataset.imputer_steps,
            "analysis": dataset.analysis_steps,
        },
        "trainings": {t.folder.name: round(t.seconds) for t in lab.used.values()},
        "processors": sorted({t.processor for t in lab.used.values()} - {""}),
        "training_steps": sum(steps for steps, _ in spent),
        "training_seconds": sum(seconds for _, seconds in spent),
    }


def _list(output: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    from imputer import research

    table = Table("experiment", "what", "data", "results")
    for name in research.EXPERIMENTS:
        module = research.load(name)
        found = sorted(path.name for path in output.glob(f"{name}*.json") if path.stem.split("-")[0] == name)
        table.add_row(name, module.TITLE, module.DATASET or "made", ", ".join(found) or "none yet")
    Console().print(table)
