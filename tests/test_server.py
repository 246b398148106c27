"""The server, as its clients see it: over a real connection, on the language of tones."""

import asyncio
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import av
import httpx
import numpy as np
import openai
import pytest
import soundfile
from hypothesis import given, strategies

import tones
from imputer import decoding, transcripts
from imputer.decoding import Options
from imputer.errors import UsageError
from imputer.recognizer import Recognizer
from imputer.server import metrics, uploads
from imputer.server.app import folders
from imputer.server.batcher import BATCH_COST_SECONDS, Batcher, Job, Window, choose
from imputer.server.failures import Failure
from imputer.server.metrics import Metrics
from imputer.server.settings import Settings
from serving import TEXT, serving, wav

TRANSCRIPTIONS = "/v1/audio/transcriptions"
get = partial(httpx.get, timeout=100)
post = partial(httpx.post, timeout=100)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tones.save(tmp_path_factory.mktemp("models") / "tones")


@pytest.fixture(scope="module")
def listener(folder):
    return Recognizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def running(folder):
    with serving(folder) as (address, service):
        yield address, service


@pytest.fixture(scope="module")
def address(running):
    return running[0]


@pytest.fixture(scope="module")
def client(address):
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(address, content=None, path=TRANSCRIPTIONS, name="speech.wav", headers=None, **fields):
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


# What OpenAI's own client sees.


def test_openai_client_json_and_text(client):
    assert client.audio.transcriptions.create(model="tones", file=("a.wav", wav())).text == TEXT
    as_text = client.audio.transcriptions.create(
        model="whisper-1", file=("a.wav", wav()), response_format="text", language="xx"
    )
    assert as_text == TEXT + "\n"


@pytest.mark.parametrize("kind", ["srt", "vtt"])
def test_openai_client_subtitles(client, listener, kind):
    got = client.audio.transcriptions.create(model="tones", file=("a.wav", wav()), response_format=kind)
    assert got == transcripts.FORMATS[kind](listener.transcribe(io.BytesIO(wav())), "a.wav")


def test_openai_client_verbose_json(client, listener):
    expected = listener.transcribe(io.BytesIO(wav()))
    got = client.audio.transcriptions.create(
        model="tones",
        file=("a.wav", wav()),
        response_format="verbose_json",
        timestamp_granularities=["word", "segment"],
    )
    assert (got.text, got.duration) == (TEXT, expected.seconds)
    assert [(w.word, w.start, w.end) for w in got.words] == [(w.text, w.start, w.end) for w in expected.words]
    (segment,) = got.segments
    assert (segment.text, segment.start, segment.end) == (
        TEXT,
        expected.words[0].start,
        expected.words[-1].end,
    )
    logs = [np.log(token.confidence) for token in expected.tokens]
    assert segment.avg_logprob == pytest.approx(np.mean(logs), abs=1e-3)
    only_words = client.audio.transcriptions.create(
        model="tones", file=("a", wav()), response_format="verbose_json", timestamp_granularities=["word"]
    )
    assert only_words.segments is None and len(only_words.words) == 4


def test_openai_client_logprobs(client, listener):
    got = client.audio.transcriptions.create(model="tones", file=("a.wav", wav()), include=["logprobs"])
    assert "".join(entry.token for entry in got.logprobs).split() == TEXT.split()
    expected = [np.log(t.confidence) for t in listener.transcribe(io.BytesIO(wav())).tokens]
    assert [entry.logprob for entry in got.logprobs] == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("strategy", decoding.STRATEGIES)
def test_openai_client_stream(client, listener, strategy):
    """Deltas add up to the text; our own events pass through the client and hold the partial alignments."""
    with client.audio.transcriptions.create(
        model="tones",
        file=("a.wav", wav()),
        stream=True,
        extra_body={"block_size": 6, "strategy": strategy},
    ) as stream:
        events = list(stream)
    expected = listener.transcribe(io.BytesIO(wav()), block_size=6, strategy=strategy, trace=True)
    assert (events[-1].type, events[-1].text) == ("transcript.text.done", expected.text)
    assert "".join(e.delta for e in events if e.type == "transcript.text.delta") == expected.text
    passes = [event.to_dict() for event in events if event.type == "imputer.pass"]
    assert [p["pass"] for p in passes] == list(range(1, expected.passes + 1))
    assert [p["alignment"] for p in passes] == expected.trace
    for p in passes:
        assert p["committed"] == [symbol != transcripts.MASK for symbol in p["alignment"]]
        assert all((c > 0) == known for c, known in zip(p["confidence"], p["committed"], strict=True))
    spoken = [c for c, symbol in zip(passes[-1]["confidence"], passes[-1]["alignment"], strict=True)
              if symbol not in (transcripts.BLANK, transcripts.MASK)]  # fmt: skip
    assert spoken == pytest.approx([token.confidence for token in expected.tokens], abs=2e-3)


def test_stream_of_a_long_recording(client, listener):
    """Windows come one after the other; what is said early is settled before the end, and the sum is the whole."""
    text, samples = long_speech()
    with client.audio.transcriptions.create(
        model="tones", file=("a.wav", wav(samples)), stream=True
    ) as stream:
        events = list(stream)
    deltas = [event.delta for event in events if event.type == "transcript.text.delta"]
    assert "".join(deltas) == events[-1].text == text == listener.transcribe(samples).text
    assert len(deltas) > 2
    assert {event.to_dict()["window"] for event in events if event.type == "imputer.pass"} == set(range(4))


def test_openai_client_models(client):
    assert [model.id for model in client.models.list()] == ["tones"]
    assert client.models.retrieve("tones").owned_by == "imputer"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_openai_client_errors(client, folder):
    with pytest.raises(openai.NotFoundError, match="there is no model 'other' here; there is tones"):
        client.audio.transcriptions.create(model="other", file=("a.wav", wav()))
    with pytest.raises(openai.BadRequestError, match="block_size"):
        client.audio.transcriptions.create(model="tones", file=("a", wav()), extra_body={"block_size": 0})
    with pytest.raises(openai.APIStatusError) as caught:
        client.audio.transcriptions.create(model="tones", file=("a.wav", b"not audio at all"))
    assert caught.value.status_code == 415


# What other clients may send.


@pytest.mark.parametrize(
    ("kind", "options"),
    [("WAV", {}), ("WAV", {"subtype": "FLOAT"}), ("FLAC", {}), ("OGG", {}), ("MP3", {}), ("AIFF", {})],
)
@pytest.mark.parametrize("rate", [16_000, 44_100])
def test_kinds_of_audio(address, kind, options, rate):
    import soxr

    samples = soxr.resample(tones.speak(TEXT, 500)[0], tones.RATE, rate)
    content = wav(np.stack([samples, samples], 1), rate, kind, **options)
    assert ask(address, content).json()["text"] == TEXT


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


@pytest.mark.parametrize(("container", "codec"), [("webm", "libopus"), ("mp4", "aac"), ("adts", "aac")])
def test_containers_of_browsers_and_phones(address, container, codec):
    """The same sound comes out, but for what the codec does to it: a little delay, a little noise."""
    samples = tones.speak(TEXT, 500)[0]
    content = packed(container, codec, samples)
    got = uploads.decode(uploads.Upload(io.BytesIO(content), "a"), sample_rate=tones.RATE, max_seconds=9.0)
    assert abs(len(got) - len(samples)) < 1100
    kept = samples[:-2000]
    best = max(np.corrcoef(kept, got[delay : delay + len(kept)])[0, 1] for delay in range(1100))
    assert best > 0.99
    assert ask(address, content).status_code == 200


def test_long_recording_is_joined(address):
    text, samples = long_speech()
    assert ask(address, wav(samples)).json()["text"] == text


def test_block_size_and_strategy_reach_the_decoder(address):
    for size, strategy in ((1, "block"), (5, "block"), (5, "right_most_last")):
        got = ask(address, path="/v1/imputations", block_size=size, strategy=strategy).json()
        assert len(got["passes"]) == size and (got["block_size"], got["strategy"]) == (size, strategy)


ENVELOPES = {
    "not audio": (415, {"content": b"hello, I am text"}, "unsupported_format"),
    "an executable": (415, {"content": b"\x7fELF" + bytes(300)}, "unsupported_format"),
    "an HTML page": (415, {"content": b"<html>no</html>"}, "unsupported_format"),
    "empty upload": (400, {"content": b""}, "empty_file"),
    "no samples": (400, {"content": wav(np.zeros(0, np.float32))}, "invalid_audio"),
    "one sample": (400, {"content": wav(np.zeros(1, np.float32))}, "audio_too_short"),
    "not a number": (
        400,
        {"content": wav(np.full(8000, np.nan, np.float32), subtype="FLOAT")},
        "invalid_audio",
    ),
    "cut off": (400, {"content": wav()[:4000]}, "invalid_audio"),
    "cut off FLAC": (400, {"content": wav(kind="FLAC")[:9000]}, "invalid_audio"),
    "cut off MP3 header": (415, {"content": b"ID3\x04\x00"}, "unsupported_format"),
    "damaged webm": (400, {"content": b"\x1aE\xdf\xa3" + bytes(4000)}, "invalid_audio"),
    "damaged mp4": (400, {"content": b"\x00\x00\x00\x20ftypM4A " + bytes(4000)}, "invalid_audio"),
    "half an SPHERE header": (415, {"content": b"NIST_1A\n   1024\n"}, "unsupported_format"),
    "unknown format": (400, {"response_format": "yaml"}, "invalid_value"),
    "unknown strategy": (400, {"strategy": "guess"}, "invalid_value"),
    "block size 0": (400, {"block_size": "0"}, "invalid_value"),
    "block size 1e99": (400, {"block_size": "9" * 99}, "invalid_value"),
    "unknown granularity": (
        400,
        {"response_format": "verbose_json", "timestamp_granularities[]": "letter"},
        "invalid_value",
    ),
    "granularity of text": (400, {"timestamp_granularities[]": "word"}, "invalid_value"),
    "logprobs of text": (400, {"include[]": "logprobs", "response_format": "text"}, "invalid_value"),
    "stream maybe": (400, {"stream": "maybe"}, "invalid_value"),
    "stream of subtitles": (400, {"stream": "true", "response_format": "srt"}, "invalid_value"),
    "misspelt field": (400, {"block_sise": "8"}, "invalid_value"),
    "field twice": (400, {"model": ["tones", "tones"]}, "invalid_value"),
    "unknown model": (404, {"model": "../../etc"}, "model_not_found"),
}


@pytest.mark.parametrize("what", ENVELOPES)
def test_bad_input_gets_an_envelope(address, what):
    status, request, code = ENVELOPES[what]
    check_envelope(ask(address, **request), status, code)


def check_envelope(response, status, code=None):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert code is None or error["code"] == code
    assert error["message"] and "Traceback" not in response.text and "/src/" not in response.text
    assert "/tmp/" not in response.text, "a path of the server shows"
    return error


def test_forms_that_are_none(address):
    url = address + TRANSCRIPTIONS
    check_envelope(post(url, json={"file": "a.wav"}), 415)
    check_envelope(post(url), 415)
    check_envelope(post(url, data={"file": "a.wav"}), 415)
    check_envelope(post(url, files={"model": (None, "tones")}), 400, "missing_file")
    error = check_envelope(post(url, files={"audio": ("a.wav", wav())}), 400, "wrong_field")
    assert "'audio'" in error["message"] and "'file'" in error["message"]
    check_envelope(post(url, files={"file": (None, "text")}), 400, "missing_file")
    check_envelope(post(url, files=[("file", ("a", wav())), ("file", ("b", wav()))]), 400, "invalid_form")
    garbage = {"content-type": "multipart/form-data; boundary=xx"}
    check_envelope(post(url, content=b"no boundary here", headers=garbage), 400)
    check_envelope(post(url, content=b"--xx\r\nhalf a", headers=garbage), 400)
    check_envelope(post(url, content=b"", headers={"content-type": "multipart/form-data"}), 400)
    many = [(f"field{n}", (None, "x")) for n in range(100)]
    check_envelope(post(url, files=many), 400)
    check_envelope(get(url), 405, "wrong_method")
    check_envelope(get(address + "/nothing/here"), 404)


# Limits.


@pytest.fixture(scope="module")
def small(folder):
    """A server with small limits and a key."""
    limits = {"max_upload_bytes": 200_000, "max_seconds": 5.0, "upload_idle_seconds": 0.5}
    with serving(folder, api_keys=("secret", "spare"), **limits) as (address, service):
        yield address, service


KEY = {"authorization": "Bearer secret"}


def test_keys(small):
    address, _ = small
    error = check_envelope(ask(address), 401, "invalid_api_key")
    assert error["type"] == "authentication_error"
    for header in ("Bearer wrong", "Bearer", "secret", "Basic secret", "Bearer secret2", "Bearer \xff"):
        check_envelope(ask(address, headers={"authorization": header.encode("latin-1")}), 401)
    for key in ("secret", "spare"):
        assert ask(address, headers={"authorization": f"Bearer {key}"}).json()["text"] == TEXT
    for path in ("/v1/models", "/metrics"):
        check_envelope(get(address + path), 401)
        assert get(address + path, headers=KEY).status_code == 200
    for path in ("/", "/health", "/static/style.css"):
        assert get(address + path).status_code == 200
    wrong = openai.OpenAI(base_url=f"{address}/v1", api_key="wrong", max_retries=0)
    with wrong, pytest.raises(openai.AuthenticationError):
        wrong.models.list()


def test_too_large_is_refused_at_once(small):
    """The header gives it away: nothing is read, and a client that asks for leave never sends it."""
    address, _ = small
    check_envelope(ask(address, bytes(1_000_000), headers=KEY), 413, "file_too_large")
    head = (
        f"POST {TRANSCRIPTIONS} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\n"
        "Content-Type: multipart/form-data; boundary=x\r\nContent-Length: 1000000\r\n"
        "Expect: 100-continue\r\n\r\n"
    )
    with connected(address) as connection:
        connection.sendall(head.encode())
        assert connection.recv(4096).startswith(b"HTTP/1.1 413")


def test_too_large_is_refused_while_it_arrives(small):
    """Without a length in the header the server stops as soon as it has seen too much, and says so."""
    address, _ = small
    sent = 0

    def body():
        nonlocal sent
        yield b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
        while sent < 50_000_000:
            sent += 50_000
            yield bytes(50_000)

    with connected(address) as connection:
        head = (
            f"POST {TRANSCRIPTIONS} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\n"
            "Content-Type: multipart/form-data; boundary=x\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        connection.sendall(head.encode())
        connection.settimeout(0.05)
        answer = b""
        for part in body():
            connection.settimeout(10)
            connection.sendall(f"{len(part):x}\r\n".encode() + part + b"\r\n")
            connection.settimeout(0.02)
            try:
                answer = connection.recv(100)
                connection.settimeout(10)
                answer = receive_all(connection, answer)
                break
            except TimeoutError:
                continue
    assert answer.startswith(b"HTTP/1.1 413") and b"file_too_large" in answer
    assert sent < 2_000_000


def test_a_client_that_sends_all_before_it_reads_hears_the_refusal(small):
    address, _ = small
    for _ in range(5):
        check_envelope(ask(address, bytes(5_000_000), headers=KEY), 413)
        check_envelope(ask(address, bytes(5_000_000)), 401)


def test_stalled_upload(small):
    address, _ = small
    head = (
        f"POST {TRANSCRIPTIONS} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\n"
        "Content-Type: multipart/form-data; boundary=x\r\nContent-Length: 1000\r\n\r\n--x"
    )
    with connected(address) as connection:
        connection.sendall(head.encode())
        assert connection.recv(4096).startswith(b"HTTP/1.1 408")


def silence(kind, seconds):
    buffer = io.BytesIO()
    with soundfile.SoundFile(buffer, "w", tones.RATE, 1, format=kind) as file:
        left = int(seconds * tones.RATE)
        while left:  # in parts: libsndfile overflows its stack on minutes of Ogg at once
            part = min(left, tones.RATE)
            file.write(np.zeros(part, np.float32))
            left -= part
    return buffer.getvalue()


def test_small_files_that_unpack_to_hours(small):
    address, _ = small
    for content in (
        silence("FLAC", 3600),
        silence("OGG", 600),
        silence("WAV", 5.1),
        packed("webm", "libopus", np.zeros(60 * tones.RATE, np.float32)),
        packed("mp4", "aac", np.zeros(60 * tones.RATE, np.float32)),
    ):
        assert len(content) < 200_000
        check_envelope(ask(address, content, headers=KEY), 413, "audio_too_long")
    assert ask(address, silence("FLAC", 4.9), headers=KEY).status_code == 200


def test_decoding_stops_at_the_limit():
    """A stream that says nothing of its length is not decoded to its end."""
    content = bytearray(silence("FLAC", 2400))
    content[8 + 13] &= 0xF0  # STREAMINFO: number of samples, 36 bits, 0 = not known
    content[8 + 14 : 8 + 18] = bytes(4)

    class Counting(io.BytesIO):
        read_bytes = 0

        def read(self, size=-1):
            data = super().read(size)
            Counting.read_bytes += len(data)
            return data

    with pytest.raises(Failure) as caught:
        uploads.decode(uploads.Upload(Counting(content), "a.flac"), sample_rate=tones.RATE, max_seconds=5.0)
    assert caught.value.status == 413
    assert Counting.read_bytes < 0.75 * len(content)

    media = packed("webm", "libopus", np.zeros(120 * tones.RATE, np.float32))
    Counting.read_bytes = 0
    with pytest.raises(Failure) as caught:
        uploads.decode(uploads.Upload(Counting(media), "a.webm"), sample_rate=tones.RATE, max_seconds=5.0)
    assert caught.value.status == 413
    assert Counting.read_bytes < 0.75 * len(media)


def test_odd_headers_are_refused(small):
    address, _ = small
    for rate, channels in ((10, 1), (2_000_000, 1), (16_000, 200)):
        content = wav(np.zeros((100, channels), np.float32), rate)
        check_envelope(ask(address, content, headers=KEY), 400, "invalid_audio")


def test_playlists_are_not_followed(address):
    """ffmpeg, left to guess, would open what a playlist names."""
    with socket.create_server(("127.0.0.1", 0)) as bait:
        bait.settimeout(0.3)
        url = f"http://127.0.0.1:{bait.getsockname()[1]}/a.wav"
        for content in (
            f"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\n{url}\n#EXT-X-ENDLIST\n",
            f"ffconcat version 1.0\nfile '{url}'\n",
            "ffconcat version 1.0\nfile '/etc/passwd'\n",
            f"[playlist]\nFile1={url}\n",
            f"v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nm=audio {bait.getsockname()[1]} RTP/AVP 0\n",
        ):
            for name in ("a.m3u8", "a.wav", "/etc/passwd", "../../../etc/passwd"):
                check_envelope(ask(address, content.encode(), name=name), 415)
        with pytest.raises(TimeoutError):
            bait.accept()


def test_names_are_only_names(address):
    for name in ("/etc/passwd", "..\\..\\windows\\system32", "a\x00b.wav", "x" * 5000, "é\u202e.wav"):
        answer = ask(address, name=name)
        assert answer.status_code == 400 or answer.json()["text"] == TEXT
    assert ask(address, name="/etc/passwd").json()["text"] == TEXT
    assert uploads.plain_name("/etc/passwd") == "passwd"
    assert uploads.plain_name("a\nb\x1b[31m.wav") == "ab[31m.wav"
    assert uploads.plain_name(None) == uploads.plain_name("..//") == "the upload"
    for path in ("/static/../app.py", "/static/%2e%2e/app.py", "/static/..%2fapp.py", "//etc/passwd"):
        assert get(address + path).status_code == 404


def test_headers(address):
    for path in ("/", "/health", "/static/main.js", "/nothing", "/v1/models"):
        headers = get(address + path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"
        assert "server" not in headers
    assert get(f"{address}/static/main.js").headers["content-type"].startswith("text/javascript")


def test_pages_of_other_sites_may_not_post(address):
    for site in ("cross-site", "same-site"):
        check_envelope(ask(address, headers={"sec-fetch-site": site}), 403)
    assert ask(address, headers={"sec-fetch-site": "same-origin"}).status_code == 200


# The queue.


def connected(address):
    parts = urlsplit(address)
    return socket.create_connection((parts.hostname, parts.port), timeout=100)


def raw_request(content, **fields):
    """The bytes of a request, as httpx would send them."""
    request = httpx.Request("POST", f"http://x{TRANSCRIPTIONS}", files={"file": ("a", content)}, data=fields)
    head = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
    return f"POST {TRANSCRIPTIONS} HTTP/1.1\r\n{head}\r\n".encode() + request.read()


def test_many_clients_get_their_own_answers(running):
    address, _ = running
    random = np.random.default_rng(1)
    texts = [tones.sentence(random, int(n)) for n in random.integers(1, 7, 48)]
    before = figure(address, "imputer_batch_size_count")
    with ThreadPoolExecutor(16) as pool:
        answers = list(
            pool.map(
                lambda item: ask(address, wav(tones.speak(item[1], item[0])[0])).json()["text"],
                enumerate(texts),
            )
        )
    assert answers == texts
    assert figure(address, "imputer_batch_size_count") - before < len(texts), "nothing was batched"


def test_bad_uploads_do_not_hurt_others(running):
    address, _ = running
    good, bad = wav(), [b"", b"junk", wav()[:3000], wav(np.full(9000, np.nan, np.float32), subtype="FLOAT")]
    contents = [bad[n // 2 % len(bad)] if n % 2 else good for n in range(40)]
    with ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(lambda content: ask(address, content), contents))
    for n, answer in enumerate(answers):
        assert answer.status_code in (400, 415) if n % 2 else answer.json()["text"] == TEXT


def job_of(samples, size=4):
    samples = samples if isinstance(samples, list) else [samples]
    seconds = sum(map(len, samples)) / tones.RATE
    return Job("tones", Options(size), samples, seconds, tones.RATE)


def batcher_of(listener, **settings):
    return Batcher({"tones": listener}, Settings(models=("tones",), **settings), Metrics())


def test_one_that_breaks_the_batch_breaks_alone(listener):
    """Samples that make the network give NaN: that one is refused, the others are answered."""
    good, _ = tones.speak(TEXT, 500)
    broken = np.full(len(good), np.inf, np.float32)

    async def run():
        batcher = batcher_of(listener)
        jobs = [job_of(samples) for samples in (good, broken, good)]
        for job in jobs:
            batcher.submit(job)
        batcher.start()
        results = await asyncio.gather(*(job.done for job in jobs), return_exceptions=True)
        batcher.stop()
        return results

    first, second, third = asyncio.run(run())
    assert isinstance(second, Failure) and second.status == 400 and "NaN" in str(second.message)
    for (decoded,) in (first, third):
        assert listener.transcript(decoded, 1.0).text == TEXT


def test_a_full_queue_says_when_to_come_back(listener):
    async def run():
        batcher = batcher_of(listener, max_waiting_seconds=10.0)
        batcher.submit(job_of(np.zeros(8 * tones.RATE, np.float32)))
        with pytest.raises(Failure) as caught:
            batcher.submit(job_of(np.zeros(4 * tones.RATE, np.float32)))
        batcher.submit(job_of(np.zeros(tones.RATE, np.float32)))
        return caught.value, len(batcher.waiting)

    failure, waiting = asyncio.run(run())
    assert failure.status == 429 and int(failure.headers["Retry-After"]) >= 1
    assert waiting == 2


def test_too_many_requests(folder):
    """A request that is still arriving holds the only place; the next is told so, and the first is served."""
    with serving(folder, max_requests=1) as (address, _):
        request = raw_request(wav())
        with connected(address) as connection:
            connection.sendall(request[:2000])
            wait_until(lambda: figure(address, "imputer_requests_in_progress") == 1)
            refusal = ask(address)
            error = check_envelope(refusal, 429, "queue_full")
            assert int(refusal.headers["retry-after"]) >= 1 and "try again" in error["message"]
            assert get(f"{address}/health").status_code == 200
            connection.sendall(request[2000:])
            assert TEXT.encode() in receive_all(connection)
        assert ask(address).status_code == 200
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        with client, connected(address) as connection:
            connection.sendall(request[:2000])
            wait_until(lambda: figure(address, "imputer_requests_in_progress") == 1)
            with pytest.raises(openai.RateLimitError):
                client.audio.transcriptions.create(model="tones", file=("a", wav()))


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


@pytest.mark.parametrize("stream", ["false", "true"])
def test_abandoned_requests_are_dropped(folder, stream):
    """A long recording whose client has gone does not run to its end, nor keep its place."""
    content = wav(np.tile(long_speech()[1], 7))  # more than 500 s: 26 windows
    with serving(folder) as (address, service):
        with connected(address) as connection:
            connection.sendall(raw_request(content, block_size="64", stream=stream))
            wait_until(lambda: figure(address, "imputer_batch_size_count") >= 1)
        wait_until(lambda: figure(address, "imputer_abandoned_total") == 1)
        wait_until(lambda: figure(address, "imputer_requests_in_progress") == 0)
        assert figure(address, "imputer_queue_depth") == 0 and not service.batcher.waiting
        assert figure(address, "imputer_audio_seconds_total") == 0
        assert ask(address).json()["text"] == TEXT


def test_abandoned_while_uploading(folder):
    with serving(folder) as (address, _):
        with connected(address) as connection:
            connection.sendall(raw_request(wav())[:3000])
            wait_until(lambda: figure(address, "imputer_requests_in_progress") == 1)
        wait_until(lambda: figure(address, "imputer_requests_in_progress") == 0)
        assert figure(address, "imputer_abandoned_total") == 1
        assert ask(address).json()["text"] == TEXT


@given(strategies.data())
def test_choice_of_a_batch(data):
    """The window due first always goes; others have its model and options; padding stays within bounds."""
    kinds = [("a", Options(8)), ("a", Options(4)), ("a", Options(8, trace=True)), ("b", Options(8))]
    seconds = strategies.floats(0.04, 24.0)
    spec = data.draw(
        strategies.lists(
            strategies.tuples(strategies.sampled_from(kinds), seconds, strategies.floats(0, 9)),
            min_size=1,
            max_size=30,
        )
    )
    items = data.draw(strategies.integers(1, 16))

    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        waiting = [
            Window(Job(*kind, [], length, tones.RATE, loop=loop), 0, length, 0.0, due)
            for kind, length, due in spec
        ]
    batch = choose(waiting, items, 64.0)
    first = min(waiting, key=lambda window: window.due)
    assert batch[0] is first and len(batch) <= items and len(set(map(id, batch))) == len(batch)
    alike = {(window.job.model, window.job.options) for window in batch}
    assert alike == {(first.job.model, first.job.options)}
    padded = max(window.seconds for window in batch) * len(batch)
    waste = padded - sum(window.seconds for window in batch)
    assert len(batch) == 1 or (padded <= 64.0 and waste <= (len(batch) - 1) * BATCH_COST_SECONDS + 1e-6)


def test_short_recordings_overtake_the_windows_of_long_ones(listener):
    """And long ones are not put off for ever: their windows fall due in their turn."""

    async def run():
        batcher = batcher_of(listener)
        long = job_of([np.zeros(24 * tones.RATE, np.float32)] * 20)
        short = job_of(np.zeros(tones.RATE, np.float32))
        batcher.submit(long)
        batcher.submit(short)
        order = []
        while batcher.waiting:
            batch = choose(batcher.waiting, 1, 64.0)
            batcher.waiting.remove(batch[0])
            order.append((batch[0].job is short, batch[0].number))
        return order

    order = asyncio.run(run())
    assert order.index((True, 0)) == 1
    assert [number for is_short, number in order if not is_short] == list(range(20))


# The page's own endpoint.


def test_imputation_has_every_pass(address, listener):
    got = ask(address, path="/v1/imputations", block_size=6, strategy="right_most_last").json()
    expected = listener.transcribe(io.BytesIO(wav()), block_size=6, strategy="right_most_last", trace=True)
    row = [got["mask"]] * got["frames"]
    rows = []
    for one in got["passes"]:
        for frame, symbol in zip(one["frames"], one["symbols"], strict=True):
            row[frame] = symbol
        rows.append(list(row))
    assert rows == expected.trace
    assert got["text"] == expected.text == got["formats"]["txt"].strip()
    assert got["formats"]["srt"] == transcripts.srt(expected, "speech.wav")
    assert [w["text"] for w in got["words"]] == TEXT.split()
    greedy = listener.transcribe(io.BytesIO(wav()), block_size=1, trace=True)
    assert got["greedy"]["symbols"] == greedy.trace[0] and got["greedy"]["text"] == greedy.text
    mel = got["pictures"]["mel"]
    assert mel["columns"] * mel["column_seconds"] == pytest.approx(got["seconds"], abs=0.05)


def test_imputation_of_a_long_recording(address):
    text, samples = long_speech()
    got = ask(address, wav(samples), path="/v1/imputations", strategy="annealing").json()
    assert got["frames"] == pytest.approx(len(samples) / tones.RATE / got["frame_seconds"], abs=1)
    row = [got["mask"]] * got["frames"]
    for one in got["passes"]:
        for frame, symbol in zip(one["frames"], one["symbols"], strict=True):
            row[frame] = symbol
    assert got["mask"] not in row
    spelt = "".join(symbol for symbol in row if symbol != got["blank"]).replace("▁", " ").split()
    assert " ".join(spelt) == got["text"] == text


@pytest.mark.parametrize("strategy", ["block", "annealing"])
def test_imputation_streams_its_passes(address, listener, strategy):
    """Outline, pictures and passes come before the end; the end is what comes without a stream."""
    asked = {"path": "/v1/imputations", "strategy": strategy}
    events = [
        json.loads(re.search("^data: (.*)$", block, re.MULTILINE)[1])
        for block in ask(address, stream="true", **asked).text.split("\n\n")[:-1]
    ]
    kinds = [event.pop("type") for event in events]
    assert kinds[0] == "imputation.start" and kinds[-1] == "imputation.done"
    assert sorted(kinds[1:-1]) == ["imputation.pass"] * 8 + ["imputation.pictures"]
    passes = [event for kind, event in zip(kinds, events, strict=True) if kind == "imputation.pass"]
    row, rows = [transcripts.MASK] * events[0]["frames"], []
    for number, event in enumerate(passes, 1):
        assert event["window"] == 0 and event["pass"] == number
        for frame, symbol in zip(event["frames"], event["symbols"], strict=True):
            row[frame] = symbol
        rows.append(list(row))
    assert rows == listener.transcribe(io.BytesIO(wav()), strategy=strategy, trace=True).trace
    whole = ask(address, **asked).json()
    assert events[kinds.index("imputation.pictures")] == whole.pop("pictures")
    assert events[-1] == whole and events[0].items() <= whole.items()


def test_silence_of_a_model_without_words(address):
    for kind, expected in (("json", '"text":""'), ("srt", ""), ("vtt", "WEBVTT"), ("text", "")):
        answer = ask(address, silence("WAV", 1.0), response_format=kind)
        assert answer.status_code == 200 and answer.text.strip().find(expected) >= 0
    assert ask(address, silence("WAV", 1.0), path="/v1/imputations").json()["words"] == []


def test_sample(folder, tmp_path, address):
    check_envelope(get(f"{address}/sample.wav"), 404)
    with_sample = tones.save(tmp_path / "other")
    (with_sample / "sample.wav").write_bytes(wav())
    with serving(folder, with_sample) as (both, _):
        assert {m["id"]: m["sample"] for m in get(f"{both}/v1/models").json()["data"]} == {
            "tones": False,
            "other": True,
        }
        assert get(f"{both}/sample.wav", params={"model": "other"}).content == wav()
        check_envelope(get(f"{both}/sample.wav", params={"model": "../other"}), 404)
        assert ask(both, model="other").json()["text"] == TEXT


# Figures.


def test_metrics_are_prometheus(running):
    address, _ = running
    ask(address)
    text = get(f"{address}/metrics").text
    for name, (kind, _, bounds) in metrics.FIGURES.items():
        assert f"# TYPE {name} {kind}\n" in text
        for bound in bounds[:1]:
            assert f'le="{bound}"' in text
    sample = re.compile(r'[a-z_]+(\{[a-z]+="[^"]*"(,[a-z]+="[^"]*")*\})? [0-9.e+]+')
    for line in text.splitlines():
        assert line.startswith("# ") or sample.fullmatch(line), line
    counts = [float(v) for v in re.findall(r'imputer_batch_size_bucket\{le="[^"]*"\} (\d+)', text)]
    assert counts == sorted(counts) and counts[-1] > 0
    errors = figure(address, "imputer_errors_total")
    ask(address, b"junk")
    assert figure(address, "imputer_errors_total") == errors + 1


def test_metrics_of_workers_add_up(tmp_path):
    finished = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True)
    gone = int(finished.stdout)
    ours = Metrics(str(tmp_path))
    ours.add("imputer_audio_seconds_total", 1_234_567.25)
    ours.set("imputer_queue_depth", 3)
    ours.observe("imputer_batch_size", 3)
    theirs = Metrics()
    theirs.add("imputer_audio_seconds_total", 2.5)
    theirs.set("imputer_queue_depth", 5)
    theirs.observe("imputer_batch_size", 100)
    (tmp_path / f"{gone}.json").write_text(json.dumps(theirs.snapshot()))
    text = ours.text()
    assert "imputer_audio_seconds_total 1234569.75\n" in text
    assert "imputer_queue_depth 3\n" in text, "the gauge of a process that is gone counts"
    assert 'imputer_batch_size_bucket{le="64"} 1\n' in text
    assert 'imputer_batch_size_bucket{le="+Inf"} 2\n' in text and "imputer_batch_size_sum 103\n" in text


# The program.


def start(*arguments):
    """`imputer serve` as a process, and its address when it is up."""
    process = subprocess.Popen(
        [sys.executable, "-m", "imputer", "serve", "--port", "0", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    line = process.stdout.readline()
    found = re.search(r"http://\S+", line)
    if not found:
        raise AssertionError(f"{line}{process.stderr.read()}")
    try:
        wait_until(lambda: healthy(found[0]))
    except BaseException:
        process.terminate()
        raise
    return process, found[0]


def healthy(address):
    try:
        return get(f"{address}/health").status_code == 200
    except httpx.TransportError:
        return False


def stop(process):
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors, errors
    return errors


def test_sigterm_finishes_what_is_running(folder):
    process, address = start("--model", folder, "--quiet")
    text, samples = long_speech()
    content = wav(samples)
    with ThreadPoolExecutor(3) as pool:
        answers = [pool.submit(ask, address, content, block_size=32) for _ in range(3)]
        wait_until(lambda: figure(address, "imputer_batch_size_count") >= 1)
        stop(process)
        for answer in answers:
            assert answer.result().json()["text"] == text
    assert not healthy(address)


def test_several_workers(folder):
    process, address = start("--model", folder, "--workers", 2, "--quiet")
    try:
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda _: ask(address).json()["text"], range(24)))
        assert answers == [TEXT] * 24
        summed = 'endpoint="transcriptions",status="200"} 24\n'  # once both have published
        wait_until(lambda: summed in get(f"{address}/metrics").text)
    finally:
        stop(process)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "nowhere"], "no model folder nowhere"),
        (["--port", "70000"], "port"),
        (["--api-key-file", "nokeys"], "nokeys has no keys"),
        (["--api-key-file", "missing"], "cannot read the keys in missing"),
        (["--workers", "0"], "--workers must be at least 1, got 0"),
        (["--patience-ms", "nan"], "--patience-ms must be at least 0, got nan"),
        (["--host", "no.such.host.invalid"], "choose another with --host"),
        (["--max-seconds", "-1"], "--max-seconds must be a number above 0"),
    ],
)
def test_mistakes_are_one_line(tmp_path, folder, arguments, message):
    (tmp_path / "nokeys").write_text("# nothing\n\n")
    arguments = arguments if "--model" in arguments else ["--model", str(folder), *arguments]
    done = subprocess.run(
        [sys.executable, "-m", "imputer", "serve", *arguments], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 2 and message in done.stderr
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("imputer: ")


def test_models_of_two_runs_are_called_as_the_runs(tmp_path):
    places = [tmp_path / "first" / "model", tmp_path / "second" / "model", tmp_path / "third"]
    for place in places:
        place.mkdir(parents=True)
    assert folders(tuple(map(str, places))) == dict(zip(("first", "second", "third"), places, strict=True))
    (tmp_path / "other" / "third").mkdir(parents=True)
    with pytest.raises(UsageError, match="two models would be called third"):
        folders((str(places[2]), str(tmp_path / "other" / "third")))


def test_port_in_use(folder):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = subprocess.run(
            [sys.executable, "-m", "imputer", "serve", "--model", str(folder), "--port", port],
            capture_output=True,
            text=True,
        )
    assert done.returncode == 2 and f"cannot listen on 127.0.0.1 port {port}" in done.stderr


def test_damaged_model_is_named_once(tmp_path):
    broken = tones.save(tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"\x80\x04pickle, not safetensors")
    arguments = ["--model", str(broken), "--port", "0", "--workers", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "imputer", "serve", *arguments], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 2 and "is damaged or not a safetensors file" in done.stderr
    assert done.stderr.count("\n") == 1


def test_keys_come_from_a_file(tmp_path, folder):
    (tmp_path / "keys").write_text("# the key\n secret \n")
    process, address = start("--model", folder, "--api-key-file", tmp_path / "keys")
    try:
        check_envelope(ask(address), 401)
        assert ask(address, headers=KEY).json()["text"] == TEXT
    finally:
        errors = stop(process)
    assert "secret" not in errors, "a key is in the log"


def test_threads_end_with_the_server(folder):
    before = threading.active_count()
    with serving(folder) as (address, _):
        ask(address)
    wait_until(lambda: threading.active_count() <= before)


def test_documentation_knows_every_option_field_and_code():
    import inspect

    from imputer.commands.serve import serve
    from imputer.server import app, guard, protocol

    text = (Path(__file__).parents[1] / "docs" / "deploying.md").read_text()
    told = set(re.findall(r"`(--[a-z-]+)`", text.partition("## Transcribing")[0]))
    assert told == {f"--{name.replace('_', '-')}" for name in inspect.signature(serve).parameters}
    for field in protocol.FIELDS:
        assert f"`{field}" in text, field
    for path in guard.ENDPOINTS:
        assert path in text
    for name in metrics.FIGURES:
        assert name in text
    source = "".join(path.read_text() for path in Path(guard.__file__).parent.glob("*.py"))
    codes = {*re.findall(r'code="([a-z_]+)"', source), *app.CODES.values()}
    for code in codes - {"internal_error", "not_found", "empty_audio"}:
        assert f"`{code}`" in text, code
