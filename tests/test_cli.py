"""The program's own help: short in the list, whole for a command, and quick."""

import shlex
import subprocess
import sys
from importlib import import_module, metadata
from pathlib import Path

import pytest

import imputer as imputer_package
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


@pytest.mark.parametrize("name", program.COMMANDS)
def test_a_command_has_examples_that_parse(name: str) -> None:
    written = getattr(import_module(f"imputer.commands.{name}"), name).__doc__
    examples = [line.strip()[2:] for line in written.splitlines() if line.strip().startswith("- imputer ")]
    assert len(examples) >= 2
    for example in examples:
        words = shlex.split(example)[1:]
        program.app.parse_args(words, exit_on_error=False, print_error=False)
        assert words[0] == name


def test_mistyped_options_and_commands_are_corrected() -> None:
    for words, said in (
        (("evaluate", "a.jsonl", "--blok-size", "3"), "Did you mean --block-size?"),
        (("trancribe", "a.wav"), 'Did you mean "transcribe"?'),
        (("train", "--config", "small", "--outptu", "x"), "did you mean --output?"),
        (("train", "--config", "small", "--training.stesp", "3"), "did you mean training.steps?"),
        (("train", "--confg", "small"), "Did you mean --config instead of --confg?"),
        (("--verison",), "Did you mean --version?"),
    ):
        refused = imputer(*words, check=False)
        assert refused.returncode == 2 and said in refused.stderr and refused.stderr.count("\n") == 1


def test_the_version_is_that_of_the_package() -> None:
    assert imputer("--version").stdout.strip() == metadata.version("imputer-asr")


def test_the_shell_completes_commands_options_and_files(tmp_path: Path) -> None:
    script = tmp_path / "imputer.bash"
    script.write_text(program.app.generate_completion(shell="bash"))
    asked = """source %s; COMP_WORDS=(imputer %s); COMP_CWORD=%d
        $(complete -p imputer | sed 's/.*-F \\([^ ]*\\).*/\\1/'); echo "${COMPREPLY[@]}" """
    (tmp_path / "talk.m4a").touch()
    (tmp_path / "my-model").mkdir()
    for words, completed in (
        ("trans", "transcribe"),
        ("transcribe --block", "--block-size"),
        ("transcribe ta", "talk.m4a"),  # what the shell does by itself, before completion is installed
        ("transcribe --model my", "my-model"),
        ("finetune my", "my-model"),
        ("serve --model my", "my-model"),
    ):
        command = asked % (script, words, len(words.split()))
        bash = ["bash", "-c", command]
        done = subprocess.run(bash, cwd=tmp_path, capture_output=True, text=True, check=True)
        assert completed in done.stdout.split(), done


def test_python_names_are_listed() -> None:
    assert {"Recognizer", "Transcript"} <= set(dir(imputer_package))
