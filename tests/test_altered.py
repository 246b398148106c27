"""Altered copies: the same words at another speed and level, the same copies from the same seed."""

import numpy as np
import pytest

from imputer import audio
from imputer.audio.alteration import SPEEDS
from imputer.corpora import CORPORA, Dropped, Found, Options
from imputer.data.manifest import Manifest, Utterance, write


@pytest.fixture
def manifest(tmp_path):
    time = np.arange(16_000) / 16_000
    utterances = []
    for number in range(4):
        audio.write(tmp_path / f"{number}.wav", 0.3 * np.sin(2 * np.pi * 300 * (number + 1) * time))
        utterances.append(Utterance(f"u{number}", f"{tmp_path}/{number}.wav", 1.0, f"word {number}", "ann"))
    write(tmp_path / "manifest.jsonl", utterances)
    return tmp_path / "manifest.jsonl"


def copies(manifest, folder, seed=1):
    return list(CORPORA["altered"](manifest, Options(audio_folder=folder, seed=seed)))


def test_copies_keep_the_words_and_change_the_sound(tmp_path, manifest):
    found = copies(manifest, tmp_path / "copies-audio")
    for copy, original in zip(found, Manifest(manifest), strict=True):
        utterance = copy.utterance
        assert (utterance.text, utterance.speaker) == (original.text, original.speaker)
        assert utterance.id == f"{original.id}-altered-1"
        assert 1 / SPEEDS[1] - 0.01 < utterance.duration < 1 / SPEEDS[0] + 0.01
        samples = audio.read(utterance.audio_filepath)
        assert len(samples) == round(utterance.duration * 16_000)
        assert 0.001 < np.abs(samples).max() <= 1.0


def test_the_same_seed_makes_the_same_copies_and_another_others(tmp_path, manifest):
    first, again, other = (
        [audio.read(found.utterance.audio_filepath) for found in copies(manifest, tmp_path / name, seed)]
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(len(a) == len(c) and np.array_equal(a, c) for a, c in zip(first, other, strict=True))


def test_a_file_that_cannot_be_read_is_dropped_and_the_rest_made(tmp_path, manifest):
    (tmp_path / "2.wav").write_bytes(b"no sound")
    found = copies(manifest, tmp_path / "copies-audio")
    assert [type(item) for item in found] == [Found, Found, Dropped, Found]
    assert "2.wav" in found[2].item


def test_a_folder_used_again_for_something_else_is_not_mixed_up(tmp_path, manifest):
    first, other = (copies(manifest, tmp_path / "copies-audio", seed) for seed in (1, 2))
    files = [{found.utterance.audio_filepath for found in some} for some in (first, other)]
    assert len(files[0]) == 4 and not files[0] & files[1]
