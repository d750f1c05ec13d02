"""A node whose disk lies: what it kept is damaged while it is down, and it believes none of it."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path

import pytest
import trio

from shoal.lab.campaigns.campaign_plan import Group
from shoal.lab.campaigns.campaign_swarm import MODEL, LivingSwarm
from shoal.node.reporting.events import Certified
from shoal.testnet.check import check_swarm
from shoal.testnet.faults import flip_bits

DEADLINE_S = 300.0
STATE_BYTES = 2 * 4 * (int(MODEL["inputs"]) + 1) * int(MODEL["outputs"])
"""Anchor and momentum."""


def test_flipped_bits_are_one_in_every_state_and_every_final_and_nowhere_else(tmp_path: Path) -> None:
    kept = {name: random.Random(name).randbytes(400) for name in ("state/3.safetensors", "finals/3-ab", "finals/4-cd")}
    kept["finals/5-ef"] = random.Random(5).randbytes(104) + bytes(296)  # most of it fills a page
    other = {
        "finals/6-gh": b"",
        "finals/7-ij": bytes(400),
        "state/9.partial": b"a" * 100,
        "rounds/0.0-3/applied": b"b" * 100,
        "chain.log": b"c" * 100,
    }
    for name, data in (kept | other).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    flipped = flip_bits(tmp_path, random.Random(1))
    assert sorted(str(path.relative_to(tmp_path)) for path in flipped) == sorted(kept)
    for name, data in kept.items():
        pairs = enumerate(zip(data, (tmp_path / name).read_bytes(), strict=True))
        [(at, bit)] = [(at, before ^ after) for at, (before, after) in pairs if before != after]
        assert at >= len(data) // 4
        assert data[at]
        assert bit.bit_count() == 1
    assert all((tmp_path / name).read_bytes() == data for name, data in other.items())


@pytest.mark.long
async def test_node_that_comes_back_to_damaged_files_fetches_what_it_lost(tmp_path: Path) -> None:
    group = Group(peers=3, codec="int8")
    with trio.fail_after(DEADLINE_S):
        async with LivingSwarm(tmp_path, group, seed=5).owned() as swarm:
            await swarm.begin()
            gate = await swarm.gather(0)
            struck = swarm.nodes[2]
            struck.signal(signal.SIGKILL)
            struck.struck = "killed"
            await struck.lives[-1].ended.wait()
            flipped = flip_bits(struck.folder, random.Random(1))
            assert any(path.parent.name == "state" and path.stem != "0" for path in flipped), flipped
            # The others stand still meanwhile: were it far behind, it would fetch the state in any case.
            await swarm.revive(struck)
            await swarm.until(lambda: swarm.began_round(struck), "node 2 takes part again", DEADLINE_S)
            await swarm.release([node for node in swarm.nodes if node is not struck])
            whole = await swarm.gather(gate)
            assert_right(swarm, whole)
            first = next(e for e in swarm.journal.of(Certified, 2) if e.at > struck.lives[-1].started_at)
            assert received_by(struck.folder, first) > STATE_BYTES


def received_by(folder: Path, certified: Certified) -> int:
    """Bytes that had come over lanes when a node certified that round."""
    lines = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    return next(int(e["lanes_received"]) for e in lines if e["event"] == "certified" and e["at"] == certified.at)


def assert_right(swarm: LivingSwarm, before: int) -> None:
    """All that any node applied is what was contributed, and all hold the same."""
    certified = [e for e in swarm.journal.of(Certified) if e.round < before]
    digests = {(e.round, e.digest) for e in certified}
    assert len(digests) == len({e.round for e in certified})
    check = check_swarm(swarm.witnesses, {(e.term, e.round) for e in certified})
    assert (check.wrong_values, check.errors) == (0, ())
    assert check.rounds[-1].contributors == len(swarm.nodes)
