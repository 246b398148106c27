"""What the server bears: throughput and latency at 1, 8 and 32 clients, batching on against off; and ill treatment.

Servers run as processes of their own, on this machine's loopback and nowhere else; both are up at once and take
turns, so that the ratio between them holds on a busy machine. Clients are coroutines in one more process. Everything
is bounded: so many requests, and no longer than ``LONGEST_SECONDS`` each.
"""

import asyncio
import io
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np

from imputer.errors import ImputerError
from imputer.server.metrics import resident_bytes

CLIENTS = (1, 8, 32)
BATCHING_TARGET = 1.3  # times the throughput without batching, at 8 clients
MEMORY_TARGET = 1.1  # of what it was before the mixed uploads
SECONDS = (0.8, 2.0)  # of the recordings sent
LONGEST_SECONDS = 120.0
START_SECONDS = 120.0


@dataclass(frozen=True)
class Request:
    """A request as bytes, and the statuses that are right answers to it."""

    body: bytes
    right: tuple[int, ...] = (200,)
    walks_away: bool = False  # the client hangs up half way and expects nothing


def run(quick: bool = False) -> dict[str, Any]:
    """Print and return the figures."""
    rounds, per_client, mixed = (1, 4, 200) if quick else (4, 12, 2000)
    with tempfile.TemporaryDirectory(prefix="imputer-bench-") as folder:
        model = _model(Path(folder))
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as clients:
            figures: dict[str, Any] = {"model": Path(model).name}
            figures |= _throughput(model, clients, rounds, per_client)
            figures |= _mixed(model, clients, mixed)
    _show(figures)
    return figures


def _model(folder: Path) -> str:
    """The digits model if it is there, else one of its size that knows nothing: it costs the same."""
    from imputer import models

    if (models.SHIPPED / "digits" / "config.toml").is_file():
        return str(models.SHIPPED / "digits")
    import torch

    from imputer import configs, model
    from imputer.vocabulary import Vocabulary

    torch.manual_seed(0)
    vocabulary = Vocabulary.train(["zero one two three four five six seven eight nine"], units="characters")
    settings = configs.Model(width=192, layers=4, heads=4, filter_size=768)
    network = model.Imputer(settings, configs.FrontEnd(channels=16), vocabulary.size)
    models.save(folder / "untrained", network, vocabulary)
    return str(folder / "untrained")


@contextmanager
def _server(model: str, *options: str) -> Iterator[tuple[int, int]]:
    """(port, process id) of `imputer serve`."""
    process = subprocess.Popen(
        [sys.executable, "-m", "imputer", "serve", "--model", model, "--port", "0", "--quiet", *options],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    try:
        assert process.stdout is not None
        found = re.search(r"http://127\.0\.0\.1:(\d+)", process.stdout.readline())
        if not found:
            raise ImputerError("the server did not start")
        port = int(found[1])
        deadline = time.monotonic() + START_SECONDS
        while not _healthy(port):
            if time.monotonic() > deadline:
                raise ImputerError("the server did not come up")
            time.sleep(0.05)
        yield port, process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)


def _healthy(port: int) -> bool:
    try:
        with urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


def _throughput(model: str, clients: ProcessPoolExecutor, rounds: int, per_client: int) -> dict[str, Any]:
    """Requests a second and latencies; for each number of clients the best round of each server."""
    requests = [_good(wave) for wave in _recordings(24)]
    figures: dict[str, Any] = {}
    with _server(model, "--batch", "16") as on, _server(model, "--batch", "1") as off:
        for port, _ in (on, off):
            clients.submit(_load, port, requests, 4).result()  # warm
        for count in CLIENTS:
            chosen = _shuffled(requests, count * per_client)
            measured: dict[str, list[dict[str, float]]] = {"on": [], "off": []}
            for _ in range(rounds):
                for name, (port, pid) in (("on", on), ("off", off)):
                    used = _processor_seconds(pid)
                    result = clients.submit(_load, port, chosen, count).result()
                    result["per_processor_second"] = len(chosen) / max(_processor_seconds(pid) - used, 1e-6)
                    if result["wrong"]:
                        raise ImputerError(
                            f"{result['wrong']} wrong answers at {count} clients: {result['seen']}"
                        )
                    measured[name].append(result)
            for name, results in measured.items():
                best = max(results, key=lambda result: result["per_second"])
                for figure in ("per_second", "p50", "p95"):
                    figures[f"{figure}_{count}_{name}"] = best[figure]
                figures[f"per_processor_second_{count}_{name}"] = max(
                    result["per_processor_second"] for result in results
                )
            for figure, gain in (("per_second", "batching_gain"), ("per_processor_second", "processor_gain")):
                on_figure, off_figure = (figures[f"{figure}_{count}_{name}"] for name in ("on", "off"))
                figures[f"{gain}_{count}"] = on_figure / off_figure
        with urlopen(f"http://127.0.0.1:{on[0]}/metrics", timeout=5) as answer:
            text = answer.read().decode()
        batches, windows = (
            float(re.search(rf"imputer_batch_size_{name} (\S+)", text)[1])  # type: ignore[index]
            for name in ("count", "sum")
        )
        figures["windows_per_batch"] = windows / batches
    return figures


def _processor_seconds(pid: int) -> float:
    """Processor time of a process so far: unlike throughput, it does not feel what else the machine is doing."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except OSError:
        return time.monotonic()


def _mixed(model: str, clients: ProcessPoolExecutor, count: int) -> dict[str, Any]:
    """Good and malformed uploads in any order: every answer right, and the memory back where it was."""
    kinds = _mixture()
    with _server(model) as (port, pid):
        # Before the memory is read, everything has happened a few times that will happen.
        clients.submit(_load, port, _shuffled(kinds, 10 * len(kinds), seed=1), 8).result()
        before = _settled_memory(pid)
        result = clients.submit(_load, port, _shuffled(kinds, count, seed=2), 8).result()
        after = _settled_memory(pid)
        alive = _healthy(port)
    return {
        "mixed_uploads": count,
        "mixed_wrong": result["wrong"],
        "mixed_statuses": result["seen"],
        "server_alive": alive,
        "memory_before_mb": before / 1e6,
        "memory_after_mb": after / 1e6,
        "memory_ratio": after / max(before, 1),
    }


def _settled_memory(pid: int) -> int:
    """The least of a second's worth of readings, when everything is over."""
    time.sleep(1.0)
    readings = []
    for _ in range(5):
        readings.append(resident_bytes(pid))
        time.sleep(0.1)
    return min(readings)


def _recordings(count: int) -> list[np.ndarray]:
    """Noise with the rhythm of syllables; what it costs does not depend on what is said."""
    generator = np.random.default_rng(0)
    waves = []
    for seconds in np.linspace(*SECONDS, count):
        time_ = np.arange(int(seconds * 16_000)) / 16_000
        wave = generator.standard_normal(len(time_)) * (0.55 + 0.45 * np.sin(2 * np.pi * 4 * time_))
        waves.append((0.1 * wave).astype(np.float32))
    return waves


def _encoded(wave: np.ndarray, kind: str = "WAV", rate: int = 16_000, **options: Any) -> bytes:
    import soundfile

    buffer = io.BytesIO()
    soundfile.write(buffer, wave, rate, format=kind, **options)
    return buffer.getvalue()


def _good(wave: np.ndarray, **fields: str) -> Request:
    return Request(_form(_encoded(wave), **fields))


def _mixture() -> list[Request]:
    """Every second one is good; the others are wrong in as many ways as we could think of."""
    waves = _recordings(8)
    wav = _encoded(waves[0])
    nan = _encoded(np.full(8000, np.nan, np.float32), subtype="FLOAT")
    bad = [
        Request(_form(b""), (400,)),
        Request(_form(b"this is not audio" * 100), (415,)),
        Request(_form(bytes(100_000)), (415,)),
        Request(_form(random.Random(0).randbytes(50_000)), (400, 415)),
        Request(_form(wav[: len(wav) // 2]), (400,)),
        Request(_form(_encoded(waves[1], "FLAC")[:9000]), (400,)),
        Request(_form(wav[:40]), (400, 415)),
        Request(_form(nan), (400,)),
        Request(_form(_encoded(np.zeros(1, np.float32))), (400,)),
        Request(_form(_encoded(np.zeros(3600 * 16_000, np.float32), "FLAC")), (413,)),
        Request(_form(wav, field="audio"), (400,)),
        Request(_form(wav, response_format="yaml"), (400,)),
        Request(_form(wav, model="nobody"), (404,)),
        Request(_form(wav, block_size="-3"), (400,)),
        Request(_form(b"\x1aE\xdf\xa3" + bytes(5000)), (400, 415)),
        Request(_form(b"\x00\x00\x00\x20ftypM4A " + bytes(5000)), (400, 415)),
        Request(_post(b"not a form", "text/plain"), (415,)),
        Request(_post(b"--x\r\nbroken", "multipart/form-data; boundary=x"), (400,)),
        Request(_post(bytes(30_000_000), "multipart/form-data; boundary=x"), (413,)),
        Request(_form(wav)[:20_000], (), walks_away=True),
    ]
    good = [
        _good(wave, response_format=kind)
        for wave, kind in zip(waves, ("json", "verbose_json") * 4, strict=True)
    ]
    good += [Request(_form(_encoded(waves[2], kind))) for kind in ("FLAC", "OGG", "MP3")]
    good += [_good(waves[3], stream="true")]
    return [request for n, one in enumerate(bad) for request in (one, good[n % len(good)])]


def _shuffled(requests: list[Request], count: int, seed: int = 0) -> list[Request]:
    repeated = (requests * math.ceil(count / len(requests)))[:count]
    random.Random(seed).shuffle(repeated)
    return repeated


def _form(content: bytes, field: str = "file", **fields: str) -> bytes:
    boundary = "imputer-benchmark"
    head = "".join(
        f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'
        for name, value in fields.items()
    )
    head += f'--{boundary}\r\nContent-Disposition: form-data; name="{field}"; filename="a.wav"\r\n\r\n'
    body = head.encode() + content + f"\r\n--{boundary}--\r\n".encode()
    return _post(body, f"multipart/form-data; boundary={boundary}")


def _post(body: bytes, kind: str) -> bytes:
    head = (
        f"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {kind}\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


# The clients, in a process of their own.


def _load(port: int, requests: list[Request], clients: int) -> dict[str, Any]:
    """Have so many clients send the requests, each the next when its last is answered."""
    return asyncio.run(_all_clients(port, requests, clients))


async def _all_clients(port: int, requests: list[Request], clients: int) -> dict[str, Any]:
    pending = list(reversed(requests))
    seen: dict[str, int] = {}
    latencies: list[float] = []
    wrong = 0

    async def client() -> None:
        nonlocal wrong
        connection = None
        while pending:
            request = pending.pop()
            started = time.perf_counter()
            status, connection = await _exchange(port, connection, request)
            latencies.append(time.perf_counter() - started)
            seen[str(status)] = seen.get(str(status), 0) + 1
            wrong += not request.walks_away and status not in request.right
        if connection:
            connection[1].close()

    started = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    taken = time.perf_counter() - started
    p50, p95 = np.percentile(latencies, (50, 95))
    return {
        "per_second": len(requests) / taken,
        "p50": float(p50),
        "p95": float(p95),
        "seen": seen,
        "wrong": wrong,
    }


async def _exchange(port: int, connection: Any, request: Request) -> tuple[int, Any]:
    """The status of the answer, and the connection if it can be used again; status 0 is a lost answer."""
    try:
        async with asyncio.timeout(LONGEST_SECONDS):
            for _ in range(20):
                if connection is None:
                    connection = await asyncio.open_connection("127.0.0.1", port)
                reader, writer = connection
                status, retry_after, reusable = await _ask(reader, writer, request)
                if not reusable:
                    connection[1].close()
                    connection = None
                if status != 429:
                    return status, connection
                await asyncio.sleep(retry_after)
            return status, connection
    except (OSError, TimeoutError, asyncio.IncompleteReadError, ValueError):
        if connection:
            connection[1].close()
        return 0, None


async def _ask(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: Request
) -> tuple[int, float, bool]:
    try:
        writer.write(request.body)
        await writer.drain()
    except ConnectionError:
        pass  # refused half way: the answer may be there all the same
    if request.walks_away:
        return 499, 0.0, False
    head = await reader.readuntil(b"\r\n\r\n")
    status = int(head.split(b" ", 2)[1])
    headers = dict(line.split(b": ", 1) for line in head.lower().split(b"\r\n")[1:] if b": " in line)
    if b"content-length" in headers:
        body = await reader.readexactly(int(headers[b"content-length"]))
    else:
        body = b""
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            body += (await reader.readexactly(size + 2))[:-2]
        await reader.readuntil(b"\r\n")
        if b"transcript.text.done" not in body:
            return 0, 0.0, False
    if status == 200 and b"json" in headers.get(b"content-type", b""):
        json.loads(body)["text"]
    refused = status >= 400  # the server may close after what it did not read
    return status, float(headers.get(b"retry-after", b"0")), not refused


def _show(figures: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        "clients",
        "batching",
        "req/s",
        "p50 ms",
        "p95 ms",
        "gain",
        "by processor",
        "target",
        title=f"serving {figures['model']}, recordings of {SECONDS[0]:g} to {SECONDS[1]:g} s, one thread",
        title_justify="left",
    )
    for column in table.columns:
        column.justify = "right"
    for count in CLIENTS:
        gains = [f"{figures[f'{gain}_{count}']:.2f}x" for gain in ("batching_gain", "processor_gain")]
        ends = {"off": ["", "", ""], "on": [*gains, f"{BATCHING_TARGET:g}x" if count == 8 else ""]}
        for name, end in ends.items():
            cells = [
                f"{figures[f'{figure}_{count}_{name}'] * scale:.0f}"
                for figure, scale in (("per_second", 1), ("p50", 1000), ("p95", 1000))
            ]
            table.add_row(str(count), name, *cells, *end)
    console = Console()
    console.print(table)
    second = Table("figure", "value", "target", title="mixed uploads, 8 clients", title_justify="left")
    for column in second.columns[1:]:
        column.justify = "right"
    statuses = ", ".join(f"{status}: {count}" for status, count in sorted(figures["mixed_statuses"].items()))
    second.add_row("uploads, good and malformed", str(figures["mixed_uploads"]), "")
    second.add_row("answers by status (499: the client walked away)", statuses, "")
    second.add_row("wrong or lost answers", str(figures["mixed_wrong"]), "0")
    second.add_row("server alive", "yes" if figures["server_alive"] else "no", "yes")
    second.add_row("memory after / before", f"{figures['memory_ratio']:.3f}", f"{MEMORY_TARGET:g}")
    second.add_row("memory after, MB", f"{figures['memory_after_mb']:.0f}", "")
    console.print(second)
