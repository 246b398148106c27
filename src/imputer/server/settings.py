"""The settings of a server: plain values that can be sent to worker processes."""

from dataclasses import dataclass

MEGABYTE = 1 << 20


@dataclass(frozen=True)
class Settings:
    """Limits hold for the whole server, whatever the number of workers."""

    models: tuple[str, ...]  # folders or shipped names; the first is the default
    aliases: tuple[tuple[str, str], ...] = ()  # (name that clients use, model)
    runtime: str = "torch"  # or "onnx", "onnx-int8"
    device: str = "cpu"
    lm: str | None = "default"  # language model of all models: their own, a path, or None
    hotwords: tuple[str, ...] = ()  # for every request
    workers: int = 1  # processes that run the network; 1 runs it in a thread of the server
    threads: int = 1  # of the network, per worker

    # Access.
    api_keys: tuple[str, ...] = ()  # none, and no file: every client
    api_key_file: str = ""  # read again when it changes
    allow_hosts: tuple[str, ...] = ()  # names in the Host header besides addresses and localhost
    allow_origins: tuple[str, ...] = ()  # origins of browser applications on other sites
    trusted_proxies: tuple[str, ...] = ()  # addresses or networks whose X-Forwarded-For is trusted
    requests_per_minute: float = 0.0  # per key, or per address where there are no keys; 0: no limit

    # How much.
    max_upload_bytes: int = 128 * MEGABYTE
    max_uploads_bytes: int = 1024 * MEGABYTE  # of all uploads together that are held at once
    max_seconds: float = 3600.0  # of decoded audio in one recording
    max_trace_seconds: float = 600.0  # in one recording of which every pass is kept
    max_requests: int = 64  # complete uploads being decoded, waiting or running
    max_connections: int = 1000
    max_connections_per_client: int = 100  # trusted proxies excepted

    # How long, in seconds.
    header_seconds: float = 10.0  # for the header of a request
    upload_idle_seconds: float = 15.0  # without a byte of the body
    upload_bytes_per_second: float = 1000.0  # least average rate, after upload_idle_seconds
    upload_total_seconds: float = 1800.0
    decode_seconds: float = 60.0  # of work to decode one upload
    write_seconds: float = 30.0  # without the client taking any of its answer
    keep_alive_seconds: float = 5.0  # between two requests on a connection
    drain_seconds: float = 60.0  # after SIGTERM, for requests that are running
    stall_seconds: float = 120.0  # without progress while work waits: not ready

    # Live sessions.
    max_sessions: int = 32
    session_buffer_seconds: float = 60.0  # of audio that one session may have waiting
    session_idle_seconds: float = 300.0  # without an event from the client

    # Batches.
    batch_items: int = 16  # windows in one batch; 1 turns batching off
    batch_seconds: float = 32.0  # of padded audio in one batch; beyond, processors gain no more
    batch_delay_seconds: float = 0.004  # batching delay, applied only under concurrent load

    # Logs.
    log_json: bool = False
    quiet: bool = False
