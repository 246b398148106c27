"""Batch -> roll-in -> model -> objective: the loss of one batch."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from imputer import alignments, configs, objectives, rollin
from imputer.data.batching import Batch
from imputer.model import Imputer
from imputer.training.text_only import TextBatch


class BatchLoss(nn.Module):
    """The negative log-likelihood of a batch, summed, in nats."""

    def __init__(
        self, model: Imputer, settings: configs.Config, expert: Callable[[str], list[int]] | None
    ) -> None:
        super().__init__()
        self.model, self.settings, self.expert = model, settings, expert

    def forward(self, batch: Batch, step: int) -> tuple[Tensor, list[str]]:
        """The summed loss, and the ids that are left out because their tokens do not fit their frames."""
        model, topology = self.model, {"merge_repeats": self.model.merge_repeats}
        if not batch.ids:  # all of it was dropped, but the other ranks need a gradient
            return torch.stack([p.sum() for p in model.parameters()]).sum() * 0.0, []
        autocast = torch.autocast(
            batch.features.device.type, torch.bfloat16, enabled=self.settings.training.bf16
        )
        with autocast:
            acoustic, frame_lengths = self.encode(batch)
        usable = alignments.feasible(batch.targets, frame_lengths, batch.target_lengths, **topology)
        if self.settings.training.objective == "ctc":
            drawn, committed = None, None
            partial = model.all_masked(acoustic)
        else:
            if isinstance(batch, TextBatch):
                expert = batch.alignments.__getitem__
            else:
                expert = self.expert or self.own_alignments(batch, acoustic.detach(), frame_lengths, usable)
            drawn, committed, fits = self.roll_in(expert, batch, frame_lengths, step)
            usable = usable & torch.tensor(fits, device=usable.device)
            partial = torch.where(committed, drawn, model.mask)
        with autocast:
            log_probs = model.impute(acoustic, frame_lengths, partial)
        keep = usable.nonzero()[:, 0]
        if not len(keep):
            return log_probs.sum() * 0.0, batch.ids
        if len(keep) < len(usable):
            log_probs, frame_lengths = log_probs[keep], frame_lengths[keep]
            drawn = drawn if drawn is None else drawn[keep]
            committed = committed if committed is None else committed[keep]
        targets, target_lengths = batch.targets[keep], batch.target_lengths[keep]
        likelihood = OBJECTIVES[self.settings.training.objective](
            log_probs, targets, drawn, committed, frame_lengths, target_lengths, **topology
        )
        return -likelihood.sum(), [n for n, fits in zip(batch.ids, usable.tolist(), strict=True) if not fits]

    def encode(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The acoustic part (batch, frame, width) and frame_lengths; zero where there is no sound."""
        if isinstance(batch, TextBatch):
            shape = (*batch.features.shape[:2], self.model.settings.width)
            return batch.features.new_zeros(shape), batch.feature_lengths
        return self.model.encode(batch.features, batch.feature_lengths)

    @torch.no_grad()
    def own_alignments(
        self, batch: Batch, acoustic: Tensor, frame_lengths: Tensor, usable: Tensor
    ) -> Callable[[str], list[int]]:
        """By id, the best alignment of every utterance under the model as it is, with all frames masked.

        # DEPARTURE own-roll-in: the paper aligns with a CTC expert or a stale copy; this is a copy of no age.
        """
        model = self.model
        found: dict[str, list[int]] = {}
        with torch.autocast(acoustic.device.type, torch.bfloat16, enabled=self.settings.training.bf16):
            log_probs = model.impute(acoustic, frame_lengths, model.all_masked(acoustic))
        best, _ = alignments.best_alignment(
            log_probs, batch.targets, frame_lengths, batch.target_lengths, merge_repeats=model.merge_repeats
        )
        for name, path, frames, fits in zip(
            batch.ids, best.tolist(), frame_lengths.tolist(), usable.tolist(), strict=True
        ):
            found[name] = path[:frames] if fits else [0] * frames
        return found.__getitem__

    def roll_in(
        self, expert: Callable[[str], list[int]], batch: Batch, frame_lengths: Tensor, step: int
    ) -> tuple[Tensor, Tensor, list[bool]]:
        """(a, a~) for every utterance of the batch."""
        policy = self.settings.rollin
        drawn, committed, usable = rollin.draw(
            expert,
            batch.ids,
            frame_lengths.tolist(),
            masking_policy=policy.masking,
            noise=policy.noise,
            block_size=policy.block_size,
            seed=self.settings.training.seed,
            step=step,
            all_masked=0.0 if isinstance(batch, TextBatch) else policy.all_masked,  # neither text nor sound
            merge_repeats=self.model.merge_repeats,
        )
        device = frame_lengths.device
        return drawn.to(device), committed.to(device), usable


def _ctc(
    log_probs: Tensor, y: Tensor, a: Any, committed: Any, n: Tensor, m: Tensor, **topology: bool
) -> Tensor:
    return objectives.ctc(log_probs, y, n, m, **topology)


def _imitation(
    log_probs: Tensor, y: Tensor, a: Tensor, committed: Any, n: Tensor, m: Tensor, **_: bool
) -> Tensor:
    return objectives.imitation(log_probs, a, n)


OBJECTIVES: dict[str, Callable[..., Tensor]] = {
    "ctc": _ctc,
    "imitation": _imitation,
    "dynamic_programming": objectives.dynamic_programming,
}
