"""What a node makes of its dial-backs: what it announces, where its lanes may go, who relays, and what its user hears.

The hosts, lanes and links are real, on loopback, which is taken for a public network where the test says so.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import trio

from shoal.node.discovery import reaching
from shoal.node.discovery.port_mapping import PortMapping
from shoal.node.discovery.reaching import RELAY, Reaching, stranded_text
from shoal.node.outcome import Notice
from shoal.node.reporting.event_log import EventLog
from shoal.protocol.address import format_address, format_circuit, parse_address
from shoal.protocol.errors import NetworkError
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.records import NodeRecord
from shoal.swarm.host import Host
from shoal.swarm.lanes.limits import LaneLimits, RateLimit
from shoal.swarm.lanes.pool import LanePool
from shoal.swarm.members import Change
from shoal.swarm.reaching import networks
from shoal.swarm.reaching.dial_back import Evidence
from shoal.swarm.reaching.own_addresses import AddressChange
from shoal.swarm.reaching.relayed_lanes import ask_relayed_lane
from tests.node.discovery.test_port_mapping import router
from tests.swarm.lane_net import RecordingSink
from tests.waiting import until

WAIT_S = 60.0
LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)


class Member:
    """A node as far as reaching goes. `links` are the connected members, and `records` what they say of themselves."""

    def __init__(
        self,
        folder: Path,
        swarm: dict[PeerId, Member],
        *,
        relay: bool = True,
        reached: bool = True,
        port_mapping: bool = False,
    ) -> None:
        identity = Identity.generate()
        self.host = Host(identity=identity, listen=LOOPBACK)
        self.lanes = LanePool(
            me=self.host.peer_id,
            swarm_id=b"swarm",
            sink=RecordingSink(),
            listen=("127.0.0.1", 0),
            request=self._no_lanes,
            limits=LaneLimits(upload=RateLimit(64 << 20)),
        )
        self.notices: list[str] = []
        self._swarm = swarm
        self.links = SimpleNamespace(linked=self.host.connected)
        self.members = SimpleNamespace(record_of=self.record_of, announce=lambda: None)
        self.config = SimpleNamespace(relay=relay, port_mapping=port_mapping)
        self.events = EventLog(folder / f"{self.host.peer_id}.jsonl")
        daemon: Any = self
        self.reaching = Reaching(daemon)
        self.reaching.connect()
        if not reached:
            self.host.dial_back_probes.expect = lambda expected: None  # type: ignore[method-assign]
        swarm[self.host.peer_id] = self

    async def _no_lanes(self, peer: PeerId, data: bytes) -> bytes:
        raise AssertionError("no lane is dialled here")

    def on_progress(self, progress: object) -> None:
        if isinstance(progress, Notice):
            self.notices.append(progress.text)

    def record_of(self, peer: PeerId) -> NodeRecord:
        of = self._swarm[peer].reaching
        return NodeRecord(
            peer=peer,
            boot=1,
            control_addresses=of.control_addresses,
            lane_addresses=of.lane_addresses,
            capabilities=of.capabilities,
        )

    async def run(self, *, task_status: trio.TaskStatus[trio.CancelScope]) -> None:
        with contextlib.closing(self.events), trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                await nursery.start(self.host.run)
                await nursery.start(self.lanes.run)
                await nursery.start(self.reaching.run)
                task_status.started(scope)


@contextlib.asynccontextmanager
async def swarm_of(
    folder: Path, *members: dict[str, bool]
) -> AsyncIterator[tuple[list[Member], list[trio.CancelScope]]]:
    """Members of which each is linked to the first, and asks it and is asked by it."""
    swarm: dict[PeerId, Member] = {}
    made = [Member(folder, swarm, **options) for options in members]
    async with trio.open_nursery() as nursery:
        scopes = [await nursery.start(member.run) for member in made]
        for member in made[1:]:
            await member.host.dial(made[0].host.addresses[0], deadline_s=WAIT_S)
            for one, other in ((member, made[0]), (made[0], member)):
                one.reaching.heard(Change("linked", other.host.peer_id))
        yield made, scopes
        nursery.cancel_scope.cancel()


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reaching, "STRANDED_S", 0.2)
    monkeypatch.setattr(reaching, "RESERVE_RETRY_S", 0.2)


@pytest.fixture
def loopback_is_public(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [network for network in networks.PRIVATE_NETWORKS if ipaddress.ip_address("127.0.0.1") not in network]
    monkeypatch.setattr(networks, "PRIVATE_NETWORKS", tuple(kept))
    # The knocker is on this machine as well: its address is the one that it knocks at.
    monkeypatch.setattr("shoal.swarm.reaching.dial_back._from_outside", lambda prober, seen_as: True)


@pytest.mark.usefixtures("loopback_is_public")
async def test_reached_node_relays_and_another_is_reached_through_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with swarm_of(tmp_path, {}, {"reached": False}) as ((public, hidden), scopes):
        assert (public.reaching.reachability, hidden.reaching.reachability) == ("unknown", "unknown")
        assert hidden.reaching.control_addresses == hidden.host.addresses, "nothing is known: all is announced"
        await until(lambda: public.reaching.reachability == "public")
        assert public.reaching.capabilities == (RELAY,)
        assert public.reaching.proven == public.reaching.control_addresses == public.host.addresses
        assert public.reaching.proven_lanes == public.lanes.addresses
        await until(lambda: hidden.reaching.reachability == "relayed")
        through = format_circuit(public.host.addresses[0], hidden.host.peer_id)
        assert hidden.reaching.control_addresses == (through,)
        assert (hidden.reaching.proven, hidden.reaching.capabilities) == ((), ())
        assert not hidden.reaching.is_reached()
        with monkeypatch.context() as also_inside:
            also_inside.setattr(hidden.reaching, "_lane_addresses", ("127.0.0.1:4002", "10.1.2.3:4002"))
            assert hidden.reaching.lane_addresses == ("10.1.2.3:4002",), "nobody came through at the other"
        assert hidden.reaching.addresses_of(public.host.peer_id) == public.lanes.addresses
        assert list(hidden.reaching.relays(hidden.host.peer_id)) == [public.host.peer_id]
        scopes[0].cancel()
        await until(lambda: not hidden.host.connected())
        hidden.reaching.heard(Change("lost", public.host.peer_id))
        ports = [parse_address(hidden.host.addresses[0]).port, int(hidden.lanes.addresses[0].split(":")[1])]
        await until(lambda: hidden.notices == [stranded_text(*ports)])
        assert hidden.reaching.reachability == "unknown"


@pytest.mark.usefixtures("loopback_is_public")
async def test_node_that_moved_announces_no_old_address_and_is_knocked_at_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with swarm_of(tmp_path, {}, {}) as ((one, other), _):
        await until(lambda: one.reaching.reachability == other.reaching.reachability == "public")
        old = one.host.addresses
        port, lane_port = parse_address(old[0]).port, int(one.lanes.addresses[0].split(":")[1])
        new, new_lane = format_address("192.0.2.8", port, one.host.peer_id), f"192.0.2.8:{lane_port}"
        one.host.addresses, one.lanes.addresses = (new,), (new_lane,)
        monkeypatch.setattr("shoal.node.discovery.reaching.ask_dial_back", refuses)
        one.reaching.moved(AddressChange(gone=frozenset({"127.0.0.1"}), come=frozenset({"192.0.2.8"})))
        told = (one.reaching.reachability, one.reaching.control_addresses, one.reaching.lane_addresses)
        assert told == ("unknown", (new,), (new_lane,)), "all that it has, until somebody has looked"
        assert (one.reaching.proven, one.reaching.proven_lanes, one.reaching.capabilities) == ((), (), ())
        monkeypatch.undo()
        one.host.addresses, one.lanes.addresses = (), ()
        one.reaching.moved(AddressChange(gone=frozenset({"192.0.2.8"})))
        assert (one.reaching.control_addresses, one.reaching.lane_addresses) == ((), ())
        one.reaching.heard(Change("linked", other.host.peer_id))
        await until(lambda: len(one.reaching._evidence) == 1)


async def refuses(host: Host, checker: PeerId, ports: tuple[int, ...]) -> NoReturn:
    await trio.lowlevel.checkpoint()
    raise NetworkError("not now")


@pytest.mark.usefixtures("loopback_is_public")
async def test_peer_that_was_linked_anew_knocks_anew(tmp_path: Path) -> None:
    """The router may have another address by now, of which this machine's own say nothing."""
    async with swarm_of(tmp_path, {}, {}) as ((one, other), _):
        await until(lambda: len(one.reaching._evidence) == 1)
        one.reaching._evidence = Evidence()
        one.reaching.heard(Change("lost", other.host.peer_id))
        one.reaching.heard(Change("linked", other.host.peer_id))
        await until(lambda: len(one.reaching._evidence) == 1)


async def test_members_that_have_no_time_to_knock_are_asked_ever_less_often_whoever_is_linked_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []

    async def ask(host: Host, *_: object) -> NoReturn:
        if host is one.host:
            asked.append(trio.current_time())
        raise NetworkError("no answer in time")

    monkeypatch.setattr(reaching, "ask_dial_back", ask)
    monkeypatch.setattr(reaching, "CHECK_SETTLE_S", 0.01)
    async with swarm_of(tmp_path, {}, {}) as ((one, other), _):
        while len(asked) < 6:
            one.reaching.heard(Change("linked", other.host.peer_id))
            await trio.sleep(0.005)
    gaps = [later - at for at, later in itertools.pairwise(asked)]
    assert all(gap >= least for gap, least in zip(gaps, (0.02, 0.04, 0.08, 0.16, 0.32), strict=True)), gaps


def test_what_a_node_relays_is_within_the_cap_on_its_lanes(tmp_path: Path) -> None:
    member = Member(tmp_path, {})
    with contextlib.closing(member.events):
        assert member.lanes.upload is not None
        assert member.reaching.relayed_lanes._upload is member.lanes.upload, "two caps would let twice as much out"


@pytest.mark.usefixtures("loopback_is_public")
async def test_node_whose_user_does_not_want_it_does_not_relay(tmp_path: Path) -> None:
    async with swarm_of(tmp_path, {"relay": False}, {"reached": False}) as ((public, hidden), _):
        await until(lambda: public.reaching.reachability == "public" and len(hidden.reaching._evidence) == 1)
        assert public.reaching.capabilities == ()
        admits = (
            public.host.relay.admits,
            public.reaching.relayed_lanes.admits,
            public.reaching.observed_addresses.admits,
        )
        assert admits == (None, None, None)
        with pytest.raises(NetworkError, match="passes no lanes on"):
            await ask_relayed_lane(hidden.host, public.host.peer_id, public.host.peer_id)
        await until(lambda: hidden.notices != [])
        assert hidden.reaching.reachability == "unknown"


@pytest.mark.usefixtures("loopback_is_public")
async def test_no_port_stays_mapped_when_a_node_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with router() as device:
        monkeypatch.setattr(reaching, "PortMapping", partial(PortMapping, description_url=device.url))
        async with swarm_of(tmp_path, {}, {"reached": False, "port_mapping": True}) as ((_, hidden), scopes):
            await until(lambda: hidden.reaching._mapping is not None and len(device.mapped) == 2)
            internal = {port for port, _ in device.mapped.values()}
            assert internal == {hidden.reaching._control_port, hidden.reaching._lane_port}
            scopes[1].cancel()
            await until(lambda: device.mapped == {})


async def test_on_a_private_network_nothing_is_withheld_and_nobody_needs_a_relay(tmp_path: Path) -> None:
    async with swarm_of(tmp_path, {}, {"reached": False}) as ((one, other), _):
        await until(lambda: len(one.reaching._evidence) == len(other.reaching._evidence) == 1)
        await until(lambda: one.reaching.proven == one.host.addresses)
        assert [node.reaching.reachability for node in (one, other)] == ["unknown", "unknown"]
        assert other.reaching.control_addresses == other.host.addresses
        assert other.reaching.lane_addresses == other.lanes.addresses
        assert other.reaching.is_reached()
        assert other.notices == []


async def test_lanes_go_where_their_peer_is_seen_and_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reaching, "own_hosts", lambda: frozenset({"127.0.0.1"}))
    async with swarm_of(tmp_path, {}, {}) as ((one, other), _):
        me, peer = one.reaching, other.host.peer_id
        assert me.may_dial(peer, "127.0.0.1")
        assert me.may_dial(peer, "192.168.1.9"), "both are on private networks"
        assert not me.may_dial(peer, "198.51.100.9")
        assert not me.may_dial(peer, "victim.example.org")
        monkeypatch.setattr(one.host, "host_of", lambda of: "203.0.113.5")
        assert me.may_dial(peer, "203.0.113.5")
        for mine in ("127.0.0.1", "0.0.0.0", "::ffff:127.0.0.1"):
            assert not me.may_dial(peer, mine), "what listens on this machine alone is no business of a peer elsewhere"
        for victim in ("203.0.113.6", "192.168.1.9", "10.0.0.1", "victim.example.org"):
            assert not me.may_dial(peer, victim)
        monkeypatch.setattr(one.host, "host_of", lambda of: None)
        assert not me.may_dial(peer, "127.0.0.1"), "who is seen through a relay is seen nowhere"
