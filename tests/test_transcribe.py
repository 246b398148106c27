"""`imputer transcribe`, through the program's own entry."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import av
import numpy as np
import pytest
import soundfile
from rich.console import Console

import tones
from imputer import decoding, transcripts
from imputer.commands import outputs
from imputer.display import animation
from imputer.recognizer import Recognizer
from imputer.transcripts import from_alignment
from trainings import call

TEXTS = {"a.wav": "goluba midago ba lu", "b.flac": "ba ba lu", "c.ogg": "midago"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(tones.save(tmp_path_factory.mktemp("model")))


@pytest.fixture
def folder(tmp_path):
    place = tmp_path / "recordings"
    (place / "inner").mkdir(parents=True)
    for number, (name, text) in enumerate(TEXTS.items()):
        where = place / "inner" if name == "c.ogg" else place
        soundfile.write(where / name, tones.speak(text, 600 + number)[0], tones.RATE)
    (place / "notes.txt").write_text("no audio")
    return place


@pytest.fixture
def run(monkeypatch):
    def transcribe(*arguments, stdin=b""):
        stream = io.BytesIO(stdin)
        stream.name = "<stdin>"
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(stream))
        return call("transcribe", *arguments)

    return transcribe


def test_one_file_prints_its_words_and_nothing_else(run, model, folder):
    assert run(folder / "a.wav", "--model", model) == (0, TEXTS["a.wav"] + "\n", "")


def test_folders_are_searched_and_files_named_in_order(run, model, folder):
    code, out, _ = run(folder, "--model", model)
    paths = [folder / "a.wav", folder / "b.flac", folder / "inner" / "c.ogg"]
    assert code == 0
    assert out.splitlines() == [f"{p}: {t}" for p, t in zip(paths, TEXTS.values(), strict=True)]


def test_standard_input(run, model, folder):
    content = (folder / "b.flac").read_bytes()
    assert run("-", "--model", model, stdin=content)[:2] == (0, TEXTS["b.flac"] + "\n")
    code, _, err = run("-", "--model", model, stdin=b"")
    assert code == 1 and "standard input" in err and "empty" in err


@pytest.mark.parametrize("format", list(transcripts.FORMATS))
def test_every_format_to_a_folder_and_a_file(run, model, folder, tmp_path, format):
    out = tmp_path / "out"
    code, printed, _ = run(folder, "--model", model, "--format", format, "--output", out)
    ending = "TextGrid" if format == "textgrid" else format
    assert (code, printed) == (0, "")
    written = sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file())
    assert written == [f"{name}.{ending}" for name in ("a", "b", "inner/c")]
    assert "midago" in (out / f"inner/c.{ending}").read_text().replace("\n", " ")
    single, named = tmp_path / "single.out", tmp_path / f"single.{ending}"
    assert run(folder / "a.wav", "--model", model, "--format", format, "-o", single)[0] == 0
    assert run(folder / "a.wav", "--model", model, "-o", named)[0] == 0, "the ending decides the format"
    assert single.read_text() == named.read_text() == (out / f"a.{ending}").read_text()


def test_recordings_of_one_name_keep_apart(run, model, folder, tmp_path):
    again = folder / "inner" / "a.wav"
    soundfile.write(again, tones.speak("lu", 900)[0], tones.RATE)
    out = tmp_path / "out"
    assert run(folder, "--model", model, "-o", out)[0] == 0
    assert (out / "a.txt").read_text() == TEXTS["a.wav"] + "\n"
    assert (out / "inner" / "a.txt").read_text() == "lu\n"
    other = tmp_path / "other"
    code, _, err = run(folder / "a.wav", again, "--model", model, "-o", other)
    assert code == 2 and f"{folder / 'a.wav'} and {again} would both be written" in err
    assert not other.exists()


def test_recordings_that_differ_by_their_ending_are_named(run, model, folder, tmp_path):
    soundfile.write(folder / "a.flac", tones.speak("lu", 900)[0], tones.RATE)
    code, _, err = run(folder, "--model", model, "-o", tmp_path / "out")
    assert code == 2 and f"{folder / 'a.flac'} and {folder / 'a.wav'} would both be written to" in err


def test_every_audio_file_of_a_folder_is_read_or_reported(run, model, folder):
    broken = [folder / f"broken.{ending}" for ending in ("aac", "raw", "wmv")]
    for path in broken:
        path.write_bytes(b"not audio")
    code, out, err = run(folder, "--model", model)
    assert code == 1 and TEXTS["a.wav"] in out and all(str(path) in err for path in broken)


def test_what_output_names(run, model, folder, tmp_path):
    """A slash at its end makes a folder of any name, and a file that is there stays a file."""
    wav = folder / "a.wav"
    assert run(wav, "--model", model, "-o", f"{tmp_path / 'x.dir'}/")[0] == 0
    assert (tmp_path / "x.dir" / "a.txt").read_text() == TEXTS["a.wav"] + "\n"
    plain = tmp_path / "transcript"
    plain.write_text("old")
    assert run(wav, "--model", model, "-o", plain)[0] == 0
    assert plain.read_text() == TEXTS["a.wav"] + "\n"
    for below in (f"{plain}/x.txt", f"{plain}/", f"{plain}/x/y.txt"):
        code, out, err = run(wav, "--model", model, "-o", below)
        assert (code, out) == (2, "") and f"cannot write {plain}" in err and len(err.splitlines()) == 1, err


def test_a_recording_is_not_written_over(run, model, folder):
    before = (folder / "a.wav").read_bytes()
    code, _, err = run(folder / "a.wav", "--model", model, "-o", folder / "a.wav")
    assert code == 2 and "is the recording itself" in err and (folder / "a.wav").read_bytes() == before


def test_the_text_of_a_recording_is_not_written_over(run, model, folder):
    (folder / "a.txt").write_text("what is said")
    code, _, err = run(folder, "-o", folder, "--model", model)
    assert code == 2 and f"{folder / 'a.txt'} exists already, beside {folder / 'a.wav'}" in err
    assert run(folder / "a.wav", "-o", folder, "--model", model)[0] == 2
    assert (folder / "a.txt").read_text() == "what is said"
    assert run(folder, "-o", folder, "--model", model, "--format", "srt")[0] == 0
    assert run(folder / "a.wav", "-o", folder / "a.txt", "--model", model)[0] == 0  # asked for by name


def test_a_link_to_nowhere_in_a_folder_is_named(run, model, folder):
    (folder / "lost.wav").symlink_to("nowhere.wav")
    code, out, err = run(folder, "--model", model)
    assert code == 2 and "lost.wav: no such file" in err and len(out.splitlines()) == 3


def test_a_pipe_in_a_folder_is_left_out(run, model, folder):
    os.mkfifo(folder / "pipe.wav")  # without a writer: reading it would wait for ever
    code, out, err = run(folder, "--model", model)
    assert code == 0 and "pipe.wav: left out" in err and len(out.splitlines()) == 3


def test_a_name_that_the_system_refuses_is_one_line(run, model, folder):
    code, _, err = run(folder / "a.wav", "-o", "n" * 300 + ".txt", "--model", model)
    assert code and "File name too long" in err and "Traceback" not in err


def test_an_interruption_is_said(run, model, folder, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(Recognizer, "each", interrupt)
    code, _, err = run(folder, "--model", model)
    assert code == 130 and err.endswith("imputer: interrupted\n")


def test_standard_output_on_a_full_disk(model, folder):
    words = [sys.executable, "-m", "imputer", "transcribe", str(folder / "a.wav"), "--model", model]
    with open("/dev/full", "w") as full:
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr == "imputer: cannot write to standard output: No space left on device\n"


def test_json_lines_hold_times(run, model, folder):
    _, out, _ = run(
        folder / "a.wav", folder / "b.flac", "--model", model, "--format", "json", "--block-size", 4
    )
    first, second = map(json.loads, out.splitlines())
    assert first["text"] == TEXTS["a.wav"] and first["passes"] == 4 and second["name"].endswith("b.flac")
    assert [w["text"] for w in second["words"]] == ["ba", "ba", "lu"]
    assert all(
        0 <= w["start"] < w["end"] <= second["seconds"] and 0 < w["confidence"] <= 1 for w in second["words"]
    )


@pytest.mark.parametrize("strategy", list(decoding.STRATEGIES))
def test_every_strategy(run, model, folder, strategy):
    assert run(folder / "a.wav", "--model", model, "--strategy", strategy)[1] == TEXTS["a.wav"] + "\n"


def test_no_id_makes_a_file_that_folders_hide():
    assert outputs.named("..a.b", "txt") == "--a.b.txt" and outputs.named("../a", "srt") == "---a.srt"


def test_endings_name_every_format():
    assert list(outputs.ENDINGS) == [".txt", ".json", ".srt", ".vtt", ".ctm", ".TextGrid"]
    for ending, name in outputs.ENDINGS.items():
        assert outputs.format_of(Path(f"talk{ending}"), None, "txt") == name in transcripts.FORMATS


def test_a_recording_without_its_end_is_transcribed_with_one_line_of_warning(run, model, tmp_path):
    """As a browser that crashed leaves it: no length, no index, half a block at the end."""
    path = tmp_path / "talk.mkv"
    text = "goluba midago ba lu"
    samples = np.concatenate([tones.speak(text, 600)[0], tones.speak("ba ba lu", 601)[0]])
    with av.open(str(path), "w", format="matroska", options={"live": "1"}) as output:
        stream = output.add_stream("pcm_s16le", rate=tones.RATE, layout="mono")
        for start in range(0, len(samples), 1600):
            part = (32767 * samples[start : start + 1600]).astype(np.int16)[None]
            frame = av.AudioFrame.from_ndarray(part, "s16", "mono")
            frame.rate, frame.pts = tones.RATE, start
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    assert run(path, "--model", model) == (0, f"{text} ba ba lu\n", "")
    content = path.read_bytes()
    path.write_bytes(content[: int(0.8 * len(content))])
    code, out, err = run(path, "--model", model)
    assert code == 0 and out.startswith(text)
    assert err.startswith(f"imputer: {path}: the end of the audio is missing") and err.count("\n") == 1


def test_bad_files_are_named_and_the_others_transcribed(run, model, folder, tmp_path):
    empty, short, damaged = tmp_path / "empty.wav", tmp_path / "short.wav", tmp_path / "damaged.wav"
    soundfile.write(empty, np.zeros(0), tones.RATE)
    soundfile.write(short, np.zeros(99), tones.RATE)
    damaged.write_bytes(b"RIFF but not really")
    code, out, err = run(empty, folder / "a.wav", short, damaged, "--model", model)
    assert code == 1 and out == f"{folder / 'a.wav'}: {TEXTS['a.wav']}\n"
    assert [line.split(":")[1].strip() for line in err.splitlines()] == [str(empty), str(short), str(damaged)]
    assert "less than one frame" in err and "Traceback" not in err
    code, out, err = run(tmp_path / "gone.wav", folder / "a.wav", "--model", model)
    assert code == 2 and TEXTS["a.wav"] in out and err == f"imputer: {tmp_path / 'gone.wav'}: no such file\n"


def test_the_callers_mistakes(run, model, folder, tmp_path):
    wav, bare = folder / "a.wav", tmp_path / "bare"
    bare.mkdir()
    mistakes = {
        (): "nothing to transcribe",
        (wav, "--model", "nowhere"): "no model folder nowhere",
        (wav, "--model", model, "--block-size", 0): "block size must be a whole number of at least 1, got 0",
        (wav, "--model", model, "--block-size", -2): "got -2",
        (wav, "--model", model, "--overlap", 30): "overlap",
        (wav, "--model", model, "--window", "nan"): "got nan",
        (wav, "--model", model, "--window", "inf"): "got inf",
        (wav, "--model", model, "--device", "nowhere"): "device 'nowhere' cannot be used",
        (wav, "--model", model, "--runtime", "onnx", "--device", "cuda"): "runs on the CPU",
        (wav, "--model", model, "--show", "--format", "json"): "add --output",
        (wav, "--model", model, "--runtime", "onnx"): "imputer export",
        (folder, "--model", model, "--format", "srt"): "--output FOLDER",
        (wav, "--modle", model): "unknown option --modle; did you mean --model?",
        (
            wav,
            "--model",
            model,
            "--format",
            "srt",
            "-o",
            tmp_path / "x.json",
        ): f"write to {tmp_path / 'x.srt'}",
        (wav, "--model", model, "-o", tmp_path / "x.doc"): ".doc is not the ending of a format (.txt .json",
        (
            folder,
            "--model",
            model,
            "-o",
            tmp_path / "x.srt",
        ): "x.srt is a file, but 3 recordings need a folder",
        (wav, "--model", model, "--strategy", "best"): "unknown strategy 'best'; known are block",
        (wav, "--model", model, "--block-size", "many"): 'unable to convert "many"',
        (bare, "--model", model): "has no audio files",
    }
    for arguments, message in mistakes.items():
        code, out, err = run(*arguments)
        assert (code, out) == (2, "") and message in err and len(err.splitlines()) == 1, (arguments, err)


def test_an_empty_output_and_an_endless_search_are_refused(run, model, folder):
    code, _, err = run(folder / "a.wav", "-o", "", "--model", model)
    assert code == 2 and "--output is empty" in err
    code, _, err = run(folder / "a.wav", "--n-best", "1000000000", "--model", model)
    assert code == 2 and "n_best must be at most 10000, got 1000000000" in err


def test_long_recordings_with_a_window(run, model, tmp_path):
    text = tones.sentence(np.random.default_rng(3), 25)
    path = tmp_path / "long.wav"
    soundfile.write(path, tones.speak(text, 3, pause=0.5)[0], tones.RATE)
    assert run(path, "--model", model, "--window", 8, "--overlap", 2)[1] == text + "\n"
    heard: list[float] = []
    recognizer = Recognizer.from_pretrained(model)
    list(recognizer.each([str(path)] * 3, window=8, overlap=2, advance=heard.append))
    assert sum(heard) == pytest.approx(3 * soundfile.info(path).duration), "what windows share counts once"


def test_show_prints_every_pass_where_there_is_no_terminal(run, model, folder):
    code, out, _ = run(folder / "a.wav", "--model", model, "--show", "--block-size", 4)
    assert code == 0 and [f"pass {n}" in out for n in range(6)] == [True] * 5 + [False]
    assert out.endswith(TEXTS["a.wav"] + "\n")
    rows = [line for line in out.splitlines() if line.startswith("│")]
    assert set(rows[0]) <= set("│∅ ") and "∅" not in rows[-1] and "[go" in out


def test_show_writes_the_output_as_well(run, model, folder, tmp_path):
    path = tmp_path / "a.json"
    code, out, _ = run(folder / "a.wav", "--model", model, "--show", "--format", "json", "-o", path)
    assert code == 0 and "pass 8" in out and json.loads(path.read_text())["text"] == TEXTS["a.wav"]


def test_figure(run, model, folder, tmp_path):
    picture = tmp_path / "path.SVG"
    code, out, _ = run(folder / "a.wav", "--model", model, "--figure", picture, "--format", "json")
    assert code == 0 and "trace" not in json.loads(out) and "<svg" in picture.read_text()[:1000]
    code, _, err = run(folder, "--model", model, "--figure", picture)
    assert code == 2 and "one recording" in err
    code, _, err = run(folder / "a.wav", "--model", model, "--figure", tmp_path / "path.gif")
    assert code == 2 and "path.gif" in err


class Letters:
    def pieces(self, ids):
        return [["", "▁have", "▁l", "ive", "▁"][i] for i in ids]


def traced(alignment, trace):
    return from_alignment(
        alignment, [1.0] * len(alignment), Letters(), frame_seconds=0.04, seconds=1.0, passes=len(trace), trace=trace,
        mask=9,
    )  # fmt: skip


def test_the_animation_keeps_cells_in_place_and_within_the_width():
    final = [0, 1, 0, 2, 0, 3, 0, 0, 4, 0, 0]
    half = [9, 1, 9, 2, 9, 9, 0, 9, 9, 9, 0]
    transcript = traced(final, [half, final])
    for width in (8, 13, 20, 80):
        frames = [
            [line.plain for line in lines]
            for lines in animation.passes(transcript, block_size=4, width=width)
        ]
        assert len(frames) == 3 and len({tuple(map(len, lines)) for lines in frames}) == 1
        assert all(len(line) <= width for lines in frames for line in lines)
        assert "".join(frames[-1]).replace("│", "") == "_[have_[l_ive__[__"
    wide = frames[-1]
    assert wide == ["│_[have_[l│_ive__│[__│"]
    with pytest.raises(ValueError, match="trace"):
        list(
            animation.passes(
                from_alignment([0], [1.0], Letters(), frame_seconds=1, seconds=1), block_size=2, width=9
            )
        )


def test_the_animation_plays_in_a_terminal():
    final = [0, 1, 0, 2]
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=40, height=10)
    animation.show(traced(final, [[9, 1, 9, 9], final]), "x.wav", block_size=2, console=console, pause=0.0)
    written = screen.getvalue()
    assert "pass 0" in written and "pass 2" in written and "[have" in written
