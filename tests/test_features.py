"""Filter banks against kaldi-native-fbank and float64, deltas against plain numpy, augmentation as promised."""

import kaldi_native_fbank
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from imputer import configs, features
from imputer.audio import augmentation

RATE = 16000


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def chirp(seconds: float, low: float = 60.0, high: float = 7000.0, rate: int = RATE) -> np.ndarray:
    time = np.arange(int(seconds * rate)) / rate
    return 0.4 * np.sin(2 * np.pi * (low * time + (high - low) * time**2 / (2 * seconds)))


def signals() -> dict[str, np.ndarray]:
    random = np.random.default_rng(1)
    time = np.arange(2 * RATE) / RATE
    noise = random.standard_normal(len(time))
    speech_like = np.convolve(noise, np.exp(-np.arange(40) / 8), "same") * (
        1.2 + np.sin(2 * np.pi * 3 * time)
    )
    return {
        "noise": 0.1 * noise,
        "speech_like": 0.03 * speech_like,
        "chirp_in_noise": 0.25 * chirp(2.0) + 0.03 * noise,
        "offset_from_zero": 0.1 * noise + 0.3,
        "very_quiet": 1e-4 * noise,
    }


def kaldi(waveform: np.ndarray, rate: int = RATE) -> np.ndarray:
    options = kaldi_native_fbank.FbankOptions()
    options.frame_opts.samp_freq = rate
    options.frame_opts.dither = 0.0
    options.mel_opts.num_bins = 80
    extractor = kaldi_native_fbank.OnlineFbank(options)
    extractor.accept_waveform(rate, (waveform * 32768).astype(np.float32))
    extractor.input_finished()
    return np.stack([extractor.get_frame(i) for i in range(extractor.num_frames_ready)])


def exact(waveform: np.ndarray) -> np.ndarray:
    """The same definition, step by step in float64: what both programs approximate."""
    samples = waveform.astype(np.float32).astype(np.float64) * 32768
    count = 1 + (len(samples) - 400) // 160
    frames = np.stack([samples[160 * i : 160 * i + 400] for i in range(count)])
    frames -= frames.mean(1, keepdims=True)
    frames = frames - 0.97 * np.concatenate([frames[:, :1], frames[:, :-1]], 1)
    frames *= (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(400) / 399)) ** 0.85
    power = np.abs(np.fft.rfft(frames, 512)) ** 2
    edges = np.linspace(1127 * np.log(1 + 20 / 700), 1127 * np.log(1 + 8000 / 700), 82)
    bins = 1127 * np.log(1 + np.arange(257) * RATE / 512 / 700)
    triangles = [np.interp(bins, edges[i : i + 3], [0, 1, 0]) for i in range(80)]
    return np.log(np.maximum(power @ np.array(triangles).T, np.finfo(np.float32).eps))


def plain_deltas(static: np.ndarray) -> np.ndarray:
    """Kaldi's add-deltas written from its definition, one frame at a time in float64."""
    scales = [np.array([1.0])]
    for _ in range(2):
        previous = scales[-1]
        grown = np.zeros(len(previous) + 4)
        for j in range(-2, 3):
            for k, value in enumerate(previous):
                grown[k + j + 2] += j * value
        scales.append(grown / sum(j * j for j in range(-2, 3)))
    frames = len(static)
    blocks = []
    for taps in scales:
        reach = len(taps) // 2
        block = np.zeros((frames, static.shape[1]))
        for t in range(frames):
            for k, weight in enumerate(taps):
                block[t] += weight * static[min(max(t + k - reach, 0), frames - 1)]
        blocks.append(block)
    return np.concatenate(blocks, 1)


@pytest.mark.parametrize("name", signals())
def test_static_banks_match_kaldi(name: str) -> None:
    waveform = signals()[name]
    expected = kaldi(waveform)
    actual = features.filterbanks(torch.from_numpy(waveform).float(), RATE)[:, :80].numpy()
    assert actual.shape == expected.shape
    error = np.abs(actual - expected)
    assert error.mean() < 1e-5
    # A bank 60 dB below its frame's loudest is float32 rounding in either program: that is silence here.
    audible = expected > expected.max(1, keepdims=True) - np.log(1e6)
    assert audible.mean() > 0.4
    assert error[audible].max() < 1e-3


@pytest.mark.parametrize("name", signals())
def test_no_further_from_the_exact_value_than_kaldi(name: str) -> None:
    waveform = signals()[name]
    truth = exact(waveform)
    actual = features.filterbanks(torch.from_numpy(waveform).float(), RATE)[:, :80].numpy()
    assert np.abs(actual - truth).mean() <= np.abs(kaldi(waveform) - truth).mean()


def test_deltas_match_plain_numpy() -> None:
    waveform = torch.from_numpy(signals()["speech_like"]).float()
    actual = features.filterbanks(waveform, RATE).numpy()
    expected = plain_deltas(actual[:, :80].astype(np.float64))
    np.testing.assert_allclose(actual, expected, atol=2e-5)


@pytest.mark.parametrize("frames", [1, 2, 3, 5, 9])
def test_deltas_of_few_frames(frames: int) -> None:
    waveform = torch.randn(400 + 160 * (frames - 1), generator=seeded(frames)) * 0.1
    actual = features.filterbanks(waveform, RATE).numpy()
    assert actual.shape == (frames, 240)
    np.testing.assert_allclose(actual, plain_deltas(actual[:, :80].astype(np.float64)), atol=2e-5)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 6000), min_size=1, max_size=5), st.integers(0, 2000), st.integers(0, 1000))
def test_alone_equals_batched(lengths: list[int], extra: int, seed: int) -> None:
    width = max(lengths) + extra
    batch = torch.randn(len(lengths), width, generator=seeded(seed)) * 0.1
    for row, length in zip(batch, lengths, strict=True):
        row[length:] = 0.0
    together = features.filterbanks(batch, RATE, lengths=torch.tensor(lengths))
    for row, length, frames in zip(batch, lengths, together, strict=True):
        alone = features.filterbanks(row[:length], RATE)
        assert len(alone) == features.frame_count(length)
        torch.testing.assert_close(frames[: len(alone)], alone, atol=1e-4, rtol=0)
        assert not frames[len(alone) :].any()


def test_integers_are_at_kaldis_scale() -> None:
    integers = torch.randint(-3000, 3000, (8000,), generator=seeded(), dtype=torch.int16)
    torch.testing.assert_close(
        features.filterbanks(integers, RATE), features.filterbanks(integers.float() / 32768, RATE)
    )


def test_shorter_than_a_window_is_padded_to_one_frame() -> None:
    waveform = torch.randn(100, generator=seeded())
    padded = torch.nn.functional.pad(waveform, (0, 300))
    torch.testing.assert_close(features.filterbanks(waveform, RATE), features.filterbanks(padded, RATE))
    assert features.filterbanks(torch.ones(1), RATE).shape == (1, 240)


def test_silence_is_finite() -> None:
    result = features.filterbanks(torch.zeros(8000), RATE)
    assert result.isfinite().all()
    assert (result[:, :80] == np.float32(np.log(np.float32(features.ENERGY_FLOOR)))).all()


@pytest.mark.parametrize(
    ("waveform", "lengths", "said"),
    [
        (torch.zeros(0), None, "0 samples"),
        (torch.zeros(2, 3, 4), None, "(2, 3, 4)"),
        (torch.zeros(2, 500), torch.tensor([500]), "(1,)"),
        (torch.zeros(2, 500), torch.tensor([500, 501]), "501"),
    ],
)
def test_bad_shapes_are_named(waveform: torch.Tensor, lengths: torch.Tensor | None, said: str) -> None:
    with pytest.raises(ValueError, match=said.replace("(", r"\(").replace(")", r"\)")):
        features.filterbanks(waveform, RATE, lengths=lengths)


@pytest.mark.parametrize("rate", [8000, 11025, 22050, 44100, 48000])
def test_other_rates_are_resampled(rate: int) -> None:
    direct = features.filterbanks(torch.from_numpy(chirp(1.0, 100, 3000)).float(), RATE)
    other = features.filterbanks(torch.from_numpy(chirp(1.0, 100, 3000, rate)).float(), rate)
    assert abs(len(direct) - len(other)) <= 1
    frames = min(len(direct), len(other))
    # Compare where the chirp is: each frame's loudest bank.
    loudest = direct[:frames, :80].argmax(1)
    steps = torch.arange(frames)
    difference = (direct[steps, loudest] - other[steps, loudest]).abs()
    assert difference[5:-5].max() < 0.1


def test_own_rate_matches_kaldi_too() -> None:
    waveform = signals()["noise"]
    actual = features.filterbanks(torch.from_numpy(waveform).float(), 22050, model_rate=None)[:, :80].numpy()
    assert np.abs(actual - kaldi(waveform, 22050)).mean() < 1e-5


def test_statistics_equal_those_of_everything_at_once() -> None:
    pieces = [torch.randn(n, 240, generator=seeded(n)) * 3 + 1000 for n in (1, 70, 300, 0, 5)]
    pieces = [torch.cat([piece[:, :239], torch.full((len(piece), 1), 7.0)], 1) for piece in pieces]
    mean, deviation = features.mean_and_deviation(pieces)
    together = torch.cat(pieces).double()
    torch.testing.assert_close(mean, together.mean(0).float())
    torch.testing.assert_close(deviation[:239], together.std(0, unbiased=False)[:239].float())
    assert deviation[239] == 1.0
    with pytest.raises(ValueError, match="no frames"):
        features.mean_and_deviation([])


def test_frames_are_counted_without_making_them() -> None:
    for samples in (1, 399, 400, 559, 560, 561, 16000):
        assert features.frame_count(samples) == len(features.filterbanks(torch.ones(samples), RATE))
    assert features.frame_count(0) == 0


# Augmentation


def test_all_off_changes_nothing() -> None:
    waveform = torch.randn(8000, generator=seeded())
    plain = configs.Augmentation()
    torch.testing.assert_close(augmentation.augment_waveform(waveform, RATE, plain, seeded()), waveform)
    frames = torch.randn(50, 240, generator=seeded())
    torch.testing.assert_close(augmentation.augment_features(frames, plain, seeded()), frames)


def test_a_seed_reproduces_and_another_differs() -> None:
    waveform = torch.randn(8000, generator=seeded()) * 0.1
    everything = configs.Augmentation(
        speed=(0.9, 1.0, 1.1), gain_db=(-6, 6), noise=1.0, telephone=0.5, spec_augment=True
    )
    runs = [augmentation.augment_waveform(waveform, RATE, everything, seeded(seed)) for seed in (1, 1, 2)]
    assert torch.equal(runs[0], runs[1])
    assert runs[0].shape != runs[2].shape or not torch.equal(runs[0], runs[2])
    frames = torch.randn(80, 240, generator=seeded())
    masked = [augmentation.augment_features(frames, everything, seeded(seed)) for seed in (1, 1, 2)]
    assert torch.equal(masked[0], masked[1])
    assert not torch.equal(masked[0], masked[2])


@pytest.mark.parametrize("factor", [0.9, 1.1])
def test_speed_moves_pitch_and_length(factor: float) -> None:
    tone = torch.sin(2 * np.pi * 1000 * torch.arange(RATE) / RATE)
    faster = augmentation.speed_perturb(tone, factor)
    assert abs(len(faster) - RATE / factor) <= 1
    peak = torch.fft.rfft(faster).abs().argmax() * RATE / len(faster)
    assert abs(float(peak) - 1000 * factor) < 2


@pytest.mark.parametrize("kind", augmentation.NOISES)
@pytest.mark.parametrize("snr_db", [0.0, 20.0])
def test_noise_has_the_ratio_it_was_asked_for(kind: str, snr_db: float) -> None:
    waveform = torch.randn(RATE, generator=seeded()) * 0.1
    noisy = augmentation.add_noise(waveform, RATE, kind=kind, snr_db=snr_db, generator=seeded(3))
    ratio = waveform.square().sum() / (noisy - waveform).square().sum()
    assert abs(10 * np.log10(float(ratio)) - snr_db) < 0.01


def test_noises_have_their_spectra() -> None:
    def octave_power(noise: torch.Tensor, low: float) -> float:
        spectrum = torch.fft.rfft(noise).abs().square()
        hertz = torch.fft.rfftfreq(len(noise), 1 / RATE)
        return 10 * np.log10(float(spectrum[(hertz >= low) & (hertz < 2 * low)].sum()))

    make = {kind: noise(8 * RATE, RATE, seeded(5)) for kind, noise in augmentation.NOISES.items()}
    assert abs(octave_power(make["white"], 2000) - octave_power(make["white"], 250) - 9.0) < 1.0
    assert abs(octave_power(make["pink"], 2000) - octave_power(make["pink"], 250)) < 1.0
    assert octave_power(make["babble"], 250) - octave_power(make["babble"], 2000) > 10
    envelope = make["babble"].square().unfold(0, 800, 800).mean(1)
    steady = make["white"].square().unfold(0, 800, 800).mean(1)
    assert envelope.std() / envelope.mean() > 3 * steady.std() / steady.mean()


def test_telephone_keeps_its_band_only() -> None:
    time = torch.arange(RATE) / RATE
    for hertz, kept in ((100, False), (1000, True), (3000, True), (3900, False), (6000, False)):
        tone = 0.5 * torch.sin(2 * np.pi * hertz * time)
        line = augmentation.telephone(tone, RATE)
        assert line.shape == tone.shape
        gain = 10 * np.log10(1e-12 + float(line[2000:-2000].square().mean() / tone.square().mean()))
        assert (abs(gain) < 1) if kept else (gain < -20), (hertz, gain)


def test_spec_augment_masks_whole_stripes_with_the_mean() -> None:
    frames = torch.randn(200, 240, generator=seeded())
    mean = frames.mean(0)
    seen_time = seen_frequency = False
    for seed in range(20):
        masked = augmentation.spec_augment(frames, generator=seeded(seed))
        changed = (masked != frames).view(200, 3, 80)
        rows, banks = changed.all((1, 2)), changed.all(0)
        assert torch.equal(banks[0], banks[1]) and torch.equal(banks[1], banks[2])
        assert torch.equal(changed.any(1), rows[:, None] | banks[0][None])
        assert torch.equal(masked[masked != frames], mean.expand_as(frames)[masked != frames])
        assert rows.sum() <= 80 and banks[0].sum() <= 54
        seen_time |= bool(rows.any())
        seen_frequency |= bool(banks.any())
    assert seen_time and seen_frequency


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"telephone": 1.5}, "telephone"),
        ({"speed": (0.0,)}, "speed"),
        ({"gain_db": (3, 1)}, "gain_db"),
        ({"noise": 0.5, "noise_kinds": ("brown",)}, "noise_kinds"),
    ],
)
def test_bad_augmentation_names_the_field(options: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        configs.Augmentation(**options)
