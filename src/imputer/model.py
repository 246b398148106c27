"""The paper's network (fig:imputer): convolution + alignment embedding -> self-attention -> softmax."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from imputer import configs, frontends
from imputer.errors import UsageError
from imputer.frontends.attention import attention, hidden_padding, rotary_angles, rotate


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
        self.layers = nn.ModuleList(Layer(settings) for _ in range(settings.layers))
        self.norm = nn.LayerNorm(settings.width)
        self.output = nn.Linear(settings.width, vocabulary_size + 1)  # V+ = V, blank
        self.apply(_initialise)

    def encode(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """(batch, frame, feature) -> acoustic (batch, frame, width), frame_lengths (batch,)."""
        return self.front_end(features, lengths)

    def impute(self, acoustic: Tensor, frame_lengths: Tensor, partial: Tensor) -> Tensor:
        """One pass: log p(a_i | a~, x) for every frame i, (batch, frame, token)."""
        hidden = hidden_padding(acoustic.shape[1], frame_lengths, acoustic.dtype)
        superimposed = acoustic + self.embedding(partial)
        context = self.contextualise(superimposed, hidden)
        return functional.log_softmax(self.output(context).float(), dim=-1)

    def contextualise(self, x: Tensor, hidden: Tensor | None) -> Tensor:
        """The self-attention stack, (batch, frame, width) -> the same; ``hidden`` takes padding out of attention."""
        rotation = rotary_angles(x.shape[1], self.settings.width // self.settings.heads, x.device, x.dtype)
        x = functional.dropout(x, self.settings.dropout, self.training)
        for layer in self.layers:
            x = layer(x, rotation, hidden)
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


class Layer(nn.Module):
    """Self-attention and feed-forward, each normalised before and added after (pre-norm)."""

    def __init__(self, settings: configs.Model) -> None:
        super().__init__()
        width = settings.width
        self.heads, self.rate = settings.heads, settings.dropout
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)  # one product for queries, keys and values
        self.attention_output = nn.Linear(width, width)
        self.filter_norm = nn.LayerNorm(width)
        self.filter_in = nn.Linear(width, settings.filter_size)
        self.filter_out = nn.Linear(settings.filter_size, width)

    def pass_through(self) -> None:
        """Start as the identity: a layer added to a trained model must not disturb it."""
        for part in (self.attention_output, self.filter_out):
            nn.init.zeros_(part.weight)
            nn.init.zeros_(part.bias)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], hidden: Tensor | None) -> Tensor:
        """(batch, frame, width) -> the same."""
        attended = self.attend(self.attention_norm(x), rotation, hidden)
        x = x + functional.dropout(attended, self.rate, self.training)
        inner = functional.relu(self.filter_in(self.filter_norm(x)), inplace=True)
        return x + functional.dropout(self.filter_out(inner), self.rate, self.training)

    def attend(self, x: Tensor, rotation: tuple[Tensor, Tensor], hidden: Tensor | None) -> Tensor:
        """Multi-head self-attention with rotary positions."""
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1)).transpose(1, 3)
        query, key, value = qkv.unbind(2)  # (batch, head, frame, size)
        query, key = (rotate(x, rotation).to(value.dtype) for x in (query, key))  # bf16 stays bf16
        mixed = attention(query, key, value, hidden)
        return self.attention_output(mixed.transpose(1, 2).flatten(2))


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
