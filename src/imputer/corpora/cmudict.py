"""Letters to phonemes: the CMU Pronouncing Dictionary, a task without sound, cheap enough for many epochs on two cores.

The input is the letters of a word, the target its phonemes, one character each, so that the character error rate
counts phonemes and the word error rate counts words with any phoneme wrong. The spelling is the utterance's id.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from imputer.corpora.common import Dropped, Found, Options
from imputer.data.manifest import Utterance
from imputer.data.text import read_lines
from imputer.errors import UsageError
from imputer.frontends.letters import FRAME_SECONDS, HELD, LETTERS

NAME = "cmudict.dict"
HELD_OUT = {"valid": 0.02, "test": 0.08}  # shares of the words
# ARPAbet's own one-letter forms; the stress of vowels is left out.
PHONEMES = dict(
    re.findall(
        r"(\w+):(\S)",
        "AA:a AE:@ AH:A AO:c AW:W AY:Y B:b CH:C D:d DH:D EH:E ER:R EY:e F:f G:g HH:h IH:I IY:i JH:J K:k L:l M:m N:n "
        "NG:G OW:o OY:O P:p R:r S:s SH:S T:t TH:T UH:U UW:u V:v W:w Y:y Z:z ZH:Z",
    )
)


def cmudict(source: Path, options: Options) -> Iterator[Found | Dropped]:
    """Every word with its first pronunciation, in splits drawn from the seed."""
    path = source / NAME if source.is_dir() else source
    words = dict[str, str]()
    for number, line in read_lines(path):
        spelled, *phonemes = line.partition("#")[0].lower().split() or [";;;"]
        if spelled.startswith(";;;") or spelled.endswith(")") or spelled in words:
            continue  # a comment, or a further pronunciation
        said = _said(phonemes)
        if said is None:
            yield Dropped("not a pronunciation", f"{path}, line {number}: {line!r}")
        elif set(spelled) - set(LETTERS):
            yield Dropped("spelt with other marks than letters", spelled)
        elif len(said) + 1 > HELD * len(spelled):  # one token more: the mark of a word's beginning
            yield Dropped("more phonemes than frames", f"{spelled}: {len(said)} phonemes")
        else:
            words[spelled] = said
    if not words:
        raise UsageError(f"{path} has no pronunciations; expected lines like 'cat K AE1 T'")
    for spelled, split in zip(words, _splits(len(words), options.seed), strict=True):
        seconds = HELD * FRAME_SECONDS * len(spelled)
        word = Utterance(spelled, str(path), seconds, words[spelled])
        if not options.splits or split in options.splits:
            yield Found(word, split, recorded=False)


def _said(phonemes: list[str]) -> str | None:
    """One character per phoneme; None if one is unknown."""
    found = [PHONEMES.get(phoneme.rstrip("012").upper()) for phoneme in phonemes]
    return "".join(map(str, found)) if found and None not in found else None


def _splits(words: int, seed: int) -> list[str]:
    """train, valid or test for each word."""
    names = np.full(words, "train", dtype=object)
    order, start = np.random.default_rng(seed).permutation(words), 0
    for split, share in HELD_OUT.items():
        stop = start + max(1, round(share * words))
        names[order[start:stop]] = split
        start = stop
    return names.tolist()
