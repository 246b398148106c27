"""Training on data that is missing, unreadable or changed: refused by name, or counted and reported."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from imputer import configs, rollin, training
from imputer.data import manifest
from imputer.data.manifest import Utterance
from imputer.errors import ImputerError, UsageError
from imputer.training import run_folder, stale_copy
from trainings import imputer, settings_for


@pytest.fixture
def mine(corpus: str, tmp_path: Path) -> Path:
    """A copy of the corpus that a test may spoil."""
    shutil.copytree(Path(corpus).parent, tmp_path / "mine")
    return tmp_path / "mine" / "manifest.jsonl"


def short(path: Path, **changed: object) -> configs.Config:
    values: dict[str, object] = {
        "steps": 4,
        "checkpoint_every": 2,
        "keep_checkpoints": 0,
        "validate_every": 0,
    }
    settings = settings_for(str(path), **(values | changed))
    return replace(settings, data=replace(settings.data, valid=(), batch_seconds=4.0))


def rewrite(path: Path, change) -> None:  # type: ignore[no-untyped-def]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(line) + "\n" for line in change(lines)))


def stopped_after_two(path: Path, folder: Path, settings: configs.Config) -> None:
    """A run of ``settings`` that was killed after its checkpoint at step 2."""
    training.train(settings, folder)
    (folder / "checkpoints/step-00000004.safetensors").unlink()


# --- training on nothing


@pytest.mark.parametrize("when", ["start_from", "resume", "scratch"])
def test_training_without_its_audio_is_refused(expert: Path, mine: Path, tmp_path: Path, when: str) -> None:
    settings = short(mine, start_from=str(expert) if when == "start_from" else "")
    if when == "resume":
        stopped_after_two(mine, tmp_path / "run", settings)
    for path in mine.parent.glob("*.wav"):
        path.unlink()
    with pytest.raises(
        ImputerError, match=r"8 of 8 utterances cannot be used.*8 x audio file is missing.*\.wav"
    ):
        training.train(settings, tmp_path / "run")
    assert not (tmp_path / "run/model").is_dir() or when == "resume"


def test_audio_that_disappears_while_training_stops_the_run(mine: Path, tmp_path: Path) -> None:
    """The files are there at the start and empty at the first read: the weights must not decay meanwhile."""
    for path in mine.parent.glob("*.wav"):
        path.write_bytes(b"")
    settings = short(mine, weight_decay=0.1, steps=50)
    settings = replace(settings, training=replace(settings.training, start_from=""))
    with pytest.raises(ImputerError, match="no utterance of the training set could be read"):
        training.train(settings, tmp_path / "run")


def test_unreadable_audio_stops_a_run_that_starts_from_a_model(
    expert: Path, mine: Path, tmp_path: Path
) -> None:
    for path in mine.parent.glob("*.wav"):
        path.write_bytes(b"")
    with pytest.raises(
        ImputerError, match=r"utterances cannot be used, more than data\.unreadable_limit = 0\.05"
    ):
        training.train(short(mine, start_from=str(expert)), tmp_path / "run")
    assert not (tmp_path / "run/model").exists() and not list(tmp_path.glob("run/checkpoints/*"))


def test_steps_without_a_usable_utterance_leave_the_weights_alone(
    expert: Path, mine: Path, tmp_path: Path
) -> None:
    """Texts far too long for their frames pass every check at the start; nothing is left to train on."""
    rewrite(mine, lambda lines: [line | {"text": "a" * 400} for line in lines])
    settings = short(mine, start_from=str(expert), nonfinite_limit=1000, weight_decay=0.5)
    model = training.train(settings, tmp_path / "run")
    before, after = (load_file(folder / "model.safetensors") for folder in (expert, model))
    assert all((before[name] == after[name]).all() for name in before)
    with pytest.raises(
        ImputerError, match=r"3 steps in a row had no usable utterance.*more tokens than frames"
    ):
        training.train(
            replace(settings, training=replace(settings.training, nonfinite_limit=2)), tmp_path / "other"
        )


def test_texts_outside_the_vocabulary_are_refused(expert: Path, mine: Path, tmp_path: Path) -> None:
    rewrite(mine, lambda lines: [line | {"text": line["text"].upper()} for line in lines])
    with pytest.raises(
        ImputerError, match=r"8 x text outside the vocabulary, first: utterance 'tones-0-00000'"
    ):
        training.train(short(mine, start_from=str(expert)), tmp_path / "run")


def test_what_is_dropped_is_said_at_start_and_end(
    mine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (mine.parent / "tones-0-00003.wav").unlink()
    (mine.parent / "tones-0-00004.wav").write_bytes(b"RIFF")
    with open(mine, "a") as file:
        file.write("{half a line\n")
    settings = short(mine)
    settings = replace(settings, data=replace(settings.data, unreadable_limit=0.4))
    training.train(settings, tmp_path / "run")
    said = capsys.readouterr().err.splitlines()
    start = next(line for line in said if line.startswith("training on 7 utterances"))
    end = next(line for line in said if line.startswith("dropped in this training"))
    for line in (start, end):
        assert "1 x audio file is missing, first: " in line and "tones-0-00003.wav" in line
        assert "1 x bad manifest line, first: " in line and "line 9" in line
    assert "1 x cannot be read, first: utterance 'tones-0-00004'" in end
    assert "cannot be read" not in start


# --- data that changed


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda lines: lines[:4], "4 utterances are missing, first 'tones-0-00004'"),
        (lambda lines: lines[::-1], "the utterances are in another order"),
        (
            lambda lines: [a | {"text": b["text"]} for a, b in zip(lines, lines[::-1], strict=True)],
            "utterances are changed in text, first 'tones-0-00000'",
        ),
        (
            lambda lines: [line | {"duration": line["duration"] / 2} for line in lines],
            "8 utterances are changed in file name, offset or duration",
        ),
        (lambda lines: [*lines, lines[0] | {"id": "more"}], "1 utterance is new, first 'more'"),
    ],
)
def test_a_run_does_not_resume_on_changed_data(
    mine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change, says: str
) -> None:  # type: ignore[no-untyped-def]
    settings = short(mine)
    stopped_after_two(mine, tmp_path / "run", settings)
    rewrite(mine, change)
    with pytest.raises(UsageError, match="the training data changed since") as raised:
        training.train(settings, tmp_path / "run")
    assert says in str(raised.value) and "--accept-changed-data" in str(raised.value)
    training.train(settings, tmp_path / "run", accept_changed_data=True)
    assert says in capsys.readouterr().err
    training.train(settings, tmp_path / "run")  # what was accepted is the data of the run from then on


def test_a_corpus_that_moved_is_still_the_same(mine: Path, tmp_path: Path) -> None:
    stopped_after_two(mine, tmp_path / "run", short(mine))
    shutil.move(mine.parent, tmp_path / "moved")
    (tmp_path / "mine").symlink_to(tmp_path / "moved")
    training.train(short(mine), tmp_path / "run")


def test_the_command_line_accepts_changed_data(mine: Path, tmp_path: Path) -> None:
    settings = short(mine)
    stopped_after_two(mine, tmp_path / "run", settings)
    rewrite(mine, lambda lines: lines[::-1])
    words = ["train", "--config", str(tmp_path / "run/config.toml"), "--output", str(tmp_path / "run")]
    refused = imputer(*words, check=False)
    assert refused.returncode == 2 and "in another order" in refused.stderr
    imputer(*words, "--accept-changed-data")


@pytest.fixture
def aligned(expert: Path, mine: Path) -> Path:
    store = mine.parent / "train.alignments"
    imputer("align", "--manifest", str(mine), "--model", str(expert), "--store", str(store))
    return store


def over(path: Path, store: Path, expert: Path, objective: str) -> configs.Config:
    settings = short(path, objective=objective, start_from=str(expert))
    return replace(settings, rollin=configs.Rollin(alignments=str(store), block_size=4))


def correct_a_letter(lines: list[dict[str, str]]) -> list[dict[str, str]]:
    return [lines[0], lines[1] | {"text": lines[1]["text"] + "a"}, *lines[2:]]


@pytest.mark.parametrize("objective", ["imitation", "dynamic_programming"])
@pytest.mark.parametrize("fingerprints", [True, False])
def test_a_text_corrected_after_the_alignment_is_refused(
    expert: Path,
    mine: Path,
    aligned: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    objective: str,
    fingerprints: bool,
) -> None:
    if not fingerprints:
        without_fingerprints(aligned)
    rewrite(mine, correct_a_letter)
    settings = over(mine, aligned, expert, objective)
    with pytest.raises(
        UsageError, match=r"1 utterance changed in text, first 'tones-0-00001'.*Align the corpus"
    ):
        training.train(settings, tmp_path / "run")
    training.train(settings, tmp_path / "run", accept_changed_data=True)
    said = capsys.readouterr().err
    assert "1 x text changed since it was aligned, first: utterance 'tones-0-00001'" in said
    assert ("has no fingerprints" in said) is not fingerprints


def without_fingerprints(store: Path) -> None:
    """The file as the version before wrote it."""
    from safetensors import safe_open

    with safe_open(str(store), framework="np") as file:
        metadata = {key: text for key, text in file.metadata().items() if key != "checksum"}
    tensors = load_file(store)
    del tensors["fingerprints"]
    save_file(tensors, store, metadata=metadata)


def test_a_duration_changed_after_the_alignment_is_refused(
    expert: Path, mine: Path, aligned: Path, tmp_path: Path
) -> None:
    rewrite(mine, lambda lines: [line | {"duration": line["duration"] / 2} for line in lines])
    with pytest.raises(UsageError, match="8 utterances changed in file name, offset or duration"):
        training.train(over(mine, aligned, expert, "imitation"), tmp_path / "run")


def test_alignments_of_the_version_before_still_train(
    expert: Path, mine: Path, aligned: Path, tmp_path: Path
) -> None:
    without_fingerprints(aligned)
    assert rollin.AlignmentStore(aligned).fingerprints is None
    training.train(over(mine, aligned, expert, "imitation"), tmp_path / "run")


# --- stale copies


def test_a_deleted_stale_copy_is_not_replaced_by_the_expert(
    expert: Path, mine: Path, aligned: Path, tmp_path: Path
) -> None:
    settings = over(mine, aligned, expert, "dynamic_programming")
    settings = replace(
        settings,
        rollin=replace(settings.rollin, refresh_every=3),
        training=replace(settings.training, steps=8),
    )
    training.train(settings, tmp_path / "run")
    (
        tmp_path / "run/checkpoints/step-00000008.safetensors"
    ).unlink()  # killed in step 7, after the copy of step 6
    shutil.copytree(tmp_path / "run", tmp_path / "same")
    training.train(settings, tmp_path / "same")
    (
        tmp_path / "run/checkpoints/step-00000006.safetensors"
    ).unlink()  # resumes at 4, which needs the copy of step 3
    shutil.rmtree(tmp_path / "run" / run_folder.STALE)
    with pytest.raises(UsageError, match=r"step-00000003\.safetensors is missing.*stale copy of step 3"):
        training.train(settings, tmp_path / "run")


def test_old_stale_copies_are_removed_at_the_next_start(
    expert: Path, mine: Path, aligned: Path, tmp_path: Path
) -> None:
    settings = over(mine, aligned, expert, "dynamic_programming")
    settings = replace(
        settings,
        rollin=replace(settings.rollin, refresh_every=2),
        training=replace(settings.training, steps=7, checkpoint_every=5, keep_checkpoints=1),
    )
    training.train(settings, tmp_path / "run")
    copies = [stale_copy.stale_path(tmp_path / "run", step) for step in (2, 4, 6)]
    assert [path.is_file() for path in copies] == [True, True, True]
    training.train(settings, tmp_path / "run")
    assert [path.is_file() for path in copies] == [False, False, True]


def test_a_validation_set_without_audio_is_refused(mine: Path, corpus: str, tmp_path: Path) -> None:
    lost = [Utterance(f"lost-{i}", str(tmp_path / f"{i}.wav"), 1.0, "ab") for i in range(3)]
    manifest.write(tmp_path / "valid.jsonl", lost)
    settings = short(mine)
    settings = replace(settings, data=replace(settings.data, valid=(str(tmp_path / "valid.jsonl"),)))
    with pytest.raises(ImputerError, match=r"data\.valid: 3 of 3 utterances cannot be used"):
        training.train(settings, tmp_path / "run")


def test_validation_audio_that_cannot_be_read_is_no_perfect_score(
    mine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(mine.parent, tmp_path / "valid")
    settings = short(mine, validate_every=2)
    valid = (str(tmp_path / "valid/manifest.jsonl"),)
    settings = replace(settings, data=replace(settings.data, valid=valid, unreadable_limit=0.2))
    recordings = sorted((tmp_path / "valid").glob("*.wav"))
    recordings[0].write_bytes(b"")
    training.train(settings, tmp_path / "run")
    said = capsys.readouterr().err
    assert said.count("validation: left out 1 x cannot be read, first: utterance 'tones-0-00000'") == 1
    for path in recordings:
        path.write_bytes(b"")
    with pytest.raises(
        ImputerError, match=r"data\.valid: 8 of 8 utterances cannot be used.*8 x cannot be read"
    ):
        training.train(settings, tmp_path / "other")
    assert "WER 0.0 %" not in capsys.readouterr().err


def test_a_network_that_is_nan_is_never_the_best(expert: Path, mine: Path, tmp_path: Path) -> None:
    ruined = shutil.copytree(expert, tmp_path / "ruined")
    weights = load_file(ruined / "model.safetensors")
    weights["output.weight"][:] = float("nan")
    save_file(weights, ruined / "model.safetensors")
    settings = short(mine, start_from=str(ruined), keep_best=True, validate_every=2)
    settings = replace(settings, data=replace(settings.data, valid=(str(mine),)))
    with pytest.raises(ImputerError, match="not finite after step 4; no model was written"):
        training.train(settings, tmp_path / "run")
    assert not (tmp_path / "run/best").exists()


def test_a_network_that_is_nan_aligns_nothing(expert: Path, mine: Path, tmp_path: Path) -> None:
    ruined = shutil.copytree(expert, tmp_path / "ruined")
    weights = load_file(ruined / "model.safetensors")
    weights["output.weight"][:] = float("nan")
    save_file(weights, ruined / "model.safetensors")
    store = tmp_path / "a.alignments"
    refused = imputer(
        "align", "--manifest", str(mine), "--model", str(ruined), "--store", str(store), check=False
    )
    assert refused.returncode == 1 and not store.exists()
    assert "none of 8 utterances could be aligned; the first: tones-0-0" in refused.stderr
    assert "the network gave NaN (not a number)" in refused.stderr
