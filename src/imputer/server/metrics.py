"""Counters, gauges and histograms in Prometheus' text format, summed over worker processes.

Each worker leaves its figures as a JSON file in one folder; whichever is asked adds up all of them. The counts of
a worker that died stay, so that no counter ever falls; its gauges go with it.
"""

import json
import os
import threading
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

Labels = tuple[tuple[str, str], ...]

# name: (kind, help, upper bounds of a histogram's buckets)
FIGURES: dict[str, tuple[str, str, tuple[float, ...]]] = {
    "imputer_requests_total": ("counter", "Requests answered, by endpoint and status.", ()),
    "imputer_errors_total": ("counter", "Requests answered with an error, by status.", ()),
    "imputer_abandoned_total": ("counter", "Requests whose client went away before the answer.", ()),
    "imputer_audio_seconds_total": ("counter", "Seconds of audio transcribed.", ()),
    "imputer_passes_total": ("counter", "Passes of the network, each over a whole batch.", ()),
    "imputer_requests_in_progress": ("gauge", "Requests uploading, waiting or running.", ()),
    "imputer_queue_depth": ("gauge", "Windows of audio waiting for the network.", ()),
    "imputer_queue_seconds": ("gauge", "Seconds of audio waiting for the network.", ()),
    "imputer_batch_size": ("histogram", "Windows of audio in a batch.", (1, 2, 4, 8, 16, 32, 64)),
    "imputer_request_seconds": (
        "histogram",
        "Time from the first byte of a request to the last of its answer, by endpoint.",
        (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
    ),
    "imputer_batch_seconds": (
        "histogram",
        "Time of a batch in the network.",
        (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
    ),
    "imputer_resident_memory_bytes": ("gauge", "Memory held by the worker processes.", ()),
}


class Metrics:
    """The figures of one process. Every method may be called from any thread."""

    def __init__(self, folder: str = "") -> None:
        self.folder = Path(folder) if folder else None
        self.lock = threading.Lock()
        self.values: dict[str, dict[Labels, Any]] = {name: {} for name in FIGURES}

    def add(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """Raise a counter."""
        key = tuple(sorted(labels.items()))
        with self.lock:
            self.values[name][key] = self.values[name].get(key, 0.0) + amount

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""
        with self.lock:
            self.values[name][tuple(sorted(labels.items()))] = value

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Count a value into a histogram: [one count a bucket and one above all, the sum]."""
        bounds = FIGURES[name][2]
        key = tuple(sorted(labels.items()))
        with self.lock:
            counts, total = self.values[name].get(key, ([0] * (len(bounds) + 1), 0.0))
            counts[bisect_left(bounds, value)] += 1
            self.values[name][key] = (counts, total + value)

    def snapshot(self) -> dict[str, list[Any]]:
        """Everything, as plain values."""
        self.set("imputer_resident_memory_bytes", resident_bytes())
        with self.lock:
            return json.loads(json.dumps({name: list(of.items()) for name, of in self.values.items()}))

    def publish(self) -> None:
        """Leave the figures where other workers find them."""
        if self.folder is None:
            return
        path = self.folder / f"{os.getpid()}.json"
        temporary = path.with_suffix(".part")
        temporary.write_text(json.dumps(self.snapshot()))
        os.replace(temporary, path)

    def text(self) -> str:
        """The page that Prometheus reads."""
        if self.folder is None:
            return render([self.snapshot()])
        self.publish()
        snapshots = []
        for path in sorted(self.folder.glob("*.json")):
            snapshot = json.loads(path.read_text())
            if not _alive(int(path.stem)):
                snapshot = {name: of for name, of in snapshot.items() if FIGURES[name][0] != "gauge"}
            snapshots.append(snapshot)
        return render(snapshots)


def render(snapshots: Iterable[Mapping[str, list[Any]]]) -> str:
    """Prometheus' text format of the sum of snapshots."""
    snapshots = list(snapshots)
    lines = []
    for name, (kind, help_text, bounds) in FIGURES.items():
        lines += [f"# HELP {name} {help_text}", f"# TYPE {name} {kind}"]
        summed: dict[Labels, Any] = {}
        for snapshot in snapshots:
            for key, value in snapshot.get(name, []):
                labels = tuple((label, text) for label, text in key)
                summed[labels] = _sum(summed.get(labels), value)
        for labels, value in sorted(summed.items()):
            if kind != "histogram":
                lines.append(f"{name}{_braces(labels)} {value:.15g}")
                continue
            counts, total = value
            seen = 0
            for bound, count in zip((*bounds, "+Inf"), counts, strict=True):
                seen += count
                lines.append(f"{name}_bucket{_braces((*labels, ('le', str(bound))))} {seen}")
            lines += [f"{name}_sum{_braces(labels)} {total:.15g}", f"{name}_count{_braces(labels)} {seen}"]
    return "\n".join(lines) + "\n"


def resident_bytes(pid: int | str = "self") -> int:
    """Memory that a process holds; 0 where the system does not say."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def _sum(old: Any, new: Any) -> Any:
    if old is None:
        return new
    if isinstance(new, list):
        return [[a + b for a, b in zip(old[0], new[0], strict=True)], old[1] + new[1]]
    return old + new


def _braces(labels: Labels) -> str:
    return "{" + ",".join(f'{name}="{value}"' for name, value in labels) + "}" if labels else ""


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
