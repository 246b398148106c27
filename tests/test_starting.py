"""A training that starts from the weights of another model."""

from dataclasses import replace
from pathlib import Path

import torch

from imputer import models, training
from imputer.model import Imputer
from imputer.training import starting
from imputer.vocabulary import Vocabulary
from trainings import settings_for


def test_a_piece_is_spelled_in_the_longest_pieces():
    theirs = Vocabulary.train(["ab ab ab abc ca b"], size=6)
    assert theirs.pieces(theirs.spell("▁abc")) == ["▁ab", "c"]
    assert theirs.spell("▁abx") == []


def test_another_tokenizer_starts_from_the_mean_of_its_spelling(expert: Path, tmp_path: Path) -> None:
    start, theirs = models.load(expert)
    text = " ".join(theirs.decode([token]) for token in range(1, theirs.size + 1))
    letters = Vocabulary.train([text], size=0, units="characters")
    words = Vocabulary.train([text], size=letters.size + 3)
    models.save(tmp_path, Imputer(start.settings, start.front_end_settings, letters.size), letters)
    found = Imputer(start.settings, start.front_end_settings, words.size)
    starting.start_from(str(tmp_path), found, words)

    weights = models.read_weights(tmp_path / models.WEIGHTS)
    for token in range(1, words.size + 1):
        spelled = letters.spell(words.pieces([token])[0])
        assert len(spelled) == len(words.pieces([token])[0])
        torch.testing.assert_close(found.output.weight[token], weights["output.weight"][spelled].mean(0))
        torch.testing.assert_close(
            found.embedding.weight[token], weights["embedding.weight"][spelled].mean(0)
        )
    torch.testing.assert_close(found.embedding.weight[words.mask], weights["embedding.weight"][letters.mask])
    torch.testing.assert_close(found.output.bias[0], weights["output.bias"][0])
    torch.testing.assert_close(found.layers[0].qkv.weight, weights["layers.0.qkv.weight"])


def test_a_training_takes_the_tokenizer_that_is_named(corpus: str, expert: Path, tmp_path: Path) -> None:
    _, theirs = models.load(expert)
    text = " ".join(theirs.decode([token]) for token in range(1, theirs.size + 1))
    letters = Vocabulary.train([text], size=0, units="characters")
    letters.save(tmp_path / "letters.model")
    settings = settings_for(corpus, start_from=str(expert), steps=2, validate_every=0)
    named = replace(settings.vocabulary, tokenizer=str(tmp_path / "letters.model"))
    trained = training.train(replace(settings, vocabulary=named), tmp_path / "run")
    assert models.load(trained)[1] == letters
