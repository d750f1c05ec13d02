"""The policy `causal-lm-policy`: a causal language model of `transformers`, found as `causal-lm` finds its own."""

from __future__ import annotations

from shoal.node.sapo.hf_policy import CausalLMPolicy, CausalLMSettings
from shoal.node.sapo.policies import PolicyLimits
from shoal.node.training.devices import pick_device
from shoal.node.workloads.causal_lm_model import find_model, load_model, load_tokenizer
from shoal.protocol.errors import ConfigError


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
        """Nothing is loaded yet."""
        self._model = model
        self._settings = {"prompt_tokens": prompt_tokens, "lora_rank": lora_rank, "lora_alpha": lora_alpha}
        self._bf16 = bf16

    def build(self, limits: PolicyLimits) -> CausalLMPolicy:
        """See `PolicyFactory`. Raises ConfigError for a model that is not to be had, or does not fit the limits."""
        settings = CausalLMSettings(
            completion_tokens=limits.completion_tokens,
            temperature=limits.temperature,
            bf16=self._bf16,
            **self._settings,
        )
        try:
            folder = find_model(self._model, data=limits.data, weights=True)
            model, tokenizer = load_model(folder, pretrained=True), load_tokenizer(folder)
        except ImportError:
            raise ConfigError("the policy 'causal-lm-policy' needs its extra: pip install 'shoal[hf]'") from None
        return CausalLMPolicy(model, tokenizer, settings, device=pick_device(limits.device), seed=limits.seed)
