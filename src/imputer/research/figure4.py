"""Figure 4 (fig:imputation): a decoding path, pass by pass."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from imputer.data.manifest import Manifest
from imputer.display import drawings
from imputer.recognizer import Recognizer
from imputer.research.report import Claim
from imputer.research.trainings import Lab
from imputer.transcripts import Transcript

TITLE = "Figure 4, a decoding path"
QUESTION = "How does an Imputer fill in an alignment, one frame of every block a pass?"
DATASET = "libri"
SECONDS = 2.5  # the utterance nearest to this length is shown, whatever comes of it


def run(lab: Lab) -> dict[str, Any]:
    """Decode one utterance of the test set with a trace; it is chosen by its length, not by how well it goes."""
    trained = lab.first.main()
    utterance = min(Manifest(lab.dataset.test), key=lambda u: abs(u.duration - SECONDS))
    said = Recognizer.from_pretrained(trained.model).transcribe(utterance, block_size=8, trace=True)
    return {
        "id": utterance.id,
        "reference": utterance.text,
        "block_size": 8,
        "transcript": dataclasses.asdict(said),
    }


def section(result: Mapping[str, Any]) -> list[str]:
    """What was said, and what was written in how many passes."""
    said = result["transcript"]
    return [
        f"Utterance {result['id']}, chosen for its length: “{result['reference']}”; written in {said['passes']} "
        f"passes: “{said['text']}”."
    ]


def claims(result: Mapping[str, Any]) -> list[Claim]:
    """A picture claims nothing."""
    return []


def draw(result: Mapping[str, Any], path: Path) -> None:
    """The picture of ``imputer transcribe --figure``."""
    said = Transcript(**{**result["transcript"], "words": [], "tokens": []})
    drawings.save(drawings.decoding_path(said, block_size=result["block_size"], title=said.text), path)
