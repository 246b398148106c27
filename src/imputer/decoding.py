"""Decoding: fill an all-mask alignment in a constant number of parallel passes (sec:inference).

``impute`` runs the passes; a strategy (``imputer.strategies``) says which frames each of them commits.
``decode`` is the one entry point for a network: acoustic frames and ``Options`` in, one result per item out.

A pass costs one evaluation of the network, whatever the length; ``block_size`` is the paper's B.
B = 1 is one pass, greedy CTC; B = the number of frames is one frame per pass, in any order.
"""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from functools import partial as with_options
from typing import Any, Protocol

import torch
from torch import Tensor

from imputer.alignments import collapse
from imputer.errors import ImputerError, UsageError
from imputer.strategies import (
    STRATEGIES,
    Pass,
    Strategy,
    adaptive,
    alternate_sub_block,
    annealing,
    block,
    likeliest_per_block,
    right_most_last,
    spread,
    top_k,
)

__all__ = [  # users name the strategies here
    "STRATEGIES",
    "WIDEST",
    "Cancelled",
    "Decoded",
    "Hypothesis",
    "Imputation",
    "Network",
    "OnPass",
    "Options",
    "Pass",
    "Search",
    "Searched",
    "Step",
    "Strategy",
    "adaptive",
    "alternate_sub_block",
    "annealing",
    "block",
    "decode",
    "impute",
    "likeliest_per_block",
    "right_most_last",
    "spread",
    "top_k",
]

Step = Callable[[Tensor], Tensor]  # partial (batch, frame) ids -> log_probs (batch, frame, token)


@dataclass(frozen=True, slots=True)
class Imputation:
    """A finished alignment and how it came about."""

    alignment: Tensor  # (batch, frame) token ids, blank beyond an item's length
    confidence: Tensor  # (batch, frame) probability of the token in the pass that committed it
    passes: int  # evaluations of the network
    passes_per_item: Tensor  # (batch,) passes until the item was complete
    trace: list[Tensor] | None = None  # after each pass: (batch, frame) ids, the mask id where still open


@torch.no_grad()  # not inference_mode: an alignment may be used to train a model
def impute(
    step: Step,
    frame_lengths: Tensor,
    *,
    block_size: int,
    strategy: str | Strategy = "block",
    mask: int,
    blank: int = 0,
    trace: bool = False,
    generator: torch.Generator | None = None,
    on_pass: Callable[[Tensor, Tensor, int], None] | None = None,
    start: Tensor | None = None,
) -> Imputation:
    """Impute a batch of alignments, a = (a_1 .. a_T), from all-mask to complete.

    ``start`` (batch, frame) gives a partial alignment to begin from instead: its tokens stay, its masks are filled.

    ``step(partial)`` evaluates p(a_i | a~, x) for every frame, eqn:factorization. ``on_pass(partial, confidence, n)``
    is called after pass n = 1, 2, ... with the partial alignments and the probabilities of their committed
    frames (0 where masked). An item is decoded alike alone and in a batch, as long as ``step`` treats it alike.
    Without ``generator`` the seed is 0.
    """
    choose = _strategy(strategy)
    _check_block_size(block_size)
    seed = int(torch.randint(2**31, (1,), generator=generator, device=generator.device)) if generator else 0

    frames = int(frame_lengths.max()) if len(frame_lengths) else 0
    inside = torch.arange(frames, device=frame_lengths.device) < frame_lengths[:, None]  # (batch, frame)
    partial = torch.full(inside.shape, blank, device=inside.device).masked_fill_(inside, mask)
    if start is not None:
        partial = torch.where(inside, start, partial)
    masked = inside & (partial == mask)
    held = torch.zeros(inside.shape, device=inside.device)
    passes_per_item = torch.zeros(len(frame_lengths), dtype=torch.long, device=inside.device)
    history: list[Tensor] = []
    number = 0
    while bool((open_items := masked.any(1)).any()):
        scores, tokens = _likeliest(step(partial), masked, mask, number)
        now = Pass(number, block_size, frame_lengths, masked, tokens, scores, held, blank, seed)
        commit, release = _decision(choose(now), now)
        partial = torch.where(commit, tokens, partial).masked_fill_(release, mask)
        held = torch.where(commit, scores, held)
        masked = (masked & ~commit) | release
        number += 1
        passes_per_item += open_items
        if trace:
            history.append(partial)
        if on_pass is not None:
            on_pass(partial, held.exp().masked_fill_(masked | ~inside, 0.0), number)
    confidence = torch.where(inside, held.exp(), 0.0)
    return Imputation(partial, confidence, number, passes_per_item, history if trace else None)


def _likeliest(log_probs: Tensor, masked: Tensor, mask: int, number: int) -> tuple[Tensor, Tensor]:
    """The likeliest token of every frame and its log probability, made finite so that any frame can win."""
    batch, frames = masked.shape
    if log_probs.shape[:2] != masked.shape or log_probs.shape[2] > mask:
        raise ValueError(
            f"step must give log_probs of shape ({batch}, {frames}, at most {mask} tokens: not the mask), "
            f"got {tuple(log_probs.shape)}"
        )
    scores, tokens = log_probs.max(2)
    if bool((scores.isnan() & masked).any()):
        item, frame = (scores.isnan() & masked).nonzero()[0].tolist()
        raise ValueError(f"step gave NaN in pass {number + 1} for item {item}, frame {frame}")
    return scores.float().nan_to_num(nan=-1e5).clamp_(min=-1e5), tokens


def _decision(choice: Tensor | tuple[Tensor, Tensor], now: Pass) -> tuple[Tensor, Tensor]:
    """Newly committed and newly masked frames; a pass that commits nothing would never end."""
    commit, release = choice if isinstance(choice, tuple) else (choice, torch.zeros_like(now.masked))
    commit = commit & now.masked
    if not bool(commit.any()):
        raise ValueError(f"the strategy committed no frame in pass {now.number + 1}")
    return commit, release


def _strategy(strategy: str | Strategy) -> Strategy:
    if callable(strategy):
        return strategy
    if strategy not in STRATEGIES:
        raise UsageError(f"unknown strategy {strategy!r}; known are {', '.join(STRATEGIES)}")
    return STRATEGIES[strategy]


def _check_block_size(block_size: int) -> None:
    if isinstance(block_size, bool) or not isinstance(block_size, int) or block_size < 1:
        raise UsageError(f"block size must be a whole number of at least 1, got {block_size!r}")


# Decoding a batch with a network.


class Network(Protocol):
    """What decoding needs of a model, however it is run."""

    vocabulary_size: int
    blank: int
    mask: int
    merge_repeats: bool
    settings: Any
    front_end: Any

    def encode(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Acoustic frames (batch, frame, channel) and their numbers, once per utterance."""

    def impute(self, acoustic: Tensor, frame_lengths: Tensor, partial: Tensor) -> Tensor:
        """log p(a_i | a~, x), once per pass."""


WIDEST = 10_000  # hypotheses of a search; time and memory grow with them


@dataclass(frozen=True, slots=True)
class Options:
    """How to decode. Equal options can share a batch."""

    block_size: int | None = None  # the paper's B, the number of passes; None: the model's own
    strategy: str | Strategy = "block"
    _: KW_ONLY
    strategy_options: tuple[tuple[str, float], ...] = ()  # keyword arguments of the strategy
    trace: bool = False  # keep the partial alignment of every pass, and the greedy first pass
    lm: Any = None  # a LanguageModel, the name or path of one, "default" for the model's own; None: none
    hotwords: tuple[str, ...] = ()  # words and phrases that the search prefers
    beam: int | None = None  # hypotheses of a search; None: the model's own
    n_best: int = 1  # results per recording, best first

    def __post_init__(self) -> None:
        """Refuse bad values before any audio is read."""
        if self.block_size is not None:
            _check_block_size(self.block_size)
        chosen = _strategy(self.strategy)
        object.__setattr__(self, "strategy_options", tuple(sorted(dict(self.strategy_options).items())))
        known = getattr(chosen, "__kwdefaults__", None) or {}
        for name, _ in self.strategy_options:
            if name not in known:
                takes = f"it takes {', '.join(known)}" if known else "it takes none"
                raise UsageError(f"strategy {self.strategy!r} has no option {name!r}; {takes}")
        if isinstance(self.hotwords, str):
            raise UsageError(f"hotwords are a list of words, got the text {self.hotwords!r}")
        object.__setattr__(self, "hotwords", tuple(self.hotwords))
        for name, value in (("beam", 1 if self.beam is None else self.beam), ("n_best", self.n_best)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UsageError(f"{name} must be a whole number of at least 1, got {value!r}")
            if value > WIDEST:
                raise UsageError(f"{name} must be at most {WIDEST}, got {value}")

    @property
    def searches(self) -> bool:
        """Whether a search may change what imputation was not sure of."""
        return self.lm is not None or bool(self.hotwords) or self.n_best > 1

    @property
    def name(self) -> str:
        """A short name for tables and files: strategy, block size, options of the strategy."""
        own = [f"{key}={value:g}" for key, value in self.strategy_options]
        return "-".join([str(self.strategy), str(self.block_size or "own"), *own])

    def passes(self, network: Network) -> int:
        """The block size to decode with: the one asked for, or the network's own."""
        return self.block_size or network.settings.block_size


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A transcript that a search found."""

    tokens: list[int]
    score: float  # what hypotheses are ranked by, in nats
    acoustic: float  # log p(tokens | committed frames, x)
    language: float  # log p(tokens) by the language model, without its weight


@dataclass(frozen=True, slots=True)
class Searched:
    """An imputation after a search: complete again."""

    imputation: Imputation
    partial: Tensor  # (batch, frame) what was masked again for it
    hypotheses: list[list[Hypothesis]]  # of each item, best first


class Search(Protocol):
    """Decides the frames that imputation was not sure of (``imputer.languagemodel.fusion``)."""

    def __call__(
        self,
        step: Step,
        imputed: Imputation,
        frame_lengths: Tensor,
        *,
        mask: int,
        blank: int,
        merge_repeats: bool,
    ) -> Searched:
        """One more pass, at most."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """One recording, or one window of it, decoded: lists over its frames."""

    alignment: list[int]
    confidence: list[float]  # probability of each frame's token in the pass that committed it
    passes: int
    trace: list[list[int]] | None = None  # after each pass, token ids, the mask id where still open
    trace_confidence: list[list[float]] | None = None  # the confidences beside ``trace``, 0 where masked
    greedy: "Decoded | None" = None  # the likeliest token of every frame in the first pass, with ``trace``
    searched: list[bool] | None = None  # whether a search, not imputation, chose a frame's token
    hypotheses: list[Hypothesis] | None = None  # of a search, best first

    def tokens(self, network: Network) -> list[int]:
        """What the alignment spells, beta^-1."""
        return collapse(self.alignment, blank=network.blank, merge_repeats=network.merge_repeats)


class Cancelled(Exception):
    """The batch was cancelled."""


# Called after pass n = 1, 2, ...: n, the partial alignment of each item, the confidences beside it.
OnPass = Callable[[int, list[list[int]], list[list[float]]], None]


def decode(
    network: Network,
    acoustic: Tensor,
    frame_lengths: Tensor,
    options: Options | None = None,
    *,
    search: Search | None = None,
    on_pass: OnPass | None = None,
    cancelled: Callable[[], bool] | None = None,
    start: Tensor | None = None,
) -> list[Decoded | ImputerError]:
    """Decode a batch of acoustic frames (batch, frame, channel); one result per item, or its error.

    ``search`` is what ``options`` ask for with a language model, hotwords or n_best: ``Recognizer`` makes it.
    ``on_pass`` is given empty rows for items that failed. ``cancelled`` is called before every pass; if it returns
    True, ``Cancelled`` is raised. ``start`` is a partial alignment to begin from, as in ``impute``.
    """
    options = options or Options()
    if options.searches and search is None:
        raise ValueError("a language model, hotwords and n_best need a search: decode with a Recognizer")
    counts: list[int] = frame_lengths.tolist()
    step = _Passes(network, acoustic, frame_lengths, cancelled)
    rows: list[list[list[int]]] = []  # (pass, item, frame)
    confidences: list[list[list[float]]] = []

    def record(partial: Tensor, confidence: Tensor, number: int) -> None:
        now, sure = _without_padding(partial, counts), _without_padding(confidence, counts)
        for item in step.failed:
            now[item], sure[item] = [], []
        if options.trace:
            rows.append(now)
            confidences.append(sure)
        if on_pass is not None:
            on_pass(number, now, sure)

    result = impute(
        step,
        frame_lengths,
        block_size=options.passes(network),
        strategy=with_options(_strategy(options.strategy), **dict(options.strategy_options)),
        mask=network.mask,
        blank=network.blank,
        on_pass=record if options.trace or on_pass is not None else None,
        start=start,
    )
    searched = None
    if search is not None:
        searched = search(
            step,
            result,
            frame_lengths,
            mask=network.mask,
            blank=network.blank,
            merge_repeats=network.merge_repeats,
        )
        again = _without_padding(searched.partial, counts)  # with the frames that the search decided masked
        if options.trace:
            _mask_again(rows, confidences, again, result.passes_per_item.tolist(), network.mask)
        result = searched.imputation
        if options.trace or on_pass is not None:
            record(result.alignment, result.confidence, result.passes)
    passes = result.passes_per_item.tolist()
    if searched is not None and options.trace:
        # An item may have had fewer passes before the search than the batch.
        for item, number in enumerate(passes):
            if number:
                rows[number - 1][item], confidences[number - 1][item] = rows[-1][item], confidences[-1][item]
    alignments = _without_padding(result.alignment, counts)
    confidence = _without_padding(result.confidence, counts)
    greedy = step.greedy(counts) if options.trace else [None] * len(counts)
    return [
        step.failed.get(item)
        or Decoded(
            alignments[item],
            confidence[item],
            passes[item],
            [row[item] for row in rows[: passes[item]]] if options.trace else None,
            [row[item] for row in confidences[: passes[item]]] if options.trace else None,
            greedy[item],
            None if searched is None else [token == network.mask for token in again[item]],
            None if searched is None else searched.hypotheses[item],
        )
        for item in range(len(counts))
    ]


def _mask_again(
    rows: list[list[list[int]]],
    confidences: list[list[list[float]]],
    again: list[list[int]],
    passes: list[int],
    mask: int,
) -> None:
    """In the trace, take the frames that a search decides out of the last row of every item that has some."""
    for item, partial in enumerate(again):
        last = passes[item] - 1
        if last >= 0 and mask in partial and rows[last][item]:
            sure = confidences[last][item]
            rows[last][item] = partial
            confidences[last][item] = [
                0.0 if token == mask else probability
                for token, probability in zip(partial, sure, strict=True)
            ]


class _Passes:
    """The network as the ``step`` of ``impute``, over the items that are neither done nor failed."""

    def __init__(
        self,
        network: Network,
        acoustic: Tensor,
        frame_lengths: Tensor,
        cancelled: Callable[[], bool] | None,
    ) -> None:
        self.network, self.frame_lengths = network, frame_lengths
        self.acoustic = acoustic[:, : int(frame_lengths.max()) if len(frame_lengths) else 0]
        self.cancelled = cancelled
        self.failed: dict[int, ImputerError] = {}
        self.alive = torch.ones(len(frame_lengths), dtype=torch.bool, device=frame_lengths.device)
        self.number = 0
        self.first: tuple[Tensor, Tensor] | None = None  # probability and token of every frame in pass 1

    def __call__(self, partial: Tensor) -> Tensor:
        if self.cancelled is not None and self.cancelled():
            raise Cancelled
        self.number += 1
        masked = partial == self.network.mask  # (batch, frame)
        left = masked.any(1) & self.alive  # (batch,)
        log_probs = self._evaluate(partial, left)
        if bool(log_probs.sum().isnan()):
            self._set_aside(log_probs, masked)
            # A failed item is filled in with anything, so that the others finish.
            log_probs = log_probs.masked_fill(~self.alive[:, None, None], 0.0)
        if self.number == 1:
            scores, tokens = log_probs.max(2)
            self.first = scores.exp(), tokens
        return log_probs

    def _set_aside(self, log_probs: Tensor, masked: Tensor) -> None:
        """Fail the items whose masked frames hold a NaN."""
        for item, frame in (log_probs.isnan().any(2) & masked).nonzero().tolist():
            if self.alive[item]:
                self.alive[item] = False
                self.failed[item] = ImputerError(
                    f"the network gave NaN (not a number) at frame {frame} of {int(self.frame_lengths[item])}, "
                    f"pass {self.number}: the recording or the weights hold values out of range"
                )

    def _evaluate(self, partial: Tensor, left: Tensor) -> Tensor:
        network = self.network
        if bool(left.all()):
            return network.impute(self.acoustic, self.frame_lengths, partial)
        log_probs = self.acoustic.new_zeros((*partial.shape, network.mask))
        if bool(left.any()):
            frames = int(self.frame_lengths[left].max())
            found = network.impute(
                self.acoustic[left, :frames], self.frame_lengths[left], partial[left, :frames]
            )
            log_probs = log_probs.to(found.dtype)
            log_probs[left, :frames] = found
        return log_probs

    def greedy(self, counts: list[int]) -> list[Decoded | None]:
        """The greedy CTC alignment of each item."""
        if self.first is None:  # no item has a frame
            return [Decoded([], [], 0) for _ in counts]
        confidence, tokens = self.first
        rows = zip(_without_padding(tokens, counts), _without_padding(confidence, counts), strict=True)
        return [Decoded(alignment, sure, 1) for alignment, sure in rows]


def _without_padding(rows: Tensor, counts: list[int]) -> list[list[Any]]:
    """(batch, frame) -> a list per item, as long as the item."""
    return [row[:n] for row, n in zip(rows.tolist(), counts, strict=True)]
