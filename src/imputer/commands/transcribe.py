"""`imputer transcribe`."""

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from imputer.audio.endings import AUDIO_ENDINGS, is_audio
from imputer.commands import outputs
from imputer.commands.options import FileName, unknown_option
from imputer.commands.outputs import Format
from imputer.errors import ImputerError, UsageError

if TYPE_CHECKING:
    from imputer.recognizer import Recognizer
    from imputer.transcripts import Transcript

ONE_FILE_EACH = ("srt", "vtt", "textgrid")  # formats that cannot be concatenated on standard output


@dataclass(frozen=True, slots=True)
class Source:
    """A recording, its name in messages, and its place below the output folder: as below the folder it came from."""

    name: str
    audio: Any
    place: Path


def transcribe(
    *files: Annotated[FileName, Parameter(allow_leading_hyphen=True)],
    model: FileName = "english",
    format: Format | None = None,
    output: Annotated[FileName | None, Parameter(alias="-o")] = None,
    block_size: int | None = None,
    strategy: str = "block",
    lm: FileName = "default",
    hotwords: FileName = "",
    n_best: int = 1,
    runtime: Literal["torch", "onnx", "onnx-int8"] = "torch",
    device: str = "cpu",
    window: float | None = None,
    overlap: float | None = None,
    show: bool = False,
    figure: Path | None = None,
) -> None:
    """Transcribe audio files, folders of them, or standard input (-).

    - imputer transcribe speech.wav
    - imputer transcribe talk.m4a -o talk.srt
    - imputer transcribe recordings/ --format json -o transcripts/

    A file that cannot be read is named and the others are still transcribed; the exit code is then 1, or 2 if
    there is no such file.

    Parameters
    ----------
    files
        Audio files of any kind, folders to search for them, or - for standard input.
    model
        A model folder, or the name of a shipped model.
    format
        txt: the words. json: words and tokens with times and confidences. srt, vtt: subtitles. ctm: one line per
        word. textgrid: for Praat. If not given, the ending of --output decides, else txt.
    output
        A file for one recording, its format by its ending: talk.srt. Or a folder (a name without an ending, or
        with a / at its end) for one file per recording, in subfolders as they were found. Standard output if not
        given.
    block_size
        Passes of the network: 1 is greedy CTC, more is better up to a point. The model's own if not given.
    strategy
        What each pass commits: block, as in the paper; adaptive takes as few passes as the speech allows; an
        unknown name lists the others.
    lm
        A language model: default is the one that the model has, if it has one; none; the name of another model; or
        a file that `imputer lm build` wrote, or an ARPA file.
    hotwords
        Expected words and phrases, separated by commas, or a file with one per line.
    n_best
        How many transcripts to write for each recording, with scores; they are in the json.
    runtime
        onnx and onnx-int8 need a folder written by `imputer export`.
    device
        A torch device: cpu, cuda, mps.
    window
        Longest piece decoded at once, in seconds; longer recordings are cut and joined. 24 unless the model
        says otherwise.
    overlap
        Overlap of neighbouring pieces, in seconds; 4, but at most a quarter of the window.
    show
        Show the alignment being filled in, pass by pass, and the words; --output writes a file as well.
    figure
        Draw the same as a picture, .svg, .png or .pdf, of one recording.
    """
    from imputer.decoding import Options
    from imputer.display.drawings import PICTURES
    from imputer.languagemodel.hotwords import read
    from imputer.recognizer import Recognizer

    # Report a bad option before anything is read.
    options = Options(
        block_size,
        strategy,
        lm=None if lm == "none" else lm,
        hotwords=tuple(read(hotwords)),
        n_best=n_best,
        trace=show or figure is not None,
    )
    sources = list(_sources(files))
    if figure and (len(sources) > 1 or figure.suffix.lower() not in PICTURES):
        raise UsageError(f"--figure {figure}: a picture is of one recording, and ends in .svg, .png or .pdf")
    if show and output is None and format not in (None, "txt"):
        raise UsageError(f"--show takes up standard output: add --output for the {format}")
    targets, written = _targets(output, sources, format)
    _probe(targets, figure)
    recognizer = Recognizer.from_pretrained(model, runtime=runtime, device=device)
    recognizer.search(options)  # report a bad language model or hotword once, not per recording
    failures: list[ImputerError] = []
    for source, result in _in_order(recognizer, sources, options, window, overlap):
        if isinstance(result, ImputerError):
            print(f"imputer: {result}", file=sys.stderr)
            failures.append(result)
            continue
        size = block_size or recognizer.model.settings.block_size
        if figure:
            _draw(result, size, figure)
        if show:
            _show(result, source.name, size)
        if targets or not show:
            head = f"{source.name}: " if len(sources) > 1 and written == "txt" else ""
            plain = replace(result, trace=None)  # kept for a picture only
            outputs.write(plain, source.name, written, targets.get(source), head=head)
    if failures:
        sys.exit(max(error.exit_code for error in failures))


def _sources(files: tuple[str, ...]) -> Iterator[Source]:
    """Every recording: folders searched, "-" standing for standard input."""
    if not files:
        raise UsageError("nothing to transcribe: give audio files, folders, or - for standard input")
    for file in files:
        if file == "-":
            if sys.stdin.isatty():
                raise UsageError(
                    "standard input is a terminal; pipe audio in: imputer transcribe - < speech.wav"
                )
            yield Source("standard input", sys.stdin.buffer, Path("stdin"))
        elif file.startswith("-"):
            raise UsageError(f"{unknown_option(file, transcribe)} (a file of that name: ./{file})")
        elif Path(file).is_dir():
            found = sorted(path for path in Path(file).rglob("*") if is_audio(path) and not path.is_dir())
            for path in [path for path in found if path.is_fifo()]:  # it may have no writer, ever
                print(f"imputer: {path}: left out, a pipe in a folder of recordings", file=sys.stderr)
                found.remove(path)
            if not found:
                raise UsageError(f"the folder {file} has no audio files ({' '.join(sorted(AUDIO_ENDINGS))})")
            yield from (Source(str(path), path, path.relative_to(file)) for path in found)
        else:
            yield Source(file, file, Path(Path(file).name))


def _targets(
    output: str | None, sources: list[Source], format: Format | None
) -> tuple[dict[Source, Path], Format]:
    """The file of each recording, none for standard output; and their format."""
    if output is None:
        if len(sources) > 1 and format in ONE_FILE_EACH:
            raise UsageError(f"{len(sources)} recordings as {format} need a folder: add --output FOLDER")
        return {}, format or "txt"
    if not output:
        raise UsageError("--output is empty: give a file or a folder, . for this one")
    path = Path(output)
    named_as_folder = path.is_dir() or output.endswith(("/", os.sep))
    if len(sources) > 1 and not named_as_folder and (path.is_file() or outputs.names_format(path)):
        raise UsageError(f"--output {path} is a file, but {len(sources)} recordings need a folder")
    if len(sources) == 1 and not outputs.names_folder(output):
        if isinstance(sources[0].audio, str | Path) and path.is_file() and path.samefile(sources[0].audio):
            raise UsageError(f"--output {path} is the recording itself")
        return {sources[0]: path}, outputs.format_of(path, format, "txt")
    targets = {source: path / outputs.transcript_of(source.place, format or "txt") for source in sources}
    outputs.refuse_same((source.name, target) for source, target in targets.items())
    outputs.refuse_texts(
        {Path(source.audio): target for source, target in targets.items() if _is_file(source)}
    )
    return targets, format or "txt"


def _is_file(source: Source) -> bool:
    return isinstance(source.audio, str | Path)


def _probe(targets: dict[Source, Path], figure: Path | None) -> None:
    """Whether what is asked for can be written; of a folder, its first file."""
    from imputer.support import atomic_files as files

    for path in [*list(targets.values())[:1], *([figure] if figure else [])]:
        files.probe(path)


def _in_order(
    recognizer: "Recognizer",
    sources: list[Source],
    options: Any,
    window: float | None,
    overlap: float | None,
) -> Iterator[tuple[Source, Any]]:
    """(source, transcript or error) in the order asked for, while a bar counts the seconds of audio."""
    from imputer.support import progress

    waiting: dict[int, Any] = {}
    following = 0
    with progress.bar("transcribing", _seconds(sources), unit="s") as advance:
        done = recognizer.each(
            (source.audio for source in sources), options, window=window, overlap=overlap, advance=advance
        )
        for place, result in done:
            waiting[place] = result
            while following in waiting:
                yield sources[following], waiting.pop(following)
                following += 1


def _seconds(sources: list[Source]) -> float | None:
    """Seconds of all audio, for the bar; None if a source cannot be measured before it is read."""
    from imputer import audio

    total = 0.0
    for source in sources:
        if not isinstance(source.audio, str | Path):
            return None
        try:
            total += audio.info(source.audio).seconds
        except ImputerError:
            continue  # reported in its turn
    return round(total) or None


def _draw(transcript: "Transcript", block_size: int, path: Path) -> None:
    from imputer.display import drawings

    title = transcript.text if len(transcript.text) <= 90 else transcript.text[:89] + "…"
    drawings.save(drawings.decoding_path(transcript, block_size=block_size, title=title), path)


def _show(transcript: "Transcript", name: str, block_size: int) -> None:
    from rich.console import Console

    from imputer.display import animation

    console = Console()
    animation.show(transcript, name, block_size=block_size, console=console)
    console.print(transcript.text, markup=False, highlight=False)
