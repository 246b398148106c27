"""Text: normal forms, and spelling out numbers, titles and symbols as they are spoken."""

import bz2
import gzip
import lzma
import re
import unicodedata
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TextIO

from imputer.errors import ImputerError, UsageError

TITLES = {
    "mr": "mister", "mrs": "missus", "ms": "miss", "dr": "doctor", "st": "saint", "messrs": "messieurs",
    "prof": "professor", "capt": "captain", "col": "colonel", "gen": "general", "lt": "lieutenant",
    "sgt": "sergeant", "rev": "reverend", "jr": "junior", "sr": "senior", "vs": "versus", "etc": "et cetera",
}  # fmt: skip
UNITS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
SCALES = ((10**9, "billion"), (10**6, "million"), (10**3, "thousand"), (100, "hundred"))
ORDINALS = {
    "one": "first", "two": "second", "three": "third", "five": "fifth", "eight": "eighth", "nine": "ninth",
    "twelve": "twelfth",
}  # fmt: skip
# Words that begin or end with an apostrophe of their own; all others lose it as a quotation mark.
ELIDED_STARTS = {"tis", "twas", "twere", "twill", "twould", "em", "ere", "til", "cause", "bout"}
ELIDED_ENDS = {"o", "th", "an", "wi", "ol", "t"}


def plain(text: str) -> str:
    """The normal form: lower case letters, digits and apostrophes, one space between words.

    Typographic apostrophes become straight, dashes separate words, other marks are removed; accents stay.
    """
    text = unicodedata.normalize("NFKC", text).replace("’", "'").replace("‘", "'").replace("ʼ", "'")
    kept = [
        " " if unicodedata.category(character) in ("Pd", "Pc") else character
        for character in text.lower()
        if character.isalnum()
        or character in "' "
        or unicodedata.category(character)[0] in "MZ"
        or character.isspace()
        or unicodedata.category(character) in ("Pd", "Pc")
    ]
    words = ("".join(kept)).split()
    # An apostrophe belongs to a word when a letter is next to it: don't, 'tis, dogs'. Quoted words lose theirs.
    return " ".join(word for word in map(_unquoted, words) if word)


def _unquoted(word: str) -> str:
    if len(word) > 2 and word[0] == word[-1] == "'":
        word = word[1:-1]
    return word if word.strip("'") else ""


def lower(text: str) -> str:
    """Lower case and single spaces, nothing else changed."""
    return " ".join(text.lower().split())


def keep(text: str) -> str:
    """Unchanged, except for surrounding and repeated spaces."""
    return " ".join(text.split())


TEXTS: dict[str, Callable[[str], str]] = {"plain": plain, "lower": lower, "keep": keep}
OPENERS: dict[str, Callable[..., IO[str]]] = {".xz": lzma.open, ".gz": gzip.open, ".bz2": bz2.open}


@contextmanager
def open_text(path: Path) -> Iterator[TextIO]:
    """A text file, unpacked by its ending; errors are one line."""
    try:
        opener = OPENERS.get(path.suffix.lower(), open)
        with opener(path, "rt", encoding="utf-8-sig") as file:
            yield file
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start})") from error
    except (lzma.LZMAError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ImputerError(f"{path} is damaged: {error}") from error
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The numbered lines of a text file that are not empty."""
    with open_text(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, line.rstrip("\r\n")


class Unspeakable(ValueError):
    """A sentence that cannot be spelled out; says why."""


def spell(line: str) -> str:
    """The line as it is spoken: letters, apostrophes and the punctuation that guides an engine's voice."""
    text = unicodedata.normalize("NFKC", line)
    text = re.sub("[‘’ʼ`´]", "'", text)
    text = re.sub(r"\s*(—|–|--+|…|\.\.+)\s*", ", ", text)
    text = "".join(
        c for c in unicodedata.normalize("NFKD", text) if unicodedata.category(c) not in ("Mn", "Cf")
    )
    text = re.sub(r"\b([A-Za-z]+)\.|\b(Mrs?|Dr)\b", _title, text).replace("&", " and ")
    text = re.sub(r"([$£€]?)(\d{1,3}(?:,\d{3})+|\d+)(\.\d+)?(st|nd|rd|th|%)?(?!\w)", _number, text)
    text = re.sub(r"[\"“”„«»()\[\]*_]", " ", text)
    text = re.sub(r"[-‑/]", " ", text)
    odd = re.search(r"[^A-Za-z' ,.?!;:]", text)
    if odd:
        raise Unspeakable("a character that cannot be spelled out" if not odd[0].isdigit() else "a number")
    if text.upper() == text:
        text = text.lower()
    if re.search(r"\b[A-Z]{2,}\b", text):
        raise Unspeakable("an abbreviation in capitals")
    text = " ".join(_without_quotation(word) for word in text.split())
    text = re.sub(r"\s+([,.?!;:])", r"\1", re.sub(r"([,.?!;:])[ ,.?!;:]*(?=[,.?!;:])", "", text))
    text = re.sub(r"^[ ,.?!;:]+", "", text)
    if not re.search("[A-Za-z]", text):
        raise Unspeakable("no words")
    return text


def transcript(spoken: str) -> str:
    """The normal form of a spoken line: lower-case letters, apostrophes and single spaces."""
    return " ".join(re.sub("[^a-z' ]", " ", spoken.lower()).split())


def _title(match: re.Match) -> str:
    short = match[1] or match[2]
    word = TITLES.get(short.lower())
    if word is None or short in ("gen", "col", "st", "sr"):
        return match[0]
    return word.capitalize() if short[0].isupper() else word


def _number(match: re.Match) -> str:
    currency, digits, fraction, suffix = match[1], match[2].replace(",", ""), match[3] or "", match[4] or ""
    number = int(digits)
    if number >= 10**12 or (currency and fraction) or (fraction and suffix not in ("", "%")):
        raise Unspeakable("a number")
    is_year = 1100 <= number <= 1999 and not (currency or fraction or suffix) and "," not in match[2]
    said = _year(number) if is_year else _cardinal(number)
    if fraction:
        said += " point " + " ".join(UNITS[int(digit)] for digit in fraction[1:])
    if suffix == "%":
        said += " percent"
    elif suffix:
        said = _ordinal(said)
    if currency:
        name = {"$": "dollar", "£": "pound", "€": "euro"}[currency]
        said += f" {name}" if number == 1 else f" {name}s"
    return said


def _cardinal(number: int) -> str:
    if number < 20:
        return UNITS[number]
    if number < 100:
        rest = number % 10
        return TENS[number // 10] + (f" {UNITS[rest]}" if rest else "")
    scale, name = next((scale, name) for scale, name in SCALES if number >= scale)
    rest = number % scale
    joint = " and " if scale == 100 else " "
    return f"{_cardinal(number // scale)} {name}" + (joint + _cardinal(rest) if rest else "")


def _year(number: int) -> str:
    century, rest = divmod(number, 100)
    if rest == 0:
        return f"{_cardinal(century)} hundred"
    return f"{_cardinal(century)} {'oh ' if rest < 10 else ''}{_cardinal(rest)}"


def _ordinal(cardinal: str) -> str:
    head, _, last = cardinal.rpartition(" ")
    last = ORDINALS.get(last) or (last[:-1] + "ieth" if last.endswith("y") else last + "th")
    return f"{head} {last}".strip()


def _without_quotation(word: str) -> str:
    """Drop apostrophes that stand for quotation marks: 'Yes, -> Yes, but 'tis and o' stay."""
    start, core, end = re.fullmatch(r"('*)([^']*(?:'[^' ,.?!;:]+)*)(.*)", word).groups()  # type: ignore[union-attr]
    bare = core.lower()
    if start and bare in ELIDED_STARTS:
        core = "'" + core
    if end.startswith("'") and (bare in ELIDED_ENDS or re.fullmatch("[a-z]{2,}in", bare)):
        core += "'"
    return core + end.replace("'", "")
