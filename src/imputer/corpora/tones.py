"""A made-up language of tones: what tests, benchmarks and quick runs train on where there is no speech.

Each of its letters is a chord of two tones with its own pitch and glide, said for about a tenth of a second.
Letters follow each other without a pause inside a word. It is learnt in a minute on one core, and is still a
real problem: lengths vary, letters repeat, speakers differ in pitch and tempo, and there is noise. Like a real one it
has words, so that what stands beside a letter tells something about it.
"""

import numpy as np

from imputer.data.manifest import Utterance, write

ALPHABET = "abcdefgh"
SAMPLE_RATE = 16_000
LEXICON = (
    "ab ace add age bad bead bee cab cage dab dad deaf dead ebb edge egg fab face fade fed feed gab gag had hag head "
    "heed hedge he be cede babe beef bag cafe decade facade"
)
WORDS = LEXICON.split()


def sentence(random: np.random.Generator, words: int) -> str:
    """Some words, as likely one as another."""
    return " ".join(random.choice(WORDS, words))


def say(text: str, random: np.random.Generator) -> np.ndarray:
    """The sound of a text: float32 samples at 16 kHz."""
    pitch, tempo = random.uniform(0.95, 1.05), random.uniform(0.85, 1.2)
    pieces = [_silence(random.uniform(0.05, 0.15))]
    for letter in text:
        pieces.append(_silence(random.uniform(0.08, 0.2)) if letter == " " else _letter(letter, pitch, tempo))
    pieces.append(_silence(random.uniform(0.05, 0.15)))
    sound = np.concatenate(pieces)
    return (sound + random.normal(0, 0.01, len(sound))).astype(np.float32)


def make(folder: str, utterances: int, *, seed: int = 0, words: tuple[int, int] = (1, 4)) -> str:
    """Write recordings and their manifest into ``folder``; returns the manifest's path."""
    from pathlib import Path

    import soundfile

    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    made = []
    for number in range(utterances):
        random = np.random.default_rng([seed, number])
        text = sentence(random, int(random.integers(words[0], words[1] + 1)))
        sound = say(text, random)
        name = f"tones-{seed}-{number:05d}"
        path = str(place / f"{name}.wav")
        soundfile.write(path, sound, SAMPLE_RATE)
        made.append(Utterance(name, path, len(sound) / SAMPLE_RATE, text, speaker=f"s{number % 7}"))
    write(place / "manifest.jsonl", made)
    return str(place / "manifest.jsonl")


def _letter(letter: str, pitch: float, tempo: float) -> np.ndarray:
    index = ALPHABET.index(letter)
    time = np.arange(int(0.11 * tempo * SAMPLE_RATE)) / SAMPLE_RATE
    low, high = pitch * 250 * 1.22**index, pitch * 1500 * 1.13 ** (ALPHABET[::-1].index(letter))
    glide = 1 + (0.6 if index % 2 else -0.6) * time
    envelope = np.hanning(len(time)) ** 0.5
    return 0.25 * envelope * (np.sin(2 * np.pi * low * glide * time) + 0.6 * np.sin(2 * np.pi * high * time))


def _silence(seconds: float) -> np.ndarray:
    return np.zeros(int(seconds * SAMPLE_RATE))
