"""Steps until the last, with validations, checkpoints and a way to stop in between."""

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from imputer import configs
from imputer.data.drops import Dropped, Tally
from imputer.data.ranks import joined
from imputer.errors import count
from imputer.support import progress
from imputer.training.data_checks import bad_lines
from imputer.training.run import Run
from imputer.training.run_folder import only_run_in, quiet, save_checkpoint, save_model
from imputer.training.stale_copy import stale_copy
from imputer.training.starting import prepare
from imputer.training.step import take_step
from imputer.training.validating import validate_and_keep

TRIM_EVERY = 50  # steps


def train(settings: configs.Config, folder: Path, *, accept_changed_data: bool = False) -> Path:
    """Train, or resume, the run in ``folder``; returns the folder of the finished model.

    A run resumes on the data it was started with; ``accept_changed_data`` lets it resume on changed data.
    """
    if settings.training.threads:
        torch.set_num_threads(settings.training.threads)
    with joined() as here, only_run_in(folder, here), _stop_signal() as stop_asked:
        run = prepare(settings, folder, here, accept_changed_data=accept_changed_data)
        finished = loop(run, stop_asked)
        report_drops(run)
        if finished and here.first:
            save_model(run)
        here.wait()
    if not finished:
        print(
            f"stopped at step {run.progress.step}; the same command resumes from there",
            file=sys.stderr,
            flush=True,
        )
        raise SystemExit(128 + (stop_asked() or signal.SIGTERM))  # 0: another rank was asked
    return folder / "model"


def loop(run: Run, stop_asked: Callable[[], int]) -> bool:
    """Steps until the last or until asked to stop; True if all are done."""
    training, here = run.settings.training, run.ranks
    stream = run.stream.batches(run.progress.epoch, run.progress.position)
    share = training.batches_per_step // here.count
    started, audio_before = time.monotonic(), run.progress.seconds_of_audio
    bar = progress.bar("training", training.steps, before=run.progress.step)
    if run.valid and training.validate_every and not run.progress.step:
        validate_and_keep(run)
    with bar if here.first else contextlib.nullcontext(quiet) as advance:
        while run.progress.step < training.steps and not out_of_patience(run):
            refresh = run.settings.rollin.refresh_every
            if refresh and run.progress.step and run.progress.step % refresh == 0:
                run.objective.expert = stale_copy(run)
            figures = take_step(run, [next(stream) for _ in range(share)])
            step = run.progress.step
            if figures and due(step, training.log_every, training.steps):
                speed = (run.progress.seconds_of_audio - audio_before) / (time.monotonic() - started)
                figures |= {"audio_seconds_per_second": round(speed, 1)}
                run.log({"step": step, "epoch": run.progress.epoch, **figures})
                advance(
                    0,
                    f"loss {figures['loss']:.3f}, lr {figures['learning_rate']:.1e}, {speed:.0f}x real time",
                )
            advance(1)
            if step % TRIM_EVERY == 0:
                give_back_memory()
            if run.valid and due(step, training.validate_every, training.steps):
                validate_and_keep(run)
            stopping = bool(run.ranks.total([float(stop_asked() > 0)])[0])
            early = out_of_patience(run)
            if stopping or early or due(step, training.checkpoint_every, training.steps):
                save_checkpoint(run)
            if stopping and step < training.steps and not early:
                return False
    return True


def out_of_patience(run: Run) -> bool:
    """Whether the last ``training.patience`` validations brought no lower loss."""
    return 0 < run.settings.training.patience <= run.progress.waited


def report_drops(run: Run) -> None:
    """Say what could not be used since the start, over all ranks."""
    dropped: dict[str, Dropped] = {}
    for found in run.ranks.gathered(run.dropped):
        dropped = found | dropped
    dropped |= run.stream.excluded
    tally = Tally().add([*dropped.values(), *bad_lines(run.stream.utterances)])
    empty = f"; {count(run.progress.empty, 'step')} had no usable utterance" if run.progress.empty else ""
    skipped = run.progress.skipped
    if skipped:
        names = ", ".join(skipped[0][:4])
        empty += f"; {count(len(skipped), 'step')} skipped, the loss was not finite, first with {names}"
    run.ranks.say(f"dropped in this training: {tally if tally.counts else 'none'}{empty}")


def due(step: int, every: int, last: int) -> bool:
    """Whether ``step`` is a multiple of ``every`` or the last one; 0 = only the last."""
    return step == last or (every > 0 and step % every == 0)


def give_back_memory() -> None:
    """Return freed memory to the system: batches of many different shapes fragment the C library's heap."""
    with contextlib.suppress(OSError, AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)


@contextlib.contextmanager
def _stop_signal() -> Iterator[Callable[[], int]]:
    """A function that tells which of SIGTERM and Ctrl-C came first, or 0; a second Ctrl-C interrupts at once."""
    asked = 0

    def ask(number: int, frame: Any) -> None:
        nonlocal asked
        if asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked = asked or number
        if number == signal.SIGINT:  # not print: a handler may interrupt another print
            os.write(
                2, b"\nimputer: stopping after this step, with a checkpoint; Ctrl-C again stops at once\n"
            )

    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
