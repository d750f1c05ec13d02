"""Deadlines of links follow what links took of late, and few are dialled at once where they are late."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from shoal.protocol.errors import NetworkError, RemoteError
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.peering import Nack
from shoal.protocol.places import Rank
from shoal.protocol.wire import Sealer, SwarmId, canonical
from shoal.swarm import dialling, links
from shoal.swarm.dialling import Dialling, DialWindow, is_there
from shoal.swarm.host import NotReached
from shoal.swarm.links import HELLO_PROTOCOL, Links
from shoal.swarm.streams import MessageStream
from tests.swarm.test_links import WELCOME, Gate
from tests.swarm.test_streams import memory_pair
from tests.waiting import running

pytestmark = pytest.mark.virtual_time

SWARM = SwarmId(b"s" * 32)
ME = Identity.from_seed(bytes([1]) * 32)
PEER, OTHER = (Identity.from_seed(bytes([n]) * 32).peer_id for n in (2, 3))
BUSY = NotReached("too much to do", refused=frozenset(), silent=frozenset({"192.0.2.1"}), is_busy=True)
SILENT = NotReached("nobody", refused=frozenset(), silent=frozenset({"192.0.2.1"}))


class Greeting:
    """The stream of a hello that is welcome, after a while."""

    def __init__(self, hello_s: float) -> None:
        self._hello_s = hello_s

    async def send(self, message: bytes, *, deadline_s: float) -> None:
        pass

    async def receive(self, *, deadline_s: float | None) -> bytes:
        await trio.sleep(self._hello_s)
        return canonical(WELCOME)

    async def aclose(self) -> None:
        pass


class SlowNetwork:
    """A host on which things take their time, and a stream that hands on what is sent."""

    def __init__(self) -> None:
        self.handshake_s = self.hello_s = self.open_s = 0.0
        self.given: list[float | None] = []
        self.fails = False
        near, far = memory_pair(buffered=100)
        self.ours, self.theirs = MessageStream(near, peer=PEER), MessageStream(far, peer=ME.peer_id)

    def serve(self, protocol: str, handler: Callable[[MessageStream], Awaitable[None]]) -> None:
        pass

    async def dial(self, address: str, *, deadline_s: float) -> PeerId:
        raise AssertionError(f"nobody is dialled by address alone here, not {address}")

    async def dial_peer(
        self, peer: PeerId, addresses: Sequence[str], *, deadline_s: float, handshake_s: float | None = None
    ) -> None:
        self.given.append(handshake_s)
        await trio.sleep(self.handshake_s)
        if self.fails:
            raise BUSY

    async def hang_up(self, peer: PeerId) -> None:
        pass

    async def open(self, peer: PeerId, protocol: str, *, deadline_s: float) -> Any:
        if protocol == HELLO_PROTOCOL:
            return Greeting(self.hello_s)
        with trio.move_on_after(deadline_s) as scope:
            await trio.sleep(self.open_s)
        if scope.cancelled_caught:
            raise NetworkError("late")
        return self.ours

    def connection(self, peer: PeerId) -> object:
        return self.ours

    async def close(self, connection: object | None) -> None:
        pass


def links_on(network: SlowNetwork, gate: Gate, **options: Callable[[float], float]) -> Links:
    return Links(host=network, swarm_id=SWARM, sealer=Sealer(ME, SWARM, 1), admission_control=gate, **options)


async def test_handshakes_are_given_as_much_longer_as_links_took_of_late() -> None:
    network, gate = SlowNetwork(), Gate()
    network.handshake_s, network.hello_s = 2.0, 1.0
    tested = links_on(network, gate)
    await tested.meet(PEER, [], deadline_s=5)
    network.handshake_s = network.hello_s = 0.0
    await tested.meet(OTHER, [], deadline_s=5)
    await trio.sleep(60)
    tested.drop(OTHER)
    tested._parting.clear()
    await tested.meet(OTHER, [], deadline_s=5)
    assert network.given == pytest.approx([5.0, 5.0 + 1.5 * 3.0, 5.0])
    assert gate.took_s == {PEER: pytest.approx(3.0), OTHER: pytest.approx(0.0)}


@pytest.mark.parametrize(("took_s", "longer_s"), [(12.0, 1.5 * 12.0), (40.0, 1.5 * links.MAKING_LIMIT_S)])
async def test_links_that_take_long_are_finished_and_a_hang_is_not_waited_for(took_s: float, longer_s: float) -> None:
    network = SlowNetwork()
    network.handshake_s = took_s
    tested = links_on(network, Gate())
    await tested.meet(PEER, [], deadline_s=5)
    await tested.meet(OTHER, [], deadline_s=5)
    assert network.given == pytest.approx([5.0, 5.0 + longer_s])


async def test_handshakes_are_given_longer_by_own_lag() -> None:
    network = SlowNetwork()
    await links_on(network, Gate(), own_lag_s=lambda: 2.5).meet(PEER, [], deadline_s=1)
    assert network.given == [7.5]


@pytest.mark.parametrize(("rank", "given"), [(Rank.STRANGER, 5.0), (Rank.FIRST, 5.0 + 1.5 * 2.0)])
async def test_strangers_make_nobody_wait_longer_by_not_answering(rank: Rank, given: float) -> None:
    network, gate = SlowNetwork(), Gate(ranks={PEER: rank})
    network.fails, network.handshake_s = True, 2.0
    tested = links_on(network, gate)
    with pytest.raises(NotReached):
        await tested.meet(PEER, [], deadline_s=5)
    network.fails, network.handshake_s = False, 0.0
    await tested.meet(OTHER, [], deadline_s=5)
    assert network.given == pytest.approx([5.0, given])
    assert gate.took_s.keys() == {OTHER}


async def test_link_whose_stream_opens_late_is_up_and_loses_nothing() -> None:
    """Whether one who is slow is there is the failure detector's to say, and it cannot if the link ends meanwhile."""
    network, gate = SlowNetwork(), Gate()
    network.open_s = 30.0
    tested = links_on(network, gate)
    async with running(tested) as nursery:
        nursery.start_soon(network.ours.run)
        nursery.start_soon(network.theirs.run)
        await tested.meet(PEER, [], deadline_s=5)
        for nonce in range(3):
            tested.send(PEER, Nack(target=OTHER, nonce=nonce))
        with trio.fail_after(2 * network.open_s):
            assert len(await network.theirs.receive_all()) == 3
        assert trio.current_time() >= network.open_s
        assert (tested.linked(), gate.downs) == ({PEER}, [])


async def test_link_whose_stream_never_opens_ends_and_says_why() -> None:
    network, gate = SlowNetwork(), Gate()
    network.open_s = 1e6
    tested = links_on(network, gate)
    async with running(tested):
        await tested.meet(PEER, [], deadline_s=5)
        began = trio.current_time()
        await trio.sleep(links.REST_LIMIT_S + 1)
        assert (gate.downs, gate.reasons) == ([PEER], ["sending: late"])
        assert trio.current_time() > began


async def test_what_gathers_on_a_link_goes_in_one_write() -> None:
    network, gate = SlowNetwork(), Gate()
    tested, writes = links_on(network, gate), list[int]()
    write = network.ours._raw.write

    async def counted(data: bytes) -> None:
        writes.append(len(data))
        await write(data)

    network.ours._raw.write = counted  # type: ignore[method-assign]
    async with running(tested) as nursery:
        nursery.start_soon(network.ours.run)
        nursery.start_soon(network.theirs.run)
        await tested.meet(PEER, [], deadline_s=5)
        for nonce in range(10):
            tested.send(PEER, Nack(target=OTHER, nonce=nonce))
        await tested.drain(deadline_s=5)
        assert len(await network.theirs.receive_all()) == 10
        assert len(writes) == 1


# -- how many at once ----------------------------------------------------------------------------------------


def test_window_grows_by_one_for_as_many_that_were_done_and_halves_for_one_that_was_late() -> None:
    window = DialWindow()
    sizes = [window.places.total_tokens]
    for step in (*[window.done] * 5, *[window.late] * 4, *[window.done] * 2):
        step()
        sizes.append(window.places.total_tokens)
    assert sizes == [4, 4, 4, 4, 4, 5, 2, 1, 1, 1, 2, 2]
    for _ in range(1000):
        window.done()
    assert window.places.total_tokens == dialling.DIALS_AT_ONCE_LIMIT


def dialling_by(meet: Callable[..., Awaitable[None]]) -> Dialling:
    return Dialling(
        me=ME.peer_id,
        links=SimpleNamespace(pace=1.0, meet=meet),  # type: ignore[arg-type]
        book=SimpleNamespace(get=lambda peer: None),  # type: ignore[arg-type]
        admission=SimpleNamespace(rank=lambda peer: Rank.FIRST),  # type: ignore[arg-type]
        never_heard=lambda peer: True,
        start=lambda job: None,
        shut_out=lambda addresses: None,
    )


def test_whom_to_dial_is_looked_for_no_more_often_than_every_period(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[float] = []
    monkeypatch.setattr(Dialling, "_look", lambda one, now: looks.append(now))
    one = dialling_by(trio.sleep)
    for now in (7.0, 7.1, 7.4, 7.5, 7.9, 8.3):
        one.look(now)
    assert looks == [7.0, 7.5, 8.3]


async def test_only_who_was_there_and_late_makes_a_node_dial_fewer_at_once() -> None:
    outcomes: dict[PeerId, Exception | None] = {}

    async def meet(peer: PeerId, addresses: Sequence[str], *, deadline_s: float) -> None:
        if (error := outcomes[peer]) is not None:
            raise error

    one = dialling_by(meet)
    window = one._windows[True]
    for error, size in ((SILENT, 4), (RemoteError("no", peer=PEER), 4), (BUSY, 2), (NetworkError("hello"), 1)):
        outcomes[PEER] = error
        await one._dial(PEER, dialling._Dial(at=0.0))
        assert window.places.total_tokens == size
    assert one._windows[False].places.total_tokens == dialling.DIALS_AT_ONCE


async def test_who_waits_for_its_turn_to_be_dialled_is_not_held_for_one_that_is_out_of_reach() -> None:
    async def meet(peer: PeerId, addresses: Sequence[str], *, deadline_s: float) -> None:
        await trio.sleep_forever()

    peers = sorted(Identity.from_seed(bytes([seed]) * 32).peer_id for seed in range(50, 52 + dialling.DIALS_AT_ONCE))
    records = {peer: SimpleNamespace(peer=peer, phase="training", control_addresses=()) for peer in peers}
    jobs: list[Callable[[], Awaitable[None]]] = []
    one = dialling_by(meet)
    one._start = jobs.append
    one._links = SimpleNamespace(pace=1.0, meet=meet, linked=frozenset, resting=frozenset)  # type: ignore[assignment]
    one._book = SimpleNamespace(get=records.get, records=records.values, expire=float)  # type: ignore[assignment]
    for at in (0.0, 2 * dialling.DIAL_DEFERRAL_S):
        one.look(at)
    assert (len(jobs), one.strangers) == (len(peers), frozenset())
    async with trio.open_nursery() as nursery:
        for job in jobs:
            nursery.start_soon(job)
        await trio.testing.wait_all_tasks_blocked()
        one.look(3 * dialling.DIAL_DEFERRAL_S)
        nursery.cancel_scope.cancel()
    assert len(one.strangers) == dialling.DIALS_AT_ONCE


def test_who_took_a_connection_is_there_and_who_refuses_or_is_silent_is_not() -> None:
    assert [is_there(e) for e in (BUSY, NetworkError("no answer to hello"))] == [True, True]
    assert [is_there(e) for e in (SILENT, RemoteError("refused", peer=PEER))] == [False, False]
