"""What strangers and members send costs a node little memory, whatever they announce; and it goes on answering."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.swarm.floods import MEMBERS, MIB, STRANGERS, NodeProcess, growth, node_process

FLOOD_BYTES = 64 * MIB
GROWTH_LIMIT_BYTES = 24 * MIB
"""The most that a stranger's unread bytes come to, with what Python makes of them; a member's is below."""


MEMBER_GROWTH_LIMIT_BYTES = 48 * MIB


@pytest.fixture(scope="module")
def node_without_members() -> Iterator[NodeProcess]:
    with node_process("nobody") as node:
        yield node


@pytest.fixture(scope="module")
def node_of_members() -> Iterator[NodeProcess]:
    with node_process("everybody") as node:
        yield node


@pytest.mark.parametrize("name", STRANGERS)
async def test_a_strangers_flood_takes_little_memory(name: str, node_without_members: NodeProcess) -> None:
    peak, _ = await growth(node_without_members, STRANGERS[name], FLOOD_BYTES)
    assert peak < GROWTH_LIMIT_BYTES


@pytest.mark.parametrize("name", MEMBERS)
async def test_a_members_flood_of_gossip_takes_little_memory(name: str, node_of_members: NodeProcess) -> None:
    peak, _ = await growth(node_of_members, MEMBERS[name], FLOOD_BYTES)
    assert peak < MEMBER_GROWTH_LIMIT_BYTES
