"""Error rates on the validation set during a training."""

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from imputer import decoding, models, objectives
from imputer.configs import NO_AUGMENTATION
from imputer.data import batching
from imputer.data.drops import Dropped, Tally
from imputer.data.manifest import Utterance
from imputer.errors import ImputerError, count
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
        losses, unread = Losses(), dict[str, Dropped]()
        for acoustic, frame_lengths, batch in encoded(run, run.valid, settings.data.valid_utterances, unread):
            if settings.training.keep_best:
                losses.add(run, acoustic, frame_lengths, batch)
            for block_size in passes:
                found = decoding.decode(model, acoustic, frame_lengths, decoding.Options(block_size))
                for name, text, one in zip(batch.ids, batch.texts, found, strict=True):
                    if isinstance(one, ImputerError):  # every word of it counts as missed
                        print(f"imputer: validation: {name}: {one}", file=sys.stderr)
                    tokens = [] if isinstance(one, ImputerError) else one.tokens(model)
                    texts[block_size].append((text, run.vocabulary.decode(tokens)))
        report_unread(run, unread, scored=len(texts[1]))
        shown = []
        for block_size, pairs in texts.items():
            words = scoring.total([scoring.word_errors(reference, written) for reference, written in pairs])
            characters = scoring.total(
                [scoring.character_errors(reference, written) for reference, written in pairs]
            )
            result |= {f"wer_{block_size}": words.rate, f"cer_{block_size}": characters.rate}
            how = "1 pass" if block_size == 1 else f"{block_size} passes"
            shown.append(f"WER {100 * words.rate:.1f} %, CER {100 * characters.rate:.1f} % in {how}")
        if settings.training.keep_best:
            result["loss"] = losses.mean
            shown.append(f"loss {losses.mean:.3f}")
        print(f"step {run.progress.step}: {'; '.join(shown)}", file=sys.stderr, flush=True)
    return run.ranks.gathered(result)[0]


def report_unread(run: Run, unread: dict[str, Dropped], *, scored: int) -> None:
    """Say what of the validation set could not be read; too many, or no utterance left to score, stop the run."""
    limit, total = run.settings.data.unreadable_limit, scored + len(unread)
    if not scored or len(unread) > limit * total:
        raise ImputerError(
            f"data.valid: {len(unread)} of {count(total, 'utterance')} cannot be used, more than "
            f"data.unreadable_limit = {limit:g} allows: {Tally().add(unread.values())}"
        )
    if unread.keys() - run.unread:
        print(f"validation: left out {Tally().add(unread.values())}", file=sys.stderr)
    run.unread |= unread.keys()


def validate_and_keep(run: Run) -> None:
    """Validate, log it, and with training.keep_best save the model if its loss is the least so far."""
    now = run.progress
    with averaged_weights(run.model, run.average):
        result = validate(run)
        run.log({"step": now.step, "valid": result})
        if not run.settings.training.keep_best:
            return
        if math.isfinite(result["loss"]) and not 0 <= now.best_loss <= result["loss"]:
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

    @property
    def mean(self) -> float:
        """Nats per token; infinite if nothing could be scored, or the network was not finite."""
        return self.total / self.tokens if self.tokens and not math.isnan(self.total) else math.inf

    def add(self, run: Run, acoustic: Tensor, frame_lengths: Tensor, batch: batching.Batch) -> None:
        topology = {"merge_repeats": run.model.merge_repeats}
        targets, target_lengths = batch.targets, batch.target_lengths
        with torch.no_grad():
            log_probs = run.model.impute(acoustic, frame_lengths, run.model.all_masked(acoustic))
            likelihood = objectives.ctc(log_probs, targets, frame_lengths, target_lengths, **topology)
        fits = likelihood != -math.inf  # texts longer than their frames; NaN stays
        self.total -= float(likelihood[fits].sum())
        self.tokens += int(target_lengths[fits].sum())


def encoded(
    run: Run, utterances: Sequence[Utterance], at_most: int, unread: dict[str, Dropped]
) -> Iterator[tuple[Tensor, Tensor, batching.Batch]]:
    """Acoustic frames of (at most so many) utterances, without augmentation or gradients; ``unread`` gets the rest."""
    every = -(-len(utterances) // at_most)  # spread over all speakers
    chosen = [utterances[i] for i in range(0, len(utterances), every)]
    extract = run.model.front_end.reader(run.settings.data, NO_AUGMENTATION, chosen)
    dataset = batching.SpeechDataset(chosen, run.vocabulary, extract)
    lengths = [run.model.front_end.feature_frames(utterance.duration) for utterance in chosen]
    plan = batching.plan_epoch(lengths, frame_budget=run.stream.frame_budget, seed=0, epoch=0)
    for batch in batching.batches(dataset, plan):
        unread |= batch.dropped
        if batch.ids:
            batch = run.ranks.moved(batch)
            with torch.no_grad():
                yield *run.model.encode(batch.features, batch.feature_lengths), batch
