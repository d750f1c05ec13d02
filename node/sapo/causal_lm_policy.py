"""The policy `causal-lm-policy`: a causal language model of `transformers`, whole or with low-rank adapters.

Needs the extra `hf`; models are found as `causal-lm` finds its own.

Prompts go through the tokenizer's chat template where it has one. A completion of another agent is encoded as plain
text: one whose tokens hold a special token, such as the end of a turn written out, is not expressed here, nor is one
with the unknown token.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional

from shoal.node.sapo.policies import PolicyLimits
from shoal.node.sapo.policy import Rollout, Sample, completion_mask, drawn_mask, extend_together, spans_of
from shoal.node.training.devices import pick_device
from shoal.node.workload import check_whole
from shoal.node.workloads.causal_lm_model import EXPORT_FOLDER, find_model, load_model, load_tokenizer
from shoal.protocol.errors import ConfigError
from shoal.protocol.manifest_rollouts import COMPLETION_TOKENS_LIMIT

RANK_LIMIT: Final = 1024
ALPHA_LIMIT: Final = 1 << 16
PROMPT_LIMIT: Final = 1 << 20
_SAID: Final = "It was said."
"""Stands for a model's turn; in no template."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CausalLMSettings:
    """Limits, sampling, and what is trained.

    prompt_tokens: a longer prompt keeps its last ones. lora_rank: of adapters on all linear layers, while the model
    itself stays as it is; 0 trains the whole model. bf16: compute in bfloat16 (parameters keep their type).
    """

    prompt_tokens: int = 512
    completion_tokens: int = 256
    temperature: float = 1.0
    lora_rank: int = 0
    lora_alpha: int = 32
    bf16: bool = False

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        check_whole(
            "policy 'causal-lm-policy'",
            self,
            {
                "prompt_tokens": (1, PROMPT_LIMIT),
                "completion_tokens": (1, COMPLETION_TOKENS_LIMIT),
                "lora_alpha": (1, ALPHA_LIMIT),
                "lora_rank": (0, RANK_LIMIT),
            },
        )
        if not self.temperature > 0:
            raise ConfigError(f"a policy's temperature must be above 0, not {self.temperature}")


class CausalLMPolicy:
    """The model generates and is trained without dropout, so that ratios begin at 1."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        settings: CausalLMSettings,
        *,
        device: torch.device | None = None,
        seed: int = 0,
    ) -> None:
        """model, tokenizer: of `transformers`, such as causal_lm_model loads. seed: of the adapters' parameters.

        Raises ConfigError for a tokenizer without an end token, and for a model that is too short.
        """
        if tokenizer.eos_token_id is None:
            raise ConfigError("the tokenizer has no end-of-text token, which ends completions; choose another model")
        room = getattr(model.config, "max_position_embeddings", None)
        if isinstance(room, int) and room < settings.prompt_tokens + settings.completion_tokens:
            raise ConfigError(
                f"the model reads {room} tokens; prompt_tokens {settings.prompt_tokens} and completion_tokens "
                f"{settings.completion_tokens} are more: lower them"
            )
        self.settings = settings
        self.device = device or torch.device("cpu")
        self._tokenizer = tokenizer
        self._end: int = tokenizer.eos_token_id
        self._special = frozenset(tokenizer.all_special_ids)
        if settings.lora_rank:
            model = _with_adapters(model, settings, seed=seed)
        self.model = model.to(self.device).eval()

    @property
    def vocabulary(self) -> int:
        """See `Policy`."""
        model: Any = self.model
        return int(model.get_output_embeddings().weight.shape[0])

    @property
    def completion_limit(self) -> int:
        """See `Policy`."""
        return self.settings.completion_tokens

    def encode_prompt(self, text: str) -> tuple[int, ...]:
        """The question as a user's turn where there is a chat template, else as it is."""
        if self._tokenizer.chat_template:
            turns = [{"role": "user", "content": text}]
            text = self._tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
            ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            ids = self._tokenizer(text)["input_ids"]
        return tuple(ids[-self.settings.prompt_tokens :]) or (self._end,)

    def encode_completion(self, text: str) -> tuple[int, ...] | None:
        """See `Policy`."""
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        if not self._special.isdisjoint(ids):
            return None
        return (*ids, self._end)[: self.settings.completion_tokens]

    def encode_reply(self, text: str) -> tuple[int, ...]:
        """A user's turn after one of the model's, where there is a chat template; else a line of its own."""
        text = _between_turns(self._tokenizer, text) if self._tokenizer.chat_template else f"\n{text}\n"
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"]) or (self._end,)

    def decode(self, tokens: Sequence[int]) -> str:
        """See `Policy`: special tokens have no text."""
        text: str = self._tokenizer.decode([token for token in tokens if token not in self._special])
        return text

    def export(self, folder: Path) -> None:
        """See `ExportingPolicy`: model and tokenizer as `save_pretrained` writes them, adapters in the model."""
        model: Any = self.model
        if self.settings.lora_rank:
            model = copy.deepcopy(model).merge_and_unload()
        model.save_pretrained(folder / EXPORT_FOLDER)
        self._tokenizer.save_pretrained(folder / EXPORT_FOLDER)

    def parameters(self) -> list[nn.Parameter]:
        """All, or those of the adapters."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def extend(
        self,
        rollouts: Sequence[Rollout],
        *,
        enough: Callable[[], bool] | None = None,
    ) -> int:
        """See `Policy`, and `extend_together`."""
        limit, end = self.settings.completion_tokens, self._end
        return extend_together(_Batch(self), rollouts, limit=limit, end=end, enough=enough)

    def log_probs(self, samples: Sequence[Sample]) -> torch.Tensor:
        """See `Policy`."""
        present = completion_mask(samples).to(self.device)
        logs, targets = self._log_probs(samples, present)
        drawn = drawn_mask(samples).to(self.device)
        return torch.where(drawn, logs.gather(2, targets[:, :, None])[:, :, 0], 0.0).cpu()

    @torch.no_grad()
    def drawn_by(self, samples: Sequence[Sample]) -> torch.Tensor:
        """See `Policy`."""
        present = completion_mask(samples)
        logs, targets = self._log_probs(samples, present.to(self.device))
        spans = spans_of(logs.cpu(), targets.cpu())
        return torch.where(present[:, :, None], spans, torch.tensor([0.0, 1.0], dtype=spans.dtype))

    def _log_probs(self, samples: Sequence[Sample], present: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities (rows, tokens, vocabulary), and the completions' tokens (rows, tokens).

        Prompts end, and completions begin, in the same column of one forward pass.
        """
        width = present.shape[1]
        targets = torch.full(present.shape, self._end, device=self.device)
        for row, sample in enumerate(samples):
            targets[row, : len(sample.completion)] = torch.tensor(sample.completion)
        ids, mask = self._left_aligned([sample.prompt for sample in samples])
        ids, mask = torch.cat([ids, targets], 1), torch.cat([mask, present.long()], 1)
        logits, _ = self._forward(ids, mask, cache=None, keep=width + 1)
        return self._log_softmax(logits[:, :-1]), targets

    def _left_aligned(self, contexts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and attention mask, (rows, longest) each, with padding in front."""
        longest = max(map(len, contexts))
        ids = torch.full((len(contexts), longest), self._end)
        mask = torch.zeros_like(ids)
        for row, context in enumerate(contexts):
            ids[row, longest - len(context) :] = torch.tensor(context)
            mask[row, longest - len(context) :] = 1
        return ids.to(self.device), mask.to(self.device)

    def _forward(self, ids: torch.Tensor, mask: torch.Tensor, *, cache: Any, keep: int) -> tuple[torch.Tensor, Any]:
        """Logits of the last `keep` columns, and the cache if nothing needs a gradient."""
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.settings.bf16):
            out = self.model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=not torch.is_grad_enabled(),
                logits_to_keep=keep,
            )
        return out.logits, out.past_key_values

    def _log_softmax(self, logits: torch.Tensor) -> torch.Tensor:
        return functional.log_softmax(logits.float() / self.settings.temperature, dim=-1)


class _Batch:
    """See `Batch`."""

    def __init__(self, policy: CausalLMPolicy) -> None:
        self._policy = policy
        self._mask: torch.Tensor
        self._cache: Any = None

    def read(self, contexts: Sequence[tuple[int, ...]], rows: Sequence[int], *, room: int) -> torch.Tensor:
        policy = self._policy
        ids, mask = policy._left_aligned(contexts)
        wanted = torch.tensor(rows, device=policy.device)
        logits, self._cache = policy._forward(ids, mask, cache=None, keep=1)
        self._mask = mask[wanted]
        self._cache.batch_select_indices(wanted)
        return policy._log_softmax(logits[wanted][:, -1]).cpu()

    def go_on(self, tokens: torch.Tensor, kept: Sequence[int] | None) -> torch.Tensor:
        policy = self._policy
        if kept is not None:
            wanted = torch.tensor(kept, device=policy.device)
            self._mask = self._mask[wanted]
            self._cache.batch_select_indices(wanted)
        self._mask = functional.pad(self._mask, (0, 1), value=1)
        logits, self._cache = policy._forward(tokens.to(policy.device), self._mask, cache=self._cache, keep=1)
        return policy._log_softmax(logits[:, -1]).cpu()


def _between_turns(tokenizer: Any, text: str) -> str:
    """Return the text of a chat template from the end of a model's turn to its next one, around a user's `text`.

    The end token, which the model drew, is not written again. A template that leaves out what was said earlier gives
    the user's turn alone.
    """
    asked = {"role": "user", "content": text}
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _SAID}, asked]
    written: str = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    _, said, after = written.partition(_SAID)
    if not said:
        after = tokenizer.apply_chat_template([asked], add_generation_prompt=True, tokenize=False)
    return after.removeprefix(tokenizer.eos_token)


def _with_adapters(model: nn.Module, settings: CausalLMSettings, *, seed: int) -> nn.Module:
    """The model with adapters of PEFT, which alone are trained."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha,
        lora_dropout=0.0,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT reads names that transformers has renamed
        torch.manual_seed(seed)
        adapted: nn.Module = get_peft_model(model, config)
    return adapted


class CausalLMPolicyFactory:
    """The options that a manifest may give; see `CausalLMSettings`. Needs the extra `hf`.

    model: a name of the Hugging Face Hub, or of a folder `models/NAME` in what --data gives.
    """

    warm_up = None

    def __init__(
        self,
        *,
        model: str,
        prompt_tokens: int = 512,
        lora_rank: int = 0,
        lora_alpha: int = 32,
        bf16: bool = False,
    ) -> None:
        """Keep the settings; nothing is loaded yet. Raises ConfigError."""
        self._model = model
        self._settings = CausalLMSettings(
            prompt_tokens=prompt_tokens, lora_rank=lora_rank, lora_alpha=lora_alpha, bf16=bf16
        )

    def build(self, limits: PolicyLimits) -> CausalLMPolicy:
        """See `PolicyFactory`. Raises ConfigError for a model that is not to be had, or does not fit the limits."""
        settings = replace(self._settings, completion_tokens=limits.completion_tokens, temperature=limits.temperature)
        try:
            folder = find_model(self._model, data=limits.data, weights=True)
            model, tokenizer = load_model(folder, pretrained=True), load_tokenizer(folder)
        except ImportError:
            raise ConfigError("the policy 'causal-lm-policy' needs its extra: pip install 'shoal[hf]'") from None
        return CausalLMPolicy(model, tokenizer, settings, device=pick_device(limits.device), seed=limits.seed)
