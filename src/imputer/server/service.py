"""The parts that the server's routes share: models, queues, and the way of a request through them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from fastapi import Request
from starlette.datastructures import UploadFile
from starlette.requests import ClientDisconnect

from imputer.decoding import STRATEGIES, Decoded
from imputer.errors import UsageError
from imputer.models import model_folder
from imputer.server import protocol, uploads, workers
from imputer.server.batcher import Batcher
from imputer.server.connections import Connections
from imputer.server.decoders import Decoders
from imputer.server.exchange import too_large
from imputer.server.failures import Failure, shutting_down
from imputer.server.jobs import Job
from imputer.server.livesessions import LiveSessions
from imputer.server.metrics import Metrics
from imputer.server.pictures import pictures
from imputer.server.protocol import Models, SettledText, TranscriptionRequest
from imputer.server.records import Record
from imputer.server.settings import Settings
from imputer.transcripts import Transcript

SAMPLE = "sample.wav"  # in a model's folder: a recording to try it on
HELPERS = 2  # threads that draw pictures and join windows
FORM_FIELDS, FORM_FIELD_BYTES = 128, 1 << 14
SILENCE_SECONDS = 15.0  # in a stream, before a comment shows proxies that it is alive


class Service:
    """One server: its models loaded, its queues empty."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.folders = folders(settings.models)
        self.recognizers = workers.load(settings, self.folders)
        self.metrics = Metrics()
        self.runners = self._runners()
        self.batcher = Batcher(self.runners, settings, self.metrics)
        self.decoders = Decoders(self.batcher, settings, self.metrics)
        self.connections = Connections(settings, self.metrics)
        self.sessions = LiveSessions(settings.max_sessions, self.metrics)
        self.helpers = ThreadPoolExecutor(HELPERS, "imputer-helper", initializer=_one_thread)
        self.models = Models(
            {name: r.model.settings.block_size for name, r in self.recognizers.items()},
            aliases(settings.aliases, list(self.recognizers)),
        )
        self.started = self.draining = False

    def _runners(self) -> list[workers.Runner]:
        settings = self.settings
        if settings.workers == 1:
            self.metrics.watch_memory(list)
            return [workers.LocalRunner(self.recognizers, settings)]
        runners = [workers.ProcessRunner(settings, self.folders) for _ in range(settings.workers)]
        self.metrics.watch_memory(lambda: [runner.pid for runner in runners if runner.pid])
        return list(runners)

    def start(self) -> None:
        """Load and warm up what is not, and open for work."""
        self.batcher.start()
        self.decoders.start()
        self.started = True

    def refuse_the_rest(self) -> None:
        """Answer 503 to all that is still waiting or running."""
        for job in list(self.batcher.jobs):
            self.batcher.fail(job, shutting_down())

    def stop(self) -> None:
        """End all threads and workers."""
        self.draining = True
        self.refuse_the_rest()
        self.decoders.stop()
        self.batcher.stop()
        self.helpers.shutdown()

    @property
    def state(self) -> str:
        """ "loading", "draining", "stalled" or "ready"."""
        if self.draining:
            return "draining"
        if not self.started:
            return "loading"
        return "ready" if self.batcher.alive and not self.batcher.stalled else "stalled"

    # From a request to its result.

    async def submit(
        self, request: Request, task: str = "transcribe", *, trace: bool = False
    ) -> tuple[TranscriptionRequest, str, Job]:
        """Receive a form and take a place in the queue: what it asks for, the name of its file, the job."""
        form = await _form(request)
        try:
            items = form.multi_items()
            texts = [(name, value) for name, value in items if isinstance(value, str) and name != "file"]
            parsed = self._read(texts, task, trace)
            file = _file(items)
            if (file.size or 0) > self.settings.max_upload_bytes:
                raise too_large(self.settings)
            job = self._enrol(parsed, file)
        except BaseException:
            await form.close()
            raise
        record: Record = request.scope["imputer.record"]
        record.job = job
        return parsed, uploads.plain_name(file.filename), job

    def _read(self, texts: list[tuple[str, str]], task: str, trace: bool) -> TranscriptionRequest:
        """The fields of a form; refuses keywords that the model cannot write, and drops a prompt like that."""
        settings = self.settings
        parsed = protocol.read_request(
            texts, self.models, task, trace=trace, lm=settings.lm, hotwords=settings.hotwords
        )
        recognizer, given = self.recognizers[parsed.model], parsed.options
        with contextlib.suppress(UsageError):
            options = replace(given, hotwords=(*given.hotwords, *parsed.suggested))
            recognizer.search(options)
            return replace(parsed, options=options)
        try:
            recognizer.search(given)
        except UsageError as error:
            raise Failure(400, str(error), code="invalid_value", param="keywords") from error
        return parsed

    def _enrol(self, parsed: TranscriptionRequest, file: UploadFile) -> Job:
        recognizer = self.recognizers[parsed.model]
        settings = self.settings
        limit = settings.max_trace_seconds if parsed.options.trace else settings.max_seconds

        def blocks(job: Job) -> Iterator[np.ndarray]:
            return uploads.blocks(
                file.file,
                uploads.plain_name(file.filename),
                sample_rate=recognizer.sample_rate,
                max_seconds=min(limit, settings.max_seconds),
                check=lambda: self.decoders.check(job),
            )

        job = Job(parsed.model, parsed.options, recognizer.sample_rate, blocks, file.file.close)
        self.batcher.enrol(job)
        return job

    def begin(self, job: Job) -> None:
        """Start to decode a job; whoever wants to see its passes or windows has said so by now."""
        self.decoders.add(job, self.recognizers[job.model])

    async def transcript(self, job: Job, windows: list[Decoded]) -> Transcript:
        """The windows of a job as one transcript; minutes of audio take too long for the event loop."""
        recognizer = self.recognizers[job.model]

        def join() -> Transcript:
            return recognizer.transcript(recognizer.join(windows), job.seconds)

        return await self.help(join)

    def help(self, function: Callable[..., Any], *arguments: Any) -> asyncio.Future:
        """Run a function in a helper thread."""
        return asyncio.get_running_loop().run_in_executor(self.helpers, function, *arguments)

    # Streams.

    async def events(
        self, parsed: TranscriptionRequest, job: Job, queue: asyncio.Queue
    ) -> AsyncIterator[bytes]:
        """The text of each window once it is settled, every pass if asked for, and the end."""
        settled = SettledText(self.recognizers[parsed.model])
        async for kind, *seen in _items(queue):
            if kind == "comment":
                yield b": waiting\n\n"
            elif kind == "pass":
                yield self._pass_event(parsed, *seen)
            else:
                number, decoded = seen
                text, tokens = settled.add(number, decoded.alignment, decoded.confidence)
                if text:
                    yield protocol.delta_event(parsed, text, tokens)
        try:
            transcript = await self.transcript(job, job.done.result())
        except Failure as failure:
            yield protocol.error_event(failure)
            return
        text, tokens = settled.rest()
        if text:
            yield protocol.delta_event(parsed, text, tokens)
        yield protocol.done_event(parsed, transcript)
        yield protocol.END

    def _pass_event(
        self,
        parsed: TranscriptionRequest,
        window: int,
        number: int,
        partial: list[int],
        confidence: list[float],
    ) -> bytes:
        recognizer = self.recognizers[parsed.model]
        hop_seconds = recognizer.window_frames()[1] * recognizer.frame_seconds
        mask = recognizer.model.mask
        return protocol.event(
            "imputer.pass",
            window=window,
            offset=round(window * hop_seconds, 3),
            frame_seconds=recognizer.frame_seconds,
            **{"pass": number},
            alignment=recognizer.symbols(partial),
            confidence=[round(c, 3) for c in confidence],
            committed=[token != mask for token in partial],
        )

    async def imputation_events(
        self, parsed: TranscriptionRequest, outline: dict[str, Any], job: Job, queue: asyncio.Queue
    ) -> AsyncIterator[bytes]:
        """For the page: the outline, the pictures when they are drawn, every pass of every window, the whole."""
        recognizer = self.recognizers[parsed.model]
        assert job.waveform is not None
        drawing = self.help(pictures, job.waveform, recognizer.sample_rate)
        drawing.add_done_callback(lambda _: queue.put_nowait(("pictures",)))
        partials: dict[int, list[int]] = {}
        drawn = False
        yield protocol.event("imputation.start", **outline)
        async for kind, *seen in _items(queue):
            if kind == "comment":
                yield b": waiting\n\n"
            elif kind == "pictures":
                drawn = True
                yield protocol.event("imputation.pictures", **drawing.result())
            elif kind == "pass":
                window, number, partial, confidence = seen
                before = partials.get(window, [recognizer.model.mask] * len(partial))
                partials[window] = partial
                changed = protocol.changes(recognizer, before, partial, confidence)
                yield protocol.event("imputation.pass", window=window, **{"pass": number}, **changed)
        try:
            windows = job.done.result()
        except Failure as failure:
            yield protocol.error_event(failure)
            return
        body = await self.help(protocol.imputation, recognizer, parsed, outline, windows, job.seconds)
        if not drawn:
            yield protocol.event("imputation.pictures", **await drawing)
        yield protocol.event("imputation.done", **body)

    # Models.

    def describe(self, name: str) -> dict[str, Any]:
        """A model under one of its names, for a list of models."""
        model = self.models.find(name)
        recognizer, folder = self.recognizers[model], self.folders[model]
        return {
            "id": name,
            "object": "model",
            "created": int((folder / "config.toml").stat().st_mtime),
            "owned_by": "imputer",
            "root": model,
            "default": model == self.models.default,
            "block_size": self.models.block_sizes[model],
            "strategies": list(STRATEGIES),
            "sample_rate": recognizer.sample_rate,
            "frame_seconds": recognizer.frame_seconds,
            "max_seconds": self.settings.max_seconds,
            "max_trace_seconds": min(self.settings.max_trace_seconds, self.settings.max_seconds),
            "max_upload_bytes": self.settings.max_upload_bytes,
            "lm": recognizer.language_model(self.settings.lm) is not None,
            "hotwords": True,
            "sample": (folder / SAMPLE).is_file(),
        }


def folders(models: tuple[str, ...]) -> dict[str, Path]:
    """The model folders by the names under which clients ask for them."""
    found: dict[str, Path] = {}
    for given in models:
        folder = model_folder(given).resolve()
        name = served_name(folder)
        if found.get(name, folder) != folder:
            raise UsageError(
                f"two models would be called {name}: {found[name]} and {folder}; rename a folder"
            )
        found[name] = folder
    return found


def served_name(folder: Path) -> str:
    """What clients call a model: its folder's name, or its run's, since every run ends in a folder ``model``."""
    return folder.parent.name if folder.name == "model" and folder.parent.name else folder.name


def aliases(given: tuple[tuple[str, str], ...], known: list[str]) -> dict[str, str]:
    """More names for models, checked."""
    for name, model in given:
        if model not in known:
            raise UsageError(
                f"--alias {name}={model}: there is no model {model}; there is {', '.join(known)}"
            )
        if name in known:
            raise UsageError(f"--alias {name}={model}: {name} is the name of a model")
    return dict(given)


async def until(request: Request, future: asyncio.Future) -> Any:
    """The result of a future; ClientDisconnect if the client leaves before that."""
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({future, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not future.done():
            raise ClientDisconnect
        return future.result()
    finally:
        gone.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _items(queue: asyncio.Queue) -> AsyncIterator[tuple]:
    """What is put into a queue, up to None; a comment whenever nothing came for a while."""
    while True:
        try:
            async with asyncio.timeout(SILENCE_SECONDS):
                item = await queue.get()
        except TimeoutError:
            yield ("comment",)
            continue
        if item is None:
            return
        yield item


async def _form(request: Request) -> Any:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "multipart/form-data":
        raise Failure(
            415, f"send multipart/form-data, not {kind[:80] or 'a body without a type'}", code="wrong_type"
        )
    return await request.form(max_files=1, max_fields=FORM_FIELDS, max_part_size=FORM_FIELD_BYTES)


def _file(items: list[tuple[str, Any]]) -> UploadFile:
    """The upload in a form."""
    for name, value in items:
        if isinstance(value, UploadFile) and name != "file":
            raise Failure(
                400,
                f"the upload is in the field {name[:80]!r}; it belongs in 'file'",
                code="wrong_field",
                param="file",
            )
        if name == "file" and isinstance(value, str):
            raise Failure(400, "the field 'file' has no file in it", code="missing_file", param="file")
    found = [value for _, value in items if isinstance(value, UploadFile)]
    if not found:
        names = ", ".join(repr(name[:40]) for name, _ in items[:8]) or "none at all"
        raise Failure(
            400, f"the form has no field 'file'; its fields are {names}", code="missing_file", param="file"
        )
    return found[0]


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)
