"""The models that come with the package: small, right on their samples, and shown by the demo."""

import importlib.util

import pytest

from imputer.models import SHIPPED
from imputer.recognizer import Recognizer
from trainings import imputer

SAMPLES = {
    "digits": "four two zero nine seven",
    "english": "she opened the window and looked out at the rain for a long time before she answered",
}
LARGEST = {"digits": 4e6, "english": 45e6}  # bytes


@pytest.mark.parametrize("name", list(SAMPLES))
def test_a_shipped_model_hears_its_sample(name):
    folder = SHIPPED / name
    assert sum(path.stat().st_size for path in folder.iterdir()) < LARGEST[name]
    transcript = Recognizer.from_pretrained(name).transcribe(str(folder / "sample.wav"))
    assert transcript.text == SAMPLES[name]
    assert transcript.passes == (9 if (folder / "lm.bin").is_file() else 8)  # a search takes one more
    times = [time for word in transcript.words for time in (word.start, word.end)]
    assert times == sorted(times) and times[-1] <= transcript.seconds


def test_the_demo_shows_every_model_and_what_to_try():
    shown = imputer("demo").stdout
    for name, text in SAMPLES.items():
        assert f"model {name}" in shown
        assert all(word in shown for word in text.split())
    assert "pass 8" in shown and "imputer transcribe your.wav" in shown


def test_the_demo_keeps_only_what_it_trains(tmp_path):
    refused = imputer("demo", "--keep", str(tmp_path / "kept"), check=False)
    assert refused.returncode == 2 and "add --train" in refused.stderr


@pytest.mark.parametrize("form", ["srt", "vtt"])
def test_subtitles_of_the_sample_are_two_lines(form):
    written = imputer("transcribe", str(SHIPPED / "english" / "sample.wav"), "--format", form).stdout
    cues = [cue.partition(" --> ")[2].split("\n")[1:] for cue in written.split("\n\n") if " --> " in cue]
    assert " ".join(line for cue in cues for line in cue) == SAMPLES["english"]
    assert all(len(cue) <= 2 and len(line) <= 42 for cue in cues for line in cue)


def test_english_is_the_default_and_needs_no_extra(monkeypatch):
    sample = str(SHIPPED / "english" / "sample.wav")
    assert imputer("transcribe", sample).stdout.strip() == SAMPLES["english"]
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name in ("moonshine_voice", "onnxruntime") else find(name, *rest),
    )
    assert imputer("transcribe", sample).stdout.strip() == SAMPLES["english"]
    shown = imputer("demo").stdout
    assert "model digits" in shown and "model english" in shown and "not shown" not in shown
