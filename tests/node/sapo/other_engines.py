"""Engines of others, over tiny models that are made here: llama.cpp (`tests/install_llama_cpp.sh`), transformers."""

from __future__ import annotations

import re
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch

from shoal.node.option import HostPort
from shoal.node.sapo.causal_lm_policy import CausalLMPolicy, CausalLMSettings
from shoal.testnet.parent_death import ended_with_parent
from tests.node.lab import environment, eventually
from tests.node.sapo.test_causal_lm_policy import END, new_model, new_tokenizer

SCRIPTS = Path(sys.executable).parent
LLAMA_SERVER = SCRIPTS / "llama-server"
START_DEADLINE_S = 240.0
DIGITS = "0123456789"
CONTEXT = 64
AS_THE_MODEL = ("--top-k", "0", "--top-p", "1", "--min-p", "0", "--temp", "1")
"""Every token is drawn with the probability that the model gives it; its own defaults leave the unlikely ones out."""
EXACT = ("--cache-type-k", "f32", "--cache-type-v", "f32", "--flash-attn", "off")

FOUR_TOGETHER = ("--parallel", "4", "--kv-unified")
"""Several completions a request. With a cache for each of them, which `--parallel` alone means, one in eight of those
that were asked for side by side had another's state: not drawn from its prompt."""


def model_of(shift: float) -> Any:
    """A tiny model that knows digits; another one by each `shift` of its parameters."""
    model = new_model(vocabulary=len(DIGITS) + 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(shift)
    return model


def policy_of(shift: float) -> CausalLMPolicy:
    """The same, as a policy."""
    return CausalLMPolicy(
        model_of(shift), new_tokenizer(letters=DIGITS), CausalLMSettings(prompt_tokens=12, completion_tokens=8)
    )


def text_of(tokens: Sequence[int]) -> str:
    """What these tokens of it are, the end being no text."""
    return "".join(("?", "", *DIGITS)[token] for token in tokens)


def save_gguf(path: Path, shift: float) -> Path:
    """The same model, as llama.cpp reads it."""
    import gguf  # type: ignore[import-not-found,import-untyped,unused-ignore]

    model = model_of(shift)
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    names = ["?", END, *DIGITS]
    kinds = [gguf.TokenType.NORMAL, gguf.TokenType.CONTROL, *[gguf.TokenType.NORMAL] * len(DIGITS)]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(names)
    writer.add_token_scores([0.0] * len(names))
    writer.add_token_types(kinds)
    writer.add_unk_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)
    for name, parameter in model.state_dict().items():
        values = parameter.numpy()
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            values = _interleaved(values, config.num_attention_heads)
        writer.add_tensor(_name_in_gguf(name), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def save_sampled(folder: Path, shift: float) -> Path:
    """The same model in the layout of Hugging Face, to be drawn from, and not always taken at its likeliest."""
    model = model_of(shift)
    model.generation_config.update(do_sample=True, top_k=0, eos_token_id=1, bos_token_id=None)
    model.save_pretrained(folder)
    new_tokenizer(letters=DIGITS).save_pretrained(folder)
    return folder


def _interleaved(values: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rows of a head in the order in which llama.cpp turns them: in pairs, where transformers has two halves."""
    rows, columns = values.shape
    return np.ascontiguousarray(values.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2)).reshape(
        rows, columns
    )


_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _name_in_gguf(name: str) -> str:
    in_layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.weight", name)
    if in_layer:
        return f"blk.{in_layer[1]}.{_NAMES[in_layer[2]]}.weight"
    return f"{_NAMES[name.removesuffix('.weight')]}.weight"


class OtherEngine(ABC):
    """A process of one; a context manager that leaves none behind. Started again, it has the same port."""

    serves: str
    """What it writes once it serves, with its port."""

    def __init__(self, model: Path, *options: str) -> None:
        self._port = 0
        self.log = model.parent / "engine.log"
        self.process: subprocess.Popen[bytes] | None = None
        self._first = (model, *options)

    @abstractmethod
    def _command(self, model: Path, port: int) -> list[str]: ...

    def start(self, model: Path, *options: str) -> None:
        """Start it, and wait until it serves."""
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                ended_with_parent([*self._command(model, self._port), *options]),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment() | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
            )
        try:
            self._port = int(eventually(self._said, "the engine serves", START_DEADLINE_S))
        except BaseException:
            self.kill()
            raise

    def _said(self) -> str:
        assert self.process is not None
        text = self.log.read_text(errors="replace")
        assert self.process.poll() is None, text
        found = re.search(self.serves, text)
        return found[1] if found else ""

    @property
    def address(self) -> HostPort:
        return HostPort("127.0.0.1", self._port)

    def __enter__(self) -> Self:
        self.start(*self._first)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.kill()

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(60)


class LlamaServer(OtherEngine):
    """The server of llama.cpp, of a model as `save_gguf` writes it, under the name of its file."""

    serves = r"listening on http://127\.0\.0\.1:(\d+)\n"

    def _command(self, model: Path, port: int) -> list[str]:
        place = ["--host", "127.0.0.1", "--port", str(port), "--threads", "1", "--ctx-size", str(4 * CONTEXT)]
        return [str(LLAMA_SERVER), "--model", str(model), "--alias", model.stem, *place, *AS_THE_MODEL, *EXACT]


class TransformersServe(OtherEngine):
    """`transformers serve`, of a model in the layout of Hugging Face."""

    serves = r"running on http://127\.0\.0\.1:(\d+) "

    def _command(self, model: Path, port: int) -> list[str]:
        place = ["--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
        return [str(SCRIPTS / "transformers"), "serve", str(model), *place]
