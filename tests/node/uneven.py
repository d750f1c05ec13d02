"""A small language model on made-up text, with all that makes sharding hard, for tests of several processes.

Blocks of their own, a tied and a frozen and an unused parameter, rows that no number of processes divides, and rows
whose numbers of tokens differ widely: some parts of a batch have none at all.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import torch

from shoal.node.workload import Assignment

SYMBOLS, WIDTH, ROWS, LENGTH = 11, 6, 5, 8
IGNORED = -100
Batch = dict[str, torch.Tensor]


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(width, 3)
        self.outer = torch.nn.Linear(3, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(torch.tanh(self.inner(x)))


class UnevenModel(torch.nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(SYMBOLS, width)
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(2))
        self.head = torch.nn.Linear(width, SYMBOLS, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)
        self.unused = torch.nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("scale", torch.ones(1))

    def forward(self, symbols: torch.Tensor) -> torch.Tensor:
        x = self.embedding(symbols) * self.frozen.mean() * self.scale
        for block in self.blocks:
            x = block(x)
        if self.training:
            self.seen += 1
        return self.head(x)


class Uneven:
    metric = "nats per symbol"

    def build(self) -> torch.nn.Module:
        return UnevenModel()

    def batches(self, assignment: Assignment) -> Iterator[Batch]:
        """Drawn from torch's own generator, as workloads do; rows 2 and 3 have no targets, the last always has some."""
        while True:
            symbols = torch.randint(SYMBOLS, (ROWS, LENGTH))
            targets = (symbols * 3 + 1) % SYMBOLS
            lengths = torch.randint(LENGTH, (ROWS, 1))
            lengths[2:4], lengths[-1] = 0, LENGTH
            yield {"symbols": symbols, "targets": targets.where(torch.arange(LENGTH) < lengths, IGNORED)}

    def loss(self, model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, int]:
        targets = batch["targets"]
        mean = torch.nn.functional.cross_entropy(
            model(batch["symbols"]).flatten(0, 1), targets.flatten(), ignore_index=IGNORED
        )
        return mean, int((targets != IGNORED).sum())

    def evaluate(self, model: torch.nn.Module) -> float:
        symbols = torch.arange(SYMBOLS).repeat(2, 1)
        logits = model(symbols).flatten(0, 1)
        return float(torch.nn.functional.cross_entropy(logits, (symbols.flatten() * 3 + 1) % SYMBOLS))


class ByHand(Uneven):
    """Divides by the number of targets by itself: of a part without any that is 0 / 0, and so is its gradient."""

    def loss(self, model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, int]:
        logits, targets = model(batch["symbols"]).flatten(0, 1), batch["targets"].flatten()
        counted = targets != IGNORED
        losses = torch.nn.functional.cross_entropy(logits, targets.clamp(min=0), reduction="none")
        return (losses * counted).sum() / counted.sum(), int(counted.sum())


class Wide(Uneven):
    """With an embedding large enough for moments in 8 bits; blocks of its rows are not all full."""

    def build(self) -> torch.nn.Module:
        return UnevenModel(401)


class FailsInOne(Uneven):
    """Raises in the second of two processes."""

    def loss(self, model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, int]:
        if len(batch["symbols"]) == ROWS // 2:
            raise ValueError("a planted mistake in another process")
        return super().loss(model, batch)


class StopsInOne(Uneven):
    """Stops that process as a debugger would, and the other waits for it in a collective."""

    def loss(self, model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, int]:
        if len(batch["symbols"]) == ROWS // 2:
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(3600)
        return super().loss(model, batch)
