"""Times of the stages in the rounds of a benchmark, read from the nodes' event logs.

    planned ───► finals here ────► reduced ──► voted ──► certified
     (first)        (last)          (last)     (last)     (last)
       └─ reduce_s ───┴─ work_out_s ──┴─ agree_s ─┴─ apply_s ─┘

Each boundary is that of the first or last peer, by the wall clock of the one machine they run on. *Reduce* is from the
first peer that accepted the plan to the last that had all finals; *work out* is their check, the candidate state, its
digest and what must be durable before the report; *agree* is report, proposal and vote; *apply* is the certificate, and
the state adopted and kept. What test mode writes of a round, to be recomputed, is not in it.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from shoal.node.reporting.event_files import LOG_NAME
from shoal.node.reporting.event_log import read_log
from shoal.node.reporting.events import Certified, Planned, Reduced, Voted
from shoal.protocol.errors import NetworkError


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRound:
    """One round at one node: wall-clock seconds, and what was certified. sent_bytes: since the process started.

    voted_at is the first vote or, if it cast none (the certificate came first), the moment it reported.
    """

    planned_at: float
    finals_at: float
    reduced_at: float
    voted_at: float
    certified_at: float
    digest: str
    coverage: float
    contributors: int
    sent_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTimes:
    """One round of the swarm: its parts in seconds; the whole is their sum."""

    reduce_s: float
    work_out_s: float
    agree_s: float
    apply_s: float

    @property
    def total_s(self) -> float:
        """Seconds from the first accepted plan until the last peer has applied."""
        return self.reduce_s + self.work_out_s + self.agree_s + self.apply_s


@dataclass(slots=True)
class _Seen:
    """The events of one round, as far as they have come; of plans the first and the newest, and that of the results."""

    first_plan: Planned | None = None
    plan: Planned | None = None
    reduced_plan: Planned | None = None
    reduced: Reduced | None = None
    voted: Voted | None = None

    def note(self, event: Planned | Reduced | Voted) -> None:
        match event:
            case Planned():
                self.first_plan, self.plan = self.first_plan or event, event
            case Reduced():
                self.reduced, self.reduced_plan = event, self.plan or self.reduced_plan
            case Voted():
                self.voted = self.voted or event


def read_node(folder: Path) -> dict[int, NodeRound]:
    """The rounds that the node in `folder` planned, reduced and certified itself."""
    seen: dict[int, _Seen] = defaultdict(_Seen)
    rounds: dict[int, NodeRound] = {}
    for event in read_log(folder / LOG_NAME):
        if isinstance(event, Planned | Reduced | Voted):
            seen[event.round].note(event)
        elif isinstance(event, Certified):
            found = _node_round(seen[event.round], event)
            if found is not None:
                rounds[event.round] = found
    return rounds


def _node_round(seen: _Seen, certified: Certified) -> NodeRound | None:
    """Times of one round at one node; None for a round that it did not reduce."""
    if seen.first_plan is None or seen.reduced_plan is None or seen.reduced is None:
        return None
    return NodeRound(
        planned_at=seen.first_plan.at,
        # The seconds of a reduction that was repaired count from its first plan, and this one is the last.
        finals_at=min(seen.reduced_plan.at + seen.reduced.seconds, seen.reduced.at),
        reduced_at=seen.reduced.at,
        voted_at=(seen.voted or seen.reduced).at,
        certified_at=certified.at - certified.kept_s,
        digest=certified.digest,
        coverage=certified.coverage,
        contributors=certified.contributors,
        sent_bytes=certified.lanes_sent + certified.control_sent,
    )


def times_of(peers: Sequence[NodeRound]) -> RoundTimes:
    """The times of one round, of which these are all peers that went through it."""
    marks = [
        min(peer.planned_at for peer in peers),
        max(peer.finals_at for peer in peers),
        max(peer.reduced_at for peer in peers),
        max(peer.voted_at for peer in peers),
        max(peer.certified_at for peer in peers),
    ]
    # A slow peer's reduction may end after the others have voted: what was over before it began took no time.
    for i in range(1, len(marks)):
        marks[i] = max(marks[i], marks[i - 1])
    parts = [late - early for early, late in pairwise(marks)]
    return RoundTimes(reduce_s=parts[0], work_out_s=parts[1], agree_s=parts[2], apply_s=parts[3])


def median_times(rounds: Sequence[RoundTimes]) -> RoundTimes:
    """The median of each part."""
    return RoundTimes(
        **{name: statistics.median(getattr(r, name) for r in rounds) for name in RoundTimes.__dataclass_fields__}
    )


def round_at(nodes: Sequence[dict[int, NodeRound]], round: int) -> list[NodeRound]:
    """Times of that round at each of these nodes. Raises NetworkError if one did not go through it."""
    missing = [str(index) for index, rounds in enumerate(nodes) if round not in rounds]
    if missing:
        raise NetworkError(f"round {round} is not whole in the log of node {', '.join(missing)}")
    return [rounds[round] for rounds in nodes]
