"""The weighted mean of several models of one network and tokenizer, as a new model folder.

    python tools/average_models.py OUTPUT MODEL[=WEIGHT] MODEL[=WEIGHT] ...

A MODEL is a folder or a shipped name, a WEIGHT 1 if it is left out. Trainings that continue from one model and are
averaged afterwards (Wortsman et al., arXiv:2203.05482) make fewer errors than each of them: see the card of `english`.
Configuration, language model and calibration are those of the first.
"""

import argparse
from pathlib import Path

import torch
from safetensors.torch import save_file

from imputer import models
from imputer.errors import ImputerError, UsageError
from imputer.support import atomic_files


def average(output: Path, parts: list[tuple[str, float]]) -> None:
    folders = [(models.torch_folder(name), weight) for name, weight in parts]
    total = sum(weight for _, weight in folders)
    (first, _), vocabulary = folders[0], models.read_vocabulary(folders[0][0])
    mean: dict[str, torch.Tensor] = {}
    for folder, weight in folders:
        found = models.read_weights(folder / models.WEIGHTS)
        if models.read_vocabulary(folder).fingerprint != vocabulary.fingerprint:
            raise UsageError(f"{folder} has another tokenizer than {first}")
        if mean and {n: t.shape for n, t in found.items()} != {n: t.shape for n, t in mean.items()}:
            raise UsageError(f"{folder} is another network than {first}")
        for name, tensor in found.items():
            share = tensor.double() * (weight / total)
            mean[name] = mean[name] + share if name in mean else share
    models.copy(first, output)
    # Rounded from 64 bits: an encoder that all models share stays exactly what it is, and so do its cached frames.
    with atomic_files.replacing(output / models.WEIGHTS) as path:
        save_file({name: tensor.float().contiguous() for name, tensor in mean.items()}, path)


def part(text: str) -> tuple[str, float]:
    name, _, weight = text.partition("=")
    if not (share := float(weight or 1)) > 0:
        raise ValueError
    return name, share


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path)
    parser.add_argument("models", type=part, nargs="+", metavar="MODEL[=WEIGHT]")
    given = parser.parse_args()
    try:
        average(given.output, given.models)
    except ImputerError as error:
        parser.error(str(error))
    print(f"written to {given.output}")


if __name__ == "__main__":
    main()
