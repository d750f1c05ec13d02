"""The book of offers: order, replays, quotas, and bounds that one peer's flood cannot use up for others."""

from __future__ import annotations

import msgspec
import pytest

from shoal.protocol import offer_book
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.offer_book import HOLDER_LIMIT, ROUND_WINDOW, OfferBook
from shoal.protocol.places import Rank
from shoal.protocol.rollouts import (
    CatchUpRequest,
    Reason,
    RolloutError,
    RolloutGroup,
    TaskRef,
    announce_group,
    assigned_seed,
    encode_group,
    seal_announcement,
)
from shoal.protocol.wire import Sealer, SwarmId

SWARM = SwarmId(bytes(range(32)))
ME, ALICE, BOB = (Identity.from_seed(bytes([seed]) * 32) for seed in (1, 2, 3))


class Origin:
    """A node that announces groups of its own."""

    def __init__(self, identity: Identity, boot: int = 1) -> None:
        self.peer_id = identity.peer_id
        self._sealer = Sealer(identity, SWARM, boot)

    def announce(self, index: int, *, round_number: int = 0, text: str = "7", digest: bytes | None = None) -> bytes:
        """digest: another group's than its own."""
        seed = assigned_seed(SWARM, self.peer_id, round_number, index)
        group = RolloutGroup(
            origin=self.peer_id,
            round=round_number,
            policy_version=1,
            task=TaskRef(family="sums", version="1", config=b"\x80", seed=seed, index=index),
            completions=(text, "8"),
        )
        announcement = announce_group(group, encode_group(group), (1.0, 0.0))
        if digest is not None:
            announcement = msgspec.structs.replace(announcement, digest=digest)
        return seal_announcement(self._sealer, announcement)


def book_of() -> OfferBook:
    return OfferBook(SWARM, ME.peer_id)


NOBODYS_FAULT = {Reason.REPLAYED, Reason.STALE, Reason.QUOTA}


def refusal(book: OfferBook, sealed: bytes, peer: PeerId, *, now: float = 0.0) -> Reason:
    """The reason, and on the way who is to blame: nobody for what anybody can bring about by sending it again."""
    with pytest.raises(RolloutError) as caught:
        book.receive(sealed, peer=peer, now=now, round_number=0)
    assert caught.value.peer == (None if caught.value.reason in NOBODYS_FAULT else peer)
    return caught.value.reason


def receive(book: OfferBook, sealed: bytes, origin: Origin, *, now: float = 0.0, round_number: int = 0) -> bytes:
    offer = book.receive(sealed, peer=origin.peer_id, now=now, round_number=round_number)
    assert offer is not None
    return offer.digest


def test_offers_come_in_any_order_and_each_once() -> None:
    book, alice = book_of(), Origin(ALICE)
    sealed = [alice.announce(index) for index in range(50)]
    for data in reversed(sealed):
        receive(book, data, alice)
    assert [offer.announcement.task.index for offer in book.offers()] == list(reversed(range(50)))
    assert [offer.order for offer in book.offers()] == list(range(50))
    assert {refusal(book, data, ALICE.peer_id) for data in sealed} == {Reason.REPLAYED}
    assert len(book) == 50
    book.forget(ALICE.peer_id)
    receive(book, alice.announce(50), alice)
    assert [offer.order for offer in book.offers()] == [50]


def test_what_is_older_than_the_window_or_an_earlier_boot_is_a_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offer_book, "REPLAY_WINDOW", 16)
    book, alice, reborn = book_of(), Origin(ALICE), Origin(ALICE, boot=2)
    late = alice.announce(0)
    for _ in range(15):
        alice._sealer.seal("node-record", b"")
    receive(book, alice.announce(1), alice)
    assert refusal(book, late, ALICE.peer_id) == Reason.REPLAYED
    unseen = alice.announce(2)
    receive(book, reborn.announce(3), reborn)
    assert refusal(book, unseen, ALICE.peer_id) == Reason.REPLAYED


def test_replay_of_an_expired_offer_is_refused() -> None:
    book, alice = book_of(), Origin(ALICE)
    sealed = alice.announce(0)
    receive(book, sealed, alice, round_number=4)
    assert book.expire(4) == 0
    assert book.expire(5) == 1
    assert len(book) == 0
    assert refusal(book, sealed, ALICE.peer_id) == Reason.REPLAYED


def test_one_group_per_task_and_none_of_rounds_long_past() -> None:
    book, alice = book_of(), Origin(ALICE)
    receive(book, alice.announce(0), alice)
    assert refusal(book, alice.announce(0), ALICE.peer_id) == Reason.DUPLICATE
    assert refusal(book, alice.announce(0, text="9"), ALICE.peer_id) == Reason.DUPLICATE
    assert book.newest_round(ALICE.peer_id) == 0
    receive(book, alice.announce(0, round_number=ROUND_WINDOW + 5), alice)
    assert book.newest_round(ALICE.peer_id) == ROUND_WINDOW + 5
    assert refusal(book, alice.announce(1, round_number=4), ALICE.peer_id) == Reason.STALE
    late = alice.announce(2, round_number=4)
    assert book.receive(late, peer=ALICE.peer_id, now=0.0, round_number=0, asked_for=True) is None
    receive(book, alice.announce(1, round_number=5), alice)


def test_nobody_announces_for_another() -> None:
    book, alice, me = book_of(), Origin(ALICE), Origin(ME)
    sealed = alice.announce(0)
    assert refusal(book, sealed, BOB.peer_id) == Reason.FORGED
    assert refusal(book, me.announce(0), ME.peer_id) == Reason.FORGED
    receive(book, sealed, alice)


def test_forged_announcement_does_not_use_up_its_number() -> None:
    book, alice = book_of(), Origin(ALICE)
    sealed = alice.announce(0)
    assert refusal(book, sealed[:-1] + bytes([sealed[-1] ^ 1]), ALICE.peer_id) == Reason.FORGED
    receive(book, sealed, alice)


def test_quota_is_per_peer_and_refills(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offer_book, "ANNOUNCEMENTS_PER_S", 2.0)
    monkeypatch.setattr(offer_book, "ANNOUNCEMENTS_BURST", 3.0)
    book, alice, bob = book_of(), Origin(ALICE), Origin(BOB)
    for index in range(3):
        receive(book, alice.announce(index), alice)
    assert refusal(book, alice.announce(3), ALICE.peer_id) == Reason.QUOTA
    assert refusal(book, b"garbage costs as much", ALICE.peer_id, now=0.4) == Reason.QUOTA
    receive(book, bob.announce(0), bob)
    receive(book, alice.announce(4), alice, now=0.5)
    assert refusal(book, alice.announce(5), ALICE.peer_id, now=0.5) == Reason.QUOTA


def test_flooder_crowds_out_its_own_offers_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offer_book, "OFFER_LIMIT", 10)
    monkeypatch.setattr(offer_book, "PEER_OFFER_LIMIT", 8)
    book, alice, bob = book_of(), Origin(ALICE), Origin(BOB)
    for index in range(4):
        receive(book, bob.announce(index), bob)
    for index in range(100):
        receive(book, alice.announce(index), alice)
    indices = [(offer.origin, offer.announcement.task.index) for offer in book.offers()]
    assert indices == [(bob.peer_id, index) for index in range(4)] + [(alice.peer_id, i) for i in range(94, 100)]


def test_peer_holds_its_own_latest_offers_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offer_book, "PEER_OFFER_LIMIT", 3)
    book, alice = book_of(), Origin(ALICE)
    for index in range(5):
        receive(book, alice.announce(index), alice)
    assert [offer.announcement.task.index for offer in book.offers()] == [2, 3, 4]


def test_missing_announcements_are_known_by_number_and_come_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offer_book, "ANNOUNCEMENTS_BURST", 3.0)
    book, alice = book_of(), Origin(ALICE)
    assert book.missing(ALICE.peer_id, 10) == CatchUpRequest()
    sealed = [alice.announce(index) for index in range(8)]
    for index in (1, 4, 6):
        receive(book, sealed[index], alice)
    assert book.missing(ALICE.peer_id, 10) == CatchUpRequest(boot=1, newest=7, missing=(6, 4, 3, 1))
    assert book.missing(ALICE.peer_id, 2).missing == (6, 4)
    for index in (0, 3, 5, 7, 4):  # asked for, the last of them in vain; no quota holds
        offer = book.receive(sealed[index], peer=ALICE.peer_id, now=0.0, round_number=0, asked_for=True)
        assert (offer is None) == (index == 4)
    assert book.missing(ALICE.peer_id, 10) == CatchUpRequest(boot=1, newest=8, missing=(3,))
    # Gossip may bring it as well, once; that is no replay.
    assert book.receive(sealed[0], peer=ALICE.peer_id, now=9.0, round_number=0) is None
    assert refusal(book, sealed[0], ALICE.peer_id, now=9.0) == Reason.REPLAYED
    assert len(book) == 7


def test_missing_numbers_reach_back_a_window_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offer_book, "MISSING_WINDOW", 4)
    book, alice = book_of(), Origin(ALICE)
    sealed = [alice.announce(index) for index in range(10)]
    receive(book, sealed[9], alice)
    assert book.missing(ALICE.peer_id, 64).missing == (9, 8, 7)
    reborn = Origin(ALICE, boot=2)
    receive(book, reborn.announce(0), reborn)
    assert book.missing(ALICE.peer_id, 64) == CatchUpRequest(boot=2, newest=1)


def test_what_was_replayed_is_not_taken_and_its_signer_not_to_blame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offer_book, "ANNOUNCEMENTS_BURST", 2.0)
    book, alice = book_of(), Origin(ALICE)
    sealed = alice.announce(0)
    digest = receive(book, sealed, alice)
    for reason in (Reason.REPLAYED, Reason.QUOTA):
        with pytest.raises(RolloutError) as caught:
            book.receive(sealed, peer=ALICE.peer_id, now=0.0, round_number=0)
        assert (caught.value.reason, caught.value.peer) == (reason, None)
    assert [offer.digest for offer in book.offers()] == [digest]


def test_digest_that_two_offer_is_offered_by_each_whoever_comes_first() -> None:
    book, alice, thief = book_of(), Origin(ALICE), Origin(BOB)
    own = receive(book_of(), alice.announce(0), alice)
    receive(book, thief.announce(7, digest=own), thief, round_number=1)
    receive(book, alice.announce(0), alice, round_number=2)
    assert [offer.key for offer in book.offers()] == [(thief.peer_id, own), (alice.peer_id, own)]
    assert [offer.announcement.task.index for offer in book.offers()] == [7, 0]
    assert refusal(book, alice.announce(1, digest=own), ALICE.peer_id) == Reason.DUPLICATE
    assert refusal(book, thief.announce(8, digest=own), BOB.peer_id) == Reason.DUPLICATE
    book.note_holder(own, ME.peer_id)
    assert book.expire(2) == 1  # the thief's goes, and takes nothing of the other's along
    assert [offer.key for offer in book.offers()] == [(alice.peer_id, own)]
    assert book.get(own) == book.offers()[0]
    assert book.holders(own) == (ME.peer_id,)
    book.forget(ALICE.peer_id)
    assert (book.get(own), book.holders(own), len(book)) == (None, (), 0)


def test_holders_are_those_who_say_so() -> None:
    book, alice = book_of(), Origin(ALICE)
    digest = receive(book, alice.announce(0), alice)
    for _ in range(2):
        book.note_holder(digest, BOB.peer_id)
    book.note_holder(bytes(32), BOB.peer_id)
    assert book.holders(digest) == (BOB.peer_id,)
    assert book.holders(bytes(32)) == ()
    book.forget(ALICE.peer_id)
    assert book.holders(digest) == ()
    assert book.offers() == ()


def test_origins_are_bounded_and_the_idle_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offer_book, "ORIGIN_LIMIT", 2)
    book, alice, bob = book_of(), Origin(ALICE), Origin(BOB)
    carol = Origin(Identity.from_seed(bytes([4]) * 32))
    receive(book, alice.announce(0), alice, round_number=1)
    receive(book, bob.announce(0), bob, round_number=0)
    assert refusal(book, carol.announce(0), carol.peer_id) == Reason.QUOTA
    book.expire(1)
    receive(book, carol.announce(0), carol)
    assert {offer.origin for offer in book.offers()} == {alice.peer_id, carol.peer_id}


def test_origin_of_a_higher_rank_is_followed_in_the_place_of_a_stranger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offer_book, "ORIGIN_LIMIT", 2)
    alice, bob, carol = (Origin(Identity.from_seed(bytes([seed]) * 32)) for seed in (2, 3, 4))
    ranks = {alice.peer_id: Rank.CONTRIBUTOR, carol.peer_id: Rank.FIRST}
    book = OfferBook(SWARM, ME.peer_id, rank=lambda peer: ranks.get(peer, Rank.STRANGER))
    receive(book, alice.announce(0), alice)
    receive(book, bob.announce(0), bob)
    receive(book, carol.announce(0), carol)
    assert {offer.origin for offer in book.offers()} == {alice.peer_id, carol.peer_id}
    dave = Origin(Identity.from_seed(bytes([5]) * 32))
    ranks[dave.peer_id] = Rank.FIRST
    assert refusal(book, dave.announce(0), dave.peer_id) == Reason.QUOTA  # nobody here gives way


def test_strangers_together_have_half_of_a_full_book_however_many_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offer_book, "OFFER_LIMIT", 8)
    monkeypatch.setattr(offer_book, "PEER_OFFER_LIMIT", 8)
    member, strangers = Origin(ALICE), [Origin(Identity.from_seed(bytes([seed]) * 32)) for seed in range(10, 18)]
    book = OfferBook(
        SWARM,
        ME.peer_id,
        rank=lambda peer: Rank.CONTRIBUTOR if peer == member.peer_id else Rank.STRANGER,
    )

    def held() -> tuple[int, int]:
        own = sum(offer.origin == member.peer_id for offer in book.offers())
        return own, len(book) - own

    for stranger in strangers:
        receive(book, stranger.announce(0), stranger)
    assert held() == (0, 8)  # while nobody else wants the room
    for index in range(4):
        receive(book, member.announce(index), member)
    assert held() == (4, 4)
    for stranger in strangers:  # each has one offer at most, and the member four
        receive(book, stranger.announce(1), stranger)
        assert held()[0] >= 3
    receive(book, member.announce(4), member)
    assert held() == (4, 4)


def test_holders_are_noted_until_there_are_enough() -> None:
    book, alice = book_of(), Origin(ALICE)
    digest = receive(book, alice.announce(0), alice)
    for seed in range(20, 20 + HOLDER_LIMIT):
        assert book.notes_holders(digest)
        book.note_holder(digest, Identity.from_seed(bytes([seed]) * 32).peer_id)
    assert not book.notes_holders(digest)
    assert not book.notes_holders(bytes(32))  # nobody offers it
