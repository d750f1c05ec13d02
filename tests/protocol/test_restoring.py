"""What a member takes up from its log after a restart."""

from __future__ import annotations

import itertools

import pytest

from shoal.protocol.agreement import Agreement, DurableRecord
from shoal.protocol.certificate import genesis
from shoal.protocol.identity import Identity
from shoal.protocol.messages import Term
from tests.protocol.lab import SWARM

KEYS = [Identity.from_seed(bytes([number]) * 32) for number in range(1, 4)]


def bound(kind: str, view: int = 0) -> DurableRecord:
    return DurableRecord(kind=kind, term=Term(), round=1, view=view)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_record_that_says_nothing_of_views_takes_back_no_promise(order: tuple[int, ...]) -> None:
    """A contribution may be announced after a view was left, and its record is of no view."""
    agreement = Agreement(identity=KEYS[0], previous=genesis(SWARM, [key.peer_id for key in KEYS]))
    records = [bound("promise", 1), bound("promise", 2), bound("ready")]
    agreement.restore([records[n] for n in order])
    assert agreement.view == 2
    assert not agreement.move_to(1)
    assert not agreement.free_to_plan
