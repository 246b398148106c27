"""Pictures of a recording, against the same computed in one piece."""

import base64

import numpy as np
import pytest
import torch

from imputer import features
from imputer.server import pictures

RATE = 16_000


def decoded(part):
    return np.frombuffer(base64.b64decode(part["data"]), np.uint8)


@pytest.mark.parametrize("samples", [1, 200, 400, 12_345, 130 * RATE + 77])
def test_in_pieces_as_in_one(samples):
    """A minute at a time gives the picture of the whole; short and odd lengths have one too."""
    random = np.random.default_rng(samples)
    loudness = np.repeat(random.random(samples // 1000 + 1), 1000)[:samples]
    waveform = (loudness * random.uniform(-1, 1, samples)).astype(np.float32)
    found = pictures.pictures(waveform, RATE)

    banks = features.filterbanks(torch.from_numpy(waveform), RATE)[:, :80].numpy().astype(np.float64)
    banks = np.concatenate([banks, banks[-1:]])[: len(banks) + len(banks) % 2]  # two frames a column
    picture = banks.reshape(-1, 2, 40, 2).mean((1, 3)).T
    low, high = np.percentile(picture, (5, 99.5))
    expected = 255 * np.clip((picture - low) / max(high - low, 1e-3), 0, 1)
    mel = found["mel"]
    assert (mel["bins"], mel["columns"], mel["column_seconds"]) == (*picture.shape, 0.02)
    assert np.abs(decoded(mel).reshape(picture.shape) - expected).max() < 1.1  # bytes are rounded down

    peaks = [np.abs(waveform[n : n + 160]).max() for n in range(0, samples, 160)]
    assert np.array_equal(decoded(found["peaks"]), (255 * np.array(peaks, np.float32)).astype(np.uint8))


def test_long_recordings_get_coarser_columns(monkeypatch):
    monkeypatch.setattr(pictures, "MOST_COLUMNS", 500)
    mel = pictures.pictures(np.zeros(60 * RATE, np.float32), RATE)["mel"]
    assert mel["columns"] <= 500 and mel["columns"] * mel["column_seconds"] == pytest.approx(60, abs=0.2)
    assert len(decoded(mel)) == 40 * mel["columns"]
