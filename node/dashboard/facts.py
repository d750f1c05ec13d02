"""Facts for the page and the metrics, as plain values: read off a running daemon here, made up by a bench elsewhere.

Numbers and names come from peers too, and are passed on as they are: whoever shows them treats them as text.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec
import psutil  # type: ignore[import-untyped]

from shoal.node.control_client import RolloutCounts
from shoal.node.dashboard.settings import JoinFacts, Settings, join_facts, settings_of
from shoal.node.discovery.link_ops import swarm_link
from shoal.node.parts import SOFTWARE, Parts
from shoal.node.peer_facts import PeerFacts
from shoal.node.peers import peer_rows
from shoal.node.reporting.round_log import term_text
from shoal.node.sapo.engine import RolloutEngine
from shoal.node.sapo.recent import RecentGroup
from shoal.node.services import UserOrders
from shoal.node.strategies.rounds import Rounds, Standing
from shoal.protocol.amending import amended_settings
from shoal.protocol.bans import FOR_EVER, Sentence
from shoal.protocol.identity import PeerId
from shoal.protocol.records import NodeRecord, Phase
from shoal.protocol.rollouts import decode_group
from shoal.protocol.voting import FaultModel

QUESTION_UNKNOWN = "(the agent of this node did not open the group)"


class PeerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of a peer's newest record beside its row, for who asks for that peer. Rates in bytes/s."""

    term: str
    incarnation: int
    boot: int
    upload_bytes_per_s: float
    download_bytes_per_s: float
    capabilities: Sequence[str]
    control_addresses: Sequence[str]
    lane_addresses: Sequence[str]


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes since this node started, over lanes and control."""

    lanes_sent: int
    lanes_received: int
    control_sent: int
    control_received: int

    @property
    def sent(self) -> int:
        """Bytes sent, in all."""
        return self.lanes_sent + self.control_sent

    @property
    def received(self) -> int:
        """Bytes received, in all."""
        return self.lanes_received + self.control_received


class RolloutFacts(RolloutCounts, frozen=True, kw_only=True):
    """Counts of a node that shares rollouts, since it started. round: of its agent's."""

    round: int = 0


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
    is held-out, `train_loss` its own, in `train_metric` if that is known; `cpu` in cores.

    certifies: whether voters certify each round, by the strategy. lying: whether some of them may lie. alerts: what
    keeps it from signing, and what helps. turn_in_rounds: in how many rounds it has a seat, where these are few.
    peer_errors, own_errors: requests of others that failed here, by whose fault that was. why_paused: why it trains
    nothing, empty while it does. max_upload, max_download: the caps, in bytes/s, None where there is none.
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
    voters: int
    lying: bool
    missing: Sequence[str]
    long_missing: Sequence[str]
    loss: float | None
    train_loss: float | None
    train_metric: str
    tokens_per_s: float | None
    blocked_fraction: float | None
    traffic: Traffic
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
    turn_in_rounds: int | None = None
    why_paused: str = ""
    max_upload: int | None = None
    max_download: int | None = None


class GroupFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Group of rollouts, in a line. reward: the mean, as its origin claims it unless `own`.

    round: of its origin's; policy: the version of the policy that wrote it, as its origin counts; came: in which of
    this node's rounds.
    """

    digest: str
    peer: str
    own: bool
    round: int
    family: str
    completions: int
    reward: float | None
    policy: int = 0
    came: int = 0


class GroupText(msgspec.Struct, frozen=True, kw_only=True):
    """A group to read. rewards: one for each completion where this node scored them, else empty."""

    digest: str
    question: str
    completions: Sequence[str]
    rewards: Sequence[float]


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """All facts of one moment. peers: all that this node knows."""

    node: NodeFacts
    peers: Sequence[PeerFacts]
    groups: Sequence[GroupFacts] = ()


class Source(Protocol):
    """Source of facts. Called in trio's thread."""

    def look(self) -> Facts:
        """The facts of this moment; quick."""

    def traffic(self) -> Traffic:
        """The bytes of this moment; quicker, however many peers there are."""

    def record(self, peer: str) -> PeerRecord | None:
        """Facts of a peer's record; None if there is none here."""

    async def group(self, digest: str) -> GroupText | None:
        """The texts of a group that `look` named; None if it is not held any more."""

    async def order(self, op: str) -> None:
        """Carry out "leave", "pause" or "resume"."""

    def settings(self) -> Settings:
        """Settings that the node runs with."""

    def joining(self, *, secret: bool) -> JoinFacts:
        """The line that others join with; one that holds a secret only if that is asked for."""


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
        peers, voters = peer_rows(self._p, self._rounds, self._phase()), frozenset(standing.voters or standing.members)
        return Facts(
            node=self._node(standing, [peer.peer for peer in peers if peer.peer in voters and peer.reach == "gone"]),
            peers=peers,
            groups=() if sharing is None else self._groups(sharing),
        )

    def traffic(self) -> Traffic:
        """See `Source`."""
        return Traffic(**self._p.traffic_bytes())

    def record(self, peer: str) -> PeerRecord | None:
        """See `Source`."""
        record = self._p.members.record_of(PeerId(peer))
        return None if record is None else _record(record)

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

    def settings(self) -> Settings:
        """See `Source`."""
        config, amended = self._p.config, self._rounds.standing().amended
        return settings_of(
            config,
            caps=self._p.lanes.caps,
            in_force=amended or config.manifest,
            amended=tuple(amended_settings(config.manifest, amended)),
        )

    def joining(self, *, secret: bool) -> JoinFacts:
        """See `Source`."""
        config = self._p.config
        return join_facts(swarm_link(self._p), config.manifest, secret=secret, data=config.data is not None)

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
        upload, download = parts.lanes.caps
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
            voters=len(standing.voters or standing.members),
            lying=standing.faults is FaultModel.LYING,
            missing=missing,
            long_missing=parts.members.long_silent(missing),
            loss=training_client.metric,
            train_loss=training_client.loss,
            train_metric=training_client.loss_metric,
            tokens_per_s=training_client.tokens_per_s or None,
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
            turn_in_rounds=standing.turn_in_rounds,
            why_paused=self._user.why_paused(),
            max_upload=upload,
            max_download=download,
            traffic=self.traffic(),
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


def _record(record: NodeRecord) -> PeerRecord:
    return PeerRecord(
        term=".".join(map(str, record.term)),
        incarnation=record.incarnation,
        boot=record.boot,
        upload_bytes_per_s=record.upload_bytes_per_s,
        download_bytes_per_s=record.download_bytes_per_s,
        capabilities=record.capabilities,
        control_addresses=record.control_addresses,
        lane_addresses=record.lane_addresses,
    )


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
        policy=announced.policy_version,
        came=known.came,
    )


def _rollouts(engine: RolloutEngine) -> RolloutFacts:
    status = engine.status
    counts = {name: getattr(status, name) for name in RolloutCounts.__struct_fields__}
    return RolloutFacts(**counts, round=engine.state_round)
