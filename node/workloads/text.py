"""The workload `text`: a small GPT (`gpt`) over bytes.

No tokenizer: 256 symbols, so any file of any language will do, and loss is in bits per byte, which compares
across models. An untrained model is at exactly 8 bits.

Shapes: B batch, T time (context).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.nn.functional as F
from blake3 import blake3
from torch import nn

from shoal.node.workload import BATCH_LIMIT, Assignment, check_whole
from shoal.node.workloads.arithmetic import DTYPES, arithmetic
from shoal.node.workloads.compiling import as_it_is, check_compiler
from shoal.node.workloads.continuing import draw_tokens, sample_generator
from shoal.node.workloads.gpt import CONTEXT_LIMIT, SIZES, Gpt, GptSettings
from shoal.node.workloads.text_data import Corpus, deal_windows, load_corpus
from shoal.protocol.errors import ConfigError

SYMBOLS = 256
HELD_OUT_WINDOWS = 64
EVALUATION_BATCH = 16
PROMPTS = ("def ", "The ")
"""Code is what there is to read where no data are given, prose what people give most."""


@dataclass(frozen=True)
class TextWorkload:
    """Predict the next byte. `data` is a folder or file of text.

    width, layers, heads: the model's, of about 12 · layers · width² parameters. context: the bytes that it sees.
    batch: windows of that length in a step. dtype: what products are computed in; auto is bf16 on CUDA, else float32.
    gradient_checkpointing: what layers compute is not kept for the backward pass, but computed again. compile: by
    `torch.compile`, which takes a minute at the start.
    """

    width: int = 128
    layers: int = 4
    heads: int = 4
    context: int = 128
    batch: int = 8
    dtype: str = "auto"
    gradient_checkpointing: bool = False
    compile: bool = False
    data: str | None = None
    metric: str = field(default="bits per byte", init=False)
    metric_per_loss: float = field(default=1 / math.log(2), init=False)

    def __post_init__(self) -> None:
        check_whole("workload 'text'", self, {**SIZES, "context": (1, CONTEXT_LIMIT), "batch": (1, BATCH_LIMIT)})
        if self.dtype not in DTYPES:
            raise ConfigError(f"workload 'text': dtype is {self.dtype!r}, expected one of {', '.join(DTYPES)}")
        if self.width % (2 * self.heads):
            raise ConfigError(
                f"workload 'text': width {self.width} must be a multiple of twice the heads, {2 * self.heads}"
            )

    def build(self) -> nn.Module:
        """About 12 · layers · width² parameters: 0.85 million by default."""
        model = Gpt(
            GptSettings(
                vocabulary=SYMBOLS,
                width=self.width,
                layers=self.layers,
                heads=self.heads,
                context=self.context,
                style="rotary",
                recomputes=self.gradient_checkpointing,
            )
        )
        if self.compile:
            model.compile()  # in place: a wrapper would change the parameters' names
        return model

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
        if self.compile and torch.is_grad_enabled():
            check_compiler(batch.device.type)
        symbols = batch.long()
        targets = symbols[:, 1:]
        with arithmetic(self.dtype, batch.device.type):
            logits = model(symbols[:, :-1])  # (B, T, 256)
            return F.cross_entropy(logits.reshape(-1, SYMBOLS), targets.reshape(-1)), targets.numel()

    def evaluate(self, model: nn.Module) -> float:
        """Bits per byte over `HELD_OUT_WINDOWS` windows spread evenly over the held-out text."""
        text = self._corpus.held_out
        window = self.context + 1
        self._require(text, window)
        starts = torch.linspace(0, len(text) - window, HELD_OUT_WINDOWS).long()
        windows = torch.stack([text[start : start + window] for start in starts.tolist()])
        device = next(model.parameters()).device
        with as_it_is(self.compile):
            losses = [float(self.loss(model, part.to(device))[0]) for part in torch.split(windows, EVALUATION_BATCH)]
        return sum(losses) / len(losses) * self.metric_per_loss

    def held_out_digest(self) -> bytes:
        """See `ComparableWorkload`."""
        return blake3(self._corpus.held_out.numpy().tobytes()).digest()

    @property
    def prompts(self) -> tuple[str, ...]:
        """See `SamplingWorkload`."""
        return PROMPTS

    def continuations(self, model: nn.Module, prompts: Sequence[str]) -> Iterator[list[str]]:
        """Yield what the model says after each prompt, a byte more every time, as far as its context reaches."""
        assert isinstance(model, Gpt)
        contexts = [list(prompt.encode()) for prompt in prompts]
        room = self.context - max(map(len, contexts))
        if room < 1:
            return
        texts, generator, device = [bytearray() for _ in contexts], sample_generator(), model.embed.weight.device
        with arithmetic(self.dtype, device.type):
            logits, cache = model.prefill(contexts, room=room)
            for left in range(room, 0, -1):
                drawn = draw_tokens(logits, generator)
                for text, symbol in zip(texts, drawn.tolist(), strict=True):
                    text.append(symbol)
                yield [text.decode(errors="replace") for text in texts]
                if left > 1:
                    logits = model.step(drawn[:, None].to(device), cache)

    @cached_property
    def _corpus(self) -> Corpus:
        """Read on first use, so that naming the workload costs nothing."""
        return load_corpus(self.data)

    def _require(self, text: torch.Tensor, needed: int) -> None:
        if len(text) < needed:
            raise ConfigError(f"{len(text)} bytes of text, {needed} are needed; add text or shorten context")
