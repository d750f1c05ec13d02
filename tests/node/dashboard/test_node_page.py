"""The page of real nodes: where it is, what it shows of the others, and what its buttons do."""

from __future__ import annotations

import json
import signal
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.node.lab import Swarm, eventually


def read(url: str, path: str) -> Any:
    with urllib.request.urlopen(f"{url}{path}", timeout=60) as answer:
        return json.loads(answer.read())


def order(url: str, op: str) -> None:
    asked = urllib.request.Request(f"{url}api/{op}", method="POST", headers={"x-shoal-order": "1"})
    urllib.request.urlopen(asked, timeout=60).close()


@pytest.mark.long
def test_a_nodes_page_shows_its_swarm_a_death_and_obeys(tmp_path: Path) -> None:
    with Swarm(tmp_path, nodes=3) as swarm:
        first = swarm.nodes[0]
        swarm.start_together(node0=("--dashboard", "127.0.0.1:0"))
        url = first.ask("status")["dashboard"]
        assert url.startswith("http://127.0.0.1:")
        assert swarm.nodes[1].ask("status")["dashboard"] is None
        for node in swarm.nodes:
            node.certified(2)
        found = eventually(
            lambda: (page := read(url, "api/snapshot"))["node"]["round"] >= 2 and page, "the page shows round 2"
        )
        assert set(found["peers"]) == {node.peer_id for node in swarm.nodes}
        digest = next(known["digest"] for known in found["certificates"] if known["round"] == 2)
        assert digest == first.certified(2)["digest"]
        last = swarm.nodes[2]
        last.kill()
        eventually(
            lambda: read(url, "api/snapshot")["peers"].get(last.peer_id, {}).get("reach") in ("gone", None),
            "the page shows who is gone",
        )
        with urllib.request.urlopen(f"{url}metrics", timeout=60) as answer:
            assert b'shoal_faults_total{kind="died"} 1.0' in answer.read()
        order(url, "pause")
        eventually(lambda: read(url, "api/snapshot")["node"]["paused"], "the page shows that the node is paused")
        assert first.ask("status")["phase"] == "paused"
        with urllib.request.urlopen(f"{url}api/feed", timeout=60) as feed:
            assert feed.readline() == b"event: snapshot\n"
            order(url, "leave")
            assert first.wait_exit() == 0
        swarm.nodes[1].signal(signal.SIGKILL)


@pytest.mark.long
def test_a_port_that_is_taken_ends_the_start_in_one_line(tmp_path: Path) -> None:
    with Swarm(tmp_path, nodes=2) as swarm:
        first, second = swarm.nodes
        first.start("--dashboard", "127.0.0.1:0")
        first.wait("trainer_started")
        port = first.ask("status")["dashboard"].rstrip("/").rpartition(":")[2]
        second.start("--dashboard", f"127.0.0.1:{port}")
        assert second.wait_exit() == 2
        assert f"--dashboard: cannot listen on 127.0.0.1:{port}" in second.log
        assert "Traceback" not in second.log
