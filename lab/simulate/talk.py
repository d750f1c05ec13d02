"""Messages of simulated peers beside those of a round: requests, payloads, and lies."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import msgspec

from shoal.lab.simulate.states import Header
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Certificate, Entry, Message, Plan, Report, Stalled
from shoal.protocol.planning import TRAINING, absent_ready
from shoal.protocol.round import RoundMachine
from shoal.protocol.sites import HandOverOffer
from shoal.swarm.lanes.frame import FrameKind


class LaneMessage:
    """Travels over a lane or a stream: it waits for the line, and is lost only where a partition stands."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class GetChain(LaneMessage):
    """Asks for the entries of the chain after the first `height`; who asks knows so many rebases.

    waits: to be answered once there is one, by who has the state as well.
    """

    height: int
    rebases: int
    waits: bool = False


@dataclass(frozen=True, slots=True)
class ChainPart(LaneMessage):
    """The answer: entries in order, and how many the answerer has in all."""

    asked: GetChain
    entries: tuple[Entry, ...]
    head: int


@dataclass(frozen=True, slots=True)
class NoPlace(LaneMessage):
    """The answer of one at whom others wait already."""

    asked: GetChain


@dataclass(frozen=True, slots=True)
class GetHeader(LaneMessage):
    """Asks for the header of the state of a round."""

    round: int


@dataclass(frozen=True, slots=True)
class HeaderAnswer(LaneMessage):
    """The answer; None: that state is not held."""

    round: int
    header: Header | None


@dataclass(frozen=True, slots=True)
class GetFinals(LaneMessage):
    """Asks whether the finals of a plan are held."""

    plan: bytes


@dataclass(frozen=True, slots=True)
class FinalsAnswer(LaneMessage):
    """The answer: the plan they are of; None: they are not held."""

    wanted: bytes
    plan: Plan | None


@dataclass(frozen=True, slots=True)
class ChunkRequest(LaneMessage):
    """Asks for chunks of a state or of finals: `scope` is the start of the state's digest or of the plan's hash."""

    scope: bytes
    chunks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChunkFrame(LaneMessage):
    """`length` bytes of a chunk's payload; the chunk is whole when all of them came. None: it is not held."""

    scope: bytes
    chunk: int
    length: int
    data: bytes | None


@dataclass(frozen=True, slots=True)
class Offering(LaneMessage):
    """Offers the delegate of a site what the sender made."""

    offer: HandOverOffer


@dataclass(frozen=True, slots=True)
class TakingBack(LaneMessage):
    """Takes back what was offered."""

    offer: HandOverOffer


@dataclass(frozen=True, slots=True)
class OfferAnswer(LaneMessage):
    """The answer: whether what was offered with that base and root is in the contribution of the delegate."""

    base: bytes
    root: bytes
    taken: bool


@dataclass(frozen=True, slots=True)
class Lacking:
    """Asks the receiver to send again what it owes the sender in a reduction."""

    lineage: bytes
    contributions: frozenset[int]
    finals: frozenset[int]


@dataclass(frozen=True, slots=True)
class Payload(LaneMessage):
    """A chunk of a reduction on its way over a lane."""

    lineage: bytes
    kind: FrameKind
    chunk: int
    data: bytes


Answer = HeaderAnswer | FinalsAnswer
FetchTalk = (
    GetChain | ChainPart | NoPlace | GetHeader | HeaderAnswer | GetFinals | FinalsAnswer | ChunkRequest | ChunkFrame
)
PeerTalk = FetchTalk | Offering | TakingBack | OfferAnswer | Lacking | Payload


def wrong(data: bytes) -> bytes:
    """The bytes that a liar sends for a chunk."""
    return bytes([data[0] ^ 1]) + data[1:]


def with_flipped_digest(report: Report) -> Report:
    """The report of a liar, with another digest than it computed."""
    return msgspec.structs.replace(report, digest=bytes(b ^ 0xFF for b in report.digest))


def one_more(part: ChainPart, newest: Certificate | None) -> ChainPart:
    """Chain as a liar serves it: after the newest round it has one more, which nobody signed."""
    if newest is None:
        return part
    value = msgspec.structs.replace(newest.value, round=newest.value.next_round, base=newest.value.hash)
    invented = msgspec.structs.replace(newest, value=value)
    return ChainPart(part.asked, (*part.entries, invented), part.head + 1)


def falsehoods(lies: Collection[str], me: PeerId, machine: RoundMachine) -> list[Message]:
    """Messages that a liar sends unasked: that everyone else stalls, and some that are not its to send."""
    head, plan = machine.previous, machine.plan
    told: list[Message] = []
    if "accuse" in lies and plan is not None:
        others = tuple(sorted(p for p in plan.remaining if p != me))
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
