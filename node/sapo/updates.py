"""From judged groups to parameter updates: rows of tokens with advantages, and the optimizer's steps over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from shoal.node.sapo.generation import GeneratedGroup
from shoal.node.sapo.groups import JudgedGroup
from shoal.node.sapo.grpo import (
    Batch,
    ExternalTerms,
    clipped_tokens,
    counts,
    group_advantages,
    grpo_loss,
    truncated_weights,
)
from shoal.node.sapo.policy import Policy, Sample, drawn_mask
from shoal.node.sapo.policy_optimizer import ADAMW, policy_optimizer
from shoal.node.sapo.turns import encoded
from shoal.protocol.manifest_rollouts import OTHER_LEARNING_RATE
from shoal.protocol.rollouts import Drawn

GRADIENT_LIMIT = 1.0
"""The norm that a gradient is cut to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSettings:
    """The training on a round's rows: in one update.

    gradient_limit: the norm that a gradient is cut to. terms: what others' completions count for. optimizer: by the
    name that a manifest gives it. together: rows that are in memory at once; None for all. How large others' groups are
    is theirs to say.
    """

    together: int | None = None
    learning_rate: float = OTHER_LEARNING_RATE
    optimizer: str = ADAMW
    gradient_limit: float = GRADIENT_LIMIT
    terms: ExternalTerms = "positive"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A completion to train on. external: another agent's.

    drawn: log-probabilities of its tokens under the policies that drew them; None where they are not known.
    """

    sample: Sample
    advantage: float
    drawn: tuple[float, ...] | None
    external: bool = False


def own_rows(group: GeneratedGroup, rewards: Sequence[float]) -> list[Row]:
    """The rows of an own group: the tokens that were drawn, the end token with them if it was."""
    advantages = group_advantages(rewards).tolist()
    return [
        Row(
            sample=rollout.sample,
            advantage=advantage,
            drawn=tuple(rollout.log_probs),
        )
        for rollout, advantage in zip(group.rollouts, advantages, strict=True)
    ]


def external_rows(group: JudgedGroup, policy: Policy) -> list[Row] | None:
    """The rows of another's group in the policy's tokens; None if it cannot express one of the completions.

    The group then is left out as a whole: its advantages are relative to the completion that would be missing.
    """
    advantages = group_advantages(group.rewards).tolist()
    said = group.sampling.drawn if group.sampling is not None else ()
    rows = []
    for text, advantage, drawn in zip(group.texts, advantages, said or (None,) * len(group.texts), strict=True):
        sample = encoded(policy, group.task, text)
        if sample is None:
            return None
        log_probs = None if drawn is None else _as_drawn(drawn, sample)
        if log_probs is not None:
            sample = replace(sample, completion=sample.completion[: len(log_probs)])
        rows.append(Row(sample=sample, advantage=advantage, drawn=log_probs, external=True))
    return rows


def _as_drawn(drawn: Drawn, sample: Sample) -> tuple[float, ...] | None:
    """Labels that another gave a completion, if its tokens are those that this policy has for the text; else None.

    An engine may leave out the token that ended the completion, which no environment gave. No token of a stranger's
    reaches the model.
    """
    ids, completion = drawn.ids(), sample.completion
    missing = len(completion) - len(ids)
    if not ids or missing not in (0, 1) or completion[: len(ids)] != ids:
        return None
    if missing and any(stop == len(completion) for _, stop in sample.given):
        return None
    return drawn.values()


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One step of the optimizer. gradient_norm: before it was cut. clipped: share of tokens whose ratio was clipped."""

    gradient_norm: float
    clipped: float


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """Return what the optimizer updates."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class Updater:
    """The optimizer of one policy."""

    def __init__(self, policy: Policy, settings: UpdateSettings) -> None:
        self._policy = policy
        self._settings = settings
        self.optimizer = policy_optimizer(policy, settings.learning_rate, settings.optimizer)
        """With its moments, which a restart takes over."""

    def train(self, rows: Sequence[Row]) -> Update | None:
        """Update the policy on `rows`, if one of them has a gradient. The loss is the mean over all their tokens.

        Rows without gradient cost no computation: their tokens are only counted.
        """
        terms = self._settings.terms
        useful = [
            row for row in rows if counts(terms, row.advantage, external=row.external, drawn=row.drawn is not None)
        ]
        if not useful:
            return None
        tokens = sum(row.sample.drawn for row in rows)
        together = self._settings.together or len(useful)
        self.optimizer.zero_grad(set_to_none=True)
        clipped = sum(
            self._add_gradient(useful[begin : begin + together], tokens) for begin in range(0, len(useful), together)
        )
        norm = torch.nn.utils.clip_grad_norm_(parameters_of(self.optimizer), self._settings.gradient_limit)
        self.optimizer.step()
        return Update(gradient_norm=float(norm), clipped=clipped / sum(row.sample.drawn for row in useful))

    def _add_gradient(self, rows: Sequence[Row], tokens: int) -> int:
        """Add the gradient of these rows, of a loss that is the mean over `tokens`. Returns how many were clipped."""
        log_probs = self._policy.log_probs([row.sample for row in rows])
        batch = _batch(rows, log_probs.detach(), self._settings.terms)
        grpo_loss(log_probs, batch, tokens=tokens).backward()  # type: ignore[no-untyped-call]
        return clipped_tokens(log_probs.detach(), batch)


def _batch(rows: Sequence[Row], current: torch.Tensor, terms: ExternalTerms) -> Batch:
    """The rows, with ratios against what they were drawn with, or against `current`, this policy, for another's."""
    old, weights = current.clone(), torch.ones_like(current)
    for at, row in enumerate(rows):
        if row.drawn is None:
            continue
        count, drawn = len(row.drawn), torch.tensor(row.drawn)
        if not row.external:
            old[at, :count] = drawn
        elif terms == "tis":
            weights[at, :count] = truncated_weights(current[at, :count], drawn)
    return Batch(
        old=old,
        mask=drawn_mask([row.sample for row in rows]),
        advantages=torch.tensor([row.advantage for row in rows]),
        weights=weights,
    )
