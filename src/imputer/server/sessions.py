"""The settings of a live session, in the two shapes that OpenAI's clients send: today's and that of the beta."""

from dataclasses import dataclass, replace
from typing import Any

from imputer.audio.activity import Gate
from imputer.server.failures import Failure
from imputer.server.modelnames import Models

RATE = 24_000  # OpenAI's
RATES = (8_000, 96_000)
SILENCE_MS = (200, 10_000)
PADDING_MS = (0, 2_000)
GATE_DB = (3.0, 15.0)  # above the noise floor, at the thresholds 0 and 1
LOGPROBS = "item.input_audio_transcription.logprobs"
PARTIAL = "imputer.partial"  # text that may still change
ALIGNMENT = "imputer.alignment"  # the tokens of all frames, as they are imputed
INCLUDES = (LOGPROBS, PARTIAL, ALIGNMENT)


@dataclass(frozen=True, slots=True)
class Detection:
    """OpenAI's server_vad."""

    threshold: float = 0.5
    prefix_padding_ms: int = 300
    silence_duration_ms: int = 800

    def gate(self) -> Gate:
        low, high = GATE_DB
        return Gate(above_floor=low + (high - low) * self.threshold)

    def described(self) -> dict[str, Any]:
        return {
            "type": "server_vad",
            "threshold": self.threshold,
            "prefix_padding_ms": self.prefix_padding_ms,
            "silence_duration_ms": self.silence_duration_ms,
        }


@dataclass(frozen=True, slots=True)
class Session:
    """What a client asked for. With a ``detection`` the server ends items, else the client does."""

    model: str
    rate: int = RATE
    detection: Detection | None = Detection()
    language: str | None = None
    include: tuple[str, ...] = ()
    beta: bool = False  # the client speaks the events of OpenAI's beta

    def updated(self, given: Any, models: Models) -> "Session":
        """With the fields of a session.update."""
        session = _object(given, "session")
        kind = session.get("type", "transcription")
        if kind != "transcription":
            raise _bad("session.type", f"session.type is {kind!r}, but this server only transcribes")
        audio = _object(session.get("audio"), "session.audio")
        return self._with(_object(audio.get("input"), "session.audio.input"), session, models, beta=False)

    def updated_beta(self, given: Any, models: Models) -> "Session":
        """With the fields of the beta's transcription_session.update."""
        session = _object(given, "session")
        names = {"input_audio_transcription": "transcription", "turn_detection": "turn_detection"}
        fields = {new: session[old] for old, new in names.items() if old in session}
        if (form := session.get("input_audio_format")) not in (None, "pcm16"):
            raise _bad("session.input_audio_format", f"input_audio_format is {form!r}, but it takes 'pcm16'")
        return self._with(fields, session, models, beta=True)

    def _with(
        self, fields: dict[str, Any], session: dict[str, Any], models: Models, *, beta: bool
    ) -> "Session":
        changes: dict[str, Any] = {"beta": beta}
        if fields.get("format") is not None:
            changes["rate"] = _rate(_object(fields["format"], "session.audio.input.format"))
        if fields.get("transcription") is not None:
            asked = _object(fields["transcription"], "session.audio.input.transcription")
            if asked.get("model") is not None:
                changes["model"] = models.find(str(asked["model"]))
            if "language" in asked:
                changes["language"] = str(asked["language"])[:40] if asked["language"] else None
        if "turn_detection" in fields:
            changes["detection"] = _detection(fields["turn_detection"])
        if "include" in session:
            changes["include"] = _include(session["include"])
        return replace(self, **changes)

    def described(self, name: str) -> dict[str, Any]:
        """The whole session as it is in effect, in the shape that its client speaks."""
        return self._described_beta(name) if self.beta else self._described(name)

    def _described(self, name: str) -> dict[str, Any]:
        return {
            "type": "transcription",
            "object": "realtime.transcription_session",
            "id": name,
            "audio": {
                "input": {
                    "format": {"type": "audio/pcm", "rate": self.rate},
                    "noise_reduction": None,
                    "transcription": {"model": self.model, "language": self.language, "prompt": ""},
                    "turn_detection": self.detection.described() if self.detection else None,
                }
            },
            "include": list(self.include) or None,
        }

    def _described_beta(self, name: str) -> dict[str, Any]:
        now = self._described(name)["audio"]["input"]
        return {
            "id": name,
            "object": "realtime.transcription_session",
            "input_audio_format": "pcm16",
            "input_audio_transcription": now["transcription"],
            "input_audio_noise_reduction": None,
            "turn_detection": now["turn_detection"],
            "include": list(self.include) or None,
        }


def _object(value: Any, name: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _bad(name, f"{name} is an object, not {str(value)[:80]!r}")
    return value


def _rate(form: dict[str, Any]) -> int:
    kind, rate = form.get("type", "audio/pcm"), form.get("rate") or RATE
    if kind != "audio/pcm":
        raise _bad("session.audio.input.format.type", f"the format is {kind!r}, but it takes 'audio/pcm'")
    return int(_number(rate, "session.audio.input.format.rate", *RATES))


def _detection(given: Any) -> Detection | None:
    if given is None:
        return None
    name = "session.audio.input.turn_detection"
    fields = _object(given, name)
    if fields.get("type", "server_vad") != "server_vad":
        raise _bad(f"{name}.type", f"turn_detection is {fields['type']!r}, but it takes 'server_vad' or null")
    known = {
        "threshold": (0.0, 1.0, float),
        "prefix_padding_ms": (*PADDING_MS, int),
        "silence_duration_ms": (*SILENCE_MS, int),
    }
    return Detection(
        **{
            field: kind(_number(fields[field], f"{name}.{field}", low, high))
            for field, (low, high, kind) in known.items()
            if fields.get(field) is not None
        }
    )


def _include(given: Any) -> tuple[str, ...]:
    if not isinstance(given, list | None):
        raise _bad("session.include", "session.include is a list")
    for value in given or []:
        if value not in INCLUDES:
            takes = ", ".join(INCLUDES)
            raise _bad("session.include", f"session.include has {str(value)[:80]!r}, but it takes {takes}")
    return tuple(given or ())


def _number(value: Any, name: str, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise _bad(name, f"{name} is {str(value)[:80]!r}, but it takes a number from {low:g} to {high:g}")
    return value


def _bad(param: str, message: str) -> Failure:
    return Failure(400, message, code="invalid_value", param=param)
