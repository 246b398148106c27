"""Run an experiment: train, decode, and write its results file with where it came from."""

import shlex
from pathlib import Path
from typing import Any

from imputer import research
from imputer.data.manifest import Manifest
from imputer.research import datasets, provenance, results
from imputer.research.datasets import DataSet
from imputer.research.results import Result
from imputer.research.trainings import Lab, say


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
    add_seeds: bool = False,
) -> Path:
    """One experiment; returns its results file."""
    module = research.load(name)
    known = provenance.record(command(name, quick, on, seeds, models, lm, add_seeds), range(seeds))
    content: dict[str, Any] = {"experiment": name, "quick": quick}
    if not module.DATASET:  # it makes its own data
        content |= {"provenance": known, **module.run(None, quick=quick)}
        return results.write(output, results.completed(name, content))
    chosen = on or ("tones" if quick else module.DATASET)
    stem = name if quick or chosen == module.DATASET else f"{name}-{chosen}"
    lab = Lab(datasets.load(chosen, runs if quick else data), runs, tuple(range(seeds)), models)
    about, decoded_by = described(lab.dataset, chosen), provenance.code(provenance.DECODING)
    if add_seeds:
        lab.earlier = earlier_result(output / f"{stem}.json", about, decoded_by)
    if lm:
        from imputer.languagemodel import LanguageModel  # compiled when it is first needed

        lab.lm = LanguageModel.load(lm)
    found = module.run(lab)
    pairs = found.pop("pairs", [])
    recorded = lab.earlier["provenance"]["trainings"] if lab.earlier else {}
    trainings = {one.folder.name: one.record or recorded.get(one.folder.name) for one in lab.used.values()}
    known |= {
        "code": provenance.code(provenance.TRAINING),
        "decoding": decoded_by,
        "configuration": provenance.changed(lab.dataset.settings),
        # An expert whose Imputers' errors are all kept was not trained here.
        "trainings": {name: record for name, record in trainings.items() if record},
    }
    content |= {"provenance": known, "data": about, "steps": steps(lab.dataset)}
    if "rows" in found:
        ids = len(found["rows"][0]["words"][0])
        content["utterances"] = results.references(lab.utterances(ids))
    return results.write(output, results.completed(stem, content | found, pairs))


def earlier_result(path: Path, about: dict[str, Any], decoded_by: str) -> Result | None:
    """The results file to add seeds to, if the same data were decoded by the same code; else say what differs."""
    if not path.is_file():
        return None
    found = Result.read(path)
    if found.data.get("fingerprints") != about["fingerprints"]:
        say(f"{path}: of other data; its seeds are not kept")
    elif found["provenance"].get("decoding") != decoded_by:
        say(f"{path}: decoded by other code; its seeds are not kept")
    else:
        return found
    return None


def command(
    name: str,
    quick: bool,
    on: str,
    seeds: int,
    models: Path | None = None,
    lm: Path | None = None,
    add_seeds: bool = False,
) -> str:
    """The command that leads to these figures, with the last part of its paths only."""
    words = ["imputer", "reproduce", name, *(["--quick"] if quick else []), *(["--on", on] if on else [])]
    words += ["--seeds", str(seeds)] if seeds > 1 else []
    words += ["--add-seeds"] if add_seeds else []
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
