"""The needs of a learner of a language model: text to tokens and back, sampling, and log-probabilities to train on.

Everything is in the policy's own tokens. Between agents travels text, so models and tokenizers may differ within
a swarm: the receiver encodes another's completion with its own tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

Draws = Callable[[int], float]
"""Numbers in [0, 1), by place: the same ones whenever they are asked for, or of chance."""


Span = tuple[int, int]
"""Places of a completion's tokens: from the first, and before the second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A prompt and a completion, which has at least one token, in the tokens of one policy.

    given: the spans of a dialogue that its environment said; no policy drew them, and none learns them.
    """

    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    given: tuple[Span, ...] = ()

    @property
    def drawn(self) -> int:
        """How many tokens a policy drew."""
        return len(self.completion) - sum(stop - start for start, stop in self.given)


@dataclass(slots=True, kw_only=True, eq=False)
class Rollout:
    """A completion in the making. Whoever extends it appends to `tokens` and `log_probs` together.

    draws: gives the number in [0, 1) by which the token at a place is drawn (`drawn_tokens`); None takes the most
    probable one each time.
    log_probs: of each token, at the policy's temperature, under the parameters that it was drawn with; they stay as
    they are if a later policy goes on. done: the end token was drawn (it is the last token), or the limit is reached.
    versions: by run of tokens, the version of the policy that drew them and how many they are; kept by `note_version`.
    given, replies: of a dialogue (`turns.py`), the spans of tokens that its environment said, whose log-probabilities
    are 0, and in which words. open: it may still answer.
    """

    prompt: tuple[int, ...]
    draws: Draws | None = None
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    done: bool = False
    versions: list[tuple[int, int]] = field(default_factory=list)
    given: list[Span] = field(default_factory=list)
    replies: list[str] = field(default_factory=list)
    open: bool = False

    @property
    def sample(self) -> Sample:
        """The part that is there, to train on."""
        return Sample(prompt=self.prompt, completion=tuple(self.tokens), given=tuple(self.given))

    def note_version(self, version: int) -> None:
        """Say that the tokens that are new since the last time were drawn by the policy of this version."""
        drawn = len(self.tokens) - sum(count for _, count in self.versions)
        if drawn and self.versions and self.versions[-1][0] == version:
            self.versions[-1] = version, self.versions[-1][1] + drawn
        elif drawn:
            self.versions.append((version, drawn))


class Policy(Protocol):
    """A causal language model with its tokenizer."""

    @property
    def vocabulary(self) -> int:
        """Number of tokens; all are below it."""

    @property
    def completion_limit(self) -> int:
        """Tokens of a completion at most, with those that an environment gives."""

    def encode_prompt(self, text: str) -> tuple[int, ...]:
        """Tokens of a question, as the model is asked it (chat template, cut to what fits). At least one."""

    def encode_completion(self, text: str) -> tuple[int, ...] | None:
        """Tokens of somebody else's completion; None if this tokenizer cannot express the text.

        The end token follows where the limit has room for it: the reward is that of a text that ends there. A longer
        text is cut at the limit and has no end token.
        """

    def encode_reply(self, text: str) -> tuple[int, ...]:
        """Tokens of what an environment answers, between the end token of a turn and the next turn. At least one."""

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of a completion's tokens, without the end token."""

    def extend(
        self,
        rollouts: Sequence[Rollout],
        *,
        enough: Callable[[], bool] | None = None,
    ) -> int:
        """Draw tokens in one batch until every rollout is done, or `enough()` after a step. Returns how many tokens.

        A rollout that is done has left the batch before `enough` is asked, which may add tokens to it and open it anew.
        """

    def log_probs(self, samples: Sequence[Sample]) -> torch.Tensor:
        """Log-probabilities of the completions' tokens at the policy's temperature, with gradient.

        Returns (len(samples), tokens of the longest completion) float32, zero where no token was drawn (`drawn_mask`).
        """

    def drawn_by(self, samples: Sequence[Sample]) -> torch.Tensor:
        """The numbers by which each token of the completions is drawn: from the first, and below the second.

        Returns (len(samples), tokens of the longest completion, 2) float64 without gradient, as `spans_of` makes them;
        0 to 1 behind each completion's end.
        """

    def parameters(self) -> Iterable[nn.Parameter]:
        """Return what training changes."""


class Batch(Protocol):
    """Sequences that a model goes on with together. Log-probabilities are (rows, vocabulary), in host memory."""

    def read(self, contexts: Sequence[tuple[int, ...]], rows: Sequence[int], *, room: int) -> torch.Tensor:
        """Read each context once, and return what may follow it, for row i after `contexts[rows[i]]`.

        room: how many tokens any of them may still get.
        """

    def go_on(self, tokens: torch.Tensor, kept: Sequence[int] | None) -> torch.Tensor:
        """Keep the rows `kept` where given, add a token to each, (rows, 1), and return what may follow."""


def drawn_tokens(logs: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """The token of each row that a number draws: the first up to which there is more than that share of probability.

    logs: (rows, vocabulary) log-probabilities. numbers: (rows,) float64 in [0, 1). Returns (rows, 1). It is the inverse
    of the cumulative distribution, so tokens come as often as they are probable, and none that has no probability.
    """
    upto = logs.double().exp().cumsum(1)
    found = torch.searchsorted(upto, numbers[:, None] * upto[:, -1:], right=True)
    return torch.where(found < logs.shape[1], found, logs.argmax(1, keepdim=True))  # a product may round up to the sum


def spans_of(logs: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The numbers by which `drawn_tokens` draws these tokens: from the first of two, and below the second.

    logs: (…, vocabulary). tokens: (…,). Returns (…, 2) float64.
    """
    shares = logs.double().exp()
    upto = shares.cumsum(-1)
    last = upto[..., -1]
    stop = upto.gather(-1, tokens[..., None])[..., 0]
    start = stop - shares.gather(-1, tokens[..., None])[..., 0]
    return torch.stack([start / last, stop / last], -1)


def _next_tokens(logs: torch.Tensor, rollouts: Sequence[Rollout]) -> torch.Tensor:
    """The next token of each, (rows, 1)."""
    tokens = logs.argmax(1, keepdim=True)
    drawn = [(at, one.draws(len(one.tokens))) for at, one in enumerate(rollouts) if one.draws is not None]
    if drawn:
        rows = torch.tensor([at for at, _ in drawn])
        tokens[rows] = drawn_tokens(logs[rows], torch.tensor([number for _, number in drawn], dtype=torch.float64))
    return tokens


@torch.no_grad()
def extend_together(
    batch: Batch,
    rollouts: Sequence[Rollout],
    *,
    limit: int,
    end: int,
    enough: Callable[[], bool] | None,
) -> int:
    """`Policy.extend` by a batch: rows with the same context are read once, and a finished row leaves the batch.

    limit: tokens of a completion. end: the token that ends one.
    """
    active = [rollout for rollout in rollouts if not rollout.done]
    if not active:
        return 0
    contexts = [(*rollout.prompt, *rollout.tokens) for rollout in active]
    unique = {context: at for at, context in enumerate(dict.fromkeys(contexts))}
    room = limit - min(len(rollout.tokens) for rollout in active)
    logs = batch.read(list(unique), [unique[context] for context in contexts], room=room)
    drawn = 0
    while True:
        tokens = _next_tokens(logs, active)
        for rollout, token, log in zip(
            active, tokens.flatten().tolist(), logs.gather(1, tokens).flatten().tolist(), strict=True
        ):
            rollout.tokens.append(token)
            rollout.log_probs.append(log)
            rollout.done = token == end or len(rollout.tokens) >= limit
        drawn += len(active)
        going = [at for at, rollout in enumerate(active) if not rollout.done]
        if not going or (enough is not None and enough()):
            return drawn
        finished = len(going) < len(active)
        active = [active[at] for at in going]
        logs = batch.go_on(tokens[going], going if finished else None)


def trained_parameters(policy: Policy) -> dict[str, nn.Parameter]:
    """The parameters that training changes, in the policy's order.

    They have the names of the policy's `model` where that is a module which holds them all, else their numbers.
    """
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    model = getattr(policy, "model", None)
    names = {id(value): name for name, value in model.named_parameters()} if isinstance(model, nn.Module) else {}
    if any(id(parameter) not in names for parameter in trained):
        names = {id(parameter): str(at) for at, parameter in enumerate(trained)}
    return {names[id(parameter)]: parameter for parameter in trained}


def module_of(policy: Policy) -> nn.Module:
    """A module with the policy's trained parameters, and no other that is trained."""
    trained = list(trained_parameters(policy).values())
    model = getattr(policy, "model", None)
    if isinstance(model, nn.Module):
        held = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
        if held == {id(parameter) for parameter in trained}:
            return model
    return nn.ParameterList(trained)


def completion_mask(samples: Sequence[Sample]) -> torch.Tensor:
    """Return where completions have tokens: (len(samples), tokens of the longest completion) bool."""
    lengths = torch.tensor([len(sample.completion) for sample in samples])
    return torch.arange(int(lengths.max()))[None, :] < lengths[:, None]


def drawn_mask(samples: Sequence[Sample]) -> torch.Tensor:
    """Return where completions have tokens that a policy drew, in the shape of `completion_mask`."""
    mask = completion_mask(samples)
    for row, sample in enumerate(samples):
        for start, stop in sample.given:
            mask[row, start:stop] = False
    return mask
