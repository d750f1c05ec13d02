"""A testnet: a swarm of real node processes, run through a scenario, checked and reported.

They run on loopback, or in network namespaces if the scenario does something to links.

    run_testnet ── nursery ─┬─ NodeProcess.run     one per process, tails its event log into the journal
                            ├─ carry_out           one per fault, waits in the journal for its moment
                            ├─ _tell               the journal again, for whoever watches
                            └─ _until_finished     then everything else is cancelled
               └─ nodes asked to leave, ended, reaped ─ check ─ report.json, report.html, loss.png

Nothing waits for ever: the whole run has a deadline, and at the deadline, or when interrupted, the report is written
with what there is.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import msgspec
import trio

from shoal.collectives.gossip import GossipSettings
from shoal.node.keys import NODE_KEY_NAME
from shoal.node.options import Hold
from shoal.node.reporting.events import CaughtUp, Evaluated, Failed, Holding, Linked, RoundEnded
from shoal.protocol.departure import LEAVE_TIMEOUT_S
from shoal.protocol.errors import ConfigError, NetworkError
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.manifest import (
    Manifest,
    SwarmSection,
    validate_manifest,
)
from shoal.protocol.manifest_rollouts import default_tables
from shoal.protocol.manifest_workload import WorkloadSection
from shoal.testnet.check import Check, check_swarm
from shoal.testnet.check_gossip import check_gossip
from shoal.testnet.check_inputs import InputRules, errors_of_inputs
from shoal.testnet.faults import FaultRecord, carry_out, has_begun, holds_for
from shoal.testnet.fleet import Fleet
from shoal.testnet.interruption import until_interrupted
from shoal.testnet.links.namespaces import Network, network, why_no_routers, why_not
from shoal.testnet.nodes import NodeProcess, Runtime
from shoal.testnet.progress import FaultInjected, NodeEnded, OnProgress, ignore_progress, progress_in
from shoal.testnet.reports.page import render_page
from shoal.testnet.reports.plot import draw_loss
from shoal.testnet.reports.report import Report, make_report, to_json
from shoal.testnet.run_folder import replace_earlier_run, write_reports
from shoal.testnet.run_record import NodeFacts, Outcome, RunRecord, settle, tokens_by_round
from shoal.testnet.scenario import Scenario

CHUNK_VALUES: Final = 32_768
"""Small, so that each node owns several chunks even of a small model: faults then strike in the midst of a reduce."""
GRACE_S: Final = 20.0
REDUCE_DEADLINE_S: Final = 60.0
WARMUP_TOKENS: Final = 20_000

START_DEADLINE_S: Final = 90.0
TOGETHER: Final = Hold(round=1, phase="train")
JOINED_AT_ONCE: Final = 3
"""Nodes whose addresses a newcomer is given: a fault that strikes as it starts may take one of them."""
TOGETHER_DEADLINE_S: Final = 60.0
"""Founders that are not there by then are not waited for."""
ROUND_DEADLINE_S: Final = 60.0
AGENT_ROUND_DEADLINE_S: Final = 300.0
"""Where rollouts are shared: nothing is logged while an agent warms its policy up or samples, which on two busy cores
took over a minute."""
STEP_DEADLINE_S: Final = 1.0
FINISH_DEADLINE_S: Final = START_DEADLINE_S
"""After the last round: by then who lives takes part in that one or a later one, who was only just started too."""
LEAVE_DEADLINE_S: Final = LEAVE_TIMEOUT_S + 10.0
"""A node that is asked to leave may wait for others, and ends its trainer."""


async def run_testnet(
    scenario: Scenario, out: Path, on_progress: OnProgress = ignore_progress, *, runtime: Runtime | None = None
) -> Report:
    """Run `scenario` in the folder `out`, which afterwards holds the report and everything the nodes kept.

    An earlier testnet in `out` is replaced. SIGINT and SIGTERM end the run early.
    Raises ConfigError or StorageError before anything starts; KeyboardInterrupt, after the report is written, if a
    signal ended the run. Cancellation: all processes are ended and reaped; no report.
    """
    founders = [Identity.generate().peer_id for _ in range(scenario.nodes)]
    testnet_manifest(scenario, founders)  # an earlier run is not lost to a wrong setting
    with _network_for(scenario) as links:
        out = await trio.to_thread.run_sync(_prepare_folder, out)
        testnet = Testnet(scenario, out, on_progress, runtime or Runtime(), links)
        interrupted = await testnet.go()
    report = await trio.to_thread.run_sync(testnet.write_report)
    if interrupted:
        raise KeyboardInterrupt
    return report


def testnet_manifest(scenario: Scenario, founders: list[PeerId]) -> Manifest:
    """The manifest of a testnet's swarm. Raises ConfigError for a workload, strategy or codec that there is not."""
    shares = scenario.synchronisation.shares_rollouts
    defaults: dict[str, dict[str, Any]] = {"workload": {}, "inner": {}}
    if scenario.has_agents:
        defaults = default_tables(scenario.workload, averages=not shares)
    membership = {**({} if scenario.sites == "apart" else {"sites": scenario.sites}), **scenario.membership}
    options = {**defaults["workload"].get("options", {}), **scenario.options}
    tables = {
        "swarm": SwarmSection(name="testnet", founders=founders, admission="open"),
        "workload": WorkloadSection(name=scenario.workload, seed=scenario.seed, options=options),
        "sync": {
            "inner_steps": scenario.inner_steps,
            "strategy": scenario.strategy,
            **({} if shares else {"balance": False}),  # for runs that can be repeated
            **({} if scenario.codec is None else {"codec": scenario.codec}),
            **scenario.sync,
        },
        "inner": {
            "warmup_tokens": WARMUP_TOKENS,
            **defaults["inner"],
            **scenario.inner,
        },
        "round": {
            "chunk_values": CHUNK_VALUES,
            "grace_s": GRACE_S,
            "reduce_deadline_s": REDUCE_DEADLINE_S,
            **scenario.round,
        },
        **({"rollouts": {**defaults["rollouts"], **scenario.rollouts}} if scenario.has_agents else {}),
        **({"membership": membership} if membership else {}),
        **({"agreement": scenario.agreement} if scenario.agreement else {}),
    }
    return validate_manifest(msgspec.to_builtins(tables), source="the scenario")


@contextlib.contextmanager
def _network_for(scenario: Scenario) -> Iterator[Network | None]:
    """Network of the nodes: namespaces if the scenario needs them, None for loopback. Raises ConfigError."""
    if not scenario.needs_namespaces:
        yield None
        return
    reason = why_no_routers() if scenario.behind_routers else why_not()
    if reason is not None:
        raise ConfigError(f"the scenario does something to links, and {reason}")
    with network(scenario.places, scenario.uplinks, scenario.behind_routers) as links:
        yield links


def deadline_s(scenario: Scenario) -> float:
    """Seconds after which a run is over, whatever state it is in: many times what it should take."""
    pauses = sum(fault.duration_s or 0.0 for fault in scenario.faults)
    return START_DEADLINE_S + scenario.rounds * _round_deadline_s(scenario) + pauses


def silence_limit_s(scenario: Scenario) -> float:
    """Seconds without any event after which the run is over: more than the longest round or pause may take."""
    longest_pause = max((fault.duration_s or 0.0 for fault in scenario.faults), default=0.0)
    return _round_deadline_s(scenario) + longest_pause


def _round_deadline_s(scenario: Scenario) -> float:
    return (
        AGENT_ROUND_DEADLINE_S if scenario.has_agents else ROUND_DEADLINE_S
    ) + STEP_DEADLINE_S * scenario.inner_steps


def _prepare_folder(out: Path) -> Path:
    return replace_earlier_run(out, "testnet", folders=("nodes",), files=("report.json", "report.html", "loss.png"))


class Testnet(Fleet):
    """One run. `go` first, then `write_report`."""

    __test__ = False  # for pytest, which takes the name for its own

    def __init__(
        self, scenario: Scenario, out: Path, on_progress: OnProgress, runtime: Runtime, links: Network | None = None
    ) -> None:
        super().__init__(out, runtime=runtime, network=links, clocks=scenario.sets_clocks)
        self.scenario = scenario
        self._on_progress = on_progress
        self._records = [FaultRecord(fault=fault) for fault in scenario.faults]
        self._began_at = self._ended_at = time.time()
        self._trouble: str | None = None
        self._interrupted = self._ending = False
        self._facts: tuple[NodeFacts, ...] = ()
        self._crashes = Counter[int]()
        self._absent_at_end: frozenset[int] = frozenset()
        self._told: set[tuple[str, int]] = set()
        self._entries_told = 0
        self.sites = scenario.site_names
        if self.sites:
            self._make_keys()
        self.found(testnet_manifest(scenario, [self.add(index).peer_id for index in range(scenario.nodes)]))

    def _make_keys(self) -> None:
        """Give the founders keys in the order of their PeerIds: of a site the first is the delegate."""
        with TemporaryDirectory(dir=self.folder) as name:
            paths = [Path(name) / str(index) for index in range(self.scenario.nodes)]
            for index, path in enumerate(sorted(paths, key=lambda path: Identity.load_or_create(path).peer_id)):
                self.home(index).mkdir(mode=0o700, parents=True)
                path.rename(self.home(index) / NODE_KEY_NAME)

    @property
    def seed(self) -> int:
        """Seed of the scenario."""
        return self.scenario.seed

    def holds(self, index: int) -> tuple[Hold, ...]:
        """Points at which the node of that index is to hold, for the faults whose moment has not come."""
        return holds_for(self.scenario, index, self._records)

    # --- the run ---

    async def go(self) -> bool:
        """Go through the scenario and end all nodes; True if a signal ended it.

        Cancellation: all processes are ended and reaped.
        """
        limit_s = deadline_s(self.scenario)
        async with trio.open_nursery() as nursery:
            # The processes live out here, so that the scenario can be over while they are asked to leave.
            nursery.start_soon(self.run, self._tell_end)
            with trio.move_on_after(limit_s) as scope:
                await self._go_through()
            if scope.cancelled_caught:
                self._trouble = f"not finished after {limit_s:.0f} s"
            self._ended_at, self._ending = time.time(), True
            facts = [self._facts_of(node) for node in self.nodes]
            hung = await self._ask_all_to_leave()
            self._facts = tuple(replace(one, hung=one.index in hung) for one in facts)
            nursery.cancel_scope.cancel()
        self._tell_news()  # what the nodes logged last, such as the loss after the last round
        return self._interrupted

    async def _go_through(self) -> None:
        """Go through the scenario from start to finish, or until a signal comes or nothing happens any more."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._heed_signals, nursery.cancel_scope)
            nursery.start_soon(self._heed_silence, nursery.cancel_scope)
            nursery.start_soon(self._tell)
            for record in self._records:
                nursery.start_soon(carry_out, record, self, self._tell_fault)
            if await self._start_founders(nursery):
                await self._until_finished()
            nursery.cancel_scope.cancel()

    async def _heed_signals(self, scope: trio.CancelScope) -> None:
        await until_interrupted()
        self._interrupted, self._trouble = True, "interrupted"
        scope.cancel()

    async def _heed_silence(self, scope: trio.CancelScope) -> None:
        limit_s = silence_limit_s(self.scenario)
        seen = -1
        while seen < len(self.journal.entries):
            seen = len(self.journal.entries)
            await trio.sleep(limit_s)
        self._trouble = f"no node logged anything for {limit_s:.0f} s"
        scope.cancel()

    async def _start_founders(self, nursery: trio.Nursery) -> bool:
        """Start node 0, then the others, which join it; False if it does not come up."""
        first = self.node(0)
        rounds = None if self._all_stay() else self.scenario.rounds
        await self.launch(first, rounds=rounds, holds=self._first_holds(0))
        with trio.move_on_after(START_DEADLINE_S):
            await self.journal.until(lambda: bool(first.addresses) or not first.alive)
        if not first.addresses:
            self._trouble = f"node 0 did not come up; see {first.folder / 'log.txt'}"
            return False
        for index in range(1, self.scenario.nodes):
            node, holds = self.node(index), self._first_holds(index)
            await self.launch(node, join=first.addresses, rounds=rounds, holds=holds)
        await self._start_together(nursery)
        return True

    def _all_stay(self) -> bool:
        """True if nodes stay until asked to leave: some come, or come back, when others may be done.

        Agents, whose rounds are their own, come back to nothing; but who is cut off from all may not be able to leave.
        """
        kinds = {fault.kind for fault in self.scenario.faults}
        if self.scenario.synchronisation.shares_rollouts:
            return "partition" in kinds
        return not kinds <= {"kill", "leave"}

    async def _start_together(self, nursery: trio.Nursery) -> None:
        """Have the founders begin their first round when all are there: half of them may be a quorum, and not wait."""
        founders = [self.node(index) for index in range(self.scenario.nodes)]
        if self.scenario.synchronisation.shares_rollouts:
            return  # each goes through rounds of its own
        with trio.move_on_after(TOGETHER_DEADLINE_S):
            await self.journal.until(lambda: all(self._is_there(node) for node in founders))
        for node in founders:
            if TOGETHER not in self.holds(node.index):  # else the fault lets it go
                nursery.start_soon(self._let_go, node)

    def _is_there(self, node: NodeProcess) -> bool:
        """True if it waits for its first round, linked to all other founders, or a fault may keep it from that."""
        if not node.alive or node.stopped:
            return True
        peers = {event.peer for event in self.journal.of(Linked, node.index)}
        alone = any(fault.round == TOGETHER.round for fault in self.scenario.faults)
        return self._waits(node) and (alone or len(peers) >= self.scenario.nodes - 1)

    def _waits(self, node: NodeProcess) -> bool:
        held = {(event.round, event.phase) for event in self.journal.of(Holding, node.index)}
        return (TOGETHER.round, TOGETHER.phase) in held

    async def _let_go(self, node: NodeProcess) -> None:
        await self.journal.until(lambda: not node.alive or (self._waits(node) and not node.stopped))
        with contextlib.suppress(NetworkError):  # it has just ended
            await node.ask("release")

    async def join(self, index: int) -> None:
        """Start a node, new or known, that joins the first of the others it could reach: one may be killed just now.

        Raises NetworkError if there is none, or if the node runs already.
        """
        if self.has(index) and self.node(index).alive:
            raise NetworkError(f"node {index} is running already")
        others = (other for other in self.nodes if other.index != index)
        hosts = [other for other in others if other.addresses and not other.stopped][:JOINED_AT_ONCE]
        if not hosts:
            raise NetworkError("nobody is there to join")
        # How many rounds are left for it nobody knows: it stays until it is asked to leave.
        node = self.node(index) if self.has(index) else self.add(index)
        addresses = tuple(address for host in hosts for address in host.addresses)
        await self.launch(node, join=addresses, holds=self.holds(index))

    def _first_holds(self, index: int) -> tuple[Hold, ...]:
        """Points at which a founder holds: also the one where all begin together."""
        holds = self.holds(index)
        return holds if self.scenario.synchronisation.shares_rollouts else tuple(dict.fromkeys((TOGETHER, *holds)))

    def _tell_end(self, node: NodeProcess) -> None:
        code = node.lives[-1].exit_code
        if code and node.struck is None and not self._ending:
            self._crashes[node.index] += 1
            reasons = [event.message for event in self.journal.of(Failed, node.index)]
            message = reasons[-1] if reasons else f"see {node.folder / 'log.txt'}"
            self._on_progress(NodeEnded(index=node.index, exit_code=code, message=message))

    async def _until_finished(self) -> None:
        """Wait until the last round is certified, the faults begun are done, and all who can have followed."""
        await self.journal.until(lambda: self._last_round_certified() or self._nobody_left())
        if not self._last_round_certified():
            self._trouble = "all nodes ended before the last round was certified"
            return
        await self.journal.until(lambda: not self._busy())
        with trio.move_on_after(FINISH_DEADLINE_S):
            await self.journal.until(lambda: all(self._has_followed(node) for node in self.nodes))
        expected = (node for node in self.nodes if self._is_expected(node))
        self._absent_at_end = frozenset(node.index for node in expected if not self._is_in(node))
        if self.scenario.tokens is not None:
            last = self._last_round()
            with trio.move_on_after(FINISH_DEADLINE_S):
                await self.journal.until(lambda: self._is_evaluated(last))

    def _is_evaluated(self, round: int) -> bool:
        return any(event.round == round and event.loss is not None for event in self.journal.of(Evaluated))

    def _ended(self, index: int | None = None) -> list[RoundEnded]:
        """Ends of rounds of the swarm, at all nodes or at one."""
        return [event for event in self.journal.of(RoundEnded, index) if self.scenario.counts(event)]

    def _last_round(self) -> int:
        """The scenario's last round, or the one that certified the last of its tokens."""
        if self.scenario.tokens is None:
            return self.scenario.rounds
        return self.scenario.last_round(tokens_by_round(self._ended()))

    def _last_round_certified(self) -> bool:
        """True if somebody certified the last round; or where each counts its own, if all that live ended theirs."""
        if self.scenario.synchronisation.shares_rollouts:
            return all(not node.alive or node.stopped or self._is_in(node) for node in self.nodes)
        last = self._last_round()
        return any(event.round == last for event in self._ended())

    def _nobody_left(self) -> bool:
        return not any(node.alive for node in self.nodes) and not self._busy()

    def _busy(self) -> bool:
        """True if a fault has begun and is not done."""
        return any(not record.done and has_begun(record.fault, self) for record in self._records)

    def _has_followed(self, node: NodeProcess) -> bool:
        return not node.alive or not self._is_expected(node) or self._is_in(node)

    def _is_in(self, node: NodeProcess) -> bool:
        """True if it took part in the last round, or in one after it."""
        last = self._last_round()
        return any(event.round >= last for event in self._ended(node.index))

    def _is_expected(self, node: NodeProcess) -> bool:
        """True if no fault keeps it away in the end: it was not ended, and nothing that was done to it lasts."""
        return node.struck is None and not node.stopped and not node.throttled and node.index not in self._cut_off()

    def _cut_off(self) -> set[int]:
        """The nodes whose links a fault changed, not for a time alone, and that nobody healed."""
        done = [record for record in self._records if record.at is not None and record.error is None]
        healed_at = max((record.at or 0.0 for record in done if record.fault.kind == "heal"), default=0.0)
        return {
            index
            for record in done
            if record.fault.kind in ("partition", "slow") and record.fault.duration_s is None
            if (record.at or 0.0) > healed_at
            for index in record.fault.struck
        }

    def _finished(self, node: NodeProcess) -> bool:
        caught_up = self.journal.of(CaughtUp, node.index)
        last = self._last_round()
        certified = any(event.round == last for event in self._ended(node.index))
        return certified or any(event.round >= last for event in caught_up)

    async def _ask_all_to_leave(self) -> frozenset[int]:
        """Give every node that still runs the chance to leave in good order; who does not take it is killed.

        Returns those that did not take it though no fault kept them from it.
        """
        asked = [node for node in self.nodes if node.alive and not node.stopped]
        expected = [node for node in asked if self._is_expected(node)]

        async def ask(node: NodeProcess) -> None:
            with contextlib.suppress(NetworkError):  # it may have ended this moment, or hang: it is killed then
                await node.ask("leave")
                await node.lives[-1].ended.wait()

        with trio.move_on_after(LEAVE_DEADLINE_S):
            async with trio.open_nursery() as nursery:
                for node in asked:
                    nursery.start_soon(ask, node)
        return frozenset(node.index for node in expected if node.alive or node.lives[-1].exit_code != 0)

    # --- what is told ---

    def _tell_fault(self, record: FaultRecord) -> None:
        at = record.at if record.at is not None else time.time()
        self._on_progress(FaultInjected(fault=record.fault, at_s=at - self._began_at))

    async def _tell(self) -> None:
        while True:
            self._tell_news()
            read = self._entries_told
            await self.journal.until(lambda read=read: len(self.journal.entries) > read)  # type: ignore[misc]

    def _tell_news(self) -> None:
        """Turn what is new in the journal into progress: each round, each loss and each newcomer once."""
        entries = self.journal.entries[self._entries_told :]
        self._entries_told += len(entries)
        for entry in entries:
            for key, progress in progress_in(entry, self.node(entry.node).peer_id, self.scenario):
                if key not in self._told:
                    self._told.add(key)
                    self._on_progress(progress)

    # --- what is left ---

    def _facts_of(self, node: NodeProcess) -> NodeFacts:
        return NodeFacts(
            index=node.index,
            peer_id=node.peer_id,
            outcome=self._outcome(node),
            lives=tuple((life.started_at, life.ended_at or self._ended_at) for life in node.lives),
            crashes=self._crashes[node.index],
            absent_at_end=node.index in self._absent_at_end,
        )

    def _outcome(self, node: NodeProcess) -> Outcome:
        """State of the node at the end of the scenario; one that stopped after its last round was running."""
        if node.struck == "left":
            return "left"
        if node.alive:
            return "running"
        if node.struck == "killed":
            return "killed"
        if not node.lives or node.lives[-1].exit_code != 0:
            return "crashed"
        return "running" if self._finished(node) else "left"

    def _manifest(self) -> Manifest:
        founders = [node.peer_id for node in self.nodes if node.index < self.scenario.nodes]
        return testnet_manifest(self.scenario, founders)

    def write_report(self) -> Report:
        """Check the values, write the report's files, and return it. Blocks. Raises StorageError."""
        run_record = RunRecord(
            scenario=self.scenario,
            began_at=self._began_at,
            ended_at=self._ended_at,
            entries=tuple(self.journal.entries),
            nodes=self._facts,
            faults=tuple(self._records),
            trouble=self._trouble,
        )
        witnesses = settle(run_record, self.witnesses)
        strategy = self.scenario.synchronisation
        if strategy.certifies:
            check = check_swarm(witnesses, run_record.certified_rounds())
            rules = InputRules.of(self._manifest())
            inputs = () if rules is None else errors_of_inputs(witnesses, run_record.last_round, rules)
            check = replace(check, inputs=inputs)
        elif strategy.exchanges_models:
            check = check_gossip(witnesses, run_record.certified_rounds(), GossipSettings.of(self._manifest().sync))
        else:
            check = Check(rounds=())  # nothing is in common that could be computed again
        report = make_report(run_record, check)
        page, picture = render_page(report), draw_loss(report)
        write_reports(self.folder, {"loss.png": picture, "report.html": page, "report.json": to_json(report)})
        return report
