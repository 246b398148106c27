"""CTC, Imputer (IM) and Imputer (DP): one network, one budget of training steps; what tables 1 and 2 share."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from imputer.decoding import Options
from imputer.research import plots
from imputer.research.report import (
    OPEN,
    Claim,
    difference,
    expects,
    no_better,
    percent,
    rate,
    score_rows,
    table,
)
from imputer.research.trainings import Lab, Maker, Score, Trainings, compared, curve, dp

PASSES = (1, 2, 4, 8, 16)
UNHEARD = 0.8  # a table of models that get most words wrong settles nothing
MORE_PASSES = "Figure 6, dev-other: 13.6 at 2, 11.3 at 8"
CTC, CTC_CONTINUED, CTC_LONGER = "CTC", "CTC, from the expert", "CTC, longer"
IM, DP = "Imputer (IM), from the expert", "Imputer (DP), from the expert"
IM_SCRATCH, DP_SCRATCH = "Imputer (IM), from scratch", "Imputer (DP), from scratch"
PAIRS = ((DP, IM), (DP_SCRATCH, IM_SCRATCH))


@dataclass(frozen=True)
class Paper:
    """What the paper's table says of each claim."""

    dp_against_ctc: str
    im_against_ctc: str
    dp_against_im: str


def makers(lab: Lab) -> dict[str, Maker]:
    """The rows: N + M steps each.

    For an Imputer from scratch the expert's N steps, for the alignments, come on top; so there is a CTC with as many.
    """
    more = lab.dataset.imputer_steps
    total = lab.dataset.expert_steps + more
    alone: dict[str, Maker] = {CTC: lambda t: t.ctc(total)}
    from_expert: dict[str, Maker] = {
        CTC_CONTINUED: lambda t: t.ctc(more, from_expert=True),
        IM: lambda t: t.imputer("imitation", more, from_expert=True),
        DP: dp(more, from_expert=True),
    }
    from_scratch: dict[str, Maker] = {
        CTC_LONGER: lambda t: t.ctc(total + lab.dataset.expert_steps),
        IM_SCRATCH: lambda t: t.main("imitation"),
        DP_SCRATCH: Trainings.main,
    }
    return alone | (from_expert if lab.dataset.from_expert else {}) | from_scratch


def run(lab: Lab) -> dict[str, Any]:
    """Train every row, decode it in 1 to 16 passes, and compare it with CTC."""
    rows, curves, scores = [], {}, dict[tuple[str, int], Score]()
    for name, make in makers(lab).items():
        trained = make(lab.first)
        curves[name] = curve(trained)
        for score in lab.scores(make, [Options(b) for b in ((1,) if name.startswith("CTC") else PASSES)]):
            passes = score.options.block_size or 0
            scores[name, passes] = score
            rows.append(score.row(f"{name}, {passes}", model=name, steps=trained.steps))
    made = list(makers(lab))
    imputers = [name for name in made if not name.startswith("CTC")]
    return {
        "rows": rows,
        "against_ctc": [
            compared((ctc, scores[ctc, 1]), (name, scores[name, 8]))
            for name in imputers
            for ctc in made
            if ctc.startswith("CTC") and (ctc != CTC_LONGER or name in (IM_SCRATCH, DP_SCRATCH))
        ],
        "against_imitation": [
            compared((im, scores[im, 8]), (dp, scores[dp, 8])) for dp, im in PAIRS if dp in made
        ],
        "more_passes": [
            compared((f"{name}, 1", scores[name, 1]), (f"{name}, 8", scores[name, 8])) for name in imputers
        ],
        "curves": curves,
    }


def section(result: Mapping[str, Any], paper: Mapping[str, str], caption: str) -> list[str]:
    """The table, what the differences are, and the paper's figures."""
    shown = [row for row in result["rows"] if row["block_size"] in (1, 8)]
    shown = [row for row in shown if row["block_size"] == 8 or row["model"].startswith("CTC")]
    headings, cells = score_rows([row | {"name": row["model"]} for row in shown], paper)
    cells = [(cell[0], f"{row['steps']:,}", *cell[1:]) for cell, row in zip(cells, shown, strict=True)]
    lines = table((headings[0], "steps", *headings[1:]), cells)
    lines += ["", f"{caption} Not comparable: {result['data']['not_comparable']}.", ""]
    lines += [
        "The rows *from scratch* take their roll-ins from the expert's alignments. The expert's own steps come on top "
        "there, so they are held against *CTC, longer* as well, which has as many.",
        "",
    ]
    hardest = worst(result)
    lines += [
        f"- {one['second']} (8 passes) less {one['first']}: {difference(one)}."
        for one in result["against_ctc"]
        if one["first"] == CTC or one in hardest
    ]
    lines += [
        f"- {one['second']} less {one['first']} (8 passes each): {difference(one)}."
        for one in result["against_imitation"]
    ]
    lines += ["", "WER % by passes:", "", *_by_passes(result)]
    if len(result["seeds"]) > 1:
        lines += ["", "WER % seed by seed:", ""]
        lines += [f"- {row['model']}: {', '.join(map(percent, row['wer_by_seed']))}" for row in shown]
    return lines


def worst(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Each Imputer against the best CTC of no larger budget."""
    found: dict[str, Mapping[str, Any]] = {}
    for one in result["against_ctc"]:
        before = found.get(one["second"])
        if before is None or one["difference"]["value"] > before["difference"]["value"]:
            found[one["second"]] = one
    return list(found.values())


def _by_passes(result: Mapping[str, Any]) -> list[str]:
    imputers = list(dict.fromkeys(row["model"] for row in result["rows"] if row["block_size"] > 1))
    cells = {(row["model"], row["block_size"]): rate(row["wer"]) for row in result["rows"]}
    return table(("", *map(str, PASSES)), [(name, *(cells[name, b] for b in PASSES)) for name in imputers])


def claims(result: Mapping[str, Any], paper: Paper) -> list[Claim]:
    """DP below CTC, IM not below it, DP below IM, more passes better than one."""
    against = {one["second"]: one for one in worst(result)}
    imitation = {one["second"]: one for one in result["against_imitation"]}
    passes = {one["second"].removesuffix(", 8"): one for one in result["more_passes"]}
    where = result["data"]["name"].replace("_", " ")
    found = []
    for dp_name, im_name in PAIRS:
        if dp_name not in against:
            continue
        which = f"{where}, {dp_name.split(', ')[1]}"
        beats, imitates, gains = against[dp_name], against[im_name], passes[dp_name]
        leads = imitation[dp_name]
        found += [
            Claim(
                f"DP at 8 passes has a lower WER than CTC ({which})",
                paper.dp_against_ctc,
                difference(beats),
                expects(beats, -1),
            ),
            Claim(
                f"IM is no better than CTC ({which})",
                paper.im_against_ctc,
                difference(imitates),
                no_better(imitates),
            ),
            Claim(
                f"DP has a lower WER than IM ({which})",
                paper.dp_against_im,
                difference(leads),
                expects(leads, -1),
            ),
            Claim(
                f"DP: 8 passes are better than 1 ({which})",
                MORE_PASSES,
                difference(gains),
                expects(gains, -1, room=0),
            ),
        ]
    if result["rows"][0]["wer"]["value"] > UNHEARD:
        return [replace(claim, verdict=OPEN) for claim in found]
    return found


def draw(result: Mapping[str, Any], path: Path) -> None:
    """WER on the validation set against steps, and on the test set against passes."""
    learning, decoding = {}, {}
    for name, points in result["curves"].items():
        best = "wer_8" if any("wer_8" in point for point in points) else "wer_1"
        learning[name] = [(p["step"], 100 * p.get(best, p["wer_1"])) for p in points]
    for row in result["rows"]:
        value = 100 * row["wer"]["value"]
        if row["model"].startswith("CTC"):
            decoding[row["model"]] = [(b, value) for b in (PASSES[0], PASSES[-1])]
        else:
            decoding.setdefault(row["model"], []).append((row["block_size"], value))
    panels = [
        plots.Panel(
            "steps, the expert's included where it started from it",
            "word error rate, %",
            learning,
            "validation set",
            ratios=True,
        ),
        plots.Panel("passes", "word error rate, %", decoding, "test set", doubling=True, ratios=True),
    ]
    plots.save(path, panels)
