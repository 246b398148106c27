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
INCLUDES = ("logprobs", "passes")
MAX_BLOCK_SIZE = 64  # passes
PROMPT_WORDS = 4  # of a phrase in a prompt that counts as a name

# Fields of OpenAI's own models that change nothing here: accepted and ignored.
IGNORED = ("temperature", "chunking_strategy", "user")
LISTS = ("timestamp_granularities", "include", "keywords", "languages", "hotwords")
FIELDS = (
    "file",
    "model",
    "language",
    "response_format",
    *LISTS,
    "prompt",
    "stream",
    "block_size",
    "strategy",
    "lm",
    *IGNORED,
)
# Fields that ask for speakers: without them the answer would be another one.
REFUSED = ("known_speaker_names", "known_speaker_references")

# Names that programs written for OpenAI's service send; they mean the default model.
ALIASES = (
    "whisper-1",
    "gpt-transcribe",
    "gpt-4o-transcribe",
    "gpt-4o-mini-transcribe",
    "gpt-4o-mini-transcribe-2025-12-15",
    "gpt-4o-transcribe-diarize",
)

# The models that come with the package are for one language; of others the server cannot tell.
LANGUAGES = {"english": "en", "digits": "en"}
ENGLISH = ("en", "eng", "english")


@dataclass(frozen=True, slots=True)
class TranscriptionRequest:
    """The fields of a request, checked."""

    model: str
    options: Options
    suggested: tuple[
        str, ...
    ] = ()  # hotwords out of the prompt, which may be ones that the model cannot write
    response_format: str = "json"
    granularities: tuple[str, ...] = ()
    stream: bool = False
    logprobs: bool = False
    passes: bool = False  # stream every pass
    language: str = ""
    task: str = "transcribe"


class Models:
    """The names that requests may use, and what they stand for."""

    def __init__(self, block_sizes: dict[str, int], aliases: dict[str, str] | None = None) -> None:
        self.block_sizes = block_sizes  # of each model by its name; the first is the default
        self.aliases = aliases or {}

    @property
    def default(self) -> str:
        return next(iter(self.block_sizes))

    def find(self, name: str) -> str:
        """The model that a name stands for."""
        if name in self.block_sizes:
            return name
        if name in self.aliases:
            return self.aliases[name]
        if not name or name in ALIASES:
            return self.default
        known = ", ".join((*self.block_sizes, *self.aliases))
        raise Failure(
            404, f"there is no model {name[:80]!r}; there is {known}", code="model_not_found", param="model"
        )


def read_request(
    items: Iterable[tuple[str, str]],
    models: Models,
    task: str = "transcribe",
    *,
    trace: bool = False,
    lm: str | None = "default",
    hotwords: tuple[str, ...] = (),
) -> TranscriptionRequest:
    """The text fields of a form, checked; ``lm`` and ``hotwords`` are the server's, for requests that do not say."""
    fields: dict[str, list[str]] = {}
    for name, value in items:
        name = name.removesuffix("[]").partition("[")[0]  # chunking_strategy[type] is chunking_strategy
        if name in REFUSED:
            raise _bad(name, f"{name} is not supported: no model here tells speakers apart")
        if name not in FIELDS:
            raise unknown_field(name)
        fields.setdefault(name, []).append(value)
    for name, values in fields.items():
        if len(values) > 1 and name not in (*LISTS, "chunking_strategy"):
            raise _bad(name, f"the field {name} was given {len(values)} times")

    def one(name: str, default: str) -> str:
        return fields.get(name, [default])[0].strip() or default

    model = models.find(one("model", ""))
    response_format = _response_format(one("response_format", "json"))
    stream = _boolean("stream", one("stream", "false"))
    if stream and response_format not in STREAMED:
        raise _bad("stream", f"stream=true goes with response_format json or text, not {response_format}")
    granularities = tuple(
        _one_of("timestamp_granularities[]", g, GRANULARITIES)
        for g in fields.get("timestamp_granularities", [])
    )
    include = {_one_of("include[]", value, INCLUDES) for value in fields.get("include", [])}
    if "logprobs" in include and response_format != "json":
        raise _bad("include[]", f"include[]=logprobs goes with response_format json, not {response_format}")
    if "passes" in include and not stream:
        raise _bad("include[]", "include[]=passes goes with stream=true")
    language = _language([one("language", ""), *fields.get("languages", [])], model)
    if task == "translate" and language != "english":
        raise _bad("model", f"{model} cannot translate: only models for English can, from English")
    options = Options(
        _block_size(one("block_size", str(models.block_sizes[model]))),
        _one_of("strategy", one("strategy", "block"), tuple(STRATEGIES)),
        trace=trace,
        lm=lm if _one_of("lm", one("lm", "default"), ("default", "none")) == "default" else None,
        hotwords=(*hotwords, *_terms([*fields.get("keywords", []), *fields.get("hotwords", [])])),
    )
    return TranscriptionRequest(
        model=model,
        options=options,
        suggested=_names(one("prompt", "")),
        response_format=response_format,
        granularities=granularities,
        stream=stream,
        logprobs="logprobs" in include,
        passes="passes" in include,
        language=language,
        task=task,
    )


def _terms(given: Iterable[str]) -> list[str]:
    """Words and phrases, several in one field with commas between."""
    return [term.strip() for text in given for term in text.split(",") if term.strip()]


def _names(prompt: str) -> tuple[str, ...]:
    """Of OpenAI's prompt, the short phrases in letters alone: names and terms, as its own guide lists them."""
    phrases = (plain(part) for part in re.split(r"[,;.!?:\n]", prompt))
    short = (one for one in phrases if 0 < len(one.split()) <= PROMPT_WORDS)
    return tuple(one for one in short if re.fullmatch("[a-z' ]+", one))


def unknown_field(name: str) -> Failure:
    """No such field, and which one may have been meant."""
    close = difflib.get_close_matches(name, FIELDS, n=1)
    hint = f"; did you mean {close[0]}?" if close else f"; there are {', '.join(FIELDS)}"
    return _bad(name[:80], f"unknown field {name[:80]!r}{hint}")


def _response_format(value: str) -> str:
    if value == "diarized_json":
        raise _bad("response_format", "diarized_json is not supported: no model here tells speakers apart")
    return _one_of("response_format", value, FORMATS)


def _language(names: Sequence[str], model: str) -> str:
    """The language of the answer; en, en_US, eng and auto are all right for an English model."""
    asked = [name.strip().lower().replace("_", "-") for name in names]
    asked = [name for name in asked if name and name != "auto"]
    if any(len(name) > 40 for name in asked):
        raise _bad("language", "language is a code such as en")
    if LANGUAGES.get(model) == "en":
        if asked and not any(name.split("-")[0] in ENGLISH for name in asked):
            raise _bad("language", f"the model {model} is for English (en), not {', '.join(asked)[:80]!r}")
        return "english"
    return asked[0] if asked else "unknown"


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
    digits = value.lstrip("0")
    if (
        not (value.isascii() and value.isdecimal())
        or len(digits) > 3
        or not 1 <= int(digits or 0) <= MAX_BLOCK_SIZE
    ):
        raise _bad("block_size", f"block_size is {value[:80]!r}, but it takes 1 to {MAX_BLOCK_SIZE}")
    return int(digits)


def _bad(param: str, message: str) -> Failure:
    return Failure(400, message, code="invalid_value", param=param)


# Answers.


def answer(request: TranscriptionRequest, transcript: Transcript, name: str) -> tuple[str, str]:
    """Body and content type of an answer that is not streamed."""
    if request.response_format == "text":
        return transcripts.txt(transcript, name), "text/plain; charset=utf-8"
    if request.response_format == "srt":
        return transcripts.srt(transcript, name), "application/x-subrip; charset=utf-8"
    if request.response_format == "vtt":
        return transcripts.vtt(transcript, name), "text/vtt; charset=utf-8"
    if request.response_format == "verbose_json":
        return dumps(verbose(request, transcript)), "application/json"
    body: dict[str, Any] = {"text": transcript.text, "usage": _usage(transcript)}
    body |= _times(request, transcript)
    if request.logprobs:
        body["logprobs"] = logprobs(transcript.tokens)
    return dumps(body), "application/json"


def verbose(request: TranscriptionRequest, transcript: Transcript) -> dict[str, Any]:
    """OpenAI's verbose_json; no_speech_prob, temperature and seek are fields of its model and always 0."""
    body: dict[str, Any] = {
        "task": request.task,
        "language": request.language,
        "duration": transcript.seconds,
        "text": transcript.text,
        "usage": _usage(transcript),
    }
    times = _times(request, transcript)
    return body | (times or {"segments": _segments(transcript)})


def _times(request: TranscriptionRequest, transcript: Transcript) -> dict[str, Any]:
    """Words and segments with their times, as far as they were asked for."""
    times: dict[str, Any] = {}
    if "word" in request.granularities:
        times["words"] = [
            {"word": word.text, "start": word.start, "end": word.end, "confidence": word.confidence}
            for word in transcript.words
        ]
    if "segment" in request.granularities:
        times["segments"] = _segments(transcript)
    return times


def _segments(transcript: Transcript) -> list[dict[str, Any]]:
    cues = transcripts.cues(transcript.words)
    return [_segment(number, cue, transcript.tokens) for number, cue in enumerate(cues)]


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


END = b"data: [DONE]\n\n"


def done_event(request: TranscriptionRequest, transcript: Transcript) -> bytes:
    """The last event of a stream: all of the text, and what was asked for beside it."""
    more = _times(request, transcript)
    if request.logprobs:
        more["logprobs"] = logprobs(transcript.tokens)
    return event("transcript.text.done", text=transcript.text, usage=_token_usage(transcript), **more)


def _token_usage(transcript: Transcript) -> dict[str, Any]:
    """OpenAI's streams count tokens: here frames in, tokens out."""
    frames = round(transcript.seconds / transcript.frame_seconds) if transcript.frame_seconds else 0
    return {
        "type": "tokens",
        "input_tokens": frames,
        "output_tokens": len(transcript.tokens),
        "total_tokens": frames + len(transcript.tokens),
        "input_token_details": {"audio_tokens": frames, "text_tokens": 0},
    }


def delta_event(request: TranscriptionRequest, text: str, tokens: Sequence[Token]) -> bytes:
    more = {"logprobs": logprobs(tokens)} if request.logprobs else {}
    return event("transcript.text.delta", delta=text, **more)


class SettledText:
    """The words that no later window can change, as deltas that add up to the final text.

    Windows are added in any order. What precedes the overlap with the next window is settled; its last word may
    still grow, so it waits for the next word to begin. Work per window does not grow with the recording.
    """

    def __init__(self, recognizer: Recognizer) -> None:
        self.recognizer = recognizer
        self.hop = recognizer.window_frames()[1]
        self.early: dict[int, tuple[list[int], list[float]]] = {}  # windows whose predecessors are not there
        self.next = 0
        self.last: tuple[list[int], list[float]] | None = None  # the window before ``next``
        self.start = 0  # frame of ``last`` from which on it counts
        self.open: tuple[list[int], list[float]] = ([], [])  # frames that are settled and not yet reported
        self.reported = False

    def add(self, number: int, alignment: list[int], confidence: list[float]) -> tuple[str, list[Token]]:
        """What a window adds to the settled text."""
        self.early[number] = alignment, confidence
        while self.next in self.early:
            self._follow(self.early.pop(self.next))
            self.next += 1
        return self._report(last=False)

    def rest(self) -> tuple[str, list[Token]]:
        """What is left when the last window is there."""
        if self.last is not None:
            self._settle(len(self.last[0]))
        return self._report(last=True)

    def _follow(self, window: tuple[list[int], list[float]]) -> None:
        if self.last is not None:
            before, now = self.last[0], window[0]
            overlap = min(len(before) - self.hop, len(now))
            blank = self.recognizer.model.blank
            handover = windows.seam(before[self.hop : self.hop + overlap], now[:overlap], blank)
            self._settle(self.hop + handover)
            self.start = handover
        self.last = window
        self._settle(self.hop)  # the next window takes over here at the earliest

    def _settle(self, frame: int) -> None:
        assert self.last is not None
        self.open[0].extend(self.last[0][self.start : frame])
        self.open[1].extend(self.last[1][self.start : frame])
        self.start = max(self.start, min(frame, len(self.last[0])))

    def _report(self, last: bool) -> tuple[str, list[Token]]:
        """The words in the open frames, but for the last unless there are no more frames."""
        alignment, confidence = self.open
        seconds = len(alignment) * self.recognizer.frame_seconds
        found = self.recognizer.transcript(Decoded(alignment, confidence, 0), seconds)
        tokens = found.tokens
        if last:
            kept, end = tokens, len(alignment)
        else:
            starts = [n for n, t in enumerate(tokens) if t.piece.startswith(transcripts.WORD_MARK)]
            if not starts:
                return "", []
            kept, end = tokens[: starts[-1]], tokens[starts[-1]].frame
        words = transcripts.words_of(kept, seconds)
        if not words:
            return "", []
        self.open = alignment[end:], confidence[end:]
        lead = " " if self.reported else ""
        self.reported = True
        return lead + " ".join(word.text for word in words), kept


# The page.


DOWNLOADS = ("txt", "srt", "vtt", "json", "ctm")


def outline(
    recognizer: Recognizer, request: TranscriptionRequest, name: str, waveform: np.ndarray
) -> dict[str, Any]:
    """What is known of an imputation before its first pass; counts of frames are estimates."""
    hop = recognizer.window_frames()[1]
    per_frame = recognizer.sample_rate * recognizer.frame_seconds
    return {
        "object": "imputation",
        "model": request.model,
        "name": name,
        "seconds": round(len(waveform) / recognizer.sample_rate, 3),
        "frame_seconds": recognizer.frame_seconds,
        "frames": max(1, round(len(waveform) / per_frame)),
        "windows": [
            {"first": number * hop, "frames": max(1, round(len(samples) / per_frame))}
            for number, samples in enumerate(recognizer.cut(waveform))
        ],
        "block_size": request.options.block_size,
        "strategy": request.options.strategy,
        "merge_repeats": recognizer.model.merge_repeats,
        "blank": transcripts.BLANK,
        "mask": transcripts.MASK,
    }


def imputation(
    recognizer: Recognizer,
    request: TranscriptionRequest,
    outline: dict[str, Any],
    windows: Sequence[Decoded],
    seconds: float,
) -> dict[str, Any]:
    """The outline completed: the passes as changes, greedy CTC beside them, texts to download."""
    decoded = recognizer.join(windows)
    assert decoded.greedy is not None
    transcript = recognizer.transcript(replace(decoded, trace=None), seconds)
    greedy = recognizer.transcript(decoded.greedy, seconds)
    return outline | {
        "text": transcript.text,
        "seconds": transcript.seconds,
        "frames": len(decoded.alignment),
        "block_starts": recognizer.block_starts(windows, request.options),
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
