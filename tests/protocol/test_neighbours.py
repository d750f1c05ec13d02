"""Neighbours of many nodes: the graph of the links that they choose, by value."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Collection, Iterable
from functools import cache

import pytest

from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.membership import detection_bound_s
from shoal.protocol.neighbours import (
    CHOSEN_LINKS,
    NEIGHBOUR_LIMIT,
    UNLINKED_S,
    WATCH_PACE,
    Neighbours,
    circle_after,
)

NODES = 200
BACKOFF_TURNS = 10
"""Turns for which a peer that did not take a dial is not dialled again."""


@cache
def peer(n: int) -> PeerId:
    return Identity.from_seed(n.to_bytes(32, "big")).peer_id


class World:
    """Nodes that choose in turns; a dial is a link at once if its target lives, is on this side and has a place."""

    def __init__(self, count: int, seed: int, *, proven: Collection[PeerId] = ()) -> None:
        self.peers = [peer(n) for n in range(count)]
        self.rng = random.Random(seed)
        self.machines = {one: Neighbours(me=one, rng=random.Random(f"{seed} {one}")) for one in self.peers}
        self.links: dict[PeerId, set[PeerId]] = {one: set() for one in self.peers}
        self.known: dict[PeerId, set[PeerId]] = {one: set(self.peers) - {one} for one in self.peers}
        self.proven = proven
        self.dead: set[PeerId] = set()
        self.side: dict[PeerId, int] = dict.fromkeys(self.peers, 0)
        self.dials: Counter[PeerId] = Counter()
        self.most = 0
        self._turn = 0
        self._not_before: dict[tuple[PeerId, PeerId], int] = {}

    @property
    def living(self) -> list[PeerId]:
        return [one for one in self.peers if one not in self.dead]

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            self._turn += 1
            for one in self.rng.sample(self.living, len(self.living)):
                for target in self.choices(one):
                    self.dial(one, target)

    def choices(self, one: PeerId) -> list[PeerId]:
        return self.machines[one].choose(
            known=self.known[one],
            linked=self.links[one],
            dialled=(),
            may_dial=lambda target: self._not_before.get((one, target), 0) <= self._turn,
            is_proven=lambda target: target in self.proven,
        )

    def dial(self, one: PeerId, target: PeerId) -> None:
        self.dials[target] += 1
        reached = target not in self.dead and self.side[one] == self.side[target]
        if reached and len(self.links[one]) < NEIGHBOUR_LIMIT and self.takes(target):
            self.links[one].add(target)
            self.links[target].add(one)
            self.most = max(self.most, len(self.links[one]), len(self.links[target]))
        else:
            self._not_before[one, target] = self._turn + BACKOFF_TURNS

    def takes(self, target: PeerId) -> bool:
        return len(self.links[target]) < NEIGHBOUR_LIMIT - self.machines[target].kept_places(self.links[target])

    def cut(self, one: PeerId, other: PeerId) -> None:
        self.links[one].discard(other)
        self.links[other].discard(one)

    def kill(self, gone: Iterable[PeerId]) -> None:
        for one in gone:
            self.dead.add(one)
            for other in list(self.links[one]):
                self.cut(one, other)

    def reached_in(self, hops: int) -> set[PeerId]:
        """Nodes that are within so many links of the first living one."""
        first = self.living[0]
        far, queue = {first: 0}, deque([first])
        while queue:
            at = queue.popleft()
            for other in self.links[at] - far.keys():
                far[other] = far[at] + 1
                queue.append(other)
        return {one for one, distance in far.items() if distance <= hops}

    @property
    def is_connected(self) -> bool:
        return self.reached_in(len(self.peers)) == set(self.living)


def settled(seed: int) -> World:
    world = World(NODES, seed)
    world.turn(3)
    return world


@pytest.mark.parametrize("seed", range(5))
def test_two_hundred_nodes_have_few_links_each_and_all_are_within_five(seed: int) -> None:
    world = settled(seed)
    degrees = [len(links) for links in world.links.values()]
    assert min(degrees) >= CHOSEN_LINKS
    assert world.most <= NEIGHBOUR_LIMIT
    assert 8 <= sum(degrees) / NODES <= 10
    assert world.reached_in(5) == set(world.peers)


def test_settled_nodes_dial_nobody() -> None:
    world = settled(1)
    world.turn(2 * BACKOFF_TURNS)
    world.dials.clear()
    world.turn(2 * BACKOFF_TURNS)
    assert world.dials.total() <= NODES // 10  # in two turns of trying again who was full


@pytest.mark.parametrize("seed", range(5))
def test_a_fifth_that_is_gone_at_once_leaves_the_others_connected_and_is_replaced(seed: int) -> None:
    world = settled(seed)
    world.kill(world.rng.sample(world.peers, NODES // 5))
    assert world.is_connected  # before anybody has noticed
    world.turn(4)  # those who are gone are still known, and dialled in vain
    assert min(len(world.links[one]) for one in world.living) >= CHOSEN_LINKS
    assert world.most <= NEIGHBOUR_LIMIT
    assert world.reached_in(5) == set(world.living)


@pytest.mark.parametrize("seed", range(3))
def test_halves_that_were_apart_until_both_had_enough_links_come_together(seed: int) -> None:
    world = settled(seed)
    for n, one in enumerate(world.peers):
        world.side[one] = n % 2
    for one in world.peers:
        for other in [other for other in world.links[one] if world.side[other] != world.side[one]]:
            world.cut(one, other)
    world.turn(3 * BACKOFF_TURNS)
    assert not world.is_connected
    assert min(map(len, world.links.values())) >= CHOSEN_LINKS  # nobody lacks a link
    world.side = dict.fromkeys(world.peers, 0)
    world.turn(2 * BACKOFF_TURNS)
    assert world.is_connected


def test_all_join_by_one_node_that_is_full_soon() -> None:
    world = World(NODES, seed=7)
    first, *others = world.peers
    world.known = {one: {first} for one in others} | {first: set()}
    for one in others:
        for target in world.choices(one):
            world.dial(one, target)
        world.known[first].add(one)  # it said hello, whether or not there was a place
        told = world.rng.sample(sorted(world.known[first]), min(64, len(world.known[first])))
        world.known[one] |= set(told) - {one}
    world.turn(5)
    assert world.is_connected
    assert max(map(len, world.links.values())) <= NEIGHBOUR_LIMIT


def test_whoever_comes_never_has_the_places_of_those_that_a_node_chooses() -> None:
    world = World(60, seed=3)
    victim, *strangers = world.peers
    for one in strangers:  # all dial it before it has chosen anybody
        world.dial(one, victim)
    assert len(world.links[victim]) == NEIGHBOUR_LIMIT - CHOSEN_LINKS
    for _ in range(3):
        for target in world.choices(victim):
            world.dial(victim, target)
    assert len(world.links[victim]) >= NEIGHBOUR_LIMIT - 1  # the next in the circle may be linked already
    assert world.machines[victim].kept_places(world.links[victim]) <= 1


def test_next_in_the_circle_beyond_the_choices_makes_no_place_for_others() -> None:
    ahead = list(circle_after(peer(0), [peer(n) for n in range(1, 20)]))
    world = World(20, seed=1)
    world.known[peer(0)] = set(ahead[1:])
    for target in world.choices(peer(0)):
        world.dial(peer(0), target)
    assert world.machines[peer(0)].kept_places(world.links[peer(0)]) == 0
    world.known[peer(0)].add(ahead[0])  # it has come, and is next
    assert world.choices(peer(0)) == [ahead[0]]
    world.dial(peer(0), ahead[0])
    assert len(world.links[peer(0)]) == CHOSEN_LINKS + 1
    assert world.machines[peer(0)].kept_places(world.links[peer(0)]) == 0


def test_half_of_the_choices_are_among_those_that_have_proven_something() -> None:
    proven = {peer(n) for n in range(1, 9)}
    world = World(400, seed=2, proven=proven)
    draws = Counter[bool]()
    for seed in range(100):
        world.machines[peer(0)] = Neighbours(me=peer(0), rng=random.Random(seed))
        chosen = world.choices(peer(0))
        assert len(chosen) == len(set(chosen)) == CHOSEN_LINKS
        draws.update(one in proven for one in chosen[1:])
    assert 150 <= draws[True] <= 250  # 200 expected of 400; 8 of 400 peers, were there no preference


def test_few_that_have_proven_something_are_not_dialled_by_everybody() -> None:
    founder = peer(0)
    world = World(NODES, seed=5, proven={founder})
    world.turn(1)
    assert world.dials[founder] <= 20  # as often as anybody else: the mean is 5


def test_choice_begins_with_the_next_in_the_circle_that_may_be_dialled() -> None:
    others = [peer(n) for n in range(1, 30)]
    circle = list(circle_after(peer(0), others))
    assert sorted(circle) == sorted(others)
    # Each one's circle is the same, begun elsewhere.
    elsewhere = circle_after(circle[3], [peer(0), *(one for one in others if one != circle[3])])
    assert list(elsewhere) == [*circle[4:], peer(0), *circle[:3]]

    def chosen(linked: Collection[PeerId] = (), not_yet: Collection[PeerId] = ()) -> list[PeerId]:
        return Neighbours(me=peer(0), rng=random.Random(1)).choose(
            known=others,
            linked=linked,
            dialled=(),
            may_dial=lambda one: one not in not_yet,
            is_proven=lambda one: False,
        )

    assert chosen()[0] == circle[0]
    assert chosen(not_yet=circle[:2])[0] == circle[2]
    # With the next one linked nobody is dialled for the circle's sake: all choices are at random.
    assert len(chosen(linked=circle[:1])) == CHOSEN_LINKS
    assert circle[1] in chosen(linked=[one for one in others if one not in circle[:2]], not_yet=circle[:1])


def test_who_died_is_gone_until_it_signs_a_newer_record_or_is_linked() -> None:
    neighbours = Neighbours(me=peer(0), rng=random.Random(1))
    assert not neighbours.is_gone(peer(1), (1, 5))
    neighbours.died(peer(1), (1, 5))
    assert neighbours.is_gone(peer(1), (1, 4))
    assert neighbours.is_gone(peer(1), (1, 5))
    assert not neighbours.is_gone(peer(1), (1, 6))
    assert not neighbours.is_gone(peer(1), (2, 0))
    neighbours.lives(peer(1))
    assert not neighbours.is_gone(peer(1), (1, 5))
    neighbours.died(peer(1), (1, 5))
    neighbours.died(peer(2), (1, 1))
    neighbours.keep({peer(2)})
    assert not neighbours.is_gone(peer(1), (1, 5))
    assert neighbours.is_gone(peer(2), (1, 1))


def test_neighbour_that_lost_its_link_is_watched_until_the_detector_is_done_with_it() -> None:
    assert detection_bound_s(NEIGHBOUR_LIMIT, pace=WATCH_PACE, calm=True) < UNLINKED_S
