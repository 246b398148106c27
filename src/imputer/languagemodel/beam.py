# mypy: allow-untyped-defs, disable-error-code="assignment"
"""The compiled beam search over what imputation leaves open, in both topologies.

A hypothesis is a prefix of the transcript, a node of a tree that grows with the search; its acoustic score is the
log of the summed probability of all partial alignments that spell it and agree with the committed frames. Prefixes
are ranked by

    log p(prefix) + lm_weight log p_LM(prefix) + token_bonus |prefix| + hotword bonus - penalty of unknown words.

Everything is counted once, where a node is made: the language model is asked once for every prefix. Ties are broken
by the age of nodes, so the same input gives the same output.
"""

import math

import numba
import numpy as np

from imputer.languagemodel import lexicon as lexicons
from imputer.languagemodel import trie as tries
from imputer.lattice.compilation import entry

OPEN = -1  # in ``given``: the frame is not committed


@numba.njit(nogil=True)
def _log_add(a, b):
    if a < b:
        a, b = b, a
    if b == -np.inf:
        return a
    return a + math.log1p(math.exp(b - a))


@numba.njit(nogil=True)
def candidates(row, blank, most, floor, chosen):
    """The likeliest tokens of a frame, at most ``most`` of them and above ``floor``; returns how many."""
    count = 0
    for token in range(len(row)):
        if token == blank or not row[token] > floor:
            continue
        place = count
        while place > 0 and row[chosen[place - 1]] < row[token]:
            place -= 1
        if place >= most:
            continue
        count = min(count + 1, most)
        for i in range(count - 1, place, -1):
            chosen[i] = chosen[i - 1]
        chosen[place] = token
    return count


@numba.njit(nogil=True)
def _place(node, slot, made, fresh, fresh_blanks, fresh_tokens):
    """The place of a node among the ``made`` of this frame, a new one if it has none; and how many there are then."""
    place = slot[node]
    if place >= 0:
        return place, made
    slot[node], fresh[made] = made, node
    fresh_blanks[made], fresh_tokens[made] = -np.inf, -np.inf
    return np.int32(made), made + 1


@entry
def search(
    log_probs, given, trie, hot_next, hot_bonus, hot_end, lexicon, unknown,
    lm_weight, token_bonus, beam, margin, most_tokens, floor, text_start, blank, merge_repeats,
):  # fmt: skip
    """The best prefixes of one utterance, best first: tokens (hypothesis, length), lengths, and scores.

    log_probs (frame, token); given (frame,) the committed token of a frame or OPEN, and what a committed frame
    scores is the same for all, so it is left out. Scores (hypothesis, 3): all in all, acoustic, language model.
    """
    frames = len(log_probs)
    most_tokens = min(most_tokens, log_probs.shape[1] - 1)
    chosen = np.empty(max(1, most_tokens), np.int64)
    room = 1  # nodes that can be made at most
    for frame in range(frames):
        if given[frame] == OPEN:
            room += beam * candidates(log_probs[frame], blank, most_tokens, floor, chosen)
        elif given[frame] != blank:
            room += beam
    longest = len(trie.first_entry) - 2
    parent, token = np.empty(room, np.int32), np.empty(room, np.int32)
    child, sibling = np.full(room, -1, np.int32), np.full(room, -1, np.int32)
    states = np.empty((room, longest), np.int64)
    hot = np.zeros(room, np.int32)
    word = np.full(room, lexicons.FRAGMENT, np.uint64)  # hash of the word that a node is in
    lm_score, extra = np.zeros(room), np.zeros(room)
    slot = np.full(room, -1, np.int32)  # place of a node among those of this frame
    nodes = 1
    parent[0], token[0] = -1, -1
    tries.start_state(trie, states[0], text_start)

    most = beam * (most_tokens + 1)
    active, fresh = np.empty(beam, np.int32), np.empty(most, np.int32)
    # Of alignments that end in a blank, and in the prefix's last token; without merging the difference does not
    # matter, and all count as the former.
    blanks, tokens = np.full(beam, -np.inf), np.full(beam, -np.inf)
    fresh_blanks, fresh_tokens = np.empty(most), np.empty(most)
    totals = np.empty(most)
    active[0], blanks[0] = 0, 0.0
    width = 1
    for frame in range(frames):
        row = log_probs[frame]
        if given[frame] == OPEN:
            count = candidates(row, blank, most_tokens, floor, chosen)
            quiet = np.float64(row[blank])
        elif given[frame] == blank:
            count, quiet = 0, 0.0
        else:
            chosen[0], count, quiet = given[frame], 1, -np.inf
        if count == 0 and not merge_repeats:
            for i in range(width):
                blanks[i] += quiet
            continue
        made = 0
        for i in range(width):
            node = active[i]
            total = _log_add(blanks[i], tokens[i])
            last = token[node]
            # The prefix stays: another blank, or its last token again.
            here_blank, here_token = total + quiet, -np.inf
            if merge_repeats and last >= 0:
                if given[frame] == OPEN:
                    here_token = tokens[i] + row[last]
                elif given[frame] == last:
                    here_token = tokens[i]
            if here_blank > -np.inf or here_token > -np.inf:
                place, made = _place(node, slot, made, fresh, fresh_blanks, fresh_tokens)
                fresh_blanks[place] = _log_add(fresh_blanks[place], here_blank)
                fresh_tokens[place] = _log_add(fresh_tokens[place], here_token)
            for k in range(count):
                new = chosen[k]
                source = blanks[i] if merge_repeats and new == last else total
                score = source + (np.float64(row[new]) if given[frame] == OPEN else 0.0)
                if score == -np.inf:
                    continue
                below = child[node]
                while below >= 0 and token[below] != new:
                    below = sibling[below]
                if below < 0:
                    below = nodes
                    nodes += 1
                    parent[below], token[below] = node, new
                    sibling[below], child[node] = child[node], below
                    gain = tries.advance(trie, states[node], new, states[below])
                    lm_score[below] = lm_score[node] + gain
                    hot[below] = hot_next[hot[node], new]
                    extra[below] = (
                        extra[node] + lm_weight * gain + token_bonus + np.float64(hot_bonus[hot[node], new])
                    )
                    if unknown:
                        word[below] = lexicons.extended(lexicon, word[node], new)
                        if lexicon.starts[new] and not lexicons.is_known(lexicon, word[node]):
                            extra[below] -= unknown
                place, made = _place(below, slot, made, fresh, fresh_blanks, fresh_tokens)
                if merge_repeats:
                    fresh_tokens[place] = _log_add(fresh_tokens[place], score)
                else:
                    fresh_blanks[place] = _log_add(fresh_blanks[place], score)
        best = -np.inf
        for place in range(made):
            slot[fresh[place]] = -1
            totals[place] = _log_add(fresh_blanks[place], fresh_tokens[place]) + extra[fresh[place]]
            best = max(best, totals[place])
        width = _best_of(
            totals, fresh, made, best - margin, beam, active, fresh_blanks, fresh_tokens, blanks, tokens
        )

    scores = np.empty((width, 3))
    for i in range(width):
        node = active[i]
        scores[i, 1], scores[i, 2] = _log_add(blanks[i], tokens[i]), lm_score[node]
        scores[i, 0] = scores[i, 1] + extra[node] + np.float64(hot_end[hot[node]])
        if unknown and not lexicons.is_known(lexicon, word[node]):
            scores[i, 0] -= unknown
    order = np.argsort(-scores[:, 0], kind="mergesort")
    lengths = np.zeros(width, np.int64)
    for i in range(width):
        node = active[order[i]]
        while parent[node] >= 0:
            lengths[i] += 1
            node = parent[node]
    found = np.zeros((width, lengths.max() if width else 0), np.int64)
    for i in range(width):
        node = active[order[i]]
        for place in range(lengths[i] - 1, -1, -1):
            found[i, place] = token[node]
            node = parent[node]
    return found, lengths, scores[order]


@numba.njit(nogil=True)
def _best_of(
    totals, fresh, made, least, beam, active, fresh_blanks, fresh_tokens, blanks, tokens
):  # fmt: skip
    """Move the best of a frame to the beam; returns how many there are. The older node first among equals."""
    good = np.empty(made, np.int64)
    count = 0
    for place in range(made):
        if totals[place] >= least and totals[place] > -np.inf:
            good[count] = place
            count += 1
    good = good[:count]
    order = np.argsort(-totals[good], kind="mergesort")[:beam]
    for i in range(len(order)):
        place = good[order[i]]
        active[i], blanks[i], tokens[i] = fresh[place], fresh_blanks[place], fresh_tokens[place]
    return len(order)


@entry
def confidences(
    log_probs, given, alignment, trie, lm_weight, token_bonus, most_tokens, floor, text_start, blank, merge_repeats,
    found,
):  # fmt: skip
    """For every open frame of an alignment, into ``found``: the share of its symbol among all the frame may take.

    Symbols are weighed by network and language model together, after the tokens before them; hotwords do not count.
    """
    longest = len(trie.first_entry) - 2
    state, following = np.empty(longest, np.int64), np.empty(longest, np.int64)
    scratch = np.empty(longest, np.int64)
    tries.start_state(trie, state, text_start)
    chosen = np.empty(max(1, min(most_tokens, log_probs.shape[1] - 1)), np.int64)
    last = blank
    for frame in range(len(alignment)):
        row, here = log_probs[frame], alignment[frame]
        begins = here != blank and not (merge_repeats and here == last)
        if given[frame] == OPEN:
            mine = total = -np.inf
            count = candidates(row, blank, len(chosen), floor, chosen)
            listed = False
            for k in range(-1, count + 1):
                if k == count and (listed or here == blank):
                    break
                symbol = blank if k < 0 else (chosen[k] if k < count else here)
                listed = listed or symbol == here
                weight = np.float64(row[symbol])
                if symbol != blank and not (merge_repeats and symbol == last):
                    weight += token_bonus + lm_weight * tries.advance(trie, state, symbol, scratch)
                total = _log_add(total, weight)
                if symbol == here:
                    mine = weight
            found[frame] = math.exp(mine - total) if total > -np.inf else 0.0
        if begins:
            tries.advance(trie, state, here, following)
            state, following = following, state
        last = here
