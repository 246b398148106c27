"""A masking policy, strategy, corpus or front end is one function and one line in a dict: each is added and used."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from imputer import configs
from imputer.corpora import CORPORA, Found, Options
from imputer.data.batching import Extract, read_utterance
from imputer.data.manifest import Manifest, Utterance
from imputer.frontends import FRONT_ENDS
from imputer.masking import POLICIES
from imputer.strategies import STRATEGIES, Pass
from trainings import imputer


def train(corpus: str, folder: Path, *options: str) -> Path:
    """Two steps on the language of tones."""
    words = ("--config", "tones", "--data.train", corpus, "--training.steps", "2", "--output", str(folder))
    imputer("train", *words, *options)
    return folder / "model"


def test_a_masking_policy(
    corpus: str, expert: Path, stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = []

    def first_half(
        frame_lengths: Tensor, *, block_size: int, generator: torch.Generator, width: int | None = None
    ) -> Tensor:
        drawn.append(frame_lengths)
        frames = torch.arange(width or int(frame_lengths.max()))
        return frames < frame_lengths[:, None] // 2

    monkeypatch.setitem(POLICIES, "first_half", first_half)
    assert " | first_half)" in imputer("train", "--config", "tones", "--list-options").stdout
    tokenizer = ("--vocabulary.tokenizer", str(expert / "tokenizer.model"))
    roll_in = ("--rollin.masking", "first_half", "--rollin.alignments", str(stored))
    train(corpus, tmp_path, "--training.objective", "dynamic_programming", *roll_in, *tokenizer)
    assert drawn


def test_a_strategy(corpus: str, expert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def everything(now: Pass) -> Tensor:
        return now.masked

    monkeypatch.setitem(STRATEGIES, "everything", everything)
    audio = next(iter(Manifest(corpus))).audio_filepath
    words = ("transcribe", audio, "--model", str(expert), "--block-size", "8", "--format", "json")
    assert '"passes": 1,' in imputer(*words, "--strategy", "everything").stdout


def test_a_corpus(corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def again(source: Path, options: Options) -> Iterator[Found]:
        for utterance in Manifest(source):
            yield Found(utterance)

    monkeypatch.setitem(CORPORA, "again", again)
    imputer("prepare", "again", corpus, "--output", str(tmp_path / "copy.jsonl"))
    assert [one.id for one in Manifest(tmp_path / "copy.jsonl")] == [one.id for one in Manifest(corpus)]


class Spectrum(nn.Module):
    """A front end in a few lines: the spectrum of every 40 ms."""

    augments_sound = False
    sample_rate, feature_size, frame_seconds = 16_000, 321, 0.04

    def __init__(self, settings: configs.FrontEnd, width: int) -> None:
        super().__init__()
        self.project = nn.Linear(self.feature_size, width)

    def extract(self, waveform: Tensor) -> Tensor:
        return torch.fft.rfft(waveform[: len(waveform) // 640 * 640].view(-1, 640)).abs()

    def feature_frames(self, seconds: float) -> int:
        return max(1, int(seconds / self.frame_seconds))

    def reader(
        self, data: configs.Data, augmentation: configs.Augmentation, utterances: Sequence[Utterance]
    ) -> Extract:
        return lambda utterance, generator: self.extract(torch.from_numpy(read_utterance(utterance)))

    def forward(self, inputs: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        return self.project(inputs), lengths


def test_a_front_end(corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FRONT_ENDS, "spectrum", f"{__name__}:Spectrum")
    assert " | spectrum)" in imputer("train", "--config", "tones", "--list-options").stdout
    model = train(corpus, tmp_path, "--front_end.name", "spectrum", "--data.workers", "0")
    audio = next(iter(Manifest(corpus))).audio_filepath
    imputer("transcribe", audio, "--model", str(model))
