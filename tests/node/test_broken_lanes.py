"""What is said of a lane that breaks: it is news unless one of the two at its ends has said that it leaves."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from shoal.node.node import Node
from shoal.node.outcome import Outcome
from shoal.protocol.errors import NetworkError
from shoal.protocol.records import NodeRecord, Phase, seal_record
from shoal.protocol.wire import Sealer
from tests.node.unstarted_node import PEER, unstarted_node


def hear_of_peer(node: Node, seq: int, phase: Phase) -> None:
    """Its record comes."""
    record = NodeRecord(peer=PEER.peer_id, boot=seq, phase=phase)
    data = seal_record(Sealer(PEER, node.parts.swarm_id, seq), record)
    assert node.members.book.receive(data, 0.0, peer=PEER.peer_id) is not None


def level_of_a_broken_lane(node: Node, caplog: pytest.LogCaptureFixture) -> int:
    caplog.clear()
    with caplog.at_level(logging.DEBUG, logger="shoal.swarm.lanes.lane"):
        node.frames.lane_closed(PEER.peer_id, NetworkError("the connection with X broke"))
    (record,) = caplog.records
    assert record.getMessage() == "the connection with X broke"
    return record.levelno


def test_a_broken_lane_is_news_unless_its_other_end_leaves(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with unstarted_node(tmp_path) as node:
        assert level_of_a_broken_lane(node, caplog) == logging.INFO  # of whom nothing is known
        hear_of_peer(node, 1, "training")
        assert level_of_a_broken_lane(node, caplog) == logging.INFO
        hear_of_peer(node, 2, "leaving")
        assert level_of_a_broken_lane(node, caplog) == logging.DEBUG
        hear_of_peer(node, 3, "training")  # it is back
        assert level_of_a_broken_lane(node, caplog) == logging.INFO


def test_a_broken_lane_is_no_news_at_a_node_that_leaves(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with unstarted_node(tmp_path) as node:
        hear_of_peer(node, 1, "training")
        node._end(Outcome.LEFT, "asked to leave")
        assert level_of_a_broken_lane(node, caplog) == logging.DEBUG


def test_a_lane_that_ends_in_order_is_never_news(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with unstarted_node(tmp_path) as node, caplog.at_level(logging.DEBUG, logger="shoal.swarm.lanes.lane"):
        node.frames.lane_closed(PEER.peer_id, None)
        assert not caplog.records
