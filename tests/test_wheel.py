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
