"""What is printed where there is no terminal."""

from imputer import progress


def test_time_left_counts_only_what_this_run_did(monkeypatch, capsys):
    """Resumed at 900 of 1,000, ten steps in 20 s: the last 90 take 180 s."""
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: False, raising=False)
    with progress.bar("training", 1000, before=900) as advance:
        now = 20.0
        advance(10)
    assert capsys.readouterr().err.split(", ")[-1].strip() == "0:03:00 left"
