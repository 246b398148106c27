"""A tiny expert and its alignments, trained once for all tests that need one."""

from pathlib import Path

import pytest
import torch

from imputer.corpora import tones
from trainings import imputer, trained_on

torch.set_num_threads(1)  # as in worker processes: the last digits of a sum hang on it


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tones.make(str(tmp_path_factory.mktemp("tones")), 8, words=(1, 2))


@pytest.fixture(scope="session")
def expert(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained_on(corpus, tmp_path_factory.mktemp("expert"))


@pytest.fixture(scope="session")
def stored(corpus: str, expert: Path) -> Path:
    """The corpus aligned by the expert, through the command line."""
    path = expert.parent / "train.alignments"
    imputer("align", "--manifest", corpus, "--model", str(expert), "--store", str(path))
    return path
