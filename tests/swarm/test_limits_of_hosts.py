"""The limits of `swarm/limits.py` where real hosts have them: floods, strangers, and members beside them."""

from __future__ import annotations

from contextlib import suppress

import pytest
import trio
import trio.testing

from shoal.protocol.errors import NetworkError
from shoal.protocol.messages import Leave, Term
from shoal.protocol.peering import Refusal, Welcome
from shoal.swarm import limits
from shoal.swarm import strangers as strangers_module
from shoal.swarm.host import Host
from shoal.swarm.limits import Door, Reason
from shoal.swarm.streams import MessageStream
from tests.swarm.test_members import Node, Stranger, assert_linked, running, stranger
from tests.waiting import WAIT_S, until


async def test_half_open_connections_keep_no_newcomer_out(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = Node(1), Node(2)
    async with running(one, two) as nursery:
        one.host._door = Door(one.host.refusals, per_s=(1e3, 1e3), address_per_s=(1e3, 1e3))  # not what is tried here
        port = int(one.host.addresses[0].split("/")[4])
        for _ in range(limits.HALF_OPEN_LIMIT + 20):
            stream = await trio.open_tcp_stream("127.0.0.1", port)
            nursery.start_soon(swallow, stream)
        await two.join(one)
        await assert_linked(one, two)
        assert one.host.refusals.counts()[Reason.HALF_OPEN.value] > 0
        assert len(one.host._half_open) <= limits.HALF_OPEN_LIMIT


async def swallow(stream: trio.SocketStream) -> None:
    with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
        async with stream:
            while await stream.receive_some():
                pass


async def test_stranger_that_says_no_hello_is_parted_from_and_members_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strangers_module, "STRANGERS_LOOK_S", 0.05)
    monkeypatch.setattr(strangers_module, "STRANGERS_REST_S", 600.0)
    one, two = Node(1), Node(2)
    async with running(one, two), stranger(9) as silent:
        await two.join(one)
        await assert_linked(one, two)
        await silent.host.dial(one.host.addresses[0], deadline_s=WAIT_S)
        await until(lambda: one.peer in silent.host.connected())
        monkeypatch.setattr(strangers_module, "STRANGER_DEADLINE_S", 0.3)
        told = one.host.refusals.counts
        with trio.fail_after(30):
            await until(lambda: one.peer not in silent.host.connected() or told().get(Reason.SILENT.value, 0) > 1)
        assert told()[Reason.SILENT.value] == 1, "who is kept is counted again"
        await until(lambda: one.peer not in silent.host.connected())
        await assert_linked(one, two)


async def test_stranger_whose_hello_was_refused_hears_why_and_is_parted_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strangers_module, "STRANGERS_LOOK_S", 0.05)
    monkeypatch.setattr(strangers_module, "REFUSED_STAY_S", 0.1)
    one, two = Node(1), Node(2)
    async with running(one, two), stranger(8) as silent, stranger(9) as other:
        await two.join(one)
        await silent.host.dial(one.host.addresses[0], deadline_s=WAIT_S)
        for times in (1, 2):
            assert isinstance(await other.ask(one, other.hello(wire=99)), Refusal)
            await until(lambda: one.peer not in other.host.connected() and other.peer not in one.host.connected())
            assert one.host.refusals.counts()[Reason.REFUSED.value] == times
        assert Reason.FLOODING.value not in one.host.refusals.counts()
        assert one.peer in silent.host.connected()
        await assert_linked(one, two)


async def test_who_was_dialled_and_says_a_hello_that_is_refused_is_parted_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strangers_module, "STRANGERS_LOOK_S", 0.05)
    monkeypatch.setattr(strangers_module, "STRANGERS_REST_S", 0.05)
    monkeypatch.setattr(strangers_module, "REFUSED_STAY_S", 0.1)
    one = Node(1)
    async with running(one), stranger(8) as silent, stranger(9) as other:
        for peer in (silent, other):
            await one.host.dial(peer.host.addresses[0], deadline_s=WAIT_S)
        await until(lambda: one.peer in other.host.connected())
        dialled = one.host.connection(other.peer)
        assert isinstance(await other.ask(one, other.hello(wire=99)), Refusal)
        assert one.host.connection(other.peer) is dialled
        with trio.fail_after(20):
            await until(lambda: one.host.connected() == {silent.peer})


async def test_who_says_hello_again_and_again_loses_its_connection_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strangers_module, "REFUSED_STAY_S", 600.0)
    monkeypatch.setattr(strangers_module, "STRANGERS_LOOK_S", 0.05)
    one, two = Node(1), Node(2)
    async with running(one, two):
        async with stranger(9) as other:
            await two.join(one)
            for _ in range(strangers_module.REFUSALS_LIMIT):
                assert isinstance(await other.ask(one, other.hello(wire=99)), Refusal)
            assert one.peer in other.host.connected()
            with pytest.raises(NetworkError):
                await other.ask(one, other.hello(wire=99))
            assert one.host.refusals.counts()[Reason.REFUSED.value] == 1
            await until(lambda: one.peer not in other.host.connected() and not one.members._strangers._refused)
            assert isinstance(await other.ask(one, other.hello()), Welcome), "it may come back as one that belongs here"
        await assert_linked(one, two)


async def test_crowd_of_strangers_pushes_out_nobody_that_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strangers_module, "STRANGER_LIMIT", 1)
    monkeypatch.setattr(strangers_module, "STRANGER_DEADLINE_S", 600.0)
    monkeypatch.setattr(strangers_module, "STRANGERS_LOOK_S", 0.05)
    one = Node(2)
    async with running(one), stranger(1) as founder, stranger(8) as older, stranger(9) as newer:
        for host in (founder.host, older.host, newer.host):
            await host.dial(one.host.addresses[0], deadline_s=WAIT_S)
        await until(lambda: one.peer not in older.host.connected())
        assert one.host.refusals.counts()[Reason.STRANGERS.value] == 1
        assert one.peer in founder.host.connected()
        assert one.peer in newer.host.connected()


async def test_full_node_ends_the_oldest_connection_of_a_stranger_for_a_new_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Host.__init__, "__kwdefaults__", {**Host.__init__.__kwdefaults__, "connection_limit": 3})
    one, two, founder = Node(2), Node(3), Node(1)
    async with running(one, two, founder), stranger(8) as older, stranger(9) as newer:
        await two.join(one)
        await assert_linked(one, two)
        for host in (older.host, newer.host):
            await host.dial(one.host.addresses[0], deadline_s=WAIT_S)
        await until(lambda: len(one.host.connected()) == 3)
        await founder.join(one)
        await until(lambda: founder.peer in one.linked())
        assert one.host.connected() == {two.peer, newer.peer, founder.peer}, "the oldest stranger gave way"
        assert one.host.refusals.counts() == {Reason.CONNECTIONS.value: 1}
        await assert_linked(one, two, founder)


async def test_stranger_that_opens_streams_without_end_loses_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "STRANGERS_READS_PER_S", 1e9)
    monkeypatch.setattr(limits, "STRANGER_STREAMS_PER_S", 1e-3)  # however long it takes to open as many as it may
    monkeypatch.setattr(limits, "STRIKES_FORGIVEN_S", 1e6)
    one, two = Node(1), Node(2)
    async with running(one, two), stranger(9) as flood:
        await two.join(one)
        await assert_linked(one, two)
        await flood.host.dial(one.host.addresses[0], deadline_s=WAIT_S)
        with suppress(NetworkError):
            for _ in range(400):
                with suppress(NetworkError):
                    await flood.host.request(one.peer, "/shoal/manifest/1", b"\x80", deadline_s=WAIT_S)
                if one.peer not in flood.host.connected():
                    break
        assert one.peer not in flood.host.connected()
        counts = one.host.refusals.counts()
        assert counts[Reason.STREAM_RATE.value] >= limits.STRIKES_LIMIT / limits.STRANGER_STRIKES
        assert counts[Reason.FLOODING.value] >= 1
        await assert_linked(one, two)


async def test_stranger_over_its_reads_waits_and_newcomers_and_members_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "STRANGERS_READS_PER_S", 1e-3)
    monkeypatch.setattr(limits, "STRANGERS_READS_BURST", 0.0)
    one, two, three = Node(1), Node(2), Node(3)
    answered = 0

    async def echo(stream: MessageStream) -> None:
        await stream.send(await stream.receive(deadline_s=60), deadline_s=60)

    async def ask_without_end(asking: Stranger) -> None:
        nonlocal answered
        await asking.host.dial(one.host.addresses[0], deadline_s=WAIT_S)
        with suppress(NetworkError):
            while True:
                await asking.host.request(one.peer, "/test/echo/1", b"again", deadline_s=60)
                answered += 1

    one.host.serve("/test/echo/1", echo)
    one.host.is_known = lambda address: False  # else all on this machine would be a member's neighbours
    async with running(one, two, three) as nursery, stranger(9) as other:
        await two.join(one)
        nursery.start_soon(ask_without_end, other)
        told = one.host.refusals.counts
        await until(lambda: told().get(Reason.TURNS.value, 0) or answered >= limits.FIRST_READS / 2)
        await three.join(one)
        await assert_linked(one, two, three)
        assert 1 <= answered < limits.FIRST_READS / 2


async def test_newcomer_joins_with_the_streams_that_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What strangers share is spent by others."""
    monkeypatch.setattr(limits, "STRANGERS_STREAMS_PER_S", 0.0)
    monkeypatch.setattr(limits, "STRANGERS_STREAMS_BURST", 0.0)
    one, two = Node(1), Node(2)
    async with running(one, two):
        await two.join(one)
        await assert_linked(one, two)
        assert one.host.refusals.counts() == two.host.refusals.counts() == {}


async def test_hello_that_is_not_admitted_is_counted() -> None:
    one = Node(1)
    async with running(one), stranger(9, swarm_id=one.manifest.swarm_id) as other:
        await other.ask(one, other.hello(wire=99))
        assert one.host.refusals.counts() == {Reason.ADMISSION.value: 1}


async def test_member_over_its_rate_is_read_later_and_heard_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MESSAGES_BURST", 20.0)
    monkeypatch.setattr(limits, "MESSAGES_PER_S", 40.0)
    one, two = Node(1), Node(2)
    async with running(one, two):
        await two.join(one)
        await assert_linked(one, two)
        before = len(one.heard)
        words = [Leave(term=Term(), round=1000 + n, base=bytes(32), signature=bytes(64)) for n in range(60)]
        for word in words:
            two.members.links.send(one.peer, word)
        await until(lambda: (two.peer, words[-1]) in one.heard)
        assert [message for peer, message in one.heard[before:] if message in words] == words
        assert one.host.refusals.counts()[Reason.PACED.value] > 0
