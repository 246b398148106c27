"""Synthetic speech from a text file, one sentence a line, by whichever engines are installed.

Four engines (Debian packages flite, rhvoice-english, libttspico-utils and espeak-ng) lend nine voices and many
variants of a tenth. Every utterance is one to eight sentences in one voice with its own rate, pitch, warp of the
voice (by resampling), pauses, equalisation, reverberation, noise and level, all drawn from (seed, number of the
utterance): the same command makes the same speech, and one that was stopped goes on where it stopped. Text is
spelled out first, so that what is said and what is written agree; what cannot be is dropped and counted.
"""

import hashlib
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from pathlib import Path

import numpy as np

from imputer import audio
from imputer.audio.alteration import recorded, warped
from imputer.corpora.common import Dropped, Found, Options
from imputer.data.manifest import Utterance
from imputer.data.text import Unspeakable, read_lines, spell, transcript
from imputer.errors import ImputerError, UsageError
from imputer.support.atomic_files import replacing

SAMPLE_RATE = 16_000
RECIPE = 2  # goes up when the same seed would give other speech
# Lengths like those of read books: 2 to 28 s, half of them under 7, some beyond 20.
MOST_SECONDS = 28.0  # of one utterance, by estimate
MEAN_SECONDS, SHAPE = 6.0, 1.6  # of the gamma distribution aimed at; the last sentence goes beyond
MOST_SENTENCES = 8
CHARACTERS_A_SECOND = 15.0
FILES_A_FOLDER = 1000
MOST_FAILURES = 20  # before the first success


def pieces(spoken: str) -> list[str]:
    """A long sentence cut at its punctuation; shorter ones whole."""
    longest = int(MOST_SECONDS * CHARACTERS_A_SECOND)
    parts = [""]
    for clause in re.findall(r"[^,.?!;:]+[,.?!;:]*\s*", spoken):
        if len(clause) > longest:
            raise Unspeakable("too long without punctuation")
        if len(parts[-1]) + len(clause) > longest:
            parts.append("")
        parts[-1] += clause
    return [part.strip() for part in parts]


# Engines: from what is said to sound.


@dataclass(frozen=True)
class Voice:
    """One speaker of one engine; ``weight`` is how often it is chosen."""

    engine: str
    name: str
    weight: float


@dataclass(frozen=True)
class Manner:
    """How a voice speaks: 1 is its usual rate and pitch."""

    rate: float
    pitch: float


def _flite(spoken: str, voice: str, manner: Manner, path: Path) -> list[str]:
    usual = {"slt": 170, "rms": 100, "awb": 130, "kal16": 105}[voice]
    settings = {
        "duration_stretch": 1 / manner.rate,
        "int_f0_target_mean": usual * manner.pitch,
        "int_f0_target_stddev": 15 * manner.pitch,
    }
    options = [part for name, value in settings.items() for part in ("--setf", f"{name}={value:.3f}")]
    return ["flite", "-voice", voice, *options, "-t", spoken, "-o", str(path)]


def _pico(spoken: str, voice: str, manner: Manner, path: Path) -> list[str]:
    tags = f'<speed level="{100 * manner.rate:.0f}"><pitch level="{100 * manner.pitch:.0f}">'
    return ["pico2wave", "-l", voice, "-w", str(path), f"{tags}{spoken}</pitch></speed>"]


def _espeak(spoken: str, voice: str, manner: Manner, path: Path) -> list[str]:
    pitch = min(99, max(0, 50 + 120 * (manner.pitch - 1)))
    options = ["-s", f"{165 * manner.rate:.0f}", "-p", f"{pitch:.0f}", "-w", str(path)]
    return ["espeak-ng", "-v", voice, *options, "--", spoken]


def _rhvoice(spoken: str, voice: str, manner: Manner, path: Path) -> list[str]:
    options = ["-r", f"{100 * manner.rate:.0f}", "-t", f"{100 * manner.pitch:.0f}", "-o", str(path)]
    return ["RHVoice-test", "-p", voice, *options]  # it reads the text from its standard input


# What an engine is asked with, and the program and Debian package it needs.
ENGINES: dict[str, tuple[Callable[[str, str, Manner, Path], list[str]], str, str]] = {
    "flite": (_flite, "flite", "flite"),
    "rhvoice": (_rhvoice, "RHVoice-test", "rhvoice rhvoice-english"),
    "pico": (_pico, "pico2wave", "libttspico-utils"),
    "espeak": (_espeak, "espeak-ng", "espeak-ng"),
}
# Weights follow how well Moonshine's own decoder understands a voice: 12 to 14 % of the words wrong for flite's
# statistical voices, 22 to 31 % for pico and kal16, 18 to 30 % for the variants of espeak kept here, which share
# one voice that sounds least like a person. RHVoice's evgeniy-eng and lyubov are CC BY-NC-ND, so left out.
ESPEAK_ACCENTS = ("en-us", "en-gb", "en-gb-x-rp", "en-gb-scotland")
ESPEAK_VARIANTS = (
    "m1", "m2", "m3", "m4", "m5", "m6", "m7", "m8", "f1", "f2", "f5", "Denis", "Diogo", "Gene", "Henrique", "Hugo",
    "Mario", "Michael", "Mike", "iven4", "john", "max", "michel",
)  # fmt: skip
VOICES = (
    Voice("flite", "slt", 12),
    Voice("flite", "rms", 14),
    Voice("flite", "awb", 12),
    Voice("flite", "kal16", 4),
    Voice("rhvoice", "bdl", 12),
    Voice("rhvoice", "clb", 12),
    Voice("rhvoice", "slt", 5),
    Voice("pico", "en-US", 8),
    Voice("pico", "en-GB", 8),
    *(
        Voice("espeak", f"{accent}+{variant}", 13 / len(ESPEAK_ACCENTS) / len(ESPEAK_VARIANTS))
        for accent in ESPEAK_ACCENTS
        for variant in ESPEAK_VARIANTS
    ),
)


def installed_voices() -> list[Voice]:
    """The voices of the engines that are there."""
    there = {name for name, (_, program, _) in ENGINES.items() if shutil.which(program)}
    if not there:
        packages = " ".join(package for *_, package in ENGINES.values())
        raise UsageError(f"no speech engine is installed; on Debian: apt-get install {packages}")
    return [voice for voice in VOICES if voice.engine in there]


def say(spoken: str, voice: Voice, manner: Manner) -> np.ndarray:
    """(samples,) float32 at 16 kHz, the silence at both ends cut off."""
    import soundfile
    import soxr

    command = ENGINES[voice.engine][0]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "speech.wav"
        try:
            words = command(spoken, voice.name, manner, path)
            subprocess.run(words, input=f"{spoken}\n".encode(), check=True, capture_output=True, timeout=60)
            samples, rate = soundfile.read(path, dtype="float32")
        except (OSError, subprocess.SubprocessError, soundfile.SoundFileError) as error:
            raise Unspeakable(f"{voice.engine} failed") from error
    if rate != SAMPLE_RATE:
        samples = soxr.resample(samples, rate, SAMPLE_RATE)
    return _trimmed(samples)


def _trimmed(samples: np.ndarray) -> np.ndarray:
    """Without what is 40 dB below the loudest at either end, but for 20 ms."""
    block = SAMPLE_RATE // 100
    levels = np.abs(samples[: len(samples) // block * block]).reshape(-1, block).max(1, initial=0)
    loud = np.flatnonzero(levels > 0.01 * levels.max(initial=0))
    if not len(loud):
        raise Unspeakable("silence from the engine")
    return samples[max(0, loud[0] - 2) * block : (loud[-1] + 3) * block]


# Variety: from clean speech to something like a recording.


def choose(voices: list[Voice], generator: np.random.Generator) -> Voice:
    weights = np.array([voice.weight for voice in voices])
    return voices[generator.choice(len(voices), p=weights / weights.sum())]


def utter(spoken: list[str], voice: Voice, generator: np.random.Generator) -> np.ndarray:
    """(samples,) of the sentences in one voice, as if recorded somewhere."""
    warp = float(
        np.clip(np.exp(generator.normal(0, 0.08)), 0.82, 1.2)
    )  # raises pitch and formants, and speed
    speed = generator.uniform(0.85, 1.2)
    manner = Manner(rate=speed / warp, pitch=generator.uniform(0.9, 1.15))
    if generator.random() < 0.5:
        spoken = [" ".join(spoken)]  # the engine's own pauses between sentences
    joined = [_silence(generator, 0.05, 0.4)]
    for sentence in spoken:
        joined += [say(sentence, voice, manner), _silence(generator, 0.15, 0.6)]
    samples = warped(np.concatenate([*joined[:-1], _silence(generator, 0.05, 0.5)]), warp)
    return recorded(samples, generator)


def _silence(generator: np.random.Generator, low: float, high: float) -> np.ndarray:
    return np.zeros(round(generator.uniform(low, high) * SAMPLE_RATE), np.float32)


# The corpus.


def plan(sentences: list[str], seed: int) -> Iterator[list[int]]:
    """Utterances without end, each as indices of sentences; every sentence once a round, in a new order."""
    for turn in count():
        generator = np.random.default_rng([seed, turn])
        order = generator.permutation(len(sentences))
        at = 0
        while at < len(order):
            aim = min(MOST_SECONDS, generator.gamma(SHAPE, MEAN_SECONDS / SHAPE))
            taken = [int(order[at])]
            seconds = len(sentences[taken[0]]) / CHARACTERS_A_SECOND
            at += 1
            while at < len(order) and len(taken) < MOST_SENTENCES and seconds < aim:
                more = len(sentences[order[at]]) / CHARACTERS_A_SECOND
                if seconds + more > MOST_SECONDS:
                    break
                taken.append(int(order[at]))
                seconds += more
                at += 1
            yield taken


def synthetic(source: Path, options: Options) -> Iterator[Found | Dropped]:
    """``options.hours`` of speech from the text file ``source``, its audio in ``options.audio_folder``."""
    yield from speech(
        source,
        options.audio_folder,
        hours=options.hours,
        seed=options.seed,
        workers=options.workers,
    )


def speech(
    source: Path, audio_folder: Path, *, hours: float, seed: int = 0, workers: int = 1
) -> Iterator[Found | Dropped]:
    """Utterances of ``hours`` in all and what cannot be said; text that runs out is said again by other voices."""
    if not hours > 0:
        raise UsageError(f"hours must be more than 0, not {hours}")
    sentences, drops = read_sentences(source)
    voices = installed_voices()
    yield from drops
    if not sentences:
        raise ImputerError(f"{source}: no sentence in it can be said")
    _claim(audio_folder, sentences, seed, voices)
    make = partial(_make, folder=audio_folder, seed=seed, voices=voices)
    work = ((number, [sentences[i] for i in taken]) for number, taken in enumerate(plan(sentences, seed)))
    name = audio_folder.name.removesuffix("-audio")
    seconds, failed = 0.0, 0
    for number, spoken, made in _each(make, work, workers):
        if isinstance(made, str):
            yield Dropped(made, " ".join(spoken))
            failed += 1
            if failed >= MOST_FAILURES and not seconds:
                raise ImputerError(f"no speech engine works; lastly: {made}")
            continue
        path, duration, speaker = made
        text = " ".join(map(transcript, spoken))
        yield Found(Utterance(f"{name}-{number:06d}", str(path), duration, text, speaker))
        seconds += duration
        if seconds >= 3600 * hours:
            return


def read_sentences(source: Path) -> tuple[list[str], list[Dropped]]:
    """What can be said of a text file, one sentence a line, and the rest with reasons."""
    sentences: list[str] = []
    drops: list[Dropped] = []
    for number, line in read_lines(source):
        try:
            sentences += pieces(spell(line))
        except Unspeakable as reason:
            drops.append(Dropped(str(reason), f"line {number}: {line}"))
    return sentences, drops


def _claim(folder: Path, sentences: list[str], seed: int, voices: list[Voice]) -> None:
    """Note what the folder is made from, so that going on with something else is refused."""
    text = hashlib.sha256("\n".join(sentences).encode()).hexdigest()[:16]
    mine = {
        "recipe": RECIPE,
        "text": text,
        "seed": seed,
        "engines": sorted({voice.engine for voice in voices}),
    }
    path = folder / "made-from.json"
    if path.exists():
        there = json.loads(path.read_text())
        different = [name for name, value in mine.items() if there.get(name) != value]
        if different:
            raise UsageError(
                f"{folder} holds speech made with another {' and '.join(different)} "
                f"({there.get(different[0])}, now {mine[different[0]]}); remove it, or choose another --output"
            )
        return
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(mine) + "\n")


Made = tuple[Path, float, str] | str  # file, seconds and speaker, or why there is none


def _make(number: int, spoken: list[str], *, folder: Path, seed: int, voices: list[Voice]) -> Made:
    """Utterance ``number``: made, or found made already."""
    generator = np.random.default_rng([seed, number, 1])
    voice = choose(voices, generator)
    path = folder / f"{number // FILES_A_FOLDER:03d}" / f"{number:06d}.ogg"
    if not path.exists():
        try:
            samples = utter(spoken, voice, generator)
        except Unspeakable as reason:
            return str(reason)
        audio.write(path, samples, SAMPLE_RATE)
    return path, audio.info(path).seconds, f"{voice.engine}-{voice.name}"


def _each(
    make: Callable[[int, list[str]], Made], work: Iterable[tuple[int, list[str]]], workers: int
) -> Iterator[tuple[int, list[str], Made]]:
    """``make`` of everything, in order, a little ahead in worker processes."""
    if workers <= 1:
        for number, spoken in work:
            yield number, spoken, make(number, spoken)
        return
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    work = iter(work)
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        ahead = [(*item, pool.submit(make, *item)) for item in islice(work, 4 * workers)]
        try:
            while ahead:
                number, spoken, future = ahead.pop(0)
                yield number, spoken, future.result()
                ahead += [(*item, pool.submit(make, *item)) for item in islice(work, 1)]
        finally:
            pool.shutdown(cancel_futures=True)
