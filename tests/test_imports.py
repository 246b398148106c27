"""The import graph of the package: rooms in layers, imports point one way, no cycles.

Imports inside functions count as well: they delay the cost of an import, not the dependency.
"""

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import imputer

ROOT = Path(imputer.__file__).parent

# From the bottom to the top. A module imports only from its own line or from lines above it in this list.
LAYERS = (
    ("errors",),
    ("support", "configs"),
    ("lattice",),
    ("alignments", "objectives", "masking", "vocabulary", "transcripts", "features"),
    ("strategies", "decoding"),
    ("rollin", "audio"),
    ("data",),
    ("languagemodel",),
    ("frontends",),
    ("model",),
    ("models", "corpora"),
    ("runtimes", "display"),
    ("recognizer",),
    ("aligner", "evaluation", "streaming"),
    ("training",),
    ("server",),
    ("research",),
    ("commands",),
    ("", "__main__"),
)
RANK = {room: rank for rank, rooms in enumerate(LAYERS) for room in rooms}
# The paper, and what users import. Everything else lives in a room.
TOP = {
    *("__init__", "__main__", "errors", "alignments", "objectives", "masking", "rollin", "model", "decoding"),
    *("strategies", "vocabulary", "features", "transcripts", "recognizer", "languagemodel"),
}


def modules() -> dict[str, Path]:
    """Every module by its name below ``imputer``; packages by the name of their folder."""
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(path: Path, known: dict[str, Path]) -> set[str]:
    """The modules of the package that a file imports, wherever in the file it does."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            if name == "imputer" or name.startswith("imputer."):
                below = name.removeprefix("imputer").removeprefix(".")
                while below not in known:  # the last part is a function or a class
                    below = below.rpartition(".")[0]
                found.add(below)
    return found


def graph() -> dict[str, set[str]]:
    known = modules()
    return {name: imports_of(path, known) - {name} for name, path in known.items()}


def room(module: str) -> str:
    return module.partition(".")[0]


@pytest.fixture(scope="module")
def edges() -> dict[str, set[str]]:
    return graph()


def test_every_room_has_a_layer(edges):
    assert {room(module) for module in edges} - RANK.keys() == set()


def test_no_import_goes_upwards(edges):
    upward = [
        f"{module} -> {target}"
        for module, targets in edges.items()
        for target in targets
        if target and RANK[room(target)] > RANK[room(module)]
    ]
    assert upward == []


def test_there_is_no_cycle(edges):
    # A package imports its own modules to offer their names, and they may import it for its constants: one thing.
    try:
        list(TopologicalSorter({a: {b for b in bs if b} for a, bs in edges.items()}).static_order())
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_the_top_holds_the_paper_and_nothing_else():
    assert {path.stem for path in ROOT.glob("*.py")} <= TOP


def test_no_module_name_is_used_for_two_things(edges):
    """Commands are thin and named after their verb; a name is otherwise used once."""
    seen: dict[str, str] = {}
    for module in sorted(edges):
        if room(module) == "commands" or not module:
            continue
        name = module.rpartition(".")[2]
        assert name not in seen, f"{module} and {seen[name]} have the same name"
        seen[name] = module


def test_nothing_imports_a_command(edges):
    importers = {module for module, targets in edges.items() if any(room(t) == "commands" for t in targets)}
    assert {room(module) for module in importers} <= {"commands", "__main__"}


def test_one_function_runs_imputation(edges):
    """``decoding.decode``; only the benchmark of ``decoding.impute`` itself calls that as well."""
    known, callers = modules(), set()
    for module in edges:
        tree = ast.parse(known[module].read_text())
        calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
        if any(ast.unparse(call) in ("impute", "decoding.impute") for call in calls):
            callers.add(module)
    assert callers == {"decoding", "research.benchmarks.bench_decoding"}


def test_dir_lists_what_a_user_may_name() -> None:
    listed = {name for name in dir(imputer) if not name.startswith("__")}
    assert {"Recognizer", "finetune", "alignments", "masking", "objectives", "streaming"} <= listed
    assert not {"Any", "TYPE_CHECKING", "import_module"} & listed
    assert all(hasattr(imputer, name) for name in listed)


# What only a Unix has is taken away; the modules named first ask for it themselves.
ELSEWHERE = """
import os, random, logging, multiprocessing.util, concurrent.futures.thread, sys
import numpy, torch, numba, soundfile
for name in ("register_at_fork", "fork", "fchmod", "setpgid"):
    delattr(os, name)
sys.modules |= dict.fromkeys(("fcntl", "resource", "termios", "pwd", "grp"))
from importlib import import_module
for name in sys.argv[1:]:
    import_module(name)
"""


@pytest.mark.slow
def test_every_module_imports_where_the_system_is_no_unix(edges):
    """On Windows, that is: there the shipped models and the training are to be had as well."""
    names = [f"imputer.{module}" for module in edges if module and module != "__main__"]
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, *names], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
