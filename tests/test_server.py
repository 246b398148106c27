"""The server, as its clients see it: over a real connection, on the language of tones."""

import io
import json
import re
import socket
import threading

import numpy as np
import openai
import pytest
import soundfile
from hypothesis import given, settings, strategies

import tones
from imputer import decoding, transcripts
from imputer.recognizer import Recognizer
from imputer.server import forms, modelnames, uploads
from imputer.server.failures import Failure
from imputer.server.settled_text import SettledText
from serving import (
    TEXT,
    TRANSCRIPTIONS,
    ask,
    check_envelope,
    connected,
    get,
    long_speech,
    packed,
    post,
    receive_all,
    serving,
    wav,
)


@pytest.fixture(scope="module")
def address(running):
    return running[0]


@pytest.fixture(scope="module")
def client(address):
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        yield client


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
    """Deltas add up to the text; the passes come on request and hold the partial alignments."""
    with client.audio.transcriptions.create(
        model="tones",
        file=("a.wav", wav()),
        stream=True,
        include=["passes"],
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


def test_a_stream_has_openai_events_only(address, client, listener):
    """Strict clients fail on events they do not know; usage and the end are as in OpenAI's streams."""
    expected = listener.transcribe(io.BytesIO(wav()))
    answer = ask(address, stream="true")
    blocks = answer.text.strip().split("\n\n")
    assert blocks[-1] == "data: [DONE]"
    kinds = [json.loads(block.partition("data: ")[2])["type"] for block in blocks[:-1]]
    assert set(kinds) == {"transcript.text.delta", "transcript.text.done"} and kinds.count(kinds[-1]) == 1
    with client.audio.transcriptions.create(model="tones", file=("a", wav()), stream=True) as stream:
        done = list(stream)[-1]
    done = type(done).model_validate(done.to_dict())  # strictly
    assert done.usage.type == "tokens" and done.usage.output_tokens == len(expected.tokens)
    assert done.usage.total_tokens == done.usage.input_tokens + done.usage.output_tokens


def test_stream_of_a_long_recording(client, listener):
    """Every window adds what it settles, before the next is done; the sum is the whole."""
    text, samples = long_speech()
    with client.audio.transcriptions.create(
        model="tones", file=("a.wav", wav(samples)), stream=True, include=["logprobs"]
    ) as stream:
        events = list(stream)
    deltas = [event.delta for event in events if event.type == "transcript.text.delta"]
    assert "".join(deltas) == events[-1].text == text == listener.transcribe(samples).text
    assert len(deltas) == len(listener.cut(samples)) + 1, "one for each window, and the last word"
    spelt = [entry.token for event in events[:-1] for entry in event.logprobs]
    assert spelt == [entry.token for entry in events[-1].logprobs]


@settings(deadline=None, max_examples=30)
@given(strategies.data())
def test_settled_text_is_the_joined_text(listener, data):
    """Windows in any order, with any alignment: the deltas add up to what joining at the end gives."""
    frames, hop = listener.window_frames()
    count = data.draw(strategies.integers(1, 4))
    random = np.random.default_rng(data.draw(strategies.integers(0, 2**32 - 1)))
    size = listener.vocabulary.size
    windows = []
    for number in range(count):
        length = frames if number + 1 < count else int(random.integers(frames - hop + 1, frames + 1))
        tokens = np.where(random.random(length) < 0.1, random.integers(1, size + 1, length), 0)
        windows.append(decoding.Decoded(tokens.tolist(), random.random(length).tolist(), 1))
    settled = SettledText(listener)
    order = data.draw(strategies.permutations(range(count)))
    parts = [settled.add(n, windows[n].alignment, windows[n].confidence) for n in order] + [settled.rest()]
    whole = listener.transcript(listener.join(windows), 100.0)
    assert "".join(text for text, _ in parts) == whole.text
    tokens = [token for _, part in parts for token in part]
    expected = [(t.piece, t.confidence) for t in whole.tokens]
    assert [(t.piece, t.confidence) for t in tokens] == expected[: len(tokens)]
    assert {piece for piece, _ in expected[len(tokens) :]} <= {transcripts.WORD_MARK}, "these spell nothing"


def test_openai_client_models(client):
    assert [model.id for model in client.models.list()] == ["tones"]
    assert client.models.retrieve("tones").owned_by == "imputer"
    for name in modelnames.ALIASES:
        assert client.models.retrieve(name).id == name
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_current_openai_fields(client, address):
    """What today's client can send is used, or ignored where that is harmless."""
    got = client.audio.transcriptions.create(
        model="gpt-transcribe",
        file=("a.wav", wav()),
        keywords=["goluba", "midago"],
        languages=["en", "de"],
        prompt="Hello there: Luda, Mi. This sentence is far too long to be a name of anything.",
        temperature=0.2,
        chunking_strategy={"type": "server_vad", "threshold": 0.5},
        timestamp_granularities=["word"],
    )
    assert got.text == TEXT and [word["word"] for word in got.to_dict()["words"]] == TEXT.split()
    check_envelope(ask(address, hotwords="xyzzy 12"), 400, "invalid_value")
    assert ask(address, lm="none").json()["text"] == TEXT


def test_keywords_and_prompts_in_any_spelling(folder):
    """A keyword is a hint: what the model can write of it counts, the rest is skipped and refuses nothing."""
    with serving(folder) as (_, service):
        texts = [("keywords[]", "Goluba"), ("keywords[]", "C3PO, mi-da"), ("prompt", "Luda, Xyzzy")]
        options = service._read(texts, "transcribe", False).options
        assert options.hotwords == ("Goluba", "mi-da", "luda")
        assert service.recognizers["tones"].search(options) is not None


def test_words_that_a_request_expects_are_limited():
    """Each letter costs kilobytes and a tenth of a millisecond: too many hints are dropped, the first ones count."""
    texts = [("hotwords", "ba"), ("keywords[]", "goluba," * 2000), ("prompt", "luda")]
    known = modelnames.Models({"tones": 8}, {})
    expected = forms.read_request(texts, known)
    assert expected.options.hotwords == ("ba",)
    assert set(expected.suggested) == {"goluba"} and 1990 < 6 * len(expected.suggested) < 2000


def test_a_list_of_hotwords_is_prepared_beside_the_event_loop(folder, monkeypatch):
    """Preparing it there would hold every connection up."""
    threads = []
    search = Recognizer.search

    def watched(self, options):
        if options.hotwords:
            threads.append(threading.current_thread().name)
        return search(self, options)

    monkeypatch.setattr(Recognizer, "search", watched)
    with serving(folder) as (address, _):
        assert ask(address, hotwords="goluba").json()["text"] == TEXT
    assert threads[0].startswith("imputer-helper")


@pytest.mark.parametrize("language", ["en", "en_US", "en-GB", "eng", "EN", "English", "auto", ""])
def test_names_of_english(language):
    models = modelnames.Models({"english": 8})
    assert forms.read_request([("language", language)], models).language == "english"


def test_languages_of_a_model_for_english():
    models = modelnames.Models({"english": 8, "mine": 8}, {"fast": "mine"})
    for items in ([("language", "de")], [("languages[]", "de"), ("languages[]", "fr")]):
        with pytest.raises(Failure, match="is for English"):
            forms.read_request(items, models)
    assert forms.read_request([("languages[]", "de"), ("languages[]", "en")], models).model == "english"
    assert forms.read_request([("model", "fast"), ("language", "de")], models).language == "de"
    assert forms.read_request([], models, "translate").task == "translate"
    with pytest.raises(Failure, match="cannot translate"):
        forms.read_request([("model", "mine")], models, "translate")


def test_translations_and_aliases(folder):
    """A model called english is for English: translating its speech is transcribing it."""
    place = tones.save(folder.parent / "english")
    with serving(place, aliases=(("mine", "english"),)) as (address, _):
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        with client:
            assert client.audio.translations.create(model="whisper-1", file=("a.wav", wav())).text == TEXT
            verbose = client.audio.translations.create(
                model="mine", file=("a.wav", wav()), response_format="verbose_json"
            )
            assert verbose.to_dict()["task"] == "translate"
            assert client.models.retrieve("mine").to_dict()["root"] == "english"
            assert [model.id for model in client.models.list()] == ["english", "mine"]


def test_openai_client_errors(client, folder):
    with pytest.raises(openai.NotFoundError, match="no model 'other'; known: tones"):
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


def decoded(content, **options):
    """What the server makes of an upload."""
    return np.concatenate(list(uploads.blocks(io.BytesIO(content), "a", sample_rate=tones.RATE, **options)))


@pytest.mark.parametrize(("container", "codec"), [("webm", "libopus"), ("mp4", "aac"), ("adts", "aac")])
def test_containers_of_browsers_and_phones(address, container, codec):
    """The same sound comes out, but for what the codec does to it: a little delay, a little noise."""
    samples = tones.speak(TEXT, 500)[0]
    content = packed(container, codec, samples)
    got = decoded(content, max_seconds=9.0)
    assert abs(len(got) - len(samples)) < 1100
    kept = samples[:-2000]
    best = max(np.corrcoef(kept, got[delay : delay + len(kept)])[0, 1] for delay in range(1100))
    assert best > 0.99
    assert ask(address, content).status_code == 200


@pytest.mark.filterwarnings(
    "error::imputer.audio.limits.AudioWarning"
)  # a server has nobody to tell on stderr
@pytest.mark.parametrize(
    ("container", "codec"), [("webm", "libopus"), ("mp3", "libmp3lame"), ("adts", "aac")]
)
def test_an_answer_says_that_the_end_of_the_audio_is_missing(address, monkeypatch, container, codec):
    whole = packed(container, codec, tones.speak(TEXT, 500)[0])
    if container == "mp3":  # no header that says how long it is
        whole = whole.replace(b"Xing", bytes(4)).replace(b"Info", bytes(4))
    cut, warning = whole[: int(len(whole) * 0.8)], "the end of the audio is missing"
    for response_format in ("json", "verbose_json", "text", "srt"):
        told = ask(address, cut, response_format=response_format)
        assert told.status_code == 200 and told.headers["x-imputer-warning"] == warning
        if "json" in response_format:
            assert told.json()["warnings"] == [warning]
    stream = ask(address, cut, stream="true").text
    assert f'"warnings":["{warning}"]' in stream.partition("event: transcript.text.done")[2]
    assert ask(address, cut, "/v1/imputations").json()["warnings"] == [warning]
    told = ask(address, whole)
    assert "x-imputer-warning" not in told.headers and "warnings" not in told.json()
    warned = []
    parts = uploads.blocks(io.BytesIO(cut), "a", sample_rate=tones.RATE, max_seconds=9.0, warn=warned.append)
    assert len(np.concatenate(list(parts))) > 0.7 * len(decoded(whole, max_seconds=9.0))
    assert set(warned) == {warning}


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
    "no samples": (400, {"content": wav(np.zeros(0, np.float32))}, "empty_audio"),
    "one sample": (400, {"content": wav(np.zeros(1, np.float32))}, "audio_too_short"),
    "not a number": (
        400,
        {"content": wav(np.full(8000, np.nan, np.float32), subtype="FLOAT")},
        "invalid_audio",
    ),
    "cut off": (400, {"content": wav()[:4000]}, "invalid_audio"),
    "cut off FLAC": (400, {"content": wav(kind="FLAC")[:9000]}, "invalid_audio"),
    "cut off MP3 header": (400, {"content": b"ID3\x04\x00"}, "invalid_audio"),
    "damaged webm": (400, {"content": b"\x1aE\xdf\xa3" + bytes(4000)}, "invalid_audio"),
    "damaged mp4": (400, {"content": b"\x00\x00\x00\x20ftypM4A " + bytes(4000)}, "invalid_audio"),
    "half an SPHERE header": (400, {"content": b"NIST_1A\n   1024\n"}, "invalid_audio"),
    "unknown format": (400, {"response_format": "yaml"}, "invalid_value"),
    "unknown strategy": (400, {"strategy": "guess"}, "invalid_value"),
    "block size 0": (400, {"block_size": "0"}, "invalid_value"),
    "block size 1e99": (400, {"block_size": "9" * 99}, "invalid_value"),
    "unknown granularity": (
        400,
        {"response_format": "verbose_json", "timestamp_granularities[]": "letter"},
        "invalid_value",
    ),
    "block size with zeros": (400, {"block_size": "0000000089999"}, "invalid_value"),
    "block size in other digits": (400, {"block_size": "\u0668"}, "invalid_value"),
    "hotwords without end": (400, {"hotwords": "ba," * 5000}, "invalid_value"),
    "speakers": (400, {"response_format": "diarized_json"}, "invalid_value"),
    "names of speakers": (400, {"known_speaker_names[]": "anna"}, "invalid_value"),
    "passes without a stream": (400, {"include[]": "passes"}, "invalid_value"),
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


def test_forms_that_are_none(address):
    url = address + TRANSCRIPTIONS
    check_envelope(post(url, json={"file": "a.wav"}), 415)
    check_envelope(post(url), 415)
    check_envelope(post(url, data={"file": "a.wav"}), 415)
    check_envelope(post(url, files={"model": (None, "tones")}), 400, "missing_file")
    error = check_envelope(post(url, files={"audio": ("a.wav", wav())}), 400, "wrong_field")
    assert "'audio'" in error["message"] and "'file'" in error["message"]
    for nameless, code in ((b"text", "missing_file"), (wav(np.zeros(20_000)), "invalid_form")):
        error = check_envelope(post(url, files={"file": (None, nameless)}), 400, code)
        assert "file name" in error["message"]
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
        f"POST {TRANSCRIPTIONS} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer secret\r\n"
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
            f"POST {TRANSCRIPTIONS} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer secret\r\n"
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
        f"POST {TRANSCRIPTIONS} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer secret\r\n"
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

    media = packed("webm", "libopus", np.zeros(120 * tones.RATE, np.float32))
    for sound in (content, media):
        blocks = 0

        def count():
            nonlocal blocks
            blocks += 1

        with pytest.raises(Failure) as caught:
            decoded(sound, max_seconds=5.0, check=count)
        assert caught.value.status == 413 and blocks < 50, "it was decoded to its end"


def test_odd_headers_are_refused(small):
    address, _ = small
    for rate, channels in ((10, 1), (2_000_000, 1), (16_000, 200)):
        content = wav(np.zeros((100, channels), np.float32), rate)
        check_envelope(ask(address, content, headers=KEY), 400, "invalid_audio")


@pytest.mark.parametrize(
    ("length", "status"),
    [("0" * 14 + "999999", b"413"), ("0" * 20 + "99999999999", b"400"), ("-5", b"400"), ("1e3", b"400")],
)
def test_lengths_are_read_whole(small, length, status):
    """Zeros in front must not hide what is behind them; the parser itself refuses more than 20 digits."""
    with connected(small[0]) as connection:
        head = (
            f"POST {TRANSCRIPTIONS} HTTP/1.1\r\nHost: localhost\r\nAuthorization: {KEY['authorization']}\r\n"
        )
        connection.sendall(f"{head}Content-Length: {length}\r\nExpect: 100-continue\r\n\r\n".encode())
        assert connection.recv(4096).split()[1] == status


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
