"""What options of several commands share: a type for names of files, and suggestions for mistyped options."""

import difflib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    FileName = str
else:
    FileName = str | Path  # a str always, the first of both; for Path the shell completes names of files


def unknown_option(word: str, command: Callable[..., Any]) -> str:
    """What to say about ``word``: with the option of ``command`` that is spelled most like it."""
    option = word.partition("=")[0]
    known = [f"--{name.replace('_', '-')}" for name in inspect.signature(command).parameters]
    close = difflib.get_close_matches(option, known, n=1)
    return f"unknown option {option}" + (f"; did you mean {close[0]}?" if close else "")
