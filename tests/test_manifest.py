"""Manifests: what is written is read, and every bad line is named."""

import json
import os
import pickle
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from imputer.data import manifest
from imputer.data.manifest import Manifest, Utterance
from imputer.errors import ImputerError, UsageError

GOOD = {"id": "a", "audio_filepath": "a.wav", "duration": 1.5, "text": "hello", "speaker": "s"}


def lines(path: Path, *items: object) -> Path:
    path.write_text("".join((item if isinstance(item, str) else json.dumps(item)) + "\n" for item in items))
    return path


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            texts.filter(bool),
            texts,
            texts,
            st.floats(0.001, 1e5),
            st.one_of(st.just(0.0), st.floats(0.001, 1e5)),
        ),
        min_size=1,
        unique_by=lambda item: item[0],
    )
)
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, items: list[tuple]) -> None:
    folder = tmp_path_factory.mktemp("manifest")
    utterances = [
        Utterance(
            name, str(folder / "audio" / f"{i}.flac"), round(seconds, 6), text, speaker, round(offset, 6)
        )
        for i, (name, text, speaker, seconds, offset) in enumerate(items)
    ]
    manifest.write(folder / "m.jsonl", utterances)
    opened = Manifest(folder / "m.jsonl", strict=True)
    assert list(opened) == utterances
    assert opened.durations.tolist() == [utterance.duration for utterance in utterances]
    assert opened[-1] == utterances[-1] and opened[:2] == utterances[:2]
    assert list(pickle.loads(pickle.dumps(opened))) == utterances


def test_paths_are_relative_to_the_manifest_and_move_with_it(tmp_path: Path) -> None:
    inside, outside = tmp_path / "corpus" / "audio" / "a.wav", tmp_path / "elsewhere" / "b.wav"
    path = tmp_path / "corpus" / "m.jsonl"
    manifest.write(path, [Utterance("a", str(inside), 1.0), Utterance("b", str(outside), 1.0)])
    stored = [json.loads(line)["audio_filepath"] for line in path.read_text().splitlines()]
    assert stored == ["audio/a.wav", str(outside)]
    os.rename(tmp_path / "corpus", tmp_path / "moved")
    opened = Manifest(tmp_path / "moved" / "m.jsonl")
    assert opened[0].audio_filepath == str(tmp_path / "moved" / "audio" / "a.wav")
    assert opened[1].audio_filepath == str(outside)


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ('{"id": "a", ', "not JSON"),
        ("just words", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("\udcff", "not JSON"),
        ("[1, 2]", "not a JSON object"),
        ({k: v for k, v in GOOD.items() if k != "id"}, "'id' is missing"),
        ({k: v for k, v in GOOD.items() if k != "audio_filepath"}, "'audio_filepath' is missing"),
        ({k: v for k, v in GOOD.items() if k != "duration"}, "'duration' is missing"),
        (GOOD | {"duration": "1.5"}, "'duration' must be a number, got '1.5'"),
        (GOOD | {"duration": True}, "'duration' must be a number"),
        (GOOD | {"duration": 0}, "more than 0 seconds, got 0"),
        (GOOD | {"duration": float("nan")}, "a finite number of seconds, got nan"),
        (GOOD | {"duration": float("inf")}, "a finite number of seconds, got inf"),
        (GOOD | {"offset": -1}, "at least 0 seconds, got -1"),
        (GOOD | {"text": None}, "'text' must be a string"),
        (GOOD | {"text": "\ud800"}, "not JSON (unexpected end of hex escape"),
        (GOOD | {"id": 7}, "'id' must be a string"),
        (GOOD | {"id": ""}, "must not be empty"),
        (GOOD | {"id": "first"}, "id 'first' is already on line 1"),
    ],
)
def test_a_bad_line_is_named_and_left_out_or_stops(tmp_path: Path, bad: object, said: str) -> None:
    path = tmp_path / "m.jsonl"
    content = [GOOD | {"id": "first"}, "", bad, GOOD | {"id": "last"}]
    text = "".join((item if isinstance(item, str) else json.dumps(item)) + "\n" for item in content)
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    opened = Manifest(path)
    assert [utterance.id for utterance in opened] == ["first", "last"]
    assert len(opened.problems) == 1
    assert f"{path}, line 3: " in opened.problems[0] and said in opened.problems[0]
    with pytest.raises(ImputerError) as raised:
        Manifest(path, strict=True)
    assert str(raised.value) == opened.problems[0]


def test_a_missing_manifest_is_the_callers_mistake(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.jsonl"):
        Manifest(tmp_path / "none.jsonl")
    with pytest.raises(UsageError, match="directory"):
        Manifest(tmp_path)


@pytest.mark.parametrize("content", ["", "\n\n", "not json\n"])
def test_nothing_usable_is_an_error(tmp_path: Path, content: str) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(content)
    with pytest.raises(ImputerError, match="no usable utterance"):
        Manifest(path)


def test_a_root_holds_every_path(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "secret.wav").touch()
    (tmp_path / "root" / "link.wav").symlink_to(tmp_path / "secret.wav")
    paths = ["a.wav", "sub/../b.wav", "../secret.wav", "/etc/passwd", "link.wav", "../root-other/c.wav"]
    items = [GOOD | {"id": str(i), "audio_filepath": p} for i, p in enumerate(paths)]
    path = lines(tmp_path / "root" / "m.jsonl", *items)
    assert len(Manifest(path, strict=True)) == 6
    opened = Manifest(path, root=tmp_path / "root")
    assert [utterance.id for utterance in opened] == ["0", "1"]
    assert all("lies outside" in problem for problem in opened.problems)
    with pytest.raises(ImputerError, match=r"line 3: .*\.\./secret\.wav"):
        Manifest(path, strict=True, root=tmp_path / "root")


def test_nothing_half_written_is_left(tmp_path: Path) -> None:
    def interrupted():
        yield Utterance("a", "a.wav", 1.0)
        raise RuntimeError("stop")

    lines(tmp_path / "m.jsonl", GOOD)
    before = (tmp_path / "m.jsonl").read_bytes()
    with pytest.raises(RuntimeError):
        manifest.write(tmp_path / "m.jsonl", interrupted())
    assert (tmp_path / "m.jsonl").read_bytes() == before
    assert os.listdir(tmp_path) == ["m.jsonl"]


def test_a_byte_order_mark_is_no_content(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    lines = "".join(f'{{"id": "{name}", "audio_filepath": "a.wav", "duration": 1}}\n' for name in "ab")
    path.write_text(lines, encoding="utf-8-sig")
    assert [utterance.id for utterance in Manifest(path, strict=True)] == ["a", "b"]


def test_without_a_last_newline(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(json.dumps(GOOD) + "\r\n" + json.dumps(GOOD | {"id": "b"}))
    assert [utterance.id for utterance in Manifest(path, strict=True)] == ["a", "b"]
