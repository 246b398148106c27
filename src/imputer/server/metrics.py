"""What the server counts, in Prometheus' text format by prometheus_client.

All requests pass through one process, so one registry in memory holds everything: there is nothing to sum over
workers and no file to write.
"""

import os
import platform
from collections.abc import Callable
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4 as CONTENT_TYPE

import imputer

__all__ = ["CONTENT_TYPE", "Metrics", "resident_bytes"]

BATCH_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
SECONDS_BUCKETS = (*BATCH_BUCKETS, 60, 120, 300, 600, 1800, 3600)
SIZE_BUCKETS = (1, 2, 4, 8, 16, 32, 64)


class Metrics:
    """The counters of one server. Safe to use from any thread."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        by_request = ("endpoint", "status", "model")
        self.requests = self._counter("requests", "Requests answered.", by_request)
        self.errors = self._counter("errors", "Requests answered with an error.", ("status",))
        self.abandoned = self._counter("abandoned", "Requests whose client left before the answer.")
        self.connections_closed = self._counter(
            "connections_closed", "Connections closed by the server to keep its limits.", ("reason",)
        )
        self.worker_restarts = self._counter("worker_restarts", "Workers that died and were replaced.")
        self.audio_seconds = self._counter("audio_seconds", "Seconds of audio transcribed.", ("model",))
        self.passes = self._counter("passes", "Passes of the network, each over a whole batch.")
        self.in_progress = self._gauge("requests_in_progress", "Complete uploads, waiting or running.")
        self.connections = self._gauge("connections", "Open connections.")
        self.live_sessions = self._gauge("live_sessions", "Open live sessions.")
        self.queue_depth = self._gauge("queue_depth", "Windows of audio waiting for the network.")
        self.queue_seconds = self._gauge("queue_seconds", "Seconds of audio waiting for the network.")
        self.request_seconds = self._histogram(
            "request_seconds", "First byte of a request to last byte of its answer.", by_request
        )
        self.queue_wait_seconds = self._histogram(
            "queue_wait_seconds", "Complete upload to its first batch in the network.", ("model",)
        )
        self.work_seconds = self._histogram(
            "work_seconds", "Time in the network of one recording, its share of each batch.", ("model",)
        )
        self.decode_seconds = self._histogram("decode_seconds", "Time to decode the audio of one upload.")
        self.batch_seconds = self._histogram(
            "batch_seconds", "Time of a batch in the network.", (), BATCH_BUCKETS
        )
        self.batch_size = self._histogram("batch_size", "Windows of audio in a batch.", (), SIZE_BUCKETS)
        self.memory = self._gauge("resident_memory_bytes", "Memory of the server and its workers.")
        build = Info("imputer_build", "Versions.", registry=self.registry)
        build.info({"version": imputer.__version__, "python": platform.python_version()})

    def _counter(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(f"imputer_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"imputer_{name}", text, registry=self.registry)

    def _histogram(
        self,
        name: str,
        text: str,
        labels: tuple[str, ...] = (),
        buckets: tuple[float, ...] = SECONDS_BUCKETS,
    ) -> Histogram:
        return Histogram(f"imputer_{name}", text, labels, buckets=buckets, registry=self.registry)

    def watch_memory(self, pids: Callable[[], list[int]]) -> None:
        """Make the memory gauge read these processes at every scrape."""
        self.memory.set_function(lambda: sum(resident_bytes(pid) for pid in (os.getpid(), *pids())))

    def text(self) -> str:
        """The page that Prometheus reads."""
        return generate_latest(self.registry).decode()


def resident_bytes(pid: int) -> int:
    """Resident memory of a process; 0 where the system does not provide it."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
