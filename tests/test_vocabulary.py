"""Vocabularies: ids as the design fixes them, text that comes back, errors that name the character."""

import os
import pickle
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from imputer.errors import ImputerError, UsageError
from imputer.vocabulary import Vocabulary

SENTENCE = (
    "the imputer writes a whole transcript in a constant number of parallel passes it is trained by dynamic "
    "programming over masked alignments and don't you forget the block size one two three four five six seven "
    "eight nine zero quick brown fox jumps over lazy dogs"
)
WORDS = SENTENCE.split()
TEXTS = [" ".join(WORDS[i:] + WORDS[:i]) for i in range(len(WORDS))]

VOCABULARIES = {
    "bpe": Vocabulary.train(TEXTS, size=90),
    "characters": Vocabulary.train(TEXTS, units="characters"),
}


@pytest.fixture(params=VOCABULARIES)
def vocabulary(request: pytest.FixtureRequest) -> Vocabulary:
    return VOCABULARIES[request.param]


def test_ids_are_those_of_the_design() -> None:
    vocabulary = VOCABULARIES["bpe"]
    assert (vocabulary.size, len(vocabulary), vocabulary.blank, vocabulary.mask) == (90, 90, 0, 91)
    used = {token for text in TEXTS for token in vocabulary.encode(text)}
    assert used <= set(range(1, 91)) and len(used) > 40
    assert sorted(vocabulary.pieces(range(1, 91))) == sorted(set(vocabulary.pieces(range(1, 91))))


def test_characters_are_the_alphabet_and_the_word_mark() -> None:
    vocabulary = VOCABULARIES["characters"]
    assert set(vocabulary.pieces(range(1, vocabulary.size + 1))) == set("".join(WORDS)) | {"▁"}
    assert vocabulary.pieces(vocabulary.encode("a fox")) == ["▁", "a", "▁", "f", "o", "x"]


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(VOCABULARIES)), st.text("".join(sorted(set(SENTENCE))) + "\t\n", max_size=60))
def test_text_comes_back(name: str, text: str) -> None:
    vocabulary = VOCABULARIES[name]
    tokens = vocabulary.encode(text)
    assert all(1 <= token <= vocabulary.size for token in tokens)
    assert vocabulary.decode(tokens) == " ".join(text.split())
    assert "".join(vocabulary.pieces(tokens)).replace("▁", " ").split() == text.split()


def test_long_lines_are_not_left_out() -> None:
    vocabulary = Vocabulary.train(["ab " * 5000 + "z"], units="characters")
    assert vocabulary.encode("z")


def test_an_unknown_character_is_named(vocabulary: Vocabulary) -> None:
    with pytest.raises(ImputerError, match="'!', 'é' in 'the café!'"):
        vocabulary.encode("the café!")
    assert vocabulary.encode("") == [] and vocabulary.decode([]) == ""


def test_blanks_and_masks_are_not_text(vocabulary: Vocabulary) -> None:
    for wrong in (vocabulary.blank, vocabulary.mask, -1):
        with pytest.raises(ValueError, match=f"1..{vocabulary.size}, got {wrong}"):
            vocabulary.decode([1, wrong])


def test_saved_pickled_and_trained_again_it_is_the_same(tmp_path: Path, vocabulary: Vocabulary) -> None:
    vocabulary.save(tmp_path / "tokenizer.model")
    assert os.listdir(tmp_path) == ["tokenizer.model"]
    copies = [
        Vocabulary.load(tmp_path / "tokenizer.model"),
        pickle.loads(pickle.dumps(vocabulary)),
    ]
    for copy in copies:
        assert copy == vocabulary and copy.fingerprint == vocabulary.fingerprint
        assert copy.encode(TEXTS[0]) == vocabulary.encode(TEXTS[0])
    assert Vocabulary.train(TEXTS, size=90) == VOCABULARIES["bpe"]
    assert len({vocabulary.fingerprint for vocabulary in VOCABULARIES.values()}) == 2


def test_a_size_the_text_cannot_fill_or_fit_says_what_can(tmp_path: Path) -> None:
    with pytest.raises(ImputerError, match=r"5 cannot hold the 26 characters"):
        Vocabulary.train(["abcdefghijklmnopqrstuvwxy"] * 3, size=5)
    with pytest.raises(ImputerError, match=r"400; (\d+) is the most") as raised:
        Vocabulary.train(["one two three"], size=400)
    most = int(str(raised.value).split("; ")[1].split()[0])
    assert Vocabulary.train(["one two three"], size=most).size == most


def test_bad_input_is_named(tmp_path: Path) -> None:
    with pytest.raises(ImputerError, match="no text"):
        Vocabulary.train(["", "  "])
    with pytest.raises(UsageError, match="syllables"):
        Vocabulary.train(TEXTS, units="syllables")
    with pytest.raises(UsageError, match=r"none\.model"):
        Vocabulary.load(tmp_path / "none.model")
    (tmp_path / "bad.model").write_bytes(b"not a model")
    with pytest.raises(ImputerError, match=r"bad\.model: not a SentencePiece model"):
        Vocabulary.load(tmp_path / "bad.model")


def test_a_foreign_model_with_other_ids_is_refused() -> None:
    import io

    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(TEXTS), model_writer=model, vocab_size=60, minloglevel=2
    )
    with pytest.raises(ImputerError, match="reserves ids other than 0"):
        Vocabulary(model.getvalue())


def test_too_little_text_names_the_keys_that_help() -> None:
    with pytest.raises(ValueError, match=r"the most it gives \(vocabulary.size\), or use vocabulary.units"):
        Vocabulary.train(["ab ba"], size=400)
