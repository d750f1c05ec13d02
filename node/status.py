"""Self-description of a node: its record for the others, its status for the user."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from shoal.node import other_data
from shoal.node.control import BytesStatus, JsonValue, MemberStatus, RollbackStatus, Status
from shoal.node.control_client import AmendStatus, BanStatus, FetchedStatus, SamplesStatus
from shoal.node.dashboard.service import PageService
from shoal.node.discovery.finding import Finding
from shoal.node.discovery.reaching import Reaching
from shoal.node.parts import SOFTWARE, Parts
from shoal.node.peer_facts import PeerFacts, Reach, summary_of
from shoal.node.peers import UNKNOWN_PHASE, peer_rows
from shoal.node.reporting.round_log import term_text
from shoal.node.strategies.rounds import Rounds
from shoal.node.training.trainer_messages import Evaluated
from shoal.protocol.amending import AmendConsent, amended_settings, settings_of
from shoal.protocol.bans import FOR_EVER, Sentence
from shoal.protocol.followers import FOLLOWS
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Consent
from shoal.protocol.names import capability_of
from shoal.protocol.records import NodeRecord, Phase
from shoal.swarm.members import IDLE_PHASES, Change

REACHES: dict[Reach, str] = {"self": "self", "direct": "direct", "detour": "through others", "suspect": "silent"}
"""How a member is reached, in the words of the status; in no other way it is gone."""


def node_record(parts: Parts, rounds: Rounds, reaching: Reaching, phase: Phase) -> NodeRecord:
    """The record that is gossiped."""
    term, round = rounds.position
    upload, download = parts.lanes.caps
    return NodeRecord(
        peer=parts.identity.peer_id,
        control_addresses=reaching.control_addresses,
        lane_addresses=reaching.lane_addresses,
        capabilities=(
            *(*reaching.capabilities, *_standing_of(parts), capability_of(parts.config.node_name)),
            *other_data.capability_of(parts.swarm_id, parts.training_client.held_out_data),
        ),
        software=SOFTWARE,
        tokens_per_s=parts.training_client.steady_tokens_per_s,
        upload_bytes_per_s=float(upload or 0),
        download_bytes_per_s=float(download or 0),
        phase=phase,
        term=(term.rebases, term.rollbacks),
        round=round,
        incarnation=parts.members.machine.incarnation,
        boot=parts.boot,
        invite=parts.members.admission.credential or msgspec.UNSET,
    )


def _standing_of(parts: Parts) -> tuple[str, ...]:
    return (FOLLOWS,) if parts.is_follower or parts.chain.is_outside(parts.identity.peer_id) else ()


def status(
    parts: Parts,
    rounds: Rounds,
    finding: Finding,
    reaching: Reaching,
    page: PageService | None,
    phase: Phase,
    *,
    why_paused: str,
) -> dict[str, JsonValue]:
    """Status as `shoal status` shows it, with the keys in docs/interfaces.md. phase: that of this node's record."""
    upload, download = parts.lanes.caps
    standing, traffic = rounds.standing(), parts.host.traffic
    steps, fetched = parts.training_client.steps_made, parts.state_store.fetched
    peers = peer_rows(parts, rounds, phase)
    rows = {row.peer: row for row in peers}
    missing = [str(peer) for peer in standing.missing]
    document = Status(
        peer_id=parts.identity.peer_id,
        swarm_id=parts.swarm_id.hex(),
        addresses=list(parts.host.addresses),
        reachability=reaching.reachability,
        proven=[*reaching.proven, *reaching.proven_lanes],
        phase=rounds.engine.phase,
        why_paused=why_paused,
        step=None if steps is None else steps.step,
        steps=None if steps is None else steps.steps,
        fetched_bytes=None if fetched is None else fetched.done_bytes,
        state_bytes=None if fetched is None else fetched.total_bytes,
        counts_from=None if rounds.certifying is None else rounds.certifying.counts_from,
        term=term_text(standing.term),
        round=standing.round,
        digest=standing.digest,
        abstains=standing.abstains,
        turn_in_rounds=standing.turn_in_rounds,
        outside=standing.outside,
        members=[_member(rows[peer]) for peer in standing.members],
        peers=summary_of(peers),
        voters=[str(peer) for peer in standing.voters],
        faults=standing.faults.value,
        rollbacks=_rollbacks(standing.rollbacks),
        amendments=_amendments(standing.amendments),
        settings=amended_settings(parts.config.manifest, standing.amended),
        bans=_bans(parts.chain.banned),
        alerts=[*parts.standstill.alerts, *finding.alerts],
        missing=missing,
        long_missing=parts.members.long_silent(missing),
        names={row.peer: row.name for row in peers if row.name},
        loss=parts.training_client.metric,
        metric="" if parts.training_client.metric is None else parts.training_client.metric_name,
        train_loss=parts.training_client.loss,
        train_metric="" if parts.training_client.loss is None else parts.training_client.loss_metric,
        tokens_per_s=parts.training_client.tokens_per_s or None,
        blocked_fraction=parts.training_client.blocked_fraction,
        rollouts=None if rounds.sharing is None else rounds.sharing.status,
        fetched={
            what: FetchedStatus(times=one.times, bytes=one.bytes)
            for what, one in parts.state_store.catchup.fetched.items()
        },
        samples=_samples(parts.training_client.sampled),
        refused=parts.host.refusals.counts() | parts.lanes.refusals.counts(),
        dashboard=None if page is None else page.url,
        dashboard_link=None if page is None else page.link,
        max_upload=upload,
        max_download=download,
        bytes=BytesStatus(
            sent=parts.lanes.bytes_sent + traffic.bytes_sent,
            received=parts.lanes.bytes_received + traffic.bytes_received,
            passed_on=reaching.bytes_passed,
        ),
    )
    built: dict[str, JsonValue] = msgspec.to_builtins(document)
    return built


def _samples(sampled: Evaluated | None) -> SamplesStatus | None:
    if sampled is None:
        return None
    return SamplesStatus(round=sampled.round, texts={sample.prompt: sample.text for sample in sampled.samples})


def left_in_order(change: Change, record: NodeRecord | None) -> bool:
    """True if a peer that died had taken its leave."""
    return change.kind == "died" and record is not None and record.phase == "leaving"


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


def _member(row: PeerFacts) -> MemberStatus:
    reach = REACHES.get(row.reach)
    if reach is None or row.phase == UNKNOWN_PHASE:
        return MemberStatus(peer_id=row.peer, phase="missing", tokens_per_s=None, reach="gone")
    speed = None if row.phase in IDLE_PHASES else row.tokens_per_s or None
    return MemberStatus(peer_id=row.peer, phase=row.phase, tokens_per_s=speed, reach=reach)
