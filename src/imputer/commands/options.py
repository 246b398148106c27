"""Suggestions for mistyped options, where a command reads words that the parser does not check."""

import difflib
import inspect
from collections.abc import Callable
from typing import Any


def unknown_option(word: str, command: Callable[..., Any]) -> str:
    """What to say about ``word``: with the option of ``command`` that is spelled most like it."""
    option = word.partition("=")[0]
    known = [f"--{name.replace('_', '-')}" for name in inspect.signature(command).parameters]
    close = difflib.get_close_matches(option, known, n=1)
    return f"unknown option {option}" + (f"; did you mean {close[0]}?" if close else "")
