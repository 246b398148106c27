"""`imputer serve` as operators see it: starting, stopping, workers, logs, metrics, keys."""

import inspect
import json
import os
import re
import resource
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path

import httpx
import numpy as np
import pytest

import tones
from imputer.errors import UsageError
from imputer.server import logs
from imputer.server.keys import read_keys
from imputer.server.metrics import Metrics
from imputer.server.service import folders
from serving import (
    TEXT,
    TRANSCRIPTIONS,
    Program,
    ask,
    check_envelope,
    connected,
    figure,
    get,
    held,
    long_speech,
    raw_request,
    receive_all,
    serving,
    wait_until,
    wav,
)
from trainings import imputer


@pytest.fixture
def log(tmp_path):
    return tmp_path / "log"


@pytest.fixture(scope="module")
def two_workers(folder, tmp_path_factory):
    """A server with two workers that no test ends."""
    with Program(tmp_path_factory.mktemp("log") / "log", "--model", folder, "--workers", 2) as program:
        assert get(f"{program.address}/ready", timeout=30).json() == {
            "status": "ready"
        }  # as soon as it says so
        yield program


def answers(address):
    try:
        return get(f"{address}/health").status_code == 200
    except httpx.TransportError:
        return False


def status(address, path):
    return get(f"{address}{path}").json()["status"]


# Starting and stopping.


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_finishes_what_is_running(folder, log, number):
    """Meanwhile /health and /ready answer and new work is refused; then the socket is closed."""
    text, samples = long_speech()
    options = ("--model", folder, "--quiet", "--drain-timeout", 300)
    with Program(log, *options) as program, ThreadPoolExecutor(3) as pool:
        address = program.address
        running = [pool.submit(ask, address, wav(samples), block_size=48) for _ in range(3)]
        wait_until(lambda: figure(address, "imputer_batch_size_count") >= 1)
        program.process.send_signal(number)
        wait_until(lambda: status(address, "/ready") == "draining")
        assert get(f"{address}/ready").status_code == 503
        assert get(f"{address}/health").status_code == 200
        check_envelope(ask(address), 503, "shutting_down")
        for answer in running:
            assert answer.result().json()["text"] == text
        assert program.process.wait(200) == 0
        assert "Traceback" not in log.read_text()
        assert not answers(address)


def test_what_is_not_done_in_time_is_refused(folder, log):
    content = wav(np.tile(long_speech()[1], 7))
    options = ("--model", folder, "--quiet", "--drain-timeout", 0.5)
    with Program(log, *options) as program, ThreadPoolExecutor(1) as pool:
        running = pool.submit(ask, program.address, content, block_size=64)
        wait_until(lambda: figure(program.address, "imputer_batch_size_count") >= 1)
        program.stop()
        check_envelope(running.result(), 503, "shutting_down")


def test_it_answers_as_soon_as_it_says_so(two_workers):
    assert ask(two_workers.address).json()["text"] == TEXT


def test_ready_says_no_when_nothing_moves(folder):
    """A batch stands still and another recording waits."""
    with (
        serving(folder, stall_seconds=0.1) as (address, service),
        connected(address) as first,
        connected(address) as second,
        held(service) as go,
    ):
        assert status(address, "/ready") == "ready"
        first.sendall(raw_request(wav()))
        go.taken.wait()
        second.sendall(raw_request(wav()))
        wait_until(lambda: status(address, "/ready") == "stalled")
        assert get(f"{address}/health").status_code == 200
        go.set()
        assert TEXT.encode() in receive_all(second)
        wait_until(lambda: status(address, "/ready") == "ready")


def test_head_requests(folder):
    with serving(folder) as (address, _):
        for path in ("/", "/health", "/ready", "/metrics", "/v1/models", "/docs"):
            answer = httpx.head(address + path, timeout=100)
            assert answer.status_code == 200 and not answer.content


def test_threads_end_with_the_server(folder):
    before = threading.active_count()
    with serving(folder) as (address, _):
        ask(address)
    wait_until(lambda: threading.active_count() <= before)


# Workers.


def children(pid):
    """Worker processes of the server, by what they say in /proc."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if parent == pid and b"spawn_main" in command:
                found.append(int(entry.name))
    return found


def exists(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_a_killed_worker_loses_nothing(folder, log):
    """What it was running is tried once more on another; it is replaced; nothing is counted twice."""
    text, samples = long_speech()
    with Program(log, "--model", folder, "--workers", 2) as program, ThreadPoolExecutor(6) as pool:
        address = program.address
        workers = children(program.process.pid)
        assert len(workers) == 2
        running = [pool.submit(ask, address, wav(samples), block_size=64) for _ in range(6)]
        wait_until(lambda: figure(address, "imputer_batch_size_count") >= 1)
        os.kill(workers[0], signal.SIGKILL)
        for answer in running:
            assert answer.result().json()["text"] == text
        wait_until(lambda: len(children(program.process.pid)) == 2)
        assert figure(address, "imputer_worker_restarts_total") == 1
        assert figure(address, "imputer_audio_seconds_total") == pytest.approx(
            6 * len(samples) / tones.RATE, rel=1e-3
        )
        assert ask(address).json()["text"] == TEXT
        program.stop()


def test_a_recording_that_kills_workers_is_given_up(folder, log, tmp_path):
    """The second death is the last; others are answered."""
    (tmp_path / "sitecustomize.py").write_text(KILLER)
    path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    options = {"environment": {"PYTHONPATH": path}}
    with Program(log, "--model", folder, "--workers", 2, "--quiet", **options) as program:
        address = program.address
        deadly = wav(np.full(8000, 0.5, np.float32))
        with ThreadPoolExecutor(4) as pool:
            good = [pool.submit(ask, address) for _ in range(3)]
            check_envelope(ask(address, deadly), 500, "internal_error")
            assert [answer.result().json()["text"] for answer in good] == [TEXT] * 3
        assert figure(address, "imputer_worker_restarts_total") == 2
        # Workers end with a killed server.
        wait_until(lambda: len(children(program.process.pid)) == 2)
        workers = children(program.process.pid)
        program.process.kill()
        wait_until(lambda: not any(exists(pid) for pid in workers))
        assert not answers(address)


# A worker that is given half a second of 0.5 dies, as by a fault of a native library.
KILLER = """
import os, sys
if "--multiprocessing-fork" in sys.argv or any("spawn_main" in a for a in sys.orig_argv):
    import imputer.recognizer as r
    decode = r.Recognizer.decode
    def deadly(self, waveforms, *arguments, **options):
        if any(len(w) == 8000 and w.min() > 0.4 for w in waveforms):
            os._exit(11)
        return decode(self, waveforms, *arguments, **options)
    r.Recognizer.decode = deadly
"""


def test_a_full_disk_passes(two_workers):
    """While nothing can be written, uploads are refused and counted; when it can, they are answered again."""
    address, pid = two_workers.address, two_workers.process.pid

    def counted(status):
        labels = f'endpoint="transcriptions",model="tones",status="{status}"'
        found = re.search(rf"{re.escape(labels)}\}} (\d+)", get(f"{address}/metrics").text)
        return int(found[1]) if found else 0

    before = counted("200")
    assert ask(address).json()["text"] == TEXT
    soft, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, hard))
    try:
        for _ in range(3):
            check_envelope(ask(address), 503, "no_space")
        assert counted("503") == 3
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))
    assert ask(address).json()["text"] == TEXT
    assert (counted("200"), counted("503")) == (before + 2, 3)


def test_streams_of_workers(two_workers):
    """Passes and deltas come through the pipe."""
    answer = ask(two_workers.address, stream="true", **{"include[]": "passes"}, block_size=5)
    kinds = re.findall(r"event: (\S+)", answer.text)
    assert kinds.count("imputer.pass") == 5 and kinds[-1] == "transcript.text.done"
    got = ask(two_workers.address, path="/v1/imputations", block_size=5).json()
    assert got["text"] == TEXT and len(got["passes"]) == 5


# Mistakes on the command line.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "nowhere"], "no model folder nowhere"),
        (["--port", "70000"], "port"),
        (["--api-key-file", "nokeys"], "nokeys has no keys"),
        (["--api-key-file", "missing"], "cannot read the keys in missing"),
        (["--workers", "0"], "--workers must be at least 1, got 0"),
        (["--batch-delay-ms", "nan"], "--batch-delay-ms must be at least 0, got nan"),
        (["--host", "no.such.host.invalid"], "choose another with --host"),
        (["--max-seconds", "-1"], "--max-seconds must be a number above 0"),
        (["--write-timeout", "0"], "--write-timeout must be a number above 0"),
        (["--alias", "mine"], "--alias takes NAME=MODEL, got 'mine'"),
        (["--alias", "mine=other"], "no model other"),
        (["--trusted-proxy", "proxy"], "--trusted-proxy takes an address or a network, got 'proxy'"),
        (["--device", "warp"], "device 'warp' cannot be used"),
    ],
)
def test_mistakes_are_one_line(tmp_path, monkeypatch, folder, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nokeys").write_text("# nothing\n\n")
    (tmp_path / "nokeys").chmod(0o600)
    arguments = arguments if "--model" in arguments else ["--model", str(folder), *arguments]
    done = imputer("serve", *arguments, check=False)
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
        done = imputer("serve", "--model", str(folder), "--port", port, check=False)
    assert done.returncode == 2 and f"cannot listen on 127.0.0.1 port {port}" in done.stderr


def test_damaged_model_is_named_once(tmp_path):
    broken = tones.save(tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"\x80\x04pickle, not safetensors")
    done = imputer("serve", "--model", str(broken), "--port", "0", "--workers", "2", check=False)
    assert done.returncode == 2 and "is damaged or not a safetensors file" in done.stderr
    assert done.stderr.count("\n") == 1


# Keys.


def test_keys_of_a_file(tmp_path):
    path = tmp_path / "keys"
    path.write_bytes("\ufeff first # of Anna\n\n# comment\n  second#2\t\n#third\n".encode())
    assert read_keys(path) == ("first", "second#2")


def test_a_changed_key_file_is_read_again(tmp_path, folder, log):
    """A key that is taken out stops working, one that is put in starts to; a broken file changes nothing."""
    path = tmp_path / "keys"
    path.write_text("# the key\n secret \n")
    with Program(log, "--model", folder, "--api-key-file", path) as program:

        def code(key):
            headers = {"authorization": f"Bearer {key}"}
            return get(f"{program.address}/v1/models", headers=headers).status_code

        check_envelope(ask(program.address), 401)
        assert ask(program.address, headers={"authorization": "Bearer secret"}).json()["text"] == TEXT
        path.write_text("another\n")
        wait_until(lambda: code("another") == 200)
        assert code("secret") == 401
        path.write_bytes(b"\xff\xfe\xff")
        wait_until(lambda: (code("another"), "the keys stay as they are" in log.read_text())[1])
        assert code("another") == 200
        errors = program.stop()
    assert "secret" not in errors and "another" not in errors, "a key is in the log"
    assert "other users may read or change the keys" in errors


def test_requests_per_minute_are_counted_by_key(folder):
    with serving(folder, api_keys=("a", "b"), requests_per_minute=3) as (address, _):
        statuses = [ask(address, headers={"authorization": "Bearer a"}).status_code for _ in range(4)]
        assert statuses == [200, 200, 200, 429]
        refusal = ask(address, headers={"authorization": "Bearer a"})
        check_envelope(refusal, 429, "rate_limit_exceeded")
        assert int(refusal.headers["retry-after"]) >= 1
        assert ask(address, headers={"authorization": "Bearer b"}).status_code == 200


def test_clients_behind_a_trusted_proxy_are_told_apart(folder):
    for trusted, expected in (("127.0.0.1/32", [200, 200, 429]), ("10.0.0.1", [200, 429, 429])):
        with serving(folder, trusted_proxies=(trusted,), requests_per_minute=1) as (address, _):
            forwarded = [{"x-forwarded-for": client} for client in ("1.2.3.4", "5.6.7.8", "1.2.3.4")]
            assert [ask(address, headers=headers).status_code for headers in forwarded] == expected


# Logs.


def test_log_lines_are_json(folder, log):
    with Program(log, "--model", folder, "--log-json") as program:
        given = ask(program.address, headers={"x-request-id": "my-id.1"})
        assert given.headers["x-request-id"] == "my-id.1"
        made = ask(program.address, headers={"x-request-id": "bad id\u00e9".encode("latin-1")})
        assert re.fullmatch("[0-9a-f]{16}", made.headers["x-request-id"])
        errors = program.stop()
    lines = [json.loads(line) for line in errors.splitlines()]
    (line,) = [line for line in lines if line.get("request_id") == "my-id.1"]
    assert line["status"] == 200 and line["model"] == "tones" and line["message"] == f"POST {TRANSCRIPTIONS}"
    seconds = len(tones.speak(TEXT, 500)[0]) / tones.RATE
    assert line["audio_seconds"] == pytest.approx(seconds, abs=1e-3) and line["duration"] > 0
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"])
    assert any(line.get("request_id") == made.headers["x-request-id"] for line in lines)


def test_damaged_uploads_do_not_fill_the_log(folder, log):
    """libmpg123 writes to stderr past the log, a line for every damaged frame: they become a few entries of it."""
    seconds = 20
    damaged = bytearray(wav(np.tile(tones.speak(TEXT, 500)[0], seconds)[: seconds * tones.RATE], kind="MP3"))
    random = np.random.default_rng(0)
    for place in random.integers(2000, len(damaged) - 4, 400).tolist():
        if 255 not in damaged[place - 3 : place + 1]:  # headers of frames stay
            damaged[place] = int(random.integers(255))
    with Program(log, "--model", folder, "--log-json", "--quiet") as program:
        for _ in range(15):
            ask(program.address, bytes(damaged))
        assert ask(program.address).json()["text"] == TEXT
        errors = program.stop()
    written = [json.loads(line)["message"] for line in errors.splitlines()]
    assert 1 <= sum("libmpg123" in message for message in written) <= logs.REPEATS


def test_a_closed_stderr_is_not_replaced(monkeypatch):
    """Without stderr, descriptor 2 may be a socket of the server."""
    monkeypatch.setattr("sys.stderr", None)
    before = os.fstat(2)
    with logs.relaying():
        assert os.path.samestat(os.fstat(2), before)


def test_lines_that_repeat_are_dropped_and_counted():
    import logging

    limit = logs.Repeats()

    def passes(text, seconds, *arguments):
        record = logging.LogRecord("asyncio", logging.ERROR, "", 0, text, arguments, None)
        record.created = seconds
        return limit.filter(record), record.getMessage()

    kept = [passes("no connection: %d", n / 1000, n)[0] for n in range(1000)]
    assert kept.count(True) == logs.REPEATS and all(kept[: logs.REPEATS])
    assert passes("something else", 1.0)[0]
    later = passes("no connection: %d", 100.0, 1)
    assert later[0] and "990 more" in later[1]


# Metrics.


def test_metrics_are_prometheus(folder):
    from prometheus_client.parser import text_string_to_metric_families

    with serving(folder) as (address, _):
        ask(address)
        ask(address, b"junk")
        found = {
            family.name: family for family in text_string_to_metric_families(get(f"{address}/metrics").text)
        }
    requests = {tuple(s.labels.items()): s.value for s in found["imputer_requests"].samples}
    by_status = {dict(labels)["status"]: value for labels, value in requests.items()}
    assert by_status["200"] == 1 and by_status["415"] == 1
    for name in ("imputer_queue_wait_seconds", "imputer_work_seconds", "imputer_request_seconds"):
        buckets = [s for s in found[name].samples if s.name.endswith("_bucket")]
        assert max(float(s.labels["le"]) for s in buckets if s.labels["le"] != "+Inf") >= 3600
        assert any(s.value for s in buckets)
    assert found["imputer_resident_memory_bytes"].samples[0].value > 1e6
    (build,) = found["imputer_build_info"].samples
    assert build.labels["version"] and build.labels["python"]


# Documentation.


def test_documentation_knows_every_option_field_and_code():
    from imputer.commands import serve
    from imputer.server import apidocs, app, forms, records

    text = (Path(__file__).parents[1] / "docs" / "deploying.md").read_text()
    told = set(re.findall(r"`(--[a-z-]+)`", text.partition("## Transcribing")[0]))
    groups = {"access": serve.Access, "limits": serve.Limits, "speed": serve.Speed}
    options = set(inspect.signature(serve.serve).parameters) - groups.keys()
    options |= {field.name for group in groups.values() for field in fields(group)}
    assert told == {f"--{name.replace('_', '-')}" for name in options}
    for field in forms.FIELDS:
        assert f"`{field}" in text, field
    assert set(apidocs.FORM_FIELDS) == set(forms.FIELDS)
    for path in records.ENDPOINTS:
        assert path in text
    assert {*apidocs.WORK, *apidocs.READ} >= records.ENDPOINTS.keys() - {"/", "/docs", "/openapi.json"}
    for name in Metrics().registry._names_to_collectors:
        if not name.endswith(("_created", "_bucket", "_count", "_sum", "_info", "_total")):
            assert name in text, name
    source = "".join(path.read_text() for path in Path(records.__file__).parent.glob("*.py"))
    codes = {*re.findall(r'code="([a-z_]+)"', source), *app.CODES.values()}
    for code in codes - {"internal_error", "not_found"}:
        assert f"`{code}`" in text, code


def test_openapi_document_is_valid(folder):
    with serving(folder) as (address, _):
        document = get(f"{address}/openapi.json").json()
        page = get(f"{address}/docs")
    assert document["openapi"].startswith("3.") and "/v1/audio/transcriptions" in document["paths"]
    assert page.headers["content-type"].startswith("text/html")
    assert all(path.replace("{", "&#123;") in page.text or path in page.text for path in document["paths"])
