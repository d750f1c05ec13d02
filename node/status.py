"""What a node says of itself: its record for the others, its status for the user."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from shoal.node.control import BytesStatus, JsonValue, MemberStatus, RollbackStatus, Status
from shoal.node.round_log import term_text
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Consent
from shoal.protocol.records import ADDRESS_LIMIT, NodeRecord

if TYPE_CHECKING:
    from shoal.node.daemon import Daemon

SOFTWARE = f"shoal {importlib.metadata.version('shoal')}"


def node_record(daemon: Daemon) -> NodeRecord:
    """The record that is gossiped."""
    head = daemon.chain.head
    return NodeRecord(
        peer=daemon.identity.peer_id,
        control_addresses=daemon.host.addresses[:ADDRESS_LIMIT],
        lane_addresses=daemon.lanes.addresses[:ADDRESS_LIMIT],
        software=SOFTWARE,
        tokens_per_s=daemon.desk.tokens_per_s,
        upload_bytes_per_s=float(daemon.config.max_upload or 0),
        download_bytes_per_s=float(daemon.config.max_download or 0),
        phase=daemon.record_phase,
        term=(head.term.rebases, head.term.rollbacks),
        round=head.round,
        incarnation=daemon.members.machine.incarnation,
        boot=daemon.boot,
    )


def status(daemon: Daemon) -> dict[str, JsonValue]:
    """What `shoal status` shows; the keys are listed in docs/protocol.md."""
    head, state = daemon.chain.head, daemon.custody.state
    machine = daemon.engine.machine
    members = [_member(daemon, peer) for peer in head.members]
    traffic = daemon.host.traffic
    document = Status(
        peer_id=daemon.identity.peer_id,
        swarm_id=daemon.swarm_id.hex(),
        addresses=list(daemon.host.addresses),
        phase=daemon.engine.phase,
        term=term_text(head.next_term),
        round=head.state_round,
        digest=None if state is None else daemon.shelf.header(state).digest.hex(),
        members=members,
        rollbacks=[] if machine is None else _rollbacks(machine.consents()),
        missing=[] if machine is None else list(machine.missing()),
        loss=daemon.desk.metric,
        tokens_per_s=daemon.desk.tokens_per_s,
        bytes=BytesStatus(
            sent=daemon.lanes.bytes_sent + traffic.bytes_sent,
            received=daemon.lanes.bytes_received + traffic.bytes_received,
        ),
    )
    built: dict[str, JsonValue] = msgspec.to_builtins(document)
    return built


def _rollbacks(consents: Mapping[PeerId, Consent]) -> list[RollbackStatus]:
    return [
        RollbackStatus(peer_id=peer, round=consent.target.round, asked=consent.asked)
        for peer, consent in sorted(consents.items())
    ]


def _member(daemon: Daemon, peer: str) -> MemberStatus:
    if peer == daemon.identity.peer_id:
        return MemberStatus(peer_id=peer, phase=daemon.record_phase, tokens_per_s=daemon.desk.tokens_per_s)
    record = daemon.members.record_of(peer)  # type: ignore[arg-type]
    gone = peer not in daemon.members.alive()
    if record is None or gone:
        return MemberStatus(peer_id=peer, phase="missing", tokens_per_s=None)
    return MemberStatus(peer_id=peer, phase=record.phase, tokens_per_s=record.tokens_per_s)
