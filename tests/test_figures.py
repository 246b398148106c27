"""Pictures: that they are written, and that what they show is right."""

import builtins
import itertools
import re
from collections import Counter

import matplotlib.image
import pytest

from imputer.display import drawings
from imputer.errors import UsageError
from imputer.research import plots
from imputer.transcripts import from_alignment

MASK = 9


class Letters:
    def pieces(self, ids):
        return [["", "▁have", "▁l", "ive"][i] for i in ids]


def traced(alignment, trace):
    options = {"frame_seconds": 0.04, "seconds": 1.0, "passes": len(trace), "trace": trace, "mask": MASK}
    return from_alignment(alignment, [1.0] * len(alignment), Letters(), **options)


def texts(figure):
    return [t.get_text() for axes in figure.axes for t in axes.texts]


def test_the_decoding_path_has_a_cell_for_every_frame_and_pass(tmp_path):
    final = [0, 1, 0, 2, 0, 3, 0] * 4
    half = [t if n % 3 else MASK for n, t in enumerate(final)]
    figure = drawings.decoding_path(traced(final, [half, final]), block_size=4, title="have live")
    shown = Counter(texts(figure))
    assert shown["∅"] == 28 + half.count(MASK)
    assert shown["_"] == half.count(0) + final.count(0)
    assert shown["[have"] == half.count(1) + final.count(1) and shown["have live"] == 1
    drawings.save(figure, tmp_path / "a.svg", tmp_path / "a.png", tmp_path / "a.pdf")
    assert "<svg" in (tmp_path / "a.svg").read_text()[:2000]
    pixels = matplotlib.image.imread(tmp_path / "a.png")
    assert pixels.shape[0] > 100 and pixels[0, 0, :3].min() == 1.0  # a white panel, whatever the page
    assert pixels[..., :3].min() < 0.4


def test_the_same_picture_is_the_same_file(tmp_path):
    for name in ("a.svg", "b.svg"):
        figure = drawings.decoding_path(traced([0, 1], [[MASK, 1], [0, 1]]), block_size=2)
        drawings.save(figure, tmp_path / name)
    assert len({(tmp_path / name).read_bytes() for name in ("a.svg", "b.svg")}) == 1


def test_every_colour_has_a_counterpart_on_dark_pages(tmp_path):
    lines = {f"line {n}": [(1, n), (2, n + 1)] for n in range(len(drawings.COLOURS))}
    plots.save(tmp_path / "lines.svg", [drawings.Panel("x", "y", lines)])
    path = drawings.decoding_path(traced([0, 1], [[MASK, 1], [0, 1]]), block_size=2)
    drawings.save(path, tmp_path / "path.svg")
    for file in tmp_path.glob("*.svg"):
        svg = file.read_text()
        rules, drawn = svg.split("</style>")
        used = set(re.findall(r"(?:fill|stroke): (#\w{6})", drawn))
        assert {drawings.PAPER, drawings.INK} <= used <= set(drawings.DARK), file
        assert all(f'[style*="fill: {colour}"]{{fill:{drawings.DARK[colour]}' in rules for colour in used)
    assert len(set(drawings.DARK.values())) == len(drawings.DARK)


def test_long_paths_go_on_in_further_lines():
    final = ([0] * 9 + [1]) * 30
    figure = drawings.decoding_path(traced(final, [final]), block_size=8)
    width, height = figure.get_size_inches()
    assert width < 16 and height > 1.5
    assert texts(figure).count("[have") == 30
    huge = drawings.decoding_path(
        traced(final, [final]), block_size=300
    )  # one block: still broken into lines
    assert huge.get_size_inches()[0] < 16


def test_error_rates_by_block_size(tmp_path):
    rows = [
        {"strategy": s, "block_size": b, "wer": {"value": 0.1 + b / 1000, "low": 0.09, "high": 0.2}}
        for s, b in itertools.product(["right_most_last", "alternate_sub_block"], [8, 2, 4])
    ]
    (axes,) = drawings.wer_by_block_size(rows, title="x").axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "right most last",
        "alternate sub block",
    ]
    assert list(axes.lines[0].get_xdata()) == [2, 4, 8]
    assert list(axes.lines[0].get_ydata()) == pytest.approx([10.2, 10.4, 10.8])
    plain = [{"strategy": "block", "block_size": 1, "wer": 0.5, "model": m} for m in ("a", "b")]
    (axes,) = drawings.wer_by_block_size(plain).axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["block, a", "block, b"]
    drawings.save(axes.figure, tmp_path / "w.png")


def test_bad_requests(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="trace"):
        drawings.decoding_path(
            from_alignment([0], [1.0], Letters(), frame_seconds=1, seconds=1), block_size=2
        )
    with pytest.raises(UsageError, match=r"\.svg"):
        drawings.save(drawings.sheet(1, 1), tmp_path / "picture.bmp")
    real = builtins.__import__

    def without(name, *rest):
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UsageError, match=r"imputer-asr\[figures\]"):
        drawings.sheet(1, 1)
