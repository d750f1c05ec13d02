"""A testnet for people: lines while it runs, a summary when it is over."""

from __future__ import annotations

import logging
from pathlib import Path

from shoal.cli.logs import FOR_USER
from shoal.cli.render import ShowNow
from shoal.cli.text import count, in_one_line, number, quantity, who_contributed
from shoal.testnet.progress import (
    FaultInjected,
    GroupsShared,
    LossMeasured,
    NodeEnded,
    NodeJoined,
    Progress,
    RoundDone,
    StepDone,
)
from shoal.testnet.reports.report import FaultReport, Report, digests_word, failures, ok
from shoal.testnet.scenario import Fault, whom

UNVERIFIED_SHOWN = 5

log = logging.getLogger(FOR_USER)


class TestnetProgress:
    """Tells how a testnet goes on: rounds, losses, faults and ends in the log, the last of them in the live line."""

    __test__ = False  # for pytest, which takes the name for its own

    def __init__(self, show_now: ShowNow, *, rounds: int) -> None:
        self._show_now = show_now
        self._rounds = rounds
        self._loss = ""

    def __call__(self, event: Progress) -> None:
        """Take one event; never raises."""
        match event:
            case RoundDone():
                log.info("%s", round_line(event, self._rounds))
                self._show_now(
                    f"{event.round} of {count(self._rounds, 'round')} certified{self._loss}", event.round / self._rounds
                )
            case StepDone():
                how = "with a partner" if event.paired else "without a partner"
                log.info("round %d of %d done %s, %.1f s", event.round, self._rounds, how, event.total_s)
                self._show_now(
                    f"{event.round} of {count(self._rounds, 'round')} done{self._loss}", event.round / self._rounds
                )
            case GroupsShared():
                reward = "" if event.reward is None else f", reward {event.reward:.3f}"
                log.info(
                    "round %d of %d done on %d own and %d other groups%s, %.1f s",
                    *(event.round, self._rounds, event.own, event.external, reward, event.total_s),
                )
                self._show_now(
                    f"{event.round} of {count(self._rounds, 'round')} done{reward}", event.round / self._rounds
                )
            case LossMeasured():
                self._loss = f", loss {event.loss:.4f} {event.metric}"
                log.info("after round %d: loss %.4f %s", event.round, event.loss, event.metric)
            case FaultInjected():
                log.info("fault: %s", fault_line(event.fault))
            case NodeJoined():
                log.info("node %d has joined and certified round %d", event.index, event.round)
            case NodeEnded():
                log.error("node %d ended with exit code %d: %s", event.index, event.exit_code, event.message)


def round_line(event: RoundDone, rounds: int) -> str:
    """`round 3 of 8 certified: 4 of 4 contributed, 100% of their chunks, 8.1 s`."""
    return (
        f"round {event.round} of {rounds} certified: {who_contributed(event.contributors, event.members)}, "
        f"{event.coverage:.0%} of the chunks, {event.total_s:.1f} s"
    )


def fault_line(fault: Fault | FaultReport) -> str:
    """`kill node 2 in round 3, reduce`, or `partition 0 1 | 2 3 in round 2`."""
    struck = "" if fault.node is None else " node"
    struck += f" {whom(fault.node, fault.groups)}".rstrip()
    return f"{fault.kind}{struck} in round {fault.round}" + (f", {fault.phase}" if fault.phase else "")


def summary(report: Report, out: Path) -> list[str]:
    """Summarise a run, a fact a line; the last says whether all was as it should be."""
    saved = report.bytes.fp32_allreduce_every_step / max(1, report.bytes.lanes_sent + report.bytes.control_sent)
    return [
        f"rounds     {report.rounds_certified} of {report.wanted_rounds} {_decided(report)} in {report.wall_s:.1f} s",
        f"loss       {number(report.loss.first)} → {number(report.loss.last)} {in_one_line(report.loss.metric)}",
        *(f"fault      {_fault_result(fault)}" for fault in report.faults),
        f"exactness  {count(report.forks, 'fork')}, {count(report.wrong_values, 'wrong value')}, "
        f"digests {digests_word(report, 'DIFFER')}",
        f"bytes      {quantity(report.bytes.lanes_sent, 'B')} of tensors, "
        f"{quantity(report.bytes.control_sent, 'B')} of control"
        + (f": {saved:.0f} times less than fp32 at every step" if saved else ""),
        *_blocked(report),
        f"report     {out / 'report.json'}, {out / 'report.html'}",
        *(["all is as it should be"] if ok(report) else _failures(report)),
    ]


def _blocked(report: Report) -> list[str]:
    """Share of its time that a trainer waited for rounds, where they are hidden behind steps."""
    waited = [node.blocked_fraction for node in report.nodes if node.blocked_fraction is not None]
    implied = report.scenario.synchronisation.defaults({})
    if not waited or not any(
        report.scenario.sync.get(key) or key in implied for key in ("overlap_steps", "late_steps")
    ):
        return []
    return [f"blocked    {max(waited):.1%} of its time, for the trainer that waited longest for rounds"]


def _decided(report: Report) -> str:
    """Word for a round that is over; where there is no common state nobody certifies it."""
    return "done" if report.digests_equal is None else "certified"


def _fault_result(fault: FaultReport) -> str:
    if fault.error is not None:
        return f"{fault_line(fault)}: not done, {in_one_line(fault.error)}"
    if fault.at_s is None:
        return f"{fault_line(fault)}: its moment never came"
    delay = "" if fault.delay_s is None else f", the round took {fault.delay_s:+.1f} s against the median"
    return f"{fault_line(fault)}: after {fault.at_s:.1f} s{delay}"


def _failures(report: Report) -> list[str]:
    """Every reason for which the testnet failed."""
    reasons = [in_one_line(reason) for reason in failures(report)]
    reasons += [f"unverified: {in_one_line(text)}" for text in report.unverified[:UNVERIFIED_SHOWN]]
    if any(fault.at_s is None or fault.error is not None for fault in report.faults):
        reasons.append("not all faults could be injected")
    return [f"FAILED     {reason}" for reason in reasons]
