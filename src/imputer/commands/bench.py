"""`imputer bench`."""

import pkgutil
from importlib import import_module
from pathlib import Path

from imputer.errors import UsageError
from imputer.research import benchmarks


def bench(name: str = "all", /, *, quick: bool = False, json: Path | None = None) -> None:
    """Measure speed and memory on this machine, as ratios within one run.

    - imputer bench objectives
    - imputer bench all --quick --json figures.json

    Parameters
    ----------
    name
        objectives, arithmetic, features, batching, training, decoding, serving or paper_size; all runs every one.
    quick
        Smaller sizes and fewer rounds: to see that it runs, not to quote.
    json
        Also write the figures to this file.
    """
    modules = pkgutil.iter_modules(benchmarks.__path__)
    names = sorted(module.name.removeprefix("bench_") for module in modules)
    if name != "all" and name not in names:
        raise UsageError(f"no benchmark {name}; there are {', '.join(names)}, and all")
    figures = {}
    for chosen in names if name == "all" else [name]:
        figures[chosen] = import_module(f"{benchmarks.__name__}.bench_{chosen}").run(quick)
    if json:
        from json import dumps

        from imputer.support.atomic_files import write_text

        write_text(json, dumps(figures, indent=1, default=str) + "\n")
