"""Events of a stream as items of OpenAI's conversations."""

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from imputer.recognizer import Recognizer
from imputer.server.sessions import ALIGNMENT, LOGPROBS, PARTIAL, Session
from imputer.server.websocket import EventSocket
from imputer.streaming import Event, Frames
from imputer.transcripts import Word

TRANSCRIPTION = "conversation.item.input_audio_transcription"


@dataclass(slots=True)
class Item:
    """A stretch of speech that becomes one item of the conversation."""

    id: str
    start: float  # seconds of the session
    text: str = ""


class Items:
    """The items of one session, sent to its client as they grow."""

    def __init__(self, socket: EventSocket, recognizers: Mapping[str, Recognizer], session: Session) -> None:
        self.socket, self.recognizers, self.session = socket, recognizers, session
        self.offset = 0.0  # seconds of the session at which the stream began
        self.item: Item | None = None
        self.previous: str | None = None  # the item before
        self.committed = 0.0  # seconds of the session

    def forget(self, now: float) -> None:
        """Drop the open item, and all audio before ``now``."""
        self.item, self.committed = None, now

    async def send(self, event: Event | Frames) -> None:
        """Send the events of the stream as OpenAI's events."""
        detects = self.session.detection is not None
        if isinstance(event, Frames):
            await self._send_frames(event)
        elif event.kind == "speech":
            if detects:
                item = self.open(self.offset + event.start)
                await self.socket.send(
                    "input_audio_buffer.speech_started", audio_start_ms=_ms(item.start), item_id=item.id
                )
        elif event.kind == "silence":
            if detects and self.item is not None:
                end = self.offset + event.start
                await self.socket.send(
                    "input_audio_buffer.speech_stopped", audio_end_ms=_ms(end), item_id=self.item.id
                )
                await self.commit(end, self.offset + event.time)
        elif event.kind == "settled":
            await self._send_settled(event)
        elif PARTIAL in self.session.include:
            item = self.open(self.committed)
            await self.socket.send(PARTIAL, item_id=item.id, text=event.text, words=self._words(event))

    async def _send_settled(self, event: Event) -> None:
        item = self.open(self.committed)
        delta = f" {event.text}" if item.text else event.text
        item.text += delta
        more = {"logprobs": _logprobs(event.words)} if LOGPROBS in self.session.include else {}
        await self.socket.send(
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

    async def _send_frames(self, event: Frames) -> None:
        recognizer = self.recognizers[self.session.model]
        first = round(self.offset / recognizer.frame_seconds)
        await self.socket.send(
            ALIGNMENT,
            first=first + event.first,
            settled=first + event.settled,
            frame_seconds=recognizer.frame_seconds,
            symbols=recognizer.symbols(event.tokens),
            confidence=[round(c, 3) for c in event.confidence],
        )

    def open(self, start: float) -> Item:
        """The open item; a new one begins at ``start``."""
        self.item = self.item or Item(f"item_{secrets.token_hex(10)}", start)
        return self.item

    async def commit(self, end: float, now: float) -> None:
        """End the open item at ``end``; what follows ``now``, the position in the audio, belongs to the next."""
        assert self.item is not None
        item, self.item = self.item, None
        order = {"item_id": item.id, "previous_item_id": self.previous}
        await self.socket.send("input_audio_buffer.committed", **order)
        content = {"type": "input_audio", "transcript": item.text}
        message = {
            "id": item.id,
            "object": "realtime.item",
            "type": "message",
            "status": "completed",
            "role": "user",
            "content": [content],
        }
        for kind in ("created",) if self.session.beta else ("added", "done"):
            await self.socket.send(f"conversation.item.{kind}", item=message, previous_item_id=self.previous)
        await self.socket.send(
            f"{TRANSCRIPTION}.completed",
            item_id=item.id,
            content_index=0,
            transcript=item.text,
            usage={"type": "duration", "seconds": round(max(0.0, end - item.start), 3)},
        )
        self.previous, self.committed = item.id, now


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
