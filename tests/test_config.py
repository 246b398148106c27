"""Configurations: what is accepted, and what a refusal says."""

from dataclasses import replace
from pathlib import Path

import pytest

from imputer import config
from imputer.errors import UsageError

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.toml"))


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "some.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_configuration_is_valid(path: Path) -> None:
    assert config.read(path).training.steps > 0


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
        for c in [config.read(folder / f"{name}.toml")]
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
        ("[data]\ntrain = 3.5", "data.train = 3.5, but it takes a text"),
        ("[augmentation]\ntelephone = 1.5", r"augmentation.telephone must lie in 0..1, got 1.5"),
        ("[model\n", "is not valid TOML"),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        config.read(written(tmp_path, text))
    assert "some.toml" in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere\.toml: No such file"):
        config.read(tmp_path / "nowhere.toml")


def test_options_override_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, "[training]\nsteps = 5\n")
    read = config.read(path, {"training.steps": "7", "data.train": "a.jsonl", "rollin.masking": "uniform"})
    assert (read.training.steps, read.data.train, read.rollin.masking) == (7, ("a.jsonl",), "uniform")
    with pytest.raises(UsageError, match=r"--steps.*--section.key"):
        config.read(path, {"steps": "7"})


def test_whole_numbers_may_stand_for_numbers(tmp_path: Path) -> None:
    assert config.read(written(tmp_path, "[data]\nbatch_seconds = 30")).data.batch_seconds == 30.0


def test_what_is_written_reads_back_the_same(tmp_path: Path) -> None:
    settings = replace(
        config.Config(),
        data=config.Data(train=("a.jsonl", 'with "quotes".jsonl'), batch_seconds=12.5),
        training=config.Training(learning_rate=3e-4, objective="imitation"),
    )
    text = config.to_toml({name: getattr(settings, name) for name in vars(settings)})
    assert config.read(written(tmp_path, text)) == settings


def test_differences_are_listed_by_name() -> None:
    old = config.Config()
    new = replace(old, model=replace(old.model, width=64), data=replace(old.data, workers=3))
    assert config.differences(old, new, ignore=("data.workers",)) == ["model.width: 512 -> 64"]
