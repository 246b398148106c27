"""`imputer align`."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from imputer.commands.outputs import Format, format_of
from imputer.errors import UsageError, count


def align(
    audio: Path | None = None,
    text_file: Path | None = None,
    *,
    text: str = "",
    model: str = "english",
    format: Format | None = None,
    output: Annotated[Path | None, Parameter(alias="-o")] = None,
    manifest: Annotated[list[Path] | None, Parameter(consume_multiple=True)] = None,
    store: Path | None = None,
    batch_seconds: float = 120.0,
    workers: int = 1,
    frames_cache: str = "",
) -> None:
    """Find the time of every word and token of a known text, for one recording or a whole corpus.

    - imputer align speech.wav speech.txt -o speech.TextGrid
    - imputer align --manifest train.jsonl --model runs/expert/model --store train.alignments

    The first aligns one recording, the second a corpus, for training; under torchrun every process aligns its share.

    Parameters
    ----------
    audio
        A recording, of any length.
    text_file
        A file with what is said in it.
    text
        What is said, instead of a file.
    model
        A model folder, or the name of a shipped model.
    format
        How to write word times and confidences. If not given, the ending of --output decides, else json.
    output
        The file to write, its format by its ending: speech.srt. Standard output if not given.
    manifest
        Corpora to align for training, one or more, instead of one recording.
    store
        The alignment file to write for them.
    batch_seconds
        Audio in one batch, in seconds.
    workers
        Processes that read audio.
    frames_cache
        Folder of cached encoder frames, for models over a pretrained encoder.
    """
    if workers < 0:
        raise UsageError(f"--workers must be 0 or more, got {workers}")
    if not 0 < batch_seconds < float("inf"):
        raise UsageError(f"--batch-seconds must be a number above 0, got {batch_seconds:g}")
    if manifest or store:
        if not (manifest and store) or audio:
            raise UsageError("a corpus is aligned with --manifest and --store together, and no recording")
        _align_corpus(manifest, store, model, batch_seconds, workers, frames_cache)
        return
    if not audio or bool(text_file) == bool(text):
        raise UsageError(
            "give a recording and its text: imputer align speech.wav speech.txt, or --text '...'"
        )
    if text_file:
        try:
            text = text_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot read the text {text_file}: {error}") from error
    from imputer import transcripts
    from imputer.aligner.recording import align_one
    from imputer.support import atomic_files

    if not audio.exists():
        raise UsageError(f"{audio}: no such file")
    form = format or "json"
    if output:
        form = format_of(output, format, "json")
        atomic_files.probe(output)
    written = transcripts.FORMATS[form](align_one(audio, text, model), str(audio))
    if output:
        with atomic_files.replacing(output) as path:
            path.write_text(written, encoding="utf-8")
    else:
        print(written, end="", flush=True)


def _align_corpus(
    manifests: list[Path], store: Path, model: str, batch_seconds: float, workers: int, frames_cache: str
) -> None:
    from imputer.aligner.corpus import align_manifests

    done = align_manifests(
        manifests, store, model, batch_seconds=batch_seconds, workers=workers, frames_cache=frames_cache
    )
    for line in done.left_out:
        print(f"left out {line}")
    if done.first_rank:
        print(f"{done.aligned} of {count(done.utterances, 'utterance')} aligned, written to {store}")
