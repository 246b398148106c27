"""The report, from the results files alone: RESULTS.md in one screen, a page per experiment in docs/results."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from imputer import research
from imputer.errors import ImputerError
from imputer.research import plots, results
from imputer.research.claims import MAIN, Claim, alone, points
from imputer.research.figure6 import PAPER_BY_SIZE
from imputer.research.results import Result
from imputer.research.tables import markdown, percent, rate
from imputer.support import atomic_files, progress

COLUMNS = {"libri": "LibriSpeech", "digits": "digits", "cmudict": "letters"}
OPENING = (
    "The claims of the paper, tested at the size that two cores allow: LibriSpeech (4.8 h of dev-clean over a frozen "
    "encoder, scored on test-clean-a), digit strings (the paper's convolutions from filter banks) and letters to "
    "phonemes. Compare rankings and relative gains with the paper's, not absolute WER. A claim *holds* or *does not "
    "hold* if a 95 % interval that contains other speakers and other trainings "
    "([how](docs/results/index.md#intervals)) settles it. With one seed a difference between two trainings is "
    "*open*, whatever the figure, and a verdict about what one training does in more passes is about that one."
)
QUICK = "**A quick run on generated data: it only shows that the commands work.**"
INTERVALS = """## Intervals

The interval of an error rate, or of a difference, is value ± t · sqrt(V_speakers + V_seeds): the variance of a ratio
under resampling of whole speakers (of utterances, where no speakers are known), and the variance over trainings with
other seeds, of each model; t is Student's with the degrees of freedom of the sum. A difference between two ways to
decode one model is paired within trainings. On simulated tables with three seeds these intervals hold the true
difference in 97 of 100 cases where the trainings of both models vary alike, and in 94 where those of one vary ten times
as much; a bootstrap over seeds and utterances does in 89, an interval of one seed in 43 (`tests/test_trials.py`).

## Rules

Settings were chosen on the held-out speakers of dev-clean and on validation sets. Some decisions came after first
figures of the test sets had been seen: that Imputers start from scratch, and that digits are without shifted roll-ins.
Every results file holds the errors of every utterance; `imputer reproduce --verify` computes all figures from them
again and compares them with the files and with these pages."""


# --- pages


def rows_table(result: Result, paper: Mapping[str, str]) -> list[str]:
    """Name, passes, CER and WER with intervals, WER by seed if there are several, the paper's WER if it has one."""
    several = any(len(row["words"]) > 1 for row in result.rows.values())
    headings = ["", "passes", "CER % (95 %)", "WER % (95 %)"]
    headings += (["WER % by seed"] if several else []) + (["paper's WER %"] if paper else [])
    cells = []
    for name, row in result.rows.items():
        passes = f"{row['passes']:.1f}".removesuffix(".0")
        cell = [name, passes, rate(result.rate(name, "characters")), rate(result.rate(name))]
        cell += [", ".join(percent(one) for one in result.trials(name).by_seed)] if several else []
        cells.append(cell + ([paper.get(name, "")] if paper else []))
    return markdown(headings, cells)


def trainings_said(result: Result) -> str:
    """How many trainings the intervals and the bands of the picture stand on."""
    seeds = max(len(row["words"]) for row in result.rows.values())
    if seeds == 1:
        return "Every model was trained once: intervals do not contain the variation of trainings."
    return f"Every model was trained with {seeds} seeds; bands in the picture reach from the lowest to the highest."


def title(result: Result) -> str:
    """The title of an experiment, with its data set if that is not the usual one."""
    module = research.load(result.experiment)
    own = not module.DATASET or result.data["name"] == module.DATASET or result["quick"]
    return str(module.TITLE) if own else f"{module.TITLE}, on {result.data['name'].replace('_', ' ')}"


def claims_about(result: Result) -> list[Claim]:
    """The claims of the paper that an experiment tests."""
    module = research.load(result.experiment)
    return module.claims(result) if hasattr(module, "claims") else []


def page(folder: Path, result: Result, every: Mapping[str, Result]) -> str:
    """Question, verdict, table, picture, what follows, provenance."""
    module = research.load(result.experiment)
    lines = [f"# {title(result)}", "", str(module.QUESTION), ""]
    if claims := claims_about(result):
        rows = [(one.claim, one.paper, one.ours, f"**{one.verdict}**") for one in claims]
        lines += ["## Verdict", "", *markdown(("claim", "paper", "here", ""), rows), ""]
    lines += ["## Table", ""]
    if hasattr(module, "table"):
        lines += [*module.table(result), ""]
    elif result.rows:
        lines += [*rows_table(result, getattr(module, "PAPER", {})), "", trainings_said(result), ""]
    if said := module.text(result) if hasattr(module, "text") else "":
        lines += [said, ""]
    if result.pairs and not hasattr(module, "table"):
        between = {pair: result.difference(*pair) for pair in result.pairs}
        lines += [f"- {b} - {a}: {points(one)}{alone(one)}." for (a, b), one in between.items()] + [""]
    if hasattr(module, "draw"):
        lines += [f"![{title(result)}]({result.name}.svg)", ""]
    notes = folder / f"{result.name}.notes.md"
    if notes.is_file():
        lines += ["## What follows", "", filled(notes, every), ""]
    return "\n".join([*lines, "## Provenance", "", *provenance_lines(result)]) + "\n"


def provenance_lines(result: Result) -> list[str]:
    """Where the figures came from."""
    known = result["provenance"]
    lines = []
    if "recorded" in known:
        lines = [f"Recorded before provenance was: {known['recorded']}", ""]
    rows = [("command", f"`{known['command']}`"), ("seeds", ", ".join(map(str, known["seeds"])))]
    if known.get("commit"):
        rows.append(
            ("commit", known["commit"] + (" with changes that were not committed" if known["dirty"] else ""))
        )
    elif "code" in known:
        rows.append(("code", f"installed package, fingerprint {known['code']}"))
    rows += [(key, str(known[key])) for key in ("time", "processor") if known.get(key)]
    rows.append(("packages", ", ".join(f"{name} {version}" for name, version in known["packages"].items())))
    if data := result.data:
        scored = (
            len(result["utterances"]["ids"]) if "utterances" in result.content else data["test_utterances"]
        )
        counted = (
            f"{scored:,} of {data['test_utterances']:,}"
            if scored < data["test_utterances"]
            else f"{scored:,}"
        )
        fingerprints, about = data["fingerprints"], f"{data['about']} ({data['amount']} to train on; {{}})"
        if "models" in result.content:  # trained elsewhere, on other data
            about = data["about"].rpartition("; ")[2] + " ({})"
            fingerprints = {"test": fingerprints["test"]}
        rows.append(("data", about.format(f"{counted} utterances scored")))
        rows.append(("fingerprints", ", ".join(f"{k} {v}" for k, v in fingerprints.items())))
    for name, run in known.get("trainings", {}).items():
        more = "; ".join(filter(None, (
            progress.clock(run["seconds"]) if run.get("seconds") else "",
            run.get("processor", ""),
            ", ".join(f"{key} = {value}" for key, value in run.get("settings", {}).items()),
        )))  # fmt: skip
        rows.append(("training", f"`{name}` ({more})" if more else f"`{name}`"))
    for name, one in result.get("models", {}).items():
        made = {"data.train": ", ".join(one.get("manifests", [])), **one.get("training", {})}
        said = ", ".join(f"{key} = {value}" for key, value in made.items() if value != "")
        rows.append(("model", f"`{name}`, weights {one['weights']}" + (f" ({said})" if said else "")))
    return lines + markdown(("", ""), rows)


def filled(path: Path, every: Mapping[str, Result]) -> str:
    """A text written by a person, with the figures in it taken from the results.

    {table2: CTC} is a WER in per cent, {table2: CTC > DP, 8 passes} a difference with its interval, and with >> its
    relative value alone.
    """

    def figure(found: re.Match[str]) -> str:
        name, first, arrow, second = found.groups()
        try:
            if not arrow:
                return percent(every[name].rate(first).value)
            between = every[name].difference(first, second)
        except KeyError as error:
            raise ImputerError(f"{path}: {found[0]} is in no results file (no {error})") from error
        return points(between) if arrow == ">" else f"{100 * between.relative[0]:+.0f} %"

    text = path.read_text(encoding="utf-8").strip()
    return re.sub(r"\{([\w-]+): ([^{}>]+?)(?: (>>?) ([^{}]+))?\}", figure, text)


# --- the summary


def summary(folder: Path, every: Mapping[str, Result]) -> str:
    """One screen: the claims, what we learnt, a picture, links."""
    if not every:
        return "# Results\n\nThere are no results yet: `imputer reproduce --all` makes them.\n"
    lines = ["# Results", "", OPENING, ""]
    if any(result["quick"] for result in every.values()):
        lines += [QUICK, ""]
    lines += [*claims_table(every), ""]
    if (folder / "summary.md").is_file():
        lines += [filled(folder / "summary.md", every), ""]
    if set(SUMMARY_PANELS) & set(every):
        lines += ["![Word error rate by passes](docs/results/summary.svg)", ""]
    links = [f"[{title(result)}](docs/results/{result.name}.md)" for result in ordered(every)]
    return "\n".join([*lines, f"Every experiment: {'; '.join(links)}."]) + "\n"


def claims_table(every: Mapping[str, Result]) -> list[str]:
    """Six claims by data set; several findings about one claim share a cell."""
    cells: dict[tuple[str, str], list[str]] = {}
    for result in ordered(every):
        column = COLUMNS.get(result.data.get("name", ""))
        for claim in claims_about(result) if column else []:
            if claim.key:
                link = f"[{claim.short}](docs/results/{result.name}.md)"
                cells.setdefault((claim.key, str(column)), []).append(f"**{claim.verdict}** {link}")
    rows = [
        (text, paper, *("; ".join(cells.get((key, column), ["not run"])) for column in COLUMNS.values()))
        for key, text, paper in MAIN
    ]
    return markdown(("claim", "paper", *COLUMNS.values()), rows)


def ordered(every: Mapping[str, Result]) -> list[Result]:
    """In the order of the experiments."""
    return sorted(every.values(), key=lambda one: (research.EXPERIMENTS.index(one.experiment), one.name))


SUMMARY_PANELS = {"table2": "LibriSpeech", "table1": "digits", "figure6": ""}


def draw_summary(every: Mapping[str, Result], path: Path) -> None:
    """WER by passes on both kinds of speech; the paper's curve beside ours."""
    panels = [
        plots.by_passes(every[name], text) for name, text in SUMMARY_PANELS.items() if text and name in every
    ]
    if "figure6" in every:
        panels.append(plots.beside_the_paper(every["figure6"], PAPER_BY_SIZE))
    if panels:
        plots.save(path, panels)


# --- files


def texts(folder: Path) -> dict[Path, str]:
    """Everything that is generated from a folder of results, by path."""
    every = results.read_all(folder)
    docs = folder.parent / "docs" / "results"
    short = summary(folder, every)
    found = {folder.parent / "RESULTS.md": short}
    found[docs / "index.md"] = (
        short.replace("docs/results/index.md", "").replace("docs/results/", "") + f"\n{INTERVALS}\n"
    )
    return found | {docs / f"{name}.md": page(folder, result, every) for name, result in every.items()}


def write(folder: Path, redrawn: Sequence[str] | None = None) -> Path:
    """Write RESULTS.md beside a folder of results, and the pages and pictures of docs/results: all, or those named."""
    every = results.read_all(folder)
    docs = folder.parent / "docs" / "results"
    names = list(every) if redrawn is None else redrawn
    for name in names:
        draw(every[name], docs)
    if set(SUMMARY_PANELS) & set(names):
        draw_summary(every, docs / "summary.svg")
    for path, text in texts(folder).items():
        atomic_files.write_text(path, text)
    return folder.parent / "RESULTS.md"


def draw(result: Result, docs: Path) -> None:
    """The picture of an experiment, if it has one."""
    module: Any = research.load(result.experiment)
    if hasattr(module, "draw"):
        module.draw(result, docs / f"{result.name}.svg")


def verify(folder: Path) -> list[str]:
    """Compute every figure again from the errors of every utterance: what differs in the files and in the pages."""
    every = results.read_all(folder)
    found = [line for result in every.values() for line in results.check(result)]
    for path, text in texts(folder).items():
        there = path.read_text(encoding="utf-8") if path.is_file() else ""
        if there != text:
            found.append(f"{path}: {_first_difference(there, text)}")
    return found


def _first_difference(there: str, wanted: str) -> str:
    if not there:
        return "is missing"
    pairs = zip([*there.splitlines(), ""], [*wanted.splitlines(), ""], strict=False)
    number, (a, b) = next((n, pair) for n, pair in enumerate(pairs, 1) if pair[0] != pair[1])
    return f"line {number} is {a[:160]!r}, the results give {b[:160]!r}"
