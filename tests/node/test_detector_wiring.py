"""What a node's failure detector is told: whom its member waits for, and that nothing is waited for."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.protocol.member import Member
from tests.node.unstarted_node import PEER, unstarted_node


@pytest.mark.parametrize("rests", [False, True])
def test_detector_of_a_node_asks_less_often_while_its_member_rests(
    rests: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Member, "rests", property(lambda _: rests))
    with unstarted_node(tmp_path) as node:
        assert node.members.machine.calm() == rests


def test_detector_of_a_node_watches_whom_its_member_waits_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Member, "awaited", lambda _: {PEER.peer_id})
    with unstarted_node(tmp_path) as node:
        assert list(node.members.machine.awaited()) == [PEER.peer_id]
