"""How much a language model should count: the settings of a search with the fewest word errors on held-out speech."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from imputer import decoding
from imputer.configs import LanguageModel as Settings
from imputer.data.batching import read_utterance
from imputer.data.manifest import Utterance
from imputer.errors import ImputerError
from imputer.evaluation import scoring
from imputer.languagemodel import fusion
from imputer.languagemodel.ngrams import LanguageModel
from imputer.recognizer import Recognizer

# Tried one key after the other, around the best found so far, until a round changes nothing.
STEPS = {"lm_weight": (-0.2, -0.1, 0.1, 0.2), "token_bonus": (-1.0, -0.5, 0.5, 1.0)}
THRESHOLDS = (0.9, 0.95, 0.98, 0.99, 0.995, 0.999)
ROUNDS = 4
BATCH = 8  # utterances, sorted by length
OnTrial = Callable[[Settings, scoring.Errors], None]


def tune(
    recognizer: Recognizer, lm: LanguageModel, utterances: Sequence[Utterance], on_trial: OnTrial
) -> tuple[Settings, scoring.Errors]:
    """The best settings found and their word errors. Imputation runs once, the search once per trial."""
    imputed = list(imputations(recognizer, utterances))
    tried: dict[Settings, scoring.Errors] = {}

    def trial(settings: Settings) -> scoring.Errors:
        if settings not in tried:
            tried[settings] = errors(recognizer, lm, imputed, settings)
            on_trial(settings, tried[settings])
        return tried[settings]

    best = recognizer.language_model_settings
    trial(best)
    for _ in range(ROUNDS):
        before = best
        for threshold in THRESHOLDS:
            trial(replace(best, threshold=threshold))
        best = min(tried, key=lambda one: tried[one].total)
        for key, steps in STEPS.items():
            for step in steps:
                value = round(max(0.0, getattr(best, key) + step), 6)
                trial(replace(best, **{key: value}))
            best = min(tried, key=lambda one: tried[one].total)
        if best == before:
            break
    return best, tried[best]


Imputed = tuple[decoding.Step, decoding.Imputation, torch.Tensor, list[str]]


@torch.inference_mode()
def imputations(recognizer: Recognizer, utterances: Sequence[Utterance]) -> list[Imputed]:
    """What a search starts from, per batch: the network, the imputation, its lengths and the texts to be found."""
    network = recognizer.model
    found: list[Imputed] = []
    ordered = sorted(utterances, key=lambda one: one.duration)
    for first in range(0, len(ordered), BATCH):
        batch = ordered[first : first + BATCH]
        features = [
            network.front_end.extract(torch.from_numpy(read_utterance(one, recognizer.sample_rate)))
            for one in batch
        ]
        acoustic, lengths = recognizer.encode(features)

        def step(
            partial: torch.Tensor, acoustic: torch.Tensor = acoustic, lengths: torch.Tensor = lengths
        ) -> torch.Tensor:
            return network.impute(acoustic, lengths, partial)

        imputed = decoding.impute(
            step,
            lengths,
            block_size=network.settings.block_size,
            strategy="block",
            mask=network.mask,
            blank=network.blank,
        )
        found.append((step, imputed, lengths, [one.text for one in batch]))
    if not found:
        raise ImputerError("there are no utterances to tune on")
    return found


@torch.inference_mode()
def errors(
    recognizer: Recognizer, lm: LanguageModel, imputed: Sequence[Imputed], settings: Settings
) -> scoring.Errors:
    """Word errors of the search with these settings."""
    network, all_errors = recognizer.model, []
    for step, one, lengths, texts in imputed:
        searched = fusion.fuse(
            step,
            one,
            lengths,
            lm,
            settings=settings,
            mask=network.mask,
            blank=network.blank,
            merge_repeats=network.merge_repeats,
        )
        for text, hypotheses in zip(texts, searched.hypotheses, strict=True):
            all_errors.append(scoring.word_errors(text, recognizer.vocabulary.decode(hypotheses[0].tokens)))
    return scoring.total(all_errors)
