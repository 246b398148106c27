"""Layers of the self-attention stack: the paper's, and one that also reads the encoder's frames."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from imputer import configs
from imputer.frontends.attention import attention, rotate
from imputer.frontends.normalisation import real_frames

Rotation = tuple[Tensor, Tensor]
REACH = 16  # acoustic frames before and after its own from which a frame reads the encoder's frames
HIDDEN = -1e4  # added to a score; finite, so that padding, which sees nothing, is no NaN


def in_blocks(x: Tensor, length: int, heads: int, *, margin: int = 0) -> Tensor:
    """(batch, frame, width) -> (block, batch, head, frame of the block, size), zeros where a block is not full.

    ``margin`` puts so many blocks of zeros in front and behind.
    """
    x = functional.pad(x, (0, 0, margin * length, -x.shape[1] % length + margin * length))
    return x.unflatten(1, (-1, length)).unflatten(-1, (heads, -1)).permute(1, 0, 3, 2, 4).contiguous()


def hidden_from_blocks(frames: int, frame_lengths: Tensor, stack: int, dtype: torch.dtype) -> Tensor:
    """(block, batch, 1, 1, 3 blocks): HIDDEN on the rows of the encoder that are no frames of the item, else 0."""
    real = real_frames(frames, frame_lengths).to(dtype).repeat_interleave(stack, dim=1)[..., None]
    around = in_blocks(real, REACH * stack, 1, margin=1)[..., 0]  # (block, batch, 1, row)
    around = torch.cat((around[:-2], around[1:-1], around[2:]), dim=-1)
    return (1 - around[..., None, :]) * HIDDEN


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

    def forward(self, x: Tensor, rotation: Rotation, hidden: Tensor | None) -> Tensor:
        """(batch, frame, width) -> the same."""
        attended = self.attend(self.attention_norm(x), rotation, hidden)
        x = x + functional.dropout(attended, self.rate, self.training)
        inner = functional.relu(self.filter_in(self.filter_norm(x)), inplace=True)
        return x + functional.dropout(self.filter_out(inner), self.rate, self.training)

    def attend(self, x: Tensor, rotation: Rotation, hidden: Tensor | None) -> Tensor:
        """Multi-head self-attention with rotary positions."""
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1)).transpose(1, 3)
        query, key, value = qkv.unbind(2)  # (batch, head, frame, size)
        query, key = (rotate(x, rotation).to(value.dtype) for x in (query, key))  # bf16 stays bf16
        mixed = attention(query, key, value, hidden)
        return self.attention_output(mixed.transpose(1, 2).flatten(2))


class CrossLayer(nn.Module):
    """A layer of Moonshine's decoder over frames: self-attention, attention to the encoder's frames, feed-forward.

    # DEPARTURE cross-attention: the paper's layers see the acoustic frames only in their sum with a~; see PAPER.md.

    Its decoder writes one token after the other and finds the place in the sound by content. Here every frame knows
    its place: each head starts with a Gaussian window around it, and learns where the window lies and how wide it is.
    """

    def __init__(self, settings: configs.Model, *, memory_size: int, stack: int) -> None:
        super().__init__()
        width = settings.width
        self.stack = stack  # encoder frames in an acoustic frame
        self.heads, self.rate = settings.heads, settings.dropout
        size = width // settings.heads
        self.rotated = size // 16 * 16 or size  # numbers of a head that carry positions
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attention_output = nn.Linear(width, width, bias=False)
        self.memory_norm = nn.LayerNorm(width, bias=False)
        self.query = nn.Linear(width, width, bias=False)
        self.keys_values = nn.Linear(memory_size, 2 * width, bias=False)
        self.memory_output = nn.Linear(width, width, bias=False)
        self.filter_norm = nn.LayerNorm(width, bias=False)
        self.filter_in = nn.Linear(width, 2 * settings.filter_size)  # values and their gates
        self.filter_out = nn.Linear(settings.filter_size, width)
        # The windows, in frames of the encoder: 0.2 s to either side, some heads a little ahead, some behind.
        self.window_centre = nn.Parameter(torch.linspace(-6.0, 6.0, settings.heads))
        self.window_width = nn.Parameter(torch.full((settings.heads,), 2.1))  # log of a standard deviation

    def pass_through(self) -> None:
        """Start as the identity: a layer added to a trained model must not disturb it."""
        for part in (self.attention_output, self.memory_output, self.filter_out):
            nn.init.zeros_(part.weight)
        nn.init.zeros_(self.filter_out.bias)

    def read(self, memory: Tensor) -> Tensor:
        """Keys and values of the encoder's frames, (batch, memory, 2 * width): once per recording, not per pass."""
        return self.keys_values(memory)

    def forward(
        self,
        x: Tensor,
        rotation: Rotation,
        hidden: Tensor | None,
        memory: Tensor,
        hidden_memory: Tensor,
    ) -> Tensor:
        """(batch, frame, width), what ``read`` gave -> (batch, frame, width)."""
        attended = self.attend(self.attention_norm(x), rotation, hidden)
        x = x + functional.dropout(attended, self.rate, self.training)
        heard = self.attend_memory(self.memory_norm(x), memory, hidden_memory)
        x = x + functional.dropout(heard, self.rate, self.training)
        inner, gate = self.filter_in(self.filter_norm(x)).chunk(2, dim=-1)
        return x + functional.dropout(
            self.filter_out(functional.silu(gate) * inner), self.rate, self.training
        )

    def attend(self, x: Tensor, rotation: Rotation, hidden: Tensor | None) -> Tensor:
        """Multi-head self-attention; a part of every head carries rotary positions."""
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1)).transpose(1, 3)
        query, key, value = qkv.unbind(2)  # (batch, head, frame, size)
        query, key = (self._rotate(x, rotation).to(value.dtype) for x in (query, key))
        mixed = attention(query, key, value, hidden)
        return self.attention_output(mixed.transpose(1, 2).flatten(2))

    def attend_memory(self, x: Tensor, memory: Tensor, hidden: Tensor) -> Tensor:
        """Attention of every acoustic frame to the encoder's frames near it."""
        query = in_blocks(self.query(x), REACH, self.heads)  # (block, batch, head, frame, size)
        keys, values = (
            in_blocks(part, REACH * self.stack, self.heads, margin=1) for part in memory.chunk(2, dim=-1)
        )
        count = query.shape[0]
        query = query * query.shape[-1] ** -0.5
        # The block before, its own and the one after, without copying them.
        scores = torch.cat([query @ keys[i : i + count].transpose(-1, -2) for i in range(3)], dim=-1)
        weights = (scores + (self.window().to(scores.dtype) + hidden)).softmax(-1)
        parts = zip(weights.chunk(3, dim=-1), (values[i : i + count] for i in range(3)), strict=True)
        before, own, after = (weight @ value for weight, value in parts)
        mixed = (before + own + after).permute(1, 0, 3, 2, 4)  # (batch, block, frame, head, size)
        return self.memory_output(mixed.flatten(3).flatten(1, 2)[:, : x.shape[1]])

    def window(self) -> Tensor:
        """What attention adds to its scores, (head, frame, 3 blocks): the log of a Gaussian, -1e4 out of reach."""
        device = self.window_centre.device
        place = torch.arange(REACH, device=device) * self.stack + (self.stack - 1) / 2
        row = torch.arange(-REACH * self.stack, 2 * REACH * self.stack, device=device)
        distance = row - place[:, None]  # (frame, 3 blocks)
        centre, width = self.window_centre[:, None, None], self.window_width.exp()[:, None, None]
        log_weight = -0.5 * ((distance - centre) / width).square()
        return log_weight.masked_fill(distance.abs() > REACH * self.stack, HIDDEN)

    def _rotate(self, x: Tensor, rotation: Rotation) -> Tensor:
        return torch.cat((rotate(x[..., : self.rotated], rotation), x[..., self.rotated :]), dim=-1)
