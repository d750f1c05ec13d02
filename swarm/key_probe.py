"""Asks peers that shut this node out whether they know another node with its key, and tells others the same.

There is one connection per peer, and so per key: of two nodes with one key, one keeps the other from saying hello. So
who is not let through asks under a key made for that, by its own record, which only the holder of the key can have
signed; the answer is the newest record of that key that is known. It tells nobody anything but what its own key said.

    a record that is further on than this node      another node with its key was started later, or has said more
    one of an earlier life, and EARLIER_S later     that life goes on: this node was started on a copy of its folder
    a newer one of that life
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import trio

from shoal.protocol.address import parse_address
from shoal.protocol.backoff import Backoff
from shoal.protocol.errors import ConfigError, NetworkError, RemoteError
from shoal.protocol.peering import RECORD_LIMIT_BYTES, AskNewest, Newest
from shoal.protocol.records import Entry, NodeRecord, RecordBook, open_record
from shoal.protocol.wire import Sealer, SwarmId
from shoal.swarm.host import Host, as_a_stranger
from shoal.swarm.questions import REQUEST_DEADLINE_S, answer, ask, hear
from shoal.swarm.streams import MessageStream

ELSEWHERE_PROTOCOL = "/shoal/elsewhere/1"
ANSWER_LIMIT_BYTES = 2 * RECORD_LIMIT_BYTES
PERIOD_S, PERIOD_LIMIT_S = 5.0, 60.0
"""Between two probes; doubled after each that tells nothing: each costs handshakes, and machines that have too much to
do let nobody through."""
EARLIER_S = 10.0
"""An earlier life that ended is silent by then: no record of it that is still on its way comes so late."""
ADDRESSES_LIMIT = 3
"""Asked in one probe: whoever shuts this node out knows for whom."""

logger = logging.getLogger(__name__)


class KeyProbe:
    """One node's question to those that shut it out, and its answers. found: gets a record of another with its key."""

    def __init__(
        self,
        host: Host,
        *,
        sealer: Sealer,
        swarm_id: SwarmId,
        book: RecordBook,
        sealed_record: Callable[[], bytes],
        found: Callable[[NodeRecord], None],
    ) -> None:
        self._sealer = sealer
        self._swarm_id = swarm_id
        self._book = book
        self._sealed_record = sealed_record
        self._found = found
        self._earlier: tuple[tuple[int, int], float] | None = None  # how far on it was at first, and when
        self._addresses: dict[str, None] = {}
        self._wanted = trio.Event()
        host.serve(ELSEWHERE_PROTOCOL, self._serve, limit_bytes=ANSWER_LIMIT_BYTES)

    def shut_out(self, addresses: Sequence[str]) -> None:
        """Somebody at these addresses, or who should be there, does not let this node through: ask."""
        room = ADDRESSES_LIMIT - len(self._addresses)
        self._addresses.update(dict.fromkeys(addresses[: max(room, 0)]))
        self._wanted.set()

    async def run(self) -> None:
        """Ask when there is reason to, at most every PERIOD_S, until cancelled."""
        pauses = Backoff(PERIOD_S, PERIOD_LIMIT_S)
        while True:
            with trio.move_on_after(PERIOD_LIMIT_S) as quiet:
                await self._wanted.wait()
            if quiet.cancelled_caught:
                pauses.reset()
                continue
            addresses, self._addresses, self._wanted = tuple(self._addresses), {}, trio.Event()
            await self._ask_all(addresses)
            if self._earlier is not None:
                pauses.reset()
            await trio.sleep(pauses.next_s())

    async def _ask_all(self, addresses: Sequence[str]) -> None:
        async def ask(host: Host) -> None:
            async with trio.open_nursery() as nursery:
                for address in addresses:
                    nursery.start_soon(self._ask, host, address)

        await as_a_stranger(ask)

    async def _ask(self, host: Host, address: str) -> None:
        try:
            peer = parse_address(address).peer
            await host.dial(address, deadline_s=REQUEST_DEADLINE_S)
            question = AskNewest(record=self._sealed_record())
            newest: Newest = await ask(host, peer, ELSEWHERE_PROTOCOL, question, Newest, limit_bytes=ANSWER_LIMIT_BYTES)
            if newest.record:
                self._judge(open_record(newest.record, self._swarm_id, trio.current_time(), peer=peer))
        except (ConfigError, NetworkError, RemoteError) as error:
            logger.debug("%s does not say whether this node's key is in use elsewhere: %s", address, error)

    def _judge(self, entry: Entry) -> None:
        order, now = (entry.boot, entry.seq), trio.current_time()
        if entry.record.peer != self._sealer.peer_id:
            return
        if order > self._sealer.order:
            self._found(entry.record)
        elif entry.boot < self._sealer.boot:
            if self._earlier is None:
                self._earlier = order, now
            elif order > self._earlier[0] and now - self._earlier[1] >= EARLIER_S:
                self._found(entry.record)

    async def _serve(self, stream: MessageStream) -> None:
        """Answer one request. Raises RemoteError when it is malformed, or not signed by whom it is about."""
        asked: AskNewest = await hear(stream, AskNewest, limit_bytes=ANSWER_LIMIT_BYTES)
        peer = open_record(asked.record, self._swarm_id, trio.current_time(), peer=stream.peer).record.peer
        await answer(stream, Newest(record=self._book.sealed(peer) or b""))
