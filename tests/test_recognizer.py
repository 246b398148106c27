"""The recogniser, on the language of tones: real audio, a real network, a real tokenizer."""

import collections
import copy
import io
import re
import shutil
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import soundfile
import soxr
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import imputer
import tones
from imputer import audio, decoding, models, recognizer
from imputer.alignments import collapse
from imputer.audio import windows
from imputer.data.manifest import Utterance
from imputer.data.recordings import mono
from imputer.decoding import Decoded, Options
from imputer.errors import ImputerError, UsageError
from imputer.recognizer import Recognizer

TEXT = "goluba midago ba lu"


@pytest.fixture(scope="module")
def listener():
    return Recognizer(tones.trained(), tones.vocabulary())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tones.save(tmp_path_factory.mktemp("model"))


@pytest.fixture
def wav(tmp_path):
    path = tmp_path / "speech.wav"
    soundfile.write(path, tones.speak(TEXT, 500)[0], tones.RATE)
    return path


def long_speech(words=70, seed=5):
    text = tones.sentence(np.random.default_rng(seed), words)
    samples, events = tones.speak(text, seed, pause=0.5)
    return text, samples, events


def test_from_a_folder_every_kind_of_audio(folder, wav):
    ours = imputer.Recognizer.from_pretrained(folder)
    samples, rate = soundfile.read(wav, dtype="float32")
    stereo = np.stack([samples, samples], 1)
    slow = soxr.resample(samples, rate, 22_050)
    kinds = [
        wav,
        str(wav),
        io.BytesIO(wav.read_bytes()),
        samples,
        torch.from_numpy(samples),
        stereo,
        stereo.T,
    ]
    for kind in [*kinds, (samples * 32767).astype(np.int16)]:
        assert ours.transcribe(kind).text == TEXT
    assert ours.transcribe(slow, sample_rate=22_050).text == TEXT
    several = [wav, samples, io.BytesIO(wav.read_bytes())]
    assert [t.text for t in ours.transcribe(several)] == [TEXT] * 3
    assert ours.transcribe([]) == []


def test_a_slice_of_a_manifest(listener, tmp_path):
    first, second = tones.speak("ba lu", 1)[0], tones.speak("midago", 2)[0]
    path = str(tmp_path / "both.flac")
    soundfile.write(path, np.concatenate([first, second]), tones.RATE)
    slices = [
        Utterance("one", path, len(first) / tones.RATE),
        Utterance("two", path, len(second) / tones.RATE, offset=len(first) / tones.RATE),
    ]
    assert [t.text for t in listener.transcribe(slices)] == ["ba lu", "midago"]


def test_words_have_the_times_of_their_chords(listener):
    samples, events = tones.speak(TEXT, 500)
    result = listener.transcribe(samples)
    assert [(token.frame) for token in result.tokens] == [frame for frame, _ in events]
    pieces = [tones.vocabulary().pieces([token])[0] for _, token in events]
    first_letters = [
        frame * 0.04
        for n, (frame, _) in enumerate(events)
        if pieces[n] != "▁" and (pieces[n][0] == "▁" or pieces[n - 1] == "▁")
    ]
    assert [word.start for word in result.words] == pytest.approx(first_letters)
    assert all(0.5 < word.confidence <= 1 for word in result.words)
    assert result.seconds == pytest.approx(len(samples) / tones.RATE, abs=1e-3)
    assert result.text == TEXT == tones.vocabulary().decode([token for _, token in events])


def test_passes_and_trace(listener):
    samples, _ = tones.speak(TEXT, 500)
    result = listener.transcribe(samples, block_size=5, strategy="right_most_last", trace=True)
    assert result.passes == 5 == len(result.trace)
    assert "∅" in result.trace[0] and "∅" not in result.trace[-1]
    assert "".join(s for s in result.trace[-1] if s != "_").replace("▁", " ").strip() == TEXT
    assert listener.transcribe(samples).passes == 8 and listener.transcribe(samples).trace is None
    assert listener.transcribe(samples, strategy="adaptive").passes < 8
    assert listener.transcribe(samples, strategy="adaptive").text == TEXT


def test_a_batch_is_what_each_is_alone(listener):
    spoken = [tones.speak(tones.sentence(np.random.default_rng(n), n), n)[0] for n in range(1, 7)]
    together = listener.transcribe_batch(spoken, trace=True)
    for one, samples in zip(together, spoken, strict=True):
        (alone,) = listener.transcribe_batch([samples], trace=True)
        assert (one.text, one.passes, one.trace[-1]) == (alone.text, alone.passes, alone.trace[-1])
        assert [len(row) for row in one.trace] == [len(row) for row in alone.trace]
        assert [w.confidence for w in one.words] == pytest.approx(
            [w.confidence for w in alone.words], abs=1e-3
        )
    assert [t.text for t in listener.transcribe(spoken)] == [t.text for t in together]
    assert listener.transcribe_batch([]) == []


def test_on_pass_streams_the_rows_of_the_trace(listener):
    seen = []
    spoken = [tones.speak("ba", 1)[0], tones.speak(TEXT, 2)[0]]
    results = listener.transcribe_batch(
        spoken, block_size=4, trace=True, on_pass=lambda *now: seen.append(now)
    )
    assert [number for _, number in seen] == [1, 2, 3, 4]
    for item, result in enumerate(results):
        assert [rows[item] for rows, _ in seen] == result.trace


def test_a_trace_is_the_same_alone_and_in_a_batch(listener):
    waves = [tones.speak(text, n)[0] for n, text in enumerate(("ba", "goluba lu mi", "midago ba bami luda"))]
    options = Options(5, trace=True)
    for wave, together in zip(waves, listener.decode(waves, options), strict=True):
        (alone,) = listener.decode([wave], options)
        assert together.alignment == alone.alignment and together.trace == alone.trace
        assert together.greedy.alignment == alone.greedy.alignment
        assert np.abs(np.subtract(together.trace_confidence, alone.trace_confidence)).max() < 1e-3


@pytest.mark.parametrize("strategy", decoding.STRATEGIES)
def test_confidences_of_a_trace(listener, strategy):
    """The last row is the result's; a masked frame has none; the first pass is what greedy CTC decodes."""
    wave, _ = tones.speak(TEXT, 500)
    (found,) = listener.decode([wave], Options(6, strategy, trace=True))
    (greedy,) = listener.decode([wave], Options(1))
    assert found.trace_confidence[-1] == found.confidence and found.trace[-1] == found.alignment
    assert found.greedy == greedy
    masked = [[token == listener.model.mask for token in row] for row in found.trace]
    assert [[value == 0 for value in row] for row in found.trace_confidence] == masked


def test_decoding_can_be_cancelled_between_passes(listener):
    passes = []
    with pytest.raises(decoding.Cancelled):
        listener.decode(
            [tones.speak(TEXT, 500)[0]],
            Options(8),
            on_pass=lambda number, *_: passes.append(number),
            cancelled=lambda: len(passes) == 3,
        )
    assert passes == [1, 2, 3]


def test_a_waveform_that_is_too_short_fails_alone(listener):
    seen = []
    waves = [np.zeros(0, np.float32), tones.speak(TEXT, 500)[0]]
    first, second = listener.decode(waves, Options(4), on_pass=lambda *now: seen.append(now))
    assert isinstance(first, ImputerError) and "less than one frame" in str(first)
    assert listener.transcript(second, 1.0).text == TEXT
    assert [rows[0] for _, rows, _ in seen] == [[]] * 4 and seen[-1][1][1] == second.alignment


@pytest.fixture
def poisoned():
    """A network that gives NaN once it has committed a token of the word "mi", and only then."""
    network = copy.deepcopy(tones.trained())
    tokens = set(tones.vocabulary().encode("mi")) - set(tones.vocabulary().encode("ba lu goluba bada luda"))
    with torch.no_grad():
        network.embedding.weight[list(tokens)] = torch.nan
    return Recognizer(network, tones.vocabulary())


@pytest.mark.parametrize("strategy", ["block", "annealing", "adaptive"])
def test_a_recording_for_which_the_network_gives_nan_is_named_and_the_others_go_on(
    poisoned, tmp_path, strategy
):
    texts = ["ba lu goluba", "mi mi ba", "bada luda"]
    paths = [tmp_path / f"{n}.wav" for n in range(3)]
    for seed, (path, text) in enumerate(zip(paths, texts, strict=True)):
        soundfile.write(path, tones.speak(text, 30 + seed)[0], tones.RATE)
    # Adaptive decoding that is never sure takes several passes, as the others do.
    never = (("threshold", 1.0), ("sure", 1.0)) if strategy == "adaptive" else ()
    found = dict(poisoned.each(paths, Options(16, strategy, strategy_options=never)))
    assert [found[0].text, found[2].text] == [texts[0], texts[2]]
    assert isinstance(found[1], ImputerError)
    assert str(found[1]).startswith(f"{paths[1]}: the network gave NaN") and "\n" not in str(found[1])
    with pytest.raises(ImputerError, match="NaN"):
        poisoned.transcribe(paths[1], block_size=16)


def test_the_rows_of_a_failed_recording_are_not_shown(poisoned):
    seen = []
    waves = [tones.speak("ba lu", 30)[0], tones.speak("mi mi", 31)[0]]
    _, failed = poisoned.decode(waves, Options(16), on_pass=lambda *now: seen.append(now))
    assert isinstance(failed, ImputerError)
    assert seen[0][1][1] and not seen[-1][1][1] and seen[-1][1][0]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"block_size": 0}, "block size"),
        ({"block_size": True}, "block size"),
        ({"block_size": 2.5}, "block size"),
        ({"strategy": "blocks"}, "right_most_last"),
        ({"strategy": "adaptive", "strategy_options": (("treshold", 0.5),)}, "threshold"),
        ({"strategy_options": (("by", 1.0),)}, "takes none"),
        ({"beam": 0}, "beam"),
        ({"n_best": -1}, "n_best"),
        ({"hotwords": "Imputer"}, "list of words"),
    ],
)
def test_bad_options_are_refused_when_they_are_made(given, named):
    with pytest.raises(UsageError, match=named):
        Options(**given)


def test_options_are_values():
    assert Options(8, hotwords=["a"]) == Options(8, hotwords=("a",)) and len({Options(), Options()}) == 1
    assert Options(8, "adaptive", strategy_options=(("threshold", 0.5),)).name == "adaptive-8-threshold=0.5"


def test_the_acoustic_part_runs_once(listener, monkeypatch):
    calls = {"encode": 0, "impute": 0}
    for name in calls:
        real = getattr(listener.model, name)

        def counted(*inputs, name=name, real=real):
            calls[name] += 1
            return real(*inputs)

        monkeypatch.setattr(listener.model, name, counted)
    listener.transcribe(tones.speak(TEXT, 500)[0], block_size=8)
    assert calls == {"encode": 1, "impute": 8}


@torch.no_grad()
def test_the_encoder_is_given_little_padding(listener, monkeypatch):
    """Recordings of all lengths in one batch: similar ones are encoded together, and each has its own frames."""
    front_end = listener.model.front_end
    waveforms = [tones.speak("ba lu", seed)[0] for seed in range(3)]
    waveforms += [np.tile(waveforms[0], times) for times in (2, 4, 4, 9)]
    features = [front_end.extract(torch.from_numpy(one)) for one in waveforms]
    alone = [listener.encode([one])[0][0] for one in features]
    shapes, encode = [], listener.model.encode

    def seen(padded, lengths):
        assert lengths.min() >= 0.95 * padded.shape[1], "padded by more than 5 %"
        assert len(lengths) == 1 or padded.shape[0] * padded.shape[1] <= front_end.feature_frames(12.0)
        shapes.append(len(lengths))
        return encode(padded, lengths)

    monkeypatch.setattr(listener.model, "encode", seen)
    together, lengths = listener.encode(features)
    assert sum(shapes) == len(features) and max(shapes) > 1
    assert lengths.tolist() == [len(one) for one in alone]
    for row, expected in zip(together, alone, strict=True):
        torch.testing.assert_close(row[: len(expected)], expected, rtol=1e-4, atol=1e-4)
        assert not row[len(expected) :].any()


def test_items_that_are_done_cost_no_more_passes(listener, monkeypatch):
    seen = []
    real = listener.model.impute

    def watched(acoustic, frame_lengths, partial):
        seen.append((len(partial), partial.shape[1], int(frame_lengths.max())))
        return real(acoustic, frame_lengths, partial)

    monkeypatch.setattr(listener.model, "impute", watched)
    texts = ["ba ba", "midago lu", "goluba midago ba lu bami bada"]
    spoken = [tones.speak(text, 40 + n)[0] for n, text in enumerate(texts)] + [np.zeros(320 * 8, np.float32)]
    results = listener.transcribe_batch(spoken, block_size=16)
    assert [t.text for t in results[:3]] == texts and results[3].passes == 4  # four frames, four passes
    assert [rows for rows, _, _ in seen] == [4] * 4 + [3] * 12
    seen.clear()
    results = listener.transcribe_batch(spoken, strategy="adaptive")
    assert sum(rows for rows, _, _ in seen) == sum(t.passes for t in results)
    assert all(frames == longest for _, frames, longest in seen)


def test_long_recordings_do_not_depend_on_the_window(listener, tmp_path, monkeypatch):
    text, samples, events = long_speech()
    assert len(samples) / tones.RATE > 70
    path = tmp_path / "long.flac"
    soundfile.write(path, samples, tones.RATE)
    read, longest = audio.Reader.read, []

    def watched(*arguments, **options):
        longest.append(options["duration"])
        return read(*arguments, **options)

    monkeypatch.setattr(audio.Reader, "read", watched)
    for window, overlap in ((24.0, 4.0), (12.0, 3.0), (7.3, 2.1)):
        longest.clear()
        result = listener.transcribe(path, window=window, overlap=overlap, trace=True)
        assert result.text == text
        assert max(longest) <= window + 0.04 and len(longest) > 3  # never the whole file
        assert [token.frame for token in result.tokens] == [frame for frame, _ in events]
        assert len(result.trace[0]) == len(result.trace[-1]) == pytest.approx(len(samples) / 640, abs=1)
        assert result.passes == 8 == len(result.trace)


def test_a_long_recording_is_read_forward():
    """Containers that are decoded forward only start over for each window that lies before the last one."""
    random = np.random.default_rng(0)
    lengths = random.uniform(20, 24, 300)
    job = recognizer._Job(0, None, [None] * len(lengths))
    starts = np.cumsum(lengths - 0.8)
    cuts = [
        recognizer._Cut(job, n, float(start), float(seconds))
        for n, (start, seconds) in enumerate(zip(starts, lengths, strict=True))
    ]
    batches = list(recognizer._batches(cuts))
    offsets = [cut.offset for batch in batches for cut in batch]
    assert sorted(offsets) == starts.tolist()
    assert sum(b < a for a, b in pairwise(offsets)) < 6  # by length alone, every second window
    for batch in batches:
        padded = len(batch) * max(c.seconds for c in batch)
        assert padded <= recognizer.BATCH_SECONDS
        assert padded * recognizer.SIMILAR < sum(c.seconds for c in batch)


def test_a_long_recording_among_short_ones(listener):
    text, samples, _ = long_speech(30)
    short = tones.speak("ba", 1)[0]
    results = listener.transcribe([short, samples, short], window=8.0, overlap=2.0)
    assert [t.text for t in results] == ["ba", text, "ba"]


def test_windows_cover_everything_and_start_on_frames():
    for seconds in (0.1, 4.0, 7.9, 8.0, 8.1, 14.0, 100.0, 123.456):
        spans = list(windows.spans(seconds, 200, 150, 0.04))  # 8 s windows, 6 s apart
        assert spans[0][0] == 0.0 and sum(spans[-1]) == pytest.approx(seconds)
        assert all(length <= 8.0 + 1e-9 for _, length in spans)
        for (a, length), (b, _) in pairwise(spans):
            assert b - a == pytest.approx(6.0) and a + length - b == pytest.approx(2.0)
        assert len(spans) == 1 or spans[-1][1] > 2.0


@given(st.lists(st.one_of(st.none(), st.floats(0.0, 2.0)), min_size=40, max_size=40), st.floats(0.1, 150.0))
@settings(max_examples=100, deadline=None)
def test_windows_meet_in_pauses(found, seconds):
    asked, answers = [], iter(found)

    def pause(offset, length):
        asked.append(offset)
        assert length == pytest.approx(2.0)
        return next(answers)

    spans = list(windows.spans_at_pauses(seconds, 200, 150, 0.04, pause))  # 8 s windows, 6 s apart
    assert spans[0][0] == 0.0 and sum(spans[-1]) == pytest.approx(seconds)
    assert all(0 < length <= 8.0 + 1e-9 for _, length in spans)
    assert len(asked) == len(spans) - 1
    for (a, length), (b, _), offset, middle in zip(spans, spans[1:], asked, found, strict=False):
        assert offset == pytest.approx(a + 6.0)
        assert b / 0.04 == pytest.approx(round(b / 0.04))  # on a frame
        if middle is None:
            assert b == pytest.approx(offset) and a + length == pytest.approx(a + 8.0)
        else:
            assert b - 1e-6 <= offset + middle + 0.02 and offset + middle - 0.02 <= a + length + 1e-6
            assert 0.36 <= a + length - b <= 0.84


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_windows_that_hear_the_same_join_to_the_same(data):
    """Tokens with jitter of a frame, found by both windows of every overlap, come out once each."""
    gaps = data.draw(st.lists(st.integers(4, 15), min_size=12, max_size=60))
    tokens = data.draw(st.lists(st.integers(1, 3), min_size=len(gaps), max_size=len(gaps)))
    places = np.cumsum(gaps)
    total, window, hop = int(places[-1]) + 10, 100, 70
    pieces = []
    for start in range(0, max(1, total - (window - hop)), hop):
        heard = [0] * min(window, total - start)
        for place, token in zip(places, tokens, strict=True):
            at = int(place) - start + data.draw(st.integers(-1, 1))
            if 0 <= at < len(heard):
                heard[at] = token
        pieces.append(Decoded(heard, [1.0] * len(heard), 1))
    joined = windows.join(pieces, hop)
    assert len(joined.alignment) == total
    expected = [t for place, t in zip(places, tokens, strict=True)]
    assert collapse(joined.alignment) == expected


def test_a_seam_prefers_pauses_and_agreement():
    left = [1, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0]
    right = [9, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 3, 0]
    cut = windows.seam(left, right)
    assert 4 < cut < 13
    assert windows.seam([0] * 10, [0] * 10) == 5  # silence: in the middle
    assert 0 <= windows.seam([], []) == 0
    # Only one window found the 7 at the edge of the other: it is kept, whichever way.
    assert windows.seam([0, 0, 5, 0, 0, 0, 0, 7, 0, 0], [0, 0, 5, 0, 0, 0, 0, 0, 0, 0]) >= 3


@pytest.mark.parametrize(
    "window, overlap",
    [
        (4.0, 4.0),
        (4.0, 5.0),
        (0.0, 0.0),
        (1.0, 0.001),
        (4.0, -1.0),
        (np.nan, 1.0),
        (np.inf, 1.0),
        (4.0, np.nan),
    ],
)
def test_bad_windows(listener, window, overlap):
    with pytest.raises(UsageError, match="overlap"):
        listener.transcribe(np.zeros(16_000, np.float32), window=window, overlap=overlap)


def test_bad_audio(listener, tmp_path, wav):
    not_audio = tmp_path / "notes.txt"
    not_audio.write_text("no sound in here, but some bytes")
    with pytest.raises(UsageError, match=r"gone\.wav: no such file"):
        listener.transcribe(tmp_path / "gone.wav")
    with pytest.raises(ImputerError, match=r"notes\.txt"):
        listener.transcribe(not_audio)
    with pytest.raises(ImputerError, match="empty"):
        listener.transcribe(np.zeros(0, np.float32))
    with pytest.raises(ImputerError, match="20 ms of audio are less than one frame of 40 ms"):
        listener.transcribe(np.zeros(320, np.float32))
    with pytest.raises(ImputerError, match="recording 2 of 2"):
        listener.transcribe_batch([np.zeros(1600, np.float32), np.zeros(3, np.float32)])
    with pytest.raises(ImputerError, match="finite"):
        listener.transcribe(np.full(1600, np.nan, np.float32))
    with pytest.raises(UsageError, match="shape"):
        listener.transcribe(np.zeros((2, 2, 2), np.float32))
    with pytest.raises(UsageError, match="int"):
        listener.transcribe(5)
    with pytest.raises(ImputerError, match="the audio stream"):
        listener.transcribe(io.BytesIO(b"not audio at all"))


def test_bytes_and_a_text_of_hotwords_are_not_taken_apart(listener, wav):
    for content in (b"", b"RIFF"):
        with pytest.raises(UsageError, match="unsupported audio type: bytes"):
            listener.transcribe(content)
    with pytest.raises(UsageError, match="hotwords are a list of words, got the text 'ba'"):
        listener.transcribe(wav, hotwords="ba")


@pytest.mark.parametrize(
    ("source", "named"),
    [
        (np.array(["a", "b"] * 800), "samples must be numbers, got an array of dtype <U1"),
        (np.array([None] * 1600), "dtype object"),
        (np.zeros(1600, bool), "dtype bool"),
        (np.full(1600, 1e16), "a sample is 1e+16, but samples lie between -1 and 1"),
        (np.full(1600, 20_000.0), "divide 16-bit values by 32768"),
        (torch.full((1600,), 20_000.0, dtype=torch.bfloat16), "divide 16-bit values by 32768"),
        (np.full(1600, 20_000), "samples of dtype int64 reach 20000 of"),
        ({"array": 1}, "unsupported audio type: dict"),
        ("a\0b.wav", "not a path"),
    ],
)
def test_bad_sources_are_one_line_and_the_others_are_transcribed(listener, wav, source, named):
    found = dict(listener.each([wav, source, wav]))
    assert found[0].text == found[2].text == TEXT
    assert isinstance(found[1], ImputerError) and named in str(found[1]) and "\n" not in str(found[1])


def test_a_loud_file_does_not_lose_the_others(listener, tmp_path, wav):
    loud = tmp_path / "loud.wav"
    soundfile.write(loud, np.full(16_000, 1e16), tones.RATE, subtype="DOUBLE")
    found = dict(listener.each([wav, loud, wav]))
    assert found[0].text == found[2].text == TEXT
    assert str(found[1]).startswith(f"{loud}: a sample is 1e+16")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int16])
def test_tensors_of_every_kind(listener, dtype):
    samples = torch.from_numpy(tones.speak(TEXT, 500)[0])
    scale = 1 if dtype.is_floating_point else 32767
    assert listener.transcribe((scale * samples).to(dtype)).text == TEXT


def test_silence_of_unsigned_samples_is_in_their_middle():
    np.testing.assert_allclose(mono(np.array([0, 64, 128, 192], np.uint8)), [-1.0, -0.5, 0.0, 0.5])


def test_any_sequence_of_recordings(listener, wav):
    for several in ((wav, str(wav)), collections.deque([wav, wav])):
        assert [t.text for t in listener.transcribe(several)] == [TEXT, TEXT]


def test_a_file_is_opened_once(listener, wav):
    """Python sees the only time it is opened; libsndfile is given that descriptor, not the path."""
    opened, decoders = [], []
    sys.addaudithook(lambda event, given: event == "open" and given[0] == str(wav) and opened.append(given))
    init = soundfile.SoundFile.__init__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            soundfile.SoundFile,
            "__init__",
            lambda self, file, **o: decoders.append(file) or init(self, file, **o),
        )
        assert listener.transcribe(str(wav), window=1.0, overlap=0.2).words
    assert len(opened) == 1 and [type(file) for file in decoders] == [int]


def test_one_bad_file_does_not_stop_the_others(listener, tmp_path, wav):
    sources = [wav, tmp_path / "gone.wav", wav]
    results = dict(listener.each(sources))
    assert results[0].text == results[2].text == TEXT and isinstance(results[1], UsageError)
    with pytest.raises(UsageError, match="gone"):
        listener.transcribe(sources)


def test_a_recording_that_breaks_half_way(listener, tmp_path):
    _, samples, _ = long_speech(30)
    path = tmp_path / "long.flac"
    soundfile.write(path, samples, tones.RATE)
    content = bytearray(path.read_bytes())
    content[len(content) // 2 : len(content) // 2 + 4000] = bytes(4000)
    path.write_bytes(bytes(content))
    results = list(listener.each([path, tones.speak("ba", 1)[0]], window=8.0, overlap=2.0))
    assert len(results) == 2  # told once, not once a window
    found = dict(results)
    assert isinstance(found[0], ImputerError) and "long.flac" in str(found[0]) and found[1].text == "ba"


# A rate of 1 made a second of sound out of every sample: the call did not end.
@pytest.mark.parametrize("rate", [0, -16_000, 1, 999, 384_001, float("nan"), float("inf"), "16000", True])
def test_bad_sample_rates(listener, rate):
    with pytest.raises(UsageError, match="sample_rate"):
        listener.transcribe(np.zeros(16_000, np.float32), sample_rate=rate)


@pytest.mark.parametrize(
    ("samples", "says"),
    [
        (np.zeros((0, 2), np.float32), r"the audio is empty \(0 samples\)"),
        (np.zeros((2, 0), np.float32), r"the audio is empty \(0 samples\)"),
        (torch.zeros(16_000).to_sparse(), r"samples must be a plain tensor, got one of torch\.sparse_coo"),
        (torch.zeros(16_000, device="meta"), "samples must be a plain tensor, got one of device meta"),
    ],
)
def test_samples_that_are_none(listener, samples, says):
    with pytest.raises(ImputerError, match=says):
        listener.transcribe(samples)


@pytest.mark.parametrize("device", ["nowhere", "cpu:x", "hpu", "meta"])
def test_bad_devices(folder, device):
    with pytest.raises(UsageError, match=f"device '{device}' cannot be used"):
        Recognizer.from_pretrained(folder, device=device)


def test_a_model_that_says_no_block_size(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "model")
    path = tmp_path / "model" / "config.toml"
    path.write_text(re.sub(r"block_size = \d+", "block_size = 0", path.read_text()))
    with pytest.raises(UsageError, match="block_size"):
        Recognizer.from_pretrained(tmp_path / "model")


def test_a_folder_of_the_name_does_not_hide_a_shipped_model(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "digits"
    run.mkdir()
    (run / "config.toml").write_text(
        "[training]\nsteps = 1\n"
    )  # as `imputer train digits.toml digits` leaves it
    assert models.model_folder("digits") == models.SHIPPED / "digits"
    shutil.copytree(folder, run, dirs_exist_ok=True)
    assert models.model_folder("digits") == Path("digits")


@pytest.mark.parametrize("block_size", [0, -3, 1.5, True])
def test_bad_block_sizes(listener, block_size):
    with pytest.raises(UsageError, match="block size"):
        listener.transcribe(np.zeros(16_000, np.float32), block_size=block_size)


def test_bad_strategy(listener):
    with pytest.raises(UsageError, match="top_k"):
        listener.transcribe(np.zeros(16_000, np.float32), strategy="best")


def test_bad_model_folders(folder, tmp_path):
    with pytest.raises(UsageError, match="no model folder nowhere"):
        Recognizer.from_pretrained("nowhere")
    with pytest.raises(UsageError, match="runtime 'tpu'"):
        Recognizer.from_pretrained(folder, runtime="tpu")
    for name in ("model.safetensors", "config.toml", "tokenizer.model"):
        damaged = tmp_path / f"damaged-{name}"
        shutil.copytree(folder, damaged)
        content = (damaged / name).read_bytes()
        (damaged / name).write_bytes(content[: len(content) // 2 - 3])
        with pytest.raises(ImputerError, match=name):
            Recognizer.from_pretrained(damaged)
        (damaged / name).unlink()
        with pytest.raises(UsageError, match=f"{name} is missing"):
            Recognizer.from_pretrained(damaged)


def test_batches_hold_like_lengths_and_no_more_than_allowed():
    random = np.random.default_rng(0)
    alone = recognizer._Job(0, None, [None])
    cuts = [recognizer._Cut(alone, 0, 0.0, float(s)) for s in random.uniform(0.5, 24, 300)]
    batches = list(recognizer._batches(cuts))
    assert sorted(id(c) for batch in batches for c in batch) == sorted(map(id, cuts))
    for batch in batches:
        padded = len(batch) * max(c.seconds for c in batch)
        assert len(batch) <= recognizer.BATCH_ITEMS and padded <= recognizer.BATCH_SECONDS
    padded = sum(len(batch) * max(c.seconds for c in batch) for batch in batches)
    assert padded < 1.15 * sum(c.seconds for c in cuts)
