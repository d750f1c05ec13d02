"""Whole nodes as processes: killed, stopped, leaving, coming back, failing; with every certified value recomputed."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from shoal.node.remains import others_in
from shoal.protocol.messages import Plan
from shoal.protocol.wire import decode
from tests.node.lab import (
    ROUND_TOKENS,
    Node,
    Swarm,
    assert_exact,
    assert_one_line,
    assert_votes_once,
    eventually,
    shoal,
)
from tests.small_disk import small_disk


@pytest.mark.long
def test_without_a_quorum_a_node_says_so_trains_on_and_goes_on_when_it_is_back(tmp_path: Path) -> None:
    with Swarm(tmp_path, nodes=3) as swarm:
        survivor, returner, gone = swarm.nodes
        swarm.start_together(holds=["3:plan"])
        for node in swarm.nodes:
            node.hold("3:plan")
        returner.kill()
        gone.kill()
        survivor.release()
        eventually(lambda: survivor.ask("status")["phase"] == "no quorum", "it notices")
        status = survivor.ask("status")
        assert sorted(status["missing"]) == sorted((returner.peer_id, gone.peer_id))
        assert {m["peer_id"]: m["phase"] for m in status["members"]}[gone.peer_id] == "missing"
        told = shoal("status", "--data-dir", str(survivor.folder))
        assert told.returncode == 0
        for said in (returner.peer_id, gone.peer_id, "1 of 3 voters here", "start those that are missing again"):
            assert said in told.stdout
        eventually(lambda: "no quorum, training on locally" in survivor.log, "its terminal says so")
        assert not survivor.events("certified", round=3)

        returner.start(join=[survivor])
        assert set(survivor.certified(3)["members"]) == {survivor.peer_id, returner.peer_id}
        last = returner.certified(4)["round"]
        assert survivor.certified(last)["digest"] == returner.certified(last)["digest"]
        # The steps it made alone are in its first contribution after, and count towards it: there is one more.
        assert survivor.wait("contributed", round=4)["tokens"] > ROUND_TOKENS
        for node in (survivor, returner):
            node.kill()
            assert_votes_once(node)
        report = swarm.report(last)
        assert_exact(report)
        assert [(r.round, r.members) for r in report.rounds] == [(1, 3), (2, 3), (3, 2), (4, 2)]


PATIENT: dict[str, dict[str, object]] = {"round": {"chunk_values": 4096, "grace_s": 600.0, "reduce_deadline_s": 600.0}}
"""A swarm's settings: who waits for one that is gone waits for longer than a test does."""


STATUS_KEYS = """
peer_id swarm_id addresses reachability proven phase doing why_paused step steps fetched_bytes state_bytes counts_from
term round digest abstains turn_in_rounds outside site members peers voters faults missing long_missing revoked
trains_alone unready without stuck cut_off names rollbacks amendments settings bans alerts checks loss metric train_loss
train_metric tokens_per_s bytes node max_upload max_download blocked_fraction refused rollouts fetched samples dashboard
dashboard_link
"""


def test_a_swarm_of_one_grows_pauses_and_shrinks(tmp_path: Path) -> None:
    with Swarm(tmp_path, nodes=2, founders=1, sections=PATIENT) as swarm:
        founder, joiner = swarm.nodes
        founder.start()
        alone = founder.certified(2)
        assert (alone["members"], alone["contributors"]) == ([founder.peer_id], 1)

        joiner.start(join=[founder])
        first = joiner.wait("certified")
        assert joiner.events("round_started", round=first["round"])[0]["role"] == "joiner"
        assert (len(first["members"]), first["contributors"], first["counted"]) == (2, 1, False)
        assert founder.certified(first["round"])["counted"]
        both = joiner.certified(first["round"] + 1)
        assert (both["contributors"], both["counted"]) == (2, True)

        folder = ["--data-dir", str(joiner.folder)]
        assert shoal("pause", *folder).returncode == 0
        paused = eventually(lambda: _certified_with(founder, 1, after=first["round"] + 1), "a round without the paused")
        assert len(paused["members"]) == 2
        status = json.loads(shoal("status", "--json", *folder).stdout)
        assert list(status) == STATUS_KEYS.split()
        assert (status["phase"], status["peer_id"], status["missing"]) == ("paused", joiner.peer_id, [])
        assert status["tokens_per_s"] is None, "it makes no step"
        assert [m["peer_id"] for m in status["members"]] == sorted(node.peer_id for node in swarm.nodes)
        assert (status["peers"]["known"], status["peers"]["states"]) == (2, {"training": 1, "paused": 1})
        listed = [line.split()[:2] for line in shoal("status", "--peers", *folder).stdout.splitlines()]
        states = {founder.peer_id: "training", joiner.peer_id: "paused"}
        assert listed == sorted([peer, state] for peer, state in states.items())
        assert shoal("resume", *folder).returncode == 0
        resumed = eventually(lambda: _certified_with(founder, 2, after=paused["round"]), "a round with the resumed")

        told = shoal("limit", "--max-upload", "8Mbit", *folder).stdout
        assert told == f"the node on {joiner.folder} uploads 1.0 MB/s at most, and downloads without a cap\n"
        eventually(lambda: _planned_upload(founder, joiner) == 1_000_000, "others plan with it")
        assert shoal("limit", "--max-upload", "none", *folder).returncode == 0
        eventually(lambda: _planned_upload(founder, joiner) != 1_000_000, "others plan without it")
        assert _certified_with(founder, 2, after=resumed["round"]) is not None

        assert shoal("leave", *folder).returncode == 0
        assert joiner.wait_exit() == 0
        after = eventually(lambda: _certified_with(founder, 1, members=1, after=paused["round"]), "a round alone")
        founder.wait("died", peer=joiner.peer_id, left=True)
        gone = shoal("status", *folder)
        assert gone.returncode == 1
        assert_one_line(gone.stderr, "no node is running on", "start one with")

        joiner.start(join=[founder])
        back = joiner.wait("certified")
        assert len(back["members"]) == 2
        assert joiner.process is not None
        joiner.process.send_signal(signal.SIGINT)
        assert joiner.wait_exit() == 130
        after = eventually(lambda: _certified_with(founder, 1, members=1, after=back["round"]), "a round alone")
        eventually(
            lambda: len(founder.events("died", peer=joiner.peer_id, left=True)) == 2, "it has taken its leave again"
        )
        assert founder.process is not None
        founder.process.send_signal(signal.SIGINT)
        assert founder.wait_exit() == 130

        assert_exact(swarm.report(after["round"]))
        for node in swarm.nodes:
            assert_votes_once(node)
            assert others_in(node.folder) == [], "all that a node writes is known by name"
            measured = json.loads(shoal("evaluate", str(node.folder), "--json").stdout)
            told = next(e for e in node.all_events() if e["event"] == "evaluated" and e["round"] == measured["round"])
            assert (measured["loss"], measured["metric"]) == (told["loss"], told["metric"])
            assert (measured["data"], told["term"]) == (None, "0.0")
            assert measured["digest"] == next(
                e["digest"] for e in node.all_events() if e["event"] == "certified" and e["round"] == measured["round"]
            )


def _planned_upload(node: Node, other: Node) -> int | None:
    """The bytes per second with which the last plan that `node` kept has `other` upload."""
    kept = node.folder / "rounds" / f"0.0-{node.events('certified')[-1]['round']}" / "plan"
    plan = decode(kept.read_bytes(), Plan)
    return next((one.upload for one in plan.participants if one.peer == other.peer_id), None)


def _certified_with(node: Node, contributors: int, *, members: int = 2, after: int) -> dict[str, Any] | None:
    """The first round after `after` that was certified with so many contributors and members."""
    found = (
        e
        for e in node.events("certified", contributors=contributors)
        if e["round"] > after and len(e["members"]) == members
    )
    return next(found, None)


BRITTLE = """
from dataclasses import dataclass
from pathlib import Path

from shoal.node.workloads.regression import RegressionWorkload


@dataclass(frozen=True)
class Brittle(RegressionWorkload):
    data: str | None = None

    def loss(self, model, batch):
        if self.data and Path(self.data).read_text() == "break":
            raise ArithmeticError("the sky fell")
        return super().loss(model, batch)
"""


def fill(folder: Path) -> None:
    """Use up the last byte of the disk under `folder`."""
    with (folder / "ballast").open("ab", buffering=0) as file:
        for size in (1 << 16, 1 << 9, 1):
            with contextlib.suppress(OSError):  # no space left
                while True:
                    file.write(bytes(size))


def test_a_full_disk_and_a_workload_that_raises_end_their_nodes_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "brittle.py").write_text(BRITTLE)
    order = tmp_path / "order"
    order.write_text("train")
    disk = tmp_path / "disk"
    with (
        small_disk(disk, 16 << 20),
        Swarm(tmp_path, nodes=3, workload="brittle:Brittle", folders={2: disk}, sections=PATIENT) as swarm,
    ):
        steady, raising, full = swarm.nodes
        swarm.start_together(node1=["--data", str(order)])
        for node in swarm.nodes:
            node.certified(2)
            assert ("the disk may run full: 1" in node.log) == (node is full), "as soon as the model is known"
        assert full.log.index("may run full") < full.log.index("round 1 certified")
        fill(disk)
        assert full.wait_exit() == 1
        assert_one_line(full.log, f"the disk under {disk}", "is full; free some space or choose another --data-dir")
        fill(disk)  # what it had in nameless files is free again
        state = max(path.stat().st_size for path in (disk / "state").iterdir())
        os.truncate(disk / "ballast", (disk / "ballast").stat().st_size - state // 2)
        full.start(join=[steady])  # as a service is: with room for its logs alone
        assert full.wait_exit() == 1
        assert_one_line(full.log, f"the disk under {disk} has", "and the next state takes", "free some space")
        without = eventually(lambda: _certified_with(steady, 2, after=2), "a round without the node on the full disk")
        assert full.peer_id not in without["members"]

        order.write_text("break")
        assert raising.wait_exit() == 1
        for said in ("the workload failed: ArithmeticError: the sky fell", "Traceback", "brittle.py"):
            assert said in raising.log
        (failed,) = raising.events("failed")
        assert failed["message"].startswith("ArithmeticError: the sky fell")
        assert failed["message"].endswith("correct it, and start this node again: it goes on where it was")
        alone = eventually(
            lambda: _certified_with(steady, 1, members=1, after=int(without["round"])),
            "a round without the node whose workload raised",
        )
        steady.wait("died", peer=raising.peer_id, left=True)
        (disk / "ballast").unlink()
        full.start(join=[steady])
        assert full.wait("certified")["round"] >= int(alone["round"])
        steady.kill()
        full.kill()
        # What the full disk did not take cannot be checked, and nothing it applied was wrong.
        report = swarm.report(int(alone["round"]))
        assert (report.rounds_certified, report.forks, report.wrong_values) == (int(alone["round"]), 0, 0)
        assert [line for line in report.unverified if "node 2" not in line] == []
        for node in (steady, raising):
            assert_votes_once(node)


def test_a_running_node_is_not_disturbed_by_strangers_noise_or_clashes(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with (
        Swarm(tmp_path, nodes=1, forked=False) as swarm,
        Swarm(tmp_path / "other", nodes=1) as other_swarm,
    ):
        (node,), (stranger,) = swarm.nodes, other_swarm.nodes
        began_at = time.time()
        node.start()
        listening = node.wait("listening")
        assert node.process is not None
        cpu_s = node.cpu_s()
        assert listening["seconds"] < 3
        assert cpu_s < 4.5  # processor time, which still costs more where a neighbour is busy
        assert listening["at"] - began_at < 60
        node.certified(1)
        port, lane_port = node.address.split("/")[4], listening["lanes"][0].rpartition(":")[2]

        stranger.start(join=[node])
        eventually(lambda: "use the same swarm.toml" in stranger.log, "the reason of the refusal")
        for said in (f"refused: this node is in swarm {swarm.manifest.swarm_id.hex()[:16]}", other_id(other_swarm)):
            assert said in stranger.log
        stranger.end()

        own = str(tmp_path / "third")
        run = ["run", str(node.manifest), "--no-mdns", "--data-dir", own]
        clash = shoal(*run, "--listen", f"/ip4/127.0.0.1/tcp/{port}", "--lane-listen", "127.0.0.1:0")
        assert clash.returncode == 2
        assert_one_line(clash.stderr, port)
        clash = shoal(*run, "--listen", "/ip4/127.0.0.1/tcp/0", "--lane-listen", f"127.0.0.1:{lane_port}")
        assert clash.returncode == 2
        assert_one_line(clash.stderr, lane_port)
        clash = shoal("run", str(node.manifest), "--no-mdns", "--data-dir", str(node.folder))
        assert clash.returncode == 2
        assert_one_line(clash.stderr, "a node is already running on")

        before = node.events("certified")[-1]["round"]
        with contextlib.ExitStack() as held:
            for number in (port, lane_port):
                for noise in noises():
                    connection = held.enter_context(socket.create_connection(("127.0.0.1", int(number)), timeout=5))
                    with contextlib.suppress(OSError):  # hanging up on noise is in order
                        connection.sendall(noise)
            node.certified(before + 3)
        node.certified(before + 4)
        assert node.memory_bytes() < 300 << 20
        assert node.events("linked") == []
        assert "Traceback" not in node.log
        status = json.loads(shoal("status", "--json", "--data-dir", str(node.folder)).stdout)
        assert (status["peer_id"], status["missing"]) == (node.peer_id, [])
        node.kill()
        assert_exact(swarm.report(before + 4))


def other_id(swarm: Swarm) -> str:
    return f"yours is {swarm.manifest.swarm_id.hex()[:16]}"


def noises() -> list[bytes]:
    """What may arrive at an open port: nothing, garbage, other protocols, a hello cut short, great lengths."""
    rng = random.Random(1)
    return [
        b"",
        b"\n" * 3,
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x13/multistream/1.0.0\n\x0b/noise\n",
        b"\x13/multistream/1.0.0\n\x07/noise\n" + rng.randbytes(66),
        b"\xff" * 64,
        (2**31 - 1).to_bytes(4, "big") + rng.randbytes(1000),
        *(rng.randbytes(size) for size in (1, 16, 100, 5000, 70_000)),
    ]
