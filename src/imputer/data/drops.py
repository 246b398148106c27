"""What could not be used, and why: the same few words for the same reason, so that items can be counted by it."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

BAD_LINE = "bad manifest line"
MISSING = "audio file is missing"
UNREADABLE = "cannot be read"
UNKNOWN_TEXT = "text outside the vocabulary"
UNALIGNED = "no alignment"
CHANGED = "text changed since it was aligned"
TOO_LONG = "more tokens than frames"


@dataclass(frozen=True, slots=True)
class Dropped:
    """Something that cannot be used: why, and which."""

    reason: str
    item: str


@dataclass
class Tally:
    """How many items were dropped for each reason, and the first of each."""

    counts: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)

    def add(self, dropped: Iterable[Dropped]) -> "Tally":
        for one in dropped:
            self.counts[one.reason] += 1
            self.first.setdefault(one.reason, one.item)
        return self

    def __str__(self) -> str:
        """One line: "3 x cannot be read, first: ...; 1 x no alignment, first: ..."."""
        return "; ".join(
            f"{number} x {reason}, first: {self.first[reason]}"
            for reason, number in self.counts.most_common()
        )
