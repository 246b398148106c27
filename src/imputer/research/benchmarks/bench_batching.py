"""How fast audio becomes batches, how fast a manifest opens, and whether memory stays flat over an epoch."""

import os
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from imputer import audio
from imputer.audio.augmentation import babble_noise
from imputer.data import manifest
from imputer.data.batching import FilterbankExtract, SpeechDataset, batches, plan_epoch
from imputer.data.manifest import Manifest, Utterance
from imputer.research.measuring import least, one_thread, show

REAL_TIME_TARGET = 250  # seconds of audio per second on one core
OPEN_TARGET = 1.0  # seconds for 100,000 lines
GROWTH_TARGET = 16.0  # megabytes over the later part of an epoch


def run(quick: bool = False) -> dict[str, Any]:
    """Print and return the figures: one thread, interleaved, least CPU time of several."""
    with one_thread(), tempfile.TemporaryDirectory() as folder:
        figures = {
            **_real_time(Path(folder), rounds=2 if quick else 8, files=6 if quick else 24),
            **_opening(Path(folder), lines=20_000 if quick else 100_000),
            **_memory(Path(folder), repeats=40 if quick else 300),
        }
    rows = [
        (
            f"{kind.replace('_', ' ')} to 240 features",
            f"{figures[kind]:,.0f}x real time",
            f">= {REAL_TIME_TARGET}x",
        )
        for kind in ("ogg", "flac", "ogg_slices")
    ]
    opened, grown = f"{figures['open_seconds']:.2f} s", f"{figures['grown_mb']:.1f} MB"
    rows += [
        (f"open {figures['lines']:,} lines", opened, f"< {OPEN_TARGET:g} s"),
        ("plan an epoch of them", f"{figures['plan_seconds']:.2f} s", ""),
        (f"memory grown over {figures['batches']} batches", grown, f"< {GROWTH_TARGET:g} MB"),
    ]
    show("from manifest to batches, one core", ("figure", "value", "target"), rows)
    return figures


def _speechlike(seconds: float, generator: torch.Generator) -> np.ndarray:
    """Noise with the spectrum and the modulation of speech, so that codecs take about as long as on speech."""
    noise = babble_noise(int(seconds * audio.SAMPLE_RATE), audio.SAMPLE_RATE, generator)
    return (0.3 * noise / noise.abs().max()).numpy()


def _real_time(folder: Path, *, rounds: int, files: int) -> dict[str, float]:
    """Seconds of audio made into finished features in a second, for whole files and for slices of one."""
    random, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
    seconds = 8.0
    corpora: dict[str, list[Utterance]] = {"ogg": [], "flac": [], "ogg_slices": []}
    for kind in ("ogg", "flac"):
        for i in range(files):
            path = folder / f"{i}.{kind}"
            audio.write(path, _speechlike(seconds, generator))
            corpora[kind].append(Utterance(f"{i}", str(path), seconds))
    audio.write(folder / "long.ogg", _speechlike(10 * seconds, generator))
    corpora["ogg_slices"] = [
        Utterance(f"{i}", str(folder / "long.ogg"), 5.0, offset=float(random.uniform(0, 10 * seconds - 5)))
        for i in range(files)
    ]

    def read(utterances: list[Utterance]) -> None:
        dataset = SpeechDataset(utterances, None, FilterbankExtract())
        for batch in batches(dataset, [list(range(files))]):
            assert not batch.dropped

    times = least([partial(read, utterances) for utterances in corpora.values()], rounds)
    durations = (sum(u.duration for u in utterances) for utterances in corpora.values())
    return {kind: total / best for kind, total, best in zip(corpora, durations, times, strict=True)}


def _opening(folder: Path, *, lines: int) -> dict[str, float]:
    text = "a sentence of about the length that people say in one breath when they read aloud"
    path = folder / "many.jsonl"
    manifest.write(
        path,
        (Utterance(f"84-121-{i:06d}", f"/corpus/84/{i}.flac", 1 + i % 20, text, "84") for i in range(lines)),
    )
    lengths = Manifest(path).durations * 100
    plan = partial(plan_epoch, lengths, frame_budget=60_000, seed=0, epoch=0)
    opening, planning = least([partial(Manifest, path), plan], 3)
    return {"lines": lines, "open_seconds": opening, "plan_seconds": planning}


def _memory(folder: Path, *, repeats: int) -> dict[str, float]:
    """Resident megabytes of this process, after the first fifth of an epoch and at its end."""
    files = sorted(path for path in folder.glob("*.ogg") if path.stem.isdecimal())[:6]
    path = folder / "epoch.jsonl"
    manifest.write(
        path,
        (Utterance(f"{r}-{file.stem}", str(file), 8.0, "text") for r in range(repeats) for file in files),
    )
    dataset = SpeechDataset(Manifest(path), None, FilterbankExtract())
    plan = plan_epoch(dataset.manifest.durations * 100, frame_budget=8000, seed=0, epoch=0)  # type: ignore[attr-defined]
    sizes = [_resident() for _ in batches(dataset, plan)]
    fifth = max(1, len(sizes) // 5)
    return {"batches": len(plan), "grown_mb": (max(sizes[-fifth:]) - max(sizes[:fifth])) / 2**20}


def _resident() -> int:
    """Bytes in memory now; where the system does not provide that, the peak."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
