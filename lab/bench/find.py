"""How long a newcomer takes to find and join a swarm, by its link alone, and where that time goes.

Real nodes on loopback train together; then `shoal link` is asked at one, and `shoal run LINK` with an empty data folder
is timed, some times over, one newcomer after the other. The members run at the lowest priority, so that they take less
from the newcomer than the machines stand for that they would have of their own.

    started       imports, the link read, the manifest fetched and checked, the key made
    listening     host, lanes and control socket are up
    linked        the first member admitted it
    linked_all    so did all others
    contributed   it trained in a round
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import msgspec

from shoal.lab.targets import Row, Target
from shoal.node.reporting.event_files import LOG_NAME, lines_of
from shoal.protocol.errors import NetworkError
from shoal.protocol.identity import Identity
from shoal.protocol.manifest import render_manifest, validate_manifest
from shoal.testnet.tether import tethered

DEADLINE_S = 180.0
POLL_S = 0.01
MEMBERS_NICENESS = 19
STAGES = ("started", "listening", "linked", "linked_all", "contributed")
LINKED = Target(name="a newcomer is linked after", unit="s", most=5.5)
LINKED_ALL = Target(name="a newcomer is linked with all after", unit="s", most=7.6)
"""Twice what eight nodes took on two cores: beyond that something waits that should not."""


class FindSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds from the start of the command: the medians, and those of each newcomer by stage."""

    nodes: int
    linked_s: float
    linked_all_s: float
    contributed_s: float
    newcomers: tuple[dict[str, float], ...]

    @property
    def rows(self) -> tuple[Row, ...]:
        """What was measured beside its targets."""
        return LINKED.row(self.linked_s), LINKED_ALL.row(self.linked_all_s)


class _Event(msgspec.Struct, frozen=True):
    at: float
    event: str
    peer: str = ""


class _Node:
    """One process of `shoal run`, in a folder of its own."""

    def __init__(self, folder: Path, what: str, *, niceness: int) -> None:
        self.folder = folder
        self._log: IO[bytes] = (folder.parent / f"{folder.name}.log").open("wb")
        self.began_at = time.time()
        self._process = subprocess.Popen(
            tethered(
                [
                    *("nice", "-n", str(niceness), sys.executable, "-m", "shoal.cli.main", "run", what),
                    *("--data-dir", str(folder), "--no-mdns", "--dashboard", "off", "--threads", "1"),
                    *("--listen", "/ip4/127.0.0.1/tcp/0", "--lane-listen", "127.0.0.1:0"),
                ]
            ),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def events(self) -> list[_Event]:
        """Those whose lines are whole."""
        return [msgspec.json.decode(line, type=_Event) for line in lines_of(self.folder / LOG_NAME)]

    def wait(self, kind: str, *, peers: int = 1) -> float:
        """When the first such event was, or that with which so many peers had it. Raises NetworkError."""
        ends_at = time.monotonic() + DEADLINE_S
        while True:
            seen: dict[str, float] = {}
            for event in self.events():
                if event.event == kind:
                    seen.setdefault(event.peer, event.at)
            if len(seen) >= peers:
                return sorted(seen.values())[peers - 1]
            if self._process.poll() is not None or time.monotonic() > ends_at:
                words = Path(self._log.name).read_text(errors="replace")[-500:]
                raise NetworkError(f"a node does not come to {kind!r}: …{' '.join(words.split())}")
            time.sleep(POLL_S)

    def end(self) -> None:
        """Kill it; its trainer ends when its socket does."""
        self._process.kill()
        self._process.wait()
        self._log.close()


@contextmanager
def _swarm(folder: Path, nodes: int) -> Iterator[list[_Node]]:
    keys = [Identity.load_or_create(folder / f"member{n}" / "node.key") for n in range(nodes)]
    tables = {
        "swarm": {"name": "bench", "founders": [key.peer_id for key in keys], "admission": "open"},
        "workload": {"name": "regression"},
        "sync": {"inner_steps": 100},
    }
    manifest = folder / "swarm.toml"
    manifest.write_text(render_manifest(validate_manifest(tables, source="the benchmark")))
    members: list[_Node] = []
    try:
        members.append(_Node(folder / "member0", str(manifest), niceness=MEMBERS_NICENESS))
        members[0].wait("listening")
        link = _link_of(members[0])
        members += [_Node(folder / f"member{n}", link, niceness=MEMBERS_NICENESS) for n in range(1, nodes)]
        for member in members:
            if nodes > 1:
                member.wait("linked", peers=nodes - 1)
            member.wait("contributed")
        yield members
    finally:
        for member in members:
            member.end()


def _link_of(node: _Node) -> str:
    command = [sys.executable, "-m", "shoal.cli.main", "link", "--data-dir", str(node.folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    if done.returncode:
        raise NetworkError(f"no link: {' '.join(done.stderr.split())}")
    return done.stdout.strip()


def measure_find(*, nodes: int, repetitions: int) -> FindSpeed:
    """Let so many newcomers in a row join a swarm of so many nodes. Raises NetworkError if a node fails."""
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as scratch:
        folder = Path(scratch)
        with _swarm(folder, nodes) as members:
            link = _link_of(members[-1])
            newcomers = tuple(_newcomer(folder / f"newcomer{n}", link, nodes) for n in range(repetitions))
    median = {stage: statistics.median(times[stage] for times in newcomers) for stage in STAGES}
    return FindSpeed(
        nodes=nodes,
        linked_s=round(median["linked"], 3),
        linked_all_s=round(median["linked_all"], 3),
        contributed_s=round(median["contributed"], 3),
        newcomers=newcomers,
    )


def _newcomer(folder: Path, link: str, nodes: int) -> dict[str, float]:
    node = _Node(folder, link, niceness=0)
    try:
        at = {
            "contributed": node.wait("contributed"),
            "started": node.wait("started"),
            "listening": node.wait("listening"),
            "linked": node.wait("linked"),
            "linked_all": node.wait("linked", peers=nodes),
        }
        return {stage: round(at[stage] - node.began_at, 3) for stage in STAGES}
    finally:
        node.end()
