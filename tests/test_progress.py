"""What is printed where there is no terminal."""

from imputer.support import progress


def test_time_left_counts_only_what_this_run_did(monkeypatch, capsys):
    """Resumed at 899 of 1,000, the first step compiles for a minute, then ten in 20 s: the last 90 take 180 s."""
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: False, raising=False)
    with progress.bar("training", 1000, before=899) as advance:
        now = 60.0
        advance()
        assert capsys.readouterr().err == "training: 900/1000\n"
        now = 80.0
        advance(10)
    assert capsys.readouterr().err == "training: 910/1000, 0:03:00 left\n"
