"""The record of every request: its id, one log line, and metrics."""

import logging
import re
import secrets
import time
from collections.abc import MutableMapping
from typing import Any

from imputer.server.jobs import Job
from imputer.server.logs import FIELDS, REQUESTS
from imputer.server.metrics import Metrics

ENDPOINTS = {
    "/": "page",
    "/docs": "docs",
    "/openapi.json": "docs",
    "/health": "health",
    "/ready": "ready",
    "/metrics": "metrics",
    "/sample.wav": "sample",
    "/v1/models": "models",
    "/v1/audio/transcriptions": "transcriptions",
    "/v1/audio/translations": "translations",
    "/v1/imputations": "imputations",
    "/v1/realtime": "realtime",
}
PREFIXES = {"/static/": "static", "/v1/models/": "models"}
REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=-]{1,128}")
LEFT = 499  # the client left before it was answered

logger = logging.getLogger(REQUESTS)


class Record:
    """One request, from header to answer; stored in the ASGI scope, so that routes can add its job."""

    def __init__(self, scope: MutableMapping[str, Any]) -> None:
        given = dict(scope["headers"]).get(b"x-request-id", b"")
        self.id = given.decode() if REQUEST_ID.fullmatch(given) else secrets.token_hex(8)
        self.method, self.path = scope.get("method", "GET"), scope["path"]
        self.endpoint = _endpoint(self.path)
        self.address = (scope.get("client") or ("", 0))[0]
        self.started = time.monotonic()
        self.job: Job | None = None
        scope["imputer.record"] = self

    def finish(self, status: int, metrics: Metrics) -> None:
        """Count the request and log it."""
        seconds = time.monotonic() - self.started
        labels = (self.endpoint, str(status), self.job.model if self.job else "")
        metrics.requests.labels(*labels).inc()
        metrics.request_seconds.labels(*labels).observe(seconds)
        if status >= 400:
            metrics.errors.labels(str(status)).inc()
        fields: dict[str, Any] = {
            "request_id": self.id,
            "client": self.address,
            "status": status,
            "duration": round(seconds, 4),
        }
        if self.job is not None:
            fields |= {
                "model": self.job.model,
                "audio_seconds": round(self.job.seconds, 3),
                "work_seconds": round(self.job.work_seconds, 4),
            }
        logger.info("%s %s", self.method, _printable(self.path), extra={FIELDS: fields})


def _endpoint(path: str) -> str:
    found = (name for start, name in PREFIXES.items() if path.startswith(start))
    return ENDPOINTS.get(path) or next(found, "other")


def _printable(path: str) -> str:
    return "".join(c if c.isprintable() and c != " " else "?" for c in path[:120])
