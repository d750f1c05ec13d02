"""A small GPT, for the workload `text` and the policy `char-policy`: one forward, with or without a cache.

A pre-norm decoder with an untied head, in two styles. Parameters of both are in checkpoints and exports, under the
names and in the order of `LAYOUTS`, so neither can take on the other's:

    rotary     RMSNorm, rotary positions (arXiv 2104.09864), no biases; the head starts at zero, so that an untrained
               model gives every symbol the same probability
    learned    LayerNorm, learned positions, biases in the perceptron; all matrices start at a deviation of 0.02

Shapes: B batch, T time, C channels (width), H heads, D = C / H, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

Style = Literal["rotary", "learned"]
Rotation = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines of positions: (T, D / 2), or (B, 1, T, D / 2) where rows have positions of their own."""

LAYOUTS: Final[Mapping[Style, Mapping[str, str]]] = {
    "rotary": {part: part for part in ("norm_attention", "query_key_value", "project", "norm_perceptron")},
    "learned": {"norm_attention": "norm_1", "norm_perceptron": "norm_2", "query_key_value": "qkv", "project": "out"},
}
"""The first parts of a block by what they do, in the order of their parameters, each with its name in files."""


SIZES: Final[Mapping[str, tuple[int, int]]] = {"width": (1, 1 << 14), "layers": (1, 256), "heads": (1, 256)}
"""The least and the most of each option of a model's size."""
SPAN_SHARE: Final = 0.25
"""Of the columns of a cache: rows whose first ones lie further apart are attended to by themselves."""
CONTEXT_LIMIT: Final = 1 << 17
"""Tokens of a row, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GptSettings:
    """Size and style. `context`: the most tokens of a row. `width` is a multiple of the heads, of twice them if rotary.

    recomputes: a block keeps its input alone for the backward pass, and computes the rest again (gradient
    checkpointing, arXiv 1604.06174). About 12 · layers · width² parameters.
    """

    vocabulary: int
    width: int
    layers: int
    heads: int
    context: int
    style: Style
    recomputes: bool = False

    @property
    def head_width(self) -> int:
        """D."""
        return self.width // self.heads

    def norm(self) -> nn.Module:
        """Make a norm over the channels."""
        return nn.RMSNorm(self.width) if self.style == "rotary" else nn.LayerNorm(self.width)


class Cache:
    """Keys and values of each layer, rows aligned at their end; what stands before a row's context is masked.

    keys, values: per layer (B, H, capacity, D), of which `used` columns are. visible: (B, capacity) bool.
    lengths: (B,), the tokens of each row. Rows that come in the order of their lengths, the longest first, are attended
    to in a few spans, and little is read of a short row where only a long one has columns.
    """

    def __init__(self, settings: GptSettings, lengths: torch.Tensor, *, room: int) -> None:
        self.used = 0
        longest = int(lengths.max())
        shape = (len(lengths), settings.heads, longest + room, settings.head_width)
        self.keys = [torch.zeros(shape, device=lengths.device) for _ in range(settings.layers)]
        self.values = [torch.zeros(shape, device=lengths.device) for _ in range(settings.layers)]
        self.lengths = lengths
        self._begins = longest - lengths  # (B,), the first column of each row
        self.visible = self._columns(shape[2]) >= self._begins[:, None]
        self._spans = [(0, len(lengths), 0)]  # of rows: the first, the one behind the last, their first column

    def keep(self, rows: torch.Tensor) -> None:
        """Go on with these rows, in this order; a row may be there several times. Not while gradients are recorded."""
        begins = self._begins[rows]
        unseen = int(begins.min())
        spare = torch.empty(0)
        for layers in (self.keys, self.values):
            for layer, columns in enumerate(layers):
                layers[layer] = self._of_rows(columns, rows, unseen, spare)
                spare = columns
        self.lengths, self._begins, self.used = self.lengths[rows], begins - unseen, self.used - unseen
        self.visible = self._columns(self.keys[0].shape[2]) >= self._begins[:, None]
        self._spans = self._spans_of(self._begins.tolist())

    def take_up(self, rows: torch.Tensor, part: Cache) -> None:
        """Copy what another cache has of these rows. Nothing may have been read behind them yet."""
        self.used = int((self.lengths + self._begins)[0])
        columns = slice(self.used - part.used, self.used)
        for mine, other in zip((*self.keys, *self.values), (*part.keys, *part.values), strict=True):
            mine[rows, :, columns] = other

    def _columns(self, count: int) -> torch.Tensor:
        return torch.arange(count, device=self.lengths.device)[None, :]

    def _of_rows(self, columns: torch.Tensor, rows: torch.Tensor, unseen: int, spare: torch.Tensor) -> torch.Tensor:
        """These rows without the first `unseen` columns; of the others those that are used are copied.

        spare: memory that nobody needs any more, which has been touched and so is quicker than new.
        """
        shape = (len(rows), columns.shape[1], columns.shape[2] - unseen, columns.shape[3])
        numel = math.prod(shape)
        kept = spare.flatten()[:numel].view(shape) if spare.numel() >= numel else columns.new_empty(shape)
        torch.index_select(columns[:, :, unseen : self.used], 0, rows, out=kept[:, :, : self.used - unseen])
        return kept

    def _spans_of(self, begins: list[int]) -> list[tuple[int, int, int]]:
        """Rows side by side whose first columns are not far from each other."""
        spans = [(0, 1, begins[0])]
        for row, begin in enumerate(begins[1:], start=1):
            first, _, column = spans[-1]
            if abs(begin - column) > SPAN_SHARE * self.used:
                spans.append((row, row + 1, begin))
            else:
                spans[-1] = first, row + 1, min(begin, column)
        return spans

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: torch.Tensor | None
    ) -> torch.Tensor:
        """Put keys and values (B, H, T, D) behind those used, and attend to all up to their end that is `seen`."""
        key, value = self.add(layer, key, value)
        if len(self._spans) == 1:
            return F.scaled_dot_product_attention(query, key, value, attn_mask=seen)
        mixed = [
            F.scaled_dot_product_attention(
                query[first:stop],
                key[first:stop, :, column:],
                value[first:stop, :, column:],
                attn_mask=None if seen is None else seen[first:stop, :, :, column:],
            )
            for first, stop, column in self._spans
        ]
        return torch.cat(mixed)

    def add(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Put keys and values (B, H, T, D) behind those used; return all up to their end."""
        end = self.used + key.shape[2]
        self.keys[layer][:, :, self.used : end] = key
        self.values[layer][:, :, self.used : end] = value
        return self.keys[layer][:, :, :end], self.values[layer][:, :, :end]


class Gpt(nn.Module):
    """Tokens (B, T) in, logits of the next token (B, T, V) out."""

    cos: torch.Tensor  # (context, D / 2), if rotary
    sin: torch.Tensor

    def __init__(self, settings: GptSettings) -> None:
        super().__init__()
        self.settings = settings
        self.embed = nn.Embedding(settings.vocabulary, settings.width)
        if settings.style == "learned":
            self.position = nn.Embedding(settings.context, settings.width)
        self.blocks = nn.ModuleList(Block(settings) for _ in range(settings.layers))
        self.norm = settings.norm()
        self.head = nn.Linear(settings.width, settings.vocabulary, bias=False)
        if settings.style == "rotary":
            nn.init.normal_(self.embed.weight, std=0.5)
            nn.init.zeros_(self.head.weight)
            half = settings.head_width // 2
            frequencies = 10_000.0 ** (-torch.arange(half) / half)  # (D / 2,), arXiv 2104.09864 section 3.2.2
            angles = torch.outer(torch.arange(settings.context), frequencies)  # (context, D / 2)
            self.register_buffer("cos", angles.cos(), persistent=False)
            self.register_buffer("sin", angles.sin(), persistent=False)
        else:
            for parameter in self.parameters():
                if parameter.ndim == 2:
                    nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        logits: torch.Tensor = self.head(self.hidden(tokens))
        return logits

    def hidden(
        self,
        tokens: torch.Tensor,
        *,
        positions: torch.Tensor | None = None,
        seen: torch.Tensor | None = None,
        cache: Cache | None = None,
    ) -> torch.Tensor:
        """Return the last hidden states, (B, T, C).

        positions: (B, T), and seen: (B, 1, T, T) bool, what each token attends to. Without them, rows are aligned at
        their beginning and each token sees all before it. cache: where the tokens are added; `seen` then is
        needed, over all of its columns up to their end.
        """
        x, rotation = self._place(tokens, positions)
        for layer, block in enumerate(self.blocks):
            x = block(x, rotation, seen=seen, cache=cache, layer=layer)
        normed: torch.Tensor = self.norm(x)
        return normed

    def prefill(self, contexts: Sequence[Sequence[int]], *, room: int) -> tuple[torch.Tensor, Cache]:
        """Read contexts of one token or more. Returns logits of the next token (B, V), and a cache with room for more.

        Those of like lengths are read together: a row's padding takes as long as what it says.
        """
        alike = _alike([len(context) for context in contexts])
        if len(alike) == 1:
            return self._read(contexts, room)
        device = self.embed.weight.device
        cache = Cache(self.settings, torch.tensor([len(context) for context in contexts], device=device), room=room)
        read = []
        for rows in alike:
            logits, part = self._read([contexts[row] for row in rows], 0)
            cache.take_up(torch.tensor(rows, device=device), part)
            read.append(logits)
        back = torch.tensor([row for rows in alike for row in rows], device=device).argsort()
        return torch.cat(read)[back], cache

    def _read(self, contexts: Sequence[Sequence[int]], room: int) -> tuple[torch.Tensor, Cache]:
        device = self.embed.weight.device
        lengths = torch.tensor([len(context) for context in contexts], device=device)
        longest = int(lengths.max())
        cache = Cache(self.settings, lengths, room=room)
        tokens = torch.zeros((len(contexts), longest), dtype=torch.long, device=device)
        for row, context in enumerate(contexts):
            tokens[row, longest - len(context) :] = torch.tensor(context, device=device)
        columns = torch.arange(longest, device=device)
        positions = (columns[None, :] - (longest - lengths[:, None])).clamp(min=0)
        causal = columns[:, None] >= columns[None, :]
        seen = causal[None] & cache.visible[:, None, :longest]
        # Padding sees itself, for a softmax needs something.
        seen |= torch.eye(longest, dtype=torch.bool, device=device)[None]
        states = self.hidden(tokens, positions=positions, seen=seen[:, None], cache=cache)
        cache.used = longest
        return self.head(states[:, -1]), cache

    def step(self, tokens: torch.Tensor, cache: Cache) -> torch.Tensor:
        """Read one more token a row, (B, 1). Returns the logits of the next (B, V)."""
        seen = cache.visible[:, None, None, : cache.used + 1]
        states = self.hidden(tokens, positions=cache.lengths[:, None], seen=seen, cache=cache)
        cache.used += 1
        cache.lengths = cache.lengths + 1
        logits: torch.Tensor = self.head(states[:, -1])
        return logits

    def _place(self, tokens: torch.Tensor, positions: torch.Tensor | None) -> tuple[torch.Tensor, Rotation | None]:
        """Return the tokens' embeddings (B, T, C) at their positions, and by what their queries and keys are turned."""
        length = tokens.shape[1]
        x: torch.Tensor = self.embed(tokens)
        if self.settings.style == "learned":
            return x + (self.position.weight[:length] if positions is None else self.position(positions)), None
        if positions is None:
            return x, (self.cos[:length], self.sin[:length])
        return x, (self.cos[positions][:, None], self.sin[positions][:, None])


class Block(nn.Module):
    """One layer: attention, then a perceptron, each on a normalised input and added to the stream (B, T, C)."""

    def __init__(self, settings: GptSettings) -> None:
        super().__init__()
        width, bias = settings.width, settings.style == "learned"
        self.heads, self.recomputes = settings.heads, settings.recomputes
        self.names = LAYOUTS[settings.style]
        parts = {
            "norm_attention": settings.norm(),
            "query_key_value": nn.Linear(width, 3 * width, bias=False),
            "project": nn.Linear(width, width, bias=False),
            "norm_perceptron": settings.norm(),
        }
        for part, name in self.names.items():
            self.add_module(name, parts[part])
        self.up, self.down = nn.Linear(width, 4 * width, bias=bias), nn.Linear(4 * width, width, bias=bias)
        if settings.style == "rotary":
            for outward in (parts["project"], self.down):  # the stream's variance must not grow with depth
                assert isinstance(outward, nn.Linear)
                nn.init.normal_(outward.weight, std=outward.in_features**-0.5 / math.sqrt(2 * settings.layers))

    def forward(
        self,
        x: torch.Tensor,
        rotation: Rotation | None,
        *,
        seen: torch.Tensor | None = None,
        cache: Cache | None = None,
        layer: int = 0,
    ) -> torch.Tensor:
        """Attend to what is `seen`, else to all before; with a cache, to what is seen in it of this layer too."""
        if self.recomputes and cache is None and torch.is_grad_enabled():
            again: torch.Tensor = checkpoint(
                self._layer, x, rotation, seen, None, layer, use_reentrant=False, preserve_rng_state=False
            )
            return again
        return self._layer(x, rotation, seen, cache, layer)

    def _layer(
        self, x: torch.Tensor, rotation: Rotation | None, seen: torch.Tensor | None, cache: Cache | None, layer: int
    ) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self._run("query_key_value", self._run("norm_attention", x))
        parts = parts.view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)  # each (B, H, T, D)
        if rotation is not None:
            query, key = rotate(query, *rotation), rotate(key, *rotation)
        if cache is None:
            mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, is_causal=seen is None)
        else:
            mixed = cache.attend(layer, query, key, value, seen)
        x = x + self._run("project", mixed.transpose(1, 2).reshape(batch, length, width))
        perceived: torch.Tensor = self.down(F.gelu(self.up(self._run("norm_perceptron", x))))
        return x + perceived

    def _run(self, part: str, x: torch.Tensor) -> torch.Tensor:
        ran: torch.Tensor = getattr(self, self.names[part])(x)
        return ran


def _alike(lengths: Sequence[int]) -> list[list[int]]:
    """The rows with these lengths in parts, of which no row is shorter than half of the longest; the longest first."""
    parts: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if parts and 2 * lengths[row] >= lengths[parts[-1][0]]:
            parts[-1].append(row)
        else:
            parts.append([row])
    return parts


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn each pair of channels of (B, H, T, D) by its position's angle."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)
