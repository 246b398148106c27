"""Whose turn it is: fair shares of the network, and which windows go together."""

from collections.abc import Sequence

from imputer.server.jobs import Job, Window

BATCH_COST_SECONDS = 0.7  # of audio: what starting a batch costs, and so what padding may, to save one


class FairClock:
    """Virtual time of fair queueing: how much work each waiting recording should have received by now.

    A recording that arrives starts at the present; each piece of work moves its tag ahead by what the work cost, and
    the clock by that cost divided by the number of recordings that share. The window that would end first goes first
    (tag plus cost, as in weighted fair queueing): a short recording passes a long one, and many short ones do not
    stop it for ever, since it keeps its tag while the clock moves on.
    """

    def __init__(self) -> None:
        self.now = 0.0

    def start(self, tag: float) -> float:
        """The tag of a recording that has work again: time when it had none is not saved up."""
        return max(self.now, tag)

    def charge(self, cost: float, sharers: int) -> None:
        self.now += cost / max(1, sharers)


def choose(
    waiting: Sequence[Window], items: int, seconds: float, seconds_per_cost: float = 0.0
) -> list[Window]:
    """The window whose turn it is, and those that are cheaper to take along than to run after it.

    A window goes along if it adds less padding than a batch of its own would cost; most alike first.
    """
    first = min(next_windows(waiting), key=lambda window: window.turn(seconds_per_cost))
    if first.attempts:
        return [first]  # it may have killed a worker, so it runs alone
    others = [
        window
        for window in waiting
        if _alike(window.job, first.job) and window is not first and not window.attempts
    ]
    others.sort(key=lambda window: (abs(window.seconds - first.seconds), window.turn(seconds_per_cost)))
    batch, longest = [first], first.seconds
    for window in others:
        if len(batch) >= items:
            break
        stretched = max(longest, window.seconds)
        padded = stretched * (len(batch) + 1)
        added = padded - longest * len(batch) - window.seconds
        if padded <= seconds and added < BATCH_COST_SECONDS:
            batch.append(window)
            longest = stretched
    return batch


def next_windows(waiting: Sequence[Window]) -> list[Window]:
    """Of each job the first window that waits: a short last window does not go before the others."""
    found: dict[Job, Window] = {}
    for window in waiting:
        if window.number < found.setdefault(window.job, window).number:
            found[window.job] = window
    return list(found.values())


def _alike(one: Job, other: Job) -> bool:
    return one.model == other.model and one.options == other.options
