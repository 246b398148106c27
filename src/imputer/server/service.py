"""The parts that the server's routes share: models, queues, and the way of a request through them."""

import asyncio
from collections.abc import Callable, Iterator
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
from imputer.languagemodel.hotwords import spelled
from imputer.models import model_folder
from imputer.server import forms, runners, uploads
from imputer.server.batcher import Batcher
from imputer.server.connections import Connections
from imputer.server.decoders import Decoders
from imputer.server.exchange import too_large
from imputer.server.failures import Failure, shutting_down
from imputer.server.forms import TranscriptionRequest
from imputer.server.jobs import Job
from imputer.server.livesessions import LiveSessions
from imputer.server.metrics import Metrics
from imputer.server.modelnames import Models
from imputer.server.records import Record
from imputer.server.runners import Runner
from imputer.server.settings import Settings
from imputer.server.workers import ProcessRunner
from imputer.transcripts import Transcript

SAMPLE = "sample.wav"  # in a model's folder: a recording to try it on
HELPERS = 2  # threads that draw pictures and join windows


class Service:
    """One server: its models loaded, its queues empty."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.folders = folders(settings.models)
        self.recognizers = runners.load(settings, self.folders)
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

    def _runners(self) -> list[Runner]:
        settings = self.settings
        if settings.workers == 1:
            self.metrics.watch_memory(list)
            return [runners.LocalRunner(self.recognizers, settings)]
        found = [ProcessRunner(settings, self.folders) for _ in range(settings.workers)]
        self.metrics.watch_memory(lambda: [runner.pid for runner in found if runner.pid])
        return list(found)

    def start(self) -> None:
        """Load and warm up the models, and accept work."""
        self.batcher.start()
        self.decoders.start()
        self.started = True

    def refuse_the_rest(self) -> None:
        """Answer 503 to all waiting and running requests."""
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
        """Receive a form and take a place in the queue; returns the request, the name of its file, and the job."""
        form = await uploads.form(request)
        try:
            items = form.multi_items()
            texts = [(name, value) for name, value in items if isinstance(value, str) and name != "file"]
            parsed = self._read(texts, task, trace)
            await self._prepare(parsed)
            file = uploads.file_of(items)
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
        """The fields of a form; keywords that the model cannot write are skipped, such hotwords are refused."""
        settings = self.settings
        parsed = forms.read_request(
            texts, self.models, task, trace=trace, lm=settings.lm, hotwords=settings.hotwords
        )
        recognizer, given = self.recognizers[parsed.model], parsed.options
        expected = [word for word in parsed.suggested if spelled(word, recognizer.vocabulary)]
        return replace(parsed, options=replace(given, hotwords=(*given.hotwords, *expected)))

    async def _prepare(self, parsed: TranscriptionRequest) -> None:
        """Prepare the search for the hotwords of a request; a long list takes a tenth of a second."""
        if parsed.options.hotwords == self.settings.hotwords:
            return
        try:
            await self.offload(self.recognizers[parsed.model].search, parsed.options)
        except UsageError as error:
            raise Failure(400, str(error), code="invalid_value", param="hotwords") from error

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
                warn=job.warn,
            )

        job = Job(parsed.model, parsed.options, recognizer.sample_rate, blocks, file.file.close)
        self.batcher.enrol(job)
        return job

    def begin(self, job: Job) -> None:
        """Start to decode a job; its callbacks for passes and windows must be set before."""
        self.decoders.add(job, self.recognizers[job.model])

    async def transcript(self, job: Job, windows: list[Decoded]) -> Transcript:
        """The windows of a job as one transcript; minutes of audio take too long for the event loop."""
        recognizer = self.recognizers[job.model]

        def join() -> Transcript:
            return recognizer.transcript(recognizer.join(windows), job.seconds)

        return await self.offload(join)

    def offload(self, function: Callable[..., Any], *arguments: Any) -> asyncio.Future:
        """Run a function in a helper thread."""
        return asyncio.get_running_loop().run_in_executor(self.helpers, function, *arguments)

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
            raise UsageError(f"--alias {name}={model}: no model {model}; known: {', '.join(known)}")
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


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)
