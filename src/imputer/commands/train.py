"""`imputer train`."""

import os
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from imputer.commands.options import unknown_option
from imputer.errors import UsageError


def train(
    *options: Annotated[str, Parameter(allow_leading_hyphen=True, show=False)],
    config: Path,
    output: Annotated[Path | None, Parameter(alias="-o")] = None,
    list_options: bool = False,
    accept_changed_data: bool = False,
) -> None:
    """Train a CTC expert or an Imputer, or resume an interrupted run.

    - imputer train --config small --output runs/expert
    - imputer train --config small --training.steps 2000 --list-options

    Every key of the configuration can be set as --section.key value, e.g. --training.steps 2000;
    --list-options explains them all. The run folder holds the configuration, the tokenizer, metrics.jsonl,
    checkpoints and, at the end, the model folder.

    Parameters
    ----------
    config
        A TOML file, or the name of a configuration that comes with the package: small, digits, english, ...
    output
        Folder of the run. By default runs/ and the name of the configuration.
    list_options
        Show every key with the value it would have, what it is for and what it takes, and stop.
    accept_changed_data
        Resume although the training data changed, or train on alignments of texts that changed, leaving those out.
    """
    overrides = parse_options(options)
    from imputer import configs as configuration

    settings = configuration.read(config, overrides)
    from imputer import training
    from imputer.support.memory import reuse_freed_memory
    from imputer.training.starting import OWN

    if list_options:
        print(configuration.to_toml(vars(settings), explained=True, choices=training.CHOICES), end="")
        return
    for line in training.warnings(settings):
        print(f"imputer: warning: {line}", file=sys.stderr)
    folder = output or Path("runs") / config.stem
    reuse_freed_memory()
    finished = training.train(settings, folder, accept_changed_data=accept_changed_data)
    if os.environ.get("RANK", "0") != "0":
        return  # the first process prints it
    print(f"model written to {finished}")
    print(f"try it:      imputer transcribe --model {finished} your.wav")
    if settings.training.objective == "ctc":
        store = settings.rollin.alignments.removesuffix(OWN) or "train.alignments"
        manifests = " ".join(settings.data.train)
        print(f"as expert:   imputer align --manifest {manifests} --model {finished} --store {store}")


def parse_options(options: tuple[str, ...]) -> dict[str, str]:
    """{"section.key": text} from ("--section.key", text, ...) or "--section.key=text"."""
    pending, found = list(options), {}
    while pending:
        word = pending.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or "." not in name:
            raise UsageError(
                f"{unknown_option(word, train)} (keys of the configuration: --section.key value)"
            )
        if not equals:
            if not pending:
                raise UsageError(f"{word} needs a value")
            value = pending.pop(0)
        found[name] = value
    return found
