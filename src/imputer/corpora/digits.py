"""Connected digit strings, joined from recordings of single digits by one speaker at a time.

The recordings are a table ``segments.tsv`` into longer files, or files named DIGIT_SPEAKER_N as in AudioMNIST and the
Free Spoken Digit Dataset. Speakers are split into train, valid and test; no speaker is in two of them.

A string is one to ten digits; every piece loses a little of its silence at random. What lies between the pieces is
drawn anew for every string (``BACKGROUNDS``): the speaker's own room, digital silence as noise gates leave it, white
noise, another room, babble. Some strings have hard joints, clicks, clipped starts or long pauses. A model trained on
a single kind of joint learns the joints: with white noise at -60 dB between the digits it had 6.8 % of the words
wrong instead of 2.0, with digital silence 19 to 28 %.
"""

import re
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from imputer import audio
from imputer.audio import alteration, augmentation
from imputer.audio.endings import is_audio
from imputer.corpora.common import Dropped, Found, Options, existing_folder, files_under
from imputer.corpora.folder import folder
from imputer.data.manifest import Utterance
from imputer.errors import ImputerError, UsageError

EVERYONE = "all"  # --test-speakers all
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
RATE = audio.SAMPLE_RATE

LONGEST_PAUSE = 0.4
LONG_PAUSE = 2.0
SHARE_LONG_PAUSES = 0.12  # of the strings
SHARE_HARD_JOINTS = 0.3
SHARE_CLICKS = 0.1
SHARE_CLIPPED = 0.15
JOINED_WITHOUT_PAUSE = 0.35  # share of joints where one digit runs into the next
FADE = 0.012
LEVEL_DB = -23.0  # of the speech of a string, give or take ...
LEVEL_SPREAD_DB = 6.0
STEP = 160  # samples of an energy frame


@dataclass(frozen=True)
class Recording:
    digit: int
    speaker: str
    path: str
    offset: float = 0.0
    duration: float | None = None


def digits(source: Path, options: Options) -> Iterator[Found | Dropped]:
    """Make the strings of every speaker, write their audio and yield them by split."""
    existing_folder(source, "recordings of single digits")
    speakers: dict[str, list[Recording]] = defaultdict(list)
    for item in _recordings(source):
        if isinstance(item, Dropped):
            yield item
        else:
            speakers[item.speaker].append(item)
    if not speakers:
        raise UsageError(f"{source} has no segments.tsv and no files named DIGIT_SPEAKER_N.wav")
    splits = split_speakers(sorted(speakers), options)
    for speaker in sorted(speakers):
        if options.splits and splits[speaker] not in options.splits:
            continue
        for made in _strings(speaker, speakers[speaker], options):
            yield Found(made, splits[speaker]) if isinstance(made, Utterance) else made


def _recordings(source: Path) -> Iterator[Recording | Dropped]:
    if (source / "segments.tsv").is_file():
        for item in folder(source / "segments.tsv", Options()):
            if isinstance(item, Dropped):
                yield item
                continue
            one = item.utterance
            digit = _digit(one.text)
            if digit is None:
                yield Dropped("not a digit", f"{one.id}: {one.text!r}")
            else:
                yield Recording(digit, one.speaker, one.audio_filepath, one.offset, one.duration or None)
        return
    for path in files_under(source):
        named = re.fullmatch(r"(\d)_(.+)_(\d+)", path.stem)
        if named and is_audio(path):
            yield Recording(int(named[1]), named[2], str(path))


def _digit(text: str) -> int | None:
    if text in WORDS:
        return WORDS.index(text)
    return int(text) if len(text) == 1 and text.isdecimal() else None


def split_speakers(speakers: list[str], options: Options) -> dict[str, str]:
    """train, valid or test for each speaker: as named, or else drawn from the seed.

    Where speakers are named, those are held out and no others; all of them may be, for a set to test on only.
    """
    valid, test = (
        speakers if named == (EVERYONE,) else list(named)
        for named in (options.valid_speakers, options.test_speakers)
    )
    unknown = sorted({*valid, *test} - set(speakers))
    if unknown:
        raise UsageError(f"no such speaker: {', '.join(unknown)}; there are {', '.join(speakers)}")
    both = sorted(set(valid) & set(test))
    if both:
        raise UsageError(f"speakers cannot be in both valid and test: {', '.join(both)}")
    if not (valid or test):
        drawn = [speakers[i] for i in np.random.default_rng(options.seed).permutation(len(speakers))][::-1]
        held_out = options.speakers_held_out
        test, valid = drawn[:held_out], drawn[held_out : 2 * held_out]
        if len(drawn) <= 2 * held_out and (not options.splits or "train" in options.splits):
            raise UsageError(
                f"holding out {len(test)} + {len(valid)} of {len(speakers)} speakers leaves none to train on; for a "
                "set to test on only: --test-speakers all"
            )
    train = set(speakers) - {*valid, *test}
    return dict.fromkeys(train, "train") | dict.fromkeys(valid, "valid") | dict.fromkeys(test, "test")


def _strings(speaker: str, recordings: list[Recording], options: Options) -> Iterator[Utterance | Dropped]:
    random = np.random.default_rng([options.seed, zlib.crc32(speaker.encode())])
    pieces: dict[int, list[np.ndarray]] = defaultdict(list)
    for recording in recordings:
        try:
            pieces[recording.digit].append(_samples(recording))
        except ImputerError as error:
            yield Dropped("unreadable audio", str(error))
    _whole.cache_clear()
    if not pieces:
        return
    everything = [samples for some in pieces.values() for samples in some]
    room = Room(everything, random)
    folder = options.audio_folder / speaker
    chosen = {digit: _without_repeats(len(some), random) for digit, some in sorted(pieces.items())}
    for number in range(options.strings):
        said = random.choice(sorted(pieces), int(random.integers(1, options.longest + 1))).tolist()
        samples = join([pieces[digit][next(chosen[digit])] for digit in said], room, random)
        identifier = f"{speaker}-{number:04d}"
        path = folder / f"{identifier}.flac"
        audio.write(path, samples)
        text = " ".join(WORDS[digit] for digit in said)
        yield Utterance(identifier, str(path), len(samples) / RATE, text, speaker)


def _samples(recording: Recording) -> np.ndarray:
    if recording.duration is None:
        return audio.read(recording.path)
    # All slices of a speaker's file are wanted, so it is decoded once.
    whole = _whole(recording.path)
    start, end = (round(time * RATE) for time in (recording.offset, recording.offset + recording.duration))
    if start >= len(whole) or end > len(whole) + audio.SECONDS_OF_GRACE * RATE:
        raise ImputerError(
            f"{recording.path}: asked for {recording.offset:.3f} to {end / RATE:.3f} s, "
            f"but the file ends at {len(whole) / RATE:.3f} s"
        )
    return whole[start:end]


@lru_cache(maxsize=4)
def _whole(path: str) -> np.ndarray:
    return audio.read(path)


def _without_repeats(count: int, random: np.random.Generator) -> Iterator[int]:
    """Indices in random order, each used once before any is used again."""
    while True:
        yield from random.permutation(count).tolist()


def _energies(samples: np.ndarray) -> np.ndarray:
    """Level of each 10 ms in dB."""
    frames = samples[: len(samples) // STEP * STEP].reshape(-1, STEP)
    return 10 * np.log10(np.square(frames, dtype=np.float64).mean(1) + 1e-12)


class Room:
    """The background between words: its level, and noise of the same spectrum."""

    def __init__(self, recordings: list[np.ndarray], random: np.random.Generator) -> None:
        energies = np.concatenate([_energies(samples) for samples in recordings])
        if not len(energies):
            energies = np.array([-60.0])
        self.floor_db = float(np.percentile(energies, 10))
        self.speech_db = float(np.percentile(energies, 90))
        spectra = []
        for samples in recordings:
            quiet = _energies(samples) < self.floor_db + 3
            # Runs of two quiet steps: long enough for a spectrum of 31 Hz resolution with a window over both.
            for start in np.flatnonzero(quiet[:-1] & quiet[1:]) * STEP:
                piece = samples[start : start + 2 * STEP] * np.hanning(2 * STEP)
                spectra.append(np.square(np.abs(np.fft.rfft(piece, 512))))
        power = np.mean(spectra, 0) if spectra else np.ones(257)
        self.spectrum = np.sqrt(power / power.mean())
        self.random = random

    def tone(self, samples: int) -> np.ndarray:
        """Noise of ``samples`` samples at the room's level and colour."""
        if samples < 1:
            return np.zeros(0, np.float32)
        points = max(1024, samples)
        white = np.fft.rfft(self.random.standard_normal(points))
        colour = np.interp(
            np.linspace(0, 1, len(white)), np.linspace(0, 1, len(self.spectrum)), self.spectrum
        )
        noise = np.fft.irfft(white * colour, points)[:samples]
        return (noise * 10 ** (self.floor_db / 20)).astype(np.float32)


def _own_room(samples: int, room: Room, random: np.random.Generator) -> np.ndarray:
    return room.tone(samples)


def _digital_silence(samples: int, room: Room, random: np.random.Generator) -> np.ndarray:
    return np.zeros(samples, np.float32)


def _white(samples: int, room: Room, random: np.random.Generator) -> np.ndarray:
    level = room.speech_db - random.uniform(25, 65)
    return (random.standard_normal(samples) * 10 ** (level / 20)).astype(np.float32)


def _other_room(samples: int, room: Room, random: np.random.Generator) -> np.ndarray:
    level = room.speech_db - random.uniform(20, 55)
    return (alteration.room_noise(samples, random) * 10 ** (level / 20)).astype(np.float32)


def _babble(samples: int, room: Room, random: np.random.Generator) -> np.ndarray:
    generator = torch.Generator().manual_seed(int(random.integers(2**31)))
    made = augmentation.babble_noise(samples, RATE, generator).numpy()
    level = room.speech_db - random.uniform(18, 40)
    return (made / (np.sqrt(np.mean(made**2)) + 1e-9) * 10 ** (level / 20)).astype(np.float32)


Background = Callable[[int, Room, np.random.Generator], np.ndarray]
# What lies between the digits, and how often. A new kind is one function and one line.
BACKGROUNDS: dict[str, tuple[Background, float]] = {
    "own room": (_own_room, 0.3),
    "digital silence": (_digital_silence, 0.25),
    "white": (_white, 0.15),
    "other room": (_other_room, 0.2),
    "babble": (_babble, 0.1),
}


def join(
    pieces: list[np.ndarray], room: Room, random: np.random.Generator, background: str | None = None
) -> np.ndarray:
    """The digits one after another over one background, at a level of speech.

    Background and faults of the recording are drawn; a background that is named comes without faults.
    """
    shares = [share for _, share in BACKGROUNDS.values()]
    make, _ = BACKGROUNDS[background or str(random.choice(list(BACKGROUNDS), p=shares))]

    def fault(share: float) -> bool:
        return background is None and random.random() < share

    pieces = [_trimmed(samples, room, random) for samples in pieces]
    if fault(SHARE_CLIPPED):  # a microphone that opens late
        pieces[0] = pieces[0][int(random.uniform(0.005, 0.03) * RATE) :]
    longest = LONG_PAUSE if fault(SHARE_LONG_PAUSES) else LONGEST_PAUSE
    gaps = [_pause(random, longest) for _ in pieces[1:]]
    edges = random.uniform(0.0 if background is None else 0.05, longest, 2)
    starts = [round(edges[0] * RATE)]
    for piece, gap in zip(pieces, gaps, strict=False):
        starts.append(starts[-1] + len(piece) + round(gap * RATE))
    total = starts[-1] + len(pieces[-1]) + round(edges[1] * RATE)
    # The room is silenced where a piece brings its own, with fades that keep the power even across the joint.
    inside = np.zeros(total)
    speech = np.zeros(total)
    hard = fault(SHARE_HARD_JOINTS)
    for start, piece in zip(starts, pieces, strict=True):
        weight = np.ones(len(piece)) if hard else _fades(len(piece))
        speech[start : start + len(piece)] += piece * np.sqrt(weight)
        inside[start : start + len(piece)] += weight
    samples = speech + make(total, room, random) * np.sqrt(1 - inside.clip(0, 1))
    if fault(SHARE_CLICKS):
        samples[random.choice(starts)] += 10 ** (room.speech_db / 20) * random.uniform(-3, 3)
    level = LEVEL_DB + random.uniform(-LEVEL_SPREAD_DB, LEVEL_SPREAD_DB) - room.speech_db
    samples = samples * 10 ** (level / 20)
    return (samples / max(1.0, float(np.abs(samples).max()) / 0.99)).astype(np.float32)


def _pause(random: np.random.Generator, longest: float) -> float:
    return 0.0 if random.random() < JOINED_WITHOUT_PAUSE else float(random.uniform(0.0, longest))


def _fades(samples: int) -> np.ndarray:
    """1 inside, rising and falling over a few thousandths of a second at the ends."""
    ramp = min(round(FADE * RATE), samples // 2)
    weight = np.ones(samples)
    slope = np.sin(np.linspace(0, np.pi / 2, ramp + 2)[1:-1]) ** 2
    weight[:ramp] = slope
    weight[samples - ramp :] = slope[::-1]
    return weight


def _trimmed(samples: np.ndarray, room: Room, random: np.random.Generator) -> np.ndarray:
    """Without a random share of the silence at its ends; what may be a faint consonant stays."""
    loud = np.flatnonzero(_energies(samples) > room.floor_db + 8)
    if not len(loud):
        return samples
    margin = round(0.03 * RATE)
    before = max(0, int(loud[0]) * STEP - margin)
    after = max(0, len(samples) - (int(loud[-1]) + 1) * STEP - margin)
    begin = int(before * random.uniform(0.3, 1.0))
    end = len(samples) - int(after * random.uniform(0.3, 1.0))
    return samples[begin:end]
