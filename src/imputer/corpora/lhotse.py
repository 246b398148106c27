"""Lhotse cuts (an extra: imputer-asr[lhotse]): every supervision of every cut becomes an utterance."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from imputer.corpora.common import Dropped, Found, Options, normaliser
from imputer.data.manifest import Utterance
from imputer.errors import UsageError


def lhotse(source: Path, options: Options) -> Iterator[Found | Dropped]:
    """A cut set in a file such as cuts.jsonl.gz, over recordings that are files."""
    try:
        from lhotse import CutSet
    except ImportError as error:
        raise UsageError("reading lhotse cuts needs: pip install 'imputer-asr[lhotse]'") from error
    if not source.is_file():
        raise UsageError(f"{source}: no such file; expected lhotse cuts such as cuts.jsonl.gz")
    text_of = normaliser(options, "plain")
    for cut in _cuts(CutSet, source):
        if not cut.supervisions:
            yield Dropped("cut without a supervision", cut.id)
        for supervision in cut.supervisions:
            yield _found(cut, supervision, text_of(supervision.text or ""))


def _cuts(cut_set: Any, source: Path) -> Iterator[Any]:
    """The cuts in a file; lhotse raises many kinds of errors for other content."""
    try:
        yield from cut_set.from_file(str(source))
    except Exception as error:
        raise UsageError(f"{source} has no lhotse cuts: {error}") from error


def _found(cut: Any, supervision: Any, text: str) -> Found | Dropped:
    several = len(cut.supervisions) > 1
    identifier = supervision.id if several else cut.id
    recording = getattr(cut, "recording", None)
    if recording is None:
        return Dropped("mixed or padded cut", identifier)
    if len(recording.sources) != 1 or recording.sources[0].type != "file":
        return Dropped("recording is not one file", identifier)
    if recording.transforms:
        return Dropped("recording is transformed on the fly; save its audio first", identifier)
    if recording.num_channels > 1 and supervision.channel != recording.channel_ids:
        return Dropped("one channel of several", identifier)
    start = max(0.0, supervision.start) if several else 0.0
    duration = min(supervision.duration, cut.duration - start) if several else cut.duration
    return Found(
        Utterance(
            identifier,
            str(Path(recording.sources[0].source).absolute()),
            duration,
            text,
            supervision.speaker or "",
            cut.start + start,
        )
    )
