"""Real nodes of which two sit behind routers: their lanes go through holes in both, where the routers keep ports."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from shoal.node.control_client import request
from shoal.protocol.manifest import render_manifest
from shoal.testnet.journal import Journal, Linked
from shoal.testnet.links import namespaces
from shoal.testnet.links.namespaces import Network, network, why_no_routers
from shoal.testnet.nodes import Launch, NodeProcess, Runtime
from shoal.testnet.scenario import Scenario
from shoal.testnet.swarm import testnet_manifest as manifest_of
from tests.testnet.links_lab import MODEL, PAYLOAD_BYTES

needs_routers = pytest.mark.skipif(why_no_routers() is not None, reason=str(why_no_routers()))
pytestmark = [needs_routers, pytest.mark.long]

DEADLINE_S = 150.0
BEHIND = (1, 2)
SETTLED, END = 3, 6
"""Rounds: until the first the lanes may still be through the third; they are looked at from there to the second."""
PASSED_ON_ROUND_BYTES = 4 * PAYLOAD_BYTES // 3
"""Between the two in one round: a third of a contribution and of the finals, each way."""


def change_ports(links: Network, index: int) -> None:
    """Have a router give every connection another port of its own, by chance."""
    rules = 'flush chain inet router leave\nadd rule inet router leave oifname "outside" masquerade fully-random\n'
    enter = [namespaces._tool("ip"), "netns", "exec", links._near(index), namespaces._tool("nft"), "-f", "-"]
    namespaces._run(enter, rules)


@pytest.mark.parametrize("keeps_ports", [True, False], ids=["ports kept", "ports changed"])
def test_two_behind_routers_exchange_tensors_through_holes_or_through_the_third(
    tmp_path: Path, keeps_ports: bool
) -> None:
    trio.run(_train, tmp_path, keeps_ports)


async def _train(folder: Path, keeps_ports: bool) -> None:
    journal = Journal()
    nodes = []
    for index in range(3):
        (folder / str(index)).mkdir()
        nodes.append(NodeProcess(index, folder / str(index), journal, Runtime()))
    scenario = Scenario(
        nodes=3, rounds=END, workload="regression", options=MODEL, codec="fp32", inner_steps=10, behind_routers=BEHIND
    )
    manifest = folder / "swarm.toml"
    manifest.write_text(render_manifest(manifest_of(scenario, [node.peer_id for node in nodes])))
    with network(3, behind=BEHIND) as links, trio.fail_after(DEADLINE_S):
        for index in () if keeps_ports else BEHIND:
            change_ports(links, index)
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
            await journal.until(lambda: all(node.certified(SETTLED) for node in nodes))
            before = await status_of(nodes[0])
            await journal.until(lambda: all(node.certified(END) for node in nodes))
            after = await status_of(nodes[0])
            for node in (nodes[index] for index in BEHIND):
                assert (await status_of(node))["reachability"] == "relayed", "control still goes through the third"
            rounds = after["round"] - before["round"]
            passed_on = after["bytes"]["passed_on"] - before["bytes"]["passed_on"]
            assert rounds >= END - SETTLED - 1
            if keeps_ports:
                assert passed_on < rounds * PASSED_ON_ROUND_BYTES / 4
            else:
                assert passed_on > (rounds - 1) * PASSED_ON_ROUND_BYTES
            nursery.cancel_scope.cancel()


async def status_of(node: NodeProcess) -> dict[str, Any]:
    return await trio.to_thread.run_sync(partial(request, node.folder, "status", deadline_s=30.0))
