"""A node full of strangers, on real hosts: who belongs to the swarm gets in at every stage, and others are told."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Collection, Sequence

import pytest
import trio

from shoal.protocol.messages import Leave, Term
from shoal.protocol.peering import Welcome
from shoal.swarm import dialling as dialling_module
from shoal.swarm import links as links_module
from shoal.swarm.limits import Door
from tests.swarm.quiet import Quiet
from tests.swarm.test_members import Node, Stranger, assert_linked, run, running, until

PLACES = 4
SOON_S = 15.0
"""A few seconds, on a loaded machine."""
FOUNDER = 1
"""The one that `MANIFEST` names."""


@pytest.fixture(autouse=True)
def _small_and_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links_module, "LINK_LIMIT", PLACES)
    monkeypatch.setattr(dialling_module, "DIAL_PERIOD_S", 0.02)
    monkeypatch.setattr(dialling_module, "DIAL_COURTESY_S", 0.1)


def open_door(node: Node) -> None:
    """Rates are not what is tried here, and all strangers of a test share an address."""
    node.host._door = Door(node.host.refusals, per_s=(1e3, 1e3), address_per_s=(1e3, 1e3), newcomers_per_s=(1e3, 1e3))


@contextlib.asynccontextmanager
async def full_of_strangers(node: Node, seeds: Sequence[int]) -> AsyncIterator[list[Quiet]]:
    """As many of them as there are seeds, linked in this order."""
    quiet = [Quiet(seed) for seed in seeds]
    async with trio.open_nursery() as nursery:
        for one in quiet:
            await nursery.start(one.host.run)
            assert isinstance(await one.ask_at(node.host.addresses[0], node.peer, one.hello()), Welcome)
            await until(lambda one=one: one.peer in node.linked())  # type: ignore[misc]
        yield quiet
        nursery.cancel_scope.cancel()


def peers(nodes: Collection[Node | Stranger]) -> set[str]:
    return {node.peer for node in nodes}


async def assert_heard(speaker: Node, listener: Node) -> None:
    """What it says of a round arrives; said until it does, since no end knows at once that a link is lost."""
    word = Leave(term=Term(), round=len(listener.heard) + 1, base=bytes(32))
    while (speaker.peer, word) not in listener.heard:
        speaker.members.links.broadcast(word)
        await trio.sleep(0.02)


def test_restarted_founder_gets_into_a_node_full_of_silent_strangers() -> None:
    async def main() -> None:
        node, founder = Node(2), Node(FOUNDER)
        open_door(node)
        async with running(node) as nursery:
            await nursery.start(founder.run)
            await founder.join(node)
            await assert_linked(node, founder)
            founder.kill()
            await until(lambda: founder.peer not in node.linked())
            async with full_of_strangers(node, range(20, 20 + PLACES)) as silent:
                again = Node(FOUNDER, boot=2)
                await nursery.start(again.run)
                with trio.fail_after(SOON_S):
                    await again.join(node)
                    await until(lambda: again.peer in node.linked() and node.peer in again.linked())
                await assert_heard(again, node)
                assert len(node.linked()) <= PLACES
                assert peers(silent) & node.linked(), "one gave way, not all"

    run(main)
