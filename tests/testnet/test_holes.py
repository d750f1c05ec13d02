"""Real nodes of which two sit behind routers: what they have to say to each other, of tensors and of control, goes
through holes in both, where the routers keep ports."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from shoal.testnet.links.namespaces import Network
from tests.testnet.links_lab import BEHIND, PAYLOAD_BYTES, Routed, change_ports, needs_routers, two_behind_routers

pytestmark = [needs_routers, pytest.mark.long]

SETTLED, ROUNDS = 3, 3
"""What goes through the third is looked at from this round on, and over so many where that is all of it."""
PASSED_ON_ROUND_BYTES = 4 * PAYLOAD_BYTES // 3
"""Between the two in one round: a third of a contribution and of the finals, each way."""


def keep_ports(links: Network) -> None:
    """As the routers are."""


@pytest.mark.parametrize("keeps_ports", [True, False], ids=["ports kept", "ports changed"])
def test_two_behind_routers_exchange_tensors_through_holes_or_through_the_third(
    tmp_path: Path, keeps_ports: bool
) -> None:
    trio.run(_train, tmp_path, keeps_ports)


async def _train(folder: Path, keeps_ports: bool) -> None:
    async with two_behind_routers(folder, 1_000, prepare=keep_ports if keeps_ports else change_ports) as routed:
        await routed.all_certified(SETTLED)
        if keeps_ports:
            await nothing_is_passed_on(routed)
        else:
            await everything_is_passed_on(routed)
        for index in BEHIND:
            assert (await routed.status(index))["reachability"] == "relayed", "nobody can dial it"


async def everything_is_passed_on(routed: Routed) -> None:
    """Return after some rounds of which the third passed on all that goes between the two.

    Not before they have lanes: rounds may have begun before the two were linked, which plans heed for a while.
    """
    before = await routed.status(0)
    while True:
        await routed.all_certified(before["round"] + ROUNDS)
        after = await routed.status(0)
        rounds = after["round"] - before["round"]
        if after["bytes"]["passed_on"] - before["bytes"]["passed_on"] > (rounds - 1) * PASSED_ON_ROUND_BYTES:
            return
        before = after


async def nothing_is_passed_on(routed: Routed) -> None:
    """Return after a round of all three in which the third passed on not a byte, of tensors or of control."""
    before = await routed.status(0)
    while True:
        await routed.all_certified(before["round"] + 2)
        after = await routed.status(0)
        if after["bytes"]["passed_on"] == before["bytes"]["passed_on"]:
            assert len(after["members"]) == len(routed.nodes)
            return
        before = after
