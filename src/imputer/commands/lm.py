"""`imputer lm`."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from imputer.commands.options import FileName
from imputer.errors import UsageError, count

if TYPE_CHECKING:
    from imputer.languagemodel import LanguageModel
    from imputer.vocabulary import Vocabulary

HELD_OUT_EVERY, HELD_OUT_MOST = 100, 4000  # texts that are kept apart to measure perplexity


def lm(
    action: Literal["build", "tune"],
    /,
    *files: Path,
    model: FileName = "english",
    order: int = 6,
    max_mb: float = 15.0,
    text: Literal["spoken", "plain", "lower", "keep"] = "spoken",
    words: Path | None = None,
    output: Annotated[Path | None, Parameter(alias="-o")] = None,
    lm: FileName = "default",
    limit: int = 300,
) -> None:
    """Build a language model from text, or tune how much it counts on held-out speech.

    - imputer lm build books.txt.xz --model english -o books.bin
    - imputer lm build lectures/*.txt --model runs/mine/model -o runs/mine/model
    - imputer lm tune valid.jsonl --model runs/mine/model

    build counts and smooths the n-grams of text files and prints the perplexity of lines held out: modified Kneser-Ney
    over the pieces of a model, pruned until it fits. 20 million words take about two minutes and 4 GB of memory.

    tune tries weights and thresholds of the search and stores those with the fewest word errors in the model folder.
    Its speech should be neither in the training set nor in the test set.

    Parameters
    ----------
    action
        What to do: build or tune.
    files
        build: text, one sentence per line: plain, .xz, .gz or .bz2. Lines that the model cannot spell are skipped.
        tune: manifests.
    model
        The model whose pieces are counted: a folder, or the name of a shipped model.
    order
        The longest n-gram, 1 to 6 pieces.
    max_mb
        The size of the file, in millions of bytes; n-grams that are worth least are left out until it fits.
    text
        What is done to the text: spoken writes numbers and titles as words, in lower case and without marks; plain
        only drops case and marks, lower only case; keep changes nothing. It should give what the model writes.
    words
        build: a file of words, one a line. Decoding then avoids words that are neither in it nor twice in the text.
    output
        The file to write; in a folder, lm.bin, where a model folder has its language model. A name that ends in
        .arpa is written as ARPA.
    lm
        tune: the language model, a file or the name of a model that has one; by default the model's own.
    limit
        tune: at most this many utterances, spread over all.
    """
    if not files:
        raise UsageError(
            "no text: name at least one file" if action == "build" else "no manifest: name at least one"
        )
    if action == "tune":
        _tune(files, model, lm, limit)
        return
    if output is None:
        raise UsageError("lm build needs --output: the file to write, or a model folder")
    _build(files, model, order, max_mb, text, words, output)


def _build(
    files: tuple[Path, ...],
    model: str,
    order: int,
    max_mb: float,
    text: str,
    words: Path | None,
    output: Path,
) -> None:
    from imputer import languagemodel, models
    from imputer.data.text import plain, read_lines
    from imputer.support import atomic_files
    from imputer.vocabulary import Vocabulary

    if not max_mb > 0:
        raise UsageError(f"--max-mb is a size above 0, got {max_mb:g}")
    folder = models.model_folder(model)
    vocabulary = Vocabulary.load(folder / models.TOKENIZER)
    path = output / models.LANGUAGE_MODEL if output.is_dir() else output
    if words is not None and path.suffix == ".arpa":
        other = path.with_suffix(".bin")
        raise UsageError(f"an ARPA file holds no list of words: leave out --words, or write to {other}")
    atomic_files.probe(path)
    held_out: list[str] = []
    skipped: list[str] = []
    texts = _held_apart(_read(files, text), held_out)
    known = None if words is None else [plain(word) for _, word in read_lines(words)]
    built = languagemodel.build(
        texts, vocabulary, order, round(max_mb * 1e6), words=known, skipped=skipped.append
    )
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
    if built.lexicon is not None:
        print(f"{count(len(built.lexicon.words), 'word')} are known; others are avoided")
    print(_perplexity(built, held_out, vocabulary))


def _tune(files: tuple[Path, ...], model: str, lm: str, limit: int) -> None:
    from imputer import models
    from imputer.configs import LanguageModel as Settings
    from imputer.data.manifest import open_utterances
    from imputer.evaluation import spread, tuning
    from imputer.evaluation.scoring import Errors
    from imputer.recognizer import Recognizer

    if limit < 1:
        raise UsageError(f"--limit must be at least 1, got {limit}")
    folder = models.model_folder(model)
    recognizer = Recognizer.from_pretrained(folder)
    found = recognizer.language_model(lm)
    if found is None:
        raise UsageError(
            f"{folder} has no language model: build one with imputer lm build, or name one with --lm"
        )
    utterances = spread(list(open_utterances([str(path) for path in files], "manifest", strict=True)), limit)

    def told(settings: Settings, errors: Errors) -> None:
        print(f"{_described(settings)}: {100 * errors.rate:.2f} % WER", flush=True)

    best, errors = tuning.tune(recognizer, found, utterances, told)
    models.store_language_model_settings(folder, best)
    print(
        f"best on {count(len(utterances), 'utterance')}, {errors.length:,} words: {_described(best)}; "
        f"{100 * errors.rate:.2f} % WER; stored in {folder / models.CONFIG}"
    )


def _described(settings: object) -> str:
    keys = ("lm_weight", "token_bonus", "threshold")
    return ", ".join(f"{key} {getattr(settings, key):g}" for key in keys)


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
        return f"perplexity: not measured, it takes {HELD_OUT_EVERY} texts to hold one out"
    pieces = sum(len(tokens) for _, tokens in encoded)
    nats = -sum(built.score(tokens) for _, tokens in encoded)
    return (
        f"perplexity on {words:,} words held out: {math.exp(nats / words):.1f} per word, "
        f"{math.exp(nats / pieces):.2f} per piece"
    )
