"""`imputer serve`."""

import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Group, Parameter

from imputer.commands.options import FileName
from imputer.errors import UsageError

Flag = Annotated[bool, Parameter(negative=())]


@Parameter(name="*", group=Group("Who may use it"))
@dataclass(frozen=True, kw_only=True)
class Access:
    """Keys, hosts, origins."""

    api_key_file: Path | None = None
    'File with the keys that clients send as "Authorization: Bearer KEY", one per line. Read again when it changes.'
    requests_per_minute: float = 0.0
    "Requests per minute for each key, or for each address where there are no keys; 0 is no limit."
    allow_host: tuple[str, ...] = ()
    "Name of the server in clients' requests, besides localhost and addresses. May be given several times; * is any."
    allow_origin: tuple[str, ...] = ()
    "Origin of a browser application on another site, such as https://app.example.org. May be given several times."
    trusted_proxy: tuple[str, ...] = ()
    "Address or network of a proxy whose X-Forwarded-For is trusted. May be given several times."


@Parameter(name="*", group=Group("Limits"))
@dataclass(frozen=True, kw_only=True)
class Limits:
    """How much, and for how long."""

    max_upload_mb: float = 128.0
    "Largest upload, in megabytes."
    max_uploads_mb: float = 1024.0
    "All uploads that are held at once, in megabytes."
    max_seconds: float = 3600.0
    "Longest recording, in seconds after decoding."
    queue: int = 64
    "Complete uploads that are decoded, waiting or running; more are answered 429 with Retry-After."
    max_sessions: int = 32
    "Open live sessions; a new one ends the one that has been silent longest, or is answered 429."
    max_connections: int = 1000
    "Open connections; the limit of open files may allow fewer."
    max_connections_per_client: int = 100
    "Open connections of one address, trusted proxies excepted."
    header_timeout: float = 10.0
    "Seconds for the header of a request."
    upload_idle_timeout: float = 15.0
    "Seconds without a byte of an upload."
    upload_rate: float = 1000.0
    "Least average bytes per second of an upload."
    upload_timeout: float = 1800.0
    "Seconds for an upload."
    decode_timeout: float = 60.0
    "Seconds of work to decode one upload."
    write_timeout: float = 30.0
    "Seconds without the client reading any of its answer."
    keep_alive_timeout: float = 5.0
    "Seconds between two requests on one connection."
    drain_timeout: float = 60.0
    "Seconds for running requests after SIGTERM."
    session_buffer: float = 60.0
    "Seconds of audio that one live session may have waiting."
    session_idle_timeout: float = 300.0
    "Seconds without an event from the client of a live session."
    stall_timeout: float = 120.0
    "Seconds without progress after which /ready says 503."


@Parameter(name="*", group=Group("Speed"))
@dataclass(frozen=True, kw_only=True)
class Speed:
    """Batches, workers, devices."""

    batch: int = 16
    "Most recordings that go through the network together; 1 turns batching off."
    batch_delay_ms: float = 4.0
    "Batching delay in milliseconds, applied only under concurrent load."
    workers: int = 1
    "Processes that run the network, each with its own copy of the model; 1 runs it inside the server."
    threads: int = 1
    "Threads of the network in each process."
    device: str = "cpu"
    "Device of the network, such as cuda or cuda:1."
    runtime: Literal["torch", "onnx", "onnx-int8"] = "torch"
    'What runs the model; onnx and onnx-int8 need a folder written by "imputer export".'


def serve(
    *,
    model: tuple[FileName, ...] = (),
    alias: tuple[str, ...] = (),
    host: str = "127.0.0.1",
    port: int = 8000,
    access: Access | None = None,
    limits: Limits | None = None,
    speed: Speed | None = None,
    lm: FileName = "default",
    hotwords: FileName = "",
    log_json: Flag = False,
    quiet: Flag = False,
) -> None:
    """Run the transcription server and its web page.

    - imputer serve
    - imputer serve --model english --model runs/mine/model --host 0.0.0.0 --api-key-file keys.txt

    The API is OpenAI's, at /v1/audio/transcriptions; the page at / shows each recording being decoded, pass by pass.
    SIGTERM, SIGHUP and Ctrl+C stop the server after the running requests.

    Parameters
    ----------
    model
        Model folder, or the name of a model that comes with the package. May be given several times; the
        first is the default. Clients call a folder by its name, and runs/X/model X. Without it: english.
    alias
        Another name for a model, as NAME=MODEL. May be given several times.
    host
        Address to listen on. The default can be reached from this machine only.
    port
        Port to listen on; 0 takes a free one and prints it.
    lm
        A language model: default is the one that a model has, if it has one; none; or a file. Requests can turn it off.
    hotwords
        Words and phrases expected in every recording, separated by commas, or a file with one per line.
    log_json
        Log one JSON object per line.
    quiet
        Log warnings and errors only.
    """
    access, limits, speed = access or Access(), limits or Limits(), speed or Speed()
    _check_numbers(port, access, limits, speed)
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import python_multipart  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"the server needs the package {error.name}: pip install 'imputer-asr[serve]'"
        ) from None
    from imputer.languagemodel.hotwords import read
    from imputer.server import keys, launch
    from imputer.server.settings import MEGABYTE, Settings

    if access.api_key_file:
        keys.read_keys(access.api_key_file)
        keys.warn_of_readers(access.api_key_file)
    settings = Settings(
        models=model or ("english",),
        aliases=_aliases(alias),
        runtime=speed.runtime,
        device=speed.device,
        lm=None if lm == "none" else lm,
        hotwords=tuple(read(hotwords)),
        workers=speed.workers,
        threads=speed.threads,
        api_key_file=str(access.api_key_file or ""),
        allow_hosts=(*access.allow_host, host),
        allow_origins=access.allow_origin,
        trusted_proxies=_networks(access.trusted_proxy),
        requests_per_minute=access.requests_per_minute,
        max_upload_bytes=int(limits.max_upload_mb * MEGABYTE),
        max_uploads_bytes=int(limits.max_uploads_mb * MEGABYTE),
        max_seconds=limits.max_seconds,
        max_requests=limits.queue,
        max_sessions=limits.max_sessions,
        max_connections=limits.max_connections,
        max_connections_per_client=limits.max_connections_per_client,
        header_seconds=limits.header_timeout,
        upload_idle_seconds=limits.upload_idle_timeout,
        upload_bytes_per_second=limits.upload_rate,
        upload_total_seconds=limits.upload_timeout,
        decode_seconds=limits.decode_timeout,
        write_seconds=limits.write_timeout,
        keep_alive_seconds=limits.keep_alive_timeout,
        drain_seconds=limits.drain_timeout,
        session_buffer_seconds=limits.session_buffer,
        session_idle_seconds=limits.session_idle_timeout,
        stall_seconds=limits.stall_timeout,
        batch_items=speed.batch,
        batch_delay_seconds=speed.batch_delay_ms / 1000,
        log_json=log_json,
        quiet=quiet,
    )
    launch.serve(settings, host=host, port=port)


def _check_numbers(port: int, access: Access, limits: Limits, speed: Speed) -> None:
    counts = {
        "--queue": limits.queue,
        "--max-sessions": limits.max_sessions,
        "--max-connections": limits.max_connections,
        "--max-connections-per-client": limits.max_connections_per_client,
        "--batch": speed.batch,
        "--workers": speed.workers,
        "--threads": speed.threads,
    }
    least: dict[str, tuple[float, float]] = {name: (value, 1) for name, value in counts.items()}
    least["--port"] = port, 0
    least["--batch-delay-ms"] = speed.batch_delay_ms, 0
    least["--requests-per-minute"] = access.requests_per_minute, 0
    for name, (value, bound) in least.items():
        if not bound <= value < float("inf"):
            raise UsageError(f"{name} must be at least {bound:g}, got {value:g}")
    for field, value in vars(limits).items():
        if not 0 < value < float("inf"):
            raise UsageError(f"--{field.replace('_', '-')} must be a number above 0, got {value:g}")


def _aliases(given: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    pairs = []
    for text in given:
        name, equals, model = text.partition("=")
        if not (name and equals and model):
            raise UsageError(f"--alias takes NAME=MODEL, got {text!r}")
        pairs.append((name, model))
    return tuple(pairs)


def _networks(given: tuple[str, ...]) -> tuple[str, ...]:
    for text in given:
        try:
            ipaddress.ip_network(text, strict=False)
        except ValueError:
            raise UsageError(f"--trusted-proxy takes an address or a network, got {text!r}") from None
    return given
