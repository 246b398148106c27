"""Other recognisers beside ours: they hear the shipped sample, and are scored in the house form."""

import numpy as np
import pytest

from imputer import audio, evaluation
from imputer.data.manifest import Utterance
from imputer.evaluation.baselines import PEERS, MoonshineDecoder, house_form
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


@pytest.mark.parametrize("name", list(PEERS))
def test_peers_are_evaluated_like_models(name):
    pytest.importorskip({"moonshine": "moonshine_voice"}.get(name, name))
    info = audio.info(SAMPLE)
    heard = []
    utterances = [
        Utterance("sample", str(SAMPLE), info.seconds, "one two"),
        Utterance("missing", "nowhere.wav", 1.0, "one"),
    ]
    result = evaluation.evaluate_peer(PEERS[name](), utterances, heard.append)
    assert [one.id for one in result.utterances] == ["sample"] and list(result.failed) == ["missing"]
    assert result.name == name and result.passes >= 1 and result.real_time_factor > 0
    assert heard == [info.seconds, 1.0]
