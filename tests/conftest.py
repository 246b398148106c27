"""The fast tier of the tests; and a tiny expert with its alignments, trained once for all tests that need one."""

import fcntl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from imputer.corpora import tones
from trainings import imputer, trained_on

if TYPE_CHECKING:
    from imputer.recognizer import Recognizer
    from imputer.server.service import Service

torch.set_num_threads(1)  # as in worker processes: the last digits of a sum depend on it


# Run by `make test-fast`: the paper against its oracles, and units that need no trained model, server or browser.
FAST = {
    *("alignments", "cli", "config", "decoding", "features", "imports", "lattice", "manifest", "masking"),
    *(
        "model",
        "objectives",
        "progress",
        "reference",
        "rollin",
        "scoring",
        "transcripts",
        "trials",
        "vocabulary",
    ),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.stem.removeprefix("test_") in FAST and not item.get_closest_marker("slow"):
            item.add_marker("fast")


def once(temporary: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """A folder that all processes of pytest-xdist share; the first that needs it fills it."""
    base = temporary.getbasetemp()
    folder = (base.parent if base.name.startswith("popen-") else base) / name
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            folder.mkdir(exist_ok=True)
            make(folder)
            (folder / "done").touch()
    return folder


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = once(tmp_path_factory, "tones", lambda folder: tones.make(str(folder), 8, words=(1, 2)))
    return str(folder / "manifest.jsonl")


@pytest.fixture(scope="session")
def expert(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return once(tmp_path_factory, "expert", lambda folder: trained_on(corpus, folder)) / "model"


@pytest.fixture(scope="session")
def stored(corpus: str, expert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The corpus aligned by the expert, through the command line."""

    def align(folder: Path) -> None:
        path = str(folder / "train.alignments")
        imputer("align", "--manifest", corpus, "--model", str(expert), "--store", path)

    return once(tmp_path_factory, "stored", align) / "train.alignments"


# For tests that need a trained recogniser or a server: a model of the tone language. Imported when they are used, so
# that the fast tests stay fast.


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tones import save

    return save(tmp_path_factory.mktemp("models") / "tones")


@pytest.fixture(scope="module")
def listener(folder: Path) -> "Recognizer":
    from imputer.recognizer import Recognizer

    return Recognizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[tuple[str, "Service"]]:
    from serving import serving

    with serving(folder) as (address, service):
        yield address, service
