"""Two chains part where they part, however long they are, and in few requests."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.protocol.chain import Chain
from shoal.protocol.chain_comparison import ALL_REBASES, difference, fetched_after
from shoal.protocol.errands import AskEntries, Clock, Errand, Steps
from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Certificate, Entry
from shoal.protocol.peering import ChainPart
from tests.node.ledger import Ledger

PEER = PeerId("peer")


def outcome(steps: Steps, ask: Callable[[int, int], ChainPart]) -> Any:
    """What comes of these steps, beside a peer that answers so."""
    errand, came = Errand(steps, Clock()), None
    while (request := errand.go_on(came, 0.0)) is not None:
        assert isinstance(request, AskEntries)
        assert request.peer == PEER
        came = ask(request.after, request.rebases)
    return errand.outcome


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

    def ask(self, after: int, rebases: int) -> ChainPart:
        assert rebases == ALL_REBASES
        self.asked += 1
        return ChainPart(certificates=tuple(self.entries[after : after + self.limit]), head=len(self.entries))


@settings(max_examples=150, derandomize=True)
@given(st.integers(0, 60), st.integers(0, 60), st.integers(0, 60), st.sampled_from([1, 3, 64]))
def test_difference_is_found_wherever_it_is(common: int, mine: int, theirs: int, limit: int) -> None:
    here, there = entries_of([0] * common + [1] * mine), entries_of([0] * common + [2] * theirs)
    server = Server(there, limit)
    found = outcome(difference(here, PEER), server.ask)
    assert found.height == common
    assert found.mine == (here[common] if mine else None)
    assert found.theirs == (there[common] if theirs else None)
    assert found.parted == bool(mine and theirs)
    assert server.asked <= 3 + math.log2(max(len(there), 1)) + 1


def test_peer_that_answers_otherwise_from_one_request_to_the_next_is_blamed() -> None:
    one, other = entries_of([0] * 5), entries_of([1] * 5)

    def ask(after: int, rebases: int) -> ChainPart:
        asked.append(after)
        return ChainPart(certificates=tuple((other if len(asked) < 6 else one)[after : after + 9]), head=5)

    asked: list[int] = []
    with pytest.raises(RemoteError, match="from one request to the next"):
        outcome(difference(one, PEER), ask)
    assert asked == [5, 4, 2, 1, 0, 0]


def test_peer_that_repeats_itself_is_not_asked_for_ever() -> None:
    ledger = Ledger()
    ledger.certify(2)

    def ask(after: int, rebases: int) -> ChainPart:
        asked.append(after)
        assert len(asked) < 5
        return ChainPart(certificates=ledger.chain.entries[:1], head=2**62)

    asked: list[int] = []
    assert outcome(fetched_after(ledger.empty_chain(), PEER, Chain.extend), ask).height == 1
    assert asked == [0, 1]
