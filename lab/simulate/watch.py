"""One simulated peer's links and its failure detector: what `swarm.members` is around the same machine.

A link comes up by a hello and its answer. It breaks when either process dies, and is made again as often and as late as
there: `_Remake`, and beside it `_Dial` for whoever is known and not linked. Of a machine that vanished, or one behind a
partition, a link tells nothing: that is for the detector to find, and the link of who is given up rests, as there.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from shoal.lab.simulate.network import IN_FLIGHT_S
from shoal.protocol.backoff import Backoff
from shoal.protocol.followers import FOLLOWERS_LIMIT
from shoal.protocol.identity import PeerId
from shoal.protocol.membership import RECEIVERS, Died, Effect, MembershipMachine, Refute, Say, State, Suspected
from shoal.protocol.neighbours import NEIGHBOUR_LIMIT, Neighbours
from shoal.protocol.peering import Ack, PingRequest, SignOfLife, Suspicion
from shoal.swarm.dialling import (
    DIAL_BACKOFF_LIMIT_S,
    DIAL_BACKOFF_S,
    DIAL_DEADLINE_S,
    DIAL_DEFERRAL_S,
    DIAL_PERIOD_S,
)
from shoal.swarm.links import ADMISSION_DEADLINE_S, REST_LIMIT_S
from shoal.swarm.members import OUTSIDE_SETTLE_S, REDIAL_DEADLINE_S, REDIAL_PAUSE_S

if TYPE_CHECKING:
    from shoal.lab.simulate.peer import SimulatedPeer

HELLO_BYTES = 760
"""A hello or its answer: a sealed node record with addresses, in an envelope."""
RECORD_BYTES = 620
HELLO_LIMIT_S = 1.0
"""So long a follower waits for the answer to its hello before it greets another in its place."""
EARLY_LIMIT_MESSAGES = 1024
"""On a link that is not yet made at this end; the oldest are lost."""
REMAKE_LIMIT = 2
"""Attempts to make a broken link again, before whoever is linked no more is dialled like anybody else."""


@dataclass(frozen=True, slots=True)
class Hello:
    """A peer introduces itself, in a life of its; `answer`: it was greeted first."""

    life: int
    incarnation: int
    answer: bool


@dataclass(frozen=True, slots=True)
class Reset:
    """The receiver of a message knows of no link to its sender. nobody: no process listens there at all."""

    nobody: bool


@dataclass(frozen=True, slots=True)
class Announce:
    """A node record: what counts here is the incarnation in it."""

    incarnation: int


LinkTalk = Hello | Reset | Announce | SignOfLife


@dataclass(slots=True)
class _Dial:
    at: float
    backoff: Backoff = field(default_factory=partial(Backoff, DIAL_BACKOFF_S, DIAL_BACKOFF_LIMIT_S))


@dataclass(slots=True, eq=False)
class _Remake:
    """A broken link is being made again. failed: how many of its attempts have; refused: whether the last one was."""

    begun: int = 0
    failed: int = 0
    refused: bool = False


class Watch:
    """Links of a peer in one of its lives. `links` has the life of each linked peer."""

    machine: MembershipMachine

    def __init__(self, peer: SimulatedPeer) -> None:
        self._peer = peer
        self._swarm = peer.swarm
        self.links: dict[int, int] = {}
        self.resting: dict[int, int] = {}
        self._dials: dict[int, _Dial] = {}
        self._remakes: dict[int, _Remake] = {}
        self._greeted_at: dict[int, float] = {}
        self._linked_at: dict[int, float] = {}
        self._rng = random.Random(f"links {peer.swarm.scenario.seed} {peer.number} {peer.life}")
        self._neighbours = Neighbours(me=peer.id, rng=self._rng)
        self._chosen: set[int] = set()
        self._known: dict[PeerId, int] = {}
        self._known_are = (0, 0)
        """How many were known, and how many had left for good, when these were noted."""
        self._has_seat = False
        self._to_end: set[int] = set()
        self._end_at = self._too_many_at = math.inf
        self._looked_at = -math.inf
        self._early: dict[int, deque[tuple[float, int, object]]] = {}
        self.machine = MembershipMachine(
            me=peer.id,
            rng=random.Random(f"watch {peer.swarm.scenario.seed} {peer.number} {peer.life}"),
            incarnation=peer.disk.incarnation,
            has_link=self._has_link,
            can_ask=self._can_ask,
            awaited=lambda: peer.peer_rounds.member.awaited(),
            calm=lambda: peer.peer_rounds.member.rests,
            tick_s=peer.swarm.tick_s,
        )

    def _has_link(self, peer: PeerId) -> bool:
        return self._swarm.numbers[peer] in self.links

    def _can_ask(self, via: PeerId, target: PeerId) -> bool:
        """True if `via` has a link to `target`; in a node they tell each other whom they lack."""
        numbers = self._swarm.numbers
        return numbers[target] in self._swarm.peers[numbers[via]].watch.links

    def alive(self) -> frozenset[PeerId]:
        """The peers not believed dead."""
        return frozenset(self.machine.alive())

    def suspected(self) -> frozenset[PeerId]:
        """Those of them that nobody asked could reach."""
        return frozenset(self.machine.in_state(State.SUSPECT))

    # -- links -------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """The detector's tick, and whatever dial is due."""
        self._carry_out(self.machine.tick(now))
        if now - self._looked_at >= DIAL_PERIOD_S:
            self._looked_at = now
            self._look(now)

    def _look(self, now: float) -> None:
        self._choose_links(now)
        for other in sorted(self._chosen):
            if other not in self.links and other not in self.resting and other not in self._remakes:
                dial = self._dials.get(other)
                if dial is None:
                    dial = self._dials[other] = _Dial(now + self._deferral_s(other))
                if now >= dial.at:
                    dial.at = now + dial.backoff.next_s() + DIAL_DEADLINE_S
                    self._greet(other, answer=False)

    def wanted(self) -> set[int]:
        """Those with whom this peer is to be linked: everyone, or, where some wait outside, who takes part with it."""
        admitted = self._peer.disk.ledger.admitted
        if admitted is None:
            return {peer.number for peer in self._swarm.peers if not peer.gone} - {self._peer.number}
        if self._follows(self._peer.number):
            return {number for number in self._chosen if not self._swarm.peers[number].gone}
        return {self._swarm.numbers[peer] for peer in admitted} - {self._peer.number}

    def _follows(self, other: int) -> bool:
        """True if a peer is a follower, as its record says in a node."""
        peer = self._swarm.peers[other]
        return peer.up and peer.peer_rounds.member.follows

    def _followers(self) -> set[int]:
        return {other for other in self.links if self._follows(other)}

    def _choose_links(self, now: float) -> None:
        """Choose whom to dial; who follows anew parts from all but a few."""
        follows = self._follows(self._peer.number)
        if not follows:
            self._has_seat, self._to_end = True, set()
            self._chosen = self.wanted() if self._swarm.scenario.outside else self._peer.disk.known
            too_many = sorted(self._followers())[FOLLOWERS_LIMIT:]  # some had a seat until now
            self._too_many_at = min(self._too_many_at, now) if too_many else math.inf
            if now - self._too_many_at >= 2 * OUTSIDE_SETTLE_S:
                self._swarm.part_links(self._peer, too_many)
            return
        if self._has_seat:
            self._has_seat, self._end_at = False, now + OUTSIDE_SETTLE_S
            ends = self._neighbours.settle([self._swarm.peers[other].id for other in self.links])
            self._to_end = {self._swarm.numbers[peer] for peer in ends}
            self._remakes.clear()
        if now >= self._end_at:
            self._swarm.part_links(self._peer, sorted(self._to_end.intersection(self.links)))
            self._end_at, self._to_end = math.inf, set()
        peers, voters = self._swarm.peers, self._peer.disk.ledger.voting.named
        if self._known_are != (known_are := (len(self._peer.disk.known), self._swarm.departed)):
            self._known_are = known_are
            self._known = {peers[other].id: other for other in self._peer.disk.known if not peers[other].gone}
        known = self._known
        chosen = self._neighbours.choose(
            known=known.keys(),
            linked=[peers[other].id for other in self.links],
            dialled=[peers[other].id for other, at in self._greeted_at.items() if now - at < HELLO_LIMIT_S],
            may_dial=lambda peer: known[peer] not in self._dials or now >= self._dials[known[peer]].at,
            is_proven=lambda peer: peer in voters,
        )
        self._chosen = {known[peer] for peer in chosen}
        if not self._to_end:
            self._swarm.check_links(self._peer, NEIGHBOUR_LIMIT)

    def _has_place(self, sender: int) -> bool:
        """True if a peer that says hello may be linked: as a node has it, by `Places` or the links of a follower."""
        if not self._swarm.scenario.outside or sender in self.links:
            return True
        if self._follows(self._peer.number):
            kept = self._neighbours.kept_places([self._swarm.peers[other].id for other in self.links])
            return len(self.links) < NEIGHBOUR_LIMIT - kept
        return not self._follows(sender) or len(self._followers()) < FOLLOWERS_LIMIT

    def _is_full(self) -> bool:
        """True if a peer has no place for another link, be it one that it dialled."""
        return self._swarm.scenario.outside and self._follows(self._peer.number) and len(self.links) >= NEIGHBOUR_LIMIT

    def parted(self, other: int) -> None:
        """A link that a follower has no more is no sign of anything."""
        if self.links.pop(other, None) is not None:
            self._peer.peer_rounds.unlinked(other)
        self.resting.pop(other, None)
        self._remakes.pop(other, None)
        self.machine.forget(self._swarm.peers[other].id)

    def _deferral_s(self, other: int) -> float:
        """Of two that know each other the lower PeerId dials at once; so does who has no link yet."""
        if self._follows(self._peer.number):
            return 0.0
        return 0.0 if not self.links or self._peer.id < self._swarm.peers[other].id else DIAL_DEFERRAL_S

    def _greet(self, other: int, *, answer: bool) -> None:
        hello = Hello(self._peer.life, self.machine.incarnation, answer)
        if not answer:
            self._greeted_at[other] = self._swarm.timeline.now
        self._swarm.send(self._peer, other, hello, HELLO_BYTES)

    def keep(self, other: int, life: int, message: object) -> bool:
        """True if `message` came over a link that is being made, and waits for the admission of `other`."""
        now = self._swarm.timeline.now
        is_made = now - self._greeted_at.get(other, -math.inf) < ADMISSION_DEADLINE_S
        is_made = is_made and self._swarm.peers[other].watch.links.get(self._peer.number) == self._peer.life
        if is_made:
            self._early.setdefault(other, deque(maxlen=EARLY_LIMIT_MESSAGES)).append((now, life, message))
        return is_made

    def reset(self, other: int, reset: Reset) -> None:
        """The machine of `other` knows of no link to this peer; if nobody listens there, a dial ends at once."""
        if self._swarm.timeline.now - self._linked_at.get(other, -math.inf) > IN_FLIGHT_S:  # else of an earlier one
            self.broke(other, self.links.get(other, self.resting.get(other, -1)))
        if not reset.nobody:
            return
        if (dial := self._dials.get(other)) is not None:
            dial.at = min(dial.at, self._swarm.timeline.now + dial.backoff.pause_s)
        if (remake := self._remakes.get(other)) is not None and remake.begun > remake.failed:
            remake.refused = True
            self._failed(other, remake, remake.begun)

    def broke(self, other: int, life: int) -> None:
        """The connection to that life of `other` ended: evidence at once, and certainty if it is not made again."""
        if self.links.get(other) == life:
            self._lose(other)
        elif self.resting.get(other) == life:
            del self.resting[other]

    def wake(self, other: int, life: int) -> None:
        """Something of that life of `other` arrives: a link that rests is up."""
        if self.resting.get(other) == life:
            self.links[other] = self.resting.pop(other)
            self._linked_at[other] = self._swarm.timeline.now
            self._peer.peer_rounds.linked_to(other)

    def _rest(self, other: int) -> None:
        """`other` is dead of silence."""
        self.resting[other] = life = self.links.pop(other)
        self._peer.peer_rounds.unlinked(other)
        self._later(REST_LIMIT_S, self._end_rest, other, life)

    def _end_rest(self, other: int, life: int) -> None:
        if self.resting.get(other) == life:
            del self.resting[other]
            self._swarm.hang_up(self._peer.number, self._peer.life, other)

    def _lose(self, other: int) -> None:
        """There is no link any more: say so, and make it again."""
        if self._follows(self._peer.number) or self._follows(other):
            self.parted(other)
            return
        del self.links[other]
        self._peer.peer_rounds.unlinked(other)
        self._carry_out(self.machine.connection_lost(self._swarm.peers[other].id, self._swarm.timeline.now))
        remake = self._remakes[other] = _Remake()
        self._later(REDIAL_PAUSE_S, self._again, other, remake)  # a connection's handshakes take their time as well

    def _again(self, other: int, remake: _Remake) -> None:
        if self._remakes.get(other) is remake:
            remake.begun, remake.refused = remake.begun + 1, False
            self._later(REDIAL_DEADLINE_S, self._failed, other, remake, remake.begun)
            self._greet(other, answer=False)

    def _failed(self, other: int, remake: _Remake, attempt: int) -> None:
        """An attempt to make a link again was refused, or had its time."""
        if self._remakes.get(other) is not remake or remake.failed >= attempt:
            return
        remake.failed = attempt
        if attempt < REMAKE_LIMIT:
            self._later(REDIAL_PAUSE_S, self._again, other, remake)
            return
        del self._remakes[other]
        peer, now = self._swarm.peers[other].id, self._swarm.timeline.now
        if remake.refused:
            self._carry_out(self.machine.connection_lost(peer, now, confirmed=True))
        else:
            self._carry_out(self.machine.unreachable(peer, now))

    def _later(self, delay_s: float, action: Callable[..., None], *arguments: object) -> None:
        """Call `action` then, or when the process runs again; never, if it has ended by then."""
        self._swarm.timeline.after(delay_s, self._due, action, arguments)

    def _due(self, action: Callable[..., None], arguments: tuple[object, ...]) -> None:
        if self._peer.up and self._peer.watch is self:
            if self._peer.hung:
                self._later(self._swarm.tick_s, action, *arguments)
            else:
                action(*arguments)

    def left(self, other: int) -> None:
        """`other` said goodbye."""
        self._remakes.pop(other, None)
        self.resting.pop(other, None)
        if self.links.pop(other, None) is not None:
            self._peer.peer_rounds.unlinked(other)
        peer = self._swarm.peers[other].id
        self._carry_out(self.machine.connection_lost(peer, self._swarm.timeline.now, confirmed=True))

    # -- messages ----------------------------------------------------------------------------------------------

    def receive(self, sender: int, message: LinkTalk) -> None:
        """Take what concerns links and liveness."""
        peer, now, machine = self._swarm.peers[sender].id, self._swarm.timeline.now, self.machine
        if isinstance(message, PingRequest) and "vouch" in self._peer.lies:
            self._say(sender, Ack(nonce=message.nonce, incarnation=0, about=message.target))
        elif isinstance(message, SignOfLife):
            self._carry_out(RECEIVERS[type(message)](machine, peer, message, now))
        elif isinstance(message, Announce):
            self._carry_out(machine.on_refutation(peer, message.incarnation, now))
        elif isinstance(message, Hello):
            self._linked(sender, message)
        else:
            self.reset(sender, message)

    def seen(self, sender: int) -> None:
        """Something else came over the link: a sign of life."""
        self._carry_out(self.machine.peer_seen(self._swarm.peers[sender].id, 0, self._swarm.timeline.now))

    def _linked(self, sender: int, hello: Hello) -> None:
        self._peer.disk.known.add(sender)
        known, now = self.links.get(sender), self._swarm.timeline.now
        if not hello.answer and not self._has_place(sender):
            return
        if hello.answer and known is None and self._is_full():
            self._swarm.hang_up(self._peer.number, self._peer.life, sender)
            return
        if known is not None and known > hello.life:
            return
        peer = self._swarm.peers[sender].id
        if known is not None and known != hello.life:  # it was started again before its death was noticed
            self._peer.peer_rounds.unlinked(sender)
            self._carry_out(self.machine.connection_lost(peer, now))
        self.resting.pop(sender, None)
        self.links[sender] = hello.life
        self._dials.pop(sender, None)
        self._remakes.pop(sender, None)
        self._carry_out(self.machine.peer_seen(peer, hello.incarnation, now))
        if not hello.answer:
            self._greet(sender, answer=True)
        if known != hello.life:
            self._linked_at[sender] = now
            self._peer.peer_rounds.linked_to(sender)
        for at, life, message in self._early.pop(sender, ()):
            if life == hello.life and now - at < ADMISSION_DEADLINE_S:
                self._peer.receive(sender, message)

    def _say(self, to: int, message: LinkTalk) -> None:
        if to in self.links or to in self.resting:
            self._swarm.send(self._peer, to, message, self._swarm.size_of(message))

    def _carry_out(self, effects: Iterable[Effect]) -> None:
        numbers = self._swarm.numbers
        for effect in effects:
            if isinstance(effect, Say):
                self._say(numbers[effect.peer], effect.message)
            elif isinstance(effect, Suspected):
                for other in sorted(self.links):
                    self._say(other, Suspicion(peer=effect.peer, incarnation=effect.incarnation))
            elif isinstance(effect, Died):
                number = numbers[effect.peer]
                self._swarm.found_dead(self._peer, number)
                if number in self.links:
                    self._rest(number)
            elif isinstance(effect, Refute):
                self._peer.disk.incarnation = effect.incarnation
                for other in sorted(self.links):
                    self._swarm.send(self._peer, other, Announce(effect.incarnation), RECORD_BYTES)
