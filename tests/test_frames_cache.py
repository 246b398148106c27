"""Frames on disk: what is read is what the encoder gave, also after a kill, a move, a copy; one writer at a time."""

import os
import pickle
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from imputer import audio
from imputer.configs import Augmentation
from imputer.data import batching
from imputer.data.frames_cache import CachedExtract, FramesCache, pack, unpack
from imputer.data.manifest import Manifest, Utterance, write
from imputer.errors import ImputerError, UsageError

HOP = 400


class Averages:
    """A little encoder: means and extremes of every 400 samples. It counts how often it was asked."""

    sample_rate = 16_000
    feature_size = 3
    frame_seconds = HOP / 16_000
    key = "averages-1"
    asked = 0

    def extract(self, waveform):
        self.asked += 1
        blocks = waveform[: len(waveform) // HOP * HOP].reshape(-1, HOP)
        return torch.stack([blocks.mean(1), blocks.amin(1), blocks.amax(1)], 1)

    def feature_frames(self, seconds):
        return round(seconds * 16_000) // HOP


class Others(Averages):
    key = "others-7"


@pytest.fixture
def manifest(tmp_path):
    generator = np.random.default_rng(0)
    utterances = []
    for number in range(6):
        samples = generator.uniform(-0.5, 0.5, 4000 + 1600 * number)
        audio.write(tmp_path / f"{number}.wav", samples)
        utterances.append(Utterance(f"u{number}", f"{tmp_path}/{number}.wav", len(samples) / 16_000, "text"))
    utterances.append(replace(utterances[-1], id="slice", offset=0.1, duration=0.25))
    write(tmp_path / "manifest.jsonl", utterances)
    return Manifest(tmp_path / "manifest.jsonl")


def direct(utterance):
    samples = audio.read(utterance.audio_filepath, offset=utterance.offset, duration=utterance.duration)
    return Averages().extract(torch.from_numpy(samples))


def assert_right(cache, manifest):
    for utterance in manifest:
        torch.testing.assert_close(cache.get(utterance), direct(utterance), rtol=0, atol=4e-3)


@pytest.mark.parametrize("workers", [1, 2])
def test_frames_come_back_as_the_encoder_gave_them(tmp_path, manifest, workers):
    cache = FramesCache(tmp_path / "frames", Averages())
    assert manifest[0] not in cache
    filled = cache.fill(manifest, workers=workers)
    assert (filled.added, filled.present, filled.dropped) == (7, 0, [])
    assert filled.seconds == pytest.approx(manifest.durations.sum())
    assert_right(cache, manifest)
    assert_right(FramesCache(tmp_path / "frames", "averages-1"), manifest)
    assert all(utterance in cache for utterance in manifest) and len(cache) == 7
    assert cache.get(manifest[0]).dtype == torch.float32
    size = sum(len(direct(utterance)) for utterance in manifest) * (2 + 3)
    assert (tmp_path / "frames" / "frames.i8").stat().st_size == size


def test_a_packed_frame_is_right_to_half_a_step_of_its_largest_number():
    random = np.random.default_rng(0)
    frames = (random.standard_normal((500, 288)) * 10 ** random.uniform(-6, 4, (500, 1))).astype(np.float32)
    frames[7] = 0
    error = np.abs(unpack(pack(frames)) - frames).max(1)
    # Half a step, and the rounding of the scale itself to 11 bits.
    assert (error <= np.abs(frames).max(1) * (0.5 / 127 + 2**-11) + 3.2e-5).all()
    assert not unpack(pack(frames))[7].any()


def test_filling_again_asks_the_encoder_nothing_and_writes_nothing(tmp_path, manifest):
    FramesCache(tmp_path / "frames", Averages()).fill(manifest[:3])
    encoder = Averages()
    cache = FramesCache(tmp_path / "frames", encoder)
    filled = cache.fill(manifest)
    assert (filled.added, filled.present, encoder.asked) == (4, 3, 4)
    before = {path.name: path.read_bytes() for path in (tmp_path / "frames").iterdir()}
    assert FramesCache(tmp_path / "frames", encoder).fill(manifest).present == 7
    assert {path.name: path.read_bytes() for path in (tmp_path / "frames").iterdir()} == before


def test_one_recording_twice_is_kept_once(tmp_path, manifest):
    cache = FramesCache(tmp_path / "frames", Averages())
    twice = [manifest[0], replace(manifest[0], id="again")]
    filled = cache.fill(twice)
    assert (filled.added, filled.present) == (1, 1)
    assert torch.equal(cache.get(twice[0]), cache.get(twice[1]))


def test_a_moved_file_is_known_and_a_changed_one_is_not(tmp_path, manifest):
    encoder = Averages()
    cache = FramesCache(tmp_path / "frames", encoder)
    cache.fill(manifest[:1])
    first = manifest[0]
    moved = replace(first, audio_filepath=str(tmp_path / "moved.wav"))
    os.rename(first.audio_filepath, moved.audio_filepath)
    assert moved in cache
    assert cache.fill([moved]).present == 1 and encoder.asked == 1
    audio.write(moved.audio_filepath, np.zeros(round(16_000 * first.duration)))
    assert moved not in cache
    cache.fill([moved])
    assert not cache.get(moved).any()


@pytest.mark.parametrize("lost", [1, 3, 6, 7, 100])
def test_a_torn_end_is_never_seen_and_made_good_by_the_next_writer(tmp_path, manifest, lost):
    folder = tmp_path / "frames"
    FramesCache(folder, Averages()).fill(manifest)
    path = folder / "frames.i8"
    os.truncate(path, path.stat().st_size - lost)
    reader = FramesCache(folder, "averages-1")
    assert manifest[-1] not in reader
    for utterance in manifest:
        if utterance in reader:
            torch.testing.assert_close(reader.get(utterance), direct(utterance), rtol=0, atol=4e-3)
    cache = FramesCache(folder, Averages())
    cache.fill(manifest)
    assert_right(cache, manifest)
    assert_right(FramesCache(folder, "averages-1"), manifest)


def test_a_damaged_index_is_one_line(tmp_path, manifest):
    folder = tmp_path / "frames"
    FramesCache(folder, Averages()).fill(manifest)
    (folder / "index.sqlite").write_bytes(b"no database" * 500)
    with pytest.raises(ImputerError, match=r"index\.sqlite is damaged .* fill it again"):
        FramesCache(folder, "averages-1").get(manifest[0])


def test_the_format_before_is_refused_by_name(tmp_path):
    (tmp_path / "encoder.json").write_text('{"format": 1, "key": "averages-1", "feature_size": 3}')
    with pytest.raises(UsageError, match="has format 1, not 2; remove it"):
        FramesCache(tmp_path, Averages())


def test_frames_written_but_not_yet_told_of_are_cut_off(tmp_path, manifest):
    folder = tmp_path / "frames"
    FramesCache(folder, Averages()).fill(manifest[:2])
    with open(folder / "frames.i8", "ab") as file:
        file.write(b"half a recor")
    cache = FramesCache(folder, Averages())
    cache.fill(manifest)
    assert_right(cache, manifest)


def test_killed_in_the_middle_it_goes_on(tmp_path, manifest):
    folder = tmp_path / "frames"
    program = f"""
import os, signal, sys
sys.path.insert(0, {str(os.path.dirname(__file__))!r})
from test_frames_cache import Averages, FramesCache, Manifest
class Mortal(Averages):
    def extract(self, waveform):
        if self.asked == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().extract(waveform)
FramesCache({str(folder)!r}, Mortal()).fill(Manifest({str(manifest.path)!r}))
"""
    assert subprocess.run([sys.executable, "-c", program]).returncode == -9
    encoder = Averages()
    cache = FramesCache(folder, encoder)
    filled = cache.fill(manifest)
    assert (filled.present, filled.added, encoder.asked) == (4, 3, 3)
    assert_right(cache, manifest)


def test_damaged_frames_are_refused(tmp_path, manifest):
    folder = tmp_path / "frames"
    FramesCache(folder, Averages()).fill(manifest)
    with open(folder / "frames.i8", "r+b") as file:
        file.seek(4)
        file.write(b"\x99")
    with pytest.raises(ImputerError, match=r"u0: its frames in .* are damaged"):
        FramesCache(folder, "averages-1").get(manifest[0])


def test_a_cache_of_another_encoder_is_refused(tmp_path, manifest):
    FramesCache(tmp_path / "frames", Averages()).fill(manifest)
    with pytest.raises(UsageError, match=r"averages-1, but others-7 .*data.frames_cache"):
        FramesCache(tmp_path / "frames", Others())


def test_an_unfilled_folder_says_so(tmp_path, manifest):
    with pytest.raises(UsageError, match="no frames"):
        FramesCache(tmp_path / "nothing", "averages-1")
    with pytest.raises(ImputerError, match="u0: no frames in"):
        FramesCache(tmp_path / "frames", Averages()).get(manifest[0])


def test_a_damaged_description_is_one_line(tmp_path):
    (tmp_path / "encoder.json").write_text("{")
    with pytest.raises(ImputerError, match=r"encoder\.json is damaged"):
        FramesCache(tmp_path, Averages())


def test_the_key_alone_cannot_fill(tmp_path, manifest):
    FramesCache(tmp_path / "frames", Averages()).fill(manifest[:1])
    with pytest.raises(UsageError, match="needs the encoder"):
        FramesCache(tmp_path / "frames", "averages-1").fill(manifest)


def test_unreadable_audio_is_dropped_and_counted_or_raised(tmp_path, manifest):
    bad = tmp_path / "bad.wav"
    bad.write_bytes(b"no sound")
    utterances = [manifest[0], replace(manifest[0], id="bad", audio_filepath=str(bad))]
    utterances.append(replace(manifest[0], id="gone", audio_filepath=str(tmp_path / "gone.wav")))
    filled = FramesCache(tmp_path / "frames", Averages()).fill(utterances)
    assert filled.added == 1
    assert sorted(name for name, _ in filled.dropped) == ["bad", "gone"]
    assert all(str(tmp_path) in reason for _, reason in filled.dropped)
    with pytest.raises(ImputerError, match=r"bad\.wav"):
        FramesCache(tmp_path / "frames", Averages()).fill(utterances[:2], strict=True)


class Broken(Averages):
    def extract(self, waveform):
        return super().extract(waveform) * float("nan")


class Huge(Averages):
    def extract(self, waveform):
        return super().extract(waveform) * 1e9


def test_numbers_out_of_range(tmp_path, manifest):
    filled = FramesCache(tmp_path / "broken", Broken()).fill(manifest[:1])
    assert filled.added == 0 and "not finite" in filled.dropped[0][1]
    cache = FramesCache(tmp_path / "huge", Huge())
    cache.fill(manifest[:1])
    assert torch.isfinite(cache.get(manifest[0])).all()


def test_one_writes_at_a_time_and_others_read_meanwhile(tmp_path, manifest):
    folder = tmp_path / "frames"
    cache = FramesCache(folder, Averages())
    cache.fill(manifest[:2])

    class Nosy(Averages):
        def extract(self, waveform):
            if not self.asked:
                with pytest.raises(UsageError, match=f"process {os.getpid()}"):
                    FramesCache(folder, Averages()).fill(manifest)
                assert FramesCache(folder, Averages()).fill(manifest[:2]).present == 2  # needs no lock
            return super().extract(waveform)

    reader = FramesCache(folder, "averages-1")
    assert manifest[5] not in reader
    FramesCache(folder, Nosy()).fill(manifest)
    assert manifest[5] in reader  # it looks again when it does not find something
    assert_right(reader, manifest)


def test_extract_travels_to_workers_of_a_data_set(tmp_path, manifest):
    cache = FramesCache(tmp_path / "frames", Averages())
    cache.fill(manifest)
    extract = cache.extract
    assert isinstance(extract, CachedExtract)
    extract(manifest[0], torch.Generator())
    copy = pickle.loads(pickle.dumps(extract))
    assert copy._cache is None
    assert torch.equal(copy(manifest[3], torch.Generator()), cache.get(manifest[3]))
    with pytest.raises(TypeError, match="CachedExtract"):
        pickle.dumps(cache)
    from imputer.vocabulary import Vocabulary

    vocabulary = Vocabulary.train(["text"], units="characters")
    dataset = batching.SpeechDataset(manifest, vocabulary, extract)
    (batch,) = batching.batches(dataset, [[0, 3]], workers=1)
    for row, utterance in enumerate((manifest[0], manifest[3])):
        frames = batch.features[row, : batch.feature_lengths[row]]
        assert torch.equal(frames, cache.get(utterance))


def test_opening_and_reading_a_large_cache_keeps_memory_flat(tmp_path):
    """A sparse file as large as the frames of 100 hours: mapped, not read."""
    folder = tmp_path / "frames"
    program = f"""
import resource, sys
sys.path.insert(0, {str(os.path.dirname(__file__))!r})
from test_frames_cache import Averages, FramesCache
import numpy as np, os
class Wide(Averages):
    feature_size = 288
cache = FramesCache({str(folder)!r}, Wide())
rows, count = 15_000_000, 50_000
with open(cache.folder / "frames.i8", "wb") as file:
    file.truncate(rows * 290)
import sqlite3, zlib
keys = np.random.default_rng(0).bytes(16 * count)
checksum = zlib.crc32(bytes(300 * 290))
with sqlite3.connect(cache.folder / "index.sqlite") as index:
    spans = ((keys[16 * i : 16 * i + 16], 300 * i, 300, checksum) for i in range(count))
    index.executemany("insert into recordings values (?, ?, ?, ?)", spans)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
cache = FramesCache({str(folder)!r}, "averages-1")
assert len(cache) == count
for i in range(0, count, 500):
    cache._recording = lambda utterance: keys[16 * i : 16 * i + 16]
    frames = cache.get(None)
    assert frames.shape == (300, 288) and not frames.any()
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
assert grown < 60_000, grown  # kilobytes, of 4.3 million; the pages touched are among them
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_stripes_differ_from_epoch_to_epoch_and_leave_the_cache_alone(tmp_path, manifest):
    cache = FramesCache(tmp_path / "frames", Averages())
    cache.fill(manifest)
    striped = CachedExtract(
        cache.folder, cache.key, Augmentation(spec_augment=True, frequency_mask_banks=1, time_mask_share=0.5)
    )
    whole = direct(manifest[5])
    drawn = [striped(manifest[5], torch.Generator().manual_seed(seed)) for seed in range(8)]
    assert len({tuple(frames.flatten().tolist()) for frames in drawn}) > 4
    for frames in drawn:
        changed = (frames - whole).abs() > 5e-3
        assert torch.allclose(frames[changed], whole.mean(0).expand_as(whole)[changed], atol=5e-3)
    assert torch.allclose(cache.get(manifest[5]), whole, atol=5e-3)
