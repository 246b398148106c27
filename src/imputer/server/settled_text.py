"""The text of a long recording while it is transcribed."""

from imputer import transcripts
from imputer.audio import windows
from imputer.decoding import Decoded
from imputer.recognizer import Recognizer
from imputer.transcripts import Token


class SettledText:
    """The words that no later window can change, as deltas that add up to the final text.

    Windows are added in any order. What precedes the overlap with the next window is settled; its last word may
    still grow, so it waits for the next word to begin. Work per window does not grow with the recording.
    """

    def __init__(self, recognizer: Recognizer) -> None:
        self.recognizer = recognizer
        self.hop = recognizer.window_frames()[1]
        self.early: dict[int, tuple[list[int], list[float]]] = {}  # windows whose predecessors are missing
        self.next = 0
        self.last: tuple[list[int], list[float]] | None = None  # the window before ``next``
        self.start = 0  # frame of ``last`` from which on it counts
        self.open: tuple[list[int], list[float]] = ([], [])  # frames that are settled and not yet reported
        self.reported = False

    def add(self, number: int, alignment: list[int], confidence: list[float]) -> tuple[str, list[Token]]:
        """What a window adds to the settled text."""
        self.early[number] = alignment, confidence
        while self.next in self.early:
            self._follow(self.early.pop(self.next))
            self.next += 1
        return self._report(last=False)

    def rest(self) -> tuple[str, list[Token]]:
        """The rest of the text, after the last window."""
        if self.last is not None:
            self._settle(len(self.last[0]))
        return self._report(last=True)

    def _follow(self, window: tuple[list[int], list[float]]) -> None:
        if self.last is not None:
            before, now = self.last[0], window[0]
            overlap = min(len(before) - self.hop, len(now))
            blank = self.recognizer.model.blank
            handover = windows.seam(before[self.hop : self.hop + overlap], now[:overlap], blank)
            self._settle(self.hop + handover)
            self.start = handover
        self.last = window
        self._settle(self.hop)  # the next window takes over here at the earliest

    def _settle(self, frame: int) -> None:
        assert self.last is not None
        self.open[0].extend(self.last[0][self.start : frame])
        self.open[1].extend(self.last[1][self.start : frame])
        self.start = max(self.start, min(frame, len(self.last[0])))

    def _report(self, last: bool) -> tuple[str, list[Token]]:
        """The words in the open frames, without the last one unless there are no more frames."""
        alignment, confidence = self.open
        seconds = len(alignment) * self.recognizer.frame_seconds
        found = self.recognizer.transcript(Decoded(alignment, confidence, 0), seconds)
        tokens = found.tokens
        if last:
            kept, end = tokens, len(alignment)
        else:
            starts = [n for n, t in enumerate(tokens) if t.piece.startswith(transcripts.WORD_MARK)]
            if not starts:
                return "", []
            kept, end = tokens[: starts[-1]], tokens[starts[-1]].frame
        words = transcripts.words_of(kept, seconds)
        if not words:
            return "", []
        self.open = alignment[end:], confidence[end:]
        lead = " " if self.reported else ""
        self.reported = True
        return lead + transcripts.text_of(words), kept
