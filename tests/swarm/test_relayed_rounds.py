"""Whole rounds in virtual time among members of which some pairs have no link: others pass on what they say."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Message
from shoal.swarm.message_relay import MessageRelay
from tests.protocol.lab import paper_signatures
from tests.protocol.round_lab import LATENCY_S, RoundLab

pytestmark = pytest.mark.usefixtures("paper_signatures")
__all__ = ["paper_signatures"]

Pair = frozenset[int]


class RelayedLab(RoundLab):
    """Pairs in `apart` have no link. What is passed on keeps its order on the way; nothing older than what came counts.

    Lanes are none of its business: reductions go on as if these pairs' were relayed.
    """

    def __init__(self, nodes: int, *apart: tuple[int, int], seed: int = 0, forwards: bool = True) -> None:
        self.apart = set(map(frozenset, apart))
        self._forwards = forwards
        self._count_of_words = itertools.count()
        self._newest: dict[tuple[int, int], int] = {}
        self._busy_until: dict[tuple[int, int, int], float] = {}
        super().__init__(nodes, seed=seed)

    def _neighbours(self, number: int) -> dict[PeerId, int]:
        """Those that are there and have a link to it."""
        there = ((n, node) for n, node in enumerate(self.nodes) if node.up and n != number)
        return {node.peer: n for n, node in there if frozenset({n, number}) not in self.apart}

    def _knowledge(self, number: int) -> MessageRelay:
        """What its neighbours have told a node, and it them."""
        message_relay = MessageRelay(self.nodes[number].peer)
        for peer, n in {**self._neighbours(number), self.nodes[number].peer: number}.items():
            lacks = [self.nodes[next(iter(pair - {n}))].peer for pair in self.apart if n in pair]
            message_relay.told(peer, lacks)
        return message_relay

    def _send(self, number: int, to: int, message: Message) -> None:
        if frozenset({number, to}) not in self.apart:
            super()._send(number, to, message)
            return
        word, signer = next(self._count_of_words), self.nodes[number].peer
        for via in self._neighbours(number).values() if self._forwards else ():
            linked = self._neighbours(via)
            targets = self._knowledge(via).targets(signer, linked, 1, self.now)
            if self.nodes[to].peer in targets:
                path = (number, via, to)
                delay_s = sum(self.rng.uniform(*LATENCY_S) for _ in range(2))
                at = self._busy_until[path] = max(self.now + delay_s, self._busy_until.get(path, 0.0) + 1e-6)
                self.after(at - self.now, self._passing_on(path, word, message))

    def _passing_on(self, path: tuple[int, int, int], word: int, message: Message) -> Callable[[], None]:
        number, via, to = path

        def arrive() -> None:
            if self.nodes[via].up and self._newest.get((number, to), -1) < word:
                self._newest[number, to] = word
                self._arrive(to, number, self.nodes[number].peer, message)

        return arrive


PAIRS = {"a pair": ((0, 1),), "two pairs": ((0, 1), (2, 3)), "one that two lack": ((0, 1), (0, 2)), "a ring": None}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("which", PAIRS)
def test_pairs_without_a_link_are_in_every_round_whoever_leads(which: str, seed: int) -> None:
    apart = PAIRS[which] or ((0, 2), (2, 4), (4, 1), (1, 3), (3, 0))
    lab, undisturbed = RelayedLab(5, *apart, seed=seed), RoundLab(5, seed=seed)
    for swarm in (lab, undisturbed):
        swarm.run_until(swarm.height_of_all(6), 120.0)
    for round in range(1, 7):
        assert lab.members(round) == lab.contributors(round) == set(range(5))
    assert all(not node.blamed and not node.evictions for node in lab.nodes)
    assert lab.decided_at[6] < undisturbed.decided_at[6] + 6.0, "two hops instead of one, and no patience lost"


def test_without_forwarding_such_a_pair_is_not_in_every_round() -> None:
    lab = RelayedLab(5, (0, 1), seed=1, forwards=False)
    lab.run_for(60.0)
    heights = {node.height for node in lab.nodes}
    counted = [len(lab.contributors(round)) for round in range(1, min(heights) + 1)]
    assert min(heights) < 6 or min(counted) < 5 or lab.decided_at[6] > 20.0


@pytest.mark.parametrize("seed", range(4))
def test_death_of_forwarders_costs_nobody_else_a_round(seed: int) -> None:
    lab = RelayedLab(6, (0, 1), seed=seed)
    lab.run_until(lab.height_of_all(2), 60.0)
    first, second = lab._knowledge(2).through(lab.nodes[0].peer, lab.nodes[1].peer, set(lab._neighbours(2)))
    lab.run_for(0.3)
    lab.kill(lab.number(first))
    rest = set(range(6)) - {lab.number(first)}
    lab.run_until(lab.height_of(rest, 5), 120.0)
    lab.kill(lab.number(second))
    rest -= {lab.number(second)}
    lab.run_until(lab.height_of(rest, 8), 120.0)
    for round in range(1, 9):
        assert {0, 1} <= lab.members(round)
        assert {0, 1} <= lab.contributors(round)
