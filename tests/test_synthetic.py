"""Synthetic speech: what is said equals what is written, the same seed gives the same speech, a stopped run resumes."""

import importlib
import json
import re
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from imputer import audio
from imputer.audio import alteration
from imputer.corpora import engines
from imputer.corpora.common import Dropped, Found, Options
from imputer.corpora.validation import write_manifests
from imputer.data import text as text_forms
from imputer.data.manifest import Utterance
from imputer.errors import ImputerError, UsageError

# By its full name: in the package the same name is the corpus, a function.
synthetic = importlib.import_module("imputer.corpora.synthetic")

needs_engine = pytest.mark.skipif(
    not any(engine.installed for engine in engines.ENGINES.values()), reason="needs a speech engine"
)

SENTENCES = """The morning was cold and clear.
He would not hear of it!
Where have you been all this time?
It is a long way to the river, and the road is bad.
Nobody answered.
She laughed, and closed the book.
"""


# Text.

TWELVE = "twelve thousand three hundred and forty five"


@pytest.mark.parametrize(
    "line, said",
    [
        ("He paid $5 on the 3rd of May, 1984.", "he paid five dollars on the third of may nineteen eighty four"),
        ("Mr. Smith & Mrs. O’Neil", "mister smith and missus o'neil"),
        ("“Well,” said Dr. Grey, “it’s 12,345.”", "well said doctor grey it's " + TWELVE),
        ("'Tis o' the boys' 50%", "'tis o' the boys fifty percent"),
        ("He said, 'Yes, I'm comin' now.'", "he said yes i'm comin' now"),
        ("A well-known café — naïve", "a well known cafe naive"),
        ("In 1905, 1800 and 2021", "in nineteen oh five eighteen hundred and two thousand twenty one"),
        ("3.14 is pi", "three point one four is pi"),
        ("the 21st, 12th, 20th and 100th", "the twenty first twelfth twentieth and one hundredth"),
        ("$1 or £20", "one dollar or twenty pounds"),
        ("Mrs Grey and Mr Grey. Mr.", "missus grey and mister grey mister"),
        ("ALL IN CAPITALS", "all in capitals"),
        ("Wait... what?", "wait what"),
        ("I asked St. John the next day", "i asked saint john the next day"),
        ("They sat down. Then 7,000,000 came", "they sat down then seven million came"),
    ],
)  # fmt: skip
def test_text_is_spelled_out_in_the_house_form(line, said):
    assert text_forms.transcript(text_forms.spell(line)) == said


@pytest.mark.parametrize(
    "line, reason",
    [
        ("He went to NASA", "capitals"),
        ("write to a@b", "character"),
        ("Привет, мир", "character"),
        ("room 12b", "number"),
        ("$1.50", "number"),
        ("99999999999999", "number"),
        ("...!", "no words"),
    ],
)
def test_what_cannot_be_said_is_refused_with_a_reason(line, reason):
    with pytest.raises(text_forms.Unspeakable, match=reason):
        text_forms.spell(line)


@given(st.text(max_size=60))
def test_any_line_is_spelled_or_refused(line):
    try:
        spoken = text_forms.spell(line)
    except text_forms.Unspeakable:
        return
    assert re.fullmatch("[A-Za-z' ,.?!;:]+", spoken)
    assert re.fullmatch("[a-z']+( [a-z']+)*", text_forms.transcript(spoken))
    assert text_forms.transcript(text_forms.spell(spoken)) == text_forms.transcript(spoken)


@given(st.integers(0, 10**12 - 1))
def test_cardinals_read_back_as_their_number(number):
    """The value of the words, worked out from the right meaning of each word."""
    values = {word: value for value, word in enumerate(text_forms.UNITS)}
    values |= {word: 10 * ten for ten, word in enumerate(text_forms.TENS) if word}
    total = group = 0
    for word in text_forms._cardinal(number).replace(" and ", " ").split():
        if word == "hundred":
            group *= 100
        elif word in ("thousand", "million", "billion"):
            total += group * {"thousand": 10**3, "million": 10**6, "billion": 10**9}[word]
            group = 0
        else:
            group += values[word]
    assert total + group == number


def test_long_sentences_are_cut_at_punctuation_and_lose_no_word():
    sentence = ", ".join(f"{word} and some more words to follow it" for word in text_forms.UNITS)
    parts = synthetic.split_sentence(sentence)
    assert len(parts) > 1
    assert max(map(len, parts)) <= synthetic.MOST_SECONDS * synthetic.CHARACTERS_A_SECOND
    assert " ".join(map(text_forms.transcript, parts)) == text_forms.transcript(sentence)
    with pytest.raises(text_forms.Unspeakable, match="too long"):
        synthetic.split_sentence("on and " * 200)


# Plan.


@given(st.lists(st.integers(3, 400), min_size=1, max_size=60), st.integers(0, 5))
def test_the_plan_uses_every_sentence_once_a_round(lengths, seed):
    sentences = ["x" * length for length in lengths]
    seen: list[int] = []
    for taken in synthetic.plan(sentences, seed):
        assert 1 <= len(taken) <= synthetic.MOST_SENTENCES
        seconds = sum(lengths[i] for i in taken) / synthetic.CHARACTERS_A_SECOND
        assert len(taken) == 1 or seconds <= synthetic.MOST_SECONDS
        seen += taken
        if len(seen) >= 2 * len(sentences):
            break
    assert sorted(seen[: len(sentences)]) == list(range(len(sentences)))
    assert sorted(seen[len(sentences) : 2 * len(sentences)]) == list(range(len(sentences)))


# Sound.


def test_recordings_are_finite_within_range_and_of_the_same_length():
    clean = np.sin(np.arange(20_000) / 10).astype(np.float32)
    for seed in range(20):
        noisy = alteration.recorded(clean, np.random.default_rng(seed))
        assert noisy.shape == clean.shape and noisy.dtype == np.float32
        assert np.isfinite(noisy).all() and np.abs(noisy).max() <= 0.981


def test_warping_changes_pitch_and_length_together():
    tone = np.sin(2 * np.pi * 440 * np.arange(16_000) / 16_000).astype(np.float32)
    fast = alteration.warped(tone, 1.25)
    assert len(fast) == pytest.approx(12_800, abs=2)
    spectrum = np.abs(np.fft.rfft(fast * np.hanning(len(fast))))
    assert spectrum.argmax() * 16_000 / len(fast) == pytest.approx(550, abs=2)


def test_silence_at_both_ends_is_cut_off_and_nothing_else():
    tone = np.sin(np.arange(8000)).astype(np.float32)
    sound = np.concatenate([np.zeros(5000), tone, np.zeros(2000), tone, np.zeros(7000)])
    trimmed = engines._trimmed(sound)
    assert 18_000 <= len(trimmed) <= 18_000 + 6 * 160
    with pytest.raises(text_forms.Unspeakable, match="silence"):
        engines._trimmed(np.zeros(4000))


@needs_engine
@pytest.mark.parametrize("engine", engines.ENGINES)
def test_every_voice_of_an_engine_speaks_and_obeys_its_rate(engine):
    if not engines.ENGINES[engine].installed:
        pytest.skip(f"{engine} is not installed")
    text = "The morning was cold and clear, and the road was long."
    for voice in [voice for voice in engines.VOICES if voice.engine == engine][:6]:
        slow, fast = (len(engines.say(text, voice, engines.Delivery(rate, 1.0))) for rate in (0.8, 1.25))
        if voice.name != "cmu_us_slt_arctic_hts":  # whose rate is fixed
            assert 1.3 < slow / fast < 1.8
        assert 1.5 < slow / 16_000 < 8


def pitch(samples):
    """The fundamental frequency of the loudest part, by autocorrelation."""
    middle = np.argmax(np.convolve(samples**2, np.ones(1600), "same"))
    piece = samples[max(0, middle - 1600) : middle + 1600]
    correlation = np.correlate(piece, piece, "full")[len(piece) :]
    return 16_000 / (np.argmax(correlation[40:300]) + 41)


def test_the_neural_voice_speaks_at_the_pitch_of_its_name():
    if not engines.ENGINES["hibari"].installed:
        pytest.skip("hibari is not installed")
    usual, low = (
        engines.say(
            "Oh no, no, no!", engines.Voice("hibari", f"heart@{factor}", 1), engines.Delivery(1.0, 1.0)
        )
        for factor in (1.0, 0.6)
    )
    assert abs(len(usual) - len(low)) < 1600
    assert 0.4 < pitch(low) / pitch(usual) < 0.75


# The corpus.


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(SENTENCES + "Nobody at NASA knew.\n")
    return path


def made(text, folder, *, seed=3, hours=30 / 3600, workers=1):
    options = Options(audio_folder=folder, hours=hours, seed=seed, workers=workers)
    items = list(synthetic.synthetic(text, options))
    return [i.utterance for i in items if isinstance(i, Found)], [i for i in items if isinstance(i, Dropped)]


def contents(utterances):
    return [(u.id, u.text, u.speaker, u.duration, audio.read(u.audio_filepath).tobytes()) for u in utterances]


@needs_engine
def test_speech_has_the_hours_asked_for_and_the_words_of_the_text(tmp_path, text):
    utterances, drops = made(text, tmp_path / "part-audio")
    seconds = sum(u.duration for u in utterances)
    assert seconds >= 30 > seconds - utterances[-1].duration
    known = [text_forms.transcript(text_forms.spell(line)) for line in SENTENCES.splitlines()]
    for utterance in utterances:
        rest = utterance.text
        for sentence in sorted(known, key=len, reverse=True):
            rest = rest.replace(sentence, "")
        assert not rest.strip()
        info = audio.info(utterance.audio_filepath)
        assert (info.sample_rate, info.channels) == (16_000, 1)
        assert info.seconds == pytest.approx(utterance.duration)
        assert utterance.speaker.partition("-")[0] in engines.ENGINES
        assert 4 < len(utterance.text) / utterance.duration < 30
    assert utterances[0].id == "part-000000"
    assert [(d.reason, d.item) for d in drops] == [
        ("an abbreviation in capitals", "line 7: Nobody at NASA knew.")
    ]


@needs_engine
def test_the_same_seed_gives_the_same_speech_with_any_number_of_workers(tmp_path, text):
    one, _ = made(text, tmp_path / "a" / "part-audio")
    two, _ = made(text, tmp_path / "b" / "part-audio", workers=2)
    other, _ = made(text, tmp_path / "c" / "part-audio", seed=4)
    assert contents(one) == contents(two)
    assert [u.text for u in one] != [u.text for u in other]


@needs_engine
def test_a_stopped_run_goes_on_where_it_stopped(tmp_path, text, monkeypatch):
    whole, _ = made(text, tmp_path / "whole" / "part-audio")
    folder = tmp_path / "stopped" / "part-audio"
    stopped = synthetic.synthetic(text, Options(audio_folder=folder, hours=1, seed=3))
    list(islice(stopped, 3))  # one drop, two utterances
    stopped.close()
    asked = []
    say = synthetic.say
    monkeypatch.setattr(synthetic, "say", lambda *given: asked.append(given) or say(*given))
    rest, _ = made(text, folder)
    assert contents(rest) == contents(whole)
    again = len(asked)
    made(text, folder)
    assert len(asked) == again > 0


@needs_engine
@pytest.mark.parametrize("change", ["seed", "text"])
def test_going_on_with_something_else_is_refused(tmp_path, text, change):
    folder = tmp_path / "part-audio"
    made(text, folder, hours=0.001)
    if change == "text":
        text.write_text(SENTENCES[:60])
    with pytest.raises(UsageError, match=f"another {change} .*choose another"):
        made(text, folder, seed=4 if change == "seed" else 3, hours=0.001)


def test_no_engine_names_the_packages(tmp_path, text, monkeypatch):
    monkeypatch.setattr(engines.Engine, "installed", False)
    with pytest.raises(
        UsageError, match=r"pip install hibari-tts; apt-get install flite; .*libttspico-utils"
    ):
        made(text, tmp_path / "audio")


def test_an_engine_that_always_fails_is_an_error_not_an_endless_run(tmp_path, text, monkeypatch):
    monkeypatch.setattr(synthetic, "installed_voices", lambda: [engines.Voice("espeak", "en-us", 1)])

    def fail(*given):
        raise text_forms.Unspeakable("espeak failed")

    monkeypatch.setattr(synthetic, "say", fail)
    with pytest.raises(ImputerError, match="espeak failed"):
        made(text, tmp_path / "audio")


@pytest.mark.parametrize("content", ["", "\n\n", "Nobody at NASA\n"])
def test_a_text_without_a_sentence_is_an_error(tmp_path, monkeypatch, content):
    monkeypatch.setattr(synthetic, "installed_voices", lambda: [engines.Voice("espeak", "en-us", 1)])
    path = tmp_path / "text.txt"
    path.write_text(content)
    with pytest.raises(ImputerError, match="no sentence"):
        made(path, tmp_path / "audio")
    with pytest.raises(UsageError, match="cannot read"):
        made(tmp_path / "none.txt", tmp_path / "audio")
    with pytest.raises(UsageError, match="hours"):
        made(path, tmp_path / "audio", hours=0)


@needs_engine
@pytest.mark.parametrize("workers", [1, 2])
def test_frames_are_cached_as_speech_is_made(tmp_path, text, workers):
    moonshine = pytest.importorskip("imputer.frontends.moonshine")
    pytest.importorskip("moonshine_voice")
    from imputer.data.frames_cache import FramesCache

    def run(hours, workers=1):
        folder, cache = tmp_path / "part-audio", str(tmp_path / "frames")
        options = Options(audio_folder=folder, hours=hours, seed=3, workers=workers, frames_cache=cache)
        found = synthetic.synthetic(text, options)
        return [item.utterance for item in found if isinstance(item, Found)]

    run(0.001)
    utterances = run(0.004, workers)  # resumes
    cache = FramesCache(tmp_path / "frames", moonshine.MoonshineEncoder())
    assert len(cache) == len(utterances) > 1
    frames = cache.get(utterances[-1])
    samples = audio.read(utterances[-1].audio_filepath)
    direct = moonshine.MoonshineEncoder().extract(torch.from_numpy(samples))
    assert torch.corrcoef(torch.stack([frames.flatten(), direct.flatten()]))[0, 1] > 0.999
    (tmp_path / "frames" / "index.sqlite").unlink()
    run(0.004)  # audio without frames: they are made again
    assert len(FramesCache(tmp_path / "frames", moonshine.MoonshineEncoder())) == len(utterances)


@needs_engine
def test_it_is_a_corpus_like_the_others(tmp_path, text):
    found = synthetic.synthetic(text, Options(audio_folder=tmp_path / "mine-audio", seed=1))
    first = next(item for item in found if isinstance(item, Found))
    assert first.utterance.id == "mine-000000"
    note = json.loads((tmp_path / "mine-audio" / "made-from.json").read_text())
    assert note["seed"] == 1


def test_progress_counts_speech_and_not_what_was_dropped(tmp_path):
    """Half of a large text dropped looked like half of the speech made."""
    path = tmp_path / "a.wav"
    audio.write(path, np.zeros(16_000, np.float32), 16_000)
    found = [Dropped("a reason", "an item"), Found(Utterance("a", str(path), 1.0, "abc"))]
    told: list[Utterance] = []
    write_manifests(found, tmp_path / "m.jsonl", advance=told.append)
    assert [one.id for one in told] == ["a"]
