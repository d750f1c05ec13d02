"""The built-in policy `char-policy`: the small character model, taught its tasks for a while before the first round."""

from __future__ import annotations

from shoal.node.sapo.char_model import ALPHABET, CharModelSettings, CharPolicy
from shoal.node.sapo.policies import PolicyLimits
from shoal.node.sapo.warm_up import WarmUpSettings
from shoal.protocol.errors import ConfigError


class CharPolicyFactory:
    """The options that a manifest may give; see `CharModelSettings` and `WarmUpSettings`. It runs on the CPU."""

    def __init__(
        self,
        *,
        width: int = 96,
        layers: int = 3,
        heads: int = 4,
        prompt_chars: int = 64,
        alphabet: str = ALPHABET,
        warm_up_reward: float = 0.2,
        warm_up_updates: int = 800,
    ) -> None:
        """Raises ConfigError."""
        for name, value in (("width", width), ("layers", layers), ("heads", heads), ("prompt_chars", prompt_chars)):
            if not isinstance(value, int) or isinstance(value, bool):
                raise ConfigError(f"policy 'char-policy': {name} = {value!r} is no whole number; write one")
        self._width, self._layers, self._heads = width, layers, heads
        self._prompt_chars = prompt_chars
        self._alphabet = alphabet
        self.warm_up = WarmUpSettings(reward=warm_up_reward, updates=warm_up_updates) if warm_up_updates else None

    def build(self, limits: PolicyLimits) -> CharPolicy:
        """See `PolicyFactory`. Raises ConfigError."""
        settings = CharModelSettings(
            width=self._width,
            layers=self._layers,
            heads=self._heads,
            prompt_chars=self._prompt_chars,
            completion_tokens=limits.completion_tokens,
            temperature=limits.temperature,
            alphabet=self._alphabet,
        )
        return CharPolicy(settings, seed=limits.seed)
