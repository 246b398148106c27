"""Answers that are sent while the network works: server-sent events."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from fastapi.responses import StreamingResponse

from imputer.recognizer import Recognizer
from imputer.server import answers, imputations
from imputer.server.failures import Failure
from imputer.server.forms import TranscriptionRequest
from imputer.server.jobs import Job
from imputer.server.pictures import pictures
from imputer.server.service import Service
from imputer.server.settled_text import SettledText

SILENCE_SECONDS = 15.0  # in a stream, before a comment shows proxies that it is alive
COMMENT = b": waiting\n\n"


def watched(job: Job, *, passes: bool) -> asyncio.Queue:
    """A queue of the events of a job, to be created before the job begins; None is its end."""
    queue: asyncio.Queue = asyncio.Queue()
    if passes:
        job.watch = lambda *seen: queue.put_nowait(("pass", *seen))
    job.on_window = lambda *seen: queue.put_nowait(("window", *seen))
    job.done.add_done_callback(lambda _: queue.put_nowait(None))
    return queue


def response(events: AsyncIterator[bytes]) -> StreamingResponse:
    """Events as an answer that neither caches nor proxies hold back."""
    return StreamingResponse(
        events,
        media_type="text/event-stream",
        headers={"cache-control": "no-store", "x-accel-buffering": "no"},
    )


async def transcription(
    service: Service, parsed: TranscriptionRequest, job: Job, queue: asyncio.Queue
) -> AsyncIterator[bytes]:
    """The text of each window once it is settled, every pass if asked for, and the end."""
    recognizer = service.recognizers[parsed.model]
    settled = SettledText(recognizer)
    async for kind, *seen in _happened(queue):
        if kind == "comment":
            yield COMMENT
        elif kind == "pass":
            yield _pass_event(recognizer, *seen)
        else:
            number, decoded = seen
            text, tokens = settled.add(number, decoded.alignment, decoded.confidence)
            if text:
                yield answers.delta_event(parsed, text, tokens)
    try:
        transcript = await service.transcript(job, job.done.result())
    except Failure as failure:
        yield answers.error_event(failure)
        return
    text, tokens = settled.rest()
    if text:
        yield answers.delta_event(parsed, text, tokens)
    yield answers.done_event(parsed, transcript, job.warnings)
    yield answers.END


def _pass_event(
    recognizer: Recognizer,
    window: int,
    number: int,
    partial: list[int],
    confidence: list[float],
) -> bytes:
    hop_seconds = recognizer.window_frames()[1] * recognizer.frame_seconds
    mask = recognizer.model.mask
    return answers.event(
        "imputer.pass",
        window=window,
        offset=round(window * hop_seconds, 3),
        frame_seconds=recognizer.frame_seconds,
        **{"pass": number},
        alignment=recognizer.symbols(partial),
        confidence=[round(c, 3) for c in confidence],
        committed=[token != mask for token in partial],
    )


async def imputation(
    service: Service, parsed: TranscriptionRequest, outline: dict[str, Any], job: Job, queue: asyncio.Queue
) -> AsyncIterator[bytes]:
    """For the page: the outline, the pictures when they are drawn, every pass of every window, the whole."""
    recognizer = service.recognizers[parsed.model]
    assert job.waveform is not None
    drawing = service.offload(pictures, job.waveform, recognizer.sample_rate)
    drawing.add_done_callback(lambda _: queue.put_nowait(("pictures",)))
    partials: dict[int, list[int]] = {}
    drawn = False
    yield answers.event("imputation.start", **outline)
    async for kind, *seen in _happened(queue):
        if kind == "comment":
            yield COMMENT
        elif kind == "pictures":
            drawn = True
            yield answers.event("imputation.pictures", **drawing.result())
        elif kind == "pass":
            window, number, partial, confidence = seen
            before = partials.get(window, [recognizer.model.mask] * len(partial))
            partials[window] = partial
            changed = imputations.changes(recognizer, before, partial, confidence)
            yield answers.event("imputation.pass", window=window, **{"pass": number}, **changed)
    try:
        windows = job.done.result()
    except Failure as failure:
        yield answers.error_event(failure)
        return
    body = await service.offload(imputations.imputation, recognizer, parsed, outline, windows, job.seconds)
    if not drawn:
        yield answers.event("imputation.pictures", **await drawing)
    yield answers.event("imputation.done", **body)


async def _happened(queue: asyncio.Queue) -> AsyncIterator[tuple]:
    """The events of a queue, up to None; a comment whenever there was none for a while."""
    while True:
        try:
            async with asyncio.timeout(SILENCE_SECONDS):
                item = await queue.get()
        except TimeoutError:
            yield ("comment",)
            continue
        if item is None:
            return
        yield item
