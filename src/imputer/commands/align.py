"""`imputer align`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from imputer.commands import outputs
from imputer.commands.options import FileName
from imputer.commands.outputs import Format
from imputer.errors import ImputerError, UsageError, count

if TYPE_CHECKING:
    from imputer.data.manifest import Utterance

TABLES = (".csv", ".tsv", ".jsonl")


def align(
    audio: Path | None = None,
    text_file: Path | None = None,
    *,
    text: str = "",
    model: FileName = "english",
    format: Format | None = None,
    output: Annotated[FileName | None, Parameter(alias="-o")] = None,
    device: str = "cpu",
    manifest: Annotated[list[Path] | None, Parameter(consume_multiple=True)] = None,
    store: Path | None = None,
    batch_seconds: float = 120.0,
    workers: int = 1,
    frames_cache: FileName = "",
) -> None:
    """Find the time of every word and token of a known text, for one recording, a folder, or a whole corpus.

    - imputer align speech.wav speech.txt -o speech.TextGrid
    - imputer align recordings/ --format srt -o subtitles/
    - imputer align --manifest train.jsonl --model runs/expert/model --store train.alignments

    The text comes back as it was written, with case and punctuation. Numbers and titles are read as they are said;
    what the model cannot read stays with the word before it. The last example aligns a corpus for training; under
    torchrun every process aligns its share.

    Parameters
    ----------
    audio
        A recording of any length; a folder of recordings with .txt files of the same names; a CSV or TSV
        table with columns for audio and text; or a manifest, .jsonl.
    text_file
        A file with what is said in the recording.
    text
        What is said, instead of a file.
    model
        A model folder, or the name of a shipped model.
    format
        How to write word times and confidences. If not given, the ending of --output decides, else json.
    output
        The file to write, its format by its ending: speech.srt. Or a folder (a name without an ending, or with a /
        at its end), which a folder, a table or a manifest needs: it takes one file for each recording. Standard
        output if not given.
    device
        A torch device: cpu, cuda, mps.
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
    if output == "":
        raise UsageError("--output is empty: give a file or a folder, . for this one")
    if workers < 0:
        raise UsageError(f"--workers must be 0 or more, got {workers}")
    if not 0 < batch_seconds < float("inf"):
        raise UsageError(f"--batch-seconds must be a number above 0, got {batch_seconds:g}")
    if manifest or store:
        if not (manifest and store) or audio:
            raise UsageError("a corpus is aligned with --manifest and --store together, and no recording")
        _align_corpus(manifest, store, model, batch_seconds, workers, frames_cache)
        return
    if audio and not text and not text_file and (audio.is_dir() or audio.suffix.lower() in TABLES):
        _align_many(audio, model, format, Path(output) if output else None, device)
        return
    if audio and text_file and text:
        raise UsageError(f"give the text once: either the file {text_file} or --text")
    if not audio or not (text_file or text):
        raise UsageError(
            "give a recording and its text: imputer align speech.wav speech.txt, or --text '...'; or a folder "
            "of recordings with .txt files"
        )
    if text_file:
        try:
            text = text_file.read_text(encoding="utf-8-sig")
        except OSError as error:
            raise UsageError(f"cannot read the text {text_file}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise UsageError(
                f"{text_file} is not UTF-8 text; the recording comes first, then its text"
            ) from error
    if not audio.exists():
        raise UsageError(f"{audio}: no such file")
    from imputer.aligner.recording import align as align_one
    from imputer.recognizer import Recognizer
    from imputer.support import atomic_files

    target, form = _target(output, audio, format)
    if target:
        for given in (audio, text_file):
            if given and target.is_file() and target.samefile(given):
                raise UsageError(f"--output {target} is also the input")
        outputs.refuse_texts({audio: target})
        atomic_files.probe(target)
    recognizer = Recognizer.from_pretrained(model, device=device)
    outputs.write(align_one(recognizer, audio, text), str(audio), form, target)


def _target(output: str | None, audio: Path, format: Format | None) -> tuple[Path | None, Format]:
    """The file of one recording, none for standard output; and its format."""
    if output is None:
        return None, format or "json"
    path, default = Path(output), format or "json"
    if outputs.names_folder(output):
        return path / outputs.transcript_of(Path(audio.name), default), default
    return path, outputs.format_of(path, format, "json")


def _align_many(source: Path, model: str, format: Format | None, output: Path | None, device: str) -> None:
    """Every recording of a folder, table or manifest, one file each; failures are reported, the others continue."""
    from imputer.aligner.recording import align as align_one
    from imputer.recognizer import Recognizer
    from imputer.support import atomic_files

    if output is None or output.is_file() or (outputs.names_format(output) and not output.is_dir()):
        raise UsageError(f"{source} may hold several recordings: add --output FOLDER for one file each")
    utterances, failures = _listed(source)
    recordings = len(utterances) + len(failures)
    form = format or "json"
    targets = [output / outputs.named(utterance.id, form) for utterance in utterances]
    outputs.refuse_same(
        (f"{one.id} ({one.audio_filepath})", path) for one, path in zip(utterances, targets, strict=True)
    )
    outputs.refuse_texts(
        {Path(one.audio_filepath): path for one, path in zip(utterances, targets, strict=True)}
    )
    if targets:
        atomic_files.probe(targets[0])
    recognizer = Recognizer.from_pretrained(model, device=device)
    for utterance, target in zip(utterances, targets, strict=True):
        whole_file = not utterance.duration
        try:
            aligned = align_one(
                recognizer, utterance.audio_filepath if whole_file else utterance, utterance.text
            )
        except ImputerError as error:
            named = "" if utterance.audio_filepath in str(error) else f"{utterance.audio_filepath}: "
            failures.append(f"{named}{error}")
            continue
        outputs.write(aligned, utterance.audio_filepath, form, target)
    for line in failures:
        print(f"imputer: {line}", file=sys.stderr)
    print(f"{recordings - len(failures)} of {count(recordings, 'recording')} aligned, written to {output}")
    if failures:
        sys.exit(1)


def _listed(source: Path) -> tuple[list["Utterance"], list[str]]:
    """The recordings of a folder, table or manifest with their texts as written, and what is wrong with the others."""
    from imputer.corpora.common import Dropped, Options
    from imputer.corpora.folder import folder
    from imputer.data.manifest import Manifest

    if source.suffix.lower() == ".jsonl" and not source.is_dir():
        manifest = Manifest(source, strict=False)
        return list(manifest), list(manifest.problems)
    found = list(folder(source, Options(text="keep")))
    failures = [f"{one.item}: {one.reason}" for one in found if isinstance(one, Dropped)]
    return [one.utterance for one in found if not isinstance(one, Dropped)], failures


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
