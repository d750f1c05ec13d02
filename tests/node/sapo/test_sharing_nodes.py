"""The whole way on real hosts: announce, choose, pull, judge; how many bytes that takes, and what an attacker gets."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import pytest
import trio

from shoal.node.sapo import trust
from shoal.node.sapo.groups import JudgedGroup
from shoal.node.sapo.selection import total_bytes
from shoal.node.sapo.trust import Trust
from shoal.protocol import offer_book
from shoal.protocol.identity import PeerId
from shoal.protocol.rollouts import (
    AnnouncementBatch,
    Reason,
    RolloutGroup,
    announce_group,
    decode_group,
    encode_batch,
    encode_group,
    seal_announcement,
)
from shoal.swarm import rollouts
from tests.node.sapo.offering import SOURCE, SWARM, group_of, new_intake, new_judge, right_answer
from tests.swarm.rollout_lab import TOPIC, Node, running
from tests.waiting import until

LOCAL, EXTERNAL = 6, 4


@dataclass
class Agent(Node):
    """A node that offers groups of its own and takes others' through an intake."""

    def __post_init__(self) -> None:
        self.trust = Trust()
        self.intake = new_intake(seed=self.seed, trust=self.trust)
        self.judge = new_judge()
        self.taken: list[JudgedGroup] = []
        super().__post_init__()

    def is_ignored(self, peer: PeerId) -> bool:
        return self.trust.ignored(peer)

    def blame(self, peer: PeerId, reason: Reason) -> None:
        super().blame(peer, reason)
        self.trust.fault(peer, reason)

    async def offer_round(self, round_number: int) -> set[bytes]:
        """Announce the groups of this node's round, some of which teach nothing; the digests of all."""
        self.round = round_number
        dice = random.Random(f"{self.seed}/{round_number}")
        digests = set()
        for index in range(LOCAL):
            right = index if index < 3 else dice.randint(1, 3)
            rewards = (1.0,) * right + (0.0,) * (4 - right)
            group = group_of(self.peer, index, round_number=round_number, rewards=rewards)
            digests.add(await self.announce_group(group, rewards))
        return digests

    async def take_round(self, round_number: int) -> None:
        wanted = self.intake.begin(self.exchange.offers(), EXTERNAL, round_number)
        while wanted:
            while wanted:
                came = await self.exchange.fetch(wanted, limit_bytes=total_bytes(wanted), deadline_s=20)
                wanted = self.intake.receive(came)
            judged = await trio.to_thread.run_sync(self.judge.judge, self.intake.pulled)
            self.taken += [one.group for one in judged if one.group is not None]
            wanted = self.intake.judged([one.verdict for one in judged])

    def rejected(self) -> Counter[Reason]:
        return self.intake.rejected + self.exchange.rejected


async def play(agents: Sequence[Agent], rounds: int, *, first: int = 0, share: float = 1.0) -> None:
    """Rounds of all agents. Groups are taken when every agent has this share of the others' offers of the round."""
    for round_number in range(first, first + rounds):
        digests = {agent.seed: await agent.offer_round(round_number) for agent in agents}
        for agent in agents:
            others = set().union(*(own for seed, own in digests.items() if seed != agent.seed))
            await until(lambda agent=agent, others=others: len(agent.offered() & others) >= share * len(others))
        async with trio.open_nursery() as nursery:
            for agent in agents:
                nursery.start_soon(agent.take_round, round_number)


def bytes_of(group: JudgedGroup) -> int:
    """What the group took to pull."""
    assert group.origin is not None
    made = group_of(group.origin, group.task.ref.index, round_number=group.round, texts=group.texts)
    return len(encode_group(made))


@pytest.mark.parametrize("hosts", [4, pytest.param(8, marks=pytest.mark.long)])
async def test_bytes_pulled_are_those_of_groups_trained_on_whatever_the_swarm_size(hosts: int) -> None:
    agents = [Agent(seed) for seed in range(1, hosts + 1)]
    rounds = 2
    async with running(*agents):
        await play(agents, rounds, share=0.5)
        for agent in agents:
            assert len(agent.taken) == rounds * EXTERNAL
            assert len({(group.origin, group.task.ref) for group in agent.taken}) == rounds * EXTERNAL
            assert agent.peer not in {group.origin for group in agent.taken}
            assert all(len(set(group.rewards)) > 1 for group in agent.taken)
            trained_bytes = sum(map(bytes_of, agent.taken))
            assert trained_bytes == agent.intake.budget.trained_bytes
            assert agent.exchange.bytes_fetched <= 1.05 * trained_bytes
            assert agent.rejected().keys() <= {Reason.NO_VARIANCE, Reason.STALE}


SEEN = {Reason.MALFORMED, Reason.FORGED, Reason.REPLAYED, Reason.FOREIGN_TASK, Reason.QUOTA, Reason.HINT}


class Attacker(Agent):
    """A quarter of the swarm: whatever pays, it tries."""

    async def publish(self, *groups: tuple[RolloutGroup, Sequence[float]]) -> None:
        """Announce groups with rewards of its choice, and serve them."""
        sealed = []
        for group, rewards in groups:
            data = encode_group(group)
            announcement = announce_group(group, data, tuple(rewards))
            self.store.keep(announcement.digest, data)
            sealed.append(seal_announcement(self.sealer, announcement))
        await self.publish_sealed(*sealed)

    async def publish_sealed(self, *sealed: bytes) -> None:
        for at in range(0, len(sealed), 50):
            await self.host.publish(TOPIC, encode_batch(AnnouncementBatch(announcements=sealed[at : at + 50])))

    def lie(self, index: int, round_number: int) -> tuple[RolloutGroup, Sequence[float]]:
        """Wrong answers announced as right."""
        return group_of(self.peer, index, round_number=round_number, rewards=(0.0,) * 4), (1.0, 1.0, 0.0, 0.0)

    def copy(self, group: RolloutGroup, index: int, round_number: int) -> list[tuple[RolloutGroup, Sequence[float]]]:
        """Another's completions as its own: for its own task, and for the task of their origin.

        Its own is the first from `index` on that has another answer: texts that are right for it too are no lie.
        """
        while right_answer(SOURCE.draw(SWARM, self.peer, round_number, index)) in group.completions:
            index += 1
        mine = group_of(self.peer, index, round_number=round_number, texts=group.completions)
        return [(mine, (1.0, 1.0, 0.0, 0.0)), (msgspec.structs.replace(group, origin=self.peer), (1.0, 1.0, 0.0, 0.0))]


@pytest.mark.parametrize("ignored_at", [4.0, 1e9])
async def test_attacker_is_found_out_and_ignored_while_honest_groups_go_on(
    ignored_at: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a bound out of reach every kind of attack is seen, round after round."""
    for module in (offer_book, rollouts):
        monkeypatch.setattr(module, "ANNOUNCEMENTS_PER_S", 20.0)
    monkeypatch.setattr(offer_book, "ANNOUNCEMENTS_BURST", 60.0)
    monkeypatch.setattr(trust, "IGNORED_AT", ignored_at)
    agents = [Agent(seed) for seed in (1, 2, 3)]
    attacker = Attacker(9)

    async def attack(round_number: int) -> None:
        attacker.round = round_number
        if round_number == 0:
            await attacker.publish(*(attacker.lie(100 + index, round_number) for index in range(100)))
        lies = [attacker.lie(index, round_number) for index in range(6)]
        stolen = [data for offer in attacker.exchange.offers() if (data := await pulled(offer.digest))][:3]
        copies = [
            one
            for at, data in enumerate(stolen, start=1)
            for one in attacker.copy(decode_group(data), 1000 * at, round_number)
        ]
        await attacker.publish(*lies, *copies)
        honest_sealed = seal_announcement(agents[0].sealer, announce(agents[0]))
        own = seal_announcement(attacker.sealer, announce(attacker))
        await attacker.publish_sealed(own, own, own[:-1] + b"\x00", honest_sealed, b"garbage")
        await attacker.host.publish(TOPIC, b"garbage")

    async def pulled(digest: bytes) -> bytes | None:
        return (await attacker.fetch(digest)).get(digest)

    def announce(agent: Agent) -> object:
        group = group_of(agent.peer, 5000, round_number=agent.round)
        return announce_group(group, encode_group(group), (1.0, 0.0, 1.0, 0.0))

    async with running(*agents, attacker):
        rounds = 0  # how many of an attacker's groups are judged in one is chance
        expected = {Reason.IGNORED} if ignored_at == 4.0 else SEEN
        honest = {agent.peer for agent in agents}
        while (
            rounds < 4
            or not all(agent.rejected().keys() >= expected for agent in agents)
            or not all({group.origin for group in agent.taken} >= honest - {agent.peer} for agent in agents)
        ):
            await attack(rounds)
            await play(agents, 1, first=rounds)
            rounds += 1
        for agent in agents:
            assert {group.origin for group in agent.taken} == honest - {agent.peer}
            assert agent.trust.ignored(attacker.peer) == (ignored_at == 4.0)
            assert all(agent.trust.demerits(peer) == 0 for peer in honest)
            # Who is ignored soon may be so before it did what blames whoever sends it.
            assert {peer for peer, _ in agent.blamed} <= {attacker.peer}
            assert agent.blamed or ignored_at == 4.0
            assert agent.host.handler_errors == 0
        if ignored_at == 4.0:
            assert all(len(agent.taken) >= (rounds - 1) * EXTERNAL for agent in agents)
            offered = agents[0].offered()
            await attacker.publish(attacker.lie(9000, rounds))
            await play(agents, 1, first=rounds)
            assert {offer.origin for offer in agents[0].exchange.offers() if offer.digest not in offered} <= honest
            assert all(len(agent.taken[-EXTERNAL:]) == EXTERNAL for agent in agents)
