"""Imputation, then a beam search over frames of low probability, with a language model and hotwords.

Frames that imputation committed with a probability of at least ``threshold`` stay committed. One more pass of the
network sees only those; a beam search over the other frames weighs what it says against the language model. The
result is an alignment like any other: the best one of the transcript found that agrees with the committed frames.
"""
# DEPARTURE language-model: the paper decodes without one; see PAPER.md.

import math
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from imputer import alignments
from imputer.configs import LanguageModel as Settings
from imputer.decoding import Hypothesis, Imputation, Searched, Step
from imputer.errors import UsageError
from imputer.languagemodel import beam as compiled
from imputer.languagemodel import hotwords as hot
from imputer.languagemodel import lexicon as lexicons
from imputer.languagemodel import trie
from imputer.languagemodel.kneserney import Table
from imputer.languagemodel.ngrams import LanguageModel

# Without a language model a search has less information than imputation: on the held-out speakers of `english` it has
# 22.9 % WER like imputation alone with frames below 0.5 open, and 26.2 with those below 0.99.
SURE_ALONE = 0.5


@torch.no_grad()
def fuse(
    step: Step,
    imputed: Imputation,
    frame_lengths: Tensor,
    lm: LanguageModel | None,
    *,
    settings: Settings,
    hotwords: hot.Hotwords | None = None,
    n_best: int = 1,
    mask: int,
    blank: int = 0,
    merge_repeats: bool = False,
) -> Searched:
    """Decide the frames that imputation was not sure of by one more pass and a search with the language model."""
    if n_best < 1:
        raise UsageError(f"n_best is a whole number of at least 1, got {n_best!r}")
    threshold = settings.threshold if lm is not None else min(settings.threshold, SURE_ALONE)
    inside = torch.arange(imputed.alignment.shape[1], device=frame_lengths.device) < frame_lengths[:, None]
    decided = inside & (imputed.confidence < threshold)
    open_items = decided.any(1)
    partial = imputed.alignment.masked_fill(decided, mask)
    if bool(open_items.any()):
        log_probs = step(partial).float()
    else:
        log_probs = torch.zeros((*partial.shape, mask), device=partial.device)
    search = _Search(lm, hotwords, settings, mask - 1, blank, merge_repeats)
    given = partial.masked_fill(decided, compiled.OPEN).cpu().numpy()
    rows = log_probs.cpu().numpy()
    lengths: list[int] = frame_lengths.tolist()
    found = [search.hypotheses(rows[i, :n], given[i, :n], n_best) for i, n in enumerate(lengths)]
    lost = [item for item, hypotheses in enumerate(found) if not hypotheses]
    for item in lost:  # a network that rules out every symbol of a frame; what imputation wrote stays
        written = imputed.alignment[item, : lengths[item]]
        tokens = alignments.collapse(written, blank=blank, merge_repeats=merge_repeats)
        found[item].append(Hypothesis(tokens, -math.inf, -math.inf, search.language_score(tokens)))
    alignment = _aligned(
        log_probs, partial, decided, frame_lengths, [one[0].tokens for one in found], blank, merge_repeats
    )
    alignment[lost] = imputed.alignment[lost]
    confidence = imputed.confidence.clone()
    for item, n in enumerate(lengths):
        shares = search.confidences(rows[item, :n], given[item, :n], alignment[item, :n].cpu().numpy())
        here = decided[item, :n]
        confidence[item, :n][here] = torch.from_numpy(shares).to(confidence)[here]
    whole = Imputation(
        alignment,
        confidence,
        imputed.passes + int(bool(open_items.any())),
        imputed.passes_per_item + open_items,
    )
    return Searched(whole, partial, found)


class _Search:
    """The compiled search with everything that does not change from item to item."""

    def __init__(
        self,
        lm: LanguageModel | None,
        hotwords: hot.Hotwords | None,
        settings: Settings,
        size: int,
        blank: int,
        merge_repeats: bool,
    ) -> None:
        self.settings, self.blank, self.merge_repeats = settings, blank, merge_repeats
        self.trie = _indifferent(size) if lm is None else lm.trie
        self.weight = 0.0 if lm is None else settings.lm_weight
        self.bonus = 0.0 if lm is None else settings.token_bonus
        self.hotwords = hotwords or hot.none(size)
        self.lexicon = lexicons.NONE if lm is None or lm.lexicon is None else lm.lexicon
        self.unknown = lexicons.UNKNOWN if len(self.lexicon.words) else 0.0
        if self.unknown and self.hotwords.words:
            theirs = lexicons.hashes(self.hotwords.words)
            self.lexicon = self.lexicon._replace(words=np.union1d(self.lexicon.words, theirs))
        self.floor = math.log(settings.least_probability) if settings.least_probability else -math.inf

    def hypotheses(self, log_probs: np.ndarray, given: np.ndarray, n_best: int) -> list[Hypothesis]:
        """The best transcripts of one item, at most ``n_best``."""
        settings, tree = self.settings, self.hotwords
        tokens, lengths, scores = compiled.search(
            log_probs, given, self.trie, tree.following, tree.bonus, tree.end, self.lexicon, self.unknown,
            self.weight, self.bonus, max(settings.beam, n_best), settings.margin, settings.most_tokens, self.floor,
            True, self.blank, self.merge_repeats,
        )  # fmt: skip
        return [
            Hypothesis(tokens[i, : lengths[i]].tolist(), *scores[i].tolist())
            for i in range(min(n_best, len(lengths)))
            if scores[i, 1] > -math.inf
        ]

    def confidences(self, log_probs: np.ndarray, given: np.ndarray, alignment: np.ndarray) -> np.ndarray:
        """(frame,) how probable the symbol of each open frame is; the values of committed frames are not used."""
        found = np.zeros(len(alignment), np.float64)
        compiled.confidences(
            log_probs, given, alignment, self.trie, self.weight, self.bonus, self.settings.most_tokens, self.floor,
            True, self.blank, self.merge_repeats, found,
        )  # fmt: skip
        return found

    def language_score(self, tokens: list[int]) -> float:
        return float(trie.score(self.trie, np.asarray(tokens, np.int64), True).sum())


def _aligned(
    log_probs: Tensor,
    partial: Tensor,
    decided: Tensor,
    frame_lengths: Tensor,
    tokens: list[list[int]],
    blank: int,
    merge_repeats: bool,
) -> Tensor:
    """The best alignments of transcripts that agree with the committed frames."""
    committed = ~decided
    forced = log_probs.masked_fill(committed[:, :, None], -torch.inf)
    rows, frames = committed.nonzero(as_tuple=True)
    forced[rows, frames, partial[rows, frames]] = 0.0
    lengths = torch.tensor([len(one) for one in tokens])
    targets = torch.zeros((len(tokens), max(1, int(lengths.max()))), dtype=torch.long)
    for item, one in enumerate(tokens):
        targets[item, : len(one)] = torch.tensor(one, dtype=torch.long)
    device = log_probs.device
    found, _ = alignments.best_alignment(
        forced,
        targets.to(device),
        frame_lengths,
        lengths.to(device),
        blank=blank,
        merge_repeats=merge_repeats,
    )
    return found


@lru_cache(maxsize=4)
def _indifferent(size: int) -> trie.Trie:
    """In place of a language model: one that scores every token with 0."""
    keys, zeros = np.arange(size + 1, dtype=np.uint64), np.zeros(size + 1, np.float32)
    return trie.make([Table(keys, zeros, zeros)], size.bit_length())
