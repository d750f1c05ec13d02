"""Facts for the page and the metrics, as plain values: read off a running daemon here, made up by a bench elsewhere.

Numbers and names come from peers too, and are passed on as they are: whoever shows them treats them as text.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol

import msgspec
import psutil  # type: ignore[import-untyped]

from shoal.node.parts import SOFTWARE, Parts
from shoal.node.reporting.round_log import term_text
from shoal.node.sapo.engine import RolloutEngine
from shoal.node.sapo.recent import RecentGroup
from shoal.node.services import UserOrders
from shoal.node.strategies.rounds import Rounds, Standing
from shoal.protocol.bans import FOR_EVER, Sentence
from shoal.protocol.identity import PeerId
from shoal.protocol.records import Phase
from shoal.protocol.rollouts import decode_group

QUESTION_UNKNOWN = "(the agent of this node did not open the group)"
PEER_LIMIT = 512
"""Peers that are shown: members first, then by PeerId."""

Reach = Literal["self", "direct", "detour", "suspect", "unlinked", "gone"]
"""direct: by a link; detour: alive, heard through others; unlinked: only its record is here; gone: held for dead."""


class PeerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One node as this one sees it. sent, received: payload bytes over the lanes between the two, in all."""

    peer: str
    phase: str
    reach: Reach
    member: bool
    round: int
    tokens_per_s: float
    sent: int = 0
    received: int = 0
    software: str = ""
    address: str = ""


class RolloutFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of a node that shares rollouts, since it started; see `RolloutStatus`."""

    role: str
    reward: float | None
    made: int
    pulled: int
    taken: int
    pulled_bytes: int
    generated_tokens: int
    rejected: dict[str, int]


class BanFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A peer that takes no part, by the certificate of `round`. until: the last round of it, None has no end.

    evidence: its digest, in hex, which is also the name of its file in the data folder.
    """

    peer: str
    round: int
    until: int | None
    evidence: str


class NodeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """This node. `long_missing`: of the missing, those not heard of for an hour. Bytes count since it started; `loss`
    is held-out, `train_loss` its own; `cpu` in cores.

    certifies: whether a majority certifies each round, by the strategy. alerts: what keeps it from signing, and what
    helps.
    peer_errors, own_errors: requests of others that failed here, by whose fault that was.
    """

    peer: str
    swarm: str
    name: str
    strategy: str
    certifies: bool
    workload: str
    software: str
    phase: str
    term: str
    round: int
    digest: str | None
    paused: bool
    members: int
    missing: Sequence[str]
    long_missing: Sequence[str]
    loss: float | None
    train_loss: float | None
    tokens_per_s: float
    blocked_fraction: float | None
    lanes_sent: int
    lanes_received: int
    control_sent: int
    control_received: int
    addresses: Sequence[str]
    device: str
    uptime_s: float
    cpu: float
    memory_bytes: int
    disk_free_bytes: int
    peer_errors: int = 0
    own_errors: int = 0
    rollouts: RolloutFacts | None = None
    bans: Sequence[BanFacts] = ()
    alerts: Sequence[str] = ()


class GroupFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Group of rollouts, in a line. reward: the mean, as its origin claims it unless `own`."""

    digest: str
    peer: str
    own: bool
    round: int
    family: str
    completions: int
    reward: float | None


class GroupText(msgspec.Struct, frozen=True, kw_only=True):
    """A group to read. rewards: one for each completion where this node scored them, else empty."""

    digest: str
    question: str
    completions: Sequence[str]
    rewards: Sequence[float]


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """All facts of one moment."""

    node: NodeFacts
    peers: Sequence[PeerFacts]
    groups: Sequence[GroupFacts] = ()


class Source(Protocol):
    """Source of facts. Called in trio's thread."""

    def look(self) -> Facts:
        """The facts of this moment; quick."""

    async def group(self, digest: str) -> GroupText | None:
        """The texts of a group that `look` named; None if it is not held any more."""

    async def order(self, op: str) -> None:
        """Carry out "leave", "pause" or "resume"."""


class NodeSource:
    """The facts of a running node. phase: that of its record."""

    def __init__(self, parts: Parts, rounds: Rounds, user: UserOrders, phase: Callable[[], Phase]) -> None:
        self._p = parts
        self._rounds = rounds
        self._user = user
        self._phase = phase
        self._began = time.monotonic()
        self._process = psutil.Process()
        self._cpu = (time.monotonic(), self._cpu_s(), 0.0)

    def look(self) -> Facts:
        """See `Source`."""
        standing, sharing = self._rounds.standing(), self._rounds.sharing
        peers = self._peers(frozenset(standing.members))
        return Facts(
            node=self._node(standing, [peer.peer for peer in peers if peer.member and peer.reach == "gone"]),
            peers=peers,
            groups=() if sharing is None else self._groups(sharing),
        )

    async def group(self, digest: str) -> GroupText | None:
        """See `Source`. The question is as this node's agent made it from the reference to the task: nobody's word."""
        sharing = self._rounds.sharing
        if sharing is None:
            return None
        known = next((known for known in sharing.recent if known.digest.hex() == digest), None)
        if known is None:
            return None
        group = decode_group(known.group)
        return GroupText(
            digest=digest,
            question=known.question or QUESTION_UNKNOWN,
            completions=group.completions,
            rewards=tuple(known.rewards or ()),
        )

    async def order(self, op: str) -> None:
        """See `Source`."""
        if op == "leave":
            self._user.leave()
        else:
            self._user.pause(op == "pause")

    def _groups(self, engine: RolloutEngine) -> tuple[GroupFacts, ...]:
        return tuple(_in_a_line(group) for group in engine.recent)

    # -- this node -------------------------------------------------------------------------------------------

    def _node(self, standing: Standing, missing: Sequence[str]) -> NodeFacts:
        parts, rounds, manifest, training_client = (
            self._p,
            self._rounds,
            self._p.config.manifest,
            self._p.training_client,
        )
        traffic = parts.traffic_bytes()
        return NodeFacts(
            peer=parts.identity.peer_id,
            swarm=parts.swarm_id.hex(),
            name=manifest.swarm.name,
            strategy=manifest.strategy.name,
            certifies=manifest.strategy.certifies,
            workload=manifest.workload.name,
            software=SOFTWARE,
            phase=rounds.engine.phase,
            term=term_text(standing.term),
            round=rounds.position[1],
            digest=standing.digest,
            paused=self._phase() == "paused",
            members=len(standing.members),
            missing=missing,
            long_missing=parts.members.long_silent(missing),
            loss=training_client.metric,
            train_loss=training_client.loss,
            tokens_per_s=training_client.tokens_per_s,
            blocked_fraction=training_client.blocked_fraction,
            addresses=tuple(parts.host.addresses),
            peer_errors=parts.host.remote_errors,
            own_errors=parts.host.handler_errors,
            device=parts.config.device,
            uptime_s=time.monotonic() - self._began,
            cpu=self._cpu_cores(),
            memory_bytes=int(self._process.memory_info().rss),
            disk_free_bytes=shutil.disk_usage(parts.store.folder).free,
            rollouts=None if rounds.sharing is None else _rollouts(rounds.sharing),
            bans=_bans(parts.chain.banned),
            alerts=tuple(parts.standstill.alerts),
            **traffic,
        )

    def _cpu_s(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)

    def _cpu_cores(self) -> float:
        """Cores in use by this process, over the last second or more."""
        at, used, cores = self._cpu
        now = time.monotonic()
        if now - at >= 1.0:
            used_now = self._cpu_s()
            cores = (used_now - used) / (now - at)
            self._cpu = (now, used_now, cores)
        return round(cores, 3)

    # -- the others ------------------------------------------------------------------------------------------

    def _peers(self, electorate: frozenset[str]) -> list[PeerFacts]:
        parts = self._p
        members, me = parts.members, parts.identity.peer_id
        alive, linked, suspected = members.alive(), members.links.linked(), members.suspected()
        records = {record.peer: record for record in members.book.records()}
        everyone: set[str] = {*records, *electorate, *alive, me}
        known = sorted(everyone, key=lambda peer: (peer not in electorate, peer))
        newest = self._rounds.position[1]
        certified = frozenset() if self._rounds.certifying is None else electorate  # who reported this very round
        found = []
        for peer in known[:PEER_LIMIT]:
            record = records.get(peer)  # type: ignore[call-overload]
            moved = parts.lanes.moved(PeerId(peer))
            mine = peer == me
            reach: Reach = "gone"
            if mine:
                reach = "self"
            elif peer in suspected:
                reach = "suspect"
            elif peer in alive:
                reach = "direct" if peer in linked else "detour"
            elif record is not None and members.machine.state_of(PeerId(peer)) is None:
                reach = "unlinked"
            found.append(
                PeerFacts(
                    peer=peer,
                    phase=self._phase() if mine else ("unknown" if record is None else record.phase),
                    reach=reach,
                    member=peer in electorate,
                    round=newest if mine or peer in certified else (0 if record is None else record.round),
                    tokens_per_s=parts.training_client.tokens_per_s
                    if mine
                    else (0.0 if record is None else record.tokens_per_s),
                    sent=moved.taken,
                    received=moved.received,
                    software="" if record is None else record.software,
                    address="" if record is None else next(iter(record.control_addresses), ""),
                )
            )
        return found


def _bans(banned: Mapping[PeerId, Sentence]) -> tuple[BanFacts, ...]:
    return tuple(
        BanFacts(
            peer=peer,
            round=sentence.decided[1],
            until=None if sentence.until == FOR_EVER else sentence.until,
            evidence=sentence.evidence.hex(),
        )
        for peer, sentence in sorted(banned.items())
    )


def _in_a_line(known: RecentGroup) -> GroupFacts:
    announced = known.announcement
    return GroupFacts(
        digest=known.digest.hex(),
        peer=known.origin,
        own=bool(known.rewards),
        round=announced.round,
        family=announced.task.family,
        completions=announced.completions,
        reward=announced.reward_mean,
    )


def _rollouts(engine: RolloutEngine) -> RolloutFacts:
    status = engine.status
    return RolloutFacts(
        role=status.role,
        reward=status.reward,
        made=status.made,
        pulled=status.pulled,
        taken=status.taken,
        pulled_bytes=status.pulled_bytes,
        generated_tokens=status.generated_tokens,
        rejected=status.rejected,
    )
