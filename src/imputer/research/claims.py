"""What the paper claims, and what an interval says about it."""

from dataclasses import dataclass

from imputer.evaluation.trials import Estimate

HOLDS, FAILS, OPEN = "holds", "does not hold", "open"
NONE = 0.01  # of the errors: smaller differences do not count

# The claims of the summary, in its order: (key, claim, what the paper has).
MAIN = (
    ("dp_ctc", "DP has a lower WER than CTC of the same budget", "−16 % (WSJ), −13 % (LibriSpeech)"),
    ("im_ctc", "Imitation is no better than CTC", "+9 % (WSJ), +20 % (LibriSpeech)"),
    ("dp_im", "DP has a lower WER than imitation", "−23 % (WSJ), −27 % (LibriSpeech)"),
    ("passes", "More passes lower the WER", "13.6 at 2 passes, 11.3 at 8"),
    ("masking", "The masking policy matters little", "11.2 to 11.4"),
    ("block_size", "Block size 8 is best in training", "11.3 at 8; 14.2 at 2, 12.7 at 32"),
)


@dataclass(frozen=True)
class Claim:
    """A claim of the paper, what was measured here, and the verdict."""

    claim: str
    paper: str
    ours: str
    verdict: str
    key: str = ""  # in ``MAIN``
    short: str = ""  # for the summary


def points(found: Estimate) -> str:
    """A difference as text."""
    low, high = 100 * found.low, 100 * found.high
    return f"{100 * found.value:+.1f} points ({low:+.1f} to {high:+.1f}), {100 * found.relative[0]:+.0f} %"


def settled(found: Estimate) -> bool:
    """Whether the interval says something: with one seed it does only for what one training does in two ways."""
    return found.paired or found.seeds > 1


def alone(found: Estimate) -> str:
    """What to add to a difference whose interval lacks the variation of trainings."""
    return "" if found.seeds > 1 else ", one training" if found.paired else ", one seed"


def sign(found: Estimate) -> int:
    """-1 if the second is significantly lower, 1 if significantly higher, else 0."""
    return 0 if not settled(found) else -1 if found.high < 0 else 1 if found.low > 0 else 0


def expects(found: Estimate, wanted: int) -> str:
    """Whether a difference has the sign that the paper found; two that are significantly alike have none."""
    which = sign(found)
    if alike(found, NONE) == HOLDS:
        return FAILS
    return HOLDS if which == wanted else FAILS if which else OPEN


def alike(found: Estimate, share: float) -> str:
    """Whether two are alike to within a share of the first's WER: the whole interval inside, outside, or neither."""
    _, low, high = found.relative
    if not settled(found):
        return OPEN
    return HOLDS if -share <= low and high <= share else FAILS if low > share or high < -share else OPEN


def no_better(found: Estimate, share: float = 0.05) -> str:
    """Whether the second is no better: significantly lower refutes it, room for a sizeable gain leaves it open."""
    if not settled(found) or sign(found) < 0:
        return FAILS if sign(found) < 0 else OPEN
    return HOLDS if found.relative[1] > -share else OPEN


def judged(text: str, paper: str, found: Estimate, verdict: str, key: str = "") -> Claim:
    """A claim about one difference."""
    after, before = 100 * (found.base + found.value), 100 * found.base
    seeds = alone(found)
    short = f"{after:.1f} against {before:.1f}, {100 * found.relative[0]:+.0f} %{seeds}"
    return Claim(text, paper, points(found) + seeds, verdict, key, short)
