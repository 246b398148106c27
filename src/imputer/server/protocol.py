"""OpenAI's transcription protocol: the fields of a request, the formats of an answer, the events of a stream."""

import difflib
import json
import math
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from imputer import transcripts
from imputer.audio import windows
from imputer.data.text import plain
from imputer.decoding import STRATEGIES, Decoded, Options
from imputer.recognizer import Recognizer
from imputer.server.failures import Failure
from imputer.transcripts import Token, Transcript, Word

FORMATS = ("json", "text", "srt", "vtt", "verbose_json")
STREAMED = ("json", "text")
GRANULARITIES = ("word", "segment")
PROMPT_WORDS = 4  # of a phrase in a prompt that counts as a name
MAX_BLOCK_SIZE = 64  # passes; a batch holds up all others for as long as it runs

# Fields of OpenAI's own models that have no meaning here: taken, and left alone.
IGNORED = ("temperature", "chunking_strategy", "user")
FIELDS = (
    "file",
    "model",
    "language",
    "response_format",
    "timestamp_granularities",
    "include",
    "stream",
    "block_size",
    "strategy",
    "lm",
    "keywords",
    "prompt",
    *IGNORED,
)

# Names that programs written for OpenAI's service ask for; they get the default model.
ALIASES = ("whisper-1", "gpt-4o-transcribe", "gpt-4o-mini-transcribe")

# Models that come with the package know one language; of others the server cannot tell.
LANGUAGES = {"english": "en", "digits": "en"}
ENGLISH = ("en", "english")

# Strategies that take back what they committed: until the last pass nothing of the text is settled.
REVISING = ("annealing", "annealing_random")


@dataclass(frozen=True, slots=True)
class TranscriptionRequest:
    """What a client asks for, checked."""

    model: str
    options: Options
    response_format: str = "json"
    granularities: tuple[str, ...] = ("segment",)
    stream: bool = False
    logprobs: bool = False
    language: str = ""


def parse(
    items: Iterable[tuple[str, str]],
    default_block_sizes: dict[str, int],
    *,
    lm: str | None = "default",
    hotwords: tuple[str, ...] = (),
) -> TranscriptionRequest:
    """The text fields of a form, checked; the first known model is the default.

    ``lm`` and ``hotwords`` are the server's own, for requests that do not say.
    """
    fields: dict[str, list[str]] = {}
    for name, value in items:
        name = name.removesuffix("[]")
        if name not in FIELDS:
            raise unknown_field(name)
        fields.setdefault(name, []).append(value)
    several = [name for name, values in fields.items() if len(values) > 1 and not _is_list(name)]
    if several:
        raise _bad(several[0], f"the field {several[0]} was given {len(fields[several[0]])} times")

    def one(name: str, default: str) -> str:
        return fields.get(name, [default])[0].strip() or default

    model = _model(one("model", ""), list(default_block_sizes))
    response_format = _one_of("response_format", one("response_format", "json"), FORMATS)
    stream = _boolean("stream", one("stream", "false"))
    if stream and response_format not in STREAMED:
        raise _bad("stream", f"stream=true goes with response_format json or text, not {response_format}")
    granularities = tuple(
        _one_of("timestamp_granularities[]", g, GRANULARITIES)
        for g in fields.get("timestamp_granularities", [])
    )
    if granularities and response_format != "verbose_json":
        raise _bad(
            "timestamp_granularities[]",
            f"timestamp_granularities[] goes with response_format verbose_json, not {response_format}",
        )
    include = [_one_of("include[]", value, ("logprobs",)) for value in fields.get("include", [])]
    if include and response_format != "json":
        raise _bad("include[]", f"include[] goes with response_format json, not {response_format}")
    return TranscriptionRequest(
        model=model,
        options=Options(
            _block_size(one("block_size", str(default_block_sizes[model]))),
            _one_of("strategy", one("strategy", "block"), tuple(STRATEGIES)),
            lm=lm if _one_of("lm", one("lm", "default"), ("default", "none")) == "default" else None,
            hotwords=(*hotwords, *_keywords(one("keywords", "")), *_names(one("prompt", ""))),
        ),
        response_format=response_format,
        granularities=granularities or ("segment",),
        stream=stream,
        logprobs=bool(include),
        language=_language(one("language", ""), model),
    )


def _keywords(given: str) -> list[str]:
    """Words and phrases with commas between."""
    return [word.strip() for word in given.split(",") if word.strip()]


def _names(prompt: str) -> list[str]:
    """Of OpenAI's prompt, the short phrases in letters alone: names and terms, as its own guide lists them."""
    phrases = (plain(part) for part in re.split(r"[,;.!?:\n]", prompt))
    return [one for one in phrases if 0 < len(one.split()) <= PROMPT_WORDS and re.fullmatch("[a-z' ]+", one)]


def unknown_field(name: str) -> Failure:
    """No such field, and which one may have been meant."""
    close = difflib.get_close_matches(name, FIELDS, n=1)
    hint = f"; did you mean {close[0]}?" if close else f"; there are {', '.join(FIELDS)}"
    return _bad(name[:80], f"unknown field {name[:80]!r}{hint}")


def _is_list(name: str) -> bool:
    return name in ("timestamp_granularities", "include")


def _model(name: str, known: list[str]) -> str:
    if not name or name in ALIASES:
        return known[0]
    if name not in known:
        raise Failure(
            404,
            f"there is no model {name[:80]!r} here; there is {', '.join(known)}",
            code="model_not_found",
            param="model",
        )
    return name


def _language(name: str, model: str) -> str:
    name = name.lower()
    if len(name) > 40:
        raise _bad("language", "language is a code such as en")
    if LANGUAGES.get(model) == "en":
        if name and name.split("-")[0] not in ENGLISH:
            raise _bad("language", f"the model {model} knows English (en), not {name!r}")
        return "english"
    return name or "unknown"


def _one_of(field: str, value: str, known: Sequence[str]) -> str:
    if value not in known:
        raise _bad(field, f"{field} is {value[:80]!r}, but it takes {', '.join(known)}")
    return value


def _boolean(field: str, value: str) -> bool:
    known = {"true": True, "1": True, "false": False, "0": False}
    if value.lower() not in known:
        raise _bad(field, f"{field} is {value[:80]!r}, but it takes true or false")
    return known[value.lower()]


def _block_size(value: str) -> int:
    if not value.isdecimal() or not 1 <= int(value[:9]) <= MAX_BLOCK_SIZE:
        raise _bad("block_size", f"block_size is {value[:80]!r}, but it takes 1 to {MAX_BLOCK_SIZE}")
    return int(value)


def _bad(param: str, message: str) -> Failure:
    return Failure(400, message, code="invalid_value", param=param)


# Answers.


def answer(asked: TranscriptionRequest, transcript: Transcript, name: str) -> tuple[str, str]:
    """Body and content type of an answer that is not streamed."""
    if asked.response_format == "text":
        return transcripts.txt(transcript, name), "text/plain; charset=utf-8"
    if asked.response_format == "srt":
        return transcripts.srt(transcript, name), "application/x-subrip; charset=utf-8"
    if asked.response_format == "vtt":
        return transcripts.vtt(transcript, name), "text/vtt; charset=utf-8"
    if asked.response_format == "verbose_json":
        return dumps(verbose(asked, transcript)), "application/json"
    body: dict[str, Any] = {"text": transcript.text, "usage": _usage(transcript)}
    if asked.logprobs:
        body["logprobs"] = logprobs(transcript.tokens)
    return dumps(body), "application/json"


def verbose(asked: TranscriptionRequest, transcript: Transcript) -> dict[str, Any]:
    """OpenAI's verbose_json; no_speech_prob, temperature and seek are fields of its model and always 0."""
    body: dict[str, Any] = {
        "task": "transcribe",
        "language": asked.language,
        "duration": transcript.seconds,
        "text": transcript.text,
        "usage": _usage(transcript),
    }
    if "word" in asked.granularities:
        body["words"] = [
            {"word": word.text, "start": word.start, "end": word.end, "confidence": word.confidence}
            for word in transcript.words
        ]
    if "segment" in asked.granularities:
        body["segments"] = [
            _segment(number, cue, transcript.tokens)
            for number, cue in enumerate(transcripts.cues(transcript.words))
        ]
    return body


def _segment(number: int, words: list[Word], tokens: list[Token]) -> dict[str, Any]:
    start, end = words[0].start, words[-1].end
    inside = [_log(token.confidence) for token in tokens if start <= token.start < max(end, start + 1e-3)]
    text = " ".join(word.text for word in words)
    packed = text.encode()
    return {
        "id": number,
        "seek": 0,
        "start": start,
        "end": end,
        "text": text,
        "tokens": [],
        "temperature": 0.0,
        "avg_logprob": round(sum(inside) / max(len(inside), 1), 4),
        "compression_ratio": round(len(packed) / len(zlib.compress(packed)), 3),
        "no_speech_prob": 0.0,
    }


def logprobs(tokens: Sequence[Token]) -> list[dict[str, Any]]:
    """Each token with the logarithm of its confidence, as OpenAI's ``include[]=logprobs`` gives them."""
    texts = [token.piece.replace(transcripts.WORD_MARK, " ") for token in tokens]
    return [
        {"token": text, "bytes": list(text.encode()), "logprob": _log(token.confidence)}
        for text, token in zip(texts, tokens, strict=True)
    ]


def _log(confidence: float) -> float:
    return round(math.log(max(confidence, 1e-5)), 4)


def _usage(transcript: Transcript) -> dict[str, Any]:
    return {"type": "duration", "seconds": transcript.seconds}


# Streams.


def event(kind: str, **fields: Any) -> bytes:
    """A server-sent event."""
    return f"event: {kind}\ndata: {dumps({'type': kind, **fields})}\n\n".encode()


def error_event(failure: Failure) -> bytes:
    """The end of a stream that failed; OpenAI's client raises it as an error."""
    return f"event: error\ndata: {dumps(failure.envelope())}\n\n".encode()


class Settled:
    """The words that no later pass can change, as deltas that add up to the final text.

    An Imputer does not write from left to right. What is settled is what stands before the first masked frame
    of the first window that is not done; its last word may still grow, so it waits for the next to begin.
    """

    def __init__(self, recognizer: Recognizer, count: int, revising: bool) -> None:
        self.recognizer, self.revising = recognizer, revising
        self.hop = recognizer.window_frames()[1]
        self.pieces: list[Decoded | None] = [None] * count
        self.said = 0

    def delta(self, window: int, partial: list[int], confidence: list[float]) -> tuple[str, list[Token]]:
        """What a pass over a window adds to the settled text."""
        if self.revising:
            return "", []
        mask = self.recognizer.model.mask
        settled = partial.index(mask) if mask in partial else len(partial)
        if settled < len(partial) and len(self.pieces) > 1:
            return "", []  # where a window hands over to the next is known when both are whole
        self.pieces[window] = Decoded(partial[:settled], confidence[:settled], 0)
        known = self._known()
        if known is None:
            return "", []
        said = self.recognizer.transcript(known, len(known.alignment) * self.recognizer.frame_seconds)
        return self._new(said, said.words[:-1])

    def rest(self, transcript: Transcript) -> tuple[str, list[Token]]:
        """What is left when all is done."""
        return self._new(transcript, transcript.words)

    def _known(self) -> Decoded | None:
        done = [piece for piece in self.pieces[: self._contiguous()] if piece is not None]
        if not done:
            return None
        piece = windows.join(done, self.hop, self.recognizer.model.blank)
        if len(done) < len(self.pieces):  # the next window may take over anywhere in the overlap
            upto = len(done) * self.hop
            return Decoded(piece.alignment[:upto], piece.confidence[:upto], 0)
        return piece

    def _contiguous(self) -> int:
        return next((n for n, piece in enumerate(self.pieces) if piece is None), len(self.pieces))

    def _new(self, transcript: Transcript, words: Sequence[Word]) -> tuple[str, list[Token]]:
        fresh = words[self.said :]
        if not fresh:
            return "", []
        text = " ".join(word.text for word in fresh)
        tokens = [token for token in transcript.tokens if fresh[0].start <= token.start < fresh[-1].end]
        lead = " " if self.said else ""
        self.said += len(fresh)
        return lead + text, tokens


# The page.

DOWNLOADS = ("txt", "srt", "vtt", "json", "ctm")


def outline(
    recognizer: Recognizer,
    asked: TranscriptionRequest,
    name: str,
    seconds: float,
    waveforms: Sequence[np.ndarray],
) -> dict[str, Any]:
    """What is known of an imputation before its first pass; counts of frames are estimates."""
    hop = recognizer.window_frames()[1]
    per_frame = recognizer.sample_rate * recognizer.frame_seconds
    return {
        "object": "imputation",
        "model": asked.model,
        "name": name,
        "seconds": round(seconds, 3),
        "frame_seconds": recognizer.frame_seconds,
        "frames": max(1, round(seconds / recognizer.frame_seconds)),
        "windows": [
            {"first": number * hop, "frames": max(1, round(len(samples) / per_frame))}
            for number, samples in enumerate(waveforms)
        ],
        "block_size": asked.options.block_size,
        "strategy": asked.options.strategy,
        "merge_repeats": recognizer.model.merge_repeats,
        "blank": transcripts.BLANK,
        "mask": transcripts.MASK,
    }


def imputation(
    recognizer: Recognizer,
    asked: TranscriptionRequest,
    outline: dict[str, Any],
    windows: Sequence[Decoded],
) -> dict[str, Any]:
    """The outline completed: the passes as changes, greedy CTC beside them, texts to download."""
    decoded = recognizer.join(windows)
    assert decoded.greedy is not None
    transcript = recognizer.transcript(replace(decoded, trace=None), outline["seconds"])
    greedy = recognizer.transcript(decoded.greedy, outline["seconds"])
    return outline | {
        "text": transcript.text,
        "frames": len(decoded.alignment),
        "block_starts": recognizer.block_starts(windows, asked.options),
        "words": [word(item) for item in transcript.words],
        "passes": list(_changes(recognizer, decoded)),
        "greedy": {
            "text": greedy.text,
            "words": [word(item) for item in greedy.words],
            "symbols": recognizer.symbols(decoded.greedy.alignment),
            "confidence": [round(c, 3) for c in decoded.greedy.confidence],
        },
        "formats": {kind: transcripts.FORMATS[kind](transcript, outline["name"]) for kind in DOWNLOADS},
    }


def word(item: Word) -> dict[str, Any]:
    """A word as plain values."""
    return {"text": item.text, "start": item.start, "end": item.end, "confidence": item.confidence}


def _changes(recognizer: Recognizer, decoded: Decoded) -> Iterator[dict[str, Any]]:
    """Of each pass: what it changed."""
    before: list[int] = [recognizer.model.mask] * len(decoded.alignment)
    for row, confidence in zip(decoded.trace or [], decoded.trace_confidence or [], strict=True):
        yield changes(recognizer, before, row, confidence)
        before = row


def changes(
    recognizer: Recognizer, before: Sequence[int], after: Sequence[int], confidence: Sequence[float]
) -> dict[str, Any]:
    """The frames that a pass changed, and their symbols and confidences after it."""
    frames = [frame for frame, (old, new) in enumerate(zip(before, after, strict=True)) if old != new]
    return {
        "frames": frames,
        "symbols": recognizer.symbols([after[frame] for frame in frames]),
        "confidence": [round(confidence[frame], 3) for frame in frames],
    }


def dumps(value: Any) -> str:
    """JSON as it goes over the wire."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
