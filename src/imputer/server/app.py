"""The server's routes: OpenAI's audio endpoints, one of our own for the page, what operators need, and the page."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse, Response
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from imputer.server import answers, apidocs, imputations, metrics, streams
from imputer.server.failures import Failure
from imputer.server.guard import Guard
from imputer.server.pictures import pictures
from imputer.server.realtime import add_realtime
from imputer.server.records import LEFT
from imputer.server.service import SAMPLE, Service, until
from imputer.server.settings import Settings

STATIC = Path(__file__).parent / "static"
CODES = {400: "invalid_form", 404: "not_found", 405: "wrong_method"}  # of what the web framework refuses
READ = ["GET", "HEAD"]


def create_app(settings: Settings) -> FastAPI:
    """The application, its models loaded."""
    service = Service(settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        # The server answers /health and /ready while the workers load.
        starting = asyncio.ensure_future(asyncio.to_thread(service.start))
        app.state.starting = starting
        yield
        await asyncio.wait([starting])
        await asyncio.to_thread(service.stop)

    # FastAPI's interactive documentation loads scripts from other sites, so it is off.
    app = FastAPI(title="imputer", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.service = service
    app.add_middleware(
        Guard,
        settings=settings,
        batcher=service.batcher,
        sessions=service.sessions,
        metrics=service.metrics,
        state=lambda: service.state,
    )
    _add_failures(app)
    _add_work(app, service)
    add_realtime(app, service)
    _add_models(app, service)
    _add_operation(app, service)
    _add_page(app)
    return app


def _add_work(app: FastAPI, service: Service) -> None:
    async def transcribe(request: Request, task: str) -> Response:
        parsed, name, job = await service.submit(request, task)
        if parsed.stream:
            queue = streams.watched(job, passes=parsed.passes)
            service.begin(job)
            await until(request, job.admitted)  # errors in the upload are still a plain answer
            return streams.response(streams.transcription(service, parsed, job, queue))
        service.begin(job)
        transcript = await service.transcript(job, await until(request, job.done))
        body, kind = await service.offload(answers.answer, parsed, transcript, name, job.warnings)
        headers = {"x-imputer-warning": "; ".join(job.warnings)} if job.warnings else {}
        return Response(body, media_type=kind, headers=headers)

    @app.post("/v1/audio/transcriptions")
    async def transcriptions(request: Request) -> Response:
        return await transcribe(request, "transcribe")

    @app.post("/v1/audio/translations")
    async def translations(request: Request) -> Response:
        return await transcribe(request, "translate")

    @app.post("/v1/imputations")
    async def impute(request: Request) -> Response:
        parsed, name, job = await service.submit(request, trace=True)
        recognizer = service.recognizers[parsed.model]
        queue = streams.watched(job, passes=True) if parsed.stream else None
        service.begin(job)
        await until(request, job.admitted)
        assert job.waveform is not None
        outline = imputations.outline(recognizer, parsed, name, job.waveform)
        if job.warnings:
            outline["warnings"] = job.warnings
        if queue is not None:
            return streams.response(streams.imputation(service, parsed, outline, job, queue))
        drawing = service.offload(pictures, job.waveform, recognizer.sample_rate)
        windows = await until(request, job.done)
        body = await service.offload(
            imputations.imputation, recognizer, parsed, outline, windows, job.seconds
        )
        body["pictures"] = await drawing
        return Response(await service.offload(answers.dumps, body), media_type="application/json")


def _add_models(app: FastAPI, service: Service) -> None:
    @app.api_route("/v1/models", methods=READ)
    async def models() -> JSONResponse:
        names = (*service.models.block_sizes, *service.models.aliases)
        return JSONResponse({"object": "list", "data": [service.describe(name) for name in names]})

    @app.api_route("/v1/models/{name}", methods=READ)
    async def model(name: str) -> JSONResponse:
        return JSONResponse(service.describe(name))

    @app.api_route("/sample.wav", methods=READ)
    async def sample(model: str = "") -> FileResponse:
        name = model or service.models.default  # looked up among the models, never a path
        if name not in service.folders or not (service.folders[name] / SAMPLE).is_file():
            raise Failure(404, "the model has no sample", code="not_found")
        return FileResponse(service.folders[name] / SAMPLE, media_type="audio/wav")


def _add_operation(app: FastAPI, service: Service) -> None:
    @app.api_route("/health", methods=READ)
    async def health() -> JSONResponse:
        return JSONResponse({"status": "draining" if service.draining else "ok"})

    @app.api_route("/ready", methods=READ)
    async def ready() -> JSONResponse:
        state = service.state
        return JSONResponse({"status": state}, 200 if state == "ready" else 503)

    @app.api_route("/metrics", methods=READ)
    async def figures() -> Response:
        return Response(service.metrics.text(), media_type=metrics.CONTENT_TYPE)


def _add_page(app: FastAPI) -> None:
    @app.api_route("/", methods=READ)
    async def page() -> FileResponse:
        return FileResponse(STATIC / "index.html", headers={"cache-control": "no-cache"})

    @app.api_route("/docs", methods=READ)
    async def documentation() -> HTMLResponse:
        return HTMLResponse(apidocs.page())

    @app.api_route("/openapi.json", methods=READ)
    async def description() -> JSONResponse:
        return JSONResponse(apidocs.openapi())

    app.mount("/static", _Static(directory=STATIC))


def _add_failures(app: FastAPI) -> None:
    """One form for every refusal; ``guard`` handles unexpected errors."""

    async def answer(request: Request, error: Exception) -> Response:
        if isinstance(error, Failure):
            failure = error
        elif isinstance(error, ClientDisconnect):
            failure = Failure(LEFT, "the client left")
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
    """Files that browsers revalidate each time, so that a new version is used at once."""

    def file_response(self, *arguments: Any, **options: Any) -> Response:
        response = super().file_response(*arguments, **options)
        response.headers["cache-control"] = "no-cache"
        return response
