"""How much a language model should count: the settings of a search with the fewest word errors on held-out speech."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

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
    imputed = imputations(recognizer, utterances)
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


# A search that lacks only the language model and its settings, and the texts to be found.
Imputed = tuple[Callable[..., decoding.Searched], list[str]]


def imputations(recognizer: Recognizer, utterances: Sequence[Utterance]) -> list[Imputed]:
    """Everything up to the search, in batches of similar length."""
    ordered = sorted(utterances, key=lambda one: one.duration)
    if not ordered:
        raise ImputerError("there are no utterances to tune on")
    return [_imputed(recognizer, ordered[first : first + BATCH]) for first in range(0, len(ordered), BATCH)]


@torch.inference_mode()
def _imputed(recognizer: Recognizer, batch: Sequence[Utterance]) -> Imputed:
    network, search = recognizer.model, None

    def remember(
        step: decoding.Step, imputed: decoding.Imputation, frame_lengths: Tensor, **topology: Any
    ) -> decoding.Searched:
        nonlocal search
        search = partial(fusion.fuse, step, imputed, frame_lengths, **topology)
        return decoding.Searched(imputed, imputed.alignment, [[] for _ in batch])

    waveforms = (torch.from_numpy(read_utterance(one, recognizer.sample_rate)) for one in batch)
    acoustic, frame_lengths = recognizer.encode([network.front_end.extract(wave) for wave in waveforms])
    results = decoding.decode(network, acoustic, frame_lengths, search=remember)
    for utterance, result in zip(batch, results, strict=True):
        if isinstance(result, ImputerError):
            raise ImputerError(f"{utterance.id}: {result}")
    assert search is not None
    return search, [one.text for one in batch]


@torch.inference_mode()
def errors(
    recognizer: Recognizer, lm: LanguageModel, imputed: Sequence[Imputed], settings: Settings
) -> scoring.Errors:
    """Word errors of the search with these settings."""
    all_errors = []
    for search, texts in imputed:
        for text, hypotheses in zip(texts, search(lm=lm, settings=settings).hypotheses, strict=True):
            all_errors.append(scoring.word_errors(text, recognizer.vocabulary.decode(hypotheses[0].tokens)))
    return scoring.total(all_errors)
