"""The wheel: built, installed into an environment of its own, and run outside the repository."""

import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

import imputer
from imputer.models import SHIPPED

ROOT = Path(__file__).parents[1]
PACKAGE = Path(imputer.__file__).parent
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that the repository stays clean."""
    place = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, place)
    shutil.copytree(ROOT / "src", place / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-build-isolation", "-w", place, place], check=True)
    (built,) = place.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def program(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``imputer`` of an environment with the wheel; everything else is found in the environment of the tests."""
    place = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True)
    python = place / "bin" / "python"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    (place / "lib" / version / "site-packages" / "others.pth").write_text(
        sysconfig.get_path("purelib") + "\n"
    )
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--python",
        python,
        "install",
        "--quiet",
    ]
    subprocess.run([*pip, "--no-deps", "--force-reinstall", "--no-warn-script-location", wheel], check=True)
    return place / "bin" / "imputer"


def test_the_wheel_holds_everything_and_nothing_else(wheel: Path) -> None:
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("imputer/")}
    there = {
        f"imputer/{path.relative_to(PACKAGE)}"
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert packed == there
    assert {"imputer/py.typed", "imputer/configs/small.toml", "imputer/server/static/index.html"} < packed


def test_its_description_has_no_links_into_the_repository(wheel: Path) -> None:
    (name,) = (name for name in zipfile.ZipFile(wheel).namelist() if name.endswith("/METADATA"))
    metadata, _, description = zipfile.ZipFile(wheel).read(name).decode().partition("\n\n")
    assert f"Version: {imputer.__version__}\n" in metadata
    assert all(link.startswith("https://") for link in re.findall(r"\]\(([^)]*)\)", description))
    assert "make demo" in description


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--version", imputer.__version__),
        ("train --config small --list-options", "[training]"),
        (f"transcribe {SHIPPED / 'digits' / 'sample.wav'} --model digits", "four two zero nine seven"),
        ("reproduce --list", "table2"),
        ("bench features --quick", "x"),
    ],
)
def test_it_runs_outside_the_repository(program: Path, tmp_path: Path, words: str, said: str) -> None:
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    done = subprocess.run(
        [program, *words.split()], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and said in done.stdout, done.stderr


def test_what_runs_is_the_wheel(program: Path, tmp_path: Path) -> None:
    where = [program.with_name("python"), "-c", "import imputer; print(imputer.__file__)"]
    found = subprocess.run(where, cwd=tmp_path, env={}, capture_output=True, text=True, check=True).stdout
    assert Path(found.strip()).is_relative_to(program.parents[1])


USER = """
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

import imputer
from imputer import Recognizer, Transcript, audio, configs, decoding, finetune
from imputer.alignments import best_alignment, collapse, compatible_count, feasible
from imputer.decoding import STRATEGIES, Options, impute
from imputer.features import filterbanks
from imputer.languagemodel import LanguageModel
from imputer.masking import POLICIES
from imputer.objectives import ctc, dynamic_programming, imitation
from imputer.streaming import Stream


def texts(paths: Sequence[Path]) -> list[str]:
    recognizer = Recognizer.from_pretrained("english")
    one: Transcript = recognizer.transcribe(paths[0], block_size=8, strategy="top_k")
    samples = recognizer.transcribe(np.zeros(16000, dtype=np.float32), sample_rate=16000)
    tensor = recognizer.transcribe(torch.zeros(16000), lm=None, hotwords=["kiwi"], n_best=2)
    times: list[tuple[str, float, float]] = [(w.text, w.start, w.end) for w in one.words]
    more: list[Transcript] = recognizer.transcribe(paths)
    more += recognizer.transcribe(["a.wav", Path("b.wav")])
    return [samples.text, tensor.text, str(times), *(transcript.text for transcript in more)]


def learn() -> float:
    report = finetune("english", "recordings", Path("my-model"), minutes=10)
    return imputer.finetune("english", "recordings", "my-model").after.value - report.before.value


def live() -> list[str]:
    stream = Stream(Recognizer.from_pretrained("english"))
    samples = audio.read("speech.wav", sample_rate=16_000)
    return [event.kind for event in [*stream.feed(samples), *stream.finish()]]


def maths(log_probs: torch.Tensor, targets: torch.Tensor, n: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    alignment, score = best_alignment(log_probs, targets, n, m)
    committed = POLICIES["block"](n, block_size=4, generator=torch.Generator())
    tokens: list[int] = collapse(alignment[0].tolist())
    number: int = compatible_count(alignment[0], committed[0])
    found = impute(lambda partial: log_probs, n, block_size=4, strategy=decoding.STRATEGIES["block"], mask=6)
    print(tokens, number, feasible(targets, n, m), found.alignment, found.passes, sorted(STRATEGIES), score)
    print(Options(block_size=4), filterbanks(torch.zeros(16000), 16000), LanguageModel.load("x").score(tokens))
    print(configs.read("small", {}), imputer.objectives.ctc)
    nats = dynamic_programming(log_probs, targets, alignment, committed, n, m)
    return nats + ctc(log_probs, targets, n, m) + imitation(log_probs, alignment, n)
"""


def test_a_strictly_typed_program_may_use_it(program: Path, tmp_path: Path) -> None:
    """The names of the public API are typed and exported for a user's ``mypy --strict``."""
    (tmp_path / "use.py").write_text(USER)
    mypy = [sys.executable, "-m", "mypy", "--strict", "--python-executable", program.with_name("python")]
    done = subprocess.run([*mypy, "use.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
