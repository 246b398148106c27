"""Small trainings on the language of tones, shared by the tests."""

import contextlib
import io
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from imputer import configs, training
from imputer.commands import program

TONES = configs.read("tones")
TINY = TONES.model
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


def settings_for(corpus: str, **changed: object) -> configs.Config:
    quick = {
        "steps": 150,
        "learning_rate": 3e-3,
        "warmup_steps": 20,
        "validate_every": 1000,
        "weight_decay": 0.0,
    }
    return replace(
        TONES,
        data=replace(TONES.data, train=(corpus,), valid=(corpus,), batch_seconds=30),
        training=replace(TONES.training, **(quick | changed)),
    )


def trained_on(
    corpus: str, folder: Path, rollin_settings: configs.Rollin | None = None, **changed: object
) -> Path:
    settings = settings_for(corpus, **changed)
    if rollin_settings:
        settings = replace(settings, rollin=rollin_settings)
    return training.train(settings, folder)


def imputer(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run the command line as ``main`` does, in this process: importing torch anew would take longer than the work."""
    out, err = io.StringIO(), io.StringIO()
    before, sys.argv = sys.argv, ["imputer", *words]
    try:
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            pytest.raises(SystemExit) as ended,
        ):
            program.main()
    finally:
        sys.argv = before
    code = int(ended.value.code or 0)
    assert not (check and code), err.getvalue()
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())


def call(*words: object) -> tuple[int, str, str]:
    """The same: exit code, output and errors, whether it fails or not."""
    done = imputer(*map(str, words), check=False)
    return done.returncode, done.stdout, done.stderr
