"""What a server is told when it starts. Plain values, so that worker processes can be handed them."""

from dataclasses import dataclass

MEGABYTE = 1 << 20


@dataclass(frozen=True)
class Settings:
    """Limits are per worker process."""

    models: tuple[str, ...]  # folders or shipped names; the first is the default
    runtime: str = "torch"  # or "onnx", "onnx-int8"
    lm: str | None = "default"  # language model of all models: their own, a path, or None
    hotwords: tuple[str, ...] = ()  # for every request
    api_keys: tuple[str, ...] = ()  # none: everybody who can connect may ask
    max_upload_bytes: int = 25 * MEGABYTE
    max_seconds: float = 600.0  # of decoded audio in one recording
    max_requests: int = 64  # uploading, waiting or running at once; the next is told to come back
    max_waiting_seconds: float = 3600.0  # of decoded audio in the queue
    batch_items: int = 16  # recordings in one batch; 1 turns batching off
    batch_seconds: float = 32.0  # of padded audio in one batch; beyond, processors gain no more
    patience_seconds: float = 0.004  # how long a batch waits for company
    threads: int = 1  # of the network
    upload_idle_seconds: float = 30.0  # an upload that stalls this long is refused
    upload_total_seconds: float = 300.0
    metrics_folder: str = ""  # where several workers leave their figures for each other
