"""Reading and writing configurations: TOML files, names of shipped ones, options; errors name file, key and value."""

import dataclasses
import difflib
import functools
import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from imputer.configs.schema import Config
from imputer.errors import UsageError

Section = TypeVar("Section")
SHIPPED = Path(__file__).parent
UNKNOWN_KEY = "unexpected_keyword_argument"  # pydantic's name for it
TYPES = {
    "string": "a text",
    "integer": "a whole number",
    "number": "a finite number",
    "boolean": "true or false",
}


DEEPEST = 100  # dots in one key


def read(path: Path | str, overrides: dict[str, str] | None = None) -> Config:
    """The configuration in a TOML file, or in one that ships with the package, by name.

    ``overrides`` maps "section.key" to text.
    """
    path = find(path)
    mapping = read_toml(path)
    for name, text in (overrides or {}).items():
        section, _, key = name.partition(".")
        if not key:
            raise UsageError(
                f"--{name}: options of a configuration look like --section.key, e.g. --training.steps"
            )
        build(Config, {section: {key: _from_text(text)}}, where="the command line")
        keys = mapping.setdefault(section, {})
        if isinstance(keys, dict):  # else it is refused below, by name
            keys[key] = _from_text(text)
    return build(Config, mapping, where=str(path))


def find(path_or_name: Path | str) -> Path:
    """The file of a configuration: a path, or the name of one that ships with the package."""
    path, shipped = Path(path_or_name), SHIPPED / f"{path_or_name}.toml"
    if path.is_file() or path.suffix or len(path.parts) > 1:
        return path
    if not shipped.is_file():
        names = ", ".join(sorted(each.stem for each in SHIPPED.glob("*.toml")))
        raise UsageError(f"no configuration {path}; give a TOML file or one of {names}")
    return shipped


def read_toml(path: Path | str) -> dict[str, Any]:
    """The mapping in a TOML file, or a UsageError that names the file."""
    try:
        content = Path(path).read_bytes()
        if any(line.partition(b"=")[0].count(b".") > DEEPEST for line in content.splitlines()):
            raise RecursionError  # the parser would take minutes
        return tomllib.loads(content.decode())
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not valid TOML: {error}") from error
    except RecursionError:
        raise UsageError(f"{path} is not a configuration: its values are nested too deeply") from None


def build(kind: type[Section], mapping: dict[str, Any], *, where: str, prefix: str = "") -> Section:
    """An instance of the section ``kind`` from a mapping, every key and value checked."""
    if not isinstance(mapping, dict):
        raise UsageError(f"{where}: {prefix.removesuffix('.')} = {mapping!r}, but it takes a section")
    try:
        return TypeAdapter(kind).validate_python(mapping)
    except ValidationError as refused:
        raise UsageError(f"{where}: {_explain(kind, refused.errors()[0], prefix)}") from refused


def _explain(kind: type, error: Any, prefix: str) -> str:
    """One line for one of pydantic's errors: the key, the value, what the key takes."""
    place = [str(part) for part in error["loc"]]
    keys = place[:2] if kind is Config else place[:1]  # behind them, the position in an array
    name = prefix + ".".join(keys)
    if error["type"] == UNKNOWN_KEY:
        names = [key.name for key in keys_of(kind, *keys[:-1])]
        close = difflib.get_close_matches(keys[-1], names, n=1)
        wanted = f"did you mean {name.removesuffix(keys[-1])}{close[0]}?" if close else ""
        return f"unknown key {name}; {wanted or 'there are ' + ', '.join(names)}"
    (key,) = (key for key in keys_of(kind, *keys[:-1]) if key.name == keys[-1])
    detail = f" ({error['ctx']['error']})" if error["type"] == "value_error" else ""
    return f"{name} = {error['input']!r}, but it takes {key.takes}{detail}"


def _from_text(text: str) -> Any:
    """A value given on the command line: a TOML value if it is one, else the text itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


@dataclasses.dataclass(frozen=True)
class Key:
    """One key of a section."""

    name: str
    default: Any
    takes: str
    description: str


@functools.cache
def keys_of(kind: type, *path: str) -> tuple[Key, ...]:
    """Every key of a section; ``path`` leads from ``kind`` to a section inside it."""
    schema = TypeAdapter(kind).json_schema()
    for name in path:
        schema = schema["$defs"][schema["properties"][name]["$ref"].rpartition("/")[2]]
    return tuple(
        Key(name, of.get("default"), _takes(of), of.get("description", ""))
        for name, of in schema["properties"].items()
    )


def _takes(schema: dict[str, Any]) -> str:
    """What a key takes, in words, from its JSON schema."""
    if "$ref" in schema:
        return "a section"
    if "enum" in schema:
        return " | ".join(map(str, schema["enum"]))
    if "prefixItems" in schema:
        return f"an array of {len(schema['prefixItems'])}, each {_takes(schema['prefixItems'][0])}"
    if schema["type"] == "array":
        return f"an array, each {_takes(schema['items'])}"
    return TYPES[schema["type"]] + _range(schema)


def _range(schema: dict[str, Any]) -> str:
    words = [
        text.format(schema[limit])
        for limit, text in (
            ("minimum", "{:g} or more"),
            ("exclusiveMinimum", "above {:g}"),
            ("maximum", "at most {:,}"),
            ("exclusiveMaximum", "below {:g}"),
        )
        if limit in schema
    ]
    return ", " + " and ".join(words) if words else ""


def with_choices(section: str, keys: Sequence[Key], choices: Mapping[str, Iterable[str]]) -> list[Key]:
    """The keys of a section; those in ``choices``, by "section.key", take one of these names."""
    named = {key.name: choices.get(f"{section}.{key.name}") for key in keys}
    return [replace(key, takes=" | ".join(named[key.name] or [key.takes])) for key in keys]


def to_toml(
    sections: dict[str, Any], *, explained: bool = False, choices: Mapping[str, Iterable[str]] | None = None
) -> str:
    """TOML for a mapping of sections (or plain mappings), readable by ``build``.

    explained: behind every key a comment says what it is for and what it takes, with the names in ``choices``.
    """
    parts = []
    for name, section in sections.items():
        items = section if isinstance(section, dict) else dataclasses.asdict(section)
        kind: Any = type(section)
        keys = with_choices(name, keys_of(kind), choices or {}) if explained else []
        comments = {key.name: f"  # {key.description} ({key.takes})" for key in keys}
        lines = [
            f"{key} = {json.dumps(value, ensure_ascii=False)}{comments.get(key, '')}"
            for key, value in items.items()
            if value is not None
        ]
        parts.append("\n".join([f"[{name}]", *lines]))
    return "\n\n".join(parts) + "\n"


def differences(old: Config, new: Config, *, ignore: tuple[str, ...] = ()) -> list[str]:
    """What differs between two configurations, as "section.key: old -> new"."""
    lines = []
    for section in dataclasses.fields(Config):
        before, after = (dataclasses.asdict(getattr(config, section.name)) for config in (old, new))
        for key, value in after.items():
            name = f"{section.name}.{key}"
            if before[key] != value and name not in ignore:
                lines.append(f"{name}: {before[key]!r} -> {value!r}")
    return lines
