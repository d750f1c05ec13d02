"""hivemind's process with its real Go daemon: meeting points in its DHT, a relay, and how it starts and ends."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import trio
import trio.testing

from shoal.protocol.address import format_circuit
from shoal.protocol.errors import ConfigError, RemoteError
from shoal.protocol.identity import Identity
from shoal.protocol.wire import SwarmId, canonical
from shoal.swarm.rendezvous.hivemind import ORDER_DEADLINE_S, Hivemind, HivemindFailed, check_installed
from shoal.swarm.rendezvous.hivemind_messages import (
    KEYS_LIMIT,
    MESSAGE_LIMIT_BYTES,
    VALUE_LIMIT_BYTES,
    VALUES_LIMIT,
    Failed,
    Found,
    Get,
    Put,
    Ready,
    Start,
    frame,
    length_of,
    read_order,
    read_report,
)
from shoal.swarm.rendezvous.hivemind_process import _entries
from shoal.swarm.rendezvous.meeting_points import keys_of, open_point, sign_point
from shoal.swarm.streams import MessageStream
from tests.swarm.rendezvous.test_kademlia import Node, peers

SWARM = SwarmId(b"h" * 32)
LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)

needs_hivemind = pytest.mark.skipif(
    importlib.util.find_spec("hivemind") is None, reason="hivemind is not installed; the extra shoal[hivemind] has it"
)


class Process(Hivemind):
    """The process, and the addresses that it said it has."""

    def __init__(self, start: Start) -> None:
        self.told = trio.Event()
        self.addresses: tuple[str, ...] = ()
        super().__init__(SWARM, start, on_ready=self._note)

    def _note(self, ready: Ready) -> None:
        self.addresses = ready.addresses
        self.told.set()


def children_of(pid: int) -> list[int]:
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return [int(text) for text in listed.stdout.split()]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@needs_hivemind
@pytest.mark.long
async def test_point_announced_in_a_hivemind_dht_is_found_by_another_process_whatever_else_lies_there() -> None:
    who, liar = Identity.from_seed(b"1" * 32), Identity.from_seed(b"2" * 32)
    signed = sign_point(who, SWARM, addresses=[f"/ip4/192.0.2.1/tcp/1/p2p/{who.peer_id}"], sequence=1)
    async with trio.open_nursery() as nursery:
        server = Process(Start(serves=True, listen=LOOPBACK))
        nursery.start_soon(server.run_once)
        await server.told.wait()
        member, newcomer = (Process(Start(initial=server.addresses)) for _ in range(2))
        nursery.start_soon(member.run_once)
        nursery.start_soon(newcomer.run_once)
        assert await newcomer.look_up() == []
        assert await member.announce(signed) == 2
        keys = tuple(key.decode() for key in keys_of(open_point(signed)))
        await member._order(Put(id=99, keys=keys, name=liar.peer_id, value=b"\xc1" * 1000, valid_s=60))
        found = await newcomer.look_up()
        assert signed in found
        assert set(found) <= {signed, b"\xc1" * 1000}
        nursery.cancel_scope.cancel()


@needs_hivemind
@pytest.mark.long
async def test_go_daemon_relays_between_two_nodes_introduces_them_and_ends_with_its_process() -> None:
    async def echo(stream: MessageStream) -> None:
        await stream.send(await stream.receive(deadline_s=10), deadline_s=10)

    behind, dialler = Node(1), Node(2)
    behind.host.serve("/echo/1", echo)
    async with trio.open_nursery() as nursery:
        daemon = Process(Start(serves=True, listen=LOOPBACK))
        await nursery.start(behind.run)
        await nursery.start(dialler.run)
        nursery.start_soon(daemon.run_once)
        await daemon.told.wait()
        for node in (behind, dialler):
            node.table.know(daemon.addresses)
        relay = await behind.host.dial(daemon.addresses[0], deadline_s=10)
        behind.kept.add(relay)
        await behind.host.circuits.reserve(relay)
        await dialler.host.dial(format_circuit(daemon.addresses[0], behind.host.peer_id), deadline_s=10)
        assert await dialler.host.request(behind.host.peer_id, "/echo/1", b"far", deadline_s=10) == b"far"
        await dialler.host.close(dialler.host.connection(behind.host.peer_id))
        while await dialler.finds() != peers(behind):  # the daemon takes up a contact a while after it connects
            await behind.table.announce(behind.point())
        assert daemon._process is not None
        process = daemon._process.pid
        (go,) = children_of(process)
        nursery.cancel_scope.cancel()
    assert not alive(process)
    while alive(go):  # noqa: ASYNC110
        await trio.sleep(0.05)


@needs_hivemind
@pytest.mark.long
async def test_process_that_reaches_no_peer_says_so_and_is_gone() -> None:
    nobody = f"/ip4/127.0.0.1/tcp/9/p2p/{Identity.from_seed(b'9' * 32).peer_id}"
    with pytest.raises(HivemindFailed, match="Error: "):
        await Process(Start(initial=(nobody,))).run_once()


@pytest.mark.virtual_time
async def test_order_for_which_no_process_gets_ready_fails_at_its_deadline() -> None:
    with pytest.raises(HivemindFailed, match="not carried out within 60 s"):
        await Process(Start()).look_up()
    assert trio.current_time() == pytest.approx(ORDER_DEADLINE_S, abs=0.01)


def test_user_is_told_what_to_install_where_hivemind_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"^--hivemind needs hivemind; install it with: pip install 'shoal\[hivemind\]'$"
    ):
        check_installed("--hivemind")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        frame(Failed(id=1, reason=""))[4:] + b"\0",
        frame(Get(id=1, keys=("k",)))[4:],
        frame(Found(id=1, values=(bytes(VALUE_LIMIT_BYTES + 1),)))[4:],
        frame(Found(id=1, values=(b"",) * (VALUES_LIMIT + 1)))[4:],
        frame(Failed(id=-1, reason=""))[4:],
    ],
)
def test_report_that_is_none_is_refused(data: bytes) -> None:
    with pytest.raises(RemoteError):
        read_report(data)


def test_order_beyond_its_bounds_is_refused_and_one_within_comes_through() -> None:
    order = Put(id=7, keys=("a", "b"), name="n", value=b"v", valid_s=60)
    assert read_order(frame(order)[4:]) == order
    with pytest.raises(RemoteError):
        read_order(frame(Get(id=1, keys=("k",) * (KEYS_LIMIT + 1)))[4:])
    with pytest.raises(RemoteError):
        length_of((MESSAGE_LIMIT_BYTES + 1).to_bytes(4, "big"))


def test_entries_that_are_no_byte_strings_of_their_size_are_left_out_and_spoil_nothing() -> None:
    def found(*entries: bytes) -> SimpleNamespace:
        return SimpleNamespace(value={str(n): SimpleNamespace(value=entry) for n, entry in enumerate(entries)})

    good, other = canonical(b"good"), canonical(b"other")
    bad = [
        b"",
        b"\xc1",
        b"\xd4\x50\x00",
        good + b"\0",
        canonical("text"),
        canonical(bytes(VALUE_LIMIT_BYTES + 1)),
        b"\x91" * 999,
    ]
    lone = SimpleNamespace(value=good)
    assert _entries([None, found(*bad, good), lone, found(other, good, *bad)]) == (b"good", b"other")
    many = found(*(canonical(n.to_bytes(4, "big")) for n in range(VALUES_LIMIT + 50)))
    assert len(_entries([many])) == VALUES_LIMIT


def test_node_that_names_hivemind_imports_none_of_it() -> None:
    modules = "shoal.swarm.rendezvous.hivemind, shoal.swarm.rendezvous.hivemind_messages"
    code = f"import sys, {modules}; sys.exit('hivemind' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
