"""The chains that a newcomer chooses among: of linked peers, and at each place where one peer is said to be.

Who is linked is linked once, at one address. Where the user named several for one peer, another node with its key may
listen at one of them, as where a data folder was copied: each is asked. A second connection under this node's key would
end the first one, so it is asked under a key made for that, and by the record of who would like to join.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import trio

from shoal.node.discovery.credentials import CHECKPOINT_NAME, kept_checkpoint
from shoal.node.options import NodeConfig
from shoal.node.state.errands import carry_out
from shoal.node.state.state_server import ANSWER_LIMIT_BYTES, REQUEST_DEADLINE_S
from shoal.protocol.address import parse_address
from shoal.protocol.chain import Chain
from shoal.protocol.chain_choice import check_link
from shoal.protocol.chain_comparison import fetched_after
from shoal.protocol.errands import AskEntries, AwaitLinks, Clock, Errand, LookElsewhere
from shoal.protocol.errors import ConfigError, NetworkError, RemoteError
from shoal.protocol.followers import is_follower
from shoal.protocol.identity import PeerId
from shoal.protocol.limits import TokenBucket
from shoal.protocol.peering import (
    REASON_LIMIT_CHARS,
    RECORD_LIMIT_BYTES,
    ChainPart,
    LookAnswer,
    LookAtChain,
    Refusal,
)
from shoal.protocol.records import open_record
from shoal.protocol.wire import SwarmId, canonical, decode
from shoal.swarm.host import Host, as_a_stranger
from shoal.swarm.members import Members
from shoal.swarm.questions import answer, hear
from shoal.swarm.streams import MessageStream

LOOK_PROTOCOL = "/shoal/look/1"
REQUEST_LIMIT_BYTES = 2 * RECORD_LIMIT_BYTES
BYTES_PER_S, BURST_BYTES = 1 << 18, 1 << 24
"""Of the chain that is shown to those who have not said hello."""
PLACE_DEADLINE_S = 5.0
"""For what one place serves, from dialling it on."""
PLACES_LIMIT = 4
"""Of one peer."""

logger = logging.getLogger(__name__)


class ChainPlaces:
    """Places where a node may look for the chain; it shows its own chain to others from here on.

    `checkpoint` is that of the link by which it joins.
    """

    def __init__(self, config: NodeConfig, *, folder: Path, chain: Chain, host: Host, members: Members) -> None:
        """Raises ConfigError if the chain that is here is another than the chain of the link."""
        swarm_id = config.manifest.swarm_id
        self._me = host.peer_id
        self._members = members
        self._places = named_places((*config.join, *config.manifest.network.bootstrap))
        self.checkpoint = kept_checkpoint(folder, swarm_id)
        ChainLooks(host, swarm_id, members, chain)
        try:
            check_link(chain, self.checkpoint)
        except ConfigError:
            (folder / CHECKPOINT_NAME).unlink(missing_ok=True)  # the next start is without the link's word
            raise

    @property
    def performers(self) -> Mapping[type[Any], Callable[[Any], Awaitable[Any]]]:
        """Functions that carry out an errand's requests."""
        return {AwaitLinks: self._await_links, LookElsewhere: self._look_elsewhere}

    async def _await_links(self, request: AwaitLinks) -> None:
        links = self._members.links
        with trio.move_on_after(request.limit_s):
            while not self._known() <= links.linked():
                await links.next_linked()

    def _known(self) -> frozenset[PeerId]:
        records = (record for record in self._members.book.records() if not is_follower(record))
        return frozenset((*self._places, *(record.peer for record in records))) - {self._me}

    async def _look_elsewhere(self, request: LookElsewhere) -> Mapping[str, Chain]:
        return await chains_at(self._members, request.peer, self._places.get(request.peer, ()), request.base)


def named_places(addresses: tuple[str, ...]) -> dict[PeerId, tuple[str, ...]]:
    """The addresses that the user named, by peer; what is none is left out."""
    found: dict[PeerId, dict[str, None]] = {}
    for text in addresses:
        try:
            found.setdefault(parse_address(text).peer, {})[text] = None
        except ConfigError as error:
            logger.debug("%s", error)
    return {peer: tuple(texts)[:PLACES_LIMIT] for peer, texts in found.items()}


async def chains_at(members: Members, peer: PeerId, addresses: tuple[str, ...], base: Chain) -> Mapping[str, Chain]:
    """Fetch the chain served at each of several addresses of one peer that answers; none if only one is given."""
    found: dict[str, Chain] = {}
    if len(addresses) < 2:
        return found

    async def ask_at(address: str) -> None:
        with trio.move_on_after(PLACE_DEADLINE_S):
            try:
                found[address] = await _chain_at(members, peer, address, base.up_to(base.height))
            except (NetworkError, RemoteError) as error:
                logger.info("%s: %s", address, error)

    async with trio.open_nursery() as nursery:
        for address in addresses:
            nursery.start_soon(ask_at, address)
    return found


async def _chain_at(members: Members, peer: PeerId, address: str, base: Chain) -> Chain:
    """Fetch the chain at one address. Raises RemoteError if the node there would not admit this one, NetworkError."""
    record = members.hello().record

    async def ask(host: Host, request: AskEntries) -> ChainPart:
        look = canonical(LookAtChain(record=record, after=request.after, rebases=request.rebases))
        reply = await host.request(
            peer, LOOK_PROTOCOL, look, deadline_s=PLACE_DEADLINE_S, limit_bytes=ANSWER_LIMIT_BYTES
        )
        answer: LookAnswer = decode(reply, LookAnswer, peer=peer, limit_bytes=ANSWER_LIMIT_BYTES)  # type: ignore[arg-type]
        if isinstance(answer, Refusal):
            raise RemoteError(f"refused: {answer.reason}", peer=peer)
        return answer

    async def look(host: Host) -> Chain:
        await host.dial(address, deadline_s=PLACE_DEADLINE_S)
        errand = Errand(fetched_after(base, peer, Chain.extend), Clock())
        found: Chain = await carry_out(errand, {AskEntries: partial(ask, host)})
        return found

    return await as_a_stranger(look)


class ChainLooks:
    """Shows the chain to who may join and has not said hello, within an allowance for all together."""

    def __init__(self, host: Host, swarm_id: SwarmId, members: Members, chain: Chain) -> None:
        self._swarm_id = swarm_id
        self._members = members
        self._chain = chain
        self._allowance = TokenBucket(BYTES_PER_S, BURST_BYTES)
        host.serve(LOOK_PROTOCOL, self._serve, limit_bytes=ANSWER_LIMIT_BYTES)

    async def _serve(self, stream: MessageStream) -> None:
        """Answer one request. Raises RemoteError when it is malformed, or its record does not hold."""
        asked: LookAtChain = await hear(
            stream, LookAtChain, limit_bytes=REQUEST_LIMIT_BYTES, deadline_s=REQUEST_DEADLINE_S
        )
        await answer(stream, self._answer(asked, stream.peer), deadline_s=REQUEST_DEADLINE_S)

    def _answer(self, asked: LookAtChain, peer: PeerId) -> LookAnswer:
        record = open_record(asked.record, self._swarm_id, trio.current_time(), peer=peer).record
        reason = self._members.admission.reason_not_to_join(record)
        if reason is not None:
            return Refusal(reason=reason[:REASON_LIMIT_CHARS])
        answer = self._chain.part(asked.after, asked.rebases)
        if not self._allowance.take(len(canonical(answer)), trio.current_time()):
            return Refusal(reason="too many look at the chain; try again in a minute")
        return answer
