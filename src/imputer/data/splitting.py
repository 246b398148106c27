"""A validation set out of a training set: whole speakers if there are many, else whole recordings."""

import random
from collections.abc import Sequence

from imputer.data.manifest import Utterance
from imputer.errors import UsageError

MANY_SPEAKERS = 8  # with fewer, holding one out would lose too much of the data


def split_off(
    utterances: Sequence[Utterance], *, share: float = 0.1, seed: int = 0
) -> tuple[list[Utterance], list[Utterance], str]:
    """(training, validation, unit): about ``share`` of the seconds is held out, in whole speakers or recordings."""
    speakers = {utterance.speaker for utterance in utterances}
    unit = "speaker" if len(speakers) >= MANY_SPEAKERS and "" not in speakers else "recording"
    of = {u.id: u.speaker if unit == "speaker" else u.audio_filepath for u in utterances}
    groups = sorted(set(of.values()))
    if len(groups) < 2:
        found = f"{groups[0]} is the only {unit}" if groups else f"there is no {unit}"
        raise UsageError(f"{found}; a validation set needs another one")
    random.Random(seed).shuffle(groups)
    seconds = dict.fromkeys(groups, 0.0)
    for utterance in utterances:
        seconds[of[utterance.id]] += utterance.duration
    wanted, held_out = share * sum(seconds.values()), set(groups[:1])
    for group in groups[1:-1]:
        if sum(seconds[one] for one in held_out) + seconds[group] / 2 > wanted:
            break
        held_out.add(group)
    train = [utterance for utterance in utterances if of[utterance.id] not in held_out]
    valid = [utterance for utterance in utterances if of[utterance.id] in held_out]
    return train, valid, unit
