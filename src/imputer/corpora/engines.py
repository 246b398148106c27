"""Speech engines: from a spelled-out sentence to sound.

An engine is a function (sentence, voice, delivery) -> samples and their rate, and one line in ENGINES. Whatever is
installed is used; every engine runs in the calling process or as a program, on one core.
"""

import importlib.util
import shutil
import subprocess
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from imputer.data.text import Unspeakable
from imputer.errors import UsageError

SAMPLE_RATE = 16_000


@dataclass(frozen=True)
class Voice:
    """One speaker of one engine; ``weight`` is how often it is chosen."""

    engine: str
    name: str
    weight: float


@dataclass(frozen=True)
class Delivery:
    """How a voice speaks: 1 is its usual rate and pitch."""

    rate: float
    pitch: float


Speak = Callable[[str, str, Delivery], tuple[np.ndarray, int]]


@dataclass(frozen=True)
class Engine:
    """How to speak with it, the program or Python package it needs, and what installs that."""

    speak: Speak
    needs: str
    install: str

    @property
    def installed(self) -> bool:
        return bool(shutil.which(self.needs) or importlib.util.find_spec(self.needs))


def _program(words: Callable[[str, str, Delivery, Path], list[str]]) -> Speak:
    """An engine that is a program: it writes a WAV file, and reads its text as an argument or from standard input."""

    def speak(sentence: str, voice: str, delivery: Delivery) -> tuple[np.ndarray, int]:
        import soundfile

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "speech.wav"
            command = words(sentence, voice, delivery, path)
            try:
                subprocess.run(
                    command, input=f"{sentence}\n".encode(), check=True, capture_output=True, timeout=60
                )
                return soundfile.read(path, dtype="float32")
            except (OSError, subprocess.SubprocessError, soundfile.SoundFileError) as error:
                raise Unspeakable(f"{command[0]} failed") from error

    return speak


def _flite(sentence: str, voice: str, delivery: Delivery, path: Path) -> list[str]:
    usual = {"slt": 170, "rms": 100, "awb": 130, "kal16": 105}[voice]
    settings = {
        "duration_stretch": 1 / delivery.rate,
        "int_f0_target_mean": usual * delivery.pitch,
        "int_f0_target_stddev": 15 * delivery.pitch,
    }
    options = [part for name, value in settings.items() for part in ("--setf", f"{name}={value:.3f}")]
    return ["flite", "-voice", voice, *options, "-t", sentence, "-o", str(path)]


def _pico(sentence: str, voice: str, delivery: Delivery, path: Path) -> list[str]:
    tags = f'<speed level="{100 * delivery.rate:.0f}"><pitch level="{100 * delivery.pitch:.0f}">'
    return ["pico2wave", "-l", voice, "-w", str(path), f"{tags}{sentence}</pitch></speed>"]


def _espeak(sentence: str, voice: str, delivery: Delivery, path: Path) -> list[str]:
    pitch = min(99, max(0, 50 + 120 * (delivery.pitch - 1)))
    options = ["-s", f"{165 * delivery.rate:.0f}", "-p", f"{pitch:.0f}", "-w", str(path)]
    return ["espeak-ng", "-v", voice, *options, "--", sentence]


def _rhvoice(sentence: str, voice: str, delivery: Delivery, path: Path) -> list[str]:
    options = ["-r", f"{100 * delivery.rate:.0f}", "-t", f"{100 * delivery.pitch:.0f}", "-o", str(path)]
    return ["RHVoice-test", "-p", voice, *options]


def _festival(sentence: str, voice: str, delivery: Delivery, path: Path) -> list[str]:
    usual = {"kal_diphone": 105, "ked_diphone": 105}.get(voice, 170)
    # The statistical voice ignores the intonation parameters; resampling still varies its pitch.
    intonation = f"((target_f0_mean {usual * delivery.pitch:.1f}) (target_f0_std {14 * delivery.pitch:.1f})"
    commands = [
        f"(voice_{voice})",
        f"(Parameter.set 'Duration_Stretch {1 / delivery.rate:.3f})",
        f"(set! int_lr_params '{intonation} (model_f0_mean 170) (model_f0_std 34)))",
    ]
    options = [part for command in commands for part in ("-eval", command)]
    return ["text2wave", *options, "-o", str(path)]


@cache
def _hibari_model() -> Any:
    from hibari import Hibari

    return Hibari(threads=1)


def _hibari(sentence: str, voice: str, delivery: Delivery) -> tuple[np.ndarray, int]:
    """A neural voice that predicts its pitch apart from its spectrum: "heart@0.75" speaks at 0.75 of its pitch."""
    from hibari import dsp

    model = _hibari_model()
    pitch = float(voice.partition("@")[2]) * delivery.pitch
    generator = np.random.default_rng(zlib.crc32(sentence.encode()))
    speed = np.asarray([delivery.rate], np.float32)
    parts = [np.zeros(0, np.float32)]
    for phonemes in model.phonemize(sentence):
        ids = np.asarray([model.ids(phonemes)], np.int64)
        *spectra, f0 = (output[0] for output in model.sess.run(None, {"ids": ids, "speed": speed}))
        parts.append(dsp.synth(*spectra, f0 * np.float32(pitch), generator))
    return np.concatenate(parts), model.sample_rate


ENGINES: dict[str, Engine] = {
    "hibari": Engine(_hibari, "hibari", "pip install hibari-tts"),
    "flite": Engine(_program(_flite), "flite", "apt-get install flite"),
    "espeak": Engine(_program(_espeak), "espeak-ng", "apt-get install espeak-ng"),
    "festival": Engine(
        _program(_festival),
        "text2wave",
        "apt-get install festival festvox-kallpc16k festvox-kdlpc16k festvox-us-slt-hts",
    ),
    "rhvoice": Engine(_program(_rhvoice), "RHVoice-test", "apt-get install rhvoice rhvoice-english"),
    "pico": Engine(_program(_pico), "pico2wave", "apt-get install libttspico-utils"),
}
# Weights follow how well Moonshine's own decoder understands a voice: 4 to 5 % of the words wrong for hibari at any of
# these pitches, 12 to 14 % for flite's statistical voices, 22 to 31 % for pico and kal16, 18 to 30 % for the variants
# of espeak kept here, which share one voice that sounds least like a person. RHVoice's evgeniy-eng and lyubov are
# CC BY-NC-ND, so left out.
HIBARI_PITCHES = (0.55, 0.62, 0.7, 0.78, 0.88, 1.0, 1.12)
ESPEAK_ACCENTS = ("en-us", "en-gb", "en-gb-x-rp", "en-gb-scotland")
ESPEAK_VARIANTS = (
    "m1", "m2", "m3", "m4", "m5", "m6", "m7", "m8", "f1", "f2", "f5", "Denis", "Diogo", "Gene", "Henrique", "Hugo",
    "Mario", "Michael", "Mike", "iven4", "john", "max", "michel",
)  # fmt: skip
VOICES = (
    *(Voice("hibari", f"heart@{pitch}", 54 / len(HIBARI_PITCHES)) for pitch in HIBARI_PITCHES),
    Voice("flite", "slt", 9),
    Voice("flite", "rms", 10),
    Voice("flite", "awb", 10),
    Voice("flite", "kal16", 2),
    Voice("rhvoice", "bdl", 9),
    Voice("rhvoice", "clb", 9),
    Voice("rhvoice", "slt", 4),
    Voice("pico", "en-US", 5),
    Voice("pico", "en-GB", 5),
    Voice("festival", "ked_diphone", 2),
    Voice("festival", "kal_diphone", 1),
    Voice("festival", "cmu_us_slt_arctic_hts", 3),
    *(
        Voice("espeak", f"{accent}+{variant}", 9 / len(ESPEAK_ACCENTS) / len(ESPEAK_VARIANTS))
        for accent in ESPEAK_ACCENTS
        for variant in ESPEAK_VARIANTS
    ),
)


def installed_voices() -> list[Voice]:
    """The voices of the engines that are installed."""
    found = {name for name, engine in ENGINES.items() if engine.installed}
    if not found:
        ways = "; ".join(engine.install for engine in ENGINES.values())
        raise UsageError(f"no speech engine is installed; one or more of: {ways}")
    return [voice for voice in VOICES if voice.engine in found]


def say(sentence: str, voice: Voice, delivery: Delivery) -> np.ndarray:
    """(samples,) float32 at 16 kHz, the silence at both ends cut off."""
    import soxr

    samples, rate = ENGINES[voice.engine].speak(sentence, voice.name, delivery)
    if rate != SAMPLE_RATE:
        samples = soxr.resample(samples, rate, SAMPLE_RATE)
    return _trimmed(samples)


def _trimmed(samples: np.ndarray) -> np.ndarray:
    """Without the samples 40 dB below the loudest at either end, except for 20 ms."""
    block = SAMPLE_RATE // 100
    levels = np.abs(samples[: len(samples) // block * block]).reshape(-1, block).max(1, initial=0)
    loud = np.flatnonzero(levels > 0.01 * levels.max(initial=0))
    if not len(loud):
        raise Unspeakable("silence from the engine")
    return samples[max(0, loud[0] - 2) * block : (loud[-1] + 3) * block]
