"""A recogniser of the language of tones (``imputer.corpora.tones``) that is trained in seconds.

Real audio, a real network and a real tokenizer, so that tests of the recogniser need no stand-in for any of them.
"""

import functools
import io
from pathlib import Path

import numpy as np
import soundfile
import torch

from imputer import configs, model, models
from imputer.corpora.tones import SAMPLE_RATE as RATE
from imputer.corpora.tones import STEP, WORDS, Voice, say, sentence
from imputer.vocabulary import Vocabulary

__all__ = ["RATE", "WORDS", "save", "sentence", "speak", "trained", "untrained", "vocabulary"]


@functools.cache
def vocabulary() -> Vocabulary:
    return Vocabulary.train([" ".join(WORDS)] * 20, size=18)


def speak(text: str, seed: int = 0, *, pause: float = 0.0) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """(samples,) at 16 kHz and the (frame, token) of every token: the frame where its first letter starts.

    The voice has tempo 1, so that there is no doubt which frame a letter belongs to.
    """
    samples, starts = say(text, np.random.default_rng(seed), Voice(), pause=pause)
    events, place = [], 0  # of a piece in the text with a space in front
    for token in vocabulary().encode(text):
        piece = vocabulary().pieces([token])[0]
        letter = place + piece.startswith("▁") - 1
        frame = round(starts[letter] / STEP)
        taken = bool(events) and events[-1][0] == frame  # by a word mark of its own
        events.append((frame + taken, token))
        place += len(piece)
    return samples, events


def untrained(**settings) -> model.Imputer:
    torch.manual_seed(0)
    shape = {"width": 64, "layers": 2, "heads": 2, "filter_size": 128, "dropout": 0.0} | settings
    return model.Imputer(configs.Model(**shape), configs.FrontEnd(channels=4), vocabulary().size)


def _recorded(samples: np.ndarray, kind: int) -> np.ndarray:
    """As it is, before digital silence, after Ogg Vorbis, or both: a network that has not seen them errs there."""
    if kind % 2:
        samples = np.concatenate([samples, np.zeros(RATE // 2, np.float32)])
    if kind < 2:
        return samples
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, RATE, format="OGG")
    buffer.seek(0)
    return soundfile.read(buffer, dtype="float32")[0]


@functools.cache
def trained() -> model.Imputer:
    """Trained to complete the alignments that ``speak`` knows, from random masks, all-mask included."""
    network = untrained()
    random = np.random.default_rng(0)
    counts = enumerate(random.integers(1, 6, 64))
    examples = [speak(sentence(random, int(n)), seed, pause=0.5 * (seed % 2)) for seed, n in counts]
    recorded = [_recorded(samples, number // 2 % 4) for number, (samples, _) in enumerate(examples)]
    features = [network.front_end.extract(torch.from_numpy(samples)) for samples in recorded]
    every = torch.cat(features)
    network.front_end.normalisation.fit(every.mean(0), every.std(0))
    optimiser = torch.optim.AdamW(network.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    steps = 160
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
