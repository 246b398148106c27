"""What experiments share: trainings made once, shared and resumed, and rows of errors on the test set."""

import contextlib
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
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
from imputer.research import provenance, results
from imputer.research.datasets import DataSet
from imputer.support import atomic_files, progress
from imputer.vocabulary import Vocabulary

CONTINUED_RATE = 0.67  # of the learning rate, when training starts from the expert's weights
Objective = Literal["ctc", "imitation", "dynamic_programming"]


@dataclass(frozen=True)
class Trained:
    """A finished training: its run folder, and what it started from."""

    folder: Path
    steps: int  # in all, with those of the model it started from
    start: "Trained | None" = None

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def record(self) -> dict[str, Any]:
        """Settings, code, processor and time of this training alone."""
        path = self.folder / "provenance.json"
        return dict(json.loads(path.read_text())) if path.is_file() else {}


def way(block_size: int, strategy: str = "block", **options: float) -> Options:
    """A way to decode: a number of passes, a strategy and its options."""
    return Options(block_size, strategy, strategy_options=tuple(options.items()))


Row = dict[str, Any]


@dataclass
class Lab:
    """A data set, the folder of its trainings, and the seeds of their repetitions."""

    dataset: DataSet
    runs: Path
    seeds: tuple[int, ...] = (0,)
    models: Path | None = None  # run folders that were trained elsewhere
    lm: Any = None  # a language model, to count the errors that it would fix
    used: dict[Path, Trained] = field(default_factory=dict)

    def trainings(self, seed: int) -> "Trainings":
        return Trainings(self.dataset, self.runs, seed, self.used)

    @property
    def first(self) -> "Trainings":
        """Those of the first seed, where one model is enough."""
        return self.trainings(self.seeds[0])

    def utterances(self, at_most: int | None = None) -> list[Utterance]:
        """The utterances of the test set that are scored."""
        return evaluation.spread(Manifest(self.dataset.test), at_most or self.dataset.scored)

    def rows(self, make: "Maker", ways: Mapping[str, Options], *, at_most: int | None = None) -> list[Row]:
        """Train with every seed, decode the test set in every way: a row of errors for each, by name."""
        made = [make(self.trainings(seed)) for seed in self.seeds]
        utterances = self.utterances(at_most)
        found = [transcribed(one, self.dataset, utterances, list(ways.values())) for one in made]
        score = self._score(made[0], [u.text for u in utterances])
        return [
            {
                "name": name,
                "trained": [model.folder.name for model in made],
                "steps": made[0].steps,
                **self.errors(one, utterances, [each[one] for each in found], score),
            }
            for name, one in ways.items()
        ]

    def row(self, name: str, make: "Maker", one: Options) -> Row:
        """The same for one way of decoding."""
        return self.rows(make, {name: one})[0]

    def _score(self, trained: "Trained", texts: Iterable[str]) -> Callable[[list[str]], float] | None:
        """How likely words are under the language model, if there is one.

        Every token is given the mean of the references, so that shorter texts are not preferred.
        """
        if (lm := self.lm) is None:
            return None
        vocabulary = Vocabulary.load(trained.model / models.TOKENIZER)
        lm.check(vocabulary)
        references = [vocabulary.encode(text) for text in texts]
        mean = sum(lm.score(one, end=True) for one in references) / sum(map(len, references))

        def score(words: list[str]) -> float:
            tokens = vocabulary.encode(" ".join(words))
            return float(lm.score(tokens, end=True) - mean * len(tokens))

        return score

    def errors(
        self,
        one: Options,
        utterances: Sequence[Utterance],
        by_seed: Sequence[Sequence["Hypothesis"]],
        score: Callable[[list[str]], float] | None = None,
    ) -> Row:
        """The errors of every utterance with every seed, in words, characters and tokens."""
        texts = [u.text for u in utterances]

        def counted(count: Callable[[str, Hypothesis], int]) -> list[list[int]]:
            return [[count(text, h) for text, h in zip(texts, seed, strict=True)] for seed in by_seed]

        tokens = [[kinds(h.reference, h.tokens) for h in seed] for seed in by_seed]
        passes = [h.passes for seed in by_seed for h in seed]
        found: Row = {
            "way": described(one),
            "passes": sum(passes) / len(passes),
            "words": counted(lambda text, h: scoring.word_errors(text, h.text).total),
            "characters": counted(lambda text, h: scoring.character_errors(text, h.text).total),
            "tokens": {
                "length": [len(h.reference) for h in by_seed[0]],
                **{kind: [[each[kind] for each in seed] for seed in tokens] for kind in results.KINDS},
            },
        }
        if score is not None:
            found["fixable"] = counted(lambda text, h: scoring.fixable(text.split(), h.text.split(), score))
        return found


def described(one: Options) -> dict[str, Any]:
    """A way to decode as plain values."""
    options = [list(pair) for pair in one.strategy_options]
    return {"block_size": one.block_size, "strategy": str(one.strategy), "options": options}


def kinds(reference: Sequence[int], hypothesis: Sequence[int]) -> dict[str, int]:
    """Errors in tokens: wrong, dropped, written twice, and otherwise inserted."""
    errors, twice = scoring.count(reference, hypothesis), scoring.doubled(reference, hypothesis)
    counts = (errors.substitutions, errors.deletions, twice, errors.insertions - twice)
    return dict(zip(results.KINDS, counts, strict=True))


@dataclass(frozen=True)
class Trainings:
    """Trainings on one data set with one seed.

    Each has a run folder that is named after everything that determines it, code included. One that is finished is
    used again, by whichever experiment needs it; one that was interrupted resumes.
    """

    dataset: DataSet
    runs: Path
    seed: int
    used: dict[Path, Trained]

    def expert(self, **model: Any) -> Trained:
        """The CTC expert: the data set's own number of steps."""
        return self.ctc(self.dataset.expert_steps, **model)

    def ctc(self, steps: int, *, from_expert: bool = False, **model: Any) -> Trained:
        """CTC, from scratch or continued from the expert."""
        start = self.expert(**model) if from_expert else None
        return self._trained(self._settings("ctc", steps, model), start, expert=None)

    def imputer(
        self,
        objective: Objective = "dynamic_programming",
        steps: int = 0,
        *,
        from_expert: bool = False,
        schedule_steps: int = 0,
        merge_repeats: bool = False,
        model: Mapping[str, Any] | None = None,
        **rollin: Any,
    ) -> Trained:
        """An Imputer on the expert's alignments, by default of the main tables' length.

        ``model`` changes its network and not the expert's.
        """
        topology = {"merge_repeats": True} if merge_repeats else {}
        expert = self.expert(**topology)
        settings = self._settings(objective, steps or self.dataset.main_steps, topology | dict(model or {}))
        settings = replace(
            settings,
            rollin=replace(settings.rollin, **rollin),
            training=replace(settings.training, schedule_steps=schedule_steps),
        )
        return self._trained(settings, expert if from_expert else None, expert)

    def _settings(self, objective: Objective, steps: int, model: dict[str, Any]) -> configs.Config:
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
            say(f"{name}: {settings.training.objective}, {settings.training.steps} steps")
            store = aligned(expert, self.dataset) if expert else ""
            placed = replace(
                settings,
                vocabulary=replace(settings.vocabulary, tokenizer=str(self._tokenizer(settings))),
                rollin=replace(settings.rollin, alignments=str(store)),
                training=replace(settings.training, start_from=str(start.model) if start else ""),
            )
            with recorded(trained.folder / "provenance.json", settings, self.dataset):
                training.train(placed, trained.folder)
            # The largest files, and no longer needed.
            shutil.rmtree(trained.folder / "checkpoints", ignore_errors=True)
        return trained

    def _tokenizer(self, settings: configs.Config) -> Path:
        """One vocabulary for all trainings on a data set."""
        wanted = settings.vocabulary
        content = provenance.digest([provenance.manifest(self.dataset.train), wanted.units, wanted.size])
        path = self.runs / f"{self.dataset.name}-{content}.tokenizer"
        if not path.is_file():
            texts = [utterance.text for utterance in Manifest(self.dataset.train)]
            with atomic_files.replacing(path) as temporary:
                Vocabulary.train(texts, size=wanted.size, units=wanted.units).save(temporary)
        return path


Maker = Callable[[Trainings], Trained]


def dp(steps: int = 0, **options: Any) -> Maker:
    """How to make an Imputer by dynamic programming, with the options of ``Trainings.imputer``."""
    return lambda t: t.imputer("dynamic_programming", steps, **options)


def variant(**options: Any) -> Maker:
    """The main tables' DP with these options, stopped early: to be compared with other variants only."""
    return lambda t: t.imputer(
        "dynamic_programming", t.dataset.analysis_steps, schedule_steps=t.dataset.main_steps, **options
    )


def run_name(
    settings: configs.Config, dataset: DataSet, start: Trained | None, expert: Trained | None
) -> str:
    """A name for everything that determines a training, and nothing else: settings, data, models it uses, and code.

    Only settings that differ from their defaults count, so that a new one does not rename old runs.
    """
    changed = provenance.changed(settings)
    for name in training.CHANGEABLE:
        changed.pop(name, None)
    if settings.training.objective == "ctc":
        changed = {name: value for name, value in changed.items() if not name.startswith("rollin.")}
    content = [
        sorted(changed.items()),
        provenance.manifest(dataset.train),
        start.folder.name if start else "",
        expert.folder.name if expert else "",
        provenance.code(provenance.TRAINING),
    ]
    kind = {"ctc": "ctc", "imitation": "im", "dynamic_programming": "dp"}[settings.training.objective]
    return f"{dataset.name}-{kind}-{settings.training.steps}-{provenance.digest(content)}"


@contextlib.contextmanager
def recorded(path: Path, settings: configs.Config, dataset: DataSet) -> Iterator[None]:
    """Record how a training was made; the seconds of an interrupted one are added up."""
    started = time.monotonic()
    before = json.loads(path.read_text())["seconds"] if path.is_file() else 0.0
    try:
        yield
    finally:
        commit, dirty = provenance.checkout()
        content = {
            "settings": provenance.changed(settings, dataset.settings),
            "seconds": round(before + time.monotonic() - started, 1),
            "processor": provenance.processor(),
            "commit": commit,
            "dirty": dirty,
            "code": provenance.code(provenance.TRAINING),
        }
        atomic_files.write_text(path, json.dumps(content))


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


# --- decoding


@dataclass(frozen=True)
class Hypothesis:
    """One utterance decoded: text, tokens, those of the reference, passes."""

    text: str
    tokens: list[int]
    reference: list[int]
    passes: int


def transcribed(
    trained: Trained, dataset: DataSet, utterances: Sequence[Utterance], ways: Sequence[Options]
) -> dict[Options, list[Hypothesis]]:
    """Decode utterances in every way; each way is kept in the run folder, so that it is done once."""
    content = provenance.digest([[[u.id, u.text] for u in utterances], provenance.code(provenance.DECODING)])
    paths = {one: trained.folder / "decoded" / f"{content}-{one.name}.json" for one in ways}
    missing = [one for one in ways if not paths[one].is_file()]
    if missing:
        named = ", ".join(one.name for one in missing)
        say(f"{trained.folder.name}: decoding {len(utterances)} utterances, {named}")
        network, vocabulary = models.load(trained.model)
        references = [vocabulary.encode(u.text) for u in utterances]
        extract = network.front_end.reader(dataset.settings.data, NO_AUGMENTATION, utterances)
        batches = list(encoded(network, utterances, extract, dataset.settings.data.batch_seconds))
        total = len(batches) * sum(one.passes(network) for one in missing)
        with progress.bar("decoding", total, unit="passes") as advance:
            for one in missing:
                found: dict[int, Hypothesis] = {}
                for places, acoustic, lengths in batches:
                    items = decoding.decode(network, acoustic, lengths, one)
                    for place, item in zip(places, items, strict=True):
                        if isinstance(item, ImputerError):
                            raise ImputerError(f"{utterances[place].id}: {item}")
                        tokens = item.tokens(network)
                        text = vocabulary.decode(tokens)
                        found[place] = Hypothesis(text, tokens, references[place], item.passes)
                    advance(one.passes(network), one.name)
                kept = json.dumps([asdict(found[i]) for i in range(len(utterances))])
                atomic_files.write_text(paths[one], kept)
    return {one: [Hypothesis(**each) for each in json.loads(path.read_text())] for one, path in paths.items()}


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
    for batch in progress.track(batching.batches(dataset, plan), "encoding", len(plan)):
        with torch.inference_mode():
            acoustic, frame_lengths = network.encode(batch.features, batch.feature_lengths)
        yield batch.indices, acoustic[:, : int(frame_lengths.max())], frame_lengths


def curve(trained: Trained) -> list[dict[str, float]]:
    """Validation error rates against steps, those of the model it started from before its own."""
    before = curve(trained.start) if trained.start else []
    offset = trained.start.steps if trained.start else 0
    lines = [json.loads(line) for line in (trained.folder / "metrics.jsonl").read_text().splitlines()]
    measured = [line for line in lines if "valid" in line and (line["step"] or not before)]
    return before + [{"step": offset + line["step"], **line["valid"]} for line in measured]


def say(line: str) -> None:
    """A line of progress."""
    print(line, file=sys.stderr, flush=True)
