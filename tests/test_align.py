"""`imputer align`: word times of a known text, in every format, for recordings of any length."""

import json
import resource
import shutil
import subprocess
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from imputer import alignments, rollin
from imputer.aligner import recording as aligner
from imputer.aligner import written_text
from imputer.data import manifest
from imputer.data.manifest import Manifest, Utterance
from imputer.data.recordings import open_recording
from imputer.errors import ImputerError
from imputer.recognizer import Recognizer
from imputer.transcripts import Word
from imputer.vocabulary import Vocabulary
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


def test_a_word_that_is_not_said_has_no_confidence(utterance: Utterance, expert: Path) -> None:
    """Calibrated, half of the words that the model is least sure of are right; a text that is given may be wrong."""
    recognizer = Recognizer.from_pretrained(expert)
    calibrated = replace(recognizer.model.settings, confidence=((0.0, 0.5), (1.0, 1.0)))
    recognizer.model.settings = calibrated
    said = utterance.text.split()
    wrong = [next(word for word in said if word != said[0]), *said[1:]]
    found = aligner.align(recognizer, utterance.audio_filepath, " ".join(wrong)).words
    assert found[0].confidence < 0.3 < max(word.confidence for word in found[1:])


@pytest.mark.parametrize("form", ["json", "ctm", "textgrid", "srt", "vtt", "txt"])
def test_every_format_names_every_word(utterance: Utterance, expert: Path, tmp_path: Path, form: str) -> None:
    path = tmp_path / f"out.{form}"
    (tmp_path / "text.txt").write_text(utterance.text.upper() + ".\n")  # as people write it
    imputer(
        *("align", utterance.audio_filepath, str(tmp_path / "text.txt"), "--model", str(expert)),
        *("--format", form, "--output", str(path)),
    )
    written = path.read_text()
    assert all(word in written for word in f"{utterance.text.upper()}.".split())


def test_windows_give_the_posteriors_of_the_whole(utterance: Utterance, expert: Path) -> None:
    """Where the context covers what the network can see of the edges, windows differ little from one piece."""
    recognizer = Recognizer.from_pretrained(expert)
    samples, _ = soundfile.read(utterance.audio_filepath, dtype="float32")
    with ExitStack() as stack:
        sound = open_recording(np.tile(samples, 4), stack, None, recognizer.sample_rate)
    whole = aligner.posteriors(recognizer, sound, window=1000.0)
    pieces = aligner.posteriors(recognizer, sound, window=3.0, overlap=2.0)
    assert pieces.shape == whole.shape
    assert (pieces.argmax(-1) == whole.argmax(-1)).float().mean() > 0.9


def test_a_recording_is_aligned_in_the_windows_of_its_model(utterance: Utterance, expert: Path) -> None:
    recognizer = Recognizer.from_pretrained(expert)
    settings = replace(recognizer.model.settings, window_seconds=2.0)
    lengths: list[float] = []
    samples, _ = soundfile.read(utterance.audio_filepath, dtype="float32")
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setattr(recognizer.model, "settings", settings)
        sound = open_recording(np.tile(samples, 3), stack, None, recognizer.sample_rate)
        read = sound.samples
        watched = replace(sound, samples=lambda *span: lengths.append(span[1]) or read(*span))
        found = aligner.posteriors(recognizer, watched)
    assert max(lengths) <= 2.0 and len(lengths) > 1
    assert len(found) == pytest.approx(sound.seconds / recognizer.frame_seconds, abs=1)


def test_the_text_comes_back_as_it_was_written(utterance: Utterance, expert: Path, tmp_path: Path) -> None:
    words = utterance.text.split()
    text = f'— "{words[0].upper()},"  § {" ".join(words[1:-1])}\n({words[-1].capitalize()}!) …'
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    rest = ("align", utterance.audio_filepath, str(tmp_path / "text.txt"), "--model", str(expert))
    found = json.loads(imputer(*rest).stdout)
    assert found["text"] == " ".join(text.split())
    assert [word["text"] for word in found["words"]] == [
        f'— "{words[0].upper()}," §',
        *words[1:-1],
        f"({words[-1].capitalize()}!) …",
    ]
    plain = json.loads(aligned(utterance, expert))
    assert [word["start"] for word in found["words"]] == [word["start"] for word in plain["words"]]
    for form in ("srt", "vtt", "textgrid", "ctm"):
        written = imputer(*rest, "--format", form).stdout
        assert words[0].upper() in written and f"{words[-1].capitalize()}!" in written
    line = imputer(*rest, "--format", "ctm").stdout.splitlines()[0].split()
    assert len(line) == 6 and line[4] == f'—_"{words[0].upper()},"_§'


def test_numbers_and_titles_are_read_as_they_are_said() -> None:
    vocabulary = Vocabulary.train(
        ["the quick brown fox jumps over a lazy dog mister twenty first's"] * 20, size=60
    )
    found = written_text.read("Mr. Fox (21st!) paid 7.50€ for Æ — café", vocabulary)
    assert found.words == ["Mr.", "Fox", "(21st!)", "paid", "7.50€", "for", "Æ", "—", "café"]
    assert found.readings == [
        ["mister"],
        ["fox"],
        ["twenty", "first"],
        ["paid"],
        [],
        ["for"],
        [],
        [],
        ["cafe"],
    ]
    percent = Vocabulary.train(["seven percent"] * 20, size=0, units="characters")
    assert written_text.read("7 % 7%", percent).readings == [["seven"], ["percent"], ["seven", "percent"]]
    times = [Word(word, n, n + 0.5, 1 - n / 10) for n, word in enumerate(found.readable.split())]
    assert [(word.text, word.start, word.end) for word in found.timed(times)] == [
        ("Mr.", 0, 0.5),
        ("Fox", 1, 1.5),
        ("(21st!)", 2, 3.5),
        ("paid 7.50€", 4, 4.5),
        ("for Æ —", 5, 5.5),
        ("café", 6, 6.5),
    ]


def test_a_folder_and_a_table_give_one_file_for_each_recording(
    corpus: str, expert: Path, tmp_path: Path
) -> None:
    source = tmp_path / "in"
    source.mkdir()
    few = sorted(Manifest(corpus), key=lambda utterance: utterance.duration)[-2:]
    for name, utterance in zip("ab", few, strict=True):
        shutil.copy(utterance.audio_filepath, source / f"{name}{Path(utterance.audio_filepath).suffix}")
        (source / f"{name}.txt").write_text(utterance.text.upper() + "!")
    (source / "broken.wav").write_bytes(b"RIFF")
    (source / "broken.txt").write_text("abc")
    rest = ("--model", str(expert), "--device", "cpu", "--format", "srt", "-o")
    said = imputer("align", str(source), *rest, str(tmp_path / "out"), check=False)
    assert said.returncode == 1 and "broken.wav" in said.stderr and "Traceback" not in said.stderr
    assert "2 of 3 recordings aligned" in said.stdout
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["a.srt", "b.srt"]
    for name, utterance in zip("ab", few, strict=True):
        cues = (tmp_path / "out" / f"{name}.srt").read_text().replace("\n", " ")
        assert all(word in cues for word in (utterance.text.upper() + "!").split())
    table = tmp_path / "table.csv"
    endings = [Path(utterance.audio_filepath).suffix for utterance in few]
    rows = [f'in/{name}{end},"{u.text}."' for name, end, u in zip("ab", endings, few, strict=True)]
    table.write_text("\n".join(["file,text", *rows]))
    imputer("align", str(table), "--model", str(expert), "-o", str(tmp_path / "times"))
    assert len(list((tmp_path / "times").glob("*.json"))) == 2
    for words in ([], ["-o", str(tmp_path / "new.srt")]):
        said = imputer("align", str(source), "--model", str(expert), *words, check=False)
        assert said.returncode == 2 and "--output FOLDER" in said.stderr
    said = imputer(
        "align", str(source), "--model", str(expert), "--format", "txt", "-o", str(source), check=False
    )
    assert said.returncode == 2 and "a.txt exists already, beside" in said.stderr


def test_two_recordings_of_one_name_are_refused(corpus: str, expert: Path, tmp_path: Path) -> None:
    """x-a.wav beside x/a.wav, and a row of a table that comes twice: one result would overwrite the other."""
    recording = Path(next(iter(Manifest(corpus))).audio_filepath)
    source = tmp_path / "in"
    for stem in (source / "x-a", source / "x" / "a"):
        stem.parent.mkdir(exist_ok=True)
        shutil.copy(recording, stem.with_suffix(recording.suffix))
        stem.with_suffix(".txt").write_text("ba")
    table = tmp_path / "twice.csv"
    table.write_text(f"file,text\n{recording},ba\n{recording},lu\n")
    for place in (source, table):
        said = imputer("align", str(place), "--model", str(expert), "-o", str(tmp_path / "out"), check=False)
        assert said.returncode == 2 and "would both be written to" in said.stderr
        assert not (tmp_path / "out").exists()


def test_a_manifest_gives_one_file_for_each_utterance(corpus: str, expert: Path, tmp_path: Path) -> None:
    """Named by its id, which may hold what a file name may not."""
    few = sorted(Manifest(corpus), key=lambda utterance: utterance.duration)[-3:]
    names = ["../a/1", "b\0 c", "d"]
    texts = [few[0].text.upper() + "!", few[1].text.capitalize() + ".", "?"]
    manifest.write(
        tmp_path / "in.jsonl",
        [replace(u, id=name, text=text) for u, name, text in zip(few, names, texts, strict=True)],
    )
    with (tmp_path / "in.jsonl").open("a") as file:
        file.write('{"id": "e"}\n')
    rest = (
        str(tmp_path / "in.jsonl"),
        "--model",
        str(expert),
        "--format",
        "ctm",
        "-o",
        str(tmp_path / "out"),
    )
    said = imputer("align", *rest, check=False)
    assert said.returncode == 1 and "2 of 4 recordings aligned" in said.stdout, said.stderr
    assert "no word that the model can read: ?" in said.stderr and "line 4: the key" in said.stderr
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["---a-1.ctm", "b- c.ctm"]
    for path, text in zip(sorted((tmp_path / "out").iterdir()), texts, strict=False):
        assert [line.split()[4] for line in path.read_text().splitlines()] == text.split()


def test_output_of_one_recording_may_be_a_folder(utterance: Utterance, expert: Path, tmp_path: Path) -> None:
    recording = tmp_path / f"a{Path(utterance.audio_filepath).suffix}"
    shutil.copy(utterance.audio_filepath, recording)
    (tmp_path / "a.txt").write_text(utterance.text.upper())
    given = ("align", str(recording), str(tmp_path / "a.txt"), "--model", str(expert), "-o")
    imputer(*given, f"{tmp_path}/new/")
    imputer(*given, str(tmp_path / "new"), "--format", "textgrid")
    imputer(*given, str(tmp_path / "other"), "--format", "srt")
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["a.TextGrid", "a.json"]
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["a.srt"]
    said = imputer(*given, str(tmp_path), "--format", "txt", check=False)
    assert said.returncode == 2 and "is also the input" in said.stderr
    assert (tmp_path / "a.txt").read_text() == utterance.text.upper()


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
        (["AUDIO", "no.txt"], 2, "cannot read the text no.txt: No such file or directory\n"),
        (["AUDIO", "AUDIO"], 2, "is not UTF-8 text; the recording comes first, then its text"),
        (["AUDIO", "no.txt", "--text", "abc"], 2, "give the text once: either the file no.txt or --text"),
        (["AUDIO", "--text", "abc", "--format", "json", "-o", "AUDIO"], 2, "is also the input"),
        (["AUDIO", "--text", "abc", "-o", ""], 2, "--output is empty"),
        (["AUDIO", "--text", "..."], 2, "no word that the model can read: ..."),
        (["AUDIO", "--text", "xyz"], 2, "no word that the model can read: xyz"),
        (["AUDIO", "--text", "abdgilmou " * 40], 1, "tokens, but the recording holds only"),
        (["AUDIO", "--text", "abc", "-o", "AUDIO/x.json"], 2, "is not a directory"),
        (["--manifest", "m.jsonl"], 2, "--manifest and --store together"),
        (
            ["--manifest", "m.jsonl", "--store", "s", "--workers", "-1"],
            2,
            "--workers must be 0 or more, got -1",
        ),
        (["--manifest", "m.jsonl", "--store", "s", "--batch-seconds", "0"], 2, "above 0, got 0"),
        (["--manifest", "m.jsonl", "--store", "s", "--batch-seconds", "nan"], 2, "above 0, got nan"),
        (["--manifest", "m.jsonl", "--store", "AUDIO/s"], 2, "is not a directory"),
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
    manifest.write(tmp_path / "m.jsonl", [Utterance(name, f"{name}.wav", 1.0, "bada") for name in "ab"])
    store = tmp_path / "store"
    words = ("--manifest", str(tmp_path / "m.jsonl"), "--model", str(expert), "--store", str(store))
    said = imputer("align", *words, check=False)
    assert said.returncode == 1 and "none of 2 utterances could be aligned; the first: " in said.stderr
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
