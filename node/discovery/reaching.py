"""Being reached: what others prove of this node's addresses, what it tells of itself by that, and who relays for it.

    members knock at its ports ──► some are reached      announced, and this node offers to relay for others
                               └─► none is               the router is asked for a mapping, and they knock again; else
                                                         this node reserves at members that relay, and announces the
                                                         addresses through them
    nobody outside has looked  ──► nothing is known      all its addresses are announced

Private addresses stay in the record for those on the same network, who try them first; others try them last.
"""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Sequence
from typing import Literal

import trio

from shoal.node.discovery.port_mapping import MappingFailed, PortMapping
from shoal.node.outcome import Notice
from shoal.node.parts import Parts
from shoal.node.reporting import events
from shoal.protocol.address import format_address, format_circuit, is_circuit, parse_address
from shoal.protocol.backoff import Backoff
from shoal.protocol.errors import ConfigError, NetworkError, RemoteError
from shoal.protocol.identity import PeerId
from shoal.protocol.records import ADDRESS_LIMIT, NodeRecord
from shoal.swarm.lanes.seal import ADDRESS_LIMIT as LANE_ADDRESS_LIMIT
from shoal.swarm.lanes.seal import format_address as format_lane
from shoal.swarm.lanes.seal import parse_address as parse_lane
from shoal.swarm.members import Change
from shoal.swarm.reaching.dial_back import DialBackServer, Evidence, ask_dial_back
from shoal.swarm.reaching.direct_upgrade import DirectUpgrade
from shoal.swarm.reaching.networks import is_private, own_hosts
from shoal.swarm.reaching.observed_addresses import ObservedAddressServer
from shoal.swarm.reaching.own_addresses import AddressChange
from shoal.swarm.reaching.punching import Puncher
from shoal.swarm.reaching.reach import Reach, Way
from shoal.swarm.reaching.relayed_lanes import RelayedLaneServer, ask_relayed_lane

CHECKERS = 4
"""Members that knock; fewer where there are fewer."""
CHECK_PERIOD_S = 300.0
CHECK_RETRY_S = 10.0
"""The same, as long as nobody has answered."""
CHECK_SETTLE_S, CHECK_SETTLE_LIMIT_S = 0.3, 10.0
"""From a new link until its peer is asked to knock: links come in bunches; longer each time that none answered."""
RELAYS = 2
"""Members at which a node that is not reached reserves."""
RESERVE_PERIOD_S = 600.0
RESERVE_RETRY_S = 5.0
STRANDED_S = 5.0
"""So long a node that needs a relay has none before its user is told."""
RELAY = "relay"
"""In a record's capabilities: this node passes circuits and lanes on."""

Reachability = Literal["public", "relayed", "unknown"]

logger = logging.getLogger(__name__)


class Reaching:
    """One node's reachability; a service of its, and what its lanes ask."""

    def __init__(self, parts: Parts) -> None:
        self._host, self._lanes, self._members = parts.host, parts.lanes, parts.members
        self._links = parts.links
        self._config = parts.config
        self._events = parts.events
        self._on_progress = parts.on_progress
        self._evidence = Evidence()
        self._mapping: PortMapping | None = None
        self._mapping_tried = False
        self._check = trio.Event()
        self._settle = Backoff(CHECK_SETTLE_S, CHECK_SETTLE_LIMIT_S)
        self._reserve = trio.Event()
        self._checked = frozenset[PeerId]()  # the linked peers that knocked, of late
        self._control: tuple[str, ...] = ()  # the listeners' own addresses
        self._lane_addresses: tuple[str, ...] = ()
        self._control_port = self._lane_port = 0
        self._told: tuple[object, ...] = ()
        self._stranded_since: float | None = None
        self._stranded_told = False
        self.proven: tuple[str, ...] = ()
        """Control addresses at which members have reached this node."""
        self.proven_lanes: tuple[str, ...] = ()
        self.relayed_lanes = RelayedLaneServer(self._host, upload=self._lanes.upload)
        self.relayed_lanes.comes_first = self._host.comes_first
        DialBackServer(self._host, self._is_linked)
        self.observed_addresses = ObservedAddressServer(self._host)
        self._parted: set[PeerId] = set()
        """The linked members of whom the user was told that there are no lanes to them."""
        self._reach = Reach(self._host.peer_id, self, is_direct=self._host.is_direct)
        self._reach.parted = self._tell_parted
        self._puncher = Puncher(self._host, self._reach, self._evidence.hosts)
        self._direct_upgrade = DirectUpgrade(self._host, self._puncher, self._relayed)

    def connect(self) -> None:
        """Have circuits and lanes go by what is known here: who comes first, who relays, where holes are punched."""
        self._host.relay.comes_first = self._host.comes_first
        handlers = (self.relayed_lanes, self.observed_addresses)
        self._lanes.use(
            self._reach, dial_back_probes=self._host.dial_back_probes, handlers=handlers, puncher=self._puncher
        )

    # -- what others of this node ask ----------------------------------------------------------------------------

    @property
    def reachability(self) -> Reachability:
        """Reachability from outside its network: by itself ("public"), through a member that relays, or unknown."""
        if any(not is_private(parse_address(text).host) for text in self.proven):
            return "public"
        return "relayed" if self._needs_relay and self._host.circuits.reserved else "unknown"

    @property
    def control_addresses(self) -> tuple[str, ...]:
        """Control addresses that this node's record names."""
        if not len(self._evidence):
            return self._host.addresses[:ADDRESS_LIMIT]
        private = (text for text in self._control if is_private(parse_address(text).host))
        found = (*self.proven, *self._circuit_addresses(), *private)
        return tuple(dict.fromkeys(found))[:ADDRESS_LIMIT] or self._control[:ADDRESS_LIMIT]

    @property
    def lane_addresses(self) -> tuple[str, ...]:
        """The same of its lanes."""
        if not len(self._evidence):
            return self._lanes.addresses[:LANE_ADDRESS_LIMIT]
        private = (text for text in self._lane_addresses if is_private(parse_lane(text)[0]))
        found = tuple(dict.fromkeys((*self.proven_lanes, *private)))
        return (found or self._lane_addresses)[:LANE_ADDRESS_LIMIT]

    @property
    def capabilities(self) -> tuple[str, ...]:
        """Services to others that this node's record names."""
        return (RELAY,) if self._host.relay.admits is not None else ()

    @property
    def bytes_passed(self) -> int:
        """Bytes that it has passed on between others: of circuits and lanes."""
        return self._host.relay.bytes_passed + self.relayed_lanes.bytes_passed

    # -- what its lanes ask --------------------------------------------------------------------------------------

    def may_dial(self, peer: PeerId, host: str) -> bool:
        """True if the peer's connection comes from `host` or `host` is this machine, or if both are private.

        So a member that names a third party's address sends nobody there, nor to what listens on this machine's
        loopback alone.
        """
        seen = self._host.host_of(peer)
        if seen is None:
            return False
        if _same(seen, host) or (is_private(seen) and is_private(host)):
            return True
        mine = own_hosts()
        return host in mine and (seen in mine or not ipaddress.ip_address(host).is_loopback)

    def is_reached(self) -> bool:
        """True if others can dial this node's lanes, as far as is known."""
        return bool(self.proven_lanes) or not self._evidence.outside()

    def addresses_of(self, relay: PeerId) -> tuple[str, ...]:
        """Addresses of the lanes of a linked member that relays."""
        record = self._relaying(relay)
        found = () if record is None else record.lane_addresses
        return tuple(text for text in found if self._may_dial_lane(relay, text))

    def _may_dial_lane(self, peer: PeerId, text: str) -> bool:
        try:
            return self.may_dial(peer, parse_lane(text)[0])
        except RemoteError:
            return False

    def relays(self, peer: PeerId) -> Sequence[PeerId]:
        """Members that relay, the nearest first."""
        return [relay for relay in self._relays() if relay != peer]

    async def way(self, relay: PeerId, peer: PeerId) -> Way:
        """A way to `peer` for one lane. Raises NetworkError."""
        addresses = self.addresses_of(relay)
        if not addresses:
            raise NetworkError(f"{relay} has no lane address that may be dialled")
        relayed_lane = await ask_relayed_lane(self._host, relay, peer)
        return Way(via=relay, addresses=addresses, near=relayed_lane.near, far=relayed_lane.far)

    # -- the service ---------------------------------------------------------------------------------------------

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Find out, announce and reserve until cancelled; what was mapped at the router is removed then."""
        self._look_at_own()
        task_status.started()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._keep_checking)
                nursery.start_soon(self._keep_reservations)
                nursery.start_soon(self._puncher.run)
                nursery.start_soon(self._direct_upgrade.run)
        finally:
            if self._mapping is not None:
                await self._mapping.remove()

    def _look_at_own(self) -> None:
        """Take note of the listeners' own addresses, whose ports stay what they are."""
        self._control, self._lane_addresses = self._host.addresses, self._lanes.addresses
        if self._control:
            self._control_port = parse_address(self._control[0]).port
        if self._lane_addresses:
            self._lane_port = parse_lane(self._lane_addresses[0])[1]

    def moved(self, change: AddressChange) -> None:
        """Own addresses are others: what was found of those that are gone does not hold, and all is asked anew."""
        self._look_at_own()
        self._checked = frozenset()
        self._evidence.forget_from(change.gone)
        if change.gone:
            self._mapping, self._mapping_tried = None, False  # it leads to where this machine was
        self._weigh()
        self._settle.reset()
        self._check.set()
        self._reserve.set()

    def heard(self, change: Change) -> None:
        """A link that came up is one more to ask; one that was lost may have been a relay."""
        if change.kind == "linked":
            self._check.set()
            self._direct_upgrade.look()
        if change.kind == "lost":
            self._checked -= {change.peer}  # linked again, this node may be seen elsewhere
        if change.kind in ("linked", "lost", "died"):
            self._reserve.set()
            self._parted.discard(change.peer)

    def _is_linked(self, peer: PeerId) -> bool:
        return peer in self._links.linked()

    def _relayed(self) -> list[PeerId]:
        """The members that this node, which nobody can dial, is linked with through a relay."""
        if not self._needs_relay:
            return []
        return sorted(peer for peer in self._links.linked() if not self._host.is_direct(peer))

    # -- checking ------------------------------------------------------------------------------------------------

    async def _keep_checking(self) -> None:
        while True:
            again = True
            with trio.move_on_after(CHECK_PERIOD_S if len(self._evidence) else CHECK_RETRY_S):
                await self._check.wait()
                await trio.sleep(self._settle.pause_s)
                again = False
            self._check = trio.Event()
            if again:
                self._checked = frozenset()
            if await self._ask():
                await self._conclude()

    async def _ask(self) -> bool:
        """Have members knock that did not yet, as long as they are fewer than CHECKERS; whether one answered."""
        linked = [peer for peer in self._links.linked() if self._host.is_direct(peer)]
        linked.sort(
            key=lambda peer: (is_private(self._host.host_of(peer) or ""), not self._host.comes_first(peer), peer)
        )
        fresh = [peer for peer in linked if peer not in self._checked]

        async def ask(peer: PeerId) -> None:
            try:
                self._evidence.add(await ask_dial_back(self._host, peer, self._ports()))
            except NetworkError as error:
                logger.debug("not dialled back: %s", error)
            except RemoteError as error:
                logger.warning("%s", error)
            else:
                self._checked |= {peer}

        asked = fresh[: max(0, CHECKERS - len(self._checked.intersection(linked)))]
        async with trio.open_nursery() as nursery:
            for peer in asked:
                nursery.start_soon(ask, peer)
        answered = not self._checked.isdisjoint(asked)
        self._settle.note(failed=bool(asked) and not answered)
        return answered

    def _ports(self) -> tuple[int, ...]:
        """The ports to knock at, as the world would number them: the listeners', and those of the mapping."""
        mapped = () if self._mapping is None else self._mapping.external
        return tuple(dict.fromkeys((self._control_port, self._lane_port, *mapped)))

    async def _conclude(self) -> None:
        """Tell what follows, and ask the router if nobody reaches this node."""
        self._weigh()
        self._reserve.set()  # a relay is had at once, and let go where the router turns out to help
        if self._needs_relay and self._config.port_mapping and not self._mapping_tried:
            self._mapping_tried = True
            if await self._map():
                self._checked = frozenset()
                await self._ask()
                self._weigh()
                self._reserve.set()

    def _weigh(self) -> None:
        control, lanes = [self._control_port], [self._lane_port]
        if self._mapping is not None:
            control.append(self._mapping.external[0])
            lanes.append(self._mapping.external[1])
        me = self._host.peer_id
        self.proven = tuple(format_address(host, port, me) for port in control for host in self._evidence.reached(port))
        self.proven_lanes = tuple(format_lane(host, port) for port in lanes for host in self._evidence.reached(port))
        offers = self._config.relay and bool(self.proven) and bool(self.proven_lanes)
        admits = self._is_linked if offers else None
        self._host.relay.admits = self.relayed_lanes.admits = self.observed_addresses.admits = admits
        self._lanes.addresses = self.lane_addresses
        self._tell()

    @property
    def _needs_relay(self) -> bool:
        return self._evidence.outside() and not any(not is_private(parse_address(text).host) for text in self.proven)

    async def _map(self) -> bool:
        """Ask the router to pass both ports on to this machine; whether it does."""
        mapping = PortMapping((self._control_port, self._lane_port))
        try:
            await mapping.add()
        except MappingFailed as error:
            logger.info("the router maps no ports: %s", error)
            return False
        self._mapping = mapping
        self._events.write(events.PortsMapped(ports=tuple(str(port) for port in mapping.external)))
        return True

    def _tell(self) -> None:
        """Announce what has changed."""
        state = (self.reachability, self.control_addresses, self.lane_addresses, self.capabilities)
        if state != self._told:
            if state[:2] != self._told[:2]:
                self._events.write(
                    events.Reachability(reachability=self.reachability, addresses=tuple(self.control_addresses))
                )
            self._told = state
            self._members.announce()

    # -- relays --------------------------------------------------------------------------------------------------

    def _relaying(self, peer: PeerId) -> NodeRecord | None:
        """The record of a member that is linked without a relay and offers to be one."""
        record = self._members.record_of(peer) if self._is_linked(peer) and self._host.is_direct(peer) else None
        return record if record is not None and RELAY in record.capabilities else None

    def _relays(self) -> list[PeerId]:
        found = [peer for peer in self._links.linked() if self._relaying(peer) is not None]
        return sorted(found, key=lambda peer: (not self._host.comes_first(peer), self._host.rtt_s(peer) or 0.0, peer))

    def _circuit_addresses(self) -> tuple[str, ...]:
        """Addresses of this node through its relays."""
        found: list[str] = []
        for relay in sorted(self._host.circuits.reserved):
            record = self._relaying(relay)
            for text in () if record is None else record.control_addresses:
                if not is_circuit(text) and self._leads_to(relay, text):
                    found.append(format_circuit(text, self._host.peer_id))
        return tuple(found) if self._needs_relay else ()

    def _leads_to(self, relay: PeerId, text: str) -> bool:
        try:
            address = parse_address(text)
        except ConfigError:
            return False
        return address.peer == relay and _same(address.host, self._host.host_of(relay) or "")

    async def _keep_reservations(self) -> None:
        while True:
            self._reserve = trio.Event()
            if self._needs_relay:
                await self._reserve_some()
            self._look_stranded(trio.current_time())
            self._tell_if_known()
            enough = not self._needs_relay or len(self._host.circuits.reserved) >= RELAYS
            with trio.move_on_after(RESERVE_PERIOD_S if enough else RESERVE_RETRY_S):
                await self._reserve.wait()
                await trio.sleep(CHECK_SETTLE_S)
            if self._mapping is not None and enough:
                await self._renew_mapping()

    async def _reserve_some(self) -> None:
        kept = sorted(self._host.circuits.reserved)
        others = [relay for relay in self._relays() if relay not in kept]
        reserved = 0
        for relay in (*kept, *others):
            if reserved >= RELAYS:
                return
            try:
                await self._host.circuits.reserve(relay)
                reserved += 1
            except NetworkError as error:
                logger.info("no reservation: %s", error)

    def _tell_if_known(self) -> None:
        if len(self._evidence):
            self._tell()

    async def _renew_mapping(self) -> None:
        assert self._mapping is not None
        try:
            await self._mapping.renew_when_due()
        except MappingFailed as error:
            logger.warning("the router does not renew the mapping: %s", error)
            self._mapping, self._mapping_tried = None, False
            self._check.set()

    def _look_stranded(self, now: float) -> None:
        """Say so when neither this node nor any member that is left can be reached from outside."""
        if not self._needs_relay or self._host.circuits.reserved:
            self._stranded_since, self._stranded_told = None, False
            return
        self._stranded_since = now if self._stranded_since is None else self._stranded_since
        if now - self._stranded_since >= STRANDED_S and not self._stranded_told:
            self._stranded_told = True
            self._events.write(events.Stranded(control_port=self._control_port, lane_port=self._lane_port))
            self._on_progress(Notice(text=stranded_text(self._control_port, self._lane_port)))

    def _tell_parted(self, peer: PeerId) -> None:
        """Say, once for a link, that nothing but control goes between this node and a member."""
        if self._is_linked(peer) and peer not in self._parted:
            self._parted.add(peer)
            self._events.write(events.Parted(peer=peer))
            self._on_progress(Notice(text=parted_text(peer, self._control_port, self._lane_port)))


def parted_text(peer: PeerId, control_port: int, lane_port: int) -> str:
    """Text for the user of a node that is linked with a member, and finds no way for tensors to it."""
    return (
        f"no lane to {peer}, so rounds that take both stand still: both are behind routers that let nothing in, and no "
        "member that relays is left. Start one that can be reached and join it with --join, or forward TCP ports "
        f"{control_port} and {lane_port} of the router to this machine"
    )


def stranded_text(control_port: int, lane_port: int) -> str:
    """Text for the user of a node that nobody can reach."""
    return (
        "nobody outside reaches this node, nor any member that it is linked with. Within one network that does not "
        "matter; for members elsewhere start one that can be reached and join it with --join, or forward TCP ports "
        f"{control_port} and {lane_port} of the router to this machine"
    )


def _same(one: str, other: str) -> bool:
    try:
        return ipaddress.ip_address(one) == ipaddress.ip_address(other)
    except ValueError:
        return one == other
