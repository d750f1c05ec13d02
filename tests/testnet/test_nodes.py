"""How real nodes are started."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest
import trio

from shoal.node.options import Hold
from shoal.node.reporting.events import Listening
from shoal.testnet import nodes
from shoal.testnet.faults import FaultRecord, holds_for
from shoal.testnet.journal import Journal
from shoal.testnet.links.namespaces import Place
from shoal.testnet.nodes import Launch, NodeProcess, Runtime, node_command
from shoal.testnet.parent_death import ended_with_parent
from shoal.testnet.scenario import DEMO

DEADLINE_S = 60.0


def test_node_command_names_every_setting_that_a_scenario_makes() -> None:
    launch = Launch(
        manifest=Path("/o/swarm.toml"),
        data_dir=Path("/o/nodes/2"),
        join=("/ip4/127.0.0.1/tcp/1/p2p/a", "/ip4/127.0.0.1/tcp/2/p2p/a"),
        rounds=8,
        holds=(Hold(round=3, phase="reduce", progress=0.4),),
    )
    command = " ".join(node_command(launch))
    assert command == (
        f"{sys.executable} -m shoal.cli.main run /o/swarm.toml --data-dir /o/nodes/2 "
        "--listen /ip4/127.0.0.1/tcp/0 --lane-listen 127.0.0.1:0 --dashboard off --no-mdns --threads 1 --test-mode "
        "--join /ip4/127.0.0.1/tcp/1/p2p/a --join /ip4/127.0.0.1/tcp/2/p2p/a --hold 3:reduce:0.4 --rounds 8"
    )
    assert Hold.parse(command.split("--hold ")[1].split()[0]) == launch.holds[0]


def test_node_command_allows_the_code_that_its_own_testnet_s_manifest_names() -> None:
    launch = Launch(manifest=Path("/o/swarm.toml"), data_dir=Path("/o/nodes/2"), workload="own.module:Class")
    assert "--test-mode --allow-workload own.module:Class" in " ".join(node_command(launch))
    launch = Launch(manifest=Path("/o/swarm.toml"), data_dir=Path("/o/nodes/2"), workload="text")
    assert "--allow-workload" not in node_command(launch)


def test_node_command_says_the_site_of_a_node_that_has_one() -> None:
    launch = Launch(manifest=Path("/o/swarm.toml"), data_dir=Path("/o/nodes/2"), site="site1")
    assert "--test-mode --site site1" in " ".join(node_command(launch))


def test_node_command_enters_the_place_where_it_runs() -> None:
    place = Place(
        host="198.18.0.3", control_port=4001, lane_port=4002, enter=("ip", "netns", "exec", "shoal-1-0-node2")
    )
    command = node_command(Launch(manifest=Path("/o/swarm.toml"), data_dir=Path("/o/nodes/2"), place=place))
    assert command[:5] == [*place.enter, sys.executable]
    assert "--listen /ip4/198.18.0.3/tcp/4001 --lane-listen 198.18.0.3:4002 " in " ".join(command)


def test_nodes_do_not_see_settings_meant_for_the_testnet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_ROUNDS", "3")
    monkeypatch.setenv("SHOALS", "kept")
    environment = nodes.environment()
    assert "SHOAL_ROUNDS" not in environment
    assert environment["SHOALS"] == "kept"


def test_holds_are_those_of_faults_whose_moment_is_to_come() -> None:
    records = [FaultRecord(fault=fault) for fault in DEMO.faults]
    assert holds_for(DEMO, 2, records) == (Hold(round=3, phase="reduce", progress=0.4),)
    assert holds_for(DEMO, 1, records) == ()
    records[0].at = 1.0
    assert holds_for(DEMO, 2, records) == ()


async def test_what_a_node_logs_before_its_start_has_returned_counts(tmp_path: Path) -> None:
    """The node is quick, or this process does not get a processor just then."""
    listening = """import json, signal, sys, time
with open(sys.argv[1], "a") as log:
    print(json.dumps({"at": time.time(), "event": "listening", "addresses": ["/fake"]}), file=log)
signal.pause()
"""
    log = tmp_path / "events.jsonl"

    def start(command: Sequence[str], output: Path) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(command, start_new_session=True)
        give_up_at = time.monotonic() + DEADLINE_S
        while not (log.exists() and log.read_text().endswith("\n")):
            assert time.monotonic() < give_up_at
            time.sleep(0.005)
        return process

    journal = Journal()
    runtime = Runtime(command=lambda launch: [sys.executable, "-S", "-c", listening, str(log)], start=start)
    node = NodeProcess(0, tmp_path, journal, runtime)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(node.run, Launch(manifest=tmp_path, data_dir=tmp_path))
        with trio.fail_after(DEADLINE_S):
            await journal.until(lambda: bool(journal.of(Listening, 0)))
        assert node.addresses == ("/fake",)
        nursery.cancel_scope.cancel()


TESTNET = """
import sys, threading
from pathlib import Path
import trio
from trio._core import _thread_cache
from shoal.testnet.journal import Journal
from shoal.testnet.nodes import Launch, NodeProcess, Runtime

NODE = "import os, time; print(os.getpid(), os.getsid(0), flush=True); time.sleep(600)"
folder = Path(sys.argv[1])
log = folder / "log.txt"

async def main():
    node = NodeProcess(0, folder, Journal(), Runtime(command=lambda launch: [sys.executable, "-c", NODE]))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(node.run, Launch(manifest=folder, data_dir=folder))
        while not log.exists() or not log.read_text().endswith("\\n"):
            await trio.sleep(0.01)
        _thread_cache.IDLE_TIMEOUT = 0.01
        await trio.to_thread.run_sync(int)  # by the thread that was idle, if there is one
        while threading.active_count() > 1:
            await trio.sleep(0.01)
        print("up", flush=True)

trio.run(main)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_node_outlives_the_threads_of_its_testnet_and_ends_when_that_is_killed(tmp_path: Path) -> None:
    watched = -1
    with subprocess.Popen([sys.executable, "-c", TESTNET, str(tmp_path)], stdout=subprocess.PIPE) as testnet:
        try:
            assert testnet.stdout is not None
            assert testnet.stdout.readline() == b"up\n"
            node, session = map(int, (tmp_path / "log.txt").read_text().split())
            assert node == session != testnet.pid
            watched = os.pidfd_open(node)
            assert not select.select([watched], [], [], 0.2)[0], "the node ended with a thread that was idle"
        finally:
            testnet.kill()
    try:
        assert select.select([watched], [], [], DEADLINE_S)[0], "the node lives on"
    finally:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(watched, signal.SIGKILL)
        os.close(watched)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_program_whose_parent_is_dead_already_never_begins(tmp_path: Path) -> None:
    before = ended_with_parent([sys.executable, "-c", f"open({str(tmp_path / 'began')!r}, 'w')"])
    assert before[4] == str(os.getpid())
    for parent, began in ((str(os.getpid() + 1), False), (str(os.getpid()), True)):
        subprocess.run([*before[:4], parent, *before[5:]], check=True, timeout=DEADLINE_S)
        assert (tmp_path / "began").exists() is began
