"""Facts for the page and the metrics, as plain values: read off a running daemon here, made up by a bench elsewhere.

Numbers and names come from peers too, and are passed on as they are: whoever shows them treats them as text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from shoal.node.control_client import BytesStatus, Status
from shoal.node.dashboard.settings import JoinFacts, Settings, join_facts, settings_of
from shoal.node.discovery.link_ops import swarm_link
from shoal.node.parts import Parts
from shoal.node.peer_facts import PeerFacts
from shoal.node.services import UserOrders
from shoal.node.status import NodeView
from shoal.node.strategies.rounds import Rounds
from shoal.protocol.amending import amended_settings
from shoal.protocol.identity import PeerId
from shoal.protocol.records import NodeRecord
from shoal.protocol.rollouts import decode_group

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


class GroupText(msgspec.Struct, frozen=True, kw_only=True):
    """A group to read. rewards: one for each completion where this node scored them, else empty."""

    digest: str
    question: str
    completions: Sequence[str]
    rewards: Sequence[float]


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """All facts of one moment: the node's status, and a row for each peer that it knows."""

    status: Status
    peers: Sequence[PeerFacts]


class Source(Protocol):
    """Source of facts. Called in trio's thread."""

    def look(self) -> Facts:
        """The facts of this moment; quick."""

    def traffic(self) -> BytesStatus:
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
    """The facts of a running node."""

    def __init__(self, parts: Parts, rounds: Rounds, user: UserOrders, view: NodeView) -> None:
        self._p = parts
        self._rounds = rounds
        self._user = user
        self._view = view

    def look(self) -> Facts:
        """See `Source`."""
        peers = self._view.peers()
        return Facts(status=self._view.status(peers), peers=peers)

    def traffic(self) -> BytesStatus:
        """See `Source`."""
        return self._view.bytes()

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
