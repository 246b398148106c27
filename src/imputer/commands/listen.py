"""`imputer listen`."""

import sys
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from imputer.commands.options import FileName
from imputer.commands.outputs import Format, write
from imputer.errors import ImputerError, UsageError

if TYPE_CHECKING:
    import numpy as np
    from rich.console import Console

    from imputer.recognizer import Recognizer
    from imputer.streaming import Event
    from imputer.transcripts import Word

CHUNK_SECONDS = 0.1
CAPTIONS: dict[str, Format] = {".srt": "srt", ".vtt": "vtt", ".txt": "txt"}


def listen(
    file: Path | None = None,
    /,
    *,
    model: FileName = "english",
    output: Annotated[Path | None, Parameter(alias="-o")] = None,
    times: bool = False,
    input_device: str | None = None,
    fast: bool = False,
) -> None:
    """Transcribe the microphone while you speak, or a file as if it were spoken now.

    - imputer listen
    - imputer listen -o captions.srt
    - imputer listen talk.wav --times

    Settled text is printed as it is; text that may still change is dim. Ctrl-C settles the rest and ends.

    Parameters
    ----------
    file
        A recording to play in real time instead of the microphone.
    model
        A model folder, or the name of a shipped model.
    output
        Captions, written as they settle: .srt, .vtt or .txt.
    times
        Print the time of every settled line.
    input_device
        The microphone, by the name or number that `python -m sounddevice` lists; the default one if not given.
    fast
        With a file: as fast as it can be transcribed, not in real time.
    """
    from imputer.recognizer import Recognizer
    from imputer.support import atomic_files

    if output is not None:
        if output.suffix.lower() not in CAPTIONS:
            raise UsageError(f"--output {output}: captions end in {', '.join(CAPTIONS)}")
        atomic_files.probe(output)
    if file is None and fast:
        raise UsageError("--fast is for a file; the microphone is real time")
    if file is not None and not file.exists():
        raise UsageError(f"{file}: no such file")
    recognizer = Recognizer.from_pretrained(model)
    rate = recognizer.sample_rate
    chunks = _microphone(rate, input_device) if file is None else _played(file, rate, fast=fast)
    _run(recognizer, chunks, output, times)


def _run(recognizer: "Recognizer", chunks: Generator["np.ndarray"], output: Path | None, times: bool) -> None:
    from rich.console import Console

    from imputer.streaming import Stream

    console = Console(highlight=False, soft_wrap=True)
    stream = Stream(recognizer)
    words: list[Word] = []
    display = _Display(console, times)

    def take(events: "list[Event]") -> None:
        for event in events:
            display.show(event)
            if event.kind == "settled":
                words.extend(event.words)
                if output is not None:
                    _write_captions(output, words)

    failure: ImputerError | None = None
    try:
        for chunk in chunks:
            take(stream.feed(chunk))
    except KeyboardInterrupt:
        pass
    except ImputerError as error:  # the microphone was disconnected: settled text is kept
        failure = error
    finally:
        chunks.close()
    take(stream.finish())
    display.end()
    if output is not None:
        _write_captions(output, words)
        print(f"written to {output}", file=sys.stderr)
    if failure is not None:
        raise failure


class _Display:
    """Settled words stay; the partial line is written over. Without a terminal only settled text is printed."""

    def __init__(self, console: "Console", times: bool) -> None:
        self.console, self.times = console, times
        self.live = console.is_terminal
        self.line = ""  # settled words of the current line
        self.start = 0.0

    def show(self, event: "Event") -> None:
        if event.kind == "silence":
            self._break()
        elif event.kind == "settled":
            if not self.line:
                self.start = event.words[0].start
            self.line = f"{self.line} {event.text}".strip()
            if len(self.line) > 72:
                self._break()
            self._draw("")
        elif event.kind == "partial":
            self._draw(event.text)

    def end(self) -> None:
        self._break()

    def _break(self) -> None:
        if self.line:
            stamp = f"{_clock(self.start)}  " if self.times else ""
            self._print(f"\r\x1b[K{stamp}{self.line}\n" if self.live else f"{stamp}{self.line}\n")
        elif self.live:
            self._print("\r\x1b[K")
        self.line = ""

    def _draw(self, partial: str) -> None:
        if self.live:
            room = max(10, self.console.width - 1)
            shown = f"{self.line} {partial}".strip()[-room:]
            dim = min(len(partial), len(shown))
            settled, open_part = shown[: len(shown) - dim], shown[len(shown) - dim :]
            self._print(f"\r\x1b[K{settled}\x1b[2m{open_part}\x1b[0m")

    def _print(self, text: str) -> None:
        self.console.file.write(text)
        self.console.file.flush()


def _clock(seconds: float) -> str:
    minutes, rest = divmod(seconds, 60)
    return f"{int(minutes):02d}:{rest:04.1f}"


def _write_captions(path: Path, words: list["Word"]) -> None:
    """The captions so far, whole or not at all."""
    from imputer.transcripts import from_words

    write(from_words(words), path.stem, CAPTIONS[path.suffix.lower()], path)


def _played(path: Path, rate: int, *, fast: bool) -> Generator["np.ndarray"]:
    """A file in chunks, in real time."""
    import time

    from imputer import audio

    seconds = audio.info(path).seconds
    started, position = time.monotonic(), 0.0
    while position < seconds - 1e-3:
        length = min(CHUNK_SECONDS, seconds - position)
        yield audio.read(path, sample_rate=rate, offset=position, duration=length)
        position += length
        if not fast:
            time.sleep(max(0.0, started + position - time.monotonic()))


def _microphone(rate: int, device: str | None) -> Generator["np.ndarray"]:
    """Chunks of the microphone, until interrupted."""
    try:
        import sounddevice
    except (ImportError, OSError) as error:  # OSError: the PortAudio library is missing
        raise UsageError(
            f"the microphone needs sounddevice ({error}): pip install 'imputer-asr[listen]', and on Linux the "
            "library libportaudio2; `imputer listen FILE` works without"
        ) from error
    chosen = int(device) if device is not None and device.isdigit() else device
    try:
        source = sounddevice.InputStream(
            samplerate=rate,
            channels=1,
            dtype="float32",
            device=chosen,
            blocksize=round(CHUNK_SECONDS * rate),
        )
    except (sounddevice.PortAudioError, ValueError) as error:
        raise UsageError(f"cannot open the microphone {device or '(default)'}: {error}") from error
    with source:
        print("listening; Ctrl-C ends", file=sys.stderr)
        while True:
            try:
                chunk, overflowed = source.read(round(CHUNK_SECONDS * rate))
            except sounddevice.PortAudioError as error:
                raise ImputerError(f"the microphone stopped: {error}") from error
            if overflowed:
                print("imputer: samples were lost: the machine is too busy", file=sys.stderr)
            yield chunk[:, 0].copy()
