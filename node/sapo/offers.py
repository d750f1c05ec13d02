"""From offers to groups that the learner can train on: choose, pull, judge, replace.

`Intake` is the whole way without IO. Whoever drives it pulls what it wants and hands over what came:

    wanted = intake.begin(offers, count, round_number)
    while wanted:
        wanted = intake.receive(await exchange.fetch(wanted, ...))
    groups = intake.finish()

`collect` does that with any function that fetches.
"""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from shoal.node.sapo.groups import JudgedGroup
from shoal.node.sapo.judge import Judge, Score
from shoal.node.sapo.selection import ByteBudget, SelectionSettings, Selector
from shoal.node.sapo.tasks import TaskSource
from shoal.node.sapo.trust import Trust
from shoal.protocol.errors import LocalError
from shoal.protocol.identity import PeerId
from shoal.protocol.offer_book import Offer
from shoal.protocol.rollouts import Reason, RolloutGroup
from shoal.protocol.wire import SwarmId

USED_LIMIT = 65_536
"""Digests of groups that were pulled, or could not be, and are not drawn again."""
ATTEMPTS_PER_GROUP = 4
"""Offers that a round may try for each group that it wants."""


def rollout_of(group: JudgedGroup, me: PeerId) -> RolloutGroup:
    """This node's own group in the form that travels. Raises LocalError for another's group."""
    if group.origin not in (None, me):
        raise LocalError(f"the group is {group.origin}'s; a node announces its own")
    return RolloutGroup(
        origin=me,
        round=group.round,
        policy_version=group.policy_version,
        task=group.task.ref,
        completions=group.texts,
    )


def total_bytes(offers: Iterable[Offer]) -> int:
    """The bytes of these offers' groups."""
    return sum(offer.announcement.size_bytes for offer in offers)


class Intake:
    """One node's way from offers to judged groups. One round's intake at a time."""

    def __init__(self, *, selector: Selector, judge: Judge, trust: Trust, budget: ByteBudget, seed: int) -> None:
        """`seed`: of the draws."""
        self.selector = selector
        self.judge = judge
        self.trust = trust
        self.budget = budget
        self._rng = random.Random(seed)
        self._used: OrderedDict[bytes, None] = OrderedDict()
        self._left: list[Offer] = []
        self._wanted: dict[bytes, Offer] = {}
        self._attempts = 0
        self._count = 0
        self._groups: list[JudgedGroup] = []

    def begin(self, offers: Iterable[Offer], count: int, round_number: int) -> list[Offer]:
        """Draw `count` of the offers that may be drawn in this node's round; these are to be pulled first."""
        self.trust.advance(round_number)
        self._groups, self._count = [], count
        self._attempts = ATTEMPTS_PER_GROUP * count
        eligible = self.selector.eligible(offers, round_number=round_number, used=self._used)
        drawn = self.selector.draw(eligible, self._attempts, self._rng)
        self._left = drawn[count:]
        return self._want(drawn[:count])

    def receive(self, came: Mapping[bytes, bytes]) -> list[Offer]:
        """Judge what came of the offers wanted last; the replacements to pull next, none when the round is done.

        An offer that did not come cost nothing and is replaced. One that came and was refused is replaced while the
        budget lasts.
        """
        pulled = [(offer, came[digest]) for digest, offer in self._wanted.items() if digest in came]
        judged = self.judge.judge(pulled)
        absent = len(self._wanted) - len(pulled)
        self._used.update(dict.fromkeys(self._wanted))
        while len(self._used) > USED_LIMIT:
            self._used.popitem(last=False)
        self._wanted = {}
        for (_, data), group in zip(pulled, judged, strict=True):
            self.budget.note(len(data), trained=group is not None)
            if group is not None:
                self._groups.append(group)
        return self._replacements(free=absent)

    def rejected(self) -> Counter[Reason]:
        """Offers and groups that were left out since the start, by reason."""
        return self.selector.rejected + self.judge.rejected

    def finish(self) -> list[JudgedGroup]:
        """The groups of this round, at most as many as were asked for."""
        groups, self._groups, self._left, self._wanted = self._groups, [], [], {}
        return groups

    def _replacements(self, *, free: int) -> list[Offer]:
        missing = self._count - len(self._groups)
        chosen: list[Offer] = []
        while self._left and len(chosen) < missing:
            offer = self._left[0]
            if self.trust.ignored(offer.origin):
                del self._left[0]
                continue
            if len(chosen) >= free and not self.budget.allows(total_bytes([*chosen[free:], offer])):
                break
            chosen.append(self._left.pop(0))
        return self._want(chosen)

    def _want(self, offers: Sequence[Offer]) -> list[Offer]:
        self._wanted = {offer.digest: offer for offer in offers}
        return list(offers)


def build_intake(
    *,
    swarm_id: SwarmId,
    source: TaskSource,
    score: Score,
    seed: int,
    selection: SelectionSettings | None = None,
    trust: Trust | None = None,
    allowance: float = 0.05,
) -> Intake:
    """An intake for the tasks of `source`.

    score: of peers' text, called where the intake judges. allowance: bytes that may be wasted, of those trained on.
    """
    trust = trust or Trust()
    judge = Judge(swarm_id=swarm_id, source=source, score=score, trust=trust)
    selector = Selector(
        selection,
        ignored=trust.ignored,
        scorable=judge.scorable,
        assigned=partial(source.assigned, swarm_id),
        blame=trust.fault,
    )
    return Intake(selector=selector, judge=judge, trust=trust, budget=ByteBudget(allowance), seed=seed)


Fetch = Callable[[Sequence[Offer]], Mapping[bytes, bytes]]


def collect(
    intake: Intake, fetch: Fetch, offers: Iterable[Offer], *, count: int, round_number: int
) -> list[JudgedGroup]:
    """Up to `count` judged groups of these offers, pulled by `fetch`."""
    wanted = intake.begin(offers, count, round_number)
    while wanted:
        wanted = intake.receive(fetch(wanted))
    return intake.finish()
