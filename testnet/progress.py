"""Events of a running testnet, for whoever watches it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from shoal.node.reporting.events import Evaluated, Rollouts, RoundEnded, Stepped
from shoal.protocol.identity import PeerId
from shoal.testnet.journal import Entry
from shoal.testnet.scenario import Fault, Scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundDone:
    """Certificate of a round, by the first node."""

    round: int
    members: int
    contributors: int
    coverage: float
    total_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupsShared:
    """Strategy rollouts: the first agent is through a round, trained on so many groups of its own and of others."""

    round: int
    own: int
    external: int
    reward: float | None
    total_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone:
    """Strategy gossip: the first node is through a round; paired says whether it had a partner."""

    round: int
    paired: bool
    total_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LossMeasured:
    """A node evaluated the state after a round."""

    round: int
    loss: float
    metric: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultInjected:
    """A fault's moment has come; it is being done."""

    fault: Fault
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeJoined:
    """A node that was started later certified its first round."""

    index: int
    peer_id: PeerId
    round: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEnded:
    """A node's process ended although no fault explains it."""

    index: int
    exit_code: int
    message: str


Progress = RoundDone | StepDone | GroupsShared | LossMeasured | FaultInjected | NodeJoined | NodeEnded
OnProgress = Callable[[Progress], None]


def ignore_progress(_: Progress) -> None:
    """Do nothing, where progress does not matter."""


def progress_in(entry: Entry, peer_id: PeerId, scenario: Scenario) -> Iterator[tuple[tuple[str, int], Progress]]:
    """(what it is about, what to say) of one entry by the node `peer_id`. All nodes log a round; it is told once."""
    match entry.event:
        case RoundEnded() as event if event.round <= scenario.rounds:
            done: Progress
            if isinstance(event, Rollouts):
                done = GroupsShared(
                    round=event.round,
                    own=event.own,
                    external=event.external,
                    reward=event.reward,
                    total_s=event.seconds,
                )
            elif isinstance(event, Stepped):
                done = StepDone(round=event.round, paired=event.partner is not None, total_s=event.total_s)
            else:
                done = RoundDone(
                    round=event.round,
                    members=len(event.members),
                    contributors=event.contributors,
                    coverage=event.coverage,
                    total_s=event.total_s,
                )
            yield (f"round {event.term}", event.round), done
            if entry.node >= scenario.nodes:
                yield ("joined", entry.node), NodeJoined(index=entry.node, peer_id=peer_id, round=event.round)
        case Evaluated(loss=float(loss)) as event if event.round <= scenario.rounds:
            yield ("loss", event.round), LossMeasured(round=event.round, loss=loss, metric=event.metric)
