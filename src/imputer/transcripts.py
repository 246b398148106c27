"""Transcripts: words with times and confidences read off an alignment, and the formats to write them in.

A token is spoken at the frame that carries it: there its time starts, earlier by ``delay``, the time that a model
takes to recognise a token once its sound has begun. A word starts with its first letters and ends with its last
ones, held on for ``HOLD_SECONDS`` or until the next word starts, because a token's frame marks where it is recognised,
not how long it lasts. A token's confidence is its probability in the pass that committed it; a word's is the least of
its tokens'. On spoken digits this separated right from wrong words a little better than their mean and about as well
as their product, with only 20 to 50 wrong words to compare.

To add a format, write a function of a transcript and a name and put it in ``FORMATS``.
"""

import html
import json as json_module
import math
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

WORD_MARK = "▁"  # SentencePiece's sign for the start of a word
BLANK, MASK = "_", "∅"  # how a trace shows them, as the paper does
HOLD_SECONDS = 0.16
LINE_CHARACTERS, CUE_LINES, CUE_SECONDS = 42, 2, 6.0  # of a subtitle, at most
CUE_PAUSE_SECONDS = 1.0  # after which a new one begins


@dataclass(frozen=True, slots=True)
class Token:
    """A piece of a word at the frame that emits it."""

    piece: str
    frame: int
    start: float  # seconds
    end: float
    confidence: float


@dataclass(frozen=True, slots=True)
class Word:
    """A word and when it is said, in seconds."""

    text: str
    start: float
    end: float
    confidence: float


@dataclass(frozen=True, slots=True)
class Alternative:
    """A transcript that a search found, and what it was ranked by, in nats."""

    text: str
    score: float


@dataclass(frozen=True, slots=True)
class Transcript:
    """What was said, when, and how sure the model was."""

    text: str
    words: list[Word]
    tokens: list[Token]
    passes: int  # of the network, until the alignment was complete
    seconds: float  # of audio
    frame_seconds: float = 0.0  # from one frame of the alignment to the next
    # After each pass, one symbol per frame: a piece, "_" blank, "∅" mask.
    trace: list[list[str]] | None = None
    # With n_best, best first, this one included.
    alternatives: list[Alternative] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON; without ``trace`` and ``alternatives`` unless there are any."""
        mapping = asdict(self)
        for name in ("trace", "alternatives"):
            if not mapping[name]:
                del mapping[name]
        return mapping


class Pieces(Protocol):
    """The part of a vocabulary that is needed here."""

    def pieces(self, ids: list[int]) -> list[str]:
        """The pieces of tokens, with the word mark."""


def from_alignment(
    alignment: Sequence[int],
    confidence: Sequence[float],
    vocabulary: Pieces,
    *,
    frame_seconds: float,
    seconds: float,
    delay: float = 0.0,
    passes: int = 0,
    blank: int = 0,
    merge_repeats: bool = False,
    trace: Sequence[Sequence[int]] | None = None,
    mask: int | None = None,
    calibration: Sequence[tuple[float, float]] = (),
    alternatives: Sequence[Alternative] = (),
) -> Transcript:
    """The transcript that an alignment (frame,) of token ids spells, with the confidence of each frame.

    ``calibration`` maps the raw confidence of a word to a calibrated one; tokens keep theirs.
    """
    runs = list(_emissions(alignment, blank, merge_repeats))
    pieces = vocabulary.pieces([alignment[first] for first, _ in runs])
    tokens = [
        Token(
            piece,
            first,
            _seconds(_earlier(first * frame_seconds, delay)),
            _seconds(_within(_earlier((last + 1) * frame_seconds, delay), first * frame_seconds, seconds)),
            _probability(max(confidence[first : last + 1])),
        )
        for piece, (first, last) in zip(pieces, runs, strict=True)
    ]
    words = [
        replace(word, confidence=_probability(calibrated(word.confidence, calibration)))
        for word in words_of(tokens, seconds)
    ]
    return Transcript(
        text=text_of(words),
        words=words,
        tokens=tokens,
        passes=passes,
        seconds=_seconds(seconds),
        frame_seconds=frame_seconds,
        trace=None if trace is None else [symbols(row, vocabulary, blank, mask) for row in trace],
        alternatives=list(alternatives),
    )


def from_words(words: list[Word]) -> Transcript:
    """The transcript of words with their times, where nothing else is known; it ends with the last."""
    return Transcript(text_of(words), words, tokens=[], passes=0, seconds=words[-1].end if words else 0.0)


def text_of(words: Sequence[Word]) -> str:
    """Words as text."""
    return " ".join(word.text for word in words)


def calibrated(confidence: float, points: Sequence[tuple[float, float]]) -> float:
    """The value at ``confidence`` of the piecewise linear map through ``points``; without points, itself."""
    if not points:
        return confidence
    raw, shares = zip(*points, strict=True)
    return float(np.interp(confidence, raw, shares))


def symbols(partial: Sequence[int], vocabulary: Pieces, blank: int = 0, mask: int | None = None) -> list[str]:
    """One symbol per frame of a partial alignment: its piece, "_" for blank, "∅" for mask."""
    pieces = iter(vocabulary.pieces([token for token in partial if token not in (blank, mask)]))
    return [BLANK if token == blank else MASK if token == mask else next(pieces) for token in partial]


def words_of(tokens: Sequence[Token], seconds: float) -> list[Word]:
    """Join tokens to words: a piece with the word mark starts one."""
    groups: list[list[Token]] = []
    for token in tokens:
        if token.piece.startswith(WORD_MARK) or not groups:
            groups.append([])
        groups[-1].append(token)
    spelt = [("".join(token.piece for token in group).replace(WORD_MARK, ""), group) for group in groups]
    spelt = [(text, group) for text, group in spelt if text]  # a lone word mark spells nothing
    # A word mark of its own may come anywhere in the pause before; the word starts with its first letter.
    starts = [next(token.start for token in group if token.piece != WORD_MARK) for _, group in spelt]
    words = []
    for (text, group), start, limit in zip(spelt, starts, [*starts, math.inf][1:], strict=True):
        until = max(seconds, group[-1].end) if limit == math.inf else limit
        end = min(group[-1].end + HOLD_SECONDS, until)
        words.append(Word(text, start, _seconds(end), min(token.confidence for token in group)))
    return words


def txt(transcript: Transcript, name: str) -> str:
    """The words, and nothing else."""
    return transcript.text + "\n"


def json(transcript: Transcript, name: str) -> str:
    """All fields, one JSON object per line."""
    return json_module.dumps({"name": name, **transcript.to_dict()}, ensure_ascii=False) + "\n"


def srt(transcript: Transcript, name: str) -> str:
    """SubRip subtitles."""
    return "".join(
        f"{number}\n{_clock(cue[0].start, ',')} --> {_clock(cue[-1].end, ',')}\n{_text(cue)}\n\n"
        for number, cue in enumerate(cues(transcript.words), 1)
    )


def vtt(transcript: Transcript, name: str) -> str:
    """WebVTT subtitles."""
    return "WEBVTT\n\n" + "".join(
        f"{_clock(cue[0].start, '.')} --> {_clock(cue[-1].end, '.')}\n"
        f"{html.escape(_text(cue), quote=False)}\n\n"
        for cue in cues(transcript.words)
    )


def ctm(transcript: Transcript, name: str) -> str:
    """NIST's time-marked words: recording (without folder and ending), channel, start, duration, word, confidence."""
    recording = "_".join(Path(name).stem.split()) or "-"
    return "".join(
        f"{recording} 1 {word.start:.3f} {word.end - word.start:.3f} {'_'.join(word.text.split())} "
        f"{word.confidence:.4f}\n"
        for word in transcript.words
    )


def textgrid(transcript: Transcript, name: str) -> str:
    """Praat's long text format, with a tier of words and one of tokens."""
    spoken = [transcript.words[-1].end] if transcript.words else []
    until = max(transcript.seconds, *spoken, *(token.end for token in transcript.tokens[-1:]), 0.001)
    tiers = {
        "words": [(word.start, word.end, word.text) for word in transcript.words],
        "tokens": [(token.start, token.end, token.piece) for token in transcript.tokens],
    }
    head = [
        'File type = "ooTextFile"',
        'Object class = "TextGrid"',
        "",
        "xmin = 0",
        f"xmax = {until:.3f}",
        "tiers? <exists>",
        f"size = {len(tiers)}",
        "item []:",
    ]
    body = [
        line
        for number, (title, spans) in enumerate(tiers.items(), 1)
        for line in _tier(number, title, list(_filled(spans, until)), until)
    ]
    return "\n".join([*head, *body]) + "\n"


FORMATS: dict[str, Callable[[Transcript, str], str]] = {
    "txt": txt,
    "json": json,
    "srt": srt,
    "vtt": vtt,
    "ctm": ctm,
    "textgrid": textgrid,
}


def cues(words: Sequence[Word]) -> list[list[Word]]:
    """Words grouped into subtitles: a new one at a pause, or when time or two lines of 42 characters are full."""
    groups: list[list[Word]] = []
    for word in words:
        group = groups[-1] if groups else []
        full = len(_lines([*group, word])) > CUE_LINES
        paused = bool(group) and word.start - group[-1].end > CUE_PAUSE_SECONDS
        if not group or full or paused or word.end - group[0].start > CUE_SECONDS:
            groups.append([])
        groups[-1].append(word)
    return groups


def _emissions(alignment: Sequence[int], blank: int, merge_repeats: bool) -> Iterator[tuple[int, int]]:
    """First and last frame of every token emitted."""
    start = 0
    for frame, token in enumerate(alignment):
        follows = merge_repeats and frame > 0 and alignment[frame - 1] == token
        start = start if follows else frame
        ends = not merge_repeats or frame + 1 == len(alignment) or alignment[frame + 1] != token
        if token != blank and ends:
            yield start, frame


def _lines(cue: Sequence[Word]) -> list[str]:
    return textwrap.wrap(text_of(cue), LINE_CHARACTERS, break_long_words=False)


def _text(cue: Sequence[Word]) -> str:
    return "\n".join(_lines(cue))


def _clock(seconds: float, point: str) -> str:
    milliseconds = round(seconds * 1000)
    minutes, milliseconds = divmod(milliseconds, 60_000)
    return (
        f"{minutes // 60:02d}:{minutes % 60:02d}:{milliseconds // 1000:02d}{point}{milliseconds % 1000:03d}"
    )


def _filled(spans: Sequence[tuple[float, float, str]], until: float) -> Iterator[tuple[float, float, str]]:
    """The spans with empty ones between them, from 0 to ``until`` without a hole: what Praat asks for."""
    time = 0.0
    for start, end, text in spans:
        if start > time:
            yield time, start, ""
        yield start, end, text
        time = end
    if until > time:
        yield time, until, ""


def _tier(number: int, title: str, spans: list[tuple[float, float, str]], until: float) -> Iterator[str]:
    yield f"    item [{number}]:"
    yield '        class = "IntervalTier"'
    yield f'        name = "{title}"'
    yield "        xmin = 0"
    yield f"        xmax = {until:.3f}"
    yield f"        intervals: size = {len(spans)}"
    for place, (start, end, text) in enumerate(spans, 1):
        quoted = text.replace('"', '""')
        yield f"        intervals [{place}]:"
        yield f"            xmin = {start:.3f}"
        yield f"            xmax = {end:.3f}"
        yield f'            text = "{quoted}"'


def _earlier(time: float, delay: float) -> float:
    """``time`` - ``delay``; near 0 a smaller shift, so that tokens keep their order."""
    return max(time - delay, time / 2)


def _within(end: float, start: float, seconds: float) -> float:
    """``end``, at most the end of the recording, unless the token itself begins there."""
    return min(end, seconds) if seconds > start else end


def _seconds(value: float) -> float:
    return round(float(value), 3)


def _probability(value: float) -> float:
    return round(float(value), 4)
