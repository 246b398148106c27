"""Is the data there, readable, and the same as before? Checked before the first step, refused by name."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from imputer import configs, rollin
from imputer.data import drops
from imputer.data.drops import Dropped, Tally
from imputer.data.fingerprints import Fingerprints, differences, fingerprint
from imputer.data.manifest import Utterance, Utterances
from imputer.data.ranks import Ranks
from imputer.errors import ImputerError, UsageError, count
from imputer.vocabulary import Vocabulary

DATA = "data.safetensors"  # in the run folder: the fingerprints of the training set
MOST_UNALIGNED = 0.01  # of the utterances; with more, the alignments are those of another corpus
ACCEPT = "--accept-changed-data"
UNUSABLE = (drops.MISSING, drops.UNREADABLE, drops.UNKNOWN_TEXT)  # count against data.unreadable_limit


def survey(
    utterances: Sequence[Utterance], vocabulary: Vocabulary, *, reads_files: bool = True
) -> dict[str, Dropped]:
    """By id, the utterances that cannot be used: their audio file is missing or their text has unknown characters."""
    found: dict[str, Dropped] = {}
    there: dict[str, bool] = {}  # many utterances may be slices of one file
    for utterance in utterances:
        path = utterance.audio_filepath
        if reads_files and path not in there:
            there[path] = os.path.isfile(path)
        if not there.get(path, True):
            found[utterance.id] = Dropped(drops.MISSING, path)
            continue
        try:
            vocabulary.encode(utterance.text)
        except ImputerError as error:
            found[utterance.id] = Dropped(drops.UNKNOWN_TEXT, f"utterance {utterance.id!r}: {error}")
    return found


def refuse_unusable(what: str, data: configs.Data, utterances: Utterances, found: dict[str, Dropped]) -> None:
    """Stop if more than the allowed share of the lines of the manifests cannot be used."""
    problems = bad_lines(utterances)
    lines, bad = len(utterances) + len(problems), len(found) + len(problems)
    if bad > data.unreadable_limit * lines:
        first = "; ".join(dict.fromkeys(one.item for one in [*found.values(), *problems][:3]))
        raise ImputerError(
            f"{what}: {bad} of {count(lines, 'utterance')} cannot be used, more than data.unreadable_limit = "
            f"{data.unreadable_limit:g} allows ({Tally().add([*found.values(), *problems])}). The first: {first}"
        )


def bad_lines(utterances: Utterances) -> list[Dropped]:
    """The lines of the manifests that hold no utterance."""
    return [Dropped(drops.BAD_LINE, text) for manifest in utterances.manifests for text in manifest.problems]


def refuse_changed_data(folder: Path, now: Fingerprints, here: Ranks, *, accept: bool) -> None:
    """A run resumes on the data it was started with, unless a change is accepted."""
    path = folder / DATA
    if not path.is_file():
        here.say(f"note: {folder} has no fingerprints of its data (an older version started it)")
        return
    changed = differences(Fingerprints.load(path), now)
    if not changed:
        return
    if not accept:
        raise UsageError(
            f"the training data changed since {folder} was started: {'; '.join(changed)}. Restore it, or "
            f"resume on it as it is with {ACCEPT}"
        )
    here.say(f"the training data changed ({'; '.join(changed)}); accepted")


def refuse_other_alignments(
    store: rollin.AlignmentStore,
    utterances: Utterances,
    vocabulary: Vocabulary,
    here: Ranks,
    *,
    merge_repeats: bool,
    accept: bool,
) -> dict[str, Dropped]:
    """By id, the utterances that have no alignment, or (if that is accepted) that of another text.

    A few may have none: with repeats merged, for instance, not every text fits into its frames.
    """
    missing = [u.id for u in utterances if u.id not in store]
    if len(missing) > MOST_UNALIGNED * len(utterances):
        raise UsageError(
            f"{store.path} has no alignment for {len(missing)} of {len(utterances)} utterances, first {missing[0]}; "
            "align this corpus, or drop them from the manifest"
        )
    if store.fingerprints is None:
        here.say(f"note: {store.path} has no fingerprints (an older version wrote it); comparing its tokens")
        texts = _other_tokens(store, utterances, vocabulary, merge_repeats)
        sounds: list[str] = []
    else:
        texts, sounds = _other_fingerprints(store.fingerprints, utterances)
    if (texts or sounds) and not accept:
        told = [
            f"{count(len(names), 'utterance')} changed in {what}, first {names[0]!r}"
            for what, names in (("text", texts), ("file name, offset or duration", sounds))
            if names
        ]
        raise UsageError(
            f"the data changed since {store.path} was written: {'; '.join(told)}. Align the corpus again, or train "
            f"with {ACCEPT}, which leaves out those whose text changed"
        )
    unaligned = {name: Dropped(drops.UNALIGNED, f"utterance {name!r}") for name in missing}
    return unaligned | {name: Dropped(drops.CHANGED, f"utterance {name!r}") for name in texts}


def _other_fingerprints(
    stored: dict[str, tuple[int, int]], utterances: Utterances
) -> tuple[list[str], list[str]]:
    """Ids whose text, and whose sound, differ from what was aligned."""
    texts, sounds = [], []
    for utterance in utterances:
        if utterance.id in stored:
            (text, sound), now = stored[utterance.id], fingerprint(utterance)
            texts += [utterance.id] * (text != now[0])
            sounds += [utterance.id] * (sound != now[1])
    return texts, sounds


def _other_tokens(
    store: Callable[[str], list[int]], utterances: Utterances, vocabulary: Vocabulary, merge_repeats: bool
) -> list[str]:
    """Ids whose stored alignment does not collapse to their text."""
    from imputer.alignments import collapse

    found = []
    for utterance in utterances:
        try:
            target = vocabulary.encode(utterance.text)
            if target != list(collapse(store(utterance.id), merge_repeats=merge_repeats)):
                found.append(utterance.id)
        except ImputerError:  # no alignment, or no tokens: dropped elsewhere
            continue
    return found
