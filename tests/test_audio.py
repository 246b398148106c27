"""Audio in every container, whole and in slices, and everything that can be wrong with a file."""

import io
import os
import threading
import tracemalloc
import warnings
from pathlib import Path

import av
import numpy as np
import pytest
import soundfile

from imputer import audio
from imputer.audio import reader
from imputer.errors import ImputerError, UsageError

RATE = 16000

# Lossless containers give back the 16-bit samples; the rest is compared by correlation.
LOSSLESS = ("WAV", "WAVEX", "FLAC", "AIFF", "AU", "CAF", "W64", "RF64", "NIST", "VOC", "IRCAM", "PVF", "PAF")
OTHERS = ("OGG", "MP3", "MAT4", "MAT5", "HTK", "SVX", "AVR", "SDS")
# libsndfile tells nothing of a missing end for the other containers.
SHOWS_ITS_END = (
    "WAV",
    "WAVEX",
    "FLAC",
    "AIFF",
    "AU",
    "CAF",
    "W64",
    "RF64",
    "NIST",
    "OGG",
    "MP3",
    "MAT4",
    "SVX",
)


def speechlike(seconds: float = 2.0, rate: int = RATE) -> np.ndarray:
    time = np.arange(round(seconds * rate)) / rate
    wave = np.sin(2 * np.pi * (200 * time + 400 * time**2)) * (0.3 + 0.2 * np.sin(2 * np.pi * 3 * time))
    return wave.astype(np.float32)


def written(path: Path, samples: np.ndarray, kind: str, rate: int = RATE, **options: str) -> Path:
    soundfile.write(path, samples, rate, format=kind, **options)
    return path


@pytest.mark.parametrize("kind", LOSSLESS + OTHERS)
def test_every_container(tmp_path: Path, kind: str) -> None:
    samples = speechlike()
    path = written(tmp_path / f"a.{kind.lower()}", samples, kind)
    got = audio.read(path)
    assert got.dtype == np.float32 and got.shape == samples.shape
    if kind in LOSSLESS:
        np.testing.assert_allclose(got, samples, atol=1.1 / 32768)
    else:
        assert np.corrcoef(got, samples)[0, 1] > 0.99
    described = audio.info(path, check=True)
    assert (described.seconds, described.sample_rate, described.channels) == (2.0, RATE, 1)
    with open(path, "rb") as stream:
        np.testing.assert_array_equal(audio.read(io.BytesIO(stream.read())), got)


@pytest.mark.parametrize("kind", ["WAV", "FLAC", "OGG", "MP3", "NIST"])
def test_slices_equal_the_whole(tmp_path: Path, kind: str) -> None:
    path = written(tmp_path / f"a.{kind.lower()}", speechlike(6.0), kind)
    whole = audio.read(path)
    for offset, duration in ((3.1, 1.3), (0.0, 0.5), (5.5, 0.5), (1.25, 2.0), (4.0, None)):
        start = round(offset * RATE)
        end = len(whole) if duration is None else round((offset + duration) * RATE)
        got = audio.read(path, offset=offset, duration=duration)
        if kind == "MP3":  # decoding that starts in the middle settles within a few thousandths
            np.testing.assert_allclose(got, whole[start:end], atol=0.02)
        else:
            np.testing.assert_array_equal(got, whole[start:end])


@pytest.mark.parametrize(
    "subtype", ["PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW"]
)
def test_sample_types(tmp_path: Path, subtype: str) -> None:
    samples = speechlike()
    got = audio.read(written(tmp_path / "a.wav", samples, "WAV", subtype=subtype))
    np.testing.assert_allclose(got, samples, atol=0.05 if subtype in ("PCM_U8", "ULAW", "ALAW") else 1e-4)


def test_opus(tmp_path: Path) -> None:
    path = written(tmp_path / "a.opus", speechlike(2.0, 48000), "OGG", 48000, subtype="OPUS")
    assert np.corrcoef(audio.read(path)[: 2 * RATE], speechlike())[0, 1] > 0.99


@pytest.mark.parametrize("rate", [8000, 22050, 44100, 48000, 96000])
def test_other_rates_are_resampled(tmp_path: Path, rate: int) -> None:
    got = audio.read(written(tmp_path / "a.wav", speechlike(2.0, rate), "WAV", rate))
    assert abs(len(got) - 2 * RATE) <= 1
    np.testing.assert_allclose(got[800:-800], speechlike()[800 : len(got) - 800], atol=0.01)
    assert len(audio.read(tmp_path / "a.wav", sample_rate=8000)) == 16000


def test_channels_are_averaged(tmp_path: Path) -> None:
    left, right = speechlike(), 0.1 * np.ones(2 * RATE, np.float32)
    path = written(tmp_path / "a.wav", np.stack([left, right], 1), "WAV", subtype="FLOAT")
    np.testing.assert_allclose(audio.read(path), (left + right) / 2, atol=1e-6)
    assert audio.info(path).channels == 2


@pytest.mark.parametrize("kind", SHOWS_ITS_END)
@pytest.mark.parametrize("kept", [0.5, 0.97])
def test_a_file_that_is_cut_off_is_named(tmp_path: Path, kind: str, kept: float) -> None:
    path = written(tmp_path / "a.audio", speechlike(20.0), kind)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * kept)])
    with pytest.raises(ImputerError, match=r"a\.audio"):
        audio.read(path)
    with pytest.raises(ImputerError, match=r"a\.audio"):
        audio.info(path, check=True)


def test_a_stream_of_text_is_told_to_be_opened_as_bytes(tmp_path: Path) -> None:
    path = written(tmp_path / "a.wav", speechlike(), "WAV")
    with (
        path.open(encoding="latin-1") as text,
        pytest.raises(UsageError, match=r"a\.wav: audio is bytes.*mode 'rb'"),
    ):
        audio.read(text)
    with pytest.raises(UsageError, match="the audio stream: audio is bytes"):
        audio.read(io.StringIO("RIFF"))


def test_a_stream_header_without_length_is_no_damage(tmp_path: Path) -> None:
    path = written(tmp_path / "a.wav", speechlike(), "WAV")
    content = bytearray(path.read_bytes())
    at = content.index(b"data") + 4
    content[4:8] = content[at : at + 4] = b"\xff\xff\xff\xff"
    path.write_bytes(content)
    assert len(audio.read(path)) == 2 * RATE


def test_a_wrong_size_around_whole_samples_is_no_damage(tmp_path: Path) -> None:
    path = written(tmp_path / "a.wav", speechlike(), "WAV")
    content = bytearray(path.read_bytes())
    content[4:8] = (len(content) + 500).to_bytes(4, "little")
    path.write_bytes(content)
    assert len(audio.read(path)) == 2 * RATE


def test_a_flac_without_its_length_is_read(tmp_path: Path) -> None:
    path = written(tmp_path / "a.flac", speechlike(), "FLAC")
    content = bytearray(path.read_bytes())
    content[21] &= 0xF0
    content[22:26] = bytes(4)
    path.write_bytes(content)
    np.testing.assert_allclose(audio.read(path), speechlike(), atol=1.1 / 32768)
    assert audio.info(path).seconds == 2.0


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "empty"),
        (b"not audio at all, just words" * 50, "not readable"),
        (bytes(5000), "not readable"),
        (b"RIFF", "not readable"),
        (b"NIST_1A\n   1024\n", "SPHERE"),
        (b"fLaC" + bytes(300), "not readable"),
        (b"OggS" + bytes(300), "not readable"),
        (np.random.default_rng(1).bytes(9000), "not readable as audio .its header is damaged"),
    ],
)
def test_what_is_not_audio_is_named(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "a.wav"
    path.write_bytes(content)
    for function in (audio.read, audio.info):
        with pytest.raises(ImputerError, match=rf"a\.wav.*{said}"):
            function(path)


def test_missing_file_and_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(ImputerError, match=r"none\.wav: no such file"):
        audio.read(tmp_path / "none.wav")
    with pytest.raises(ImputerError, match="folder"):
        audio.read(tmp_path)


def test_no_samples(tmp_path: Path) -> None:
    path = written(tmp_path / "a.wav", np.zeros(0, np.float32), "WAV")
    for function in (audio.read, audio.info):
        with pytest.raises(ImputerError, match=r"a\.wav: the audio is empty"):
            function(path)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_not_a_number_is_named_with_its_place(tmp_path: Path, value: float) -> None:
    samples = speechlike()
    samples[1234] = value
    path = written(tmp_path / "a.wav", samples, "WAV", subtype="FLOAT")
    with pytest.raises(ImputerError, match=r"a\.wav: sample 1234"):
        audio.read(path)
    with pytest.raises(ImputerError, match=r"a\.wav: sample 1234"):
        audio.info(path, check=True)


@pytest.mark.parametrize(
    ("offset", "duration"), [(-1.0, 1.0), (0.0, 0.0), (2.5, 1.0), (1.0, 5.0), (2.0, None), (0.5, -1.0)]
)
def test_slices_outside_the_file_are_named(tmp_path: Path, offset: float, duration: float | None) -> None:
    path = written(tmp_path / "a.wav", speechlike(), "WAV")
    with pytest.raises(ImputerError, match=r"a\.wav"):
        audio.read(path, offset=offset, duration=duration)


def test_rounded_times_reach_the_end(tmp_path: Path) -> None:
    path = written(tmp_path / "a.wav", speechlike(), "WAV")
    assert len(audio.read(path, offset=1.0, duration=1.04)) == RATE


def test_slices_of_a_replaced_file_are_new(tmp_path: Path) -> None:
    path = written(tmp_path / "a.wav", np.full(RATE, 0.25, np.float32), "WAV")
    assert audio.read(path, offset=0.5, duration=0.1)[0] == 0.25
    other = written(tmp_path / "b.wav", np.full(RATE, 0.5, np.float32), "WAV")
    os.replace(other, path)
    assert audio.read(path, offset=0.5, duration=0.1)[0] == 0.5


def test_few_files_stay_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    for number in range(40):
        path = written(tmp_path / f"{number}.wav", speechlike(0.2), "WAV")
        audio.read(path, offset=0.05, duration=0.1)
    if before:
        assert len(os.listdir("/proc/self/fd")) <= before + reader.OPEN_FILES + 1


def test_threads_and_forks_do_not_share_positions(tmp_path: Path) -> None:
    path = written(tmp_path / "a.ogg", speechlike(20.0), "OGG")
    whole = audio.read(path)
    wrong: list[float] = []

    def check(seed: int) -> bool:
        random = np.random.default_rng(seed)
        for offset in random.uniform(0, 19, 20).round(3):
            start = round(offset * RATE)
            if not np.array_equal(audio.read(path, offset=offset, duration=0.5), whole[start : start + 8000]):
                wrong.append(offset)
        return not wrong

    assert check(0)
    child = os.fork()
    if child == 0:
        os._exit(0 if check(1) else 1)
    alone = check(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    threads = [threading.Thread(target=check, args=(seed,)) for seed in range(3, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert alone and not wrong


def test_writing_round_trips_and_leaves_no_pieces(tmp_path: Path) -> None:
    samples = speechlike()
    for ending in ("flac", "wav"):
        audio.write(tmp_path / f"a.{ending}", samples)
        np.testing.assert_allclose(audio.read(tmp_path / f"a.{ending}"), samples, atol=1.1 / 32768)
    assert sorted(os.listdir(tmp_path)) == ["a.flac", "a.wav"]


# Containers that libsndfile does not know.

MEDIA = {
    "a.m4a": ("aac", 44100, {}),
    "a.mp4": ("aac", 44100, {"movflags": "faststart"}),
    "fragments.mp4": ("aac", 44100, {"movflags": "frag_keyframe+empty_moov"}),
    "a.mov": ("aac", 44100, {}),
    "a.webm": ("libopus", 48000, {}),
    "live.webm": ("libopus", 48000, {"live": "1"}),  # as a browser records: no length, no index
    "a.mka": ("libopus", 48000, {}),
    "a.aac": ("aac", 44100, {}),
}


def encoded(path: Path, seconds: float = 2.0, layout: str = "mono") -> Path:
    codec, rate, options = MEDIA[path.name]
    with av.open(
        str(path), "w", format={".aac": "adts", ".mka": "matroska"}.get(path.suffix), options=options
    ) as output:
        stream = output.add_stream(codec, rate=rate, layout=layout)
        samples = speechlike(seconds, rate)
        for start in range(0, len(samples), rate):
            part = np.repeat(samples[None, start : start + rate], 2 if layout == "stereo" else 1, 0)
            frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(part), format="fltp", layout=layout)
            frame.rate, frame.pts = rate, start
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return path


def assert_sounds_like(got: np.ndarray, wanted: np.ndarray) -> None:
    """The same, but for the delay of a lossy codec."""
    count = len(wanted) - 4000
    best = max(np.dot(got[lag : lag + count], wanted[:count]) for lag in range(2000))
    assert best > 0.9 * np.dot(wanted[:count], wanted[:count])


@pytest.mark.parametrize("name", MEDIA)
def test_what_libsndfile_does_not_know(tmp_path: Path, name: str) -> None:
    path = encoded(tmp_path / name)
    got = audio.read(path)
    assert abs(len(got) - 2 * RATE) < 0.1 * RATE
    assert audio.info(path).seconds == pytest.approx(2.0, abs=0.1)
    assert_sounds_like(got, speechlike())
    np.testing.assert_array_equal(audio.read(io.BytesIO(path.read_bytes())), got)


@pytest.mark.parametrize("name", ["a.m4a", "live.webm"])
def test_slices_and_blocks_of_media_equal_the_whole(tmp_path: Path, name: str) -> None:
    path = encoded(tmp_path / name, 7.0, "stereo")
    with audio.Reader(path) as reader:
        whole = reader.read(reader.rate)
        for offset, duration in (
            (3.0, 2.0),
            (4.5, 2.0),
            (0.0, 1.0),
            (0.5, 4.0),
            (6.0, 0.5),
        ):  # on, back, and on
            start = round(offset * reader.rate)
            got = reader.read(reader.rate, offset=offset, duration=duration)
            np.testing.assert_array_equal(got, whole[start : start + round(duration * reader.rate)])
        np.testing.assert_array_equal(np.concatenate(list(reader.blocks(reader.rate))), whole)


def test_memory_does_not_grow_with_the_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And windows that overlap are decoded forward, not each from the start of the file."""
    path = encoded(tmp_path / "a.m4a", 90.0)  # 16 MB as samples
    with audio.Reader(path) as reader:
        tracemalloc.start()
        total = sum(len(block) for block in reader.blocks())
        reader.read(offset=0, duration=16)
        monkeypatch.setattr(reader.opened, "_restart", lambda: pytest.fail("started over"))
        for offset in range(12, 74, 12):
            reader.read(offset=offset, duration=16)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert total == pytest.approx(90 * RATE, rel=0.01) and peak < 8e6


@pytest.mark.parametrize("name", ["a.m4a", "a.mp4", "fragments.mp4", "a.mov"])
@pytest.mark.parametrize("kept", [0.3, 0.7, 0.95])
def test_media_that_is_cut_off_is_refused(tmp_path: Path, name: str, kept: float) -> None:
    path = encoded(tmp_path / name, 20.0)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * kept)])
    for function in (audio.read, audio.info):
        with pytest.raises(ImputerError, match=r"cut off|not readable"):
            function(path)


@pytest.mark.parametrize("name", ["a.webm", "live.webm", "a.mka", "a.aac"])
def test_media_without_an_index_is_read_as_far_as_it_goes_with_a_warning(tmp_path: Path, name: str) -> None:
    path = encoded(tmp_path / name, 20.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        audio.read(path)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * 0.7)])
    with pytest.warns(audio.AudioWarning, match=rf"{name}: the end of the audio is missing"):
        got = audio.read(path)
    assert len(got) == pytest.approx(14 * RATE, rel=0.1)
    assert_sounds_like(got[: 2 * RATE], speechlike(20.0)[: 2 * RATE])


def test_slices_of_an_mp3_print_nothing(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    """libmpg123 complains about every place that decoding starts at, although nothing is wrong."""
    path = written(tmp_path / "a.mp3", speechlike(60.0, 44100), "MP3", 44100)
    for offset in range(3, 57, 6):
        audio.read(path, offset=offset, duration=2.0)
    os.write(2, b"still open")
    assert capfd.readouterr().err == "still open"


def test_a_closed_stderr_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without stderr, descriptor 2 may be a socket of the server."""
    path = written(tmp_path / "a.mp3", speechlike(60.0, 44100), "MP3", 44100)
    before, seen, read = os.fstat(2), [], soundfile.SoundFile.read

    def watched(*given: object, **options: object) -> object:
        seen.append(os.path.samestat(os.fstat(2), before))
        return read(*given, **options)

    monkeypatch.setattr(soundfile.SoundFile, "read", watched)
    audio.read(path, offset=30.0, duration=2.0)
    assert seen and not all(seen)
    seen.clear()
    monkeypatch.setattr("sys.stderr", None)
    audio.read(path, offset=30.0, duration=2.0)
    assert seen and all(seen)


@pytest.mark.parametrize("header", [True, False])
def test_an_mp3_that_is_cut_off(tmp_path: Path, header: bool) -> None:
    """A Xing header proves that audio is missing; without one, half a frame at the end is all there is to see."""
    path = tmp_path / "a.mp3"
    with av.open(str(path), "w", options={"write_xing": str(int(header))}) as output:
        stream = output.add_stream("libmp3lame", rate=44100, layout="mono")
        frame = av.AudioFrame.from_ndarray(speechlike(6.0, 44100)[None], format="fltp", layout="mono")
        frame.rate = 44100
        output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_sounds_like(audio.read(path), speechlike(6.0)[: 2 * RATE])
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    if header:
        with pytest.raises(ImputerError, match=r"a\.mp3: the audio is cut off"):
            audio.read(path)
    else:
        with pytest.warns(audio.AudioWarning, match=r"a\.mp3: the end of the audio is missing"):
            assert len(audio.read(path)) == pytest.approx(3 * RATE, rel=0.1)


# Limits.


def test_what_costs_too_much_is_refused_by_its_header(tmp_path: Path) -> None:
    """Silence packs well: a small file that unpacks to a great many samples is refused before it is decoded."""
    bomb = written(tmp_path / "bomb.flac", np.zeros((655_350, 8), np.int16), "FLAC", 655_350)
    with pytest.raises(audio.AudioError, match=r"bomb\.flac: 8 channels at 655350 Hz"):
        audio.read(bomb)
    stereo = written(tmp_path / "a.flac", np.zeros((96_000 * 3, 2), np.int16), "FLAC", 96_000)
    limits = audio.Limits(seconds=3.0, samples=3.0 * 2 * 48_000, check=lambda: pytest.fail("decoded"))
    with pytest.raises(
        audio.AudioError, match=r"longer than the limit of 1.5 s.*2 channels at 96000 Hz"
    ) as caught:
        audio.Reader(stereo, limits=limits)
    assert caught.value.reason == "too_long"
    with pytest.raises(audio.AudioError, match="longer than the limit of 2 s"):
        audio.Reader(stereo, limits=audio.Limits(seconds=2.0))
    with pytest.raises(audio.AudioError, match="longer than the limit of 2 s"):
        audio.Reader(encoded(tmp_path / "a.m4a", 3.0), limits=audio.Limits(seconds=2.0))


@pytest.mark.parametrize("name", ["a.wav", "a.m4a"])
def test_reading_stops_when_it_is_told_to(tmp_path: Path, name: str) -> None:
    class Gone(Exception):
        pass

    path = tmp_path / name
    if name == "a.wav":
        written(path, speechlike(20.0), "WAV")
    else:
        encoded(path, 20.0)
    calls = []

    def check() -> None:
        calls.append(1)
        if len(calls) > 4:
            raise Gone

    read = 0
    with pytest.raises(Gone), audio.Reader(path, limits=audio.Limits(check=check)) as reader:
        for block in reader.blocks():
            read += len(block)
    assert 0 <= read < 18 * RATE


# Names and places.


def test_the_name_does_not_decide_how_a_file_is_read(tmp_path: Path) -> None:
    path = written(tmp_path / "a.raw", speechlike(), "WAV")
    np.testing.assert_allclose(audio.read(path), speechlike(), atol=1.1 / 32768)
    path.write_bytes(speechlike().tobytes())
    with pytest.raises(
        ImputerError, match=r"a\.raw: not readable as audio.*without a header.*as WAV.*ffmpeg -f s16le"
    ):
        audio.read(path)


def test_a_nul_in_a_path(tmp_path: Path) -> None:
    for function in (audio.read, audio.info):
        with pytest.raises(ImputerError, match="not a path"):
            function(f"{tmp_path}/a\0.wav")


def test_a_pipe_is_read_to_its_end(tmp_path: Path) -> None:
    content = written(tmp_path / "a.flac", speechlike(), "FLAC").read_bytes()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(content,))
    writer.start()
    np.testing.assert_allclose(audio.read(pipe), speechlike(), atol=1.1 / 32768)
    writer.join()
    with pytest.raises(ImputerError, match="not a regular file"):
        audio.read("/dev/zero")


@pytest.mark.parametrize("peak", [1e16, 20_000.0])
def test_samples_far_beyond_full_scale_are_refused(tmp_path: Path, peak: float) -> None:
    path = written(tmp_path / "a.wav", peak * speechlike(), "WAV", subtype="FLOAT")
    for function in (audio.read, lambda path: audio.info(path, check=True)):
        with pytest.raises(ImputerError, match=r"a\.wav: a sample is .*between -1 and 1"):
            function(path)
