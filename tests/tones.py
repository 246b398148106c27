"""A language that can be learnt in seconds: every token sounds as a chord of its own.

Real audio, a real network and a real tokenizer, so that tests of the recogniser need no stand-in for any of them.
"""

import functools
from pathlib import Path

import numpy as np
import torch

from imputer import configs, model, models
from imputer.vocabulary import Vocabulary

RATE = 16_000
FRAME = 640  # samples
WORDS = ["ba", "bada", "dago", "gobaba", "lu", "luda", "goluba", "mi", "midago", "bami"]


@functools.cache
def vocabulary() -> Vocabulary:
    return Vocabulary.train([" ".join(WORDS)] * 20, size=18)


def sentence(random: np.random.Generator, words: int) -> str:
    return " ".join(random.choice(WORDS, words))


def speak(text: str, seed: int = 0, *, pause: float = 0.0) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """(samples,) at 16 kHz and the (frame, token) of every chord; words are ``pause`` seconds more apart.

    Everything lasts a whole number of frames of 40 ms, so that there is no doubt which frame a chord belongs to.
    """
    random = np.random.default_rng(seed)
    parts, events, frames = [np.zeros(0)], [], 0
    for place, word in enumerate(text.split()):
        silence = int(random.integers(3, 8)) + (round(pause / 0.04) if place else 0)
        parts.append(np.zeros(silence * FRAME))
        frames += silence
        for token in vocabulary().encode(word):
            at = np.arange(3 * FRAME) / RATE
            low, high = 250 * 1.12 ** (token % 6), 900 * 1.35 ** (token // 6)
            chord = 0.2 * np.sin(2 * np.pi * low * at) + 0.2 * np.sin(2 * np.pi * high * at)
            parts += [chord * np.hanning(len(at)) ** 0.3, np.zeros(FRAME)]
            events.append((frames + 1, token))
            frames += 4
    samples = np.concatenate([*parts, np.zeros(int(random.integers(3, 8)) * FRAME)])
    return (samples + 0.001 * random.standard_normal(len(samples))).astype(np.float32), events


def untrained(**settings) -> model.Imputer:
    torch.manual_seed(0)
    shape = {"width": 64, "layers": 2, "heads": 2, "filter_size": 128, "dropout": 0.0} | settings
    return model.Imputer(configs.Model(**shape), configs.FrontEnd(channels=4), vocabulary().size)


@functools.cache
def trained() -> model.Imputer:
    """Trained to complete the alignments that ``speak`` knows, from random masks, all-mask included."""
    network = untrained()
    random = np.random.default_rng(0)
    examples = [speak(sentence(random, int(n)), seed) for seed, n in enumerate(random.integers(1, 6, 64))]
    features = [network.front_end.extract(torch.from_numpy(samples)) for samples, _ in examples]
    every = torch.cat(features)
    network.front_end.normalisation.fit(every.mean(0), every.std(0))
    optimiser = torch.optim.AdamW(network.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    steps = 100
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 3e-3, steps)
    for _ in range(steps):
        chosen = torch.randint(len(examples), (8,), generator=generator).tolist()
        batch = torch.nn.utils.rnn.pad_sequence([features[i] for i in chosen], batch_first=True)
        lengths = torch.tensor([len(features[i]) for i in chosen])
        acoustic, frame_lengths = network.encode(batch, lengths)
        target = torch.zeros(acoustic.shape[:2], dtype=torch.long)
        for row, i in enumerate(chosen):
            for frame, token in examples[i][1]:
                target[row, frame] = token
        rate = torch.rand(len(chosen), 1, generator=generator) * 1.4
        hidden = torch.rand(target.shape, generator=generator) < rate
        log_probs = network.impute(acoustic, frame_lengths, target.masked_fill(hidden, network.mask))
        inside = torch.arange(target.shape[1]) < frame_lengths[:, None]
        loss = -log_probs.gather(2, target[..., None])[..., 0][inside].mean()
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimiser.step()
        schedule.step()
    return network.eval()


def save(folder: Path) -> Path:
    models.save(folder, trained(), vocabulary())
    return folder
