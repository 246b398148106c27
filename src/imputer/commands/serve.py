"""`imputer serve`."""

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from imputer.errors import UsageError


def serve(
    *,
    model: tuple[str, ...] = (),
    host: str = "127.0.0.1",
    port: int = 8000,
    api_key_file: Path | None = None,
    max_upload_mb: float = 25.0,
    max_seconds: float = 600.0,
    queue: int = 64,
    batch: int = 16,
    patience_ms: float = 4.0,
    workers: int = 1,
    threads: int = 1,
    lm: str = "default",
    hotwords: str = "",
    runtime: Literal["torch", "onnx", "onnx-int8"] = "torch",
    quiet: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Run the transcription server and its web page.

    - imputer serve
    - imputer serve --model english --model runs/mine/model --host 0.0.0.0 --api-key-file keys.txt

    The API is OpenAI's, at /v1/audio/transcriptions; the page at / shows each recording being decoded, pass by pass.
    SIGTERM and Ctrl+C stop the server after the running requests.

    Parameters
    ----------
    model
        Model folder, or the name of a model that comes with the package. May be given several times; the
        first is the default. Clients call a folder by its name, and runs/X/model X. Without it: english if its
        extra is installed, else digits.
    host
        Address to listen on. The default can be reached from this machine only.
    port
        Port to listen on; 0 takes a free one and prints it.
    api_key_file
        File with the keys that clients must send as "Authorization: Bearer KEY", one per line.
    max_upload_mb
        Largest upload, in megabytes.
    max_seconds
        Longest recording, in seconds after decoding.
    queue
        Requests in progress per worker; more are answered 429 with Retry-After.
    batch
        Most recordings that go through the network together; 1 turns batching off.
    patience_ms
        Batching delay in milliseconds, applied only under concurrent load.
    workers
        Processes, each with its own copy of the model.
    threads
        Threads of the network in each process.
    lm
        A language model: default is the one that a model has, if it has one; none; or a file. Requests can turn it off.
    hotwords
        Words and phrases expected in every recording, separated by commas, or a file with one per line.
    runtime
        What runs the model; onnx and onnx-int8 need a folder written by "imputer export".
    quiet
        Log warnings and errors only.
    """
    for name, value, least in (
        ("--port", port, 0),
        ("--queue", queue, 1),
        ("--batch", batch, 1),
        ("--patience-ms", patience_ms, 0),
        ("--workers", workers, 1),
        ("--threads", threads, 1),
    ):
        if not least <= value < float("inf"):
            raise UsageError(f"{name} must be at least {least}, got {value:g}")
    for name, value in (("--max-upload-mb", max_upload_mb), ("--max-seconds", max_seconds)):
        if not 0 < value < float("inf"):
            raise UsageError(f"{name} must be a number above 0, got {value:g}")
    keys = read_keys(api_key_file) if api_key_file else ()
    try:
        import fastapi  # noqa: F401
        import multipart  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"the server needs the package {error.name}: pip install 'imputer-asr[serve]'"
        ) from None
    from imputer.languagemodel.hotwords import read
    from imputer.server import launch
    from imputer.server.settings import MEGABYTE, Settings

    settings = Settings(
        models=model or (launch.default_model(),),
        runtime=runtime,
        lm=None if lm == "none" else lm,
        hotwords=tuple(read(hotwords)),
        api_keys=keys,
        max_upload_bytes=int(max_upload_mb * MEGABYTE),
        max_seconds=max_seconds,
        max_requests=queue,
        batch_items=batch,
        patience_seconds=patience_ms / 1000,
        threads=threads,
    )
    launch.serve(settings, host=host, port=port, workers=workers, quiet=quiet)


def read_keys(path: Path) -> tuple[str, ...]:
    """The keys in a file, one per line; empty lines and lines that start with # are skipped."""
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise UsageError(f"cannot read the keys in {path}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not a text file with keys") from None
    keys = tuple(line.strip() for line in lines if line.strip() and not line.startswith("#"))
    if not keys:
        raise UsageError(f"{path} has no keys: write one per line")
    return keys
