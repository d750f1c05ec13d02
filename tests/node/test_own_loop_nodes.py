"""Own loops as whole nodes: processes killed, started again, and of the wrong model."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import msgspec
import psutil  # type: ignore[import-untyped]
import pytest

from shoal.node.loops.loop_daemon import LEAVE_DEADLINE_S
from shoal.protocol.manifest import render_manifest, validate_manifest
from tests.node.lab import assert_exact, eventually
from tests.node.loop_lab import LoopSwarm

LOOP = """
import os, signal, sys, time
import torch
from shoal.node.own_loop import join, node_seed

signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored by who is started in a shell's background
folder, width, peers = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
model = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Tanh(), torch.nn.Linear(width, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
own = torch.Generator().manual_seed(node_seed(folder))
with join(model, optimizer, "swarm.toml", data_dir=folder, peers=peers) as swarm:
    if os.environ.get("LOOP_FORKS") and not os.fork():  # as a data loader's worker, which outlives it a while
        while not os.path.exists("over"):
            time.sleep(0.05)
        os._exit(0)
    while swarm.active:
        x = torch.randn(16, 8, generator=own)
        loss = torch.nn.functional.mse_loss(model(x)[:, 0], x.sum(1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        swarm.step(tokens=len(x), loss=loss)
"""


@pytest.mark.long
def test_a_loop_that_is_killed_is_waited_for_and_comes_back(tmp_path: Path) -> None:
    with LoopSwarm(tmp_path, nodes=2) as swarm:
        first, second = swarm.nodes
        swarm.begin(LOOP, "8", LOOP_FORKS="1")
        second.certified(2)
        assert second.process is not None
        killed = second.process.pid
        os.kill(killed, signal.SIGKILL)  # the loop alone; its daemon and its worker live on
        second.process.wait()
        gone = eventually(lambda: second.events("loop_detached"), "the daemon notices")[0]
        assert str(killed) in gone["cause"]
        alone = eventually(
            lambda: [e for e in first.events("certified") if (len(e["members"]), e["contributors"]) == (2, 1)],
            "rounds go on with the daemon as an observer",
        )[0]["round"]
        assert second.ask("status")["phase"] == "paused"
        eventually(
            lambda: [e for e in second.all_events() if e["event"] == "certified" and e["round"] > alone + 3],
            "the observer follows round after round",
        )

        second.begin(tmp_path / "loop.py", "8", SHOAL_HOLD="")
        back = eventually(
            lambda: [e for e in first.events("certified") if e["round"] > alone and e["contributors"] == 2],
            "it contributes again",
        )[0]
        (tmp_path / "over").touch()
        assert len([e for e in second.all_events() if e["event"] == "started"]) == 1  # the same daemon
        theirs = eventually(
            lambda: [e for e in second.all_events() if e["event"] == "certified" and e["round"] == back["round"]],
            "both have the certificate",
        )[0]
        assert theirs["digest"] == back["digest"]
        daemon = next(e["pid"] for e in second.all_events() if e["event"] == "started")
        first.ask("leave")
        second.ask("leave")
        for node in swarm.nodes:
            assert node.wait_exit() == 0, node.log
        eventually(lambda: not Path(f"/proc/{daemon}").exists(), "the daemon has left")
        assert_exact(swarm.report(back["round"]))


@pytest.mark.long
def test_a_loop_with_another_model_ends_before_its_first_round(tmp_path: Path) -> None:
    with LoopSwarm(tmp_path, nodes=2, founders=1) as swarm:
        first, second = swarm.nodes
        script = tmp_path / "loop.py"
        script.write_text(LOOP)
        first.begin(script, "8")
        first.certified(1)
        second.begin(script, "9", first.address)
        assert second.wait_exit() == 1
        words = f"parameter '0.bias' has shape (8,) at {first.peer_id} and (9,) here; build the same model"
        assert words in second.log.splitlines()[-1], second.log
        assert not second.events("round_started")
        later = first.events("certified")[-1]["round"] + 2
        assert first.certified(later)["contributors"] == 1
        first.ask("leave")
        assert first.wait_exit() == 0


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_a_loop_that_is_interrupted_leaves_no_daemon_behind(tmp_path: Path, number: signal.Signals) -> None:
    with LoopSwarm(tmp_path, nodes=1) as swarm:
        (node,) = swarm.nodes
        script = tmp_path / "loop.py"
        script.write_text(LOOP)
        node.begin(script, "8")
        node.certified(2)
        daemon = node.events("started")[0]["pid"]
        assert node.process is not None
        os.kill(node.process.pid, number)
        assert node.wait_exit() != 0
        if number == signal.SIGINT:
            assert "KeyboardInterrupt" in node.log
            assert not Path(f"/proc/{daemon}").exists()
            assert node.events("left")
        else:  # Python ends at once: the daemon waits for another loop, for a while
            assert node.all_events()[-1]["event"] != "left"
            node.ask("leave")
            eventually(lambda: not Path(f"/proc/{daemon}").exists(), "the daemon has left")


def test_a_loop_that_is_interrupted_while_its_node_starts_has_it_leave_at_once(tmp_path: Path) -> None:
    with LoopSwarm(tmp_path, nodes=1) as swarm:
        (node,) = swarm.nodes
        script = tmp_path / "loop.py"
        script.write_text(LOOP)
        node.begin(script, "8")
        eventually(lambda: "starting a node on" in node.log, "it starts a node")
        assert node.process is not None
        os.kill(node.process.pid, signal.SIGINT)
        began = time.monotonic()
        assert node.wait_exit() != 0
        assert time.monotonic() - began < LEAVE_DEADLINE_S / 2, "as long as importing takes, and not until a deadline"
        assert "does not leave in order" not in node.log
        left = [
            p.info
            for p in psutil.process_iter(["cmdline", "pid", "ppid"])
            if str(node.folder) in (p.info["cmdline"] or ())
        ]
        assert not left, (left, node.log)


SHAPED = LOOP.replace("width, peers", "shape, peers").replace("int(sys.argv[2])", "sys.argv[2]")
SHAPED = SHAPED.replace(
    "model = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Tanh(), torch.nn.Linear(width, 1))",
    "rows, columns = map(int, shape.split('x'))\nmodel = torch.nn.Linear(columns, rows, bias=False)",
)
SHAPED = SHAPED.replace("torch.randn(16, 8, generator=own)", "torch.randn(16, columns, generator=own)")


@pytest.mark.long
def test_gossip_mixes_no_model_with_another_of_as_many_values(tmp_path: Path) -> None:
    with LoopSwarm(tmp_path, nodes=2) as swarm:
        tables = msgspec.to_builtins(swarm.manifest)
        tables["sync"] = {"inner_steps": 10, "strategy": "gossip"}
        swarm.manifest = validate_manifest(tables, source="the test's manifest")
        swarm.manifest_path.write_text(render_manifest(swarm.manifest))
        first, second = swarm.nodes
        script = tmp_path / "loop.py"
        script.write_text(SHAPED)
        first.begin(script, "4x6")
        second.begin(script, "6x4", first.address)
        code = second.wait_exit()  # 1 before its first round; a loop that has begun is told, and ends by itself
        assert code == (0 if second.events("stepped") else 1), second.log
        words = f"parameter 'weight' has shape (4, 6) at {first.peer_id} and (6, 4) here; build the same model"
        assert words in second.log.splitlines()[-1], second.log
        first.wait("stepped")
        assert {event["partner"] for node in swarm.nodes for event in node.events("stepped")} == {None}
        first.ask("leave")
        assert first.wait_exit() == 0
