"""Outcome of a soak."""

from __future__ import annotations

import msgspec

from shoal.lab.campaigns.soak_measures import (
    BEYOND_CHAIN_BYTES_PER_H,
    BEYOND_CHAIN_FROM_S,
    Verdict,
    beyond_chain_per_h,
)
from shoal.lab.campaigns.soak_plan import SoakFault


class SoakFaultRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One fault. struck_at_s: after the swarm began to train; round: under way then.

    whole_s: from when it was undone until all contributed to one round again. error: why it could not be done.
    """

    strike: SoakFault
    struck_at_s: float
    round: int
    whole_s: float
    error: str | None = None


class SoakReport(msgspec.Struct, frozen=True, kw_only=True):
    """The whole soak. seconds: how long it really trained. without_links: why nothing was done to links, if so.

    longest_gap_s: between the first certificates of two rounds, of at most `gap_bound_s`. load: the most runnable
    processes a core that there were. lies: told by a liar among them. entry_bytes: of memory, of the chain. problems:
    whatever was not as it should be, in words, other than growth, which the verdicts tell; trouble: why the soak ended
    before its time.
    """

    seed: int
    nodes: int
    strategy: str
    minutes: float
    period_s: float
    seconds: float
    faults_drawn: int
    faults: tuple[SoakFaultRecord, ...]
    without_links: str | None
    rounds: int
    rounds_checked: int
    wrong_values: int
    forks: int
    broken_votes: int
    unverified: int
    longest_gap_s: float
    gap_bound_s: float
    load: float
    lies: int = 0
    digests_equal: bool
    verdicts: tuple[Verdict, ...]
    entry_bytes: int
    problems: tuple[str, ...]
    trouble: str | None = None

    @property
    def grown(self) -> tuple[Verdict, ...]:
        """The verdicts that do not hold."""
        return tuple(verdict for verdict in self.verdicts if not verdict.holds)

    @property
    def beyond_chain_per_h(self) -> float | None:
        """Bytes an hour that the daemons grew by which lived through it, but for what the chain takes; the most."""
        return beyond_chain_per_h(self.verdicts, self.entry_bytes)

    @property
    def grows_beyond_chain(self) -> bool:
        """True if that is too much, and the soak long enough to say so."""
        grew = self.beyond_chain_per_h
        return grew is not None and self.seconds >= BEYOND_CHAIN_FROM_S and grew > BEYOND_CHAIN_BYTES_PER_H


def ok(report: SoakReport) -> bool:
    """True if it went to its end, struck where it was to, nothing grew, and every round was exact."""
    return (
        report.trouble is None
        and not report.problems
        and not report.grown
        and not report.grows_beyond_chain
        and report.digests_equal
        and report.rounds_checked > 0
        and (len(report.faults) > 0 or not report.faults_drawn)
        and not (report.wrong_values or report.forks or report.broken_votes or report.unverified)
    )


def to_json(report: SoakReport) -> str:
    """The report as one JSON document; a verdict says itself whether it holds."""
    content = msgspec.to_builtins(report)
    for told, verdict in zip(content["verdicts"], report.verdicts, strict=True):
        told |= {"growth": verdict.growth, "holds": verdict.holds}
    content["beyond_chain_per_h"] = report.beyond_chain_per_h
    content["ok"] = ok(report)
    return msgspec.json.format(msgspec.json.encode(content)).decode()
