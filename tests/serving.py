"""A real server on a free port of this machine, for the tests that need one."""

import io
import threading
import time
from contextlib import contextmanager

import numpy as np
import soundfile

import tones
from imputer.server.app import create_app
from imputer.server.launch import listen, uvicorn_server
from imputer.server.settings import Settings

TEXT = "goluba midago ba lu"


def wav(samples: np.ndarray | None = None, rate: int = tones.RATE, kind: str = "WAV", **options) -> bytes:
    """A recording of ``TEXT``, or of the given samples."""
    buffer = io.BytesIO()
    samples = tones.speak(TEXT, 500)[0] if samples is None else samples
    soundfile.write(buffer, samples, rate, format=kind, **options)
    return buffer.getvalue()


@contextmanager
def serving(*models, **settings):
    """(address, service) of a server that runs in a thread of this process."""
    app = create_app(Settings(models=tuple(map(str, models)), **settings))
    listener = listen("127.0.0.1", 0)
    server = uvicorn_server(app, quiet=True)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", app.state.service
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
