"""Places: the exact order in which peers give way, and what a peer is to the swarm."""

from __future__ import annotations

import itertools

import pytest

from shoal.protocol import places
from shoal.protocol.admission import Admission
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.invites import make_revocations
from shoal.protocol.places import SILENT_STRANGER_S, Place, Rank, gives_way, next_around
from tests.manifests import manifest_of

AUTHORITY, FOUNDER, MEMBER, GAVE, NAMED, STRANGER = (Identity.from_seed(bytes([n]) * 32) for n in range(1, 7))
OPEN = manifest_of([FOUNDER.peer_id], authority=AUTHORITY.peer_id, admission="open")


def place(name: str, rank: Rank, silent_s: float = 0.0) -> Place:
    return Place(peer=PeerId(name), rank=rank, silent_s=silent_s)


def test_next_around_is_who_comes_after_and_then_from_the_start() -> None:
    ring = [PeerId(letter) for letter in "bdfh"]
    assert [next_around(ring, PeerId(me), 2) for me in "acgz"] == [("b", "d"), ("d", "f"), ("h", "b"), ("b", "d")]
    assert next_around(ring, PeerId("d"), 9) == ("f", "h", "b", "d")[: len(ring)]
    assert next_around([], PeerId("d"), 3) == ()


def test_stranger_gives_way_before_a_contributor_and_of_strangers_the_one_silent_longest() -> None:
    places = [
        place("first", Rank.FIRST, 9e9),
        place("gave", Rank.CONTRIBUTOR, 9e9),
        place("talks", Rank.STRANGER, 1.0),
        place("silent", Rank.STRANGER, 20.0),
        place("so so", Rank.STRANGER, 10.0),
    ]
    order = []
    while (loser := gives_way(places, Rank.FIRST)) is not None:
        order.append(loser)
        places = [one for one in places if one.peer != loser]
    assert order == ["silent", "so so", "talks", "gave"]
    assert [one.peer for one in places] == ["first"]


@pytest.mark.parametrize(("holder", "newcomer"), list(itertools.product(Rank, Rank)))
@pytest.mark.parametrize("silent_s", [0.0, 9e9])
def test_nobody_gives_way_to_its_like_or_less_but_for_a_silent_stranger(
    holder: Rank, newcomer: Rank, silent_s: float
) -> None:
    expected = holder < newcomer or (holder == newcomer == Rank.STRANGER and silent_s > 0)
    assert (gives_way([place("holder", holder, silent_s)], newcomer) is not None) == expected


def test_stranger_keeps_its_place_against_another_until_it_was_silent_for_long() -> None:
    for silent_s, loser in ((SILENT_STRANGER_S - 0.1, None), (SILENT_STRANGER_S, "one")):
        assert gives_way([place("one", Rank.STRANGER, silent_s)], Rank.STRANGER) == loser


def test_of_two_silent_equally_long_the_choice_does_not_depend_on_their_order() -> None:
    two = [place("a", Rank.STRANGER, 5.0), place("b", Rank.STRANGER, 5.0)]
    assert gives_way(two, Rank.FIRST) == gives_way(two[::-1], Rank.FIRST) == "a"


def test_rank_is_by_the_manifest_the_last_certificate_the_user_and_the_chain() -> None:
    admission = Admission(
        manifest=OPEN,
        members=lambda: (MEMBER.peer_id,),
        contributed=lambda peer: peer == GAVE.peer_id,
        named=frozenset({NAMED.peer_id}),
    )
    first = {AUTHORITY.peer_id, FOUNDER.peer_id, MEMBER.peer_id, NAMED.peer_id}
    assert {
        who.peer_id: admission.rank(who.peer_id) for who in (AUTHORITY, FOUNDER, MEMBER, NAMED, GAVE, STRANGER)
    } == {
        **dict.fromkeys(first, Rank.FIRST),
        GAVE.peer_id: Rank.CONTRIBUTOR,
        STRANGER.peer_id: Rank.STRANGER,
    }
    assert admission.first() == first
    known_to_all = first - {NAMED.peer_id}
    assert {who for who in (*first, GAVE.peer_id, STRANGER.peer_id) if admission.belongs(who)} == known_to_all
    admission.take(make_revocations(AUTHORITY, OPEN.swarm_id, None, [FOUNDER.peer_id, GAVE.peer_id]))
    assert admission.rank(FOUNDER.peer_id) is admission.rank(GAVE.peer_id) is Rank.STRANGER
    assert FOUNDER.peer_id not in admission.first()


def test_contributors_are_the_last_of_whom_something_was_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "CONTRIBUTORS_LIMIT", 2)
    known = places.Contributors()
    for peer in ("a", "b", "a", "c"):
        known.note(peer)
    assert [peer in known for peer in "abc"] == [True, False, True]
