# mypy: allow-untyped-defs, disable-error-code="assignment"
"""A compact trie of n-grams, and the compiled walk through it.

Entries are the n-grams, shortest first, sorted within an order, so that the extensions of one context lie side by
side. An entry is its last token and a code for its log probability, packed in bits. Bit i of ``inner`` says whether
entry i is a context of longer ones; contexts are numbered in the order of their entries. Bit i of ``opens`` says
whether entry i is the first extension of its context, so that the c-th set bit is where those of context c start.
Samples of both make counting and finding set bits fast. Codes are looked up per order in a small table.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from imputer.languagemodel.kneserney import Table
from imputer.lattice.compilation import entry

CODE_BITS = 8
CODES = 1 << CODE_BITS
EVERY = 64  # contexts from one sample to the next

Words = NDArray[np.uint64]


class Trie(NamedTuple):
    """The arrays of a model. A state is order - 1 numbers of contexts, the last 1, 2, ... tokens; -1 if it is none."""

    entries: Words  # packed: token, code
    inner: Words
    inner_before: NDArray[np.uint32]  # set bits of `inner` before each word
    opens: Words
    opens_at: NDArray[np.uint32]  # where set bit 0, EVERY, 2 EVERY ... of `opens` lies
    backoffs: NDArray[np.uint8]  # code of each context
    prob_values: NDArray[np.float32]  # (order, code)
    backoff_values: NDArray[np.float32]  # (order, code)
    first_entry: NDArray[np.int64]  # (order + 1,)
    first_context: NDArray[np.int64]  # (order + 1,)
    token_bits: NDArray[np.int64]  # (1,)


def size_in_bytes(entries: Sequence[int], contexts: int, token_bits: int) -> int:
    """Bytes of the arrays for these numbers of n-grams and contexts."""
    total = sum(entries)
    words = -(-total // 64)
    packed = 8 * (-(-total * (token_bits + CODE_BITS) // 64) + 1)
    tables = len(entries) * (2 * CODES * 4 + 16) + 24
    return packed + words * (8 + 4 + 8) + (contexts // EVERY + 1) * 4 + contexts + tables


def make(tables: Sequence[Table], bits: int) -> Trie:
    """A trie of the n-grams of every order; single tokens are all there, and every context is an n-gram itself."""
    order = len(tables)
    counts = [len(table.keys) for table in tables]
    first_entry = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    inner, opens = np.zeros(first_entry[-1], bool), np.zeros(first_entry[-1], bool)
    for n in range(1, order):
        context = tables[n].keys >> np.uint64(bits)
        first = np.concatenate(([True], context[1:] != context[:-1])) if len(context) else np.empty(0, bool)
        inner[first_entry[n - 1] + np.searchsorted(tables[n - 1].keys, context[first])] = True
        opens[first_entry[n] : first_entry[n + 1]] = first
    tokens = np.concatenate([table.keys & np.uint64((1 << bits) - 1) for table in tables])
    codes = np.zeros(len(tokens), np.uint64)
    prob_values, backoff_values = (np.zeros((order, CODES), np.float32) for _ in range(2))
    contexts: list[NDArray[np.uint8]] = []
    for n, table in enumerate(tables):
        place = slice(first_entry[n], first_entry[n + 1])
        codes[place], prob_values[n] = _quantised(table.log_probs)
        found, backoff_values[n] = _quantised(table.backoffs[inner[place]])
        contexts.append(found.astype(np.uint8))
    return Trie(
        entries=_packed(tokens | codes << np.uint64(bits), bits + CODE_BITS),
        inner=_bit_words(inner),
        inner_before=_set_before(inner),
        opens=_bit_words(opens),
        opens_at=np.flatnonzero(opens)[::EVERY].astype(np.uint32),
        backoffs=np.concatenate(contexts),
        prob_values=prob_values,
        backoff_values=backoff_values,
        first_entry=first_entry,
        first_context=np.concatenate(([0], np.cumsum([len(one) for one in contexts]))).astype(np.int64),
        token_bits=np.array([bits], np.int64),
    )


def tables_of(trie: Trie) -> list[Table]:
    """The n-grams of a trie, with the probabilities and back-offs as it stores them."""
    bits, total = int(trie.token_bits[0]), int(trie.first_entry[-1])
    values = _unpacked(trie.entries, bits + CODE_BITS, total)
    tokens, codes = values & np.uint64((1 << bits) - 1), values >> np.uint64(bits)
    inner, opens = (_bits_of(words, total) for words in (trie.inner, trie.opens))
    parents = np.flatnonzero(inner)  # entry of each context
    tables: list[Table] = []
    keys = np.empty(0, np.uint64)
    for n in range(len(trie.first_entry) - 1):
        place = slice(trie.first_entry[n], trie.first_entry[n + 1])
        if n == 0:
            keys = tokens[place]
        else:
            context = np.cumsum(opens[place]) - 1 + trie.first_context[n - 1]
            keys = keys[parents[context] - trie.first_entry[n - 1]] << np.uint64(bits) | tokens[place]
        backoffs = np.zeros(len(keys), np.float32)
        among = slice(trie.first_context[n], trie.first_context[n + 1])
        backoffs[inner[place]] = trie.backoff_values[n][trie.backoffs[among]]
        tables.append(Table(keys, trie.prob_values[n][codes[place].astype(np.int64)], backoffs))
    return tables


def _quantised(values: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """A code for each value and the value of each code: all values if they are few, else means of equal shares."""
    distinct, codes = np.unique(values, return_inverse=True)
    if len(distinct) > CODES:
        shares = np.array_split(np.sort(values), CODES)
        centres = np.unique([share.mean(dtype=np.float64) for share in shares]).astype(np.float32)
        codes = np.searchsorted((centres[1:] + centres[:-1]) / 2, values)
        distinct = centres
    table = np.zeros(CODES, np.float32)
    table[: len(distinct)] = distinct
    return codes, table


def _bit_words(flags: NDArray[np.bool_]) -> Words:
    padded = np.zeros(-(-len(flags) // 64) * 64, bool)
    padded[: len(flags)] = flags
    return np.packbits(padded, bitorder="little").view(np.uint64)


def _bits_of(words: Words, count: int) -> NDArray[np.bool_]:
    return np.unpackbits(np.ascontiguousarray(words).view(np.uint8), bitorder="little")[:count].astype(bool)


def _set_before(flags: NDArray[np.bool_]) -> NDArray[np.uint32]:
    per_word = np.add.reduceat(flags, np.arange(0, len(flags), 64), dtype=np.uint32)
    return np.concatenate(([0], np.cumsum(per_word)[:-1])).astype(np.uint32)


@entry
def _packed(values, width):
    words = np.zeros((len(values) * width + 63) // 64 + 1, np.uint64)
    for i in range(len(values)):
        word, shift = (i * width) >> 6, np.uint64((i * width) & 63)
        words[word] |= values[i] << shift
        if shift + np.uint64(width) > np.uint64(64):
            words[word + 1] |= values[i] >> (np.uint64(64) - shift)
    return words


@entry
def _unpacked(words, width, count):
    values = np.empty(count, np.uint64)
    for i in range(count):
        values[i] = unpack(words, i, width)
    return values


@numba.njit(nogil=True, inline="always")
def unpack(words, i, width):
    word, shift = (i * width) >> 6, np.uint64((i * width) & 63)
    value = words[word] >> shift
    if shift + np.uint64(width) > np.uint64(64):
        value |= words[word + 1] << (np.uint64(64) - shift)
    return value & ((np.uint64(1) << np.uint64(width)) - np.uint64(1))


@numba.njit(nogil=True)
def _ones(x):
    """Set bits of a word."""
    x = x - ((x >> np.uint64(1)) & np.uint64(0x5555555555555555))
    x = (x & np.uint64(0x3333333333333333)) + ((x >> np.uint64(2)) & np.uint64(0x3333333333333333))
    x = (x + (x >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return np.int64((x * np.uint64(0x0101010101010101)) >> np.uint64(56))


@numba.njit(nogil=True)
def _lowest(x):
    """Place of the lowest set bit of a word that has one."""
    return _ones((x & (~x + np.uint64(1))) - np.uint64(1))


@numba.njit(nogil=True)
def _extensions(trie, context):
    """(first, end) of the entries that extend a context."""
    first = np.int64(trie.opens_at[context // EVERY])
    word = first >> 6
    bits = trie.opens[word] & (~np.uint64(0) << np.uint64(first & 63))
    skip = context % EVERY  # set bits still to pass
    here = _ones(bits)
    while skip >= here:
        skip -= here
        word += 1
        bits = trie.opens[word]
        here = _ones(bits)
    for _ in range(skip):
        bits &= bits - np.uint64(1)
    first = (word << 6) + _lowest(bits)
    bits &= bits - np.uint64(1)
    while bits == 0:
        word += 1
        if word == len(trie.opens):
            return first, trie.first_entry[-1]
        bits = trie.opens[word]
    return first, (word << 6) + _lowest(bits)


@numba.njit(nogil=True)
def _context_of(trie, entry):
    """The number of an entry as a context, -1 if it is none."""
    word, bit = entry >> 6, np.uint64(entry & 63)
    bits = trie.inner[word]
    if (bits >> bit) & np.uint64(1) == 0:
        return np.int64(-1)
    return np.int64(trie.inner_before[word]) + _ones(bits & ((np.uint64(1) << bit) - np.uint64(1)))


@numba.njit(nogil=True)
def advance(trie, state, token, following):
    """log p(token | state), and the state after it into ``following``, another array."""
    width = trie.token_bits[0] + CODE_BITS
    low = (np.uint64(1) << np.uint64(trie.token_bits[0])) - np.uint64(1)
    wanted = np.uint64(token)
    code = unpack(trie.entries, token, width) >> np.uint64(trie.token_bits[0])
    found, backoff = trie.prob_values[0, np.int64(code)], np.float32(0)
    longest = len(state)
    if longest:
        following[0] = _context_of(trie, token)
    for n in range(1, longest + 1):
        context = state[n - 1]
        if n < longest:
            following[n] = -1
        if context < 0:
            continue
        first, end = _extensions(trie, context)
        while first < end:
            middle = (first + end) >> 1
            value = unpack(trie.entries, middle, width)
            if value & low < wanted:
                first = middle + 1
            elif value & low > wanted:
                end = middle
            else:
                found = trie.prob_values[n, np.int64(value >> np.uint64(trie.token_bits[0]))]
                backoff = np.float32(0)
                if n < longest:
                    following[n] = _context_of(trie, middle)
                break
        else:
            backoff += trie.backoff_values[n - 1, trie.backoffs[context]]
    return np.float64(found) + np.float64(backoff)


@numba.njit(nogil=True)
def start_state(trie, state, text_start):
    """The state at the start of a text, or with nothing known of what came before."""
    state[:] = -1
    if text_start and len(state):
        state[0] = _context_of(trie, 0)


@entry
def score(trie, tokens, text_start):
    """Log probability of each token after those before it."""
    longest = len(trie.first_entry) - 2
    state, following = np.empty(longest, np.int64), np.empty(longest, np.int64)
    start_state(trie, state, text_start)
    found = np.empty(len(tokens))
    for i in range(len(tokens)):
        found[i] = advance(trie, state, tokens[i], following)
        state, following = following, state
    return found
