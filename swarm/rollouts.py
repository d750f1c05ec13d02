"""Rollouts between nodes: announced over gossip by digest, pulled by whoever chose them, served by whoever has them.

    announce    sealed, gathered for ANNOUNCE_PERIOD_S, then one gossip message; `announce` waits while too many wait
    offers      what others announced, bounded (`shoal.protocol.offer_book`); what gossip lost is asked for, of its
                origin (`CatchUp`), and where not all are linked of neighbours (`shoal.protocol.offer_news`)
    fetch       chosen groups in chunks, from the origin or from others who say to have them; every group's hash is
                checked before anybody sees it. Where not all are linked, over a connection made for it
                (`shoal.swarm.brief_connections`)

A group that was pulled is kept and announced as held, so that a popular one does not load its origin alone. A server
that is slow, absent or wrong is passed over, and left alone for a while. Per peer there are quotas of gossip messages,
announcements and bytes served, groups and offers alike; what is refused is counted in `rejected` by reason, and nothing
is raised for it.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable
from functools import cache, partial
from typing import Protocol

import trio

from shoal.protocol.errors import LocalError, NetworkError, RemoteError
from shoal.protocol.group_pull import Ask, Budget, Came, GroupPull, LeftAlone, Tally, Wait
from shoal.protocol.identity import PeerId
from shoal.protocol.limits import Rates
from shoal.protocol.offer_book import ANNOUNCEMENTS_PER_S, Offer, OfferBook
from shoal.protocol.offer_catch_up import ANSWERS_PER_TURN, OfferCatchUp
from shoal.protocol.offer_news import NEWS_ANSWERS_PER_TURN, NEWS_PERIOD_S, OfferNews
from shoal.protocol.places import Rank
from shoal.protocol.rollouts import (
    BATCH_LIMIT_BYTES,
    BATCH_LIMIT_ITEMS,
    CHUNK_LIMIT_BYTES,
    Announcement,
    AnnouncementBatch,
    CatchUpRequest,
    GroupChunk,
    GroupRequest,
    News,
    NewsRequest,
    Reason,
    RolloutError,
    decode_message,
    digest_of,
    encode_batch,
    maker_of,
    open_announcement,
    peek_announcement,
    seal_announcement,
)
from shoal.protocol.wire import Envelope, Sealer, SwarmId, canonical
from shoal.swarm.brief_connections import BriefConnections
from shoal.swarm.gossip import GossipMessage
from shoal.swarm.host import Host
from shoal.swarm.questions import REQUEST_DEADLINE_S
from shoal.swarm.streams import MessageStream

logger = logging.getLogger(__name__)

ROLLOUT_PROTOCOL = "/shoal/rollouts/1"
CATCH_UP_PROTOCOL = "/shoal/rollout-offers/1"
NEWS_PROTOCOL = "/shoal/rollout-news/1"
CATCH_UP_DEADLINE_S = 10.0
ANNOUNCE_PERIOD_S = 0.2
PUBLISH_PAUSE_S = 1.0
"""After gossip took nothing."""
OUTBOX_LIMIT_ITEMS = 256
CHUNK_MESSAGE_LIMIT_BYTES = CHUNK_LIMIT_BYTES + 128
REQUEST_COST_BYTES = 4096
"""The cost of a request in its peer's quota of bytes, whatever the answer."""
BUSY_PAUSE_S = 0.2
MESSAGES_PER_S, MESSAGES_BURST = 10.0, 50.0
"""Of gossip, from one peer."""
SERVED_BYTES_PER_S, SERVED_BURST_BYTES = float(8 << 20), float(16 << 20)
"""To one peer, of groups and of offers."""
ANSWER_LIMIT = 32
"""Chunks that are sent at once, but for the first of each peer: some that read no answer keep nobody from one."""
FETCH_LIMIT = 8
"""Groups that are fetched at once, and chunks that are sent to one peer at once."""
CHUNK_DEADLINE_S = 10.0
GROUP_DEADLINE_S = 20.0
"""For a group from one server."""
LEFT_ALONE_S = 30.0
"""Of a server that failed."""
SLOW_S = 1.0
"""A server that was silent for so long when its answer was waited for no more is left alone as one that failed."""


class Holdings(Protocol):
    """The groups that this node can serve."""

    def get(self, digest: bytes) -> bytes | None:
        """The bytes of a group."""

    def keep(self, digest: bytes, data: bytes) -> bool:
        """Hold a group, own or pulled, for as long as it may; return whether it is held."""


class RolloutExchange:
    """One node's side of the exchange. `run` it; then announce, look at the offers, fetch what was chosen.

    `sealer` numbers announcements alone, so that gaps in their numbers are losses. `round_number` is this node's own
    round. `takes_part` tells who may announce and be served, `ignored` whose announcements are dropped unread, `rank`
    who comes first where there is not room for all; `blame` is called with who broke which rule, `pulled` with the
    digest of each group that somebody began to fetch here. `connections`: to peers that hold groups and are not
    connected; None where those alone are asked that are.
    """

    def __init__(
        self,
        *,
        host: Host,
        sealer: Sealer,
        swarm_id: SwarmId,
        holdings: Holdings,
        round_number: Callable[[], int],
        takes_part: Callable[[PeerId], bool] = lambda peer: True,
        rank: Callable[[PeerId], Rank] = lambda peer: Rank.STRANGER,
        connections: BriefConnections | None = None,
        pulled: Callable[[bytes], None] = lambda digest: None,
        ignored: Callable[[PeerId], bool] = lambda peer: False,
        blame: Callable[[PeerId, Reason], None] = lambda peer, reason: None,
    ) -> None:
        self.book = OfferBook(swarm_id, sealer.peer_id, rank=rank)
        self.rejected: Counter[Reason] = Counter()
        self.announcements_sent = 0
        self.announcements_received = 0
        self.bytes_served = 0
        self._host = host
        self._sealer = sealer
        self._topic = f"shoal/{swarm_id.hex()}/rollouts"
        self._protocol = f"{ROLLOUT_PROTOCOL}/{swarm_id.hex()[:16]}"
        self._holdings = holdings
        self._round_number = round_number
        self._takes_part = takes_part
        self._connections = connections
        self._pulled = pulled
        self._ignored = ignored
        self._blame = blame
        self._outbox, self._to_publish = trio.open_memory_channel[tuple[bool, bytes]](OUTBOX_LIMIT_ITEMS)
        self._messages: Rates[PeerId] = Rates(MESSAGES_PER_S, MESSAGES_BURST)
        self._served: Rates[PeerId] = Rates(SERVED_BYTES_PER_S, SERVED_BURST_BYTES)
        self._catch_up = CatchUp(
            host=host,
            protocol=f"{CATCH_UP_PROTOCOL}/{swarm_id.hex()[:16]}",
            boot=sealer.boot,
            peers=self._partners,
            missing=partial(self.book.missing, count=BATCH_LIMIT_ITEMS),
            take=self._caught_up,
            blame=self._reject,
            send=self._send_news,
            beside_news=connections is not None,
        )
        self._news = OfferNews(boot=sealer.boot)
        self._news_protocol = f"{NEWS_PROTOCOL}/{swarm_id.hex()[:16]}"
        self._me, self._swarm_id = sealer.peer_id, swarm_id
        self._answering: Counter[PeerId] = Counter()
        self._fetching = trio.Semaphore(FETCH_LIMIT)
        self._left_alone = LeftAlone(LEFT_ALONE_S)
        self._tally = Tally()

    @property
    def bytes_fetched(self) -> int:
        """Of groups, those that proved wrong included."""
        return self._tally.fetched_bytes

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Announce, collect and serve until cancelled, or until the host ends."""
        self._host.serve(self._protocol, self._answer_stream, limit_bytes=CHUNK_MESSAGE_LIMIT_BYTES)
        self._host.serve(self._news_protocol, self._answer_news, limit_bytes=BATCH_LIMIT_BYTES)
        mailbox = await self._host.subscribe(self._topic)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._publish)
                nursery.start_soon(self._catch_up.run)
                if self._connections is not None:
                    nursery.start_soon(self._connections.run)
                    nursery.start_soon(self._ask_for_news, self._connections)
                task_status.started()
                async for message in mailbox:
                    self._collect(message)
                nursery.cancel_scope.cancel()
        finally:
            mailbox.close()

    # -- announcing ------------------------------------------------------------------------------------------

    async def announce(self, announcement: Announcement, group: bytes) -> None:
        """Hold this encoded group of this node's and announce it; one that cannot be held is not announced.

        Waits while OUTBOX_LIMIT_ITEMS announcements wait to be published. Raises LocalError for an announcement that is
        out of range, or of another group. Cancellation: held, and either announced or not.
        """
        if announcement.digest != digest_of(group) or announcement.size_bytes != len(group):
            raise LocalError("an announcement of another group than the one beside it")
        if not self._holdings.keep(announcement.digest, group):
            return
        sealed = seal_announcement(self._sealer, announcement)
        self._catch_up.note(peek_announcement(sealed).seq, sealed, self._round_number())
        self._news.note(sealed)
        await self._outbox.send((True, sealed))

    def _announce_held(self, digest: bytes) -> None:
        """Say that a group is here as well, unless as many have said so as anybody notes."""
        if not self.book.notes_holders(digest):
            return
        try:
            self._outbox.send_nowait((False, digest))
        except trio.WouldBlock:
            logger.debug("too busy to announce that a group is held here as well")

    async def _publish(self) -> None:
        """One message per period, with no more announcements than a receiver's quota lets through."""
        batch_items = max(1, min(BATCH_LIMIT_ITEMS, int(ANNOUNCEMENTS_PER_S * ANNOUNCE_PERIOD_S)))
        while True:
            news = [await self._to_publish.receive()]
            await trio.sleep(ANNOUNCE_PERIOD_S)
            while len(news) < batch_items and self._to_publish.statistics().current_buffer_used:
                news.append(self._to_publish.receive_nowait())
            announcements = tuple(data for is_announcement, data in news if is_announcement)
            held = tuple(data for is_announcement, data in news if not is_announcement)
            await self._publish_batch(encode_batch(AnnouncementBatch(announcements=announcements, held=held)))
            self.announcements_sent += len(announcements)

    async def _publish_batch(self, batch: bytes) -> None:
        while True:
            try:
                await self._host.publish(self._topic, batch)
                return
            except NetworkError as error:
                logger.info("announcements wait: %s", error)
                await trio.sleep(PUBLISH_PAUSE_S)

    # -- collecting ------------------------------------------------------------------------------------------

    def offers(self) -> tuple[Offer, ...]:
        """Return what others offer, in the order of arrival."""
        return self.book.offers()

    def at_hand(self) -> tuple[Offer, ...]:
        """Return the same, without those that nobody can be asked for now: who has them left, or is left alone."""
        now = trio.current_time()
        can_be_asked = cache(lambda peer: bool(self._able([peer], now)))  # of so many offers there are few origins
        return tuple(
            offer
            for offer in self.book.offers()
            if any(can_be_asked(peer) for peer in (offer.origin, *self.book.holders(offer.digest)))
        )

    def expire(self, *, offered_before: int, announced_before: int) -> None:
        """Forget what others offered, and what this node announced, before these rounds of its own."""
        self.book.expire(offered_before)
        self._catch_up.expire(announced_before)

    def _collect(self, message: GossipMessage) -> None:
        peer = message.origin
        if not self._takes_part(peer):
            self.rejected[Reason.STRANGER] += 1
        elif self._ignored(peer):
            self.rejected[Reason.IGNORED] += 1
        elif not self._messages.take(peer, trio.current_time()):
            self.rejected[Reason.QUOTA] += 1  # anybody may have sent what it once published
        else:
            try:
                batch = decode_message(message.data, AnnouncementBatch, peer=peer)
            except RolloutError as error:
                self._reject(error)
                return
            for sealed in batch.announcements:
                self._receive(peer, sealed)
            for digest in batch.held:
                self.book.note_holder(digest, peer)

    def _caught_up(self, peer: PeerId, batch: AnnouncementBatch) -> int:
        before = self.announcements_received
        for sealed in batch.announcements:
            self._receive(peer, sealed, asked_for=True)
        return self.announcements_received - before

    def _receive(self, peer: PeerId, sealed: bytes, *, asked_for: bool = False) -> None:
        now, round_number = trio.current_time(), self._round_number()
        try:
            offer = self.book.receive(sealed, peer=peer, now=now, round_number=round_number, asked_for=asked_for)
        except RolloutError as error:
            logger.debug("an announcement was refused: %s", error)
            self._reject(error)
        else:
            if offer is not None:
                self._left_alone.heard(offer.origin, offer.boot)
                self.announcements_received += 1
                self._news.note(sealed)

    # -- news of neighbours ----------------------------------------------------------------------------------

    async def _answer_news(self, stream: MessageStream) -> None:
        data = await stream.receive(deadline_s=CATCH_UP_DEADLINE_S)
        request = decode_message(data, NewsRequest, peer=stream.peer)
        if not self._takes_part(stream.peer):
            raise RemoteError("asks for news of a swarm that it is not in", peer=stream.peer)
        await self._send_news(stream, canonical(self._news.answer(request)))

    async def _send_news(self, stream: MessageStream, answer: bytes) -> None:
        """Tell of offers, as long as the peer's quota of bytes lasts. Raises NetworkError; who asks does so again."""
        if not self._served.take(stream.peer, trio.current_time(), REQUEST_COST_BYTES + len(answer)):
            raise NetworkError(f"{stream.peer} asks for more than {SERVED_BYTES_PER_S:.0f} bytes/s")
        await stream.send(answer, deadline_s=CATCH_UP_DEADLINE_S)

    async def _ask_for_news(self, connections: BriefConnections) -> None:
        """Ask one neighbour each period, until cancelled."""
        while True:
            await trio.sleep(NEWS_PERIOD_S)
            peer = self._news.turn([peer for peer in self._partners() if connections.is_linked(peer)])
            if peer is not None:
                try:
                    await self._ask_neighbour(peer)
                except RolloutError as error:
                    self._reject(error)
                except (NetworkError, RemoteError) as error:
                    logger.debug("news of a neighbour: %s", error)

    async def _ask_neighbour(self, peer: PeerId) -> None:
        """Take a neighbour's news. Raises RolloutError at the first that its origin did not sign: it made that up."""
        for _ in range(NEWS_ANSWERS_PER_TURN):
            request = canonical(self._news.request(peer))
            answer = await self._host.request(
                peer, self._news_protocol, request, deadline_s=CATCH_UP_DEADLINE_S, limit_bytes=BATCH_LIMIT_BYTES
            )
            news = decode_message(answer, News, peer=peer)
            for sealed in news.announcements:
                if self._may_be_news(peek_announcement(sealed, peer=peer)):
                    origin = open_announcement(sealed, self._swarm_id, peer=peer).origin
                    self._receive(origin, sealed, asked_for=True)
            if not self._news.came(peer, news):
                return

    def _may_be_news(self, envelope: Envelope) -> bool:
        """Return whether it is worth the look at its signature."""
        origin = PeerId(envelope.sender)
        may_announce = origin != self._me and self._takes_part(origin) and not self._ignored(origin)
        return may_announce and not self.book.has_come(origin, envelope.boot, envelope.seq)

    def _partners(self) -> Collection[PeerId]:
        """The connected peers that may announce."""
        return {peer for peer in self._host.connected() if self._takes_part(peer) and not self._ignored(peer)}

    def _reject(self, error: RolloutError) -> None:
        self.rejected[error.reason] += 1
        if error.peer is not None:
            self._blame(error.peer, error.reason)

    # -- serving ---------------------------------------------------------------------------------------------

    async def _answer_stream(self, stream: MessageStream) -> None:
        data = await stream.receive(deadline_s=REQUEST_DEADLINE_S)
        try:
            request = decode_message(data, GroupRequest, peer=stream.peer)
        except RolloutError as error:
            self._reject(error)
            raise
        under_way = self._answering[stream.peer]
        if under_way and (under_way >= FETCH_LIMIT or self._answering.total() >= ANSWER_LIMIT):
            await stream.send(canonical(GroupChunk(status="busy")), deadline_s=CHUNK_DEADLINE_S)
            return
        answer = self._chunk(stream.peer, request)
        self._answering += Counter((stream.peer,))
        try:
            await stream.send(canonical(answer), deadline_s=CHUNK_DEADLINE_S)
        finally:
            self._answering -= Counter((stream.peer,))

    def _chunk(self, peer: PeerId, request: GroupRequest) -> GroupChunk:
        if not self._served.take(peer, trio.current_time(), REQUEST_COST_BYTES):
            return GroupChunk(status="busy")
        group = self._holdings.get(request.digest) if self._takes_part(peer) else None
        if group is None or request.offset >= len(group):
            return GroupChunk(status="absent")
        data = group[request.offset : request.offset + CHUNK_LIMIT_BYTES]
        if not self._served.take(peer, trio.current_time(), len(data)):
            return GroupChunk(status="busy")
        self.bytes_served += len(data)
        if request.offset == 0:
            self._pulled(request.digest)
        return GroupChunk(status="chunk", data=data)

    # -- fetching --------------------------------------------------------------------------------------------

    async def fetch(self, offers: Iterable[Offer], *, limit_bytes: int, deadline_s: float) -> dict[bytes, bytes]:
        """The groups of these offers by digest, those that came in time, their hashes checked.

        Receives at most `limit_bytes`, those of groups that prove wrong included; the offers in front come first.
        Cancellation: nothing is returned, what came is held.
        """
        budget = Budget(limit_bytes)
        came: dict[bytes, bytes] = {}
        with trio.move_on_after(deadline_s):
            async with trio.open_nursery() as nursery:
                for digest, same in _by_digest(offers).items():
                    await self._fetching.acquire()
                    nursery.start_soon(self._fetch_group, digest, same, budget, came)
        return came

    async def _fetch_group(self, digest: bytes, offers: list[Offer], budget: Budget, came: dict[bytes, bytes]) -> None:
        try:
            data = self._holdings.get(digest)
            if data is None:
                data = await self._pull(digest, offers, budget)
            if data is not None:
                came[digest] = data
        finally:
            self._fetching.release()

    async def _pull(self, digest: bytes, offers: list[Offer], budget: Budget) -> bytes | None:
        """The group by the first of its offers that brings it. It is held if one of these origins made it.

        What another made is left for the offer of that one, which would not be taken if the group were held.
        """
        for offer in offers:
            data = await self._from_anyone(offer, budget)
            if data is None:
                continue
            if maker_of(data) in {offer.origin for offer in offers} and self._holdings.keep(digest, data):
                self._announce_held(digest)
            return data
        return None

    async def _from_anyone(self, offer: Offer, budget: Budget) -> bytes | None:
        """The group from the first server that has it; None when nobody is left to ask, or the budget is spent."""
        pull = GroupPull(
            offer,
            servers=partial(self._servers, offer),
            deadline_s=GROUP_DEADLINE_S,
            budget=budget,
            tally=self._tally,
        )
        asked = set[PeerId]()
        try:
            while True:
                step = pull.next(trio.current_time())
                if isinstance(step, Ask):
                    asked.add(step.peer)
                    await self._ask_for(step, pull)
                elif isinstance(step, Wait):
                    await trio.sleep(BUSY_PAUSE_S)
                elif isinstance(step, Came):
                    return step.data
                else:
                    if not step.spent:
                        self._unavailable(offer, asked)
                    return None
        finally:
            pull.close()

    def _unavailable(self, offer: Offer, asked: Collection[PeerId]) -> None:
        """Nobody gave it. Its origin is to blame if it was asked, and not if it is left alone for a while."""
        self.rejected[Reason.UNAVAILABLE] += 1
        if offer.origin in asked and offer.origin in self._host.connected():
            self._blame(offer.origin, Reason.UNAVAILABLE)

    async def _ask_for(self, ask: Ask, pull: GroupPull) -> None:
        """One chunk, or the end of asking this server."""
        asked_at = trio.current_time()
        try:
            with trio.fail_at(ask.until):
                chunk = await self._ask(ask)
            pull.answered(chunk)
        except RemoteError as error:
            if not isinstance(error, RolloutError):
                error = RolloutError(str(error), reason=Reason.MALFORMED, peer=ask.peer)
            if error.peer in (None, ask.peer):
                self._pass_over(ask.peer, error)
            pull.failed()
            self._reject(error)
        except (NetworkError, trio.TooSlowError) as error:
            self._pass_over(ask.peer, error)
            pull.failed()
        except trio.Cancelled:
            if trio.current_time() - asked_at >= SLOW_S:
                self._leave_alone(ask.peer)
            raise

    def _leave_alone(self, peer: PeerId) -> None:
        self._left_alone.pass_over(peer, trio.current_time(), self.book.boot_of(peer))

    def _servers(self, offer: Offer, now: float) -> list[PeerId]:
        """Return who may have it and can be asked: the origin, then others that hold it; the connected first."""
        return self._able(dict.fromkeys((offer.origin, *self.book.holders(offer.digest))), now)

    def _able(self, peers: Collection[PeerId], now: float) -> list[PeerId]:
        """Those of these that are not left alone and can be asked, the connected first."""
        connected, more = self._host.connected(), self._connections
        allowed = [peer for peer in self._left_alone.allowed(peers, now) if not self._ignored(peer)]
        others = [] if more is None else [peer for peer in allowed if peer not in connected and more.may_reach(peer)]
        return [*(peer for peer in allowed if peer in connected), *others]

    def _pass_over(self, peer: PeerId, error: Exception) -> None:
        logger.debug("a group is asked of others: %s", error)
        self._leave_alone(peer)

    async def _ask(self, ask: Ask) -> GroupChunk:
        connection = contextlib.nullcontext() if self._connections is None else self._connections.to(ask.peer)
        async with connection:
            answer = await self._host.request(
                ask.peer,
                self._protocol,
                canonical(ask.request),
                deadline_s=CHUNK_DEADLINE_S,
                limit_bytes=CHUNK_MESSAGE_LIMIT_BYTES,
            )
        return decode_message(answer, GroupChunk, peer=ask.peer)


def _by_digest(offers: Iterable[Offer]) -> dict[bytes, list[Offer]]:
    found: dict[bytes, list[Offer]] = {}
    for offer in offers:
        found.setdefault(offer.digest, []).append(offer)
    return found


class CatchUp:
    """Both sides of asking for announcements that did not arrive: carries out `shoal.protocol.offer_catch_up`."""

    def __init__(
        self,
        *,
        host: Host,
        protocol: str,
        boot: int,
        peers: Callable[[], Collection[PeerId]],
        missing: Callable[[PeerId], CatchUpRequest],
        take: Callable[[PeerId, AnnouncementBatch], int],
        blame: Callable[[RolloutError], None],
        send: Callable[[MessageStream, bytes], Awaitable[None]],
        beside_news: bool,
    ) -> None:
        """`peers`: who may be asked and may ask. `take`: what to do with an answer; returns how many of it are news.
        `send`: sends one, within what its peer may have."""
        self._host = host
        self._protocol = protocol
        self._peers = peers
        self._take = take
        self._blame = blame
        self._send = send
        self._machine = OfferCatchUp(boot=boot, missing=missing, beside_news=beside_news)

    def note(self, sequence: int, sealed: bytes, round_number: int) -> None:
        """This node publishes this announcement of its round."""
        self._machine.note(sequence, sealed, round_number, trio.current_time())

    def expire(self, before_round: int) -> None:
        """Forget what was announced before this round."""
        self._machine.expire(before_round)

    async def run(self) -> None:
        """Answer, and ask a few peers each period, until cancelled."""
        self._host.serve(self._protocol, self._answer, limit_bytes=BATCH_LIMIT_BYTES)
        while True:
            await trio.sleep(self._machine.period_s)
            async with trio.open_nursery() as nursery:
                for peer in self._machine.begin_turn(self._host.connected() & frozenset(self._peers())):
                    nursery.start_soon(self._ask, peer)
            self._machine.end_turn()

    async def _ask(self, peer: PeerId) -> None:
        try:
            for _ in range(ANSWERS_PER_TURN):
                request = canonical(self._machine.request(peer))
                answer = await self._host.request(
                    peer, self._protocol, request, deadline_s=CATCH_UP_DEADLINE_S, limit_bytes=BATCH_LIMIT_BYTES
                )
                batch = decode_message(answer, AnnouncementBatch, peer=peer)
                if not self._machine.came(batch, self._take(peer, batch)):
                    return
        except RolloutError as error:
            self._blame(error)
        except (NetworkError, RemoteError) as error:
            logger.debug("announcements that may be missing: %s", error)

    async def _answer(self, stream: MessageStream) -> None:
        data = await stream.receive(deadline_s=CATCH_UP_DEADLINE_S)
        try:
            request = decode_message(data, CatchUpRequest, peer=stream.peer)
        except RolloutError as error:
            self._blame(error)
            raise
        is_partner = stream.peer in self._peers()
        batch = self._machine.answer(request, trio.current_time()) if is_partner else AnnouncementBatch()
        await self._send(stream, encode_batch(batch))
