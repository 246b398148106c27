"""Live sessions of the server: with OpenAI's own client, and with one that behaves badly."""

import base64
import contextlib
import json
import socket

import numpy as np
import openai
import pytest
import soxr
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

import tones
from imputer.server import livesessions
from serving import TEXT, Program, ask, figure, get, serving, wait_until

TRANSCRIPTION = "conversation.item.input_audio_transcription"
QUIET = np.zeros(2 * tones.RATE, np.float32)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tones.save(tmp_path_factory.mktemp("models") / "tones")


@pytest.fixture(scope="module")
def server(model):
    with serving(model) as (address, service):
        yield address, service


def speech(words=4, seed=1):
    text = tones.sentence(np.random.default_rng(seed), words)
    return np.concatenate((tones.speak(text, seed)[0], QUIET)), text


def pcm(samples, rate=24_000):
    """Base64 PCM16 at OpenAI's rate."""
    moved = soxr.resample(samples, tones.RATE, rate)
    return base64.b64encode((moved * 32767).astype("<i2").tobytes()).decode()


def chunks(samples, seconds=0.1):
    size = round(seconds * tones.RATE)
    return [samples[first : first + size] for first in range(0, len(samples), size)]


class Raw:
    """A WebSocket of our own, to send what the official client would not."""

    def __init__(self, address, **options):
        self.stack = contextlib.ExitStack()
        self.socket = self.stack.enter_context(
            connect(
                address.replace("http", "ws") + "/v1/realtime", max_size=None, open_timeout=100, **options
            )
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stack.close()

    def send(self, kind, **fields):
        self.socket.send(json.dumps({"type": kind, **fields}))

    def next(self):
        return json.loads(self.socket.recv(timeout=200))

    def until(self, kind):
        """All events up to the first of a kind, that one included."""
        events = [self.next()]
        while events[-1]["type"] != kind:
            events.append(self.next())
        return events

    def rest(self):
        """All events up to the end, and the close code."""
        events = []
        try:
            while True:
                events.append(self.next())
        except ConnectionClosed as closed:
            return events, closed.rcvd.code


def kinds(events):
    return [event["type"] for event in events]


def deltas(events):
    return "".join(event["delta"] for event in events if event["type"] == f"{TRANSCRIPTION}.delta")


def test_the_official_client_transcribes_what_is_said(server):
    address, _ = server
    samples, text = speech(12)
    again, more = speech(3, 2)
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none")
    with client.realtime.connect(model="tones") as connection:
        created = connection.recv()
        assert created.type == "session.created"
        assert created.session.audio.input.format.rate == 24_000
        connection.session.update(
            session={
                "type": "transcription",
                "audio": {
                    "input": {
                        "format": {"type": "audio/pcm", "rate": 24_000},
                        "transcription": {"model": "whisper-1", "language": "en"},
                        "turn_detection": {"type": "server_vad", "silence_duration_ms": 600},
                    }
                },
                "include": ["item.input_audio_transcription.logprobs"],
            }
        )
        updated = connection.recv()
        assert updated.type == "session.updated"
        assert updated.session.audio.input.transcription.model == "tones"
        assert updated.session.audio.input.turn_detection.silence_duration_ms == 600
        for chunk in chunks(np.concatenate((samples, again))):
            connection.input_audio_buffer.append(audio=pcm(chunk))
        events, transcripts = [], []
        while len(transcripts) < 2:
            event = connection.recv()
            events.append(event)
            if event.type == f"{TRANSCRIPTION}.completed":
                transcripts.append(event.transcript)
    assert transcripts == [text, more]
    by_item = {}
    for event in events:
        if event.type == f"{TRANSCRIPTION}.delta":
            by_item[event.item_id] = by_item.get(event.item_id, "") + event.delta
            assert len(event.logprobs) == len(event.delta.split())
            assert all(entry.logprob <= 0 for entry in event.logprobs)
    assert list(by_item.values()) == transcripts
    first = [event for event in events if getattr(event, "item_id", None) == next(iter(by_item))]
    assert first[0].type == "input_audio_buffer.speech_started"
    assert first[1].type == f"{TRANSCRIPTION}.delta"  # while it is still being said
    assert [event.type for event in first[-3:]] == [
        "input_audio_buffer.speech_stopped",
        "input_audio_buffer.committed",
        f"{TRANSCRIPTION}.completed",
    ]
    assert abs(first[-3].audio_end_ms / 1000 - (len(samples) - len(QUIET)) / tones.RATE) < 0.4
    added = [event for event in events if event.type == "conversation.item.added"]
    assert [event.item.content[0].transcript for event in added] == transcripts
    assert added[1].previous_item_id == added[0].item.id
    assert first[-1].usage.type == "duration" and first[-1].usage.seconds > 1


def test_the_client_commits_and_clears(server):
    address, _ = server
    samples, text = speech(3, 3)
    with Raw(address) as raw:
        raw.send(
            "session.update",
            session={
                "type": "transcription",
                "audio": {"input": {"format": {"type": "audio/pcm", "rate": 16_000}, "turn_detection": None}},
                "include": ["imputer.partial", "imputer.alignment"],
            },
        )
        assert raw.until("session.updated")[-1]["session"]["audio"]["input"]["turn_detection"] is None
        raw.send("input_audio_buffer.commit", event_id="mine")
        error = raw.next()["error"]
        assert (error["code"], error["event_id"]) == ("input_audio_buffer_commit_empty", "mine")
        raw.send("input_audio_buffer.append", audio=pcm(samples, 16_000))
        raw.send("input_audio_buffer.clear")
        assert "input_audio_buffer.committed" not in kinds(raw.until("input_audio_buffer.cleared"))
        raw.send("input_audio_buffer.append", audio=pcm(samples, 16_000))
        raw.send("input_audio_buffer.commit")
        events = raw.until(f"{TRANSCRIPTION}.completed")
        assert events[-1]["transcript"] == text == deltas(events)
        assert "input_audio_buffer.speech_started" not in kinds(events)
        partial = next(event for event in events if event["type"] == "imputer.partial")
        assert text.startswith(partial["words"][0]["word"])
        frames = [event for event in events if event["type"] == "imputer.alignment"]
        assert frames and all(len(event["symbols"]) == len(event["confidence"]) for event in frames)


def test_the_events_of_the_beta(server):
    address, _ = server
    samples, text = speech(2, 4)
    with Raw(address, additional_headers={"OpenAI-Beta": "realtime=v1"}) as raw:
        assert raw.next()["type"] == "transcription_session.created"
        raw.send(
            "transcription_session.update",
            session={
                "input_audio_format": "pcm16",
                "input_audio_transcription": {"model": "gpt-4o-transcribe"},
                "turn_detection": {"type": "server_vad", "threshold": 0.5, "prefix_padding_ms": 300},
            },
        )
        updated = raw.next()
        assert updated["type"] == "transcription_session.updated"
        assert updated["session"]["input_audio_transcription"]["model"] == "tones"
        raw.send("input_audio_buffer.append", audio=pcm(samples))
        events = raw.until(f"{TRANSCRIPTION}.completed")
        assert events[-1]["transcript"] == text
        assert "conversation.item.created" in kinds(events)


def test_bad_events_are_named_and_harm_nothing(server):
    address, _ = server
    samples, text = speech(2, 5)

    def session(**fields):
        return json.dumps({"type": "session.update", "session": {"type": "transcription", **fields}})

    bad = [
        ("{", "invalid_json", "not JSON"),
        ('{"type": "x", "event_id": ' + "9" * 5000 + "}", "invalid_json", "not JSON"),
        ("[]", "invalid_value", "a JSON object with a type"),
        (b"\x00\x01", "invalid_value", "events are JSON in text messages"),
        ('{"type": "response.create"}', "invalid_value", "unknown event 'response.create'"),
        ('{"type": "input_audio_buffer.append"}', "invalid_value", "audio is text"),
        ('{"type": "input_audio_buffer.append", "audio": "%%%"}', "invalid_value", "not base64"),
        ('{"type": "input_audio_buffer.append", "audio": "AAAA"}', "invalid_value", "has 3 bytes, but PCM16"),
        (session(audio={"input": {"format": {"rate": 10}}}), "invalid_value", "a number from 8000 to 96000"),
        (session(audio={"input": {"format": {"type": "audio/pcmu"}}}), "invalid_value", "takes 'audio/pcm'"),
        (
            session(audio={"input": {"turn_detection": {"type": "semantic_vad"}}}),
            "invalid_value",
            "server_vad",
        ),
        (session(audio={"input": {"transcription": {"model": "x"}}}), "model_not_found", "no model 'x'"),
        (session(audio=[1]), "invalid_value", "session.audio is an object"),
        (session(include=["y"]), "invalid_value", "session.include has 'y'"),
        ('{"type": "session.update", "session": {"type": "realtime"}}', "invalid_value", "only transcribes"),
    ]
    with Raw(address) as raw:
        raw.next()
        for message, code, said in bad:
            raw.socket.send(message)
            error = raw.next()["error"]
            assert error["code"] == code and said in error["message"], error
            assert "Traceback" not in error["message"]
        raw.send("input_audio_buffer.append", audio=pcm(samples))
        assert raw.until(f"{TRANSCRIPTION}.completed")[-1]["transcript"] == text


def test_a_flood_is_ended_with_all_that_was_settled_and_hurts_nobody(model):
    samples, text = speech(6, 6)
    with serving(model, session_buffer_seconds=20.0) as (address, service):
        with Raw(address) as raw:
            raw.send("input_audio_buffer.append", audio=pcm(samples))
            before = raw.until(f"{TRANSCRIPTION}.delta")
            raw.send("input_audio_buffer.append", audio=pcm(np.tile(samples, 8)))
            assert ask(address).json()["text"]  # an upload is served meanwhile
            after, code = raw.rest()
        assert code == 1008
        assert after[-1]["error"]["code"] == "buffer_overflow"
        assert "no faster than it is spoken" in after[-1]["error"]["message"]
        assert after[-2]["type"] == f"{TRANSCRIPTION}.completed"
        whole = deltas(before + after)
        assert whole == after[-2]["transcript"] and text.startswith(whole.rpartition(" ")[0])
        wait_until(lambda: not service.batcher.jobs and not service.connections.busy)


def test_streams_run_in_worker_processes_too(model):
    samples, text = speech(8, 9)
    with serving(model, workers=2) as (address, _), Raw(address) as raw:
        raw.send("input_audio_buffer.append", audio=pcm(samples))
        events = raw.until(f"{TRANSCRIPTION}.completed")
        assert events[-1]["transcript"] == text == deltas(events)


def test_silence_of_the_client_ends_a_session(model):
    with serving(model, session_idle_seconds=0.5) as (address, service):
        with Raw(address) as raw:
            events, code = raw.rest()
        assert (kinds(events), code) == (["session.created", "error"], 1008)
        assert events[-1]["error"]["code"] == "idle_timeout"
        # A client that goes away in the middle leaves nothing behind.
        with Raw(address) as raw:
            raw.send("input_audio_buffer.append", audio=pcm(speech(8, 7)[0]))
            raw.until("input_audio_buffer.speech_started")
        wait_until(lambda: not service.batcher.jobs and not service.connections.open)


def test_sessions_that_are_held_open_lock_nobody_out(model, monkeypatch):
    """They take no place of uploads; the one that has been silent longest makes room for a new one."""
    monkeypatch.setattr(livesessions, "SILENT_SECONDS", 3600.0)
    with (
        serving(model, max_sessions=3, max_requests=1) as (address, service),
        contextlib.ExitStack() as stack,
    ):
        held = [stack.enter_context(Raw(address)) for _ in range(3)]
        for raw in held:
            assert raw.next()["type"] == "session.created"
        assert ask(address).json()["text"] == TEXT
        with pytest.raises(InvalidStatus, match="429"):
            Raw(address)
        assert figure(address, "imputer_live_sessions") == 3
        monkeypatch.setattr(livesessions, "SILENT_SECONDS", 0.0)
        held[0].send("input_audio_buffer.clear")
        held[0].until("input_audio_buffer.cleared")
        samples, text = speech(2, 5)
        with Raw(address) as new:
            new.send("input_audio_buffer.append", audio=pcm(samples))
            assert new.until(f"{TRANSCRIPTION}.completed")[-1]["transcript"] == text
        events, code = held[1].rest()
        assert code == 1013 and events[-1]["error"]["code"] == "queue_full"
        held[0].send("input_audio_buffer.clear")
        held[0].until("input_audio_buffer.cleared")
    assert not service.sessions.open


def test_sessions_are_logged_and_counted(model, tmp_path):
    samples, text = speech(3, 3)
    with Program(tmp_path / "log", "--model", model, "--log-json") as program:
        with Raw(program.address, additional_headers={"x-request-id": "live-1"}) as raw:
            raw.send("input_audio_buffer.append", audio=pcm(samples))
            assert raw.until(f"{TRANSCRIPTION}.completed")[-1]["transcript"] == text
        with pytest.raises(InvalidStatus, match="403"):
            Raw(program.address, origin="https://elsewhere.example")
        wait_until(lambda: figure(program.address, "imputer_live_sessions") == 0)
        seconds = len(samples) / tones.RATE
        wait_until(lambda: figure(program.address, "imputer_audio_seconds_total") > 0)
        counted = figure(program.address, "imputer_audio_seconds_total")
        assert seconds - 2 < counted < seconds + 0.1  # the client left in the silence at the end
        figures = get(f"{program.address}/metrics").text
        lines = [json.loads(line) for line in program.stop().splitlines()]
    assert not [line for line in lines if line["level"] == "error"], "a refusal is not an error"
    for status, name in (("101", "tones"), ("403", "")):
        assert f'requests_total{{endpoint="realtime",model="{name}",status="{status}"}} 1.0' in figures
    (line,) = [line for line in lines if line.get("request_id") == "live-1"]
    assert line["message"] == "GET /v1/realtime" and line["status"] == 101 and line["model"] == "tones"
    assert line["audio_seconds"] == pytest.approx(counted, abs=0.01) and line["work_seconds"] > 0


def test_a_server_that_stops_settles_first(model):
    samples, _ = speech(3, 8)
    with serving(model) as (address, service), Raw(address) as raw:
        raw.send("input_audio_buffer.append", audio=pcm(samples[: -len(QUIET)]))
        raw.until("input_audio_buffer.speech_started")
        wait_until(lambda: not service.batcher.waiting)
        service.draining = True
        events, code = raw.rest()
        assert code == 1012
        assert events[-1]["error"]["code"] == "shutting_down"
        assert events[-2]["type"] == f"{TRANSCRIPTION}.completed"
        with pytest.raises(InvalidStatus, match="503"):
            Raw(address)


def test_the_checks_of_uploads_hold(model):
    def status(address, **options):
        with pytest.raises(InvalidStatus) as refused:
            Raw(address, **options)
        response = refused.value.response
        assert json.loads(response.body)["error"]["message"]
        return response.status_code

    with serving(model, api_keys=("secret",), max_sessions=1) as (address, service):
        right = {"additional_headers": {"Authorization": "Bearer secret"}}
        assert status(address) == 401
        assert status(address, additional_headers={"Authorization": "Bearer wrong"}) == 401
        assert status(address, origin="https://elsewhere.example", **right) == 403
        assert status(address, subprotocols=["realtime", "openai-insecure-api-key.wrong"]) == 401
        with Raw(address, subprotocols=["realtime", "openai-insecure-api-key.secret"]) as raw:
            assert raw.socket.subprotocol == "realtime"
            assert raw.next()["type"] == "session.created"
            assert status(address, **right) == 429  # the only place is taken
        wait_until(lambda: not service.batcher.jobs)
        with Raw(address, **right) as raw:
            assert raw.next()["type"] == "session.created"


def test_other_hosts_are_refused(server):
    address, _ = server
    port = address.rpartition(":")[2]
    with (
        socket.create_connection(("127.0.0.1", int(port))) as plain,
        pytest.raises(InvalidStatus, match="421"),
        connect(f"ws://evil.example:{port}/v1/realtime", sock=plain),
    ):
        pass
