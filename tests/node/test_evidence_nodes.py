"""Real nodes with a liar among them: audits prove it, everybody verifies that, and a certificate bans it."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

from shoal.protocol.manifest import render_manifest
from shoal.protocol.manifest_audit import AuditSection
from tests.node import lab
from tests.node.lab import Swarm, assert_one_line, shoal

LYING_NODE = Path(__file__).with_name("lying_node.py")


@pytest.mark.long
def test_owner_of_wrong_sums_is_proven_by_an_audit_and_banned_within_five_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest_command = lab.command
    with Swarm(tmp_path, nodes=3) as swarm:
        swarm.manifest = msgspec.structs.replace(swarm.manifest, audit=AuditSection(chunks=9, share=1.0))
        swarm.manifest_path.write_text(render_manifest(swarm.manifest))
        *honest, liar = swarm.nodes

        def command(*arguments: str) -> list[str]:
            lies = str(liar.folder) in arguments
            return [sys.executable, str(LYING_NODE), *arguments] if lies else honest_command(*arguments)

        monkeypatch.setattr(lab, "command", command)
        swarm.start_together()
        for node in honest:
            proof = node.wait("evidence")
            assert (proof["peer"], proof["kind"]) == (liar.peer_id, "wrongsum")
            ban = node.wait("banned")
            assert ban["peers"] == [liar.peer_id]
            assert ban["round"] <= 5
            after = node.certified(ban["round"] + 1)
            assert sorted(after["members"]) == sorted(one.peer_id for one in honest)
        files = sorted((honest[0].folder / "evidence").iterdir())
        assert files
        manifest = str(swarm.manifest_path)
        shown = shoal("evidence", *map(str, files), "--manifest", manifest)
        assert shown.returncode == 0, shown.stderr
        assert shown.stdout.count(liar.peer_id) == len(files)
        altered = tmp_path / "altered"
        altered.write_bytes(files[0].read_bytes()[:-1] + b"\0\0")
        refused = shoal("evidence", str(altered), "--manifest", manifest)
        assert refused.returncode == 1
        assert_one_line(refused.stderr, "altered")
