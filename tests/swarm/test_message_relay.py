"""Who passes on what for a pair without a link: the choice of forwarders, and the bounds."""

from __future__ import annotations

import itertools
import random

import pytest

from shoal.protocol.identity import PeerId
from shoal.swarm import message_relay
from shoal.swarm.message_relay import PATH_BURST_BYTES, PATH_BYTES_PER_S, RELAYS_PER_PAIR, MessageRelay


def name(index: int) -> PeerId:
    return PeerId(f"peer{index:03}")


class Mesh:
    """What every node knows when all were told whom the others lack, over the links that there are."""

    def __init__(self, count: int, *apart: tuple[int, int], first: int = 0) -> None:
        """first: how many of them are members."""
        self.peers = [name(index) for index in range(count)]
        self.missing = {frozenset(map(name, pair)) for pair in apart}
        self.nodes = {peer: MessageRelay(peer) for peer in self.peers}
        for node in self.nodes.values():
            node.belongs = set(self.peers[:first]).__contains__
        for me in self.peers:
            lacks = [other for other in self.peers if {me, other} in self.missing]
            for hearer in {me, *self.linked(me)}:
                self.nodes[hearer].told(me, lacks)

    def linked(self, me: PeerId) -> set[PeerId]:
        return {other for other in self.peers if other != me and {me, other} not in self.missing}

    def passed_on(self, signer: PeerId, *, size_bytes: int = 100, now: float = 0.0) -> dict[PeerId, list[PeerId]]:
        """To whom what `signer` broadcasts is passed on, and by whom."""
        found: dict[PeerId, list[PeerId]] = {}
        for node in self.linked(signer):
            for target in self.nodes[node].targets(signer, self.linked(node), size_bytes, now):
                found.setdefault(target, []).append(node)
        return found


def test_where_everybody_reaches_everybody_nothing_is_passed_on() -> None:
    mesh = Mesh(6)
    assert not any(node.needed for node in mesh.nodes.values())
    assert [mesh.passed_on(peer) for peer in mesh.peers] == [{}] * 6


@pytest.mark.parametrize("count", [3, 4, 10, 64])
def test_pair_without_a_link_has_two_forwarders_on_which_all_agree(count: int) -> None:
    mesh = Mesh(count, (0, 1))
    there, back = mesh.passed_on(name(0)), mesh.passed_on(name(1))
    assert set(there) == {name(1)}
    assert set(back) == {name(0)}
    assert sorted(there[name(1)]) == sorted(back[name(0)])
    assert len(there[name(1)]) == min(RELAYS_PER_PAIR, count - 2)
    assert set(mesh.nodes[name(0)].through(name(0), name(1), mesh.linked(name(0)))) == set(there[name(1)])
    assert all(mesh.passed_on(peer) == {} for peer in mesh.peers[2:])


def test_forwarders_of_different_pairs_differ() -> None:
    load: dict[PeerId, int] = {}
    for pair in itertools.combinations(range(16), 2):
        mesh = Mesh(16, pair)
        for relay in mesh.passed_on(name(pair[0]))[name(pair[1])]:
            load[relay] = load.get(relay, 0) + 1
    assert max(load.values()) < 3 * 2 * 120 / 16


def test_every_pair_that_others_can_help_is_helped_once_or_twice_by_those_who_can() -> None:
    rng = random.Random(5)
    for _ in range(60):
        count = rng.randint(3, 9)
        pairs = list(itertools.combinations(range(count), 2))
        mesh = Mesh(count, *rng.sample(pairs, rng.randint(1, len(pairs) // 2)))
        for signer in mesh.peers:
            passed_on = mesh.passed_on(signer)
            for target in mesh.peers:
                common = mesh.linked(signer) & mesh.linked(target)
                helped = passed_on.get(target, [])
                if target == signer or {signer, target} not in mesh.missing:
                    assert helped == []
                else:
                    assert set(helped) <= common
                    # Two neighbours without a link to each other do not know of each other: each may do it.
                    assert min(1, len(common)) <= len(helped)
                    if all(b in mesh.linked(a) for a, b in itertools.combinations(common, 2)):
                        assert len(helped) == min(RELAYS_PER_PAIR, len(common))


def test_word_of_one_end_is_enough() -> None:
    """A link that is silent is noticed at one end first."""
    node = MessageRelay(name(2))
    node.told(name(0), [name(1)])
    linked = {name(0), name(1)}
    assert node.targets(name(0), linked, 1, 0.0) == (name(1),)
    assert node.targets(name(1), linked, 1, 0.0) == (name(0),)
    node.told(name(0), [])
    assert node.targets(name(0), linked, 1, 0.0) == node.targets(name(1), linked, 1, 0.0) == ()


def test_what_a_lost_neighbour_said_counts_no_more() -> None:
    node = MessageRelay(name(2))
    node.told(name(0), [name(1)])
    node.forget(name(0))
    assert not node.needed
    assert node.targets(name(1), {name(1)}, 1, 0.0) == ()


def test_who_does_not_reach_one_of_the_two_is_no_forwarder() -> None:
    node = MessageRelay(name(2))
    node.told(name(0), [name(1)])
    node.lack([name(0)])  # its link is up, and silent
    linked = {name(0), name(1), name(3)}
    assert node.lacking == {name(0)}
    assert node.targets(name(0), linked, 1, 0.0) == ()
    assert node.targets(name(1), linked, 1, 0.0) == ()
    assert node.through(name(0), name(1), linked) == (name(3),)


def test_nobody_makes_another_pass_on_more_than_its_allowance() -> None:
    mesh = Mesh(3, (0, 1))
    node, linked = mesh.nodes[name(2)], mesh.linked(name(2))
    size_bytes, seconds = 64 << 10, 60
    passed_on = sum(len(node.targets(name(0), linked, size_bytes, step / 100)) for step in range(seconds * 100))
    assert passed_on * size_bytes <= PATH_BURST_BYTES + PATH_BYTES_PER_S * seconds
    assert passed_on * size_bytes > PATH_BYTES_PER_S * seconds, "and the allowance is used"
    assert node.dropped == seconds * 100 - passed_on
    assert node.targets(name(1), linked, size_bytes, seconds) == (name(0),), "the other way is none the worse for it"


def test_all_together_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """One who says that it reaches nobody has everything passed on to it, by two at most and within what one gives."""
    monkeypatch.setattr(message_relay, "TOTAL_BURST_BYTES", 1000)
    monkeypatch.setattr(message_relay, "TOTAL_BYTES_PER_S", 10)
    node = MessageRelay(name(2))
    node.told(name(0), [name(index) for index in range(3, 40)])
    linked = {name(index) for index in range(40)} - {name(2)}
    assert len(node.targets(name(0), linked, 100, 0.0)) <= 10
    assert sum(len(node.targets(name(index), linked, 100, 0.0)) for index in range(40)) <= 10
    assert sum(len(node.targets(name(index), linked, 100, 20.0)) for index in range(40)) <= 2


def test_table_of_paths_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_relay, "PATH_LIMIT", 5)
    node = MessageRelay(name(0))
    for index in range(1, 30):
        node.told(name(index), [name(50)])
        node.targets(name(index), {name(index), name(50)}, 1, 0.0)
    assert len(node._paths) <= 5


@pytest.mark.parametrize(("members", "relays"), [(5, {2, 3, 4}), (4, {2, 3})])
def test_strangers_pass_on_nothing_where_members_can(members: int, relays: set[int]) -> None:
    """However many there are: nothing makes them do it."""
    mesh = Mesh(100, (0, 1), first=members)
    passing = mesh.passed_on(name(0))[name(1)]
    assert len(passing) == RELAYS_PER_PAIR
    assert set(passing) <= set(map(name, relays))


def test_stranger_passes_on_what_too_few_members_can() -> None:
    mesh = Mesh(20, (0, 1), first=3)
    passing = mesh.passed_on(name(0))[name(1)]
    assert len(passing) == RELAYS_PER_PAIR
    assert name(2) in passing
