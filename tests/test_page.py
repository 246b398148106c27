"""The page, in a real browser: what a person does there, with mouse, keyboard and microphone."""

import base64
import json
import os
import shutil
import time
from functools import partial
from pathlib import Path

import httpx
import numpy as np
import pytest

import tones
from imputer import transcripts
from imputer.recognizer import Recognizer
from serving import TEXT, serving, wav

pytestmark = pytest.mark.browser

post = partial(httpx.post, timeout=100)
CHROMIUM = shutil.which("chromium") or "/usr/bin/chromium"
ARGUMENTS = [
    "--no-sandbox",
    "--headless=new",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--use-fake-ui-for-media-stream",
    "--use-fake-device-for-media-stream",
    "--autoplay-policy=no-user-gesture-required",
]
ARTIFACTS = Path(__file__).parents[1] / "artifacts"

# What the page does with sound is written down, and policy violations are kept.
SPY = """
window.heard = [];
window.violations = [];
const start = AudioBufferSourceNode.prototype.start;
AudioBufferSourceNode.prototype.start = function (when, offset, length) {
  window.heard.push([offset, length]);
  return start.call(this, when, offset, length);
};
document.addEventListener("securitypolicyviolation", (event) => window.violations.push(event.violatedDirective));
"""


@pytest.fixture(scope="module")
def browser():
    if not Path(CHROMIUM).exists():
        reason = "chromium is not installed: apt-get install chromium"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tones.save(tmp_path_factory.mktemp("models") / "tones")


@pytest.fixture(scope="module")
def address(folder):
    with serving(folder) as (address, _):
        yield address


@pytest.fixture
def page(browser, address):
    yield from opened(browser, address)


def opened(browser, address, **options):
    """A page that must not complain, break its own policy, or ask anything of anyone else."""
    context = browser.new_context(**({"viewport": {"width": 1280, "height": 900}} | options))
    page = context.new_page()
    page.set_default_timeout(120_000)
    page.add_init_script(SPY)
    complaints, strangers = [], []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda m: complaints.append(m.text) if m.type == "error" else None)
    page.on(
        "request", lambda r: strangers.append(r.url) if not r.url.startswith((address, "blob:")) else None
    )
    page.allowed = complaints
    page.goto(address)
    until(
        page,
        "document.querySelector('#strategy').options.length > 0 || !document.querySelector('#key-form').hidden",
    )
    yield page
    assert page.evaluate("window.violations") == []
    assert complaints == [] and strangers == []
    context.close()


def upload(page, content=None, name="speech.wav"):
    with page.expect_response("**/v1/imputations") as answer:
        page.set_input_files(
            "#file", {"name": name, "mimeType": "audio/wav", "buffer": wav() if content is None else content}
        )
    if answer.value.ok:
        shown(page)


def shown(page):
    page.wait_for_selector("#result[aria-busy=false]")


def until(page, condition):
    """Wait for a condition; playwright's own waiting is forbidden by the page's policy."""
    deadline = time.monotonic() + 120
    while not page.evaluate(condition):
        assert time.monotonic() < deadline, condition
        page.wait_for_timeout(20)


def transcript(page):
    return [word.strip() for word in page.locator("#transcript > *").all_inner_texts()]


def labels(page):
    return [canvas.get_attribute("aria-label") for canvas in page.locator("#rows canvas").all()]


def filled(page):
    """Frames filled, added up over the rows' descriptions."""
    return sum(int(label.rpartition(": ")[2].split(" of ")[0]) for label in labels(page))


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


def test_from_upload_to_subtitles(page, folder, tmp_path):
    """The whole way: upload a generated WAV, step through the passes, change the block size, download SRT."""
    expected = Recognizer.from_pretrained(folder).transcribe(tones.speak(TEXT, 500)[0], trace=True)
    frames = len(expected.trace[0])
    upload(page)
    assert transcript(page) == TEXT.split()
    assert "Pass 8 of 8" in page.inner_text("#pass-text") and filled(page) == frames

    for number in range(7, -1, -1):
        page.click("#back")
        known = 0 if number == 0 else sum(s != transcripts.MASK for s in expected.trace[number - 1])
        assert page.inner_text("#pass-text") == f"Pass {number} of 8 · {known} of {frames} filled"
        assert filled(page) == known
    assert page.is_disabled("#back") and transcript(page) == ["…"]
    for _ in range(8):
        page.click("#step")
    assert page.is_disabled("#step") and transcript(page) == TEXT.split()
    assert page.locator(".row-words button").all_inner_texts() == TEXT.split()

    with page.expect_response("**/v1/imputations"):
        set_range(page, "#block-size", 4)
    until(page, "document.querySelector('#pass').max === '4'")
    assert page.inner_text("#block-size-value") == "4" and "Pass 4 of 4" in page.inner_text("#pass-text")
    assert "160 ms" in page.inner_text("#block-size-hint")

    for kind in ("srt", "txt", "json"):
        with page.expect_download() as download:
            page.click(f"#download-{kind}")
        assert download.value.suggested_filename == f"speech.{kind}"
        text = Path(download.value.path()).read_text()
        if kind == "json":
            told = json.loads(text)
            assert told["text"] == TEXT and told["passes"] == 4
            assert [word["text"] for word in told["words"]] == TEXT.split()
        else:
            assert text == transcripts.FORMATS[kind](expected, "")
    ARTIFACTS.mkdir(exist_ok=True)
    page.click("#back")
    page.screenshot(path=ARTIFACTS / "page.png", full_page=True)


def test_keyboard(page):
    upload(page)
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("Home")
    assert "Pass 0 of 8" in page.inner_text("#pass-text")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert "Pass 2 of 8" in page.inner_text("#pass-text")
    page.keyboard.press("ArrowLeft")
    assert "Pass 1 of 8" in page.inner_text("#pass-text")
    page.keyboard.press("Space")
    assert page.get_attribute("#play", "aria-label") == "Pause"
    until(page, "Number(document.querySelector('#pass').value) >= 3")
    page.keyboard.press("Space")
    assert page.get_attribute("#play", "aria-label") == "Play the passes"
    stopped = page.inner_text("#pass-text")
    page.wait_for_timeout(900)
    assert page.inner_text("#pass-text") == stopped
    page.keyboard.press("End")
    assert "Pass 8 of 8" in page.inner_text("#pass-text")
    page.keyboard.press("Space")  # from the end it starts again
    until(page, "document.querySelector('#pass').value < 8 && document.querySelector('#pass').value >= 2")
    page.locator("#play").focus()
    page.keyboard.press("Enter")
    assert page.get_attribute("#play", "aria-label") == "Play the passes"
    page.locator("#strategy").focus()
    before = page.inner_text("#pass-text")
    page.keyboard.press("Space")  # opens the list of strategies, and plays nothing
    assert page.get_attribute("#play", "aria-label") == "Play the passes"
    assert page.inner_text("#pass-text") == before
    page.keyboard.press("Escape")


def test_everything_can_be_reached_by_tab(page):
    upload(page)
    page.evaluate("document.activeElement.blur()")
    reached = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.textContent"))
    wanted = {"file", "record", "block-size", "strategy", "play", "pass", "back", "listen", "show-greedy"}
    wanted |= {"download-txt", "download-srt", "download-json", *TEXT.split()}
    assert wanted <= reached


def test_every_control_has_a_name(page):
    """As a screen reader is told: from the browser's own accessibility tree."""
    upload(page)
    page.click("#back")
    session = page.context.new_cdp_session(page)
    session.send("Accessibility.enable")
    nodes = session.send("Accessibility.getFullAXTree")["nodes"]
    roles = {
        "button",
        "slider",
        "combobox",
        "checkbox",
        "textbox",
        "image",
        "img",
        "link",
        "meter",
        "group",
        "region",
    }
    found = set()
    for node in nodes:
        role = node.get("role", {}).get("value")
        if role in roles and not node.get("ignored"):
            found.add(role)
            focusable = {p["name"]: p["value"].get("value") for p in node.get("properties", [])}.get(
                "focusable"
            )
            if role not in ("image", "img", "group") or focusable:
                assert node.get("name", {}).get("value"), node
    assert {"button", "slider", "combobox", "checkbox"} <= found
    for canvas in labels(page):
        assert canvas.startswith("Alignment from ")
    unnamed = page.evaluate(
        """[...document.querySelectorAll("button, input, select, canvas, meter")]
            .filter((e) => !(e.getAttribute("aria-label") || e.labels?.length || e.textContent.trim()))
            .map((e) => e.outerHTML)"""
    )
    assert unnamed == []


def test_words_can_be_heard(page):
    upload(page)
    words = post(page.url + "v1/imputations", files={"file": ("a.wav", wav())}).json()["words"]
    page.locator("#transcript button").nth(1).click()
    page.locator(".row-words button").nth(2).click()
    heard = page.evaluate("window.heard")
    for (offset, length), word in zip(heard, words[1:3], strict=True):
        assert offset == pytest.approx(word["start"] - 0.06, abs=1e-6)
        assert offset + length >= word["end"]
    page.click("#listen")
    assert page.evaluate("window.heard").pop()[0] == 0
    assert page.inner_text("#listen") == "Stop"
    page.click("#listen")
    until(page, "document.querySelector('#listen').textContent === 'Listen'")


@pytest.mark.parametrize("strategy", ["alternate_sub_block", "annealing", "adaptive", "top_k"])
def test_strategies(page, strategy):
    upload(page)
    with page.expect_response("**/v1/imputations") as answer:
        page.select_option("#strategy", strategy)
    told = answer.value.json()
    assert told["strategy"] == strategy
    until(page, f"document.querySelector('#pass').max === '{len(told['passes'])}'")
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("Home")
    for one in range(len(told["passes"])):
        page.keyboard.press("ArrowRight")
        assert f"Pass {one + 1} of" in page.inner_text("#pass-text")
    assert transcript(page) == told["text"].split()


def test_beside_greedy_ctc(page):
    """Noise that makes the two differ: the words that differ are marked, and only those."""
    samples, _ = tones.speak(tones.sentence(np.random.default_rng(9), 9), 9, pause=0.1)
    noisy = samples + 0.02 * np.random.default_rng(0).standard_normal(len(samples)).astype(np.float32)
    told = post(page.url + "v1/imputations", files={"file": ("a.wav", wav(noisy))}).json()
    assert told["text"] != told["greedy"]["text"], "choose other noise"
    upload(page, wav(noisy))
    assert page.inner_text("#ours-text").split() == told["text"].split()
    assert page.inner_text("#greedy-text").split() == told["greedy"]["text"].split()
    text_nodes = (
        "(side) => [...side.childNodes].filter((n) => n.nodeName === '#text').map((n) => n.data).join('')"
    )
    unmarked = [page.locator(side).evaluate(text_nodes).split() for side in ("#ours-text", "#greedy-text")]
    assert unmarked[0] == unmarked[1]
    assert page.locator("mark").count() > 0
    height = page.locator("#rows canvas").first.bounding_box()["height"]
    page.uncheck("#show-greedy")
    assert page.locator("#rows canvas").first.bounding_box()["height"] < height


def test_microphone(page):
    """Chromium's pretended microphone beeps; what counts is that a recording is made, sent and shown."""
    page.click("#record")
    until(page, "document.querySelector('#record').getAttribute('aria-pressed') === 'true'")
    assert page.is_visible("#level")
    page.wait_for_timeout(1200)
    with page.expect_response("**/v1/imputations") as answer:
        page.click("#record")
    assert answer.value.ok and 0.8 < answer.value.json()["seconds"] < 10
    shown(page)
    assert page.get_attribute("#record", "aria-pressed") == "false"
    assert "recording.wav" in page.inner_text("#status")


def test_drop(page):
    with page.expect_response("**/v1/imputations"):
        page.evaluate(
            """(content) => {
                const bytes = Uint8Array.from(atob(content), (c) => c.charCodeAt(0));
                const data = new DataTransfer();
                data.items.add(new File([bytes], "dropped.wav"));
                document.dispatchEvent(new DragEvent("dragenter", { dataTransfer: data, bubbles: true }));
                document.dispatchEvent(new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true }));
            }""",
            base64.b64encode(wav()).decode(),
        )
    shown(page)
    assert transcript(page) == TEXT.split() and page.is_hidden("#drop")


def test_mistakes_are_told_and_forgotten(page):
    upload(page, b"this is no audio", "notes.txt")
    page.wait_for_selector("#error:not([hidden])")
    assert "notes.txt is no audio" in page.inner_text("#error").lower()
    assert page.get_attribute("#error", "role") == "alert"
    page.allowed.clear()  # the browser itself logs the 415
    upload(page)
    assert page.is_hidden("#error") and transcript(page) == TEXT.split()


def test_the_last_wish_counts(page):
    """A slider moved faster than the server answers: what is shown in the end is where it stopped."""
    upload(page)
    for size in (2, 5, 11, 3):
        set_range(page, "#block-size", size)
    until(page, "document.querySelector('#pass').max === '3'")
    page.wait_for_timeout(300)
    assert "Pass 3 of 3" in page.inner_text("#pass-text")


def test_long_recording(page):
    text = tones.sentence(np.random.default_rng(5), 60)
    upload(page, wav(tones.speak(text, 5, pause=0.5)[0]))
    assert transcript(page) == text.split()
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("Home")
    assert filled(page) == 0
    page.keyboard.press("End")
    words = page.locator(".row-words button").all_inner_texts()
    assert words == text.split()


@pytest.mark.parametrize(("scheme", "width"), [("light", 375), ("dark", 375), ("dark", 1280)])
def test_phone_and_dark(browser, address, scheme, width):
    visits = opened(
        browser,
        address,
        viewport={"width": width, "height": 800},
        color_scheme=scheme,
        reduced_motion="reduce",
    )
    page = next(visits)
    upload(page)
    page.click("#back")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    beyond = page.evaluate(
        """(width) => [...document.querySelectorAll("main *")]
            .filter((e) => e.getClientRects().length && !e.closest(".as-text, .unseen, .quiet"))
            .filter((e) => e.getBoundingClientRect().right > width + 1)
            .map((e) => e.outerHTML.slice(0, 80))""",
        width,
    )
    assert beyond == []
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
    assert next(visits, None) is None


def test_key(browser, folder):
    with serving(folder, api_keys=("secret",)) as (address, _):
        visits = opened(browser, address)
        page = next(visits)
        page.fill("#key", "wrong")
        page.keyboard.press("Enter")
        until(page, "document.querySelector('#status').textContent === 'the key is wrong'")
        page.fill("#key", "secret")
        page.keyboard.press("Enter")
        page.wait_for_selector("#key-form", state="hidden")
        upload(page)
        assert transcript(page) == TEXT.split()
        page.allowed.clear()  # the browser itself logs the 401s
        assert next(visits, None) is None


def test_several_models_and_a_sample(browser, folder, tmp_path):
    other = tones.save(tmp_path / "other")
    (other / "sample.wav").write_bytes(wav(tones.speak("luda mi", 3)[0]))
    with serving(folder, other) as (address, _):
        visits = opened(browser, address)
        page = next(visits)
        assert page.is_visible("#model") and page.is_hidden("#sample")
        page.select_option("#model", "other")
        with page.expect_response("**/v1/imputations") as answer:
            page.click("#sample")
        assert answer.value.json()["model"] == "other"
        shown(page)
        assert transcript(page) == ["luda", "mi"]
        assert next(visits, None) is None
