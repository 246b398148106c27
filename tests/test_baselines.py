"""Other recognisers: they transcribe the shipped sample, and are scored like ours."""

import numpy as np
import pytest

from imputer import audio, evaluation
from imputer.data.manifest import Utterance
from imputer.evaluation import scoring
from imputer.evaluation.baselines import BASELINES, MoonshineDecoder, house_form
from imputer.models import SHIPPED

SAMPLE = SHIPPED / "digits" / "sample.wav"


@pytest.fixture(scope="module")
def moonshine():
    pytest.importorskip("moonshine_voice")
    return MoonshineDecoder()


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("Mr. Smith paid 21 pounds.", "mister smith paid twenty one pounds"),
        ("", ""),
        ("It's NASA's.", "it's nasa's"),
    ],
)
def test_texts_are_scored_in_the_house_form(written, said):
    assert house_form(written) == said


def test_moonshine_takes_a_pass_for_every_token_and_stops(moonshine):
    samples = audio.read(SAMPLE)
    text, passes = moonshine.transcribe(samples)
    assert (
        len(
            set(text.split())
            & {"one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "zero"}
        )
        > 1
    )
    assert len(text.split()) < passes < 60
    assert moonshine.transcribe(samples) == (text, passes)  # nothing is left over from before
    assert len(moonshine.tokens) == 32768


def test_long_recordings_are_decoded_as_well(moonshine):
    samples = audio.read(SAMPLE)
    longer = np.tile(samples, 1 + 20 * 16_000 // len(samples))
    text, passes = moonshine.transcribe(longer)
    assert passes <= 2 + 6.5 * len(longer) / 16_000 and text


@pytest.mark.parametrize("name", ["moonshine", "whisper-tiny.en"])
def test_baselines_transcribe_the_english_sample(name):
    pytest.importorskip("moonshine_voice" if name == "moonshine" else "faster_whisper")
    said = BASELINES[name]().transcribe(audio.read(SHIPPED / "english" / "sample.wav"))[0]
    words = "she opened the window and looked out at the rain for a long time before she answered"
    assert scoring.word_errors(words, said).rate < 0.2, said


@pytest.mark.parametrize("name", list(BASELINES))
def test_baselines_are_evaluated_like_models(name):
    pytest.importorskip({"moonshine": "moonshine_voice", "whisper-tiny.en": "faster_whisper"}.get(name, name))
    info = audio.info(SAMPLE)
    heard = []
    utterances = [
        Utterance("sample", str(SAMPLE), info.seconds, "one two"),
        Utterance("missing", "nowhere.wav", 1.0, "one"),
    ]
    result = evaluation.evaluate_baseline(BASELINES[name](), utterances, heard.append)
    assert [one.id for one in result.utterances] == ["sample"] and list(result.failed) == ["missing"]
    assert result.name == name and result.passes >= 1 and result.real_time_factor > 0
    assert heard == [info.seconds, 1.0]
