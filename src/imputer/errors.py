"""Errors that a user can fix: one line on the terminal, no stack trace."""


class ImputerError(ValueError):
    """Something in the data failed (a damaged file, a bad manifest line); the program ends with code 1."""

    exit_code = 1


class UsageError(ImputerError):
    """The call is wrong (a missing file, a bad option); the program ends with code 2."""

    exit_code = 2


def count(number: int, noun: str) -> str:
    """A number with its noun: "1 frame", "2 frames"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
