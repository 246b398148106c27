"""The imputation in the terminal: the alignment fills in, pass by pass, like the paper's Figure 4.

Every frame has a cell as wide as its final symbol, so that only the filled cells change; bars separate the blocks, and
lines break between blocks at the width of the terminal.
"""

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from imputer.transcripts import BLANK, MASK, WORD_MARK, Transcript

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

BAR = "│"
STYLES = {"mask": "bright_black", "blank": "bright_black", "kept": "bold", "new": "bold black on green"}


def show(
    transcript: Transcript, name: str, *, block_size: int, console: "Console", pause: float = 0.35
) -> None:
    """Play the passes of a transcript that has a trace; where there is no terminal, print them one by one."""
    from rich.live import Live

    frames = list(passes(transcript, block_size=block_size, width=console.width))
    console.print(
        f"{name}: {transcript.seconds:.1f} s, {transcript.passes} passes", highlight=False, markup=False
    )
    if not console.is_terminal:
        for number, lines in enumerate(frames):
            console.print(f"pass {number}", highlight=False)
            for line in lines:
                console.print(line, overflow="ignore", no_wrap=True, soft_wrap=True)
        return
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        for number, lines in enumerate(frames):
            live.update(_screen(lines, number, console.height), refresh=True)
            time.sleep(pause)


def passes(transcript: Transcript, *, block_size: int, width: int) -> Iterator[list["Text"]]:
    """The lines of the start, where all is masked, and of every pass."""
    if not transcript.trace:
        raise ValueError("the transcript has no trace: transcribe with trace=True")
    final = transcript.trace[-1]
    widths = [len(shown(symbol)) for symbol in final]
    breaks = line_breaks(widths, block_size, width)
    before = [MASK] * len(final)
    for row in [before, *transcript.trace]:
        yield [_line(row, before, widths, block_size, start, end) for start, end in breaks]
        before = row


def line_breaks(widths: Sequence[float], block_size: int, width: float) -> list[tuple[int, int]]:
    """(first frame, end) of every line: as many whole blocks as fit, or part of one that does not fit at all."""
    lines, start, used = [], 0, 1.0
    for first in range(0, len(widths), block_size):
        block = widths[first : first + block_size]
        if used > 1 and used + sum(block) + 1 > width:
            lines.append((start, first))
            start, used = first, 1.0
        for frame, cell in enumerate(block, first):
            if used > 1 and used + cell + 1 > width:
                lines.append((start, frame))
                start, used = frame, 1.0
            used += cell
        used += 1
    return [*lines, (start, len(widths))] if len(widths) else []


def _line(
    row: Sequence[str], before: Sequence[str], widths: Sequence[int], block_size: int, start: int, end: int
) -> "Text":
    from rich.text import Text

    line = Text(BAR, style=STYLES["mask"])
    for frame in range(start, end):
        symbol, new = row[frame], before[frame] == MASK
        kind = {MASK: "mask", BLANK: "blank"}.get(symbol, "kept")
        style = STYLES["new"] if new and symbol != MASK else STYLES[kind]
        line.append(shown(symbol).center(widths[frame]), style=style)
        if (frame + 1) % block_size == 0 or frame + 1 == len(row):
            line.append(BAR, style=STYLES["mask"])
    return line


def shown(symbol: str) -> str:
    """A piece as the paper prints it, "[" for the start of a word."""
    return symbol.replace(WORD_MARK, "[")


def _screen(lines: Sequence["Text"], number: int, height: int) -> "Text":
    from rich.text import Text

    head = Text(f"pass {number}\n", style="bold")
    return head.append_text(Text("\n").join(lines[: max(1, height - 2)]))
