"""The page of real nodes: where it is, what it shows of the others, and what its buttons do."""

from __future__ import annotations

import json
import signal
import threading
import time
import urllib.error
import urllib.request
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import pytest

from shoal.node.dashboard.site import LOOK_PERIOD_S, TICK_S
from shoal.node.dashboard.token import TOKEN_NAME
from shoal.protocol.membership import detection_bound_s
from tests.node.lab import Swarm, eventually

ALLOWANCE_S = 5.0
"""For processes that wait for their turn on a busy machine."""


class Viewer:
    """A page that is open: when it heard of which peer's reach. Times are the wall clock's."""

    def __init__(self, url: str) -> None:
        self._heard: list[tuple[float, str, str]] = []
        self._feed: HTTPResponse = urllib.request.urlopen(f"{url}api/feed", timeout=60)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self._feed:
            name, _, data = line.partition(b": ")
            if name == b"data":
                now = time.time()
                for peer, fields in json.loads(data).get("peers", {}).items():
                    if fields is None or "reach" in fields:
                        self._heard.append((now, peer, "removed" if fields is None else fields["reach"]))

    def saw(self, peer: str, *reaches: str, after: float) -> float:
        """When it first heard, after that moment, that the peer is reached so."""
        found: list[float] = eventually(
            lambda: [at for at, who, reach in self._heard if who == peer and reach in reaches and at >= after],
            f"the page shows {peer} as {' or '.join(reaches)}",
        )
        return found[0]


def read(url: str, path: str) -> Any:
    with urllib.request.urlopen(f"{url}{path}", timeout=60) as answer:
        return json.loads(answer.read())


def order(url: str, op: str, token: str) -> None:
    headers = {"x-shoal-order": "1", "authorization": f"Bearer {token}"}
    asked = urllib.request.Request(f"{url}api/{op}", method="POST", headers=headers)
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
        line = first.ask("link")["link"]
        assert read(url, "api/joining")["line"] == f"shoal run '{line}'"
        settings = read(url, "api/settings")
        assert {"name": "--data-dir", "value": str(first.folder), "changed": True} in settings["node"]
        token = (first.folder / TOKEN_NAME).read_text().strip()
        assert first.ask("status")["dashboard_link"] == f"{url}#token={token}"
        with pytest.raises(urllib.error.HTTPError, match="401"):
            order(url, "pause", "another")
        assert not read(url, "api/snapshot")["node"]["paused"]
        order(url, "pause", token)
        eventually(lambda: read(url, "api/snapshot")["node"]["paused"], "the page shows that the node is paused")
        assert first.ask("status")["phase"] == "paused"
        with urllib.request.urlopen(f"{url}api/feed", timeout=60) as feed:
            assert feed.readline() == b"event: snapshot\n"
            order(url, "leave", token)
            assert first.wait_exit() == 0
        swarm.nodes[1].signal(signal.SIGKILL)


@pytest.mark.long
def test_how_soon_a_page_shows_who_died_and_who_came(tmp_path: Path) -> None:
    """Prints both (pytest -s). On a quiet machine either is below two seconds."""
    with Swarm(tmp_path, nodes=4, founders=3) as swarm:
        first, _, third, newcomer = swarm.nodes
        for index, node in enumerate(swarm.nodes[:3]):
            options = ("--dashboard", "127.0.0.1:0") if index == 0 else ()
            node.start(*options, join=[first] if index else [])
        first.wait("trainer_started")
        viewer = Viewer(first.ask("status")["dashboard"])
        for node in swarm.nodes[:3]:
            node.wait("certified")  # two of the founders may begin without the third
        started_at = time.time()
        newcomer.start(join=[first])
        linked_at = newcomer.wait("linked", peer=first.peer_id)["at"]
        joined_at = viewer.saw(newcomer.peer_id, "direct", after=started_at)
        viewer.saw(third.peer_id, "direct", after=0.0)
        killed_at = time.time()
        third.kill()
        gone_at = viewer.saw(third.peer_id, "gone", "removed", after=killed_at)
        joined_s, gone_s = joined_at - linked_at, gone_at - killed_at
        print(
            f"killed: on the page after {gone_s:.2f} s\njoined: on the page {joined_s:.2f} s after it was linked, "
            f"{joined_at - started_at:.2f} s after its start"
        )
        assert joined_s <= LOOK_PERIOD_S + TICK_S + ALLOWANCE_S
        assert gone_s <= detection_bound_s(3) + LOOK_PERIOD_S + TICK_S + ALLOWANCE_S


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
