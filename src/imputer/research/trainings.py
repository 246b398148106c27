"""What experiments share: trainings made once, shared and resumed, and scores of what they made on the test set."""

import contextlib
import dataclasses
import hashlib
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from imputer import configs, decoding, evaluation, models, training
from imputer.aligner.corpus import align_manifests
from imputer.configs import NO_AUGMENTATION
from imputer.data import batching
from imputer.data.manifest import Manifest, Utterance
from imputer.decoding import Options
from imputer.errors import ImputerError
from imputer.evaluation import scoring
from imputer.model import Imputer
from imputer.research import report
from imputer.research.datasets import DataSet
from imputer.support import atomic_files, progress
from imputer.vocabulary import Vocabulary

# Settings that say where something is; the content takes their place in the name of a run.
PLACES = ("data.train", "data.valid", "vocabulary.tokenizer", "rollin.alignments", "training.start_from")
CONTINUED_RATE = 0.67  # of the learning rate, when training goes on from the expert's weights


@dataclass(frozen=True)
class Trained:
    """A finished training."""

    folder: Path  # of the run
    steps: int  # in all, with those of the model it started from
    start: "Trained | None" = None

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def processor(self) -> str:
        """What it was trained on; empty if that was not written down."""
        path = self.folder / "processor"
        return path.read_text().strip() if path.is_file() else ""

    @property
    def seconds(self) -> float:
        """Wall clock of this training alone; what a SIGKILL cut short is not counted."""
        path = self.folder / "seconds"
        return float(path.read_text()) if path.is_file() else 0.0


@dataclass(frozen=True)
class Score:
    """How a model, or one model a seed, fared on the test set in one way of decoding."""

    options: Options
    words: list[scoring.Errors]  # of each utterance, summed over seeds
    characters: list[scoring.Errors]
    passes: float  # mean over utterances
    by_seed: list[float]  # word error rates

    @property
    def wer(self) -> scoring.Interval:
        return scoring.interval(self.words)

    @property
    def cer(self) -> scoring.Interval:
        return scoring.interval(self.characters)

    def row(self, name: str, **more: Any) -> dict[str, Any]:
        """The score as plain values under a name."""
        return {
            "name": name,
            **more,
            "block_size": self.options.block_size,
            "strategy": self.options.strategy,
            "options": dict(self.options.strategy_options),
            "passes": self.passes,
            "wer": dataclasses.asdict(self.wer),
            "cer": dataclasses.asdict(self.cer),
            "wer_by_seed": self.by_seed,
            "word_errors": [errors.total for errors in self.words],
            "character_errors": [errors.total for errors in self.characters],
            "kinds": {
                unit: {kind: sum(getattr(one, kind) for one in errors) for kind in scoring.KINDS}
                for unit, errors in (("words", self.words), ("characters", self.characters))
            },
        }


def compared(first: tuple[str, Score], second: tuple[str, Score]) -> dict[str, Any]:
    """The second's word error rate less the first's, on the same utterances: interval, p-value, relative change."""
    found = scoring.compare(first[1].words, second[1].words)
    before = first[1].wer.value
    return {
        "first": first[0],
        "second": second[0],
        "base": before,
        "difference": dataclasses.asdict(found.difference),
        "relative": found.difference.value / before if before else 0.0,
        "p_value": found.p_value,
    }


def dp(steps: int, **options: Any) -> "Maker":
    """How to make an Imputer by dynamic programming, with the options of ``Trainings.imputer``."""
    return lambda t: t.imputer("dynamic_programming", steps, **options)


def variant(**options: Any) -> "Maker":
    """The main tables' DP but for these options, stopped early: to be compared with other variants only."""
    return lambda t: t.imputer(
        "dynamic_programming", t.dataset.analysis_steps, schedule_steps=t.main_steps, **options
    )


@dataclass
class Lab:
    """A data set, where its trainings live, and the seeds everything is repeated with."""

    dataset: DataSet
    runs: Path
    seeds: tuple[int, ...] = (0,)
    used: dict[Path, Trained] = field(default_factory=dict)

    def trainings(self, seed: int) -> "Trainings":
        return Trainings(self.dataset, self.runs, seed, self.used)

    @property
    def first(self) -> "Trainings":
        """Those of the first seed, where one model is enough."""
        return self.trainings(self.seeds[0])

    def scores(self, make: "Maker", ways: Sequence[Options], *, at_most: int | None = None) -> list[Score]:
        """Train what ``make`` says with every seed, and decode the test set in every way."""
        utterances = evaluation.spread(Manifest(self.dataset.test), at_most or self.dataset.scored)
        found = [
            transcribed(make(self.trainings(seed)), self.dataset, utterances, ways) for seed in self.seeds
        ]
        return [_pooled(options, utterances, [one[options] for one in found]) for options in ways]

    def score(self, make: "Maker", options: Options, *, at_most: int | None = None) -> Score:
        """The same for one way of decoding."""
        return self.scores(make, [options], at_most=at_most)[0]


@dataclass(frozen=True)
class Trainings:
    """Trainings on one data set with one seed.

    Each has a run folder that is named after everything that determines it. One that is finished is used again, by
    whichever experiment needs it; one that was interrupted goes on.
    """

    dataset: DataSet
    runs: Path
    seed: int
    used: dict[Path, Trained]

    def expert(self, **model: Any) -> Trained:
        """The CTC expert: the data set's own number of steps."""
        return self.ctc(self.dataset.expert_steps, **model)

    def ctc(self, steps: int, *, from_expert: bool = False, **model: Any) -> Trained:
        """CTC, from scratch or going on from the expert."""
        start = self.expert(**model) if from_expert else None
        return self._trained(self._settings("ctc", steps, model), start, expert=None)

    def imputer(
        self,
        objective: Literal["imitation", "dynamic_programming"],
        steps: int,
        *,
        from_expert: bool = False,
        schedule_steps: int = 0,
        model: dict[str, Any] | None = None,
        **rollin: Any,
    ) -> Trained:
        """An Imputer on the expert's alignments, from scratch or from the expert's weights."""
        expert = self.expert(**(model or {}))
        settings = self._settings(objective, steps, model or {})
        settings = replace(
            settings,
            rollin=replace(settings.rollin, **rollin),
            training=replace(settings.training, schedule_steps=schedule_steps),
        )
        return self._trained(settings, expert if from_expert else None, expert)

    def main(self, objective: Literal["imitation", "dynamic_programming"] = "dynamic_programming") -> Trained:
        """The Imputer of the main tables, from scratch."""
        return self.imputer(objective, self.main_steps)

    @property
    def main_steps(self) -> int:
        """Of an Imputer of the main tables, from scratch."""
        return self.dataset.expert_steps + self.dataset.imputer_steps

    def _settings(self, objective: Any, steps: int, model: dict[str, Any]) -> configs.Config:
        base = self.dataset.settings
        data = replace(base.data, train=(str(self.dataset.train),), valid=(str(self.dataset.valid),))
        made = replace(
            base.training,
            objective=objective,
            steps=steps,
            warmup_steps=min(base.training.warmup_steps, max(1, steps // 4)),
            seed=self.seed,
            threads=0,
        )
        return replace(base, data=data, model=replace(base.model, **model), training=made)

    def _trained(self, settings: configs.Config, start: Trained | None, expert: Trained | None) -> Trained:
        if start:
            rate = settings.training.learning_rate * CONTINUED_RATE
            settings = replace(settings, training=replace(settings.training, learning_rate=rate))
        name = run_name(settings, self.dataset, start, expert)
        trained = Trained(self.runs / name, settings.training.steps + (start.steps if start else 0), start)
        self.used[trained.folder] = trained
        if not (trained.model / models.CONFIG).is_file():
            tokenizer = self._tokenizer(settings)
            settings = replace(
                settings,
                vocabulary=replace(settings.vocabulary, tokenizer=str(tokenizer)),
                rollin=replace(
                    settings.rollin, alignments=str(aligned(expert, self.dataset)) if expert else ""
                ),
                training=replace(settings.training, start_from=str(start.model) if start else ""),
            )
            say(f"{name}: {settings.training.objective}, {settings.training.steps} steps")
            with timed(trained.folder / "seconds"):
                training.train(settings, trained.folder)
            (trained.folder / "processor").write_text(report.processor() + "\n")
            shutil.rmtree(
                trained.folder / "checkpoints", ignore_errors=True
            )  # most of the disk, no longer needed
        return trained

    def _tokenizer(self, settings: configs.Config) -> Path:
        """One vocabulary for all trainings on a data set."""
        wanted = settings.vocabulary
        content = _digest([manifest_digest(self.dataset.train), wanted.units, wanted.size])
        path = self.runs / f"{self.dataset.name}-{content}.tokenizer"
        if not path.is_file():
            texts = [utterance.text for utterance in Manifest(self.dataset.train)]
            with atomic_files.replacing(path) as temporary:
                Vocabulary.train(texts, size=wanted.size, units=wanted.units).save(temporary)
        return path


Maker = Callable[[Trainings], Trained]


def run_name(
    settings: configs.Config, dataset: DataSet, start: Trained | None, expert: Trained | None
) -> str:
    """A name for everything that determines a training, and nothing else.

    Only settings that differ from their defaults count, so that a new one does not rename old runs.
    """
    plain = configs.Config()
    changed = {
        f"{section}.{key}": value
        for section in vars(settings)
        for key, value in configs.vars_of(getattr(settings, section)).items()
        if value != configs.vars_of(getattr(plain, section))[key]
    }
    for name in (*PLACES, *training.CHANGEABLE):
        changed.pop(name, None)
    if settings.training.objective == "ctc":
        changed = {name: value for name, value in changed.items() if not name.startswith("rollin.")}
    content = [
        sorted(changed.items()),
        manifest_digest(dataset.train),
        start.folder.name if start else "",
        expert.folder.name if expert else "",
    ]
    kind = {"ctc": "ctc", "imitation": "im", "dynamic_programming": "dp"}[settings.training.objective]
    return f"{dataset.name}-{kind}-{settings.training.steps}-{_digest(content)}"


def manifest_digest(path: Path) -> str:
    """What a manifest says, wherever its audio lies."""
    return _digest([[u.id, round(u.duration, 3), u.text] for u in Manifest(path)])


def _digest(content: Any) -> str:
    return hashlib.blake2b(json.dumps(content, default=str).encode(), digest_size=5).hexdigest()


def aligned(expert: Trained, dataset: DataSet) -> Path:
    """The training set's best alignments under the expert, made once (eqn:argmax_alignment)."""
    store = expert.folder / f"{dataset.name}.alignments"
    if not store.is_file():
        data = dataset.settings.data
        done = align_manifests(
            [dataset.train],
            store,
            expert.model,
            batch_seconds=data.batch_seconds,
            workers=data.workers,
            frames_cache=data.frames_cache,
        )
        say(f"{done.aligned} of {done.utterances} utterances aligned")
    return store


# --- decoding and scoring


@dataclass(frozen=True)
class Hypothesis:
    """What was recognised of one utterance."""

    text: str
    passes: int


def transcribed(
    trained: Trained, dataset: DataSet, utterances: Sequence[Utterance], ways: Sequence[Options]
) -> dict[Options, list[Hypothesis]]:
    """Decode utterances in every way; each way is kept in the run folder, so that it is done once."""
    content = _digest([[u.id, u.text] for u in utterances])
    paths = {way: trained.folder / "heard" / f"{content}-{way.name}.json" for way in ways}
    missing = [way for way in ways if not paths[way].is_file()]
    if missing:
        names = ", ".join(way.name for way in missing)
        say(f"{trained.folder.name}: decoding {len(utterances)} utterances, {names}")
        network, vocabulary = models.load(trained.model)
        extract = network.front_end.reader(dataset.settings.data, NO_AUGMENTATION, utterances)
        batches = list(encoded(network, utterances, extract, dataset.settings.data.batch_seconds))
        total = len(batches) * sum(way.passes(network) for way in missing)
        with progress.bar("decoding", total, unit="passes") as advance:
            for way in missing:
                found: dict[int, Hypothesis] = {}
                for indices, acoustic, lengths in batches:
                    for place, result in zip(
                        indices, decoding.decode(network, acoustic, lengths, way), strict=True
                    ):
                        if isinstance(result, ImputerError):
                            raise ImputerError(f"{utterances[place].id}: {result}")
                        text = vocabulary.decode(result.tokens(network))
                        found[place] = Hypothesis(text, result.passes)
                    advance(way.passes(network), way.name)
                with atomic_files.replacing(paths[way]) as temporary:
                    ordered = [dataclasses.asdict(found[i]) for i in range(len(utterances))]
                    temporary.write_text(json.dumps(ordered))
    return {way: [Hypothesis(**one) for one in json.loads(path.read_text())] for way, path in paths.items()}


def encoded(
    network: Imputer,
    utterances: Sequence[Utterance],
    extract: batching.Extract,
    batch_seconds: float,
) -> Iterator[tuple[list[int], Tensor, Tensor]]:
    """(places, acoustic, frame_lengths) in batches of like length; an utterance that cannot be read is an error."""
    dataset = batching.SpeechDataset(utterances, None, extract, strict=True)
    lengths = [network.front_end.feature_frames(u.duration) for u in utterances]
    budget = network.front_end.feature_frames(batch_seconds)
    plan = batching.plan_epoch(lengths, frame_budget=budget, seed=0, epoch=0)
    for batch in progress.track(batching.batches(dataset, plan), "listening", len(plan)):
        with torch.inference_mode():
            acoustic, frame_lengths = network.encode(batch.features, batch.feature_lengths)
        yield batch.indices, acoustic[:, : int(frame_lengths.max())], frame_lengths


def _pooled(
    options: Options, utterances: Sequence[Utterance], seeds: Sequence[Sequence[Hypothesis]]
) -> Score:
    """Scores of all seeds as one: an utterance's errors are summed over them, and utterances are resampled."""
    words = [[scoring.word_errors(u.text, h.text) for u, h in zip(utterances, s, strict=True)] for s in seeds]
    characters = [
        [scoring.character_errors(u.text, h.text) for u, h in zip(utterances, s, strict=True)] for s in seeds
    ]
    passes = [one.passes for seed in seeds for one in seed]
    return Score(
        options,
        [scoring.total(errors) for errors in zip(*words, strict=True)],
        [scoring.total(errors) for errors in zip(*characters, strict=True)],
        sum(passes) / len(passes),
        [scoring.total(seed).rate for seed in words],
    )


# --- what happened while training


def curve(trained: Trained) -> list[dict[str, float]]:
    """Validation error rates against steps, those of the model it started from before its own."""
    before = curve(trained.start) if trained.start else []
    offset = trained.start.steps if trained.start else 0
    lines = [json.loads(line) for line in (trained.folder / "metrics.jsonl").read_text().splitlines()]
    return before + [{"step": offset + line["step"], **line["valid"]} for line in lines if "valid" in line]


@contextlib.contextmanager
def timed(path: Path) -> Iterator[None]:
    """Add the seconds spent inside to those in the file, also when stopped by a signal."""
    started = time.monotonic()
    before = float(path.read_text()) if path.is_file() else 0.0
    try:
        yield
    finally:
        with atomic_files.replacing(path) as temporary:
            temporary.write_text(f"{before + time.monotonic() - started:.1f}")


def say(line: str) -> None:
    """A line of progress."""
    print(line, file=sys.stderr, flush=True)
