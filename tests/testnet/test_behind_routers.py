"""Real nodes of which two sit behind routers that let nothing in: all train together, through the third, which does.

When the third is gone the two go on by themselves, where holes lead through both routers, or say what is missing.
"""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
import trio

from shoal.node.discovery.reaching import parted_text, stranded_text
from shoal.swarm.reaching.punching import PUNCH_DEADLINE_S
from shoal.testnet.links import namespaces
from shoal.testnet.links.namespaces import CONTROL_PORT, LANE_PORT, Network
from tests.testnet.links_lab import (
    BEHIND,
    Routed,
    assert_everyone_is_in_every_chunk,
    behind_routers,
    change_ports,
    change_rules,
    events,
    needs_routers,
    relays,
    run,
    two_behind_routers,
)

pytestmark = [needs_routers, pytest.mark.long]

ROUTERS = {1: "198.18.0.2", 2: "198.18.0.3"}
"""Where the two behind them are seen."""
LOOK_S = 0.5
ROUNDS = 40
"""Of half a second or less; what could not be reached is tried again after some seconds."""
_NAME = re.compile(r" \(\S*…\S+\)")
"""A peer's name, behind its PeerId."""
_FORWARD = """
flush chain inet router forward
add rule inet router forward ct state established,related accept
{between}
add rule inet router forward oifname "outside" accept
"""


def last_reachability(out: Path, node: int) -> tuple[str, list[str]]:
    """What it found of itself before the swarm was stopped, and what it announced."""
    end = events(out, node, "certified")[-1]["at"]
    told = [event for event in events(out, node, "reachability") if event["at"] < end][-1]
    return told["reachability"], told["addresses"]


def test_two_behind_routers_and_a_third_train_together(tmp_path: Path) -> None:
    """Every value of every round is right; no frame goes through the plan's relays, once the two have lanes of theirs.

    Rounds may begin before the two are linked, which plans heed for a while.
    """
    report = run(behind_routers(ROUNDS), tmp_path)
    assert_everyone_is_in_every_chunk(report)
    assert [relays(report, tmp_path, round) for round in range(1, ROUNDS + 1)][-3:] == [[]] * 3
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


@pytest.mark.parametrize("keeps_ports", [True, False], ids=["ports kept", "ports changed"])
def test_two_behind_routers_find_a_way_or_say_what_is_missing_when_the_third_dies(
    tmp_path: Path, keeps_ports: bool
) -> None:
    trio.run(_lose_the_third, tmp_path, keeps_ports)


async def _lose_the_third(folder: Path, keeps_ports: bool) -> None:
    """The two have a connection for control through holes, and all lanes lead through the third until that is dead."""
    async with two_behind_routers(folder, 1_000) as routed:
        await _until_control_alone(routed)
        public = routed.nodes[0]
        for index, expected in enumerate(("public", "relayed", "relayed")):
            status = await routed.status(index)
            assert status["reachability"] == expected
            proven = [f"/ip4/198.18.0.1/tcp/{CONTROL_PORT}/p2p/{public.peer_id}", f"198.18.0.1:{LANE_PORT}"]
            assert status["proven"] == ([] if index in BEHIND else proven)
        public.signal(signal.SIGKILL)
        if not keeps_ports:
            change_ports(routed.links)
        let_through(routed.links, True)
        for index in BEHIND:
            await _until_logged(folder / str(index) / "log.txt", stranded_text(CONTROL_PORT, LANE_PORT))
        if keeps_ports:
            await routed.go_on_by_themselves(3)
        for index in BEHIND:
            missing = parted_text(routed.nodes[3 - index].peer_id, CONTROL_PORT, LANE_PORT)
            if not keeps_ports:
                await _until_logged(folder / str(index) / "log.txt", missing)
            assert (missing in _said(folder / str(index) / "log.txt")) != keeps_ports


def let_through(links: Network, allowed: bool) -> None:
    """Whether new connections pass from one of the two routers to the other."""
    drop = f'add rule inet router forward oifname "outside" ip daddr {{ {", ".join(ROUTERS.values())} }} drop'
    change_rules(links, _FORWARD.format(between="" if allowed else drop))


async def _until_control_alone(routed: Routed) -> None:
    """Until the two are connected through holes for control, and for nothing else; no more holes are let through."""
    while True:
        let_through(routed.links, True)
        while not await _holes(routed):  # noqa: ASYNC110
            await trio.sleep(LOOK_S)
        let_through(routed.links, False)
        await routed.nodes[1].ask("cut", routed.nodes[2].peer_id)
        await trio.sleep(
            2 * PUNCH_DEADLINE_S
        )  # lanes are closed by then, and an attempt that the third helped with is over
        if await _holes(routed) == 1:
            return


async def _holes(routed: Routed) -> int:
    """How many connections of the two lead through both routers; the kernel sets no event when that changes."""
    enter = [namespaces._tool("ip"), "netns", "exec", routed.links._node(1), namespaces._tool("ss")]
    look = [*enter, "-H", "-t", "-n", "state", "established", "dst", ROUTERS[2]]
    return len((await trio.to_thread.run_sync(namespaces._run, look)).splitlines())


async def _until_logged(log: Path, text: str) -> None:
    while text not in await trio.to_thread.run_sync(_said, log):  # noqa: ASYNC110 - a file sets no event
        await trio.sleep(0.1)


def _said(log: Path) -> str:
    """The text of a log, without peers' names."""
    return _NAME.sub("", log.read_text())
