"""Live recognition, on the tone language: real audio through a real network."""

import os
import pickle
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import soxr

import tones
from imputer import Recognizer, audio
from imputer.audio import activity
from imputer.commands.listen import listen
from imputer.decoding import Decoded
from imputer.errors import ImputerError, UsageError
from imputer.streaming import Stream
from imputer.transcripts import WORD_MARK
from trainings import imputer

RATE = tones.RATE


@pytest.fixture(scope="module")
def recognizer() -> Recognizer:
    return Recognizer(tones.trained(), tones.vocabulary())


def spoken(words: int, seed: int, pause: float = 0.0) -> tuple[np.ndarray, str]:
    text = tones.sentence(np.random.default_rng(seed), words)
    return tones.speak(text, seed, pause=pause)[0], text


def run(stream: Stream, samples: np.ndarray, chunk: int) -> list:
    events = []
    for first in range(0, len(samples), chunk):
        events += stream.feed(samples[first : first + chunk])
    return events + stream.finish()


def settled(events: list) -> str:
    return " ".join(event.text for event in events if event.kind == "settled")


def test_the_settled_text_is_that_of_the_whole_recording(recognizer):
    samples, text = spoken(30, 1)
    assert len(samples) / RATE > 14  # longer than a window: it slides
    events = run(Stream(recognizer), samples, 1600)
    assert settled(events) == text == recognizer.transcribe(samples).text


@pytest.mark.parametrize("chunk", [1, 777, 16_000, 10**9])
def test_the_chunk_size_changes_nothing(recognizer, chunk):
    samples, _ = spoken(6 if chunk == 1 else 12, 2)
    expected = run(Stream(recognizer), samples, 1600)
    assert run(Stream(recognizer), samples, chunk) == expected


def test_words_have_their_times_and_settle_in_order(recognizer):
    samples, _ = spoken(20, 3)
    events = run(Stream(recognizer), samples, 1600)
    words = [word for event in events if event.kind == "settled" for word in event.words]
    whole = recognizer.transcribe(samples).words
    assert [word.text for word in words] == [word.text for word in whole]
    assert max(abs(a.start - b.start) for a, b in zip(words, whole, strict=True)) <= 0.081
    assert all(event.time >= event.words[-1].start for event in events if event.words)
    assert [event.time for event in events] == sorted(event.time for event in events)


def test_text_is_partial_before_it_settles(recognizer):
    samples, _ = spoken(8, 4)
    events = run(Stream(recognizer), samples, 1600)
    first = next(event for event in events if event.kind == "settled").words[0]
    partial = next(event for event in events if event.kind == "partial" and event.words)
    assert partial.words[0].text == first.text
    assert partial.time < next(event.time for event in events if event.kind == "settled")


def test_silence_takes_no_pass_and_ends_a_segment(recognizer):
    samples, text = spoken(3, 5)
    quiet = 0.0005 * np.random.default_rng(0).standard_normal(20 * RATE).astype(np.float32)
    stream = Stream(recognizer)
    events = stream.feed(np.concatenate((samples, quiet[: 3 * RATE])))
    assert settled(events) == text
    assert events[-1].kind == "silence"
    before = stream.passes
    assert stream.feed(quiet) == []
    assert stream.passes == before
    again = stream.feed(samples) + stream.finish()
    assert settled(again) == text
    start = (len(samples) + 23 * RATE) / RATE
    assert all(word.start >= start - 0.5 for event in again for word in event.words)


def test_memory_stays_that_of_a_window(recognizer):
    samples, text = spoken(60, 6)
    stream = Stream(recognizer, window=6.0, context=3.0)
    held, events = [], []
    for first in range(0, len(samples), 8000):
        events += stream.feed(samples[first : first + 8000])
        held.append(len(stream._buffer) / RATE)
    assert max(held) <= 6.0 + 0.5 + 0.4
    assert settled(events + stream.finish()) == text


class Counting(Stream):
    """A stream whose network is replaced: it says the same in every frame, and the sizes of windows are kept."""

    def __init__(self, recognizer, token, **options):
        super().__init__(recognizer, **options)
        self.token, self.longest, self.windows, self.settled = token, 0.0, 0, 0

    def feed(self, samples):
        return self._run_with(self.feeding(samples))

    def _run_with(self, work):
        try:
            window = next(work)
            while True:
                frames = len(window.samples) // self.frame
                assert len(window.start) <= frames
                self.longest = max(self.longest, len(window.samples) / RATE)
                self.windows += 1
                window = work.send(Decoded([self.token] * frames, [0.9] * frames, 1))
        except StopIteration as end:
            return end.value


@pytest.mark.parametrize("piece", ["blank", "word", "no word begins"])
def test_an_hour_takes_the_memory_of_a_window(recognizer, piece):
    """Whatever the network says: only blanks, a word in every frame, or one word that never ends."""
    pieces = recognizer.vocabulary.pieces(range(1, recognizer.model.mask))
    marked = [p.startswith(WORD_MARK) for p in pieces]
    token = {"blank": 0, "word": 1 + marked.index(True), "no word begins": 1 + marked.index(False)}[piece]
    stream = Counting(recognizer, token, window=6.0, context=3.0, hop=2.0)
    minute = (0.2 * np.sin(np.arange(60 * RATE))).astype(np.float32)
    held = []
    told = 0
    for _ in range(60):
        events = stream.feed(minute)
        told += sum(len(event.words) for event in events if event.kind == "settled")
        held.append(len(pickle.dumps({k: v for k, v in vars(stream).items() if k != "recognizer"})))
    assert stream.windows == 1800
    assert stream.longest <= 6.0 + 2.0 + 0.04
    assert max(held[1:]) < 1.2 * min(held[1:])
    assert (told > 0) == (token != 0)


def test_an_hour_of_speech_and_silence_is_transcribed(recognizer):
    """The real network; most of the hour is silence."""
    spoken_minute, text = spoken(8, 11)
    rest = 0.0005 * np.random.default_rng(0).standard_normal(60 * RATE - len(spoken_minute)).astype(
        np.float32
    )
    minute = np.concatenate((spoken_minute, rest))
    stream = Stream(recognizer, hop=1.0)
    heard = [settled(stream.feed(minute)) for _ in range(60)]
    assert heard == [text] * 60
    assert stream.passes < 60 * 4 * (2 + len(spoken_minute) / RATE)


def test_sound_without_words_is_silence_too(recognizer):
    stream = Counting(recognizer, 0)
    events = stream.feed((0.2 * np.sin(np.arange(30 * RATE))).astype(np.float32))
    assert [event.kind for event in events] == ["speech", "silence"]
    assert events[1].start == 0.0


def test_a_chunk_of_another_rate_is_resampled(recognizer):
    samples, text = spoken(10, 12)
    fast = soxr.resample(samples, RATE, 24_000)
    whole = run(Stream(recognizer, sample_rate=24_000), fast, 10**9)
    assert settled(whole) == text
    assert settled(run(Stream(recognizer, sample_rate=24_000), fast, 1111)) == text


def test_flush_settles_and_clear_forgets(recognizer):
    samples, text = spoken(3, 13)
    stream = Stream(recognizer)
    assert settled(stream.feed(samples) + stream.flush()) == text
    stream.feed(samples[: len(samples) // 2])
    stream.clear()
    assert settled(stream.feed(samples) + stream.finish()) == text


def test_nothing_is_decoded_after_the_last_word(recognizer):
    samples, _ = spoken(3, 5)
    stream = Stream(recognizer)
    stream.feed(np.concatenate((samples, np.zeros(2 * RATE, np.float32))))
    before = stream.passes
    assert stream.finish() == []
    assert stream.passes == before


def test_frames_add_up_to_the_alignment(recognizer):
    samples, _ = spoken(20, 14)
    stream = Stream(recognizer, frames=True)
    alignment: dict[int, int] = {}
    final: dict[int, int] = {}
    for event in run(stream, samples, 1600):
        if event.kind == "frames":
            written = dict(enumerate(event.tokens, event.first))
            assert not written.keys() & final.keys()  # what is settled is never sent again
            alignment |= written
            final |= {frame: token for frame, token in written.items() if frame < event.settled}
    tokens = [token for _, token in sorted(final.items()) if token]
    assert tokens == [token for token in recognizer.decode([samples])[0].alignment if token]
    assert alignment == final


def test_commitments_save_passes(recognizer):
    samples, text = spoken(25, 7)
    carried, fresh = Stream(recognizer), Stream(recognizer, carry=False)
    assert settled(run(carried, samples, 1600)) == text
    run(fresh, samples, 1600)
    assert carried.passes < fresh.passes


def test_bad_chunks_are_named(recognizer):
    stream = Stream(recognizer)
    with pytest.raises(ImputerError, match="sample 3 of the chunk is not finite"):
        stream.feed(np.array([0, 0, 0, np.nan], np.float32))
    with pytest.raises(UsageError, match=r"takes \(samples,\), got shape \(2, 2\)"):
        stream.feed(np.zeros((2, 2), np.float32))
    with pytest.raises(UsageError, match="got uint8"):
        stream.feed(np.zeros(4, np.uint8))
    with pytest.raises(UsageError, match="0 < hop < context < window"):
        Stream(recognizer, hop=7.0)
    with pytest.raises(UsageError, match="a sample rate is a positive number, got 0"):
        Stream(recognizer, sample_rate=0)
    stream.finish()
    assert stream.finish() == []
    with pytest.raises(UsageError, match="finished"):
        stream.feed(np.zeros(10, np.float32))


def test_whole_numbers_are_samples_too(recognizer):
    samples, text = spoken(4, 8)
    events = run(Stream(recognizer), (samples * 32767).astype(np.int16), 1600)
    assert settled(events) == text


def test_the_gate_finds_speech_in_noise():
    random = np.random.default_rng(1)
    noise = 0.003 * random.standard_normal(8 * RATE)
    noise[3 * RATE : 4 * RATE] += 0.1 * np.sin(np.arange(RATE))
    active = activity.Gate().active(activity.levels(noise.astype(np.float32), RATE))
    blocks = np.flatnonzero(active) * activity.BLOCK_SECONDS
    assert 2.95 < blocks.min() < 3.05
    assert 3.9 < blocks.max() < 4.0
    assert not activity.Gate().active(activity.levels(np.zeros(RATE, np.float32), RATE)).any()
    tone = noise[3 * RATE : 4 * RATE]
    assert 1.1 < activity.pause(np.r_[tone, noise[: RATE // 2], tone], RATE) < 1.4
    assert activity.pause(noise[: 2 * RATE], RATE) is None  # nothing tells where to cut noise


def listening(tmp_path, *options: str) -> list[str]:
    model = tones.save(tmp_path / "model")
    return ["listen", *options, "--model", str(model)]


def test_listen_writes_captions(tmp_path):
    samples, text = spoken(12, 9)
    audio.write(tmp_path / "speech.wav", samples, RATE)
    options = ("--fast", "--times", "-o", str(tmp_path / "c.srt"))
    done = imputer(*listening(tmp_path, str(tmp_path / "speech.wav"), *options))
    printed = " ".join(line[9:] for line in done.stdout.splitlines())
    assert printed == text
    captions = (tmp_path / "c.srt").read_text()
    assert " ".join(line for line in captions.splitlines() if line[:1].isalpha()) == text


class Unplugged:
    """sounddevice with a microphone that says something and is gone."""

    class PortAudioError(Exception):
        pass

    def __init__(self, samples: np.ndarray):
        self.samples = samples

    def InputStream(self, samplerate, channels, dtype, device, blocksize):
        assert (samplerate, channels, dtype) == (RATE, 1, "float32")
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def read(self, count):
        if not len(self.samples):
            raise self.PortAudioError("Device unavailable [PaErrorCode -9985]")
        chunk, self.samples = self.samples[:count], self.samples[count:]
        return chunk[:, None], False


def test_a_microphone_that_vanishes_keeps_what_was_said(tmp_path, monkeypatch, capsys):
    samples, text = spoken(5, 15)
    monkeypatch.setitem(sys.modules, "sounddevice", Unplugged(samples))
    captions = tmp_path / "c.txt"
    with pytest.raises(ImputerError, match="the microphone stopped: Device unavailable"):
        listen(model=str(tones.save(tmp_path / "model")), output=captions)
    assert captions.read_text().split() == text.split() == capsys.readouterr().out.split()


def test_interrupting_keeps_what_was_settled(tmp_path):
    samples, text = spoken(60, 10)
    audio.write(tmp_path / "speech.wav", samples, RATE)
    words = listening(tmp_path, str(tmp_path / "speech.wav"), "-o", str(tmp_path / "c.txt"))
    command = [sys.executable, "-m", "imputer", *words]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not (tmp_path / "c.txt").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    os.kill(running.pid, signal.SIGINT)
    printed, errors = running.communicate(timeout=120)
    assert running.returncode == 0, errors
    assert "Traceback" not in errors
    words = (tmp_path / "c.txt").read_text().split()
    assert words
    assert words[:-1] == text.split()[: len(words) - 1]
    assert printed.split() == words


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("nowhere.wav",), "nowhere.wav: no such file"),
        (("nowhere.wav", "-o", "c.doc"), "captions end in .srt, .vtt, .txt"),
        (("--fast",), "--fast is for a file"),
    ],
)
def test_mistakes_are_one_line(tmp_path, options, message):
    done = imputer(*listening(tmp_path, *options), check=False)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
