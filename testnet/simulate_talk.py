"""What simulated peers say beside the messages of a round: requests, payloads, and lies."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import msgspec

from shoal.collectives.codecs import F32
from shoal.collectives.finals import Finals
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Certificate, Message, Report, Stalled
from shoal.protocol.planning import TRAINING, absent_ready
from shoal.protocol.round import RoundMachine
from shoal.swarm.frame import FrameKind


@dataclass(frozen=True, slots=True)
class Fetch:
    """Asks for the certificates after the first `height`, and for the state they lead to."""

    height: int


@dataclass(frozen=True, slots=True)
class Caught:
    """The answer: certificates in order, and the state after the last."""

    certificates: tuple[Certificate, ...]
    state: F32


@dataclass(frozen=True, slots=True)
class FetchFinals:
    """Asks for the finals of a plan."""

    plan: bytes


@dataclass(frozen=True, slots=True)
class GotFinals:
    """The answer."""

    finals: Finals


@dataclass(frozen=True, slots=True)
class Lacking:
    """Asks the receiver to send again what it owes the sender in a reduction."""

    lineage: bytes
    contributions: frozenset[int]
    finals: frozenset[int]


@dataclass(frozen=True, slots=True)
class Payload:
    """A chunk on its way over a lane."""

    lineage: bytes
    kind: FrameKind
    chunk: int
    data: bytes


CourseTalk = Fetch | Caught | FetchFinals | GotFinals | Lacking | Payload


def with_flipped_digest(report: Report) -> Report:
    """What a liar says it computed."""
    return msgspec.structs.replace(report, digest=bytes(b ^ 0xFF for b in report.digest))


def falsehoods(lies: Collection[str], me: PeerId, machine: RoundMachine) -> list[Message]:
    """What a liar says unasked: that everyone else stalls, and things that are not its to say."""
    head, plan = machine.previous, machine.plan
    told: list[Message] = []
    if "accuse" in lies and plan is not None:
        others = tuple(sorted(p for p in plan.remaining() if p != me))
        told.append(Stalled(term=head.next_term, round=head.next_round, base=head.hash, plan=plan.hash, peers=others))
    if "flood" in lies:
        ready = absent_ready(TRAINING, head, head.digest)
        told.append(msgspec.structs.replace(ready, role="admiral"))
        told += [msgspec.structs.replace(ready, round=head.next_round + ahead) for ahead in (1, 2)]
        told.append(Certificate(value=head, view=0, signers=(me,), signatures=(bytes(64),)))
        if plan is not None:
            told.append(msgspec.structs.replace(plan, planner=me, attempt=plan.attempt + 1))
            told.append(msgspec.structs.replace(plan, view=plan.view + 1, planner=me))
    return told
