"""The bounds of sec:lowerbound, measured: J_IM, J_DP, the constant C, and the variance of both gradients."""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from imputer import alignments, evaluation, models, objectives, rollin
from imputer.configs import NO_AUGMENTATION
from imputer.data.manifest import Manifest
from imputer.model import Imputer
from imputer.research.claims import FAILS, HOLDS, OPEN, Claim
from imputer.research.results import Result
from imputer.research.tables import markdown
from imputer.research.trainings import Lab, Trained, encoded
from imputer.support import progress

TITLE = "The bounds and the gradients"
QUESTION = (
    "Is J_IM <= J_DP <= 0 on the same roll-ins, what do they bound, and which gradient is the less noisy?"
)
DATASET = "libri"
UTTERANCES, GRADIENT_UTTERANCES, EXCERPTS = 40, 16, 8
DRAWS = 8  # roll-ins of each utterance
BLOCK_SIZE = 8
NOISES = ("none", "utterance")
MUCH = 2  # a variance is much lower from here on
EXCERPT_FRAMES, EXCERPT_BLOCK = 8, 4  # small enough to enumerate every alignment and every mask


@dataclass(frozen=True)
class Example:
    """An utterance of the test set with the expert's alignment of it."""

    name: str
    features: Tensor  # (1, frame, feature)
    target: list[int]
    alignment: list[int]  # one token per frame
    noise: str  # of the roll-ins: what the models were trained with

    def rolled_in(self, draws: int) -> tuple[Tensor, Tensor]:
        """(draw, frame) alignments and commitments, the same for every model."""
        drawn = [
            rollin.draw(
                lambda _: self.alignment, [self.name], [len(self.alignment)],
                masking_policy="block", noise=self.noise, block_size=BLOCK_SIZE, seed=0, step=step,
            )[:2]
            for step in range(draws)
        ]  # fmt: skip
        return torch.cat([a for a, _ in drawn]), torch.cat([c for _, c in drawn])


def run(lab: Lab) -> dict[str, Any]:
    """Bounds of three models on the same roll-ins; gradients at the start and at the end of training."""
    t = lab.first
    trained = {
        "CTC expert": t.expert(),
        "Imputer (IM)": t.imputer("imitation"),
        "Imputer (DP)": t.imputer(),
    }
    examples = aligned_examples(lab, trained["CTC expert"])
    networks = {name: models.load(one.model)[0] for name, one in trained.items()}
    return {
        "noise": rollin_noise(lab),
        "likelihoods": {name: likelihoods(network, examples) for name, network in networks.items()},
        "gradients": {
            name: gradient_noise(networks[name], evaluation.spread(examples, GRADIENT_UTTERANCES))
            for name in ("CTC expert", "Imputer (DP)")
        },
        "exact": {
            name: [exact(network, e) for e in examples[:EXCERPTS]] for name, network in networks.items()
        },
    }


def rollin_noise(lab: Lab) -> str:
    """The noise of the data set's roll-ins, if it is one whose entropy is known here."""
    noise = lab.dataset.settings.rollin.noise
    return noise if noise in NOISES else NOISES[0]


def aligned_examples(lab: Lab, expert: Trained) -> list[Example]:
    """Some utterances of the test set, aligned by the expert (eqn:argmax_alignment)."""
    network, vocabulary = models.load(expert.model)
    chosen = evaluation.spread(Manifest(lab.dataset.test), UTTERANCES)
    extract = network.front_end.reader(lab.dataset.settings.data, NO_AUGMENTATION, chosen)
    found: dict[int, Example] = {}
    for places, acoustic, lengths in encoded(network, chosen, extract, batch_seconds=1e-3):  # one at a time
        (place,) = places
        target = vocabulary.encode(chosen[place].text)
        size = torch.tensor([len(target)])
        with torch.inference_mode():
            log_probs = network.impute(acoustic, lengths, network.all_masked(acoustic))
        best, score = alignments.best_alignment(log_probs, torch.tensor([target]), lengths, size)
        if bool(score.isfinite()) and int(lengths) >= BLOCK_SIZE:
            features = extract(chosen[place], torch.Generator())[None]
            found[place] = Example(chosen[place].id, features, target, best[0].tolist(), rollin_noise(lab))
    return [found[place] for place in sorted(found)]


def conditioned(
    network: Imputer, acoustic: Tensor, drawn: Tensor, committed: Tensor
) -> tuple[Tensor, Tensor]:
    """log_probs (draw, frame, token) and lengths of the roll-ins of one utterance, ``acoustic`` (1, frame, width)."""
    draws, frames = drawn.shape
    lengths = torch.full((draws,), frames)
    partial = torch.where(committed, drawn, network.mask)
    return network.impute(acoustic.expand(draws, -1, -1), lengths, partial), lengths


def both(
    network: Imputer, acoustic: Tensor, target: Sequence[int], drawn: Tensor, committed: Tensor
) -> tuple[Tensor, Tensor]:
    """J_IM and J_DP (draw,) of the roll-ins of one utterance."""
    log_probs, lengths = conditioned(network, acoustic, drawn, committed)
    targets = torch.tensor([list(target)] * len(drawn))
    sizes = torch.full((len(drawn),), len(target))
    return (
        objectives.imitation(log_probs, drawn, lengths),
        objectives.dynamic_programming(log_probs, targets, drawn, committed, lengths, sizes),
    )


def likelihoods(network: Imputer, examples: Sequence[Example]) -> dict[str, Any]:
    """Nats per token of every utterance: J_IM, J_DP, E log c(a~, a), H(r) + H(q); roll-ins that break their order."""
    rows, broken = [], 0
    for example in examples:
        drawn, committed = example.rolled_in(DRAWS)
        with torch.inference_mode():
            acoustic, _ = network.encode(example.features, torch.tensor([example.features.shape[1]]))
            imitation, dynamic = both(network, acoustic, example.target, drawn, committed)
        slack = 1e-4 * imitation.abs() + 1e-4  # float32
        broken += int(((imitation > dynamic + slack) | (dynamic > slack)).sum())
        pairs = zip(drawn.tolist(), committed.tolist(), strict=True)
        count = np.mean([math.log(alignments.compatible_count(a, c)) for a, c in pairs])
        entropy = masking_entropy(len(example.alignment), BLOCK_SIZE)
        entropy += noise_entropy(example.alignment, example.noise)
        values = (float(imitation.mean()), float(dynamic.mean()), float(count), entropy)
        rows.append([value / len(example.target) for value in values])
    return {"by_utterance": rows, "rollins": len(rows) * DRAWS, "order_broken": broken}


def masking_entropy(frames: int, block_size: int) -> float:
    """H(r) of the block policy, for at least one whole block: c is uniform, then any c frames of each block."""
    assert frames >= block_size  # else different c give the same mask
    sizes = [min(block_size, frames - start) for start in range(0, frames, block_size)]
    given = [sum(math.log(math.comb(n, min(c, n))) for n in sizes) for c in range(block_size)]
    return math.log(block_size) + sum(given) / block_size


def noise_outcomes(alignment: Sequence[int], noise: str) -> dict[tuple[int, ...], float]:
    """q_phi': the alignments that noise makes of one, and how likely each is."""
    whole = tuple(alignment)
    shifts = ((*whole[1:], 0), whole, (0, *whole[:-1])) if noise == "utterance" else (whole,)
    kept = [one if sum(map(bool, one)) == sum(map(bool, whole)) else whole for one in shifts]
    return {one: count / len(kept) for one, count in Counter(kept).items()}


def noise_entropy(alignment: Sequence[int], noise: str) -> float:
    """H(q)."""
    return -sum(p * math.log(p) for p in noise_outcomes(alignment, noise).values())


# --- both sides of the bound, in full, for an excerpt small enough to enumerate


def exact(network: Imputer, example: Example) -> dict[str, float]:
    """The sum of eqn:lowerbound_marginalization and both bounds on it, for an excerpt with two tokens, or near that.

    Every alignment and every mask is enumerated, so nothing here is an estimate.
    """
    with torch.inference_mode():
        acoustic, _ = network.encode(example.features, torch.tensor([example.features.shape[1]]))
    starts = range(len(example.alignment) - EXCERPT_FRAMES + 1)
    tokens = [sum(map(bool, example.alignment[s : s + EXCERPT_FRAMES])) for s in starts]
    start = min(starts, key=lambda s: (abs(tokens[s] - 2), s))  # two tokens if there is such a place
    piece = example.alignment[start : start + EXCERPT_FRAMES]
    return bounds(network, acoustic[:, start : start + EXCERPT_FRAMES], piece, EXCERPT_BLOCK, example.noise)


def bounds(
    network: Imputer, acoustic: Tensor, alignment: Sequence[int], block_size: int, noise: str
) -> dict[str, float]:
    """log sum over a, a~ of p(a | a~, x); and J_IM, J_DP in exact expectation with their constants."""
    frames, target = len(alignment), alignments.collapse(alignment)
    every_mask = torch.tensor(list(itertools.product((False, True), repeat=frames)))
    parts = []
    for places in itertools.combinations(range(frames), len(target)):
        one = torch.zeros(frames, dtype=torch.long)
        one[list(places)] = torch.tensor(target, dtype=torch.long)
        with torch.inference_mode():
            drawn = one.expand(len(every_mask), -1)
            log_probs, lengths = conditioned(network, acoustic, drawn, every_mask)
            parts.append(objectives.imitation(log_probs, drawn, lengths).double().logsumexp(0))
    probability = mask_probabilities(frames, block_size)
    masks = torch.tensor(list(probability))
    weights = torch.tensor(list(probability.values()), dtype=torch.float64)
    imitation = dynamic = count = 0.0
    for outcome, chance in noise_outcomes(alignment, noise).items():
        drawn = torch.tensor(outcome).expand(len(masks), -1)
        with torch.inference_mode():
            im, dp = both(network, acoustic, target, drawn, masks)
        counts = torch.tensor([math.log(alignments.compatible_count(outcome, m)) for m in masks.tolist()])
        imitation += chance * float(weights @ im.double())
        dynamic += chance * float(weights @ dp.double())
        count += chance * float(weights @ counts.double())
    entropy = float(-(weights * weights.log()).sum()) + noise_entropy(alignment, noise)
    return {
        "sum": float(torch.stack(parts).logsumexp(0)),
        "imitation_bound": imitation + entropy,
        "dynamic_programming_bound": dynamic + entropy - count,
    }


def mask_probabilities(frames: int, block_size: int) -> dict[tuple[bool, ...], float]:
    """The block policy r in full: every mask (True = committed) and its probability."""
    sizes = [min(block_size, frames - start) for start in range(0, frames, block_size)]
    found: dict[tuple[bool, ...], float] = defaultdict(float)
    for c in range(block_size):
        ways = [
            [tuple(i in kept for i in range(n)) for kept in itertools.combinations(range(n), min(c, n))]
            for n in sizes
        ]
        chance = 1 / block_size / math.prod(map(len, ways))
        for choice in itertools.product(*ways):
            found[tuple(itertools.chain(*choice))] += chance
    return dict(found)


# --- gradients


def gradient_noise(network: Imputer, examples: Sequence[Example]) -> dict[str, list[list[float]]]:
    """(variance over roll-ins, noise to signal) of the gradient of every utterance, dropout off: of J_IM and J_DP."""
    found: dict[str, list[Moments]] = {"imitation": [], "dynamic_programming": []}
    for example in progress.track(examples, "gradients"):
        drawn, committed = example.rolled_in(DRAWS)
        moments = {name: Moments() for name in found}
        for draw in range(DRAWS):
            acoustic, _ = network.encode(example.features, torch.tensor([example.features.shape[1]]))
            values = both(
                network, acoustic, example.target, drawn[draw : draw + 1], committed[draw : draw + 1]
            )
            for name, value in zip(found, values, strict=True):
                gradient = torch.autograd.grad(value.sum() / len(example.target), list(network.parameters()),
                    retain_graph=True, allow_unused=True)  # fmt: skip
                moments[name].add([g for g in gradient if g is not None])
        for name, moment in moments.items():
            found[name].append(moment)
    return {name: [[m.variance, m.noise_to_signal] for m in moments] for name, moments in found.items()}


class Moments:
    """The mean and the variance of gradients, one added after the other."""

    def __init__(self) -> None:
        self.count, self.squares = 0, 0.0
        self.sums: list[Tensor] = []

    def add(self, gradient: Sequence[Tensor]) -> None:
        self.count += 1
        self.squares += sum(float(g.double().square().sum()) for g in gradient)
        self.sums = [s + g for s, g in zip(self.sums, gradient, strict=True)] if self.sums else list(gradient)

    @property
    def _square_of_mean(self) -> float:
        return sum(float(s.double().square().sum()) for s in self.sums) / self.count**2

    @property
    def variance(self) -> float:
        """Summed over all weights."""
        return max(0.0, (self.squares - self.count * self._square_of_mean) / (self.count - 1))

    @property
    def noise_to_signal(self) -> float:
        """The variance over the squared norm of the expected gradient.

        The mean of n draws is itself noisy: its squared norm is too large by variance / n on average.
        """
        return self.variance / max(1e-30, self._square_of_mean - self.variance / self.count)


def mean_with_interval(sample: Sequence[float]) -> dict[str, float]:
    """The mean over utterances, with its 95 % interval from resampling them."""
    values = np.asarray(sample)
    draws = np.random.default_rng(0).integers(0, len(values), (10_000, len(values)))
    low, high = np.percentile(values[draws].mean(1), (2.5, 97.5))
    return {"value": float(values.mean()), "low": float(low), "high": float(high)}


# --- the report


def variance_ratio(gradients: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, float]:
    """The variance of IM's gradient over that of DP's: geometric mean over utterances, with its interval."""
    both = zip(gradients["imitation"], gradients["dynamic_programming"], strict=True)
    ratios = [math.log(im[0] / dp[0]) for im, dp in both if im[0] > 0 and dp[0] > 0]
    return {key: math.exp(value) for key, value in mean_with_interval(ratios).items()}


def table(result: Result) -> list[str]:
    """Likelihoods, the exact check, gradients."""
    rows = []
    for name, found in result["likelihoods"].items():
        im, dp, count, entropy = (list(column) for column in zip(*found["by_utterance"], strict=True))
        h, c = float(np.mean(entropy)), float(np.mean(entropy) - np.mean(count))
        cells = (
            f"{np.mean(im) + h:.3f}",
            f"{np.mean(dp) + c:.3f}",
            f"{found['order_broken']} of {found['rollins']}",
        )
        rows.append((name, _nats(im), _nats(dp), f"{np.mean(count):.3f}", f"{h:.3f}", *cells))
    headings = ("", "J_IM", "J_DP", "E log c", "H(r) + H(q)", "J_IM + H", "J_DP + C", "order broken")
    keys = ("sum", "imitation_bound", "dynamic_programming_bound")
    exacts = [
        (name, *(f"{np.mean([one[key] for one in found]):.3f}" for key in keys))
        for name, found in result["exact"].items()
    ]
    lines = [
        f"Nats per token on the same roll-ins (block size {BLOCK_SIZE}, noise: {result['noise']}), 95 % intervals:",
        *("", *markdown(headings, rows), ""),
        "J_IM + H and J_DP + C = J_DP + H − E log c both bound the prior-free sum of eqn:lowerbound_marginalization, "
        "which cannot be computed at this length; neither bounds the one-pass log p(y | x). "
        f"On excerpts of {EXCERPT_FRAMES} frames every alignment and every mask can be enumerated (nats, mean over "
        f"excerpts, block size {EXCERPT_BLOCK}):",
        *("", *markdown(("", "the sum", "J_IM + H", "J_DP + C"), exacts)),
    ]
    if result["gradients"]:
        lines += [
            "",
            f"Variance of an utterance's gradient over {DRAWS} roll-ins, dropout off, all weights:",
            "",
        ]
        lines += _gradient_table(result["gradients"])
    return lines


def _gradient_table(gradients: Mapping[str, Any]) -> list[str]:
    rows = []
    for name, found in gradients.items():
        cells = [name]
        for kind in ("imitation", "dynamic_programming"):
            variances, noises = zip(*found[kind], strict=True)
            cells += [f"{np.mean(variances):.3g}", f"{np.median(noises):.3g}"]
        ratio = variance_ratio(found)
        rows.append((*cells, f"{ratio['value']:.2f} ({ratio['low']:.2f}–{ratio['high']:.2f})"))
    heads = (
        "at the weights of",
        "IM, variance",
        "IM, noise to signal",
        "DP, variance",
        "DP, noise to signal",
    )
    return markdown((*heads, "variance IM / DP (95 %)"), rows)


def text(result: Result) -> str:
    """What the columns are."""
    if not result["gradients"]:
        return ""
    return (
        "*Variance* is the mean over utterances. *Noise to signal* is the variance over the squared norm of the "
        "expected gradient, the median of utterances."
    )


def _nats(sample: Sequence[float]) -> str:
    found = mean_with_interval(sample)
    return f"{found['value']:.2f} ({found['low']:.2f} to {found['high']:.2f})"


def claims(result: Result) -> list[Claim]:
    """The order, both bounds, and the variance."""
    broken = sum(f["order_broken"] for f in result["likelihoods"].values())
    rollins = sum(f["rollins"] for f in result["likelihoods"].values())
    exacts = [one for found in result["exact"].values() for one in found]
    held = sum(
        max(one["imitation_bound"], one["dynamic_programming_bound"]) <= one["sum"] + 1e-3 for one in exacts
    )
    found = [
        Claim(
            "J_IM is a lower bound of J_DP",
            "by dropping terms",
            f"broken in {broken} of {rollins} roll-ins",
            HOLDS if not broken else FAILS,
        ),
        Claim(
            "J_DP + C is a lower bound of the sum over alignments and masks",
            "by Jensen's inequality",
            f"held in {held} of {len(exacts)} excerpts that could be enumerated",
            HOLDS if held == len(exacts) else FAILS,
        ),
    ]
    ratios = {name: variance_ratio(one) for name, one in result["gradients"].items()}
    if ratios:
        much, little = (
            all(r["low"] > MUCH for r in ratios.values()),
            all(r["high"] < MUCH for r in ratios.values()),
        )
        said = (
            f"{r['value']:.2f} ({r['low']:.2f}–{r['high']:.2f}) at the {name}" for name, r in ratios.items()
        )
        text = "the gradient of J_DP has a much lower variance than that of J_IM"
        verdict = HOLDS if much else FAILS if little else OPEN
        found.append(Claim(text, "stated, not measured", f"variance IM / DP {', '.join(said)}", verdict))
    return found
