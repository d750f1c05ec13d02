"""Real nodes of which two sit behind routers that let nothing in: all train together, through the third, which does."""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path

import pytest
import trio

from shoal.node.control_client import request
from shoal.node.discovery.reaching import stranded_text
from shoal.protocol.manifest import render_manifest
from shoal.testnet.journal import Certified, Journal, Linked
from shoal.testnet.links.namespaces import CONTROL_PORT, LANE_PORT, network, why_no_routers
from shoal.testnet.nodes import Launch, NodeProcess, Runtime
from shoal.testnet.scenario import Scenario
from shoal.testnet.swarm import testnet_manifest as manifest_of
from tests.testnet.links_lab import MODEL, assert_everyone_is_in_every_chunk, events, relays, run

needs_routers = pytest.mark.skipif(why_no_routers() is not None, reason=str(why_no_routers()))
pytestmark = [needs_routers, pytest.mark.long]

DEADLINE_S = 150.0
BEHIND = (1, 2)


def scenario(rounds: int) -> Scenario:
    return Scenario(
        nodes=3,
        rounds=rounds,
        workload="regression",
        options=MODEL,
        codec="fp32",
        inner_steps=10,
        behind_routers=BEHIND,
    )


def last_reachability(out: Path, node: int) -> tuple[str, list[str]]:
    """What it found of itself before the swarm was stopped, and what it announced."""
    end = events(out, node, "certified")[-1]["at"]
    told = [event for event in events(out, node, "reachability") if event["at"] < end][-1]
    return told["reachability"], told["addresses"]


def test_two_behind_routers_and_a_third_train_together(tmp_path: Path) -> None:
    """Every value of every round is right; no frame goes through the plan's relays, as the two have lanes of theirs."""
    report = run(scenario(3), tmp_path)
    assert_everyone_is_in_every_chunk(report)
    assert [relays(report, tmp_path, round) for round in (1, 2, 3)] == [[]] * 3
    public = next(node.peer_id for node in report.nodes if node.index == 0)
    assert last_reachability(tmp_path, 0) == ("public", [f"/ip4/198.18.0.1/tcp/{CONTROL_PORT}/p2p/{public}"])
    for index in BEHIND:
        me = next(node.peer_id for node in report.nodes if node.index == index)
        reachability, addresses = last_reachability(tmp_path, index)
        through = f"/ip4/198.18.0.1/tcp/{CONTROL_PORT}/p2p/{public}/p2p-circuit/p2p/{me}"
        assert (reachability, addresses) == (
            "relayed",
            [through, f"/ip4/10.0.{index + 1}.2/tcp/{CONTROL_PORT}/p2p/{me}"],
        )


def test_two_behind_routers_say_what_is_missing_when_the_third_dies(tmp_path: Path) -> None:
    trio.run(_lose_the_third, tmp_path)


async def _lose_the_third(folder: Path) -> None:
    journal = Journal()
    nodes = []
    for index in range(3):
        (folder / str(index)).mkdir()
        nodes.append(NodeProcess(index, folder / str(index), journal, Runtime()))
    manifest = folder / "swarm.toml"
    manifest.write_text(render_manifest(manifest_of(scenario(1), [node.peer_id for node in nodes])))
    with network(3, behind=BEHIND) as links, trio.fail_after(DEADLINE_S):
        async with trio.open_nursery() as nursery:

            async def start(index: int, join: tuple[str, ...]) -> None:
                node = nodes[index]
                launch = Launch(manifest=manifest, data_dir=node.folder, join=join, place=links.place(index))
                nursery.start_soon(node.run, launch)

            await start(0, ())
            await journal.until(lambda: bool(nodes[0].addresses))
            for index in BEHIND:
                await start(index, nodes[0].addresses)
            await journal.until(lambda: all(len(journal.of(Linked, index)) >= 2 for index in BEHIND))
            await journal.until(lambda: all(node.certified(1) for node in nodes))
            assert journal.of(Certified, 0)
            for node, expected in zip(nodes, ("public", "relayed", "relayed"), strict=True):
                ask = partial(request, node.folder, "status", deadline_s=30.0)
                status = await trio.to_thread.run_sync(ask)
                assert status["reachability"] == expected
                proven = [f"/ip4/198.18.0.1/tcp/{CONTROL_PORT}/p2p/{nodes[0].peer_id}", f"198.18.0.1:{LANE_PORT}"]
                assert status["proven"] == (proven if node is nodes[0] else [])
            nodes[0].signal(signal.SIGKILL)
            for index in BEHIND:
                await _until_logged(folder / str(index) / "log.txt", stranded_text(CONTROL_PORT, LANE_PORT))
                await _until_logged(folder / str(index) / "log.txt", "no quorum")
            nursery.cancel_scope.cancel()


async def _until_logged(log: Path, text: str) -> None:
    while text not in await trio.to_thread.run_sync(log.read_text):  # noqa: ASYNC110 - a file sets no event
        await trio.sleep(0.1)
