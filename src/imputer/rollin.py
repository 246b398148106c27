"""The roll-in policy q x r (sec:rollin_policy): expert alignments, their noise, and masking -> (a, a~).

Alignments come from an expert, are stored offline in one compact file, and are perturbed and masked during training.
What is drawn for (seed, step, utterance) does not depend on batching, ranks or earlier draws.
"""

import errno
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from imputer import lattice, masking
from imputer.errors import ImputerError, UsageError
from imputer.support import atomic_files, checksums, mapped_tensors

BLANK = 0


@dataclass(frozen=True)
class Segment:
    """The frames [start, start + length) that one target token holds in an alignment."""

    token: int
    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length


def segments(alignment: Sequence[int], *, merge_repeats: bool = False) -> list[Segment]:
    """The segments of an alignment; without merging each has one frame."""
    found: list[Segment] = []
    previous = BLANK
    for frame, token in enumerate(alignment):
        if token != BLANK and merge_repeats and token == previous:
            found[-1] = Segment(token, found[-1].start, found[-1].length + 1)
        elif token != BLANK:
            found.append(Segment(token, frame, 1))
        previous = token
    return found


def from_segments(parts: Iterable[Segment], frames: int) -> list[int]:
    """The alignment of ``frames`` frames with these segments, blank elsewhere."""
    alignment = [BLANK] * frames
    for part in parts:
        alignment[part.start : part.end] = [part.token] * part.length
    return alignment


# --- noise: q_phi' = a* + N, eqn:expert_noise. Always collapse(noised) == collapse(alignment).


def no_noise(alignment: list[int], generator: torch.Generator, *, merge_repeats: bool = False) -> list[int]:
    """The expert's alignment, unchanged."""
    return alignment


def utterance_noise(
    alignment: list[int], generator: torch.Generator, *, merge_repeats: bool = False
) -> list[int]:
    """Shift the whole alignment by -1, 0 or 1 frames; not at all if that would push a token beyond either end."""
    shift = int(torch.randint(-1, 2, (), generator=generator))
    shifted = {-1: [*alignment[1:], BLANK], 0: alignment, 1: [BLANK, *alignment[:-1]]}[shift]
    keeps_tokens = len(segments(shifted, merge_repeats=merge_repeats)) == len(
        segments(alignment, merge_repeats=merge_repeats)
    )
    return shifted if keeps_tokens else alignment


def token_noise(
    alignment: list[int], generator: torch.Generator, *, merge_repeats: bool = False
) -> list[int]:
    """Shift every token by -1, 0 or 1 frames, as far as its neighbours leave room."""
    parts = segments(alignment, merge_repeats=merge_repeats)
    shifts = torch.randint(-1, 2, (len(parts),), generator=generator).tolist()
    starts = [part.start + shift for part, shift in zip(parts, shifts, strict=True)]
    return from_segments(_placed(parts, starts, len(alignment), merge_repeats), len(alignment))


NOISES: dict[str, Callable[..., list[int]]] = {
    "none": no_noise,
    "utterance": utterance_noise,
    "token": token_noise,
}


def stretch(alignment: list[int], frames: int, *, merge_repeats: bool = False) -> list[int] | None:
    """The alignment of the same tokens over another number of frames (speech played faster or slower).

    None if and only if the tokens do not fit.
    """
    if frames == len(alignment):
        return alignment
    ratio = frames / max(1, len(alignment))
    parts = segments(alignment, merge_repeats=merge_repeats)
    gaps = sum(_gaps(parts, merge_repeats))
    if len(parts) + gaps > frames:
        return None
    lengths = [max(1, int(part.length * ratio)) if merge_repeats else 1 for part in parts]
    for _ in range(sum(lengths) + gaps - frames):  # a tight fit: shorten the longest segments
        lengths[lengths.index(max(lengths))] -= 1
    stretched, starts = [], []
    for part, length in zip(parts, lengths, strict=True):
        centre = (part.start + part.length / 2) * ratio  # in proportion to the recording
        starts.append(int(centre - length / 2 + 0.5))
        stretched.append(Segment(part.token, starts[-1], length))
    return from_segments(_placed(stretched, starts, frames, merge_repeats), frames)


def _gaps(parts: list[Segment], merge_repeats: bool) -> list[int]:
    """Blank frames required before each segment: one between equal tokens where repeats merge."""
    return [0] * bool(parts) + [
        int(merge_repeats and a.token == b.token) for a, b in itertools.pairwise(parts)
    ]


def _placed(parts: list[Segment], starts: list[int], frames: int, merge_repeats: bool) -> list[Segment]:
    """Segments near the wanted starts, in order, without overlap, with the required gaps; they must fit ``frames``.

    Each is pushed right by the segment before it, then left by the segment after it or the end.
    """
    gaps = _gaps(parts, merge_repeats)
    starts = list(starts)
    edge = 0
    for i, part in enumerate(parts):
        starts[i] = max(starts[i], edge + gaps[i])
        edge = starts[i] + part.length
    edge = frames
    for i in reversed(range(len(parts))):
        starts[i] = min(starts[i], edge - parts[i].length)
        edge = starts[i] - gaps[i]
    return [Segment(part.token, start, part.length) for part, start in zip(parts, starts, strict=True)]


# --- drawing (a, a~)


def generator_for(*key: int | str) -> torch.Generator:
    """A generator seeded by ``key``: a draw depends on nothing else."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def draw(
    expert: Callable[[str], list[int]],
    ids: Sequence[str],
    frame_lengths: Sequence[int],
    *,
    masking_policy: str,
    noise: str,
    block_size: int,
    seed: int,
    step: int,
    all_masked: float = 0.0,
    merge_repeats: bool = False,
) -> tuple[Tensor, Tensor, list[bool]]:
    """Sample a ~ q_phi' and a~ ~ r(a): alignments (batch, frame), committed (batch, frame), and which are usable.

    ``expert`` returns the stored alignment of an utterance. One that does not fit its number of frames
    is all blank and marked unusable. A share ``all_masked`` of the utterances commits nothing, like the first pass.
    """
    width = max(frame_lengths)
    alignments = torch.zeros(len(ids), width, dtype=torch.long)
    committed = torch.zeros(len(ids), width, dtype=torch.bool)
    usable = []
    for item, (name, frames) in enumerate(zip(ids, frame_lengths, strict=True)):
        generator = generator_for(seed, step, name)
        alignment = stretch(expert(name), frames, merge_repeats=merge_repeats)
        usable.append(alignment is not None)
        if alignment is None:
            continue
        alignment = NOISES[noise](alignment, generator, merge_repeats=merge_repeats)
        alignments[item, :frames] = torch.tensor(alignment)
        drawn = masking.POLICIES[masking_policy](
            torch.tensor([frames]), block_size=block_size, generator=generator
        )
        if not all_masked or float(torch.rand((), generator=generator)) >= all_masked:
            committed[item, :frames] = drawn[0, :frames]
    return alignments, committed, usable


def forced_imputation(
    step: Callable[[Tensor], Tensor],
    targets: Tensor,
    frame_lengths: Tensor,
    target_lengths: Tensor,
    *,
    block_size: int,
    mask: int,
    merge_repeats: bool = False,
) -> Tensor:
    """Alignments (batch, frame) of known targets by the passes of decoding: the stale copy's q_theta'.

    Every pass computes the best path that agrees with the frames committed so far, and commits the most probable
    masked frame of each block. All frames of a pass belong to one path, so the result collapses to its target.
    """
    batch, frames = len(frame_lengths), int(frame_lengths.max())
    device = targets.device
    inside = torch.arange(frames, device=device) < frame_lengths[:, None]
    committed = torch.zeros(batch, frames, dtype=torch.bool, device=device)
    path = torch.zeros(batch, frames, dtype=torch.long, device=device)
    blocks = -(-frames // block_size)
    for number in range(min(block_size, frames)):
        log_probs = step(torch.where(committed, path, mask))
        given = (path, committed) if number else (None, None)
        path, _scores = lattice.best(
            log_probs, targets, frame_lengths, target_lengths, *given, merge_repeats=merge_repeats
        )
        score = log_probs.gather(-1, path[..., None])[..., 0]
        score = torch.where(inside & ~committed, score, -torch.inf)
        padded = torch.nn.functional.pad(score, (0, blocks * block_size - frames), value=-torch.inf)
        best, slot = padded.view(batch, blocks, block_size).max(-1)  # (batch, block)
        chosen = torch.nn.functional.one_hot(slot, block_size).bool() & (best > -torch.inf)[..., None]
        committed |= chosen.view(batch, -1)[:, :frames]
        if bool((committed == inside).all()):
            break
    return path


# --- the store: alignments of a corpus in one memory-mapped file


@dataclass(frozen=True)
class Provenance:
    """What an alignment file was made from; training refuses a file that does not match."""

    tokenizer: str  # fingerprint of the vocabulary
    merge_repeats: bool
    frame_seconds: float


REMEDIES = {  # what to set if one of these differs
    "tokenizer": "use the expert's tokenizer, --vocabulary.tokenizer EXPERT/model/tokenizer.model",
    "merge_repeats": "set --model.merge_repeats {}",
    "frame_seconds": "use the expert's front end (front_end.name, .stack and .frame_seconds)",
}


class AlignmentStore:
    """Alignments by utterance id, read from a memory-mapped safetensors file."""

    def __init__(self, path: Path | str) -> None:
        try:
            if Path(path).is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            checksums.check(path)  # files of older versions have none
            metadata, tensors = mapped_tensors.read(path)
            if metadata.get("kind") != "imputer-alignments" or "tokens" not in tensors:
                raise UsageError(f"{path} is not an alignment file; `imputer align --store` writes one")
            self._tokens, self._offsets = tensors["tokens"], tensors["offsets"]
            # (utterance, 2): text and sound of what was aligned; None in files of older versions.
            self._fingerprints = tensors.get("fingerprints")
            names = tensors["names"].tobytes().decode().split("\n")
            self.path = Path(path)
            self.provenance = Provenance(**json.loads(metadata["provenance"]))
            self.names = [name for name in names if name]
            self._index = {name: i for i, name in enumerate(self.names)}
            steps = np.diff(self._offsets, prepend=0, append=len(self._tokens))
            if len(self._offsets) != len(self.names) + 1 or (steps < 0).any() or steps[-1] or steps[0]:
                raise ValueError("its offsets do not fit its names and tokens")
        except UsageError:
            raise
        except OSError as error:
            raise UsageError(f"cannot read alignments {path}: {error.strerror or error}") from error
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise UsageError(f"{path} is damaged or not an alignment file: {error}") from error

    def __len__(self) -> int:
        return len(self._index)

    def __contains__(self, name: str) -> bool:
        return name in self._index

    def __call__(self, name: str) -> list[int]:
        """The alignment of one utterance."""
        i = self._index.get(name)
        if i is None:
            raise ImputerError(f"{self.path} has no alignment for utterance {name!r}")
        return self._tokens[self._offsets[i] : self._offsets[i + 1]].tolist()

    @property
    def fingerprints(self) -> dict[str, tuple[int, int]] | None:
        """(text, sound) of each utterance as it was aligned, see ``imputer.data.fingerprints``."""
        if self._fingerprints is None:
            return None
        return dict(zip(self.names, map(tuple, self._fingerprints.tolist()), strict=True))

    def check(self, wanted: Provenance) -> None:
        """Refuse a file from another tokenizer, topology or frame rate; the error says what differs."""
        for key, value in vars(wanted).items():
            found = getattr(self.provenance, key)
            same = abs(found - value) < 1e-6 if isinstance(value, float) else found == value
            if not same:
                remedy = REMEDIES[key].format(json.dumps(found))
                raise UsageError(
                    f"{self.path} does not fit this model: its {key} is {found}, the model's {value}; "
                    f"{remedy}, or align the corpus again with an expert of the same {key}"
                )


def write_alignments(
    path: Path | str,
    items: Iterable[tuple[str, Sequence[int]]],
    provenance: Provenance,
    *,
    fingerprints: Mapping[str, tuple[int, int]] | None = None,
) -> None:
    """Store (id, alignment) pairs, atomically."""
    from safetensors.numpy import save_file

    names, lengths, tokens = [], [0], []
    for name, alignment in items:
        names.append(name)
        lengths.append(len(alignment))
        tokens.append(np.asarray(alignment, dtype=np.uint16))
    arrays: dict[str, np.ndarray] = {
        "tokens": np.concatenate(tokens) if tokens else np.zeros(0, np.uint16),
        "offsets": np.cumsum(lengths, dtype=np.int64),
        "names": np.frombuffer("\n".join(names).encode() or b"\n", dtype=np.uint8),
    }
    if fingerprints is not None:
        numbers = [fingerprints[name] for name in names]
        arrays["fingerprints"] = np.array(numbers, dtype=np.uint64).reshape(-1, 2)
    metadata = {"kind": "imputer-alignments", "provenance": json.dumps(vars(provenance))}
    with atomic_files.replacing(path) as temporary:
        save_file(arrays, temporary, metadata=metadata | {checksums.KEY: checksums.EMPTY})
        checksums.stamp(temporary)
