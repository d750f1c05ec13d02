"""The workload `causal-lm`: any causal language model of `transformers`, on any text that `datasets` reads.

It needs the extra: ``pip install 'shoal[hf]'``. The swarm trains float32 parameters; with `bf16` the arithmetic of
forward and backward is bfloat16 by autocast. Documents are packed: each is followed by the end-of-text token, and
the whole is cut into blocks of `sequence_length` tokens, in which attention sees across documents.

Shapes: B batch, T sequence_length.
"""

from __future__ import annotations

import importlib
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from shoal.node.workload import BATCH_LIMIT, Assignment, check_whole
from shoal.node.workloads.arithmetic import arithmetic
from shoal.node.workloads.causal_lm_data import (
    SAMPLE_BY,
    Documents,
    Hub,
    held_out_texts,
    open_documents,
    pack,
    training_texts,
)
from shoal.node.workloads.causal_lm_model import (
    EXPORT_FOLDER,
    find_model,
    load_model,
    load_tokenizer,
    split_name,
)
from shoal.node.workloads.compiling import as_it_is, check_compiler
from shoal.node.workloads.continuing import draw_tokens, sample_generator
from shoal.protocol.errors import ConfigError

EXTRA = ("transformers", "datasets")
HELD_OUT_BLOCKS = 64
SEQUENCE_LIMIT = 1 << 20
"""Tokens of a block, at most."""
PROMPTS = ("Once upon a time", "The ")


@dataclass(frozen=True, kw_only=True)
class CausalLMWorkload:
    """Predict the next token. The options are the fields; `data` is a folder or file of documents.

    model: its name, see `causal_lm_model`. tokenizer: empty for the model's. init: whether training begins with the
    model's weights ("pretrained") or with random ones of its configuration ("random"). dataset: of the Hub, for nodes
    without files of their own; dataset_config, split and streaming are those of `datasets.load_dataset`.
    sample_by: what of a plain text file is one document. batch: blocks in a step.
    """

    model: str
    tokenizer: str = ""
    init: str = "pretrained"
    dataset: str = ""
    dataset_config: str = ""
    split: str = "train"
    streaming: bool = True
    text_column: str = "text"
    sample_by: str = "paragraph"
    sequence_length: int = 512
    batch: int = 8
    bf16: bool = True
    gradient_checkpointing: bool = False
    compile: bool = False
    data: str | None = None
    metric: str = field(default="nats per token", init=False)
    metric_per_loss: float = field(default=1.0, init=False)

    def __post_init__(self) -> None:
        _require_extra()
        check_whole("workload 'causal-lm'", self, {"sequence_length": (2, SEQUENCE_LIMIT), "batch": (1, BATCH_LIMIT)})
        for option, known in (("init", ("pretrained", "random")), ("sample_by", SAMPLE_BY)):
            if getattr(self, option) not in known:
                raise _unfit(f"{option} is {getattr(self, option)!r}, expected one of: {', '.join(known)}")
        for option in ("model", "tokenizer", "dataset"):
            if getattr(self, option) or option == "model":
                split_name(getattr(self, option), option=option)
        if self.dataset and "/" not in self.dataset:
            raise _unfit(f"dataset {self.dataset!r} lacks its owner; write owner/name")

    def build(self) -> nn.Module:
        """Load the model, or draw it; its parameters are float32."""
        pretrained = self.init == "pretrained"
        folder = find_model(self.model, data=self.data, weights=pretrained)
        model = cast(Any, load_model(folder, pretrained=pretrained))
        symbols = model.get_input_embeddings().num_embeddings
        if len(self._tokenizer) > symbols:
            raise _unfit(f"the tokenizer has {len(self._tokenizer)} tokens, the model {symbols}; choose one that fits")
        longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        if longest is not None and self.sequence_length > longest:
            raise _unfit(f"sequence_length {self.sequence_length} is over the {longest} that the model takes")
        if self.gradient_checkpointing:
            try:
                model.activation_checkpointing_enable()
            except ValueError as error:
                raise _unfit(f"{error}; leave gradient_checkpointing out") from None
        if self.compile:
            model.compile()  # in place: a wrapper would change the parameters' names
        return cast(nn.Module, model.train())  # a model with weights comes in evaluation mode

    def batches(self, assignment: Assignment) -> Iterator[torch.Tensor]:
        """Yield ``(B, T) int64``: blocks of the documents that are this member's alone."""
        blocks = self._packed(training_texts(self._documents, assignment))
        while some := list(itertools.islice(blocks, self.batch)):
            yield torch.stack(some)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Cross-entropy in nats per token, and the number of tokens predicted, B · (T - 1)."""
        if self.compile and torch.is_grad_enabled():
            check_compiler(batch.device.type)
        with arithmetic("bf16" if self.bf16 else "float32", batch.device.type):
            mean: torch.Tensor = model(input_ids=batch, labels=batch, use_cache=False).loss
        return mean, batch[:, 1:].numel()

    def evaluate(self, model: nn.Module) -> float:
        """Mean cross-entropy over the first `HELD_OUT_BLOCKS` blocks of the held-out documents."""
        device = next(model.parameters()).device
        parts = [part.to(device) for part in torch.split(self._held_out, self.batch)]
        with as_it_is(self.compile):
            return sum(float(self.loss(model, part)[0]) * len(part) for part in parts) / len(self._held_out)

    @property
    def prompts(self) -> tuple[str, ...]:
        """See `SamplingWorkload`."""
        return PROMPTS

    def continuations(self, model: nn.Module, prompts: Sequence[str]) -> Iterator[list[str]]:
        """Yield what the model says after each prompt, a token more every time, until it says that the text ends."""
        device, end = next(model.parameters()).device, self._tokenizer.eos_token_id
        contexts = self._tokenize(list(prompts))
        tokens = [list[int]() for _ in contexts]
        inputs = [torch.tensor([context], device=device) for context in contexts]
        memories: list[Any] = [None] * len(contexts)
        generator, open_rows = sample_generator(), [place for place, context in enumerate(contexts) if context]
        with as_it_is(self.compile):
            while open_rows:
                for place in tuple(open_rows):
                    with arithmetic("bf16" if self.bf16 else "float32", device.type):
                        out = model(input_ids=inputs[place], past_key_values=memories[place], use_cache=True)
                    drawn, memories[place] = draw_tokens(out.logits[:, -1], generator), out.past_key_values
                    inputs[place] = drawn[:, None].to(device)
                    tokens[place].append(int(drawn[0]))
                    length = len(contexts[place]) + len(tokens[place])
                    if tokens[place][-1] == end or length >= self.sequence_length:
                        open_rows.remove(place)
                yield [self._tokenizer.decode(row, skip_special_tokens=True) for row in tokens]

    def export(self, model: nn.Module, folder: Path) -> None:
        """Write model and tokenizer to `folder`/huggingface, as `save_pretrained` does."""
        target = folder / EXPORT_FOLDER
        cast(Any, model).save_pretrained(target)
        self._tokenizer.save_pretrained(target)

    @cached_property
    def _tokenizer(self) -> Any:
        os.environ.setdefault("RAYON_NUM_THREADS", str(torch.get_num_threads()))  # or it takes every core
        return load_tokenizer(find_model(self.tokenizer or self.model, data=self.data, weights=False))

    @cached_property
    def _documents(self) -> Documents:
        hub: Hub | None = None
        if self.dataset:
            name, revision = split_name(self.dataset, option="dataset")
            hub = Hub(
                name=name,
                config=self.dataset_config,
                revision=revision or "",
                split=self.split,
                streaming=self.streaming,
            )
        return open_documents(data=self.data, hub=hub, column=self.text_column, sample_by=self.sample_by)

    @cached_property
    def _held_out(self) -> torch.Tensor:
        """``(n, T) int64`` with 1 <= n <= `HELD_OUT_BLOCKS`."""
        blocks = list(itertools.islice(self._packed(held_out_texts(self._documents)), HELD_OUT_BLOCKS))
        if not blocks:
            raise _unfit("too little text to hold a block out; add documents, or lower sequence_length")
        return torch.stack(blocks)

    def _packed(self, texts: Iterator[str]) -> Iterator[torch.Tensor]:
        return pack(texts, self._tokenize, end=self._tokenizer.eos_token_id, length=self.sequence_length)

    def _tokenize(self, texts: list[str]) -> list[list[int]]:
        tokens: list[list[int]] = self._tokenizer(
            texts, add_special_tokens=False, return_attention_mask=False, verbose=False
        )["input_ids"]
        return tokens


def _unfit(problem: str) -> ConfigError:
    return ConfigError(f"workload 'causal-lm': {problem}")


def _require_extra() -> None:
    """Import what the extra brings. Its progress bars stay out of the log, and what is read is reported to nobody."""
    try:
        transformers, datasets = map(importlib.import_module, EXTRA)
    except ModuleNotFoundError as error:
        if error.name not in EXTRA:
            raise
        raise ConfigError("the workload 'causal-lm' needs its extra: pip install 'shoal[hf]'") from None
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
