"""Real nodes on loopback for tests: started as a user starts them, watched through their event logs, always ended.

What a node imports is imported already, unless a test has it otherwise (see `forks`). A `Swarm` is a context manager:
whatever happens inside, no process it started is left behind. Its nodes run in test mode, so `report` can recompute
every certified round from what the nodes kept, as a testnet's report does. Waiting is for an event in a node's log,
under a deadline; a node that ends meanwhile fails the test at once, with its log.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import psutil  # type: ignore[import-untyped]

from shoal.node.control_client import request
from shoal.node.holds import HOLD_LIMIT_S
from shoal.node.options import Hold
from shoal.node.reporting.event_log import LogTail
from shoal.node.state.store import RecordLog, Store
from shoal.protocol.agreement import DurableRecord
from shoal.protocol.identity import Identity
from shoal.protocol.manifest import Manifest, render_manifest, validate_manifest
from shoal.protocol.swarm_link import PREFIX
from shoal.testnet.check import Witness, check_swarm
from shoal.testnet.journal import Entry
from shoal.testnet.parent_death import ended_with_parent
from shoal.testnet.reports.report import Report, make_report
from shoal.testnet.run_record import NodeFacts, RunRecord, settled_rounds
from shoal.testnet.scenario import Scenario
from tests.node.forks import Copy, run_copy, start_copy

POLL_S = 0.02
DEADLINE_S = 120.0
"""For any one event. Far more than it takes on an idle machine: it bounds a test that fails, not one that passes."""
CALL_DEADLINE_S = 60.0
LOG_SHOWN_CHARS = 6000

INNER_STEPS = 100
"""A few tenths of a second: rounds are short, and a node that comes back still has the time to catch one."""
BATCH = 32
ROUND_TOKENS = INNER_STEPS * BATCH

Event = dict[str, Any]


def shoal(*arguments: str, deadline_s: float = CALL_DEADLINE_S, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run one `shoal` command in a process of its own, to its end; `settings` are added to the environment."""
    return run_copy(command(*arguments), Path.cwd(), settings, deadline_s)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "shoal.cli.main", *arguments]


def environment() -> dict[str, str]:
    """Without settings of the user's that would reach into a test."""
    return {key: value for key, value in os.environ.items() if not key.startswith("SHOAL_")}


def eventually(condition: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S) -> Any:
    """Wait until `condition` is true, and return what it was; AssertionError naming `what` at the deadline."""
    ends_at = time.monotonic() + deadline_s
    while not (found := condition()):
        assert time.monotonic() < ends_at, f"{what}: not within {deadline_s:g} s"
        time.sleep(POLL_S)
    return found


def _allowing(manifest: Path) -> list[str]:
    """The option without which a node imports no code that the manifest of a test names."""
    if str(manifest).startswith(PREFIX) or not manifest.is_file():  # what a link names is not known yet
        return []
    name = tomllib.loads(manifest.read_text())["workload"]["name"]
    return ["--allow-workload", name] if ":" in name else []


class Node:
    """One data folder and, while it has one, its process: a copy of one that has imported, if it may be `forked`."""

    def __init__(self, folder: Path, manifest: Path, workplace: Path, *, forked: bool = True) -> None:
        self.folder = folder
        self.manifest = manifest
        self.peer_id = Identity.load_or_create(folder / "node.key").peer_id
        self.process: subprocess.Popen[bytes] | Copy | None = None
        self.forked = forked
        self.lives: list[list[float]] = []
        self._workplace = workplace
        self._log_began = 0
        self._events_began = 0

    # -- its process -----------------------------------------------------------------------------------------

    def start(self, *extra: str, join: Sequence[Node] = (), holds: Sequence[str] = ()) -> None:
        """Start a process; `extra` are further options of `shoal run`, `join` nodes that listen already."""
        assert not self.running
        self._events_began = len(self.all_events())
        arguments = ["run", str(self.manifest), "--data-dir", str(self.folder), "--no-mdns", "--threads", "1"]
        for option, default in (
            ("--listen", "/ip4/127.0.0.1/tcp/0"),
            ("--lane-listen", "127.0.0.1:0"),
            ("--dashboard", "off"),
        ):
            arguments += [] if option in extra else [option, default]
        arguments += ["--test-mode", *extra, *_allowing(self.manifest)]
        for other in join:
            arguments += ["--join", other.address]
        for hold in holds:
            arguments += ["--hold", hold]
        with self._log_path.open("ab") as log:
            self._log_began = log.tell()
            self.process = start_copy(command(*arguments), self._log_path, self._workplace) if self.forked else None
            self.process = self.process or subprocess.Popen(
                ended_with_parent(command(*arguments)),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment(),
                cwd=self._workplace,
                start_new_session=True,
            )
        self.lives.append([time.time(), float("inf")])

    @property
    def _log_path(self) -> Path:
        return self._workplace / f"{self.folder.name}.log"

    @property
    def running(self) -> bool:
        if self.process is None or self.process.poll() is not None:
            if self.lives:
                self.lives[-1][1] = min(self.lives[-1][1], time.time())
            return False
        return True

    @property
    def log(self) -> str:
        """What this life wrote to stdout and stderr."""
        return self._log_path.read_bytes()[self._log_began :].decode(errors="replace")

    def signal(self, number: signal.Signals, *, trainer: bool = True) -> None:
        """To the node and, unless it may go on, its trainer, as when their machine dies or hangs."""
        assert self.process is not None
        child = number == signal.SIGKILL or not isinstance(self.process, Copy)
        assert child or not trainer, "a copy's trainer is no child of it"
        daemon = psutil.Process(self.process.pid)
        for process in (daemon, *daemon.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and reap."""
        self.signal(signal.SIGKILL)
        self.wait_exit()

    def wait_exit(self, deadline_s: float = DEADLINE_S) -> int:
        """The exit code, once the process has ended."""
        assert self.process is not None
        try:
            code = self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.folder.name} does not end:\n{self.log[-LOG_SHOWN_CHARS:]}") from None
        assert not self.running
        return code

    def end(self) -> None:
        """Whatever state it is in, it is gone after this, and so is its trainer."""
        if self.process is None:
            return
        if self.process.poll() is None:
            self.kill()

    def memory_bytes(self) -> int:
        """Resident memory of the daemon, without its trainer."""
        assert self.process is not None
        return int(psutil.Process(self.process.pid).memory_info().rss)

    def cpu_s(self) -> float:
        """Processor time that the daemon has used so far, without its trainer."""
        assert self.process is not None
        times = psutil.Process(self.process.pid).cpu_times()
        return float(times.user + times.system)

    # -- what it tells ---------------------------------------------------------------------------------------

    def events(self, event: str | None = None, **fields: object) -> list[Event]:
        """The events of this life of that kind whose fields are these."""
        return [
            e
            for e in self.all_events()[self._events_began :]
            if event in (None, e["event"]) and all(e.get(key) == value for key, value in fields.items())
        ]

    def all_events(self) -> list[Event]:
        """Those of all its lives, as far as they are written out."""
        try:
            *lines, _ = (self.folder / "events.jsonl").read_bytes().split(b"\n")
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in lines]

    def wait(self, event: str, deadline_s: float = DEADLINE_S, held: Sequence[Node] = (), **fields: object) -> Event:
        """The first such event of this life, once it is there; `held` are nodes that hold until then."""
        ends_at = time.monotonic() + deadline_s
        renewed_at = time.monotonic()
        while not (found := self.events(event, **fields)):
            if not self.running or time.monotonic() > ends_at:
                told = "\n".join(json.dumps(e) for e in self.events()[-12:])
                raise AssertionError(
                    f"{self.folder.name}: no {event} {fields}; the last of what it told:\n{told}\n"
                    f"{self.log[-LOG_SHOWN_CHARS:]}"
                )
            if time.monotonic() > renewed_at + HOLD_LIMIT_S / 4:
                renewed_at = time.monotonic()
                for node in held:
                    node.ask("renew")
            time.sleep(POLL_S)
        return found[0]

    def certified(self, round: int, deadline_s: float = DEADLINE_S) -> Event:
        """Its `certified` event of a round, once it is there."""
        return self.wait("certified", deadline_s, round=round)

    def hold(self, text: str, deadline_s: float = DEADLINE_S, held: Sequence[Node] = ()) -> Event:
        """Its `holding` event of a hold, once it is there."""
        hold = Hold.parse(text)
        return self.wait("holding", deadline_s, held, round=hold.round, phase=hold.phase)

    @property
    def address(self) -> str:
        addresses: list[str] = self.wait("listening")["addresses"]
        return addresses[0]

    # -- what is asked of it ---------------------------------------------------------------------------------

    def ask(self, op: str) -> Any:
        """Through its control socket."""
        return request(self.folder, op)

    def release(self) -> None:
        """End its hold."""
        self.ask("release")

    def durable_records(self) -> list[DurableRecord]:
        """What it bound itself to in the round under way; only while it does not run."""
        with Store(self.folder) as store:
            return store.durable_records()


class Swarm:
    """Some nodes of one swarm, the first `founders` of them its founders. sections: more of its manifest.

    forked: whether they may be copies of a process that has imported everything; not where a test measures a node's
    start or stops its trainer.
    """

    def __init__(
        self,
        workplace: Path,
        *,
        nodes: int,
        founders: int | None = None,
        workload: str = "regression",
        options: dict[str, str | int | float | bool] | None = None,
        folders: dict[int, Path] | None = None,
        forked: bool = True,
        sections: dict[str, dict[str, object]] | None = None,
    ) -> None:
        self.workplace = workplace
        self.manifest_path = workplace / "swarm.toml"
        paths = [(folders or {}).get(index, workplace / f"node{index}") for index in range(nodes)]
        self.nodes = [Node(path, self.manifest_path, workplace, forked=forked) for path in paths]
        self.began_at = time.time()
        founding = [node.peer_id for node in self.nodes[: founders or nodes]]
        self.manifest = manifest_of(founding, workload, SMALL_MODEL if options is None else options, sections)
        self.manifest_path.write_text(render_manifest(self.manifest))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.ExitStack() as ends:  # all of them, even if one cannot be ended
            for node in self.nodes:
                ends.callback(node.end)

    def start_together(self, holds: Sequence[str] = (), **extra: Sequence[str]) -> None:
        """Start all nodes and let them begin round 1 at once, each linked with each. `extra`: by `node<index>`."""
        first = self.nodes[0]
        for index, node in enumerate(self.nodes):
            options = extra.get(f"node{index}", ())
            node.start(*options, join=[] if node is first else [first], holds=["1:train", *holds])
        for node in self.nodes:
            node.hold("1:train")
            eventually(
                lambda node=node: len({e["peer"] for e in node.events("linked")}) >= len(self.nodes) - 1,  # type: ignore[misc]
                f"{node.folder.name} linked with all others",
            )
        for node in self.nodes:
            node.release()

    def by_peer(self, peer_id: str) -> Node:
        return next(node for node in self.nodes if node.peer_id == peer_id)

    def report(self, rounds: int) -> Report:
        """The report over rounds 1 to `rounds`, every value of them recomputed."""
        for node in self.nodes:
            node.running  # noqa: B018  notes when it ended
        entries = [
            Entry(index, event)
            for index, node in enumerate(self.nodes)
            for event in LogTail(node.folder / "events.jsonl").read()
        ]
        run_record = RunRecord(
            scenario=Scenario(nodes=len(self.nodes), rounds=rounds, workload="regression"),
            began_at=self.began_at,
            ended_at=time.time(),
            entries=tuple(sorted(entries, key=lambda entry: entry.event.at)),
            nodes=tuple(
                NodeFacts(
                    index=index,
                    peer_id=node.peer_id,
                    outcome="running" if node.running else "killed",
                    lives=tuple((start, min(end, time.time())) for start, end in node.lives),
                )
                for index, node in enumerate(self.nodes)
            ),
            faults=(),
        )
        witnesses = [
            Witness(index=i, peer_id=node.peer_id, folder=node.folder, settled=settled_rounds(run_record, i))
            for i, node in enumerate(self.nodes)
        ]
        return make_report(run_record, check_swarm(witnesses, run_record.certified_rounds()))


SMALL_MODEL: dict[str, str | int | float | bool] = {"inputs": 256, "outputs": 128}
"""32,896 parameters: nine chunks of the smallest grid, so that each of three nodes owns three."""


def manifest_of(
    founders: Sequence[str],
    workload: str = "regression",
    options: dict[str, str | int | float | bool] | None = None,
    sections: dict[str, dict[str, object]] | None = None,
) -> Manifest:
    """Short rounds on small chunks, patient with a slow machine and quick with a dead peer."""
    tables: dict[str, object] = {
        "swarm": {"name": "test", "founders": list(founders), "admission": "open"},
        "workload": {"name": workload, "options": options or {}},
        "sync": {"inner_steps": INNER_STEPS, "balance": False},
        "round": {"chunk_values": 4096, "grace_s": 20.0, "reduce_deadline_s": 60.0},
        **(sections or {}),
    }
    return validate_manifest(tables, source="the test's manifest")


def assert_exact(report: Report) -> None:
    """All rounds certified, one state each, every value of it recomputed and equal to the bit."""
    found = msgspec.structs.asdict(report)
    assert report.rounds_certified == report.scenario.rounds, found
    assert (report.forks, report.wrong_values, report.digests_equal, report.unverified) == (0, 0, True, ()), found


def assert_votes_once(node: Node) -> None:
    """Over all its lives, the node voted and proposed at most once in a view, and never below what it had promised."""
    said: set[tuple[str, str, int, int]] = set()
    promised: dict[tuple[str, int], int] = {}
    for event in node.all_events():
        if event["event"] == "view_changed":
            decision = event["term"], event["round"]
            promised[decision] = max(promised.get(decision, 0), event["view"])
        elif event["event"] in ("voted", "proposed"):
            decision = event["term"], event["round"]
            key = (event["event"], *decision, event["view"])
            assert key not in said, (node.folder, key)
            assert event["view"] >= promised.get(decision, 0), (node.folder, key)
            said.add(key)
    assert any(kind == "voted" for kind, *_ in said), node.folder


def assert_one_line(text: str, *parts: str) -> None:
    """An error as users see it: one line of Shoal's own that names these."""
    lines = [line for line in text.splitlines() if line.startswith("shoal: ")]
    assert len(lines) == 1, text
    for part in parts:
        assert part in lines[0], text
    assert "Traceback" not in text, text


def lose_newest_certificate(node: Node) -> None:
    """As if the power had gone before it was on this disk; what was signed in its round was there before."""
    log = RecordLog(node.folder / "chain.log")
    log.rewrite(log.recovered[:-1])
    log.close()
