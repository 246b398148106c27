"""A real server on a free port of this machine, for the tests that need one."""

import io
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from functools import partial
from urllib.parse import urlsplit

import av
import httpx
import numpy as np
import soundfile

import tones
from imputer.server.app import create_app
from imputer.server.launch import Server, listen
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
    chosen = Settings(models=tuple(map(str, models)), **settings)
    app = create_app(chosen)
    listener = listen("127.0.0.1", 0)
    server = Server(app, chosen)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    while not server.ready:
        assert thread.is_alive(), "the server did not start"
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", app.state.service
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


# Clients.

TRANSCRIPTIONS = "/v1/audio/transcriptions"
get = partial(httpx.get, timeout=200)
post = partial(httpx.post, timeout=200)


def ask(address, content=None, path=TRANSCRIPTIONS, name="speech.wav", headers=None, **fields):
    """The answer to a recording of ``TEXT``, or to another upload."""
    content = wav() if content is None else content
    return post(address + path, files={"file": (name, content)}, data=fields, headers=headers)


def long_speech(words=70, seed=5):
    text = tones.sentence(np.random.default_rng(seed), words)
    return text, tones.speak(text, seed, pause=0.5)[0]


def figure(address, name):
    """The value of a figure without labels, or the sum over its labels."""
    lines = get(f"{address}/metrics").text.splitlines()
    values = [line.rpartition(" ")[2] for line in lines if re.match(rf"{name}(\{{.*\}})? ", line)]
    return sum(map(float, values))


def check_envelope(response, status, code=None):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert code is None or error["code"] == code
    assert error["message"] and "Traceback" not in response.text and "/src/" not in response.text
    assert "/tmp/" not in response.text, "a path of the server shows"
    return error


def connected(address):
    parts = urlsplit(address)
    return socket.create_connection((parts.hostname, parts.port), timeout=100)


def raw_request(content, path=TRANSCRIPTIONS, name="a", **fields):
    """The bytes of a request, as httpx would send them."""
    request = httpx.Request("POST", f"http://localhost{path}", files={"file": (name, content)}, data=fields)
    head = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
    return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + request.read()


def receive_all(connection, data=b""):
    """An answer with its length in the header, or whatever comes until the end; ``data`` has come already."""
    while part := connection.recv(65536):
        data += part
        head, _, body = data.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head)
        if length and len(body) >= int(length[1]):
            break
    return data


def wait_until(condition):
    deadline = time.monotonic() + 200  # a sign of life on a busy machine, not a measure of speed
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)


@contextmanager
def held(service):
    """The network of a server takes a batch and then stops; setting the event lets it continue."""
    go, runner = threading.Event(), service.runners[0]
    run = runner.run

    def wait_and_run(batch, host):
        go.taken.set()
        go.wait()
        run(batch, host)

    go.taken = threading.Event()
    runner.run = wait_and_run
    try:
        yield go
    finally:
        runner.run = run
        go.set()


# The program.


class Program:
    """`imputer serve` as a process, its log in a file."""

    def __init__(self, log, *arguments, before=None, environment=None):
        self.log = log
        with open(log, "w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "imputer", "serve", "--port", "0", *map(str, arguments)],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=os.environ | {"OMP_NUM_THREADS": "1"} | (environment or {}),
                preexec_fn=before,
            )
        line = self.process.stdout.readline()
        found = re.search(r"http://\S+", line)
        assert found, f"{line}{log.read_text()}"
        self.address = found[0]

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if self.process.poll() is None:
            self.process.kill() if kind else self.process.terminate()
        self.process.wait(200)
        self.process.stdout.close()

    def stop(self, number=signal.SIGTERM):
        """End it well, and return its log."""
        self.process.send_signal(number)
        self.process.wait(200)
        errors = self.log.read_text()
        assert self.process.returncode == 0, errors
        assert "Traceback" not in errors, errors
        return errors


def packed(container, codec, samples, rate=48_000):
    """Samples at 16 kHz in a container that libsndfile does not know."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as output:
        stream = output.add_stream(codec, rate=rate, layout="mono")
        resampler = av.AudioResampler(stream.format, "mono", rate, frame_size=stream.codec_context.frame_size)
        frame = av.AudioFrame.from_ndarray(samples[None], format="fltp", layout="mono")
        frame.rate = tones.RATE
        for part in (*resampler.resample(frame), *resampler.resample(None), None):
            output.mux(stream.encode(part))
    return buffer.getvalue()
