"""Attacks on a real server, each of which stopped or locked an earlier version.

While an attack runs, ordinary requests are sent and must be answered; the limits are generous, since they tell
"answered" from "locked out", not fast from slow.
"""

import contextlib
import io
import resource
import socket
import threading
import time

import httpx
import numpy as np
import pytest
import soundfile

import tones
from imputer.recognizer import Recognizer
from imputer.server import uploads
from imputer.server.failures import Failure
from serving import (
    TEXT,
    TRANSCRIPTIONS,
    Program,
    ask,
    check_envelope,
    connected,
    figure,
    get,
    long_speech,
    post,
    raw_request,
    receive_all,
    serving,
    wait_until,
    wav,
)

ORDINARY = 5  # requests that must be answered while an attack runs


def answered(address, count=ORDINARY):
    """Ordinary requests, one after the other, are all answered."""
    for _ in range(count):
        assert ask(address).json()["text"] == TEXT


# 1. Small files that unpack to much.


def bomb(rate, channels, seconds, path):
    """FLAC silence, written in parts; (path, bytes)."""
    with soundfile.SoundFile(path, "w", rate, channels, format="FLAC") as file:
        for _ in range(seconds):
            file.write(np.zeros((rate, channels), np.int16))
    return path.read_bytes()


def test_absurd_rates_are_refused_without_decoding(folder, tmp_path):
    """8 channels at 655,350 Hz: a few kilobytes a minute, five million samples a second."""
    content = bomb(655_350, 8, 2, tmp_path / "a.flac")
    with serving(folder) as (address, _):
        check_envelope(ask(address, content), 400, "invalid_audio")


def test_samples_of_all_channels_count(tmp_path):
    """The length alone is within the limit; what decoding costs is not. Refused by its header."""
    content = bomb(192_000, 8, 20, tmp_path / "a.flac")

    with pytest.raises(Failure) as caught:
        next(uploads.blocks(io.BytesIO(content), "a.flac", sample_rate=16_000, max_seconds=60.0))
    assert caught.value.status == 413 and "8 channels at 192000 Hz" in caught.value.message


def slow_blocks(monkeypatch, seconds):
    """Every block of every upload takes so long to decode; the count of blocks goes into the list."""
    decoded = []
    blocks = uploads.blocks

    def slow(file, name, **options):
        for block in blocks(file, name, **options):
            decoded.append(name)
            if name == "slow.wav":
                time.sleep(seconds)
            yield block

    monkeypatch.setattr(uploads, "blocks", slow)
    return decoded


def test_slow_decoding_holds_nobody_up(folder, monkeypatch):
    """Four uploads that take minutes to decode, on two threads; ordinary ones are decoded in between."""
    decoded = slow_blocks(monkeypatch, 0.2)
    content = wav(np.zeros(600 * tones.RATE, np.float32))  # 147 blocks
    with serving(folder) as (address, service), contextlib.ExitStack() as stack:
        for _ in range(4):
            connection = stack.enter_context(connected(address))
            connection.sendall(raw_request(content, name="slow.wav"))
        wait_until(lambda: decoded.count("slow.wav") > 4)
        answered(address)
        assert any(not job.ended for job in service.batcher.jobs), "the attack was over before"


def test_a_thread_is_kept_for_uploads_that_cost_little(folder, monkeypatch):
    """Costly uploads took all threads and cores; now one thread decodes them, however many there are."""
    threads = []
    blocks = uploads.blocks

    def named(*arguments, **options):
        for block in blocks(*arguments, **options):
            threads.append(threading.current_thread().name)
            time.sleep(0.1)
            yield block

    monkeypatch.setattr(uploads, "blocks", named)
    content = wav(np.zeros(600 * tones.RATE, np.float32))
    with serving(folder) as (address, _), contextlib.ExitStack() as stack:
        for _ in range(4):
            connection = stack.enter_context(connected(address))
            connection.sendall(raw_request(content))
        wait_until(lambda: len(threads) > 40)
        assert set(threads[:20]) == {"imputer-decode-0", "imputer-decode-1"}
        assert set(threads[30:]) == {"imputer-decode-1"}


def test_decoding_stops_when_its_client_leaves(folder, monkeypatch):
    decoded = slow_blocks(monkeypatch, 0.05)
    content = wav(np.zeros(600 * tones.RATE, np.float32))
    with serving(
        folder,
    ) as (address, service):
        with connected(address) as connection:
            connection.sendall(raw_request(content, name="slow.wav"))
            wait_until(lambda: len(decoded) > 2)
        wait_until(lambda: figure(address, "imputer_abandoned_total") == 1)
        wait_until(lambda: not service.decoders.idle and not service.batcher.jobs)
        assert len(decoded) < 147


def test_decoding_has_a_deadline(folder, monkeypatch):
    slow_blocks(monkeypatch, 0.2)
    content = wav(np.zeros(600 * tones.RATE, np.float32))
    with serving(folder, decode_seconds=1.0) as (address, _):
        answer = ask(address, content, name="slow.wav", path="/v1/imputations")
        check_envelope(answer, 413, "decode_timeout")


# 2. One long file.


@pytest.mark.parametrize("block_size", [8, 64])
def test_a_long_file_starves_nobody(folder, block_size):
    """Ordinary requests are answered while ten minutes of audio are transcribed."""
    content = wav(np.tile(long_speech()[1], 10))
    with serving(folder) as (address, _), connected(address) as connection:
        connection.sendall(raw_request(content, block_size=str(block_size)))
        wait_until(lambda: figure(address, "imputer_batch_size_count") >= 1)
        answered(address)
        assert figure(address, "imputer_requests_in_progress") == 1, "the long file was done before"


def test_turns_do_not_change_what_is_written(folder):
    """The long recording is interrupted between passes and still says what it says alone."""
    text, samples = long_speech()
    expected = Recognizer.from_pretrained(folder).transcribe(samples, block_size=64)
    with serving(folder) as (address, _):
        result = {}
        thread = threading.Thread(
            target=lambda: result.update(ask(address, wav(samples), block_size=64).json())
        )
        thread.start()
        answered(address)
        thread.join()
    assert result["text"] == expected.text == text


# 3. Connections that are held.


def test_uploads_that_drip_do_not_lock(folder):
    """More of them than there are places, a byte now and then: they take no place, and are refused in time."""
    request = raw_request(wav())
    least = 10.0 * len(request)  # bytes per second on average, once the idle seconds have passed
    with (
        serving(folder, max_requests=4, upload_idle_seconds=2.0, upload_bytes_per_second=least) as server,
        contextlib.ExitStack() as stack,
    ):
        address, _ = server
        drips = [stack.enter_context(connected(address)) for _ in range(16)]
        for drip in drips:
            drip.sendall(request[:-100])
        over = threading.Event()

        def trickle():
            at = len(request) - 100
            while not over.wait(0.5) and at < len(request) - 2:
                for drip in drips:
                    with contextlib.suppress(OSError):
                        drip.sendall(request[at : at + 1])
                at += 1

        thread = threading.Thread(target=trickle)
        thread.start()
        try:
            answered(address)
            for drip in drips:
                with contextlib.suppress(ConnectionError):  # refused while it was sending
                    assert drip.recv(4096).startswith(b"HTTP/1.1 408")
        finally:
            over.set()
            thread.join()


def test_clients_that_never_read_lose_their_connection(folder):
    """Streams with every pass, more than the buffers hold, to clients that do not read."""
    content = wav(np.tile(long_speech()[1], 3))
    settings = {"max_requests": 2, "write_seconds": 2.0}
    with serving(folder, **settings) as (address, service), contextlib.ExitStack() as stack:
        for _ in range(2):
            unread = socket.socket()
            stack.enter_context(unread)
            unread.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            unread.connect(("127.0.0.1", int(address.rpartition(":")[2])))
            unread.sendall(raw_request(content, stream="true", block_size="32", **{"include[]": "passes"}))
        wait_until(lambda: 'reason="unread"' in get(f"{address}/metrics").text)
        wait_until(lambda: figure(address, "imputer_requests_in_progress") == 0)
        answered(address)
        wait_until(lambda: len(service.connections.open) <= 1)


def test_half_sent_headers_do_not_lock(folder, tmp_path):
    """More of them than the process may open files: others are answered, and the log stays small."""
    limit = 256

    def lower():
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))

    program = Program(tmp_path / "log", "--model", folder, "--quiet", before=lower)
    with program, contextlib.ExitStack() as stack:
        halves = []
        for _ in range(limit + 100):
            half = stack.enter_context(connected(program.address))
            half.sendall(b"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: localhost\r\nX-Half: ")
            halves.append(half)
        answered(program.address)
        assert (tmp_path / "log").stat().st_size < 100_000
        lost = 0
        for half in halves:
            half.settimeout(0.001)
            with contextlib.suppress(TimeoutError):
                try:
                    lost += half.recv(10) == b""
                except ConnectionError:
                    lost += 1
        assert lost > 100, "none was closed"


def test_headers_have_a_deadline(folder):
    """A connection without a word, half a header, and half the header of a second request."""
    with serving(folder, header_seconds=0.5, keep_alive_seconds=60.0) as (address, _):
        for start in (b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\n"):
            with connected(address) as half:
                half.sendall(start)
                assert half.recv(100).startswith(b"HTTP/1.1 408")
        with connected(address) as second:
            second.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert receive_all(second).startswith(b"HTTP/1.1 200")
            second.sendall(b"GET /hea")
            assert second.recv(100).startswith(b"HTTP/1.1 408")


def test_connections_are_limited_per_client(folder):
    """A client that holds many loses its oldest; one from another address loses none."""
    with serving(folder, max_connections_per_client=8) as (address, service), contextlib.ExitStack() as stack:
        port = int(address.rpartition(":")[2])
        other = stack.enter_context(
            socket.create_connection(("127.0.0.1", port), timeout=100, source_address=("127.0.0.7", 0))
        )
        wait_until(lambda: len(service.connections.open) == 1)
        held = [stack.enter_context(connected(address)) for _ in range(20)]
        wait_until(lambda: len(service.connections.open) <= 9)
        assert is_closed(held[0])
        answered(address, 2)
        other.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert other.recv(100).startswith(b"HTTP/1.1 200")


def test_a_connection_between_two_requests_is_not_the_first_to_go(folder):
    """Half-sent headers that are older make room for new ones, not a client that has just been answered."""
    health = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    settings = {"max_connections_per_client": 8, "keep_alive_seconds": 100.0}
    with serving(folder, **settings) as (address, service), contextlib.ExitStack() as stack:
        halves = [stack.enter_context(connected(address)) for _ in range(7)]
        wait_until(lambda: len(service.connections.open) == 7)
        client = stack.enter_context(connected(address))
        client.sendall(health)
        assert receive_all(client).startswith(b"HTTP/1.1 200")
        for _ in range(3):
            stack.enter_context(connected(address)).sendall(b"GET /hea")
        assert all(is_closed(half) for half in halves[:3])
        client.sendall(health)
        assert receive_all(client).startswith(b"HTTP/1.1 200")


def is_closed(connection):
    try:
        return connection.recv(10) == b""
    except ConnectionError:
        return True


def test_work_is_not_given_up_for_new_connections(folder):
    text, samples = long_speech()
    with serving(folder, max_connections_per_client=4) as (address, _), contextlib.ExitStack() as stack:
        result = {}
        thread = threading.Thread(
            target=lambda: result.update(ask(address, wav(samples), block_size=32).json())
        )
        thread.start()
        wait_until(lambda: figure(address, "imputer_requests_in_progress") == 1)
        for _ in range(50):
            stack.enter_context(connected(address))
        thread.join()
    assert result["text"] == text


# 5. Pages of other sites.


def rebound(address, **headers):
    """What a browser sends that was told that evil.example is at this address."""
    port = address.rpartition(":")[2]
    given = {"host": f"evil.example:{port}", "origin": f"http://evil.example:{port}"} | headers
    return post(address + TRANSCRIPTIONS, files={"file": ("a", wav())}, headers=given)


def test_names_of_other_sites_are_refused(folder):
    """DNS rebinding: the name is the attacker's, the address is ours, and for the browser all is one origin."""
    with serving(folder) as (address, _):
        check_envelope(rebound(address, **{"sec-fetch-site": "same-origin"}), 421, "unknown_host")
        check_envelope(get(address + "/v1/models", headers={"host": "evil.example"}), 421, "unknown_host")
        for host in ("localhost", "127.0.0.1:80", "[::1]:8000", "192.168.1.2"):
            assert get(f"{address}/health", headers={"host": host}).status_code == 200
    with serving(folder, allow_hosts=("speech.example",)) as (address, _):
        assert get(f"{address}/health", headers={"host": "Speech.Example:443"}).status_code == 200
        check_envelope(rebound(address), 421, "unknown_host")


def test_origins_of_other_sites_are_refused(folder):
    """With and without the headers that newer browsers add."""
    with serving(folder, allow_origins=("https://app.example",)) as (address, _):
        for origin in (
            "https://evil.example",
            "null",
            "http://localhost:1",
            "https://app.example.evil",
            "http://[",
        ):
            refused = ask(address, headers={"origin": origin})
            check_envelope(refused, 403, "cross_origin")
            assert "access-control-allow-origin" not in refused.headers
        for site in ("cross-site", "same-site"):
            check_envelope(ask(address, headers={"sec-fetch-site": site}), 403, "cross_origin")
        assert ask(address, headers={"sec-fetch-site": "same-origin"}).status_code == 200
        assert ask(address, headers={"origin": address}).status_code == 200
        allowed = {"origin": "https://app.example", "sec-fetch-site": "cross-site"}
        answer = ask(address, headers=allowed)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://app.example"
        preflight = {
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization",
        }
        before = httpx.options(address + TRANSCRIPTIONS, headers=allowed | preflight, timeout=100)
        assert before.status_code == 204 and "POST" in before.headers["access-control-allow-methods"]
        assert before.headers["access-control-allow-headers"] == "authorization"
        foreign = httpx.options(
            address + TRANSCRIPTIONS, headers=preflight | {"origin": "https://evil.example"}, timeout=100
        )
        assert "access-control-allow-origin" not in foreign.headers
