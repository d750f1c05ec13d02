"""What the op `revoke` says of voters that are shut out and still counted."""

from __future__ import annotations

import pytest

from shoal.node.discovery.link_ops import holding_up
from shoal.protocol.identity import PeerId
from shoal.protocol.voting import FaultModel


@pytest.mark.parametrize(
    ("voters", "here", "revoked", "faults", "counted"),
    [
        ("AB", "A", "B", FaultModel.CRASH, "B"),
        ("AB", "AN", "B", FaultModel.CRASH, "B"),  # a newcomer has no vote
        ("ABC", "AC", "B", FaultModel.CRASH, ""),
        ("ABC", "ABC", "BC", FaultModel.CRASH, "BC"),  # they may not be seen to go yet
        ("ABCD", "ABC", "D", FaultModel.LYING, ""),
        ("ABCD", "AB", "D", FaultModel.LYING, "D"),
        ("ABC", "A", "", FaultModel.CRASH, ""),
    ],
)
def test_revoked_voters_are_named_where_the_others_are_no_majority(
    voters: str, here: str, revoked: str, faults: FaultModel, counted: str
) -> None:
    held_up = holding_up(*([PeerId(peer) for peer in peers] for peers in (revoked, here, voters)), faults)
    assert held_up == list(counted)
