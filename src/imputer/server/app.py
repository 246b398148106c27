"""The server: OpenAI's transcription endpoint, one of our own for the page, and the page."""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, Response, StreamingResponse
from fastapi.staticfiles import StaticFiles
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from imputer import models
from imputer.decoding import STRATEGIES, Decoded, Options
from imputer.errors import UsageError
from imputer.recognizer import Recognizer
from imputer.server import protocol
from imputer.server.batcher import Batcher, Job
from imputer.server.failures import Failure
from imputer.server.guard import Guard, Visit, too_large
from imputer.server.metrics import Metrics
from imputer.server.pictures import pictures
from imputer.server.protocol import TranscriptionRequest
from imputer.server.settings import Settings
from imputer.server.uploads import Upload, decode, plain_name, too_long

STATIC = Path(__file__).parent / "static"
SAMPLE = "sample.wav"  # in a model's folder: a recording to try it on
DECODERS = 2  # threads that unpack uploads
PUBLISH_SECONDS = 1.0
FORM_FIELDS, FORM_FIELD_BYTES = 32, 1 << 14
CODES = {400: "invalid_form", 404: "not_found", 405: "wrong_method"}  # of what the web framework refuses


class Service:
    """The parts that a server's routes share."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.folders = folders(settings.models)
        self.recognizers = {
            name: Recognizer.from_pretrained(folder, runtime=settings.runtime)  # type: ignore[arg-type]
            for name, folder in self.folders.items()
        }
        self.metrics = Metrics(settings.metrics_folder)
        self.batcher = Batcher(self.recognizers, settings, self.metrics)
        self.decoders = ThreadPoolExecutor(DECODERS, "imputer-decode", initializer=_one_thread)
        self.block_sizes = {name: r.model.settings.block_size for name, r in self.recognizers.items()}

    def start(self) -> None:
        """Warm up the models, so that the first client waits no longer than others, and open for work."""
        for recognizer in self.recognizers.values():
            silence = np.zeros(recognizer.sample_rate, np.float32)
            options = Options(2, lm=self.settings.lm, hotwords=self.settings.hotwords)
            for result in recognizer.decode([silence, silence[:8000]], options):
                if isinstance(result, Exception):
                    raise result
        self.batcher.start()

    def stop(self) -> None:
        """Finish what is running."""
        self.batcher.stop()
        self.decoders.shutdown()

    async def take(self, request: Request) -> tuple[TranscriptionRequest, str, np.ndarray]:
        """Receive a form: what is asked for, the name of the file, and its samples at the model's rate."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "multipart/form-data":
            raise Failure(
                415,
                f"send multipart/form-data, not {kind[:80] or 'a body without a type'}",
                code="wrong_type",
            )
        async with request.form(max_files=1, max_fields=FORM_FIELDS, max_part_size=FORM_FIELD_BYTES) as form:
            items = form.multi_items()
            asked = protocol.parse(
                [(name, value) for name, value in items if isinstance(value, str) and name != "file"],
                self.block_sizes,
                lm=self.settings.lm,
                hotwords=self.settings.hotwords,
            )
            self._check_words(asked)
            file = _file(items)
            if (file.size or 0) > self.settings.max_upload_bytes:
                raise too_large(self.settings)
            loop = asyncio.get_running_loop()
            waveform = await loop.run_in_executor(self.decoders, self._decode, file, asked.model)
        return asked, plain_name(file.filename), waveform

    def _check_words(self, asked: TranscriptionRequest) -> None:
        """Refuse keywords that the model cannot write before the audio is read."""
        try:
            self.recognizers[asked.model].search(asked.options)
        except UsageError as error:
            raise Failure(400, str(error), code="invalid_value", param="keywords") from error

    def _decode(self, file: UploadFile, model: str) -> np.ndarray:
        recognizer = self.recognizers[model]
        upload = Upload(file.file, file.filename)
        limit = self.settings.max_seconds
        waveform = decode(upload, sample_rate=recognizer.sample_rate, max_seconds=limit)
        seconds = len(waveform) / recognizer.sample_rate
        if seconds > limit + 0.1:  # a resampler may add a few samples
            raise too_long(upload.name, limit)
        if seconds < recognizer.frame_seconds:
            raise Failure(
                400,
                f"{upload.name} is {seconds * 1000:.0f} ms long, less than a frame of "
                f"{recognizer.frame_seconds * 1000:.0f} ms",
                code="audio_too_short",
                param="file",
            )
        return waveform

    def job(self, asked: TranscriptionRequest, waveform: np.ndarray, *, trace: bool = False) -> Job:
        recognizer = self.recognizers[asked.model]
        return Job(
            asked.model,
            replace(asked.options, trace=trace),
            recognizer.cut(waveform),
            len(waveform) / recognizer.sample_rate,
            recognizer.sample_rate,
        )

    def submit(self, request: Request, job: Job) -> None:
        visit: Visit = request.scope["imputer.visit"]
        self.batcher.submit(job)
        visit.jobs.append(job)
        if visit.expecting:
            visit.expecting = False
            self.batcher.expect(-1)

    async def result(self, request: Request, job: Job) -> list[Decoded]:
        """The results of the windows; ClientDisconnect if the client goes away before that."""
        gone = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait({job.done, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not job.done.done():
                raise ClientDisconnect
            return job.done.result()
        finally:
            gone.cancel()

    async def events(
        self, asked: TranscriptionRequest, job: Job, queue: asyncio.Queue
    ) -> AsyncIterator[bytes]:
        """One event a pass with the partial alignment, one for what it settled of the text, and the end."""
        recognizer = self.recognizers[asked.model]
        revising = asked.options.strategy in protocol.REVISING or recognizer.search(asked.options) is not None
        settled = protocol.Settled(recognizer, len(job.windows), revising)
        hop_seconds = recognizer.window_frames()[1] * recognizer.frame_seconds
        while (seen := await queue.get()) is not None:
            window, number, partial, confidence = seen
            mask = recognizer.model.mask
            yield protocol.event(
                "imputer.pass",
                window=window,
                offset=round(window * hop_seconds, 3),
                frame_seconds=recognizer.frame_seconds,
                **{"pass": number},
                alignment=recognizer.symbols(partial),
                confidence=[round(c, 3) for c in confidence],
                committed=[token != mask for token in partial],
            )
            if event := _delta(asked, *settled.delta(window, partial, confidence)):
                yield event
        try:
            transcript = recognizer.transcript(recognizer.join(job.done.result()), job.seconds)
        except Failure as failure:
            yield protocol.error_event(failure)
            return
        if event := _delta(asked, *settled.rest(transcript)):
            yield event
        more: dict[str, Any] = {"logprobs": protocol.logprobs(transcript.tokens)} if asked.logprobs else {}
        yield protocol.event(
            "transcript.text.done",
            text=transcript.text,
            seconds=transcript.seconds,
            passes=transcript.passes,
            words=[protocol.word(word) for word in transcript.words],
            **more,
        )

    async def imputing(
        self,
        asked: TranscriptionRequest,
        outline: dict[str, Any],
        job: Job,
        drawing: asyncio.Future,
        queue: asyncio.Queue,
    ) -> AsyncIterator[bytes]:
        """For the page: the outline, the pictures when they are drawn, every pass of every window, the whole."""
        recognizer = self.recognizers[asked.model]
        partials: dict[int, list[int]] = {}
        drawing.add_done_callback(lambda _: queue.put_nowait(drawing))
        yield protocol.event("imputation.start", **outline)
        drawn = False
        while (seen := await queue.get()) is not None:
            if seen is drawing:
                drawn = True
                yield protocol.event("imputation.pictures", **drawing.result())
                continue
            window, number, partial, confidence = seen
            before = partials.get(window, [recognizer.model.mask] * len(partial))
            partials[window] = partial
            changed = protocol.changes(recognizer, before, partial, confidence)
            yield protocol.event("imputation.pass", window=window, **{"pass": number}, **changed)
        try:
            body = protocol.imputation(recognizer, asked, outline, job.done.result())
        except Failure as failure:
            yield protocol.error_event(failure)
            return
        if not drawn:
            yield protocol.event("imputation.pictures", **await drawing)
        yield protocol.event("imputation.done", **body)

    def describe(self, name: str) -> dict[str, Any]:
        """A model, for a list of models."""
        recognizer, folder = self.recognizers[name], self.folders[name]
        return {
            "id": name,
            "object": "model",
            "created": int((folder / "config.toml").stat().st_mtime),
            "owned_by": "imputer",
            "default": name == next(iter(self.recognizers)),
            "block_size": self.block_sizes[name],
            "strategies": list(STRATEGIES),
            "sample_rate": recognizer.sample_rate,
            "frame_seconds": recognizer.frame_seconds,
            "max_seconds": self.settings.max_seconds,
            "max_upload_bytes": self.settings.max_upload_bytes,
            "sample": (folder / SAMPLE).is_file(),
        }


def create_app(settings: Settings) -> FastAPI:
    """The application, its models loaded."""
    service = Service(settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, service.start)
        publisher = asyncio.ensure_future(_publish(service.metrics))
        yield
        publisher.cancel()
        await loop.run_in_executor(None, service.stop)

    # The interactive documentation that FastAPI offers is loaded from elsewhere: nothing here is.
    app = FastAPI(title="imputer", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.service = service
    app.add_middleware(Guard, settings=settings, batcher=service.batcher, metrics=service.metrics)
    _add_failures(app)

    @app.post("/v1/audio/transcriptions")
    async def transcriptions(request: Request) -> Response:
        asked, name, waveform = await service.take(request)
        job = service.job(asked, waveform)
        if asked.stream:
            return _streamed(service, request, job, lambda queue: service.events(asked, job, queue))
        service.submit(request, job)
        recognizer = service.recognizers[asked.model]
        decoded = recognizer.join(await service.result(request, job))
        transcript = recognizer.transcript(decoded, job.seconds)
        body, kind = protocol.answer(asked, transcript, name)
        return Response(body, media_type=kind)

    @app.post("/v1/imputations")
    async def imputations(request: Request) -> Response:
        asked, name, waveform = await service.take(request)
        recognizer = service.recognizers[asked.model]
        job = service.job(asked, waveform, trace=True)
        outline = protocol.outline(recognizer, asked, name, job.seconds, job.windows)

        def draw() -> asyncio.Future:
            return asyncio.get_running_loop().run_in_executor(
                service.decoders, pictures, waveform, recognizer.sample_rate
            )

        if asked.stream:
            return _streamed(
                service, request, job, lambda queue: service.imputing(asked, outline, job, draw(), queue)
            )
        service.submit(request, job)
        drawing = draw()
        results = await service.result(request, job)
        body = protocol.imputation(recognizer, asked, outline, results)
        return Response(protocol.dumps(body | {"pictures": await drawing}), media_type="application/json")

    @app.get("/v1/models")
    async def models() -> JSONResponse:
        return JSONResponse(
            {"object": "list", "data": [service.describe(name) for name in service.recognizers]}
        )

    @app.get("/v1/models/{name}")
    async def model(name: str) -> JSONResponse:
        if name not in service.recognizers:
            raise Failure(404, f"there is no model {name[:80]!r} here", code="model_not_found", param="model")
        return JSONResponse(service.describe(name))

    @app.get("/health")
    async def health() -> JSONResponse:
        alive = service.batcher.thread.is_alive() and not service.batcher.stopping
        return JSONResponse({"status": "ok" if alive else "stopping"}, 200 if alive else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/sample.wav")
    async def sample(model: str = "") -> FileResponse:
        name = model or next(iter(service.folders))  # looked up among the models, never a path
        if name not in service.folders or not (service.folders[name] / SAMPLE).is_file():
            raise Failure(404, "there is no sample", code="not_found")
        return FileResponse(service.folders[name] / SAMPLE, media_type="audio/wav")

    @app.get("/")
    async def page() -> FileResponse:
        return FileResponse(STATIC / "index.html", headers={"cache-control": "no-cache"})

    app.mount("/static", _Static(directory=STATIC))
    return app


def folders(names: tuple[str, ...]) -> dict[str, Path]:
    """The model folders by the names under which clients ask for them."""
    found: dict[str, Path] = {}
    for given in names:
        folder = models.model_folder(given).resolve()
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


def _streamed(
    service: Service,
    request: Request,
    job: Job,
    events: Callable[[asyncio.Queue], AsyncIterator[bytes]],
) -> StreamingResponse:
    queue: asyncio.Queue = asyncio.Queue()
    job.watch = lambda *seen: queue.put_nowait(seen)
    job.done.add_done_callback(lambda _: queue.put_nowait(None))
    service.submit(request, job)
    return StreamingResponse(
        events(queue),
        media_type="text/event-stream",
        headers={"cache-control": "no-store", "x-accel-buffering": "no"},
    )


def _delta(asked: TranscriptionRequest, text: str, tokens: list) -> bytes:
    if not text:
        return b""
    more = {"logprobs": protocol.logprobs(tokens)} if asked.logprobs else {}
    return protocol.event("transcript.text.delta", delta=text, **more)


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
    uploads = [value for _, value in items if isinstance(value, UploadFile)]
    if not uploads:
        names = ", ".join(repr(name[:40]) for name, _ in items[:8]) or "none at all"
        raise Failure(
            400, f"the form has no field 'file'; its fields are {names}", code="missing_file", param="file"
        )
    return uploads[0]


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _publish(metrics: Metrics) -> None:
    while True:
        metrics.publish()
        await asyncio.sleep(PUBLISH_SECONDS)


def _add_failures(app: FastAPI) -> None:
    """What is refused is refused in one form; the guard sees to what nobody thought of."""

    async def answer(request: Request, error: Exception) -> Response:
        if isinstance(error, Failure):
            failure = error
        elif isinstance(error, ClientDisconnect):
            failure = Failure(499, "the client went away")
        else:
            assert isinstance(error, HTTPException)
            failure = Failure(
                error.status_code,
                str(error.detail),
                code=CODES.get(error.status_code),
                headers=dict(error.headers or {}),
            )
        return JSONResponse(failure.envelope(), failure.status, headers=failure.headers)

    for kind in (Failure, ClientDisconnect, HTTPException):
        app.add_exception_handler(kind, answer)


class _Static(StaticFiles):
    """Files that browsers ask about again each time, so that a new version is seen at once."""

    def file_response(self, *arguments: Any, **options: Any) -> Response:
        response = super().file_response(*arguments, **options)
        response.headers["cache-control"] = "no-cache"
        return response


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)
