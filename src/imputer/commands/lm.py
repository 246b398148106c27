"""`imputer lm`."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from imputer.errors import UsageError, count

if TYPE_CHECKING:
    from imputer.languagemodel import LanguageModel
    from imputer.vocabulary import Vocabulary

HELD_OUT_EVERY, HELD_OUT_MOST = 100, 4000  # texts that are kept apart to measure perplexity


def lm(
    action: Literal["build"],
    /,
    *files: Path,
    model: str = "english",
    order: int = 6,
    max_mb: float = 15.0,
    text: Literal["spoken", "plain", "lower", "keep"] = "spoken",
    output: Annotated[Path, Parameter(alias="-o")],
) -> None:
    """Build a language model: count and smooth the n-grams of text files, and print the perplexity of lines held out.

    - imputer lm build books.txt.xz --model english -o books.bin
    - imputer lm build lectures/*.txt --model runs/mine/model -o runs/mine/model

    Modified Kneser-Ney over the pieces of a model, pruned until it fits. 20 million words take about two minutes
    and 4 GB of memory.

    Parameters
    ----------
    action
        What to do: build.
    files
        Text, one sentence per line: plain, .xz, .gz or .bz2. Lines that the model cannot spell are skipped.
    model
        The model whose pieces are counted: a folder, or the name of a shipped model.
    order
        The longest n-gram, 1 to 6 pieces.
    max_mb
        The size of the file, in millions of bytes; n-grams that are worth least are left out until it fits.
    text
        What is done to the text: spoken writes numbers and titles as words, in lower case and without marks; plain
        only drops case and marks, lower only case; keep changes nothing. It should give what the model writes.
    output
        The file to write; in a folder, lm.bin, where a model folder has its language model. A name that ends in
        .arpa is written as ARPA.
    """
    from imputer import languagemodel, models
    from imputer.support import atomic_files
    from imputer.vocabulary import Vocabulary

    if not files:
        raise UsageError("no text: name at least one file")
    if not max_mb > 0:
        raise UsageError(f"--max-mb is a size above 0, got {max_mb:g}")
    folder = models.model_folder(model)
    vocabulary = Vocabulary.load(folder / models.TOKENIZER)
    path = output / models.LANGUAGE_MODEL if output.is_dir() else output
    atomic_files.probe(path)
    held_out: list[str] = []
    skipped: list[str] = []
    texts = _held_apart(_read(files, text), held_out)
    built = languagemodel.build(texts, vocabulary, order, round(max_mb * 1e6), skipped=skipped.append)
    if path.suffix == ".arpa":
        languagemodel.write_arpa(built, path, vocabulary)
    else:
        built.save(path)
    if skipped:
        print(
            f"skipped {count(len(skipped), 'text')} that the model cannot spell, such as {skipped[0][:60]!r}"
        )
    grams = ", ".join(f"{n:,}" for n in built.ngrams)
    print(f"{path}  {path.stat().st_size / 1e6:.1f} MB, order {built.order}, n-grams: {grams}")
    print(_perplexity(built, held_out, vocabulary))


def _read(files: tuple[Path, ...], form: str) -> Iterator[str]:
    from imputer.languagemodel.texts import texts
    from imputer.support import progress

    missing = [path for path in files if not path.is_file()]
    if missing:
        raise UsageError(f"cannot read {missing[0]}: not a file")
    with progress.bar("counting n-grams", unit="million characters") as advance:
        yield from texts(files, form, read=lambda characters: advance(characters / 1e6))


def _held_apart(texts: Iterator[str], held_out: list[str]) -> Iterator[str]:
    """All texts but every hundredth, which goes to the list."""
    for number, text in enumerate(texts):
        if number % HELD_OUT_EVERY == HELD_OUT_EVERY - 1 and len(held_out) < HELD_OUT_MOST:
            held_out.append(text)
        else:
            yield text


def _perplexity(built: "LanguageModel", held_out: list[str], vocabulary: "Vocabulary") -> str:
    import math

    encoded = [(text, tokens) for text in held_out if (tokens := vocabulary.encode_each([text])[0])]
    words = sum(len(text.split()) for text, _ in encoded)
    if not words:
        return f"perplexity: not measured, the text has fewer than {HELD_OUT_EVERY} pieces to hold one out of"
    pieces = sum(len(tokens) for _, tokens in encoded)
    nats = -sum(built.score(tokens) for _, tokens in encoded)
    return (
        f"perplexity on {words:,} words held out: {math.exp(nats / words):.1f} per word, "
        f"{math.exp(nats / pieces):.2f} per piece"
    )
