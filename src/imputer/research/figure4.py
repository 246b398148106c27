"""Figure 4 (fig:imputation): a decoding path, pass by pass."""

import dataclasses
from pathlib import Path
from typing import Any

from imputer.data.manifest import Manifest
from imputer.display import drawings
from imputer.recognizer import Recognizer
from imputer.research.results import Result
from imputer.research.trainings import Lab
from imputer.transcripts import Transcript

TITLE = "Figure 4, a decoding path"
QUESTION = "How does an Imputer fill in an alignment, one frame per block per pass?"
DATASET = "libri"
SECONDS = 2.5  # the utterance nearest to this length is shown, right or wrong


def run(lab: Lab) -> dict[str, Any]:
    """Decode one utterance of the test set with a trace; it is chosen by its length, not by its errors."""
    trained = lab.first.imputer()
    utterance = min(Manifest(lab.dataset.test), key=lambda u: abs(u.duration - SECONDS))
    said = Recognizer.from_pretrained(trained.model).transcribe(utterance, block_size=8, trace=True)
    kept = {
        key: value for key, value in dataclasses.asdict(said).items() if key in ("text", "passes", "trace")
    }
    return {"id": utterance.id, "reference": utterance.text, "block_size": 8, "transcript": kept}


def text(result: Result) -> str:
    """The reference, the hypothesis and the number of passes."""
    said = result["transcript"]
    return (
        f"Utterance {result['id']}, chosen for its length: “{result['reference']}”; written in {said['passes']} "
        f"passes: “{said['text']}”."
    )


def draw(result: Result, path: Path) -> None:
    """The picture of ``imputer transcribe --figure``."""
    said = Transcript(**result["transcript"], words=[], tokens=[], seconds=0.0)
    drawings.save(drawings.decoding_path(said, block_size=result["block_size"], title=said.text), path)
