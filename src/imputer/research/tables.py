"""Pieces of Markdown for the experiments and the report."""

import re
from collections.abc import Iterable, Sequence

from imputer.evaluation.trials import Estimate
from imputer.research.results import Result


def markdown(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table, its first column to the left, the others to the right if they are figures."""
    body = [list(row) for row in rows]
    figures = [all(_is_figure(row[i]) for row in body) for i in range(len(headings))]
    rule = ["---:" if figure and i else "---" for i, figure in enumerate(figures)]
    return [f"| {' | '.join(row)} |" for row in ([*headings], rule, *body)]


def _is_figure(cell: str) -> bool:
    """Whether a cell is empty, or a number with no words behind it."""
    return not cell or bool(re.match(r"[-+–−\d](?!.*[A-Za-z]{3})", cell))


def percent(value: float) -> str:
    """A share as per cent, one decimal."""
    return f"{100 * value:.1f}"


def rate(found: Estimate) -> str:
    """An error rate with its interval."""
    return f"{percent(found.value)} ({percent(found.low)}–{percent(found.high)})"


def variants(result: Result) -> str:
    """How the Imputers of an analysis were trained, and why they are not comparable with the paper's."""
    steps = result["steps"]
    return (
        f"The Imputers are trained like the main tables' and stopped after {steps['analysis']:,} of "
        f"{steps['main']:,} steps. Not comparable: {result.data['not_comparable']}."
    )
