"""Real nodes with a liar among them: audits prove it, everybody verifies that, and a certificate bans it."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

from shoal.node.control_client import request
from shoal.protocol.manifest import AuditSection, render_manifest
from tests.node import lab
from tests.node.lab import Swarm, assert_one_line, shoal

LYING_NODE = Path(__file__).with_name("lying_node.py")


def started_as(script: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the node of that folder run by a script that lies."""
    honest_command = lab.command

    def command(*arguments: str) -> list[str]:
        lies = str(folder) in arguments
        return [sys.executable, str(script), *arguments] if lies else honest_command(*arguments)

    monkeypatch.setattr(lab, "command", command)


@pytest.mark.long
def test_owner_of_wrong_sums_is_proven_by_an_audit_and_banned_within_five_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Swarm(tmp_path, nodes=3) as swarm:
        swarm.manifest = msgspec.structs.replace(swarm.manifest, audit=AuditSection(chunks=9, share=1.0))
        swarm.manifest_path.write_text(render_manifest(swarm.manifest))
        *honest, liar = swarm.nodes
        started_as(LYING_NODE, liar.folder, monkeypatch)
        swarm.start_together()
        for node in honest:
            proof = node.wait("evidence")
            assert (proof["peer"], proof["kind"]) == (liar.peer_id, "wrongsum")
            ban = node.wait("banned")
            assert ban["peers"] == [liar.peer_id]
            assert ban["round"] <= 5
            after = node.certified(ban["round"] + 1)
            assert sorted(after["members"]) == sorted(one.peer_id for one in honest)
            (shown,) = request(node.folder, "status")["bans"]  # type: ignore[misc]
            assert shown == {
                "peer_id": liar.peer_id,
                "term": "0.0",
                "round": ban["round"],
                "until": None,
                "evidence": ban["evidence"][0],
            }
        files = sorted((honest[0].folder / "evidence").iterdir())
        assert files
        manifest = str(swarm.manifest_path)
        told = shoal("evidence", *map(str, files), "--manifest", manifest)
        assert told.returncode == 0, told.stderr
        assert told.stdout.count(liar.peer_id) == len(files)
        altered = tmp_path / "altered"
        altered.write_bytes(files[0].read_bytes()[:-1] + b"\0\0")
        refused = shoal("evidence", str(altered), "--manifest", manifest)
        assert refused.returncode == 1
        assert_one_line(refused.stderr, "altered")
