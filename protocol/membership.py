"""Failure detector in the manner of SWIM: a machine without clock or sockets that decides who is alive.

Each node watches every peer it has heard from, on its own. A peer that was silent for a probe interval is pinged; if
no answer comes, it is pinged again and three others are asked to ping it; if that fails too it is suspected, and
it and all others are told so; if it still says nothing it is dead. A process that hangs (SIGSTOP) keeps its connections
open and is caught exactly like one that vanished.

Closely a node watches whom it waits for, every `PROBE_INTERVAL_S`, and, at `close_interval_s(n)`, the `CLOSE_PEERS`
that come after it in the order of their PeerIds, around the ring of those that answer: so each peer is watched closely
by as many, whatever n, and where one of these is silent too, by the one before it. All others are pinged `PROBES_PER_S`
times a second in all. Whoever is told of a suspicion looks for itself at once.

What a peer is held for after each thing that can happen to it is `TRANSITIONS`:

    event        what happened                                      ALIVE     SUSPECT   DEAD
    HEARD        the peer itself said something to us               ALIVE     ALIVE     ALIVE
    VOUCHED      one whom we asked got an answer from it            ALIVE     ALIVE     ALIVE
    REFUTED      it signed something newer, and others told us      ALIVE     ALIVE     DEAD, ping now
    ACCUSED      another suspects it                                ALIVE,    SUSPECT   DEAD
                                                                    ping now
    UNANSWERED   neither we nor those we asked reach it             SUSPECT   illegal   illegal
    EXPIRED      a suspect had its time                             illegal   DEAD      illegal
    LOST         its connection broke, and its death is confirmed   DEAD      DEAD      DEAD

A broken connection is confirmed in one of two ways: its machine refuses another, for nobody listens there any more; or
it cannot be re-made, and all those whom we asked gave the peer up or could not re-make theirs either. Not to reach a
peer is no evidence by itself: a firewall may stand between two that everybody else reaches. So a peer to which we have
no link is asked after through others at once, and for as long as they vouch for it it is alive. How long a peer may
hang in a reduction is `STALL_S` of `shoal.collectives.stalls`.

Three rules keep it honest:

* *Own evidence outranks hearsay.* Another's suspicion makes us look; it never changes a state. A liar who accuses
  everybody has each peer pinged by each other once per `PROBE_INTERVAL_S`, and no more.
* *The living refute.* A suspect learns of it, raises its incarnation and says so; accusations of an older
  incarnation are void.
* *Our own sleep is no one's fault.* If `tick` comes late by more than `LOCAL_STALL_S` we were stopped ourselves, and
  all waits begin anew; and for as long as we run late all waits are longer (lateness.py).

Overload is not death. Who answers late is waited for as long as its answers take, and asked no sooner again; an
accusation of one that was heard within the probe interval, or as long ago as that, is no reason to ask.

How fast.  `tick` is called every `TICK_S`, or, by who asks each time for how long it may rest (`rest_s`), as soon as a
deadline is over and every `WAITING_TICK_S`, or every `RESTING_TICK_S` by who waits for nobody. From the last sign of
life of a silent peer that answered quickly before, seen by a process that is not late, to `Died` at most

    PROBE_INTERVAL_S + ACK_DEADLINE_S + INDIRECT_DEADLINE_S + SUSPICION_S + 4 × TICK_S = 7.4 s

pass for who waits for it all the time, whatever others say, the ticks being how late each of four steps may be noticed,
or the first of them by who rests. For those that watch it closely close_interval_s(n) takes the place of the first
term, and RESTING_TICK_S of the last: 8 s, and 9 s at most where there are many. What these find the others are told,
and look: 12 s, whatever n, if one of those lives and its message comes through. Else, as where a node that has just
told all of many tells the suspect alone, each finds out by itself, with probe_interval_s(n) for the first term: 15 s
where there are sixteen live peers, 39 s where there are 64. While all train both intervals are CALM_TIMES as long.
A broken connection leaves out the first two terms, and one that is confirmed ends it at once.

Known limit: one lying intermediary can vouch for a dead peer. The round does not rely on this view to be exact: it
evicts on lack of progress.

Source: Das, Gupta, Motivala, "SWIM" (DSN 2002), sections 3 and 4; the local stall after Lifeguard, arXiv 1707.00788.
"""

from __future__ import annotations

import enum
import math
import random
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from shoal.protocol.errors import LocalError
from shoal.protocol.identity import PeerId
from shoal.protocol.lateness import HALF_LIFE_S, LATE_LIMIT_S, WAITED_TIMES, Lateness
from shoal.protocol.peering import Ack, Nack, Ping, PingRequest, SignOfLife, Suspicion
from shoal.protocol.places import next_around
from shoal.protocol.timeouts import RESTING_TICK_S, in_crowd


class State(enum.Enum):
    """State in which we hold a peer to be. Members are hashed by identity: the table is asked with every message."""

    ALIVE = "alive"
    SUSPECT = "suspect"
    DEAD = "dead"

    __hash__ = object.__hash__


class Event(enum.Enum):
    """Event that can happen to a peer; see the table above. Hashed as states are."""

    HEARD = "heard"
    VOUCHED = "vouched"
    REFUTED = "refuted"
    ACCUSED = "accused"
    UNANSWERED = "unanswered"
    EXPIRED = "expired"
    LOST = "lost"

    __hash__ = object.__hash__


TRANSITIONS: dict[State, dict[Event, State]] = {
    State.ALIVE: {
        Event.HEARD: State.ALIVE,
        Event.VOUCHED: State.ALIVE,
        Event.REFUTED: State.ALIVE,
        Event.ACCUSED: State.ALIVE,
        Event.UNANSWERED: State.SUSPECT,
        Event.LOST: State.DEAD,
    },
    State.SUSPECT: {
        Event.HEARD: State.ALIVE,
        Event.VOUCHED: State.ALIVE,
        Event.REFUTED: State.ALIVE,
        Event.ACCUSED: State.SUSPECT,
        Event.EXPIRED: State.DEAD,
        Event.LOST: State.DEAD,
    },
    State.DEAD: {
        Event.HEARD: State.ALIVE,
        Event.VOUCHED: State.ALIVE,
        Event.REFUTED: State.DEAD,
        Event.ACCUSED: State.DEAD,
        Event.LOST: State.DEAD,
    },
}


def next_state(state: State, event: Event) -> State:
    """The table. Raises LocalError for what cannot happen in that state."""
    try:
        return TRANSITIONS[state][event]
    except KeyError:
        raise LocalError(f"membership: {event.name} cannot happen to a peer that is {state.name}") from None


class Say(msgspec.Struct, frozen=True, gc=False):
    """Send `message` to `peer`."""

    peer: PeerId
    message: SignOfLife


class Suspected(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Tell `peer` and the others that it is suspected in this incarnation."""

    peer: PeerId
    incarnation: int


class Died(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """`peer` is dead to us."""

    peer: PeerId


class Revived(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """`peer` is alive after all, having been suspected or dead."""

    peer: PeerId


class Refute(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """We are suspected: tell everyone that we live, in this new incarnation."""

    incarnation: int


Effect = Say | Suspected | Died | Revived | Refute


TICK_S = 0.1  # the detector's clock, where it does not rest
WAITING_TICK_S = 4 * TICK_S
"""The same where it rests, but for what is due before, while somebody is waited for; of nobody it is RESTING_TICK_S.
All that it costs is that a ping goes out later."""
PROBE_INTERVAL_S = 1.0  # of silence before a ping, of a peer that is waited for
CLOSE_PROBES_PER_S, CLOSE_INTERVAL_LIMIT_S = 8, 2.0
"""Of one next on the ring it grows with the number of live peers, to this: of many it is enough that one is told of."""
CLOSE_PEERS = 3
"""Peers that a node watches closely beside those it waits for."""
PROBES_PER_S = 2
"""Of all others: with the number of live peers the interval grows, so that the load does not."""
CALM_TIMES = 2.0
"""All these are probed so many times as seldom while nobody waits for anybody, as when all train: among 16, it saves a
daemon at rest nearly a fifth of its processor time (docs/scale.md)."""
CROWD_PEERS = 64
"""Beyond so many peers those that come first are watched as if they were alone."""
PROBES_PER_TICK_LIMIT = 64
ACK_DEADLINE_S = 1.5  # for the direct answer
INDIRECT_DEADLINE_S = 1.5  # for the answer through others
SUSPICION_S = 3.0  # from suspect to dead
INDIRECT_PEERS = 3
DEAD_PROBE_INTERVAL_S = 10.0  # between pings to the dead
PINGS_REMEMBERED = 16
"""Of one peer, to know how long each answer took; beyond `SUSPICION_S` of the slowest round trip."""
LOST_WINDOW_S = 0.5
"""Connections to one peer that break within this time broke together."""
SILENCE_S = 0.5
"""Since a ping: a peer from which nothing came back over its link for so long, or as long as its answers take; longer
in a crowd."""
LOCAL_STALL_S = 1.0
EXCUSES_PER_SILENCE_LIMIT = 3
REFUTE_INTERVAL_S = 0.5
PEER_LIMIT = 4096  # peers watched
RELAY_LIMIT = 1024
STRANGERS_RELAY_LIMIT = RELAY_LIMIT // 2
"""Pings that are sent for others than those who come first."""
RELAYS_PER_PEER_LIMIT = 64
INCARNATION_LIMIT = 2**62
NONCE_BITS = 62
NUMBER_BITS = 32
"""Of a nonce, the lowest: what a ping of the connection has room for, and its answer comes back with."""

_ALIVE, _SUSPECT, _DEAD = State
_HEARD, _ACCUSED = Event.HEARD, Event.ACCUSED
"""Members that are needed with every message; looking one up in its enumeration takes CPython a hundred nanoseconds."""


def number_of(nonce: int) -> int:
    """The number of a ping of the connection with this nonce."""
    return nonce % (1 << NUMBER_BITS)


def close_interval_s(peers: int) -> float:
    """Seconds of silence after which one of `peers` live peers is probed that is next on the ring, not waited for."""
    return min(max(PROBE_INTERVAL_S, peers / CLOSE_PROBES_PER_S), CLOSE_INTERVAL_LIMIT_S)


def probe_interval_s(peers: int) -> float:
    """Seconds of silence after which one of `peers` live peers is probed that is not watched closely."""
    return max(PROBE_INTERVAL_S, peers / PROBES_PER_S)


def detection_bound_s(
    peers: int,
    late_s: float = 0.0,
    *,
    pace: float = 1.0,
    told: bool = False,
    awaited: bool = False,
    calm: bool = False,
) -> float:
    """Seconds within which a peer that fell silent is `Died`, if we are not late ourselves.

    late_s: how long its answers took shortly before, or those of most; of more than LATE_LIMIT_S no more is held.
    told: one of those that watch it closely lives, and what it says comes through at once. awaited: we wait for it.
    calm: nobody waits for anybody.
    """
    waited_s = WAITED_TIMES * min(late_s, LATE_LIMIT_S)
    looks_s = max(pace * ACK_DEADLINE_S, waited_s) + max(pace * INDIRECT_DEADLINE_S, waited_s)
    ends_s = looks_s + max(pace * SUSPICION_S, waited_s)
    if awaited:
        return pace * PROBE_INTERVAL_S + ends_s + WAITING_TICK_S
    seldom = pace * (CALM_TIMES if calm else 1.0)
    close_s = seldom * close_interval_s(peers)
    begins_s = close_s if peers <= CLOSE_PEERS else seldom * probe_interval_s(peers)
    told_s = close_s + looks_s if told else math.inf
    return min(begins_s, told_s) + ends_s + RESTING_TICK_S


class _Probe(msgspec.Struct):
    """A ping under way to a live peer. `indirect`: others are asked too."""

    nonce: int
    deadline: float
    indirect: bool = False


@dataclass(slots=True)
class _Inquiry:
    """Others were asked to ping a peer; `without` are those who answered that they cannot reach it."""

    nonce: int
    vias: tuple[PeerId, ...]
    without: set[PeerId] = field(default_factory=set)


@dataclass(slots=True)
class _Watched:
    """Knowledge of one peer. heard_at: of it or about it. asked_at: when it was pinged first since it said something
    itself, to us; infinity if it was not.

    cut: it cannot be reached over a link since it last said something. asked: when each of the last pings was sent.
    """

    incarnation: int
    heard_at: float
    asked_at: float = math.inf
    state: State = _ALIVE
    pinged_at: float = -math.inf
    lost_at: float = -math.inf
    cut: bool = False
    suspect_until: float = math.inf
    excuses: int = 0
    probe: _Probe | None = None
    inquiry: _Inquiry | None = None
    asked: dict[int, float] = field(default_factory=dict)
    round_trip: Lateness = field(default_factory=Lateness)


def _always(*_: PeerId) -> bool:
    return True


def _never() -> bool:
    return False


@dataclass(frozen=True, slots=True)
class _Relay:
    """A ping that we sent for another."""

    requester: PeerId
    nonce: int
    target: PeerId
    deadline: float


@dataclass(slots=True)
class MembershipMachine:
    """The detector of one node. Every input returns what to do about it, in order.

    `now` is any clock in seconds that does not go back. `incarnation` is our own, put into every Ping and Ack.
    tick_s: how often `tick` is called.
    has_link: whether we can send to a peer. can_ask: whether a peer (first) may have a link to another (second).
    first: who comes first (places.py): watched where there is not room for all, and as often as if they were alone.
    pace: how many times as long as the constants say is waited, where nobody waits for who is gone.
    awaited: whom this node waits for: watched closely. calm: nothing is waited for in seconds.
    """

    me: PeerId
    rng: random.Random
    incarnation: int = 0
    has_link: Callable[[PeerId], bool] = _always
    can_ask: Callable[[PeerId, PeerId], bool] = _always
    first: Callable[[], Collection[PeerId]] = tuple
    awaited: Callable[[], Collection[PeerId]] = tuple
    calm: Callable[[], bool] = _never
    tick_s: float = TICK_S
    pace: float = 1.0
    _peers: dict[PeerId, _Watched] = field(default_factory=dict)
    _relays: dict[int, _Relay] = field(default_factory=dict)
    lag: Lateness = field(default_factory=Lateness)
    _ran_at: float | None = None
    _rested_s: float = 0.0
    _refuted_at: float = -math.inf

    def state_of(self, peer: PeerId) -> State | None:
        """State in which we hold `peer` to be; None if we never heard from it."""
        watched = self._peers.get(peer)
        return watched.state if watched else None

    def in_state(self, *states: State) -> tuple[PeerId, ...]:
        """The peers in any of `states`, sorted."""
        return tuple(sorted(peer for peer, watched in self._peers.items() if watched.state in states))

    def alive(self) -> tuple[PeerId, ...]:
        """The peers that are not dead: suspects have not had their time yet."""
        return self.in_state(_ALIVE, _SUSPECT)

    def silent(self, now: float) -> frozenset[PeerId]:
        """The live peers that were pinged over their links and say nothing over them; others may vouch for them."""
        silence_s = self._silence_s()
        return frozenset(
            peer
            for peer, watched in self._peers.items()
            if watched.state is not _DEAD and now >= self._silent_at(watched, silence_s, now)
        )

    def _silence_s(self) -> float:
        """Of many who come first one or other is always slow, and to say so is a word to all of them."""
        return in_crowd(SILENCE_S, len(self.first()))

    def _silent_at(self, watched: _Watched, silence_s: float, now: float) -> float:
        return watched.asked_at + max(silence_s, watched.round_trip.waited_s(now)) + self.lag.waited_s(now)

    def forget(self, peer: PeerId) -> None:
        """Stop watching a peer that left or whose record expired."""
        self._peers.pop(peer, None)

    def _has_room(self, peer: PeerId) -> bool:
        """Make room to watch one more, where it takes that: the dead go first, those heard of longest ago before.

        Who comes first is watched in the place of a live stranger as well, and gives way to nobody.
        """
        if len(self._peers) < PEER_LIMIT:
            return True
        first = self.first()
        others = [(w.state is not _DEAD, w.heard_at, other) for other, w in self._peers.items() if other not in first]
        is_alive, _, gone = min(others, default=(True, 0.0, peer))
        if not others or (is_alive and peer not in first):
            return False
        del self._peers[gone]
        return True

    # --- what peers say; `RECEIVERS` has what each message leads to ---

    def peer_seen(self, peer: PeerId, incarnation: int, now: float) -> list[Effect]:
        """Anything at all came from `peer` itself; the first time begins to watch it."""
        self._notice_stall(now)
        watched = self._peers.get(peer)
        if watched is None:
            if peer != self.me and self._has_room(peer):
                self._peers[peer] = _Watched(incarnation, heard_at=now)
            return []
        if incarnation > watched.incarnation:
            watched.incarnation = incarnation
        watched.lost_at = -math.inf
        watched.asked_at = math.inf
        watched.cut = False
        return self._happens(peer, watched, _HEARD, now)

    def link_made(self, peer: PeerId, took_s: float, now: float) -> None:
        """A link to `peer` took so long to make: several answers of its, and all that is known of them at first."""
        watched = self._peers.get(peer)
        if watched is not None:
            watched.round_trip.note(took_s, now)

    def heard_through(self, peer: PeerId, incarnation: int, now: float) -> list[Effect]:
        """A message that `peer` signed, and that we did not have yet, was passed on to us by another."""
        self._notice_stall(now)
        watched = self._peers.get(peer)
        if watched is None:
            if peer != self.me and self._has_room(peer):
                self._peers[peer] = _Watched(incarnation, heard_at=now, asked_at=-math.inf, cut=True)
                return [Revived(peer=peer)]
            return []
        watched.incarnation = max(watched.incarnation, incarnation)
        return self._happens(peer, watched, Event.REFUTED, now)

    def on_ping(self, peer: PeerId, nonce: int, incarnation: int, now: float) -> list[Effect]:
        """`peer` asks whether we are there."""
        effects = self.peer_seen(peer, incarnation, now)
        effects.append(Say(peer, Ack(nonce=nonce, incarnation=self.incarnation)))
        return effects

    def on_ack(self, peer: PeerId, nonce: int, incarnation: int, now: float) -> list[Effect]:
        """`peer` answered a ping, ours or one that we sent for another."""
        self._note_round_trip(peer, nonce, now)
        effects = self.peer_seen(peer, incarnation, now)
        relay = self._relays.get(nonce)
        if relay is not None and relay.target == peer:
            del self._relays[nonce]
            answer = Ack(nonce=relay.nonce, incarnation=self.incarnation, about=peer)
            effects.append(Say(relay.requester, answer))
        return effects

    def on_answer(self, peer: PeerId, number: int, incarnation: int, now: float) -> list[Effect]:
        """The connection with `peer` answered a ping, of whose nonce this is what it has room for."""
        watched = self._peers.get(peer)
        asked = (*(() if watched is None else watched.asked), *self._relays)
        nonce = next((one for one in asked if number_of(one) == number), number)
        return self.on_ack(peer, nonce, incarnation, now)

    def _note_round_trip(self, peer: PeerId, nonce: int, now: float) -> None:
        watched = self._peers.get(peer)
        at = None if watched is None else watched.asked.pop(nonce, None)
        if watched is not None and at is not None:
            watched.round_trip.note(now - at, now)

    def on_ping_request(self, requester: PeerId, target: PeerId, nonce: int, now: float) -> list[Effect]:
        """`requester` cannot reach `target`. Only peers we watch are pinged: we are nobody's reflector."""
        self._notice_stall(now)
        mine = sum(1 for relay in self._relays.values() if relay.requester == requester)
        limit = RELAY_LIMIT if requester in self.first() else STRANGERS_RELAY_LIMIT
        full = len(self._relays) >= limit or mine >= RELAYS_PER_PEER_LIMIT
        if requester not in self._peers or target not in self._peers or target == requester or full:
            return []
        if not self.has_link(target):
            watched = self._peers[target]
            is_gone = watched.cut or watched.state is _DEAD  # else its link is being made again
            return [Say(requester, Nack(target=target, nonce=nonce))] if is_gone else []
        ours = self._nonce()
        self._relays[ours] = _Relay(requester, nonce, target, now + self.pace * INDIRECT_DEADLINE_S)
        return [self._say_ping(target, ours)]

    def on_indirect_ack(self, via: PeerId, target: PeerId, nonce: int, now: float) -> list[Effect]:
        """`via` says that `target` answered. Believed only from one whom we asked, about this very probe."""
        self._notice_stall(now)
        watched = self._asked(via, target, nonce)
        return [] if watched is None else self._happens(target, watched, Event.VOUCHED, now)

    def on_nack(self, via: PeerId, target: PeerId, nonce: int, now: float) -> list[Effect]:
        """`via` cannot reach `target` either. If all whom we asked say so, a broken connection is confirmed."""
        self._notice_stall(now)
        watched = self._asked(via, target, nonce)
        if watched is None or watched.inquiry is None:
            return []
        watched.inquiry.without.add(via)
        return self._confirmed_by_others(target, watched, now)

    def _asked(self, via: PeerId, target: PeerId, nonce: int) -> _Watched | None:
        """The target of an inquiry, if `via` is one of those whom we asked, and about this very one."""
        watched = self._peers.get(target)
        inquiry = None if watched is None else watched.inquiry
        return watched if inquiry is not None and inquiry.nonce == nonce and via in inquiry.vias else None

    def _confirmed_by_others(self, peer: PeerId, watched: _Watched, now: float) -> list[Effect]:
        inquiry = watched.inquiry
        nobody_has = inquiry is not None and bool(inquiry.vias) and inquiry.without == set(inquiry.vias)
        return self._happens(peer, watched, Event.LOST, now) if watched.cut and nobody_has else []

    def on_suspicion(self, peer: PeerId, incarnation: int, now: float) -> list[Effect]:
        """Somebody suspects `peer`, perhaps us, in `incarnation`."""
        self._notice_stall(now)
        if peer == self.me:
            return self._refute(incarnation, now)
        watched = self._peers.get(peer)
        if watched is None or incarnation < watched.incarnation:
            return []
        return self._happens(peer, watched, _ACCUSED, now)

    def on_refutation(self, peer: PeerId, incarnation: int, now: float) -> list[Effect]:
        """A statement signed by `peer` in `incarnation` reached us through others."""
        self._notice_stall(now)
        watched = self._peers.get(peer)
        if watched is None or incarnation <= watched.incarnation:
            return []
        watched.incarnation = incarnation
        return self._happens(peer, watched, Event.REFUTED, now)

    def connection_lost(self, peer: PeerId, now: float, *, confirmed: bool = False) -> list[Effect]:
        """A connection to `peer` broke: ask others at once. `confirmed` if re-making it was refused: it is dead."""
        self._notice_stall(now)
        watched = self._peers.get(peer)
        if watched is None:
            return []
        if confirmed:
            return self._happens(peer, watched, Event.LOST, now)
        since_s, watched.lost_at = now - watched.lost_at, now
        if watched.state is not _ALIVE or since_s < LOST_WINDOW_S:
            return []  # already looking; several connections to one peer often break together
        return self._ping(peer, watched, now)

    def unreachable(self, peer: PeerId, now: float) -> list[Effect]:
        """A broken connection to `peer` could not be re-made: nobody refused it, but nobody answered either."""
        self._notice_stall(now)
        watched = self._peers.get(peer)
        if watched is None:
            return []
        watched.cut = True
        return self._confirmed_by_others(peer, watched, now)

    # --- time ---

    def tick(self, now: float) -> list[Effect]:
        """Time has come to `now`; to be called every `tick_s`, or when `rest_s` has passed."""
        self._notice_stall(now)
        self._ran_at, self._rested_s = now, 0.0
        effects: list[Effect] = []
        overdue, due = self._look(now)
        if overdue:
            for peer, watched in overdue:
                effects += self._overdue(peer, watched, now)
            _, due = self._look(now)
        for _, peer, watched in due:
            effects += self._ping(peer, watched, now)
        if self._relays:
            self._relays = {nonce: relay for nonce, relay in self._relays.items() if now < relay.deadline}
        return effects

    def rest_s(self, now: float, at_most_s: float = RESTING_TICK_S) -> float:
        """Seconds until `tick` is to be called next, asked right after it was; who does so then is not late.

        at_most_s: for so long who asks is going to rest. What others say meanwhile leads to no deadline that is sooner.
        """
        rest_s = WAITING_TICK_S if self.awaited() else RESTING_TICK_S
        silence_s = self._silence_s()
        for watched in self._peers.values():
            if watched.probe is not None:
                rest_s = min(rest_s, watched.probe.deadline - now)
            elif watched.state is _SUSPECT:
                rest_s = min(rest_s, watched.suspect_until - now)
            if watched.asked_at < math.inf and (silent_s := self._silent_at(watched, silence_s, now) - now) > 0:
                rest_s = min(rest_s, silent_s)
        rest_s = min(rest_s, at_most_s)
        self._rested_s = rest_s - self.tick_s
        return rest_s

    def _overdue(self, peer: PeerId, watched: _Watched, now: float) -> list[Effect]:
        """Take the next step against a peer that let a deadline pass."""
        if watched.state is _SUSPECT and now >= watched.suspect_until:
            return self._happens(peer, watched, Event.EXPIRED, now)
        probe = watched.probe
        if probe is None or now < probe.deadline:
            return []
        if probe.indirect:
            return self._happens(peer, watched, Event.UNANSWERED, now)
        probe.indirect = True
        probe.deadline = now + self._waited_s(INDIRECT_DEADLINE_S, watched, now)
        # The direct path gets a second chance as well: one lost packet should not make a suspect.
        return [self._say_ping(peer, probe.nonce), *self._inquire(peer, watched, probe.nonce)]

    def _inquire(self, peer: PeerId, watched: _Watched, nonce: int) -> list[Effect]:
        """Ask others to ping `peer` for us: those to whom we have a link, before all who may have one to it; of those
        the ones that come first, lest strangers answer for everybody."""
        others = [other for other in self.in_state(_ALIVE) if other != peer and self.has_link(other)]
        self.rng.shuffle(others)
        first = self.first()
        others.sort(key=lambda other: (not self.can_ask(other, peer), other not in first))
        vias = tuple(others[:INDIRECT_PEERS])
        watched.inquiry = _Inquiry(nonce, vias)
        return [Say(via, PingRequest(target=peer, nonce=nonce)) for via in vias]

    def _look(self, now: float) -> tuple[list[tuple[PeerId, _Watched]], list[tuple[float, PeerId, _Watched]]]:
        """List the peers that may have let a deadline pass, and those to ping now, the longest overdue first."""
        peers = self._peers
        first = self.first() if len(peers) > CROWD_PEERS else ()
        awaited, ring = frozenset(self.awaited()), self._ring(first)
        alive = [watched.state for watched in peers.values()].count(_ALIVE)
        seldom = CALM_TIMES if self.calm() else 1.0
        interval, close_interval = seldom * probe_interval_s(alive), seldom * close_interval_s(alive)
        among_first = seldom * probe_interval_s(sum(1 for p in first if p in peers and peers[p].state is _ALIVE))
        overdue: list[tuple[PeerId, _Watched]] = []
        due: list[tuple[float, PeerId, _Watched]] = []
        for peer, watched in peers.items():
            state, probe = watched.state, watched.probe
            if (probe is not None and now >= probe.deadline) or now >= watched.suspect_until:
                overdue.append((peer, watched))
            if state is _ALIVE:
                if probe is not None:
                    continue
                silent_s = among_first if peer in first else interval
                if peer in ring:
                    silent_s = min(silent_s, close_interval)
                at = watched.heard_at + self.pace * (PROBE_INTERVAL_S if peer in awaited else silent_s)
            elif state is _SUSPECT:
                at = watched.pinged_at + max(self.pace * PROBE_INTERVAL_S, self._answer_s(watched, now))
            else:
                at = watched.pinged_at + DEAD_PROBE_INTERVAL_S
            if now >= at:
                due.append((at, peer, watched))
        if len(due) > 1:
            due.sort()
        return overdue, due[:PROBES_PER_TICK_LIMIT]

    def _ring(self, first: Collection[PeerId]) -> set[PeerId]:
        """Peers to watch closely though nobody waits for them: the next ones around the ring of all that answer.

        Of those that come `first` there is a ring too, lest strangers stand between them.
        """
        alive = ((peer, watched.probe) for peer, watched in self._peers.items() if watched.state is _ALIVE)
        answering = sorted(peer for peer, probe in alive if probe is None or not probe.indirect)
        ring = set(next_around(answering, self.me, CLOSE_PEERS))
        if self.me in first:
            ring.update(next_around([peer for peer in answering if peer in first], self.me, CLOSE_PEERS))
        return ring

    def _notice_stall(self, now: float) -> None:
        """If we did not run for a while, nobody else is to blame for the silence: begin all waits anew.

        Only so often per silence of a peer, though: a machine that is always late must still find its dead.
        """
        late_s = now - self._ran_at if self._ran_at is not None else 0.0
        if late_s < 0:
            raise LocalError(f"membership: time went back by {-late_s} s")
        late_s -= self._rested_s
        self.lag.note(late_s - self.tick_s, now)
        if late_s <= LOCAL_STALL_S:
            return
        self._ran_at, self._rested_s = now, 0.0
        for watched in self._peers.values():
            watched.lost_at = -math.inf
            if watched.asked_at > -math.inf:
                watched.asked_at = math.inf
            if watched.excuses < EXCUSES_PER_SILENCE_LIMIT:
                watched.excuses += 1
                watched.probe = None
                watched.pinged_at = -math.inf
                watched.suspect_until = now + self._waited_s(SUSPICION_S, watched, now)

    # --- steps ---

    def _happens(self, peer: PeerId, watched: _Watched, event: Event, now: float) -> list[Effect]:
        """Move `watched` by the table, and say what follows."""
        if event is _HEARD and watched.state is _ALIVE:  # as nearly always
            watched.probe = watched.inquiry = None
            watched.heard_at = now
            watched.excuses = 0
            return []
        was, watched.state = watched.state, next_state(watched.state, event)
        effects: list[Effect] = []
        if watched.state is _ALIVE:
            if event is _ACCUSED:
                # Look for ourselves, unless we just did or are at it.
                silent_s = max(PROBE_INTERVAL_S, self._answer_s(watched, now))
                idle = watched.probe is None and now - watched.heard_at >= silent_s
                return self._ping(peer, watched, now) if idle else []
            watched.probe = watched.inquiry = None
            watched.heard_at = now
            watched.excuses = 0
            if was is not _ALIVE:
                effects.append(Revived(peer=peer))
        elif watched.state is _SUSPECT and was is _ALIVE:
            watched.probe = None
            watched.suspect_until = now + self._waited_s(SUSPICION_S, watched, now)
            effects.append(Suspected(peer=peer, incarnation=watched.incarnation))
        elif watched.state is _DEAD and was is not _DEAD:
            watched.probe = None
            watched.pinged_at = now
            effects.append(Died(peer=peer))
            # A firewall may refuse as well: whom others still reach is alive after all.
            effects += self._inquire(peer, watched, self._nonce())
        elif event is Event.REFUTED and now - watched.pinged_at >= LOST_WINDOW_S:  # dead, and yet it signs
            effects += self._ping(peer, watched, now)
        return effects

    def _waited_s(self, deadline_s: float, watched: _Watched, now: float) -> float:
        """How long a word of a peer is waited for, of which `deadline_s` is long enough where nobody is slow."""
        return max(self.pace * deadline_s, self._answer_s(watched, now)) + self.lag.waited_s(now)

    def late_s(self, now: float) -> float:
        """By how much longer than usual anybody is waited for: this node runs late, or most others answered late.

        Where some come first it is they who count: else strangers, of whom anybody can be many, could hold up all. What
        one of several takes does not count either.
        """
        first = self.first()
        trips = [watched.round_trip for peer, watched in self._peers.items() if not first or peer in first]
        return max(self.lag.waited_s(now), WAITED_TIMES * _usual_s(trips, now))

    def _answer_s(self, watched: _Watched, now: float) -> float:
        """How long an answer is waited for where answers are late: as its own were, or as most peers' were of late.

        Most of whom this node pings it pings seldom, and knows no more of them than what it sees of the others.
        """
        usual_s = _usual_s((other.round_trip for other in self._peers.values()), now)
        return WAITED_TIMES * max(usual_s, watched.round_trip.seconds(now))

    def _ping(self, peer: PeerId, watched: _Watched, now: float) -> list[Effect]:
        """Ping `peer`. Of a live one an answer is expected as soon as its answers come; others just get their chance.

        One that is not live, or has no link to us, is asked after through others as well.
        """
        nonce, indirect = self._nonce(), not self.has_link(peer)
        watched.pinged_at = watched.asked[nonce] = now
        watched.asked_at = min(watched.asked_at, now)
        if len(watched.asked) > PINGS_REMEMBERED:
            del watched.asked[next(iter(watched.asked))]
        effects: list[Effect] = [self._say_ping(peer, nonce)]
        if watched.state is _ALIVE:
            deadline_s = INDIRECT_DEADLINE_S if indirect else ACK_DEADLINE_S
            watched.probe = _Probe(nonce, now + self._waited_s(deadline_s, watched, now), indirect)
        if indirect or watched.state is not _ALIVE:
            effects += self._inquire(peer, watched, nonce)
        return effects

    def _say_ping(self, peer: PeerId, nonce: int) -> Say:
        return Say(peer, Ping(nonce=nonce, incarnation=self.incarnation))

    def _refute(self, incarnation: int, now: float) -> list[Effect]:
        """Outbid an accusation against us; at most every `REFUTE_INTERVAL_S`, lest a liar make us flood."""
        stale = incarnation < self.incarnation or incarnation >= INCARNATION_LIMIT
        if stale or now - self._refuted_at < REFUTE_INTERVAL_S:
            return []
        self.incarnation = incarnation + 1
        self._refuted_at = now
        return [Refute(incarnation=self.incarnation)]

    def _nonce(self) -> int:
        return self.rng.getrandbits(NONCE_BITS)


def _take_ack(machine: MembershipMachine, peer: PeerId, ack: Ack, now: float) -> list[Effect]:
    if ack.about is None:
        return machine.on_ack(peer, ack.nonce, ack.incarnation, now)
    return machine.on_indirect_ack(peer, PeerId(ack.about), ack.nonce, now)


RECEIVERS: Mapping[type, Callable[[MembershipMachine, PeerId, Any, float], list[Effect]]] = {
    Ping: lambda machine, peer, ping, now: machine.on_ping(peer, ping.nonce, ping.incarnation, now),
    Ack: _take_ack,
    PingRequest: lambda machine, peer, asked, now: machine.on_ping_request(peer, asked.target, asked.nonce, now),
    Nack: lambda machine, peer, nack, now: machine.on_nack(peer, nack.target, nack.nonce, now),
    Suspicion: lambda machine, peer, said, now: machine.on_suspicion(said.peer, said.incarnation, now),
}
"""Handler of a machine for each of the messages that a peer itself says, at a time."""


def _usual_s(trips: Iterable[Lateness], now: float) -> float:
    """How late the answers of most were that answered lately."""
    lately = sorted(trip.seconds(now) for trip in trips if trip.noted_within(HALF_LIFE_S, now))
    return lately[(len(lately) - 1) // 2] if lately else 0.0
