"""`imputer finetune`."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from imputer.commands.options import FileName


def finetune(
    model: FileName,
    recordings: Path,
    *,
    output: Annotated[Path, Parameter(alias="-o")],
    minutes: float | None = None,
) -> None:
    """Fine-tune a model on your own recordings.

    - imputer finetune english recordings/ -o my-model
    - imputer finetune english table.csv -o my-model --minutes 10

    Some recordings are held out; the table at the end compares the word error rates on them before and after. An
    interrupted run is resumed by the same command.

    Parameters
    ----------
    model
        The model to start from: a model folder, or the name of a shipped model.
    recordings
        A folder of recordings with text files of the same name, a CSV or TSV table, or a manifest.
    output
        The model folder to write.
    minutes
        Train on at most this many minutes of speech.
    """
    from imputer.support.memory import reuse_freed_memory
    from imputer.training.finetuning import RUN
    from imputer.training.finetuning import finetune as run

    reuse_freed_memory()
    report = run(model, recordings, output, minutes=minutes)
    print(report)
    print(f"model written to {output}")
    print(f"try it:      imputer transcribe --model {output} your.wav")
    print(f"{output / RUN} ({megabytes(output / RUN):.0f} MB of checkpoints and manifests) may be deleted")


def megabytes(folder: Path) -> float:
    """What the files of a folder take on disk."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6
