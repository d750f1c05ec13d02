"""Replays of others' completions: was a group drawn by the policy that it names?

The numbers by which tokens are drawn are assigned (`assigned_draws`), and each has one policy, that of the round it
names. So one pass of that policy over a completion tells for each token between which numbers it is drawn, and the
number that it had to be drawn by is within, but for what precision makes of it. Whoever draws from another policy, at
another temperature, chooses among several completions, or writes them itself, has tokens whose numbers are elsewhere.

Nobody can tell beforehand which completions are gone through. Source of the idea: Token-DiFR, arXiv 2511.20621; there
the noise of Gumbel's is compared, here the one number that inverse sampling takes.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

import torch

from shoal.node.sapo.groups import JudgedGroup
from shoal.node.sapo.past_policies import PastPolicies
from shoal.node.sapo.policy import Policy, Sample, drawn_mask
from shoal.node.sapo.trust import Replayed
from shoal.node.sapo.turns import given_in
from shoal.protocol.errors import LocalError
from shoal.protocol.rollouts import COMPLETION_LIMIT, Reason, RolloutError, assigned_draws
from shoal.protocol.wire import SwarmId

SHARE: Final = 2
"""Of so many completions one is gone through, and one of each group at least."""
VALUES_AT_ONCE: Final = 1 << 23
"""Of all tokens' probabilities, in some 40 bytes each: how long its completions are, and how many, a peer says."""
TOLERANCE: Final = 5e-3
"""A number may be so far outside of where its token is drawn: of probability, what machines differ by."""


@dataclass(frozen=True, slots=True)
class _Claim:
    """A completion as its origin says it was drawn. number: in its group."""

    number: int
    sample: Sample


class Replayer:
    """Goes through others' completions by the policy that they name.

    together: completions that are in memory at once; how many a group has is its origin's to say. chance: which
    completions are gone through.
    """

    def __init__(
        self,
        policy: Policy,
        past: PastPolicies,
        *,
        swarm_id: SwarmId,
        together: int = COMPLETION_LIMIT,
        chance: random.Random | None = None,
    ) -> None:
        self._policy = policy
        self._past = past
        self._swarm_id = swarm_id
        self._together = together
        self._chance = chance or random.SystemRandom()
        ended = policy.encode_completion("")
        if not ended:
            raise LocalError("a policy that has no tokens for an empty completion")
        self._end = ended[-1]

    @property
    def rounds(self) -> tuple[int, ...]:
        """The rounds whose policies are here; groups of others are not taken."""
        return self._past.rounds

    def replay(self, group: JudgedGroup) -> Replayed:
        """Count the tokens that were gone through, and those that this policy does not draw.

        Raises RolloutError for a group of a policy that is not here, or whose tokens are not those of its texts; and
        for one that another policy drew, of a round that was made again after a rollback: it may be honest.
        """
        if group.policy_version not in self._past.rounds:
            raise RolloutError("a policy that is not here (any more)", reason=Reason.STALE, peer=group.origin)
        claims = self._claims(group)
        samples = [claim.sample for claim in claims]
        longest = max(len(sample.completion) for sample in samples)
        together = max(1, min(self._together, VALUES_AT_ONCE // (longest * self._policy.vocabulary)))
        with self._past.standing_on(group.policy_version):
            spans = [
                span
                for begin in range(0, len(samples), together)
                for span in self._policy.drawn_by(samples[begin : begin + together])
            ]
        origin = group.origin
        assert origin is not None
        missed = 0
        for claim, span in zip(claims, spans, strict=True):
            draws = assigned_draws(self._swarm_id, origin, group.round, group.task.ref.index, claim.number)
            numbers = torch.tensor([draws(place) for place in range(len(claim.sample.completion))], dtype=torch.float64)
            span = span[: len(numbers)]
            outside = (numbers < span[:, 0] - TOLERANCE) | (numbers > span[:, 1] + TOLERANCE)
            missed += int((outside & drawn_mask([claim.sample])[0]).sum())
        if missed and group.policy_version <= self._past.made_again_to:
            raise RolloutError("a policy that was abandoned, or another", reason=Reason.STALE, peer=origin)
        return Replayed(tokens=sum(claim.sample.drawn for claim in claims), missed=missed)

    def _claims(self, group: JudgedGroup) -> list[_Claim]:
        """Choose completions, and return the tokens that they say they have. Raises RolloutError."""
        size, prompt = len(group.texts), self._policy.encode_prompt(group.task.question)
        chosen = sorted(self._chance.sample(range(size), max(1, size // SHARE)))
        said = group.sampling.drawn if group.sampling is not None else ()
        claims = []
        for number in chosen:
            text = group.texts[number]
            tokens = said[number].ids() if said else ()
            given = None
            if 0 < len(tokens) <= self._policy.completion_limit and max(tokens) < self._policy.vocabulary:
                given = given_in(self._policy, group.task, text, tokens, end=self._end)
            if given is None:
                raise RolloutError(
                    "tokens that are not those of its texts", reason=Reason.MISLABELLED, peer=group.origin
                )
            claims.append(_Claim(number, Sample(prompt=prompt, completion=tokens, given=given)))
        return claims
