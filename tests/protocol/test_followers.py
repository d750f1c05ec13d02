"""Followers: whom one waits at, who may wait here, and when who waits is answered."""

from __future__ import annotations

import pytest

from shoal.protocol.donors import REST_S, DonorScores
from shoal.protocol.followers import (
    AGAIN_S,
    AWAIT_S,
    AWAITED_LIMIT,
    FOLLOWERS_LIMIT,
    FOLLOWS,
    LET_IN_S,
    WAITS_LIMIT,
    Parents,
    Places,
    Waiting,
    has_room,
    is_follower,
)
from shoal.protocol.identity import PeerId
from shoal.protocol.records import NodeRecord
from shoal.protocol.terms import make_rebase
from tests.node.ledger import AUTHORITY, Ledger, identity

ME = PeerId("e")
A, B, C, F = (PeerId(name) for name in "abcf")
LINKED = (A, B, C, F)


def parents() -> Parents:
    return Parents(ME, DonorScores())


def test_follower_waits_at_two_of_those_linked_from_itself_around_the_ring() -> None:
    mine = parents()
    assert [mine.next(LINKED, 0.0) for _ in range(3)] == [F, A, None]


def test_another_is_waited_at_as_soon_as_one_brought_nothing_and_who_was_least_lately() -> None:
    mine = parents()
    for at, expected in ((0.0, F), (0.0, A)):
        assert mine.next(LINKED, at) == expected
    mine.brought(A, new=False)
    assert mine.next(LINKED, 1.0) == B
    mine.brought(B, new=False)
    assert mine.next(LINKED, 2.0) == C
    mine.brought(C, new=False)
    assert mine.next(LINKED, 3.0) == A


def test_who_brought_an_entry_is_the_parent_and_waited_at_again_at_once() -> None:
    mine = parents()
    assert [mine.next(LINKED, 0.0), mine.next(LINKED, 0.0)] == [F, A]
    mine.brought(A, new=True)
    assert mine.parent == A
    assert mine.next(LINKED, 0.0) == A
    assert mine.first(LINKED) == [A, B, C, F]
    mine.brought(F, new=True)
    assert mine.parent == F
    assert mine.first(LINKED) == [F, A, B, C]


def test_who_answers_at_once_with_nothing_is_not_asked_all_the_time() -> None:
    mine = parents()
    assert mine.next((A,), 0.0) == A
    mine.brought(A, new=False)
    assert mine.next((A,), 0.99 * AGAIN_S) is None
    assert mine.next((A,), AGAIN_S) == A


def test_parent_that_fails_is_replaced_at_once_and_left_alone_for_a_while() -> None:
    mine = parents()
    assert mine.next(LINKED, 0.0) == F
    mine.brought(F, new=True)
    assert [mine.next(LINKED, 0.0), mine.next(LINKED, 0.0)] == [F, A]
    mine.failed(F, 5.0)
    assert mine.parent is None
    assert mine.next(LINKED, 5.0) == B
    mine.brought(A, new=False)
    assert mine.next(LINKED, 5.0) == C
    mine.brought(B, new=False)
    mine.brought(C, new=False)
    assert [mine.next(LINKED, 5.5), mine.next(LINKED, 5.5)] == [A, None], "F rests, B and C were asked just now"
    mine.brought(A, new=False)
    assert F in {mine.next(LINKED, 6.0 + REST_S), mine.next(LINKED, 6.0 + REST_S)}


def test_wait_at_who_is_linked_no_more_keeps_nobody_from_being_waited_at_but_not_without_end() -> None:
    mine = parents()
    assert {mine.next((A, B), 0.0), mine.next((A, B), 0.0)} == {A, B}
    assert {mine.next((C, F), 0.0), mine.next((C, F), 0.0)} == {C, F}
    other = PeerId("other")
    assert mine.next((other,), 0.0) is None, f"{WAITS_LIMIT} waits are under way"
    mine.failed(A, AWAIT_S)
    assert mine.next((other,), AWAIT_S) == other


def test_limits_are_those_of_the_documents() -> None:
    assert (FOLLOWERS_LIMIT, AWAITED_LIMIT, WAITS_LIMIT) == (16, 2, 4)


def test_so_many_followers_have_a_place_and_who_has_one_keeps_it() -> None:
    followers = {identity(n).peer_id for n in range(FOLLOWERS_LIMIT)}
    one = min(followers)
    assert not has_room(followers, ME)
    assert has_room(followers, one)
    assert has_room(followers - {one}, ME)


def test_of_many_that_come_at_once_so_many_are_let_in_and_a_place_waits_for_its_link_for_a_while() -> None:
    places = Places()
    crowd = [identity(n).peer_id for n in range(FOLLOWERS_LIMIT + 1)]
    assert [places.take(one, (), 0.0) for one in crowd] == [True] * FOLLOWERS_LIMIT + [False]
    assert places.take(crowd[0], (), 1.0), "who says hello again has a place"
    linked = frozenset(crowd[:FOLLOWERS_LIMIT])
    assert not places.take(crowd[-1], linked, 2.0)
    assert places.take(crowd[-1], linked - {crowd[0]}, 3.0), "one has gone"
    assert not places.take(crowd[0], linked - {crowd[0]}, 4.0), "its place is another's, who is not linked yet"
    assert places.take(crowd[0], linked - {crowd[0]}, 3.0 + LET_IN_S), "and never was"


@pytest.mark.parametrize(("capabilities", "follows"), [((), False), ((FOLLOWS,), True), (("relay", FOLLOWS), True)])
def test_follower_says_so_in_its_record(capabilities: tuple[str, ...], follows: bool) -> None:
    record = NodeRecord(peer=identity(1).peer_id, boot=1, capabilities=capabilities)
    assert is_follower(record) is follows
    assert not is_follower(None)


# -- who waits here --------------------------------------------------------------------------------------------


def chain(rounds: int) -> Ledger:
    ledger = Ledger()
    if rounds:
        ledger.certify(rounds)
    return ledger


def test_who_waits_is_answered_once_there_is_more_and_its_state_is_here() -> None:
    waiting, ledger = Waiting(), chain(2)
    assert waiting.come(A, 2, 0, 0.0)
    assert waiting.come(B, 1, 0, 0.0)
    assert waiting.due(ledger.chain, 0.0, current=False) == []
    assert waiting.due(ledger.chain, 0.0, current=True) == [B]
    assert waiting.due(ledger.chain, 0.0, current=True) == []
    ledger.certify(1)
    assert waiting.due(ledger.chain, 1.0, current=False) == []
    assert waiting.due(ledger.chain, 1.0, current=True) == [A]
    assert not len(waiting)


def test_wait_ends_after_a_while_though_there_is_nothing() -> None:
    waiting, ledger = Waiting(), chain(2)
    assert waiting.come(A, 2, 0, 3.0)
    assert waiting.due(ledger.chain, 2.99 + AWAIT_S, current=True) == []
    assert waiting.due(ledger.chain, 3.0 + AWAIT_S, current=False) == [A]


def test_a_rebase_of_which_one_does_not_know_is_something_new() -> None:
    waiting, ledger = Waiting(), chain(3)
    assert waiting.come(A, 3, 0, 0.0)
    ledger.chain.extend(make_rebase(AUTHORITY, ledger.chain.value(2), ledger.peers[:2]))
    assert ledger.chain.height == 3
    assert waiting.due(ledger.chain, 0.0, current=True) == [A]


def test_no_more_than_so_many_wait_at_one_node_and_who_comes_again_takes_its_own_place() -> None:
    waiting = Waiting()
    peers = [identity(n).peer_id for n in range(FOLLOWERS_LIMIT)]
    assert all(waiting.come(peer, 0, 0, 0.0) for peer in peers)
    assert not waiting.come(ME, 0, 0, 0.0)
    assert waiting.come(peers[0], 1, 0, 0.0)
    assert len(waiting) == FOLLOWERS_LIMIT
    waiting.gone(peers[1])
    assert waiting.come(ME, 0, 0, 0.0)
