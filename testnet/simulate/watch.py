"""One simulated peer's links and its failure detector: what `swarm.members` is around the same machine.

A link comes up by a hello and its answer; it breaks when either process dies, and is made again as often and as late as
there. Of a machine that vanished, or one behind a partition, a link tells nothing: that is for the detector to find.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.protocol.identity import PeerId
from shoal.protocol.liveness import (
    Died,
    Effect,
    Refute,
    SendAck,
    SendNack,
    SendPing,
    SendPingRequest,
    State,
    Suspected,
)
from shoal.protocol.membership import MembershipMachine
from shoal.protocol.peering import Ack, Nack, Ping, PingRequest, Suspicion
from shoal.swarm.members import (
    DIAL_BACKOFF_LIMIT_S,
    DIAL_BACKOFF_S,
    DIAL_DEADLINE_S,
    REDIAL_DEADLINE_S,
    REDIAL_PAUSE_S,
)

if TYPE_CHECKING:
    from shoal.testnet.simulate.peer import SimulatedPeer

HELLO_BYTES = 760
"""A hello or its answer: a sealed node record with addresses, in an envelope."""
RECORD_BYTES = 620


@dataclass(frozen=True, slots=True)
class Hello:
    """A peer introduces itself, in a life of its; `answer`: it was greeted first."""

    life: int
    incarnation: int
    answer: bool


@dataclass(frozen=True, slots=True)
class Reset:
    """The receiver of a message knows of no link to its sender."""


@dataclass(frozen=True, slots=True)
class Announce:
    """A node record: what counts here is the incarnation in it."""

    incarnation: int


LinkTalk = Hello | Reset | Announce | Ping | Ack | PingRequest | Nack | Suspicion


@dataclass(slots=True)
class _Dial:
    at: float
    backoff_s: float = DIAL_BACKOFF_S


class Watch:
    """Links of a peer in one of its lives. `links` has the life of each linked peer."""

    machine: MembershipMachine

    def __init__(self, peer: SimulatedPeer) -> None:
        self._peer = peer
        self._swarm = peer.swarm
        self.links: dict[int, int] = {}
        self._dials: dict[int, _Dial] = {}
        self.machine = MembershipMachine(
            me=peer.id,
            rng=random.Random(f"watch {peer.swarm.scenario.seed} {peer.number} {peer.life}"),
            incarnation=peer.disk.incarnation,
            has_link=self._has_link,
        )

    def _has_link(self, peer: PeerId) -> bool:
        return self._swarm.numbers[peer] in self.links

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
        for other in self._peer.disk.known:
            if other not in self.links:
                dial = self._dials.get(other)
                if dial is None:
                    dial = self._dials[other] = _Dial(now)
                if now >= dial.at:
                    dial.at = now + dial.backoff_s + DIAL_DEADLINE_S
                    dial.backoff_s = min(2 * dial.backoff_s, DIAL_BACKOFF_LIMIT_S)
                    self._greet(other, answer=False)

    def _greet(self, other: int, *, answer: bool) -> None:
        hello = Hello(self._peer.life, self.machine.incarnation, answer)
        self._swarm.send(self._peer, other, hello, HELLO_BYTES)

    def refused(self, other: int) -> None:
        """Nobody listens there: a dial ends at once, and is tried again after its pause."""
        dial = self._dials.get(other)
        if dial is not None:
            dial.at = min(dial.at, self._swarm.timeline.now + dial.backoff_s)

    def broke(self, other: int, life: int) -> None:
        """The connection to that life of `other` ended: evidence at once, and certainty if it is not made again."""
        if self.links.get(other) != life:
            return
        del self.links[other]
        self._peer.course.unlinked(other)
        now = self._swarm.timeline.now
        self._carry_out(self.machine.connection_lost(self._swarm.peers[other].id, now))
        self._swarm.timeline.after(REDIAL_PAUSE_S, self._again, other, self._peer.life)

    def _again(self, other: int, my_life: int) -> None:
        if self._peer.life != my_life or not self._peer.up or other in self.links:
            return
        self._greet(other, answer=False)
        self._swarm.timeline.after(REDIAL_DEADLINE_S, self._given_up, other, my_life)

    def _given_up(self, other: int, my_life: int) -> None:
        if self._peer.life != my_life or not self._peer.up or other in self.links:
            return
        there, now = self._swarm.peers[other], self._swarm.timeline.now
        refuses = not there.up and there.host_up and self._swarm.network.passes(other, self._peer.number)
        if refuses:
            self._carry_out(self.machine.connection_lost(there.id, now, confirmed=True))
        else:
            self._carry_out(self.machine.unreachable(there.id, now))

    def left(self, other: int) -> None:
        """`other` said goodbye."""
        if self.links.pop(other, None) is not None:
            self._peer.course.unlinked(other)
        peer = self._swarm.peers[other].id
        self._carry_out(self.machine.connection_lost(peer, self._swarm.timeline.now, confirmed=True))

    # -- messages ----------------------------------------------------------------------------------------------

    def receive(self, sender: int, message: LinkTalk) -> None:
        """Take what concerns links and liveness."""
        peer, now, machine = self._swarm.peers[sender].id, self._swarm.timeline.now, self.machine
        if isinstance(message, Ping):
            self._carry_out(machine.on_ping(peer, message.nonce, message.incarnation, now))
        elif isinstance(message, Ack):
            if message.about is None:
                self._carry_out(machine.on_ack(peer, message.nonce, message.incarnation, now))
            else:
                self._carry_out(machine.on_indirect_ack(peer, message.about, message.nonce, now))
        elif isinstance(message, PingRequest):
            if "vouch" in self._peer.lies:
                self._say(sender, Ack(nonce=message.nonce, incarnation=0, about=message.target))
            else:
                self._carry_out(machine.on_ping_request(peer, message.target, message.nonce, now))
        elif isinstance(message, Nack):
            self._carry_out(machine.on_nack(peer, message.target, message.nonce, now))
        elif isinstance(message, Suspicion):
            self._carry_out(machine.on_suspicion(message.peer, message.incarnation, now))
        elif isinstance(message, Announce):
            self._carry_out(machine.on_refutation(peer, message.incarnation, now))
        elif isinstance(message, Hello):
            self._linked(sender, message)
        else:
            self.broke(sender, self.links.get(sender, -1))

    def seen(self, sender: int) -> None:
        """Something else came over the link: a sign of life."""
        self._carry_out(self.machine.peer_seen(self._swarm.peers[sender].id, 0, self._swarm.timeline.now))

    def _linked(self, sender: int, hello: Hello) -> None:
        self._peer.disk.known.add(sender)
        known = self.links.get(sender)
        if known is not None and known > hello.life:
            return
        self.links[sender] = hello.life
        self._dials.pop(sender, None)
        peer = self._swarm.peers[sender].id
        self._carry_out(self.machine.peer_seen(peer, hello.incarnation, self._swarm.timeline.now))
        if not hello.answer:
            self._greet(sender, answer=True)
        if known != hello.life:
            self._peer.course.linked(sender)

    def _say(self, to: int, message: LinkTalk) -> None:
        if to in self.links:
            self._swarm.send(self._peer, to, message, self._swarm.size_of(message))

    def _carry_out(self, effects: Iterable[Effect]) -> None:
        numbers, mine = self._swarm.numbers, self.machine.incarnation
        for effect in effects:
            if isinstance(effect, SendPing):
                self._say(numbers[effect.peer], Ping(nonce=effect.nonce, incarnation=mine))
            elif isinstance(effect, SendAck):
                self._say(numbers[effect.peer], Ack(nonce=effect.nonce, incarnation=mine, about=effect.about))
            elif isinstance(effect, SendNack):
                self._say(numbers[effect.peer], Nack(target=effect.target, nonce=effect.nonce))
            elif isinstance(effect, SendPingRequest):
                self._say(numbers[effect.via], PingRequest(target=effect.target, nonce=effect.nonce))
            elif isinstance(effect, Suspected):
                for other in sorted(self.links):
                    self._say(other, Suspicion(peer=effect.peer, incarnation=effect.incarnation))
            elif isinstance(effect, Died):
                if self.links.pop(numbers[effect.peer], None) is not None:
                    self._peer.course.unlinked(numbers[effect.peer])
                self._swarm.found_dead(self._peer, numbers[effect.peer])
            elif isinstance(effect, Refute):
                self._peer.disk.incarnation = effect.incarnation
                for other in sorted(self.links):
                    self._swarm.send(self._peer, other, Announce(effect.incarnation), RECORD_BYTES)
