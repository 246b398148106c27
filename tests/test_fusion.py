"""Decoding with a language model and hotwords, against a search that lists everything."""

import itertools
import math
from functools import partial

import numpy as np
import pytest
import torch

import oracle
from imputer import alignments, configs, decoding
from imputer.configs import LanguageModel as Settings
from imputer.errors import ImputerError
from imputer.languagemodel import LanguageModel, build, fusion, lexicon
from imputer.languagemodel.hotwords import hotwords, read, spelled
from imputer.vocabulary import Vocabulary

TOPOLOGIES = pytest.mark.parametrize("merge", [False, True], ids=["delete blanks", "merge repeats"])
WIDE = Settings(
    beam=3000, margin=1e9, most_tokens=1000, least_probability=0.0, lm_weight=0.7, token_bonus=0.4
)


@pytest.fixture(scope="module")
def vocabulary():
    return Vocabulary.train(["ab ba"] * 3, units="characters")  # ▁, a, b


@pytest.fixture(scope="module")
def lm(vocabulary):
    rng = np.random.default_rng(0)
    words = [" ".join(rng.choice(["ab", "ba", "a", "abba"], size=4)) for _ in range(60)]
    return build(words, vocabulary, 3, None)


def random_log_probs(seed, frames, tokens):
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(frames, tokens, generator=generator)).log_softmax(-1)


def imputed(alignment, sure):
    """An imputation whose frames are sure where told."""
    alignment = torch.as_tensor(alignment)
    confidence = torch.where(torch.as_tensor(sure), 1.0, 0.4)
    return decoding.Imputation(alignment, confidence, 3, torch.full((len(alignment),), 3))


def exhaustive(scores, given, merge, value):
    """All transcripts with their scores, best first; ``value(tokens)`` is what text adds."""
    tokens = len(scores[0])
    ways = {}
    for alignment in itertools.product(range(tokens), repeat=len(scores)):
        if all(g in (-1, a) for g, a in zip(given, alignment, strict=True)):
            ways.setdefault(oracle.collapse(alignment, 0, merge), []).append(alignment)
    free = [[0.0] * tokens if g >= 0 else row for g, row in zip(given, scores, strict=True)]
    found = {target: oracle.log_sum(many, free) + value(target) for target, many in ways.items()}
    return sorted(found.items(), key=lambda pair: -pair[1])


def fuse_one(log_probs, given, lm, merge, settings=WIDE, **options):
    sure = [[g >= 0 for g in given]]
    start = imputed([[max(g, 0) for g in given]], sure)
    return fusion.fuse(
        lambda _: log_probs[None],
        start,
        torch.tensor([len(given)]),
        lm,
        settings=settings,
        mask=log_probs.shape[1],
        merge_repeats=merge,
        **options,
    )


@TOPOLOGIES
@pytest.mark.parametrize("seed", range(6))
def test_a_wide_beam_finds_the_maximum(vocabulary, lm, merge, seed):
    log_probs = random_log_probs(seed, 5, 4)
    rng = np.random.default_rng(seed)
    given = [int(rng.integers(4)) if rng.random() < 0.3 * (seed % 3) else -1 for _ in range(5)]

    def value(target):
        return WIDE.lm_weight * lm.score(target) + WIDE.token_bonus * len(target)

    expected = exhaustive(log_probs.double().tolist(), given, merge, value)
    found = fuse_one(log_probs, given, lm, merge, n_best=4).hypotheses[0]
    for (target, score), hypothesis in zip(expected[: len(found)], found, strict=True):
        assert tuple(hypothesis.tokens) == target
        assert hypothesis.score == pytest.approx(score, abs=1e-5)
        assert hypothesis.language == pytest.approx(lm.score(target), abs=1e-6)
        assert hypothesis.acoustic == pytest.approx(score - value(target), abs=1e-5)
    assert len(found) == min(4, len(expected))


@TOPOLOGIES
@pytest.mark.parametrize("seed", range(4))
def test_hotwords_add_their_bonus_and_nothing_else(vocabulary, lm, merge, seed):
    log_probs = random_log_probs(seed + 50, 6, 4)
    bonus = 0.8
    tree = hotwords(["ab", "b"], vocabulary, bonus)

    def value(target):
        text = vocabulary.decode(target) if target else ""
        whole = "".join(vocabulary.pieces(target)).startswith("▁")  # a piece of a word is not a word
        words = text.split() if whole else text.split()[1:]
        hot = sum({"ab": 3, "b": 2}.get(word, 0) for word in words)
        return WIDE.lm_weight * lm.score(target) + WIDE.token_bonus * len(target) + bonus * hot

    expected = exhaustive(log_probs.double().tolist(), [-1] * 6, merge, value)
    found = fuse_one(log_probs, [-1] * 6, lm, merge, hotwords=tree, n_best=3).hypotheses[0]
    assert [tuple(one.tokens) for one in found] == [target for target, _ in expected[:3]]
    assert [one.score for one in found] == pytest.approx([score for _, score in expected[:3]], abs=1e-5)


@TOPOLOGIES
@pytest.mark.parametrize("seed", range(6))
def test_words_that_are_not_known_cost_what_they_should(vocabulary, lm, merge, seed, tmp_path):
    """Every other time with a hotword, which is a known word from then on."""
    log_probs = random_log_probs(seed + 150, 6, 4)
    LanguageModel(lm.trie, lm.fingerprint, lexicon.make(["ab", "a"], vocabulary)).save(tmp_path / "lm")
    knows = LanguageModel.load(tmp_path / "lm")
    hot = {"hotwords": hotwords(["b"], vocabulary, 0.0)} if seed % 2 else {}
    known = {"ab", "a", *(["b"] if hot else [])}

    def value(target):
        text = vocabulary.decode(target) if target else ""
        whole = "".join(vocabulary.pieces(target)).startswith("▁")
        unknown = sum(word not in known for word in (text.split() if whole else text.split()[1:]))
        said = WIDE.lm_weight * lm.score(target) + WIDE.token_bonus * len(target)
        return said - lexicon.UNKNOWN * unknown

    expected = exhaustive(log_probs.double().tolist(), [-1] * 6, merge, value)
    found = fuse_one(log_probs, [-1] * 6, knows, merge, n_best=3, **hot).hypotheses[0]
    assert [tuple(one.tokens) for one in found] == [target for target, _ in expected[:3]]
    assert [one.score for one in found] == pytest.approx([score for _, score in expected[:3]], abs=1e-5)


def test_a_hash_does_not_depend_on_the_pieces():
    vocabulary = Vocabulary.train(["the then there thence other another bother"] * 5, size=24)
    words = ["the", "then", "bother", "other"]
    known = lexicon.make(words, vocabulary)
    assert len(known.words) == 4 and list(known.words) == sorted(known.words)
    pieces = vocabulary.pieces(range(1, vocabulary.size + 1))

    def ways(rest):
        """All ways to cut letters into pieces."""
        if not rest:
            yield []
        for token, piece in enumerate(pieces, 1):
            if piece and rest.startswith(piece):
                yield from ([token, *way] for way in ways(rest[len(piece) :]))

    for word in (*words, "thenc", "othe", "no"):
        found = list(ways("▁" + word))
        assert len(found) > 1 or word == "no"
        for way in found:
            value = np.uint64(lexicon.FRAGMENT)
            for token in way:
                value = np.uint64(lexicon.extended(known, value, token))
            assert lexicon.is_known(known, value) == (word in words), way


@TOPOLOGIES
@pytest.mark.parametrize("seed", range(4))
def test_the_result_is_the_best_alignment_of_the_best_transcript(vocabulary, lm, merge, seed):
    log_probs = random_log_probs(seed + 100, 6, 4)
    given = [-1, 2, -1, -1, 0, -1]
    result = fuse_one(log_probs, given, lm, merge)
    (hypothesis,) = result.hypotheses[0]
    alignment = result.imputation.alignment[0].tolist()
    ways = [
        way
        for way in oracle.alignments(hypothesis.tokens, 6, 0, merge)
        if all(g in (-1, a) for g, a in zip(given, way, strict=True))
    ]
    assert tuple(alignment) in ways
    scores = [[0.0] * 4 if g >= 0 else row for g, row in zip(given, log_probs.double().tolist(), strict=True)]
    best = max(oracle.log_prob(way, scores) for way in ways)
    assert oracle.log_prob(alignment, scores) == pytest.approx(best, abs=1e-5)
    assert (result.partial == 4).tolist() == [[g < 0 for g in given]]
    assert result.imputation.passes == 4


@TOPOLOGIES
def test_alone_as_in_a_batch_and_every_time(vocabulary, lm, merge):
    lengths = torch.tensor([9, 4, 7])
    rows = torch.stack([random_log_probs(seed, 9, 4) for seed in range(3)])
    alignment = torch.tensor(
        [[1, 2, 0, 0, 3, 1, 2, 2, 0], [0, 1, 3, 2, 0, 0, 0, 0, 0], [1, 1, 2, 0, 2, 3, 0, 0, 0]]
    )
    sure = torch.rand(3, 9, generator=torch.Generator().manual_seed(1)) < 0.4
    sure[1, :4] = True  # nothing to decide
    settings = Settings(beam=5)

    def run(items):
        frames = int(lengths[items].max())
        return fusion.fuse(
            lambda _: rows[items][:, :frames],
            imputed(alignment[items][:, :frames], sure[items][:, :frames]),
            lengths[items],
            lm,
            settings=settings,
            hotwords=hotwords(["ba"], vocabulary),
            n_best=3,
            mask=4,
            merge_repeats=merge,
        )

    together, again = run([0, 1, 2]), run([0, 1, 2])
    assert torch.equal(together.imputation.alignment, again.imputation.alignment)
    assert together.imputation.passes_per_item.tolist() == [4, 3, 4]
    for item in range(3):
        alone, n = run([item]), int(lengths[item])
        assert torch.equal(alone.imputation.alignment[0], together.imputation.alignment[item, :n])
        assert torch.equal(alone.imputation.confidence[0], together.imputation.confidence[item, :n])
        assert alone.hypotheses[0] == together.hypotheses[item] == again.hypotheses[item]
        tokens = alignments.collapse(together.imputation.alignment[item, :n], merge_repeats=merge)
        assert tokens == together.hypotheses[item][0].tokens


@TOPOLOGIES
def test_committed_frames_keep_token_and_confidence(vocabulary, lm, merge):
    given = [1, -1, 3, -1, -1, 2]
    result = fuse_one(random_log_probs(7, 6, 4), given, lm, merge, Settings())
    for frame, token in enumerate(given):
        if token >= 0:
            assert result.imputation.alignment[0, frame] == token
            assert result.imputation.confidence[0, frame] == 1


def test_confidence_weighs_network_and_text(vocabulary, lm):
    log_probs = random_log_probs(3, 1, 4)
    result = fuse_one(log_probs, [-1], lm, False)
    weights = [float(log_probs[0, 0])] + [
        float(log_probs[0, t]) + WIDE.lm_weight * lm.score([t]) + WIDE.token_bonus for t in (1, 2, 3)
    ]
    chosen = int(result.imputation.alignment[0, 0])
    expected = math.exp(weights[chosen]) / sum(map(math.exp, weights))
    assert float(result.imputation.confidence[0, 0]) == pytest.approx(expected, rel=1e-4)


class Network:
    """Answers a pass by what it is given, so that some frames are sure and others never are."""

    blank, mask, merge_repeats = 0, 4, False
    settings = configs.Model(block_size=2)

    def __init__(self):
        self.passes = 0

    def impute(self, acoustic, frame_lengths, partial):
        self.passes += 1
        return acoustic.log_softmax(-1)


def test_the_trace_shows_what_the_search_decided(vocabulary, lm):
    sure = torch.tensor([[9.0, 0, 0, 0], [0, 9, 0, 0]])
    unsure = torch.tensor([[0.1, 0, 0, 1], [0, 1, 2, 0]])
    acoustic = torch.stack([torch.cat([sure, unsure]), torch.cat([sure, sure])])  # (batch, frame, token)
    search = partial(fusion.fuse, lm=lm, settings=Settings())
    seen = []
    first, second = decoding.decode(
        Network(),
        acoustic,
        torch.tensor([4, 4]),
        decoding.Options(lm=lm, trace=True),
        search=search,
        on_pass=lambda number, rows, _: seen.append((number, rows)),
    )
    assert first.trace[1] == [0, 1, 4, 4]
    assert first.trace_confidence[1][2:] == [0, 0]
    assert first.trace[2] == first.alignment == seen[-1][1][0]
    assert (first.passes, second.passes, [number for number, _ in seen]) == (3, 2, [1, 2, 3])
    assert first.searched == [False, False, True, True]
    assert second.searched == [False] * 4
    assert second.trace == [row for row in second.trace if row] and len(second.trace) == 2
    assert second.trace[-1] == second.alignment == [0, 1, 0, 1]
    assert first.hypotheses[0].tokens == alignments.collapse(first.alignment)


def test_a_search_that_is_asked_for_is_not_left_out(lm):
    with pytest.raises(ValueError, match="need a search"):
        decoding.decode(Network(), torch.zeros(1, 2, 4), torch.tensor([2]), decoding.Options(lm=lm))


def test_nothing_open_costs_no_pass(vocabulary, lm):
    def step(partial):
        raise AssertionError("no pass is needed")

    start = imputed([[1, 2, 0]], [[True] * 3])
    result = fusion.fuse(step, start, torch.tensor([3]), lm, settings=Settings(), mask=4)
    assert torch.equal(result.imputation.alignment, start.alignment)
    assert result.imputation.passes == 3
    assert result.hypotheses[0][0].tokens == [1, 2]


def test_a_network_that_rules_everything_out_keeps_the_imputation(vocabulary, lm):
    rows = torch.full((1, 3, 4), -torch.inf)
    start = imputed([[1, 2, 0]], [[False] * 3])
    result = fusion.fuse(lambda _: rows, start, torch.tensor([3]), lm, settings=Settings(), mask=4)
    assert result.hypotheses[0][0].tokens == [1, 2]
    assert torch.equal(result.imputation.alignment, start.alignment)


def score_of(tree, vocabulary, pieces):
    """The bonus of a text spelled in these pieces."""
    ids = {piece: i for i, piece in enumerate(vocabulary.pieces(range(1, vocabulary.size + 1)), 1)}
    node, total = 0, 0.0
    for piece in pieces:
        total += tree.bonus[node, ids[piece]]
        node = tree.following[node, ids[piece]]
    return float(total + tree.end[node])


@pytest.mark.parametrize(
    ("text", "hot"),
    [
        ("new york", ["new york"]), ("new", []), ("newt", []), ("york", []), ("new yorker", []), ("new yor", []),
        ("new york new york", ["new york"] * 2), ("new new york", ["new york"]), ("zoo", ["zoo"]),
        ("zoo new york zoo", ["zoo", "new york", "zoo"]), ("new zoo", ["zoo"]), ("zoology", []), ("", []),
        ("old art", ["old art"]), ("old artist", ["old"]), ("old", ["old"]), ("old old zoo", ["old", "old", "zoo"]),
    ],
)  # fmt: skip
def test_a_bonus_is_given_back_unless_a_word_is_complete(text, hot):
    vocabulary = Vocabulary.train(["new york zoology artist old newt"] * 2, units="characters")
    tree = hotwords(["new york", "zoo", "old", "old art"], vocabulary, 1.0)
    letters = list("▁" + text.replace(" ", "▁")) if text else []
    # A piece each: letters and word marks. What "old" holds is the most that its letters do in any hotword.
    worth = {"new york": 9, "zoo": 4, "old": 4, "old art": 8}
    assert score_of(tree, vocabulary, letters) == pytest.approx(sum(worth[word] for word in hot), abs=1e-5)


def test_the_bonus_does_not_depend_on_the_pieces():
    vocabulary = Vocabulary.train(["lavoisier lava voice silver"] * 4, size=24)
    tree = hotwords(["lavoisier"], vocabulary, 1.0)
    own = vocabulary.pieces(vocabulary.encode("lavoisier"))
    assert score_of(tree, vocabulary, own) == pytest.approx(len(own))
    assert score_of(tree, vocabulary, list("▁lavoisier")) == pytest.approx(len(own), rel=1e-5)


def test_hotwords_are_spelled_as_the_model_writes():
    """Capitals and marks that the model never writes are no reason to refuse a name; those that it writes stay."""
    small = Vocabulary.train(["o'brien new york"] * 4, size=24)
    ours, theirs = hotwords(["O’Brien", "New-York!"], small), hotwords(["o'brien", "new york"], small)
    assert np.array_equal(ours.bonus, theirs.bonus) and np.array_equal(ours.following, theirs.following)
    assert spelled("New York", Vocabulary.train(["New York"] * 4, size=14))[0] == "New York"


def test_hotwords_that_cannot_be(vocabulary, tmp_path):
    with pytest.raises(ImputerError, match="hotword 'čaj' has 'j', 'č', which this model never writes"):
        hotwords(["ab", "čaj"], vocabulary)
    with pytest.raises(ImputerError, match="a hotword is empty"):
        hotwords(["  "], vocabulary)
    with pytest.raises(ImputerError, match="a list of words, got the text 'ab'"):
        hotwords("ab", vocabulary)


def test_hotwords_as_people_give_them(tmp_path):
    assert read("zau al makan, lavoisier ,") == ["zau al makan", "lavoisier"]
    (tmp_path / "words.txt").write_text("zau al makan\n\nlavoisier\n")
    assert read(str(tmp_path / "words.txt")) == ["zau al makan", "lavoisier"]
    assert read("") == []


@pytest.mark.parametrize(
    ("name", "value"), [("beam", 0), ("lm_weight", -1.0), ("lm_weight", math.nan), ("threshold", 3.0)]
)
def test_settings_that_cannot_be(name, value):
    with pytest.raises(ImputerError, match=rf"config.toml.*language_model.{name}"):
        configs.build(Settings, {name: value}, where="config.toml", prefix="language_model.")


def test_n_best_of_none(vocabulary, lm):
    with pytest.raises(ImputerError, match="n_best is a whole number of at least 1"):
        fuse_one(random_log_probs(0, 2, 4), [-1, -1], lm, False, n_best=0)
