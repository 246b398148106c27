"""Results files of format 1, made before provenance was recorded, into format 2.

    python -m imputer.research.migration results --data data

Kept are the errors of every utterance, if they add up to the error rate that was stored beside them. Everything else
is computed from them again or dropped: p-values, kinds of errors that were stored as sums only, validation curves.
Rows of the main tables that start from the expert become the experiment ``start``. Files in ``DROPPED`` were edited
by hand or are incomplete, and are removed.
"""

import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from imputer import evaluation, research
from imputer.data.manifest import Manifest
from imputer.errors import ImputerError, UsageError
from imputer.research import datasets, figure5, model_samples, provenance, results, start
from imputer.research.comparison import CTC, DP, IM, at
from imputer.research.results import Result

DROPPED = {
    "bound": "the noise of its roll-ins and its noise-to-signal ratios were completed by hand",
    "bound-digits": "its constants and gradients were stored as means only",
    "table1-digits_shifted": "trained on alignments that were half a frame early, a defect since corrected",
}
UNKNOWN = {"topology"}  # files whose processor was written by hand
RECORDED = (
    "commit, configuration and the fingerprint of the training set were not stored. Kept are the errors of every "
    "utterance, which add up to the error rates stored then; the figures are computed from them "
    "(`imputer.research.migration`)."
)
MODELS = {"Imputer (IM)": IM, "Imputer (DP)": DP}
TESTS: dict[str, Callable[[Path], Path]] = {
    "libri": lambda data: datasets.libri_manifest(data, "test-clean-a"),
    "libri_convolution": lambda data: datasets.libri_manifest(data, "test-clean-a"),
    "digits": lambda data: datasets.digit_manifest(data, "test"),
    "cmudict": lambda data: datasets.cmudict_manifest(data, "test"),
}
WORDS = {
    r"dev-clean less \d+ speakers": "dev-clean without its held-out speakers",
    r"20 speakers of test-clean": "test-clean-a",
    r"speakers of their own": "eight other speakers",
}


def migrate(folder: Path, data: Path) -> list[str]:
    """Migrate every file of a folder; returns one line per file."""
    old = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}
    old = {name: content for name, content in old.items() if content.get("format") != results.FORMAT}
    made = {name: migrated(name, old[name], data, old) for name in old if name not in DROPPED}
    for name in old:  # once all of them are known to be sound
        (folder / f"{name}.json").unlink()
        for one in made.get(name, []):
            results.write(folder, one)
    kept = [f"{name}: {one.name}, {len(one.rows)} rows" for name, found in made.items() for one in found]
    return kept + [f"{name}: dropped, {DROPPED[name]}" for name in old if name in DROPPED]


def migrated(name: str, old: Mapping[str, Any], data: Path, every: Mapping[str, Any]) -> list[Result]:
    """The migrated files of one file."""
    experiment = old["experiment"]
    if "rows" not in old:
        kept = {"figure4": ("id", "reference", "block_size"), "paper_size": ()}[experiment]
        content = {"experiment": experiment, **_frame(name, old, data), **{key: old[key] for key in kept}}
        if experiment == "paper_size":  # quick runs on generated data are tested, and no longer reported
            content["figures"] = {
                one: {key: value for key, value in found.items() if key != "commands"}
                for one, found in old["figures"].items()
            }
        else:
            content["transcript"] = {key: old["transcript"][key] for key in ("text", "passes", "trace")}
        return [results.completed(name, content)]
    rows = [_row(experiment, row, old) for row in _checked(name, old, data)]
    if experiment == "topology" and old["data"]["name"] == "libri":
        _same_as_table2(rows, every["table2"])
    if experiment not in ("table1", "table2"):
        return [_result(name, experiment, rows, old, data)]
    main = [row for row in rows if row["name"] == CTC or re.fullmatch(r"(IM|DP), \d+ pass(es)?", row["name"])]
    if old["data"]["name"] == "libri_convolution":
        return [_result(name, experiment, main, old, data)]
    wanted = {end for pair in start.pairs() for end in pair} | {
        at(f"{IM}, {w}", 1) for w in (start.SCRATCH, start.EXPERT)
    }
    other = []
    for row in rows:
        named = re.sub(r"^(IM|DP), (\d+ pass)", rf"\1, {start.SCRATCH}, \2", row["name"])
        other += [{**row, "name": named}] if named in wanted else []
    where = "start" if old["data"]["name"] == start.DATASET else f"start-{old['data']['name']}"
    return [_result(name, experiment, main, old, data), _result(where, "start", other, old, data)]


def _result(
    name: str, experiment: str, rows: list[dict[str, Any]], old: Mapping[str, Any], data: Path
) -> Result:
    names = {row["name"] for row in rows}
    module = research.load(experiment)
    pairs = module.pairs() if hasattr(module, "pairs") else _pairs(experiment, names)
    return results.completed(
        name,
        {
            "experiment": experiment,
            **_frame(name, old, data),
            "utterances": _references(old, data),
            "rows": rows,
        },
        [pair for pair in pairs if set(pair) <= names],
    )


def _pairs(experiment: str, names: set[str]) -> list[tuple[str, str]]:
    if experiment in ("table1", "table2"):
        return [(CTC, at(IM, 8)), (CTC, at(DP, 8)), (at(IM, 8), at(DP, 8)), (at(DP, 1), at(DP, 8))]
    if experiment == "figure5":
        return [
            (figure5.at(s, 8), figure5.at(s, n)) for s in figure5.STRATEGIES for n in figure5.SIZES if n != 8
        ]
    first = {"table3": "Block", "noise": "none", "model_samples": model_samples.EXPERT}.get(experiment)
    if first:
        return [(first, name) for name in sorted(names - {first})]
    return [("block, 8", "adaptive, 0.9")] if experiment == "adaptive" else []


def _frame(name: str, old: Mapping[str, Any], data: Path) -> dict[str, Any]:
    """What is known of the run and of its data."""
    machine = old["hardware"]
    known = {
        "recorded": RECORDED,
        "command": old["command"],
        "seeds": old["seeds"],
        "processor": "" if name in UNKNOWN else " and ".join(old.get("processors") or [machine["processor"]]),
        "packages": {key: machine[key] for key in ("python", "torch", "imputer")},
        "trainings": {run: {"seconds": seconds} for run, seconds in old.get("trainings", {}).items()},
    }
    found: dict[str, Any] = {"quick": old["quick"], "provenance": known}
    if "data" in old:
        about = old["data"]["about"]
        for before, after in WORDS.items():
            about = re.sub(before, after, about)
        test = TESTS[old["data"]["name"]](data)
        found["data"] = {
            "name": old["data"]["name"],
            "about": about,
            "not_comparable": old["data"]["not_comparable"],
            "amount": old["data"].get("amount") or f"{old['data']['train_hours']:.2f} h",
            "test_utterances": old["data"]["test_utterances"],
            "fingerprints": {"test": provenance.manifest(test)},
        }
        steps = old["steps"]
        found["steps"] = {
            "expert": steps["expert"],
            "main": steps["expert"] + steps["imputer"],
            "analysis": steps["analysis"],
        }
    return found


def _references(old: Mapping[str, Any], data: Path) -> dict[str, list[Any]]:
    test = Manifest(TESTS[old["data"]["name"]](data))
    return results.references(evaluation.spread(test, len(old["rows"][0]["word_errors"])))


def _checked(name: str, old: Mapping[str, Any], data: Path) -> list[dict[str, Any]]:
    """The rows, whose errors must add up to the error rates beside them."""
    lengths = _references(old, data)
    for row in old["rows"]:
        for unit, errors, key in (("words", "word_errors", "wer"), ("characters", "character_errors", "cer")):
            rate = sum(row[errors]) / sum(lengths[unit])
            if abs(rate - row[key]["value"]) > 1e-9:
                raise ImputerError(
                    f"{name}.json, {row['name']}: {key} is {row[key]['value']}, its utterances give {rate}"
                )
    return list(old["rows"])


def _row(experiment: str, row: Mapping[str, Any], old: Mapping[str, Any]) -> dict[str, Any]:
    name = _renamed(experiment, row)
    model = re.sub(r", \d+ pass(es)?$", "", name)
    if experiment in ("figure6", "adaptive"):
        model = DP
    elif experiment in ("annealing", "topk"):
        model = name.rsplit(", ", 1)[0]
    elif experiment == "figure5":
        model = str(row["block_size"])
    found = {
        "name": name,
        "trained": [model],
        "way": {
            "block_size": row["block_size"],
            "strategy": row["strategy"],
            "options": [list(pair) for pair in row["options"].items()],
        },
        "passes": row["passes"],
        "words": [row["word_errors"]],
        "characters": [row["character_errors"]],
    }
    steps = row.get("steps") or old.get("model_steps", {}).get(model)
    return found | ({"steps": steps} if steps else {})


def _renamed(experiment: str, row: Mapping[str, Any]) -> str:
    name = str(row["name"])
    if experiment in ("table1", "table2"):
        model, size = row["model"], row["block_size"]
        plain = {
            "CTC, longer": CTC,
            "CTC": f"CTC, {start.SCRATCH}",
            "CTC, from the expert": f"CTC, {start.EXPERT}",
        }
        if model in plain:
            return plain[model]
        kind, where = model.split(", ")
        return at(MODELS[kind] if where == start.SCRATCH else f"{MODELS[kind]}, {where}", size)
    if experiment == "topology" and name.startswith("Imputer"):
        _, passes, topology = name.split(", ")
        return f"{DP}, {topology}, {passes}"
    if experiment in ("figure5", "figure6"):
        return figure5.at(row["strategy"], row["block_size"])
    return model_samples.STALE if name.startswith("a stale copy's") else name


def _same_as_table2(rows: list[dict[str, Any]], table2: Mapping[str, Any]) -> None:
    """The rows without merging were copied from table 2 by hand: they must be its rows."""
    theirs = {_renamed("table2", row): row["word_errors"] for row in table2["rows"]}
    for row in rows:
        source = row["name"].replace(", no merging", "")
        if source != row["name"] and row["words"] != [theirs[source]]:
            raise ImputerError(f"topology.json, {row['name']}: not the errors of {source} in table2.json")


def main(words: list[str]) -> None:
    """The command."""
    if len(words) != 3 or words[1] != "--data":
        raise UsageError("python -m imputer.research.migration RESULTS --data DATA")
    for line in migrate(Path(words[0]), Path(words[2])):
        print(line)


if __name__ == "__main__":
    main(sys.argv[1:])
