"""The page in a real browser: what a person does there, with mouse, keyboard and microphone."""

import base64
import contextlib
import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import httpx
import numpy as np
import pytest

import tones
from imputer import transcripts
from imputer.recognizer import Recognizer
from imputer.server.launch import listen
from serving import TEXT, packed, serving, wav

pytestmark = pytest.mark.browser

post = partial(httpx.post, timeout=100)
CHROMIUM = shutil.which("chromium") or "/usr/bin/chromium"
ARGUMENTS = [
    "--no-sandbox",
    "--headless=new",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--use-fake-ui-for-media-stream",
    "--use-fake-device-for-media-stream",
    "--autoplay-policy=no-user-gesture-required",
]
ARTIFACTS = Path(__file__).parents[1] / "artifacts"
KINDS = ("txt", "srt", "vtt", "json", "ctm")

# Sounds played, microphones opened, fields sent and violations of the policy are written down.
SPY = """
window.played = [];
window.microphones = [];
window.violations = [];
window.fields = {};
const append = FormData.prototype.append;
FormData.prototype.append = function (name, value, ...rest) {
  if (name === "file") window.fields = {}; // it comes first
  else window.fields[name] = String(value);
  return append.call(this, name, value, ...rest);
};
const play = HTMLMediaElement.prototype.play;
HTMLMediaElement.prototype.play = function () {
  window.audio = this;
  window.played.push(this.currentTime);
  return play.call(this);
};
const open = MediaDevices.prototype.getUserMedia;
MediaDevices.prototype.getUserMedia = async function (wanted) {
  const place = window.microphones.push("asked") - 1;
  const stream = await open.call(this, wanted);
  window.microphones[place] = stream;
  return stream;
};
const isLive = (stream) => stream === "asked" || stream.getTracks().some((track) => track.readyState === "live");
window.live = () => window.microphones.filter(isLive).length;
document.addEventListener("securitypolicyviolation", (event) => window.violations.push(event.violatedDirective));
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if not Path(CHROMIUM).exists():
        reason = "chromium is not installed: apt-get install chromium"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    from playwright.sync_api import sync_playwright

    spoken = tmp_path_factory.mktemp("microphone") / "spoken.wav"
    spoken.write_bytes(wav(subtype="PCM_16"))
    arguments = [*ARGUMENTS, f"--use-file-for-fake-audio-capture={spoken}"]
    # A name that leads here, and no check of the browser's own that would hide a missing one of the server's.
    arguments += ["--host-resolver-rules=MAP evil.example 127.0.0.1", "--no-proxy-server"]
    arguments += ["--disable-features=LocalNetworkAccessChecks,LocalNetworkAccessChecksWebSockets"]
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def server(folder):
    with serving(folder) as found:
        yield found


@pytest.fixture(scope="module")
def address(server):
    return server[0]


@pytest.fixture
def page(browser, address):
    with opened(browser, address) as page:
        yield page


@contextlib.contextmanager
def opened(browser, address, *, prepare=lambda page: None, **options):
    """A page that must not log an error, break its own policy, or ask anything of another server."""
    context = browser.new_context(**({"viewport": {"width": 1280, "height": 900}} | options))
    page = context.new_page()
    page.set_default_timeout(120_000)
    page.add_init_script(SPY)
    prepare(page)
    errors, strangers, page.sent = [], [], []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
    page.on("request", lambda r: page.sent.append(r) if r.method == "POST" else None)
    page.on(
        "request", lambda r: strangers.append(r.url) if not r.url.startswith((address, "blob:")) else None
    )
    page.errors = errors
    page.goto(address)
    until(
        page,
        "!document.querySelector('#strategy') || document.querySelector('#strategy').options.length > 0"
        " || !document.querySelector('#key-form').hidden || !document.querySelector('#error').hidden",
    )
    yield page
    assert page.evaluate("window.violations") == []
    assert page.evaluate("window.live()") == 0, "a microphone is open"
    assert errors == [] and strangers == []
    context.close()


def until(page, condition):
    """Wait for a condition; playwright's own waiting is forbidden by the page's policy."""
    deadline = time.monotonic() + 120
    while not page.evaluate(condition):
        assert time.monotonic() < deadline, condition
        page.wait_for_timeout(20)


def choose(page, content=None, name="speech.wav"):
    """Choose a file and wait for nothing."""
    content = wav() if content is None else content
    page.set_input_files("#file", {"name": name, "mimeType": "audio/wav", "buffer": content})


def shown(page):
    page.wait_for_selector("#result[aria-busy=false] #transport:not([hidden])")
    page.wait_for_selector("#transcript[aria-busy=false]")


def upload(page, content=None, name="speech.wav"):
    choose(page, content, name)
    shown(page)


def blur(page):
    page.evaluate("document.activeElement.blur()")


def words(page):
    return page.locator("#transcript .word, #transcript .open").all_inner_texts()


def filled(page):
    """Frames filled in the visible part of the timeline, and how many there are."""
    label = page.get_attribute("#timeline-canvas", "aria-label")
    found = re.search(r"(\d+) of (\d+) frames filled", label)
    return int(found[1]), int(found[2])


def settle(page):
    """Let the page draw what it was told to."""
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def set_range(page, selector, value):
    """Move a slider as a hand would: its events are what the page listens to."""
    page.locator(selector).evaluate(
        """(slider, value) => {
            slider.value = value;
            slider.dispatchEvent(new Event("input", { bubbles: true }));
            slider.dispatchEvent(new Event("change", { bubbles: true }));
        }""",
        value,
    )


@contextlib.contextmanager
def gated(service, model="tones"):
    """The network makes a pass for each ``release()`` of the semaphore, and as it likes in the end."""
    network = service.recognizers[model].model
    gate, open_for_all, impute = threading.Semaphore(0), threading.Event(), network.impute

    def one_pass(*arguments):
        while not open_for_all.is_set() and not gate.acquire(timeout=0.02):
            pass
        return impute(*arguments)

    network.impute = one_pass
    try:
        yield gate
    finally:
        open_for_all.set()
        del network.impute


def transcribed(folder):
    """What the recogniser makes of the recording that the tests upload."""
    return Recognizer.from_pretrained(folder).transcribe(io.BytesIO(wav()), trace=True)


# Pages of other sites.

ATTACK = """
async ([address, encoded]) => {
  const bytes = Uint8Array.from(atob(encoded), (c) => c.charCodeAt(0));
  const form = new FormData();
  form.append("file", new Blob([bytes]), "a.wav");
  const posted = fetch(`${address}/v1/audio/transcriptions`, { method: "POST", body: form });
  const text = await posted.then((answer) => answer.text(), (error) => `failed: ${error}`);
  const socket = new WebSocket(`${address.replace("http", "ws")}/v1/realtime`);
  const opened = await new Promise((done) => {
    socket.onopen = () => done(true);
    socket.onerror = () => done(false);
  });
  socket.close();
  return [text, opened];
}
"""


@pytest.mark.parametrize(
    ("site", "target", "allowed", "status"),
    [
        ("http://evil.example:PORT", "http://evil.example:PORT", {}, "421"),
        ("http://evil.example", "http://127.0.0.1:PORT", {}, "403"),
        ("http://evil.example:PORT", "http://evil.example:PORT", {"allow_hosts": ("evil.example",)}, "200"),
        ("http://evil.example", "http://127.0.0.1:PORT", {"allow_origins": ("http://evil.example",)}, "200"),
    ],
)
def test_a_page_of_another_site(browser, folder, site, target, allowed, status):
    """A name of the attacker that now leads here (DNS rebinding), and a page elsewhere that posts here."""
    with serving(folder, **allowed) as (address, _):
        site, target = (url.replace("PORT", address.rpartition(":")[2]) for url in (site, target))
        context = browser.new_context()
        page = context.new_page()
        document = {"content_type": "text/html", "body": "<!doctype html><title>Attack</title>"}
        page.route(f"{site}/", lambda route: route.fulfill(**document))  # loaded while the name led elsewhere
        page.goto(f"{site}/")
        text, opened = page.evaluate(ATTACK, [target, base64.b64encode(wav()).decode()])
        context.close()
        figures = httpx.get(f"{address}/metrics", timeout=100).text
    assert (TEXT in text, opened) == ((status == "200"),) * 2, text
    assert re.search(
        rf'requests_total{{endpoint="transcriptions",model="\w*",status="{status}"}} \d', figures
    )


# Writing, as it happens.


def test_passes_are_shown_as_they_happen(page, server, folder):
    expected = transcribed(folder)
    frames = len(expected.trace[0])
    with gated(server[1]) as gate:
        choose(page)
        until(page, "document.querySelector('#progress-text').textContent === 'Waiting for the server'")
        for number, row in enumerate(expected.trace[:-1], 1):
            gate.release()
            until(page, f"document.querySelector('#progress-text').textContent === 'Pass {number} of 8'")
            settle(page)
            known = sum(symbol != transcripts.MASK for symbol in row)
            if page.is_hidden("#overview"):
                assert filled(page) == (known, frames)
            assert page.locator("#progress").evaluate("(bar) => bar.value") == pytest.approx(known / frames)
            assert page.get_attribute("#result", "aria-busy") == "true"
            assert page.is_visible("#cancel") and page.is_hidden("#take") and page.is_hidden("#transport")
        assert words(page), "some of the text can be read before the last pass"
    shown(page)
    assert words(page) == TEXT.split() and page.is_hidden("#cancel")


def test_what_is_missing_in_an_upload_is_said(page):
    whole = packed("webm", "libopus", tones.speak(TEXT, 500)[0])
    choose(page, whole[: int(len(whole) * 0.8)], "cut.webm")
    shown(page)
    missing = "the end of the audio is missing"
    assert missing in page.inner_text("#facts") and missing in page.inner_text("#status")
    choose(page)
    shown(page)
    assert missing not in page.inner_text("#facts")


def test_passes_of_a_long_recording_are_shown_window_by_window(page, server):
    text = tones.sentence(np.random.default_rng(5), 60)
    samples = tones.speak(text, 5, pause=0.5)[0]
    count = len(
        post(server[0] + "/v1/imputations", files={"file": ("a.wav", wav(samples))}).json()["windows"]
    )
    assert count > 2
    with gated(server[1]) as gate:
        choose(page, wav(samples))
        for number in range(1, 9):
            gate.release()
            until(
                page,
                f"document.querySelector('#progress-text').textContent.includes(' of {count}, pass {number} of 8')",
            )
        read = words(page)
        assert 3 < len(read) < 60, "the first windows are written, the others are not"
        assert read[:3] == text.split()[:3]
    shown(page)
    assert words(page) == text.split()


def test_the_pass_of_a_search_is_counted_beforehand(page, server):
    with gated(server[1]) as gate:
        page.locator("#advanced summary").click()
        page.fill("#hotwords", "goluba")
        choose(page)
        gate.release()
        until(page, "document.querySelector('#progress-text').textContent === 'Pass 1 of 9'")


def test_cancel(page, server):
    service = server[1]
    with gated(service) as gate:
        choose(page)
        gate.release()
        until(page, "document.querySelector('#progress-text').textContent === 'Pass 1 of 8'")
        page.click("#cancel")
        page.wait_for_selector("#resume")
        assert (
            "incomplete" in page.inner_text("#facts")
            and page.inner_text("#status") == "Cancelled speech.wav."
        )
        assert page.is_hidden("#take") and page.is_hidden("#transport") and page.is_hidden("#cancel")
    deadline = time.monotonic() + 60
    while "imputer_requests_in_progress 0" not in service.metrics.text():
        assert time.monotonic() < deadline, "the server still works for a client that left"
        time.sleep(0.02)
    page.click("#resume")
    shown(page)
    assert words(page) == TEXT.split()


def test_nothing_stale_under_a_new_name(page, server):
    upload(page, name="first.wav")
    assert page.inner_text("#result-title") == "first.wav"
    other = wav(tones.speak("luda mi", 3)[0])
    with gated(server[1]) as gate:
        choose(page, other, "second.wav")
        assert page.inner_text("#result-title") == "second.wav"
        assert words(page) == [] and page.inner_text("#facts").count("word") == 0
        assert page.is_hidden("#take") and page.is_hidden("#transport") and page.is_hidden("#greedy")
        gate.release()
        until(page, "document.querySelector('#progress-text').textContent === 'Pass 1 of 8'")
        choose(page, b"not audio", "third.txt")  # a third before the second is done
        page.wait_for_selector("#error:not([hidden])")
        assert page.inner_text("#result-title") == "third.txt" and words(page) == []
    page.wait_for_timeout(200)
    assert words(page) == [] and page.is_hidden("#take"), "the second came in after the third"
    page.errors.clear()  # the browser itself logs the 415
    upload(page, other, "second.wav")
    assert words(page) == ["luda", "mi"]


def test_the_last_file_counts(page):
    for text, name in (("ba lu", "a.wav"), ("mi", "b.wav"), ("luda mi", "c.wav")):
        choose(page, wav(tones.speak(text, 3)[0]), name)
    shown(page)
    page.wait_for_timeout(300)
    assert words(page) == ["luda", "mi"] and page.inner_text("#result-title") == "c.wav"


@contextlib.contextmanager
def process(folder, port):
    """A server in a process of its own, ready to answer."""
    command = [
        sys.executable,
        "-m",
        "imputer",
        "serve",
        "--model",
        str(folder),
        "--port",
        str(port),
        "--quiet",
    ]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"http://127.0.0.1:{port}/ready").is_success:
                    break
            assert time.monotonic() < deadline and server.poll() is None, "the server did not start"
            time.sleep(0.1)
        yield server
    finally:
        server.send_signal(signal.SIGCONT)
        server.kill()
        server.wait()


def test_a_lost_server_and_one_that_comes_back(browser, folder):
    """The server is killed while it writes; the page says so, and continues when the server is back."""
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    listener.close()
    text = tones.sentence(np.random.default_rng(5), 300)
    content = wav(tones.speak(text, 5, pause=0.6)[0], kind="FLAC")
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(process(folder, port))
        page = stack.enter_context(opened(browser, f"http://127.0.0.1:{port}"))
        page.locator("#advanced summary").click()
        set_range(page, "#block-size", 32)  # with so long a recording, there is time to kill it in between
        choose(page, content)
        until(page, "document.querySelector('#progress-text').textContent.includes('pass')")
        server.kill()
        page.wait_for_selector("#error:not([hidden])")
        assert re.search("cannot be reached|stopped before the end", page.inner_text("#error-text"))
        assert "incomplete" in page.inner_text("#facts") and page.is_hidden("#take")
        server.wait()
        page.click("#retry")  # there is still no server
        until(page, "document.querySelector('#error-text').textContent === 'The server cannot be reached.'")
        page.wait_for_selector("#error:not([hidden])")
        stack.enter_context(process(folder, port))
        set_range(page, "#block-size", 4)
        page.click("#retry")
        shown(page)
        assert words(page) == text.split() and page.is_hidden("#error")
        assert "block size 4" in page.inner_text("#facts"), "settings outlive the server"
        page.errors.clear()  # the browser itself logs refused connections


def test_a_server_that_is_busy(page):
    page.route(
        "**/v1/imputations", lambda route: route.fulfill(status=429, json={"error": {"message": "too busy"}})
    )
    choose(page)
    page.wait_for_selector("#retry")
    assert page.inner_text("#error-text") == "Too busy"
    page.unroute("**/v1/imputations")
    page.click("#retry")
    shown(page)
    page.errors.clear()  # the browser itself logs the 429


@pytest.mark.parametrize(
    ("body", "message", "again"),
    [
        ('event: error\ndata: {"error": {"message": "no sound in it"}}\n\n', "No sound in it", False),
        ("event: other\ndata: {}\n\n", "The server stopped before the end.", True),
    ],
)
def test_streams_that_end_badly(page, body, message, again):
    page.route("**/v1/imputations", lambda route: route.fulfill(content_type="text/event-stream", body=body))
    choose(page)
    page.wait_for_selector("#error:not([hidden])")
    assert page.inner_text("#error-text") == message and page.is_visible("#retry") == again
    assert page.get_attribute("#result", "aria-busy") == "false" and page.is_hidden("#busy")


def test_events_are_read_however_they_are_cut(page):
    """A stream that arrives character by character gives what it gives at once."""
    response = post(page.url + "v1/imputations", files={"file": ("a.wav", wav())}, data={"stream": "true"})
    text = "".join(block + "\n\n" for block in response.text.split("\n\n")[2:6])
    found = page.evaluate(
        """async (text) => {
            const { EventReader } = await import("./static/events.js");
            const [slow, fast] = [[], []];
            const one = new EventReader((...event) => slow.push(event));
            for (let end = 0; end <= text.length; end++) one.read(text.slice(0, end));
            new EventReader((...event) => fast.push(event)).read(text);
            return [slow, fast];
        }""",
        text,
    )
    expected = [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: ")]
    assert len(expected) == 4
    assert found[0] == found[1] == [[event["type"], event] for event in expected]


# The transcript.


def test_from_upload_to_downloads(page, folder):
    """Upload, step through the passes, take the text along in every format."""
    expected = transcribed(folder)
    frames = len(expected.trace[0])
    upload(page)
    assert words(page) == TEXT.split()
    assert page.inner_text("#pass-text") == f"Pass 8 of 8 · {frames} of {frames} filled"
    for number in range(7, -1, -1):
        page.click("#back")
        known = 0 if number == 0 else sum(s != transcripts.MASK for s in expected.trace[number - 1])
        assert page.inner_text("#pass-text") == f"Pass {number} of 8 · {known} of {frames} filled"
    assert page.get_attribute("#back", "aria-disabled") == "true"
    assert page.inner_text("#transcript").strip() == "…"
    for _ in range(8):
        page.click("#step")
    assert page.get_attribute("#step", "aria-disabled") == "true" and words(page) == TEXT.split()

    for kind in KINDS:
        with page.expect_download() as download:
            page.click(f"[data-download={kind}]")
        assert download.value.suggested_filename == f"speech.{kind}"
        got, wanted = (
            Path(download.value.path()).read_text(),
            transcripts.FORMATS[kind](expected, "speech.wav"),
        )
        if kind == "json":
            got, wanted = json.loads(got), json.loads(wanted)
            wanted.pop("trace")
        assert got == wanted
    ARTIFACTS.mkdir(exist_ok=True)
    page.click("#back")
    page.screenshot(path=ARTIFACTS / "page.png", full_page=True)


def test_text_can_be_copied_and_selected(browser, address):
    with opened(browser, address, permissions=["clipboard-read", "clipboard-write"]) as page:
        upload(page)
        page.click("#copy")
        until(page, "document.querySelector('#status').textContent === 'Copied 4 words.'")
        assert page.evaluate("navigator.clipboard.readText()") == TEXT
        first, last = page.locator(".word").first.bounding_box(), page.locator(".word").last.bounding_box()
        page.mouse.move(first["x"] + 1, first["y"] + first["height"] / 2)
        page.mouse.down()
        page.mouse.move(last["x"] + last["width"] - 1, last["y"] + last["height"] / 2, steps=5)
        page.mouse.up()
        assert page.evaluate("getSelection().toString()").split() == TEXT.split()
        assert page.evaluate("window.played") == [], "selecting is not playing"


def test_copy_without_a_clipboard(browser, address):
    """Pages that are neither https nor localhost have no navigator.clipboard."""
    with opened(browser, address, permissions=["clipboard-read"]) as page:
        upload(page)
        page.evaluate(
            "Object.defineProperty(navigator, 'clipboard', { value: undefined, configurable: true })"
        )
        page.click("#copy")
        until(page, "document.querySelector('#status').textContent.startsWith('Copied')")
        page.evaluate("delete navigator.clipboard")
        assert page.evaluate("navigator.clipboard.readText()") == TEXT


def told(page):
    return post(page.url + "v1/imputations", files={"file": ("a.wav", wav())}).json()


def test_words_can_be_played(page):
    upload(page)
    expected = told(page)["words"]
    page.locator(".word").nth(1).click()
    until(page, "window.played.length === 1 && window.audio.paused")
    assert page.evaluate("window.played[0]") == pytest.approx(expected[1]["start"] - 0.06, abs=0.01)
    assert page.evaluate("window.audio.currentTime") >= expected[1]["end"]
    # The same word over the alignment, by its place on the canvas.
    page.locator("#timeline").scroll_into_view_if_needed()
    page.locator("#timeline").evaluate("(timeline) => { timeline.scrollLeft = 0; }")  # it followed the sound
    settle(page)
    box = page.locator("#timeline-canvas").bounding_box()
    cell = (
        page.evaluate("parseFloat(document.querySelector('#timeline-space').style.width)")
        / told(page)["frames"]
    )
    frame = round(expected[1]["start"] / told(page)["frame_seconds"])
    page.mouse.click(box["x"] + (frame + 0.5) * cell, box["y"] + 12)
    until(page, "window.played.length === 2 && window.audio.paused")
    assert page.evaluate("window.played[1]") == pytest.approx(expected[1]["start"] - 0.06, abs=0.01)

    page.click("#listen")
    until(page, "document.querySelector('#listen-text').textContent === 'Pause sound'")
    until(page, "document.querySelector('.word.now') !== null")
    page.click("#listen")
    until(page, "document.querySelector('#listen-text').textContent === 'Play sound'")
    set_range(page, "#seek", 1)
    assert page.evaluate("window.audio.currentTime") == 1 and page.inner_text("#clock").startswith("0:01 / ")


def test_times_and_confidence_of_a_word(page):
    """On hover and on focus, as text; as description for a screen reader; as colour where unsure."""
    upload(page)
    expected = told(page)["words"]

    def tip(word):
        sure = math.floor(1000 * word["confidence"] + 1e-6) / 10
        return (
            f"{word['start']:.2f} to {word['end']:.2f} s, {sure if sure >= 99 else math.floor(sure):g} % sure"
        )

    page.locator(".word").nth(2).hover()
    assert page.is_visible("#word-tip") and page.inner_text("#word-tip") == tip(expected[2])
    page.mouse.move(2, 2)
    assert page.is_hidden("#word-tip")
    page.locator(".word").nth(0).focus()
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#word-tip") == tip(expected[1])
    focused = [node for node in tree(page) if node["focused"]][-1]  # the page itself is, too
    assert focused["name"] == expected[1]["text"] and focused["description"] == tip(expected[1])
    page.keyboard.press("Escape")
    assert page.is_hidden("#word-tip")


def test_unsure_words_have_a_colour(page):
    samples = noisy()
    sure = [
        w["confidence"] >= 0.9
        for w in post(page.url + "v1/imputations", files={"file": ("a.wav", wav(samples))}).json()["words"]
    ]
    assert len(set(sure)) == 2, "choose other noise"
    upload(page, wav(samples))
    lines = page.locator(".word").evaluate_all(
        "(all) => all.map((e) => getComputedStyle(e).textDecorationLine)"
    )
    assert [line == "none" for line in lines] == sure


def test_double_clicks(browser, folder, tmp_path):
    """On a word it selects, on a button it does the work once."""
    model = tones.save(tmp_path / "sampled")
    (model / "sample.wav").write_bytes(wav(tones.speak("luda mi", 3)[0]))
    with serving(model) as (address, _), opened(browser, address) as page:
        page.dblclick("#sample")
        shown(page)
        assert words(page) == ["luda", "mi"] and page.inner_text("#result-title") == "sample.wav"
        page.wait_for_timeout(200)
        assert len([request for request in page.sent if request.failure is None]) == 1
        page.dblclick(".word")
        assert page.evaluate("getSelection().toString()").strip() == "luda"
        until(page, "window.played.length >= 1 && window.audio.paused")
        assert len(page.evaluate("window.played")) == 1
        page.dblclick("#play")  # starts and pauses
        assert page.inner_text("#play-text") == "Play passes"


# Settings.


def test_settings_send_nothing_by_themselves(page):
    upload(page)
    assert not page.is_visible("#block-size"), "settings are folded"
    page.locator("#advanced summary").click()
    sent = len(page.sent)
    page.locator("#block-size").focus()
    for _ in range(4):
        page.keyboard.press("ArrowLeft")
    page.locator("#strategy").focus()
    page.keyboard.press("ArrowDown")
    page.wait_for_timeout(200)
    assert len(page.sent) == sent, "an upload per arrow key"
    assert page.inner_text("#block-size-value") == "4" and "160 ms" in page.inner_text("#block-size-hint")
    assert "other settings" in page.inner_text("#again-hint") and "block size 8" in page.inner_text("#facts")
    page.click("#again")
    until(page, "document.querySelector('#pass').max === '4'")
    shown(page)
    assert len(page.sent) == sent + 1 and "block size 4 · Alternate sub-blocks" in page.inner_text("#facts")
    assert page.inner_text("#again-hint") == ""


def strategy_answer(page, strategy):
    data = {"strategy": strategy}
    return post(page.url + "v1/imputations", files={"file": ("a.wav", wav())}, data=data).json()


@pytest.mark.parametrize("strategy", ["alternate_sub_block", "annealing", "adaptive", "top_k"])
def test_strategies(page, strategy):
    page.locator("#advanced summary").click()
    page.select_option("#strategy", strategy)
    upload(page)
    expected = strategy_answer(page, strategy)
    count = len(expected["passes"])
    assert page.get_attribute("#pass", "max") == str(count)
    blur(page)
    page.keyboard.press("Home")
    for number in range(1, count + 1):
        page.keyboard.press("ArrowRight")
        assert f"Pass {number} of {count} " in page.inner_text("#pass-text")
    assert words(page) == expected["text"].split()


def test_annealing_is_not_said_to_keep_what_it_wrote(page):
    text = page.inner_text("main")
    assert "never changes" not in text.lower() and "Only it and the annealing strategies revise" in text
    page.locator("#advanced summary").click()
    page.select_option("#strategy", "annealing")
    assert "masks again" in page.inner_text("#strategy-hint")


def test_language_model_and_hotwords(browser, address):
    """Controls for models that say they have them; others are not sent fields that they would refuse."""
    with opened(browser, address) as page:
        page.locator("#advanced summary").click()
        assert page.is_hidden("#lm") and page.is_visible("#hotwords")  # this model has no language model
        assert page.inner_text("#block-size-hint").endswith(" 8 passes.")
        upload(page)
        assert set(page.evaluate("window.fields")) == {"model", "block_size", "strategy", "stream"}

    models = httpx.get(address + "/v1/models").json()
    models["data"][0] |= {"lm": True, "hotwords": True}

    def prepare(page):
        page.route("**/v1/models", lambda route: route.fulfill(json=models))
        # What is sent is looked at; the answer does not matter.
        page.route(
            "**/v1/imputations", lambda route: route.fulfill(status=400, json={"error": {"message": "no"}})
        )

    def fields(page):
        page.wait_for_selector("#error:not([hidden])")
        return page.evaluate("window.fields")

    with opened(browser, address, prepare=prepare) as page:
        page.locator("#advanced summary").click()
        assert page.inner_text("#block-size-hint").endswith(" 8 passes and one with the language model.")
        page.fill("#hotwords", "Chan, Saharia ")
        choose(page)
        assert fields(page)["lm"] == "default" and fields(page)["hotwords"] == "Chan, Saharia"
        page.uncheck("#lm")
        assert page.inner_text("#block-size-hint").endswith(" 8 passes and one with the hotwords.")
        page.fill("#hotwords", " ")
        assert "no language model" in page.inner_text("#settings-summary")
        page.click("#again")
        assert fields(page)["lm"] == "none" and "hotwords" not in fields(page)
        page.errors.clear()  # the browser itself logs the 400s


def noisy():
    samples, _ = tones.speak(tones.sentence(np.random.default_rng(9), 9), 9, pause=0.1)
    return samples + 0.004 * np.random.default_rng(13).standard_normal(len(samples)).astype(np.float32)


def test_beside_greedy_ctc(page):
    """A switch. Noise makes the two differ: the words that differ are marked in both, and only those."""
    samples = noisy()
    expected = post(page.url + "v1/imputations", files={"file": ("a.wav", wav(samples))}).json()
    assert expected["text"] != expected["greedy"]["text"], "choose other noise"
    upload(page, wav(samples))
    height = page.locator("#timeline-canvas").bounding_box()["height"]
    assert page.is_hidden("#greedy") and page.locator(".differs").count() == 0
    page.check("#compare")
    assert page.inner_text("#greedy-text").split() == expected["greedy"]["text"].split()
    assert page.locator("#timeline-canvas").bounding_box()["height"] > height
    ours = page.locator(".word:not(.differs)").all_inner_texts()
    theirs = page.locator("#greedy-text").evaluate(
        "(side) => [...side.childNodes].filter((n) => n.nodeName === '#text').map((n) => n.data).join('')"
    )
    assert ours == theirs.split()
    assert page.locator("mark, .differs").count() > 0
    page.uncheck("#compare")
    assert page.is_hidden("#greedy") and page.locator(".differs").count() == 0
    assert page.locator("#timeline-canvas").bounding_box()["height"] == height


# A long recording.


def test_five_minutes_fit(page):
    text = tones.sentence(np.random.default_rng(5), 260)
    samples = tones.speak(text, 5, pause=0.6)[0]
    assert len(samples) > 300 * tones.RATE
    upload(page, wav(samples, kind="FLAC"), "long.flac")
    assert words(page) == text.split()
    assert page.evaluate("document.documentElement.scrollHeight") < 2000
    assert page.locator("#timeline-canvas").evaluate("(canvas) => canvas.width") <= 1280
    assert page.evaluate("document.querySelector('#timeline').scrollWidth") > 100_000
    before = page.get_attribute("#timeline-canvas", "aria-label")
    assert before.startswith("Alignment from 0.0 to ")
    box = page.locator("#overview").bounding_box()
    page.mouse.click(box["x"] + 0.995 * box["width"], box["y"] + 10)
    settle(page)
    start = float(re.search(r"from ([\d.]+) to", page.get_attribute("#timeline-canvas", "aria-label"))[1])
    assert start > 0.97 * len(samples) / tones.RATE - 5
    blur(page)
    page.keyboard.press("Home")
    settle(page)
    assert filled(page)[0] == 0
    page.keyboard.press("ArrowRight")
    settle(page)
    assert 0 < filled(page)[0] < filled(page)[1]
    page.keyboard.press("End")
    page.wait_for_selector("#transcript[aria-busy=false]")
    assert words(page) == text.split()
    # Sound from the last word: the timeline and the transcript follow.
    page.locator(".word").first.focus()
    page.keyboard.press("End")
    page.keyboard.press("Enter")
    until(page, "window.played.length === 1")
    assert page.evaluate("window.played[0]") > 300
    page.screenshot(path=ARTIFACTS / "page-long.png", full_page=True)


# Calls that draw, and changes of the document, between two frames of an animation.
COUNT_DRAWING = """
async (frames) => {
  const kinds = ["fillRect", "fillText", "drawImage", "stroke", "fill", "strokeText", "putImageData"];
  const proto = CanvasRenderingContext2D.prototype;
  let count = 0;
  const real = Object.fromEntries(kinds.map((kind) => [kind, proto[kind]]));
  for (const kind of kinds) {
    proto[kind] = function (...rest) { count += 1; return real[kind].apply(this, rest); };
  }
  const observer = new MutationObserver((changes) => { count += changes.length; });
  observer.observe(document.body, { subtree: true, childList: true, attributes: true, characterData: true });
  const counts = [];
  for (let frame = 0; frame < frames; frame += 1) {
    await new Promise((done) => requestAnimationFrame(done));
    counts.push(count);
    count = 0;
  }
  observer.disconnect();
  Object.assign(proto, real);
  return counts;
}
"""


def test_playing_draws_what_is_seen_and_no_more(page):
    """The work of a frame of the animation does not grow with the recording: half a minute and five minutes."""
    most = {}
    for count in (30, 260):
        samples = tones.speak(tones.sentence(np.random.default_rng(5), count), 5, pause=0.6)[0]
        upload(page, wav(samples, kind="FLAC"), f"{count}.flac")
        page.locator(".word").first.focus()
        page.keyboard.press("Enter")
        until(page, "window.played.length && !window.audio.paused && window.audio.currentTime > 0")
        most[count] = max(page.evaluate(COUNT_DRAWING, 60))
        page.evaluate("window.audio.pause()")
    assert most[30] > 0, "nothing was drawn"
    assert most[260] < 2 * most[30] + 50, most


def test_transport_stays_in_sight(page):
    text = tones.sentence(np.random.default_rng(5), 60)
    upload(page, wav(tones.speak(text, 5, pause=0.5)[0]))
    page.set_viewport_size({"width": 1280, "height": 420})
    for place in (0, 300, 10_000):
        page.evaluate(f"scrollTo(0, {place})")
        assert page.locator("#play").evaluate(
            "(e) => { const b = e.getBoundingClientRect(); return b.top >= 0 && b.bottom <= innerHeight; }"
        )


# Keyboard and screen reader.


def test_keys_for_the_passes(page):
    upload(page)
    blur(page)
    page.keyboard.press("Home")
    assert "Pass 0 of 8" in page.inner_text("#pass-text")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert "Pass 2 of 8" in page.inner_text("#pass-text")
    page.keyboard.press("ArrowLeft")
    assert "Pass 1 of 8" in page.inner_text("#pass-text")
    page.keyboard.press("Space")
    assert page.inner_text("#play-text") == "Pause passes"
    until(page, "Number(document.querySelector('#pass').value) >= 3")
    page.keyboard.press("Space")
    assert page.inner_text("#play-text") == "Play passes"
    stopped = page.inner_text("#pass-text")
    page.wait_for_timeout(900)
    assert page.inner_text("#pass-text") == stopped
    page.keyboard.press("End")
    assert "Pass 8 of 8" in page.inner_text("#pass-text")
    page.keyboard.press("Space")  # from the end it starts again
    until(page, "document.querySelector('#pass').value < 8 && document.querySelector('#pass').value >= 2")
    page.locator("#play").focus()
    page.keyboard.press("Enter")
    assert page.inner_text("#play-text") == "Play passes"
    before = page.inner_text("#pass-text")
    page.locator("#timeline").focus()
    page.keyboard.press("ArrowRight")  # scrolls, and steps nowhere
    page.locator("#advanced summary").focus()
    page.keyboard.press("Space")  # unfolds, and plays nothing
    assert page.inner_text("#pass-text") == before and page.inner_text("#play-text") == "Play passes"
    assert page.is_visible("#block-size")


def tab_stops(page):
    """What Tab reaches from the top of the page, in order, until it comes round."""
    page.evaluate(
        "document.body.tabIndex = -1; document.body.focus(); document.body.removeAttribute('tabindex')"
    )
    stops = []
    for _ in range(80):
        page.keyboard.press("Tab")
        stop = page.evaluate(
            "document.activeElement.id || document.activeElement.dataset.download || document.activeElement.className"
            " || document.activeElement.tagName"
        )
        if stop in ("BODY", *stops[:1]):
            break
        stops.append(stop)
    return stops


def test_by_keyboard_alone(page):
    """From choosing a file to playing a word, to a download, without a mouse."""
    choosers = []
    # Well before the key: the browser is told of it in its own time.
    page.on("filechooser", lambda chooser: choosers.append(chooser))
    stops = tab_stops(page)
    assert stops[:3] == ["skip", "file", "record"]
    page.locator("#file").focus()
    page.keyboard.press("Enter")
    deadline = time.monotonic() + 120
    while not choosers:
        assert time.monotonic() < deadline, "no file can be chosen"
        page.wait_for_timeout(20)
    choosers[0].set_files({"name": "speech.wav", "mimeType": "audio/wav", "buffer": wav()})
    shown(page)
    stops = tab_stops(page)
    assert stops.count("word") == 1, "words are one tab stop"
    wanted = {
        "file",
        "record",
        "copy",
        "listen",
        "seek",
        "play",
        "back",
        "pass",
        "step",
        "timeline",
        "compare",
        *KINDS,
    }
    assert wanted <= set(stops)
    assert stops.index("copy") < stops.index("word") < stops.index("listen") < stops.index("timeline")

    page.locator("#copy").focus()
    for _ in range(len(KINDS) + 1):
        page.keyboard.press("Tab")
    at = "document.activeElement.textContent"
    assert page.evaluate(at) == TEXT.split()[0]
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.evaluate(at) == TEXT.split()[2]
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Enter")
    until(page, "window.played.length === 1")
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Tab")
    assert page.evaluate(at) == TEXT.split()[1], "the word that was left is the tab stop"
    page.keyboard.press("End")
    assert page.evaluate(at) == TEXT.split()[-1]
    page.keyboard.press("Home")
    assert page.evaluate(at) == TEXT.split()[0] and "Pass 8 of 8" in page.inner_text("#pass-text")


def test_words_up_and_down(page):
    upload(page, wav(tones.speak(tones.sentence(np.random.default_rng(5), 60), 5, pause=0.5)[0]))
    top = "document.activeElement.getBoundingClientRect().top"
    page.locator(".word").nth(3).focus()
    first = page.evaluate(top)
    page.keyboard.press("ArrowDown")
    assert page.evaluate(top) > first
    page.keyboard.press("ArrowUp")
    assert page.evaluate(top) == first


def tree(page):
    """What a screen reader is told: the browser's own accessibility tree."""
    session = page.context.new_cdp_session(page)
    session.send("Accessibility.enable")
    nodes = []
    for node in session.send("Accessibility.getFullAXTree")["nodes"]:
        if node.get("ignored"):
            continue
        properties = {p["name"]: p["value"].get("value") for p in node.get("properties", [])}
        nodes.append(
            {
                "role": node.get("role", {}).get("value"),
                "name": node.get("name", {}).get("value", ""),
                "description": node.get("description", {}).get("value", ""),
                "focusable": properties.get("focusable", False),
                "focused": properties.get("focused", False),
                "node": node.get("backendDOMNodeId"),
            }
        )
    session.detach()
    return nodes


CONTROLS = {"button", "slider", "combobox", "checkbox", "switch", "textbox", "image", "meter", "progressbar"}


def test_visible_and_spoken_names_agree(page):
    page.locator("#advanced summary").click()
    upload(page)
    page.check("#compare")
    found = [node for node in tree(page) if node["role"] in CONTROLS]
    assert {"button", "slider", "combobox", "switch"} <= {node["role"] for node in found}
    session = page.context.new_cdp_session(page)
    for node in found:
        assert node["name"], node
        element = session.send("DOM.resolveNode", {"backendNodeId": node["node"]})["object"]["objectId"]
        seen = session.send(
            "Runtime.callFunctionOn",
            {"objectId": element, "functionDeclaration": VISIBLE_TEXT, "returnByValue": True},
        )["result"]["value"]
        assert " ".join(seen.split()).lower() in node["name"].lower(), (seen, node)


# Of a control: the text in it, or of its label.
VISIBLE_TEXT = """function () {
    if (this.nodeType !== 1) return "";
    const own = this.matches("button, [role=button]") ? this.innerText : "";
    return own || [...(this.labels ?? [])].map((label) => label.innerText).join(" ");
}"""


# Looks.


def axe(page):
    import axe_playwright_python

    source = (Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text()
    page.evaluate(source)
    options = {"rules": {"label-content-name-mismatch": {"enabled": True}, "target-size": {"enabled": True}}}
    found = page.evaluate("(options) => axe.run(document, options)", options)
    assert len(found["passes"]) > 20
    return [
        (problem["id"], node["html"][:120], node["failureSummary"])
        for problem in found["violations"]
        for node in problem["nodes"]
    ]


@pytest.mark.parametrize(
    ("scheme", "width"), [("light", 1280), ("dark", 1280), ("light", 390), ("dark", 390)]
)
def test_axe_finds_nothing(browser, address, scheme, width):
    with opened(browser, address, viewport={"width": width, "height": 800}, color_scheme=scheme) as page:
        assert axe(page) == []
        page.locator("#advanced summary").click()
        upload(page, wav(noisy()))
        page.check("#compare")
        page.locator("#as-text summary").click()
        page.locator(".word").first.focus()
        assert axe(page) == []
        page.click("#back")
        assert axe(page) == []
        choose(page, b"not audio", "notes.txt")
        page.wait_for_selector("#error:not([hidden])")
        assert axe(page) == []
        page.errors.clear()  # the browser itself logs the 415


def test_axe_finds_nothing_while_writing(page, server):
    with gated(server[1]) as gate:
        choose(page)
        gate.release()
        until(page, "document.querySelector('#progress-text').textContent === 'Pass 1 of 8'")
        assert axe(page) == []
        page.click("#cancel")
        assert axe(page) == []


CONTRAST = """() => {
    const channels = (colour) => colour.match(/[0-9.]+/g).map(Number);
    const luminance = (colour) => channels(colour).slice(0, 3)
        .map((v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
        .reduce((sum, v, n) => sum + v * [0.2126, 0.7152, 0.0722][n], 0);
    const behind = (element) => {
        for (let at = element.parentElement; at; at = at.parentElement) {
            const colour = getComputedStyle(at).backgroundColor;
            if (channels(colour)[3] !== 0) return colour;
        }
    };
    return [...document.querySelectorAll(".button, .round, select, input[type=text], input[type=password], .level")]
        .filter((e) => e.getClientRects().length && !e.disabled)
        .map((e) => {
            const [a, b] = [getComputedStyle(e).borderTopColor, behind(e)].map(luminance).sort((x, y) => y - x);
            return [e.id || e.textContent, (a + 0.05) / (b + 0.05)];
        });
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_borders_of_controls_have_contrast(browser, address, scheme):
    with opened(browser, address, color_scheme=scheme) as page:
        page.locator("#advanced summary").click()
        upload(page)
        page.evaluate("for (const e of document.querySelectorAll('[hidden]')) e.hidden = false")
        found = page.evaluate(CONTRAST)
        assert len(found) > 15
        assert [(name, ratio) for name, ratio in found if ratio < 3] == []


@pytest.mark.parametrize("width", [320, 390, 768])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_phone_and_dark(browser, address, scheme, width):
    options = {
        "viewport": {"width": width, "height": 800},
        "color_scheme": scheme,
        "reduced_motion": "reduce",
    }
    with opened(browser, address, **options) as page:
        check_width(page, width)
        page.locator("#advanced summary").click()
        upload(page, name="a-name-as-long-as-phones-like-to-give-them_2026-11-18_at_01.02.03.wav")
        page.check("#compare")
        page.click("#back")
        check_width(page, width)
        small = page.evaluate(
            """[...document.querySelectorAll(".button, .round, select")]
                .filter((e) => e.getClientRects().length && e.getBoundingClientRect().height < 40).map((e) => e.id)"""
        )
        assert small == [], "too small for a finger"
        brightness = "(v) => v.match(/[0-9]+/g).slice(0, 3).reduce((a, b) => a + Number(b), 0) / 3"
        paper, ink = (
            page.evaluate(f"({brightness})(getComputedStyle(document.documentElement).{name})")
            for name in ("backgroundColor", "color")
        )
        assert (paper > 200 and ink < 80) if scheme == "light" else (paper < 60 and ink > 180)
        ARTIFACTS.mkdir(exist_ok=True)
        page.screenshot(path=ARTIFACTS / f"page-{scheme}-{width}.png", full_page=True)


def test_touch(browser, server):
    """Nothing is dropped by a finger; what Cancel cancels is on its line."""
    address, service = server
    samples = tones.speak(tones.sentence(np.random.default_rng(5), 60), 5, pause=0.5)[0]
    options = {"viewport": {"width": 390, "height": 800}, "has_touch": True, "is_mobile": True}
    with opened(browser, address, **options) as page:
        assert page.is_hidden(".by-mouse") and page.is_visible("#record-limit")
        with gated(service) as gate:
            choose(page, wav(samples))
            gate.release()
            until(page, "document.querySelector('#progress-text').textContent.includes('pass 1 of 8')")
            text, cancel = (page.locator(one).bounding_box() for one in ("#progress-text", "#cancel"))
            assert cancel["x"] > text["x"] + text["width"] and cancel["x"] + cancel["width"] <= 390


def check_width(page, width):
    """Nothing sticks out; only the timeline is wider, and scrolls by itself."""
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    beyond = page.evaluate(
        """(width) => [...document.querySelectorAll("body *")]
            .filter((e) => e.getClientRects().length && !e.closest(".timeline-space, .unseen, .quiet, .skip"))
            .filter((e) => e.getBoundingClientRect().right > width + 1)
            .map((e) => e.outerHTML.slice(0, 80))""",
        width,
    )
    assert beyond == []


def test_canvases_follow_the_colour_scheme(page):
    upload(page)
    pixels = "document.querySelector('#timeline-canvas').toDataURL()"
    light = page.evaluate(pixels)
    page.emulate_media(color_scheme="dark")
    settle(page)
    assert page.evaluate(pixels) != light


# Recording.

RECORDING = "document.querySelector('#record').classList.contains('recording')"


def test_microphone(page):
    """Chromium's pretended microphone says TEXT over and over."""
    assert "Recording stops after 5:00" in page.inner_text("#record-limit")
    page.click("#record")
    until(page, RECORDING)
    assert page.is_visible("#level")
    until(page, "Number(document.querySelector('#level').getAttribute('aria-valuenow')) > -30")
    assert page.locator("#level-bar").evaluate("(bar) => bar.getBoundingClientRect().width") > 100
    assert page.locator("#level").bounding_box()["height"] >= 12
    seconds = 2 * len(tones.speak(TEXT, 500)[0]) / tones.RATE
    until(
        page,
        f"Number(document.querySelector('#record-text').textContent.match(/0:(\\d+) of 5:00/)?.[1]) >= {seconds}",
    )
    page.click("#record")
    shown(page)
    assert page.evaluate("window.live()") == 0
    assert page.inner_text("#record") == "Record" and page.is_hidden("#level")
    assert page.inner_text("#result-title") == "recording.wav"
    assert set(words(page)) & set(TEXT.split())


def test_never_two_microphones(page):
    """Record twice, a double click, a file while recording: one microphone at most, none in the end."""
    page.evaluate("document.querySelector('#record').click(); document.querySelector('#record').click()")
    until(page, RECORDING)
    assert len(page.evaluate("window.microphones.map(String)")) == 1
    upload(page)  # a file instead: the recording is dropped
    assert page.evaluate("window.live()") == 0 and page.inner_text("#record") == "Record"
    assert words(page) == TEXT.split() and len(page.sent) == 1
    page.dblclick("#record")
    until(page, f"{RECORDING} || window.live() === 0")
    assert page.evaluate("window.live()") <= 1
    choose(page)  # while the microphone may still be opening
    shown(page)
    until(page, "window.live() === 0")
    page.click("#record")
    until(page, RECORDING)
    assert page.evaluate("window.live()") == 1
    page.click("#record")
    until(page, "window.live() === 0")
    shown(page)


def test_recording_stops_at_the_limit(browser, folder):
    with serving(folder, max_seconds=2) as (address, _), opened(browser, address) as page:
        assert "Recording stops after 0:02" in page.inner_text("#record-limit")
        page.click("#record")
        shown(page)
        assert page.evaluate("window.live()") == 0 and page.inner_text("#clock").endswith("/ 0:02")


def test_no_microphone(page):
    page.evaluate(
        """() => {
            navigator.mediaDevices.getUserMedia = () => Promise.reject(new DOMException("", "NotAllowedError"));
        }"""
    )
    page.click("#record")
    page.wait_for_selector("#error:not([hidden])")
    assert "does not allow" in page.inner_text("#error-text") and page.is_hidden("#retry")
    assert page.inner_text("#record") == "Record"


# Live.

LIVE = "document.querySelector('#live').classList.contains('recording')"
SETTLED = "document.querySelectorAll('#transcript .word').length"
SETTLED_TEXT = (
    "[...document.querySelectorAll('#transcript .word')].map((word) => word.textContent.trim()).join(' ')"
)


def test_words_appear_while_somebody_speaks(page):
    page.click("#live")
    until(page, LIVE)
    assert page.evaluate("window.live()") == 1
    assert page.is_disabled("#record") and page.is_visible("#level")
    until(page, "document.querySelector('#transcript .open')")  # what may still change
    until(page, f"{SETTLED} >= 4")
    early = filled(page)
    settle(page)
    scrolled = "(box) => box.scrollLeft + box.clientWidth >= box.scrollWidth - 40"
    assert page.locator("#timeline").evaluate(scrolled), "the right edge is not in view"
    said = words(page)[:4]
    until(page, f"{SETTLED} >= 10")
    # The microphone says it over and over, and a busy machine drops samples at times: wait for a whole one.
    until(page, f"{SETTLED_TEXT}.includes('{TEXT}')")
    assert words(page)[:4] == said  # what is settled stays
    assert filled(page)[0] > 0 and early[0] > 0
    page.click("#live")
    until(page, "document.querySelector('#live-text').textContent === 'Live'")
    assert page.evaluate("window.live()") == 0 and page.is_hidden("#level")
    text = " ".join(words(page))
    assert page.locator("#transcript .open").count() == 0
    assert TEXT in text
    assert page.inner_text("#result-title") == "Live" and "words" in page.inner_text("#facts")
    assert page.is_visible("#copy") and page.is_hidden("#downloads")
    # What was said can be played, and transcribed as a whole.
    page.locator("#transcript .word").nth(1).click()
    until(page, "window.played.length > 0")
    page.click("#advanced > summary")
    page.click("#again")
    shown(page)
    assert page.inner_text("#result-title") == "live.wav" and page.is_visible("#downloads")
    assert TEXT in " ".join(words(page))


def test_live_and_other_uses_of_the_microphone(page):
    page.evaluate("document.querySelector('#live').click(); document.querySelector('#live').click()")
    until(page, LIVE)
    page.evaluate("document.querySelector('#record').click()")
    assert len(page.evaluate("window.microphones.map(String)")) == 1
    upload(page)  # a file instead: live ends
    assert page.evaluate("window.live()") == 0 and page.inner_text("#live") == "Live"
    assert words(page) == TEXT.split() and page.is_enabled("#record")
    page.click("#record")
    until(page, RECORDING)
    assert page.is_disabled("#live")
    page.click("#record")
    shown(page)
    assert page.is_enabled("#live")


def test_a_server_that_stops_ends_live_with_its_reason(browser, folder):
    with (
        serving(folder, api_keys=("secret",)) as (address, service),
        opened(browser, address) as page,
    ):
        page.fill("#key", "secret")
        page.click("#key-form button")
        until(page, "document.querySelector('#strategy').options.length > 0")
        page.errors.clear()  # the browser logs the 401 of the first request
        page.click("#live")
        until(page, f"{SETTLED} >= 2")
        service.draining = True
        page.wait_for_selector("#error:not([hidden])")
        assert "shutting down" in page.inner_text("#error-text")
        until(page, "document.querySelector('#live-text').textContent === 'Live'")
        assert page.evaluate("window.live()") == 0
        assert len(words(page)) >= 2 and page.locator("#transcript .open").count() == 0


def test_live_without_a_microphone(page):
    page.evaluate(
        """() => {
            navigator.mediaDevices.getUserMedia = () => Promise.reject(new DOMException("", "NotFoundError"));
        }"""
    )
    page.click("#live")
    page.wait_for_selector("#error:not([hidden])")
    assert "No microphone found" in page.inner_text("#error-text")
    assert page.inner_text("#live") == "Live" and page.is_enabled("#record")


# The rest.


def test_drop(page):
    page.evaluate(
        """(content) => {
            const bytes = Uint8Array.from(atob(content), (c) => c.charCodeAt(0));
            const data = new DataTransfer();
            data.items.add(new File([bytes], "dropped.wav"));
            document.dispatchEvent(new DragEvent("dragenter", { dataTransfer: data, bubbles: true }));
            window.veiled = !document.querySelector("#drop").hidden;
            document.dispatchEvent(new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true }));
        }""",
        base64.b64encode(wav()).decode(),
    )
    shown(page)
    assert page.evaluate("window.veiled")
    assert words(page) == TEXT.split() and page.is_hidden("#drop")


def test_mistakes_are_told_and_forgotten(page):
    choose(page, b"this is no audio", "notes.txt")
    page.wait_for_selector("#error:not([hidden])")
    assert "notes.txt" in page.inner_text("#error-text").lower()
    assert page.get_attribute("#error", "role") == "alert" and page.is_hidden("#retry")
    page.errors.clear()  # the browser itself logs the 415
    upload(page)
    assert page.is_hidden("#error") and words(page) == TEXT.split()


def test_too_large_a_file_is_not_sent(browser, folder):
    with serving(folder, max_upload_bytes=1 << 20) as (address, _), opened(browser, address) as page:
        choose(page, bytes(2 << 20), "large.wav")
        page.wait_for_selector("#error:not([hidden])")
        assert page.inner_text("#error-text") == "Large.wav is larger than the 1 MB that this server takes."
        assert page.sent == []


def test_key(browser, folder):
    with serving(folder, api_keys=("secret",)) as (address, _), opened(browser, address) as page:
        page.fill("#key", "wrong")
        page.keyboard.press("Enter")
        until(page, "document.querySelector('#status').textContent === 'the key is wrong'")
        page.fill("#key", "secret")
        page.keyboard.press("Enter")
        page.wait_for_selector("#key-form", state="hidden")
        upload(page)
        assert words(page) == TEXT.split()
        page.errors.clear()  # the browser itself logs the 401s


def test_several_models_and_a_sample(browser, folder, tmp_path):
    other = tones.save(tmp_path / "other")
    (other / "sample.wav").write_bytes(wav(tones.speak("luda mi", 3)[0]))
    with serving(folder, other) as (address, _), opened(browser, address) as page:
        page.locator("#advanced summary").click()
        assert page.is_visible("#model") and page.is_hidden("#sample")
        page.select_option("#model", "other")
        page.click("#sample")
        shown(page)
        assert words(page) == ["luda", "mi"] and "other" in page.inner_text("#facts")


def test_passes_as_text(page, folder):
    expected = transcribed(folder)
    upload(page)
    page.locator("#as-text summary").click()
    until(page, "document.querySelectorAll('#passes-text p').length > 0")
    lines = page.locator("#passes-text p").all_inner_texts()
    assert [line.partition(". ")[2].split() for line in lines] == expected.trace
