"""Membership of the swarm: admission, records by gossip, the failure detector, and links to everyone or to neighbours.

The shell around two machines of the protocol: `MembershipMachine` decides who is alive from pings and broken links,
`RecordBook` keeps the newest signed record of each. This module moves their bytes; `shoal.swarm.dialling` dials whoever
is known and not linked. Whom this node does not reach all the same it tells its neighbours, who help out
(`shoal.swarm.message_relay`).

Where the strategy does not link all (`Strategy.links_all`), links are kept with a few (`shoal.protocol.neighbours`),
and these alone are watched. Of all others a node knows what their records say, for as long as these last; it can
connect to one of them for a while (`shoal.swarm.brief_connections`). So does a follower (`shoal.protocol.followers`)
where the strategy links all others; each of those has a few places for followers beside its links with one another.

Where who has no seat waits outside (`shoal.protocol.enlisting`), the chain says of each round who links all others that
take part, and who follows. A node that follows from now on keeps a few of its links, and ends the others after a while.
"""

from __future__ import annotations

import contextlib
import logging
import math
import random
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import trio

from shoal.protocol.address import CircuitAddress, parse_any
from shoal.protocol.admission import Admission
from shoal.protocol.backoff import Backoff
from shoal.protocol.errors import ConfigError, LocalError, NetworkError, RemoteError
from shoal.protocol.followers import FOLLOWERS_LIMIT, Places, has_room, is_follower
from shoal.protocol.identity import PeerId
from shoal.protocol.invites import Revocations
from shoal.protocol.limits import TokenBucket
from shoal.protocol.manifest import Manifest
from shoal.protocol.membership import (
    RECEIVERS,
    TICK_S,
    Died,
    Effect,
    MembershipMachine,
    Refute,
    Revived,
    Say,
    State,
    Suspected,
)
from shoal.protocol.messages import MEMBER_LIMIT, Message
from shoal.protocol.neighbours import CHOSEN_LINKS, NEIGHBOUR_LIMIT, UNLINKED_S, WATCH_PACE, Neighbours
from shoal.protocol.peering import (
    REASON_LIMIT_CHARS,
    RECORDS_IN_WELCOME_LIMIT,
    Announce,
    Full,
    Hello,
    HelloAnswer,
    LinkMessage,
    Reach,
    Refusal,
    Suspicion,
    SwarmMessage,
    Welcome,
)
from shoal.protocol.places import Rank
from shoal.protocol.records import NodeRecord, RecordBook, open_record, renewal_s, seal_record
from shoal.protocol.timeouts import in_crowd, next_beat
from shoal.protocol.wire import WIRE_VERSION, Sealer, SwarmId
from shoal.swarm.brief_connections import BriefConnections
from shoal.swarm.dialling import Dialling, is_there
from shoal.swarm.host import Host, NotReached
from shoal.swarm.key_probe import KeyProbe
from shoal.swarm.last_seen import LastSeen
from shoal.swarm.limits import KnownHosts, Reason
from shoal.swarm.links import LINK_LIMIT, Links, NoPlaceLeft
from shoal.swarm.strangers import Strangers
from shoal.swarm.streams import Mailbox

REDIAL_DEADLINE_S = 0.8
"""Re-making a broken connection: the machine of a killed peer refuses at once, and it is then known to be dead."""
REDIAL_PAUSE_S = 0.1
"""Both ends re-make a link at once, and one attempt can spoil the other: one failure is no proof of a death."""
REDIALS_PER_S, REDIALS_BURST = 4.0, 16.0
"""Links that one node makes again at once: who loses many, since its network fails or it is slow itself, does not spend
all that it has on handshakes. Those beyond are dialled like anybody who is known."""
RECORD_PERIOD_S = 5.0
"""Between two looks at what this node's record says: what is new in it is told at once."""
GOSSIPED_PER_S = 1.0
"""Records that all nodes together gossip, where all are to be linked."""
IDLE_PHASES = ("paused", "leaving")
LACK_SETTLE_S = 0.5
"""So long a live peer is without a link before others are told: most are re-made, or their peers dead, by then."""
STRANGER_SETTLE_S = 3.0
"""The same for one that was never heard; it may be about to be linked."""
REACH_PERIOD_S, STRANGERS_REACH_PERIOD_S = 0.5, 5.0
"""At most so often others are told, at first; the latter where nobody is lacking anew who comes first: of who is there
again they hear later, for it may be lacking again before that."""
REACH_PERIOD_LIMIT_S, REACH_CALM_S = 8.0, 16.0
"""To the first the pause grows, twofold each time, where it changes all the while whom a node reaches, as in a swarm
that is starting: there all tell all. After the second it begins anew."""
WORDS_PER_S, WORDS_BURST = 2.0, 256.0
"""Messages by which a node tells all the others whom it suspects, and whom it does not reach. Each hears as many as it
sends: in a crowd where all have too much to do everybody would else hear of everybody all the while, and have more. Who
is suspected beyond that is told so alone."""
OUTSIDE_SETTLE_S = 5.0
"""So long a node without a seat keeps the links that it had: others may still want what it owned in its round."""
CHANGE_LIMIT_ITEMS = 1024
PLACES_LIMIT_PEERS = 1024
"""Peers of which it is remembered where they were linked from last."""
OWN_ADDRESS_GONE = "this machine's address is another one"

Taker = Callable[[PeerId, Any], None]
"""Takes a message of a peer; must not block."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Change:
    """A peer was "linked" or its link "lost"; it was found "suspected", "died" or "revived".

    why: what ended a link that is "lost".
    "revoked": the swarm's authority has taken it back, and the link with it, if there was one, is closed.
    "detoured": nothing comes over a link to it, so others are asked to pass on what the two have to say to each other.
    """

    kind: str
    peer: PeerId
    why: str = field(default="", compare=False)


class Members:
    """The swarm as this node sees it. Use from trio's thread only.

    record: makes this node's current record. admission: None for what the manifest says alone. follows: this node is a
    follower. outside: whether the chain keeps a peer outside the round under way; None where it does so to nobody. Who
    takes which message is said by `register`; what concerns links, records and who is alive is taken
    here.
    """

    def __init__(
        self,
        *,
        host: Host,
        sealer: Sealer,
        swarm_id: SwarmId,
        manifest: Manifest,
        record: Callable[[], NodeRecord],
        admission: Admission | None = None,
        follows: bool = False,
        outside: Callable[[PeerId], bool] | None = None,
    ) -> None:
        self._host = host
        self._sealer = sealer
        self._swarm_id = swarm_id
        self._record = record
        self.admission = admission or Admission(manifest=manifest)
        self.book = RecordBook(swarm_id, keep=self.admission.first)
        self.on_elsewhere: Callable[[NodeRecord], None] = lambda record: None
        """Called with a record that this node's key signed, and not this node: it is further on."""
        self.on_moved: Callable[[PeerId, str], None] = lambda peer, host: None
        """Called with a peer that is linked from another address than before, and the one that it has left."""
        self.probe = KeyProbe(
            host,
            sealer=sealer,
            swarm_id=swarm_id,
            book=self.book,
            sealed_record=self._sealed_record,
            found=lambda record: self.on_elsewhere(record),
        )
        self._me = host.peer_id
        self._rng = random.Random(self._me)
        self._outside = outside
        self._may_link_all = manifest.strategy.links_all and not follows
        self._choice = Neighbours(me=self._me, rng=self._rng)
        self._linked_all = self.links_all
        self._to_end: frozenset[PeerId] = frozenset()  # links of a node that has no seat any more
        self._end_at = self._too_many_at = math.inf
        self._pulls_of_all = manifest.rollouts is not None
        self._topic = f"shoal/{swarm_id.hex()}/records"
        self.links = Links(
            host=host,
            swarm_id=swarm_id,
            sealer=sealer,
            admission_control=self,
            refusals=host.refusals,
            places=self._link_places,
            pace=self._pace,
            own_lag_s=self.own_lag_s,
        )
        self.links.message_relay.belongs = self.admission.belongs
        self._known = KnownHosts()
        self._strangers = Strangers(host)
        self._room = Places()
        host.pinged = self._pinged
        host.is_admitted = self.links.holds
        host.is_known = self._known.__contains__
        host.is_expected = self.admits
        host.comes_first = lambda peer: self.rank(peer) is Rank.FIRST
        self._vouched = manifest.swarm.admission != "open"  # who is linked is somebody whom the swarm chose
        self._last_seen = LastSeen(-math.inf)
        self._shut_out: set[PeerId] = set()
        """Those parted from: of who came with an invite that was revoked, the record that says so is forgotten."""
        self._redials = TokenBucket(REDIALS_PER_S, REDIALS_BURST)
        self.machine = MembershipMachine(
            me=self._me,
            rng=self._rng,
            has_link=lambda peer: peer in self.links.linked(),
            can_ask=lambda via, target: not self.links.message_relay.apart(via, target),
            first=self.admission.first,
            pace=self._pace,
        )
        self.changes: Mailbox[Change] = Mailbox(CHANGE_LIMIT_ITEMS)
        self._jobs, self._job_queue = trio.open_memory_channel[Callable[[], Awaitable[None]]](math.inf)
        self._dialling = Dialling(
            me=self._me,
            links=self.links,
            book=self.book,
            admission=self.admission,
            never_heard=lambda peer: self.machine.state_of(peer) is None,
            start=self._jobs.send_nowait,
            shut_out=self.probe.shut_out,
            neighbours=lambda: self._neighbours,
            follows=self.follows,
        )
        self.addresses_of = self._dialling.addresses_of
        self.found = self._dialling.found
        self._hosts: dict[PeerId, str | None] = {}  # where links led to
        self._places: dict[PeerId, str] = {}  # the same, also after their end; who was linked last is last
        self._without_link: dict[PeerId, float] = {}  # since when
        self._reach_told_at = -math.inf
        self._reach_urgent_at = -math.inf
        self._reach_pause = Backoff(REACH_PERIOD_S, REACH_PERIOD_LIMIT_S)
        self._words = TokenBucket(WORDS_PER_S, WORDS_BURST)
        self._announce = trio.Event()
        self._takers: dict[type, Taker] = {}
        self.register({kind: partial(self._take_sign_of_life, receive) for kind, receive in RECEIVERS.items()})
        self.register(
            {
                Reach: lambda peer, reach: self.links.message_relay.told(peer, reach.lacks),
                Announce: lambda peer, announce: self._take_record(announce.record, blame=peer),
                Revocations: lambda peer, revocations: self.revoke(revocations, blame=peer),
            }
        )
        self._about_links = frozenset(self._takers)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep links, records and the detector going until cancelled."""
        self._last_seen = LastSeen(trio.current_time())
        mailbox = await self._host.subscribe(self._topic)
        async with trio.open_nursery() as nursery:
            await nursery.start(self.links.run)
            nursery.start_soon(self._tick)
            nursery.start_soon(self._publish)
            nursery.start_soon(self._strangers.run)
            nursery.start_soon(self.probe.run)
            task_status.started()
            nursery.start_soon(self._run_jobs)
            async for gossip in mailbox:
                self._take_record(gossip.data, blame=gossip.origin)

    async def _run_jobs(self) -> None:
        async with trio.open_nursery() as nursery:
            async for job in self._job_queue:
                nursery.start_soon(job)

    # -- what others ask -------------------------------------------------------------------------------------

    def alive(self) -> frozenset[PeerId]:
        """The peers not believed dead."""
        return frozenset(self.machine.alive())

    def own_lag_s(self) -> float:
        """Return by how much longer than usual this node waits for all, since it runs late itself."""
        return self.machine.lag.waited_s(trio.current_time())

    def late_s(self) -> float:
        """Return by how much longer than usual anybody is waited for, since this node runs late or most answer late."""
        return self.machine.late_s(trio.current_time())

    def suspected(self) -> frozenset[PeerId]:
        """Those of them that neither this node nor those it asked could reach."""
        return frozenset(self.machine.in_state(State.SUSPECT))

    def present(self) -> frozenset[PeerId]:
        """The peers believed to be here: those not believed dead, and where not all are watched, by their records."""
        if self._neighbours is None:
            return self.alive()
        dead = self.machine.in_state(State.DEAD)
        by_record = {
            record.peer
            for record in self.book.records()
            if record.phase != "leaving" and not self._neighbours.is_gone(record.peer, self.book.order(record.peer))
        }
        return frozenset(by_record.union(self.alive()).difference(dead, (self._me,)))

    def takes_part(self, peer: PeerId) -> bool:
        """True if what a peer says to the whole swarm counts here: it is there, or may be and is not watched."""
        if self.links_all and not self.follows(peer):
            return peer in self.links.linked() or self.machine.state_of(peer) in (State.ALIVE, State.SUSPECT)
        return self.may_join(peer)

    def brief_connections(self) -> BriefConnections | None:
        """Connections to those who are not linked, where not all are to be; followers are not. None to who has left."""
        if self.links_all and not self._pulls_of_all:
            return None
        return BriefConnections(self._host, addresses_of=self._addresses_unless_left, is_linked=self.links.holds)

    def _addresses_unless_left(self, peer: PeerId) -> Sequence[str]:
        return () if self._is_leaving(peer) else self.addresses_of(peer)

    @property
    def links_all(self) -> bool:
        """True if a link is kept with everybody who takes part."""
        return self._may_link_all and not (self._outside is not None and self._outside(self._me))

    @property
    def _neighbours(self) -> Neighbours | None:
        """The choice of whom to link, None while that is all."""
        return None if self.links_all else self._choice

    @property
    def _pace(self) -> float:
        return 1.0 if self.links_all else WATCH_PACE

    @property
    def links_wanted(self) -> int:
        """Number of links for which a node that has none dials at once."""
        return LINK_LIMIT if self.links_all else CHOSEN_LINKS

    def follows(self, peer: PeerId) -> bool:
        """True if a peer follows: as its record says, or the chain, where that keeps some outside."""
        return is_follower(self.book.get(peer)) if self._outside is None else self._outside(peer)

    def followers(self) -> frozenset[PeerId]:
        """The linked peers that are followers."""
        return frozenset(filter(self.follows, self.links.linked()))

    def leaving(self) -> frozenset[PeerId]:
        """Those not believed dead whose records say that they are about to leave."""
        return frozenset(peer for peer in self.machine.alive() if self._is_leaving(peer))

    def record_of(self, peer: PeerId) -> NodeRecord | None:
        """The newest record of a peer."""
        return self.book.get(peer)

    def speeds(self, peers: Sequence[PeerId]) -> list[float]:
        """Steps/s of those of the peers, but for this node, that are alive and train, by their records; 0: unknown."""
        records = [self.book.get(peer) for peer in sorted(self.present().intersection(peers))]
        return [0.0 if r is None else r.steps_per_s for r in records if r is None or r.phase not in IDLE_PHASES]

    def announce(self) -> None:
        """This node's record changed: publish it now rather than at the next period."""
        self._announce.set()

    def revoke(self, revocations: Revocations, *, blame: PeerId | None = None) -> None:
        """Take the authority's list, pass it on if it is news, and part from everybody on it, who is sent it first.

        A change of this node itself, "revoked", says that it is on it.
        Raises RemoteError, blaming `blame`, for a list that the authority did not sign.
        """
        if not self.admission.take(revocations, peer=blame):
            return
        assert self.admission.revocations is not None
        self.links.broadcast(self.admission.revocations)
        if self.admission.is_revoked(self._me, self._record()):
            self.changes.put(Change("revoked", self._me))
        known = {*self._dialling.known(), *self.links.linked(), *self.links.resting()} - {self._me}
        for peer in sorted(peer for peer in known if self.admission.is_revoked(peer, self.book.get(peer))):
            self._shut_out.add(peer)
            self.changes.put(Change("revoked", peer))
            self.links.drop(peer, "the swarm's authority took its admission back", last_word=True)
            self._carry_out(self.machine.connection_lost(peer, trio.current_time(), confirmed=True))
            self.book.forget(peer)
            self._dialling.forget(peer)

    # -- the gatekeeper of the links -------------------------------------------------------------------------

    def hello(self) -> Hello:
        """This node's introduction."""
        return Hello(
            wire=WIRE_VERSION, swarm=self._swarm_id, software=self._record().software, record=self._sealed_record()
        )

    def welcome(self, peer: PeerId, hello: Hello) -> tuple[HelloAnswer, Revocations | None]:
        """Admit a peer of this swarm that the manifest admits, and whose record holds.

        Who is refused since it was revoked gets the list that says so: it may have been away when that was sent.
        """
        reason = _reason_to_refuse(peer, hello, self._swarm_id, self.admission)
        if reason is not None:
            self._host.refusals.note(Reason.ADMISSION)
            self._strangers.refused(peer)
            return Refusal(reason=reason[:REASON_LIMIT_CHARS]), self._revocations_of(peer, hello)
        self._note_seen(peer)
        (before, _), known = self.book.order(peer), self.book.sealed(peer)
        self._take_record(hello.record, blame=peer)
        boot, _ = self.book.order(peer)
        later = () if known is None or self.book.sealed(peer) != known else (known,)
        if later and boot > _own_record(peer, hello.record, self._swarm_id).boot:
            logger.warning("%s was started more often than who says hello with its key: that one is told", peer)
            self._strangers.refused(peer)
            return Welcome(record=b"", others=later), None
        if peer in self.links.resting() or (peer in self.links.linked() and 0 < before < boot):
            # At its end there is no link: it restarted before its death was noticed, or lost it.
            self.links.drop(peer, "it introduces itself anew")
        if self.follows(peer) and not self._let_follower_in(peer):
            return self.full(peer), None
        others = (*later, *self._others(peer))[:RECORDS_IN_WELCOME_LIMIT]
        return Welcome(record=self._sealed_record(), others=others), None

    def _revocations_of(self, peer: PeerId, hello: Hello) -> Revocations | None:
        """The list by which a peer is refused that says hello, None where it is refused for something else."""
        with contextlib.suppress(RemoteError):
            if self.admission.is_revoked(peer, _own_record(peer, hello.record, self._swarm_id)):
                if self.rank(peer) > Rank.STRANGER:  # it counts until it is forgotten; of others there is no end
                    self._shut_out.add(peer)
                return self.admission.revocations
        return None

    def told_revocations(self, peer: PeerId, revocations: Revocations) -> None:
        """Take the list for which a peer refused this node. Raises RemoteError if the authority did not sign it."""
        self.revoke(revocations, blame=peer)

    def _let_follower_in(self, peer: PeerId) -> bool:
        """Have a place for a follower, be it that of a stranger where it is none; whether there is one."""
        followers, now = self.followers(), trio.current_time()
        if not self._room.take(peer, followers, now, comes_first=lambda one: self.rank(one) > Rank.STRANGER):
            return False
        if not has_room(followers, peer):
            self.links.make_way(peer, followers)
        return True

    def _others(self, peer: PeerId) -> tuple[bytes, ...]:
        others = [r.peer for r in self.book.records() if r.peer not in (peer, self._me)]
        follows = self.follows(peer)
        if not self.links_all or follows:
            self._rng.shuffle(others)  # each who asks is told others
        ranked = sorted(others, key=lambda other: -self.rank(other))  # else strangers could fill it
        if follows:  # those of rank may all be full
            ranked = [one for both in zip(ranked, others, strict=True) for one in both]
        sealed = (self.book.sealed(other) for other in [*dict.fromkeys(ranked)][:RECORDS_IN_WELCOME_LIMIT])
        return tuple(data for data in sealed if data is not None)

    def welcomed(self, peer: PeerId, welcome: Welcome) -> None:
        """Admit the peer as well, and take the records that it sent. Raises RemoteError if that may not be."""
        if not welcome.record:
            for data in welcome.others:
                self._take_record(data, blame=peer)
            raise RemoteError("another node with this node's key, started more often, was there", peer=peer)
        if _own_record(peer, welcome.record, self._swarm_id).boot < self.book.order(peer)[0]:
            raise RemoteError("an earlier life than is known of it; its key may be in use in two places", peer=peer)
        reason = self.admission.reason_not_admitted(_own_record(peer, welcome.record, self._swarm_id))
        if reason is not None:
            raise RemoteError(f"does not belong to this swarm: {reason}", peer=peer)
        self._take_record(welcome.record, blame=peer)
        self._take_others(peer, welcome.others)

    def _take_others(self, peer: PeerId, others: Sequence[bytes]) -> None:
        """Take the records that `peer` names; a node without any link then dials all that it knows of at once."""
        for data in others:
            self._take_record(data, blame=peer)
        if not self.links.linked():
            here = (record.peer for record in self.book.records() if record.phase != "leaving")
            self._dialling.dial_now(set(here) - {self._me, peer})

    def rank(self, peer: PeerId) -> Rank:
        """Rank of a peer when there is not room for all."""
        return self.admission.rank(peer)

    def full(self, peer: PeerId) -> Full:
        """Name others to a peer for which there is no place here."""
        self._strangers.refused(peer)
        return Full(others=self._others(peer))

    def turned_away(self, peer: PeerId, full: Full) -> None:
        """Take note of the others whom a peer names that has no place left for this node."""
        self._note_seen(peer)
        self._take_others(peer, full.others)

    def _link_places(self, dialled: bool) -> int | None:
        """Links that there may be, where they are few; some places are kept for whom this node chooses itself."""
        if self.links_all:
            return None
        return NEIGHBOUR_LIMIT - (0 if dialled else self._choice.kept_places(self.links.linked()))

    def linked(self, peer: PeerId) -> None:
        """A link is up."""
        self._dialling.linked(peer)
        if self._neighbours is not None:
            self._neighbours.lives(peer)
        if len(self.links.linked()) == 1:  # whom gossip reaches
            self.announce()
        self._hosts[peer] = self._host.host_of(peer)
        self._note_place(peer, self._hosts[peer])
        self._note_host(peer)
        self._host.gossip_with(peer)
        self._carry_out(self.machine.peer_seen(peer, self._incarnation(peer), trio.current_time()))
        self.changes.put(Change("linked", peer))
        if self.admission.revocations is not None:
            self.links.send(peer, self.admission.revocations)

    def _note_place(self, peer: PeerId, host: str | None) -> None:
        """Note where a peer is linked from, and say so if it was elsewhere: nothing leads there any more."""
        if host is None:
            return
        before = self._places.pop(peer, host)
        self._places[peer] = host
        if len(self._places) > PLACES_LIMIT_PEERS:
            del self._places[next(iter(self._places))]
        if before != host:
            self.on_moved(peer, before)

    def moved(self, gone: Collection[str]) -> None:
        """Make the links anew that led from addresses which this machine has no more, and tell all where it is.

        Who was silent or could not be reached is dialled as well, for that was from where this node was.
        """
        if not self.links.linked():  # where this machine was, whoever is well may have been silent
            self._last_seen = LastSeen(trio.current_time())
        self.links.end_from(gone, OWN_ADDRESS_GONE)
        self.links.end_rests()
        self._dialling.begin_anew()
        self.announce()

    def made(self, peer: PeerId, took_s: float) -> None:
        """A link that this node dialled is up, and took so long."""
        self.machine.link_made(peer, took_s, trio.current_time())

    def _note_host(self, peer: PeerId) -> None:
        """Connections from where a peer is that belongs to the swarm come before others."""
        if self._vouched or self.rank(peer) > Rank.STRANGER:
            self._known.note(self._host.host_of(peer))

    def expect_from(self, addresses: Iterable[str]) -> None:
        """Connections from where members were last, or the user says that they are, come before others from now on."""
        for text in addresses:
            with contextlib.suppress(ConfigError):
                address = parse_any(text)
                self._known.note(None if isinstance(address, CircuitAddress) else address.host)

    def gave_way(self, peer: PeerId) -> None:
        """A link was ended for another's sake: its peer is not held for dead, and not dialled at once."""
        self.changes.put(Change("lost", peer, "another has its place"))
        self._hosts.pop(peer, None)
        self.machine.forget(peer)

    def rests(self, peer: PeerId) -> None:
        """A link is none any more: its peer is dead of silence."""
        self._hosts.pop(peer, None)
        self.changes.put(Change("lost", peer, "it is dead of silence"))

    def lost(self, peer: PeerId, why: str) -> None:
        """A link is gone: evidence at once, and certainty when it cannot be re-made."""
        self.changes.put(Change("lost", peer, why))
        if self.links_all and self.follows(peer):
            self._hosts.pop(peer, None)
            self.machine.forget(peer)  # it links whom it likes, and nobody waits for it
            return
        if self.admission.is_revoked(peer, self.book.get(peer)) or self._is_leaving(peer):
            self._carry_out(self.machine.connection_lost(peer, trio.current_time(), confirmed=True))
            return
        self._carry_out(self.machine.connection_lost(peer, trio.current_time()))
        self._jobs.send_nowait(partial(self._remake, peer))

    def _is_leaving(self, peer: PeerId) -> bool:
        record = self.book.get(peer)
        return record is not None and record.phase == "leaving"

    async def _remake(self, peer: PeerId) -> None:
        host = self._hosts.pop(peer, None)
        if not self._redials.take(1.0, trio.current_time()):
            return
        ended = busy = False
        for is_last in (False, True):
            try:
                deadline_s = REDIAL_DEADLINE_S + self.own_lag_s()
                await self.links.meet(peer, self.addresses_of(peer), deadline_s=deadline_s)
                return
            except NoPlaceLeft as error:
                logger.info("the link to %s is not re-made: %s", peer, error)
                break
            except (NetworkError, RemoteError) as error:
                logger.debug("cannot re-make the link to %s: %s", peer, error)
                ended = isinstance(error, NotReached) and error.proves_end(host)
                busy = is_there(error)
            if busy:  # trying again would be more work for one that has too much to do
                break
            if not is_last:
                await trio.sleep(REDIAL_PAUSE_S * self._rng.uniform(1, 2))
        if peer in self.links.linked():
            return
        now = trio.current_time()
        if ended:
            self._carry_out(self.machine.connection_lost(peer, now, confirmed=True))
        else:
            self.probe.shut_out(self.addresses_of(peer))
            if not busy:
                self._carry_out(self.machine.unreachable(peer, now))

    def message(self, peer: PeerId, message: LinkMessage) -> None:
        """Take what came over a link."""
        self._note_seen(peer)
        if type(message) not in self._about_links:
            self._carry_out(self.machine.peer_seen(peer, self._incarnation(peer), trio.current_time()))
        self.give(peer, message)

    def register(self, takers: Mapping[type, Taker]) -> None:
        """Give every message of these types to its taker from now on. Raises LocalError where one has a taker."""
        if taken := self._takers.keys() & takers.keys():
            raise LocalError(f"two take {', '.join(sorted(kind.__name__ for kind in taken))}")
        self._takers.update(takers)

    def give(self, peer: PeerId, message: Message) -> None:
        """Give a message of a peer, however it came, to whoever takes its like."""
        take = self._takers.get(type(message))
        if take is None:
            logger.debug("%s sends a %s, which has no meaning here", peer, type(message).__name__)
        else:
            take(peer, message)

    def _take_sign_of_life(self, receive: Callable[..., list[Effect]], peer: PeerId, message: LinkMessage) -> None:
        self._carry_out(receive(self.machine, peer, message, trio.current_time()))

    def _pinged(self, peer: PeerId, number: int | None) -> None:
        """Take a sign of life that came over the connection with a peer: a ping, or the answer to that of a number.

        Where there is no link it means nothing.
        """
        if not self.links.is_heard(peer):
            return
        self._note_seen(peer)
        incarnation, now = self._incarnation(peer), trio.current_time()
        if number is None:
            self._carry_out(self.machine.peer_seen(peer, incarnation, now))
        else:
            self._carry_out(self.machine.on_answer(peer, number, incarnation, now))

    def admits(self, peer: PeerId) -> bool:
        """True if a peer may be heard through others: it is admitted, and said who it is."""
        record = self.book.get(peer)
        return peer != self._me and record is not None and self.admission.reason_not_admitted(record) is None

    def may_join(self, peer: PeerId) -> bool:
        """True if a peer may become a member of the swarm, as far as is known here."""
        return self.admission.may_join(peer, self.book.get(peer))

    def left_in_order(self, change: Change) -> bool:
        """True if a peer that died had taken its leave."""
        record = self.book.get(change.peer)
        return change.kind == "died" and record is not None and record.phase == "leaving"

    def came_with(self, invites: Collection[PeerId]) -> frozenset[PeerId]:
        """Those that came with these invites for whoever bears them, by the records that are known."""
        shown = {record.peer: record.credential for record in self.book.records()}
        return frozenset(peer for peer, one in shown.items() if one is not None and one.invite.holder in invites)

    def is_revoked(self, peer: PeerId) -> bool:
        """True if the authority has shut a peer out, or the invite by which it came, as far as that was seen here."""
        return peer in self._shut_out or self.admission.is_revoked(peer, self.book.get(peer))

    def passed_on(self, peer: PeerId, message: SwarmMessage) -> None:
        """Take what a peer said to the whole swarm, as it came through another."""
        self._note_seen(peer)
        self._carry_out(self.machine.heard_through(peer, self._incarnation(peer), trio.current_time()))
        self.give(peer, message)

    def _note_seen(self, peer: PeerId) -> None:
        self._last_seen.note(peer, trio.current_time(), keep=self.admission.first)

    def long_silent(self, peers: Iterable[str]) -> list[str]:
        """Those of the peers of whom nothing was heard for an hour, by themselves or through others; nobody offline."""
        return [] if self._host.is_cut_off else self._last_seen.long_silent(peers, trio.current_time())

    def _incarnation(self, peer: PeerId) -> int:
        record = self.book.get(peer)
        return 0 if record is None else record.incarnation

    # -- the detector ----------------------------------------------------------------------------------------

    async def _tick(self) -> None:
        while True:
            now = trio.current_time()
            self._carry_out(self.machine.tick(now))
            self.links.end_long_rests(now)
            self._keep_to_chain(now)
            self._dialling.look(now)
            if self.links_all:
                self._tell_reach(now)
            else:
                self._watch_neighbours_only(now)
            at_most_s = next_beat(now) - now
            if self._without_link:
                at_most_s = min(at_most_s, in_crowd(TICK_S, len(self.links.linked())))
            await trio.sleep_until(now + self.machine.rest_s(now, at_most_s))

    def _keep_to_chain(self, now: float) -> None:
        """Keep the links that go with what the chain says now of this node, and of those with which it has one."""
        if self._outside is None:
            return
        linked, links_all = self.links.linked(), self.links_all
        if links_all != self._linked_all:
            self._linked_all = links_all
            self.links.pace = self.machine.pace = self._pace
            self._to_end = frozenset() if links_all else self._choice.settle(linked)
            self._end_at = now + OUTSIDE_SETTLE_S
            self._dialling.begin_anew()
        followers = self.followers() if links_all else frozenset()
        if links_all:
            for peer in filter(self.follows, self.machine.in_state(*State)):
                if not self.links.holds(peer):
                    self.machine.forget(peer)  # it had a seat, and nobody waits for it any more
        self._too_many_at = min(self._too_many_at, now) if len(followers) > FOLLOWERS_LIMIT else math.inf
        ends = sorted(self._to_end & linked) if now >= self._end_at else []
        if now - self._too_many_at >= 2 * OUTSIDE_SETTLE_S:  # who had a seat has ended its links by then
            ends = sorted(followers, key=lambda peer: (-self.rank(peer), peer))[FOLLOWERS_LIMIT:]
        for peer in ends:
            self.links.end(peer)
        if now >= self._end_at:
            self._to_end, self._end_at = frozenset(), math.inf

    def _watch_neighbours_only(self, now: float) -> None:
        """Stop watching whose link was lost, once it was time enough to make it again or to find its end."""
        self._note_without_link(frozenset(filter(self._is_unlinked, self.machine.in_state(*State))), now)
        for peer, since in self._without_link.items():
            if now - since >= UNLINKED_S:
                self.machine.forget(peer)

    def _is_unlinked(self, peer: PeerId) -> bool:
        return not self.links.holds(peer)

    def _note_without_link(self, peers: frozenset[PeerId], now: float) -> None:
        self._without_link = {peer: self._without_link.get(peer, now) for peer in peers}

    def _tell_reach(self, now: float) -> None:
        """Tell the others whom this node does not reach itself, when that changed."""
        linked, alive = self.links.linked(), self.alive()
        self._note_without_link((alive | self._dialling.strangers) - linked, now)
        before = self.links.message_relay.lacking
        settled = {
            peer
            for peer, since in self._without_link.items()
            if peer in before or now - since >= (LACK_SETTLE_S if peer in alive else STRANGER_SETTLE_S)
        }
        first = self.admission.first()
        found = sorted(
            settled | self.machine.silent(now), key=lambda peer: (peer not in first, peer not in alive, peer)
        )
        lacking = frozenset(found[:MEMBER_LIMIT])
        is_urgent = not first.isdisjoint(lacking - before)
        period_s = self._reach_pause.pause_s if is_urgent else STRANGERS_REACH_PERIOD_S
        is_due = lacking != before and now - self._reach_told_at >= period_s
        if is_due and self._words.take(len(linked), now):
            self._reach_told_at = now
            if is_urgent:
                self._lengthen_reach_pause(now)
            self.links.lack(lacking)
            for peer in sorted(lacking - before):
                self.changes.put(Change("detoured", peer))

    def _lengthen_reach_pause(self, now: float) -> None:
        if now - self._reach_urgent_at >= REACH_CALM_S:
            self._reach_pause.reset()
        self._reach_urgent_at = now
        self._reach_pause.next_s()

    def _carry_out(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Say):
                self.links.send(effect.peer, effect.message)
            elif isinstance(effect, Suspected):
                self._tell_suspicion(Suspicion(peer=effect.peer, incarnation=effect.incarnation))
                self.changes.put(Change("suspected", effect.peer))
            elif isinstance(effect, Died):
                self.changes.put(Change("died", effect.peer))
                self.links.rest(effect.peer)
                if self._neighbours is not None:
                    self._neighbours.died(effect.peer, self.book.order(effect.peer))
            elif isinstance(effect, Revived):
                self.changes.put(Change("revived", effect.peer))
                if self._neighbours is not None:
                    self._neighbours.lives(effect.peer)
            elif isinstance(effect, Refute):
                self.announce()

    def _tell_suspicion(self, suspicion: Suspicion) -> None:
        peer = suspicion.peer
        if self._words.take(len(self.links.linked()), trio.current_time()):
            self.links.tell_of(peer, suspicion)
        else:
            self.links.send(peer, suspicion)

    # -- records ---------------------------------------------------------------------------------------------

    def _sealed_record(self) -> bytes:
        return seal_record(self._sealer, self._record())

    def _take_record(self, data: bytes, *, blame: PeerId) -> None:
        try:
            record = self.book.receive(data, trio.current_time(), peer=blame)
        except RemoteError as error:
            logger.info("a record that does not hold: %s", error)
            return
        if record is not None and record.peer == self._me:
            if self.book.order(self._me) > self._sealer.order:
                self.on_elsewhere(record)
        elif record is not None and self.admission.reason_not_admitted(record) is not None:
            self.book.forget(record.peer)  # nobody shall dial it, or hear of it from here
        elif record is not None:
            self.links.note_said(record.peer)
            order = self.book.order(record.peer)
            self._last_seen.note_signed(record.peer, order, trio.current_time(), keep=self.admission.first)
            self._carry_out(self.machine.on_refutation(record.peer, record.incarnation, trio.current_time()))

    async def _publish(self) -> None:
        """Tell what is new in this node's record to all at once; whoever is not linked hears of it by gossip.

        Gossip repeats it from time to time, and where somebody was linked since. Where all are to be linked it has
        little to add: there a swarm that is starting, in which everybody's record changes, would gossip all the while.
        It has the very bytes that were told, so who has these has nothing to look at.
        """
        told: NodeRecord | None = None
        sealed, gossiped_at = b"", -math.inf
        linked, is_due = frozenset[PeerId](), True
        while True:
            self._announce = trio.Event()  # before the record is made: a change while it is sent is news again
            now, before, linked = trio.current_time(), linked, self.links.linked()
            for peer in linked:
                self._note_host(peer)  # some of them are members only since they were linked
            record = self._record()
            is_news = told is None or not record.says_the_same(told)
            needs_renewal = now >= gossiped_at + renewal_s(len(self.book))
            if is_news or needs_renewal:
                sealed = seal_record(self._sealer, record)
            if is_news:
                told = record
                self.links.broadcast(Announce(record=sealed))
            is_due |= is_news or not linked <= before
            next_at = gossiped_at + len(self.book) / GOSSIPED_PER_S if self.links_all else -math.inf
            may_be_gossiped = needs_renewal or (is_due and (now >= next_at or record.phase == "leaving"))
            if linked and may_be_gossiped:
                gossiped_at, is_due = now, False
                await self._gossip(sealed)
            with trio.move_on_after(min(RECORD_PERIOD_S, next_at - now) if linked and is_due else RECORD_PERIOD_S):
                await self._announce.wait()
                told = None

    async def _gossip(self, sealed: bytes) -> None:
        try:
            await self._host.publish(self._topic, sealed)
        except NetworkError as error:
            logger.debug("record not published: %s", error)


def _own_record(peer: PeerId, data: bytes, swarm_id: SwarmId) -> NodeRecord:
    """The record in `data`. Raises RemoteError unless it is of `peer` itself."""
    record = open_record(data, swarm_id, trio.current_time(), peer=peer).record
    if record.peer != peer:
        raise RemoteError(f"introduces itself with the record of {record.peer}", peer=peer)
    return record


def _reason_to_refuse(peer: PeerId, hello: Hello, swarm_id: SwarmId, admission: Admission) -> str | None:
    """Return why the sender of this hello is not let in, for its user to read; None if it is."""
    if hello.wire != WIRE_VERSION:
        return f"this node speaks wire version {WIRE_VERSION}, yours {hello.wire}; install the same version of Shoal"
    if hello.swarm != swarm_id:
        return (
            f"this node is in swarm {swarm_id.hex()[:16]}…, yours is {hello.swarm.hex()[:16]}…; use the same swarm.toml"
        )
    try:
        record = _own_record(peer, hello.record, swarm_id)
    except RemoteError as error:
        return f"your record does not hold: {error}"
    return admission.reason_not_to_join(record)
