"""Error rates on the validation set during a training."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from imputer import decoding, models, objectives
from imputer.configs import NO_AUGMENTATION
from imputer.data import batching
from imputer.data.manifest import Utterance
from imputer.errors import ImputerError
from imputer.evaluation import scoring
from imputer.training.optimizers import averaged_weights
from imputer.training.run import Run
from imputer.training.run_folder import BEST


def validate(run: Run) -> dict[str, Any]:
    """Error rates on the validation set, greedy and (for an Imputer) in as many passes as the block size."""
    assert run.valid is not None
    settings, model = run.settings, run.model
    result: dict[str, float] = {}
    if run.ranks.first:
        model.eval()
        passes = [1] if settings.training.objective == "ctc" else [1, settings.rollin.block_size]
        texts: dict[int, list[tuple[str, str]]] = {b: [] for b in passes}
        losses = Losses()
        for acoustic, frame_lengths, batch in encoded(run, run.valid, settings.data.valid_utterances):
            if settings.training.keep_best:
                losses.add(run, acoustic, frame_lengths, batch)
            for block_size in passes:
                found = decoding.decode(model, acoustic, frame_lengths, decoding.Options(block_size))
                for name, text, one in zip(batch.ids, batch.texts, found, strict=True):
                    if isinstance(one, ImputerError):  # every word of it counts as missed
                        print(f"imputer: validation: {name}: {one}", file=sys.stderr)
                    tokens = [] if isinstance(one, ImputerError) else one.tokens(model)
                    texts[block_size].append((text, run.vocabulary.decode(tokens)))
        for block_size, pairs in texts.items():
            words = scoring.total([scoring.word_errors(reference, written) for reference, written in pairs])
            characters = scoring.total(
                [scoring.character_errors(reference, written) for reference, written in pairs]
            )
            result |= {f"wer_{block_size}": words.rate, f"cer_{block_size}": characters.rate}
        if settings.training.keep_best:
            result["loss"] = losses.total / max(1, losses.tokens)
        shown = ", ".join(
            f"{name} {value:.3f}" if name == "loss" else f"{name} {100 * value:.1f} %"
            for name, value in result.items()
        )
        print(f"step {run.progress.step}: {shown}", file=sys.stderr, flush=True)
    return run.ranks.gathered(result)[0]


def validate_and_keep(run: Run) -> None:
    """Validate, log it, and with training.keep_best save the model if its loss is the least so far."""
    now = run.progress
    with averaged_weights(run.model, run.average):
        result = validate(run)
        run.log({"step": now.step, "valid": result})
        if not run.settings.training.keep_best:
            return
        if not 0 <= now.best_loss <= result["loss"]:
            now.best_loss, now.best_step, now.waited = result["loss"], now.step, 0
            if run.ranks.first:
                models.save(run.folder / BEST, run.model, run.vocabulary)
        else:
            now.waited += 1


@dataclass
class Losses:
    """Loss on the validation set. Far less noisy than word errors, so it chooses what to keep.

    It is that of the first pass, all frames masked: exact for CTC and the Imputer alike, and without chance.
    """

    total: float = 0.0  # nats
    tokens: int = 0

    def add(self, run: Run, acoustic: Tensor, frame_lengths: Tensor, batch: batching.Batch) -> None:
        topology = {"merge_repeats": run.model.merge_repeats}
        targets, target_lengths = batch.targets, batch.target_lengths
        with torch.no_grad():
            log_probs = run.model.impute(acoustic, frame_lengths, run.model.all_masked(acoustic))
            likelihood = objectives.ctc(log_probs, targets, frame_lengths, target_lengths, **topology)
        fits = likelihood.isfinite()
        self.total -= float(likelihood[fits].sum())
        self.tokens += int(target_lengths[fits].sum())


def encoded(
    run: Run, utterances: Sequence[Utterance], at_most: int
) -> Iterator[tuple[Tensor, Tensor, batching.Batch]]:
    """Acoustic frames of (at most so many) utterances, without augmentation or gradients."""
    every = -(-len(utterances) // at_most)  # spread over all speakers
    chosen = [utterances[i] for i in range(0, len(utterances), every)]
    extract = run.model.front_end.reader(run.settings.data, NO_AUGMENTATION, chosen)
    dataset = batching.SpeechDataset(chosen, run.vocabulary, extract)
    lengths = [run.model.front_end.feature_frames(utterance.duration) for utterance in chosen]
    plan = batching.plan_epoch(lengths, frame_budget=run.stream.frame_budget, seed=0, epoch=0)
    for batch in batching.batches(dataset, plan):
        if batch.ids:
            batch = run.ranks.moved(batch)
            with torch.no_grad():
                yield *run.model.encode(batch.features, batch.feature_lengths), batch
