"""From recordings to a better model: the split, the report, and the documented recipe, run as printed."""

import json
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from safetensors.torch import load_file

import imputer as package
from imputer import configs, models, training
from imputer.corpora import tones
from imputer.data import manifest
from imputer.data.manifest import Manifest, Utterance
from imputer.data.splitting import split_off
from imputer.errors import UsageError
from imputer.model import Imputer
from imputer.training import finetuning
from imputer.vocabulary import Vocabulary
from trainings import TINY, imputer, settings_for

ROOT = Path(__file__).parents[1]


def recordings(folder: Path, number: int, *, pitch: float = 1.0, spoken_as=str) -> Path:  # type: ignore[no-untyped-def]
    """Audio with text files of the same name, in the language of tones; another pitch is another speaker."""
    folder.mkdir(parents=True)
    for i in range(number):
        random = np.random.default_rng([7, i])
        text = tones.sentence(random, 3)
        sound, _ = tones.say(text, random)
        stretched = np.interp(np.arange(0, len(sound), pitch), np.arange(len(sound)), sound)
        soundfile.write(folder / f"{i:03d}.wav", stretched, tones.SAMPLE_RATE)
        (folder / f"{i:03d}.txt").write_text(spoken_as(text))
    return folder


# --- the split


def utterances(speakers: int, each: int, files: int = 0) -> list[Utterance]:
    return [
        Utterance(
            f"{s}-{i}", f"{s}-{i % files if files else i}.wav", 2.0, "a", speaker=f"s{s}" if speakers else ""
        )
        for s in range(max(1, speakers))
        for i in range(each)
    ]


@pytest.mark.parametrize(
    ("given", "unit"),
    [
        (utterances(20, 5), "speaker"),
        (utterances(3, 30), "recording"),
        (utterances(0, 50), "recording"),
        (utterances(0, 60, files=12), "recording"),  # slices of longer files
    ],
)
def test_no_speaker_or_recording_is_on_both_sides(given: list[Utterance], unit: str) -> None:
    train, valid, found = split_off(given, share=0.2)
    assert found == unit
    assert sorted(u.id for u in [*train, *valid]) == sorted(u.id for u in given)
    of = (lambda u: u.speaker) if unit == "speaker" else (lambda u: u.audio_filepath)
    assert not {of(u) for u in train} & {of(u) for u in valid}
    assert 0.1 <= len(valid) / len(given) <= 0.3
    assert split_off(given, share=0.2)[1] == valid


def test_one_recording_cannot_be_split() -> None:
    with pytest.raises(UsageError, match="is the only recording"):
        split_off(utterances(0, 5, files=1))


def test_at_most_so_many_minutes_are_taken() -> None:
    given = utterances(2, 100)  # 400 s
    kept = finetuning.first_minutes(given, 2.0)
    assert 110 <= sum(u.duration for u in kept) <= 120
    assert {u.speaker for u in kept} == {"s0", "s1"}
    assert finetuning.first_minutes(given, None) == given and finetuning.first_minutes(given, 99) == given


def test_texts_are_changed_no_more_than_the_vocabulary_needs() -> None:
    vocabulary = Vocabulary.train(["abcdefghijklmnopqrstuvwxyz '"], units="characters")
    assert finetuning.writable("don't", vocabulary) == "don't"
    assert finetuning.writable("Hello, World!", vocabulary) == "hello world"
    assert finetuning.writable("3 apples", vocabulary) == "three apples"
    assert finetuning.writable("I work at NASA.", vocabulary) == "i work at nasa"
    for unknown in ("Привет, мир", "NASA 2024x", "???", ""):
        assert finetuning.writable(unknown, vocabulary) is None


def test_texts_that_the_model_cannot_write_are_dropped_by_name(
    expert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = recordings(tmp_path / "mine", 8)
    (source / "003.txt").write_text("Привет, мир")
    vocabulary = models.load(expert)[1]
    assert len(list(finetuning.readable(source, vocabulary, tmp_path))) == 7
    assert (
        "dropped 1 x text that the model cannot write, first: 003: 'Привет, мир'" in capsys.readouterr().err
    )


# --- staying near the start, keeping the best


def test_weights_that_stay_near_are_nearer(corpus: str, expert: Path, tmp_path: Path) -> None:
    start = load_file(expert / models.WEIGHTS)
    far = {}
    for strength in (0.0, 10.0):
        settings = settings_for(
            corpus, steps=15, start_from=str(expert), stay_near=strength, validate_every=0
        )
        settings = replace(settings, data=replace(settings.data, valid=()))
        made = load_file(training.train(settings, tmp_path / str(strength)) / models.WEIGHTS)
        far[strength] = float(sum((made[name] - start[name]).square().sum() for name in start))
    assert 0 < far[10.0] < 0.5 * far[0.0]


def test_the_penalty_is_the_gradient_of_the_squared_distance(
    corpus: str, expert: Path, tmp_path: Path
) -> None:
    from imputer.data.ranks import Ranks
    from imputer.training.step import pull_to_start

    settings = settings_for(corpus, start_from=str(expert), stay_near=0.3)
    run = training.prepare(settings, tmp_path, Ranks())
    weights = list(run.model.parameters())
    with torch.no_grad():
        for weight in weights:
            weight.add_(torch.randn_like(weight))
    penalty = 0.3 * sum(
        (weight - run.start[name]).square().sum() for name, weight in run.model.named_parameters()
    )
    expected = torch.autograd.grad(penalty, weights)
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    pull_to_start(run)
    assert all(
        torch.allclose(w.grad, g, rtol=1e-4, atol=1e-6) for w, g in zip(weights, expected, strict=True)
    )


def test_staying_near_needs_a_start(corpus: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"stay_near needs training\.start_from"):
        training.train(settings_for(corpus, stay_near=1.0), tmp_path)


def test_the_best_validation_is_kept_which_may_be_the_start(
    corpus: str, expert: Path, tmp_path: Path
) -> None:
    """A learning rate that ruins the model: the start stays the best, and training stops early."""
    settings = settings_for(
        corpus,
        steps=40,
        start_from=str(expert),
        learning_rate=1.0,
        warmup_steps=0,
        schedule="constant",
        validate_every=2,
        keep_best=True,
        patience=3,
    )
    made = training.train(settings, tmp_path)
    start, kept = load_file(expert / models.WEIGHTS), load_file(made / models.WEIGHTS)
    assert all(torch.equal(start[name], kept[name]) for name in start)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "valid" in line] == [0, 2, 4, 6]
    training.train(settings, tmp_path)  # finished: resumes to the same end


# --- finetune


def test_a_few_recordings_make_the_model_better(expert: Path, tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """The expert is trained on eight sentences; it must learn new sentences at another pitch."""
    for name, value in {"FEWEST_STEPS": 150, "LEARNING_RATE": 3e-3, "KEPT": 1.0}.items():
        monkeypatch.setattr(finetuning, name, value)  # it is far from what it must learn
    source = recordings(tmp_path / "mine", 60, pitch=1.04, spoken_as=str.upper)
    report = package.finetune(expert, source, tmp_path / "model")
    assert report.before.value > report.after.value
    assert report.comparison.difference.high < 0 and report.verdict == "better"
    assert report.split_by == "recording" and report.recordings + report.valid_recordings == 60
    assert "before" in str(report) and "after" in str(report)
    models.load(tmp_path / "model")
    before = (tmp_path / "model" / models.WEIGHTS).read_bytes()
    assert package.finetune(expert, source, tmp_path / "model").after == report.after  # nothing is done twice
    assert (tmp_path / "model" / models.WEIGHTS).read_bytes() == before


def test_weights_that_are_worse_are_discarded(
    corpus: str,
    expert: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A learning rate that ruins the model: the output is the model it started from, and the report says so."""
    for name, value in {"FEWEST_STEPS": 20, "LEARNING_RATE": 1.0, "KEPT": 1.0}.items():
        monkeypatch.setattr(finetuning, name, value)
    known = [replace(one, id=f"{one.id}-{copy}") for one in Manifest(corpus) for copy in range(8)]
    manifest.write(tmp_path / "known.jsonl", known)
    report = package.finetune(expert, tmp_path / "known.jsonl", tmp_path / "model")
    assert report.worse and report.verdict.startswith("worse: the new weights are discarded")
    start, kept = load_file(expert / models.WEIGHTS), load_file(tmp_path / "model" / models.WEIGHTS)
    assert all(torch.equal(start[name], kept[name]) for name in start)


def test_weights_move_part_of_the_way_and_all_else_stays(expert: Path, tmp_path: Path) -> None:
    """The settings of the language model were lost: the new model decoded with the defaults."""
    start, end, output = (tmp_path / name for name in ("start", "end", "output"))
    model, vocabulary = models.load(expert)
    models.save(start, model, vocabulary, half=True)
    (start / models.LANGUAGE_MODEL).write_bytes(b"some bytes")
    models.store_language_model_settings(start, configs.LanguageModel(lm_weight=0.123))
    for weight in model.parameters():
        weight.data += 1.0
    models.save(end, model, vocabulary)
    finetuning.write_between(start, end, output)
    first, moved = load_file(start / models.WEIGHTS), load_file(output / models.WEIGHTS)
    for name, _ in model.named_parameters():
        assert moved[name].dtype == torch.float16
        assert torch.allclose(moved[name].float(), first[name].float() + finetuning.KEPT, atol=4e-3), name
    assert models.language_model_settings(output).lm_weight == 0.123
    assert (output / models.LANGUAGE_MODEL).read_bytes() == b"some bytes"


def test_the_layers_above_an_encoder_move_less(tmp_path: Path) -> None:
    vocabulary = Vocabulary.train(["abc"], size=4, units="characters")
    shape = configs.Model(width=32, layers=1, heads=2, filter_size=32)
    model = Imputer(shape, configs.FrontEnd(name="trainable_moonshine", stack=3), vocabulary.size)
    models.save(tmp_path / "start", model, vocabulary)
    for weight in model.parameters():
        weight.data += 1.0
    models.save(tmp_path / "end", model, vocabulary)
    finetuning.write_between(tmp_path / "start", tmp_path / "end", tmp_path / "output")
    first, moved = (load_file(tmp_path / name / models.WEIGHTS) for name in ("start", "output"))
    for name, _ in model.named_parameters():
        distance = finetuning.KEPT if name.startswith("front_end.encoder.") else finetuning.KEPT_ABOVE
        assert torch.allclose(moved[name], first[name] + distance, atol=1e-5), name


@pytest.mark.parametrize(("front_end", "altered"), [("filterbank_convolution", True), ("letters", False)])
def test_sound_is_altered_where_training_reads_sound(front_end: str, altered: bool, tmp_path: Path) -> None:
    settings = finetuning.small_data_settings(
        configs.Model(width=32, heads=2), configs.FrontEnd(name=front_end), tmp_path, tmp_path, 60.0
    )
    assert bool(settings.augmentation.of_sound) is altered and settings.augmentation.spec_augment


def test_the_command_takes_a_manifest_and_says_when_it_cannot_tell(
    expert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finetuning, "FEWEST_STEPS", 12)
    monkeypatch.setattr(finetuning, "EPOCHS", 1)
    made = tones.make(str(tmp_path / "tones"), 60)
    words = ("finetune", str(expert), made, "-o", str(tmp_path / "model"), "--minutes")
    said = imputer(*words, "0.5")
    assert "before" in said.stdout and "after" in said.stdout and "without a language model" in said.stdout
    assert f"model written to {tmp_path / 'model'}" in said.stdout
    assert re.search(r"^difference +[+-][\d.]+ points  \([+-][\d.]+ to [+-][\d.]+\)$", said.stdout, re.M)
    assert re.search(r"to tell: \d+ words were scored; the new weights are kept|better", said.stdout)
    assert re.search(r"model/finetuning \(\d+ MB of checkpoints and manifests\) may be deleted", said.stdout)
    wanted = (
        r"^\d+ recordings to train on, 0\.\d minutes; \d+ recordings held out \(split by recording\)",
        r"^word error rate before: [\d.]+ %$",
        r"^training; the rates on the way .* will be kept: 50 %",
        r"^step 0: WER [\d.]+ %, CER [\d.]+ % in 1 pass; WER [\d.]+ %, CER [\d.]+ % in 8 passes",
        r"^word error rate after: [\d.]+ %$",
    )
    places = [re.search(pattern, said.stderr, re.M) for pattern in wanted]
    assert all(places), said.stderr
    assert [place.start() for place in places if place] == sorted(p.start() for p in places if p)
    # Other recordings are refused, without an option of another command.
    other = imputer(*words, "0.3", check=False)
    assert other.returncode == 2 and "--accept-changed-data" not in other.stderr
    assert "the training data changed since" in other.stderr
    assert "To start again, remove" in other.stderr


@pytest.mark.parametrize(
    ("number", "output", "minutes", "says"),
    [
        (4, "model", "1", "fine-tuning needs at least 60 s"),
        (4, "model", "-1", "minutes must be a number above 0"),
        (4, "", "1", "is the model to start from"),
    ],
)
def test_what_cannot_work_is_one_line(
    expert: Path, tmp_path: Path, number: int, output: str, minutes: str, says: str
) -> None:
    source = recordings(tmp_path / "mine", number)
    target = str(tmp_path / output) if output else str(expert)
    said = imputer("finetune", str(expert), str(source), "-o", target, "--minutes", minutes, check=False)
    assert said.returncode == 2 and says in said.stderr and "Traceback" not in said.stderr


def test_texts_of_another_language_and_single_recordings_are_named(expert: Path, tmp_path: Path) -> None:
    """It said "nothing is the only recording", and that an audio file is not a UTF-8 table."""
    source = recordings(tmp_path / "mine", 3)
    target = ("-o", str(tmp_path / "model"))
    said = imputer("finetune", str(expert), str(source / "000.wav"), *target, check=False)
    assert said.returncode == 2 and "000.wav is one recording; give the folder" in said.stderr
    for path in source.glob("*.txt"):
        path.write_text("Привет, мир")
    said = imputer("finetune", str(expert), str(source), *target, check=False)
    assert said.returncode == 2 and said.stderr.startswith(
        f"imputer: {source}: nothing is left to train on: 3 x text that the model cannot write, first: 0"
    )


def test_an_output_that_would_hide_something_is_refused(
    expert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = recordings(tmp_path / "mine", 2)
    monkeypatch.chdir(tmp_path)
    for output, says in (("english", "which the folder would hide"), ("mine", "mine holds the recordings")):
        said = imputer("finetune", str(expert), str(source), "-o", output, check=False)
        assert said.returncode == 2 and says in said.stderr
    with pytest.raises(UsageError, match="minutes must be a number above 0, got 'ten'"):
        package.finetune(expert, source, "model", minutes="ten")  # type: ignore[arg-type]
    said = imputer("finetune", "mine", "mine", "-o", "model", check=False)
    assert said.returncode == 2 and "mine is not a model folder: config.toml is missing" in said.stderr


# --- the recipe of the documentation


def recipe() -> list[list[str]]:
    """The commands of docs/training.md, in their order."""
    page = (ROOT / "docs" / "training.md").read_text(encoding="utf-8").replace("\\\n", " ")
    blocks = re.findall(r"```\n(.*?)```", page, re.S)
    lines = [line for block in blocks for line in block.splitlines() if line.startswith("imputer")]
    return [shlex.split(line)[1:] for line in lines]


def test_the_recipe_works_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a folder of 50 recordings; only smaller and shorter than printed."""
    recordings(tmp_path / "RECORDINGS", 50)
    shutil.copyfile(tmp_path / "RECORDINGS/000.wav", tmp_path / "your.wav")
    monkeypatch.chdir(tmp_path)
    small = {f"model.{key}": getattr(TINY, key) for key in ("width", "layers", "heads", "filter_size")}
    small |= {
        "front_end.channels": 4,
        "vocabulary.units": "characters",
        "training.steps": 2,
        "data.workers": 0,
    }
    shorter = [word for key, value in small.items() for word in (f"--{key}", str(value))]
    commands = recipe()
    verbs = ["prepare", "prepare", "train", "align", "train", "evaluate", "transcribe"]
    assert [words[0] for words in commands] == verbs
    for words in commands:
        said = imputer(*words, *(shorter if words[0] == "train" else []))
        if words[0] == "train":
            assert re.search(r"^step 0: WER [\d.]+ %, CER [\d.]+ % in 1 pass", said.stderr, re.M)
            assert (
                "too little to train from scratch" in said.stderr
                and "imputer finetune english" in said.stderr
            )
        if "runs/expert" in words:  # the next command as it is hinted, and as it is printed
            hint = next(line for line in said.stdout.splitlines() if line.startswith("as expert:"))
            assert shlex.split(hint)[3:] == commands[commands.index(words) + 1]
    assert len(Manifest("data/train.jsonl")) + len(Manifest("data/valid.jsonl")) == 50
    assert len(Manifest("data/valid.jsonl")) == 5
    models.load(Path("runs/imputer/model"))


def test_a_shipped_name_is_a_start_like_any_folder(tmp_path: Path) -> None:
    made = tones.make(str(tmp_path / "tones"), 3)
    settings = settings_for(made, start_from="digits")
    settings = replace(settings, model=configs.Model(width=32, heads=2))
    with pytest.raises(UsageError, match="does not fit the model"):
        training.train(replace(settings, data=replace(settings.data, unreadable_limit=1.0)), tmp_path / "run")
