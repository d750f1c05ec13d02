"""Peers that offer groups of sums: honest ones, and what each kind of cheat would make of them."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.node.sapo.judge import Judge
from shoal.node.sapo.selection import Intake, Tasks
from shoal.node.sapo.tasks import Task, TaskChoice, TaskSource
from shoal.node.sapo.trust import Trust
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.offer_book import Offer
from shoal.protocol.rollouts import Announcement, RolloutGroup, announce_group, encode_group
from shoal.protocol.wire import SwarmId
from tests.node.sapo.sums import SUMS, score

SWARM = SwarmId(bytes(range(32)))
SOURCE = TaskSource([TaskChoice(family=SUMS, config={"most": 9}), TaskChoice(family=SUMS, config={"most": 4})])


def peer_id(seed: int) -> PeerId:
    return Identity.from_seed(bytes([seed]) * 32).peer_id


def right_answer(task: Task) -> str:
    return str(sum(SUMS.terms(task.config, task.ref.seed, task.ref.index)))


def texts_for(task: Task, rewards: Sequence[float], *, wrong: str = "none") -> tuple[str, ...]:
    """Completions of a task that earn these rewards of 0 and 1."""
    return tuple(right_answer(task) if reward else wrong for reward in rewards)


def group_of(
    origin: PeerId,
    index: int = 0,
    *,
    round_number: int = 0,
    rewards: Sequence[float] = (1.0, 0.0, 1.0, 0.0),
    texts: Sequence[str] | None = None,
    policy_version: int = 0,
) -> RolloutGroup:
    """A group of the task that `origin` was assigned, worth `rewards`."""
    task = SOURCE.draw(SWARM, origin, round_number, index)
    return RolloutGroup(
        origin=origin,
        round=round_number,
        policy_version=policy_version,
        task=task.ref,
        completions=tuple(texts_for(task, rewards) if texts is None else texts),
    )


def announced(group: RolloutGroup, rewards: Sequence[float] | None = None) -> tuple[Announcement, bytes]:
    """The group's announcement and bytes; with its true rewards, or those given."""
    data = encode_group(group)
    if rewards is None:
        task = SOURCE.task(group.task)
        rewards = score([(task, text) for text in group.completions])
    return announce_group(group, data, tuple(rewards)), data


def offer_of(
    group: RolloutGroup,
    rewards: Sequence[float] | None = None,
    *,
    arrived: int = 0,
    order: int = 0,
    by: PeerId | None = None,
) -> tuple[Offer, bytes]:
    """An offer of the group as `by`, its origin if not given, announced it; and its bytes."""
    announcement, data = announced(group, rewards)
    offer = Offer(
        announcement=announcement, origin=by or group.origin, boot=1, sequence=1, arrived=arrived, order=order
    )
    return offer, data


TASKS = Tasks(swarm_id=SWARM, table=SOURCE.table, scorable=SOURCE.scorable)


def new_judge() -> Judge:
    return Judge(swarm_id=SWARM, source=SOURCE, score=score)


def new_intake(*, seed: int = 0, trust: Trust | None = None) -> Intake:
    return Intake(TASKS, trust=trust or Trust(), seed=seed, staleness_rounds=4)
