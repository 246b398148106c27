"""The WebSocket of a live session: events in JSON, both ways."""

import asyncio
import base64
import binascii
import json
import secrets
from typing import Any

import numpy as np
from fastapi import WebSocket
from starlette.websockets import WebSocketDisconnect

from imputer.server.failures import Failure

REASON_CHARACTERS = 120  # of a close frame, which has room for 123 bytes


class EventSocket:
    """Sends events; a client that does not read one in time is disconnected."""

    def __init__(self, socket: WebSocket, write_seconds: float) -> None:
        self.socket, self.write_seconds = socket, write_seconds

    async def send(self, kind: str, **fields: Any) -> None:
        event = {"type": kind, "event_id": f"event_{secrets.token_hex(10)}", **fields}
        try:
            async with asyncio.timeout(self.write_seconds):
                await self.socket.send_text(json.dumps(event))
        except (TimeoutError, RuntimeError) as error:  # RuntimeError: it is closed already
            raise WebSocketDisconnect(1006) from error

    async def send_error(self, failure: Failure, event: dict[str, Any] | None = None) -> None:
        """Send an error about an event of the client, or about the session."""
        given = (event or {}).get("event_id")
        blamed = given[:200] if isinstance(given, str) else None
        await self.send("error", error=failure.envelope()["error"] | {"event_id": blamed})

    async def close(self, code: int, failure: Failure) -> None:
        """Send the reason, and close."""
        try:
            await self.send_error(failure)
            async with asyncio.timeout(self.write_seconds):
                await self.socket.close(code, failure.message[:REASON_CHARACTERS])
        except (WebSocketDisconnect, RuntimeError, TimeoutError):
            pass  # the client closed it first


def parse(message: Any) -> dict[str, Any]:
    """The event in a message."""
    text = message.get("text")
    if text is None:
        raise invalid(None, "events are JSON in text messages; audio goes into input_audio_buffer.append")
    try:
        event = json.loads(text)
    except (ValueError, RecursionError):  # also of a number with thousands of digits
        raise invalid(None, "the event is not JSON", "invalid_json") from None
    if not isinstance(event, dict) or not isinstance(event.get("type"), str):
        raise invalid("type", "an event is a JSON object with a type")
    return event


def pcm16(audio: Any) -> np.ndarray:
    """(samples,) of base64 PCM16."""
    if not isinstance(audio, str):
        raise invalid("audio", "audio is text: PCM16 in base64")
    try:
        data = base64.b64decode(audio, validate=True)
    except (binascii.Error, ValueError) as error:
        raise invalid("audio", f"audio is not base64: {error}") from None
    if len(data) % 2:
        raise invalid("audio", f"audio has {len(data)} bytes, but PCM16 takes two per sample")
    return np.frombuffer(data, "<i2")


def invalid(param: str | None, message: str, code: str = "invalid_value") -> Failure:
    """An error in an event; the session continues."""
    return Failure(400, message, code=code, param=param)
