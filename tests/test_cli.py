"""The program's own help: short in the list, whole for a command, and quick."""

import subprocess
import sys
from importlib import import_module

import pytest

from imputer.commands import program
from trainings import imputer

SMALL = "small"


def words_of(text: str) -> str:
    """Words in a row, whatever the lines, list marks and backticks."""
    return " ".join(word for word in text.replace("`", "").split() if word not in ("-", "•"))


def test_the_list_of_commands_imports_none_of_them() -> None:
    code = (
        "import sys; from imputer.commands import program; program.app(['--help'], result_action='return_value'); "
        "print({name for name in sys.modules if name.startswith(('torch', 'imputer.commands.'))})"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    for name, summary in program.COMMANDS.items():
        assert f"{name} {summary}" in words_of(said.replace("│", ""))
    assert said.endswith("{'imputer.commands.program'}\n")


@pytest.mark.parametrize("name", program.COMMANDS)
def test_a_command_explains_itself(name: str) -> None:
    written = getattr(import_module(f"imputer.commands.{name}"), name).__doc__.partition("Parameters\n")[0]
    said = imputer(name, "--help").stdout
    assert words_of(written) in words_of(said)
    assert "--empty-" not in said


def test_the_help_of_train_tells_how_to_set_a_key() -> None:
    assert "--section.key value" in words_of(imputer("train", "--help").stdout)


def test_options_are_listed_with_what_they_are_for() -> None:
    said = imputer("train", "--config", str(SMALL), "--list-options", "--training.steps", "7").stdout
    assert "\nsteps = 7  # steps of the optimiser (a whole number, 1 or more)\n" in said
