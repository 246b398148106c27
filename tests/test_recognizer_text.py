"""Language models and hotwords through the recogniser, the commands and the server, on the language of tones."""

import json
from dataclasses import replace

import httpx
import numpy as np
import pytest
import soundfile

import serving
import tones
from imputer import languagemodel, models
from imputer.data import manifest
from imputer.data.manifest import Utterance
from imputer.decoding import Options
from imputer.errors import ImputerError
from imputer.evaluation import tuning
from imputer.languagemodel import write_arpa
from imputer.recognizer import Recognizer
from imputer.vocabulary import Vocabulary
from trainings import call

TEXT = serving.TEXT


@pytest.fixture(scope="module")
def lm():
    rng = np.random.default_rng(0)
    return languagemodel.build([tones.sentence(rng, 5) for _ in range(300)], tones.vocabulary(), 4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, lm):
    """A model with a language model of its own, and weights for it that show."""
    place = tones.save(tmp_path_factory.mktemp("model"))
    lm.save(place / models.LANGUAGE_MODEL)
    with open(place / models.CONFIG, "a") as file:
        file.write("\n[language_model]\nthreshold = 2.0\nlm_weight = 0.5\ntoken_bonus = 1.0\n")
    return place


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return tones.save(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def speech():
    return tones.speak(TEXT, 500)[0]


@pytest.fixture
def run():
    return call


def test_the_models_own_is_used_unless_told_otherwise(folder, plain, speech):
    ours = Recognizer.from_pretrained(folder)
    informed, alone = ours.transcribe(speech, block_size=4), ours.transcribe(speech, block_size=4, lm=None)
    assert informed.text == alone.text == TEXT
    assert (informed.passes, alone.passes) == (5, 4)
    assert [word.text for word in informed.words] == TEXT.split()
    assert [word.start for word in informed.words] == pytest.approx([w.start for w in alone.words], abs=0.1)
    assert all(0 < word.confidence <= 1 for word in informed.words)
    assert Recognizer.from_pretrained(plain).transcribe(speech, block_size=4).passes == 4


def test_a_language_model_by_object_path_name_and_arpa(folder, plain, speech, lm, tmp_path):
    write_arpa(lm, tmp_path / "lm.arpa", tones.vocabulary())
    ours = Recognizer.from_pretrained(plain)
    for given in (lm, folder / models.LANGUAGE_MODEL, str(folder), tmp_path / "lm.arpa"):
        result = ours.transcribe(speech, block_size=2, lm=given)
        assert result.text == TEXT
    with pytest.raises(ImputerError, match=r"no language model nowhere.lm: neither a file nor a model"):
        ours.transcribe(speech, lm="nowhere.lm")
    with pytest.raises(ImputerError, match=r"has no language model \(lm.bin\)"):
        ours.transcribe(speech, lm=str(plain))


def test_text_overrules_sound_where_it_weighs_enough(plain, speech):
    """A model of a text that always says "lu" where the recording says "ba"."""
    vocabulary = tones.vocabulary()
    ours = Recognizer.from_pretrained(plain)
    insistent = languagemodel.build(["goluba midago lu lu"] * 50, vocabulary, 6)
    settings = {
        "threshold": 2.0,
        "lm_weight": 30.0,
        "least_probability": 0.0,
        "margin": 1e6,
        "most_tokens": 50,
    }
    with open(plain / models.CONFIG) as file:
        before = file.read()
    section = "\n[language_model]\n" + "".join(f"{k} = {v}\n" for k, v in settings.items())
    (plain / models.CONFIG).write_text(before + section)
    try:
        assert "ba" not in ours.transcribe(speech, lm=insistent).text.split()
    finally:
        (plain / models.CONFIG).write_text(before)


def test_alternatives_on_request(folder, speech):
    ours = Recognizer.from_pretrained(folder)
    result = ours.transcribe(speech, n_best=4)
    assert len(result.alternatives) == 4
    assert result.alternatives[0].text == result.text
    scores = [one.score for one in result.alternatives]
    assert scores == sorted(scores, reverse=True)
    assert len({one.text for one in result.alternatives}) > 1
    assert "alternatives" in result.to_dict()
    assert "alternatives" not in ours.transcribe(speech).to_dict()


def test_long_recordings_are_joined_as_ever(folder):
    text = tones.sentence(np.random.default_rng(5), 40)
    samples = tones.speak(text, 5, pause=0.5)[0]
    ours = Recognizer.from_pretrained(folder)
    result = ours.transcribe(samples, window=6.0, overlap=2.0, trace=True)
    assert result.text == text
    assert result.passes == len(result.trace) == ours.model.settings.block_size + 1
    assert "∅" in result.trace[-2] and "∅" not in result.trace[-1]


def test_what_cannot_be_said_is_refused(folder, plain, speech, tmp_path):
    ours = Recognizer.from_pretrained(folder)
    with pytest.raises(ImputerError, match="hotword 'xyz' has 'x', 'y', 'z', which this model never writes"):
        ours.transcribe(speech, hotwords=["ba", "xyz"])
    other = Vocabulary.train(["some other text"] * 3, size=14)
    languagemodel.build(["some text"], other, 2).save(tmp_path / "other.lm")
    with pytest.raises(ImputerError, match=r"other.lm is over other pieces \(vocabulary"):
        ours.transcribe(speech, lm=tmp_path / "other.lm")


def test_searches_are_prepared_once_and_not_kept_for_ever(folder):
    ours = Recognizer.from_pretrained(folder)
    options = Options(lm="default", hotwords=("ba",))
    assert ours.search(options) is ours.search(Options(lm="default", hotwords=["ba"]))
    for number in range(40):
        ours.search(Options(lm="default", hotwords=("ba " * (number + 1),)))
    assert len(ours._searches) <= 16


def test_transcribe_with_text(run, folder, speech, tmp_path):
    soundfile.write(tmp_path / "a.wav", speech, tones.RATE)
    code, out, _ = run(
        "transcribe",
        tmp_path / "a.wav",
        "--model",
        folder,
        "--n-best",
        3,
        "--format",
        "json",
        "--hotwords",
        "midago, ba lu",
    )
    found = json.loads(out)
    assert code == 0 and found["text"] == TEXT and len(found["alternatives"]) == 3
    code, out, err = run("transcribe", tmp_path / "a.wav", "--model", folder, "--lm", "none")
    assert (code, out) == (0, TEXT + "\n")
    code, out, err = run("transcribe", tmp_path / "a.wav", "--model", folder, "--hotwords", "żubr")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1 and "hotword 'żubr'" in err
    code, out, err = run("transcribe", tmp_path / "a.wav", "--model", folder, "--hotwords", "names.txt")
    assert (code, out, err) == (2, "", "imputer: hotwords: no file names.txt\n")  # it was taken for a word


def test_evaluate_with_and_without(run, folder, plain, speech, tmp_path):
    soundfile.write(tmp_path / "a.wav", speech, tones.RATE)
    manifest.write(
        tmp_path / "t.jsonl", [Utterance("a", str(tmp_path / "a.wav"), len(speech) / tones.RATE, TEXT)]
    )
    code, _, _ = run("evaluate", tmp_path / "t.jsonl", "--model", folder, "--json", tmp_path / "s.json")
    rows = json.loads((tmp_path / "s.json").read_text())["evaluations"]
    assert code == 0 and [row["text"] for row in rows] == ["", "lm"]
    assert [row["passes"] for row in rows] == [8, 9]
    assert [row["wer"]["value"] for row in rows] == [0, 0]
    for more, expected in (
        (["--lm", "none"], [""]),
        (["--hotwords", "ba"], ["", "lm + hotwords"]),
        (["--compare", plain], ["", "lm", ""]),
    ):
        code, _, _ = run(
            "evaluate", tmp_path / "t.jsonl", "--model", folder, "--json", tmp_path / "s.json", *more
        )
        content = json.loads((tmp_path / "s.json").read_text())
        assert code == 0 and [row["text"] for row in content["evaluations"]] == expected
    assert len(content["comparisons"]) == 1
    _, out, _ = run("evaluate", tmp_path / "t.jsonl", "--model", folder, "--compare", folder)
    said = [line for line in out.splitlines() if " against " in line]
    assert ["(block, B = 8):" in said[0], "(block, B = 8, lm):" in said[1], len(said)] == [True, True, 2]


def test_lm_build_writes_what_the_model_takes(run, plain, speech, tmp_path):
    rng = np.random.default_rng(1)
    (tmp_path / "text.txt").write_text("\n".join(tones.sentence(rng, 6) for _ in range(2000)))
    target = tmp_path / "own"
    tones.save(target)
    code, out, _ = run("lm", "build", tmp_path / "text.txt", "--model", target, "--order", 3, "-o", target)
    assert code == 0
    assert "perplexity on" in out and "per word" in out and "per piece" in out
    assert Recognizer.from_pretrained(target).transcribe(speech).text == TEXT
    (tmp_path / "words.txt").write_text("Goluba\nlu\n")
    words = ("lm", "build", tmp_path / "text.txt", "--model", target, "--words", tmp_path / "words.txt")
    code, out, _ = run(*words, "--order", 3, "-o", target)
    assert code == 0 and "words are known; others are avoided" in out
    assert Recognizer.from_pretrained(target).transcribe(speech).text == TEXT
    code, _, err = run(*words, "-o", tmp_path / "x.arpa")
    assert code == 2 and "an ARPA file holds no list of words" in err
    code, _, err = run("lm", "build", tmp_path / "none.txt", "--model", target, "-o", tmp_path / "x")
    assert code == 2 and "cannot read" in err
    code, _, err = run(
        "lm", "build", tmp_path / "text.txt", "--model", target, "--order", 0, "-o", tmp_path / "x"
    )
    assert code == 2 and "order of a language model" in err
    (tmp_path / "empty.txt").write_text("")
    code, _, err = run("lm", "build", tmp_path / "empty.txt", "--model", target, "-o", tmp_path / "x")
    assert code == 1 and "holds no words" in err and err.count("\n") == 1


def test_lm_tune_stores_settings_that_err_least(run, lm, speech, tmp_path):
    """A language model that counts a hundred times too much writes nothing right; tuning undoes that."""
    target = tones.save(tmp_path / "own")
    lm.save(target / models.LANGUAGE_MODEL)
    before = replace(models.language_model_settings(target), lm_weight=1.6, token_bonus=-8.0, threshold=2.0)
    models.store_language_model_settings(target, before)
    soundfile.write(tmp_path / "a.wav", speech, tones.RATE)
    manifest.write(
        tmp_path / "t.jsonl", [Utterance("a", str(tmp_path / "a.wav"), len(speech) / tones.RATE, TEXT)]
    )
    assert Recognizer.from_pretrained(target).transcribe(speech).text != TEXT
    code, out, _ = run("lm", "tune", tmp_path / "t.jsonl", "--model", target)
    assert code == 0 and "best on 1 utterance" in out and "0.00 % WER; stored in" in out
    assert models.language_model_settings(target) != before
    assert Recognizer.from_pretrained(target).transcribe(speech).text == TEXT


def test_lm_tune_names_an_utterance_that_the_network_gives_nan_for(lm, speech, tmp_path):
    """As every decoding does: tuning calls ``decoding.decode`` too."""
    recognizer = Recognizer.from_pretrained(tones.save(tmp_path / "own"))
    impute = recognizer.model.impute
    recognizer.model.impute = lambda *given: impute(*given).mul(float("nan"))
    soundfile.write(tmp_path / "a.wav", speech, tones.RATE)
    utterance = Utterance("a", str(tmp_path / "a.wav"), len(speech) / tones.RATE, TEXT)
    with pytest.raises(ImputerError, match=r"^a: the network gave NaN"):
        tuning.tune(recognizer, lm, [utterance], print)


def test_lm_tune_without_a_language_model_or_speech(run, plain, tmp_path):
    code, _, err = run("lm", "tune", "--model", plain)
    assert code == 2 and "no manifest" in err
    code, _, err = run("lm", "tune", tmp_path / "none.jsonl", "--model", plain)
    assert code == 2 and "has no language model: build one" in err
    code, _, err = run("lm", "build", tmp_path / "text.txt", "--model", plain)
    assert code == 2 and "lm build needs --output" in err


def test_the_server_takes_keywords_prompts_and_no_language_model(folder):
    with serving.serving(folder) as (address, _):

        def ask(**fields):
            return httpx.post(
                f"{address}/v1/audio/transcriptions",
                files={"file": ("a.wav", serving.wav())},
                data={"response_format": "verbose_json", **fields},
                timeout=60,
            )

        for fields in (
            {},
            {"lm": "none"},
            {"keywords": "Midago, ba lu, żubr"},
            {"prompt": "Midago, 17 Zürich; Ba lu."},
        ):
            answer = ask(**fields)
            assert answer.status_code == 200, answer.text
            assert answer.json()["text"] == TEXT
        for fields, said in (({"hotwords": "żubr"}, "hotword 'żubr'"), ({"lm": "x"}, "lm")):
            answer = ask(**fields)
            assert answer.status_code == 400
            assert said in answer.json()["error"]["message"]


def test_a_stream_has_the_pass_of_the_language_model(folder, speech):
    """It comes after the window is complete; without it, what is shown while a recording runs lacks its corrections."""
    expected = Recognizer.from_pretrained(folder).transcribe(speech, block_size=4, trace=True)
    with serving.serving(folder) as (address, _):
        fields = {"stream": "true", "include[]": "passes", "block_size": "4"}
        lines = serving.ask(address, **fields).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    passes = [event for event in events if event["type"] == "imputer.pass"]
    assert [one["pass"] for one in passes] == [1, 2, 3, 4, 5] and expected.passes == 5
    assert passes[-1]["alignment"] == expected.trace[-1]


def test_a_trace_ends_with_what_the_language_model_decided(folder, speech):
    """In a batch too, where the search follows the last pass of the slowest."""
    ours = Recognizer.from_pretrained(folder)
    waves = [speech, speech[: round(4 * ours.frame_seconds * ours.sample_rate)]]
    options = Options(8, trace=True, lm="default")
    together = ours.decode(waves, options)
    assert [one.passes for one in together] == [9, 5]
    for one, wave in zip(together, waves, strict=True):
        (alone,) = ours.decode([wave], options)
        assert one.trace == alone.trace and one.trace[-1] == one.alignment
        assert one.trace_confidence[-1] == one.confidence
