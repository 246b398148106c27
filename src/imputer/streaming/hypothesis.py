"""The alignment of a stream's window, and the words in it."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from imputer.decoding import Decoded
from imputer.recognizer import Recognizer
from imputer.transcripts import WORD_MARK, Word

WORD_END_SECONDS = 0.5  # of blanks after a word: nothing will be added to it


@dataclass(slots=True)
class Hypothesis:
    """Tokens and confidences of the window's frames, settled ones first. Frames are counted from the stream's start."""

    recognizer: Recognizer
    first: int = 0  # frame of the window
    settled: int = 0  # first frame that is not settled
    tokens: list[int] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)
    before: list[int] = field(default_factory=list)  # tokens of the window before

    @property
    def end(self) -> int:
        return self.first + len(self.tokens)

    @property
    def settled_count(self) -> int:
        """Frames of the window that are settled."""
        return self.settled - self.first

    def replace_open(self, found: Decoded) -> None:
        """Take over a decoded window; settled frames keep their tokens."""
        self.before, kept = self.tokens, self.settled_count
        self.tokens = self.tokens[:kept] + found.alignment[kept:]
        self.confidence = self.confidence[:kept] + found.confidence[kept:]

    def cut(self, count: int) -> "Hypothesis":
        """Without its first ``count`` frames."""
        return Hypothesis(
            self.recognizer, self.first + count, self.settled, self.tokens[count:], self.confidence[count:]
        )

    def agreed(self, oldest: int, newest: int) -> int:
        """The first frame that stays open.

        Frames settle from the left, as long as they come before ``newest`` and have the token they had in the window
        before, or come before ``oldest``.
        """
        border = max(self.settled, min(oldest, self.end))
        for frame in range(self.settled, min(newest, self.end)):
            place = frame - self.first
            if place >= len(self.before) or self.before[place] != self.tokens[place]:
                break
            border = max(border, frame + 1)
        return border

    def words(self, count: int | None = None) -> list[Word]:
        """The words in the first ``count`` frames, or in all, with their times in the stream."""
        decoded = Decoded(self.tokens[:count], self.confidence[:count], 0)
        frame_seconds = self.recognizer.frame_seconds
        offset = self.first * frame_seconds
        found = self.recognizer.transcript(decoded, len(decoded.alignment) * frame_seconds).words
        return [replace(w, start=round(w.start + offset, 3), end=round(w.end + offset, 3)) for w in found]

    def complete(self) -> int:
        """How many settled frames hold whole words: up to the start of the last one, or all if a pause follows it."""
        tokens = self.tokens[: self.settled_count]
        spoken, starts = self._spoken(tokens)
        pause = max(1, round(WORD_END_SECONDS / self.recognizer.frame_seconds))
        if not spoken or len(tokens) - spoken[-1] > pause:
            return len(tokens)
        return starts[-1] if starts else 0

    def blanks(self) -> int:
        """Frames after the last token."""
        spoken, _ = self._spoken(self.tokens)
        return len(self.tokens) - (spoken[-1] + 1 if spoken else 0)

    def gaps(self) -> list[tuple[int, int]]:
        """(frame of the window, length) of the pauses between words: the frame in the middle of each."""
        spoken, starts = self._spoken(self.tokens)
        ends = {place: before for before, place in pairwise(spoken)}
        return [
            ((ends[place] + 1 + place) // 2, place - ends[place] - 1) for place in starts if place in ends
        ]

    def _spoken(self, tokens: Sequence[int]) -> tuple[list[int], list[int]]:
        """Places of the tokens that are not blank, and those among them that begin a word."""
        spoken = [place for place, token in enumerate(tokens) if token != self.recognizer.model.blank]
        pieces = self.recognizer.vocabulary.pieces([tokens[place] for place in spoken])
        return spoken, [
            place for place, piece in zip(spoken, pieces, strict=True) if piece.startswith(WORD_MARK)
        ]
