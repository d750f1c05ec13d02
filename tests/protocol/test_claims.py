"""Whose claim to be ahead is looked into, how often, and beside whom."""

from __future__ import annotations

from shoal.protocol.claims import CLAIMS_LIMIT, OUTSIDERS_LIMIT, Claims
from shoal.protocol.donors import HEDGE_S, REST_LIMIT_S, DonorScores
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Term
from tests.node.ledger import Ledger

LEDGER = Ledger()
HEAD = LEDGER.chain.head
FAR = (Term(), 99)
FIRST, SECOND, _ = LEDGER.peers


class Here:
    """The claims that reached a node whose head is genesis."""

    def __init__(self) -> None:
        self.claims = Claims(DonorScores())

    def claim(self, *peers: PeerId) -> None:
        for peer in peers:
            self.claims.heard(peer, FAR, members=HEAD.members)

    def asks(self, now: float) -> PeerId | None:
        return self.claims.next(HEAD, now)


def stranger(number: int) -> PeerId:
    return PeerId(f"stranger{number}")


def test_member_is_asked_before_others_and_nobody_twice_at_once() -> None:
    here = Here()
    here.claim(stranger(1), FIRST)
    assert here.asks(0.0) == FIRST
    assert here.asks(HEDGE_S / 2) is None
    assert here.asks(HEDGE_S) == stranger(1)
    here.claim(FIRST)
    assert here.asks(2 * HEDGE_S) is None  # both are being asked


def test_claim_that_showed_nothing_makes_the_next_ones_wait_twice_as_long() -> None:
    here, now, waited = Here(), 0.0, list[float]()
    for _ in range(9):
        here.claim(stranger(1))
        began = now
        while here.asks(now) is None:
            now += 0.25
        waited.append(now - began)
        here.claims.answered(stranger(1), HEAD, now, new=False)
    assert waited == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, REST_LIMIT_S, REST_LIMIT_S]
    assert here.asks(now + 1000) is None  # without another claim there is nothing to look into
    here.claim(stranger(1))
    assert here.asks(now + 1000) == stranger(1)
    here.claims.answered(stranger(1), HEAD, now + 1000, new=True)
    here.claim(stranger(1))
    assert here.asks(now + 1000) == stranger(1)


def test_claim_that_came_true_meanwhile_is_held_against_nobody() -> None:
    here, ledger = Here(), Ledger()
    ledger.certify()
    here.claims.heard(FIRST, (Term(), 2), members=HEAD.members)
    assert here.asks(0.0) == FIRST
    here.claims.answered(FIRST, ledger.chain.head, 0.1, new=False)  # the certificate came another way
    here.claim(FIRST)
    assert here.asks(0.2) == FIRST
    here.claims.heard(SECOND, (Term(), 2), members=HEAD.members)
    assert SECOND not in here.claims.claimants(ledger.chain.head)


def test_outsiders_that_do_not_answer_leave_room_for_members() -> None:
    here, now = Here(), 0.0
    here.claim(*map(stranger, range(20)))
    asked = []
    for _ in range(20):
        asked.append(here.asks(now))
        now += HEDGE_S
    assert asked[:OUTSIDERS_LIMIT] == [stranger(n) for n in range(OUTSIDERS_LIMIT)]
    assert asked[OUTSIDERS_LIMIT:] == [None] * (20 - OUTSIDERS_LIMIT)
    here.claim(FIRST)
    assert here.asks(now) == FIRST


def test_claims_of_many_are_forgotten_but_those_of_members() -> None:
    here = Here()
    here.claim(FIRST, *map(stranger, range(2 * CLAIMS_LIMIT)))
    found = here.claims.claimants(HEAD)
    assert len(found) == CLAIMS_LIMIT
    assert FIRST in found
    assert stranger(0) not in found
