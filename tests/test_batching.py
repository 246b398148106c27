"""Plans cover everything once, batches are the same however they are made, and bad utterances are named."""

import multiprocessing
import os
import subprocess
import sys
import time
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from imputer.configs import Augmentation
from imputer.data import manifest
from imputer.data.batching import Batch, FilterbankExtract, SpeechDataset, batches, collate, plan_epoch, shard
from imputer.data.manifest import Manifest, Utterance
from imputer.errors import ImputerError
from imputer.features import filterbanks
from imputer.vocabulary import Vocabulary

RATE = 16000
TEXTS = ["one two", "three", "four five six", "seven", "eight nine zero", "one one", "two", "zero"]
VOCABULARY = Vocabulary.train(TEXTS, units="characters")

lengths_lists = st.lists(st.integers(1, 3000), min_size=1, max_size=200)


@settings(max_examples=100, deadline=None)
@given(lengths_lists, st.integers(1, 5000), st.integers(0, 5), st.integers(0, 5))
def test_a_plan_holds_every_index_once_within_the_budget(
    lengths: list[int], budget: int, seed: int, epoch: int
) -> None:
    plan = plan_epoch(lengths, frame_budget=budget, seed=seed, epoch=epoch)
    assert sorted(chain(*plan)) == list(range(len(lengths)))
    for batch in plan:
        assert len(batch) == 1 or max(lengths[i] for i in batch) * len(batch) <= budget
    assert plan == plan_epoch(np.array(lengths), frame_budget=budget, seed=seed, epoch=epoch)


def test_plans_bucket_by_length_and_differ_between_seeds_and_epochs() -> None:
    lengths = np.random.default_rng(0).integers(100, 3000, 2000)
    plans = [
        plan_epoch(lengths, frame_budget=30_000, seed=seed, epoch=epoch)
        for seed, epoch in [(0, 0), (0, 1), (1, 0)]
    ]
    for plan in plans:
        padded = sum(max(lengths[i] for i in batch) * len(batch) for batch in plan)
        assert padded < 1.1 * lengths.sum()
        # Shuffled: the batches do not go from short to long.
        means = [lengths[batch].mean() for batch in plan]
        assert abs(np.corrcoef(means, range(len(means)))[0, 1]) < 0.3
    sets = [{tuple(sorted(batch)) for batch in plan} for plan in plans]
    assert not sets[0] & sets[1] and not sets[0] & sets[2]


@settings(max_examples=100, deadline=None)
@given(lengths_lists, st.integers(100, 5000), st.integers(1, 9))
def test_shards_share_the_plan_without_overlap_or_loss(
    lengths: list[int], budget: int, world_size: int
) -> None:
    plan = plan_epoch(lengths, frame_budget=budget, seed=0, epoch=0)
    shards = [shard(plan, rank, world_size) for rank in range(world_size)]
    assert sorted(chain(*chain(*shards))) == list(range(len(lengths)))
    assert all(batch for part in shards for batch in part)
    counts = {len(part) for part in shards}
    if len(lengths) >= world_size and any(len(batch) > 1 for batch in shard(plan, 0, 1)):
        splittable = sum(len(batch) - 1 for batch in plan) >= -len(plan) % world_size
        assert len(counts) == 1 or not splittable
    assert max(counts) - min(counts) <= 1


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="frame_budget"):
        plan_epoch([1], frame_budget=0, seed=0, epoch=0)
    with pytest.raises(ValueError, match="rank"):
        shard([[0]], 2, 2)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight utterances: six files in several formats and rates, and two slices of one long file."""
    folder = tmp_path_factory.mktemp("corpus")
    random = np.random.default_rng(0)
    utterances = []
    for i, ending in enumerate(["wav", "flac", "ogg", "wav", "mp3", "flac"]):
        seconds, rate = 0.5 + 0.17 * i, 8000 if i == 3 else RATE
        path = folder / f"{i}.{ending}"
        soundfile.write(path, 0.1 * random.standard_normal(round(seconds * rate)), rate)
        utterances.append(Utterance(f"u{i}", str(path), seconds, TEXTS[i], "s"))
    soundfile.write(folder / "long.ogg", 0.1 * random.standard_normal(10 * RATE), RATE)
    for i, offset in ((6, 0.0), (7, 5.5)):
        utterances.append(Utterance(f"u{i}", str(folder / "long.ogg"), 0.8, TEXTS[i], "s", offset))
    manifest.write(folder / "m.jsonl", utterances)
    return folder / "m.jsonl"


def same(left: Batch, right: Batch) -> bool:
    return (
        left.ids == right.ids
        and left.indices == right.indices
        and torch.equal(left.features, right.features)
        and torch.equal(left.feature_lengths, right.feature_lengths)
        and torch.equal(left.targets, right.targets)
        and torch.equal(left.target_lengths, right.target_lengths)
        and left.texts == right.texts
        and left.seconds == right.seconds
        and left.dropped == right.dropped
    )


AUGMENTED = FilterbankExtract(
    augmentation=Augmentation(
        speed=(0.9, 1.0, 1.1), gain_db=(-3, 3), noise=0.5, telephone=0.3, spec_augment=True
    )
)


def test_a_batch_is_its_utterances_padded(corpus: Path) -> None:
    opened = Manifest(corpus, strict=True)
    dataset = SpeechDataset(opened, VOCABULARY, FilterbankExtract())
    (batch,) = batches(dataset, [list(range(8))])
    assert batch.ids == [f"u{i}" for i in range(8)] and batch.indices == list(range(8)) and not batch.dropped
    assert (
        batch.features.shape == (8, max(batch.feature_lengths), 240) and batch.features.dtype == torch.float32
    )
    assert batch.seconds == pytest.approx(opened.durations.sum())
    for row, text in enumerate(TEXTS):
        target = batch.targets[row, : batch.target_lengths[row]].tolist()
        assert VOCABULARY.decode(target) == text
        assert not batch.targets[row, batch.target_lengths[row] :].any()
        assert not batch.features[row, batch.feature_lengths[row] :].any()
        (alone,) = batches(dataset, [[row]])
        assert torch.equal(alone.features[0], batch.features[row, : batch.feature_lengths[row]])
    long, _ = soundfile.read(corpus.parent / "long.ogg", dtype="float32")
    slice_ = torch.from_numpy(long[round(5.5 * RATE) : round(6.3 * RATE)])
    torch.testing.assert_close(batch.features[7, : batch.feature_lengths[7]], filterbanks(slice_))


@pytest.mark.parametrize("extract", [FilterbankExtract(), AUGMENTED], ids=["plain", "augmented"])
def test_workers_and_resumption_change_nothing(corpus: Path, extract: FilterbankExtract) -> None:
    opened = Manifest(corpus)
    dataset = SpeechDataset(opened, VOCABULARY, extract, seed=3, epoch=2)
    plan = plan_epoch(opened.durations * 100, frame_budget=250, seed=3, epoch=2)
    alone = list(batches(dataset, plan))
    assert len(alone) == len(plan) > 3
    assert all(map(same, alone, batches(dataset, plan, workers=2)))
    assert all(map(same, alone[2:], batches(dataset, plan[2:], workers=1)))
    other = SpeechDataset(opened, VOCABULARY, extract, seed=3, epoch=3)
    assert all(map(same, alone, batches(other, plan))) == (extract is not AUGMENTED)


def test_batches_leave_the_global_generator_alone(corpus: Path) -> None:
    dataset = SpeechDataset(Manifest(corpus), VOCABULARY, AUGMENTED)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    for workers in (0, 1):
        assert len(list(batches(dataset, [[0], [1]], workers=workers))) == 2
    assert torch.equal(torch.get_rng_state(), before)


def test_without_a_vocabulary_there_are_no_targets(corpus: Path) -> None:
    (batch,) = batches(SpeechDataset(Manifest(corpus), None, FilterbankExtract()), [[0, 1]])
    assert batch.targets.shape == (2, 0) and batch.texts == TEXTS[:2]


@pytest.mark.parametrize("workers", [0, 1])
def test_what_cannot_be_used_is_dropped_and_named_or_stops(tmp_path: Path, workers: int) -> None:
    noise = 0.1 * np.random.default_rng(0).standard_normal(RATE)
    for name in ("good", "cut", "word"):
        soundfile.write(tmp_path / f"{name}.flac", noise, RATE)
    content = (tmp_path / "cut.flac").read_bytes()
    (tmp_path / "cut.flac").write_bytes(content[: len(content) // 2])
    (tmp_path / "text.flac").write_bytes(b"words")
    noise[77] = np.nan
    soundfile.write(tmp_path / "nan.wav", noise, RATE, subtype="FLOAT")
    names = ["good.flac", "cut.flac", "word.flac", "text.flac", "nan.wav", "none.wav"]
    manifest.write(
        tmp_path / "m.jsonl",
        [
            Utterance(f"id-{name}", str(tmp_path / name), 1.0, "one?" if name == "word.flac" else "one")
            for name in names
        ],
    )
    opened = Manifest(tmp_path / "m.jsonl")
    dataset = SpeechDataset(opened, VOCABULARY, FilterbankExtract())
    first, second = batches(dataset, [[0, 1, 2, 3], [4, 5]], workers=workers)
    assert first.ids == ["id-good.flac"] and len(second) == 0 and second.features.shape[0] == 0
    dropped = first.dropped | second.dropped
    assert list(dropped) == [f"id-{name}" for name in names[1:]]
    for said, one in zip(
        ["cut.flac", "'?'", "text.flac", "nan.wav: sample 77", "none.wav: no such file"],
        dropped.values(),
        strict=True,
    ):
        assert said in one.item and "utterance 'id-" in one.item
    strict = SpeechDataset(opened, VOCABULARY, FilterbankExtract(), strict=True)
    with pytest.raises(ImputerError, match=r"^utterance 'id-cut\.flac': .*cut\.flac.*cut off|damaged"):
        list(batches(strict, [[0], [1], [2]], workers=workers))


def test_all_failed_is_an_empty_batch() -> None:
    batch = collate([])
    assert len(batch) == 0 and batch.features.numel() == 0 and batch.seconds == 0


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs /proc")
def test_memory_is_flat_over_an_epoch(corpus: Path, tmp_path: Path) -> None:
    utterances = list(Manifest(corpus))
    many = [
        Utterance(f"{u.id}-{k}", u.audio_filepath, u.duration, u.text, "", u.offset)
        for k in range(120)
        for u in utterances
    ]
    manifest.write(tmp_path / "many.jsonl", many)
    opened = Manifest(tmp_path / "many.jsonl")
    dataset = SpeechDataset(opened, VOCABULARY, FilterbankExtract())
    plan = plan_epoch(opened.durations * 100, frame_budget=2000, seed=0, epoch=0)
    sizes = [resident() for _ in batches(dataset, plan)]
    fifth = len(sizes) // 5
    assert max(sizes[-fifth:]) - max(sizes[:fifth]) < 8 << 20


def test_workers_leave_signals_to_their_parent(corpus: Path) -> None:
    """Ctrl-C and schedulers signal the whole group: the parent decides when to end, and may still want a batch."""
    before = set(multiprocessing.active_children())
    running = batches(
        SpeechDataset(Manifest(corpus), VOCABULARY, FilterbankExtract()), [[0, 1]] * 9, workers=1
    )
    next(running)
    (worker,) = set(multiprocessing.active_children()) - before
    assert os.getpgid(worker.pid) == worker.pid != os.getpgid(0)
    assert sum(1 for _ in running) == 8


def test_workers_end_with_a_parent_that_is_killed(corpus: Path) -> None:
    program = f"""
import multiprocessing, sys
from imputer.data.batching import FilterbankExtract, SpeechDataset, batches
from imputer.data.manifest import Manifest
from imputer.vocabulary import Vocabulary
manifest = Manifest({str(corpus)!r})
vocabulary = Vocabulary.train([u.text for u in manifest], units="characters")
dataset = SpeechDataset(manifest, vocabulary, FilterbankExtract())
for batch in batches(dataset, [[0, 1, 2, 3]] * 1000, workers=2):
    print(*(child.pid for child in multiprocessing.active_children()), flush=True)
    sys.stdin.readline()
"""
    running = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert running.stdout is not None
    children = [int(pid) for pid in running.stdout.readline().split()]
    assert len(children) == 2
    time.sleep(0.5)  # by now they have filled their pipes and wait
    running.kill()
    running.wait()
    for _ in range(100):
        left = [pid for pid in children if Path(f"/proc/{pid}").exists()]
        if not left:
            break
        time.sleep(0.1)
    assert not left
