"""What a training keeps on disk: configuration, metrics, checkpoints, the finished model."""

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from imputer import configs, models
from imputer.data.ranks import Ranks
from imputer.errors import ImputerError, UsageError
from imputer.support import atomic_files, locks
from imputer.training import checkpoints
from imputer.training.optimizers import averaged_weights
from imputer.training.run import Run

CHECKPOINTS, METRICS = "checkpoints", "metrics.jsonl"
START = "start.safetensors"  # the weights to stay near, with training.stay_near
BEST = "best"  # the model of the best validation, with training.keep_best
STALE = "stale"  # folder of alignments by stale copies

# A resumed run may differ in these keys.
CHANGEABLE = (
    "training.validate_every",
    "training.checkpoint_every",
    "training.keep_checkpoints",
    "training.log_every",
    "training.nonfinite_limit",
    "training.tensorboard",
    "training.threads",
    "data.workers",
    "data.unreadable_limit",
    "data.frames_cache",
    "data.valid",
    "data.valid_utterances",
)


@contextlib.contextmanager
def only_run_in(folder: Path, here: Ranks) -> Iterator[None]:
    """Hold the lock of a run folder: two trainings in one folder would overwrite each other."""
    if not here.first:
        yield
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / ".lock", "w")  # noqa: SIM115 - held open for the whole run
    except OSError as error:
        reason = "it is not a directory" if isinstance(error, FileExistsError) else error.strerror
        raise UsageError(f"cannot write to the run folder {folder}: {reason}") from error
    with lock:
        if not locks.taken(lock, folder / ".lock"):
            raise UsageError(f"another process is training in {folder}")
        yield


def remove_leftovers(folder: Path, oldest_needed: int, step: int) -> None:
    """Delete what killed writers left behind, and alignments of stale copies that no checkpoint needs any more."""
    for path in [*folder.rglob(".*.part"), *folder.rglob("*.part-*")]:
        path.unlink(missing_ok=True)
    for path in (folder / STALE).glob(checkpoints.PATTERN):
        if not oldest_needed <= int(path.stem.removeprefix("step-")) <= step:
            path.unlink()


def refuse_changes(folder: Path, settings: configs.Config) -> None:
    """A run resumes only under the configuration it was started with."""
    before = configs.read(folder / "config.toml")
    changed = configs.differences(before, settings, ignore=CHANGEABLE)
    if settings.training.objective == "ctc":  # it has no roll-in
        changed = [line for line in changed if not line.startswith("rollin.")]
    if changed:
        raise UsageError(
            f"{folder} was started with another configuration: {'; '.join(changed)}. "
            "Give the old values to resume, or another --output for a new training"
        )


def save_checkpoint(run: Run) -> None:
    """The first rank writes; the others wait."""
    if run.ranks.first:
        tensors = checkpoints.pack(run.model, run.optimizer, run.average)
        checkpoints.save(
            run.folder / CHECKPOINTS, run.progress, tensors, run.settings.training.keep_checkpoints
        )
    run.ranks.wait()


def save_model(run: Run) -> None:
    """The model folder: the best of the validations if that is asked for, else the (averaged) weights as they are."""
    if run.settings.training.keep_best and run.progress.best_loss >= 0:
        models.copy(run.folder / BEST, run.folder / "model")
        return
    with averaged_weights(run.model, run.average):
        for name, tensor in run.model.state_dict().items():
            if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                raise ImputerError(
                    f"the weights {name} are not finite after step {run.progress.step}; no model was written. "
                    f"Remove the last checkpoints in {run.folder / CHECKPOINTS} to resume from an earlier one"
                )
        models.save(run.folder / "model", run.model, run.vocabulary)


def metrics_log(folder: Path, here: Ranks, *, tensorboard: bool) -> Callable[[dict[str, Any]], None]:
    """A function that appends to metrics.jsonl (and TensorBoard); silent on all ranks but the first."""
    if not here.first:
        return quiet
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / METRICS
    writer = _summary_writer(folder) if tensorboard else None

    def log(line: dict[str, Any]) -> None:
        try:
            with open(path, "a") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            raise ImputerError(f"cannot write {path}: {error.strerror or error}") from error
        if writer:
            for name, value in {**line, **line.get("valid", {})}.items():
                if isinstance(value, int | float) and name != "step":
                    writer.add_scalar(name, value, line["step"])
            writer.flush()

    return log


def _summary_writer(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UsageError("training.tensorboard needs: pip install 'imputer-asr[tensorboard]'") from error
    return SummaryWriter(str(folder / "tensorboard"))


def forget_metrics_after(folder: Path, step: int) -> None:
    """Remove the lines after the checkpoint: those steps are taken and logged again."""
    path = folder / METRICS
    if not path.is_file():
        return
    kept = []
    for line in path.read_text(errors="replace").splitlines():
        with contextlib.suppress(
            ValueError, TypeError, KeyError, RecursionError
        ):  # the last line may be incomplete
            if json.loads(line)["step"] <= step:
                kept.append(line)
    with atomic_files.replacing(path) as temporary:
        temporary.write_text("".join(f"{line}\n" for line in kept))


def quiet(*_: Any, **__: Any) -> None:
    """Log nothing, show nothing: what the other ranks do."""
