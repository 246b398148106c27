"""Errors in OpenAI's envelope: a status, a sentence, and never a stack trace."""

from dataclasses import dataclass, field
from typing import Any

KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


@dataclass
class Failure(Exception):
    """An answer that is not the one asked for."""

    status: int
    message: str
    code: str | None = None
    param: str | None = None  # the field that caused it
    headers: dict[str, str] = field(default_factory=dict)

    def envelope(self) -> dict[str, Any]:
        """The body of the answer."""
        kind = KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def retry_later(status: int, reason: str, code: str, seconds: float) -> Failure:
    """A temporary refusal; the client should try again after ``seconds``."""
    wait = max(1, min(60, round(seconds)))
    message = f"{reason}: try again in {wait} s"
    return Failure(status, message, code=code, headers={"Retry-After": str(wait)})


def busy(seconds: float) -> Failure:
    """All places are taken."""
    return retry_later(429, "the server is busy", "queue_full", seconds)


def no_space() -> Failure:
    """The upload cannot be written, for instance because the disk is full."""
    return retry_later(503, "the server cannot store the upload", "no_space", 30)


def shutting_down() -> Failure:
    """No new work while the server drains."""
    return retry_later(503, "the server is shutting down", "shutting_down", 5)


def unexpected() -> Failure:
    """An error of the server; details are in the log only."""
    return Failure(500, "something went wrong in the server", code="internal_error")
