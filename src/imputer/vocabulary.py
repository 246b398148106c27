"""Text to token ids and back: V, V+ (blank) and V++ (mask).

blank = 0, tokens = 1..|V|, mask = |V|+1. SentencePiece is trained so that its piece ids are these token ids: its id
0, which it reserves for the unknown, is our blank and never occurs in encoded text.

Text is not normalised here: case and marks are left to the corpus (``imputer.corpora``).
"""

import hashlib
import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from imputer.errors import ImputerError, UsageError
from imputer.support.atomic_files import replacing

WORD_MARK = "▁"
UNITS = {"bpe": "bpe", "characters": "char"}


class Vocabulary:
    """A SentencePiece model. Build one with ``train`` or ``load``."""

    blank = 0

    def __init__(self, content: bytes) -> None:
        import sentencepiece

        self._content = content
        self._model = sentencepiece.SentencePieceProcessor()
        try:
            self._model.LoadFromSerializedProto(content)
        except RuntimeError as error:
            raise ImputerError("not a SentencePiece model") from error
        if self._model.unk_id() != 0 or self._model.bos_id() >= 0 or self._model.eos_id() >= 0:
            raise ImputerError(
                "this SentencePiece model reserves ids other than 0; train one with Vocabulary.train"
            )
        self.size: int = self._model.GetPieceSize() - 1
        self._pieces: list[str] = [self._model.IdToPiece(i) for i in range(self.size + 1)]
        self.alphabet = {piece for piece in self._pieces[1:] if len(piece) == 1} | {" "}

    @property
    def mask(self) -> int:
        return self.size + 1

    @property
    def fingerprint(self) -> str:
        """Twelve hexadecimal digits that identify the vocabulary."""
        return hashlib.sha256(self._content).hexdigest()[:12]

    @classmethod
    def train(cls, texts: Iterable[str], *, size: int = 400, units: str = "bpe") -> "Vocabulary":
        """Learn ``size`` pieces from text by byte-pair encoding (the paper's 400), or take its characters.

        With ``units="characters"`` the vocabulary is the characters that occur, whatever ``size`` says.
        """
        if units not in UNITS:
            raise UsageError(f"units must be one of {', '.join(UNITS)}, got {units!r}")
        texts = [joined for text in texts if (joined := " ".join(text.split()))]
        if not texts:
            raise ImputerError("no text to train a vocabulary on")
        if units == "characters":
            size = len(set(WORD_MARK + "".join(texts).replace(" ", "")))
        return cls(_trained(texts, size, UNITS[units]))

    @classmethod
    def load(cls, path: str | Path) -> "Vocabulary":
        try:
            return cls(Path(path).read_bytes())
        except OSError as error:
            raise UsageError(f"cannot read the vocabulary {path}: {error.strerror or error}") from error
        except ImputerError as error:
            raise ImputerError(f"{path}: {error}") from error

    def save(self, path: str | Path) -> None:
        with replacing(path) as temporary:
            temporary.write_bytes(self._content)

    def encode(self, text: str) -> list[int]:
        """Token ids in 1..size; a character that no piece holds is an error that names it."""
        text = " ".join(text.split())
        tokens: list[int] = self._model.EncodeAsIds(text)
        if self.blank in tokens:
            unknown = sorted(set(text) - self.alphabet)
            named = ", ".join(map(repr, unknown))
            raise ImputerError(f"the vocabulary has no token for {named} in {text!r}")
        return tokens

    def encode_each(self, texts: list[str]) -> list[list[int] | None]:
        """Token ids of each text, or None where no piece holds one of its characters."""
        encoded: list[list[int]] = self._model.EncodeAsIds([" ".join(text.split()) for text in texts])
        return [None if self.blank in tokens else tokens for tokens in encoded]

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of token ids; blanks and masks are not tokens and raise."""
        return self._model.DecodePieces(self.pieces(tokens)) if (tokens := list(tokens)) else ""

    def pieces(self, tokens: Iterable[int]) -> list[str]:
        """The written form of each token, words starting with the mark ``▁``."""
        tokens = list(tokens)
        wrong = [token for token in tokens if not 1 <= token <= self.size]
        if wrong:
            raise ValueError(f"token ids lie in 1..{self.size}, got {wrong[0]}")
        return [self._pieces[token] for token in tokens]

    def spell(self, piece: str) -> list[int]:
        """The tokens that make up a piece of another vocabulary, longest first; none if a character is missing."""
        ids = {text: token for token, text in enumerate(self._pieces) if token}
        tokens: list[int] = []
        start = 0
        while start < len(piece):
            end = next((end for end in range(len(piece), start, -1) if piece[start:end] in ids), None)
            if end is None:
                return []
            tokens.append(ids[piece[start:end]])
            start = end
        return tokens

    def __len__(self) -> int:
        return self.size

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Vocabulary) and self._content == other._content

    def __hash__(self) -> int:
        return hash(self._content)

    def __reduce__(self) -> tuple[Any, ...]:
        return Vocabulary, (self._content,)

    def __repr__(self) -> str:
        return f"Vocabulary({self.size} tokens, {self.fingerprint})"


def _trained(texts: list[str], size: int, kind: str) -> bytes:
    """The serialised model; the same texts give the same bytes."""
    import sentencepiece

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.Train(
            sentence_iterator=iter(texts),
            model_writer=model,
            model_type=kind,
            vocab_size=size + 1,
            unk_id=0,
            bos_id=-1,
            eos_id=-1,
            pad_id=-1,
            character_coverage=1.0,
            normalization_rule_name="identity",
            max_sentence_length=max(4192, 4 * max(map(len, texts))),
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise ImputerError(_why_not(error, texts, size)) from error
    return model.getvalue()


def _why_not(error: RuntimeError, texts: list[str], size: int) -> str:
    characters = len(set(WORD_MARK + "".join(texts).replace(" ", "")))
    if size < characters:
        return f"a vocabulary of {size} cannot hold the {characters} characters of the text; ask for more"
    # SentencePiece says "Please set it to a value <= N" of its own count, which includes its unknown.
    highest = str(error).rpartition("<= ")[2].strip(" .")
    if highest.isdigit():
        return (
            f"the text has too little variety for a vocabulary of {size}; "
            f'{int(highest) - 1} is the most it gives (vocabulary.size), or use vocabulary.units = "characters"'
        )
    return f"SentencePiece could not train a vocabulary of {size}: {error}"
