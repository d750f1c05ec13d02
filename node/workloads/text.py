"""The workload `text`: a small GPT over bytes, to be read from top to bottom.

No tokenizer: 256 symbols, so any file of any language will do, and loss is in bits per byte, which compares
across models. The model is a pre-norm decoder with rotary positions (arXiv 2104.09864), RMSNorm and an
untied head that starts at zero, so that an untrained model is at exactly 8 bits.

Shapes: B batch, T time (context), C channels (width), H heads, D = C / H.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import nn

from shoal.node.workload import Assignment
from shoal.node.workloads.text_data import Corpus, deal_windows, load_corpus
from shoal.protocol.errors import ConfigError

SYMBOLS = 256
HELD_OUT_WINDOWS = 64
EVALUATION_BATCH = 16


@dataclass(frozen=True)
class TextWorkload:
    """Predict the next byte. The options are the model's size; `data` is a folder or file of text."""

    width: int = 128
    layers: int = 4
    heads: int = 4
    context: int = 128
    batch: int = 8
    data: str | None = None
    metric: str = field(default="bits per byte", init=False)

    def __post_init__(self) -> None:
        for option in ("width", "layers", "heads", "context", "batch"):
            value = getattr(self, option)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"workload 'text': {option} is {value!r}, expected a whole number from 1")
        if self.width % (2 * self.heads):
            raise ConfigError(
                f"workload 'text': width {self.width} must be a multiple of twice the heads, {2 * self.heads}"
            )

    def build(self) -> nn.Module:
        """About 12 · layers · width² parameters: 0.85 million by default."""
        return ByteGPT(width=self.width, layers=self.layers, heads=self.heads, context=self.context)

    def batches(self, assignment: Assignment) -> Iterator[torch.Tensor]:
        """Yield ``(B, T + 1) uint8``: windows of the training text that are this member's alone."""
        text = self._corpus.train
        window = self.context + 1
        self._require(text, window * assignment.members)
        indices = deal_windows(len(text) // window, assignment)
        while True:
            starts = [next(indices) * window for _ in range(self.batch)]
            yield torch.stack([text[start : start + window] for start in starts])

    def loss(self, model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Cross-entropy in nats per byte, and the number of bytes predicted."""
        symbols = batch.long()
        logits = model(symbols[:, :-1])  # (B, T, 256)
        targets = symbols[:, 1:]
        return F.cross_entropy(logits.reshape(-1, SYMBOLS), targets.reshape(-1)), targets.numel()

    def evaluate(self, model: nn.Module) -> float:
        """Bits per byte over `HELD_OUT_WINDOWS` windows spread evenly over the held-out text."""
        text = self._corpus.held_out
        window = self.context + 1
        self._require(text, window)
        starts = torch.linspace(0, len(text) - window, HELD_OUT_WINDOWS).long()
        windows = torch.stack([text[start : start + window] for start in starts.tolist()])
        device = next(model.parameters()).device
        losses = [float(self.loss(model, part.to(device))[0]) for part in torch.split(windows, EVALUATION_BATCH)]
        return sum(losses) / len(losses) / math.log(2)

    @cached_property
    def _corpus(self) -> Corpus:
        """Read on first use, so that naming the workload costs nothing."""
        return load_corpus(self.data)

    def _require(self, text: torch.Tensor, needed: int) -> None:
        if len(text) < needed:
            raise ConfigError(f"{len(text)} bytes of text, {needed} are needed; add text or shorten context")


class ByteGPT(nn.Module):
    """Bytes ``(B, T)`` in, logits of the next byte ``(B, T, 256)`` out."""

    cos: torch.Tensor  # (context, D / 2)
    sin: torch.Tensor

    def __init__(self, *, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(SYMBOLS, width)
        self.blocks = nn.ModuleList(Block(width, heads, layers) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, SYMBOLS, bias=False)
        nn.init.normal_(self.embed.weight, std=0.5)
        nn.init.zeros_(self.head.weight)
        half = width // heads // 2
        frequencies = 10_000.0 ** (-torch.arange(half) / half)  # (D / 2,), arXiv 2104.09864 section 3.2.2
        angles = torch.outer(torch.arange(context), frequencies)  # (context, D / 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, symbols: torch.Tensor) -> torch.Tensor:
        length = symbols.shape[1]
        cos, sin = self.cos[:length], self.sin[:length]
        x = self.embed(symbols)  # (B, T, C)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


class Block(nn.Module):
    """One layer: attention, then a perceptron, each on a normalised input and added to the stream."""

    def __init__(self, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.RMSNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.norm_perceptron = nn.RMSNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        for outward in (self.project, self.down):  # the stream's variance must not grow with depth
            nn.init.normal_(outward.weight, std=outward.in_features**-0.5 / math.sqrt(2 * layers))

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attend(self.norm_attention(x), cos, sin)
        perceived: torch.Tensor = self.down(F.gelu(self.up(self.norm_perceptron(x))))
        return x + perceived

    def attend(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.query_key_value(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each (B, H, T, D)
        mixed = F.scaled_dot_product_attention(rotate(query, cos, sin), rotate(key, cos, sin), value, is_causal=True)
        projected: torch.Tensor = self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        return projected


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn each pair of channels of ``(B, H, T, D)`` by its position's angle: ``cos, sin (T, D / 2)``."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)
