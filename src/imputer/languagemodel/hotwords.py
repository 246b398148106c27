"""Hotwords: a bonus for words and phrases that are expected.

A tree of the letters of all hotwords gives every prefix of one its share of the bonus. What is spelled follows the
tree piece by piece, however the word is cut into pieces. Where it leaves the tree inside a word, the share is given
back; where a word is complete, and the next piece starts another, it stays.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from imputer.data.text import plain, read_lines
from imputer.errors import UsageError
from imputer.vocabulary import WORD_MARK, Vocabulary

BONUS = 2.0  # nats per piece of a hotword


@dataclass(frozen=True, slots=True)
class Hotwords:
    """Where each piece leads from each node of the tree, and the bonus that it brings or takes; node 0 is the root."""

    following: NDArray[np.int32]  # (node, token)
    bonus: NDArray[np.float32]  # (node, token)
    end: NDArray[np.float32]  # (node,) what is taken at the end of the text
    words: tuple[str, ...] = ()  # in the form that the model writes, single words of phrases too


def read(given: str) -> list[str]:
    """Hotwords from the command line: separated by commas, or a file with one per line."""
    if given and "," not in given and Path(given).is_file():
        return [line.strip() for _, line in read_lines(Path(given))]
    if "," not in given and (given.lower().endswith(".txt") or "/" in given):  # no word is written so
        raise UsageError(f"hotwords: no file {given}")
    return [word.strip() for word in given.split(",") if word.strip()]


def hotwords(words: Iterable[str], vocabulary: Vocabulary, bonus: float = BONUS) -> Hotwords:
    """The tree of words and phrases; ``bonus`` nats for every piece that the vocabulary spells them in."""
    if isinstance(words, str):
        raise UsageError(f"hotwords are a list of words, got the text {words!r}")
    nodes: list[dict[str, int]] = [{}]
    held, complete = [0.0], [False]  # the bonus held at a node; whether a hotword ends there
    single: list[str] = []
    for given in words:
        word, tokens = spelled(given, vocabulary) or _cannot_write(given, vocabulary)
        single += word.split()
        letters = WORD_MARK + WORD_MARK.join(word.split())
        total = bonus * len(tokens)
        length = len(letters.replace(WORD_MARK, ""))
        node, so_far = 0, 0
        for letter in letters:
            if letter not in nodes[node]:
                nodes[node][letter] = len(nodes)
                nodes.append({})
                held.append(0.0)
                complete.append(False)
            node = nodes[node][letter]
            so_far += letter != WORD_MARK
            held[node] = max(held[node], total * so_far / length)
        complete[node] = True
    return replace(_tables(nodes, held, complete, vocabulary), words=tuple(single))


def spelled(word: str, vocabulary: Vocabulary) -> tuple[str, list[int]] | None:
    """A hotword in the form that a model writes, as given or plain (lower case, no marks), and its tokens."""
    forms = [word, plain(word)]
    found = zip(forms, vocabulary.encode_each(forms), strict=True)
    return next(((form, tokens) for form, tokens in found if tokens), None)


def _cannot_write(word: str, vocabulary: Vocabulary) -> NoReturn:
    if not word.strip():
        raise UsageError("a hotword is empty")
    strange = sorted(set(plain(word) or word) - vocabulary.alphabet)
    raise UsageError(f"hotword {word!r} has {', '.join(map(repr, strange))}, which this model never writes")


def _tables(
    nodes: list[dict[str, int]], held: list[float], complete: list[bool], vocabulary: Vocabulary
) -> Hotwords:
    safe = _safe(nodes, held, complete)
    paths = _paths(nodes)
    pieces = ["", *vocabulary.pieces(range(1, vocabulary.size + 1))]
    starting: dict[str, list[int]] = {}
    for token, piece in enumerate(pieces):
        starting.setdefault(piece[:1], []).append(token)
    starts_word = np.array([piece.startswith(WORD_MARK) for piece in pieces])
    following = np.zeros((len(nodes), len(pieces)), np.int32)
    bonus = np.zeros(following.shape, np.float32)
    for node in sorted(range(len(nodes)), key=lambda node: len(paths[node])):
        if node:  # outside the tree, continue from the longest suffix of the path that starts a hotword
            instead = _fallback(nodes, paths[node])
            kept = np.where(starts_word & complete[node], held[node], safe[node])
            following[node] = following[instead]
            bonus[node] = kept - held[node] + held[instead] + bonus[instead]
        for token in (token for letter in nodes[node] for token in starting.get(letter, ())):
            if reached := _walk(nodes, node, pieces[token]):
                following[node, token] = reached
                bonus[node, token] = held[reached] - held[node]
    end = [0.0 if complete[node] else safe[node] - held[node] for node in range(len(nodes))]
    return Hotwords(following, bonus, np.array(end, np.float32))


def _safe(nodes: list[dict[str, int]], held: list[float], complete: list[bool]) -> list[float]:
    """The part of a node's bonus that is never taken back: that of the last hotword completed on the way to it."""
    safe = [0.0] * len(nodes)
    for node, letters in enumerate(nodes):  # parents come before their children
        for letter, below in letters.items():
            done = complete[node] and letter == WORD_MARK
            safe[below] = held[node] if done else safe[node]
    return safe


def _paths(nodes: list[dict[str, int]]) -> list[str]:
    """The letters on the way to each node."""
    paths = [""] * len(nodes)
    for node, letters in enumerate(nodes):
        for letter, below in letters.items():
            paths[below] = paths[node] + letter
    return paths


def _fallback(nodes: list[dict[str, int]], path: str) -> int:
    ends = (path[place:] for place in range(1, len(path)) if path[place] == WORD_MARK)
    return next((node for end in ends if (node := _walk(nodes, 0, end))), 0)


def _walk(nodes: list[dict[str, int]], node: int, piece: str) -> int:
    """The node that a piece leads to, 0 if it leaves the tree."""
    for letter in piece:
        found = nodes[node].get(letter)
        if found is None:
            return 0
        node = found
    return node


def none(size: int) -> Hotwords:
    """No hotwords, for a vocabulary of ``size``."""
    shape: Any = (1, size + 1)
    return Hotwords(np.zeros(shape, np.int32), np.zeros(shape, np.float32), np.zeros(1, np.float32))
