"""Rendezvous by SwarmId: this node's meeting point put where strangers keep it, and those of others looked up and met.

    Kademlia   among the nodes that were named, linked or in the address book     see shoal.swarm.rendezvous.kademlia
    hivemind   in a DHT of hivemind's, by a process of its own                    see shoal.swarm.rendezvous.hivemind

It runs beside everything else and nothing waits for it: a table that hangs costs its own task. Only a node that
belongs to the swarm, because it is linked or founded it, says where it is.
"""

from __future__ import annotations

import ipaddress
import logging
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import trio

from shoal.node.options import NodeConfig
from shoal.node.parts import Parts
from shoal.node.services import Service
from shoal.protocol.address import parse_address
from shoal.protocol.backoff import Backoff
from shoal.protocol.errors import ConfigError, NetworkError, RemoteError
from shoal.protocol.identity import Identity, PeerId
from shoal.swarm.address_book import AddressBook
from shoal.swarm.members import Change, Members
from shoal.swarm.reaching.own_addresses import AddressChange
from shoal.swarm.rendezvous.hivemind import Hivemind
from shoal.swarm.rendezvous.hivemind_messages import Start
from shoal.swarm.rendezvous.kademlia import Kademlia
from shoal.swarm.rendezvous.meeting_points import FirstSight, MeetingPoint, open_point, sign_point

GO_DEADLINE_S = 300.0
"""One announcement and look-up in one table."""
PERIOD_S = 600.0
"""Between two goes while somebody is linked: a third of what a point is valid for, and more."""
ALONE_S, ALONE_LIMIT_S = 5.0, 120.0
"""Between two goes while nobody is, doubled each time."""
LEAST_S = 2.0
"""Between any two goes."""
RENDEZVOUS_LIMIT = 32
"""Peers that are dialled after one look-up."""
RENDEZVOUS_AT_ONCE_LIMIT = 8
MEET_DEADLINE_S = 5.0
SEQUENCE_BITS = 32

logger = logging.getLogger(__name__)


class Table(Protocol):
    """Distributed table in which meeting points are kept."""

    def know(self, addresses: Iterable[str]) -> None:
        """Nodes at these addresses may keep points too."""

    async def announce(self, signed: bytes) -> int:
        """Keep a signed point of this node; at how many peers it lies. Raises NetworkError."""

    async def look_up(self) -> list[bytes]:
        """Signed points of this swarm, unchecked. Raises NetworkError."""


def wants_table(config: NodeConfig) -> bool:
    """True if this node takes part in Kademlia: as its user said, else if an address beyond this machine is named."""
    if config.rendezvous != "auto":
        return config.rendezvous == "on"
    return not all(map(_on_this_machine, (*config.join, *config.manifest.network.bootstrap)))


def _on_this_machine(text: str) -> bool:
    try:
        host = parse_address(text).host
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except (ConfigError, ValueError):
        return False


class Rendezvous:
    """One node's way into one table. A service of the parts.

    addresses: where this node is, to be said. known: where others are that may keep points.
    """

    def __init__(
        self,
        table: Table,
        *,
        identity: Identity,
        boot: int,
        config: NodeConfig,
        members: Members,
        addresses: Callable[[], Sequence[str]],
        known: Callable[[], Iterable[str]],
    ) -> None:
        self._table = table
        self._identity = identity
        self._sequence = boot << SEQUENCE_BITS
        self._swarm_id = config.manifest.swarm_id
        self._is_founder = identity.peer_id in config.manifest.swarm.founders
        self._members = members
        self._addresses = addresses
        self._known = known
        self._sight = FirstSight()
        self._said = False  # since somebody was linked
        self._wake = trio.Event()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Announce and look up until cancelled; started at once."""
        task_status.started()
        alone = Backoff(ALONE_S, ALONE_LIMIT_S)
        while True:
            self._wake = trio.Event()
            with trio.move_on_after(GO_DEADLINE_S):
                await self._go()
            linked = bool(self._members.links.linked())
            if linked:
                alone.reset()
            await trio.sleep(LEAST_S)
            with trio.move_on_after(PERIOD_S if linked else alone.next_s()):
                await self._wake.wait()

    def heard(self, change: Change) -> None:
        """Wake the task if the last link was lost, or if one came and the point was announced while there was none."""
        if (change.kind == "lost" and not self._members.links.linked()) or (change.kind == "linked" and not self._said):
            self._wake.set()

    def moved(self, change: AddressChange) -> None:
        """Own addresses are others: say so where others look."""
        self._wake.set()

    async def _go(self) -> None:
        try:
            self._table.know(self._known())
            if not self._members.links.linked():
                await self._meet(await self._table.look_up())
            await self._announce()
            if self._members.links.linked():  # the swarm may have been split in two
                await self._meet(await self._table.look_up())
        except (NetworkError, RemoteError) as error:
            logger.info("the swarm is not looked up: %s", error)

    async def _announce(self) -> None:
        addresses = self._addresses()
        if not addresses or not (self._is_founder or self._members.links.linked()):
            return
        self._said = bool(self._members.links.linked())
        self._sequence += 1
        signed = sign_point(self._identity, self._swarm_id, addresses=addresses, sequence=self._sequence)
        logger.debug("this node's meeting point lies at %d peers", await self._table.announce(signed))

    async def _meet(self, found: Sequence[bytes]) -> None:
        """Meet those of the swarm whose points hold, a bounded number of them chosen at random."""
        points = {point.peer: point for point in filter(None, map(self._checked, found))}
        chosen = random.sample(sorted(points), min(RENDEZVOUS_LIMIT, len(points)))
        limiter = trio.CapacityLimiter(RENDEZVOUS_AT_ONCE_LIMIT)
        async with trio.open_nursery() as nursery:
            for peer in chosen:
                nursery.start_soon(self._meet_one, points[peer], limiter)

    def _checked(self, signed: bytes) -> MeetingPoint | None:
        """The point of a peer that is worth a dial; None if it does not hold, or is of no use."""
        try:
            point = open_point(signed, swarm=self._swarm_id)
        except RemoteError as error:
            logger.debug("ignored: %s", error)
            return None
        peer = PeerId(point.peer)
        if peer == self._identity.peer_id or peer in self._members.links.linked():
            return None
        if self._sight.ends_at(point, trio.current_time()) is None:
            return None
        return point if self._members.admission.reason_not_to_know(peer) is None else None

    async def _meet_one(self, point: MeetingPoint, limiter: trio.CapacityLimiter) -> None:
        try:
            async with limiter:
                await self._members.links.meet(PeerId(point.peer), point.addresses, deadline_s=MEET_DEADLINE_S)
        except NetworkError as error:
            logger.debug("not where it said: %s", error)
        except RemoteError as error:
            logger.warning("%s: %s", point.peer, error)


def rendezvous_of(parts: Parts, book: AddressBook, addresses: Callable[[], Sequence[str]]) -> list[Service]:
    """The services with which this node meets others by SwarmId: none, where its user wants none.

    addresses: where this node says that it is.
    """
    config, members = parts.config, parts.members
    named = (*config.join, *config.manifest.network.bootstrap)
    bootstrap = {parse_address(text).peer for text in named}

    def known() -> Iterable[str]:
        yield from named
        for peer in members.links.linked():
            yield from members.addresses_of(peer)
        for known_peer in book.best():
            yield from known_peer.addresses

    def keeps(peer: PeerId) -> bool:
        return peer in bootstrap or peer in members.links.linked() or members.record_of(peer) is not None

    def meeting(table: Table) -> Rendezvous:
        return Rendezvous(
            table,
            identity=parts.identity,
            boot=parts.boot,
            config=config,
            members=members,
            addresses=addresses,
            known=known,
        )

    services: list[Service] = []
    if wants_table(config):
        table = Kademlia(parts.host, parts.swarm_id, keeps=keeps)
        table.know(named)
        services.append(meeting(table))
    if config.hivemind:
        hivemind = Hivemind(parts.swarm_id, Start(initial=config.hivemind))
        services += [hivemind, meeting(hivemind)]
    return services
