"""`imputer align`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from imputer.errors import UsageError, count

if TYPE_CHECKING:
    from imputer.manifest import Manifest
    from imputer.transcripts import Transcript


def align(
    audio: Path | None = None,
    text_file: Path | None = None,
    *,
    text: str = "",
    model: str = "english",
    format: Literal["json", "ctm", "textgrid", "srt", "vtt", "txt"] = "json",
    output: Annotated[Path | None, Parameter(alias="-o")] = None,
    manifest: Annotated[list[Path] | None, Parameter(consume_multiple=True)] = None,
    store: Path | None = None,
    batch_seconds: float = 120.0,
    workers: int = 1,
    frames_cache: str = "",
) -> None:
    """Find the time of every word and token of a known text, for one recording or a whole corpus.

    One recording: imputer align speech.wav speech.txt --format textgrid.
    A corpus, for training: imputer align --manifest train.jsonl --model EXPERT --store train.alignments;
    under torchrun every process aligns its share.

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
        How to write word times and confidences.
    output
        Where to write; standard output if not given.
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
        align_manifests(manifest, store, model, batch_seconds, workers, frames_cache)
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
    from imputer import files, transcripts

    if not audio.exists():
        raise UsageError(f"{audio}: no such file")
    if output:
        files.probe(output)
    written = transcripts.FORMATS[format](align_one(audio, text, model), str(audio))
    if output:
        with files.replacing(output) as path:
            path.write_text(written, encoding="utf-8")
    else:
        print(written, end="", flush=True)


def align_one(path: Path, text: str, name: str) -> "Transcript":
    """The transcript of a recording whose text is known: its best alignment, with times and confidences."""
    import torch

    from imputer import aligning, audio, transcripts
    from imputer import model as models
    from imputer.corpora.common import plain
    from imputer.recognizer import torch_folder

    model, vocabulary = models.load(torch_folder(name))
    target = vocabulary.encode(plain(text))
    if not target:
        raise UsageError("the text is empty once everything but letters and apostrophes is left out")
    rate = model.front_end.sample_rate
    seconds = audio.info(path).seconds

    def samples(start: int, stop: int) -> torch.Tensor:
        return torch.from_numpy(
            audio.read(path, sample_rate=rate, offset=start / rate, duration=(stop - start) / rate)
        )

    log_probs = aligning.posteriors(model, samples, round(seconds * rate))
    alignment, _score = aligning.align_recording(log_probs, target, merge_repeats=model.merge_repeats)
    confidence = log_probs.gather(1, torch.tensor(alignment)[:, None])[:, 0].exp().tolist()
    return transcripts.from_alignment(
        alignment,
        confidence,
        vocabulary,
        frame_seconds=model.front_end.frame_seconds,
        seconds=seconds,
        passes=1,
        merge_repeats=model.merge_repeats,
    )


def align_manifests(
    manifests: list[Path], store: Path, name: str, batch_seconds: float, workers: int, frames_cache: str
) -> None:
    """Align a corpus with an expert and store it for training; each rank takes its share."""
    from imputer import aligning, config, files, ranks, training
    from imputer import model as models
    from imputer.recognizer import torch_folder

    files.probe(store)
    model, vocabulary = models.load(torch_folder(name))
    utterances = training.open_utterances([str(path) for path in manifests], "--manifest", strict=False)
    if len(manifests) > 1:
        _refuse_twice(utterances.manifests)
    settings = config.Config(front_end=model.front_end_settings, data=config.Data(frames_cache=frames_cache))
    extract = training.extractor(settings, model.front_end, utterances, augment=False)
    with ranks.joined() as here:
        model.to(here.device)
        done = aligning.align_corpus(
            store, model, vocabulary, utterances, extract, here, batch_seconds=batch_seconds, workers=workers
        )
    for line in done.left_out:
        print(f"left out {line}")
    if here.first:
        print(f"{done.utterances} of {count(len(utterances), 'utterance')} aligned, written to {store}")


def _refuse_twice(manifests: list["Manifest"]) -> None:
    """A store has room for one alignment of an id."""
    places: dict[str, Path] = {}
    for manifest in manifests:
        for utterance in manifest:
            if utterance.id in places:
                raise UsageError(
                    f"--manifest: the id {utterance.id!r} is in {places[utterance.id]} and again in {manifest.path}; "
                    "an alignment file holds each once, so leave one out or give the other its own --store"
                )
            places[utterance.id] = manifest.path
