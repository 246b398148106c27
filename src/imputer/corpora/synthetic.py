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
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from pathlib import Path

import numpy as np

from imputer import audio
from imputer.corpora.common import Dropped, Found, Options, read_lines
from imputer.errors import ImputerError, UsageError
from imputer.files import replacing
from imputer.manifest import Utterance

SAMPLE_RATE = 16_000
RECIPE = 2  # goes up when the same seed would give other speech
# Lengths like those of read books: 2 to 28 s, half of them under 7, some beyond 20.
MOST_SECONDS = 28.0  # of one utterance, by estimate
MEAN_SECONDS, SHAPE = 6.0, 1.6  # of the gamma distribution aimed at; the last sentence goes beyond
MOST_SENTENCES = 8
CHARACTERS_A_SECOND = 15.0
FILES_A_FOLDER = 1000
MOST_FAILURES = 20  # before the first success


# Text: from what is written to what is said.

TITLES = {
    "mr": "mister", "mrs": "missus", "ms": "miss", "dr": "doctor", "st": "saint", "messrs": "messieurs",
    "prof": "professor", "capt": "captain", "col": "colonel", "gen": "general", "lt": "lieutenant",
    "sgt": "sergeant", "rev": "reverend", "jr": "junior", "sr": "senior", "vs": "versus", "etc": "et cetera",
}  # fmt: skip
UNITS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
SCALES = ((10**9, "billion"), (10**6, "million"), (10**3, "thousand"), (100, "hundred"))
ORDINALS = {
    "one": "first", "two": "second", "three": "third", "five": "fifth", "eight": "eighth", "nine": "ninth",
    "twelve": "twelfth",
}  # fmt: skip
# Words that begin or end with an apostrophe of their own; all others lose it as a quotation mark.
ELIDED_STARTS = {"tis", "twas", "twere", "twill", "twould", "em", "ere", "til", "cause", "bout"}
ELIDED_ENDS = {"o", "th", "an", "wi", "ol", "t"}


class Unspeakable(ValueError):
    """A sentence that cannot be spelled out; says why."""


def spell(line: str) -> str:
    """The line as it will be said: letters, apostrophes and the punctuation that guides an engine's voice."""
    text = unicodedata.normalize("NFKC", line)
    text = re.sub("[‘’ʼ`´]", "'", text)
    text = re.sub(r"\s*(—|–|--+|…|\.\.+)\s*", ", ", text)
    text = "".join(
        c for c in unicodedata.normalize("NFKD", text) if unicodedata.category(c) not in ("Mn", "Cf")
    )
    text = re.sub(r"\b([A-Za-z]+)\.|\b(Mrs?|Dr)\b", _title, text).replace("&", " and ")
    text = re.sub(r"([$£€]?)(\d{1,3}(?:,\d{3})+|\d+)(\.\d+)?(st|nd|rd|th|%)?(?!\w)", _number, text)
    text = re.sub(r"[\"“”„«»()\[\]*_]", " ", text)
    text = re.sub(r"[-‑/]", " ", text)
    odd = re.search(r"[^A-Za-z' ,.?!;:]", text)
    if odd:
        raise Unspeakable("a character that cannot be said" if not odd[0].isdigit() else "a number")
    if text.upper() == text:
        text = text.lower()
    if re.search(r"\b[A-Z]{2,}\b", text):
        raise Unspeakable("an abbreviation in capitals")
    text = " ".join(_without_quotation(word) for word in text.split())
    text = re.sub(r"\s+([,.?!;:])", r"\1", re.sub(r"([,.?!;:])[ ,.?!;:]*(?=[,.?!;:])", "", text))
    text = re.sub(r"^[ ,.?!;:]+", "", text)
    if not re.search("[A-Za-z]", text):
        raise Unspeakable("no words")
    return text


def transcript(spoken: str) -> str:
    """The house form of what is said: lower-case letters, apostrophes and single spaces."""
    return " ".join(re.sub("[^a-z' ]", " ", spoken.lower()).split())


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


def _title(match: re.Match) -> str:
    short = match[1] or match[2]
    word = TITLES.get(short.lower())
    if word is None or short in ("gen", "col", "st", "sr"):
        return match[0]
    return word.capitalize() if short[0].isupper() else word


def _number(match: re.Match) -> str:
    currency, digits, fraction, suffix = match[1], match[2].replace(",", ""), match[3] or "", match[4] or ""
    number = int(digits)
    if number >= 10**12 or (currency and fraction) or (fraction and suffix not in ("", "%")):
        raise Unspeakable("a number")
    is_year = 1100 <= number <= 1999 and not (currency or fraction or suffix) and "," not in match[2]
    said = _year(number) if is_year else _cardinal(number)
    if fraction:
        said += " point " + " ".join(UNITS[int(digit)] for digit in fraction[1:])
    if suffix == "%":
        said += " percent"
    elif suffix:
        said = _ordinal(said)
    if currency:
        name = {"$": "dollar", "£": "pound", "€": "euro"}[currency]
        said += f" {name}" if number == 1 else f" {name}s"
    return said


def _cardinal(number: int) -> str:
    if number < 20:
        return UNITS[number]
    if number < 100:
        rest = number % 10
        return TENS[number // 10] + (f" {UNITS[rest]}" if rest else "")
    scale, name = next((scale, name) for scale, name in SCALES if number >= scale)
    rest = number % scale
    joint = " and " if scale == 100 else " "
    return f"{_cardinal(number // scale)} {name}" + (joint + _cardinal(rest) if rest else "")


def _year(number: int) -> str:
    century, rest = divmod(number, 100)
    if rest == 0:
        return f"{_cardinal(century)} hundred"
    return f"{_cardinal(century)} {'oh ' if rest < 10 else ''}{_cardinal(rest)}"


def _ordinal(cardinal: str) -> str:
    head, _, last = cardinal.rpartition(" ")
    last = ORDINALS.get(last) or (last[:-1] + "ieth" if last.endswith("y") else last + "th")
    return f"{head} {last}".strip()


def _without_quotation(word: str) -> str:
    """Drop apostrophes that stand for quotation marks: 'Yes, -> Yes, but 'tis and o' stay."""
    start, core, end = re.fullmatch(r"('*)([^']*(?:'[^' ,.?!;:]+)*)(.*)", word).groups()  # type: ignore[union-attr]
    bare = core.lower()
    if start and bare in ELIDED_STARTS:
        core = "'" + core
    if end.startswith("'") and (bare in ELIDED_ENDS or re.fullmatch("[a-z]{2,}in", bare)):
        core += "'"
    return core + end.replace("'", "")


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


def warped(samples: np.ndarray, factor: float) -> np.ndarray:
    """Played ``factor`` times as fast."""
    import soxr

    return soxr.resample(samples, SAMPLE_RATE * factor, SAMPLE_RATE)


def recorded(samples: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """As a microphone in a room takes it: equalised, often reverberant, mostly a little noisy, at some level."""
    length = len(samples)
    points = 1 << (length + SAMPLE_RATE // 2 - 1).bit_length()
    spectrum = np.fft.rfft(samples, points) * _equaliser(points, generator)
    if generator.random() < 0.45:
        spectrum *= np.fft.rfft(_room(generator), points)
    samples = np.fft.irfft(spectrum, points)[:length]
    samples /= np.sqrt(np.mean(samples**2)) + 1e-9
    if generator.random() < 0.7:
        noise = _noise(length, generator)
        samples += noise * 10 ** (-generator.uniform(15, 50) / 20)
    samples *= 10 ** (generator.uniform(-38, -16) / 20)  # root mean square over full scale
    peak = np.abs(samples).max()
    return (samples * min(1.0, 0.98 / peak)).astype(np.float32)


def _equaliser(points: int, generator: np.random.Generator) -> np.ndarray:
    """A smooth curve of about 4 dB either way, in half of the cases with a tilt, over the bins of a spectrum."""
    knots = np.array([0, 100, 300, 800, 2000, 4000, 6000, 8000])
    decibels = generator.normal(0, 3, len(knots)) + generator.uniform(-1, 1) * np.linspace(-4, 4, len(knots))
    curve = np.interp(np.linspace(0, SAMPLE_RATE / 2, points // 2 + 1), knots, decibels)
    return 10 ** (curve / 20)


def _room(generator: np.random.Generator) -> np.ndarray:
    """An impulse response: the direct sound, then noise that decays by 60 dB in 0.1 to 0.45 s."""
    decay = generator.uniform(0.1, 0.45)
    time = np.arange(round(decay * SAMPLE_RATE)) / SAMPLE_RATE
    tail = generator.standard_normal(len(time)) * 10 ** (-3 * time / decay)
    tail[: round(generator.uniform(0.002, 0.02) * SAMPLE_RATE)] = 0
    response = tail * 10 ** (-generator.uniform(5, 22) / 20) / (np.sqrt(np.sum(tail**2)) + 1e-9)
    response[0] = 1
    return response


def _noise(length: int, generator: np.random.Generator) -> np.ndarray:
    """Unit noise between white and brown, its level wandering slowly."""
    points = 1 << (length - 1).bit_length()
    slope = generator.uniform(0, 1)
    spectrum = np.fft.rfft(generator.standard_normal(points, np.float32))
    spectrum /= np.maximum(np.arange(len(spectrum)), points * 50 // SAMPLE_RATE + 1) ** slope
    noise = np.fft.irfft(spectrum, points)[:length]
    wander = np.interp(np.arange(length), np.linspace(0, length, 8), 10 ** (generator.normal(0, 2, 8) / 20))
    noise *= wander
    return noise / (np.sqrt(np.mean(noise**2)) + 1e-9)


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
