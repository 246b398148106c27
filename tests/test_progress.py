"""Progress on stderr."""

import io
import sys

import pytest

from imputer.support import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_progress_never_passes_its_total(stream: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream())
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    monkeypatch.setenv("COLUMNS", "200")
    with progress.bar("work", 616, unit="s") as advance:
        for _ in range(3):
            advance(239.76)
    said = sys.stderr.getvalue()
    assert "616/616 s" in said and "719" not in said and "-1:" not in said and " left" in said


def test_what_was_done_before_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    with progress.bar("work", 10, before=8) as advance:
        advance(note="loss 1.0")
    assert sys.stderr.getvalue() == "work: 9/10, loss 1.0\n"
