"""Language models against a plain-Python modified Kneser-Ney and, where it is installed, against KenLM."""

import bz2
import gzip
import lzma
import math
import subprocess
import sys
from collections import Counter, defaultdict

import numpy as np
import pytest

from imputer.errors import ImputerError
from imputer.languagemodel import LanguageModel, build, counts, kneserney, lexicon, read_arpa, write_arpa
from imputer.languagemodel.texts import open_text, texts
from imputer.vocabulary import Vocabulary

WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "dog", "ate", "that", "near", "old", "hat", "sun")


def some_texts(count, seed=0):
    rng = np.random.default_rng(seed)
    ranks = 1 / np.arange(1, len(WORDS) + 1)
    return [" ".join(rng.choice(WORDS, size=rng.integers(1, 9), p=ranks / ranks.sum())) for _ in range(count)]


@pytest.fixture(scope="module")
def vocabulary():
    return Vocabulary.train([" ".join(WORDS)] * 3, size=30)


class Plain:
    """Interpolated modified Kneser-Ney with dictionaries of tuples, straight from Chen and Goodman."""

    def __init__(self, sentences, size, order):
        self.size, self.order = size, order
        raw = [Counter() for _ in range(order + 1)]
        for sentence in sentences:
            padded = ("<s>", *sentence, "</s>")
            for n in range(1, order + 1):
                for i in range(len(padded) - n + 1):
                    raw[n][padded[i : i + n]] += 1
        del raw[1][("<s>",)]
        self.counts = [Counter() for _ in range(order + 1)]
        self.counts[order] = raw[order]
        for n in range(1, order):
            for longer in raw[n + 1]:
                self.counts[n][longer[1:]] += 1
            for ngram, times in raw[n].items():
                if ngram[0] == "<s>":
                    self.counts[n][ngram] = times
        self.discounts = [None] + [self.discount(self.counts[n].values()) for n in range(1, order + 1)]
        self.contexts = [defaultdict(list) for _ in range(order + 1)]
        for n in range(1, order + 1):
            for ngram, times in self.counts[n].items():
                self.contexts[n][ngram[:-1]].append(times)

    @staticmethod
    def discount(values):
        n = Counter(values)
        try:
            y = n[1] / (n[1] + 2 * n[2])
            found = [0, *(c - (c + 1) * y * n[c + 1] / n[c] for c in (1, 2, 3))]
        except ZeroDivisionError:
            return [0, 0.5, 1, 1.5]
        return found if all(0 <= d <= c for c, d in enumerate(found)) else [0, 0.5, 1, 1.5]

    def probability(self, word, context):
        lower = self.probability(word, context[1:]) if context else 1 / (self.size + 1)
        n = len(context) + 1
        times = self.contexts[n].get(tuple(context))
        if not times:
            return lower
        d = self.discounts[n]
        total = sum(times)
        count = self.counts[n][(*context, word)]
        backoff = sum(d[min(c, 3)] for c in times) / total
        return max(count - d[min(count, 3)], 0) / total + backoff * lower

    def score(self, sentence):
        padded = ["<s>", *sentence, "</s>"]
        return sum(
            math.log(self.probability(padded[i], padded[max(0, i - self.order + 1) : i]))
            for i in range(1, len(padded))
        )


class Listed:
    """A model as the ARPA format defines it, by dictionaries over the tables of all orders."""

    def __init__(self, tables, bits):
        self.order, self.bits = len(tables), bits
        self.found = [
            {int(k): (float(p), float(b)) for k, p, b in zip(t.keys, t.log_probs, t.backoffs, strict=True)}
            for t in tables
        ]

    def key(self, ngram):
        return sum(token << self.bits * place for place, token in enumerate(reversed(ngram)))

    def log_prob(self, word, context):
        ngram = [*context, word][-self.order :]
        entry = self.found[len(ngram) - 1].get(self.key(ngram))
        if entry:
            return entry[0]
        context = self.found[len(ngram) - 2].get(self.key(ngram[:-1]))
        return (context[1] if context else 0.0) + self.log_prob(word, ngram[1:-1])

    def score(self, tokens):
        padded = [0, *tokens, 0]
        return sum(self.log_prob(padded[i], padded[:i]) for i in range(1, len(padded)))


@pytest.mark.parametrize("order", [1, 2, 3, 6])
@pytest.mark.parametrize("amount", [3, 400])
def test_kneser_ney_is_the_textbooks(vocabulary, order, amount):
    given = some_texts(amount)
    tables = kneserney.estimate(counts.count([vocabulary.encode(t) for t in given], vocabulary.size, order))
    plain = Plain([vocabulary.encode(t) for t in given], vocabulary.size, order)
    ours = Listed(tables, vocabulary.size.bit_length())
    for text in [*some_texts(20, seed=1), *given[:5], "hat hat hat"]:
        tokens = vocabulary.encode(text)
        assert ours.score(tokens) == pytest.approx(plain.score(tokens), rel=1e-5)


@pytest.mark.parametrize("order", [1, 3, 6])
@pytest.mark.parametrize("max_bytes", [None, 20_000])
def test_the_trie_scores_as_its_tables(vocabulary, order, max_bytes):
    lm = build(some_texts(400), vocabulary, order, max_bytes)
    listed = Listed(lm.tables(), vocabulary.size.bit_length())
    assert lm.order == order
    for text in some_texts(30, seed=1):
        tokens = vocabulary.encode(text)
        assert lm.score(tokens, end=True) == pytest.approx(listed.score(tokens), rel=1e-6)
    assert lm.score([]) == 0


def test_quantised_scores_are_close(vocabulary):
    lm = build(some_texts(2000), vocabulary, 6, None)
    plain = Plain([vocabulary.encode(t) for t in some_texts(2000)], vocabulary.size, 6)
    scored = [vocabulary.encode(text) for text in some_texts(30, seed=1)]
    ours = sum(lm.score(tokens, end=True) for tokens in scored)
    assert ours == pytest.approx(sum(map(plain.score, scored)), rel=2e-3)


def test_probabilities_sum_to_one_also_when_pruned(vocabulary):
    tokens = [vocabulary.encode(t) for t in some_texts(400)]
    counted = counts.count(tokens, vocabulary.size, 4)
    whole = kneserney.estimate(counted)
    pruned = kneserney.prune(counted, whole, lambda entries, contexts: sum(entries), 150)
    assert sum(len(table.keys) for table in pruned) <= 150 < sum(len(table.keys) for table in whole)
    for tables in (whole, pruned):
        listed = Listed(tables, vocabulary.size.bit_length())
        for before in ([0], [0, *tokens[0][:1]], tokens[1][:3], tokens[2][:2], [7, 7, 7]):
            every = [listed.log_prob(word, before) for word in range(vocabulary.size + 1)]
            assert sum(map(math.exp, every)) == pytest.approx(1, abs=1e-5)


def test_counting_in_chunks_is_counting_at_once(vocabulary, monkeypatch):
    given = [vocabulary.encode(t) for t in some_texts(300)]
    whole = counts.count(given, vocabulary.size, 5)
    monkeypatch.setattr(counts, "CHUNK", 100)
    monkeypatch.setattr(counts, "TEXTS_AT_ONCE", 7)
    parts = counts.count(iter(given), vocabulary.size, 5)
    for a, b in zip(whole.orders, parts.orders, strict=True):
        assert all(
            np.array_equal(x, y) for x, y in ((a.keys, b.keys), (a.times, b.times), (a.suffix, b.suffix))
        )
    monkeypatch.setattr(counts, "MOST_NGRAMS", 50)
    with pytest.raises(ImputerError, match=r"more than 50 distinct n-grams of order 5.*lower order"):
        counts.count(given, vocabulary.size, 5)


def test_pruning_fits_and_keeps_what_counts(vocabulary, tmp_path):
    given = some_texts(3000)
    scored = [vocabulary.encode(text) for text in given]
    likelihoods = []
    for max_bytes in (16_500, 25_000, None):
        lm = build(given, vocabulary, 5, max_bytes)
        lm.save(tmp_path / "lm")
        assert max_bytes is None or (tmp_path / "lm").stat().st_size <= max_bytes
        likelihoods.append(sum(map(lm.score, scored)))
    assert likelihoods == sorted(likelihoods)
    # The budget is used: nothing like half of it is left over.
    build(given, vocabulary, 5, 25_000).save(tmp_path / "lm")
    assert (tmp_path / "lm").stat().st_size > 20_000


def test_the_same_text_gives_the_same_file(vocabulary, tmp_path):
    for name in ("a", "b"):
        build(some_texts(300), vocabulary, 4, 20_000).save(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_saved_model_scores_alike(vocabulary, tmp_path):
    lm = build(some_texts(300), vocabulary)
    lm.save(tmp_path / "lm")
    again = LanguageModel.load(tmp_path / "lm")
    tokens = vocabulary.encode("the cat sat on a dog")
    assert again.score(tokens) == lm.score(tokens)
    assert (again.order, again.ngrams, again.fingerprint) == (lm.order, lm.ngrams, lm.fingerprint)


@pytest.mark.parametrize("order", [1, 2, 4])
def test_arpa_there_and_back(vocabulary, tmp_path, order):
    lm = build(some_texts(300), vocabulary, order, None)
    write_arpa(lm, tmp_path / "lm.arpa", vocabulary)
    again = read_arpa(tmp_path / "lm.arpa", vocabulary)
    assert again.ngrams == lm.ngrams
    for a, b in zip(lm.tables(), again.tables(), strict=True):
        assert np.array_equal(a.keys, b.keys)
        np.testing.assert_allclose(a.log_probs, b.log_probs, rtol=1e-5)
        np.testing.assert_allclose(a.backoffs, b.backoffs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("max_bytes", [None, 20_000])
def test_kenlm_scores_our_arpa_alike(vocabulary, tmp_path, max_bytes):
    kenlm = pytest.importorskip("kenlm")
    lm = build(some_texts(1000), vocabulary, 5, max_bytes)
    write_arpa(lm, tmp_path / "lm.arpa", vocabulary)
    other = kenlm.Model(str(tmp_path / "lm.arpa"))
    for text in some_texts(50, seed=1):
        tokens = vocabulary.encode(text)
        pieces = " ".join(vocabulary.pieces(tokens))
        for end in (True, False):
            expected = other.score(pieces, bos=True, eos=end) * math.log(10)
            assert lm.score(tokens, end=end) == pytest.approx(expected, rel=1e-5)


ARPA = """\\data\\
ngram 1=4
ngram 2=2

\\1-grams:
-99 <s> -0.3
-1 </s>
-0.5 ▁the -0.2
-0.7 ▁cat

\\2-grams:
-0.1 <s> ▁the
-0.2 ▁the ▁cat

\\end\\
"""


@pytest.fixture
def arpa_vocabulary():
    return Vocabulary.train(["the cat"] * 4, size=12)


def test_arpa_written_by_hand(arpa_vocabulary, tmp_path):
    pieces = arpa_vocabulary.pieces(arpa_vocabulary.encode("the cat"))
    assert pieces == ["▁the", "▁cat"]
    path = tmp_path / "lm.arpa"
    path.write_text(ARPA)
    the, cat = arpa_vocabulary.encode("the cat")
    lm = read_arpa(path, arpa_vocabulary)
    ten = math.log(10)
    assert lm.score([the, cat]) == pytest.approx((-0.1 - 0.2) * ten)
    assert lm.score([the, the], end=True) == pytest.approx((-0.1 - 0.2 - 0.5 - 0.2 - 1) * ten)
    assert lm.score([cat]) == pytest.approx((-0.3 - 0.7) * ten)
    assert lm.score([cat], start=False) == pytest.approx(-0.7 * ten)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("-0.5 ▁the -0.2", "-0.5 ▁the"), "back-off of '▁the' is missing"),
        (("-99 <s> -0.3", "-99 <s>"), "back-off of '<s>' is missing"),
        (("-0.5 ▁the", "-0.5 ▁ape"), "line 8: '▁ape' is not a piece of this model"),
        (("-0.5 ▁the -0.2", "-0.5 t -0.2"), "back-off of '▁the' is missing"),
        (("ngram 2=2", "ngram 2=3"), "line 15: 3 2-grams were announced, the file has 2"),
        (("-0.2 ▁the ▁cat", "zero ▁the ▁cat"), "line 13: a log probability is a number"),
        (("-0.2 ▁the ▁cat", "-0.2 ▁cat"), "line 13: expected a log probability, 2 words"),
        (("-0.2 ▁the ▁cat", "-0.1 <s> ▁the"), "a 2-gram is listed twice"),
        (("\\end\\", ""), "the file ends before"),
        (("\\data\\", "hello"), "line 1: an ARPA file starts with"),
        (("-1 </s>", "-1 t"), "the 1-grams lack </s>"),
    ],
)
def test_what_is_wrong_with_an_arpa_file(arpa_vocabulary, tmp_path, change, message):
    path = tmp_path / "lm.arpa"
    assert change[0] in ARPA
    path.write_text(ARPA.replace(*change))
    with pytest.raises(ImputerError) as caught:
        read_arpa(path, arpa_vocabulary)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_arpa_file_lists_its_contexts(arpa_vocabulary, tmp_path):
    path = tmp_path / "lm.arpa"
    longer = ARPA.replace("ngram 2=2", "ngram 2=2\nngram 3=1")
    path.write_text(longer.replace("\\end\\", "\\3-grams:\n-0.1 ▁cat ▁the ▁cat\n\\end\\"))
    with pytest.raises(ImputerError, match="n-grams start with '▁cat ▁the', which is not listed itself"):
        read_arpa(path, arpa_vocabulary)


def test_pieces_that_an_arpa_file_does_not_list_are_unknown(arpa_vocabulary, tmp_path):
    path = tmp_path / "lm.arpa"
    path.write_text(ARPA.replace("ngram 1=4", "ngram 1=5").replace("-1 </s>", "-1 </s>\n-2 <unk>"))
    (t,) = (
        i for i, p in enumerate(arpa_vocabulary.pieces(range(1, arpa_vocabulary.size + 1)), 1) if p == "t"
    )
    lm = read_arpa(path, arpa_vocabulary)
    assert lm.score([t], start=False) == pytest.approx(-2 * math.log(10))


@pytest.mark.parametrize("order", [0, -1, 7, 2.0, True, "3"])
def test_orders_that_cannot_be(vocabulary, order):
    with pytest.raises(ImputerError, match="order of a language model is a whole number of 1 to 6"):
        build(["the cat"], vocabulary, order)


@pytest.mark.parametrize("given", [[], [""], ["  "], ["日本"]])
def test_text_without_words(vocabulary, given):
    with pytest.raises(ImputerError, match="holds no words that the vocabulary can spell"):
        build(given, vocabulary)


def test_texts_that_cannot_be_spelled_are_told(vocabulary):
    skipped = []
    build(["the cat", "the żubr", "a hat"], vocabulary, skipped=skipped.append)
    assert skipped == ["the żubr"]


def test_too_little_room(vocabulary):
    with pytest.raises(ImputerError, match="100 bytes cannot hold even the single pieces"):
        build(["the cat"], vocabulary, max_bytes=100)


def test_damaged_files(vocabulary, tmp_path):
    path = tmp_path / "lm"
    with pytest.raises(ImputerError, match=r"cannot read the language model .*lm: No such file"):
        LanguageModel.load(path)
    path.write_bytes(b"")
    with pytest.raises(ImputerError, match="the file is empty"):
        LanguageModel.load(path)
    for content in (b"x" * 100, b"\x10" + b"\0" * 7 + b'{"a": 1}        '):
        path.write_bytes(content)
        with pytest.raises(ImputerError, match="is not a language model written by"):
            LanguageModel.load(path)
    build(some_texts(100), vocabulary).save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1000])
    with pytest.raises(ImputerError, match=r"is not a language model|is damaged"):
        LanguageModel.load(path)
    place = len(whole) - 500
    path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    with pytest.raises(ImputerError, match="is damaged: its contents do not match its checksum"):
        LanguageModel.load(path)


def test_other_pieces_are_refused(vocabulary, arpa_vocabulary):
    lm = build(["the cat"], vocabulary)
    lm.check(vocabulary)
    with pytest.raises(ImputerError, match=f"over other pieces.*{arpa_vocabulary.fingerprint}"):
        lm.check(arpa_vocabulary)
    with pytest.raises(ValueError, match="token ids lie in 1"):
        lm.score([vocabulary.size + 1])


def test_texts_of_files(tmp_path):
    lines = "Mr. Fogg had 2 cats.\n\n— One — was old!\nIt slept.\nI paid 3½ for it\nThe end\n"
    for name, opener in (("t.txt", open), ("t.xz", lzma.open), ("t.gz", gzip.open), ("t.bz2", bz2.open)):
        with opener(tmp_path / name, "wt", encoding="utf-8") as file:
            file.write(lines)
        read = []
        found = list(texts([tmp_path / name], words=6, read=read.append))
        assert found[0] == "mister fogg had two cats one was old"
        assert found[-1].endswith("the end")
        assert sum(read) == len(lines)
    assert next(texts([tmp_path / "t.txt"], "keep", 1)) == "Mr. Fogg had 2 cats."


def test_texts_that_cannot_be_read(tmp_path):
    with pytest.raises(ImputerError, match=r"cannot read .*none.txt: No such file"):
        list(texts([tmp_path / "none.txt"]))
    (tmp_path / "bad.xz").write_bytes(b"not xz at all")
    with pytest.raises(ImputerError, match=r"bad.xz is damaged"):
        list(texts([tmp_path / "bad.xz"]))
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 noir\n")
    with (
        pytest.raises(ImputerError, match=r"latin.txt is not UTF-8"),
        open_text(tmp_path / "latin.txt") as file,
    ):
        file.read()


def test_words_of_the_text_and_of_a_list_are_known(vocabulary, tmp_path):
    texts = some_texts(300)
    times = Counter(word for text in texts for word in text.split())
    lm = build([*texts, "once"], vocabulary, 3, 20_000, words=["zebra"])
    assert lm.lexicon is not None
    known = {"zebra", *(word for word, n in times.items() if n > 1)}
    assert lm.lexicon.words.tolist() == lexicon.hashes(known).tolist() and "once" not in known
    lm.save(tmp_path / "lm.bin")
    assert (tmp_path / "lm.bin").stat().st_size <= 20_000
    found = LanguageModel.load(tmp_path / "lm.bin")
    assert found.lexicon is not None
    assert all(np.array_equal(a, b) for a, b in zip(found.lexicon, lm.lexicon, strict=True))
    assert build(texts, vocabulary, 3, 20_000).lexicon is None


WITHOUT_A_PLACE = """
from numba.core import caching

caching.CacheImpl._locator_classes = []  # as on a disk that is read-only
import numpy as np
from imputer.languagemodel import fusion, trie

assert trie.score(fusion._indifferent(5), np.array([1, 2]), True).tolist() == [0.0, 0.0]
"""


def test_compiled_code_needs_no_place_to_be_kept() -> None:
    """A server under a read-only file system did not start: numba refused at import."""
    assert subprocess.run([sys.executable, "-c", WITHOUT_A_PLACE], check=False).returncode == 0
