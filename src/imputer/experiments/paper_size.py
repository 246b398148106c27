"""The paper's two networks at full size: a few real steps on made data, and what a GPU would need."""

from collections.abc import Mapping
from typing import Any

from imputer.benchmarks import paper_size
from imputer.experiments.lab import Lab
from imputer.experiments.results import Claim, table

TITLE = "The paper's size"
QUESTION = "Do `configs/wsj.toml` and `configs/librispeech.toml` train, and what would the whole of it take?"
DATASET = ""  # made data of its own


def run(lab: Lab | None, *, quick: bool = False) -> dict[str, Any]:
    """Real steps of each configuration, with FLOPs and memory counted."""
    return {"figures": paper_size.run(quick)}


def section(result: Mapping[str, Any]) -> list[str]:
    """A row a configuration."""
    rows = [
        (
            f"`configs/{name}.toml`",
            f"{f['parameters'] / 1e6:.1f} M",
            " → ".join(f"{loss:.0f}" for loss in f["losses"]),
            f"{f['gflop_per_second_of_audio']:.1f}",
            f"{f['activation_mb_per_second']:.1f}",
            f"{f['state_gb']:.2f}",
            f"{f['epochs']:.0f}",
            f"{f['gpu_hours']:.1f}",
        )
        for name, f in result["figures"].items()
    ]
    headings = (
        "",
        "parameters",
        "loss, step by step",
        "GFLOP a second of audio",
        "activations, MB a second of audio",
        "weights and optimiser, GB",
        "epochs",
        f"hours on one {paper_size.GPU}",
    )
    share = round(100 * paper_size.ASSUMED_SHARE)
    return [
        *table(headings, rows),
        "",
        f"Operations and memory are counted in real steps; the hours assume {share} % of the GPU's peak, and have not "
        "been measured.",
    ]


def claims(result: Mapping[str, Any]) -> list[Claim]:
    """Nothing to compare."""
    return []
