"""Alignments by a stale copy of the model (q_theta')."""

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from imputer import rollin
from imputer.aligner.corpus import align_corpus
from imputer.training.run import Run
from imputer.training.run_folder import STALE


def stale_copy(run: Run) -> rollin.AlignmentStore:
    """Alignments from the model as it is now, by forced imputation (q_theta'), kept in the run folder."""
    path = stale_path(run.folder, run.progress.step)
    run.model.eval()

    def align(log_probs_of: Callable[[Tensor], Tensor], targets: Tensor, n: Tensor, m: Tensor) -> Tensor:
        return rollin.forced_imputation(
            log_probs_of,
            targets,
            n,
            m,
            block_size=run.settings.rollin.block_size,
            mask=run.model.mask,
            merge_repeats=run.model.merge_repeats,
        )

    align_corpus(
        path, run.model, run.vocabulary, run.stream.utterances, run.plain_extract, run.ranks, how=align
    )
    return rollin.AlignmentStore(path)


def stale_path(folder: Path, step: int) -> Path:
    """Where the alignments of the stale copy taken at ``step`` are kept."""
    return folder / STALE / f"step-{step:08d}.safetensors"
