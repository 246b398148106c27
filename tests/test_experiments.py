"""`imputer reproduce`: every experiment in small, what they share, and the maths of those that have some."""

import itertools
import json
import math
import shutil
import tarfile
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from imputer import configs, masking, research, rollin, training
from imputer.corpora import tones
from imputer.data import manifest
from imputer.data.manifest import Manifest
from imputer.decoding import Options
from imputer.errors import UsageError
from imputer.evaluation import scoring
from imputer.model import Imputer
from imputer.recognizer import Recognizer
from imputer.research import bound, datasets, report
from imputer.research.trainings import Lab, Score, Trained, compared, curve, dp, run_name, transcribed
from trainings import imputer

pytestmark = pytest.mark.timeout(900)  # whichever test is first has to wait for every experiment
SMALL = partial(datasets.made_tones, utterances=6, scored=3, steps=(4, 2, 2, 1))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything, run once by the command line on a handful of recordings for a handful of steps."""
    place = tmp_path_factory.mktemp("reproduce")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(datasets.DATASETS, "tones", SMALL)
        imputer(
            "reproduce", "--all", "--quick", "--runs", str(place / "runs"), "--output", str(place / "results")
        )
    return place


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(datasets.DATASETS, "tones", SMALL)


def result(place: Path, name: str) -> dict[str, Any]:
    return json.loads((place / "results" / f"{name}.json").read_text())


# --- the whole


@pytest.mark.parametrize("name", research.EXPERIMENTS)
def test_every_experiment_writes_its_figures_and_its_section(place: Path, name: str) -> None:
    found, module = result(place, name), research.load(name)
    assert found["command"] == f"imputer reproduce {name} --quick"
    assert found["seeds"] == [0] and found["hardware"]["cores"] >= 1
    text = (place / "RESULTS.md").read_text()
    assert f"\n## {name}\n" in text and module.TITLE in text
    assert (place / "results" / f"{name}.svg").is_file() == hasattr(module, "draw")
    for claim in module.claims(found):
        assert claim.claim in text and claim.verdict in (report.HOLDS, report.FAILS, report.OPEN)
    for row in found.get("rows", []):
        assert row["wer"]["low"] <= row["wer"]["value"] <= row["wer"]["high"]
        assert row["passes"] <= max(2 + row["block_size"], 1)


def test_error_rates_are_those_of_the_utterances(place: Path) -> None:
    (test,) = (place / "runs").glob("tones-*/test/manifest.jsonl")
    words = sum(len(u.text.split()) for u in Manifest(test))
    for row in result(place, "table2")["rows"]:
        assert row["wer"]["value"] == pytest.approx(sum(row["word_errors"]) / words)
        assert row["wer_by_seed"] == [pytest.approx(row["wer"]["value"])]


def test_every_row_of_the_main_tables_has_the_same_budget(place: Path) -> None:
    found = result(place, "table2")
    longer = {"CTC, longer": 4 + 2 + 4}  # the expert's steps on top, as the Imputers from scratch have them
    assert all(row["steps"] == longer.get(row["model"], 4 + 2) for row in found["rows"])
    assert all(points[-1]["step"] == longer.get(name, 4 + 2) for name, points in found["curves"].items())
    # Expert; CTC, continued and longer; IM and DP from the expert and from scratch: trained once for both tables.
    assert len(found["trainings"]) == 8
    assert found["training_steps"] == 4 + 6 + 2 + 10 + 2 + 2 + 6 + 6
    against = {(one["second"], one["first"]) for one in found["against_ctc"]}
    assert len(against) == 2 * 2 + 2 * 3 and ("Imputer (DP), from the expert", "CTC, longer") not in against
    assert found["trainings"] == result(place, "table1")["trainings"]


def test_what_is_there_is_not_trained_or_decoded_again(
    place: Path, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("it was there")

    monkeypatch.setattr(training, "train", refuse)
    monkeypatch.setattr("imputer.decoding.decode", refuse)
    before = result(place, "figure5")
    imputer(
        "reproduce", "figure5", "--quick", "--runs", str(place / "runs"), "--output", str(place / "results")
    )
    assert result(place, "figure5") == before


def test_an_interrupted_run_goes_on(small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train, asked = training.train, []

    def interrupted(settings: configs.Config, folder: Path) -> Path:
        asked.append(folder.name)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return train(settings, folder)

    monkeypatch.setattr(training, "train", interrupted)
    words = [
        "reproduce",
        "noise",
        "--quick",
        "--runs",
        str(tmp_path / "r"),
        "--output",
        str(tmp_path / "results"),
    ]
    assert imputer(*words, check=False).returncode == 130
    assert not (tmp_path / "results").exists()
    imputer(*words)
    expert, first, *rest = asked
    assert rest[0] == first and len(rest) == 3 and expert not in rest
    assert len(json.loads((tmp_path / "results" / "noise.json").read_text())["rows"]) == 3


def test_the_report_is_made_from_the_results_alone(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "results", tmp_path / "results")
    (tmp_path / "results" / "topk.notes.md").write_text("What made the difference: nothing.")
    imputer("reproduce", "--report", "--output", str(tmp_path / "results"))
    text = (tmp_path / "RESULTS.md").read_text()
    assert text.replace("What made the difference: nothing.\n\n", "") == (place / "RESULTS.md").read_text()
    assert "made data" in text and "![Table 2, LibriSpeech](results/table2.svg)" in text
    for line in text.splitlines():  # tables are whole
        assert not line.startswith("|") or line.endswith("|")
    imputer("reproduce", "--report", "--output", str(tmp_path / "none" / "results"))
    assert "no results yet" in (tmp_path / "none" / "RESULTS.md").read_text()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "give the name of an experiment"),
        (["table1", "--all"], "give the name of an experiment"),
        (["table9"], "no experiment 'table9'; there are table1"),
        (["table1", "--seeds", "0"], "--seeds must be at least 1"),
        (["paper_size", "--on", "digits"], "makes data of its own"),
        (["table1", "--on", "nothing"], "no data set 'nothing'; there are libri"),
        (["table2", "--data", "nowhere"], "imputer prepare librispeech nowhere --download --split dev-clean"),
    ],
)
def test_mistakes_are_one_line(words: list[str], says: str, tmp_path: Path) -> None:
    said = imputer("reproduce", *words, "--output", str(tmp_path), check=False)
    assert said.returncode == 2 and says in said.stderr and "Traceback" not in said.stderr


def test_they_are_listed(place: Path) -> None:
    said = imputer("reproduce", "--list", "--output", str(place / "results")).stdout
    assert all(name in said for name in research.EXPERIMENTS) and "none yet" not in said


# --- what they share


def test_runs_are_named_after_what_determines_them(tmp_path: Path) -> None:
    dataset = SMALL(tmp_path)
    plain = replace(
        dataset.settings, rollin=configs.Rollin(), training=configs.Training(objective="dynamic_programming")
    )
    start = Trained(tmp_path / "expert", 4)

    def name(
        settings: configs.Config = plain, dataset: Any = dataset, start: Any = start, expert: Any = start
    ) -> str:
        return run_name(settings, dataset, start, expert)

    shutil.copytree(dataset.train.parent, tmp_path / "moved")
    moved = replace(dataset, train=tmp_path / "moved" / "manifest.jsonl")
    same = replace(
        plain, training=replace(plain.training, threads=2), data=replace(plain.data, train=("elsewhere",))
    )
    assert name() == name(same) == name(dataset=moved)
    others = [
        name(replace(plain, rollin=configs.Rollin(masking="uniform"))),
        name(replace(plain, training=replace(plain.training, seed=1))),
        name(replace(plain, model=configs.Model(layers=3))),
        name(start=None),
        name(expert=Trained(tmp_path / "other", 4)),
        name(dataset=replace(dataset, train=dataset.test)),
    ]
    assert len({name(), *others}) == len(others) + 1


def test_decoding_is_that_of_the_recogniser(place: Path) -> None:
    dataset = SMALL(place / "runs")
    lab = Lab(dataset, place / "runs")
    trained = dp(2, from_expert=True)(lab.first)
    utterances = list(Manifest(dataset.test))
    found = transcribed(trained, dataset, utterances, [Options(4, "right_most_last")])
    recognizer = Recognizer.from_pretrained(trained.model)
    said = recognizer.transcribe(utterances, block_size=4, strategy="right_most_last")
    assert [one.text for one in found[Options(4, "right_most_last")]] == [one.text for one in said]
    assert [p["step"] for p in curve(trained)] == [1, 2, 3, 4, 5, 6]


def test_seeds_are_pooled(place: Path) -> None:
    lab = Lab(SMALL(place / "runs"), place / "runs", (0, 1))
    alone = [replace_seeds(lab, (seed,)).score(lambda t: t.expert(), Options(1)) for seed in (0, 1)]
    both = lab.score(lambda t: t.expert(), Options(1))
    assert len(lab.used) == 2
    assert both.by_seed == [one.wer.value for one in alone]
    assert both.wer.value == pytest.approx(np.mean(both.by_seed))


def replace_seeds(lab: Lab, seeds: tuple[int, ...]) -> Lab:
    return Lab(lab.dataset, lab.runs, seeds)


def score(*errors: int) -> Score:
    counted = [scoring.Errors(e, 0, 0, 10) for e in errors]
    return Score(Options(1), counted, counted, 1.0, [0.0])


def test_verdicts_follow_the_interval() -> None:
    worse, better = score(*[4, 3, 5] * 20), score(*[2, 1, 2] * 20)
    fall, rise = compared(("a", worse), ("b", better)), compared(("b", better), ("a", worse))
    even = compared(("a", worse), ("a", worse))
    assert fall["relative"] == pytest.approx(5 / 12 - 1)
    assert [report.expects(one, -1) for one in (fall, rise, even)] == [
        report.HOLDS,
        report.FAILS,
        report.FAILS,  # surely no difference
    ]
    slight = compared(("a", score(*[100] * 200)), ("b", score(*[98, 99] * 100)))
    assert report.expects(slight, -1) == report.OPEN  # another training could undo it
    assert report.expects(slight, -1, room=0) == report.HOLDS
    assert [report.no_better(one) for one in (fall, rise, even)] == [
        report.FAILS,
        report.HOLDS,
        report.HOLDS,
    ]
    assert [report.alike(one, 0.05) for one in (fall, rise, even)] == [
        report.FAILS,
        report.FAILS,
        report.HOLDS,
    ]
    noisy = compared(("a", score(*[9, 0] * 10)), ("b", score(*[0, 9] * 10)))
    assert {report.expects(noisy, -1), report.no_better(noisy), report.alike(noisy, 0.05)} == {report.OPEN}


# --- data


def corpus_folder(folder: Path, speakers: int) -> None:
    (folder / "audio").mkdir(parents=True)
    rows = ["utt\tspeaker\tchapter\tseconds\ttext"]
    for number in range(speakers * 2):
        sound = tones.say("BAD CAB".lower(), np.random.default_rng(number))
        soundfile.write(folder / "audio" / f"u{number}.ogg", sound, 16_000)
        rows.append(f"u{number}\ts{number // 2}\t0\t{len(sound) / 16_000}\tBAD CAB")
    (folder / "manifest.tsv").write_text("\n".join(rows) + "\n")


def test_libri_is_made_from_archives_with_speakers_held_out(tmp_path: Path) -> None:
    for name, speakers in (("libri-dev-clean", 6), ("libri-test-clean-a", 2)):
        corpus_folder(tmp_path / "made" / name, speakers)
        with tarfile.open(tmp_path / f"{name}.tar", "w") as tar:
            tar.add(tmp_path / "made" / name, name)
    dataset = datasets.libri(tmp_path)
    train, valid, test = (list(Manifest(path)) for path in (dataset.train, dataset.valid, dataset.test))
    assert (len(train), len(valid), len(test)) == (4, 8, 4)
    assert not {u.speaker for u in train} & {u.speaker for u in valid}
    assert {u.text for u in train} == {"bad cab"} and Path(test[0].audio_filepath).is_file()
    assert dataset.settings.front_end.name == "moonshine" and "frozen encoder" in dataset.not_comparable
    again = datasets.libri_convolution(tmp_path)
    assert again.train == dataset.train and again.settings.front_end.name == "filterbank_convolution"
    with pytest.raises(UsageError, match="no manifests of altered and synthetic speech"):
        datasets.libri_synthetic(tmp_path)
    tones.make(str(tmp_path / "made-tones"), 3)
    (tmp_path / "syn").mkdir()
    manifest.write(tmp_path / "syn" / "made.jsonl", Manifest(tmp_path / "made-tones" / "manifest.jsonl"))
    more = list(Manifest(datasets.libri_synthetic(tmp_path).train))
    assert [u.id for u in more[:4]] == [u.id for u in train] and len(more) == 7
    assert all(Path(u.audio_filepath).is_file() for u in more)


def test_digits_are_made_from_single_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "STRINGS", 2)
    with pytest.raises(UsageError, match="audiomnist-40spk"):
        datasets.digits(tmp_path)
    folder = tmp_path / "audiomnist-40spk"
    folder.mkdir()
    for speaker, digit in itertools.product((1, 2, 3, 6, 11, 16, 21, 23, 26, 31, 36), range(10)):
        sound = tones.say(tones.ALPHABET[digit % 8], np.random.default_rng(digit))
        soundfile.write(folder / f"{digit}_{speaker:02d}_0.wav", sound, 16_000)
    dataset = datasets.digits(tmp_path)
    speakers = [{u.speaker for u in Manifest(path)} for path in (dataset.train, dataset.valid, dataset.test)]
    assert list(map(len, speakers)) == [1, 2, 8] and len(set.union(*speakers)) == 11
    shifted = datasets.digits_shifted(tmp_path)
    names = [
        [
            run_name(Lab(one, tmp_path).first._settings(kind, 9, {}), one, None, None)
            for one in (dataset, shifted)
        ]
        for kind in ("ctc", "imitation")
    ]
    assert [len(set(pair)) for pair in names] == [1, 2]  # CTC is trained once for both


def test_words_are_parted_from_a_dictionary(tmp_path: Path) -> None:
    lines = [f"{letter}o{letter} B D" for letter in "abcdefgh"]
    (tmp_path / "cmudict.dict").write_text("\n".join(lines) + "\n")
    dataset = datasets.cmudict(tmp_path)
    parts = [[u.id for u in Manifest(path)] for path in (dataset.train, dataset.valid, dataset.test)]
    assert list(map(len, parts)) == [6, 1, 1] and len({word for part in parts for word in part}) == 8
    assert dataset.amount == "6 words" and dataset.settings.front_end.name == "letters"
    assert datasets.made_tones(tmp_path, utterances=2, scored=1).amount.endswith(" h")


# --- the bound


def network(seed: int, tokens: int = 3) -> Imputer:
    torch.manual_seed(seed)
    settings = configs.Model(width=16, layers=1, heads=2, filter_size=16, dropout=0.0)
    made = Imputer(settings, configs.FrontEnd(name="frames", feature_size=4, frame_seconds=0.04), tokens)
    made.output.weight.data *= 8  # far from uniform
    return made.eval()


@pytest.mark.parametrize("noise", bound.NOISES)
@pytest.mark.parametrize("alignment", [[0, 1, 0, 2], [1, 0, 2, 0], [1, 2, 2, 1], [0, 0, 0, 0]])
def test_noise_outcomes_are_those_of_the_rollin(alignment: list[int], noise: str) -> None:
    outcomes = bound.noise_outcomes(alignment, noise)
    drawn = Counter(
        tuple(rollin.NOISES[noise](alignment, torch.Generator().manual_seed(seed))) for seed in range(600)
    )
    assert outcomes.keys() == drawn.keys() and sum(outcomes.values()) == pytest.approx(1)
    for outcome, count in drawn.items():
        assert count / 600 == pytest.approx(outcomes[outcome], abs=0.08)


@pytest.mark.parametrize(("frames", "block_size"), [(4, 4), (6, 3), (7, 3)])
def test_masks_are_those_of_the_policy(frames: int, block_size: int) -> None:
    probabilities = bound.mask_probabilities(frames, block_size)
    assert sum(probabilities.values()) == pytest.approx(1)
    generator = torch.Generator().manual_seed(0)
    drawn = masking.block(torch.full((4000,), frames), block_size=block_size, generator=generator)
    counts = Counter(tuple(row) for row in drawn.tolist())
    assert counts.keys() <= probabilities.keys()
    for mask, chance in probabilities.items():
        assert counts[mask] / 4000 == pytest.approx(chance, abs=0.03)
    entropy = -sum(p * math.log(p) for p in probabilities.values())
    assert bound.masking_entropy(frames, block_size) == pytest.approx(entropy)


@pytest.mark.parametrize("seed", range(4))
def test_both_bounds_hold_exactly(seed: int) -> None:
    model = network(seed)
    acoustic = torch.randn(1, 4, 16, generator=torch.Generator().manual_seed(seed))
    with torch.inference_mode():
        found = bound.bounds(model, acoustic, [0, 1, 0, 2], 2, bound.NOISES[seed % 2])
    # The sum, spelt out: every alignment of (1, 2) over four frames, every mask.
    total = 0.0
    for places in itertools.combinations(range(4), 2):
        alignment = torch.zeros(4, dtype=torch.long)
        alignment[list(places)] = torch.tensor([1, 2])
        for mask in itertools.product((False, True), repeat=4):
            partial_alignment = torch.where(torch.tensor(mask), alignment, model.mask)
            with torch.inference_mode():
                log_probs = model.impute(acoustic, torch.tensor([4]), partial_alignment[None])[0]
            total += math.exp(float(log_probs[torch.arange(4), alignment].sum()))
    assert found["sum"] == pytest.approx(math.log(total), abs=1e-4)
    assert found["imitation_bound"] < found["sum"] and found["dynamic_programming_bound"] < found["sum"]


def test_the_variance_of_gradients_is_that_of_the_definition() -> None:
    gradients = torch.randn(6, 10, generator=torch.Generator().manual_seed(0)) + 1
    moments = bound.Moments()
    for gradient in gradients:
        moments.add([gradient[:4], gradient[4:]])
    assert moments.variance == pytest.approx(float(gradients.var(0).sum()), rel=1e-5)
    signal = gradients.mean(0).square().sum() - gradients.var(0).sum() / 6  # without bias
    assert moments.noise_to_signal == pytest.approx(float(gradients.var(0).sum() / signal), rel=1e-5)


def test_the_order_holds_on_real_rollins(place: Path) -> None:
    found = result(place, "bound")
    for likelihoods in found["likelihoods"].values():
        assert likelihoods["order_broken"] == 0
        assert likelihoods["imitation"] <= likelihoods["dynamic_programming"] <= 0
    for one in itertools.chain(*found["exact"].values()):
        assert max(one["imitation_bound"], one["dynamic_programming_bound"]) <= one["sum"] + 1e-3
