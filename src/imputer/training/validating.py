"""Error rates on the validation set during a training."""

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from imputer import decoding
from imputer.configs import NO_AUGMENTATION
from imputer.data import batching
from imputer.data.manifest import Utterance
from imputer.errors import ImputerError
from imputer.evaluation import scoring
from imputer.training.run import Run


def validate(run: Run) -> dict[str, Any]:
    """Error rates on the validation set, greedy and (for an Imputer) in as many passes as the block size."""
    assert run.valid is not None
    settings, model = run.settings, run.model
    result: dict[str, float] = {}
    if run.ranks.first:
        model.eval()
        passes = [1] if settings.training.objective == "ctc" else [1, settings.rollin.block_size]
        texts: dict[int, list[tuple[str, str]]] = {b: [] for b in passes}
        for acoustic, frame_lengths, batch in encoded(run, run.valid, settings.data.valid_utterances):
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
        shown = ", ".join(f"{name} {100 * value:.1f} %" for name, value in result.items())
        print(f"step {run.progress.step}: {shown}", file=sys.stderr, flush=True)
    run.ranks.wait()
    return result


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
