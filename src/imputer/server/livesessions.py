"""The live sessions that are open, a bounded number; a silent one makes room for a new one."""

import time
from typing import Protocol

from imputer.server.failures import retry_later
from imputer.server.metrics import Metrics

SILENT_SECONDS = 10.0  # without an event from its client, before a session may be ended for another


class LiveSession(Protocol):
    """What the limit needs of a session."""

    last_event: float  # from its client, by the monotonic clock

    def make_room(self) -> None:
        """End soon, to make room for another."""


class LiveSessions:
    """The open sessions. They do not count as uploads: sessions held open must not block uploads."""

    def __init__(self, limit: int, metrics: Metrics) -> None:
        self.limit, self.metrics = limit, metrics
        self.open: set[LiveSession] = set()

    def check(self) -> None:
        """Refuse a session if there is no room and none can be made."""
        if len(self.open) >= self.limit and self._silent() is None:
            raise retry_later(429, "too many live sessions", "queue_full", SILENT_SECONDS)

    def enter(self, session: LiveSession) -> None:
        self.check()
        if len(self.open) >= self.limit and (silent := self._silent()) is not None:
            self.leave(silent)
            silent.make_room()
        self.open.add(session)
        self.metrics.live_sessions.set(len(self.open))

    def leave(self, session: LiveSession) -> None:
        self.open.discard(session)
        self.metrics.live_sessions.set(len(self.open))

    def _silent(self) -> LiveSession | None:
        """The session that has been silent longest, if that is long enough."""
        found = min(self.open, key=lambda session: session.last_event, default=None)
        if found is None or time.monotonic() - found.last_event < SILENT_SECONDS:
            return None
        return found
