"""The server under load: batching, the first words of a stream, short requests during attacks, malformed uploads.

Servers run as processes of their own, on this machine's loopback and nowhere else; with and without batching take
turns, so that the ratio between them holds on a busy machine. Clients are coroutines in one more process. Recordings
are cut from the model's own sample to the lengths of read sentences.
"""

import asyncio
import contextlib
import io
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

from imputer import decoding, models
from imputer.errors import ImputerError, UsageError
from imputer.recognizer import Recognizer
from imputer.research.measuring import least, one_thread, show
from imputer.server.metrics import resident_bytes

CLIENTS = (1, 8)
BATCHING_TARGET = 1.3  # times the work per processor second without batching, at 8 clients
WAIT_TARGET = 10.0  # times the idle latency, at the 99th percentile, during an attack
MEMORY_TARGET = 1.1  # of what it was before the mixed uploads
STREAM_SECONDS, STREAM_TARGET = 300.0, 2.0  # of a recording, and until the first words of its stream
EQUAL_SECONDS, EQUAL_COUNT = (1.5, 3.0, 6.0, 12.0), 8  # recordings of one length in a batch
SECONDS = (2.0, 15.0)  # of the recordings sent
SHORT_SECONDS, LONG_SECONDS = 3.0, 590.0
BOMB_SECONDS = 60
LONGEST_SECONDS = 300.0
TRANSCRIPTIONS = "/v1/audio/transcriptions"
# Connections are limited per address; attacks come from one of their own where loopback has several.
ATTACKER = ("127.0.0.2", 0) if sys.platform == "linux" else None


@dataclass(frozen=True)
class Request:
    """An upload, and the statuses that are right answers to it."""

    content: bytes
    right: tuple[int, ...] = (200,)
    file_field: str = "file"
    fields: dict[str, str] = field(default_factory=dict)
    kind: str = ""  # of a body that is not a form
    leaves: bool = False  # the client disconnects half way and expects no answer


@dataclass(frozen=True)
class Attack:
    """Connections that all send the same, and reconnect when they are closed, while ordinary requests are sent."""

    name: str
    content: bytes
    connections: int
    drips: bool = False  # a byte more every second
    reads: bool = True


def run(quick: bool = False) -> dict[str, Any]:
    """Print and return the figures."""
    rounds, per_client, mixed = (1, 3, 100) if quick else (3, 12, 2000)
    try:
        import httpx  # noqa: F401
    except ImportError:
        raise UsageError("imputer bench serving needs the package httpx: pip install httpx") from None
    model = "english"
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as clients:
        figures: dict[str, Any] = {"model": model}
        figures |= _throughput(model, clients, rounds, per_client)
        figures |= _bounds(model, rounds)
        figures |= _first_words(model, clients, 1 if quick else 5)
        figures |= _during_attacks(model, clients, 10 if quick else 100)
        figures |= _mixed(model, clients, mixed)
    _show(figures)
    return figures


@contextmanager
def _server(model: str, *options: str) -> Iterator[tuple[str, int]]:
    """(address, process id) of `imputer serve`."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "imputer", "serve", "--model", model),
            *("--port", "0", "--quiet", "--drain-timeout", "5", *options),
        ],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    try:
        assert process.stdout is not None
        found = re.search(r"http://\S+", process.stdout.readline())
        if not found:
            raise ImputerError("the server did not start")
        yield found[0], process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=120)


def _throughput(model: str, clients: ProcessPoolExecutor, rounds: int, per_client: int) -> dict[str, Any]:
    """Requests per second and latencies; for each number of clients the best round of each server."""
    requests = [Request(_encoded(wave)) for wave in _recordings(model, 24)]
    figures: dict[str, Any] = {}
    with _server(model, "--batch", "16") as on, _server(model, "--batch", "1") as off:
        for address, _ in (on, off):
            clients.submit(_load, address, requests[:8], 4).result()  # warm
        for count in CLIENTS:
            # Each recording at least once: rates of different numbers of clients are of the same lengths.
            chosen = _shuffled(requests, max(len(requests), count * per_client))
            measured: dict[str, list[dict[str, Any]]] = {"on": [], "off": []}
            for _ in range(rounds):
                for name, (address, pid) in (("on", on), ("off", off)):
                    used = _processor_seconds(pid)
                    result = clients.submit(_load, address, chosen, count).result()
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
        figures["windows_per_batch"] = clients.submit(_windows_per_batch, on[0]).result()
    return figures


def _windows_per_batch(address: str) -> float:
    import httpx

    text = httpx.get(f"{address}/metrics", timeout=30).text
    windows, batches = (
        float(re.search(rf"imputer_batch_size_{name} (\S+)", text)[1])  # type: ignore[index]
        for name in ("sum", "count")
    )
    return windows / batches


@torch.inference_mode()
def _bounds(model: str, rounds: int) -> dict[str, Any]:
    """What batching can gain: processor time of recordings of equal length one by one / in a batch."""
    network = Recognizer.from_pretrained(model).model
    gains: dict[str, tuple[float, float]] = {}
    with one_thread():
        for seconds in EQUAL_SECONDS:
            one = network.front_end.extract(torch.from_numpy(_cut(_speech(model), seconds)))[None]
            inputs = [
                (one.expand(count, -1, -1), torch.full((count,), one.shape[1])) for count in (1, EQUAL_COUNT)
            ]
            encoders = [partial(network.encode, *given) for given in inputs]
            passes = [
                partial(decoding.decode, network, *encode(), decoding.Options(8)) for encode in encoders
            ]
            encoder, decoder = (
                EQUAL_COUNT * alone / together
                for alone, together in (least(encoders, rounds), least(passes, rounds))
            )
            gains[f"{seconds:g}"] = encoder, decoder
    return {"equal_gains": gains}


def _first_words(model: str, clients: ProcessPoolExecutor, rounds: int) -> dict[str, Any]:
    """Seconds to the first words of a stream, the median: wall time, and processor time of the server."""
    request = Request(_encoded(_cut(_speech(model), STREAM_SECONDS)), fields={"stream": "true"})
    with _server(model) as (address, pid):
        measured = [clients.submit(_until_first_words, address, pid, request).result() for _ in range(rounds)]
    wall, processor = np.median(measured, axis=0).tolist()
    return {"first_words": wall, "first_words_processor": processor}


def _until_first_words(address: str, pid: int, request: Request) -> tuple[float, float]:
    import httpx

    used, started = _processor_seconds(pid), time.perf_counter()
    with httpx.stream("POST", address + TRANSCRIPTIONS, timeout=LONGEST_SECONDS, **_body(request)) as answer:
        if not any("transcript.text.delta" in line for line in answer.iter_lines()):
            raise ImputerError(f"a stream of {STREAM_SECONDS:g} s has no words: {answer.status_code}")
        return time.perf_counter() - started, _processor_seconds(pid) - used


def _during_attacks(model: str, clients: ProcessPoolExecutor, count: int) -> dict[str, Any]:
    """Latency of short requests, alone and during each attack, and how many answers were wrong or lost."""
    speech = _speech(model)
    short = Request(_encoded(_cut(speech, SHORT_SECONDS)))
    figures: dict[str, Any] = {"wait_ratios": {}, "attacks_wrong": {}}
    with _server(model) as (address, _):
        alone = clients.submit(_load, address, [short] * count, 1).result()
        figures["alone_p50"], figures["alone_p99"] = alone["p50"], alone["p99"]
        for attack in _attacks(speech):
            during = clients.submit(_load, address, [short] * count, 1, attack).result()
            figures["attacks_wrong"][attack.name] = during["wrong"]
            figures["wait_ratios"][attack.name] = during["p99"] / alone["p50"]
    return figures


def _attacks(speech: np.ndarray) -> list["Attack"]:
    long = _encoded(_cut(speech, LONG_SECONDS))
    bomb = _encoded(np.zeros((BOMB_SECONDS * 192_000, 8), np.int16), "FLAC", 192_000)
    head = b"POST %s HTTP/1.1\r\nHost: localhost\r\n" % TRANSCRIPTIONS.encode()
    passes = {"stream": "true", "include[]": "passes", "block_size": "64"}
    return [
        *(
            Attack(
                f"{LONG_SECONDS:g} s at {n} passes", _post(Request(long, fields={"block_size": str(n)})), 1
            )
            for n in (8, 64)
        ),
        Attack(f"FLAC silence, 8 channels at 192 kHz, {BOMB_SECONDS} s", _post(Request(bomb)), 4),
        Attack("uploads of a byte per second", head + b"Content-Length: 9999\r\n\r\n", 64, drips=True),
        Attack("half-sent headers", head + b"X-Half: ", 500),
        Attack("streams that are not read", _post(Request(long, fields=passes)), 8, reads=False),
    ]


def _post(request: Request) -> bytes:
    """The bytes of a request."""
    import httpx

    made = httpx.Request("POST", f"http://localhost{TRANSCRIPTIONS}", **_body(request))
    head = "".join(f"{name}: {value}\r\n" for name, value in made.headers.items())
    return f"POST {TRANSCRIPTIONS} HTTP/1.1\r\n{head}\r\n".encode() + made.read()


def _processor_seconds(pid: int) -> float:
    """Processor time of a process so far: unlike throughput, it hardly depends on other load."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except OSError:
        return time.monotonic()


def _mixed(model: str, clients: ProcessPoolExecutor, count: int) -> dict[str, Any]:
    """Good and malformed uploads in any order: every answer right, and the memory back where it was."""
    kinds = _mixture(model)
    with _server(model) as (address, pid):
        # Before memory is measured, every kind of request has been sent a few times.
        clients.submit(_load, address, _shuffled(kinds, 10 * len(kinds), seed=1), 8).result()
        before = _settled_memory(pid)
        result = clients.submit(_load, address, _shuffled(kinds, count, seed=2), 8).result()
        after = _settled_memory(pid)
    return {
        "mixed_uploads": count,
        "mixed_wrong": result["wrong"],
        "mixed_statuses": result["seen"],
        "memory_before_mb": before / 1e6,
        "memory_after_mb": after / 1e6,
        "memory_ratio": after / max(before, 1),
    }


def _settled_memory(pid: int) -> int:
    """The least of the readings of one second, after all requests have ended."""
    time.sleep(1.0)
    readings = []
    for _ in range(5):
        readings.append(resident_bytes(pid))
        time.sleep(0.1)
    return min(readings)


# Recordings and requests.


def _speech(model: str) -> np.ndarray:
    """The sample that comes with the model, at 16 kHz."""
    from imputer import audio

    return audio.read(models.SHIPPED / model / "sample.wav", sample_rate=16_000)


def _cut(speech: np.ndarray, seconds: float) -> np.ndarray:
    count = int(seconds * 16_000)
    return np.tile(speech, math.ceil(count / len(speech)))[:count]


def _recordings(model: str, count: int) -> list[np.ndarray]:
    speech = _speech(model)
    return [_cut(speech, seconds) for seconds in np.linspace(*SECONDS, count)]


def _encoded(wave: np.ndarray, kind: str = "WAV", rate: int = 16_000, **options: Any) -> bytes:
    import soundfile

    buffer = io.BytesIO()
    soundfile.write(buffer, wave, rate, format=kind, **options)
    return buffer.getvalue()


def _mixture(model: str) -> list[Request]:
    """Every second request is valid; the others are malformed, each in another way."""
    waves = [_cut(_speech(model), seconds) for seconds in np.linspace(0.8, 4.0, 8)]
    wav = _encoded(waves[0])
    nan = _encoded(np.full(8000, np.nan, np.float32), subtype="FLOAT")
    bad = [
        Request(b"", (400,)),
        Request(b"this is not audio" * 100, (415,)),
        Request(bytes(100_000), (415,)),
        Request(random.Random(0).randbytes(50_000), (400, 415)),
        Request(wav[: len(wav) // 2], (400,)),
        Request(_encoded(waves[1], "FLAC")[:9000], (400,)),
        Request(wav[:40], (400, 415)),
        Request(nan, (400,)),
        Request(_encoded(np.zeros(1, np.float32)), (400,)),
        Request(_encoded(np.zeros(3700 * 16_000, np.int16), "FLAC"), (413,)),
        Request(_encoded(np.zeros((192_000, 8), np.int16), "FLAC", 400_000), (400,)),
        Request(wav, (400,), file_field="audio"),
        Request(wav, (400,), fields={"response_format": "yaml"}),
        Request(wav, (404,), fields={"model": "nobody"}),
        Request(wav, (400,), fields={"block_size": "-3"}),
        Request(b"\x1aE\xdf\xa3" + bytes(5000), (400, 415)),
        Request(b"\x00\x00\x00\x20ftypM4A " + bytes(5000), (400, 415)),
        Request(b"not a form", (415,), kind="text/plain"),
        Request(b"--x\r\nbroken", (400,), kind="multipart/form-data; boundary=x"),
        Request(wav, leaves=True),
    ]
    formats = ("json", "verbose_json") * 4
    good = [
        Request(_encoded(wave), fields={"response_format": kind})
        for wave, kind in zip(waves, formats, strict=True)
    ]
    good += [Request(_encoded(waves[2], kind)) for kind in ("FLAC", "OGG", "MP3")]
    good += [Request(_encoded(waves[3]), fields={"stream": "true"})]
    return [request for n, one in enumerate(bad) for request in (one, good[n % len(good)])]


def _shuffled(requests: list[Request], count: int, seed: int = 0) -> list[Request]:
    repeated = (requests * math.ceil(count / len(requests)))[:count]
    random.Random(seed).shuffle(repeated)
    return repeated


# The clients, in a process of their own.


def _load(
    address: str, requests: list[Request], clients: int, attack: Attack | None = None
) -> dict[str, Any]:
    """Let ``clients`` clients send the requests, each the next after its last answer, during an attack or not."""
    return asyncio.run(_all_clients(address, requests, clients, attack))


async def _all_clients(
    address: str, requests: list[Request], clients: int, attack: Attack | None
) -> dict[str, Any]:
    import httpx

    pending = list(reversed(requests))
    seen: dict[str, int] = {}
    latencies: list[float] = []
    wrong = 0

    async def client(http: Any) -> None:
        nonlocal wrong
        while pending:
            request = pending.pop()
            started = time.perf_counter()
            status = await _send(http, request)
            latencies.append(time.perf_counter() - started)
            seen[str(status)] = seen.get(str(status), 0) + 1
            wrong += not request.leaves and status not in request.right

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=address, timeout=LONGEST_SECONDS, limits=limits) as http:
        attackers = [
            asyncio.ensure_future(_attack(address, attack))
            for _ in range(attack.connections if attack else 0)
        ]
        if attackers:
            await asyncio.sleep(2.0)  # time for their uploads and the start of the work
        started = time.perf_counter()
        await asyncio.gather(*(client(http) for _ in range(clients)))
        taken = time.perf_counter() - started
        for attacker in attackers:
            attacker.cancel()
        await asyncio.gather(*attackers, return_exceptions=True)
    p50, p95, p99 = np.percentile(latencies, (50, 95, 99))
    return {
        "per_second": len(requests) / taken,
        "p50": float(p50),
        "p95": float(p95),
        "p99": float(p99),
        "seen": seen,
        "wrong": wrong,
    }


async def _attack(address: str, attack: Attack | None) -> None:
    """One connection of an attack; it reconnects when it is closed."""
    assert attack is not None
    host, _, port = address.removeprefix("http://").partition(":")
    while True:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection(host, int(port), limit=2**12, local_addr=ATTACKER)
            try:
                writer.write(attack.content)
                await writer.drain()
                while attack.drips:
                    await asyncio.sleep(1.0)
                    writer.write(b"x")
                    await writer.drain()
                while not attack.reads and not writer.is_closing():
                    await asyncio.sleep(1.0)
                await reader.read(2**12)
            finally:
                writer.close()
        await asyncio.sleep(1.0)


async def _send(http: Any, request: Request) -> int:
    """The status of the answer; 0 is a lost or incomplete one, 499 one that the client did not wait for."""
    import httpx

    try:
        for _ in range(20):
            answer = await http.post(TRANSCRIPTIONS, **_body(request))
            if answer.status_code != 429:
                return answer.status_code if _is_whole(answer) else 0
            await asyncio.sleep(float(answer.headers.get("retry-after", "1")))
        return answer.status_code
    except _Left:
        return 499
    except (httpx.HTTPError, ValueError):
        return 0


class _Left(Exception):
    """The client disconnects."""


def _body(request: Request) -> dict[str, Any]:
    if request.leaves:
        return {
            "content": _half(request.content),
            "headers": {"content-type": "multipart/form-data; boundary=x"},
        }
    if request.kind:
        return {"content": request.content, "headers": {"content-type": request.kind}}
    return {"files": {request.file_field: ("a.wav", request.content)}, "data": request.fields}


async def _half(content: bytes) -> Any:
    yield b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
    yield content[: len(content) // 2]
    raise _Left


def _is_whole(answer: Any) -> bool:
    if answer.status_code != 200:
        return True
    kind = answer.headers["content-type"]
    if kind.startswith("text/event-stream"):
        return "transcript.text.done" in answer.text
    return "text" in json.loads(answer.text)


def _show(figures: dict[str, Any]) -> None:
    rows = []
    for count in CLIENTS:
        gains = [f"{figures[f'{gain}_{count}']:.2f}x" for gain in ("batching_gain", "processor_gain")]
        ends = {"off": ["", "", ""], "on": [*gains, f"{BATCHING_TARGET:g}x" if count == 8 else ""]}
        for name, end in ends.items():
            cells = [
                f"{figures[f'{figure}_{count}_{name}'] * scale:.3g}"
                for figure, scale in (("per_second", 1), ("p50", 1000), ("p95", 1000))
            ]
            rows.append([str(count), name, *cells, *end])
    lengths = f"recordings of {SECONDS[0]:g} to {SECONDS[1]:g} s"
    headings = ("clients", "batching", "req/s", "p50 ms", "p95 ms", "gain", "by processor", "target")
    show(f"serving {figures['model']}, {lengths}, one thread", headings, rows)
    bounds = [
        (f"{seconds} s", *(f"{gain:.2f}x" for gain in both))
        for seconds, both in figures["equal_gains"].items()
    ]
    title = f"{EQUAL_COUNT} recordings of equal length, one by one / in a batch, processor time"
    show(title, ("length", "encoder", "8 passes"), bounds)
    alone = f"{figures['alone_p50'] * 1000:.0f}, {figures['alone_p99'] * 1000:.0f}"
    waits = [
        (f"during {name}: p99 / p50 alone", f"{ratio:.1f}x", f"{WAIT_TARGET:g}x")
        for name, ratio in figures["wait_ratios"].items()
    ]
    statuses = ", ".join(f"{status}: {count}" for status, count in sorted(figures["mixed_statuses"].items()))
    others = [
        (f"{SHORT_SECONDS:g} s requests alone, p50 and p99, ms", alone, ""),
        (
            f"first words of a stream of {STREAM_SECONDS:g} s",
            f"{figures['first_words']:.2f} s",
            f"{STREAM_TARGET:g} s",
        ),
        ("the same in processor time of the server", f"{figures['first_words_processor']:.2f} s", ""),
        *waits,
        ("uploads, good and malformed, 8 clients", str(figures["mixed_uploads"]), ""),
        ("answers by status (499: the client left)", statuses, ""),
        ("wrong or lost answers", str(figures["mixed_wrong"]), "0"),
        ("wrong or lost during attacks", str(sum(figures["attacks_wrong"].values())), "0"),
        ("memory after / before", f"{figures['memory_ratio']:.3f}", f"{MEMORY_TARGET:g}"),
        ("memory after, MB", f"{figures['memory_after_mb']:.0f}", ""),
    ]
    show("attacks and mixed uploads", ("figure", "value", "target"), others)
