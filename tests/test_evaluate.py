"""`imputer evaluate` and what it counts, against jiwer on the same texts."""

import json
import shutil
from functools import partial

import jiwer
import numpy as np
import pytest
import soundfile

import tones
from imputer import evaluation, models
from imputer.data import manifest
from imputer.data.manifest import Utterance
from imputer.decoding import Options
from imputer.evaluation.reporting import side_by_side
from imputer.recognizer import Recognizer
from trainings import call


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Models ``good`` and ``bad`` (the same, its output disturbed), and a manifest with some wrong texts."""
    place = tmp_path_factory.mktemp("evaluate")
    tones.save(place / "good")
    bad, vocabulary = models.load(place / "good")
    bad.output.bias.data[vocabulary.encode("lu")[0]] += 9.0
    models.save(place / "bad", bad, vocabulary)
    random = np.random.default_rng(4)
    lines = []
    for number in range(24):
        text = tones.sentence(random, int(random.integers(1, 7)))
        samples = tones.speak(text, 800 + number)[0]
        soundfile.write(place / f"{number}.flac", samples, tones.RATE)
        if number % 8 == 0:
            text += " lu"  # the reference says more than the recording
        lines.append(
            Utterance(f"utt-{number}", str(place / f"{number}.flac"), len(samples) / tones.RATE, text)
        )
    manifest.write(place / "test.jsonl", lines)
    return place


@pytest.fixture
def run():
    return partial(call, "evaluate")


def test_counts_are_those_of_jiwer(place):
    utterances = list(manifest.Manifest(place / "test.jsonl"))
    seconds = []
    result = evaluation.evaluate(
        Recognizer.from_pretrained(place / "good"),
        utterances,
        Options(4),
        name="good",
        advance=seconds.append,
    )
    assert [one.id for one in result.utterances] == [u.id for u in utterances]
    references, hypotheses = zip(*((one.reference, one.hypothesis) for one in result.utterances), strict=True)
    assert result.wer.value == pytest.approx(jiwer.wer(list(references), list(hypotheses)))
    assert result.cer.value == pytest.approx(jiwer.cer(list(references), list(hypotheses)))
    assert result.wer.low <= result.wer.value <= result.wer.high and result.wer.value > 0
    assert sum(one.words.deletions for one in result.utterances) == 3  # the three words that were never said
    assert result.passes == 4 and result.block_size == 4 and 0 < result.real_time_factor < 10
    assert sum(seconds) == pytest.approx(sum(u.duration for u in utterances), abs=0.01)
    assert {one.id for one in result.worst(3)} == {"utt-0", "utt-8", "utt-16"}
    assert result.worst(99) == [one for one in result.worst(99) if one.words.total]


def test_table_worst_and_json(run, place, tmp_path):
    path = tmp_path / "scores.json"
    code, out, err = run(
        place / "test.jsonl", "--model", place / "good", "--block-size", 1, 4,
        "--strategy", "block", "adaptive", "--json", path,
    )  # fmt: skip
    assert (code, err) == (0, "")
    shown = " ".join(out.split())  # a long path wraps the title
    assert "WER %" in shown and "RTF" in shown and "24 utterances" in shown
    assert "errors 1, words" in out and "hypothesis  " in out and "**" in out
    content = json.loads(path.read_text())
    rows = content["evaluations"]
    assert [(r["strategy"], r["block_size"]) for r in rows] == [
        ("block", 1), ("block", 4), ("adaptive", 1), ("adaptive", 4),
    ]  # fmt: skip
    assert len(rows[0]["utterances"]) == 24 and rows[0]["passes"] == 1 and rows[3]["passes"] < 4
    for row in rows:
        assert row["wer"]["value"] == pytest.approx(
            sum(row["words"][k] for k in ("substitutions", "deletions", "insertions"))
            / row["words"]["length"]
        )
        assert f"{100 * row['wer']['value']:.2f}" in out


def test_two_models_are_compared_in_pairs(run, place, tmp_path):
    path = tmp_path / "scores.json"
    code, out, _ = run(
        place / "test.jsonl", "--model", place / "good", "--compare", place / "bad", "--json", path
    )
    (comparison,) = json.loads(path.read_text())["comparisons"]
    assert code == 0 and "points of WER" in out and ", significant" in out
    assert comparison["difference"]["low"] > 0 and comparison["p_value"] < 0.05
    code, out, _ = run(place / "test.jsonl", "--model", place / "good", "--compare", place / "good")
    assert "p = 1.0000, not significant" in out


def test_compared_models_are_named_by_their_folders(run, place, tmp_path, monkeypatch):
    for name in ("runs/first/model", "runs/second/model"):
        shutil.copytree(place / "good", tmp_path / name)
    models = ("--model", tmp_path / "runs/first/model", "--compare", tmp_path / "runs/second/model")
    code, out, _ = run(place / "test.jsonl", *models, "--limit", 2)
    assert code == 0 and "\nsecond against first (block" in out
    assert [line.split()[0] for line in out.splitlines() if " block " in line] == ["first", "second"]
    monkeypatch.chdir(tmp_path / "runs/first/model")
    code, out, _ = run(place / "test.jsonl", "--model", ".", "--compare", "../../second/model", "--limit", 2)
    assert code == 0 and "\nsecond against first (block" in out


def test_a_limit_is_spread_over_the_manifest(place):
    utterances = manifest.Manifest(place / "test.jsonl")
    assert [u.id for u in evaluation.spread(utterances, 4)] == ["utt-0", "utt-6", "utt-12", "utt-18"]
    assert len(evaluation.spread(utterances, None)) == len(evaluation.spread(utterances, 999)) == 24


def test_unreadable_recordings_are_told_and_the_others_scored(run, place, tmp_path):
    lines = [Utterance("fine", str(place / "1.flac"), 1.0, "ba"), Utterance("gone", "gone.wav", 1.0, "ba")]
    manifest.write(tmp_path / "m.jsonl", lines)
    code, out, err = run(tmp_path / "m.jsonl", "--model", place / "good")
    assert code == 1 and ": 1 utterance " in " ".join(out.split()) and "gone.wav: no such file" in err


def test_nothing_is_scored_where_nothing_can_be_read(run, place, tmp_path):
    manifest.write(tmp_path / "m.jsonl", [Utterance(name, f"{name}.wav", 1.0, "ba") for name in "ab"])
    path = tmp_path / "scores.json"
    models = ("--model", place / "good", "--compare", place / "bad")
    code, out, err = run(tmp_path / "m.jsonl", *models, "--json", path)
    assert (code, out) == (1, "") and "none of 2 recordings could be read" in err and "a.wav" in err
    assert len(err.splitlines()) == 1 and not path.exists()


def test_everything_is_there_before_anything_is_scored(run, place, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluation, "evaluate", lambda *_, **__: pytest.fail("scored too early"))
    test, good = place / "test.jsonl", place / "good"
    for arguments, message in {
        ("--compare", "nowhere"): "no model folder nowhere",
        ("--beside", tmp_path): "is not a model folder",
        ("--json", test / "scores.json"): f"cannot write {test / 'scores.json'}",
        ("--json", tmp_path): "it is a directory",
        ("--device", "nowhere"): "device 'nowhere'",
    }.items():
        code, out, err = run(test, "--model", good, *arguments)
        assert (code, out) == (2, "") and message in err and len(err.splitlines()) == 1, err


def test_letters_the_model_does_not_know_are_told(run, place, tmp_path):
    manifest.write(tmp_path / "m.jsonl", [Utterance("a", str(place / "1.flac"), 1.0, "BA lu")])
    _, _, err = run(tmp_path / "m.jsonl", "--model", place / "good")
    assert "not in the model's vocabulary: AB" in err


def test_the_callers_mistakes(run, place, tmp_path):
    silent = tmp_path / "m.jsonl"
    manifest.write(silent, [Utterance("a", str(place / "1.flac"), 1.0, "")])
    test = place / "test.jsonl"
    for arguments, message in {
        (tmp_path / "gone.jsonl", "--model", place / "good"): "gone.jsonl",
        (test, "--model", "nowhere"): "no model folder nowhere",
        (test, "--model", place / "good", "--block-size", 0): "block size",
        (test, "--model", place / "good", "--limit", 0): "--limit",
        (test, "--model", "none", "--reliability", "x.doc"): "--reliability x.doc: a picture ends in",
        (silent, "--model", place / "good"): "no texts to score",
    }.items():
        code, out, err = run(*arguments)
        assert (code, out) == (2, "") and message in err and len(err.splitlines()) == 1, err


def test_words_stand_under_words():
    rows = [("equal", "the", "the"), ("replace", "cat", "cart"), ("insert", "", "on"), ("delete", "mats", "")]
    assert side_by_side(rows, 80) == [("the CAT  ** MATS", "the CART ON ****")]
    assert side_by_side(rows, 10) == [("the CAT", "the CART"), ("** MATS", "ON ****")]
    assert side_by_side([], 10) == []


def test_others_stand_beside_a_model(run, place):
    code, out, _ = run(
        place / "test.jsonl", "--model", place / "good", "--limit", 3, "--threads", 1,
        "--beside", place / "bad", "pocketsphinx",
    )  # fmt: skip
    assert code == 0
    rows = [line.split() for line in out.splitlines() if "beam search" in line or " block " in line]
    assert [row[0] for row in rows] == ["good", "bad", "pocketsphinx"]
    code, _, err = run(place / "test.jsonl", "--model", place / "good", "--beside", "nobody")
    assert code == 2 and "moonshine, pocketsphinx" in err
