"""Training: it learns, it survives, and many ranks do what one does."""

import itertools
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from safetensors.torch import load_file

from imputer import alignments, configs, models, rollin, training
from imputer.corpora import tones
from imputer.data import manifest
from imputer.data.ranks import Ranks
from imputer.errors import ImputerError, UsageError
from imputer.training import checkpoints, data_checks, stale_copy, starting
from imputer.vocabulary import Vocabulary
from trainings import ENVIRONMENT, imputer, settings_for, trained_on


def last_validation(folder: Path) -> dict[str, float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["valid"] for line in lines if "valid" in line][-1]


# --- it learns


def test_ctc_learns_a_handful_of_utterances_by_heart(expert: Path) -> None:
    assert last_validation(expert.parent)["wer_1"] == 0.0


@pytest.mark.parametrize("objective", ["imitation", "dynamic_programming"])
@pytest.mark.parametrize("start", ["scratch", "expert"])
def test_the_imputer_learns_them_too(
    corpus: str, expert: Path, stored: Path, tmp_path: Path, objective: str, start: str
) -> None:
    trained_on(
        corpus,
        tmp_path / "run",
        configs.Rollin(alignments=str(stored), block_size=4, noise="none"),
        objective=objective,
        start_from=str(expert) if start == "expert" else "",
        steps=60 if start == "expert" else 120,  # from scratch 50 were enough
        learning_rate=1e-3 if start == "expert" else 3e-3,
    )
    assert last_validation(tmp_path / "run")["wer_4"] == 0.0


def test_the_imputer_learns_them_without_an_expert(corpus: str, expert: Path, tmp_path: Path) -> None:
    """Its own alignments of each step are the roll-in; from scratch they are those of an untrained network."""
    policy = configs.Rollin(alignments="own", block_size=4)
    trained_on(corpus, tmp_path, policy, objective="dynamic_programming", start_from=str(expert), steps=100)
    assert last_validation(tmp_path)["wer_4"] == 0.0


def test_the_stored_alignments_are_those_of_the_texts(corpus: str, expert: Path, stored: Path) -> None:
    store = rollin.AlignmentStore(stored)
    _, vocabulary = models.load(expert)
    for utterance in manifest.Manifest(corpus):
        assert alignments.collapse(store(utterance.id)) == vocabulary.encode(utterance.text)


def test_a_stale_copy_takes_over_the_roll_in(corpus: str, expert: Path, stored: Path, tmp_path: Path) -> None:
    policy = configs.Rollin(alignments=str(stored), block_size=4, refresh_every=5)
    trained_on(corpus, tmp_path, policy, objective="dynamic_programming", start_from=str(expert), steps=12)
    assert [p.stem for p in sorted((tmp_path / "stale").iterdir())] == ["step-00000005", "step-00000010"]
    _, vocabulary = models.load(expert)
    fresh = rollin.AlignmentStore(stale_copy.stale_path(tmp_path, 10))
    for utterance in manifest.Manifest(corpus):
        assert alignments.collapse(fresh(utterance.id)) == vocabulary.encode(utterance.text)


@pytest.mark.parametrize("schedule", ["cosine", "inverse_sqrt", "constant"])
def test_the_learning_rate_warms_up_and_decays(schedule: str) -> None:
    given = configs.Training(learning_rate=1.0, warmup_steps=10, steps=100, schedule=schedule)  # type: ignore[arg-type]
    rates = [training.learning_rate(given, step) for step in range(100)]
    assert rates[:10] == pytest.approx([i / 10 for i in range(1, 11)])
    assert all(a >= b for a, b in itertools.pairwise(rates[9:]))
    assert rates[-1] == pytest.approx(
        {"cosine": 0.01, "inverse_sqrt": 0.316, "constant": 1.0}[schedule], abs=5e-3
    )


def test_a_training_can_stop_before_its_schedule_is_down() -> None:
    whole = configs.Training(learning_rate=1.0, warmup_steps=10, steps=100)
    early = replace(whole, steps=50, schedule_steps=100)
    assert [training.learning_rate(early, step) for step in range(50)] == [
        training.learning_rate(whole, step) for step in range(50)
    ]


def test_averaged_weights_lie_between(corpus: str, tmp_path: Path) -> None:
    trained_on(corpus, tmp_path / "run", steps=30, average=0.9)
    averaged = load_file(tmp_path / "run" / "model" / models.WEIGHTS)
    _, tensors = checkpoints.load(checkpoints.latest(tmp_path / "run" / "checkpoints"))  # type: ignore[arg-type]
    assert torch.equal(averaged["output.weight"], tensors["average.output.weight"])
    assert not torch.equal(averaged["output.weight"], tensors["model.output.weight"])


def test_given_vectors_are_a_front_end_of_their_own(tmp_path: Path) -> None:
    """Frame vectors from .npy files: each letter its own direction, twice as many vectors as letters."""
    path = given_vectors(tmp_path)
    settings = settings_for(path, steps=120)
    settings = replace(
        settings, front_end=configs.FrontEnd(name="frames", feature_size=6, frame_seconds=0.02, stack=2)
    )
    training.train(settings, tmp_path / "run")
    assert last_validation(tmp_path / "run")["wer_1"] == 0.0


def test_spelled_words_are_a_front_end_of_their_own(tmp_path: Path) -> None:
    """Letters to phonemes: an expert, its alignments, an Imputer over them; an invalid spelling is named."""
    said = {"axe": "@ks", "cattle": "k@tAl", "shoe": "Su", "ox": "aks", "it's": "Its"}
    words = [manifest.Utterance(word, "cmudict.dict", 0.08 * len(word), text) for word, text in said.items()]
    manifest.write(tmp_path / "words.jsonl", words)
    settings = settings_for(str(tmp_path / "words.jsonl"), steps=120)
    settings = replace(settings, front_end=configs.FrontEnd(name="letters"))
    expert = training.train(settings, tmp_path / "expert")
    assert last_validation(tmp_path / "expert")["wer_1"] == 0.0
    store = tmp_path / "words.alignments"
    manifest.write(tmp_path / "more.jsonl", [*words, replace(words[0], id="a.m.")])
    aligning = ("align", "--model", str(expert), "--store", str(store))
    said_of_it = imputer(*aligning, "--manifest", str(tmp_path / "more.jsonl")).stdout
    assert "5 of 6 utterances aligned" in said_of_it and "'a.m.' is not spelt" in said_of_it
    settings = replace(
        settings,
        rollin=configs.Rollin(alignments=str(store), noise="none"),
        vocabulary=replace(settings.vocabulary, tokenizer=str(expert / "tokenizer.model")),
        training=replace(settings.training, objective="dynamic_programming", steps=250),
    )
    made = training.train(settings, tmp_path / "imputer")
    assert last_validation(tmp_path / "imputer")["wer_8"] == 0.0
    soundfile.write(tmp_path / "some.wav", np.zeros(16_000), 16_000)
    refused = imputer("transcribe", str(tmp_path / "some.wav"), "--model", str(made), check=False)
    assert refused.returncode and "takes spelled words, not audio" in refused.stderr


def given_vectors(folder: Path, spoilt: int = -1) -> str:
    random = np.random.default_rng(0)
    directions = random.normal(size=(10, 6))
    made = []
    for i in range(6):
        text = tones.sentence(random, 2)
        rows = [directions[(" " + tones.ALPHABET).index(letter)] for letter in text for _ in range(6)]
        vectors = np.array(rows) + 0.01 * random.normal(size=(len(rows), 6))
        if i == spoilt:
            vectors[3] = np.nan
        np.save(folder / f"{i}.npy", vectors)
        made.append(manifest.Utterance(f"utt{i}", str(folder / f"{i}.npy"), len(rows) * 0.02, text))
    manifest.write(folder / "given.jsonl", made)
    return str(folder / "given.jsonl")


# --- it survives


def command_for(corpus: str, folder: Path, **changed: object) -> list[str]:
    settings = settings_for(corpus, **changed)
    (folder / "some.toml").write_text(
        configs.to_toml({name: getattr(settings, name) for name in vars(settings)})
    )
    return ["train", "--config", str(folder / "some.toml"), "--output"]


def steps_logged(run: Path) -> int:
    path = run / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.is_file() else 0


@pytest.mark.parametrize("objective", ["ctc", "dynamic_programming"])
def test_a_killed_run_ends_with_the_same_weights(
    corpus: str, stored: Path, tmp_path: Path, objective: str
) -> None:
    changed = {"steps": 40, "checkpoint_every": 7, "log_every": 1, "average": 0.9, "objective": objective}
    words = [*command_for(corpus, tmp_path, **changed), str(tmp_path / "killed")]
    options = ["--rollin.alignments", str(stored), "--model.dropout", "0.1", "--data.batch_seconds", "4"]
    imputer(*words[:-1], str(tmp_path / "whole"), *options)
    for until in (9, 23):
        process = subprocess.Popen(
            [sys.executable, "-m", "imputer", *words, *options], env=ENVIRONMENT, stderr=subprocess.DEVNULL
        )
        while steps_logged(tmp_path / "killed") < until and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    imputer(*words, *options)
    for name in ("model.safetensors", "config.toml", "tokenizer.model"):
        assert (tmp_path / "killed/model" / name).read_bytes() == (
            tmp_path / "whole/model" / name
        ).read_bytes()
    steps = [
        json.loads(line)["step"] for line in (tmp_path / "killed/metrics.jsonl").read_text().splitlines()
    ]
    assert [step for step in steps if step < 40] == list(range(40))


@pytest.mark.parametrize(
    ("workers", "sent", "code"), [(0, signal.SIGTERM, 143), (1, signal.SIGTERM, 143), (1, signal.SIGINT, 130)]
)
def test_sigterm_and_ctrl_c_save_and_end(
    corpus: str, tmp_path: Path, workers: int, sent: signal.Signals, code: int
) -> None:
    words = [*command_for(corpus, tmp_path, steps=100_000, log_every=1), str(tmp_path / "run")]
    words += ["--data.workers", str(workers)]
    process = subprocess.Popen(
        [sys.executable, "-m", "imputer", *words],
        env=ENVIRONMENT,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while steps_logged(tmp_path / "run") < 3:
        time.sleep(0.01)
        assert process.poll() is None
    os.killpg(process.pid, sent)  # the whole group, its worker too, as schedulers and terminals do
    said = process.communicate(timeout=60)[1]
    assert process.returncode == code
    assert ("stopping after this step, with a checkpoint" in said) == (sent == signal.SIGINT)
    assert "the same command resumes from there" in said and "Traceback" not in said
    assert checkpoints.latest(tmp_path / "run/checkpoints") is not None


def test_zero_means_only_after_the_last_step(corpus: str, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 2}\n'
    )  # of a start that was killed before any checkpoint
    trained_on(corpus, tmp_path, steps=3, validate_every=0, checkpoint_every=0, log_every=0)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], "valid" in line) for line in lines] == [(3, False), (3, True)]
    assert [p.stem for p in (tmp_path / "checkpoints").iterdir()] == ["step-00000003"]


@pytest.mark.parametrize(("keep", "kept"), [(0, [1, 2, 3]), (2, [2, 3])])
def test_so_many_checkpoints_are_kept(tmp_path: Path, keep: int, kept: list[int]) -> None:
    for step in (1, 2, 3):
        checkpoints.save(tmp_path, checkpoints.Progress(step=step), {"x": torch.ones(1)}, keep)
    assert sorted(int(path.stem[5:]) for path in tmp_path.iterdir()) == kept


def test_a_full_disk_leaves_the_last_good_checkpoint(tmp_path: Path) -> None:
    progress = checkpoints.Progress(step=1)
    checkpoints.save(tmp_path, progress, {"x": torch.ones(10)}, keep=2)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        with pytest.raises(ImputerError, match=r"cannot write .*step-00000002"):
            checkpoints.save(tmp_path, replace(progress, step=2), {"x": torch.ones(10_000)}, keep=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001.safetensors"]
    assert checkpoints.load(tmp_path / "step-00000001.safetensors")[0].step == 1


def test_a_folder_that_cannot_be_written_is_named(corpus: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said = imputer(*command_for(corpus, tmp_path), str(tmp_path / "file" / "run"), check=False)
    assert said.returncode == 2
    assert "imputer: cannot write to the run folder" in said.stderr


def test_a_loss_that_is_no_number_is_skipped_then_stops_the_run(tmp_path: Path) -> None:
    settings = settings_for(given_vectors(tmp_path, spoilt=2), steps=40, nonfinite_limit=3, log_every=1)
    settings = replace(
        settings,
        front_end=configs.FrontEnd(name="frames", feature_size=6, frame_seconds=0.02),
        data=replace(settings.data, batch_seconds=1.0, valid=()),
    )
    with pytest.raises(ImputerError, match=r"not finite in 4 steps.*utt2"):
        training.train(settings, tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    skipped = [line["skipped"] for line in lines if isinstance(line.get("skipped"), list)]
    assert len(skipped) == 4
    assert all("utt2" in group for group in skipped)
    assert any("learning_rate" in line for line in lines)  # the other batches did count


def test_a_damaged_recording_is_dropped_and_counted(corpus: str, tmp_path: Path) -> None:
    good = [replace(u, audio_filepath=os.path.abspath(u.audio_filepath)) for u in manifest.Manifest(corpus)]
    (tmp_path / "bad.wav").write_bytes(b"RIFF but no sound")
    manifest.write(
        tmp_path / "m.jsonl", [*good, manifest.Utterance("bad", str(tmp_path / "bad.wav"), 1.0, "abc")]
    )
    settings = settings_for(str(tmp_path / "m.jsonl"), steps=2, log_every=1)
    settings = replace(settings, data=replace(settings.data, unreadable_limit=0.2))
    training.train(settings, tmp_path / "run")
    last = (tmp_path / "run/metrics.jsonl").read_text().splitlines()[-2]
    assert json.loads(last)["dropped"] >= 1
    with pytest.raises(ImputerError, match="bad"):
        training.train(replace(settings, data=replace(settings.data, strict=True)), tmp_path / "strict")


# --- many ranks


def test_two_ranks_take_the_steps_of_one(corpus: str, stored: Path, tmp_path: Path) -> None:
    changed = {"steps": 12, "batches_per_step": 2, "objective": "dynamic_programming"}
    words = command_for(corpus, tmp_path, **changed)
    options = ["--rollin.alignments", str(stored), "--model.dropout", "0.1", "--data.batch_seconds", "3"]
    imputer(*words, str(tmp_path / "one"), *options)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run(
        [*torchrun, "-m", "imputer", *words, str(tmp_path / "two"), *options],
        env=ENVIRONMENT,
        check=True,
        capture_output=True,
    )
    one, two = (load_file(tmp_path / name / "model" / models.WEIGHTS) for name in ("one", "two"))
    for name in one:
        assert torch.allclose(one[name], two[name], atol=1e-5), name


def test_two_ranks_align_what_one_does(corpus: str, expert: Path, stored: Path, tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = ["align", "--manifest", corpus, "--model", str(expert), "--store", str(tmp_path / "two")]
    subprocess.run(
        [*torchrun, "-m", "imputer", *words, "--batch-seconds", "4"],
        env=ENVIRONMENT,
        check=True,
        capture_output=True,
    )
    one, two = rollin.AlignmentStore(stored), rollin.AlignmentStore(tmp_path / "two")
    assert sorted(one.names) == sorted(two.names)
    assert all(one(name) == two(name) for name in one.names)
    assert [p.name for p in tmp_path.iterdir()] == ["two"]


def test_ranks_share_every_epoch_without_overlap_or_loss(corpus: str, tmp_path: Path) -> None:
    settings = settings_for(corpus)
    settings = replace(settings, data=replace(settings.data, batch_seconds=3.0))
    run = training.prepare(settings, tmp_path, Ranks())
    order = []
    for rank in range(3):
        stream = replace(run.stream, ranks=Ranks(rank, 3)).batches(0, 0)
        order += [(e, i, tuple(batch.ids)) for e, i, batch in (next(stream) for _ in range(8))]
    alone = run.stream.batches(0, 0)
    assert sorted(order) == [(e, i, tuple(batch.ids)) for e, i, batch in (next(alone) for _ in range(24))]


# --- what is refused


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--training.objective", "imitation"], "needs rollin.alignments"),
        (["--rollin.masking", "checkers"], "rollin.masking = 'checkers', but there are"),
        (["--data.train", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--training.stepps", "3"], "did you mean training.steps"),
        (["--training.steps", "0"], "training.steps = 0, but it takes a whole number, 1 or more"),
        (["--front_end.name", "ear"], "front_end.name = 'ear'"),
        (["--steps", "3"], "keys of the configuration: --section.key value"),
        (["--training.start_from", "nowhere"], "no model folder nowhere"),
        (
            ["--rollin.alignments", "no.file", "--training.objective", "imitation"],
            "cannot read alignments no.file",
        ),
    ],
)
def test_mistakes_are_one_line_and_code_two(
    corpus: str, tmp_path: Path, options: list[str], says: str
) -> None:
    said = imputer(*command_for(corpus, tmp_path), str(tmp_path / "run"), *options, check=False)
    assert (said.returncode, says in said.stderr) == (2, True), said.stderr
    assert "Traceback" not in said.stderr


def test_a_resumed_run_refuses_another_configuration(corpus: str, tmp_path: Path) -> None:
    trained_on(corpus, tmp_path, steps=3)
    with pytest.raises(UsageError, match=r"another configuration: training.learning_rate: 0.003 -> 0.001"):
        trained_on(corpus, tmp_path, steps=3, learning_rate=1e-3)
    trained_on(corpus, tmp_path, steps=3, log_every=7)  # that may change


def test_a_start_that_failed_leaves_no_tokenizer_to_the_next(corpus: str, tmp_path: Path) -> None:
    words = [*command_for(corpus, tmp_path, steps=1), str(tmp_path / "run")]
    assert "model.width = 30" in imputer(*words, "--model.width", "30", check=False).stderr
    imputer(*words, "--vocabulary.units", "bpe", "--vocabulary.size", "14")
    texts = [utterance.text for utterance in manifest.Manifest(corpus)]
    assert models.load(tmp_path / "run/model")[1] == Vocabulary.train(texts, size=14, units="bpe")


def test_a_resumed_run_keeps_its_tokenizer(
    corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained_on(corpus, tmp_path, steps=1)
    monkeypatch.setattr(starting, "vocabulary_for", lambda *_: pytest.fail("it was made anew"))
    trained_on(corpus, tmp_path, steps=1)


def test_an_expert_with_another_tokenizer_is_refused(
    corpus: str, expert: Path, stored: Path, tmp_path: Path
) -> None:
    settings = replace(
        settings_for(corpus, objective="imitation"),
        vocabulary=configs.Vocabulary(units="bpe", size=14),
        rollin=configs.Rollin(alignments=str(stored)),
    )
    with pytest.raises(UsageError, match=r"its tokenizer is .*--vocabulary\.tokenizer"):
        training.train(settings, tmp_path / "run")
    corrected = replace(
        settings,
        vocabulary=configs.Vocabulary(tokenizer=str(expert / models.TOKENIZER)),
        training=replace(settings.training, steps=1),
    )
    training.train(corrected, tmp_path / "run")  # in the same folder


def test_a_model_whose_configuration_was_spoilt_is_refused(expert: Path, tmp_path: Path) -> None:
    shutil.copytree(expert, tmp_path / "model")
    path = tmp_path / "model" / models.CONFIG
    path.write_text(path.read_text().replace("block_size = 8", "block_size = 0"))
    with pytest.raises(UsageError, match=r"config\.toml: model\.block_size = 0, but it takes"):
        models.load(tmp_path / "model")


def test_alignments_of_another_corpus_are_refused(stored: Path, expert: Path, tmp_path: Path) -> None:
    other = tones.make(str(tmp_path / "other"), 3, seed=1)
    settings = replace(
        settings_for(other, objective="imitation"),
        vocabulary=configs.Vocabulary(tokenizer=str(expert / models.TOKENIZER)),
        rollin=configs.Rollin(alignments=str(stored)),
    )
    with pytest.raises(UsageError, match="has no alignment for 3 of 3 utterances"):
        training.train(settings, tmp_path / "run")


def test_a_few_that_could_not_be_aligned_are_left_out(
    stored: Path, expert: Path, corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = Path(tones.make(str(tmp_path / "other"), 1, seed=1)).read_text().replace('"id": "', '"id": "new-')
    (tmp_path / "other" / "manifest.jsonl").write_text(lines)
    settings = settings_for(corpus, objective="dynamic_programming", steps=3, log_every=1)
    settings = replace(
        settings,
        data=replace(settings.data, train=(str(tmp_path / "other" / "manifest.jsonl"), corpus)),
        vocabulary=configs.Vocabulary(tokenizer=str(expert / models.TOKENIZER)),
        rollin=configs.Rollin(alignments=str(stored)),
    )
    with pytest.raises(UsageError, match="has no alignment for 1 of 9 utterances, first new-"):
        training.train(settings, tmp_path / "run")
    monkeypatch.setattr(data_checks, "MOST_UNALIGNED", 0.2)
    training.train(settings, tmp_path / "run")
    last = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert max(json.loads(line).get("dropped", 0) for line in last) >= 1


def test_a_network_that_cannot_be_built_is_one_line(corpus: str, tmp_path: Path) -> None:
    settings = settings_for(corpus)
    settings = replace(settings, model=replace(settings.model, width=1 << 62))
    with pytest.raises(UsageError, match="the network of this configuration cannot be built: ") as raised:
        training.train(settings, tmp_path / "run")
    assert "\n" not in str(raised.value)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"cannot write to the run folder .*: it is not a directory"):
        training.train(settings, tmp_path / "file")
