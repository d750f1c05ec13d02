"""The built-in policy `char-policy`: the small GPT over characters, quick enough to learn on one core; it is taught its
tasks for a while before the first round.

Generation keeps keys and values; rows with the same context share its computation, and finished rows leave the batch.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import nn
from torch.nn import functional

from shoal.node.sapo.policies import PolicyLimits
from shoal.node.sapo.policy import Batch, Rollout, Sample, completion_mask, drawn_mask, extend_together, spans_of
from shoal.node.sapo.warm_up import WarmUpSettings
from shoal.node.workload import check_whole
from shoal.node.workloads.gpt import LAYOUTS, SIZES, Cache, Gpt, GptSettings, Style
from shoal.protocol.errors import ConfigError
from shoal.protocol.manifest_rollouts import COMPLETION_TOKENS_LIMIT

PAD: Final = 0
END: Final = 1
"""Ends a completion."""
ASK: Final = 2
"""Stands between prompt and completion."""
UNKNOWN: Final = 3
"""Stands in prompts for characters outside the alphabet."""
SPECIAL: Final = 4

PACKED_SAMPLES: Final = 16
"""Completions that share a prompt's row in training: the attention mask grows with the square of the row."""

LIVE_SHARE: Final = 0.75
"""Of the rows of a batch: with fewer that go on, those that are done are taken out."""

PROMPT: Final = 1, 1 << 13
COMPLETION: Final = 1, COMPLETION_TOKENS_LIMIT
"""The least and the most characters of a prompt, and tokens of a completion."""
WARM_UP_LIMIT: Final = 100_000
"""Updates, at most."""

ALPHABET: Final = string.digits + string.ascii_letters + string.punctuation + " \n"


@dataclass(frozen=True, slots=True, kw_only=True)
class CharModelSettings:
    """Size and limits. A prompt keeps its last `prompt_chars` characters: these questions end with what is asked.

    alphabet: the characters that completions may have, each once. temperature: of sampling. style: of the network
    (`shoal.node.workloads.gpt`); of the two rotary learns more from as many tasks.
    """

    width: int = 96
    layers: int = 3
    heads: int = 4
    prompt_chars: int = 64
    completion_tokens: int = 24
    temperature: float = 1.0
    alphabet: str = ALPHABET
    style: Style = "learned"

    def __post_init__(self) -> None:
        """Raises ConfigError for what no model can be made of."""
        if self.style not in LAYOUTS:
            raise ConfigError(f"the character model's style must be one of {', '.join(LAYOUTS)}, not {self.style!r}")
        check_whole("policy 'char-policy'", self, {**SIZES, "prompt_chars": PROMPT, "completion_tokens": COMPLETION})
        parts = self.heads if self.style == "learned" else 2 * self.heads
        if self.width % parts:
            what = "its heads" if self.style == "learned" else "twice its heads"
            raise ConfigError(f"the character model's width {self.width} must be a multiple of {what}, {parts}")
        if not self.temperature > 0:
            raise ConfigError(f"the character model's temperature must be above 0, not {self.temperature}")
        if not self.alphabet or len(set(self.alphabet)) != len(self.alphabet):
            raise ConfigError("the character model's alphabet must have characters, and each of them once")

    @property
    def gpt(self) -> GptSettings:
        """Settings of the network. A row is a prompt, the token that asks, and a completion."""
        return GptSettings(
            vocabulary=SPECIAL + len(self.alphabet),
            width=self.width,
            layers=self.layers,
            heads=self.heads,
            context=self.prompt_chars + 1 + self.completion_tokens,
            style=self.style,
        )


class CharPolicy:
    """A `Policy` over characters. The parameters follow from settings and seed."""

    def __init__(self, settings: CharModelSettings, *, seed: int) -> None:
        self.settings = settings
        self._ids = {char: SPECIAL + at for at, char in enumerate(settings.alphabet)}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model = Gpt(settings.gpt)

    @property
    def vocabulary(self) -> int:
        """See `Policy`."""
        return self.settings.gpt.vocabulary

    @property
    def completion_limit(self) -> int:
        """See `Policy`."""
        return self.settings.completion_tokens

    def encode_prompt(self, text: str) -> tuple[int, ...]:
        """The last characters of the question, and the token that asks."""
        return (*(self._ids.get(char, UNKNOWN) for char in text[-self.settings.prompt_chars :]), ASK)

    def encode_completion(self, text: str) -> tuple[int, ...] | None:
        """See `Policy`: None if a character is outside the alphabet."""
        ids = tuple(self._ids.get(char, UNKNOWN) for char in text)
        if UNKNOWN in ids:
            return None
        return (*ids, END)[: self.settings.completion_tokens]

    def encode_reply(self, text: str) -> tuple[int, ...]:
        """The characters, and the token that asks."""
        return (*(self._ids.get(char, UNKNOWN) for char in text), ASK)

    def decode(self, tokens: Sequence[int]) -> str:
        """The characters; special tokens have none."""
        return "".join(self.settings.alphabet[token - SPECIAL] for token in tokens if token >= SPECIAL)

    def parameters(self) -> list[nn.Parameter]:
        """All of them."""
        return list(self.model.parameters())

    def extend(
        self,
        rollouts: Sequence[Rollout],
        *,
        enough: Callable[[], bool] | None = None,
    ) -> int:
        """See `Policy`. Sampling never draws a token that is neither a character nor the end."""
        return extend_together(
            self.batch(),
            rollouts,
            limit=self.settings.completion_tokens,
            end=END,
            enough=enough,
        )

    def batch(self) -> Batch:
        """A place for sequences that the model goes on with together."""
        return _Batch(self.model, self._log_softmax)

    def log_probs(self, samples: Sequence[Sample]) -> torch.Tensor:
        """See `Policy`."""
        mask = completion_mask(samples)
        logs, targets = self._forward(samples, mask)
        return torch.where(drawn_mask(samples), logs.gather(2, targets[:, :, None])[:, :, 0], 0.0)

    @torch.no_grad()
    def drawn_by(self, samples: Sequence[Sample]) -> torch.Tensor:
        """See `Policy`."""
        mask = completion_mask(samples)
        spans = spans_of(*self._forward(samples, mask))
        return torch.where(mask[:, :, None], spans, torch.tensor([0.0, 1.0], dtype=spans.dtype))

    def _forward(self, samples: Sequence[Sample], mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities (rows, tokens, vocabulary), and the completions' tokens (rows, tokens).

        Samples of one prompt share its computation, and stand behind it without seeing each other.
        """
        packs = _pack(samples)
        longest = max(len(pack.tokens) for pack in packs)
        tokens = torch.full((len(packs), longest), PAD)
        positions, parts = torch.zeros_like(tokens), torch.full_like(tokens, -1)
        places, targets = torch.zeros(mask.shape, dtype=torch.long), torch.full(mask.shape, END)
        for at, pack in enumerate(packs):
            length = len(pack.tokens)
            tokens[at, :length] = torch.tensor(pack.tokens)
            positions[at, :length] = torch.tensor(pack.positions)
            parts[at, :length] = torch.tensor(pack.parts)
            for row, columns in pack.rows.items():
                places[row, : len(columns)] = at * longest + torch.tensor(columns)
                targets[row, : len(columns)] = torch.tensor(samples[row].completion)
        seen = (parts[:, None, :] == 0) | (parts[:, None, :] == parts[:, :, None])
        seen &= torch.ones(longest, longest, dtype=torch.bool).tril()
        hidden = self.model.hidden(tokens, positions=positions, seen=seen[:, None]).flatten(0, 1)[places]
        return self._log_softmax(self.model.head(hidden)), targets

    def _log_softmax(self, logits: torch.Tensor) -> torch.Tensor:
        """Log-probabilities over the vocabulary, in which special tokens other than the end have none."""
        logits = logits / self.settings.temperature
        logits[..., [PAD, ASK, UNKNOWN]] = float("-inf")
        return functional.log_softmax(logits, dim=-1)


class _Batch:
    """See `Batch`. Rows that are done stay in the cache until they are many: to take one out copies all others.

    There the rows lie in the order of their lengths, the longest first.
    """

    def __init__(self, model: Gpt, log_softmax: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._model = model
        self._log_softmax = log_softmax
        self._cache: Cache
        self._rows: torch.Tensor  # those of the cache that go on

    def read(self, contexts: Sequence[tuple[int, ...]], rows: Sequence[int], *, room: int) -> torch.Tensor:
        logits, self._cache = self._model.prefill(contexts, room=room)
        wanted = torch.tensor(rows)
        order = self._cache.lengths[wanted].argsort(descending=True, stable=True)
        self._cache.keep(wanted[order])
        self._rows = order.argsort()
        return self._log_softmax(logits[wanted])

    def go_on(self, tokens: torch.Tensor, kept: Sequence[int] | None) -> torch.Tensor:
        if kept is not None:
            self._keep(self._rows[torch.tensor(kept)])
        every = torch.full((len(self._cache.lengths), 1), PAD)
        every[self._rows] = tokens
        return self._log_softmax(self._model.step(every, self._cache)[self._rows])

    def _keep(self, rows: torch.Tensor) -> None:
        cache, self._rows = self._cache, rows
        if len(rows) <= LIVE_SHARE * len(cache.lengths):
            order = rows.argsort()
            cache.keep(rows[order])
            self._rows = order.argsort()
        else:  # the others' places stay within the model's context
            lengths = torch.zeros_like(cache.lengths)
            lengths[rows] = cache.lengths[rows]
            cache.lengths = lengths


@dataclass(slots=True, kw_only=True)
class _Pack:
    """A prompt and completions of it in one row; parts: 0 for the prompt, n for the n-th completion.

    rows: by the sample's number, the columns whose logits are for the tokens of its completion.
    """

    tokens: list[int]
    positions: list[int]
    parts: list[int]
    rows: dict[int, list[int]]


def _pack(samples: Sequence[Sample]) -> list[_Pack]:
    """The samples in packs of at most `PACKED_SAMPLES`. The last token of a completion is a target only."""
    packs: list[_Pack] = []
    open_packs: dict[tuple[int, ...], _Pack] = {}
    for row, sample in enumerate(samples):
        pack = open_packs.get(sample.prompt)
        size = len(sample.prompt)
        if pack is None or len(pack.rows) == PACKED_SAMPLES:
            pack = _Pack(tokens=[*sample.prompt], positions=[*range(size)], parts=[0] * size, rows={})
            packs.append(pack)
            open_packs[sample.prompt] = pack
        more = len(sample.completion) - 1
        begin = len(pack.tokens)
        pack.tokens += sample.completion[:-1]
        pack.positions += range(size, size + more)
        pack.parts += [len(pack.rows) + 1] * more
        pack.rows[row] = [size - 1, *range(begin, begin + more)]
    return packs


class CharPolicyFactory:
    """A small policy over characters, which runs on the CPU; see `CharModelSettings` and `WarmUpSettings`.

    prompt_chars: of a question, its last. style: of the network, rotary or learned. warm_up_reward: it is taught right
    answers until it earns so much, in warm_up_updates updates at most, 0 for no teaching.
    """

    def __init__(
        self,
        *,
        width: int = 96,
        layers: int = 3,
        heads: int = 4,
        prompt_chars: int = 64,
        alphabet: str = ALPHABET,
        style: Style = "learned",
        warm_up_reward: float = 0.2,
        warm_up_updates: int = 800,
    ) -> None:
        """Raises ConfigError."""
        self.warm_up_updates = warm_up_updates
        check_whole("policy 'char-policy'", self, {"warm_up_updates": (0, WARM_UP_LIMIT)})
        self._settings = CharModelSettings(
            width=width, layers=layers, heads=heads, prompt_chars=prompt_chars, alphabet=alphabet, style=style
        )
        self.warm_up = WarmUpSettings(reward=warm_up_reward, updates=warm_up_updates) if warm_up_updates else None

    def build(self, limits: PolicyLimits) -> CharPolicy:
        """See `PolicyFactory`."""
        settings = replace(self._settings, completion_tokens=limits.completion_tokens, temperature=limits.temperature)
        return CharPolicy(settings, seed=limits.seed)
