"""The documentation that the server offers: /openapi.json, and /docs made from it."""

from html import escape
from typing import Any

from imputer import __version__
from imputer.decoding import STRATEGIES
from imputer.server.forms import FORMATS, GRANULARITIES, INCLUDES, MAX_BLOCK_SIZE

TEXT = {"type": "string"}
TEXTS = {"type": "array", "items": TEXT}
FORM_FIELDS: dict[str, dict[str, Any]] = {
    "file": {"type": "string", "format": "binary", "description": "The recording. Required."},
    "model": TEXT | {"description": "A name from /v1/models, or a name of OpenAI's for the default model."},
    "language": TEXT | {"description": "A code such as en; auto is the same as none."},
    "response_format": TEXT | {"enum": list(FORMATS), "default": "json"},
    "timestamp_granularities": TEXTS
    | {"description": f"{' and '.join(GRANULARITIES)}; with json and verbose_json."},
    "include": TEXTS
    | {
        "description": f"{', '.join(INCLUDES)}: logarithms of token probabilities, with json; "
        "every pass of the network, with stream."
    },
    "keywords": TEXTS | {"description": "Words and phrases to prefer."},
    "hotwords": TEXT | {"description": "The same, separated by commas."},
    "languages": TEXTS | {"description": "Codes of languages, one of which is the model's."},
    "prompt": TEXT | {"description": "Phrases of up to four words in it count as keywords."},
    "stream": {"type": "boolean", "description": "Answer with server-sent events.", "default": False},
    "block_size": {
        "type": "integer",
        "minimum": 1,
        "maximum": MAX_BLOCK_SIZE,
        "description": "The number of passes.",
    },
    "strategy": TEXT | {"enum": list(STRATEGIES), "default": "block"},
    "lm": TEXT | {"enum": ["default", "none"], "description": "none decodes without the language model."},
    "temperature": {"type": "number", "description": "Ignored."},
    "chunking_strategy": TEXT | {"description": "Ignored."},
    "user": TEXT | {"description": "Ignored."},
}
WORK = {
    "/v1/audio/transcriptions": "Transcribe a recording.",
    "/v1/audio/translations": "English speech to English text: the same as a transcription.",
    "/v1/imputations": "Transcribe a recording and show every pass, as the page draws them.",
}
READ = {
    "/v1/realtime": "Live transcription over a WebSocket, in OpenAI's realtime transcription events.",
    "/v1/models": "The models that are served.",
    "/v1/models/{name}": "One of them, by any name that a request may use.",
    "/health": "200 as long as the process answers.",
    "/ready": "200 when requests are taken and make progress; 503 while loading, stalled or draining.",
    "/metrics": "Counters for Prometheus.",
    "/sample.wav": "A recording to try a model on.",
}


def openapi() -> dict[str, Any]:
    """The API as an OpenAPI document."""
    form = {"schema": {"type": "object", "required": ["file"], "properties": FORM_FIELDS}}
    answers = {
        "200": {"description": "The answer."},
        "default": {"description": 'Refused: {"error": {"message", "type", "param", "code"}}.'},
    }
    paths: dict[str, Any] = {
        path: {
            "post": {
                "summary": text,
                "requestBody": {"required": True, "content": {"multipart/form-data": form}},
                "responses": answers,
            }
        }
        for path, text in WORK.items()
    }
    paths |= {path: {"get": {"summary": text, "responses": answers}} for path, text in READ.items()}
    name = {"name": "name", "in": "path", "required": True, "schema": TEXT}
    paths["/v1/models/{name}"]["get"]["parameters"] = [name]
    return {
        "openapi": "3.1.0",
        "info": {"title": "Imputer", "version": __version__},
        "paths": paths,
        "components": {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
    }


def page() -> str:
    """The OpenAPI document as a page."""
    document = openapi()
    routes = "".join(
        f"<tr><td><code>{method.upper()} {escape(path)}</code></td><td>{escape(operation['summary'])}</td></tr>"
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    )
    fields = "".join(
        f"<tr><td><code>{escape(name)}</code></td><td>{escape(_describe(field))}</td></tr>"
        for name, field in FORM_FIELDS.items()
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Imputer: API</title>'
        '<meta name="viewport" content="width=device-width"></head><body>'
        "<h1>API</h1><p>Any client of OpenAI's audio API works here. "
        '<a href="openapi.json">openapi.json</a> describes it for programs.</p>'
        "<pre>curl http://127.0.0.1:8000/v1/audio/transcriptions -F file=@speech.wav</pre>"
        f"<h2>Addresses</h2><table>{routes}</table>"
        f"<h2>Fields of a form (multipart/form-data)</h2><table>{fields}</table>"
        "<h2>Streams</h2><p>With stream=true: events transcript.text.delta as text is settled, "
        "transcript.text.done with all of it, and [DONE].</p></body></html>"
    )


def _describe(field: dict[str, Any]) -> str:
    parts = [field.get("description", "")]
    if "enum" in field:
        parts.append(f"One of {', '.join(field['enum'])}.")
    if "maximum" in field:
        parts.append(f"{field['minimum']} to {field['maximum']}.")
    if "default" in field:
        parts.append(f"Default: {str(field['default']).lower()}.")
    return " ".join(part for part in parts if part)
