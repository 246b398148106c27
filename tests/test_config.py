"""Configurations: what is accepted, and what a refusal says."""

from dataclasses import fields, replace
from pathlib import Path

import pytest

from imputer import configs, training
from imputer.errors import UsageError

ROOT = Path(__file__).parent.parent
CONFIGS = sorted(configs.SHIPPED.glob("*.toml"))
PAGE = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
SECTIONS = {name: type(section) for name, section in vars(configs.Config()).items()}


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "some.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_configuration_is_valid(path: Path) -> None:
    assert configs.read(path).training.steps > 0


def test_the_papers_networks_have_the_papers_sizes() -> None:
    folder = CONFIGS[0].parent
    sizes = {
        name: (
            c.model.layers,
            c.model.heads,
            c.model.width,
            c.model.filter_size,
            c.model.dropout,
            c.training.steps,
        )
        for name in ("wsj", "librispeech")
        for c in [configs.read(folder / f"{name}.toml")]
    }
    assert sizes == {
        "wsj": (8, 4, 512, 2048, 0.2, 300_000),
        "librispeech": (16, 4, 512, 4096, 0.3, 1_000_000),
    }


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[model]\nwidht = 3", r"unknown key model.widht; did you mean model.width\?"),
        ("[modell]\nwidth = 3", r"unknown key modell; did you mean model\?"),
        ("[model]\nwidth = 'wide'", "model.width = 'wide', but it takes a whole number"),
        ("[model]\nwidth = true", "model.width = True, but it takes a whole number"),
        ("[model]\nmerge_repeats = 1", "takes true or false"),
        (
            "[training]\nobjective = 'rnnt'",
            r"training.objective = 'rnnt', but it takes ctc \| imitation \| dynamic_programming",
        ),
        ("[data]\ntrain = 3.5", "data.train = 3.5, but it takes an array, each a text"),
        (
            "[augmentation]\ntelephone = 1.5",
            "augmentation.telephone = 1.5, but it takes a finite number, 0 or more and at most 1",
        ),
        (
            "[augmentation]\ngain_db = [nan, 3]",
            "augmentation.gain_db = nan, but it takes an array of 2, each a finite",
        ),
        ("training = 3", "training = 3, but it takes a section"),
        ("[[training]]\nsteps = 3", "but it takes a section"),
        ("[model\n", "is not valid TOML"),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        configs.read(written(tmp_path, text))
    assert "some.toml" in str(caught.value)


def test_a_mistake_on_the_command_line_is_not_blamed_on_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, "[training]\nsteps = 3")
    for name, value, says in (
        ("training.step", "5", r"unknown key training.step; did you mean training.steps\?"),
        ("training.steps", "many", "training.steps = 'many', but it takes a whole number"),
    ):
        with pytest.raises(UsageError, match=rf"^the command line: {says}"):
            configs.read(path, {name: value})


NEGATIVE = (
    *("front_end.channels", "front_end.stack", "front_end.feature_size", "front_end.frame_seconds"),
    *("model.width", "model.layers", "model.heads", "model.filter_size", "model.dropout", "model.block_size"),
    *(
        "model.window_seconds",
        "vocabulary.size",
        "data.batch_seconds",
        "data.workers",
        "data.valid_utterances",
    ),
    *("rollin.block_size", "rollin.all_masked", "rollin.refresh_every", "training.steps", "training.clip"),
    *("training.batches_per_step", "training.learning_rate", "training.warmup_steps", "training.average"),
    *("training.schedule_steps", "training.weight_decay", "training.seed", "training.validate_every"),
    *("training.checkpoint_every", "training.keep_checkpoints", "training.log_every", "training.threads"),
    "training.nonfinite_limit",
)
ZERO = (
    *(
        "front_end.channels",
        "front_end.stack",
        "model.width",
        "model.layers",
        "model.heads",
        "model.filter_size",
    ),
    *("model.block_size", "model.window_seconds", "vocabulary.size", "data.batch_seconds"),
    *("data.valid_utterances", "rollin.block_size", "training.steps", "training.batches_per_step"),
    *("training.learning_rate", "training.clip"),
)
TOO_MUCH = {
    "model.dropout": "1",
    "training.average": "2",
    "rollin.all_masked": "1.1",
    "training.seed": str(2**63),
    "training.clip": "inf",
    "training.learning_rate": "nan",
    "data.batch_seconds": "9" * 400,
}


@pytest.mark.parametrize(
    ("key", "value"),
    [*((key, "-1") for key in NEGATIVE), *((key, "0") for key in ZERO), *TOO_MUCH.items()],
)
def test_a_number_out_of_range_is_refused(tmp_path: Path, key: str, value: str) -> None:
    with pytest.raises(
        UsageError, match=rf"the command line: {key} = \S+, but it takes a (whole|finite) number"
    ):
        configs.read(written(tmp_path, ""), {key: value})


def test_a_number_at_the_end_of_its_range_is_taken(tmp_path: Path) -> None:
    lowest = {key: "0" for key in NEGATIVE if key not in ZERO} | dict.fromkeys(ZERO, "1")
    configs.read(written(tmp_path, ""), lowest)
    configs.read(written(tmp_path, ""), {"rollin.all_masked": "1", "training.seed": str(2**63 - 1)})


def test_every_number_has_a_range() -> None:
    keys = [key for kind in SECTIONS.values() for key in configs.keys_of(kind)]
    assert [key.name for key in keys if key.takes in ("a whole number", "a finite number")] == []
    assert sum("number, " in key.takes for key in keys) > 30


def test_numbers_are_checked_in_python_too() -> None:
    with pytest.raises(ValueError, match="dropout\n  Input should be less than 1"):
        replace(configs.Model(), dropout=2)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere\.toml: No such file"):
        configs.read(tmp_path / "nowhere.toml")


def test_a_name_that_is_not_shipped_lists_those_that_are() -> None:
    with pytest.raises(
        UsageError, match=r"no configuration smal; .* one of cmudict, digits, .* small, tones, wsj"
    ):
        configs.read("smal")


def test_options_override_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, "[training]\nsteps = 5\n")
    read = configs.read(path, {"training.steps": "7", "data.train": "a.jsonl", "rollin.masking": "uniform"})
    assert (read.training.steps, read.data.train, read.rollin.masking) == (7, ("a.jsonl",), "uniform")
    with pytest.raises(UsageError, match=r"--steps.*--section.key"):
        configs.read(path, {"steps": "7"})
    with pytest.raises(UsageError, match="training = 3, but it takes a section"):
        configs.read(written(tmp_path, "training = 3"), {"training.steps": "7"})


def test_whole_numbers_may_stand_for_numbers(tmp_path: Path) -> None:
    assert configs.read(written(tmp_path, "[data]\nbatch_seconds = 30")).data.batch_seconds == 30.0


def test_what_is_written_reads_back_the_same(tmp_path: Path) -> None:
    settings = replace(
        configs.Config(),
        data=configs.Data(train=("a.jsonl", 'with "quotes".jsonl'), batch_seconds=12.5),
        training=configs.Training(learning_rate=3e-4, objective="imitation"),
    )
    text = configs.to_toml({name: getattr(settings, name) for name in vars(settings)})
    assert configs.read(written(tmp_path, text)) == settings


def test_what_is_listed_is_explained_and_reads_back_the_same(tmp_path: Path) -> None:
    settings = configs.Config(data=configs.Data(train=("with # and 'quotes'.jsonl",)))
    text = configs.to_toml(vars(settings), explained=True)
    assert configs.read(written(tmp_path, text)) == settings
    assert "dropout = 0.2  # share of the activations dropped in training (a finite number, 0 or" in text
    assert 'units = "bpe"  # what the tokens are (bpe | characters)' in text


@pytest.mark.parametrize("kind", SECTIONS.values(), ids=SECTIONS)
def test_every_key_is_explained(kind: type) -> None:
    keys = configs.keys_of(kind)
    assert [key.name for key in keys] == [field.name for field in fields(kind)]
    assert [key.name for key in keys if not key.description] == []


def test_the_documentation_says_what_a_resumed_run_may_change() -> None:
    assert [name for name in training.CHANGEABLE if f"`{name}`" not in PAGE] == []


def test_differences_are_listed_by_name() -> None:
    old = configs.Config()
    new = replace(old, model=replace(old.model, width=64), data=replace(old.data, workers=3))
    assert configs.differences(old, new, ignore=("data.workers",)) == ["model.width: 512 -> 64"]
