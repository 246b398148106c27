"""The paper's network (fig:imputer): convolution + alignment embedding -> self-attention -> softmax."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from imputer import configs, frontends
from imputer.errors import UsageError
from imputer.frontends.attention import hidden_padding, rotary_angles
from imputer.frontends.normalisation import real_frames
from imputer.layers import CrossLayer, Layer, hidden_from_blocks

TOKENS_A_SECOND = 4.2  # with cross-attention, positions count tokens as Moonshine's decoder does


class Imputer(nn.Module):
    """p(a | a~, x), eqn:factorization: one distribution over V+ for every frame, given a partial alignment.

    The acoustic part (``encode``) does not read a~, so decoding runs it once and ``impute`` once per pass.
    """

    blank = 0
    front_end: Any  # one of imputer.frontends.FRONT_ENDS

    def __init__(self, settings: configs.Model, front_end: configs.FrontEnd, vocabulary_size: int) -> None:
        super().__init__()
        if settings.width % (2 * settings.heads):
            raise UsageError(
                f"model.width = {settings.width} must be a multiple of twice model.heads = {settings.heads}"
            )
        self.settings, self.front_end_settings = settings, front_end
        self.vocabulary_size = vocabulary_size
        self.mask = vocabulary_size + 1
        self.merge_repeats = settings.merge_repeats
        self.front_end = frontends.build(front_end, settings.width)
        self.embedding = nn.Embedding(vocabulary_size + 2, settings.width)  # V++ = V, blank, mask
        if settings.cross_attention:
            self.layers = nn.ModuleList(self._cross_layer() for _ in range(settings.layers))
            self.norm = nn.LayerNorm(settings.width, bias=False)
            # V+ = V, blank: their rows of the embedding are those of the output too.
            self.output_bias = nn.Parameter(torch.zeros(vocabulary_size + 1))
        else:
            self.layers = nn.ModuleList(Layer(settings) for _ in range(settings.layers))
            self.norm = nn.LayerNorm(settings.width)
            self.output = nn.Linear(settings.width, vocabulary_size + 1)  # V+ = V, blank
        self.apply(_initialise)

    def _cross_layer(self) -> CrossLayer:
        if not hasattr(self.front_end, "encoder_frames"):
            raise UsageError(
                f"model.cross_attention needs a front end that gives its encoder's frames, trainable_moonshine, not "
                f"{self.front_end_settings.name}"
            )
        return CrossLayer(self.settings, memory_size=self.front_end.memory_size, stack=self.front_end.stack)

    @property
    def acoustic_size(self) -> int:
        """Numbers in an acoustic frame: its width, and with cross-attention the keys and values of all layers."""
        memory = 2 * self.settings.width * self.front_end.stack if self.settings.cross_attention else 0
        return self.settings.width + self.settings.layers * memory

    def encode(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """(batch, frame, feature) -> acoustic (batch, frame, acoustic_size), frame_lengths (batch,)."""
        if not self.settings.cross_attention:
            return self.front_end(features, lengths)
        frames, lengths = self.front_end.encoder_frames(features, lengths)
        acoustic, frame_lengths = self.front_end.acoustic(frames, lengths)
        frames = frames * real_frames(frames.shape[1], lengths)[..., None]
        frames = functional.pad(frames, (0, 0, 0, acoustic.shape[1] * self.front_end.stack - frames.shape[1]))
        # Read once per recording, not once per pass: (batch, frame, stack * 2 * width) for every layer.
        read = [layer.read(frames).unflatten(1, (acoustic.shape[1], -1)).flatten(2) for layer in self.layers]  # type: ignore[operator]
        return torch.cat((acoustic.to(read[0].dtype), *read), dim=-1), frame_lengths

    def impute(self, acoustic: Tensor, frame_lengths: Tensor, partial: Tensor) -> Tensor:
        """One pass: log p(a_i | a~, x) for every frame i, (batch, frame, token)."""
        hidden = hidden_padding(acoustic.shape[1], frame_lengths, acoustic.dtype)
        width = self.settings.width
        superimposed = acoustic[..., :width] + self.embedding(partial)
        if not self.settings.cross_attention:
            context = self.contextualise(superimposed, hidden)
            return functional.log_softmax(self.output(context).float(), dim=-1)
        stack = self.front_end.stack
        hidden_memory = hidden_from_blocks(acoustic.shape[1], frame_lengths, stack, acoustic.dtype)
        context = self.contextualise(superimposed, hidden, acoustic[..., width:], hidden_memory)
        output = self.embedding.weight[: self.vocabulary_size + 1]
        return functional.log_softmax(functional.linear(context, output, self.output_bias).float(), dim=-1)

    def contextualise(
        self,
        x: Tensor,
        hidden: Tensor | None,
        memory: Tensor | None = None,
        hidden_memory: Tensor | None = None,
    ) -> Tensor:
        """The self-attention stack, (batch, frame, width) -> the same; ``hidden`` takes padding out of attention."""
        size = self.settings.width // self.settings.heads
        x = functional.dropout(x, self.settings.dropout, self.training)
        if memory is None:
            rotation = rotary_angles(x.shape[1], size, x.device, x.dtype)
            for layer in self.layers:
                x = layer(x, rotation, hidden)
            return self.norm(x)
        scale = TOKENS_A_SECOND * self.front_end.frame_seconds
        rotation = rotary_angles(x.shape[1], self.layers[0].rotated, x.device, x.dtype, scale=scale)  # type: ignore[arg-type]
        for layer, read in zip(self.layers, memory.chunk(len(self.layers), dim=-1), strict=True):
            rows = read.unflatten(-1, (self.front_end.stack, -1)).flatten(1, 2)  # (batch, memory, 2 * width)
            x = layer(x, rotation, hidden, rows, hidden_memory)
        return self.norm(x)

    def forward(
        self, features: Tensor, lengths: Tensor, partial: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """log_probs (batch, frame, token) and frame_lengths; without ``partial`` every frame is masked (CTC)."""
        acoustic, frame_lengths = self.encode(features, lengths)
        if partial is None:
            partial = self.all_masked(acoustic)
        return self.impute(acoustic, frame_lengths, partial), frame_lengths

    def all_masked(self, acoustic: Tensor) -> Tensor:
        """The start of decoding: nothing committed, (batch, frame)."""
        return torch.full(acoustic.shape[:2], self.mask, dtype=torch.long, device=acoustic.device)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=module.embedding_dim**-0.5)


def parameters(model: nn.Module) -> int:
    """The number of parameters."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)
