"""One optimiser step."""

import contextlib
import math
from collections.abc import Sequence

import torch
from torch import nn

from imputer import rollin
from imputer.data import drops
from imputer.data.batching import Batch
from imputer.data.drops import Dropped, Tally
from imputer.errors import ImputerError
from imputer.training.data_checks import UNUSABLE
from imputer.training.optimizers import learning_rate, update_average
from imputer.training.run import Run
from imputer.training.run_folder import save_checkpoint
from imputer.training.text_only import TextBatch


def take_step(run: Run, share: list[tuple[int, int, Batch]]) -> dict[str, float] | None:
    """One optimiser step over this rank's share of batches; None if it changed nothing."""
    training, here, now = run.settings.training, run.ranks, run.progress
    loaded = [here.moved(batch) for _, _, batch in share]
    silent = [here.moved(batch) for batch in text_batches(run, len(loaded))]
    spoken, written = here.total([_tokens(loaded), _tokens(silent)])
    rate = learning_rate(training, now.step)
    for group in run.optimizer.param_groups:
        group["lr"] = rate * group["share"]
    run.trained.train()
    loss_sum, text_loss, too_long = 0.0, 0.0, list[str]()
    for j, batch in enumerate([*loaded, *silent]):
        seed_for_batch(training.seed, now.step, j * here.count + here.rank)
        more = here.count > 1 and j < len(loaded) + len(silent) - 1
        with run.trained.no_sync() if more else contextlib.nullcontext():  # type: ignore[operator]
            loss, left_out = run.trained(batch, now.step)
            # Ranks average their gradients; the loss is a sum over all of them.
            (loss * (here.count / max(1.0, spoken + written))).backward()
        if isinstance(batch, TextBatch):
            text_loss += float(loss.detach())
        else:
            loss_sum, too_long = loss_sum + float(loss.detach()), too_long + left_out
    pull_to_start(run)
    norm = float(nn.utils.clip_grad_norm_(run.model.parameters(), training.clip))
    used = sum(len(batch) for batch in loaded) - len(too_long)
    dropped = len(too_long) + sum(len(batch.dropped) for batch in loaded)
    seconds = sum(batch.seconds for batch in loaded)
    loss_sum, text_loss, seconds, dropped, used = here.total([loss_sum, text_loss, seconds, dropped, used])  # type: ignore[assignment]
    count_drops(run, loaded, too_long)
    finite = math.isfinite(loss_sum + text_loss) and math.isfinite(norm)
    if finite and used:
        run.optimizer.step()
        update_average(run.average, run.model, run.settings.training.average, run.progress.step)
    run.optimizer.zero_grad(set_to_none=True)
    now.step, now.epoch = now.step + 1, share[-1][0]
    now.position = share[-1][1] + here.count - here.rank  # the batch after the last rank's last
    now.seconds_of_audio += seconds
    now.dropped += int(dropped)
    if not used:
        note_empty(run)
        return None
    run.empty_in_a_row = 0
    if not finite:
        skip(run, [name for batch in loaded for name in batch.ids], loss_sum, norm)
        return None
    return {
        "loss": loss_sum / max(1.0, spoken),  # nats per token
        **({"text_loss": text_loss / max(1.0, written)} if silent else {}),
        "learning_rate": rate,
        "gradient_norm": norm,
        "dropped": now.dropped,
        "skipped": len(now.skipped),
    }


def text_batches(run: Run, number: int) -> list[TextBatch]:
    """A batch without sound for each of this rank's batches, if there are to be any; all ranks together as one does."""
    settings, here = run.settings, run.ranks
    if run.text is None:
        return []
    return [
        run.text.draw(
            *(settings.training.seed, run.progress.step, j * here.count + here.rank),
            seconds=settings.training.text_share * settings.data.batch_seconds,
            frame_seconds=run.model.front_end.frame_seconds,
            merge_repeats=run.model.merge_repeats,
        )
        for j in range(number)
    ]


def _tokens(batches: Sequence[Batch]) -> float:
    return sum(float(batch.target_lengths.sum()) for batch in batches)


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


def count_drops(run: Run, loaded: list[Batch], too_long: list[str]) -> None:
    """Add what this step could not use; stop if too large a share of the training set is unreadable."""
    for batch in loaded:
        new = {name: one for name, one in batch.dropped.items() if name not in run.stream.excluded}
        run.dropped = new | run.dropped
    for name in too_long:
        run.dropped.setdefault(name, Dropped(drops.TOO_LONG, f"utterance {name!r}"))
    unusable = [one for one in run.dropped.values() if one.reason in UNUSABLE]
    known = sum(one.reason in UNUSABLE for one in run.stream.excluded.values())
    total = known + run.ranks.total([len(unusable)])[0]
    limit = run.settings.data.unreadable_limit
    if total > limit * len(run.stream.utterances):
        first = f"; the first: {unusable[0].item}" if unusable else ""
        raise ImputerError(
            f"{total:.0f} of {len(run.stream.utterances)} utterances cannot be used, more than data.unreadable_limit = "
            f"{limit:g} allows{first}. Nothing after the last checkpoint was saved; the same command resumes there"
        )


def note_empty(run: Run) -> None:
    """Count a step in which no utterance could be used: the weights stay; after too many in a row stop."""
    run.progress.empty += 1
    run.empty_in_a_row += 1
    if run.empty_in_a_row > run.settings.training.nonfinite_limit:
        raise ImputerError(
            f"{run.empty_in_a_row} steps in a row had no usable utterance, more than training.nonfinite_limit = "
            f"{run.settings.training.nonfinite_limit}: {Tally().add(run.dropped.values())}"
        )


def pull_to_start(run: Run) -> None:
    """Add the gradient of training.stay_near * |weights - start|^2, in the unit of the loss: nats per token."""
    if run.start:
        strength = 2 * run.settings.training.stay_near
        for name, weight in run.model.named_parameters():
            if weight.grad is not None and name in run.start:  # a layer more than the start has is free
                weight.grad.add_(weight.detach() - run.start[name], alpha=strength)


def seed_for_batch(*key: int) -> None:
    """Dropout of a batch depends on (seed, step, batch) alone."""
    torch.manual_seed(rollin.generator_for("dropout", *key).initial_seed())
