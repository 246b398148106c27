"""Live transcription: OpenAI's realtime transcription events over a WebSocket.

A connection has a queue of what its client sent and a stream that works it off. Windows of the stream go through the
same batcher as uploads, one at a time, and take fair turns with them. The queue is bounded in seconds of audio: a
client that sends faster than it is served for long is told so and disconnected, after all that was settled was sent.
"""

import asyncio
import base64
import binascii
import json
import logging
import math
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from fastapi import FastAPI, WebSocket
from starlette.websockets import WebSocketDisconnect

from imputer.decoding import Decoded
from imputer.server.failures import Failure, shutting_down
from imputer.server.jobs import Job
from imputer.server.service import Service
from imputer.server.sessions import ALIGNMENT, LOGPROBS, PARTIAL, Detection, Session
from imputer.streaming import Event, Frames, Stream, Window
from imputer.streaming.live import OPTIONS
from imputer.transcripts import Word

PIECE_SECONDS = 0.5  # of a long message that are fed at a time: its events are sent meanwhile
LEAST_COMMIT_SECONDS = 0.1  # OpenAI's
TICK_SECONDS = 1.0
SUBPROTOCOL = "realtime"
APPEND, CLEAR = "input_audio_buffer.append", "input_audio_buffer.clear"
BETA_UPDATE = "transcription_session.update"
END = "end"  # not from the client: the last command
TRANSCRIPTION = "conversation.item.input_audio_transcription"
POLICY, FAILED, RESTARTING, TRY_LATER = 1008, 1011, 1012, 1013  # close codes

logger = logging.getLogger("imputer.server")


def add_realtime(app: FastAPI, service: Service) -> None:
    """Put up the route."""

    @app.websocket("/v1/realtime")
    async def realtime(socket: WebSocket) -> None:
        await Conversation(service, socket).run()


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a conversation ends, and the close code; without a failure the client is gone."""

    code: int = 1000
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class Audio:
    """Samples that wait to be fed."""

    samples: np.ndarray
    seconds: float


@dataclass(slots=True)
class Item:
    """A stretch of speech that becomes one item of the conversation."""

    id: str
    start: float  # seconds of the session
    text: str = ""


class Line:
    """A place in the batcher for the windows of one stream, one at a time."""

    def __init__(self, service: Service, model: str) -> None:
        self.batcher = service.batcher
        rate, settings = service.recognizers[model].sample_rate, service.settings
        options = replace(OPTIONS, lm=settings.lm, hotwords=settings.hotwords)
        self.job = Job(model, options, rate, open=lambda job: iter(()))
        self.job.on_window = self._deliver
        self.job.done.add_done_callback(self._failed)
        self.answer: asyncio.Future | None = None
        self.batcher.enrol(self.job)

    async def decode(self, window: Window) -> Decoded:
        self.answer = asyncio.get_running_loop().create_future()
        if self.job.done.done():
            self._failed(self.job.done)
        else:
            self.batcher.push(self.job, window.samples, window.start)
        return await self.answer

    def _deliver(self, number: int, decoded: Decoded) -> None:
        del self.job.results[number]  # hours of them
        if self.answer is not None and not self.answer.done():
            self.answer.set_result(decoded)

    def _failed(self, done: asyncio.Future) -> None:
        error = done.exception() if not done.cancelled() else None
        if self.answer is not None and not self.answer.done():
            self.answer.set_exception(error or Failure(500, "the stream ended", "internal_error"))

    def close(self) -> None:
        self.batcher.cancel(self.job)


class Conversation:
    """One connection, from its acceptance to its end."""

    def __init__(self, service: Service, socket: WebSocket) -> None:
        self.service, self.socket = service, socket
        self.id = f"sess_{secrets.token_hex(12)}"
        self.beta = "realtime=v1" in socket.headers.get("openai-beta", "")
        self.session = Session(service.models.default)
        self.queue: deque[dict[str, Any] | Audio] = deque()
        self.arrived = asyncio.Event()
        self.buffered = 0.0  # seconds in the queue
        self.received = 0.0  # seconds in all
        self.started = time.monotonic()
        self.line: Line | None = None
        self.stream: Stream | None = None
        self.offset = 0.0  # seconds of the session at which the stream began
        self.item: Item | None = None
        self.previous: str | None = None  # the item before
        self.committed = 0.0  # seconds of the session

    async def run(self) -> None:
        """Talk until one side ends it."""
        offered = self.socket.scope.get("subprotocols", [])
        await self.socket.accept(subprotocol=SUBPROTOCOL if SUBPROTOCOL in offered else None)
        tasks: list[asyncio.Future] = []
        try:
            if name := self.socket.query_params.get("model"):
                self.session = Session(self.service.models.find(name))
            self.line = Line(self.service, self.session.model)
            await self._send_session("created")
            reader, worker = tasks = [
                asyncio.ensure_future(self._read()),
                asyncio.ensure_future(self._work()),
            ]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not reader.done():
                await worker  # raises: it ends by itself only when something is wrong
            await self._end(reader.result(), worker)
        except Failure as failure:
            await self._close(Ending(_close_code(failure), failure))
        except WebSocketDisconnect:
            pass
        except Exception as error:
            logger.error("a live session failed", exc_info=error)
            unknown = Failure(500, "something went wrong in the server", code="internal_error")
            await self._close(Ending(FAILED, unknown))
        finally:
            for task in tasks:
                task.cancel()
            if self.line is not None:
                self.line.close()

    async def _end(self, ending: Ending, worker: asyncio.Future) -> None:
        """Settle and send what was heard, then close; what still waits in the queue is dropped."""
        if ending.failure is None:
            return
        self.queue.clear()
        self.queue.append({"type": END})
        self.arrived.set()
        await worker
        await self._close(ending)

    async def _close(self, ending: Ending) -> None:
        assert ending.failure is not None
        try:
            await self._send_error(ending.failure)
            async with asyncio.timeout(self.service.settings.write_seconds):
                await self.socket.close(ending.code, ending.failure.message[:120])
        except (WebSocketDisconnect, RuntimeError, TimeoutError):
            pass  # the client was faster

    # What the client sends.

    async def _read(self) -> Ending:
        """Queue what comes, until the client leaves or breaks a limit."""
        settings = self.service.settings
        last = time.monotonic()
        waiting = asyncio.ensure_future(self.socket.receive())
        try:
            while True:
                done, _ = await asyncio.wait({waiting}, timeout=TICK_SECONDS)
                if self.service.draining:
                    return Ending(RESTARTING, shutting_down())
                if not done:
                    if time.monotonic() - last > settings.realtime_idle_seconds:
                        reason = f"nothing was sent for {settings.realtime_idle_seconds:g} s"
                        return Ending(POLICY, Failure(408, reason, "idle_timeout"))
                    continue
                last = time.monotonic()
                message = waiting.result()
                if message["type"] == "websocket.disconnect":
                    return Ending()
                await self._take(message)
                if self.buffered > settings.realtime_buffer_seconds:
                    return self._overflow()
                waiting = asyncio.ensure_future(self.socket.receive())
        finally:
            waiting.cancel()

    def _overflow(self) -> Ending:
        limit = self.service.settings.realtime_buffer_seconds
        elapsed = time.monotonic() - self.started
        if self.received > elapsed + limit / 2:
            message = f"more than {limit:g} s of audio wait: send it no faster than it is spoken"
            return Ending(POLICY, Failure(429, message, "buffer_overflow"))
        message = f"the server is busy: more than {limit:g} s of audio wait; try again later"
        return Ending(TRY_LATER, Failure(429, message, "queue_full"))

    async def _take(self, message: Any) -> None:
        """Check a message and queue it; what is wrong with it is said at once."""
        event: dict[str, Any] = {}
        try:
            event = _parse(message)
            self._queue(event)
            self.arrived.set()
        except Failure as failure:
            await self._send_error(failure, event)

    def _queue(self, event: dict[str, Any]) -> None:
        kind = event["type"]
        if kind == APPEND:
            samples = _samples(event.get("audio"))
            audio = Audio(samples, len(samples) / self.session.rate)
            self.buffered += audio.seconds
            self.received += audio.seconds
            self.queue.append(audio)
        elif kind in HANDLERS:
            if kind == CLEAR:
                while self.queue and isinstance(self.queue[-1], Audio):
                    self.buffered -= self.queue.pop().seconds  # type: ignore[union-attr]
            self.queue.append(event)
        else:
            takes = ", ".join((APPEND, *HANDLERS))
            raise _invalid("type", f"unknown event {str(kind)[:80]!r}; there are {takes}")

    # What is done about it.

    async def _work(self) -> None:
        while True:
            while not self.queue:
                self.arrived.clear()
                await self.arrived.wait()
            command = self.queue.popleft()
            if isinstance(command, Audio):
                await self._feed(command.samples)
                self.buffered -= command.seconds
                continue
            if command["type"] == END:
                await self._finish()
                return
            try:
                await HANDLERS[command["type"]](self, command)
            except Failure as failure:
                await self._send_error(failure, command)

    async def _feed(self, samples: np.ndarray) -> None:
        size = max(1, round(PIECE_SECONDS * self.session.rate))
        for first in range(0, len(samples), size):
            await self._drive(self._stream().feeding(samples[first : first + size]))

    def _stream(self) -> Stream:
        if self.stream is None:
            session, detection = self.session, self.session.detection or Detection()
            self.stream = Stream(
                self.service.recognizers[session.model],
                sample_rate=session.rate,
                frames=ALIGNMENT in session.include,
                gate=detection.gate(),
                onset=detection.prefix_padding_ms / 1000,
                pause=detection.silence_duration_ms / 1000,
            )
        return self.stream

    @property
    def seconds(self) -> float:
        """Position in the audio of the session."""
        return self.offset + (self.stream.seconds if self.stream else 0.0)

    async def _drive(self, work: Generator[Window, Decoded, list[Event]]) -> None:
        """Run a piece of the stream's work, its windows in the network, and send what comes of it."""
        assert self.line is not None
        result: Decoded | None = None
        while True:
            window, events = await self.service.help(_advance, work, result)
            if window is None:
                break
            result = await self.line.decode(window)
        for event in events:
            await self._tell(event)

    async def _finish(self) -> None:
        """The stream ends: everything settles, and an item that is open is committed."""
        if self.stream is not None:
            await self._drive(self.stream.finishing())
            if self.item is not None:
                await self._commit_item(self.seconds)
            self.offset, self.stream = self.seconds, None

    async def _update(self, event: dict[str, Any]) -> None:
        self.beta = event["type"] == BETA_UPDATE
        change = self.session.updated_beta if self.beta else self.session.updated
        session = change(event.get("session"), self.service.models)
        if session != self.session:
            await self._finish()  # what came so far came with the old settings
            if session.model != self.session.model:
                line = Line(self.service, session.model)
                if self.line is not None:
                    self.line.close()
                self.line = line
            self.session = session
        await self._send_session("updated")

    async def _commit(self, event: dict[str, Any]) -> None:
        waiting = self.seconds - self.committed
        if waiting < LEAST_COMMIT_SECONDS:
            raise Failure(
                400,
                f"there are {1000 * waiting:.0f} ms of audio to commit, less than "
                f"{1000 * LEAST_COMMIT_SECONDS:.0f} ms",
                "input_audio_buffer_commit_empty",
            )
        self._open_item(self.committed)
        await self._drive(self._stream().flushing())
        if self.item is not None:  # the end of speech may have committed it
            await self._commit_item(self.seconds)

    async def _clear(self, event: dict[str, Any]) -> None:
        if self.stream is not None:
            self.stream.clear()
        self.item = None
        self.committed = self.seconds
        await self._send("input_audio_buffer.cleared")

    # What the client is sent.

    async def _tell(self, event: Event | Frames) -> None:
        """What the stream made known, in OpenAI's words."""
        detects = self.session.detection is not None
        if isinstance(event, Frames):
            await self._tell_frames(event)
        elif event.kind == "speech":
            if detects:
                item = self._open_item(self.offset + event.start)
                await self._send(
                    "input_audio_buffer.speech_started", audio_start_ms=_ms(item.start), item_id=item.id
                )
        elif event.kind == "silence":
            if detects and self.item is not None:
                end = self.offset + event.start
                await self._send(
                    "input_audio_buffer.speech_stopped", audio_end_ms=_ms(end), item_id=self.item.id
                )
                await self._commit_item(end)
        elif event.kind == "settled":
            await self._tell_settled(event)
        elif PARTIAL in self.session.include:
            item = self._open_item(self.committed)
            await self._send(PARTIAL, item_id=item.id, text=event.text, words=self._words(event))

    async def _tell_settled(self, event: Event) -> None:
        item = self._open_item(self.committed)
        delta = f" {event.text}" if item.text else event.text
        item.text += delta
        more = {"logprobs": _logprobs(event.words)} if LOGPROBS in self.session.include else {}
        await self._send(
            f"{TRANSCRIPTION}.delta",
            item_id=item.id,
            content_index=0,
            delta=delta,
            words=self._words(event),
            **more,
        )

    def _words(self, event: Event) -> list[dict[str, Any]]:
        return [
            {
                "word": word.text,
                "start": round(self.offset + word.start, 3),
                "end": round(self.offset + word.end, 3),
                "confidence": word.confidence,
            }
            for word in event.words
        ]

    async def _tell_frames(self, event: Frames) -> None:
        recognizer = self.service.recognizers[self.session.model]
        first = round(self.offset / recognizer.frame_seconds)
        await self._send(
            ALIGNMENT,
            first=first + event.first,
            settled=first + event.settled,
            frame_seconds=recognizer.frame_seconds,
            symbols=recognizer.symbols(event.tokens),
            confidence=[round(c, 3) for c in event.confidence],
        )

    def _open_item(self, start: float) -> Item:
        self.item = self.item or Item(f"item_{secrets.token_hex(10)}", start)
        return self.item

    async def _commit_item(self, end: float) -> None:
        assert self.item is not None
        item, self.item = self.item, None
        order = {"item_id": item.id, "previous_item_id": self.previous}
        await self._send("input_audio_buffer.committed", **order)
        content = {"type": "input_audio", "transcript": item.text}
        message = {
            "id": item.id,
            "object": "realtime.item",
            "type": "message",
            "status": "completed",
            "role": "user",
            "content": [content],
        }
        for kind in ("created",) if self.beta else ("added", "done"):
            await self._send(f"conversation.item.{kind}", item=message, previous_item_id=self.previous)
        await self._send(
            f"{TRANSCRIPTION}.completed",
            item_id=item.id,
            content_index=0,
            transcript=item.text,
            usage={"type": "duration", "seconds": round(max(0.0, end - item.start), 3)},
        )
        self.previous, self.committed = item.id, self.seconds

    async def _send_session(self, state: str) -> None:
        if self.beta:
            described = self.session.described_beta(self.id)
            await self._send(f"transcription_session.{state}", session=described)
        else:
            await self._send(f"session.{state}", session=self.session.described(self.id))

    async def _send_error(self, failure: Failure, event: dict[str, Any] | None = None) -> None:
        given = (event or {}).get("event_id")
        blamed = given[:200] if isinstance(given, str) else None
        await self._send("error", error=failure.envelope()["error"] | {"event_id": blamed})

    async def _send(self, kind: str, **fields: Any) -> None:
        """An event; a client that does not take it in time is given up."""
        event = {"type": kind, "event_id": f"event_{secrets.token_hex(10)}", **fields}
        try:
            async with asyncio.timeout(self.service.settings.write_seconds):
                await self.socket.send_text(json.dumps(event))
        except (TimeoutError, RuntimeError) as error:  # RuntimeError: it is closed already
            raise WebSocketDisconnect(1006) from error


HANDLERS: dict[str, Callable[[Conversation, dict[str, Any]], Awaitable[None]]] = {
    "session.update": Conversation._update,
    BETA_UPDATE: Conversation._update,
    "input_audio_buffer.commit": Conversation._commit,
    CLEAR: Conversation._clear,
}


def _advance(
    work: Generator[Window, Decoded, list[Event]], result: Decoded | None
) -> tuple[Window | None, list[Event]]:
    """The next window to decode, or None and the events."""
    try:
        return work.send(result), []  # type: ignore[arg-type]  # None starts it
    except StopIteration as end:
        return None, end.value


def _parse(message: Any) -> dict[str, Any]:
    text = message.get("text")
    if text is None:
        raise _invalid(None, "events are JSON in text messages; audio goes into input_audio_buffer.append")
    try:
        event = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        raise _invalid(None, "the event is not JSON", "invalid_json") from None
    if not isinstance(event, dict) or not isinstance(event.get("type"), str):
        raise _invalid("type", "an event is a JSON object with a type")
    return event


def _samples(audio: Any) -> np.ndarray:
    """(samples,) of base64 PCM16."""
    if not isinstance(audio, str):
        raise _invalid("audio", "audio is text: PCM16 in base64")
    try:
        data = base64.b64decode(audio, validate=True)
    except (binascii.Error, ValueError) as error:
        raise _invalid("audio", f"audio is not base64: {error}") from None
    if len(data) % 2:
        raise _invalid("audio", f"audio has {len(data)} bytes, but PCM16 takes two per sample")
    return np.frombuffer(data, "<i2")


def _invalid(param: str | None, message: str, code: str = "invalid_value") -> Failure:
    return Failure(400, message, code=code, param=param)


def _close_code(failure: Failure) -> int:
    if failure.code == "shutting_down":
        return RESTARTING
    return {429: TRY_LATER, 503: TRY_LATER}.get(failure.status, FAILED if failure.status >= 500 else POLICY)


def _ms(seconds: float) -> int:
    return round(1000 * seconds)


def _logprobs(words: Sequence[Word]) -> list[dict[str, Any]]:
    """One entry per word: the confidence that the model's calibration gives it."""
    return [
        {
            "token": word.text,
            "bytes": list(word.text.encode()),
            "logprob": math.log(max(word.confidence, 1e-9)),
        }
        for word in words
    ]
