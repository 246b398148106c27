"""Results files: errors of every utterance with where they came from, and the figures that follow from them.

A file holds ``rows``, one per model and way of decoding: the errors of every utterance with every seed. What a report
says of them is computed from these (``Result.rate``, ``Result.difference``); the main figures are also written into
the file for readers, and ``check`` computes them again. Nothing is edited by hand: a change of format is a tested
program (``migration.py``).
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from imputer.data.manifest import Utterance
from imputer.errors import ImputerError
from imputer.evaluation import trials
from imputer.evaluation.trials import LEVEL, Estimate, Trials
from imputer.support import atomic_files

FORMAT = 2
PROVENANCE = ("command", "seeds", "time", "processor", "packages")
KINDS = ("wrong", "dropped", "doubled", "inserted")  # of tokens; doubled ones are not counted as inserted
Pairs = Sequence[tuple[str, str]]


class Result:
    """A results file."""

    def __init__(self, name: str, content: Mapping[str, Any]) -> None:
        self.name, self.content = name, content

    @classmethod
    def read(cls, path: Path) -> "Result":
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ImputerError(f"cannot read {path}: {error}") from error
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ImputerError(
                f"{path}: not a results file of format {FORMAT}; `python -m imputer.research.migration` reads format 1"
            )
        return cls(path.stem, content)

    def __getitem__(self, key: str) -> Any:
        return self.content[key]

    def get(self, key: str, default: Any = None) -> Any:
        return self.content.get(key, default)

    @property
    def experiment(self) -> str:
        return str(self["experiment"])

    @property
    def data(self) -> Mapping[str, Any]:
        return self.get("data", {})

    @cached_property
    def rows(self) -> dict[str, Mapping[str, Any]]:
        return {row["name"]: row for row in self.get("rows", [])}

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The comparisons that the file holds."""
        return [(one["first"], one["second"]) for one in self.get("differences", [])]

    def trials(self, row: str, unit: str = "words") -> Trials:
        """The errors of a row: words, characters or a kind of token errors (per token)."""
        of, lengths = self.rows[row], self["utterances"]
        errors = of["tokens"][unit] if unit in KINDS else of[unit]
        length = lengths[unit] if unit not in KINDS else of["tokens"]["length"]
        return Trials(np.array(errors, float), np.array(length, float), lengths["speakers"])

    def rate(self, row: str, unit: str = "words") -> Estimate:
        """An error rate."""
        return trials.rate(self.trials(row, unit))

    def difference(self, first: str, second: str, level: float = LEVEL) -> Estimate:
        """The word error rate of the second row - that of the first."""
        paired = self.rows[first]["trained"] == self.rows[second]["trained"]
        return trials.difference(self.trials(first), self.trials(second), level, paired=paired)

    def figures(self) -> dict[str, Any]:
        """The figures of the file, computed from its errors."""
        return {
            "figures": {
                name: {"wer": asdict(self.rate(name)), "cer": asdict(self.rate(name, "characters"))}
                for name in self.rows
            },
            "differences": [
                {"first": first, "second": second, **asdict(self.difference(first, second))}
                for first, second in self.pairs
            ],
        }


def completed(name: str, content: Mapping[str, Any], pairs: Pairs = ()) -> Result:
    """A result with its figures."""
    pairs_only = [{"first": first, "second": second} for first, second in pairs]
    bare = Result(name, {"format": FORMAT, **content, "differences": pairs_only})
    return Result(name, {**bare.content, **bare.figures()} if bare.rows else {"format": FORMAT, **content})


def write(folder: Path, result: Result) -> Path:
    """results/NAME.json, whole or not at all."""
    path = folder / f"{result.name}.json"
    atomic_files.write_text(path, json.dumps(result.content, separators=(",", ":")) + "\n")
    return path


def read_all(folder: Path) -> dict[str, Result]:
    """Every results file of a folder by name."""
    return {path.stem: Result.read(path) for path in sorted(folder.glob("*.json"))}


def references(utterances: Iterable[Utterance]) -> dict[str, list[Any]]:
    """What every row of a file is scored against."""
    found = list(utterances)
    return {
        "ids": [u.id for u in found],
        "speakers": [u.speaker for u in found],
        "words": [len(u.text.split()) for u in found],
        "characters": [len(" ".join(u.text.split())) for u in found],
    }


def check(result: Result) -> list[str]:
    """What is missing in the provenance of a file, and its figures that do not follow from its errors, a line each."""
    found = [] if result["quick"] else [f"{result.name}.json: {line}" for line in _unproven(result)]
    if result.rows:
        for key, value in result.figures().items():
            found += [f"{result.name}.json: {line}" for line in _differences(result.get(key), value, key)]
    return found


def _unproven(result: Result) -> list[str]:
    """What a results file does not say of its making; older ones say that it was not recorded."""
    known = result["provenance"]
    if "recorded" in known:
        return []
    found = [f"its provenance has no {key}" for key in PROVENANCE if not known.get(key)]
    if not known.get("commit") and not known.get("code"):
        found.append("its provenance has neither a commit nor a fingerprint of the code")
    if known.get("dirty"):
        found.append("it was made by code that was not committed")
    return found


def _differences(said: Any, computed: Any, where: str) -> list[str]:
    if isinstance(computed, Mapping) and isinstance(said, Mapping):
        keys = dict.fromkeys([*said, *computed])
        return [
            line for key in keys for line in _differences(said.get(key), computed.get(key), f"{where}, {key}")
        ]
    if isinstance(computed, list) and isinstance(said, list) and len(computed) == len(said):
        return [
            line
            for number, (a, b) in enumerate(zip(said, computed, strict=True), 1)
            for line in _differences(a, b, f"{where} {number}")
        ]
    numbers = isinstance(said, int | float) and isinstance(computed, int | float)
    same = abs(said - computed) <= 1e-9 * max(1.0, abs(computed)) if numbers else said == computed
    return [] if same else [f"{where} is {said}, the errors of its utterances give {computed}"]
