"""The manifest from members that are strangers yet: the right one from any of them, and nothing else from all."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import trio
import trio.testing

from shoal.protocol.errors import ConfigError, NetworkError, RemoteError
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.manifest import Manifest
from shoal.protocol.peering import GetManifest, ManifestAnswer, ManifestReply, Refusal
from shoal.protocol.swarm_link import SwarmLink
from shoal.protocol.wire import canonical, decode
from shoal.swarm import manifest_exchange
from shoal.swarm.host import Host
from shoal.swarm.manifest_exchange import MANIFEST_PROTOCOL, ManifestServer, ask_again, fetch_manifest
from shoal.swarm.rendezvous.mdns import LocalDiscovery
from shoal.swarm.streams import MessageStream
from tests.manifests import manifest_of
from tests.swarm.rendezvous.test_mdns import LOOPBACK, loopback_multicast_fault
from tests.waiting import WAIT_S


def manifest(name: str = "test") -> Manifest:
    founder = Identity.from_seed(bytes(32)).peer_id
    return manifest_of([founder], {"network": {"bootstrap": ["/ip4/192.0.2.1/tcp/1/p2p/" + founder]}}, name=name)


MANIFEST = manifest()


@contextlib.asynccontextmanager
async def hosts(count: int) -> AsyncIterator[list[Host]]:
    made = [Host(identity=Identity.generate(), listen=("/ip4/127.0.0.1/tcp/0",)) for _ in range(count)]
    async with trio.open_nursery() as nursery:
        for host in made:
            await nursery.start(host.run)
        yield made
        nursery.cancel_scope.cancel()


def answering(host: Host, reply: bytes) -> list[bytes]:
    """Have `host` give that answer to all who ask; returns where their questions are kept."""
    asked: list[bytes] = []

    async def answer(stream: MessageStream) -> None:
        asked.append(await stream.receive(deadline_s=WAIT_S))
        await stream.send(reply, deadline_s=WAIT_S)
        await stream.aclose()

    host.serve(MANIFEST_PROTOCOL, answer)
    return asked


async def keep_silent(stream: MessageStream) -> None:
    await trio.sleep_forever()


def link_to(*members: Host) -> SwarmLink:
    return SwarmLink(swarm=MANIFEST.swarm_id, addresses=tuple(host.addresses[0] for host in members))


def discovery(peer: PeerId, addresses: Sequence[str] | None) -> LocalDiscovery:
    swarm_id = MANIFEST.swarm_id.hex()
    return LocalDiscovery(peer=peer, swarm_id=swarm_id, addresses=addresses, interfaces=LOOPBACK)


async def ask(host: Host, server: Host, request: bytes) -> ManifestReply:
    await host.dial(server.addresses[0], deadline_s=WAIT_S)
    answer = await host.request(server.peer_id, MANIFEST_PROTOCOL, request, deadline_s=WAIT_S)
    return decode(answer, ManifestReply)  # type: ignore[arg-type]


async def test_manifest_comes_without_its_addresses_and_is_the_swarms() -> None:
    async with hosts(1) as (member,):
        ManifestServer(member, MANIFEST)
        got = await fetch_manifest(link_to(member))
        assert got.swarm_id == MANIFEST.swarm_id
        assert got.network.bootstrap == []
        assert got.to_canonical() == MANIFEST.to_canonical()


async def test_one_honest_member_among_dead_silent_and_lying_ones_suffices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest_exchange, "TRY_DEADLINE_S", 1e6)  # who waits for the silent one first waits for long
    async with hosts(6) as (gone, silent, other_swarms, garbler, decliner, honest):
        server = link_to(gone)
        answering(other_swarms, canonical(ManifestAnswer(manifest=manifest("other").to_canonical())))
        answering(garbler, b"\xc1")
        answering(decliner, canonical(Refusal(reason="not now")))
        silent.serve(MANIFEST_PROTOCOL, keep_silent)
        ManifestServer(honest, MANIFEST)
        dead = "/ip4/127.0.0.1/tcp/9/p2p/" + server.addresses[0].rpartition("/")[2]
        members = link_to(silent, other_swarms, garbler, decliner, honest)
        asked = SwarmLink(swarm=MANIFEST.swarm_id, addresses=(dead, *members.addresses))
        assert (await fetch_manifest(asked, deadline_s=1e6)).swarm_id == MANIFEST.swarm_id


@pytest.mark.skipif(bool(loopback_multicast_fault()), reason="multicast over loopback does not work here")
async def test_member_on_the_local_network_gives_it_where_those_that_the_link_names_are_gone() -> None:
    async with hosts(3) as (gone, liar, living):
        answering(liar, canonical(ManifestAnswer(manifest=manifest("other").to_canonical())))
        ManifestServer(living, MANIFEST)
        dead = "/ip4/127.0.0.1/tcp/9/p2p/" + gone.peer_id
        link = SwarmLink(swarm=MANIFEST.swarm_id, addresses=(dead,))
        async with trio.open_nursery() as nursery:
            for host in (liar, living):
                await nursery.start(discovery(host.peer_id, host.addresses).run)
            with trio.fail_after(WAIT_S):
                got = await fetch_manifest(link, deadline_s=1e6, locally=discovery(gone.peer_id, None))
            nursery.cancel_scope.cancel()
        assert got.swarm_id == MANIFEST.swarm_id


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (canonical(ManifestAnswer(manifest=manifest("other").to_canonical())), "a manifest of another swarm"),
        (canonical(ManifestAnswer(manifest=MANIFEST.to_canonical()[:-1])), "not a valid Manifest"),
        (canonical(ManifestAnswer(manifest=b"")), "not a valid Manifest"),
        (canonical(Refusal(reason="this node is in swarm 00…, not in that one")), "this node is in swarm 00…"),
        (b"\x91" * 10_000, "not a valid"),
        (b"x" * (manifest_exchange.ANSWER_LIMIT_BYTES + 1), "exceeds the limit"),
    ],
    ids=["other", "cut", "empty", "elsewhere", "nested", "large"],
)
async def test_what_is_not_the_swarms_manifest_is_not_taken_nor_asked_for_again(reply: bytes, said: str) -> None:
    async with hosts(1) as (member,):
        asked = answering(member, reply)
        with pytest.raises(NetworkError) as caught:
            await fetch_manifest(link_to(member))
        assert str(caught.value).startswith("no member that the link names or this network has gives the manifest; ")
        assert said in str(caught.value)
        assert len(asked) == 1


@pytest.mark.parametrize("again", ["breaks off", "asks to come later"])
async def test_member_that_answers_the_second_time_is_asked_a_second_time(
    again: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest_exchange, "FIRST_PAUSE_S", 0.1)
    asked: list[bytes] = []

    async def answer(stream: MessageStream) -> None:
        asked.append(await stream.receive(deadline_s=WAIT_S))
        if len(asked) > 1:
            await stream.send(canonical(ManifestAnswer(manifest=MANIFEST.to_canonical())), deadline_s=WAIT_S)
        elif again == "breaks off":
            await stream.abort()
            return
        else:
            await stream.send(canonical(Refusal(reason="too many ask for the manifest; try again")), deadline_s=WAIT_S)
        await stream.aclose()

    async with hosts(1) as (member,):
        member.serve(MANIFEST_PROTOCOL, answer)
        told: list[str] = []
        assert (await fetch_manifest(link_to(member), on_wait=told.append)).swarm_id == MANIFEST.swarm_id
        assert asked == [canonical(GetManifest(swarm=MANIFEST.swarm_id))] * 2
        assert told == []  # it was over before anybody had to be told


@pytest.mark.virtual_time
async def test_pauses_between_tries_grow_and_no_two_newcomers_keep_time() -> None:
    async def times_of(seed: int) -> list[float]:
        """When a member that never answers is asked."""
        began, asked = trio.current_time(), list[float]()

        async def ask(try_s: float) -> Manifest:
            asked.append(trio.current_time() - began)
            assert 0 < try_s <= manifest_exchange.TRY_DEADLINE_S
            raise NetworkError(f"no answer to try {len(asked)}")

        ends_at = began + manifest_exchange.FETCH_DEADLINE_S
        with pytest.raises(NetworkError) as caught:
            await ask_again(ask, ends_at, random.Random(seed))
        assert str(caught.value) == f"no answer to try {len(asked)}"
        return asked

    several = [await times_of(seed) for seed in range(20)]
    assert len({tuple(times) for times in several}) == len(several)
    for times in several:
        pauses = [after - before for before, after in itertools.pairwise(times)]
        for number, pause in enumerate(pauses):
            most = min(manifest_exchange.FIRST_PAUSE_S * 2**number, manifest_exchange.PAUSE_LIMIT_S)
            assert 0.5 * most - 1e-6 <= pause <= 1.5 * most + 1e-6
        assert 6 <= len(times) <= 14  # one port may be dialled 16 times
        left_s = manifest_exchange.FETCH_DEADLINE_S - times[-1]
        longest_s = 1.5 * manifest_exchange.PAUSE_LIMIT_S + manifest_exchange.FIRST_PAUSE_S
        assert manifest_exchange.FIRST_PAUSE_S < left_s <= longest_s


@pytest.mark.virtual_time
async def test_slow_tries_end_in_time_and_what_no_try_changes_ends_at_once() -> None:
    tries: list[float] = []

    async def hang(try_s: float) -> Manifest:
        tries.append(try_s)
        await trio.sleep(try_s)
        raise NetworkError("no answer in time")

    began = trio.current_time()
    with pytest.raises(NetworkError, match="no answer in time"):
        await ask_again(hang, began + 45, random.Random(1))
    assert 40 < trio.current_time() - began <= 45
    assert tries[0] == manifest_exchange.TRY_DEADLINE_S
    assert len(tries) == 4

    async def lie(try_s: float) -> Manifest:
        tries.append(try_s)
        raise RemoteError("a manifest of another swarm")

    with pytest.raises(RemoteError, match="another swarm"):
        await ask_again(lie, trio.current_time() + 45, random.Random(1))
    assert len(tries) == 5


async def test_user_is_told_once_of_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest_exchange, "TELL_AFTER_S", 0.05)
    monkeypatch.setattr(manifest_exchange, "FIRST_PAUSE_S", 0.05)
    told, asked_since = list[str](), 0

    async def answer(stream: MessageStream) -> None:
        nonlocal asked_since
        await stream.receive(deadline_s=WAIT_S)
        asked_since += len(told)
        reason = "not now" if asked_since < 6 else manifest_exchange.OTHER_SWARM
        await stream.send(canonical(Refusal(reason=reason)), deadline_s=WAIT_S)
        await stream.aclose()

    async with hosts(2) as members:
        for member in members:
            member.serve(MANIFEST_PROTOCOL, answer)
        with pytest.raises(NetworkError, match=manifest_exchange.OTHER_SWARM):
            await fetch_manifest(link_to(*members), deadline_s=WAIT_S, on_wait=told.append)
        (text,) = told
        assert text.startswith("no member that the link names has given the manifest yet; asking again")


async def test_user_who_waits_is_told_what_came_of_whom_and_what_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest_exchange, "FIRST_PAUSE_S", 0.05)
    told, gone = list[str](), Identity.generate().peer_id
    async with hosts(1) as (silent,):
        silent.serve(MANIFEST_PROTOCOL, keep_silent)
        asked = link_to(silent)
        link = replace(asked, addresses=(*asked.addresses, f"/ip4/127.0.0.1/tcp/9/p2p/{gone}"))
        heard = trio.Event()
        ask = manifest_exchange._ask

        async def ask_and_note(host: Host, peer: PeerId, *arguments: Any) -> Manifest:
            try:
                return await ask(host, peer, *arguments)
            finally:
                if peer == gone:
                    heard.set()

        async def tell_when_heard(on_wait: Callable[[str], None], why: Callable[[], str]) -> None:
            await heard.wait()
            on_wait(why())

        monkeypatch.setattr(manifest_exchange, "_ask", ask_and_note)
        monkeypatch.setattr(manifest_exchange, "_tell_later", tell_when_heard)
        with pytest.raises(NetworkError):
            await fetch_manifest(link, deadline_s=1.0, on_wait=told.append)
    (text,) = told
    assert f"Tried: nothing yet from {silent.peer_id}; cannot reach {gone}: nobody listens at 127.0.0.1:9. " in text
    assert text.endswith("Start one, or take a fresh link: `shoal link` at a member")


@pytest.mark.parametrize("address", ["/ip4/192.0.2.7/tcp/9", "/dns4/n.invalid/tcp/9", "/ip4/127.0.0.1/tcp/9"])
async def test_who_has_no_network_is_told_so_and_blames_no_member(
    monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setattr(manifest_exchange, "has_network", lambda: False)
    monkeypatch.setattr(manifest_exchange, "TELL_AFTER_S", 0.05)
    monkeypatch.setattr(manifest_exchange, "FIRST_PAUSE_S", 0.05)
    link = SwarmLink(swarm=MANIFEST.swarm_id, addresses=(f"{address}/p2p/{Identity.generate().peer_id}",))
    told = list[str]()
    with pytest.raises(NetworkError) as caught:
        await fetch_manifest(link, deadline_s=0.5, on_wait=told.append)
    beyond = "127" not in address
    assert ("this machine has no network; connect it" in str(caught.value)) == beyond, "a member here needs none"
    assert [text.startswith("this machine has no network; asking again") for text in told] == [beyond]


async def test_members_that_do_not_answer_end_the_fetch_at_its_deadline() -> None:
    async with hosts(1) as (silent,):
        silent.serve(MANIFEST_PROTOCOL, keep_silent)
        with pytest.raises(NetworkError, match="ask for a fresh link"):
            await fetch_manifest(link_to(silent), deadline_s=0.5)


async def test_link_without_addresses_says_what_to_add() -> None:
    with pytest.raises(ConfigError, match="add a member's address with --join"):
        await fetch_manifest(SwarmLink(swarm=MANIFEST.swarm_id))


async def test_desk_tells_the_manifest_of_its_own_swarm_only() -> None:
    async with hosts(2) as (member, asker):
        ManifestServer(member, MANIFEST)
        reply = await ask(asker, member, canonical(GetManifest(swarm=manifest("other").swarm_id)))
        assert reply == Refusal(reason=f"this node is in swarm {MANIFEST.swarm_id.hex()[:16]}…, not in that one")
        with pytest.raises((NetworkError, RemoteError)):
            await ask(asker, member, b"\x00" * 1000)
        assert member.remote_errors == 1


async def test_one_address_gets_so_many_whatever_its_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest_exchange, "HOST_BURST_BYTES", 3 * manifest_exchange.ANSWER_LEAST_BYTES)
    monkeypatch.setattr(manifest_exchange, "HOST_BYTES_PER_S", 1)
    async with hosts(3) as (member, asker, neighbour):
        ManifestServer(member, MANIFEST)
        request = canonical(GetManifest(swarm=MANIFEST.swarm_id))
        given = [isinstance(await ask(asker, member, request), ManifestAnswer) for _ in range(5)]
        assert given == [True, True, True, False, False]
        expected = Refusal(reason="too many ask for the manifest; try again in a minute")
        assert await ask(neighbour, member, request) == expected


async def test_all_addresses_together_get_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest_exchange, "TOTAL_BURST_BYTES", 2 * manifest_exchange.ANSWER_LEAST_BYTES)
    monkeypatch.setattr(manifest_exchange, "TOTAL_BYTES_PER_S", 1)
    async with hosts(2) as (member, asker):
        ManifestServer(member, MANIFEST)
        request = canonical(GetManifest(swarm=MANIFEST.swarm_id))
        given = [isinstance(await ask(asker, member, request), ManifestAnswer) for _ in range(3)]
        assert given == [True, True, False]
