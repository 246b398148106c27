"""The program ``imputer``: one command per file in ``imputer.commands``, imported only when it is called."""

import difflib
import errno
import os
import sys
import warnings
from typing import Any, NoReturn

from cyclopts import App, CycloptsError, MissingArgumentError, Parameter, UnknownCommandError

from imputer import __version__
from imputer.errors import ImputerError

COMMANDS = {
    "transcribe": "Transcribe audio files.",
    "listen": "Transcribe the microphone while you speak.",
    "align": "Find the time of every word of a known text.",
    "serve": "Run the transcription server and its web page.",
    "demo": "Show the shipped models decoding, pass by pass; or train one.",
    "prepare": "Turn a corpus or a folder of recordings into a manifest.",
    "finetune": "Fine-tune a model on your own recordings.",
    "train": "Train a CTC expert or an Imputer.",
    "lm": "Build language models over the pieces of a model.",
    "evaluate": "Score a model: word and character error rates with intervals.",
    "export": "Write a model as ONNX, in float32 or int8.",
    "reproduce": "Regenerate the paper's tables and figures.",
    "bench": "Measure speed and memory.",
}

app = App(
    name="imputer",
    version=__version__,
    help="Speech recognition in a constant number of parallel passes.",
    default_parameter=Parameter(negative_iterable=()),  # no --empty-something
    suppress_keyboard_interrupt=False,  # main says that it was interrupted
)
for name, summary in COMMANDS.items():
    app.command(f"imputer.commands.{name}:{name}", name=name, help=summary)
app.register_install_completion_command(help="Install completion of commands and options for your shell.")


def explain(words: list[str]) -> None:
    """Give the command that is called its whole docstring as help; the others, not imported, keep their summary."""
    called = next((word for word in words if word in COMMANDS), None)
    if called:
        app[called].help = None


def correction(error: CycloptsError, words: list[str]) -> str:
    """What was meant, where cyclopts does not say it: options before a command, and those that `train` collects."""
    given = [word.partition("=")[0] for word in words if word.startswith("--")]
    if isinstance(error, UnknownCommandError) and given[:1] == words[:1]:
        known = [name for name in app if name.startswith("--")]
        close = difflib.get_close_matches(given[0], known, n=1)
        return f" Did you mean {close[0]}?" if close else ""
    if isinstance(error, MissingArgumentError) and error.argument and "Did you mean" not in str(error):
        missing = error.argument.name
        close = difflib.get_close_matches(missing, given, n=1)
        return f" Did you mean {missing} instead of {close[0]}?" if close else ""
    return ""


def show_our_warnings_plainly() -> None:
    """A warning of this package is one line on stderr; others look as Python shows them."""
    usual = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *rest: Any, **more: Any) -> None:
        if category.__module__.startswith("imputer."):
            print(f"imputer: {message}", file=sys.stderr)
        else:
            usual(message, category, *rest, **more)

    warnings.showwarning = show


def main() -> NoReturn:
    """Run the command line; an error is one line on stderr and an exit code."""
    show_our_warnings_plainly()
    try:
        explain(sys.argv[1:])
        app(sys.argv[1:], exit_on_error=False, print_error=False)
    except CycloptsError as error:
        called = next((word for word in sys.argv[1:] if word in COMMANDS), "")
        said = f"imputer: {' '.join(str(error).split())}{correction(error, sys.argv[1:])} (imputer {called} --help)"
        print(said.replace("  ", " "), file=sys.stderr)
        sys.exit(2)
    except ImputerError as error:
        print(f"imputer: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("imputer: interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(0)
    except OSError as error:
        if error.filename is not None:
            print(f"imputer: {error.filename}: {error.strerror}", file=sys.stderr)
            sys.exit(1)
        if error.errno != errno.ENOSPC:
            raise
        # What could not be written is still in the buffer, and Python would try once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"imputer: cannot write to standard output: {error.strerror}", file=sys.stderr)
        sys.exit(1)
    sys.exit(0)
