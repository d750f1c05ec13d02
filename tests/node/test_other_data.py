"""Members that train on different data: how a node notices, and real nodes that say so."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from shoal.node.other_data import OtherData, capability_of, claimed
from shoal.node.workloads.text import TextWorkload
from shoal.protocol.manifest import render_manifest, validate_manifest
from shoal.protocol.wire import SwarmId
from tests.node.lab import Node, Swarm, eventually

SWARM = SwarmId(bytes(32))
A, B, C, D, E = (capability_of(SWARM, bytes([number]))[0] for number in range(5))


def test_capability_is_one_that_a_record_takes_and_follows_from_swarm_and_data() -> None:
    assert re.fullmatch(r"held-out\.[0-9a-f]{16}", A)
    assert len({A, B, *capability_of(SwarmId(bytes([1] * 32)), bytes([0]))}) == 3
    assert capability_of(SWARM, b"") == ()
    assert claimed(("relay", A, "name.x")) == A
    assert claimed(("relay", "name.held-out")) == ""


@pytest.mark.parametrize(
    ("named", "remedy"),
    [
        (True, "name the same with --data at every node"),
        (False, "this node was started without --data: ask what the others train on, and name a copy of that here"),
    ],
)
def test_difference_is_said_once_with_what_helps(named: bool, remedy: str) -> None:
    other = OtherData(named=named)
    assert other.compare("", {"m1": A}) is None, "what is held out here is not known yet"
    assert other.compare(A, {"m1": A, "m2": "", "m4": B}) == (
        "other data than here is held out at m4, so held-out losses cannot be compared, and perhaps other data is "
        f"trained on; if that is not meant, {remedy}"
    )
    assert other.compare(A, {"m1": A, "m2": A, "m4": B, "m5": B}) is None


def test_where_everybody_has_data_of_their_own_there_are_three_lines_at_most() -> None:
    other = OtherData(named=True)
    lines = [other.compare(A, {f"m{number}": mark}) for number, mark in enumerate((B, C, D, E))]
    assert [line is not None for line in lines] == [True, True, True, False]
    many = OtherData(named=True).compare(A, dict(zip(("m1", "m2", "m3", "m4", "m5"), (B, C, D, E, E), strict=True)))
    assert many is not None
    assert "held out at m1, m2, m3 and 2 more, so" in many


def test_text_tells_by_a_hash_what_it_holds_out(tmp_path: Path) -> None:
    digests = []
    for number, text in enumerate(("one " * 1000 + "held", "two " * 1000 + "held", "one " * 1000 + "hold")):
        file = tmp_path / f"{number}.txt"
        file.write_text(text)
        digests.append(TextWorkload(data=str(file)).held_out_digest())
    assert len(set(digests)) == 3
    assert digests[0] == TextWorkload(data=str(tmp_path / "0.txt")).held_out_digest()
    assert len(digests[0]) == 32


def notices(node: Node) -> list[str]:
    return [line for line in node.log.splitlines() if "other data than here is held out" in line]


@pytest.mark.long
def test_node_that_joins_without_the_text_of_the_swarm_hears_of_it_and_so_do_the_others(tmp_path: Path) -> None:
    text = tmp_path / "all.txt"
    text.write_text("to be or not to be, that is the question\n" * 500)
    with Swarm(tmp_path, nodes=2, founders=1) as swarm:
        tables = msgspec.to_builtins(swarm.manifest)
        options = {"width": 16, "layers": 1, "heads": 2, "context": 16, "batch": 2}
        tables["workload"] = {"name": "text", "options": options}
        swarm.manifest = validate_manifest(tables, source="the test's manifest")
        swarm.manifest_path.write_text(render_manifest(swarm.manifest))
        founder, joiner = swarm.nodes
        founder.start("--data", str(text))
        founder.wait("certified")
        assert founder.ask("link")["data"] is True
        joiner.start(join=[founder])
        joiner.wait("certified")
        assert joiner.ask("link")["data"] is False
        eventually(lambda: notices(joiner), "the newcomer says so")
        eventually(lambda: notices(founder), "and so does the founder")
        assert "this node was started without --data" in notices(joiner)[0]
        assert "name the same with --data at every node" in notices(founder)[0]
        assert joiner.peer_id in notices(founder)[0]
        after = joiner.events("certified")[-1]["round"] + 3
        eventually(lambda: joiner.events("certified")[-1]["round"] >= after, "three more rounds")
        assert (len(notices(joiner)), len(notices(founder))) == (1, 1)
