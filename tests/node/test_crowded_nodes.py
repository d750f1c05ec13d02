"""Real nodes full of strangers that say no more than that they are alive: a founder comes back, and rounds go on."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path

import pytest
import trio

from shoal.protocol.errors import NetworkError
from shoal.protocol.identity import PeerId
from shoal.protocol.peering import Full, Welcome
from shoal.protocol.wire import SwarmId
from tests.node.lab import Node, Swarm, assert_exact, eventually
from tests.node.test_evidence_nodes import started_as
from tests.swarm.quiet import Quiet

CROWDED_NODE = Path(__file__).with_name("crowded_node.py")
PLACES = 4
RETURN_S = 5.0
"""Until a stranger that was told that a node is full says hello again: all here share what one address may spend."""
SOON_S = 60.0
"""From the start of a process to its links: a few seconds, on a loaded machine."""


async def besiege(node: Node, swarm: bytes, seed: int, told: set[type]) -> None:
    """Be linked with a node as a stranger, and come back whenever it ends that; what it answers is in `told`."""
    async with trio.open_nursery() as nursery:
        quiet = Quiet(50 + seed, swarm_id=SwarmId(swarm))
        await nursery.start(quiet.host.run)
        while True:
            changes = quiet.host.watch()
            with contextlib.suppress(NetworkError):
                told.add(type(await quiet.ask_at(node.address, PeerId(node.peer_id), quiet.hello())))
                async for change in changes:
                    if not change.connected:
                        break
            changes.close()
            await trio.sleep(RETURN_S)


@pytest.mark.long
def test_founder_comes_back_to_nodes_full_of_strangers_and_rounds_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many strangers at either node as it has places, of which founders hold some."""
    monkeypatch.setenv("PLACES", str(PLACES))
    with Swarm(tmp_path, nodes=3) as swarm:
        first, second, founder = swarm.nodes
        started_as(CROWDED_NODE, first.folder, monkeypatch)
        started_as(CROWDED_NODE, second.folder, monkeypatch)
        swarm.start_together()

        async def main() -> int:
            do = trio.to_thread.run_sync
            await do(partial(founder.certified, 2))
            await do(founder.kill)
            told: dict[str, set[type]] = {node.peer_id: set() for node in (first, second)}
            async with trio.open_nursery() as nursery:
                for index, node in enumerate((first, second)):
                    for number in range(PLACES):
                        nursery.start_soon(
                            besiege, node, swarm.manifest.swarm_id, index * PLACES + number, told[node.peer_id]
                        )
                await do(eventually, lambda: all(who == {Welcome, Full} for who in told.values()), "both are full")
                status = first.ask("status")
                if status["missing"]:
                    assert status["long_missing"] == [], "it was here a moment ago"
                await do(partial(founder.start, join=[first]))
                for node in (first, second):
                    await do(partial(founder.wait, "linked", SOON_S, peer=node.peer_id))
                    since = founder.lives[-1][0]
                    came = partial(linked_since, node, founder, since)
                    await do(eventually, came, f"{node.folder.name} is linked with it", SOON_S)
                back = await do(eventually, partial(round_of_three, first, since), "a round of all three")
                await do(partial(second.certified, back))
                for node, other in ((first, second), (second, first)):
                    assert not node.events("lost", peer=other.peer_id), "no member gives way"
                nursery.cancel_scope.cancel()
            return back

        back = trio.run(main)
        for node in swarm.nodes:
            node.kill()
        assert_exact(swarm.report(back))


def linked_since(node: Node, other: Node, since: float) -> bool:
    return any(event["at"] >= since for event in node.events("linked", peer=other.peer_id))


def round_of_three(node: Node, since: float) -> int:
    """The first round after `since` to which three contributed, 0 if there is none yet."""
    rounds = [e["round"] for e in node.events("certified") if e["at"] >= since and e["contributors"] == 3]
    return rounds[0] if rounds else 0
