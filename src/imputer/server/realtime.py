"""Live transcription: OpenAI's realtime transcription events over a WebSocket.

A connection has a queue of client events and a stream that processes them. Windows of the stream go through the same
batcher as uploads, one at a time, and take fair turns with them. The queue is bounded in seconds of audio: a client
that sends faster than it is served gets an error and is disconnected, after all settled text was sent.
"""

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass
from typing import Any

import numpy as np
from fastapi import FastAPI, WebSocket
from starlette.websockets import WebSocketDisconnect

from imputer.decoding import Decoded
from imputer.server.failures import Failure, retry_later, shutting_down, unexpected
from imputer.server.items import Items
from imputer.server.live_decoding import LiveDecoder
from imputer.server.service import Service
from imputer.server.sessions import ALIGNMENT, Detection, Session
from imputer.server.websocket import EventSocket, invalid, parse, pcm16
from imputer.streaming import Event, Stream, Window

PIECE_SECONDS = 0.5  # of a long message that are fed at a time: its events are sent meanwhile
LEAST_COMMIT_SECONDS = 0.1  # OpenAI's
TICK_SECONDS = 1.0
SUBPROTOCOL = "realtime"
APPEND, CLEAR = "input_audio_buffer.append", "input_audio_buffer.clear"
BETA_UPDATE = "transcription_session.update"
END = "end"  # not from the client: the last command
POLICY, FAILED, RESTARTING, TRY_LATER = 1008, 1011, 1012, 1013  # close codes

logger = logging.getLogger("imputer.server")


def add_realtime(app: FastAPI, service: Service) -> None:
    """Add the route."""

    @app.websocket("/v1/realtime")
    async def realtime(socket: WebSocket) -> None:
        await Conversation(service, socket).run()


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a conversation ends, and the close code."""

    code: int
    failure: Failure


@dataclass(frozen=True, slots=True)
class Audio:
    """Samples that wait to be fed."""

    samples: np.ndarray
    seconds: float


class Conversation:
    """One connection."""

    def __init__(self, service: Service, socket: WebSocket) -> None:
        self.service, self.socket = service, socket
        self.id = f"sess_{secrets.token_hex(12)}"
        beta = "realtime=v1" in socket.headers.get("openai-beta", "")
        self.session = Session(service.models.default, beta=beta)
        self.events = EventSocket(socket, service.settings.write_seconds)
        self.items = Items(self.events, service.recognizers, self.session)
        self.queue: deque[dict[str, Any] | Audio] = deque()
        self.arrived = asyncio.Event()
        self.buffered = 0.0  # seconds in the queue
        self.received = 0.0  # seconds in all
        self.started = self.last_event = time.monotonic()
        self.crowded_out = False
        self.decoder: LiveDecoder | None = None
        self.stream: Stream | None = None

    def make_room(self) -> None:
        """End soon, to make room for another session."""
        self.crowded_out = True

    async def run(self) -> None:
        """Run until one side ends it."""
        offered = self.socket.scope.get("subprotocols", [])
        await self.socket.accept(subprotocol=SUBPROTOCOL if SUBPROTOCOL in offered else None)
        try:
            await self._talk()
        except Failure as failure:
            await self.events.close(_close_code(failure), failure)
        except WebSocketDisconnect:
            pass
        except Exception as error:
            logger.error("a live session failed", exc_info=error)
            await self.events.close(FAILED, unexpected())
        finally:
            self.service.sessions.leave(self)
            if self.decoder is not None:
                self.decoder.close()

    async def _talk(self) -> None:
        if name := self.socket.query_params.get("model"):
            self._use(Session(self.service.models.find(name), beta=self.session.beta))
        self.service.sessions.enter(self)
        self._open_decoder()
        await self._send_session("created")
        reader, worker = asyncio.ensure_future(self._read()), asyncio.ensure_future(self._work())
        try:
            await asyncio.wait({reader, worker}, return_when=asyncio.FIRST_COMPLETED)
            if not reader.done():
                await worker  # raises: it ends by itself only after an error
            if (ending := reader.result()) is not None:
                await self._end(ending, worker)
        finally:
            reader.cancel()
            worker.cancel()

    async def _end(self, ending: Ending, worker: asyncio.Future) -> None:
        """Settle and send the rest of the decoded text, then close; the queue is dropped."""
        self.queue.clear()
        self.queue.append({"type": END})
        self.arrived.set()
        await worker
        await self.events.close(ending.code, ending.failure)

    # What the client sends.

    async def _read(self) -> Ending | None:
        """Queue messages until the client leaves (None) or there is a reason to end."""
        waiting = asyncio.ensure_future(self.socket.receive())
        try:
            while True:
                done, _ = await asyncio.wait({waiting}, timeout=TICK_SECONDS)
                if done:
                    self.last_event = time.monotonic()
                    message = waiting.result()
                    if message["type"] == "websocket.disconnect":
                        return None
                    await self._take(message)
                    waiting = asyncio.ensure_future(self.socket.receive())
                if ending := self._ending():
                    return ending
        finally:
            waiting.cancel()

    def _ending(self) -> Ending | None:
        """The reason to end the session, if there is one."""
        settings, now = self.service.settings, time.monotonic()
        limit, idle = settings.session_buffer_seconds, settings.session_idle_seconds
        if self.service.draining:
            return Ending(RESTARTING, shutting_down())
        if self.crowded_out:
            return Ending(TRY_LATER, retry_later(429, "too many live sessions", "queue_full", 10))
        if now - self.last_event > idle:
            return Ending(POLICY, Failure(408, f"nothing was sent for {idle:g} s", "idle_timeout"))
        if self.buffered <= limit:
            return None
        if self.received > now - self.started + limit / 2:
            message = f"more than {limit:g} s of audio wait: send it no faster than it is spoken"
            return Ending(POLICY, Failure(429, message, "buffer_overflow"))
        message = f"the server is busy: more than {limit:g} s of audio wait; try again later"
        return Ending(TRY_LATER, Failure(429, message, "queue_full"))

    async def _take(self, message: Any) -> None:
        """Check a message and queue it; errors are sent at once."""
        event: dict[str, Any] = {}
        try:
            event = parse(message)
            self._queue(event)
            self.arrived.set()
        except Failure as failure:
            await self.events.send_error(failure, event)

    def _queue(self, event: dict[str, Any]) -> None:
        kind = event["type"]
        if kind == APPEND:
            samples = pcm16(event.get("audio"))
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
            raise invalid("type", f"unknown event {str(kind)[:80]!r}; there are {takes}")

    # Processing the queue.

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
                await self.events.send_error(failure, command)

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
        return self.items.offset + (self.stream.seconds if self.stream else 0.0)

    async def _drive(self, work: Generator[Window, Decoded, list[Event]]) -> None:
        """Run a generator of the stream, its windows in the network, and send the events."""
        assert self.decoder is not None
        result: Decoded | None = None
        while True:
            window, events = await self.service.offload(_advance, work, result)
            if window is None:
                break
            result = await self.decoder.decode(window)
        self.decoder.job.seconds = self.seconds
        for event in events:
            await self.items.send(event)

    async def _finish(self) -> None:
        """The stream ends: everything settles, and an item that is open is committed."""
        if self.stream is not None:
            await self._drive(self.stream.finishing())
            if self.items.item is not None:
                await self.items.commit(self.seconds, self.seconds)
            self.items.offset, self.stream = self.seconds, None

    async def _update(self, event: dict[str, Any]) -> None:
        beta = event["type"] == BETA_UPDATE
        change = self.session.updated_beta if beta else self.session.updated
        session = change(event.get("session"), self.service.models)
        if session != self.session:
            await self._finish()  # audio before this event used the old settings
            before = self.session.model
            self._use(session)
            if session.model != before:
                self._open_decoder()
        await self._send_session("updated")

    def _use(self, session: Session) -> None:
        self.session = self.items.session = session

    def _open_decoder(self) -> None:
        before, model = self.decoder, self.session.model
        self.decoder = LiveDecoder(self.service.batcher, model, self.service.recognizers[model].sample_rate)
        self.socket.scope["imputer.record"].job = self.decoder.job
        if before is not None:
            before.close()

    async def _commit(self, event: dict[str, Any]) -> None:
        waiting = self.seconds - self.items.committed
        if waiting < LEAST_COMMIT_SECONDS:
            raise Failure(
                400,
                f"there are {1000 * waiting:.0f} ms of audio to commit, less than "
                f"{1000 * LEAST_COMMIT_SECONDS:.0f} ms",
                "input_audio_buffer_commit_empty",
            )
        self.items.open(self.items.committed)
        await self._drive(self._stream().flushing())
        if self.items.item is not None:  # the end of speech may have committed it
            await self.items.commit(self.seconds, self.seconds)

    async def _clear(self, event: dict[str, Any]) -> None:
        if self.stream is not None:
            self.stream.clear()
        self.items.forget(self.seconds)
        await self.events.send("input_audio_buffer.cleared")

    async def _send_session(self, state: str) -> None:
        kind = "transcription_session" if self.session.beta else "session"
        await self.events.send(f"{kind}.{state}", session=self.session.described(self.id))


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


def _close_code(failure: Failure) -> int:
    if failure.code == "shutting_down":
        return RESTARTING
    return {429: TRY_LATER, 503: TRY_LATER}.get(failure.status, FAILED if failure.status >= 500 else POLICY)
