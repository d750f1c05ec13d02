"""Real nodes of which two sit behind routers that let nothing in: all train together, through the third, which does."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import trio

from shoal.node.discovery.reaching import stranded_text
from shoal.testnet.links.namespaces import CONTROL_PORT, LANE_PORT
from tests.testnet.links_lab import (
    BEHIND,
    assert_everyone_is_in_every_chunk,
    behind_routers,
    events,
    needs_routers,
    relays,
    run,
    two_behind_routers,
)

pytestmark = [needs_routers, pytest.mark.long]


def last_reachability(out: Path, node: int) -> tuple[str, list[str]]:
    """What it found of itself before the swarm was stopped, and what it announced."""
    end = events(out, node, "certified")[-1]["at"]
    told = [event for event in events(out, node, "reachability") if event["at"] < end][-1]
    return told["reachability"], told["addresses"]


def test_two_behind_routers_and_a_third_train_together(tmp_path: Path) -> None:
    """Every value of every round is right; no frame goes through the plan's relays, as the two have lanes of theirs."""
    report = run(behind_routers(3), tmp_path)
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
    async with two_behind_routers(folder, 1) as routed:
        await routed.all_certified(1)
        public = routed.nodes[0]
        for index, expected in enumerate(("public", "relayed", "relayed")):
            status = await routed.status(index)
            assert status["reachability"] == expected
            proven = [f"/ip4/198.18.0.1/tcp/{CONTROL_PORT}/p2p/{public.peer_id}", f"198.18.0.1:{LANE_PORT}"]
            assert status["proven"] == ([] if index in BEHIND else proven)
        public.signal(signal.SIGKILL)
        for index in BEHIND:
            await _until_logged(folder / str(index) / "log.txt", stranded_text(CONTROL_PORT, LANE_PORT))
            await _until_logged(folder / str(index) / "log.txt", "no quorum")


async def _until_logged(log: Path, text: str) -> None:
    while text not in await trio.to_thread.run_sync(log.read_text):  # noqa: ASYNC110 - a file sets no event
        await trio.sleep(0.1)
