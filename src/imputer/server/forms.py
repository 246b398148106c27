"""What a transcription request asks for: the fields of OpenAI's form, and ours, checked."""

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from imputer.data.text import plain
from imputer.decoding import STRATEGIES, Options
from imputer.server.failures import Failure
from imputer.server.modelnames import Models

FORMATS = ("json", "text", "srt", "vtt", "verbose_json")
STREAMED = ("json", "text")
GRANULARITIES = ("word", "segment")
INCLUDES = ("logprobs", "passes")
MAX_BLOCK_SIZE = 64  # passes
PROMPT_WORDS = 4  # of a phrase in a prompt that counts as a name
EXPECTED_LETTERS = 2000  # of all words that a request expects: a search has a table row per letter and piece

# Fields of OpenAI's own models that change nothing here: accepted and ignored.
IGNORED = ("temperature", "chunking_strategy", "user")
LISTS = ("timestamp_granularities", "include", "keywords", "languages", "hotwords")
FIELDS = (
    "file",
    "model",
    "language",
    "response_format",
    *LISTS,
    "prompt",
    "stream",
    "block_size",
    "strategy",
    "lm",
    *IGNORED,
)
# Fields that ask for speakers are refused: ignoring them would change the meaning of the answer.
REFUSED = ("known_speaker_names", "known_speaker_references")

# The models that come with the package are for one language; the language of others is unknown.
LANGUAGES = {"english": "en", "digits": "en"}
ENGLISH = ("en", "eng", "english")


@dataclass(frozen=True, slots=True)
class TranscriptionRequest:
    """The fields of a request, checked."""

    model: str
    options: Options
    suggested: tuple[str, ...] = ()  # OpenAI's keywords and prompt; used where the model can write them
    response_format: str = "json"
    granularities: tuple[str, ...] = ()
    stream: bool = False
    logprobs: bool = False
    passes: bool = False  # stream every pass
    language: str = ""
    task: str = "transcribe"


def read_request(
    items: Iterable[tuple[str, str]],
    models: Models,
    task: str = "transcribe",
    *,
    trace: bool = False,
    lm: str | None = "default",
    hotwords: tuple[str, ...] = (),
) -> TranscriptionRequest:
    """The text fields of a form, checked; ``lm`` and ``hotwords`` are the server's, for requests that do not say."""
    fields: dict[str, list[str]] = {}
    for name, value in items:
        name = name.removesuffix("[]").partition("[")[0]  # chunking_strategy[type] is chunking_strategy
        if name in REFUSED:
            raise _bad(name, f"{name} is not supported: the models do not distinguish speakers")
        if name not in FIELDS:
            raise unknown_field(name)
        fields.setdefault(name, []).append(value)
    for name, values in fields.items():
        if len(values) > 1 and name not in (*LISTS, "chunking_strategy"):
            raise _bad(name, f"the field {name} was given {len(values)} times")

    def one(name: str, default: str) -> str:
        return fields.get(name, [default])[0].strip() or default

    model = models.find(one("model", ""))
    response_format = _response_format(one("response_format", "json"))
    stream = _boolean("stream", one("stream", "false"))
    if stream and response_format not in STREAMED:
        raise _bad("stream", f"stream=true goes with response_format json or text, not {response_format}")
    granularities = tuple(
        _one_of("timestamp_granularities[]", g, GRANULARITIES)
        for g in fields.get("timestamp_granularities", [])
    )
    include = {_one_of("include[]", value, INCLUDES) for value in fields.get("include", [])}
    if "logprobs" in include and response_format != "json":
        raise _bad("include[]", f"include[]=logprobs goes with response_format json, not {response_format}")
    if "passes" in include and not stream:
        raise _bad("include[]", "include[]=passes goes with stream=true")
    language = _language([one("language", ""), *fields.get("languages", [])], model)
    if task == "translate" and language != "english":
        raise _bad("model", f"{model} cannot translate: only models for English can, from English")
    expected = _terms(fields.get("hotwords", []))
    letters = sum(map(len, expected))
    if letters > EXPECTED_LETTERS:
        raise _bad(
            "hotwords", f"hotwords have {letters} letters, but it takes {EXPECTED_LETTERS} of them at most"
        )
    hints = (*_terms(fields.get("keywords", [])), *_names(one("prompt", "")))
    options = Options(
        _block_size(one("block_size", str(models.block_sizes[model]))),
        _one_of("strategy", one("strategy", "block"), tuple(STRATEGIES)),
        trace=trace,
        lm=lm if _one_of("lm", one("lm", "default"), ("default", "none")) == "default" else None,
        hotwords=(*hotwords, *expected),
    )
    return TranscriptionRequest(
        model=model,
        options=options,
        suggested=_first(hints, EXPECTED_LETTERS - letters),
        response_format=response_format,
        granularities=granularities,
        stream=stream,
        logprobs="logprobs" in include,
        passes="passes" in include,
        language=language,
        task=task,
    )


def _terms(given: Iterable[str]) -> list[str]:
    """Words and phrases, several in one field with commas between."""
    return [term.strip() for text in given for term in text.split(",") if term.strip()]


def _first(terms: Iterable[str], letters: int) -> tuple[str, ...]:
    """As many of the terms as have ``letters`` letters in all."""
    totals = accumulate(map(len, terms := list(terms)))
    return tuple(term for term, total in zip(terms, totals, strict=True) if total <= letters)


def _names(prompt: str) -> tuple[str, ...]:
    """Of OpenAI's prompt, the short phrases in letters alone: names and terms, as its own guide lists them."""
    phrases = (plain(part) for part in re.split(r"[,;.!?:\n]", prompt))
    short = (one for one in phrases if 0 < len(one.split()) <= PROMPT_WORDS)
    return tuple(one for one in short if re.fullmatch("[a-z' ]+", one))


def unknown_field(name: str) -> Failure:
    """No such field, and which one may have been meant."""
    close = difflib.get_close_matches(name, FIELDS, n=1)
    hint = f"; did you mean {close[0]}?" if close else f"; there are {', '.join(FIELDS)}"
    return _bad(name[:80], f"unknown field {name[:80]!r}{hint}")


def _response_format(value: str) -> str:
    if value == "diarized_json":
        raise _bad(
            "response_format", "diarized_json is not supported: the models do not distinguish speakers"
        )
    return _one_of("response_format", value, FORMATS)


def _language(names: Sequence[str], model: str) -> str:
    """The language of the answer; en, en_US, eng and auto are all right for an English model."""
    asked = [name.strip().lower().replace("_", "-") for name in names]
    asked = [name for name in asked if name and name != "auto"]
    if any(len(name) > 40 for name in asked):
        raise _bad("language", "language is a code such as en")
    if LANGUAGES.get(model) == "en":
        if asked and not any(name.split("-")[0] in ENGLISH for name in asked):
            raise _bad("language", f"the model {model} is for English (en), not {', '.join(asked)[:80]!r}")
        return "english"
    return asked[0] if asked else "unknown"


def _one_of(field: str, value: str, known: Sequence[str]) -> str:
    if value not in known:
        raise _bad(field, f"{field} is {value[:80]!r}, but it takes {', '.join(known)}")
    return value


def _boolean(field: str, value: str) -> bool:
    known = {"true": True, "1": True, "false": False, "0": False}
    if value.lower() not in known:
        raise _bad(field, f"{field} is {value[:80]!r}, but it takes true or false")
    return known[value.lower()]


def _block_size(value: str) -> int:
    digits = value.lstrip("0")
    if (
        not (value.isascii() and value.isdecimal())
        or len(digits) > 3
        or not 1 <= int(digits or 0) <= MAX_BLOCK_SIZE
    ):
        raise _bad("block_size", f"block_size is {value[:80]!r}, but it takes 1 to {MAX_BLOCK_SIZE}")
    return int(digits)


def _bad(param: str, message: str) -> Failure:
    return Failure(400, message, code="invalid_value", param=param)
