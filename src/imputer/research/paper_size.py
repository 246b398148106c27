"""The paper's two networks at full size: what a training would take, counted in real steps on generated data."""

from typing import Any

from imputer.research.benchmarks import bench_paper_size as benchmark
from imputer.research.results import Result
from imputer.research.tables import markdown
from imputer.research.trainings import Lab

TITLE = "The paper's size"
QUESTION = "Do the configurations `wsj` and `librispeech` train, and what would a whole training take?"
DATASET = ""  # generated data of its own


def run(lab: Lab | None, *, quick: bool = False) -> dict[str, Any]:
    """Count the operations and the memory of each configuration."""
    return {"figures": benchmark.run(quick)}


def table(result: Result) -> list[str]:
    """A row per configuration."""
    rows = [(f"`{name}`", *benchmark.cells(found)) for name, found in result["figures"].items()]
    return markdown(("", "parameters", *benchmark.COLUMNS), rows)


def text(result: Result) -> str:
    """How it was counted."""
    losses = ", ".join(
        f"{' → '.join(f'{loss:.0f}' for loss in found['losses'])} (`{name}`)"
        for name, found in result["figures"].items()
    )
    return (
        "Operations and memory are counted in real steps on utterances of the corpus's usual length, with 400 tokens; "
        f"on one such batch the loss, nats per utterance, falls {losses}. The hours assume "
        f"{100 * benchmark.ASSUMED_SHARE:.0f} % of the GPU's peak and have not been measured. The expert and the "
        "Imputer take as long each."
    )
