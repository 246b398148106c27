"""Fingerprints of utterances, to notice data that changed since a training or an alignment.

Two numbers per utterance: one for its text, one for its sound (file name, offset and duration). The content of audio
files is not read, and the folder they are in does not count: a corpus may move.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from imputer.data.manifest import Utterance
from imputer.errors import ImputerError, count
from imputer.support.atomic_files import replacing


def fingerprint(utterance: Utterance) -> tuple[int, int]:
    """(text, sound) of one utterance."""
    sound = f"{Path(utterance.audio_filepath).name}\0{utterance.offset:.3f}\0{utterance.duration:.3f}"
    return _hash(f"{utterance.id}\0{utterance.text}"), _hash(f"{utterance.id}\0{sound}")


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True)
class Fingerprints:
    """The utterances of a data set in their order."""

    names: list[str]
    numbers: np.ndarray  # (utterance, 2) uint64: text, sound

    @classmethod
    def of(cls, utterances: Iterable[Utterance]) -> "Fingerprints":
        names, numbers = [], []
        for utterance in utterances:
            names.append(utterance.id)
            numbers.append(fingerprint(utterance))
        return cls(names, np.array(numbers, np.uint64).reshape(-1, 2))

    def save(self, path: Path) -> None:
        from safetensors.numpy import save_file

        names = np.frombuffer(json.dumps(self.names).encode(), np.uint8)
        with replacing(path) as temporary:
            save_file({"names": names, "numbers": self.numbers}, temporary)

    @classmethod
    def load(cls, path: Path) -> "Fingerprints":
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        try:
            tensors = load_file(path)
            names, numbers = json.loads(tensors["names"].tobytes()), tensors["numbers"]
            if numbers.shape != (len(names), 2):
                raise ValueError(f"{len(names)} names for {len(numbers)} fingerprints")
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise ImputerError(
                f"{path} is damaged ({error}); remove it to resume without comparing the data"
            ) from error
        return cls(names, numbers)

    def __iter__(self) -> Iterator[tuple[str, tuple[int, int]]]:
        return zip(self.names, map(tuple, self.numbers.tolist()), strict=True)


def differences(before: Fingerprints, now: Fingerprints) -> list[str]:
    """What differs between two data sets, one sentence for each kind of difference; the order counts."""
    if before.names == now.names and np.array_equal(before.numbers, now.numbers):
        return []
    old, new = dict(before), dict(now)
    kinds = {
        "missing": [name for name in old if name not in new],
        "new": [name for name in new if name not in old],
        "changed in text": [name for name in new if name in old and new[name][0] != old[name][0]],
        "changed in file name, offset or duration": [
            name for name in new if name in old and new[name][1] != old[name][1]
        ],
    }
    found = [_sentence(names, what) for what, names in kinds.items() if names]
    return found or ["the utterances are in another order"]


def _sentence(names: list[str], what: str) -> str:
    verb = "is" if len(names) == 1 else "are"
    return f"{count(len(names), 'utterance')} {verb} {what}, first {names[0]!r}"
