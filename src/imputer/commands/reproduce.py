"""`imputer reproduce`."""

import sys
from pathlib import Path

from imputer.errors import ImputerError, UsageError


def reproduce(
    name: str | None = None,
    /,
    *,
    all: bool = False,
    quick: bool = False,
    on: str = "",
    data: Path = Path("data"),
    runs: Path | None = None,
    output: Path | None = None,
    seeds: int = 1,
    add_seeds: bool = False,
    models: Path | None = None,
    lm: Path | None = None,
    list: bool = False,
    report: bool = False,
    verify: bool = False,
) -> None:
    """Regenerate the paper's tables and figures: train what they need, decode, and write results and a report.

    - imputer reproduce --list
    - imputer reproduce table2 --seeds 3
    - imputer reproduce --all --quick
    - imputer reproduce --verify

    Experiments share their trainings. The same command resumes an interrupted run. RESULTS.md is written beside the
    folder of results, a page for every experiment into docs/results.

    Parameters
    ----------
    name
        The experiment; --list shows them.
    all
        Run every experiment that needs no models of other trainings, one after the other.
    quick
        On generated data and in minutes, to see that everything works.
    on
        Another data set than the experiment's own: libri, libri_convolution, english, digits, digits_shifted, cmudict
        or tones.
    data
        Folder with the manifests, or with the folders and archives to make them from; generated files go there too.
    runs
        Folder of the trainings: runs/reproduce, or runs/quick with --quick.
    output
        Folder of the results: results, or runs/quick/results with --quick.
    seeds
        Repeat every training with so many seeds; error rates are means over them.
    add_seeds
        Keep the errors of the seeds that the results file already has, if the same code, settings and data made
        them, and train only the others. So seeds can be run on several machines, one after the other.
    models
        Run folders that were trained elsewhere, for the experiment english.
    lm
        A language model: count the errors that it would fix.
    list
        Only show the experiments.
    report
        Only write the report and its pictures again from the existing results.
    verify
        Only compute every reported figure again from the stored errors of every utterance; fail on a difference.
    """
    from imputer import research
    from imputer.research import report as reports

    output = output or Path("runs/quick/results" if quick else "results")
    if list:
        _list(output)
    elif verify:
        if found := reports.verify(output):
            raise ImputerError("\n".join([f"{len(found)} figures differ from the stored errors:", *found]))
        print(f"every figure follows from the errors of the utterances in {output}")
    elif report:
        print(f"written to {reports.write(output)}")
    else:
        if all == bool(name):
            raise UsageError("give the name of an experiment, or --all; --list shows them")
        if name and name not in research.EXPERIMENTS:
            raise UsageError(f"no experiment {name!r}; there are {', '.join(research.EXPERIMENTS)}")
        if on and name and not research.load(name).DATASET:
            raise UsageError(f"{name} generates its own data; leave --on {on} out")
        if seeds < 1:
            raise UsageError(f"--seeds must be at least 1, got {seeds}")
        if add_seeds and (models or lm):
            raise UsageError("--add-seeds takes errors from the results file; leave --models and --lm out")
        from imputer.research.reproduction import reproduce as run
        from imputer.support.memory import reuse_freed_memory

        names = [name] if name else [one for one in research.EXPERIMENTS if one != "english"]
        reuse_freed_memory()
        place = runs or Path("runs/quick" if quick else "runs/reproduce")
        for number, one in enumerate(names, 1):
            print(f"[{number}/{len(names)}] {one}", file=sys.stderr, flush=True)
            path = run(
                one,
                data=data,
                runs=place,
                output=output,
                quick=quick,
                on=on,
                seeds=seeds,
                models=models,
                lm=lm,
                add_seeds=add_seeds,
            )
            print(f"{one}: written to {path}", flush=True)
            together = reports.write(output, [path.stem])  # after each, so that what is done can be read
        print(f"put together in {together}")


def _list(output: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    from imputer import research

    table = Table("experiment", "what", "data", "results")
    for name in research.EXPERIMENTS:
        module = research.load(name)
        found = sorted(path.name for path in output.glob(f"{name}*.json") if path.stem.split("-")[0] == name)
        table.add_row(name, module.TITLE, module.DATASET or "made", ", ".join(found) or "none yet")
    Console().print(table)
