"""One optimiser step."""

import contextlib
import math

import torch
from torch import nn

from imputer import rollin
from imputer.data.batching import Batch
from imputer.errors import ImputerError
from imputer.training.optimizers import learning_rate, update_average
from imputer.training.run import Run
from imputer.training.run_folder import save_checkpoint


def take_step(run: Run, share: list[tuple[int, int, Batch]]) -> dict[str, float] | None:
    """One optimiser step over this rank's share of batches; None if its loss was not finite and it was skipped."""
    training, here, now = run.settings.training, run.ranks, run.progress
    loaded = [here.moved(batch) for _, _, batch in share]
    tokens = here.total([sum(float(batch.target_lengths.sum()) for batch in loaded)])[0]
    rate = learning_rate(training, now.step)
    for group in run.optimizer.param_groups:
        group["lr"] = rate
    run.trained.train()
    loss_sum, unusable = 0.0, 0
    for j, batch in enumerate(loaded):
        seed_for_batch(training.seed, now.step, j * here.count + here.rank)
        more = here.count > 1 and j < len(loaded) - 1
        with run.trained.no_sync() if more else contextlib.nullcontext():  # type: ignore[operator]
            loss, left_out = run.trained(batch, now.step)
            # Ranks average their gradients; the loss is a sum over all of them.
            (loss * (here.count / max(1.0, tokens))).backward()
        loss_sum, unusable = loss_sum + float(loss.detach()), unusable + left_out
    norm = float(nn.utils.clip_grad_norm_(run.model.parameters(), training.clip))
    seconds, dropped = sum(b.seconds for b in loaded), unusable + sum(len(b.dropped) for b in loaded)
    loss_sum, seconds, dropped_all = here.total([loss_sum, seconds, dropped])
    finite = math.isfinite(loss_sum) and math.isfinite(norm)
    if finite:
        run.optimizer.step()
        update_average(run.average, run.model, run.settings.training.average, run.progress.step)
    run.optimizer.zero_grad(set_to_none=True)
    now.step, now.epoch = now.step + 1, share[-1][0]
    now.position = share[-1][1] + here.count - here.rank  # the batch after the last rank's last
    now.seconds_of_audio += seconds
    now.dropped += int(dropped_all)
    if not finite:
        skip(run, [name for batch in loaded for name in batch.ids], loss_sum, norm)
        return None
    return {
        "loss": loss_sum / max(1.0, tokens),  # nats per token
        "learning_rate": rate,
        "gradient_norm": norm,
        "dropped": now.dropped,
        "skipped": len(now.skipped),
    }


def skip(run: Run, ids: list[str], loss: float, norm: float) -> None:
    """Record a step whose loss or gradient is not finite; after too many of them stop and name the utterances."""
    run.progress.skipped.append(ids)
    run.log({"step": run.progress.step, "skipped": ids, "loss": str(loss), "gradient_norm": str(norm)})
    if len(run.progress.skipped) > run.settings.training.nonfinite_limit:
        save_checkpoint(run)
        names = ", ".join(name for group in run.progress.skipped[-3:] for name in group[:4])
        raise ImputerError(
            f"the loss was not finite in {len(run.progress.skipped)} steps, more than "
            f"training.nonfinite_limit = {run.settings.training.nonfinite_limit}; last with utterances {names}; "
            "lower training.learning_rate, or check those recordings"
        )


def seed_for_batch(*key: int) -> None:
    """Dropout of a batch depends on (seed, step, batch) alone."""
    torch.manual_seed(rollin.generator_for("dropout", *key).initial_seed())
