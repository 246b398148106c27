"""Words and times from alignments, and the formats."""

import itertools
import json
import re
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imputer import transcripts
from imputer.transcripts import FORMATS, Transcript, Word, from_alignment

PIECES = ["", "▁the", "▁cat", "s", "▁", "'", "▁a", '"']
MASK = len(PIECES)


class Spelling:
    """A vocabulary of a handful of pieces."""

    def pieces(self, ids):
        return [PIECES[i] for i in ids]


def transcript(alignment, confidence=None, **options):
    given = {"frame_seconds": 0.04, "seconds": len(alignment) * 0.04} | options
    return from_alignment(alignment, confidence or [1.0] * len(alignment), Spelling(), **given)


def test_words_times_and_confidences():
    #                      0  1  2  3  4  5  6  7  8  9  10 11
    result = transcript(  [0, 1, 0, 0, 2, 0, 3, 0, 0, 0, 0, 0],
                          [1, .9, 1, 1, .8, 1, .5, 1, 1, 1, 1, 1], passes=3)  # fmt: skip
    assert result.text == "the cats" and result.passes == 3 and result.seconds == 0.48
    the, cats = result.words
    assert (the.start, the.end, the.confidence) == (0.04, 0.16, 0.9)  # held on until the next word starts
    assert (cats.start, cats.end, cats.confidence) == (0.16, 0.44, 0.5)  # held on for 0.16 s
    assert [(t.piece, t.frame, t.start, t.end, t.confidence) for t in result.tokens] == [
        ("▁the", 1, 0.04, 0.08, 0.9),
        ("▁cat", 4, 0.16, 0.2, 0.8),
        ("s", 6, 0.24, 0.28, 0.5),
    ]


def test_repeats_are_two_tokens_unless_merged():
    alignment = [1, 1, 0, 1, 3, 3, 3]
    assert transcript(alignment).text == "the the thesss"
    merged = transcript(alignment, [0.5, 0.7, 1, 0.9, 0.2, 0.4, 0.3], merge_repeats=True)
    assert merged.text == "the thes"
    assert [(t.frame, t.start, t.end, t.confidence) for t in merged.tokens] == [
        (0, 0.0, 0.08, 0.7),
        (3, 0.12, 0.16, 0.9),
        (4, 0.16, 0.28, 0.4),
    ]


def test_odd_starts_and_lone_word_marks():
    assert transcript([3, 0, 1]).text == "s the"  # begins inside a word
    assert transcript([4, 3, 0, 4, 0, 1]).text == "s the"  # "▁" "s" is a word, "▁" alone is none
    assert transcript([1, 5, 3]).text == "the's"
    assert transcript([0, 0, 0]).words == [] and transcript([], seconds=0.0).text == ""


def test_times_end_with_the_sound():
    result = transcript([0, 0, 1], seconds=0.1)
    assert result.words[0].end == 0.1 and result.tokens[0].end == 0.1
    beyond = transcript([0, 0, 0, 1], seconds=0.1)  # the last frame may look past the end
    assert beyond.words[0].end > beyond.words[0].start


@given(st.lists(st.integers(0, 7), max_size=60), st.booleans())
def test_times_are_in_order_and_the_text_is_the_words(alignment, merge):
    result = transcript(alignment, merge_repeats=merge)
    assert result.text == " ".join(word.text for word in result.words)
    assert result.text.split() == [word.text for word in result.words]
    previous = 0.0
    for word in result.words:
        assert previous <= word.start < word.end <= result.seconds + 1e-9
        previous = word.end


def test_trace_shows_pieces_blank_and_mask():
    result = transcript([1, 0, 3], trace=[[MASK, 0, MASK], [1, 0, 3]], mask=MASK)
    assert result.trace == [["∅", "_", "∅"], ["▁the", "_", "s"]]
    assert result.to_dict()["trace"] == result.trace and "trace" not in transcript([1]).to_dict()


def said(*words):
    items = [Word(text, start, end, 0.5) for text, start, end in words]
    return Transcript(" ".join(w.text for w in items), items, [], 1, items[-1].end if items else 0.0)


LONG = said(*[("word", i * 0.4, i * 0.4 + 0.3) for i in range(40)], ("later", 7300.5, 7301.25))


def test_txt_and_json():
    assert FORMATS["txt"](said(("hello", 0, 1), ("you", 1, 2)), "x.wav") == "hello you\n"
    read = json.loads(FORMATS["json"](transcript([1, 0, 2]), "höre.wav"))
    assert read["name"] == "höre.wav" and read["text"] == "the cat" and read["words"][1]["start"] == 0.08
    assert FORMATS["json"](transcript([1, 0, 2]), "a").count("\n") == 1


def test_srt():
    text = FORMATS["srt"](LONG, "x")
    cues = text.strip().split("\n\n")
    assert [cue.split("\n")[0] for cue in cues] == [str(i) for i in range(1, len(cues) + 1)]
    assert cues[0].split("\n")[1].startswith("00:00:00,000 --> 00:00:")
    assert cues[-1] == f"{len(cues)}\n02:01:40,500 --> 02:01:41,250\nlater"
    assert all(len(line) <= 42 for cue in cues for line in cue.split("\n")[2:])
    assert all(len(cue.split("\n")) <= 2 + 2 for cue in cues)
    spoken = " ".join(" ".join(cue.split("\n")[2:]) for cue in cues)
    assert spoken == LONG.text


def test_cues_break_at_pauses_and_when_full():
    words = [Word("a", 0, 0.2, 1), Word("b", 0.3, 0.5, 1), Word("c", 2.0, 2.1, 1)]
    assert [len(cue) for cue in transcripts.cues(words)] == [2, 1]
    assert all(cue[-1].end - cue[0].start <= 6.0 for cue in transcripts.cues(LONG.words))
    assert transcripts.cues([]) == []


@given(st.lists(st.integers(1, 30), max_size=60))
def test_a_cue_is_two_lines_and_has_no_room_for_the_next_word(lengths):
    """Wrapping loses room at the ends of lines, so that characters alone do not tell whether a cue is full."""
    words = [Word("x" * n, 0.01 * i, 0.01 * i + 0.01, 1.0) for i, n in enumerate(lengths)]
    cues = transcripts.cues(words)
    assert [word for cue in cues for word in cue] == words
    texts = [" ".join(word.text for word in cue) for cue in cues]
    assert all(len(textwrap.wrap(text, 42)) <= 2 for text in texts)
    for text, following in itertools.pairwise(texts):
        assert len(textwrap.wrap(f"{text} {following.split()[0]}", 42)) == 3


def test_vtt_escapes():
    text = FORMATS["vtt"](said(("<b>&", 0.0, 1.0)), "x")
    assert text == "WEBVTT\n\n00:00:00.000 --> 00:00:01.000\n&lt;b&gt;&amp;\n\n"


def test_ctm():
    text = FORMATS["ctm"](said(("hello", 0.12, 0.5), ("you", 0.5, 1.0)), "some/my file.v2.wav")
    assert text == "my_file.v2 1 0.120 0.380 hello 0.5000\nmy_file.v2 1 0.500 0.500 you 0.5000\n"


@given(st.lists(st.integers(0, 7), max_size=40))
def test_textgrid_has_no_holes(alignment):
    result = transcript(alignment)
    text = FORMATS["textgrid"](result, "x")
    assert text.startswith('File type = "ooTextFile"\nObject class = "TextGrid"\n\nxmin = 0\n')
    until = float(re.search(r"^xmax = (.*)$", text, re.MULTILINE).group(1))
    for title, items in (("words", result.words), ("tokens", result.tokens)):
        tier = text.split(f'name = "{title}"')[1].split("item [")[0]
        spans = re.findall(r'xmin = ([\d.]+)\n\s+xmax = ([\d.]+)\n\s+text = "(.*)"', tier)
        assert len(spans) == int(re.search(r"size = (\d+)", tier).group(1))
        assert float(spans[0][0]) == 0 and float(spans[-1][1]) == until
        assert all(a[1] == b[0] for a, b in itertools.pairwise(spans))
        assert all(float(a) < float(b) for a, b, _ in spans)
        texts = [item.text if title == "words" else item.piece for item in items]
        assert [t.replace('""', '"') for _, _, t in spans if t] == texts


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_writes_silence(name):
    assert isinstance(FORMATS[name](transcript([0, 0]), "silence.wav"), str)


def test_a_delay_moves_every_time_and_keeps_the_order():
    plain, early = (
        from_alignment([2, 0, 3, 0, 0, 2], [1.0] * 6, Spelling(), frame_seconds=0.1, seconds=0.6, delay=delay)
        for delay in (0.0, 0.15)
    )
    assert [token.start for token in plain.tokens] == [0.0, 0.2, 0.5]
    assert [token.start for token in early.tokens] == [0.0, 0.1, 0.35]
    assert [token.frame for token in early.tokens] == [token.frame for token in plain.tokens]
    assert all(0 <= token.start < token.end for token in early.tokens)
