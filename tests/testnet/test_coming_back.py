"""Nodes that come back on an old copy of their folder, or at another address: what they may do, and what fails."""

from __future__ import annotations

import shutil
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from shoal.lab.campaigns.campaign_check import broken_votes
from shoal.lab.campaigns.campaign_swarm import read_chain
from shoal.lab.waiting_workload import WORKLOAD_NAME
from shoal.node.reporting.events import Certified, Linked, Listening
from shoal.protocol.errors import NetworkError
from shoal.protocol.manifest import Manifest
from shoal.testnet.check import Witness
from shoal.testnet.faults import KEPT, NotWhole, copy_folder, put_back, strike, until_whole
from shoal.testnet.fleet import Fleet
from shoal.testnet.nodes import Launch, Runtime
from shoal.testnet.scenario import ROUND_LIMIT, Fault, Scenario
from tests.lab.test_fleet import manifest_of
from tests.testnet.links_lab import needs_namespaces
from tests.testnet.real_nodes import run_real

DEADLINE_S = 60.0
IN_USE = "shoal: the key in /it is in use elsewhere: … start this one with `shoal run --take-over`"
STAND_IN = """\
import json, pathlib, sys, time
folder, mode, peer, *options = sys.argv[1:]
def log(event, **fields):
    with open(f"{folder}/events.jsonl", "a") as file:
        file.write(json.dumps({"event": event, "at": time.time(), **fields}) + "\\n")
first = not pathlib.Path(folder, "events.jsonl").exists()
log("listening", addresses=[f"/of/{time.time()}"])
if first or mode == "goes on" or "--take-over" in options:
    pathlib.Path(folder, "agreement.log").write_text("signed")
    for round in range(1, 10**6):
        log("certified", round=round, digest="", members=[peer])
        time.sleep(0.01)
if mode == "follows":
    for round in range(1, 10**6):
        log("certified", round=round, digest="", members=["another"])
        time.sleep(0.01)
if mode == "samples":
    for round in range(1, 10**6):
        log("rollouts", round=round, tokens=1, reward=None, own=1, external=0, external_reward=None, origins={})
        time.sleep(0.01)
if mode == "is done":
    sys.exit()
if mode == "crashes":
    sys.exit("it has no idea")
if mode in ("refuses", "breaks"):
    print("Traceback (most recent call last):\\n" * (mode == "breaks") + IN_USE)
    sys.exit(2)
time.sleep(600)
""".replace("IN_USE", repr(IN_USE))


class Lone(Fleet):
    """A fleet of one stand-in, which joins by being started."""

    seed = 1

    async def join(self, index: int) -> None:
        await self.launch(self.node(index))


@asynccontextmanager
async def lone(folder: Path, mode: str) -> AsyncIterator[Lone]:
    """A node of this mode that is started, and has certified."""

    def command(launch: Launch) -> list[str]:
        options = ["--take-over"] if launch.take_over else []
        return [sys.executable, "-S", "-c", STAND_IN, str(launch.data_dir), mode, node.peer_id, *options]

    await trio.Path(folder).mkdir()
    fleet = Lone(folder, runtime=Runtime(command=command))
    node = fleet.add(0)
    found: Manifest = manifest_of([node.peer_id])
    fleet.found(found)
    with trio.fail_after(DEADLINE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fleet.run)
            await fleet.launch(node)
            await fleet.journal.until(lambda: len(fleet.journal.of(Certified)) > 3)
            yield fleet
            nursery.cancel_scope.cancel()


RESTORE = Fault(kind="restore", node=0, round=3)


@pytest.mark.parametrize(("mode", "lives"), [("refuses", 3), ("goes on", 2)])
async def test_who_is_put_back_may_refuse_in_one_line_and_is_told_that_this_copy_goes_on(
    mode: str, lives: int, tmp_path: Path
) -> None:
    async with lone(tmp_path / "swarm", mode) as swarm:
        await copy_folder(RESTORE, swarm)
        await strike(RESTORE, swarm)
        await until_whole(RESTORE, swarm)
        (node,) = swarm.nodes
        assert (len(node.lives), node.struck, node.put_back, node.take_over) == (lives, None, False, False)
        assert [path.name for path in node.folder.parent.iterdir()] == ["0"], "no copy is left beside it"
        assert (IN_USE in (node.folder / "log.txt").read_text()) == (mode == "refuses")


@pytest.mark.parametrize(
    ("mode", "what"),
    [
        ("crashes", "node 0 ended after its restore"),
        ("breaks", "node 0 ended after its restore"),
        ("hangs", "node 0 took part in no round within 1 s of its restore"),
        ("follows", "node 0 took part in no round within 1 s of its restore"),
        ("samples", "node 0 took part in no round within 1 s of its restore"),
    ],
)
async def test_whatever_else_comes_of_an_old_folder_is_a_failure(mode: str, what: str, tmp_path: Path) -> None:
    async with lone(tmp_path / "swarm", mode) as swarm:
        await copy_folder(RESTORE, swarm)
        await strike(RESTORE, swarm)
        with pytest.raises(NotWhole, match=what):
            await until_whole(RESTORE, swarm, limit_s=DEADLINE_S if mode in ("crashes", "breaks") else 1.0)
        assert len(swarm.node(0).lives) == 2, "nobody told it to go on"


async def test_who_ends_in_order_after_a_fault_may_have_done_its_rounds(tmp_path: Path) -> None:
    """Where no round has members each node does its own, and may be through before the fault is over."""
    async with lone(tmp_path / "swarm", "is done") as swarm:
        await copy_folder(RESTORE, swarm)
        await strike(RESTORE, swarm)
        await until_whole(RESTORE, swarm)
        assert not swarm.node(0).alive


async def test_nothing_is_put_back_of_which_there_is_no_copy(tmp_path: Path) -> None:
    async with lone(tmp_path / "swarm", "goes on") as swarm:
        with pytest.raises(NetworkError, match="there is no copy of the folder of node 0"):
            await strike(RESTORE, swarm)
        assert swarm.node(0).alive


async def test_a_running_node_is_copied_as_it_is_at_one_moment_and_goes_on(tmp_path: Path) -> None:
    async with lone(tmp_path / "swarm", "goes on") as swarm:
        node = swarm.node(0)
        stopped: list[bool] = []
        real = shutil.copytree
        with socket.socket(socket.AF_UNIX) as listening:  # as a node whose user trains has two
            listening.bind(str(node.folder / "trainer.sock"))

        def noted(copied: Path, copy: Path, **kwargs: Any) -> Path:
            stopped.append(node.stopped)
            return real(copied, copy, **kwargs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("shoal.testnet.faults.shutil.copytree", noted)
            await copy_folder(RESTORE, swarm)
        assert (stopped, node.stopped) == ([True], False)
        copy = {path.name for path in node.folder.with_name("0.copy").iterdir()}
        assert "node.key" in copy
        assert "trainer.sock" not in copy
        there = len(swarm.journal.of(Certified))
        await swarm.journal.until(lambda: len(swarm.journal.of(Certified)) > there)


def test_what_is_put_back_is_all_that_was_copied_and_nothing_newer_but_what_judges(tmp_path: Path) -> None:
    copy, folder = tmp_path / "copy", tmp_path / "folder"
    for path in ("chain.log", "state/3", "rounds/0.0-9/plan", "log.txt", "newer", "newer.d/one"):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text("new")
    for path in ("chain.log", "state/1"):
        (copy / path).parent.mkdir(parents=True, exist_ok=True)
        (copy / path).write_text("old")
    put_back(copy, folder)
    found = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}
    assert found == {"chain.log": "old", "state/1": "old", "rounds/0.0-9/plan": "new", "log.txt": "new"}
    assert {"rounds", "log.txt"} <= set(KEPT)


MOVE = Fault(kind="move", node=0, round=3)


@pytest.mark.parametrize(("mode", "found"), [("goes on", True), ("goes on", False), ("hangs", True)])
async def test_who_moved_is_to_take_part_and_to_be_found_again(mode: str, found: bool, tmp_path: Path) -> None:
    async with lone(tmp_path / "swarm", mode) as swarm:
        node, other = swarm.node(0), swarm.add(1)
        await swarm.launch(other)  # the first start of any goes on
        swarm.journal.add(1, Linked(at=node.lives[-1].started_at, peer=node.peer_id))
        before = node.addresses
        await strike(MOVE, swarm)
        assert before
        assert not set(before) & set(swarm.journal.of(Listening, 0)[-1].addresses)
        if found:
            swarm.journal.add(1, Linked(at=node.lives[-1].started_at + 0.1, peer=node.peer_id))
        if mode == "goes on" and found:
            await until_whole(MOVE, swarm)
            return
        if not found:
            apart = SimpleNamespace(is_apart=lambda pair: set(pair) == {0, 1})
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(swarm, "network", apart)
                await until_whole(MOVE, swarm, limit_s=1.0)
        what = "took part in no round" if found else "has another address, and nodes \\[1\\] did not find it there"
        with pytest.raises(NotWhole, match=what):
            await until_whole(MOVE, swarm, limit_s=1.0)


# -- real nodes ----------------------------------------------------------------------------------------------


@pytest.mark.long
def test_node_on_an_old_copy_of_its_folder_signs_nothing_twice_and_is_of_the_rounds_again(tmp_path: Path) -> None:
    restore = Fault(kind="restore", node=1, round=6, phase="certify", from_round=2, duration_s=1.0)
    scenario = Scenario(
        nodes=3,
        rounds=8,
        workload=WORKLOAD_NAME,  # of rounds that are long enough for the copy to be of the one that is meant
        options={"inputs": 320, "outputs": 128, "step_s": 0.1},
        inner_steps=6,
        codec="int8",
        faults=(restore,),
    )
    report = run_real(scenario, tmp_path)
    assert [(fault.error, fault.unmet) for fault in report.faults] == [(None, None)]
    assert report.alarms == ()
    node, home = report.nodes[1], tmp_path / "nodes" / "1"
    chain = read_chain(tmp_path / "nodes" / "0" / "chain.log")
    shown = [one.value.round for one in chain if 2 <= one.value.round < 6 and node.peer_id in one.signers]
    said = [line for line in (home / "log.txt").read_text().splitlines() if "in use elsewhere" in line]
    # Two votes of three certify, and its own may be among them in none: then nothing shows that it had been further on.
    assert (len(node.lives), len(said)) == ((3, 1) if shown else (2, 0)), "it refused to go on, and was told to"
    witness = Witness(index=1, peer_id=node.peer_id, folder=home)  # type: ignore[arg-type]
    assert broken_votes(witness, 1, ROUND_LIMIT) == []


@needs_namespaces
def test_node_that_comes_back_at_another_address_is_found_and_of_the_rounds_again(tmp_path: Path) -> None:
    faults = (
        Fault(kind="move", node=1, round=2, phase="reduce", progress=0.5),
        Fault(kind="partition", groups=((1,), (0, 2)), round=5, duration_s=4.0),
    )
    scenario = Scenario(nodes=3, rounds=8, workload="regression", inner_steps=5, codec="int8", faults=faults)
    report = run_real(scenario, tmp_path)
    assert [(fault.error, fault.unmet) for fault in report.faults] == [(None, None)] * 2
    listening = (tmp_path / "nodes" / "1" / "events.jsonl").read_text()
    assert "/ip4/198.18.0.2/" in listening
    assert "/ip4/198.18.0.5/" in listening, "and what is done to links is done to it where it is"
    assert report.faults[1].delay_s is not None
