"""`imputer reproduce`: every experiment in small, what they share, and the maths of those that have some."""

import itertools
import json
import math
import re
import shutil
import subprocess
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
from imputer.corpora.librispeech import SUBSETS
from imputer.data.manifest import Manifest
from imputer.errors import ImputerError, UsageError
from imputer.evaluation.trials import Estimate
from imputer.model import Imputer
from imputer.recognizer import Recognizer
from imputer.research import bound, claims, datasets, migration, provenance, report, results
from imputer.research.results import Result
from imputer.research.trainings import Lab, Trained, curve, dp, kinds, run_name, transcribed, way
from imputer.vocabulary import Vocabulary
from trainings import imputer

pytestmark = pytest.mark.timeout(900)  # whichever test is first has to wait for every experiment
ROOT = Path(__file__).parents[1]
SMALL = partial(datasets.generated_tones, utterances=6, scored=3, steps=(4, 2, 2, 1))
NAMES = [name for name in research.EXPERIMENTS if name != "english"]  # which needs models of other trainings


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything, run once by the command line on a handful of recordings for a handful of steps."""
    place = tmp_path_factory.mktemp("reproduce")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(datasets.DATASETS, "tones", SMALL)
        folders = ("--runs", str(place / "runs"), "--output", str(place / "results"))
        imputer("reproduce", "--all", "--quick", *folders)
        models = place / "models"
        for kind, run in (("ctc", "ctc-10"), ("dp", "dp-6")):
            found = sorted((place / "runs").glob(f"tones-{run}-*"))
            shutil.copytree(found[0], models / kind)
        imputer("reproduce", "english", "--quick", "--models", str(models), *folders)
    return place


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(datasets.DATASETS, "tones", SMALL)


def result(place: Path, name: str) -> Result:
    return Result.read(place / "results" / f"{name}.json")


# --- the whole


@pytest.mark.parametrize("name", research.EXPERIMENTS)
def test_every_experiment_writes_its_figures_and_its_page(place: Path, name: str) -> None:
    found, module = result(place, name), research.load(name)
    models = " --models models" if name == "english" else ""
    assert found["provenance"]["command"] == f"imputer reproduce {name} --quick{models}"
    page = (place / "docs" / "results" / f"{name}.md").read_text()
    assert module.TITLE in page and module.QUESTION in page and "## Provenance" in page
    assert (place / "docs" / "results" / f"{name}.svg").is_file() == hasattr(module, "draw")
    for claim in report.claims_about(found):
        assert claim.claim in page and claim.verdict in (claims.HOLDS, claims.FAILS, claims.OPEN)
    for row in found.rows.values():
        assert row["passes"] <= max(2 + row["way"]["block_size"], 1)
        assert len(row["words"]) == len(row["trained"]) == 1
        tokens = np.sum([row["tokens"][kind] for kind in results.KINDS], axis=0)
        assert (tokens == 0).tolist() == (np.array(row["characters"]) == 0).tolist()


@pytest.mark.parametrize("name", NAMES)
def test_results_say_where_they_came_from(place: Path, name: str) -> None:
    known, data = result(place, name)["provenance"], result(place, name).data
    for key in ("commit", "dirty", "command", "seeds", "time", "processor", "cores", "packages"):
        assert key in known
    assert re.fullmatch("[0-9a-f]{40}", known["commit"]) or not (ROOT / ".git").exists()
    assert torch.__version__.startswith(known["packages"]["torch"].split("+")[0])
    if research.load(name).DATASET:
        assert known["configuration"]["model.width"] == 64 and known["code"]
        assert set(data["fingerprints"]) == {"train", "valid", "test"}
        for run in known["trainings"].values():
            assert run["code"] == known["code"] and run["seconds"] > 0 and run["processor"]


def test_figures_are_those_of_the_utterances(place: Path) -> None:
    found = result(place, "table2")
    (test,) = (place / "runs").glob("tones-*/test/manifest.jsonl")
    words = sum(len(u.text.split()) for u in Manifest(test))
    assert sum(found["utterances"]["words"]) == words
    for name, row in found.rows.items():
        assert found["figures"][name]["wer"]["value"] == pytest.approx(sum(row["words"][0]) / words)


def test_every_row_of_the_main_tables_has_the_same_budget(place: Path) -> None:
    found = result(place, "table2")
    assert {name.split(",")[0]: row["steps"] for name, row in found.rows.items()} == {
        "CTC": 10,
        "IM": 6,
        "DP": 6,
    }
    trained = found["provenance"]["trainings"]
    assert len(trained) == 4  # the expert, CTC, IM and DP: trained once for both tables
    assert trained == result(place, "table1")["provenance"]["trainings"]


def test_what_is_there_is_not_trained_or_decoded_again(
    place: Path, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("it was there")

    monkeypatch.setattr(training, "train", refuse)
    monkeypatch.setattr("imputer.decoding.decode", refuse)
    before = result(place, "figure5")
    folders = ("--runs", str(place / "runs"), "--output", str(place / "results"))
    imputer("reproduce", "figure5", "--quick", *folders)
    assert result(place, "figure5")["rows"] == before["rows"]


def test_an_interrupted_run_resumes(small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train, asked = training.train, []

    def interrupted(settings: configs.Config, folder: Path) -> Path:
        asked.append(folder.name)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return train(settings, folder)

    monkeypatch.setattr(training, "train", interrupted)
    folders = ("--runs", str(tmp_path / "r"), "--output", str(tmp_path / "results"))
    words = ["reproduce", "noise", "--quick", *folders]
    assert imputer(*words, check=False).returncode == 130
    assert not (tmp_path / "results").exists()
    imputer(*words)
    expert, first, *rest = asked
    assert rest[0] == first and len(rest) == 3 and expert not in rest
    assert len(Result.read(tmp_path / "results" / "noise.json").rows) == 3


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "give the name of an experiment"),
        (["table1", "--all"], "give the name of an experiment"),
        (["table9"], "no experiment 'table9'; there are table1"),
        (["table1", "--seeds", "0"], "--seeds must be at least 1"),
        (["paper_size", "--on", "digits"], "generates its own data"),
        (["table1", "--on", "nothing"], "no data set 'nothing'; there are libri"),
        (
            ["table2", "--data", "nowhere"],
            "imputer prepare librispeech nowhere --download --split dev-clean-train",
        ),
        (["english", "--quick"], "english needs --models DIR"),
    ],
)
def test_mistakes_are_one_line(words: list[str], says: str, tmp_path: Path) -> None:
    said = imputer("reproduce", *words, "--output", str(tmp_path), "--runs", str(tmp_path), check=False)
    assert said.returncode == 2 and says in said.stderr and "Traceback" not in said.stderr


def test_they_are_listed(place: Path) -> None:
    said = imputer("reproduce", "--list", "--output", str(place / "results")).stdout
    assert all(name in said for name in research.EXPERIMENTS) and "none yet" not in said


# --- the report, and whether it says what the errors say


def copied(place: Path, to: Path) -> Path:
    for name in ("results", "docs"):
        shutil.copytree(place / name, to / name)
    shutil.copy(place / "RESULTS.md", to)
    return to / "results"


def test_the_report_is_made_from_the_results_alone(place: Path, tmp_path: Path) -> None:
    folder = copied(place, tmp_path)
    before = {path: path.read_bytes() for path in (tmp_path / "docs" / "results").iterdir()}
    (folder / "topk.notes.md").write_text(
        "CTC {table2: CTC} %, DP {table2: CTC > DP, 8 passes}, {table2: CTC >> DP, 8 passes}"
    )
    imputer("reproduce", "--report", "--output", str(folder))
    changed = [path.name for path, content in before.items() if path.read_bytes() != content]
    assert changed == ["topk.md"]
    table2 = result(place, "table2")
    gain = table2.difference("CTC", "DP, 8 passes")
    said = f"CTC {100 * table2.rate('CTC').value:.1f} %, DP {claims.points(gain)}, {100 * gain.relative[0]:+.0f} %"
    assert said in (tmp_path / "docs" / "results" / "topk.md").read_text()
    for line in (tmp_path / "RESULTS.md").read_text().splitlines():  # tables are whole
        assert not line.startswith("|") or line.endswith("|")
    (folder / "topk.notes.md").write_text("{table2: nobody}")
    assert (
        "is in no results file"
        in imputer("reproduce", "--report", "--output", str(folder), check=False).stderr
    )
    imputer("reproduce", "--report", "--output", str(tmp_path / "none" / "results"))
    assert "no results yet" in (tmp_path / "none" / "RESULTS.md").read_text()


def test_verify_finds_a_figure_that_does_not_follow(place: Path, tmp_path: Path) -> None:
    folder = copied(place, tmp_path)
    assert "every figure follows" in imputer("reproduce", "--verify", "--output", str(folder)).stdout
    path = folder / "table2.json"
    content = json.loads(path.read_text())

    def tampered(change: Any) -> str:
        other = json.loads(json.dumps(content))
        change(other)
        path.write_text(json.dumps(other))
        said = imputer("reproduce", "--verify", "--output", str(folder), check=False)
        assert said.returncode == 1 and "Traceback" not in said.stderr
        return said.stderr

    said = tampered(lambda c: c["figures"]["CTC"]["wer"].update(value=0.01))
    assert "table2.json: figures, CTC, wer, value is 0.01" in said
    assert "differences 1, low is -1" in tampered(lambda c: c["differences"][0].update(low=-1))
    assert "figures, CTC, wer" in tampered(lambda c: c["rows"][0]["words"][0].__setitem__(0, 99))

    def unproven(change: Any) -> str:
        return tampered(lambda c: (c.update(quick=False), change(c["provenance"])))

    assert "its provenance has no time" in unproven(lambda known: known.pop("time"))
    assert "made by code that was not committed" in unproven(lambda known: known.update(dirty=True))
    assert "its provenance" not in unproven(lambda known: (known.pop("time"), known.update(recorded="yes")))
    path.write_text(json.dumps(content))
    page = tmp_path / "docs" / "results" / "table2.md"
    page.write_text(page.read_text().replace("| CTC | 1 |", "| CTC | 2 |"))
    assert "table2.md: line" in imputer("reproduce", "--verify", "--output", str(folder), check=False).stderr


def test_the_reported_figures_follow_from_the_stored_errors() -> None:
    """RESULTS.md and docs/results are what the files in results/ say, and these are what their utterances say."""
    assert report.verify(ROOT / "results") == []
    for path in (ROOT / "docs" / "results").glob("*.md"):
        for picture in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", path.read_text()):
            assert (path.parent / picture).is_file()
    every = results.read_all(ROOT / "results")
    wanted = {"index.md", "summary.svg"} | {f"{name}.md" for name in every}
    wanted |= {f"{name}.svg" for name, one in every.items() if hasattr(research.load(one.experiment), "draw")}
    assert {path.name for path in (ROOT / "docs" / "results").iterdir()} == wanted  # nothing is left over


def test_seeds_are_shown_apart(place: Path, tmp_path: Path) -> None:
    content = json.loads((place / "results" / "table2.json").read_text())
    for row in content["rows"]:
        row["words"].append([errors // 2 for errors in row["words"][0]])
        row["characters"] *= 2
    found = results.completed("table2", content, [("CTC", "DP, 8 passes")])
    page = report.page(place / "results", found, {})
    rates = ", ".join(f"{100 * rate:.1f}" for rate in found.trials("CTC").by_seed)
    assert (
        "WER % by seed" in page
        and f"| {rates} |" in page
        and found.difference("CTC", "DP, 8 passes").seeds == 2
    )
    report.draw(found, tmp_path)
    assert (tmp_path / "table2.svg").stat().st_size > 10_000


def test_the_summary_fits_a_screen() -> None:
    text = (ROOT / "RESULTS.md").read_text()
    assert len(text.splitlines()) <= 60 and len(text) < 6000


# --- provenance


def test_the_fingerprint_of_code_is_that_of_what_runs(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    source = '"""What it is."""\n\ndef double(x):\n    """Twice."""\n    return 2 * x  # by two\n'
    file = tmp_path / "data" / "a.py"

    def fingerprint(text: str) -> str:
        file.write_text(text)
        return provenance.code.__wrapped__(("data",), tmp_path)

    first = fingerprint(source)
    assert (
        fingerprint(
            source.replace("# by two", "# twice").replace("Twice.", "x, x").replace("What it is", "A")
        )
        == first
    )
    assert fingerprint(source.replace("2 * x", "2  *  (x)")) == first
    assert fingerprint(source.replace("2 * x", "3 * x")) != first
    (tmp_path / "data" / "recordings.py").write_text("x = 1")  # changes no outcome
    assert fingerprint(source) == first
    (tmp_path / "data" / "b.py").write_text("x = 1")
    assert fingerprint(source) != first


def test_the_commit_is_that_of_our_own_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "src" / "imputer"
    package.mkdir(parents=True)
    monkeypatch.setattr(provenance, "PACKAGE", package)
    assert provenance.checkout() == ("", False)
    git = partial(subprocess.run, cwd=tmp_path, check=True, capture_output=True)
    git(["git", "init"])
    (package / "__init__.py").write_text("")
    assert provenance.checkout() == ("", False)  # a package inside another repository, not part of it
    git(["git", "add", "."])
    git(["git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-m", "first"])
    commit, dirty = provenance.checkout()
    assert len(commit) == 40 and not dirty
    (package / "__init__.py").write_text("x = 1")
    assert provenance.checkout() == (commit, True)


def test_the_code_of_a_training_is_found() -> None:
    for places in (provenance.TRAINING, provenance.DECODING):
        for one in (*places, *provenance.ASIDE):
            assert (provenance.PACKAGE / one).exists(), one


def test_runs_are_named_after_what_determines_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    monkeypatch.setattr(provenance, "code", lambda _: "other code")
    assert len({name(), *others}) == len(others) + 1
    monkeypatch.undo()
    assert name() not in others


# --- rows and verdicts


def test_decoding_is_that_of_the_recogniser(place: Path) -> None:
    dataset = SMALL(place / "runs")
    trained = dp(2, from_expert=True)(Lab(dataset, place / "runs").first)
    utterances = list(Manifest(dataset.test))
    one = way(4, "right_most_last")
    found = transcribed(trained, dataset, utterances, [one])[one]
    said = Recognizer.from_pretrained(trained.model).transcribe(
        utterances, block_size=4, strategy="right_most_last"
    )
    assert [each.text for each in found] == [each.text for each in said]
    assert [p["step"] for p in curve(trained)] == [0, 1, 2, 3, 4, 5, 6]


def test_seeds_stay_apart(place: Path) -> None:
    dataset = SMALL(place / "runs")
    alone = [Lab(dataset, place / "runs", (seed,)).row("a", lambda t: t.expert(), way(1)) for seed in (0, 1)]
    both = Lab(dataset, place / "runs", (0, 1)).row("a", lambda t: t.expert(), way(1))
    assert both["words"] == [one["words"][0] for one in alone] and len(set(both["trained"])) == 2


def test_seeds_are_added_where_the_first_were_not_trained(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = (
        "reproduce",
        "table2",
        "--quick",
        "--runs",
        str(tmp_path),
        "--output",
        str(tmp_path / "results"),
    )
    imputer(*command)
    one = Result.read(tmp_path / "results" / "table2.json")
    for run in [*tmp_path.glob("tones-ctc-*"), *tmp_path.glob("tones-im-*"), *tmp_path.glob("tones-dp-*")]:
        shutil.rmtree(run)
    imputer(*command, "--seeds", "2", "--add-seeds")
    two = Result.read(tmp_path / "results" / "table2.json")
    for name, row in one.rows.items():
        now = two.rows[name]
        assert now["trained"][0] == row["trained"][0] and not (tmp_path / row["trained"][0]).exists()
        assert (tmp_path / now["trained"][1] / "model").is_dir()
        assert len(now["words"]) == 2 and now["words"][0] == row["words"][0]
        assert (
            now["characters"][0] == row["characters"][0]
            and now["tokens"]["wrong"][0] == row["tokens"]["wrong"][0]
        )
    assert one["provenance"]["trainings"].items() < two["provenance"]["trainings"].items()
    # Another decoder would write other errors.
    monkeypatch.setattr(provenance, "DECODING", (*provenance.DECODING, "transcripts.py"))
    again = imputer(*command, "--seeds", "1", "--add-seeds")
    assert "decoded by other code; its seeds are not kept" in again.stderr
    assert Result.read(tmp_path / "results" / "table2.json").rows["CTC"]["words"] == one.rows["CTC"]["words"]


def test_a_model_that_was_trained_elsewhere_counts_once(place: Path) -> None:
    """With --seeds 3 it was three trainings without any variation: every difference to it was settled."""
    lab = Lab(SMALL(place / "runs"), place / "runs", (0, 1, 2))
    row = lab.row("a", lambda _: Trained(place / "models" / "ctc", 0), way(1))
    assert row["trained"] == ["ctc"] and len(row["words"]) == 1


def test_other_weights_in_the_same_folder_are_decoded_anew(place: Path, tmp_path: Path) -> None:
    lab = Lab(SMALL(place / "runs"), place / "runs")
    for kind in ("ctc", "dp"):  # dp takes the place of ctc
        shutil.copytree(place / "models" / kind / "model", tmp_path / "run" / "model", dirs_exist_ok=True)
        row = lab.row("a", lambda _: Trained(tmp_path / "run", 0), way(1))
        wanted = lab.row("a", lambda _, kind=kind: Trained(place / "models" / kind, 0), way(1))  # type: ignore[misc]
        assert row["characters"] == wanted["characters"]
    assert len(list((tmp_path / "run" / "decoded").glob("*.json"))) == 2


def test_rows_that_are_done_are_kept_when_the_next_is_interrupted(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("reproduce", "letters_ablation", "--quick", "--runs", str(tmp_path / "runs"))
    command += ("--output", str(tmp_path / "results"))
    train, started = training.train, []

    def interrupted(settings: configs.Config, folder: Path) -> Path:
        started.append(folder.name)
        if len(started) == 3:
            raise SystemExit(130)  # as after Ctrl-C
        return train(settings, folder)

    monkeypatch.setattr(training, "train", interrupted)
    said = imputer(*command)
    assert "stopped before CTC, as many all-masked as 0.5 was done" in said.stderr
    one = Result.read(tmp_path / "results" / "letters_ablation.json")
    assert list(one.rows) == ["CTC", "CTC, as many all-masked as DP"] and not one.pairs
    assert "Not run yet: DP; " in (tmp_path / "docs" / "results" / "letters_ablation.md").read_text()
    for run in (tmp_path / "runs").glob("tones-ctc-*"):  # another machine
        shutil.rmtree(run)
    imputer(*command, "--add-seeds")
    two = Result.read(tmp_path / "results" / "letters_ablation.json")
    assert len(two.rows) > 8 and two.rows["CTC"] == one.rows["CTC"] and two.pairs
    assert two["curves"]["CTC"] == one["curves"]["CTC"] and not set(started[:2]) & set(started[3:])


def test_dropout_of_an_imputer_is_not_that_of_its_expert(place: Path) -> None:
    """The rows of letters_ablation change one thing: all rows learn from the same expert."""
    trained = result(place, "letters_ablation")["provenance"]["trainings"]
    changed = [run["settings"] for run in trained.values()]
    assert sum(run.get("model.dropout") == 0.3 for run in changed) == 1
    assert sum(name.startswith("tones-ctc-4-") for name in trained) == 1


def test_errors_a_language_model_would_fix_are_counted(place: Path) -> None:
    dataset = SMALL(place / "runs")
    known: list[list[int]] = []

    class Strict:
        """Gives the references probability 1 and everything else next to none."""

        def check(self, vocabulary: Vocabulary) -> None:
            known.extend(vocabulary.encode(u.text) for u in Manifest(dataset.test))

        def score(self, tokens: list[int], *, end: bool) -> float:
            return 0.0 if tokens in known else -100.0

    row = Lab(dataset, place / "runs", lm=Strict()).row("a", lambda t: t.expert(), way(1))
    assert row["fixable"] == [[int(errors == 1) for errors in row["words"][0]]]


def test_kinds_of_errors() -> None:
    assert kinds([1, 2, 3], [1, 1, 2, 4]) == {"wrong": 1, "dropped": 0, "doubled": 1, "inserted": 0}
    assert kinds([1, 2, 3, 4], [1, 3, 4, 5]) == {"wrong": 0, "dropped": 1, "doubled": 0, "inserted": 1}


def test_verdicts_follow_the_interval() -> None:
    def found(low: float, high: float, **more: Any) -> Estimate:
        return Estimate((low + high) / 2, low, high, **{"seeds": 3, "base": 1.0} | more)

    lower, higher, even = found(-0.3, -0.2), found(0.2, 0.3), found(-0.005, 0.005)
    wide, slight = found(-0.4, 0.4), found(-0.03, -0.01)
    holds, fails, left = claims.HOLDS, claims.FAILS, claims.OPEN
    assert [claims.expects(one, -1) for one in (lower, higher, even, wide, slight)] == [
        holds,
        fails,
        fails,
        left,
        holds,
    ]
    assert claims.expects(found(-0.008, -0.001), -1) == fails  # significant, and too small to count
    assert [claims.no_better(one) for one in (lower, higher, even, wide)] == [fails, holds, holds, left]
    assert [claims.alike(one, 0.05) for one in (lower, higher, even, wide)] == [fails, fails, holds, left]
    alone = [
        replace(one, seeds=1) for one in (lower, higher, even)
    ]  # what other trainings would do is not known
    for verdict in (
        lambda one: claims.expects(one, -1),
        claims.no_better,
        lambda one: claims.alike(one, 0.05),
    ):
        assert {verdict(one) for one in alone} == {left}
    once = replace(lower, seeds=1, paired=True)  # one model, decoded in two ways
    assert claims.expects(once, -1) == holds
    assert [claims.alone(one) for one in (lower, once, alone[0])] == ["", ", one training", ", one seed"]


# --- migration


def old_file(folder: Path, words: list[int], **more: Any) -> dict[str, Any]:
    rows = []
    for model, size in (
        ("CTC, longer", 1),
        ("CTC", 1),
        *((f"Imputer ({o}), from scratch", n) for o in ("IM", "DP") for n in (1, 8)),
    ):
        errors = [(e + size) % 3 for e in words]
        row = {
            "name": f"{model}, {size}",
            "model": model,
            "block_size": size,
            "strategy": "block",
            "options": {},
        }
        row |= {"passes": size, "steps": 6, "word_errors": errors, "character_errors": errors}
        rows.append(row | {"wer": {"value": sum(errors) / 20}, "cer": {"value": sum(errors) / 70}})
    data = {"name": "libri", "about": "dev-clean less 4 speakers; scored on 20 speakers of test-clean"}
    data |= {"not_comparable": "made", "train_hours": 1.0, "test_utterances": 10}
    content = {
        "experiment": "table2",
        "quick": False,
        "command": "imputer reproduce table2",
        "seeds": [0],
        "data": data,
    }
    content |= {"hardware": {"processor": "p", "python": "3", "torch": "2", "imputer": "0"}, "rows": rows}
    content |= {"steps": {"expert": 2, "imputer": 2, "analysis": 2}, "trainings": {"run": 3}} | more
    (folder / "table2.json").write_text(json.dumps(content))
    return content


def test_old_results_are_migrated_if_their_errors_add_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "results"
    folder.mkdir()
    lines = [
        json.dumps(
            {
                "id": f"u{n}",
                "audio_filepath": "a.wav",
                "duration": 1.0,
                "text": "bad cab",
                "speaker": f"{n % 5}",
            }
        )
        for n in range(10)
    ]
    (tmp_path / "libri-test-clean-a.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "bound.json").write_text(json.dumps({"experiment": "bound"}))
    old = old_file(folder, [*range(10)])
    migration.main([str(folder), "--data", str(tmp_path)])
    said = capsys.readouterr().out
    assert "bound: dropped" in said and not (folder / "bound.json").exists()
    found = results.read_all(folder)
    assert list(found) == ["start", "table2"] and not any(results.check(one) for one in found.values())
    table2 = found["table2"]
    assert list(table2.rows) == ["CTC", "IM, 1 pass", "IM, 8 passes", "DP, 1 pass", "DP, 8 passes"]
    assert table2.rate("CTC").value == old["rows"][0]["wer"]["value"]
    assert (
        table2.difference("DP, 1 pass", "DP, 8 passes").paired
        and not table2.difference("CTC", "DP, 1 pass").paired
    )
    assert table2.data["about"] == "dev-clean without its held-out speakers; scored on test-clean-a"
    assert "Recorded before provenance" in report.page(folder, table2, found)
    old["rows"][1]["word_errors"][3] += 1
    old_file(folder, [*range(10)], rows=old["rows"])
    with pytest.raises(ImputerError, match=r"table2\.json, CTC, 1: wer is"):
        migration.migrate(folder, tmp_path)
    assert json.loads((folder / "table2.json").read_text())["rows"] == old["rows"]  # nothing was touched


# --- data


def corpus_folder(folder: Path, speakers: tuple[str, ...]) -> None:
    (folder / "audio").mkdir(parents=True)
    rows = ["utt\tspeaker\tchapter\tseconds\ttext"]
    for number, speaker in enumerate(speakers * 2):
        sound, _ = tones.say("BADA LU".lower(), np.random.default_rng(number))
        soundfile.write(folder / "audio" / f"u{number}.ogg", sound, 16_000)
        rows.append(f"u{number}\t{speaker}\t0\t{len(sound) / 16_000}\tBADA LU")
    (folder / "manifest.tsv").write_text("\n".join(rows) + "\n")


def test_libri_is_made_from_archives_with_speakers_held_out(tmp_path: Path) -> None:
    speakers = {
        "libri-dev-clean": ("84", "174", "1919", "5895", "2412"),
        "libri-test-clean-a": ("672", "1089"),
    }
    for name, wanted in speakers.items():
        corpus_folder(tmp_path / "made" / name, wanted)
        with tarfile.open(tmp_path / f"{name}.tar", "w") as tar:
            tar.add(tmp_path / "made" / name, name)
    dataset = datasets.libri(tmp_path)
    train, valid, test = (list(Manifest(path)) for path in (dataset.train, dataset.valid, dataset.test))
    assert [{u.speaker for u in part} for part in (train, valid, test)] == [
        {"84", "174"},
        {"1919", "5895", "2412"},
        {"672", "1089"},
    ]
    assert {u.text for u in train} == {"bada lu"} and Path(test[0].audio_filepath).is_file()
    assert dataset.settings.front_end.name == "moonshine" and "frozen encoder" in dataset.not_comparable
    again = datasets.libri_convolution(tmp_path)
    assert again.train == dataset.train and again.settings.front_end.name == "filterbank_convolution"
    with pytest.raises(UsageError, match="english holds no manifests"):
        datasets.english(tmp_path)
    (tmp_path / "english").mkdir()
    for name in ("libri-train", "libri-valid"):
        (tmp_path / "english" / f"{name}.jsonl").symlink_to(tmp_path / f"{name}.jsonl")
    assert len(Manifest(datasets.english(tmp_path).train)) == len(train) + len(valid)


def test_libri_is_made_from_the_official_folders(tmp_path: Path) -> None:
    for split, (part, speakers) in SUBSETS.items():
        for speaker in speakers:
            chapter = tmp_path / "LibriSpeech" / part / speaker / "7"
            chapter.mkdir(parents=True)
            soundfile.write(chapter / f"{speaker}-7-0.flac", np.full(16_000, 0.01), 16_000)
            (chapter / f"{speaker}-7.trans.txt").write_text(f"{speaker}-7-0 GO {split}\n")
    dataset = datasets.libri(tmp_path)
    for path, speakers in zip((dataset.train, dataset.valid, dataset.test), SUBSETS.values(), strict=True):
        assert sorted(u.speaker for u in Manifest(path)) == sorted(speakers[1])


def test_digits_are_made_from_single_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "STRINGS", 2)
    with pytest.raises(UsageError, match="audiomnist-40spk"):
        datasets.digits(tmp_path)
    folder = tmp_path / "audiomnist-40spk"
    folder.mkdir()
    for speaker, digit in itertools.product((1, 2, 3, 6, 11, 16, 21, 23, 26, 31, 36), range(10)):
        sound, _ = tones.say(tones.ALPHABET[digit % 8], np.random.default_rng(digit))
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


def test_words_of_a_dictionary_are_split(tmp_path: Path) -> None:
    lines = [f"{letter}o{letter} B D" for letter in "abcdefgh"]
    (tmp_path / "cmudict.dict").write_text("\n".join(lines) + "\n")
    dataset = datasets.cmudict(tmp_path)
    parts = [[u.id for u in Manifest(path)] for path in (dataset.train, dataset.valid, dataset.test)]
    assert list(map(len, parts)) == [6, 1, 1] and len({word for part in parts for word in part}) == 8
    assert dataset.amount == "6 words" and dataset.settings.front_end.name == "letters"
    assert datasets.generated_tones(tmp_path, utterances=2, scored=1).amount.endswith(" h")


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
        for imitation, dynamic, count, entropy in likelihoods["by_utterance"]:
            assert imitation <= dynamic <= 0 and 0 <= count <= entropy
    for one in itertools.chain(*found["exact"].values()):
        assert max(one["imitation_bound"], one["dynamic_programming_bound"]) <= one["sum"] + 1e-3
