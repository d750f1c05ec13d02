"""Whose groups are gone through again: who says that it samples, and nobody whom the chain knows as a trainer."""

from __future__ import annotations

import pytest

from shoal.node.sapo.origins import Origins
from shoal.protocol.followers import FOLLOWS
from shoal.protocol.identity import PeerId
from shoal.protocol.records import NodeRecord
from tests.node.ledger import identity

MEMBER, SAMPLER, NEWCOMER, UNKNOWN = (identity(number).peer_id for number in range(1, 5))


def origins(*, waits_outside: bool = False) -> Origins:
    records: dict[PeerId, NodeRecord] = {
        SAMPLER: NodeRecord(peer=SAMPLER, boot=1, phase="sampling", capabilities=(FOLLOWS,)),
        NEWCOMER: NodeRecord(peer=NEWCOMER, boot=1, phase="joining"),
    }
    return Origins(was_member=lambda peer: peer == MEMBER, record_of=records.get, waits_outside=waits_outside)


@pytest.mark.parametrize(
    ("peer", "trains", "may_be_taken"),
    [(MEMBER, True, True), (SAMPLER, False, True), (NEWCOMER, False, False), (UNKNOWN, False, False)],
)
def test_who_is_no_member_has_to_say_that_it_samples(peer: PeerId, trains: bool, may_be_taken: bool) -> None:
    assert (origins().trains(peer), origins().may_be_taken(peer)) == (trains, may_be_taken)


@pytest.mark.parametrize(("peer", "trains"), [(MEMBER, True), (SAMPLER, False), (NEWCOMER, True), (UNKNOWN, True)])
def test_where_trainers_wait_outside_all_others_are_taken_for_trainers(peer: PeerId, trains: bool) -> None:
    found = origins(waits_outside=True)
    assert (found.trains(peer), found.may_be_taken(peer)) == (trains, True)
