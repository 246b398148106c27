"""The program ``imputer``: one command a file in ``imputer.commands``, imported only when it is called."""

import sys
from typing import NoReturn

from cyclopts import App

from imputer import __version__
from imputer.errors import ImputerError

COMMANDS = {
    "transcribe": "Write down what is said in audio files.",
    "align": "Find the time of every word of a known text.",
    "serve": "Run the transcription server and its web page.",
    "demo": "Show what an Imputer does, on recordings made on the spot.",
    "prepare": "Turn a corpus or a folder of recordings into a manifest.",
    "train": "Train a CTC expert or an Imputer.",
    "evaluate": "Score a model: word and character error rates with intervals.",
    "export": "Write a model as ONNX, in float32 or int8.",
    "reproduce": "Regenerate the paper's tables and figures.",
    "bench": "Measure speed and memory.",
}

app = App(
    name="imputer",
    version=__version__,
    help="Speech recognition in a constant number of parallel passes.",
)
for name, summary in COMMANDS.items():
    app.command(f"imputer.commands.{name}:{name}", name=name, help=summary)


def main() -> NoReturn:
    """Run the command line; a person's mistake is one line on stderr and its exit code."""
    try:
        app(sys.argv[1:])
    except ImputerError as error:
        print(f"imputer: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("imputer: interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(0)
    sys.exit(0)
