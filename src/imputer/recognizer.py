"""The recogniser: audio in, transcript with times out.

Recordings up to the window of the model are decoded whole, in batches of like length. Longer ones are cut into
overlapping windows, decoded like any other recording, and joined in a pause where the two alignments agree. A
window is read from its file when its turn comes, so that hours of audio take the memory of a few windows.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal, Protocol, overload

import numpy as np
import torch
from torch import Tensor

from imputer import configs, decoding, models, transcripts
from imputer.audio import windows
from imputer.audio.windows import Piece
from imputer.data.recordings import Audio, Recording, Waveform, mono, open_recording
from imputer.errors import ImputerError, UsageError
from imputer.transcripts import Transcript
from imputer.vocabulary import Vocabulary

__all__ = ["Recognizer", "Transcript"]

OVERLAP_SECONDS = 4.0
BATCH_SECONDS, BATCH_ITEMS = 64.0, 16  # of padded audio in a batch, and recordings
AHEAD = 256  # recordings that are sorted by length together

Runtime = Literal["torch", "onnx", "onnx-int8"]
OnPass = Callable[[list[list[str]], int], None]


class Network(Protocol):
    """What decoding needs of a model, however it is run."""

    vocabulary_size: int
    blank: int
    mask: int
    merge_repeats: bool
    settings: configs.Model
    front_end: Any

    def encode(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Acoustic frames, once an utterance."""

    def impute(self, acoustic: Tensor, frame_lengths: Tensor, partial: Tensor) -> Tensor:
        """log p(a_i | a~, x), once a pass."""


@dataclass(frozen=True, slots=True)
class Manner:
    """How to decode."""

    block_size: int | None = None  # None: the model's own
    strategy: str | decoding.Strategy = "block"
    trace: bool = False
    on_pass: OnPass | None = None

    def __post_init__(self) -> None:
        """Refuse before any audio is read what decoding would refuse."""
        size = 1 if self.block_size is None else self.block_size
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise UsageError(f"block size must be a whole number of at least 1, got {size!r}")
        if isinstance(self.strategy, str) and self.strategy not in decoding.STRATEGIES:
            known = ", ".join(decoding.STRATEGIES)
            raise UsageError(f"unknown strategy {self.strategy!r}; known are {known}")


class Recognizer:
    """A model and its vocabulary, ready to transcribe."""

    def __init__(self, model: Network, vocabulary: Vocabulary, *, device: str = "cpu") -> None:
        self.model, self.vocabulary, self.device = model, vocabulary, _device(device)
        if isinstance(model, torch.nn.Module):
            model.to(self.device).eval()

    @classmethod
    def from_pretrained(
        cls, path_or_name: str | Path, *, runtime: Runtime = "torch", device: str = "cpu"
    ) -> "Recognizer":
        """Read a model folder, or a model that comes with the package, by its name."""
        if runtime == "torch":
            return cls(*models.load(models.torch_folder(path_or_name)), device=device)
        if runtime not in ("onnx", "onnx-int8"):
            raise UsageError(f"runtime {runtime!r} is none of torch, onnx, onnx-int8")
        if device != "cpu":
            raise UsageError(f"runtime {runtime} runs on the cpu, not on device {device!r}")
        from imputer.runtimes import onnx

        return cls(*onnx.load(models.model_folder(path_or_name), int8=runtime == "onnx-int8"))

    @property
    def sample_rate(self) -> int:
        """Samples a second that the model listens to; other rates are resampled."""
        return self.model.front_end.sample_rate

    @property
    def frame_seconds(self) -> float:
        """Seconds from one frame of an alignment to the next."""
        return self.model.front_end.frame_seconds

    @property
    def window_seconds(self) -> float:
        """The longest piece to decode at once: what the model says it was trained on, if it says so."""
        return self.model.settings.window_seconds

    @overload
    def transcribe(
        self,
        audio: Audio,
        *,
        sample_rate: int | None = None,
        block_size: int | None = None,
        strategy: str | decoding.Strategy = "block",
        trace: bool = False,
        window: float | None = None,
        overlap: float | None = None,
    ) -> Transcript: ...
    @overload
    def transcribe(
        self,
        audio: list[Audio],
        *,
        sample_rate: int | None = None,
        block_size: int | None = None,
        strategy: str | decoding.Strategy = "block",
        trace: bool = False,
        window: float | None = None,
        overlap: float | None = None,
    ) -> list[Transcript]: ...
    def transcribe(
        self,
        audio: Audio | list[Audio],
        *,
        sample_rate: int | None = None,
        block_size: int | None = None,
        strategy: str | decoding.Strategy = "block",
        trace: bool = False,
        window: float | None = None,
        overlap: float | None = None,
    ) -> Transcript | list[Transcript]:
        """Transcribe a recording, or a list of them; the first that fails raises.

        ``audio`` is a path, a binary file object, an utterance of a manifest, or samples at ``sample_rate`` (the
        model's own if not given): (samples,), or (samples, channels) to be averaged. ``block_size`` is the
        number of passes, the model's own if not given. ``trace`` keeps the partial alignment of every pass.
        ``window`` and ``overlap`` are seconds, for recordings longer than a window; the model's own if not given.
        """
        several = isinstance(audio, list | tuple)
        sources: list[Audio] = list(audio) if isinstance(audio, list | tuple) else [audio]
        done: dict[int, Transcript] = {}
        for place, result in self.each(
            sources,
            Manner(block_size, strategy, trace),
            sample_rate=sample_rate,
            window=window,
            overlap=overlap,
        ):
            if isinstance(result, ImputerError):
                raise result
            done[place] = result
        return [done[place] for place in range(len(sources))] if several else done[0]

    def each(
        self,
        sources: Iterable[Audio],
        manner: Manner | None = None,
        *,
        sample_rate: int | None = None,
        window: float | None = None,
        overlap: float | None = None,
        heard: Callable[[float], None] | None = None,
    ) -> Iterator[tuple[int, Transcript | ImputerError]]:
        """Yield (place, transcript), or (place, what is wrong with it), for every recording when it is done.

        Recordings are taken ``AHEAD`` at a time and sorted by length, so the order is not that of the sources,
        but not far from it either, and the sources may be without end. ``heard(seconds)`` is told of every batch.
        """
        window = self.window_seconds if window is None else window
        overlap = min(OVERLAP_SECONDS, window / 4) if overlap is None else overlap
        frames, hop = windows.in_frames(window, overlap, self.frame_seconds)
        if sample_rate is not None and not 0 < sample_rate < math.inf:
            raise UsageError(f"sample_rate is samples a second, more than 0, got {sample_rate}")
        place, waiting = 0, iter(sources)
        while group := list(islice(waiting, AHEAD)):
            with ExitStack() as stack:
                cuts: list[_Cut] = []
                for source in group:
                    try:
                        recording = open_recording(source, stack, sample_rate, self.sample_rate)
                        self._check_length(recording.seconds, recording.name)
                        cuts += self._cuts(place, recording, frames, hop)
                    except ImputerError as error:
                        yield place, error
                    place += 1
                for batch in _batches(cuts):
                    yield from self._decode_cuts(batch, hop, manner or Manner())
                    if heard:
                        heard(sum(cut.seconds for cut in batch))

    def transcribe_batch(
        self,
        waveforms: Sequence[Waveform],
        *,
        block_size: int | None = None,
        strategy: str | decoding.Strategy = "block",
        trace: bool = False,
        on_pass: OnPass | None = None,
    ) -> list[Transcript]:
        """Transcribe recordings (samples,) at the model's rate as one batch, each whole.

        ``on_pass(rows, number)`` is called after pass 1, 2, ... with one list of symbols a recording: a piece,
        "_" for blank or "∅" for mask in every frame.
        """
        manner = Manner(block_size, strategy, trace, on_pass)
        samples = [mono(waveform) for waveform in waveforms]
        lengths = [len(one) / self.sample_rate for one in samples]
        for number, seconds in enumerate(lengths, 1):
            self._check_length(seconds, f"recording {number} of {len(samples)}")
        pieces = self._decode(samples, manner)
        return [self.transcript(piece, seconds) for piece, seconds in zip(pieces, lengths, strict=True)]

    def symbols(self, partial: Sequence[int]) -> list[str]:
        """One symbol a frame of a partial alignment: a piece, "_" for blank, "∅" for mask."""
        return transcripts.symbols(partial, self.vocabulary, self.model.blank, self.model.mask)

    def _cuts(self, place: int, recording: Recording, frames: int, hop: int) -> list["_Cut"]:
        spans = list(windows.spans(recording.seconds, frames, hop, self.frame_seconds))
        job = _Job(place, recording, [None] * len(spans))
        return [_Cut(job, number, *span) for number, span in enumerate(spans)]

    def _decode_cuts(
        self, cuts: Sequence["_Cut"], hop: int, manner: Manner
    ) -> Iterator[tuple[int, Transcript | ImputerError]]:
        """Decode a batch of windows; yield the recordings that are complete with it, or broken."""
        heard, samples = [], []
        for cut in cuts:
            if cut.job.broken:
                continue
            try:
                samples.append(cut.job.recording.samples(cut.offset, cut.seconds))
                heard.append(cut)
            except ImputerError as error:
                cut.job.broken = True
                yield cut.job.place, error
        for cut, piece in zip(heard, self._decode(samples, manner), strict=True):
            cut.job.pieces[cut.number] = piece
        for job in {cut.job.place: cut.job for cut in heard}.values():
            pieces = [piece for piece in job.pieces if piece is not None]
            if not job.broken and len(pieces) == len(job.pieces):
                whole = windows.join(pieces, hop, self.model.blank)
                yield job.place, self.transcript(whole, job.recording.seconds)

    @torch.inference_mode()
    def _decode(self, samples: Sequence[np.ndarray], manner: Manner) -> list[Piece]:
        """The two hops of decoding, batch -> impute; the acoustic part runs once."""
        if not samples:
            return []
        model, on_pass = self.model, manner.on_pass
        acoustic, frame_lengths = self.encode(
            [model.front_end.extract(torch.from_numpy(one)) for one in samples]
        )
        counts: list[int] = frame_lengths.tolist()

        def show(partial: Tensor, number: int) -> None:
            rows = zip(partial.tolist(), counts, strict=True)
            on_pass([self.symbols(row[:n]) for row, n in rows], number)  # type: ignore[misc]

        result = decoding.impute(
            step_over(model, acoustic, frame_lengths),
            frame_lengths,
            block_size=manner.block_size or model.settings.block_size,
            strategy=manner.strategy,
            mask=model.mask,
            blank=model.blank,
            trace=manner.trace,
            on_pass=show if on_pass else None,
        )
        return pieces(result, counts)

    def encode(self, features: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Recordings as the front end extracts them, (frame, feature) each, as one batch of acoustic frames."""
        lengths = torch.tensor([len(one) for one in features])
        padded = torch.nn.utils.rnn.pad_sequence(list(features), batch_first=True)  # (batch, frame, feature)
        acoustic, frame_lengths = self.model.encode(padded.to(self.device), lengths.to(self.device))
        return acoustic[:, : int(frame_lengths.max())], frame_lengths

    def transcript(self, piece: Piece, seconds: float) -> Transcript:
        """What an alignment of a recording of so many seconds spells, with the times and confidences of its words."""
        return transcripts.from_alignment(
            piece.alignment,
            piece.confidence,
            self.vocabulary,
            frame_seconds=self.frame_seconds,
            seconds=seconds,
            passes=piece.passes,
            blank=self.model.blank,
            merge_repeats=self.model.merge_repeats,
            trace=piece.trace,
            mask=self.model.mask,
        )

    def _check_length(self, seconds: float, name: str) -> None:
        if seconds < self.frame_seconds - 1e-9:
            raise ImputerError(
                f"{name}: {seconds * 1000:.3g} ms of sound are less than one frame of "
                f"{self.frame_seconds * 1000:.3g} ms"
            )


def _device(name: str) -> torch.device:
    try:
        torch.zeros(1, device=name).cpu()
        return torch.device(name)
    except (RuntimeError, AssertionError, ImportError) as error:  # what torch raises hangs on the device
        reason = str(error).splitlines()[0]
        raise UsageError(f"device {name!r} cannot be used here ({reason}); cpu always can") from error


def step_over(model: Network, acoustic: Tensor, frame_lengths: Tensor) -> decoding.Step:
    """A pass of the network over the items that are not done yet; the others are given no thought."""

    def step(partial: Tensor) -> Tensor:
        left = (partial == model.mask).any(1)  # (batch,)
        if bool(left.all()):
            return model.impute(acoustic, frame_lengths, partial)
        frames = int(frame_lengths[left].max())
        found = model.impute(acoustic[left, :frames], frame_lengths[left], partial[left, :frames])
        log_probs = found.new_zeros((*partial.shape, found.shape[2]))
        log_probs[left, :frames] = found
        return log_probs

    return step


@dataclass
class _Job:
    """A recording on its way through: the windows that are done, and None for those that are not."""

    place: int
    recording: Recording
    pieces: list[Piece | None] = field(default_factory=list)
    broken: bool = False


@dataclass(frozen=True, slots=True)
class _Cut:
    """A window of a recording."""

    job: _Job
    number: int
    offset: float
    seconds: float


def _batches(cuts: Iterable[_Cut]) -> Iterator[list[_Cut]]:
    """Windows of like length together, the longest first, so that a batch too large shows at once."""
    batch: list[_Cut] = []
    for cut in sorted(cuts, key=lambda cut: -cut.seconds):
        if batch and (len(batch) == BATCH_ITEMS or (len(batch) + 1) * batch[0].seconds > BATCH_SECONDS):
            yield batch
            batch = []
        batch.append(cut)
    if batch:
        yield batch


def pieces(result: decoding.Imputation, counts: Sequence[int]) -> list[Piece]:
    """An imputation of a batch as one piece an item, without the padding."""
    alignments, confidences = result.alignment.tolist(), result.confidence.tolist()
    passes = result.passes_per_item.tolist()
    history = None if result.trace is None else [row.tolist() for row in result.trace]  # (pass, batch, frame)
    return [
        Piece(
            alignments[item][:n],
            confidences[item][:n],
            passes[item],
            None if history is None else [row[item][:n] for row in history[: passes[item]]],
        )
        for item, n in enumerate(counts)
    ]
