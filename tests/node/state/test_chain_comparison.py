"""Two chains part where they part, however long they are, and in few requests."""

from __future__ import annotations

import math

import msgspec
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.node.state.chain_comparison import ALL_REBASES, difference, fetched_after
from shoal.protocol.chain import Chain
from shoal.protocol.errors import RemoteError
from shoal.protocol.messages import Certificate, Entry
from shoal.protocol.peering import ChainPart
from tests.node.ledger import Ledger


def entries_of(marks: list[int]) -> list[Entry]:
    """Entries that are alike where the marks before them are."""
    base, found = bytes(32), list[Entry]()
    template = Ledger().chain.head
    for number, mark in enumerate(marks):
        value = msgspec.structs.replace(template, round=number + 1, base=base, tokens=mark)
        found.append(Certificate(value=value, view=0, signers=(), signatures=()))
        base = value.hash
    return found


class Server:
    """A peer with a chain, in parts of `limit` entries."""

    def __init__(self, entries: list[Entry], limit: int) -> None:
        self.entries = entries
        self.limit = limit
        self.asked = 0

    async def ask(self, after: int, rebases: int) -> ChainPart:
        await trio.lowlevel.checkpoint()
        assert rebases == ALL_REBASES
        self.asked += 1
        return ChainPart(certificates=tuple(self.entries[after : after + self.limit]), head=len(self.entries))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.integers(0, 60), st.integers(0, 60), st.integers(0, 60), st.sampled_from([1, 3, 64]))
def test_difference_is_found_wherever_it_is(common: int, mine: int, theirs: int, limit: int) -> None:
    here, there = entries_of([0] * common + [1] * mine), entries_of([0] * common + [2] * theirs)
    server = Server(there, limit)
    found = trio.run(difference, here, server.ask)
    assert found.height == common
    assert found.mine == (here[common] if mine else None)
    assert found.theirs == (there[common] if theirs else None)
    assert found.parted == bool(mine and theirs)
    assert server.asked <= 3 + math.log2(max(len(there), 1)) + 1


def test_peer_that_answers_otherwise_from_one_request_to_the_next_is_blamed() -> None:
    one, other = entries_of([0] * 5), entries_of([1] * 5)

    async def ask(after: int, rebases: int) -> ChainPart:
        await trio.lowlevel.checkpoint()
        asked.append(after)
        return ChainPart(certificates=tuple((other if len(asked) < 6 else one)[after : after + 9]), head=5)

    asked: list[int] = []
    with pytest.raises(RemoteError, match="from one request to the next"):
        trio.run(difference, one, ask)
    assert asked == [5, 4, 2, 1, 0, 0]


def test_peer_that_repeats_itself_is_not_asked_for_ever() -> None:
    ledger = Ledger()
    ledger.certify(2)

    async def ask(after: int, rebases: int) -> ChainPart:
        await trio.lowlevel.checkpoint()
        asked.append(after)
        assert len(asked) < 5
        return ChainPart(certificates=ledger.chain.entries[:1], head=2**62)

    async def main() -> Chain:
        return await fetched_after(ledger.empty_chain(), ask, Chain.extend)

    asked: list[int] = []
    assert trio.run(main).height == 1
    assert asked == [0, 1]
