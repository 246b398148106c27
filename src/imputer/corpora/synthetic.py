"""Synthetic speech from a text file, one sentence per line, by whichever engines are installed (``engines``).

Every utterance is one to eight sentences in one voice with its own rate, pitch, warp of the voice (by resampling),
pauses, equalisation, reverberation, noise and level, all drawn from (seed, number of the utterance): the same command
makes the same speech, and an interrupted one resumes. Text is spelled out first, so that what is said and what is
written agree; what cannot be spelled out is dropped and counted.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np

from imputer import audio
from imputer.audio.alteration import recorded, warped
from imputer.corpora.common import Dropped, Found, Options
from imputer.corpora.engines import SAMPLE_RATE, Delivery, Voice, installed_voices, say
from imputer.data.frames_cache import Encoder, FramesCache, packed_frames
from imputer.data.manifest import Utterance
from imputer.data.text import Unspeakable, read_lines, spell, transcript
from imputer.errors import ImputerError, UsageError
from imputer.support.atomic_files import write_text
from imputer.support.processes import in_order

RECIPE = 4  # goes up when the same seed would give other speech
# Lengths like those of read books: 2 to 28 s, half of them under 7, some beyond 20.
MOST_SECONDS = 28.0  # of one utterance, by estimate
MEAN_SECONDS, SHAPE = 6.0, 1.6  # of the gamma distribution aimed at; the last sentence goes beyond
MOST_SENTENCES = 8
CHARACTERS_A_SECOND = 15.0
FILES_A_FOLDER = 1000
MOST_FAILURES = 20  # before the first success


def split_sentence(spoken: str) -> list[str]:
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


# Variety: from clean speech to something like a recording.


def choose(voices: list[Voice], generator: np.random.Generator) -> Voice:
    weights = np.array([voice.weight for voice in voices])
    return voices[generator.choice(len(voices), p=weights / weights.sum())]


def utter(spoken: list[str], voice: Voice, generator: np.random.Generator) -> np.ndarray:
    """(samples,) of the sentences in one voice, as if recorded somewhere."""
    # Raises pitch and formants, and speed.
    warp = float(np.clip(np.exp(generator.normal(0, 0.08)), 0.82, 1.2))
    speed = generator.uniform(0.85, 1.2)
    delivery = Delivery(rate=speed / warp, pitch=generator.uniform(0.9, 1.15))
    if generator.random() < 0.5:
        spoken = [" ".join(spoken)]  # the engine's own pauses between sentences
    joined = [_silence(generator, 0.05, 0.4)]
    for sentence in spoken:
        joined += [say(sentence, voice, delivery), _silence(generator, 0.15, 0.6)]
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
    """``options.hours`` of speech from the text file ``source``, and the lines that cannot be spelled out.

    When the text runs out, it is read again by other voices. With ``options.frames_cache`` the worker that makes an
    utterance also encodes it.
    """
    if not options.hours > 0:
        raise UsageError(f"hours must be more than 0, not {options.hours}")
    sentences, drops = read_sentences(source)
    voices = installed_voices()
    yield from drops
    if not sentences:
        raise ImputerError(f"{source}: no sentence can be synthesised")
    _claim(options.audio_folder, sentences, options.seed, voices)
    with _encoding(options.frames_cache) as (encoder, store_frames):
        make = partial(_make, folder=options.audio_folder, seed=options.seed, voices=voices, encoder=encoder)
        yield from _speech(make, store_frames, sentences, options)


def _speech(
    make: Callable[[tuple[int, list[str]]], "Made"],
    store_frames: Callable[[Utterance, np.ndarray | None], None],
    sentences: list[str],
    options: Options,
) -> Iterator[Found | Dropped]:
    plans = enumerate(plan(sentences, options.seed))
    work = ((number, [sentences[i] for i in taken]) for number, taken in plans)
    name = options.audio_folder.name.removesuffix("-audio")
    seconds, failed = 0.0, 0
    for (number, spoken), made in in_order(make, work, options.workers):
        if isinstance(made, str):
            yield Dropped(made, " ".join(spoken))
            failed += 1
            if failed >= MOST_FAILURES and not seconds:
                raise ImputerError(f"no speech engine works; lastly: {made}")
            continue
        path, duration, speaker, rows = made
        text = " ".join(map(transcript, spoken))
        utterance = Utterance(f"{name}-{number:06d}", str(path), duration, text, speaker)
        store_frames(utterance, rows)
        yield Found(utterance)
        seconds += duration
        if seconds >= 3600 * options.hours:
            return


def read_sentences(source: Path) -> tuple[list[str], list[Dropped]]:
    """The sentences of a text file that can be spelled out, and the other lines with reasons."""
    sentences: list[str] = []
    drops: list[Dropped] = []
    for number, line in read_lines(source):
        try:
            sentences += split_sentence(spell(line))
        except Unspeakable as reason:
            drops.append(Dropped(str(reason), f"line {number}: {line}"))
    return sentences, drops


def _claim(folder: Path, sentences: list[str], seed: int, voices: list[Voice]) -> None:
    """Record what the folder is made from; resuming with other inputs is refused."""
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
    write_text(path, json.dumps(mine) + "\n")


# File, seconds, speaker and packed frames (None without an encoder or if the file was there), or why there is none.
Made = tuple[Path, float, str, np.ndarray | None] | str


@contextmanager
def _encoding(folder: str) -> Iterator[tuple[Encoder | None, Callable[[Utterance, np.ndarray | None], None]]]:
    """The encoder whose frames ``folder`` caches, and a function that stores those of an utterance; or nothing."""
    if not folder:
        yield None, lambda utterance, rows: None
        return
    from imputer.frontends.moonshine import MoonshineEncoder

    cache = FramesCache(folder, encoder := MoonshineEncoder())
    with cache.adding() as add:

        def store_frames(utterance: Utterance, rows: np.ndarray | str | None) -> None:
            # An interrupted run may leave audio without its frames.
            if rows is None and utterance not in cache:
                rows = packed_frames(utterance, encoder)
            if isinstance(rows, str):
                raise ImputerError(f"{utterance.id}: {rows}")
            if rows is not None:
                add(utterance, rows)

        yield encoder, store_frames


def _make(
    planned: tuple[int, list[str]],
    *,
    folder: Path,
    seed: int,
    voices: list[Voice],
    encoder: Encoder | None = None,
) -> Made:
    """Utterance ``number`` of the plan; an existing file is not made again."""
    number, spoken = planned
    generator = np.random.default_rng([seed, number, 1])
    voice = choose(voices, generator)
    path = folder / f"{number // FILES_A_FOLDER:03d}" / f"{number:06d}.ogg"
    rows: np.ndarray | None = None
    if not path.exists():
        try:
            samples = utter(spoken, voice, generator)
        except Unspeakable as reason:
            return str(reason)
        audio.write(path, samples, SAMPLE_RATE)
        if encoder is not None:
            made = Utterance(str(number), str(path), audio.info(path).seconds, "")
            encoded = packed_frames(made, encoder)
            if isinstance(encoded, str):
                return encoded
            rows = encoded
    return path, audio.info(path).seconds, f"{voice.engine}-{voice.name}", rows
