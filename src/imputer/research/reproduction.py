"""Run an experiment: train, decode, and write its results file with where it came from."""

import shlex
from pathlib import Path
from typing import Any

from imputer import research
from imputer.data.manifest import Manifest
from imputer.research import datasets, provenance, results
from imputer.research.datasets import DataSet
from imputer.research.trainings import Lab


def reproduce(
    name: str,
    *,
    data: Path,
    runs: Path,
    output: Path,
    quick: bool,
    on: str,
    seeds: int,
    models: Path | None,
    lm: Path | None,
) -> Path:
    """One experiment; returns its results file."""
    module = research.load(name)
    known = provenance.record(command(name, quick, on, seeds, models, lm), range(seeds))
    content: dict[str, Any] = {"experiment": name, "quick": quick}
    if not module.DATASET:  # it makes its own data
        content |= {"provenance": known, **module.run(None, quick=quick)}
        return results.write(output, results.completed(name, content))
    chosen = on or ("tones" if quick else module.DATASET)
    lab = Lab(datasets.load(chosen, runs if quick else data), runs, tuple(range(seeds)), models)
    if lm:
        from imputer.languagemodel import LanguageModel  # compiled when it is first needed

        lab.lm = LanguageModel.load(lm)
    found = module.run(lab)
    pairs = found.pop("pairs", [])
    known |= {
        "code": provenance.code(provenance.TRAINING),
        "configuration": provenance.changed(lab.dataset.settings),
        "trainings": {one.folder.name: one.record for one in lab.used.values()},
    }
    content |= {"provenance": known, "data": described(lab.dataset, chosen), "steps": steps(lab.dataset)}
    if "rows" in found:
        ids = len(found["rows"][0]["words"][0])
        content["utterances"] = results.references(lab.utterances(ids))
    stem = name if quick or chosen == module.DATASET else f"{name}-{chosen}"
    return results.write(output, results.completed(stem, content | found, pairs))


def command(
    name: str, quick: bool, on: str, seeds: int, models: Path | None = None, lm: Path | None = None
) -> str:
    """The command that leads to these figures, with the last part of its paths only."""
    words = ["imputer", "reproduce", name, *(["--quick"] if quick else []), *(["--on", on] if on else [])]
    words += ["--seeds", str(seeds)] if seeds > 1 else []
    words += ["--models", models.name] if models else []
    return shlex.join([*words, *(["--lm", lm.name] if lm else [])])


def steps(dataset: DataSet) -> dict[str, int]:
    """The lengths of trainings on a data set."""
    return {"expert": dataset.expert_steps, "main": dataset.main_steps, "analysis": dataset.analysis_steps}


def described(dataset: DataSet, name: str) -> dict[str, Any]:
    """The data, by the name they were asked for, with fingerprints of what the manifests say."""
    parts = {"train": dataset.train, "valid": dataset.valid, "test": dataset.test}
    return {
        "name": name,
        "about": dataset.about,
        "not_comparable": dataset.not_comparable,
        "amount": dataset.amount,
        "test_utterances": len(Manifest(dataset.test)),
        "fingerprints": {part: provenance.manifest(path) for part, path in parts.items()},
    }
