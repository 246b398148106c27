"""What README and docs say is tried: commands are parsed and run, snippets run, settings read, links followed."""

import html
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import soundfile
import torch
import yaml

import serving
from imputer import configs, models
from imputer.aligner import corpus as aligning
from imputer.commands import program
from imputer.commands.train import parse_options
from imputer.corpora.librispeech import ARCHIVES
from imputer.corpora.validation import split_path
from imputer.corpora.wsj import DEFAULT_SETS
from imputer.data import batching, manifest, ranks
from imputer.data.manifest import Manifest
from trainings import TINY as TINY_MODEL
from trainings import imputer

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RESULTS = sorted((ROOT / "docs" / "results").glob("*.md"))
LINKED = [
    *PAGES,
    *RESULTS,
    *(ROOT / name for name in ("PAPER.md", "CONTRIBUTING.md", "CHANGELOG.md", "RESULTS.md")),
]
TOOLS = ("imputer", "torchrun", "make", "pip", "apt-get", "curl", "docker", "cat")

# Commands that are only parsed: they need a corpus, a network, engines, a cluster, or hours.
PARSED_ONLY = (
    "prepare librispeech",
    "prepare wsj",
    "prepare digits",
    "prepare synthetic",
    "prepare CORPUS",
    "train --config english",
    "reproduce table2",
    "reproduce --all",
    "serve",
    "lm build",
    "finetune",  # tests/test_finetuning.py
    "listen",
)
# What makes a training of the documentation end in a second; the network is that of the expert at hand.
TINY = {
    **{f"model.{key}": getattr(TINY_MODEL, key) for key in ("width", "layers", "heads", "filter_size")},
    "front_end.channels": 4,
    "vocabulary.units": "characters",
    "vocabulary.size": 9,
    "data.workers": 0,
    "data.batch_seconds": 20,
    "training.threads": 1,
    "training.steps": 2,
    "training.validate_every": 2,
}


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page."""
    language, start, lines = None, 0, []
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if language is None and line.startswith("```"):
            language, start, lines = line[3:].strip(), number, []
        elif language is not None and line.startswith("```"):
            yield Block(page, start, language, "\n".join(lines))
            language = None
        elif language is not None:
            lines.append(line)
    assert language is None, f"{page.name}: the block of line {start} is not closed"


def commands(block: Block) -> Iterator[list[str]]:
    """The commands of a shell block, continued lines joined, comments gone, pipes taken apart."""
    if block.language not in ("", "sh", "bash", "shell", "console"):
        return
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True) if line.startswith(TOOLS) else []
        while "|" in words:
            yield words[: words.index("|")]
            words = words[words.index("|") + 1 :]
        if words:
            yield words


def arguments(words: list[str]) -> list[str] | None:
    """What follows ``imputer``, also behind torchrun; None for other programs."""
    if words[0] == "imputer":
        return words[1:]
    return words[words.index("imputer") + 1 :] if words[0] == "torchrun" else None


ALL = [block for page in PAGES for block in blocks(page)]
COMMANDS = [(block.name, words) for block in ALL for words in commands(block)]
OURS = [(name, found) for name, words in COMMANDS if (found := arguments(words)) is not None]


def of(kind: str) -> list[Any]:
    return [pytest.param(block, id=block.name) for block in ALL if block.language == kind]


# --- without running


def test_there_is_something_to_try() -> None:
    assert len(OURS) > 20 and len(of("python")) > 5


@pytest.mark.parametrize(("where", "words"), OURS, ids=[f"{n} {' '.join(w)[:40]}" for n, w in OURS])
def test_commands_are_those_of_the_program(where: str, words: list[str]) -> None:
    function, bound, _ = program.app.parse_args(words, exit_on_error=False, print_error=False)
    assert function.__name__ == words[0] or words[0].startswith("--")
    if words[0] == "train":  # its options are those of the configuration
        configs.read(bound.kwargs["config"], parse_options(bound.args))


def test_other_programs_are_told_what_exists() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for where, words in COMMANDS:
        if words[0] == "make":
            assert set(words[1:]) <= set(targets), where
        if words[0] == "pip":
            extras = re.findall(r"\[([a-z,]+)\]", " ".join(words))
            assert {e for found in extras for e in found.split(",")} <= project[
                "optional-dependencies"
            ].keys(), where


@pytest.mark.parametrize(("corpus", "parts"), [("librispeech", tuple(ARCHIVES)), ("wsj", DEFAULT_SETS)])
def test_recipes_read_what_was_prepared(corpus: str, parts: tuple[str, ...]) -> None:
    """The manifests of a recipe, and of its configuration, are those that its first command writes."""
    (block,) = (b for b in blocks(ROOT / "docs" / "cluster.md") if f"prepare {corpus}" in b.text)
    output = Path(re.findall(r"--output (\S+\.jsonl)", block.text)[0])
    written = {str(split_path(output, part, parts)) for part in parts}
    settings = configs.read(corpus)
    assert {*settings.data.train, *settings.data.valid} <= written
    assert set(re.findall(r"\S+\.jsonl", block.text)) - {str(output)} <= written
    assert set(re.findall(r"\S+\.jsonl", block.text)) > set(settings.data.train)  # all of it is aligned
    assert f"--store {settings.rollin.alignments}" in block.text


def prose(page: Path) -> list[str]:
    """What stands between backticks in running text."""
    return re.findall(
        r"`([^`\n]+)`", re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    )


def test_commands_named_in_the_text_exist() -> None:
    named = {
        found for page in PAGES for code in prose(page) for found in re.findall(r"^imputer ([a-z]+)", code)
    }
    assert named <= program.COMMANDS.keys()
    for name in named:
        assert program.app[name].default_command is not None, name


def test_options_named_in_the_text_exist() -> None:
    known = {"--nnodes", "--node-rank", "--rdzv-endpoint", "--stop-timeout"}  # torchrun's and docker's
    known |= {"--install-completion", "--help", "--version", "--index-url"}  # the program's and pip's
    known |= {"--each-speaker"}  # of tools/measure_finetuning.py
    for name in program.COMMANDS:
        if (ROOT / "src/imputer/commands" / f"{name}.py").is_file():
            known |= {
                option
                for argument in program.app[name].assemble_argument_collection()
                for option in argument.names
            }
    for page in PAGES:
        for code in prose(page):
            for option in re.findall(r"(?<!\S)--[a-z][a-z0-9-]+(?![a-z.-])", code):
                assert option in known, f"{page.name}: {option}"


@pytest.mark.parametrize("block", of("toml"))
def test_settings_are_those_of_the_configuration(block: Block) -> None:
    configs.build(configs.Config, tomllib.loads(block.text), where=block.name)


@pytest.mark.parametrize("block", of("json"))
def test_json_is_json(block: Block) -> None:
    for line in block.text.splitlines():
        json.loads(line)


def anchors(page: Path) -> set[str]:
    """The addresses of a page's headings, as GitHub and the site make them."""
    headings = re.findall(
        r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    if not page.is_file():
        pytest.skip("it is made by `imputer reproduce`")
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor.startswith("imputer.") or anchor in anchors(there), (
            f"{page.name}: {target}"
        )


def test_every_page_is_in_the_navigation() -> None:
    def pages(entry: Any) -> Iterator[str]:
        if isinstance(entry, str):
            yield entry
        else:
            for value in entry.values() if isinstance(entry, dict) else entry:
                yield from pages(value)

    listed = [*pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])]
    docs = ROOT / "docs"
    assert sorted(listed) == sorted(str(page.relative_to(docs)) for page in docs.rglob("*.md"))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The documentation, built as `make docs` builds it; a warning is an error."""
    place = tmp_path_factory.mktemp("site")
    shutil.copytree(ROOT / "docs", place / "docs")
    settings = (ROOT / "mkdocs.yml").read_text().replace("paths: [src]", f"paths: [{ROOT / 'src'}]")
    (place / "mkdocs.yml").write_text(settings)
    program = Path(sys.executable).with_name("zensical")
    built = subprocess.run(
        [program, "build", "--clean", "--strict"], cwd=place, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return place / "site"


def test_the_site_has_the_docstrings_and_loads_nothing_from_elsewhere(site: Path) -> None:
    assert "log sum over a' in beta'(a~, a)" in html.unescape((site / "api.html").read_text())
    for page in site.glob("*.html"):
        loaded = re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=\"?(https?:[^\" >]+)", page.read_text())
        assert not loaded, (page.name, loaded)
        pictures = re.findall(r"<img[^>]+src=\"?([^\" >]+)", page.read_text())
        assert all((site / picture).is_file() for picture in pictures), (page.name, pictures)


@pytest.mark.browser
def test_formulas_are_drawn(site: Path) -> None:
    from playwright.sync_api import sync_playwright

    program = shutil.which("chromium")
    if not program:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)("apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page = browser.new_page()
        for name in ("maths.html", "index.html"):
            page.goto((site / name).as_uri(), wait_until="domcontentloaded")
            unread = page.locator(".katex-error").all_inner_texts()
            drawn, formulas = page.locator(".arithmatex math").count(), page.locator(".arithmatex").count()
            assert not unread and drawn == formulas
            assert "\\" not in "".join(page.locator("math semantics > :first-child").all_text_contents())
            assert (formulas > 50) == (name == "maths.html")
        browser.close()


# --- by running


@pytest.fixture(scope="module")
def place(corpus: str, expert: Path, stored: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything that the documentation speaks of, small: recordings, manifests, models."""
    place = tmp_path_factory.mktemp("docs")
    utterances = list(Manifest(corpus))
    for name in (
        "runs/expert/model",
        "runs/imputer/model",
        "runs/mine/model",
        "english",
        "MODEL",
        "OTHER",
        "my-model",
    ):
        shutil.copytree(expert, place / name)
    for name in ("data/train", "data/valid", "test", "mine", "dev-clean", "MANIFEST"):
        manifest.write(place / f"{name}.jsonl", utterances[:4])
    model, vocabulary = models.load(expert)
    with ranks.joined() as here:
        aligning.align_corpus(
            place / "data/train.alignments",
            model,
            vocabulary,
            utterances[:4],
            batching.FilterbankExtract(),
            here,
        )
    sound, rate = soundfile.read(utterances[0].audio_filepath, dtype="float32")
    for folder in ("RECORDINGS/anna", "recordings/anna"):
        (place / folder).mkdir(parents=True)
        for name, utterance in zip(("one", "two", "three", "four"), utterances, strict=False):
            shutil.copy(utterance.audio_filepath, place / folder / f"{name}.wav")
            (place / folder / f"{name}.txt").write_text(utterance.text)
    (place / "recordings.csv").write_text(f"audio,text\nspeech.wav,{utterances[0].text}\n")
    for name in ("speech.wav", "your.wav", "a.wav", "speech.flac", "b.flac", "speech.mp3"):
        soundfile.write(place / name, sound, rate)
    (place / "speech.txt").write_text(utterances[0].text)
    (place / "cmudict.dict").write_text("ax AE1 K S\nbat B AE1 T\ncat K AE1 T\n")
    return place


@pytest.fixture
def inside(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(place)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return place


def tried(words: list[str]) -> bool:
    return not " ".join(words).startswith(PARSED_ONLY) and not any(
        "librispeech" in w or "wsj" in w for w in words
    )


TRIED = [(name, words) for name, words in OURS if tried(words)]


@pytest.mark.parametrize(("where", "words"), TRIED, ids=[f"{n} {' '.join(w)[:40]}" for n, w in TRIED])
def test_commands_run(where: str, words: list[str], inside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The text to be found by alignment must be one of the made language.
    made = {"have to live with myself": (inside / "speech.txt").read_text(), "zau al makan, lavoisier": "bad"}
    words = [made.get(word, word) for word in words]
    if words[0] == "train":
        words += [word for key, value in TINY.items() for word in (f"--{key}", str(value))]
        words[words.index("--output") + 1] += "-new"  # beside the finished one
    if words[0] == "transcribe" and "-" in words:
        with open("speech.flac", "rb") as sound:
            monkeypatch.setattr(
                sys, "stdin", type("Stdin", (), {"buffer": sound, "isatty": lambda self: False})()
            )
            assert imputer(*words).stdout.strip()
    else:
        imputer(*words)
    for place in ("RECORDINGS", "recordings"):
        assert (inside / place / "anna" / "one.wav").is_file()


# What a page's snippets take for granted, and what to do with what they define.
GIVEN: dict[str, str] = {
    "decoding.md": """
import json, torch, numpy as np, soundfile
samples = soundfile.read("speech.wav", dtype="float32")[0]
frame_lengths, mask = torch.tensor([20]), 6
step = lambda partial: torch.randn(1, 20, 6, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
rows = [{"strategy": "block", "block_size": b, "wer": 0.1} for b in (1, 8)]
json.dump({"evaluations": rows}, open("scores.json", "w"))
""",
    "aligning.md": 'text = open("speech.txt").read()',
    "finetuning.md": """
import imputer
from imputer.training import finetuning
finetuning.LEAST_MINUTES, finetuning.FEWEST_STEPS = 0.01, 2
""",
}
AFTER: dict[str, str] = {
    "decoding.md": """
assert recognizer.transcribe("speech.wav", strategy=left_to_right).passes == 8
assert result.passes == 8 and len(result.trace) == 8
""",
    "aligning.md": """
assert " ".join(word.text for word in found.words) == text
assert len(alignment) > 5
""",
    "finetuning.md": """
finetuning.LEAST_MINUTES, finetuning.FEWEST_STEPS = 1.0, 60
assert report.minutes < 1
""",
    "README.md": "assert log_probs.grad is not None and nats < 0",
    "pretrained.md": "assert filled.added == 4 and frames.shape[1] == 288",
}


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name != "deploying.md"], ids=lambda page: page.name
)
def test_snippets_run(page: Path, inside: Path) -> None:
    """All Python of a page, in order, as one programme."""
    snippets = [block for block in blocks(page) if block.language == "python"]
    if not snippets:
        pytest.skip("no Python here")
    torch.manual_seed(0)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(GIVEN.get(page.name, ""), names)
    for block in snippets:
        # Line numbers of the page, for the one that fails.
        code = compile("\n" * block.line + block.text, str(page), "exec")
        exec(code, names)
    exec(AFTER.get(page.name, ""), names)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_the_server_answers_as_documented(inside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The page's curl lines, sent as they are written, and its snippets with OpenAI's client."""
    page = ROOT / "docs" / "deploying.md"
    names: dict[str, Any] = {}
    with serving.serving(inside / "english") as (address, _):
        for block in blocks(page):
            text = block.text.replace("http://127.0.0.1:8000", address)
            if block.language == "python":
                exec(compile("\n" * block.line + text, str(page), "exec"), names)
            for words in commands(Block(page, block.line, block.language, text)):
                if words[0] == "curl":
                    answer = sent(words[1], words[2:])
                    assert answer.status_code == 200, (words, answer.text)
    assert names["answer"].text in capsys.readouterr().out


def sent(address: str, options: list[str]) -> httpx.Response:
    """What curl -F sends."""
    assert options[::2] == ["-F"] * (len(options) // 2), options
    fields: dict[str, str] = {}
    uploads = {}
    for option in options[1::2]:
        key, _, value = option.partition("=")
        if value.startswith("@"):
            uploads[key] = (value[1:], Path(value[1:]).read_bytes())
        else:
            fields[key] = value
    return httpx.post(address, data=fields, files=uploads, timeout=60)
