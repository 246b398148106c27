"""The recogniser: audio in, transcript with times out.

Recordings up to the window of the model are decoded whole, in batches of similar length. Longer ones are cut into
windows that meet in a pause, or overlap where there is none, and joined where the two alignments agree. A
window is read from its file when its turn comes, so that hours of audio take the memory of a few windows.
"""

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Literal, cast, overload

import numpy as np
import torch
from torch import Tensor

from imputer import configs, decoding, languagemodel, models, transcripts
from imputer.audio import activity, windows
from imputer.data.recordings import Audio, Recording, Waveform, check_rate, mono, open_recording
from imputer.decoding import Decoded, Network, Options
from imputer.errors import ImputerError, UsageError
from imputer.languagemodel import LanguageModel, fusion, hotwords
from imputer.transcripts import Alternative, Transcript
from imputer.vocabulary import Vocabulary

__all__ = ["Recognizer", "Transcript"]

OVERLAP_SECONDS = 4.0
BATCH_SECONDS, BATCH_ITEMS = 64.0, 16  # of padded audio in a batch, and recordings
AHEAD = 64  # recordings that are open at a time and sorted by length together
ENCODE_SECONDS = 12.0  # of sound and padding in one run of the encoder on a processor: more gain nothing
SIMILAR = 0.95  # of the longest recording in such a run: what the shortest may be
SEARCHES = 16  # prepared searches that are kept: as many lists of hotwords as may be in use at once

_keeping = threading.Lock()  # servers prepare searches in threads

Runtime = Literal["torch", "onnx", "onnx-int8"]
OnSymbols = Callable[[list[list[str]], int], None]


class Recognizer:
    """A model and its vocabulary, ready to transcribe; ``folder`` is where its language model would be."""

    def __init__(
        self, model: Network, vocabulary: Vocabulary, *, device: str = "cpu", folder: Path | None = None
    ) -> None:
        self.model, self.vocabulary, self.device = model, vocabulary, _device(device)
        self.folder = folder
        self._language_models: dict[str, LanguageModel] = {}
        self._searches: dict[Options, decoding.Search] = {}
        if isinstance(model, torch.nn.Module):
            model.to(self.device).eval()

    @classmethod
    def from_pretrained(
        cls, path_or_name: str | Path, *, runtime: Runtime = "torch", device: str = "cpu"
    ) -> "Recognizer":
        """Read a model folder, or a model that comes with the package, by its name."""
        if runtime == "torch":
            folder = models.torch_folder(path_or_name)
            return cls(*models.load(folder), device=device, folder=folder)
        if runtime not in ("onnx", "onnx-int8"):
            raise UsageError(f"unknown runtime {runtime!r}; there are torch, onnx and onnx-int8")
        if device != "cpu":
            raise UsageError(f"runtime {runtime} runs on the CPU, not on device {device!r}")
        from imputer.runtimes import onnx

        folder = models.model_folder(path_or_name)
        return cls(*onnx.load(folder, int8=runtime == "onnx-int8"), folder=folder)

    @property
    def sample_rate(self) -> int:
        """Samples per second that the model takes; other rates are resampled."""
        return self.model.front_end.sample_rate

    @property
    def frame_seconds(self) -> float:
        """Seconds from one frame of an alignment to the next."""
        return self.model.front_end.frame_seconds

    @property
    def window_seconds(self) -> float:
        """The longest piece to decode at once: from the model's configuration, if it is set there."""
        return self.model.settings.window_seconds

    @overload
    def transcribe(  # type: ignore[overload-overlap]  # a path is a sequence of characters; it comes first
        self,
        audio: Audio,
        *,
        sample_rate: int | None = None,
        block_size: int | None = None,
        strategy: str | decoding.Strategy = "block",
        lm: LanguageModel | str | Path | None = "default",
        hotwords: Sequence[str] = (),
        n_best: int = 1,
        trace: bool = False,
        window: float | None = None,
        overlap: float | None = None,
    ) -> Transcript: ...
    @overload
    def transcribe(
        self,
        audio: Sequence[Audio],
        *,
        sample_rate: int | None = None,
        block_size: int | None = None,
        strategy: str | decoding.Strategy = "block",
        lm: LanguageModel | str | Path | None = "default",
        hotwords: Sequence[str] = (),
        n_best: int = 1,
        trace: bool = False,
        window: float | None = None,
        overlap: float | None = None,
    ) -> list[Transcript]: ...
    def transcribe(
        self,
        audio: Audio | Sequence[Audio],
        *,
        sample_rate: int | None = None,
        block_size: int | None = None,
        strategy: str | decoding.Strategy = "block",
        lm: LanguageModel | str | Path | None = "default",
        hotwords: Sequence[str] = (),
        n_best: int = 1,
        trace: bool = False,
        window: float | None = None,
        overlap: float | None = None,
    ) -> Transcript | list[Transcript]:
        """Transcribe a recording, or a sequence of them; the first that fails raises.

        ``audio`` is a path, a binary file object, an utterance of a manifest, or samples at ``sample_rate`` (the
        model's own if not given): (samples,), or (samples, channels) to be averaged. ``block_size`` is the number of
        passes, the model's own if not given. ``lm`` is a language model, its path, "default" for the one that the
        model has, if it has one, or None; ``hotwords`` are words and phrases that are expected; ``n_best`` is the
        number of ``Transcript.alternatives``. ``trace`` keeps the partial alignment of every pass. ``window`` and
        ``overlap`` are seconds, for recordings longer than a window; the model's own if not given.
        """
        several = isinstance(audio, Sequence) and not isinstance(audio, str | bytes)
        sources = cast("list[Audio]", list(audio) if several else [audio])  # type: ignore[arg-type]
        words = cast("tuple[str, ...]", hotwords)  # a text is refused there, any list is taken
        done: dict[int, Transcript] = {}
        for place, result in self.each(
            sources,
            Options(block_size, strategy, lm=lm, hotwords=words, n_best=n_best, trace=trace),
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
        options: Options | None = None,
        *,
        sample_rate: int | None = None,
        window: float | None = None,
        overlap: float | None = None,
        advance: Callable[[float], None] | None = None,
    ) -> Iterator[tuple[int, Transcript | ImputerError]]:
        """Yield (place, transcript), or (place, error), for every recording when it is done.

        Recordings are taken ``AHEAD`` at a time and sorted by length, so the order is close to that of the sources
        but not the same, and the sources may be endless. ``advance(seconds)`` is called after every batch with the
        seconds of audio in it, overlaps counted once.
        """
        frames, hop = self.window_frames(window, overlap)
        check_rate(sample_rate)
        place, waiting = 0, iter(sources)
        while group := list(islice(waiting, AHEAD)):
            with ExitStack() as stack:
                cuts: list[_Cut] = []
                for source in group:
                    try:
                        recording = open_recording(source, stack, sample_rate, self.sample_rate)
                        cuts += self._cuts(place, recording, frames, hop)
                    except ImputerError as error:
                        yield place, error
                    place += 1
                for batch in _batches(cuts):
                    yield from self._decode_cuts(batch, options or Options())
                    if advance:
                        advance(sum(cut.job.recording.seconds / len(cut.job.pieces) for cut in batch))

    def transcribe_batch(
        self,
        waveforms: Sequence[Waveform],
        *,
        block_size: int | None = None,
        strategy: str | decoding.Strategy = "block",
        trace: bool = False,
        on_pass: OnSymbols | None = None,
    ) -> list[Transcript]:
        """Transcribe recordings (samples,) at the model's rate as one batch, each whole.

        ``on_pass(rows, number)`` is called after pass 1, 2, ... with one list of symbols per recording: a piece,
        "_" for blank or "∅" for mask in every frame.
        """
        samples = [mono(waveform) for waveform in waveforms]

        def show(number: int, partial: list[list[int]], confidence: list[list[float]]) -> None:
            if on_pass is not None:
                on_pass([self.symbols(row) for row in partial], number)

        results = self.decode(
            samples, Options(block_size, strategy, trace=trace), on_pass=show if on_pass else None
        )
        whole = []
        for number, (one, result) in enumerate(zip(samples, results, strict=True), 1):
            if isinstance(result, ImputerError):
                raise ImputerError(f"recording {number} of {len(samples)}: {result}")
            whole.append(self.transcript(result, len(one) / self.sample_rate))
        return whole

    def symbols(self, partial: Sequence[int]) -> list[str]:
        """One symbol per frame of a partial alignment: a piece, "_" for blank, "∅" for mask."""
        return transcripts.symbols(partial, self.vocabulary, self.model.blank, self.model.mask)

    def _cuts(self, place: int, recording: Recording, frames: int, hop: int) -> list["_Cut"]:
        def pause(offset: float, seconds: float) -> float | None:
            return activity.pause(recording.samples(offset, seconds), self.sample_rate)

        spans = list(windows.spans_at_pauses(recording.seconds, frames, hop, self.frame_seconds, pause))
        hops = [round((b - a) / self.frame_seconds) for (a, _), (b, _) in pairwise(spans)]
        job = _Job(place, recording, [None] * len(spans), hops)
        return [_Cut(job, number, *span) for number, span in enumerate(spans)]

    def _decode_cuts(
        self, cuts: Sequence["_Cut"], options: Options
    ) -> Iterator[tuple[int, Transcript | ImputerError]]:
        """Decode a batch of windows; yield the recordings that are complete with it, or failed."""
        taken, samples = [], []
        for cut in cuts:
            if cut.job.broken:
                continue
            try:
                samples.append(cut.job.recording.samples(cut.offset, cut.seconds))
                taken.append(cut)
            except ImputerError as error:
                cut.job.broken = True
                yield cut.job.place, error
        for cut, result in zip(taken, self.decode(samples, options), strict=True):
            if isinstance(result, Decoded):
                cut.job.pieces[cut.number] = result
            elif not cut.job.broken:
                cut.job.broken = True
                yield cut.job.place, ImputerError(f"{cut.job.recording.name}: {result}")
        for job in {cut.job.place: cut.job for cut in taken}.values():
            pieces = [piece for piece in job.pieces if piece is not None]
            if not job.broken and len(pieces) == len(job.pieces):
                whole = windows.join(pieces, job.hops, self.model.blank)
                yield job.place, self.transcript(whole, job.recording.seconds)

    @torch.inference_mode()
    def decode(
        self,
        waveforms: Sequence[np.ndarray],
        options: Options | None = None,
        *,
        starts: Sequence[Sequence[int]] | None = None,
        on_pass: decoding.OnPass | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> list[Decoded | ImputerError]:
        """Decode waveforms (samples,) as one batch, each whole: a result or an error per waveform.

        The acoustic part runs once. ``starts`` are the tokens of the first frames of each waveform, where they are
        given. ``on_pass`` and ``cancelled`` are those of ``decoding.decode``; a waveform that failed before the first
        pass has no frames in what ``on_pass`` is given.
        """
        options = options or Options()
        search = self.search(options)
        if search is None:
            options = replace(options, lm=None)  # this model has none
        results: dict[int, Decoded | ImputerError] = {}
        features: dict[int, Tensor] = {}
        for place, waveform in enumerate(waveforms):
            try:
                self._check_length(len(waveform) / self.sample_rate)
                features[place] = self.model.front_end.extract(torch.from_numpy(waveform))
            except ImputerError as error:
                results[place] = error

        def show(number: int, partial: list[list[int]], confidence: list[list[float]]) -> None:
            rows, sure = (
                dict(zip(features, partial, strict=True)),
                dict(zip(features, confidence, strict=True)),
            )
            places = range(len(waveforms))
            on_pass(number, [rows.get(p, []) for p in places], [sure.get(p, []) for p in places])  # type: ignore[misc]

        if features:
            acoustic, frame_lengths = self.encode(list(features.values()))
            found = decoding.decode(
                self.model,
                acoustic,
                frame_lengths,
                options,
                search=search,
                on_pass=show if on_pass else None,
                cancelled=cancelled,
                start=self._start(frame_lengths, [starts[p] for p in features]) if starts else None,
            )
            results |= zip(features, found, strict=True)
        return [results[place] for place in range(len(waveforms))]

    def search(self, options: Options) -> decoding.Search | None:
        """The search over frames that imputation is not sure of; None if the options need none."""
        if not options.searches:
            return None
        found = self._searches.get(options)
        if found is None:
            settings = self.language_model_settings
            lm = self.language_model(options.lm)
            if lm is None and not options.hotwords and options.n_best == 1:
                return None
            expected = None
            if options.hotwords:
                expected = hotwords.hotwords(options.hotwords, self.vocabulary, settings.hotword_bonus)
            found = partial(
                fusion.fuse,
                lm=lm,
                settings=replace(settings, beam=options.beam or settings.beam),
                hotwords=expected,
                n_best=options.n_best,
            )
            with _keeping:
                if len(self._searches) >= SEARCHES:
                    self._searches.pop(next(iter(self._searches)))
                self._searches[options] = found
        return found

    @property
    def language_model_settings(self) -> configs.LanguageModel:
        """How this model decodes with language models and hotwords."""
        return models.language_model_settings(self.folder)

    def text_knowledge(self, options: Options) -> str:
        """A short name for tables: which knowledge of text these options use, "lm", "hotwords", both or neither."""
        known = ("lm", self.language_model(options.lm)), ("hotwords", options.hotwords or None)
        return " + ".join(name for name, value in known if value is not None)

    def language_model(self, lm: LanguageModel | str | Path | None) -> LanguageModel | None:
        """A language model over the pieces of this model: itself, from its file, or from a model folder by name."""
        if lm is None or isinstance(lm, LanguageModel):
            if lm is not None:
                lm.check(self.vocabulary)
            return lm
        if str(lm) == "default":
            path = None if self.folder is None else self.folder / models.LANGUAGE_MODEL
            if path is None or not path.is_file():
                return None
        elif Path(lm).is_file():
            path = Path(lm)
        else:
            path = models.language_model_file(lm)
        if str(path) not in self._language_models:
            if ".arpa" in path.suffixes:
                found = languagemodel.read_arpa(path, self.vocabulary)
            else:
                found = LanguageModel.load(path)
            found.check(self.vocabulary, str(path))
            self._language_models[str(path)] = found
        return self._language_models[str(path)]

    def _start(self, frame_lengths: Tensor, given: Sequence[Sequence[int]]) -> Tensor:
        """(batch, frame) partial alignments whose first frames are given, the others masked."""
        frames = int(frame_lengths.max())
        start = torch.full((len(given), frames), self.model.mask, device=frame_lengths.device)
        for row, tokens, length in zip(start, given, frame_lengths.tolist(), strict=True):
            row[: min(length, len(tokens))] = torch.tensor(tokens[:length], dtype=row.dtype)
        return start

    def encode(self, features: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Recordings as the front end extracts them, (frame, feature) each, as one batch of acoustic frames.

        On a processor only short recordings of similar length are encoded together: a recording of a few seconds
        keeps a core busy, and padding costs as much as sound.
        """
        limit = self.model.front_end.feature_frames(ENCODE_SECONDS) if self.device.type == "cpu" else None
        acoustic: list[Tensor] = [torch.empty(0)] * len(features)
        frame_lengths = torch.zeros(len(features), dtype=torch.long)
        for group in _similar([len(one) for one in features], limit):
            lengths = torch.tensor([len(features[place]) for place in group])
            padded = torch.nn.utils.rnn.pad_sequence([features[place] for place in group], batch_first=True)
            found, counts = self.model.encode(padded.to(self.device), lengths.to(self.device))
            for place, row, count in zip(group, found, counts.tolist(), strict=True):
                acoustic[place], frame_lengths[place] = row[:count], count
        # (batch, frame, width)
        return torch.nn.utils.rnn.pad_sequence(acoustic, batch_first=True), frame_lengths.to(self.device)

    def transcript(self, decoded: Decoded, seconds: float, *, calibrated: bool = True) -> Transcript:
        """The transcript of an alignment, with the times of its words and, calibrated or raw, their confidences."""
        return transcripts.from_alignment(
            decoded.alignment,
            decoded.confidence,
            self.vocabulary,
            frame_seconds=self.frame_seconds,
            seconds=seconds,
            delay=self.model.settings.token_delay,
            passes=decoded.passes,
            blank=self.model.blank,
            merge_repeats=self.model.merge_repeats,
            trace=decoded.trace,
            mask=self.model.mask,
            calibration=self.model.settings.confidence if calibrated else (),
            alternatives=self._alternatives(decoded),
        )

    def _alternatives(self, decoded: Decoded) -> list[Alternative]:
        if decoded.hypotheses is None or len(decoded.hypotheses) < 2:  # one is the transcript itself
            return []
        return [Alternative(self.vocabulary.decode(one.tokens), one.score) for one in decoded.hypotheses]

    def window_frames(self, window: float | None = None, overlap: float | None = None) -> tuple[int, int]:
        """A window and the way to the next one, in frames, from seconds; the model's own if not given."""
        window = self.window_seconds if window is None else window
        overlap = min(OVERLAP_SECONDS, window / 4) if overlap is None else overlap
        return windows.in_frames(window, overlap, self.frame_seconds)

    def cutter(self) -> windows.Cutter:
        """Cuts a recording that comes block by block into windows."""
        per_frame = self.frame_seconds * self.sample_rate
        return windows.Cutter(*(round(frames * per_frame) for frames in self.window_frames()))

    def cut(self, waveform: np.ndarray) -> list[np.ndarray]:
        """The windows of a recording in memory; a short one is its own only window."""
        cutter = self.cutter()
        cutter.add(waveform)
        return list(cutter.rest())

    def join(self, pieces: Sequence[Decoded]) -> Decoded:
        """One result out of those of the windows of ``cut``."""
        return windows.join(pieces, self.window_frames()[1], self.model.blank)

    def block_starts(self, pieces: Sequence[Decoded], options: Options) -> list[int]:
        """Frames of the joined result at which a block begins."""
        hop = self.window_frames()[1]
        return windows.block_starts(pieces, hop, options.passes(self.model), self.model.blank)

    def _check_length(self, seconds: float) -> None:
        if seconds < self.frame_seconds - 1e-9:
            raise ImputerError(
                f"{seconds * 1000:.3g} ms of audio are less than one frame of {self.frame_seconds * 1000:.3g} ms"
            )


def _device(name: str) -> torch.device:
    try:
        torch.zeros(1, device=name).cpu()
        return torch.device(name)
    except (RuntimeError, AssertionError, ImportError) as error:  # what torch raises depends on the device
        reason = str(error).splitlines()[0]
        raise UsageError(f"device {name!r} cannot be used ({reason}); use cpu") from error


@dataclass
class _Job:
    """A recording that is being decoded: its finished windows, and None for the others."""

    place: int
    recording: Recording
    pieces: list[Decoded | None] = field(default_factory=list)
    hops: list[int] = field(default_factory=list)  # frames from each window to the next
    broken: bool = False


@dataclass(frozen=True, slots=True)
class _Cut:
    """A window of a recording."""

    job: _Job
    number: int
    offset: float
    seconds: float


def _similar(lengths: Sequence[int], limit: int | None) -> Iterator[list[int]]:
    """Places of recordings in groups of similar length, each at most ``limit`` frames with its padding."""
    group: list[int] = []
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        longest = lengths[group[0]] if group else 0
        fits = lengths[place] >= SIMILAR * longest and (len(group) + 1) * longest <= (limit or 0)
        if group and limit is not None and not fits:
            yield group
            group = []
        group.append(place)
    if group:
        yield group


def _batches(cuts: Iterable[_Cut]) -> Iterator[list[_Cut]]:
    """Windows of similar length together, the longest first, so that a batch that is too large fails at once."""
    batch: list[_Cut] = []
    longest = 0.0
    for cut in sorted(cuts, key=lambda cut: -_rank(cut)):
        longest = max(longest, cut.seconds)
        if batch and (len(batch) == BATCH_ITEMS or (len(batch) + 1) * longest > BATCH_SECONDS):
            yield batch
            batch, longest = [], cut.seconds
        batch.append(cut)
    if batch:
        yield batch


def _rank(cut: _Cut) -> float:
    """The length of a window; of a recording with several, in steps of ``SIMILAR``.

    Windows of one step keep the order of the recording: many containers are decoded forward only, and each window
    that lies before the last one starts over.
    """
    if len(cut.job.pieces) == 1:
        return cut.seconds
    return SIMILAR ** math.floor(math.log(cut.seconds, SIMILAR))
