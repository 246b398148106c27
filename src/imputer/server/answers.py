"""Transcripts in the formats of OpenAI's API: answers, and events of a stream."""

import json
import math
import zlib
from collections.abc import Sequence
from typing import Any

from imputer import transcripts
from imputer.server.failures import Failure
from imputer.server.forms import TranscriptionRequest
from imputer.transcripts import Token, Transcript, Word

END = b"data: [DONE]\n\n"


def answer(
    request: TranscriptionRequest, transcript: Transcript, name: str, warnings: Sequence[str] = ()
) -> tuple[str, str]:
    """Body and content type of an answer that is not streamed."""
    noted = {"warnings": list(warnings)} if warnings else {}
    if request.response_format == "text":
        return transcripts.txt(transcript, name), "text/plain; charset=utf-8"
    if request.response_format == "srt":
        return transcripts.srt(transcript, name), "application/x-subrip; charset=utf-8"
    if request.response_format == "vtt":
        return transcripts.vtt(transcript, name), "text/vtt; charset=utf-8"
    if request.response_format == "verbose_json":
        return dumps(verbose(request, transcript) | noted), "application/json"
    body: dict[str, Any] = {"text": transcript.text, "usage": _usage(transcript)}
    body |= _times(request, transcript)
    if request.logprobs:
        body["logprobs"] = logprobs(transcript.tokens)
    return dumps(body | noted), "application/json"


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
    text = transcripts.text_of(words)
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


def done_event(request: TranscriptionRequest, transcript: Transcript, warnings: Sequence[str] = ()) -> bytes:
    """The last event of a stream: all of the text, and what was asked for beside it."""
    more = _times(request, transcript)
    if warnings:
        more["warnings"] = list(warnings)
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


def dumps(value: Any) -> str:
    """JSON as it goes over the wire."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
