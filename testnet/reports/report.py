"""Report of a testnet, `report.json`: what was done, what came of it, and whether it was right.

`ok` is the exit rule: every fault of the scenario really happened, nothing was left unverified, and none of `failures`
is there: all rounds certified, no forks, no wrong values, equal digests, nobody that no fault struck missed a round,
and who came, or came back, took part again; no node ended by itself, hung or gave the alarm; and the run was not cut
short.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Final

import msgspec

from shoal.node.reporting.events import (
    AgentStarted,
    CaughtUp,
    Contributed,
    Evaluated,
    HeldOutReward,
    RolledBack,
    Rollouts,
    RoundEnded,
    Started,
)
from shoal.testnet.check import Check
from shoal.testnet.delays import round_durations, undisturbed_median
from shoal.testnet.faults import FaultRecord
from shoal.testnet.run_record import NodeFacts, Outcome, RunRecord, alarms, tokens_by_round
from shoal.testnet.scenario import Scenario

ROUNDS_NAMED: Final = 8
"""Rounds that a line names one by one."""


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """A round as one node saw it, in seconds since the testnet began. end_s: None if the node never certified it."""

    round: int
    start_s: float
    end_s: float | None


class NodeReport(msgspec.Struct, frozen=True, kw_only=True):
    """One node. certified: how many rounds it did, as `rounds` says too. contributed: to how many of those certified.

    digests: by round. lives: (start, end) of its processes, in seconds. missed: rounds that others certified without it
    though no fault had struck it. crashes, absent_at_end, hung: see `NodeFacts`. blocked_fraction: the share of its
    time between contributions in which it stood still and waited for a round.
    """

    index: int
    peer_id: str
    outcome: Outcome
    rounds: int
    certified: int
    contributed: int
    digests: dict[str, str]
    missed: tuple[int, ...] = ()
    crashes: int = 0
    absent_at_end: bool = False
    hung: bool = False
    lives: tuple[tuple[float, float], ...] = ()
    spans: tuple[Span, ...] = ()
    blocked_fraction: float | None = None


class LossReport(msgspec.Struct, frozen=True, kw_only=True):
    """Held-out loss: before round 1, at the end, and after each certified round (None where nobody evaluated)."""

    metric: str
    first: float | None
    last: float | None
    by_round: tuple[float | None, ...]


class HeldOutReport(msgspec.Struct, frozen=True, kw_only=True):
    """The greedy reward on held-out tasks after `round` rounds: the mean over the nodes that were evaluated then."""

    round: int
    reward: float
    nodes: int


class FaultReport(msgspec.Struct, frozen=True, kw_only=True):
    """One fault. at_s: None if its moment never came. delay_s: against the median undisturbed round.

    node: None for what strikes links between several, of which `groups` names those of a partition. unmet: what should
    have come of it and did not, once it was done.
    """

    kind: str
    node: int | None
    round: int
    phase: str | None
    at_s: float | None
    delay_s: float | None
    error: str | None = None
    unmet: str | None = None
    groups: tuple[tuple[int, ...], ...] = ()


class RoundReport(msgspec.Struct, frozen=True, kw_only=True):
    """One certified round. members: of the electorate after it. reduce_s, total_s: medians over the nodes."""

    round: int
    members: int
    contributors: int
    coverage: float
    tokens: int
    reduce_s: float
    total_s: float


class BytesReport(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that all nodes sent, and that synchronous training would have: a ring all-reduce in fp32 at every step."""

    lanes_sent: int
    control_sent: int
    fp32_allreduce_every_step: int


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The whole report. unverified: what the check could not verify. trouble: why the run ended before its time.
    alarms: what nodes logged that never happens among nodes that are sound.

    unaffected_absent: nodes that no fault struck, and that took part in fewer rounds than they could. evicted_alive:
    how often a plan that had been begun went on without one that no fault had struck.

    Under the strategy gossip there is no common state: a round is certified where somebody made its step, there are no
    digests, and `digests_equal` is None. Under rollouts neither: a round is there where somebody made one of that
    number, coverage is the share of others' groups in what was trained on, and the loss is what is missing of reward 1.
    """

    scenario: Scenario
    wall_s: float
    rounds_certified: int
    forks: int
    wrong_values: int
    digests_equal: bool | None
    nodes: tuple[NodeReport, ...]
    loss: LossReport
    held_out: tuple[HeldOutReport, ...] = ()
    faults: tuple[FaultReport, ...]
    rounds: tuple[RoundReport, ...]
    bytes: BytesReport
    unaffected_absent: tuple[int, ...] = ()
    evicted_alive: int = 0
    unverified: tuple[str, ...] = ()
    alarms: tuple[str, ...] = ()
    trouble: str | None = None

    @property
    def wanted_rounds(self) -> int:
        """Number of rounds that were to be certified, for the tokens that were wanted if any were."""
        return self.scenario.last_round({entry.round: entry.tokens for entry in self.rounds})


def ok(report: Report) -> bool:
    """True if the testnet did what it should; its exit code is 0 only then."""
    done = all(fault.at_s is not None and fault.error is None for fault in report.faults)
    return done and not failures(report) and not report.unverified


def failures(report: Report) -> list[str]:
    """Every reason for which the run is not as it should be, in a line; what is unverified, and faults, apart."""
    reasons = [] if report.trouble is None else [report.trouble]
    if report.rounds_certified < report.wanted_rounds:
        reasons.append(_too_little(report))
    if report.forks:
        reasons.append(f"{report.forks} round{'s have' if report.forks > 1 else ' has'} two different certificates")
    if report.wrong_values:
        reasons.append(f"{report.wrong_values} applied values are not the mean of what was contributed")
    if report.digests_equal is False:
        reasons.append("nodes do not hold the same state")
    if len(report.nodes) > 1 and report.rounds and not any(entry.coverage for entry in report.rounds):
        reasons.append("in no round did anything that one node made reach another")
    unmet = [fault.unmet for fault in report.faults if fault.unmet is not None]
    return [*reasons, *_absences(report), *unmet, *_ends(report), *report.alarms]


def _too_little(report: Report) -> str:
    done = "done" if report.digests_equal is None else "certified"
    if report.scenario.tokens is not None:
        tokens = sum(entry.tokens for entry in report.rounds)
        return f"{tokens:,} of {report.scenario.tokens:,} tokens were {done}, in {report.rounds_certified} rounds"
    return f"{report.wanted_rounds - report.rounds_certified} rounds were not {done}"


def _absences(report: Report) -> list[str]:
    """Tell who missed rounds although no fault struck it, and who did not come back, each in a line."""
    nodes = {node.index: node for node in report.nodes}
    return [
        *(f"no fault struck node {index}, and it {_absence(nodes[index])}" for index in report.unaffected_absent),
        *(
            f"node {node.index} took part neither in the last round nor in one after it"
            for node in report.nodes
            if node.absent_at_end and node.index not in report.unaffected_absent
        ),
    ]


def _ends(report: Report) -> list[str]:
    """Tell who ended by itself, and who did not end when it was to, each in a line."""
    ended = [(node.index, "ended by itself") for node in report.nodes if node.crashes]
    hung = [(node.index, "did not end in good order when it was asked to leave") for node in report.nodes if node.hung]
    return [f"node {index} {how}; see nodes/{index}/log.txt" for index, how in (*ended, *hung)]


def _absence(node: NodeReport) -> str:
    if not node.certified:
        return "took part in no round"
    return f"{'ended by itself and ' * (node.outcome == 'crashed')}missed {rounds_word(node.missed)}"


def rounds_word(rounds: Sequence[int]) -> str:
    """Some rounds by their numbers, or how many they are where a line has no room for all."""
    if len(rounds) > ROUNDS_NAMED:
        return f"{len(rounds)} rounds, from {rounds[0]} on"
    return f"round{'s' * (len(rounds) > 1)} {', '.join(map(str, rounds))}"


def digests_word(report: Report, differ: str) -> str:
    """`equal`, `differ` as it is given, or `none` where there is no common state."""
    return {True: "equal", False: differ, None: "none"}[report.digests_equal]


def to_json(report: Report) -> bytes:
    """The report as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(report), indent=2)


def make_report(run_record: RunRecord, check: Check) -> Report:
    """The report of a testnet that is over."""
    certified, strategy = run_record.certified(), run_record.scenario.synchronisation
    missed = run_record.missed()
    return Report(
        scenario=run_record.scenario,
        wall_s=round(run_record.ended_at - run_record.began_at, 3),
        rounds_certified=len({event.round for _, event in certified}),
        forks=count_forks(run_record.decided()),
        wrong_values=check.wrong_values,
        digests_equal=_digests_equal(certified) if strategy.certifies else None,
        nodes=tuple(_node_report(node, run_record, missed.get(node.index, ())) for node in run_record.nodes),
        loss=_missing_reward(run_record) if strategy.shares_rollouts else _loss(run_record),
        held_out=_held_out(run_record),
        faults=_fault_reports(run_record),
        rounds=_shared_rounds(certified) if strategy.shares_rollouts else _round_reports(certified, check),
        bytes=_bytes(run_record, check),
        unaffected_absent=run_record.unaffected_absent(),
        evicted_alive=run_record.evicted_alive(),
        unverified=check.errors + _two_values(certified),
        alarms=tuple(alarms(run_record.entries, {node.index for node in run_record.unharmed()})),
        trouble=run_record.trouble,
    )


def count_forks(decided: Sequence[tuple[int, RoundEnded | RolledBack]]) -> int:
    """(term, round) pairs with two different certified digests, or with one and a rollback."""
    return sum(len(digests) > 1 for digests in _by_round(decided, "digest").values())


def _by_round(decided: Sequence[tuple[int, RoundEnded | RolledBack]], field: str) -> dict[tuple[str, int], set[str]]:
    found: dict[tuple[str, int], set[str]] = defaultdict(set)
    for _, event in decided:
        kind = "back " if isinstance(event, RolledBack) else ""
        found[event.term, event.round].add(kind + getattr(event, field))
    return found


def _two_values(certified: Sequence[tuple[int, RoundEnded]]) -> tuple[str, ...]:
    """Rounds in which nodes agree on the state and not on the certified value: no fork of the state, but wrong."""
    pairs = _by_round(certified, "value").items()
    return tuple(f"round {number}: {len(values)} certified values" for (_, number), values in pairs if len(values) > 1)


def _digests_equal(certified: Sequence[tuple[int, RoundEnded]]) -> bool:
    """True if all nodes that certified a round hold the same state after it; False if nothing was certified."""
    return bool(certified) and count_forks(certified) == 0


def _node_report(node: NodeFacts, run_record: RunRecord, missed: tuple[int, ...]) -> NodeReport:
    events = [event for index, event in run_record.certified() if index == node.index]
    rounds = len({event.round for event in events})
    return NodeReport(
        index=node.index,
        peer_id=node.peer_id,
        outcome=node.outcome,
        rounds=rounds,
        certified=rounds,
        contributed=len(_contributed(node.index, run_record)),
        missed=missed,
        crashes=node.crashes,
        absent_at_end=node.absent_at_end,
        hung=node.hung,
        digests={str(event.round): event.digest for event in events if event.digest},
        lives=tuple((_since(run_record, start), _since(run_record, end)) for start, end in node.lives),
        spans=_spans(node.index, run_record),
        blocked_fraction=_blocked_fraction(node.index, run_record),
    )


def _contributed(index: int, run_record: RunRecord) -> frozenset[int]:
    """The certified rounds to which a node announced a contribution; where rollouts are shared those of its own."""
    everyones = {number for _, number in run_record.certified_rounds()}
    if run_record.scenario.synchronisation.shares_rollouts:
        made = {event.round for node, event in run_record.certified() if node == index}
    else:
        made = {
            entry.event.round
            for entry in run_record.entries
            if entry.node == index and isinstance(entry.event, Contributed)
        }
    return frozenset(made & everyones)


def _blocked_fraction(index: int, run_record: RunRecord) -> float | None:
    made = [entry.event for entry in run_record.entries if entry.node == index and isinstance(entry.event, Contributed)]
    wall_s = sum(event.wall_s for event in made)
    return round(sum(event.blocked_s for event in made) / wall_s, 4) if wall_s else None


def _since(run_record: RunRecord, at: float) -> float:
    return round(at - run_record.began_at, 3)


def _spans(index: int, run_record: RunRecord) -> tuple[Span, ...]:
    ends = {event.round: event.at for node, event in run_record.certified() if node == index}
    ends |= {
        entry.event.round: ends.get(entry.event.round, entry.event.at)
        for entry in run_record.entries
        if entry.node == index and isinstance(entry.event, CaughtUp)
    }
    starts: dict[int, float] = {}
    for entry in run_record.entries:
        begun = run_record.begun(entry.event)
        if entry.node == index and begun is not None and begun <= run_record.scenario.rounds:
            starts.setdefault(begun, entry.event.at)
    return tuple(
        Span(
            round=number,
            start_s=_since(run_record, start),
            end_s=_since(run_record, ends[number]) if number in ends else None,
        )
        for number, start in sorted(starts.items())
    )


def _loss(run_record: RunRecord) -> LossReport:
    """Held-out loss, before round 1, at the end and by round: as all members hold one state, any evaluation will do.

    Where nothing is certified each holds its own: a round's loss is the mean of theirs.
    """
    found: dict[int, float] = {}
    counts: dict[int, int] = defaultdict(int)
    metric = ""
    for entry in run_record.entries:
        event = entry.event
        if isinstance(event, Evaluated) and event.loss is not None and event.round <= run_record.scenario.rounds:
            number, loss = event.round, event.loss
            counts[number] += 1
            if number in found and not run_record.scenario.synchronisation.certifies:
                loss = found[number] + (loss - found[number]) / counts[number]
            found[number] = loss
            metric = metric or event.metric
    last_round = max((event.round for _, event in run_record.certified()), default=0)
    return LossReport(
        metric=metric,
        first=found.get(0),
        last=found[max(found)] if found else None,
        by_round=tuple(found.get(number) for number in range(1, last_round + 1)),
    )


def _missing_reward(run_record: RunRecord) -> LossReport:
    """Mean reward that the nodes lack of 1, by round, under the strategy rollouts."""
    found: dict[int, list[float]] = defaultdict(list)
    for _, event in run_record.certified():
        if isinstance(event, Rollouts) and event.reward is not None:
            found[event.round].append(1 - event.reward)
    warm_ups = [
        1 - entry.event.warm_up_reward
        for entry in run_record.entries
        if isinstance(entry.event, AgentStarted) and entry.event.warm_up_reward is not None
    ]
    last_round = max(found, default=0)
    by_round = tuple(
        round(statistics.fmean(found[number]), 4) if number in found else None for number in range(1, last_round + 1)
    )
    return LossReport(
        metric="missing of reward 1",
        first=round(statistics.fmean(warm_ups), 4) if warm_ups else None,
        last=by_round[-1] if by_round else None,
        by_round=by_round,
    )


def _held_out(run_record: RunRecord) -> tuple[HeldOutReport, ...]:
    found: dict[int, list[float]] = defaultdict(list)
    for entry in run_record.entries:
        if isinstance(entry.event, HeldOutReward):
            found[entry.event.round].append(entry.event.reward)
    return tuple(
        HeldOutReport(round=number, reward=round(statistics.fmean(rewards), 4), nodes=len(rewards))
        for number, rewards in sorted(found.items())
    )


def _shared_rounds(certified: Sequence[tuple[int, RoundEnded]]) -> tuple[RoundReport, ...]:
    """Rounds of the strategy rollouts, each over the nodes that made one of that number."""
    by_round: dict[int, dict[int, Rollouts]] = defaultdict(dict)
    for node, event in certified:
        if isinstance(event, Rollouts):
            by_round[event.round][node] = event
    return tuple(
        RoundReport(
            round=number,
            members=len(made),
            contributors=sum(event.own > 0 for event in made.values()),
            coverage=round(
                sum(event.external for event in made.values())
                / max(1, sum(event.own + event.external for event in made.values())),
                3,
            ),
            tokens=sum(event.tokens for event in made.values()),
            reduce_s=0.0,
            total_s=round(statistics.median(event.seconds for event in made.values()), 3),
        )
        for number, made in sorted(by_round.items())
    )


def _round_reports(certified: Sequence[tuple[int, RoundEnded]], check: Check) -> tuple[RoundReport, ...]:
    by_round: dict[int, list[RoundEnded]] = defaultdict(list)
    for _, event in certified:
        by_round[event.round].append(event)
    tokens = tokens_by_round(event for _, event in certified)
    reports = []
    for number, events in sorted(by_round.items()):
        last = max(events, key=lambda event: event.term)
        checked = check.of(last.term, number)
        verified = checked is not None and checked.updates_compared > 0
        reports.append(
            RoundReport(
                round=number,
                members=len(last.members),
                contributors=checked.contributors if checked and verified else last.contributors,
                coverage=checked.coverage if checked and verified else last.coverage,
                tokens=tokens[number],
                reduce_s=round(statistics.median(event.reduce_s for event in events), 3),
                total_s=round(statistics.median(event.total_s for event in events), 3),
            )
        )
    return tuple(reports)


def _bytes(run_record: RunRecord, check: Check) -> BytesReport:
    numel: dict[int, int] = defaultdict(int)  # by certified round, of which each reduced one fragment
    for found in check.rounds:
        numel[found.round] = max(numel[found.round], found.numel)
    last = _last_of_each_life(run_record)
    nodes, steps = run_record.scenario.nodes, run_record.scenario.inner_steps
    return BytesReport(
        lanes_sent=sum(event.lanes_sent for event in last),
        control_sent=sum(event.control_sent for event in last),
        fp32_allreduce_every_step=allreduce_bytes(nodes=nodes, steps=steps, numel=sum(numel.values())),
    )


def allreduce_bytes(*, nodes: int, steps: int, numel: int) -> int:
    """Bytes that all nodes send to sum `numel` fp32 gradients in a ring or butterfly after each of `steps` steps.

    Each of n nodes sends 2 (n-1)/n of the gradients, so all together 2 (n-1) times.
    """
    return steps * 2 * (nodes - 1) * numel * 4


def _last_of_each_life(run_record: RunRecord) -> list[RoundEnded]:
    """The last certificate of every process: its counters say what that process had sent by then."""
    last: dict[tuple[int, int], RoundEnded] = {}
    lives: dict[int, int] = defaultdict(int)
    for entry in run_record.entries:
        if isinstance(entry.event, Started):
            lives[entry.node] += 1
        elif isinstance(entry.event, RoundEnded) and entry.event.round <= run_record.scenario.rounds:
            last[entry.node, lives[entry.node]] = entry.event
    return list(last.values())


def _fault_reports(run_record: RunRecord) -> tuple[FaultReport, ...]:
    durations = round_durations(run_record)
    usual = undisturbed_median(run_record, durations)
    reports = []
    for record in run_record.faults:
        fault = record.fault
        took = durations.get(fault.round)
        measured = record.at is not None and took is not None and usual is not None
        reports.append(
            FaultReport(
                kind=fault.kind,
                node=fault.node,
                groups=fault.groups,
                round=fault.round,
                phase=fault.phase,
                at_s=None if record.at is None else _since(run_record, record.at),
                delay_s=round(took - usual, 3) if measured and took is not None and usual is not None else None,
                error=record.error or (None if record.done else _unfinished(record)),
                unmet=record.unmet,
            )
        )
    return tuple(reports)


def _unfinished(record: FaultRecord) -> str:
    return "its moment never came" if record.at is None else "the run ended before it was done"
