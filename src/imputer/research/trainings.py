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
from imputer.research.results import Result
from imputer.support import atomic_files, progress
from imputer.vocabulary import Vocabulary

CONTINUED_RATE = 0.67  # of the learning rate, when training starts from the expert's weights
Objective = Literal["ctc", "imitation", "dynamic_programming"]


@dataclass(frozen=True)
class Trained:
    """A training: its run folder, and what it started from. It runs when its model is first needed."""

    folder: Path
    steps: int  # in all, with those of the model it started from
    start: "Trained | None" = None
    run: Callable[[], None] = field(default=lambda: None, compare=False, repr=False)

    @property
    def model(self) -> Path:
        """The folder of the finished model."""
        folder = self.folder / "model"
        if not (folder / models.CONFIG).is_file():
            self.run()
        return folder

    @property
    def record(self) -> dict[str, Any]:
        """Settings, code, processor and time of this training alone."""
        path = self.folder / "provenance.json"
        return dict(json.loads(path.read_text())) if path.is_file() else {}


def way(block_size: int, strategy: str = "block", **options: float) -> Options:
    """A way to decode: a number of passes, a strategy and its options."""
    return Options(block_size, strategy, strategy_options=tuple(options.items()))


Row = dict[str, Any]
BY_SEED = ("words", "characters", "fixable")  # what a row holds for every seed and utterance


@dataclass
class Lab:
    """A data set, the folder of its trainings, and the seeds of their repetitions."""

    dataset: DataSet
    runs: Path
    seeds: tuple[int, ...] = (0,)
    models: Path | None = None  # run folders that were trained elsewhere
    lm: Any = None  # a language model, to count the errors that it would fix
    earlier: Result | None = (
        None  # a results file of the same data and code, whose seeds need not be trained again
    )
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
        # A model that was trained elsewhere is the same with every seed, and counts once.
        made = list({one.folder: one for one in (make(self.trainings(seed)) for seed in self.seeds)}.values())
        utterances = self.utterances(at_most)
        found = [self._known(one, ways, utterances) or self._decoded(one, ways, utterances) for one in made]
        return [
            {
                "name": name,
                "trained": [model.folder.name for model in made],
                "steps": made[0].steps,
                "way": described(one),
                **together([each[name] for each in found]),
            }
            for name, one in ways.items()
        ]

    def _known(
        self, trained: "Trained", ways: Mapping[str, Options], utterances: Sequence[Utterance]
    ) -> dict[str, Row]:
        """The errors of a training by row, out of the earlier results file; empty if it lacks one of them."""
        if not self.earlier or self.earlier["utterances"]["ids"] != [u.id for u in utterances]:
            return {}
        found = {}
        for name, one in ways.items():
            row = self.earlier.rows.get(name)
            if not row or trained.folder.name not in row["trained"] or row["way"] != described(one):
                return {}
            found[name] = of_seed(row, row["trained"].index(trained.folder.name))
        say(f"{trained.folder.name}: its errors are kept from {self.earlier.name}.json")
        return found

    def _decoded(
        self, trained: "Trained", ways: Mapping[str, Options], utterances: Sequence[Utterance]
    ) -> dict[str, Row]:
        """The errors of a training by row."""
        found = transcribed(trained, self.dataset, utterances, list(ways.values()))
        score = self._score(trained, [u.text for u in utterances])
        return {name: errors(utterances, found[one], score) for name, one in ways.items()}

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
    utterances: Sequence[Utterance],
    hypotheses: Sequence["Hypothesis"],
    score: Callable[[list[str]], float] | None = None,
) -> Row:
    """The errors of every utterance, in words, characters and tokens."""
    pairs = list(zip([u.text for u in utterances], hypotheses, strict=True))
    tokens = [kinds(h.reference, h.tokens) for h in hypotheses]
    found: Row = {
        "passes": sum(h.passes for h in hypotheses) / len(hypotheses),
        "words": [scoring.word_errors(text, h.text).total for text, h in pairs],
        "characters": [scoring.character_errors(text, h.text).total for text, h in pairs],
        "tokens": {
            "length": [len(h.reference) for h in hypotheses],
            **{kind: [each[kind] for each in tokens] for kind in results.KINDS},
        },
    }
    if score is not None:
        found["fixable"] = [scoring.fixable(text.split(), h.text.split(), score) for text, h in pairs]
    return found


def together(seeds: Sequence[Row]) -> Row:
    """The errors of several trainings as a row's lists by seed."""
    first = seeds[0]
    passes = [one["passes"] for one in seeds]
    return {
        "passes": sum(passes) / len(passes),
        "seed_passes": passes,
        **{key: [one[key] for one in seeds] for key in BY_SEED if key in first},
        "tokens": {
            "length": first["tokens"]["length"],
            **{kind: [one["tokens"][kind] for one in seeds] for kind in results.KINDS},
        },
    }


def of_seed(row: Mapping[str, Any], place: int) -> Row:
    """The errors of one training out of a row; undoes ``together``."""
    return {
        "passes": row["seed_passes"][place],
        **{key: row[key][place] for key in BY_SEED if key in row},
        "tokens": {
            "length": row["tokens"]["length"],
            **{kind: row["tokens"][kind][place] for kind in results.KINDS},
        },
    }


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
        folder = self.runs / name

        def run() -> None:
            store = aligned(expert, self.dataset) if expert else ""
            placed = replace(
                settings,
                vocabulary=replace(settings.vocabulary, tokenizer=str(self._tokenizer(settings))),
                rollin=replace(settings.rollin, alignments=str(store)),
                training=replace(settings.training, start_from=str(start.model) if start else ""),
            )
            say(f"{name}: {settings.training.objective}, {settings.training.steps} steps")
            with recorded(folder / "provenance.json", settings, self.dataset):
                training.train(placed, folder)
            # The largest files, and no longer needed.
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)

        steps = settings.training.steps + (start.steps if start else 0)
        self.used[folder] = trained = Trained(folder, steps, start, run)
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
    commit, dirty = provenance.checkout()  # what runs; the checkout may have changed at the end
    before = json.loads(path.read_text())["seconds"] if path.is_file() else 0.0
    try:
        yield
    finally:
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
    texts = [[u.id, u.text] for u in utterances]
    content = provenance.digest(
        [texts, provenance.code(provenance.DECODING), provenance.weights(trained.model)]
    )
    paths = {one: trained.folder / "decoded" / f"{content}-{one.name}.json" for one in ways}
    missing = [one for one in ways if not paths[one].is_file()]
    if missing:
        network, vocabulary = models.load(trained.model)
        named = ", ".join(one.name for one in missing)
        say(f"{trained.folder.name}: decoding {len(utterances)} utterances, {named}")
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


def curve_of(lab: Lab, trained: Trained, name: str) -> Sequence[Sequence[float]]:
    """(step, validation WER in one pass); of a training of another machine, those of the earlier results file."""
    if lab.earlier and not (trained.folder / "metrics.jsonl").is_file():
        return lab.earlier["curves"][name]
    return [(point["step"], point["wer_1"]) for point in curve(trained)]


def say(line: str) -> None:
    """A line of progress."""
    print(line, file=sys.stderr, flush=True)
