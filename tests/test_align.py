"""`imputer align`: word times of a known text, in every format, for recordings of any length."""

import json
import resource
import subprocess
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from imputer import alignments, models, rollin
from imputer.aligner import recording as aligner
from imputer.data import manifest
from imputer.data.manifest import Manifest, Utterance
from imputer.errors import ImputerError
from trainings import imputer


@pytest.fixture(scope="module")
def utterance(corpus: str) -> Utterance:
    return max(Manifest(corpus), key=lambda utterance: len(utterance.text))


def aligned(utterance: Utterance, expert: Path, *more: str) -> str:
    return imputer(
        "align", utterance.audio_filepath, "--text", utterance.text, "--model", str(expert), *more
    ).stdout


def test_words_have_times_in_order_and_within_the_recording(utterance: Utterance, expert: Path) -> None:
    found = json.loads(aligned(utterance, expert))
    assert [word["text"] for word in found["words"]] == utterance.text.split()
    times = [time for word in found["words"] for time in (word["start"], word["end"])]
    assert times == sorted(times)
    assert 0 <= times[0] < times[-1] <= utterance.duration + 1e-6
    assert all(0 < word["confidence"] <= 1 for word in found["words"])


def test_times_are_those_of_the_sound(utterance: Utterance, expert: Path, tmp_path: Path) -> None:
    """What is said again after a pause is found again, later by as much."""
    sound, rate = soundfile.read(utterance.audio_filepath, dtype="float32")
    pause = np.random.default_rng(3).normal(0, 0.01, rate // 4).astype(np.float32)
    soundfile.write(tmp_path / "x.wav", np.concatenate((sound, pause, sound)), rate)
    text = f"{utterance.text} {utterance.text}"
    said = imputer("align", str(tmp_path / "x.wav"), "--text", text, "--model", str(expert))
    words = json.loads(said.stdout)["words"]
    half = len(words) // 2
    later = [
        second["start"] - first["start"] for first, second in zip(words[:half], words[half:], strict=True)
    ]
    assert later == pytest.approx([(len(sound) + len(pause)) / rate] * half, abs=0.1)


@pytest.mark.parametrize("form", ["json", "ctm", "textgrid", "srt", "vtt", "txt"])
def test_every_format_names_every_word(utterance: Utterance, expert: Path, tmp_path: Path, form: str) -> None:
    path = tmp_path / f"out.{form}"
    (tmp_path / "text.txt").write_text(utterance.text.upper() + ".\n")  # as people write it
    imputer(
        *("align", utterance.audio_filepath, str(tmp_path / "text.txt"), "--model", str(expert)),
        *("--format", form, "--output", str(path)),
    )
    written = path.read_text()
    assert all(word in written for word in utterance.text.split())


def test_windows_give_the_posteriors_of_the_whole(utterance: Utterance, expert: Path) -> None:
    """Where the context covers what the network can see of the edges, windows differ little from one piece."""
    network, _ = models.load(expert)
    samples, _ = soundfile.read(utterance.audio_filepath, dtype="float32")
    sound = torch.from_numpy(np.tile(samples, 4))

    def read(start: int, stop: int) -> torch.Tensor:
        assert 0 <= start < stop <= len(sound)  # a file has no more
        return sound[start:stop]

    whole = aligner.posteriors(network, read, len(sound), window_seconds=1000)
    pieces = aligner.posteriors(network, read, len(sound), window_seconds=1.0, context_seconds=1.0)
    assert pieces.shape == whole.shape
    assert (pieces.argmax(-1) == whole.argmax(-1)).float().mean() > 0.9


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    frames=st.integers(2, 40),
    tokens=st.integers(1, 30),
    cells=st.integers(1, 200),
    merge=st.booleans(),
    forbidden=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
)
def test_a_long_recording_is_aligned_exactly_in_chunks(
    seed: int, frames: int, tokens: int, cells: int, merge: bool, forbidden: float
) -> None:
    """In bounded memory the result is the best alignment of the text, even where its probability is 0."""
    generator = torch.Generator().manual_seed(seed)
    log_probs = torch.randn(frames, 4, generator=generator).log_softmax(-1)
    log_probs[torch.rand(frames, 4, generator=generator) < forbidden] = -torch.inf
    target = torch.randint(1, 4, (tokens,), generator=generator)
    lengths = torch.tensor([frames]), torch.tensor([tokens])
    assume(bool(alignments.feasible(target[None], *lengths, merge_repeats=merge)))
    found, score = aligner.align_recording(log_probs, target.tolist(), merge_repeats=merge, most_cells=cells)
    best, best_score = alignments.best_alignment(log_probs[None], target[None], *lengths, merge_repeats=merge)
    assert score == pytest.approx(float(best_score[0]), rel=1e-5)
    assert alignments.collapse(found, merge_repeats=merge) == target.tolist()
    assert found == best[0].tolist()


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["no.wav", "--text", "abc"], 2, "no.wav: no such file"),
        (["AUDIO"], 2, "give a recording and its text"),
        (["AUDIO", "no.txt"], 2, "cannot read the text no.txt"),
        (["AUDIO", "--text", "..."], 2, "the text is empty"),
        (["AUDIO", "--text", "xyz"], 1, "x"),
        (["AUDIO", "--text", "abcdefgh " * 40], 1, "tokens, but the recording holds only"),
        (["AUDIO", "--text", "abc", "-o", "AUDIO/x.json"], 2, "is no folder"),
        (["--manifest", "m.jsonl"], 2, "--manifest and --store together"),
        (
            ["--manifest", "m.jsonl", "--store", "s", "--workers", "-1"],
            2,
            "--workers must be 0 or more, got -1",
        ),
        (["--manifest", "m.jsonl", "--store", "s", "--batch-seconds", "0"], 2, "above 0, got 0"),
        (["--manifest", "m.jsonl", "--store", "s", "--batch-seconds", "nan"], 2, "above 0, got nan"),
        (["--manifest", "m.jsonl", "--store", "AUDIO/s"], 2, "is no folder"),
    ],
)
def test_mistakes_are_one_line(
    utterance: Utterance, expert: Path, words: list[str], code: int, says: str
) -> None:
    words = [word.replace("AUDIO", utterance.audio_filepath) for word in words]
    said: subprocess.CompletedProcess[str] = imputer("align", *words, "--model", str(expert), check=False)
    assert (said.returncode, says in said.stderr) == (code, True), said.stderr
    assert "Traceback" not in said.stderr


def test_several_manifests_go_into_one_store(corpus: str, expert: Path, tmp_path: Path) -> None:
    utterances = list(Manifest(corpus))
    paths = [str(tmp_path / "one.jsonl"), str(tmp_path / "two.jsonl")]
    manifest.write(paths[0], utterances[:3])
    manifest.write(paths[1], utterances[3:])
    store = tmp_path / "both.alignments"
    rest = ("--model", str(expert), "--store", str(store))
    said = imputer("align", "--manifest", *paths, *rest).stdout
    assert f"{len(utterances)} of {len(utterances)} utterances aligned" in said
    assert sorted(rollin.AlignmentStore(store).names) == sorted(utterance.id for utterance in utterances)
    twice = imputer("align", "--manifest", paths[0], paths[0], *rest, check=False)
    assert (
        twice.returncode == 2
        and f"{utterances[0].id!r} is in {paths[0]} and again in {paths[0]}" in twice.stderr
    )


def test_a_corpus_of_which_nothing_can_be_aligned_leaves_no_store(expert: Path, tmp_path: Path) -> None:
    manifest.write(tmp_path / "m.jsonl", [Utterance(name, f"{name}.wav", 1.0, "abc") for name in "ab"])
    store = tmp_path / "store"
    words = ("--manifest", str(tmp_path / "m.jsonl"), "--model", str(expert), "--store", str(store))
    said = imputer("align", *words, check=False)
    assert said.returncode == 1 and "of 2 utterances none could be aligned; the first: " in said.stderr
    assert ".wav" in said.stderr and len(said.stderr.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["m.jsonl"]


def test_a_recording_is_called_alike_by_align_and_transcribe(utterance: Utterance, expert: Path) -> None:
    stem = Path(utterance.audio_filepath).stem
    said = imputer("transcribe", utterance.audio_filepath, "--model", str(expert), "--format", "ctm").stdout
    found = aligned(utterance, expert, "--format", "ctm")
    assert {line.split()[0] for line in (said + found).splitlines()} == {stem}


def test_a_store_that_does_not_fit_the_disk_is_one_line(tmp_path: Path) -> None:
    """A limit on the size of files stands for a full disk; safetensors has an exception of its own for it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    provenance = rollin.Provenance("x", False, 0.04)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(ImputerError, match=f"cannot write {tmp_path / 'store'}"):
            rollin.write_alignments(tmp_path / "store", [("a", [1] * 9000)], provenance)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.iterdir())
