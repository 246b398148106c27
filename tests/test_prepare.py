"""The command: what it writes, what its tables say, how it ends."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import soundfile

from imputer.data.manifest import Manifest
from imputer.vocabulary import Vocabulary
from trainings import call

pytestmark = pytest.mark.filterwarnings("ignore:Cyclopts application invoked without tokens")

RATE = 16000
Patch = pytest.MonkeyPatch


def run(monkeypatch: Patch, *words: object) -> tuple[int, str, str]:
    monkeypatch.setenv("COLUMNS", "200")
    return call(*words)


@pytest.fixture
def recordings(tmp_path: Path) -> Path:
    """Four good utterances by two speakers and one of each kind of bad."""
    folder = tmp_path / "recordings"
    random = np.random.default_rng(0)
    texts = {
        "anna/1": "One two.",
        "anna/2": "Three!",
        "bob/1": "Four, five",
        "bob/2": "It's six",
        "bob/empty": "...",
        "bob/fast": "far too many words for such a short time " * 3,
        "bob/nan": "not a number",
        "bob/cut": "cut off",
    }
    for number, (name, text) in enumerate(texts.items()):
        path = folder / f"{name}.wav"
        path.parent.mkdir(parents=True, exist_ok=True)
        samples = 0.1 * random.standard_normal(round((1.0 + 0.1 * number) * RATE))
        if name == "bob/nan":
            samples[5] = np.nan
        soundfile.write(path, samples, RATE, subtype="FLOAT")
        path.with_suffix(".txt").write_text(text)
    cut = folder / "bob/cut.wav"
    cut.write_bytes(cut.read_bytes()[:9000])
    return folder


def test_a_folder_becomes_a_manifest_and_a_table(
    recordings: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    output = tmp_path / "m.jsonl"
    code, out, _ = run(monkeypatch, "prepare", "folder", recordings, "--output", output)
    assert code == 0
    opened = Manifest(output, strict=True)
    assert [(u.id, u.text, u.speaker, round(u.duration, 3)) for u in opened] == [
        ("anna-1", "one two", "anna", 1.0),
        ("anna-2", "three", "anna", 1.1),
        ("bob-1", "four five", "bob", 1.2),
        ("bob-2", "it's six", "bob", 1.3),
    ]
    assert json.loads(output.read_text().splitlines()[0])["audio_filepath"] == "recordings/anna/1.wav"
    table = " ".join(out.split())
    for said in (
        "m.jsonl │ 4 │ 0.00 │ 2 │ 29 │ 1.0 - 1.1 - 1.3",
        "empty text │ 1 │ bob-empty",
        "longer than its frames can hold │ 1 │ bob-fast: 122 tokens, 37 frames",
        "unreadable audio │ 2 │",
        "cut.wav: the audio is cut off",
    ):
        assert said in table, said


def test_strict_stops_at_the_first_and_writes_nothing(
    recordings: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    output = tmp_path / "m.jsonl"
    code, _, err = run(monkeypatch, "prepare", "folder", recordings, "--output", output, "--strict")
    assert code == 1
    lines = err.strip().splitlines()
    assert lines[-1].startswith("imputer: ") and "cut.wav" in lines[-1] and "Traceback" not in err
    assert not output.exists() and sorted(os.listdir(tmp_path)) == ["recordings"]


def test_inspection_prints_the_same_and_a_histogram(
    recordings: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    output = tmp_path / "m.jsonl"
    run(monkeypatch, "prepare", "folder", recordings, "--output", output)
    with open(output, "a") as file:
        file.write("not json\n")
    code, out, _ = run(monkeypatch, "prepare", "--inspect", output)
    table = " ".join(out.split())
    assert code == 0
    assert "4 │ 0.00 │ 2 │ 29 │ 1.0 - 1.1 - 1.3" in table
    assert "bad line │ 1 │" in table and "m.jsonl, line 5: not JSON" in table
    assert "0 to 1 s 0" in table and f"1 to 2 s {'█' * 50} 4" in table
    code, _, err = run(monkeypatch, "prepare", "--inspect", output, "--strict")
    assert code == 1 and "line 5" in err
    code, out, _ = run(monkeypatch, "prepare", "--inspect", output, "--root", recordings / "anna")
    assert code == 0 and "bad line │ 3 │" in " ".join(out.split()) and "lies outside" in " ".join(out.split())


def test_a_tokenizer_counts_instead_of_characters(
    recordings: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    text = "far too many words for such a short time"
    Vocabulary.train([text, "one two three four five it's six cut off"] * 3, size=75).save(
        tmp_path / "t.model"
    )
    tokens = len(Vocabulary.load(tmp_path / "t.model").encode(" ".join([text] * 3)))
    assert tokens <= 37
    arguments = ("prepare", "folder", recordings, "-o", tmp_path / "m.jsonl")
    code, out, _ = run(monkeypatch, *arguments, "--tokenizer", tmp_path / "t.model")
    assert code == 0 and "bob-fast" not in out and len(Manifest(tmp_path / "m.jsonl")) == 5
    code, out, _ = run(
        monkeypatch,
        *arguments,
        "--frame-seconds",
        "0.01",
    )
    assert code == 0 and "bob-fast" not in out and len(Manifest(tmp_path / "m.jsonl")) == 5


def test_digits_write_three_manifests(tmp_path: Path, monkeypatch: Patch) -> None:
    random = np.random.default_rng(0)
    for speaker in ("jackson", "lucas", "theo", "yweweler"):
        for digit in range(10):
            path = tmp_path / "recordings" / f"{digit}_{speaker}_0.wav"
            path.parent.mkdir(exist_ok=True)
            soundfile.write(path, 0.1 * random.standard_normal(4000), 8000)
    code, out, _ = run(
        monkeypatch,
        *(
            "prepare",
            "digits",
            tmp_path / "recordings",
            "-o",
            tmp_path / "d.jsonl",
            "--strings",
            3,
            "--longest",
            4,
        ),
        *("--test-speakers", "theo", "--valid-speakers", "lucas"),
    )
    assert code == 0, out
    speakers = {}
    for split in ("train", "valid", "test"):
        opened = Manifest(tmp_path / f"d-{split}.jsonl", strict=True, root=tmp_path)
        speakers[split] = {utterance.speaker for utterance in opened}
        assert len(opened) == 3 * len(speakers[split])
        assert all(1 <= len(utterance.text.split()) <= 4 for utterance in opened)
    assert speakers == {"train": {"jackson", "yweweler"}, "valid": {"lucas"}, "test": {"theo"}}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("prepare",), "needs a corpus"),
        (("prepare", "folder", "here"), "needs a corpus"),
        (("prepare", "timit", "here", "-o", "m.jsonl"), "no corpus 'timit'; there are folder, librispeech"),
        (("prepare", "folder", "nowhere", "-o", "m.jsonl"), "nowhere: no such folder"),
        (
            ("prepare", "digits", ".", "-o", "m.jsonl", "--strings", "0"),
            "--strings must be above 0, got 0",
        ),
        (
            ("prepare", "digits", ".", "-o", "m.jsonl", "--hours", "nan"),
            "--hours must be above 0, got nan",
        ),
        (("prepare", "digits", ".", "-o", "m.jsonl", "--seed", "-1"), "--seed must be 0 or more"),
        (("prepare", "librispeech", ".", "-o", "m.jsonl", "--mirror", "nonsense"), "--mirror nonsense"),
        (("prepare", "--inspect", "nowhere.jsonl"), "nowhere.jsonl"),
        (
            ("prepare", "folder", ".", "-o", "m.jsonl", "--valid", "./m.jsonl"),
            "--valid are the same file, m.jsonl",
        ),
        (
            ("prepare", "folder", ".", "-o", "m.jsonl", "--valid", "/proc/v.jsonl"),
            "cannot write /proc/v.jsonl",
        ),
    ],
)
def test_mistakes_are_one_line_and_code_two(
    tmp_path: Path, words: tuple[str, ...], said: str, monkeypatch: Patch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = run(monkeypatch, *words)
    assert code == 2 and said in err and "Traceback" not in err
    assert len(err.strip().splitlines()) == 1
