"""What a node says of itself: its record for the others, its status for the user."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from shoal.node.control import BytesStatus, JsonValue, MemberStatus, RollbackStatus, Status
from shoal.node.control_client import AmendStatus, BanStatus
from shoal.node.dashboard.service import PageService
from shoal.node.gossip.engine import GossipEngine
from shoal.node.reporting.round_log import term_text
from shoal.node.rounds.engine import Engine
from shoal.node.sapo.engine import RolloutEngine
from shoal.protocol.amending import AmendConsent, amended_settings, settings_of
from shoal.protocol.bans import FOR_EVER, Sentence
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Consent, Term
from shoal.protocol.records import NodeRecord
from shoal.swarm.members import Change

if TYPE_CHECKING:
    from shoal.node.daemon import Daemon

SOFTWARE = f"shoal {importlib.metadata.version('shoal')}"


def node_record(daemon: Daemon) -> NodeRecord:
    """The record that is gossiped."""
    term, round = daemon.position
    return NodeRecord(
        peer=daemon.identity.peer_id,
        control_addresses=daemon.reaching.control_addresses,
        lane_addresses=daemon.reaching.lane_addresses,
        capabilities=daemon.reaching.capabilities,
        software=SOFTWARE,
        tokens_per_s=daemon.desk.steady_tokens_per_s,
        upload_bytes_per_s=float(daemon.config.max_upload or 0),
        download_bytes_per_s=float(daemon.config.max_download or 0),
        phase=daemon.record_phase,
        term=(term.rebases, term.rollbacks),
        round=round,
        incarnation=daemon.members.machine.incarnation,
        boot=daemon.boot,
        invite=daemon.members.admission.credential or msgspec.UNSET,
    )


def status(daemon: Daemon) -> dict[str, JsonValue]:
    """What `shoal status` shows; the keys are listed in docs/interfaces.md."""
    engine, traffic = daemon.engine, daemon.host.traffic
    if isinstance(engine, GossipEngine | RolloutEngine):
        term, round, digest = Term(), engine.state_round, None
        electorate = (daemon.identity.peer_id, *sorted(engine.others))
        rollbacks, amendments, missing = list[RollbackStatus](), list[AmendStatus](), list[str]()
        amended = None
    else:
        head, state, machine = daemon.chain.head, daemon.custody.state, engine.machine
        term, round, electorate = head.next_term, head.state_round, head.members
        digest = None if state is None else daemon.shelf.header(state).digest.hex()
        rollbacks = [] if machine is None else _rollbacks(machine.consents())
        amendments = [] if machine is None else _amendments(machine.amend_consents())
        missing = [str(peer) for peer in engine.missing()]
        amended = daemon.chain.amended(head.next_round)
    page = next((page for page in daemon.services if isinstance(page, PageService)), None)
    document = Status(
        peer_id=daemon.identity.peer_id,
        swarm_id=daemon.swarm_id.hex(),
        addresses=list(daemon.host.addresses),
        reachability=daemon.reaching.reachability,
        proven=[*daemon.reaching.proven, *daemon.reaching.proven_lanes],
        phase=engine.phase,
        term=term_text(term),
        round=round,
        digest=digest,
        abstains=engine.abstains if isinstance(engine, Engine) else None,
        members=[_member(daemon, peer) for peer in electorate],
        rollbacks=rollbacks,
        amendments=amendments,
        settings=amended_settings(daemon.config.manifest, amended),
        bans=_bans(daemon.chain.banned),
        alerts=daemon.standstill.alerts,
        missing=missing,
        long_missing=daemon.members.long_silent(missing),
        loss=daemon.desk.metric,
        tokens_per_s=daemon.desk.tokens_per_s,
        blocked_fraction=daemon.desk.blocked_fraction,
        rollouts=None if daemon.sharing is None else daemon.sharing.status,
        refused=daemon.host.refusals.counts() | daemon.lanes.refusals.counts(),
        dashboard=None if page is None else page.url,
        dashboard_link=None if page is None else page.link,
        bytes=BytesStatus(
            sent=daemon.lanes.bytes_sent + traffic.bytes_sent,
            received=daemon.lanes.bytes_received + traffic.bytes_received,
            passed_on=daemon.reaching.bytes_passed,
        ),
    )
    built: dict[str, JsonValue] = msgspec.to_builtins(document)
    return built


def left_in_order(change: Change, record: NodeRecord | None) -> bool:
    """Whether a peer that died had taken its leave."""
    return change.kind == "died" and record is not None and record.phase == "leaving"


def either_leaves(daemon: Daemon, peer: PeerId) -> bool:
    """Whether this node or `peer` is on its way out, so that lanes between them end. From any thread."""
    record = daemon.members.record_of(peer)
    return daemon.record_phase == "leaving" or (record is not None and record.phase == "leaving")


def _rollbacks(consents: Mapping[PeerId, Consent]) -> list[RollbackStatus]:
    return [
        RollbackStatus(peer_id=peer, round=consent.target.round, asked=consent.asked)
        for peer, consent in sorted(consents.items())
    ]


def _amendments(consents: Mapping[PeerId, AmendConsent]) -> list[AmendStatus]:
    return [
        AmendStatus(peer_id=peer, settings=settings_of(consent.amendment), asked=consent.asked)
        for peer, consent in sorted(consents.items())
    ]


def _bans(banned: Mapping[PeerId, Sentence]) -> list[BanStatus]:
    return [
        BanStatus(
            peer_id=peer,
            term=term_text(sentence.decided[0]),
            round=sentence.decided[1],
            until=None if sentence.until == FOR_EVER else sentence.until,
            evidence=sentence.evidence.hex(),
        )
        for peer, sentence in sorted(banned.items())
    ]


def _member(daemon: Daemon, peer: str) -> MemberStatus:
    if peer == daemon.identity.peer_id:
        speed = None if daemon.record_phase == "paused" else daemon.desk.tokens_per_s
        return MemberStatus(peer_id=peer, phase=daemon.record_phase, tokens_per_s=speed, reach="self")
    record = daemon.members.record_of(peer)  # type: ignore[arg-type]
    gone = peer not in daemon.members.alive()
    if record is None or gone:
        return MemberStatus(peer_id=peer, phase="missing", tokens_per_s=None, reach="gone")
    silent, linked = peer in daemon.members.suspected(), peer in daemon.members.links.linked()
    reach = "silent" if silent else "direct" if linked else "through others"
    speed = None if record.phase in ("paused", "leaving") else record.tokens_per_s
    return MemberStatus(peer_id=peer, phase=record.phase, tokens_per_s=speed, reach=reach)
