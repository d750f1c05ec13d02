"""Membership: many detectors joined in memory under virtual time; the living stay, the silent are found in time."""

from __future__ import annotations

import collections
import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shoal.protocol import membership
from shoal.protocol.errors import LocalError
from shoal.protocol.identity import PeerId
from shoal.protocol.lateness import LATE_LIMIT_S, WAITED_TIMES
from shoal.protocol.membership import (
    ACK_DEADLINE_S,
    CLOSE_PEERS,
    INDIRECT_DEADLINE_S,
    PROBES_PER_S,
    RECEIVERS,
    SILENCE_S,
    SUSPICION_S,
    TICK_S,
    TRANSITIONS,
    Died,
    Effect,
    Event,
    MembershipMachine,
    Refute,
    Revived,
    Say,
    State,
    Suspected,
    close_interval_s,
    detection_bound_s,
    next_state,
    number_of,
    probe_interval_s,
)
from shoal.protocol.peering import Ack, Nack, Ping, PingRequest, SignOfLife
from shoal.protocol.timeouts import CROWD, RESTING_TICK_S, next_beat

FUZZ = settings(derandomize=True)
"""The same examples every time, however busy the machine."""

Kind = TypeVar("Kind", bound=SignOfLife)
Deliver = Callable[[MembershipMachine, float], list[Effect]]


def name(index: int) -> PeerId:
    return PeerId(f"peer{index:03}")


def what(effect: Effect) -> type:
    """The kind of message to be sent, or else of effect."""
    return type(effect.message if isinstance(effect, Say) else effect)


def said(effect: Effect, kind: type[Kind]) -> Kind:
    """The message of that kind that is to be sent."""
    assert isinstance(effect, Say)
    assert isinstance(effect.message, kind)
    return effect.message


ME, A, B, C, D, E = (name(index) for index in range(6))


@dataclass
class Node:
    """A detector with its process: running, stopped (its mail waits), or killed (its mail is lost)."""

    machine: MembershipMachine
    running: bool = True
    killed: bool = False
    mail: list[Deliver] = field(default_factory=list)
    seen: list[tuple[float, Effect]] = field(default_factory=list)

    def events(self, of: type[Effect]) -> list[tuple[float, Effect]]:
        return [(at, effect) for at, effect in self.seen if isinstance(effect, of)]


class Net:
    """Nodes, links with latency and loss, and a clock that jumps from event to event.

    rests: each is called as seldom as it says, as a node does, and not every TICK_S.
    """

    def __init__(
        self, count: int, seed: int = 1, latency_s: float = 0.01, loss: float = 0.0, *, rests: bool = False
    ) -> None:
        self.rests, self.ticks = rests, 0
        self.rng = random.Random(seed)
        self.now = 0.0
        self.latency_s, self.loss = latency_s, loss
        self.cut: Callable[[PeerId, PeerId], bool] = lambda a, b: False
        self.unlinked: set[frozenset[PeerId]] = set()
        self.sent = 0
        self._order = itertools.count()
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self.nodes = {name(i): Node(self._machine(name(i), seed * 1000 + i)) for i in range(count)}
        for me, other in itertools.permutations(self.nodes, 2):
            self.nodes[me].machine.peer_seen(other, 0, 0.0)
        for me in self.nodes:
            self.at(self.rng.uniform(0, TICK_S), lambda me=me: self._tick(me))

    def _machine(self, me: PeerId, seed: int) -> MembershipMachine:
        return MembershipMachine(me, random.Random(seed), has_link=lambda peer: {me, peer} not in self.unlinked)

    def break_link(self, one: PeerId, other: PeerId) -> None:
        """The connection between two breaks, and nothing passes between them any more; neither can dial the other."""
        self.unlinked.add(frozenset({one, other}))
        for me, peer in ((one, other), (other, one)):
            self._carry_out(me, self.nodes[me].machine.connection_lost(peer, self.now))
            self.at(self.now + 1.7, lambda me=me, peer=peer: self._carry_out(me, self._cannot_remake(me, peer)))

    def _cannot_remake(self, me: PeerId, peer: PeerId) -> list[Effect]:
        return self.nodes[me].machine.unreachable(peer, self.now) if self.nodes[me].running else []

    def at(self, when: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (when, next(self._order), action))

    def run(self, until: float) -> None:
        while self._queue and self._queue[0][0] <= until:
            self.now, _, action = heapq.heappop(self._queue)
            action()
        self.now = until

    def stop(self, peer: PeerId) -> None:
        self.nodes[peer].running = False

    def resume(self, peer: PeerId, *, mail_first: bool = True) -> None:
        """Go on; what comes first, the late tick or the mail, is up to the event loop."""
        node = self.nodes[peer]
        if node.running or node.killed:
            return
        node.running = True
        if not mail_first:
            self._carry_out(peer, node.machine.tick(self.now))
        mail, node.mail = node.mail, []
        for deliver in mail:
            self._carry_out(peer, deliver(node.machine, self.now))

    def kill(self, peer: PeerId) -> None:
        self.nodes[peer].running, self.nodes[peer].killed = False, True

    def _tick(self, me: PeerId) -> None:
        node = self.nodes[me]
        pause_s = TICK_S
        if node.running:
            self.ticks += 1
            self._carry_out(me, node.machine.tick(self.now))
            pause_s = node.machine.rest_s(self.now) if self.rests else TICK_S
        if not node.killed:
            self.at(self.now + pause_s, lambda: self._tick(me))

    def _send(self, source: PeerId, target: PeerId, deliver: Deliver) -> None:
        self.sent += 1
        if self.rng.random() < self.loss or self.cut(source, target) or {source, target} in self.unlinked:
            return
        delay = self.rng.uniform(0, 2 * self.latency_s)
        self.at(self.now + delay, lambda: self._arrive(target, deliver))

    def _arrive(self, target: PeerId, deliver: Deliver) -> None:
        node = self.nodes[target]
        if node.running:
            self._carry_out(target, deliver(node.machine, self.now))
        elif not node.killed:
            node.mail.append(deliver)

    def _carry_out(self, me: PeerId, effects: list[Effect]) -> None:
        node = self.nodes[me]
        for effect in effects:
            node.seen.append((self.now, effect))
            match effect:
                case Say(peer=peer, message=message):
                    self._send(me, peer, lambda m, t, one=message: RECEIVERS[type(one)](m, me, one, t))
                case Suspected(peer=peer, incarnation=i):
                    for other in self.nodes:
                        if other != me:
                            self._send(me, other, lambda m, t, p=peer, i=i: m.on_suspicion(p, i, t))
                case Refute(incarnation=i):
                    for other in self.nodes:
                        if other != me:
                            self._send(me, other, lambda m, t, i=i: m.peer_seen(me, i, t))
                case _:
                    pass

    def died(self, peer: PeerId) -> dict[PeerId, float]:
        """Who declared `peer` dead, and when first."""
        found: dict[PeerId, float] = {}
        for watcher, node in self.nodes.items():
            for at, effect in node.events(Died):
                if effect == Died(peer=peer):
                    found.setdefault(watcher, at)
        return found


def watching(*peers: PeerId, now: float = 0.0) -> MembershipMachine:
    machine = MembershipMachine(ME, random.Random(1))
    for peer in peers:
        machine.peer_seen(peer, 0, now)
    machine.tick(now)
    return machine


def run_ticks(
    machine: MembershipMachine, start: float, end: float, talking: tuple[PeerId, ...] = ()
) -> list[tuple[float, Effect]]:
    """Tick from `start` to `end`, with `talking` heard all the while; what the machine wanted, and when."""
    wanted: list[tuple[float, Effect]] = []
    steps = round((end - start) / TICK_S)
    for step in range(1, steps + 1):
        now = start + step * TICK_S
        for peer in talking:
            machine.peer_seen(peer, 0, now)
        wanted += [(now, effect) for effect in machine.tick(now)]
    return wanted


# --- the table ---


def test_table_is_the_documented_one() -> None:
    documented = {
        Event.HEARD: ("ALIVE", "ALIVE", "ALIVE"),
        Event.VOUCHED: ("ALIVE", "ALIVE", "ALIVE"),
        Event.REFUTED: ("ALIVE", "ALIVE", "DEAD"),
        Event.ACCUSED: ("ALIVE", "SUSPECT", "DEAD"),
        Event.UNANSWERED: ("SUSPECT", None, None),
        Event.EXPIRED: (None, "DEAD", None),
        Event.LOST: ("DEAD", "DEAD", "DEAD"),
    }
    assert set(documented) == set(Event)
    for event, row in documented.items():
        for state, after in zip((State.ALIVE, State.SUSPECT, State.DEAD), row, strict=True):
            if after is None:
                with pytest.raises(LocalError, match=f"{event.name} cannot happen"):
                    next_state(state, event)
                assert event not in TRANSITIONS[state]
            else:
                assert next_state(state, event) is State[after]


def test_time_cannot_go_back() -> None:
    machine = watching(A, now=5.0)
    with pytest.raises(LocalError, match="time went back"):
        machine.tick(4.0)


def test_bound_is_the_documented_one() -> None:
    assert [probe_interval_s(peers) for peers in (1, 2, 4, 16, 64)] == [1.0, 1.0, 2.0, 8.0, 32.0]
    assert [detection_bound_s(peers, awaited=True) for peers in (1, 64)] == pytest.approx([7.4, 7.4])
    assert [detection_bound_s(peers) for peers in (3, 4, 16, 64)] == pytest.approx([8.0, 9.0, 15.0, 39.0])
    assert detection_bound_s(64, awaited=True) + 2 * 0.25 < 8.0  # a round trip of half a second fits
    assert [close_interval_s(peers) for peers in (1, 8, 12, 16, 64)] == [1.0, 1.0, 1.5, 2.0, 2.0]
    assert [detection_bound_s(peers, told=True) for peers in (3, 64, 4096)] == pytest.approx([8.0, 12.0, 12.0])
    assert [detection_bound_s(peers, calm=True) for peers in (3, 4, 16, 64)] == pytest.approx([9.0, 11.0, 23.0, 71.0])
    assert [detection_bound_s(peers, told=True, calm=True) for peers in (3, 64)] == pytest.approx([9.0, 14.0])
    assert detection_bound_s(64, awaited=True, calm=True) == pytest.approx(7.4)


# --- the living stay ---


@pytest.mark.parametrize("count", [2, 5, 24, 64])
def test_quiet_net_stays_whole_at_ten_signs_of_life_a_second_for_each(count: int) -> None:
    net = Net(count)
    net.run(30.0)
    for node in net.nodes.values():
        assert {what(effect) for _, effect in node.seen} <= {Ping, Ack}
        assert len(node.machine.alive()) == count - 1
    close = min(CLOSE_PEERS, count / 2)
    at_once = 1.35  # sometimes both ask
    assert net.sent / count <= 30 * (2 * close + PROBES_PER_S) * at_once
    assert net.sent / count >= 30 * close / at_once


def test_each_is_watched_closely_by_those_before_it_around_the_ring() -> None:
    net = Net(24)
    net.run(20.0)
    pinged: dict[PeerId, dict[PeerId, int]] = {me: {} for me in net.nodes}
    for me, node in net.nodes.items():
        for _, effect in node.events(Say):
            if isinstance(effect, Say) and isinstance(effect.message, Ping):
                pinged[me][effect.peer] = pinged[me].get(effect.peer, 0) + 1
    ring = sorted(net.nodes)
    for place, me in enumerate(ring):
        after = {ring[(place + step) % len(ring)] for step in range(1, CLOSE_PEERS + 1)}
        assert {peer for peer, times in pinged[me].items() if times >= 8} == after
        assert all(times <= 4 for peer, times in pinged[me].items() if peer not in after)


def test_whom_this_node_waits_for_is_watched_closely() -> None:
    crowd = [name(index) for index in range(1, 25)]
    machine = MembershipMachine(ME, random.Random(1), awaited=lambda: (crowd[12],))
    for peer in crowd:
        machine.peer_seen(peer, 0, 0.0)
    wanted = [(at, effect.peer) for at, effect in run_ticks(machine, 0.0, 3.0) if isinstance(effect, Say)]
    assert {peer for at, peer in wanted if at <= 1.1} == {crowd[12]}
    assert {peer for at, peer in wanted if at <= 2.1} == {*crowd[:CLOSE_PEERS], crowd[12]}


def test_lossy_net_kills_nobody() -> None:
    net = Net(10, seed=7, latency_s=0.1, loss=0.1)
    net.run(120.0)
    assert not any(node.events(Died) for node in net.nodes.values())


def test_one_broken_link_is_bridged_by_the_others() -> None:
    net = Net(5)
    net.cut = lambda a, b: {a, b} == {A, B}
    net.run(40.0)
    assert not any(node.events(Suspected) or node.events(Died) for node in net.nodes.values())
    assert any(what(effect) is PingRequest for _, effect in net.nodes[A].seen)


# --- the silent are found ---


@pytest.mark.parametrize("rests", [False, True])
@pytest.mark.parametrize("count", [2, 8, 64])
def test_stopped_process_is_dead_to_all_within_the_bound(count: int, rests: bool) -> None:
    net = Net(count, latency_s=0.02, rests=rests)
    net.run(3.0)
    net.stop(A)
    net.run(15.0)
    died = net.died(A)
    assert set(died) == set(net.nodes) - {A}
    last = max(died.values()) - 3.0
    assert last <= detection_bound_s(count, told=True) + 2 * 0.04  # words under way when it stopped, and a watcher's
    assert min(died.values()) - 3.0 <= detection_bound_s(CLOSE_PEERS) + 0.04 < 8.5
    assert {effect for node in net.nodes.values() for _, effect in node.events(Died)} == {Died(peer=A)}


def test_slow_watch_finds_the_dead_as_many_times_later_and_asks_as_many_times_less() -> None:
    sent = {}
    for pace in (1.0, 5.0):
        net = Net(4)
        for node in net.nodes.values():
            node.machine.pace = pace
        net.run(30.0)
        sent[pace] = net.sent
        net.stop(A)
        net.run(30.0 + detection_bound_s(4, pace=pace) + 0.04)
        assert set(net.died(A)) == set(net.nodes) - {A}
        assert min(net.died(A).values()) - 30.0 > pace * (1.0 + 1.5 + 3.0)
    assert 4.5 <= sent[1.0] / sent[5.0] <= 5.5


def test_one_that_falls_silent_with_all_that_watch_it_closely_costs_another_answer() -> None:
    net = Net(64, latency_s=0.02)
    net.run(3.0)
    ring = sorted(net.nodes)
    victims = ring[20 : 20 + CLOSE_PEERS + 1]
    for victim in victims:
        net.stop(victim)
    net.run(20.0)
    died = net.died(victims[-1])
    assert set(died) == set(net.nodes) - set(victims)
    more_s = ACK_DEADLINE_S + TICK_S
    assert max(died.values()) - 3.0 <= detection_bound_s(64, told=True) + more_s + 2 * 0.04
    assert min(died.values()) - 3.0 > detection_bound_s(CLOSE_PEERS), "else somebody else watched it closely"


def test_one_of_which_nobody_tells_is_found_by_each_for_itself() -> None:
    net = Net(24, latency_s=0.02)
    net.run(3.0)
    net.stop(A)
    tell = net._carry_out
    quiet = lambda me, effects: tell(me, [e for e in effects if not isinstance(e, Suspected)])  # noqa: E731
    net._carry_out = quiet  # type: ignore[method-assign]
    net.run(3.0 + 24 / PROBES_PER_S + 6.4 + 0.04)
    assert set(net.nodes[ME].machine.in_state(State.DEAD)) == {A}
    assert all(node.machine.state_of(A) is State.DEAD for me, node in net.nodes.items() if me != A)


def test_half_of_the_net_dying_at_once_is_found_within_the_bound() -> None:
    net = Net(16, latency_s=0.02)
    net.run(3.0)
    victims = [name(index) for index in range(8)]
    for victim in victims:
        net.kill(victim)
    net.run(3.0 + detection_bound_s(16) + 0.1)
    for victim in victims:
        assert set(net.died(victim)) == set(net.nodes) - set(victims)
        assert max(net.died(victim).values()) - 3.0 <= detection_bound_s(16) + 0.04


def test_partition_is_seen_by_both_sides_and_heals() -> None:
    net = Net(5)
    left, right = {ME, A, B}, {C, D}
    net.run(3.0)
    net.cut = lambda a, b: (a in left) != (b in left)
    net.run(11.0)
    for side, other in ((left, right), (right, left)):
        for peer in other:
            assert set(net.died(peer)) == side
    net.cut = lambda a, b: False
    net.run(11.0 + membership.DEAD_PROBE_INTERVAL_S + 1.0)
    for me, node in net.nodes.items():
        assert node.machine.in_state(State.ALIVE) == tuple(sorted(set(net.nodes) - {me}))


def test_steps_against_a_silent_peer_come_in_order() -> None:
    machine = watching(A, B, C, D, E)
    wanted = run_ticks(machine, 0.0, 9.0, talking=(B, C, D, E))
    to_a = [(at, effect) for at, effect in wanted if getattr(effect, "peer", None) == A]
    requests = [(at, effect) for at, effect in wanted if isinstance(effect, Say) and what(effect) is PingRequest]
    assert to_a[0][0] == pytest.approx(1.0)
    ping = said(to_a[0][1], Ping)
    first = [effect for at, effect in requests if at < 4.0]
    assert [at for at, _ in requests][:3] == pytest.approx([2.5] * 3)
    assert len({effect.peer for effect in first} & {B, C, D, E}) == len(first) == 3
    assert all(said(effect, PingRequest) == PingRequest(target=A, nonce=ping.nonce) for effect in first)
    # They are asked again while it is suspected, and once more when it is given up.
    assert {round(at) for at, _ in requests[3:]} == {4, 5, 6, 7}
    marks = {type(effect): at for at, effect in to_a if isinstance(effect, Suspected | Died)}
    assert marks == {Suspected: pytest.approx(4.0), Died: pytest.approx(7.0)}
    asked_while_suspect = [at for at, effect in to_a if what(effect) is Ping and 4.0 <= at < 7.0]
    assert len(asked_while_suspect) == 3


def test_suspect_that_answers_is_revived() -> None:
    machine = watching(A)
    run_ticks(machine, 0.0, 5.0)
    assert machine.state_of(A) is State.SUSPECT
    assert machine.on_ack(A, 1, 0, 5.0) == [Revived(peer=A)]
    run_ticks(machine, 5.0, 15.0)
    assert machine.state_of(A) is State.DEAD
    assert machine.alive() == ()
    assert machine.peer_seen(A, 0, 15.0) == [Revived(peer=A)]


# --- broken connections ---


def without_link(*peers: PeerId, to: PeerId) -> MembershipMachine:
    machine = MembershipMachine(ME, random.Random(1), has_link=lambda peer: peer != to)
    for peer in peers:
        machine.peer_seen(peer, 0, 0.0)
    machine.tick(0.0)
    return machine


def asked_in(effects: list[Effect]) -> dict[PeerId, int]:
    """Who is asked to ping for this node, and the nonce of each request."""
    return {e.peer: e.message.nonce for e in effects if isinstance(e, Say) and isinstance(e.message, PingRequest)}


def test_lost_connection_has_others_asked_at_once() -> None:
    machine = without_link(A, B, to=A)
    ping, request = machine.connection_lost(A, 0.2)
    assert request == Say(B, PingRequest(target=A, nonce=said(ping, Ping).nonce))
    assert machine.connection_lost(A, 0.3) == []  # its other connections, breaking with the first
    wanted = run_ticks(machine, 0.2, 7.0, talking=(B,))
    (died,) = [at for at, effect in wanted if effect == Died(peer=A)]
    assert died == pytest.approx(0.2 + INDIRECT_DEADLINE_S + SUSPICION_S, abs=3 * TICK_S)


def test_refused_connection_is_death_at_once() -> None:
    machine = watching(A, B)
    died, request = machine.connection_lost(B, 0.8, confirmed=True)
    assert died == Died(peer=B)
    nonce = said(request, PingRequest).nonce  # a firewall may refuse as well
    assert machine.connection_lost(B, 0.9, confirmed=True) == []
    assert machine.state_of(B) is State.DEAD
    assert machine.on_indirect_ack(A, B, nonce, 1.0) == [Revived(peer=B)]


@pytest.mark.parametrize("nacks_first", [True, False])
def test_broken_connection_is_confirmed_when_nobody_asked_has_one(nacks_first: bool) -> None:
    machine = without_link(A, B, C, to=A)
    asked = asked_in(machine.connection_lost(A, 0.2))
    assert asked.keys() == {B, C}
    effects: list[Effect] = []
    if not nacks_first:
        effects += machine.unreachable(A, 0.5)
    for via, nonce in asked.items():
        assert not effects
        effects += machine.on_nack(via, A, nonce, 0.6)
    if nacks_first:
        assert not effects, "the connection may still be re-made"
        effects += machine.unreachable(A, 0.7)
    assert effects[0] == Died(peer=A)


def test_connection_that_cannot_be_remade_is_no_death_while_one_may_still_have_one() -> None:
    machine = without_link(A, B, C, to=A)
    asked = asked_in(machine.connection_lost(A, 0.2))
    assert machine.on_nack(B, A, asked[B], 0.3) == []
    assert machine.unreachable(A, 0.4) == []
    assert machine.on_nack(B, A, asked[B], 0.5) == []  # it said so before
    assert machine.on_nack(D, A, asked[B], 0.5) == []  # it was not asked
    assert machine.on_nack(C, A, asked[C] + 1, 0.5) == []  # of another time
    assert machine.state_of(A) is State.ALIVE
    machine.on_indirect_ack(C, A, asked[C], 0.6)
    assert machine.on_nack(C, A, asked[C], 0.7) == []
    assert machine.state_of(A) is State.ALIVE


def test_alone_with_a_peer_that_cannot_be_reached_there_is_nobody_to_confirm_it() -> None:
    machine = without_link(A, to=A)
    machine.connection_lost(A, 0.2)
    run_ticks(machine, 0.2, 1.8)
    assert machine.unreachable(A, 1.9) == []
    wanted = run_ticks(machine, 1.9, 8.0)
    assert [effect for _, effect in wanted if isinstance(effect, Died)] == [Died(peer=A)]


@pytest.mark.parametrize("count", [3, 4, 8])
def test_pair_whose_link_breaks_and_cannot_be_remade_lives_on_through_others(count: int) -> None:
    net = Net(count, latency_s=0.02)
    net.run(3.0)
    net.break_link(A, B)
    net.run(60.0)
    assert not any(node.events(Suspected) or node.events(Died) for node in net.nodes.values())
    net.kill(A)
    for other in set(net.nodes) - {A, B}:
        net.nodes[other].machine.connection_lost(A, net.now, confirmed=True)
        net.unlinked.add(frozenset({other, A}))
    net.run(70.0)
    assert net.nodes[B].events(Died)[-1][0] - 60.0 < 1.5, "those who know better say so"


def test_machine_that_vanishes_with_all_its_connections_is_dead_as_soon_as_they_cannot_be_remade() -> None:
    net = Net(5, latency_s=0.02)
    net.run(3.0)
    net.kill(A)
    for other in set(net.nodes) - {A}:
        net.break_link(other, A)
    net.run(7.0)
    died = net.died(A)
    assert set(died) == set(net.nodes) - {A}
    assert max(died.values()) - 3.0 < 3.0


# --- heard through others ---


def test_peer_that_is_heard_through_others_only_is_watched() -> None:
    machine = without_link(B, to=A)
    run_ticks(machine, 0.0, 0.9, talking=(B,))
    assert machine.heard_through(A, 0, 1.0) == [Revived(peer=A)]
    run_ticks(machine, 1.0, 1.4, talking=(B,))
    assert machine.alive() == (A, B)
    assert machine.heard_through(A, 0, 1.5) == []
    assert machine.heard_through(ME, 0, 1.5) == []
    wanted = run_ticks(machine, 1.5, 9.0, talking=(B,))
    assert asked_in([effect for _, effect in wanted]).keys() == {B}
    (died,) = [at for at, effect in wanted if effect == Died(peer=A)]
    assert died <= 1.5 + detection_bound_s(2)


def test_words_of_the_dead_that_others_pass_on_are_looked_into() -> None:
    machine = without_link(A, B, to=A)
    machine.connection_lost(A, 0.1, confirmed=True)
    assert machine.heard_through(A, 0, 0.2) == []  # it may have been on its way; and others are being asked
    _, request = machine.heard_through(A, 0, 0.9)
    assert machine.state_of(A) is State.DEAD
    nonce = said(request, PingRequest).nonce
    assert machine.heard_through(A, 0, 1.0) == []
    assert machine.on_indirect_ack(B, A, nonce, 1.1) == [Revived(peer=A)]


def test_silence_over_a_link_is_noticed_though_others_vouch() -> None:
    net = Net(4, latency_s=0.02)
    net.run(3.0)
    net.cut = lambda a, b: {a, b} == {A, B}
    noticed_s = 1.0 + SILENCE_S
    net.run(3.0 + noticed_s + 0.1)
    for _ in range(20):
        net.run(net.now + 0.5)
        for me, node in net.nodes.items():
            assert node.machine.silent(net.now) == {A: {B}, B: {A}}.get(me, set())
            assert len(node.machine.alive()) == 3
    net.cut = lambda a, b: False
    net.run(net.now + 2.5)
    assert not any(node.machine.silent(net.now) for node in net.nodes.values())


def test_those_who_lack_a_peer_themselves_are_asked_after_it_last() -> None:
    others = [name(index) for index in range(2, 9)]
    machine = without_link(A, *others, to=A)
    machine.can_ask = lambda via, target: via in others[3:6]
    assert asked_in(machine.connection_lost(A, 0.2)).keys() == set(others[3:6])
    machine.can_ask = lambda via, target: via == others[3]
    vias = list(asked_in(machine.connection_lost(A, 0.9)))
    assert len(vias) == 3
    assert vias[0] == others[3]


def test_request_about_a_peer_without_a_link_is_answered_with_that() -> None:
    machine = without_link(A, B, to=B)
    assert machine.on_ping_request(A, B, 77, 0.5) == []  # it may be made again
    machine.unreachable(B, 0.6)
    assert machine.on_ping_request(A, B, 77, 0.7) == [Say(A, Nack(target=B, nonce=77))]
    machine.peer_seen(B, 0, 0.8)
    assert machine.on_ping_request(A, B, 77, 0.9) == []
    machine.connection_lost(B, 1.0, confirmed=True)
    assert machine.on_ping_request(A, B, 77, 1.1) == [Say(A, Nack(target=B, nonce=77))]
    assert machine.on_ping_request(A, C, 77, 1.2) == []


# --- suspicion and refutation ---


def test_accusation_of_another_makes_us_look_but_not_believe() -> None:
    machine = watching(A, B)
    assert machine.on_suspicion(A, 0, 0.1) == []  # heard just now
    assert machine.on_suspicion(A, 0, 0.9) == []  # and within the probe interval: no storm of pings comes of a word
    machine.tick(0.99)
    (ping,) = machine.on_suspicion(A, 0, 1.05)
    assert said(ping, Ping)
    assert machine.state_of(A) is State.ALIVE
    assert machine.on_suspicion(A, 0, 1.1) == []  # asking already
    machine.peer_seen(A, 3, 1.2)
    machine.tick(2.15)
    assert machine.on_suspicion(A, 2, 2.22) == []  # refuted before
    assert [what(effect) for effect in machine.on_suspicion(A, 3, 2.23)] == [Ping]


def test_liar_that_accuses_everybody_has_each_ping_each_once_an_interval_and_no_more() -> None:
    net = Net(16)
    net.run(5.0)
    before = net.sent
    for step in range(100):
        for me in net.nodes:
            for peer in net.nodes:
                if peer not in (me, A):
                    net._carry_out(me, net.nodes[me].machine.on_suspicion(peer, 99, net.now))
        net.run(5.0 + (step + 1) * 0.1)
    pairs = 16 * 15 / 2
    refuted = sum(len(node.events(Refute)) for node in net.nodes.values()) * 15
    assert net.sent - before - refuted <= 2 * 2 * pairs * 10
    assert not any(node.events(Suspected) for node in net.nodes.values())


def test_accused_refutes_with_a_newer_incarnation_but_does_not_flood() -> None:
    machine = watching(A)
    assert machine.on_suspicion(ME, 0, 1.0) == [Refute(incarnation=1)]
    assert machine.on_suspicion(ME, 0, 1.1) == []
    assert machine.on_suspicion(ME, 1, 1.2) == []
    machine.tick(1.6)
    assert machine.on_suspicion(ME, 1, 1.7) == [Refute(incarnation=2)]
    machine.tick(2.3)
    assert machine.on_suspicion(ME, 7, 2.4) == [Refute(incarnation=8)]  # from a former life of ours
    machine.tick(3.0)
    assert machine.on_suspicion(ME, 2**62, 3.1) == []


def test_refutation_clears_a_suspect_only_if_it_is_newer() -> None:
    machine = watching(A)
    machine.peer_seen(A, 4, 0.0)
    run_ticks(machine, 0.0, 4.5)
    assert machine.state_of(A) is State.SUSPECT
    assert machine.on_refutation(A, 4, 4.5) == []
    assert machine.on_refutation(A, 5, 4.5) == [Revived(peer=A)]


def test_refutation_of_the_dead_is_checked_with_a_ping() -> None:
    machine = watching(A)
    machine.connection_lost(A, 0.1, confirmed=True)
    assert machine.on_refutation(A, 1, 0.2) == []  # it may have been on its way
    assert [what(effect) for effect in machine.on_refutation(A, 2, 0.7)] == [Ping]
    assert machine.state_of(A) is State.DEAD


def test_suspect_hears_of_it_and_refutes_through_the_net() -> None:
    net = Net(4)
    net.run(2.0)
    # C hears all and is heard by ME only: A and B suspect... nobody, since ME vouches. Cut ME off as well for a
    # while, in one direction: C still hears, and refutes once its words get through again.
    net.cut = lambda a, b: a == C
    net.run(6.5)
    assert net.nodes[A].machine.state_of(C) is State.SUSPECT
    net.cut = lambda a, b: False
    net.run(8.0)
    assert net.nodes[C].machine.incarnation >= 1
    assert not net.died(C)
    assert net.nodes[A].machine.state_of(C) is State.ALIVE


# --- asking for others ---


def test_ping_request_is_relayed_and_its_answer_comes_back() -> None:
    machine = watching(A, B)
    (ping,) = machine.on_ping_request(A, B, 77, 0.5)
    nonce = said(ping, Ping).nonce
    assert ping == Say(B, Ping(nonce=nonce, incarnation=machine.incarnation))
    assert machine.on_ack(A, nonce, 0, 0.6) == []  # A cannot answer for B
    assert machine.on_ack(B, nonce, 0, 0.7) == [Say(A, Ack(nonce=77, incarnation=machine.incarnation, about=B))]
    assert machine.on_ack(B, nonce, 0, 0.8) == []


def test_ping_request_answer_that_comes_too_late_is_dropped() -> None:
    machine = watching(A, B)
    (ping,) = machine.on_ping_request(A, B, 77, 0.5)
    run_ticks(machine, 0.5, 2.2)
    assert machine.on_ack(B, said(ping, Ping).nonce, 0, 2.2) == []


def test_ping_request_makes_us_nobodys_reflector() -> None:
    machine = watching(A, B)
    assert machine.on_ping_request(A, C, 1, 0.1) == []
    assert machine.on_ping_request(C, A, 1, 0.1) == []
    assert machine.on_ping_request(A, A, 1, 0.1) == []
    sent = [machine.on_ping_request(A, B, nonce, 0.1) for nonce in range(100)]
    assert sum(map(len, sent)) == membership.RELAYS_PER_PEER_LIMIT
    assert len(machine.on_ping_request(B, A, 1, 0.1)) == 1


def test_indirect_ack_counts_only_from_those_asked_about_this_probe() -> None:
    machine = watching(A, B, C, D, E)
    wanted = run_ticks(machine, 0.0, 2.6, talking=(B, C, D, E))
    asked = asked_in([effect for _, effect in wanted])
    nonce = next(iter(asked.values()))
    (bystander,) = {B, C, D, E} - asked.keys()
    liar = sorted(asked)[0]

    def suspected_after(via: PeerId, about: PeerId, nonce: int) -> bool:
        other = watching(A, B, C, D, E)
        run_ticks(other, 0.0, 2.6, talking=(B, C, D, E))
        other.on_indirect_ack(via, about, nonce, 2.7)
        return any(isinstance(effect, Suspected) for _, effect in run_ticks(other, 2.7, 4.2, talking=(B, C, D, E)))

    assert not suspected_after(liar, A, nonce)
    assert suspected_after(bystander, A, nonce)
    assert suspected_after(liar, A, nonce + 1)
    assert suspected_after(liar, B, nonce)


def test_table_of_peers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "PEER_LIMIT", 2)
    machine = watching(A, B, C)
    assert machine.alive() == (A, B)
    assert machine.peer_seen(ME, 0, 0.1) == []
    machine.forget(A)
    machine.peer_seen(C, 0, 0.2)
    assert machine.alive() == (B, C)


def test_pings_per_tick_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "CLOSE_PEERS", 0)
    machine = watching(*(name(index) for index in range(1, 500)))
    until = probe_interval_s(499) + ACK_DEADLINE_S - TICK_S
    per_tick = [len(machine.tick(step * TICK_S)) for step in range(1, round(until / TICK_S))]
    assert max(per_tick) == membership.PROBES_PER_TICK_LIMIT


def test_longest_overdue_are_pinged_first_where_a_tick_cannot_ping_all(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = membership.PROBES_PER_TICK_LIMIT
    monkeypatch.setattr(membership, "CLOSE_PEERS", 0)
    machine = MembershipMachine(ME, random.Random(1))
    peers = [name(index) for index in range(1, 2 * limit + 1)]
    for step, peer in enumerate([*peers, *reversed(peers)]):
        machine.peer_seen(peer, 0, 0.001 * step)
    due = machine.tick(0.001 * 4 * limit + probe_interval_s(2 * limit))
    pinged = [effect.peer for effect in due if isinstance(effect, Say) and what(effect) is Ping]
    assert pinged == list(reversed(peers))[:limit]


def test_suspect_is_pinged_in_the_tick_that_suspects_it_and_one_given_up_is_not() -> None:
    machine = watching(A, B)
    ticks = [machine.tick(step * TICK_S) for step in range(90)]
    suspected = next(effects for effects in ticks if any(isinstance(effect, Suspected) for effect in effects))
    died = next(effects for effects in ticks if any(isinstance(effect, Died) for effect in effects))
    assert {e.peer for e in suspected if isinstance(e, Say) and what(e) is Ping} == {A, B}
    assert not [effect for effect in died if what(effect) is Ping]


# --- our own sleep ---


def test_own_stall_blames_nobody() -> None:
    for mail_first in (True, False):
        net = Net(6)
        net.run(3.0)
        net.stop(A)
        net.run(60.0)
        net.resume(A, mail_first=mail_first)
        net.run(90.0)
        assert not net.nodes[A].events(Suspected)
        assert not net.nodes[A].events(Died)
        assert all(node.machine.state_of(A) is State.ALIVE for key, node in net.nodes.items() if key != A)


def test_own_stall_is_excused_every_time_if_the_peer_spoke_between() -> None:
    machine = watching(A, B)
    now = 0.0
    for _ in range(5):
        run_ticks(machine, now, now + 1.5)  # asked, not yet answered
        assert {what(effect) for effect in machine.tick(now + 30.0)} == {Ping}
        now += 30.1
        for peer in (A, B):
            machine.peer_seen(peer, 0, now)
        machine.tick(now)


def test_own_stall_during_a_suspicion_restarts_it() -> None:
    machine = watching(A)
    run_ticks(machine, 0.0, 4.5)
    assert machine.state_of(A) is State.SUSPECT
    assert [what(effect) for effect in machine.tick(20.0)] == [Ping]
    wanted = run_ticks(machine, 20.0, 30.0)
    (died,) = [at for at, effect in wanted if effect == Died(peer=A)]
    assert died == pytest.approx(20.0 + SUSPICION_S + WAITED_TIMES * LATE_LIMIT_S, abs=TICK_S)


def test_always_late_machine_still_finds_its_dead() -> None:
    machine = watching(A, B)
    now = 0.0
    for _ in range(20):
        now += 1.5  # each time a stall
        machine.peer_seen(B, 0, now)
        machine.tick(now)
    assert machine.state_of(A) is State.DEAD
    assert machine.state_of(B) is State.ALIVE


# --- walks ---


@given(seed=st.integers(0, 2**32 - 1), count=st.integers(2, 7), faulty=st.integers(0, 3))
@example(seed=0, count=7, faulty=3)
@settings(FUZZ, max_examples=40)
def test_walk_responsive_peers_never_die_and_silent_ones_always_do(seed: int, count: int, faulty: int) -> None:
    """Some nodes stop, go on and die at random; the others never lose a message and never pause."""
    rng = random.Random(seed)
    net = Net(count, seed=seed, latency_s=rng.uniform(0, 0.15))
    bad = [name(index) for index in range(min(faulty, count - 1))]
    silent_since: dict[PeerId, float] = {}
    resumed: set[PeerId] = set()
    for _ in range(12):
        net.run(net.now + rng.uniform(0.0, 10.0))
        for peer, since in silent_since.items():
            late_s = LATE_LIMIT_S if peer in resumed else 0.0  # what was asked of it while it was stopped took so long
            if net.now - since > detection_bound_s(count, late_s) + 0.3:
                watchers = [node for key, node in net.nodes.items() if key not in bad]
                assert all(node.machine.state_of(peer) is State.DEAD for node in watchers)
        if bad:
            resumed |= _disturb(net, rng.choice(bad), rng, silent_since)
    for peer in set(net.nodes) - set(bad):
        assert net.died(peer) == {}, f"{peer} answered all the time"


def _disturb(net: Net, peer: PeerId, rng: random.Random, silent_since: dict[PeerId, float]) -> set[PeerId]:
    """Stop a peer, have it go on, or kill it; who goes on."""
    node = net.nodes[peer]
    if node.killed:
        return set()
    if rng.random() < 0.15:
        net.kill(peer)
        silent_since.setdefault(peer, net.now)
    elif node.running:
        net.stop(peer)
        silent_since[peer] = net.now
    else:
        net.resume(peer, mail_first=rng.random() < 0.5)
        del silent_since[peer]
        return {peer}
    return set()


def test_own_sleep_makes_nobody_silent() -> None:
    machine = watching(A, B)
    assert machine.silent(1.4) == frozenset()
    machine.tick(30.0)
    assert machine.silent(30.0) == frozenset()
    run_ticks(machine, 30.0, 33.5, talking=(B,))
    assert machine.silent(33.5) == frozenset(), "it waits for as long as it was late itself"
    run_ticks(machine, 33.5, 34.5, talking=(B,))
    assert machine.silent(34.5) == {A}


def test_peer_that_answers_late_is_not_silent_until_it_has_had_its_time() -> None:
    """So that nobody is asked to pass messages on to one that is merely slow, over and over."""
    machine = watching(A)
    ((at, ping),) = run_ticks(machine, 0.0, 1.0)
    run_ticks(machine, 1.0, 2.0)
    assert machine.silent(at + SILENCE_S + TICK_S) == {A}, "it was never late"
    machine.on_ack(A, said(ping, Ping).nonce, 0, 2.0)
    assert machine.silent(2.0) == frozenset()
    ((at, ping),) = run_ticks(machine, 2.0, 3.0)
    run_ticks(machine, 3.0, 4.4)
    assert machine.silent(at + 1.0) == frozenset(), "it took so long before"
    assert machine.silent(at + 1.4) == {A}


# --- crowds of strangers ---


def machine_of(*first: PeerId, links: bool = True) -> MembershipMachine:
    return MembershipMachine(me=ME, rng=random.Random(1), has_link=lambda peer: links, first=lambda: first)


def test_who_comes_first_is_watched_however_many_strangers_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "PEER_LIMIT", 3)
    machine = machine_of(A, B)
    for stranger in (C, D, E):
        machine.peer_seen(stranger, 0, 0.0)
    machine.connection_lost(D, 1.0, confirmed=True)
    machine.peer_seen(name(9), 0, 2.0)
    assert machine.state_of(D) is None, "the dead give way to anybody"
    machine.peer_seen(name(10), 0, 2.0)
    assert machine.state_of(name(10)) is None, "the living to no stranger"
    machine.peer_seen(A, 0, 3.0)
    machine.heard_through(B, 0, 4.0)
    assert machine.alive() == tuple(sorted((A, B, name(9)))), "and to who comes first those heard of longest ago"


def test_among_many_members_who_is_silent_has_longer_however_many_strangers_there_are() -> None:
    for members, strangers, silence_s in ((3, 100, SILENCE_S), (3 * CROWD, 0, 3 * SILENCE_S)):
        first = [name(number) for number in range(100, 100 + members)]
        machine = machine_of(*first)
        for peer in (*first, *(name(number) for number in range(200, 200 + strangers))):
            machine.peer_seen(peer, 0, 0.0)
        machine.connection_lost(first[0], 1.0)
        assert machine.silent(1.0 + silence_s - TICK_S) == frozenset()
        assert machine.silent(1.0 + silence_s + TICK_S) == {first[0]}


def test_members_are_probed_as_often_as_without_a_crowd() -> None:
    crowd = [name(number) for number in range(100, 356)]
    machine = machine_of(A)
    for peer in (A, *crowd):
        machine.peer_seen(peer, 0, 0.0)
    pinged: dict[PeerId, float] = {}
    for tick in range(25):
        for effect in machine.tick(tick * TICK_S):
            if isinstance(effect, Say) and what(effect) is Ping:
                pinged.setdefault(effect.peer, tick * TICK_S)
    assert pinged[A] == pytest.approx(probe_interval_s(1), abs=2 * TICK_S)
    assert set(pinged) == {A, *crowd[: CLOSE_PEERS - 1]}, "of strangers only the next ones around the ring"
    assert A in machine.silent(probe_interval_s(1) + SILENCE_S + 2 * TICK_S)
    assert crowd[-1] not in machine.silent(probe_interval_s(1) + SILENCE_S + 2 * TICK_S)


def test_strangers_do_not_come_between_members_on_their_ring() -> None:
    """Each member is watched closely by members, whatever keys strangers make for themselves."""
    members = [name(index) for index in range(100, 900, 50)]
    machine = machine_of(ME, *members)
    crowd = [name(index) for index in range(1, 80)]
    for peer in (*members, *crowd):
        machine.peer_seen(peer, 0, 0.0)
    wanted = [(at, effect.peer) for at, effect in run_ticks(machine, 0.0, 2.1) if isinstance(effect, Say)]
    assert {peer for _, peer in wanted} == {*members[:CLOSE_PEERS], *crowd[:CLOSE_PEERS]}


def test_members_are_asked_about_the_dead_before_strangers() -> None:
    machine = machine_of(A, B, C, D)
    for peer in (A, B, C, D, *(name(number) for number in range(100, 150))):
        machine.peer_seen(peer, 0, 0.0)
    effects = machine.connection_lost(A, 0.1, confirmed=True)
    assert asked_in(effects).keys() == {B, C, D}


def test_strangers_leave_room_for_the_requests_of_members(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "STRANGERS_RELAY_LIMIT", 4)
    machine = machine_of(A, B)
    for peer in (A, B, C):
        machine.peer_seen(peer, 0, 0.0)
    asked = [machine.on_ping_request(C, B, nonce, 0.0) for nonce in range(10)]
    assert sum(map(bool, asked)) == 4
    assert machine.on_ping_request(A, B, 99, 0.0)


# --- overload is not death ---


def late_ticks(machine: MembershipMachine, start: float, end: float, late_s: float) -> float:
    """Tick as a process does that has too much to do; until when."""
    now = start
    while now < end:
        now += TICK_S + late_s
        machine.tick(now)
    return now


def first_pings(machine: MembershipMachine, until: float) -> dict[PeerId, Ping]:
    """The pings that it sends up to then, by peer."""
    said_to = (effect for _, effect in run_ticks(machine, 0.0, until) if isinstance(effect, Say))
    return {effect.peer: said(effect, Ping) for effect in said_to}


def answered_late(net: Net, peer: PeerId, late_s: float) -> None:
    """All that `peer` says takes so much longer from now on."""
    node, send = net.nodes[peer], net._send

    def slowly(source: PeerId, target: PeerId, deliver: Deliver) -> None:
        if peer in (source, target) and node.running:
            net.at(net.now + late_s, lambda: send(source, target, deliver))
        else:
            send(source, target, deliver)

    net._send = slowly  # type: ignore[method-assign]


def test_process_that_runs_late_itself_waits_longer_for_others() -> None:
    """Half a second late, it waits three quarters longer in each of three steps."""
    quick, late = watching(A), watching(A)
    wanted = run_ticks(quick, 0.0, 12.0)
    (at,) = [at for at, effect in wanted if isinstance(effect, Died)]
    assert at == pytest.approx(7.0)
    now = 0.0
    while late.state_of(A) is not State.DEAD:
        now += TICK_S + 0.5
        late.tick(now)
    assert at + 3 * WAITED_TIMES * 0.5 - 0.6 < now < at + 3 * WAITED_TIMES * 0.5 + 3 * 0.6  # seen a tick late, each


def test_lag_is_forgotten_once_it_is_over() -> None:
    machine = watching(A)
    until = late_ticks(machine, 0.0, 6.0, 0.9)
    assert machine.lag.waited_s(until) == pytest.approx(WAITED_TIMES * 0.9)
    run_ticks(machine, until, until + 10.0, talking=(A,))
    assert machine.lag.waited_s(until + 10.0) == 0.0
    since = until + 10.0
    wanted = run_ticks(machine, since, since + 9.0)
    (at,) = [at for at, effect in wanted if isinstance(effect, Died)]
    assert at - since <= detection_bound_s(1)


def test_process_that_gets_its_turn_every_few_seconds_is_suspected_once_at_most() -> None:
    net = Net(8, latency_s=0.01)
    net.run(3.0)
    for turn in range(20):
        net.stop(A)
        net.run(net.now + 4.5)
        net.resume(A)
        net.run(net.now + 0.4)
        if turn == 0:
            learnt_at = net.now
    accused = [at for node in net.nodes.values() for at, effect in node.events(Suspected) if at > learnt_at]
    assert accused == []
    assert net.died(A) == {}


def test_one_that_answered_late_is_found_within_the_bound_that_this_has() -> None:
    net = Net(8, latency_s=0.01)
    net.run(3.0)
    answered_late(net, A, 1.0)
    net.run(30.0)
    net.kill(A)
    net.run(60.0)
    died = net.died(A)
    assert set(died) == set(net.nodes) - {A}
    assert max(died.values()) - 30.0 <= detection_bound_s(8, late_s=2.2) + 2.2  # and its last words


def test_where_most_answer_late_all_are_waited_for_longer_and_where_one_does_only_that_one() -> None:
    crowd = [name(index) for index in range(1, 6)]

    def waited_s(late: int) -> float:
        """How long after a ping of the last one, which never answered, others are asked, if some are late."""
        machine = watching(*crowd)
        machine.awaited = lambda: crowd
        pings = first_pings(machine, 1.5)
        for number, peer in enumerate(crowd[:-1]):
            if number >= late:
                machine.on_ack(peer, pings[peer].nonce, 0, 1.5)
        run_ticks(machine, 1.5, 3.0)
        for peer in crowd[:late]:
            machine.on_ack(peer, pings[peer].nonce, 0, 3.0)
        machine.peer_seen(crowd[-1], 0, 3.0)
        wanted = [(at, e) for at, e in run_ticks(machine, 3.0, 9.0, talking=tuple(crowd[:-1])) if isinstance(e, Say)]
        asked = next(at for at, effect in wanted if effect.peer == crowd[-1] and what(effect) is Ping)
        return next(at for at, effect in wanted if what(effect) is PingRequest) - asked

    assert waited_s(late=1) == pytest.approx(ACK_DEADLINE_S, abs=TICK_S)
    assert waited_s(late=4) > ACK_DEADLINE_S + 0.3


def test_anybody_is_waited_for_longer_where_most_answer_late_or_this_node_does_and_not_where_one_does() -> None:
    crowd = [name(index) for index in range(1, 6)]

    def late_s(late: int) -> float:
        machine = watching(*crowd)
        machine.awaited = lambda: crowd
        pings = first_pings(machine, 1.15)
        for peer in crowd[late:]:
            machine.on_ack(peer, pings[peer].nonce, 0, 1.2)
        run_ticks(machine, 1.25, 2.4)
        for peer in crowd[:late]:
            machine.on_ack(peer, pings[peer].nonce, 0, 2.5)
        return machine.late_s(2.5)

    assert late_s(0) == late_s(1) == 0.0
    assert late_s(4) == pytest.approx(WAITED_TIMES * 1.5)
    stopped = watching(*crowd)
    stopped.awaited = lambda: crowd
    pings = first_pings(stopped, 1.15)
    stopped.tick(3.15)
    own_s = stopped.late_s(3.15)
    assert 1.5 < own_s <= 2.0 * WAITED_TIMES
    for peer in crowd:  # they lay unread
        stopped.on_ack(peer, pings[peer].nonce, 0, 3.15)
    assert stopped.late_s(3.15) == pytest.approx(own_s, abs=0.5), "its own lag is in what it took to hear, once"


def test_where_some_come_first_strangers_that_answer_late_have_nobody_waited_for_longer() -> None:
    members, strangers = [name(index) for index in range(1, 4)], [name(index) for index in range(4, 24)]
    for first in ((), members):
        machine = watching(*members, *strangers)
        machine.first, machine.awaited = lambda first=first: first, lambda: [*members, *strangers]  # type: ignore[misc]
        pings = first_pings(machine, 1.15)
        for peer in members:
            machine.on_ack(peer, pings[peer].nonce, 0, 1.2)
        run_ticks(machine, 1.25, 2.4)
        for peer in strangers:
            machine.on_ack(peer, pings[peer].nonce, 0, 2.5)
        assert (machine.late_s(2.5) > 0) == (not first)


def test_who_took_long_to_be_linked_is_waited_for_as_long_from_the_first_ping_on() -> None:
    """Of one that is new no answer is known, and where all are starting all are slow."""

    def steps(took_s: float) -> list[float]:
        """When A is asked after through others, when it is suspected, and when it is dead, after the first ping."""
        machine = watching(A, B)
        machine.link_made(A, took_s, 0.0)
        said_of_a = [
            (at, what(effect))
            for at, effect in run_ticks(machine, 0.0, 40.0, talking=(B,))
            if getattr(effect, "peer", None) == A or what(effect) is PingRequest
        ]
        first = next(at for at, kind in said_of_a if kind is Ping)
        return [next(at for at, one in said_of_a if one is kind) - first for kind in (PingRequest, Suspected, Died)]

    assert steps(took_s=0.1) == pytest.approx([1.5, 3.0, 6.0], abs=4 * TICK_S)
    asked, suspected, dead = steps(took_s=3.5)
    assert asked == pytest.approx(WAITED_TIMES * 3.5 * 0.5 ** (1.1 / 5), abs=0.2)
    assert suspected - asked == pytest.approx(WAITED_TIMES * 3.5 * 0.5 ** (5.7 / 5), abs=0.2)
    assert dead - suspected == pytest.approx(SUSPICION_S, abs=2 * TICK_S)
    assert dead <= detection_bound_s(2, late_s=3.5)


def test_suspect_is_asked_no_sooner_again_than_its_answers_take() -> None:
    def questions(late_s: float) -> int:
        """How often a suspect is pinged in its time, where another answers so late."""
        machine = watching(A, B)
        effects = run_ticks(machine, 0.0, 4.2, talking=(B,))
        assert machine.state_of(A) is State.SUSPECT
        machine.link_made(B, late_s, 4.2)
        pings = run_ticks(machine, 4.2, 6.6, talking=(B,))
        assert Suspected(peer=A, incarnation=0) in [effect for _, effect in effects]
        return len([at for at, effect in pings if isinstance(effect, Say) and effect.peer == A])

    assert (questions(late_s=0.1), questions(late_s=4.0)) == (2, 0)


def test_accusation_of_one_that_was_heard_as_long_ago_as_its_answers_take_is_no_reason_to_ask() -> None:
    """All that are told of a suspicion would else ask one that has too much to do at once."""

    def asks(late_s: float) -> bool:
        machine = watching(A)
        machine.link_made(A, late_s, 0.0)
        machine.peer_seen(A, 0, 10.0)
        machine.link_made(A, late_s, 10.0)
        run = machine.on_suspicion(A, 0, 12.0)
        return [what(effect) for effect in run] == [Ping]

    assert (asks(late_s=0.1), asks(late_s=3.0)) == (True, False)


def test_answer_that_was_not_asked_for_is_no_round_trip() -> None:
    machine = watching(A)
    (ping,) = machine.tick(1.0)
    machine.on_ack(A, said(ping, Ping).nonce + 1, 0, 3.0)
    assert machine._peers[A].round_trip.seconds(3.0) == 0.0
    machine.tick(3.05)


# --- at rest ---


def test_sixteen_at_rest_ask_twice_a_second_each_and_look_once_a_second() -> None:
    """Each ping is a frame and its answer another: by their number goes what a daemon costs that has nothing to do."""
    net, seconds = Net(16, rests=True), 60.0
    net.run(seconds)
    said_by = [collections.Counter(what(effect) for _, effect in node.seen) for node in net.nodes.values()]
    assert all(kinds.keys() <= {Ping, Ack} for kinds in said_by), "nobody is told of anything"
    pings = sum(kinds[Ping] for kinds in said_by) / 16 / seconds
    close, others = 16 * CLOSE_PEERS, 16 * 15 / 2 - 16 * CLOSE_PEERS
    seldom = (close / (close_interval_s(15) + RESTING_TICK_S) + others / (probe_interval_s(15) + RESTING_TICK_S)) / 16
    assert seldom <= pings <= 2.0, "of two that watch each other one asks"
    assert net.ticks / 16 / seconds <= 1.3 / RESTING_TICK_S, "once more only where an answer is awaited"


def test_where_nobody_waits_for_anybody_all_ask_half_as_often_and_find_the_silent_within_the_bound() -> None:
    sent = {}
    for calm in (False, True):
        net, seconds = Net(16, rests=True), 120.0
        for node in net.nodes.values():
            node.machine.calm = lambda calm=calm: calm  # type: ignore[misc]
        net.run(seconds)
        assert all(len(node.machine.alive()) == 15 for node in net.nodes.values())
        sent[calm] = net.sent
        victim = name(0)
        net.stop(victim)
        net.run(seconds + detection_bound_s(15, told=True, calm=calm) + 0.1)
        assert len(net.died(victim)) == 15
    assert sent[True] < 0.6 * sent[False]


def test_detector_that_rests_wakes_up_for_each_deadline_and_for_a_silence() -> None:
    machine, now = watching(A, B), 0.0
    wakes: list[float] = []
    while machine.state_of(A) is not State.DEAD:
        machine.tick(now)
        machine.peer_seen(B, 0, now)
        wakes.append(now)
        now += machine.rest_s(now)
    pinged = membership.PROBE_INTERVAL_S  # the first look at which it was silent for an interval
    suspected = pinged + ACK_DEADLINE_S + INDIRECT_DEADLINE_S
    for due in (pinged, pinged + SILENCE_S, pinged + ACK_DEADLINE_S, suspected, suspected + SUSPICION_S):
        assert any(due <= at < due + 1e-6 for at in wakes), due
    assert max(later - at for at, later in itertools.pairwise(wakes)) <= RESTING_TICK_S + 1e-9
    assert len(wakes) <= wakes[-1] / RESTING_TICK_S + 6


@pytest.mark.parametrize("late_s", [0.4, 3.0])
def test_detector_at_rest_is_late_from_when_it_was_to_be_called(late_s: float) -> None:
    machine = watching(A)
    now = machine.rest_s(0.0)
    machine.tick(now)
    assert machine.lag.seconds(now) == 0.0
    now += machine.rest_s(now) + late_s
    machine.tick(now)
    assert machine.lag.seconds(now) == pytest.approx(late_s)
    assert (machine._peers[A].excuses > 0) == (late_s > membership.LOCAL_STALL_S)


@pytest.mark.parametrize("late_s", [0.8, 1.5])
def test_detector_that_looks_at_each_beat_is_late_from_that_on(late_s: float) -> None:
    """Of looks that all come as late, the time from one to the next says nothing."""
    machine, now = watching(A), 0.0
    for _ in range(12):
        machine.tick(now)
        now += machine.rest_s(now, next_beat(now) - now) + late_s
    machine.tick(now)
    assert machine.lag.seconds(now) == pytest.approx(late_s)
    assert (machine._peers[A].excuses > 0) == (late_s > membership.LOCAL_STALL_S)


@pytest.mark.parametrize("awaited", [False, True])
@pytest.mark.parametrize("said_at", [0.0, 0.13, 0.27, 0.41])
def test_detector_that_rests_finds_the_silent_within_its_bound(said_at: float, awaited: bool) -> None:
    machine, now = watching(A, B), 0.0
    machine.awaited = lambda: (A,) * awaited
    while machine.state_of(A) is not State.DEAD:
        machine.tick(now)
        machine.peer_seen(B, 0, now)
        rest_s = machine.rest_s(now)
        if now <= said_at < now + rest_s:
            machine.peer_seen(A, 0, said_at)
        now += rest_s
    assert now - rest_s - said_at <= detection_bound_s(2, awaited=awaited) + 1e-9


def test_answer_of_a_connection_is_that_of_the_ping_whose_number_it_has() -> None:
    machine = watching(A, B)
    (ping,) = (effect for _, effect in run_ticks(machine, 0.0, 1.0, talking=(B,)))
    nonce = said(ping, Ping).nonce
    assert nonce > number_of(nonce) >= 0
    assert number_of(nonce) < 2**32
    assert machine.on_answer(A, number_of(nonce), 0, 3.0) == []
    assert machine._peers[A].probe is None
    assert machine._peers[A].round_trip.seconds(3.0) == pytest.approx(2.0), "it took so long"
    (asked,) = machine.on_ping_request(B, A, 11, 3.0)
    (told,) = machine.on_answer(A, number_of(said(asked, Ping).nonce), 0, 3.1)
    assert told == Say(B, Ack(nonce=11, incarnation=0, about=A)), "who asked for the ping is told"
    assert machine.on_answer(A, number_of(nonce), 0, 3.2) == []
    assert machine.on_answer(C, 5, 0, 3.2) == []
