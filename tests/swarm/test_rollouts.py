"""The rollout exchange on real hosts: announcements, pulls, quotas, and servers that are gone, slow, busy or wrong."""

from __future__ import annotations

import contextlib
import itertools

import msgspec
import pytest
import trio

from shoal.protocol import offer_book, offer_catch_up
from shoal.protocol.errors import LocalError, NetworkError
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Message
from shoal.protocol.rollouts import (
    CHUNK_LIMIT_BYTES,
    Announcement,
    AnnouncementBatch,
    CatchUpRequest,
    GroupChunk,
    GroupRequest,
    NewsRequest,
    Reason,
    announce_group,
    decode_message,
    digest_of,
    encode_batch,
    encode_group,
    peek_announcement,
    seal_announcement,
)
from shoal.protocol.wire import canonical
from shoal.swarm import rollouts
from shoal.swarm.gossip import GossipMessage
from shoal.swarm.rollouts import CATCH_UP_PROTOCOL, NEWS_PROTOCOL, ROLLOUT_PROTOCOL, RolloutExchange
from shoal.swarm.streams import MessageStream
from tests.swarm.rollout_lab import SWARM, TOPIC, Node, identity, running
from tests.waiting import WAIT_S, until

CATCH_UP = f"{CATCH_UP_PROTOCOL}/{SWARM.hex()[:16]}"
NEWS = f"{NEWS_PROTOCOL}/{SWARM.hex()[:16]}"
PROTOCOL = f"{ROLLOUT_PROTOCOL}/{SWARM.hex()[:16]}"


@pytest.fixture(autouse=True)
def _ask_busy_servers_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollouts, "BUSY_PAUSE_S", 0.01)


@pytest.fixture
def _ask_for_what_is_missing_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offer_catch_up, "ASK_PERIOD_S", 0.3)
    monkeypatch.setattr(offer_catch_up, "HISTORY_DELAY_S", 0.2)


# --- announcing ---


async def test_200_announcements_per_second_all_arrive() -> None:
    nodes = [Node(seed, members=(1, 2, 3, 4)) for seed in (1, 2, 3, 4)]
    announced: dict[int, set[bytes]] = {node.seed: set() for node in nodes}

    async def announce_steadily(node: Node) -> None:
        began = trio.current_time()
        for index in range(100):
            announced[node.seed].add(await node.announce(index))
            await trio.sleep_until(began + (index + 1) / 50)

    async with running(*nodes):
        async with trio.open_nursery() as nursery:
            for node in nodes:
                nursery.start_soon(announce_steadily, node)
        for node in nodes:
            await until(lambda node=node: node.exchange.announcements_received == 300)
            assert node.offered() == set().union(*(own for seed, own in announced.items() if seed != node.seed))
        for node in nodes:
            await until(lambda node=node: node.exchange.announcements_sent == 100)  # counted when the last has it
            assert node.exchange.announcements_received == len(node.exchange.book) == 300
            assert not node.exchange.rejected
            assert node.exchange.bytes_fetched == 0


async def test_announcements_are_gathered_into_few_messages() -> None:
    near, far = Node(1), Node(2)
    async with running(near, far):
        mailbox = await far.host.subscribe(TOPIC)
        began = trio.current_time()
        for index in range(30):
            await near.announce(index)
        await until(lambda: len(far.offered()) == 30)
        periods = (trio.current_time() - began) / rollouts.ANNOUNCE_PERIOD_S
        sizes = []
        with trio.move_on_after(0):
            while True:
                sizes.append(len((await mailbox.receive()).data))
        assert len(sizes) <= 1 + periods


async def test_announce_waits_while_too_many_wait() -> None:
    """Back-pressure: a node announces no faster than its peers' quotas let through."""
    near, far = Node(1), Node(2)
    async with running(near, far):
        start = trio.current_time()
        with trio.move_on_after(1.0) as scope:
            for index in range(10_000):
                await near.announce(index)
        assert scope.cancelled_caught
        assert near.exchange.announcements_sent <= 20 + 100 * (trio.current_time() - start)
        await until(lambda: len(far.offered()) >= near.exchange.announcements_sent > 0)
        assert not far.exchange.rejected


async def test_only_members_announce_and_are_served() -> None:
    member, stranger, reader = Node(1), Node(2), Node(3, members=(1, 3))
    async with running(member, stranger, reader):
        digest = await member.announce(0)
        await stranger.announce(0)
        own = await reader.announce(0)
        await until(lambda: reader.exchange.rejected[Reason.STRANGER])
        await until(lambda: digest in reader.offered() and own in stranger.offered() and own in member.offered())
        assert reader.offered() == {digest}
        assert await stranger.fetch(own) == {}
        assert list(await member.fetch(own)) == [own]


@pytest.mark.usefixtures("_ask_for_what_is_missing_at_once")
async def test_announcements_that_gossip_lost_are_asked_for() -> None:
    nodes = [Node(seed) for seed in (1, 2, 3)]
    near, far, stranger = nodes[0], Node(4), Node(5)
    for node in nodes:
        node.members = (1, 2, 3, 4)
        node.exchange = node.new_exchange()
    async with trio.open_nursery() as nursery:
        async with running(*nodes):
            before = {await near.announce(index) for index in range(100)}
            await until(lambda: all(node.offered() == before for node in nodes[1:]))
            for late in (far, stranger):  # they heard nothing of it
                await nursery.start(late.run)
                for node in nodes:
                    await late.host.dial(node.host.addresses[0], deadline_s=WAIT_S)
            await until(lambda: far.offered() == before)
            assert far.exchange.announcements_received == 100
            after = await near.announce(100)
            await until(lambda: after in far.offered())
            assert not far.exchange.rejected
            assert not nodes[1].exchange.rejected
            near.exchange.expire(offered_before=0, announced_before=0)
            assert await ask(far, near) == 64
            assert await ask(stranger, near) == 0
            near.exchange.expire(offered_before=0, announced_before=1)
            assert await ask(far, near) == 0
        nursery.cancel_scope.cancel()


async def ask(near: Node, far: Node) -> int:
    """How many announcements a node gets that says it has none."""
    answer = await near.host.request(far.peer, CATCH_UP, canonical(CatchUpRequest()), deadline_s=WAIT_S)
    return len(decode_message(answer, AnnouncementBatch).announcements)


@pytest.mark.usefixtures("_ask_for_what_is_missing_at_once")
async def test_lossy_gossip_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of three messages never reach the far node."""
    near, far = Node(1), Node(2)
    collect = RolloutExchange._collect
    messages = itertools.count()

    def lossy(exchange: RolloutExchange, message: GossipMessage) -> None:
        if next(messages) % 3 == 1:
            collect(exchange, message)

    monkeypatch.setattr(RolloutExchange, "_collect", lossy)
    async with running(near, far):
        digests = {await near.announce(index) for index in range(200)}
        await until(lambda: far.offered() == digests)
        assert far.exchange.announcements_received == 200
        assert not far.exchange.rejected


async def test_announcement_of_another_group_than_the_one_beside_it_is_refused() -> None:
    node = Node(1)
    group, other = (encode_group(node.group(index)) for index in range(2))
    announcement = announce_group(node.group(0), group, (1.0, 0.0, 1.0, 0.0))
    async with running(node):
        for wrong in (other, group + b"x", b""):
            with pytest.raises(LocalError, match="another group"):
                await node.exchange.announce(announcement, wrong)
        assert len(node.store) == 0
        await node.exchange.announce(announcement, group)
        assert node.store.get(announcement.digest) == group


async def test_group_that_cannot_be_held_leaves_no_gap_that_others_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    origin, reader = Node(1), Node(2)
    async with running(origin, reader):
        with monkeypatch.context() as full:
            full.setattr(origin.store, "keep", lambda digest, data: False)
            await origin.announce(0)
        digest = await origin.announce(1)
        await until(lambda: reader.offered() == {digest})
        assert reader.exchange.book.missing(origin.peer, 8).missing == ()


# --- fetching ---


async def test_fetch_brings_chosen_groups_whole_and_nothing_else() -> None:
    near, far = Node(1), Node(2)
    async with running(near, far):
        sizes = (8, 32_000, 4)
        digests = [await far.announce(index, text_bytes=size) for index, size in enumerate(sizes)]
        digests.append(await far.announce_group(far.group(3, text_bytes=32_000, completions=20), (1.0, 0.0) * 10))
        await until(lambda: len(near.offered()) == 4)
        chosen = (digests[0], digests[1], digests[3])
        came = await near.fetch(*chosen)
        assert came == {far_digest: far.store.get(far_digest) for far_digest in chosen}
        total_bytes = sum(len(data) for data in came.values())
        assert total_bytes > 2 * CHUNK_LIMIT_BYTES
        assert near.exchange.bytes_fetched == far.exchange.bytes_served == total_bytes
        assert await near.fetch(*chosen) == came  # held: nothing is pulled twice
        assert near.exchange.bytes_fetched == total_bytes
        assert sorted(far.pulled) == sorted(chosen)  # each once, however many chunks it has
        assert near.pulled == []


async def test_fetch_keeps_to_its_limit_of_bytes() -> None:
    near, far = Node(1), Node(2)
    async with running(near, far):
        for index in range(10):
            await far.announce(index, text_bytes=1000)
        await until(lambda: len(near.offered()) == 10)
        size_bytes = near.exchange.offers()[0].announcement.size_bytes
        came = await near.fetch(*near.offered(), limit_bytes=4 * size_bytes + 3)
        assert len(came) == 4
        assert near.exchange.bytes_fetched == 4 * size_bytes


async def test_group_of_an_origin_that_is_gone_comes_from_others_who_pulled_it() -> None:
    origin, holder, late = Node(1), Node(2), Node(3)
    async with running(origin, holder, late):
        digest = await origin.announce(0, text_bytes=5000)
        await until(lambda: digest in holder.offered() and digest in late.offered())
        came = await holder.fetch(digest)
        await until(lambda: holder.peer in late.exchange.book.holders(digest))
        origin.scope.cancel()
        await until(lambda: origin.peer not in late.host.connected())
        assert await late.fetch(digest) == came
        assert holder.exchange.bytes_served == len(came[digest])


async def test_wrong_bytes_never_pass_and_their_server_is_passed_over() -> None:
    liar, holder, reader = Node(1), Node(2), Node(3)
    async with running(liar, holder, reader):
        digests = [await liar.announce(index, text_bytes=3000) for index in range(2)]
        await until(lambda: set(digests) <= holder.offered() and set(digests) <= reader.offered())
        right = await holder.fetch(*digests)
        await until(lambda: all(holder.peer in reader.exchange.book.holders(digest) for digest in digests))

        async def lie(stream: MessageStream) -> None:
            request = decode_message(await stream.receive(deadline_s=WAIT_S), GroupRequest)
            data = right[request.digest][request.offset :]
            await stream.send(canonical(GroupChunk(status="chunk", data=data[:-1] + b"\x00")), deadline_s=WAIT_S)

        liar.host.serve(PROTOCOL, lie)
        assert await reader.fetch(digests[0]) == {digests[0]: right[digests[0]]}
        assert reader.blamed == {(liar.peer, Reason.FORGED): 1}
        assert reader.exchange.bytes_fetched == 2 * len(right[digests[0]])
        assert await reader.fetch(digests[1]) == {digests[1]: right[digests[1]]}
        assert reader.blamed == {(liar.peer, Reason.FORGED): 1}  # the liar was not asked again


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"garbage", Reason.MALFORMED),
        (bytes(2 * CHUNK_LIMIT_BYTES), Reason.MALFORMED),
        (canonical(GroupChunk(status="chunk")), Reason.MALFORMED),
        (canonical(GroupChunk(status="chunk", data=bytes(CHUNK_LIMIT_BYTES))), Reason.MALFORMED),
        (canonical(GroupChunk(status="absent")), Reason.UNAVAILABLE),
        (canonical(GroupChunk(status="busy")), Reason.UNAVAILABLE),
        (None, Reason.UNAVAILABLE),
    ],
)
async def test_servers_answers_are_bounded_and_blamed(
    answer: bytes | None, reason: Reason, monkeypatch: pytest.MonkeyPatch
) -> None:
    if answer is None:
        monkeypatch.setattr(rollouts, "CHUNK_DEADLINE_S", 0.5)
    server, reader = Node(1), Node(2)

    async def handler(stream: MessageStream) -> None:
        await stream.receive(deadline_s=WAIT_S)
        if answer is None:
            await trio.sleep_forever()
        else:
            await stream.send(answer, deadline_s=WAIT_S)

    async with running(server, reader):
        digest = await server.announce(0)
        await until(lambda: digest in reader.offered())
        server.host.serve(PROTOCOL, handler)
        assert await reader.fetch(digest, deadline_s=20) == {}
        assert reader.blamed[server.peer, reason] == 1
        assert reader.store.get(digest) is None


async def test_who_is_left_alone_for_a_while_is_not_blamed_for_what_it_was_not_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rollouts, "CHUNK_DEADLINE_S", 0.5)
    server, reader, other = Node(1), Node(2), Node(3)

    async def handler(stream: MessageStream) -> None:
        await stream.receive(deadline_s=WAIT_S)
        await trio.sleep_forever()

    async with running(server, reader, other):
        digests = [await server.announce(index) for index in range(2)]
        await until(lambda: set(digests) <= reader.offered())
        server.host.serve(PROTOCOL, handler)
        for digest in digests:
            assert await reader.fetch(digest, deadline_s=20) == {}
        assert reader.exchange.rejected[Reason.UNAVAILABLE] == 2
        assert {offer.digest for offer in reader.exchange.at_hand()} == set()
        reader.exchange.book.note_holder(digests[1], other.peer)  # as any other peer might say
        assert {offer.digest for offer in reader.exchange.at_hand()} == {digests[1]}
        assert reader.blamed == {(server.peer, Reason.UNAVAILABLE): 1}


async def test_groups_of_a_node_that_has_ended_are_not_at_hand_and_count_as_no_failure() -> None:
    server, reader = Node(1), Node(2)
    async with running(server, reader):
        digest = await server.announce(0)
        await until(lambda: {offer.digest for offer in reader.exchange.at_hand()} == {digest})
        server.scope.cancel()
        await until(lambda: server.peer not in reader.host.connected())
        assert reader.offered() == {digest}
        assert reader.exchange.at_hand() == ()
        assert not reader.exchange.rejected


@pytest.mark.parametrize(("patience_s", "asked"), [(1.2, 1), (0.2, 2)])
async def test_server_that_is_silent_until_nobody_waits_is_left_alone_if_that_was_long(
    patience_s: float, asked: int
) -> None:
    server, reader = Node(1), Node(2)
    requests: list[bytes] = []

    async def handler(stream: MessageStream) -> None:
        requests.append(await stream.receive(deadline_s=WAIT_S))
        await trio.sleep_forever()

    async with running(server, reader):
        digests = [await server.announce(index) for index in range(2)]
        await until(lambda: set(digests) <= reader.offered())
        server.host.serve(PROTOCOL, handler)
        for digest in digests:
            before = len(requests)
            with trio.move_on_after(patience_s) as scope:
                assert await reader.fetch(digest, deadline_s=20) == {}
            assert scope.cancelled_caught is (len(requests) > before)
        assert len(requests) == asked
        assert not reader.blamed, "who had no time to answer is not at fault"


async def test_quota_of_bytes_makes_a_greedy_peer_wait_and_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollouts, "SERVED_BYTES_PER_S", 20_000.0)
    monkeypatch.setattr(rollouts, "SERVED_BURST_BYTES", 40_000.0)
    server, greedy, modest = Node(1), Node(2), Node(3)
    async with running(server, greedy, modest):
        digests = [await server.announce(index, text_bytes=4000) for index in range(4)]
        await until(lambda: set(digests) <= greedy.offered() and set(digests) <= modest.offered())
        start = trio.current_time()
        first = await greedy.fetch(*digests[:1])
        assert list(first) == digests[:1]
        with trio.move_on_after(1.0):
            while True:  # asks for what it has, from the start, again and again
                request = canonical(GroupRequest(digest=digests[0], offset=0))
                await greedy.host.request(server.peer, PROTOCOL, request, deadline_s=WAIT_S)
        elapsed_s = trio.current_time() - start
        served_bytes = server.exchange.bytes_served
        assert 0 < served_bytes <= 40_000 + 20_000 * elapsed_s
        assert list(await modest.fetch(digests[1])) == [digests[1]]


@pytest.mark.parametrize(("protocol", "question"), [(CATCH_UP, CatchUpRequest()), (NEWS, NewsRequest())])
async def test_quota_of_bytes_bounds_what_one_peer_is_told_of_offers_and_nobody_else(
    monkeypatch: pytest.MonkeyPatch, protocol: str, question: Message
) -> None:
    monkeypatch.setattr(rollouts, "SERVED_BYTES_PER_S", 1.0)
    monkeypatch.setattr(rollouts, "SERVED_BURST_BYTES", 40_000.0)
    monkeypatch.setattr(offer_catch_up, "ASK_PERIOD_S", 1000.0)
    monkeypatch.setattr(offer_catch_up, "HISTORY_DELAY_S", 0.0)
    server, greedy, modest = Node(1), Node(2), Node(3)
    async with running(server, greedy, modest):
        for index in range(20):
            await server.announce(index)
        told = []
        with contextlib.suppress(NetworkError):
            while len(told) < 100:  # asks for what it has, again and again
                told.append(await greedy.host.request(server.peer, protocol, canonical(question), deadline_s=WAIT_S))
        assert len(told[0]) > 20 * 100
        assert len(told) == 40_000 // (4096 + len(told[0]))
        assert await modest.host.request(server.peer, protocol, canonical(question), deadline_s=WAIT_S) == told[0]
        assert server.host.remote_errors == server.host.handler_errors == 0
        assert not server.blamed


async def test_groups_of_one_origin_are_at_hand_by_one_look_at_it() -> None:
    server, reader = Node(1), Node(2)
    asked_about: list[PeerId] = []
    reader.is_ignored = lambda peer: asked_about.append(peer) or False  # type: ignore[method-assign, func-returns-value]
    reader.exchange = reader.new_exchange()
    async with running(server, reader):
        digests = [await server.announce(index) for index in range(20)]
        await until(lambda: set(digests) <= reader.offered())
        asked_about.clear()
        assert {offer.digest for offer in reader.exchange.at_hand()} == set(digests)
        assert asked_about == [server.peer]


# --- hostile peers ---


async def test_who_announces_anothers_group_in_a_false_size_is_to_blame_and_nobody_that_has_it() -> None:
    maker, holder, liar, reader = Node(1), Node(2), Node(3), Node(4)
    async with running(maker, holder, liar, reader):
        digest, own = await maker.announce(0), await holder.announce(0)
        await until(lambda: digest in holder.offered() and own in reader.offered())
        assert list(await holder.fetch(digest)) == [digest]
        await until(lambda: holder.peer in reader.exchange.book.holders(digest))
        told = announce_group(liar.group(0), maker.store[digest] + b"\x00", (1.0, 0.0, 1.0, 0.0))
        false = seal_announcement(liar.sealer, msgspec.structs.replace(told, digest=digest))
        await liar.host.publish(TOPIC, encode_batch(AnnouncementBatch(announcements=(false,))))
        await until(lambda: liar.peer in {offer.origin for offer in reader.exchange.offers()})
        offers = [offer for offer in reader.exchange.offers() if offer.origin == liar.peer]
        assert await reader.exchange.fetch(offers, limit_bytes=1 << 20, deadline_s=20) == {}
        assert reader.blamed[liar.peer, Reason.MISLABELLED] == 1
        assert {origin for origin, _ in reader.blamed} == {liar.peer}
        assert own in {offer.digest for offer in reader.exchange.at_hand()}


@pytest.mark.parametrize("answer_limit", [rollouts.ANSWER_LIMIT, rollouts.FETCH_LIMIT])
async def test_who_reads_no_answer_keeps_nobody_else_from_being_served(
    monkeypatch: pytest.MonkeyPatch, answer_limit: int
) -> None:
    monkeypatch.setattr(rollouts, "CHUNK_DEADLINE_S", 600.0)
    monkeypatch.setattr(rollouts, "ANSWER_LIMIT", answer_limit)  # the second: all that it may have are there
    server, hostile, modest = Node(1), Node(2), Node(3)
    async with running(server, hostile, modest):
        digest = await server.announce_group(server.group(0, text_bytes=30_000, completions=16), (1.0, 0.0) * 8)
        await until(lambda: digest in modest.offered())
        request = canonical(GroupRequest(digest=digest, offset=0))
        for _ in range(4 * rollouts.FETCH_LIMIT):
            stream = await hostile.host._network.open_stream(server.peer, PROTOCOL, deadline_s=WAIT_S)
            await stream.write(len(request).to_bytes(4, "big") + request)
            await stream.read(1)  # the answer is under way, and no more of it is taken
        assert server.exchange._answering[hostile.peer] == rollouts.FETCH_LIMIT
        assert list(await modest.fetch(digest)) == [digest]


async def test_attacker_cannot_keep_honest_offers_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """It floods, replays, forges and sends garbage; all of it is counted, the others' offers all arrive."""
    monkeypatch.setattr(offer_book, "OFFER_LIMIT", 64)
    monkeypatch.setattr(offer_book, "PEER_OFFER_LIMIT", 32)
    monkeypatch.setattr(rollouts, "MESSAGES_BURST", 60.0)
    nodes = [Node(seed) for seed in (1, 2, 3)]
    attacker = Node(4)

    async def flood() -> None:
        honest = nodes[0].group(0)
        sealed = [sealed_by(attacker, index) for index in range(600)]
        stolen = sealed_by(nodes[0], 999)
        forged = sealed[0][:-1] + bytes([sealed[0][-1] ^ 1])
        batches = [
            b"garbage",
            bytes(200_000),
            encode_batch(AnnouncementBatch(announcements=(forged, stolen, b"garbage", encode_group(honest)[:100]))),
            encode_batch(AnnouncementBatch(announcements=(sealed[0], sealed[0], sealed[1]))),
            *(
                encode_batch(AnnouncementBatch(announcements=tuple(sealed[at : at + 60]), held=(bytes(32),) * 512))
                for at in range(0, 600, 60)
            ),
        ]
        for batch in batches * 6:
            await attacker.host.publish(TOPIC, batch)

    def sealed_by(node: Node, index: int) -> bytes:
        group = node.group(index)
        data = encode_group(group)
        announcement = announce_group(group, data, (1.0, 0.0, 1.0, 0.0))
        assert announcement.digest == digest_of(data)
        return rollouts.seal_announcement(node.sealer, announcement)

    async with running(*nodes, attacker):
        digests: dict[int, set[bytes]] = {node.seed: set() for node in nodes}
        async with trio.open_nursery() as nursery:
            nursery.start_soon(flood)
            for index in range(10):
                for node in nodes:
                    digests[node.seed].add(await node.announce(index))
                await trio.sleep(0.05)
        for node in nodes:
            others = set().union(*(own for seed, own in digests.items() if seed != node.seed))
            await until(lambda node=node, others=others: others <= node.offered())
            rejected = node.exchange.rejected
            await until(
                lambda rejected=rejected: (
                    {
                        Reason.MALFORMED,
                        Reason.TOO_LARGE,
                        Reason.FORGED,
                        Reason.REPLAYED,
                        Reason.QUOTA,
                    }
                    <= rejected.keys()
                )
            )
            assert {peer for peer, _ in node.blamed} == {attacker.peer}
            time_alone = rejected[Reason.REPLAYED] + rejected[Reason.QUOTA]  # nobody's fault
            assert sum(node.blamed.values()) + time_alone == sum(rejected.values())
            assert len(node.exchange.book) <= 64
            assert sum(offer.origin == attacker.peer for offer in node.exchange.offers()) <= 32
            node.ignores.add(attacker.peer)
        before = {node.seed: node.offered() for node in nodes}
        await attacker.announce(10_000)
        for node in nodes:
            await until(lambda node=node: node.exchange.rejected[Reason.IGNORED])
            assert node.offered() == before[node.seed]
        assert attacker.host.handler_errors == 0


async def test_gossip_that_is_sent_again_costs_its_signer_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollouts, "MESSAGES_PER_S", 1e-3)
    monkeypatch.setattr(rollouts, "MESSAGES_BURST", 3.0)
    near, far = Node(1), Node(2)
    async with running(near, far):
        sealed, digest = sealed_group(near, 0)
        batch = encode_batch(AnnouncementBatch(announcements=(sealed,)))
        for _ in range(5):  # as if somebody else sent it
            await near.host.publish(TOPIC, batch)
        await until(lambda: far.exchange.rejected.total() == 4)
        assert far.exchange.rejected == {Reason.REPLAYED: 2, Reason.QUOTA: 2}
        assert far.offered() == {digest}
        assert not far.blamed


async def test_digest_of_a_group_that_another_made_is_pulled_once_and_taken_from_nobody() -> None:
    """A thief announces it first, of a wrong size; who only holds it is not to blame that it has the right one."""
    origin, thief, holder, reader = nodes = [Node(seed) for seed in (1, 2, 3, 4)]
    async with running(*nodes):
        data = encode_group(origin.group(0))
        made = announce_group(origin.group(0), data, (1.0, 0.0, 1.0, 0.0))
        stolen = msgspec.structs.replace(made, task=thief.group(0).task, size_bytes=len(data) - 1)
        await publish(thief, stolen)
        await until(lambda: made.digest in reader.offered())
        holder.store.keep(made.digest, data)
        reader.exchange.book.note_holder(made.digest, holder.peer)
        assert await reader.fetch(made.digest) == {}
        assert reader.blamed == {(thief.peer, Reason.MISLABELLED): 1, (thief.peer, Reason.UNAVAILABLE): 1}
        await origin.exchange.announce(made, data)
        await until(lambda: len(reader.exchange.offers()) == 2)
        before = reader.exchange.bytes_fetched
        fresh = [offer for offer in reader.exchange.offers() if offer.origin == origin.peer]  # none is chosen twice
        assert await reader.exchange.fetch(fresh, limit_bytes=1 << 20, deadline_s=20) == {made.digest: data}
        assert reader.exchange.bytes_fetched - before == len(data)
        assert reader.store.get(made.digest) == data
        assert {peer for peer, _ in reader.blamed} == {thief.peer}


async def test_group_that_its_announcer_did_not_make_is_not_held() -> None:
    """The one that made it may offer it as well; what is held here is not taken any more."""
    origin, thief, reader = nodes = [Node(seed) for seed in (1, 2, 3)]
    async with running(*nodes):
        data = encode_group(origin.group(0))
        made = announce_group(origin.group(0), data, (1.0, 0.0, 1.0, 0.0))
        thief.store.keep(made.digest, data)
        await publish(thief, msgspec.structs.replace(made, task=thief.group(0).task))
        await until(lambda: made.digest in reader.offered())
        assert await reader.fetch(made.digest) == {made.digest: data}
        assert reader.store.get(made.digest) is None
        assert not reader.blamed, "that is for who judges it"


def sealed_group(node: Node, index: int) -> tuple[bytes, bytes]:
    """A group of this node's, announced and sealed, and its digest."""
    group = node.group(index)
    announcement = announce_group(group, encode_group(group), (1.0, 0.0, 1.0, 0.0))
    return rollouts.seal_announcement(node.sealer, announcement), announcement.digest


async def publish(node: Node, announcement: Announcement) -> None:
    """Announce whatever it is."""
    sealed = rollouts.seal_announcement(node.sealer, announcement)
    await node.host.publish(TOPIC, encode_batch(AnnouncementBatch(announcements=(sealed,))))


async def test_malformed_requests_end_their_stream_and_are_counted() -> None:
    server, attacker = Node(1), Node(2)
    async with running(server, attacker):
        for data in (b"", b"garbage", bytes(10_000), canonical({"digest": bytes(32), "offset": -1})):
            with pytest.raises(Exception, match=r"ended|closed|reset|broke"):
                await attacker.host.request(server.peer, PROTOCOL, data, deadline_s=WAIT_S)
        assert server.blamed == {
            (attacker.peer, Reason.MALFORMED): 3,
            (attacker.peer, Reason.TOO_LARGE): 1,
        }
        assert server.host.handler_errors == 0


# --- news of neighbours ---


async def test_what_gossip_did_not_bring_comes_from_a_neighbour_though_its_origin_is_gone() -> None:
    first, second, deaf = nodes = [Node(seed, has_neighbours=True) for seed in (1, 2, 3)]
    deaf.exchange._collect = lambda message: None  # type: ignore[method-assign]  # gossip passes it by

    async with running(*nodes):
        digest = await first.announce(0)
        own = await deaf.announce(0)
        await until(lambda: second.offered() == {digest, own})
        first.scope.cancel()
        await until(lambda: first.peer not in deaf.host.connected())
        await deaf.exchange._ask_neighbour(second.peer)
        assert deaf.offered() == {digest}
        assert deaf.exchange.announcements_received == 1
        answer, answers = second.exchange._news.answer, []
        second.exchange._news.answer = lambda request: answers.append(answer(request)) or answers[-1]  # type: ignore[method-assign, func-returns-value]
        await deaf.exchange._ask_neighbour(second.peer)
        assert [one.announcements for one in answers] == [()], "it goes on from where the last answer ended"
        assert not deaf.exchange.rejected
        assert not deaf.blamed


async def test_node_with_neighbours_asks_them_for_news_each_period(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollouts, "NEWS_PERIOD_S", 0.1)
    monkeypatch.setattr(offer_catch_up, "ASK_PERIOD_S", 1000.0)
    monkeypatch.setattr(offer_catch_up, "ASK_PERIOD_LIMIT_S", 1000.0)
    nodes = [Node(seed, has_neighbours=True) for seed in (1, 2)]
    nodes[1].exchange._collect = lambda message: None  # type: ignore[method-assign]

    async with running(*nodes):
        digest = await nodes[0].announce(0)
        await until(lambda: nodes[1].offered() == {digest})


async def test_neighbour_that_makes_news_up_is_to_blame_and_nobody_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollouts, "NEWS_PERIOD_S", 0.1)
    nodes = [Node(seed, has_neighbours=True) for seed in (1, 2, 3)]
    named, liar, reader = nodes
    invented, unheard = identity(99).peer_id, Node(4)
    sealed = [sealed_group(liar, index)[0] for index in range(2)]
    made_up = [
        canonical(msgspec.structs.replace(peek_announcement(one), sender=sender, seq=1000, signature=bytes(64)))
        for one, sender in zip(sealed, (named.peer, invented), strict=True)
    ]
    first, digest = sealed_group(unheard, 0)
    for answer in (first, *made_up, sealed_group(unheard, 1)[0]):
        liar.exchange._news.note(answer)
    reader.is_ignored = lambda peer: peer == liar.peer and bool(reader.blamed)  # type: ignore[method-assign]
    reader.exchange = reader.new_exchange()
    reader.exchange._collect = lambda message: None  # type: ignore[method-assign]

    async with running(*nodes):
        await until(lambda: reader.blamed)
        assert reader.blamed == {(liar.peer, Reason.FORGED): 1}
        assert reader.exchange.rejected == {Reason.FORGED: 1}
        assert reader.offered() == {digest}, "what came after it is dropped"
        assert reader.exchange.book._origins.keys() == {unheard.peer}


async def test_news_are_for_those_that_take_part() -> None:
    member, stranger = Node(1, members=(1,), has_neighbours=True), Node(2, has_neighbours=True)

    async with running(member, stranger):
        await member.announce(0)
        with pytest.raises(NetworkError):
            await stranger.exchange._ask_neighbour(member.peer)
        assert member.host.remote_errors == 1
