"""Where figures come from: code, command, configuration, data, processor, packages and time, for a program to check."""

import ast
import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Iterable
from dataclasses import asdict
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import imputer
from imputer import configs, models
from imputer.data.manifest import Manifest

PACKAGE = Path(imputer.__file__).parent
# The code that determines what a training makes of its settings and data, and what decoding makes of a model.
NETWORK = ("model.py", "vocabulary.py", "features.py", "frontends", "audio", "data")
OBJECTIVES = ("alignments.py", "lattice", "objectives.py", "masking.py", "rollin.py", "aligner/corpus.py")
TRAINING = (*NETWORK, *OBJECTIVES, "training", "configs/schema.py")
DECODING = (*NETWORK, "alignments.py", "strategies.py", "decoding.py")
# Files of these folders that change no outcome of an experiment: they tell which recordings can be opened, store
# checkpoints, validate and fine-tune.
ASIDE = {
    *(f"audio/{name}.py" for name in ("completeness", "containers", "endings", "limits", "media")),
    *("data/recordings.py", "training/checkpoints.py", "training/run_folder.py"),
    *("training/validating.py", "training/finetuning.py"),
}
PACKAGES = ("torch", "numpy", "numba", "sentencepiece", "soundfile", "soxr", "rapidfuzz", "moonshine-voice")
# Settings that are paths; fingerprints of the content take their place.
PLACES = (
    *("data.train", "data.valid", "data.frames_cache", "vocabulary.tokenizer"),
    *("rollin.alignments", "training.start_from"),
)


def record(command: str, seeds: Iterable[int]) -> dict[str, Any]:
    """The provenance of this run."""
    commit, dirty = checkout()
    return {
        "commit": commit,
        "dirty": dirty,
        "command": command,
        "seeds": list(seeds),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "processor": processor(),
        "cores": os.cpu_count(),
        "packages": packages(),
    }


def checkout() -> tuple[str, bool]:
    """The commit of the checkout that this code runs from, and whether files of the package differ from it.

    An installed package has no checkout: the commit is then empty, and ``code`` identifies what ran.
    """
    # An environment inside another repository is not a checkout of ours.
    if not _git("ls-files", "--", "__init__.py"):
        return "", False
    return _git("rev-parse", "HEAD"), bool(_git("status", "--porcelain", "--", "."))


def _git(*words: str) -> str:
    try:
        done = subprocess.run(["git", *words], cwd=PACKAGE, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if not done.returncode else ""


def processor() -> str:
    """The model name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def packages() -> dict[str, str]:
    """The versions of Python, of this package and of those that its figures depend on."""
    found = {"python": platform.python_version(), "imputer": imputer.__version__}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


# --- fingerprints


def digest(content: Any) -> str:
    """A short name for plain values."""
    return hashlib.blake2b(json.dumps(content, default=str).encode(), digest_size=5).hexdigest()


def weights(folder: Path) -> str:
    """A fingerprint of the weights of a model folder."""
    return digest((folder / models.WEIGHTS).read_bytes().hex())


@cache
def manifest(path: Path) -> str:
    """A fingerprint of the content of a manifest, without the paths of its audio."""
    return digest([[u.id, round(u.duration, 3), u.text] for u in Manifest(path)])


@cache
def code(places: tuple[str, ...], root: Path = PACKAGE) -> str:
    """A fingerprint of source files, by folder or name; comments, docstrings and layout do not count."""
    files = sorted(
        file
        for place in places
        for file in ([root / place] if place.endswith(".py") else (root / place).rglob("*.py"))
        if file.is_file() and str(file.relative_to(root)) not in ASIDE
    )
    return digest(
        [[str(file.relative_to(root)), statements(file.read_text(encoding="utf-8"))] for file in files]
    )


def statements(source: str) -> str:
    """Python source without comments and docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and ast.get_docstring(node) is not None
        ):
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


def changed(settings: configs.Config, base: configs.Config | None = None) -> dict[str, Any]:
    """The settings that differ from their defaults, or from another configuration, by name; places are left out."""
    base = base or configs.Config()
    return {
        f"{section}.{key}": value
        for section in vars(settings)
        for key, value in asdict(getattr(settings, section)).items()
        if value != asdict(getattr(base, section))[key] and f"{section}.{key}" not in PLACES
    }
