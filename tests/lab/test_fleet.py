"""A swarm that is measured: started in order, watched, and nobody left; its nodes are stand-ins here."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest

from shoal.lab import fleet
from shoal.lab.bench.swarm import BenchSpec, check_disk, check_memory
from shoal.lab.fleet import Swarm, end
from shoal.node.control_client import JsonValue
from shoal.node.reporting.events import Lost
from shoal.protocol.errors import ConfigError, NetworkError
from shoal.protocol.identity import PeerId
from shoal.protocol.manifest import Manifest, validate_manifest
from shoal.testnet.nodes import Launch, Runtime

DEADLINE_S = 60.0

LISTENING = """\
import json, sys, time
folder, joined = sys.argv[1], sys.argv[2:]
print("joins", *joined, flush=True)
with open(f"{folder}/events.jsonl", "a") as log:
    event = {"event": "listening", "at": time.time(), "addresses": [f"/of/{folder[-1]}"]}
    log.write(json.dumps(event) + "\\n")
time.sleep(600)
"""
KILLED = "import os; os.kill(os.getpid(), 9)"
FAILING = "print('no such thing'); raise SystemExit(7)"


def manifest_of(founders: list[PeerId]) -> Manifest:
    tables = {
        "swarm": {"name": "test", "founders": founders, "admission": "open"},
        "workload": {"name": "regression"},
        "sync": {"inner_steps": 1},
    }
    return validate_manifest(tables, source="the test")


def swarm_of(folder: Path, program: str = LISTENING, count: int = 3) -> Swarm:
    def command(launch: Launch) -> list[str]:
        return [sys.executable, "-I", "-c", program, str(launch.data_dir), *launch.join]

    return Swarm(folder, count, manifest_of, runtime=Runtime(command=command))


def says(swarm: Swarm, index: int) -> str:
    return (swarm.home(index) / "log.txt").read_text()


async def test_all_join_the_first_and_none_is_left(tmp_path: Path) -> None:
    pids: list[int] = []
    async with swarm_of(tmp_path).owned() as swarm:
        assert (tmp_path / "swarm.toml").read_text().count(swarm.nodes[2].peer_id) == 1
        await swarm.start()
        await swarm.until(lambda: all(node.addresses for node in swarm.nodes), "all listen", DEADLINE_S)
        pids.extend(node.lives[-1].pid for node in swarm.nodes)
        assert [says(swarm, index).strip() for index in range(3)] == ["joins", "joins /of/0", "joins /of/0"]
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def test_who_ends_by_itself_ends_the_waiting_with_its_last_words(tmp_path: Path) -> None:
    async with swarm_of(tmp_path, FAILING).owned() as swarm:
        with pytest.raises(NetworkError, match="node 0 ended with exit code 7: …no such thing"):
            await swarm.start()


async def test_who_was_killed_by_nobody_here_is_told_as_memory_that_ran_out(tmp_path: Path) -> None:
    async with swarm_of(tmp_path, KILLED).owned() as swarm:
        with pytest.raises(NetworkError, match="node 0 was killed, most likely since memory ran out; take fewer nodes"):
            await swarm.start()


def test_a_swarm_that_cannot_fit_is_refused_with_what_would() -> None:
    spec = BenchSpec(peers=2, numel=1_000_000_000, codec="int8", rounds=1)
    said = "2 nodes of 1,000,000,000 values need 32.6 GB of memory, and 16.6 GB are available; take at most 500,000,000"
    with pytest.raises(ConfigError, match=said):
        check_memory(spec, 16_600_000_000)
    check_memory(spec, 32_600_000_000)
    with pytest.raises(ConfigError, match="take at most 0 values"):
        check_memory(spec, 1)


def test_what_does_not_fit_on_disk_is_refused_with_what_would() -> None:
    spec = BenchSpec(peers=2, numel=1_000_000_000, codec="int8", rounds=3)
    check_disk(spec, 78_000_000_000)
    said = r"need 78\.0 GB of disk at least, and 39\.0 GB are free; take at most 500,000,000 values"
    with pytest.raises(ConfigError, match=said):
        check_disk(spec, 39_000_000_000)


async def test_what_does_not_come_is_said_with_what_nodes_said_last(tmp_path: Path) -> None:
    async with swarm_of(tmp_path, count=2).owned() as swarm:
        await swarm.start()
        await swarm.until(lambda: bool(swarm.nodes[1].addresses), "the second listens", DEADLINE_S)
        with pytest.raises(NetworkError, match=r"peace: not within 0 s. node 0: …joins; node 1: …joins /of/0"):
            await swarm.until(lambda: False, "peace", 0.1)


HOLDING = """\
import json, pathlib, sys, time
folder, joined = sys.argv[1], sys.argv[2:]
with open(f"{folder}/events.jsonl", "a", buffering=1) as log:
    def tell(event, **fields):
        log.write(json.dumps({"event": event, "at": time.time(), **fields}) + "\\n")
    tell("listening", addresses=[f"/of/{folder[-1]}"])
    tell("linked", peer="another")
    if not joined:
        tell("holding", round=1, phase="train")
    else:
        while not pathlib.Path(folder, "asked").exists():
            time.sleep(0.02)
        tell("holding", round=1, phase="train")
        for _ in range(4):
            tell("lost", peer="another")
            time.sleep(0.1)
time.sleep(600)
"""


async def test_who_waits_for_the_others_is_asked_to_go_on_waiting_until_all_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first to start waits for longer than a hold lasts by itself, and all until links stay."""
    monkeypatch.setattr(fleet, "RENEWED_S", 0.2)
    monkeypatch.setattr(fleet, "SETTLED_S", 1.0)
    asked: list[tuple[str, str]] = []
    released: list[float] = []

    def ask(data_dir: Path, op: str, *arguments: str, deadline_s: float) -> dict[str, JsonValue]:
        asked.append((data_dir.name, op))
        released.extend([time.time()] if op == "release" else [])
        if asked.count((data_dir.name, "renew")) == 3:
            (data_dir / "asked").write_text("the last is there")
        return {}

    def command(launch: Launch) -> list[str]:
        return [sys.executable, "-I", "-c", HOLDING, str(launch.data_dir), *launch.join]

    async with Swarm(tmp_path, 2, manifest_of, runtime=Runtime(command=command, ask=ask)).owned() as swarm:
        took_s = await swarm.begin_together()
        first, second = (swarm.home(index).name for index in range(2))
        lost = [entry.event.at for entry in swarm.journal.entries if isinstance(entry.event, Lost)]
    assert took_s is not None
    assert took_s > 3 * 0.2
    assert asked.count((first, "renew")) >= 3
    for name in (first, second):
        assert [op for one, op in asked if one == name][-2:] == ["hold", "release"]
    assert len(lost) == 4
    assert min(released) >= max(lost) + 1.0


async def test_who_was_killed_ends_nothing_and_joins_all_others_when_it_comes_back(tmp_path: Path) -> None:
    async with swarm_of(tmp_path).owned() as swarm:
        await swarm.start()
        await swarm.until(lambda: all(node.addresses for node in swarm.nodes), "all listen", DEADLINE_S)
        first = swarm.node(0)
        await end(first)
        await swarm.until(lambda: not first.alive, "it is gone", DEADLINE_S)
        await swarm.revive(first)
        await swarm.until(lambda: bool(first.addresses), "it is back", DEADLINE_S)
        assert says(swarm, 0).splitlines() == ["joins", "joins /of/1 /of/2"]
        with pytest.raises(NetworkError, match="there is no node 3 yet"):
            swarm.node(3)
        for node in swarm.nodes:
            await end(node)
        with pytest.raises(NetworkError, match="nobody is left to join"):
            await swarm.revive(first)


async def test_a_newcomer_is_one_more_node_with_a_key_of_its_own(tmp_path: Path) -> None:
    async with swarm_of(tmp_path, count=1).owned() as swarm:
        began = time.time()
        newcomer = swarm.add(7)
        await swarm.launch(newcomer, join=("/of/nobody",))
        await swarm.until(lambda: bool(newcomer.addresses), "it listens", DEADLINE_S)
        assert [node.index for node in swarm.nodes] == [0, 7]
        (line,) = (swarm.home(7) / "events.jsonl").read_text().splitlines()
        assert json.loads(line)["at"] > began
