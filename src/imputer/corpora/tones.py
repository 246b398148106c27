"""An invented language of tones: what tests, the demo and quick runs train on where there is no speech.

Every letter is a chord of two tones with its own pitch and glide. Letters follow each other without a pause inside a
word. It is learnt in a minute on one core, and is still a real problem: lengths vary, speakers differ in pitch and
tempo, and there is noise. Like a real one it has words, so that the neighbours of a letter say something about it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from imputer import audio
from imputer.data.manifest import Utterance, write

ALPHABET = "abdgilmou"
SAMPLE_RATE = 16_000
WORDS = ("ba", "bada", "dago", "gobaba", "lu", "luda", "goluba", "mi", "midago", "bami")
STEP = 0.04  # seconds, the frame of a model; a letter takes two, a silence four to eight


@dataclass(frozen=True)
class Voice:
    """How a speaker sounds; at tempo 1 everything lasts a whole number of frames."""

    pitch: float = 1.0
    tempo: float = 1.0
    noise: float = 0.001


def sentence(random: np.random.Generator, words: int) -> str:
    """Some words, equally likely."""
    return " ".join(random.choice(WORDS, words))


def say(
    text: str, random: np.random.Generator, voice: Voice | None = None, *, pause: float = 0.0
) -> tuple[np.ndarray, list[float]]:
    """(samples,) at 16 kHz, and the second at which each letter starts; of a space, the end of its silence.

    Without a voice one is drawn. Words are ``pause`` seconds further apart.
    """
    if voice is None:
        voice = Voice(random.uniform(0.95, 1.05), random.uniform(1.1, 1.5), 0.01)
    step = round(STEP * voice.tempo * SAMPLE_RATE)

    def silence(more: float = 0.0) -> np.ndarray:
        return np.zeros((int(random.integers(4, 9)) + round(more / STEP)) * step)

    parts = [silence()]
    starts, length = [], len(parts[0])
    for letter in text:
        if letter == " ":
            parts.append(silence(pause))
            length += len(parts[-1])
        starts.append(length / SAMPLE_RATE)
        if letter != " ":
            parts.append(_chord(letter, voice.pitch, 2 * step))
            length += len(parts[-1])
    sound = np.concatenate([*parts, silence()])
    return (sound + random.normal(0, voice.noise, len(sound))).astype(np.float32), starts


def make(folder: Path | str, utterances: int, *, seed: int = 0, words: Sequence[int] = (1, 4)) -> str:
    """Write recordings of ``words`` (fewest, most) and their manifest into ``folder``; the manifest's path."""
    made = []
    for number in range(utterances):
        random = np.random.default_rng([seed, number])
        text = sentence(random, int(random.integers(words[0], words[1] + 1)))
        sound, _ = say(text, random)
        name = f"tones-{seed}-{number:05d}"
        path = Path(folder) / f"{name}.wav"
        audio.write(path, sound, SAMPLE_RATE)
        made.append(Utterance(name, str(path), len(sound) / SAMPLE_RATE, text, speaker=f"s{number % 7}"))
    write(Path(folder) / "manifest.jsonl", made)
    return str(Path(folder) / "manifest.jsonl")


def _chord(letter: str, pitch: float, samples: int) -> np.ndarray:
    index = ALPHABET.index(letter)
    time = np.arange(samples) / SAMPLE_RATE
    low, high = pitch * 250 * 1.12**index, pitch * 900 * 1.1 ** (len(ALPHABET) - index)
    glide = 1 + (0.6 if index % 2 else -0.6) * time
    tones = np.sin(2 * np.pi * low * glide * time) + 0.6 * np.sin(2 * np.pi * high * time)
    return 0.25 * np.hanning(samples) ** 0.5 * tones
