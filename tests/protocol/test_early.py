"""Messages that wait for their round: in order, bounded, and none at the cost of another peer's."""

from __future__ import annotations

import msgspec

from shoal.protocol.early import (
    EARLY_LIMIT_BYTES,
    EARLY_LIMIT_MESSAGES,
    EARLY_PEER_LIMIT_BYTES,
    EARLY_PEER_LIMIT_MESSAGES,
    EarlyMessages,
)
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.inputs import Received
from shoal.protocol.messages import CHUNK_LIMIT, NO_HASH, ChunkResults, Held, Leave, Term
from shoal.protocol.planning import OBSERVER, absent_ready
from shoal.protocol.wire import canonical
from tests.node.ledger import Ledger

PEER, OTHER = (Identity.from_seed(bytes([n]) * 32).peer_id for n in (0, 1))
READY = absent_ready(OBSERVER, Ledger().chain.head, NO_HASH)


def heard(round: int) -> Received:
    return Received(PEER, Leave(term=Term(), round=round, base=NO_HASH, signature=bytes(64)))


def test_what_is_early_is_kept_once_and_bounded() -> None:
    early_messages = EarlyMessages()
    early_messages.keep(ready(OTHER, 7))
    for round in range(EARLY_PEER_LIMIT_MESSAGES + 1):
        early_messages.keep(heard(round))
    early = early_messages.take()
    positions = [(Term(), 7), *((Term(), n) for n in range(1, EARLY_PEER_LIMIT_MESSAGES + 1))]
    assert [event.position for event in early] == positions
    assert early_messages.take() == []


def test_what_is_early_takes_no_more_memory_than_it_may_and_nobody_anothers() -> None:
    early_messages, results = EarlyMessages(), ChunkResults.of(0, dict.fromkeys(range(CHUNK_LIMIT), NO_HASH))
    early_messages.keep(ready(OTHER, 2))
    large = Received(PEER, Held(term=Term(), round=2, base=NO_HASH, lineage=NO_HASH, evicted=(), chunks=(results,)))
    size = len(canonical(large.message))
    for _ in range(2 * EARLY_PEER_LIMIT_BYTES // size):
        early_messages.keep(large)
    early = early_messages.take()
    assert early[0] == ready(OTHER, 2)
    assert (len(early) - 1) * size <= EARLY_PEER_LIMIT_BYTES < len(early) * size
    strangers = [Identity.from_seed(bytes([9, n]) * 16).peer_id for n in range(40)]
    early_messages.keep(ready(OTHER, 2))
    for stranger in strangers:
        for _ in range(EARLY_PEER_LIMIT_BYTES // size):
            early_messages.keep(Received(stranger, large.message))
    early = early_messages.take()
    assert early[0] == ready(OTHER, 2)
    assert EARLY_LIMIT_BYTES - size < (len(early) - 1) * size <= EARLY_LIMIT_BYTES
    for stranger in strangers:
        for round in range(EARLY_PEER_LIMIT_MESSAGES):
            early_messages.keep(ready(stranger, round))
    early_messages.keep(ready(OTHER, 2))
    early = early_messages.take()
    assert len(early) == EARLY_LIMIT_MESSAGES
    assert early[-1] == ready(OTHER, 2)


def ready(peer: PeerId, round: int) -> Received:
    return Received(peer, msgspec.structs.replace(READY, round=round))
