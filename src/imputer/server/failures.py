"""What goes wrong, in OpenAI's error envelope: a status, a sentence, and never a stack trace."""

from dataclasses import dataclass, field
from typing import Any

KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


@dataclass
class Failure(Exception):
    """An answer that is not the one asked for."""

    status: int
    message: str
    code: str | None = None
    param: str | None = None  # the field that is to blame
    headers: dict[str, str] = field(default_factory=dict)

    def envelope(self) -> dict[str, Any]:
        """The body of the answer."""
        kind = KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def busy(seconds: float) -> Failure:
    """The queue is full; the client should try again after so many seconds."""
    wait = max(1, min(60, round(seconds)))
    return Failure(
        429,
        f"the server is busy: try again in {wait} s",
        code="queue_full",
        headers={"Retry-After": str(wait)},
    )
