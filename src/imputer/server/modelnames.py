"""The names that requests may use for models."""

from imputer.server.failures import Failure

# Names that programs written for OpenAI's service send; they mean the default model.
ALIASES = (
    "whisper-1",
    "gpt-transcribe",
    "gpt-4o-transcribe",
    "gpt-4o-mini-transcribe",
    "gpt-4o-mini-transcribe-2025-12-15",
    "gpt-4o-transcribe-diarize",
)


class Models:
    """The names that requests may use, and what they stand for."""

    def __init__(self, block_sizes: dict[str, int], aliases: dict[str, str] | None = None) -> None:
        self.block_sizes = block_sizes  # of each model by its name; the first is the default
        self.aliases = aliases or {}

    @property
    def default(self) -> str:
        return next(iter(self.block_sizes))

    def find(self, name: str) -> str:
        """The model that a name stands for."""
        if name in self.block_sizes:
            return name
        if name in self.aliases:
            return self.aliases[name]
        if not name or name in ALIASES:
            return self.default
        known = ", ".join((*self.block_sizes, *self.aliases))
        raise Failure(404, f"no model {name[:80]!r}; known: {known}", code="model_not_found", param="model")
