"""Self-description of a node: its record for the others, its status for the user."""

from __future__ import annotations

import contextlib
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec
import psutil  # type: ignore[import-untyped]

from shoal.node import other_data
from shoal.node.checks import checked
from shoal.node.control_client import (
    AmendStatus,
    BanStatus,
    BytesStatus,
    FetchedStatus,
    JsonValue,
    MemberStatus,
    NodeFacts,
    RollbackStatus,
    SamplesStatus,
    Status,
    start_command,
)
from shoal.node.discovery.finding import Finding
from shoal.node.discovery.reaching import Reaching
from shoal.node.parts import SOFTWARE, Parts
from shoal.node.peer_facts import PeerFacts, Reach, summary_of
from shoal.node.peers import UNKNOWN_PHASE, peer_rows
from shoal.node.reporting.round_log import term_text
from shoal.node.strategies.rounds import Rounds
from shoal.node.training.trainer_messages import Evaluated
from shoal.protocol import sites
from shoal.protocol.amending import AmendConsent, amended_settings, settings_of
from shoal.protocol.bans import FOR_EVER, Sentence
from shoal.protocol.followers import FOLLOWS
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Consent
from shoal.protocol.names import capability_of
from shoal.protocol.records import NodeRecord, Phase, step_capability
from shoal.swarm.members import IDLE_PHASES

REACHES: dict[Reach, str] = {"self": "self", "direct": "direct", "detour": "through others", "suspect": "silent"}
"""How a member is reached, in the words of the status; in no other way it is gone."""
USAGE_PERIOD_S = 5.0
"""Between readings of what processes use: to find them takes some milliseconds where a machine has thousands."""


def node_record(parts: Parts, rounds: Rounds, reaching: Reaching, phase: Phase) -> NodeRecord:
    """The record that is gossiped."""
    term, round = rounds.position
    upload, download = parts.lanes.caps
    client = parts.training_client
    return NodeRecord(
        peer=parts.identity.peer_id,
        control_addresses=reaching.control_addresses,
        lane_addresses=reaching.lane_addresses,
        capabilities=(
            *(*reaching.capabilities, *_standing_of(parts), capability_of(parts.config.node_name)),
            *other_data.capability_of(parts.swarm_id, client.held_out_data),
            *step_capability(client.step_tokens),
            *_site_of(parts),
        ),
        software=SOFTWARE,
        tokens_per_s=0.0 if client.stuck else client.steady_tokens_per_s,
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


def _site_of(parts: Parts) -> tuple[str, ...]:
    name = parts.config.site if parts.config.manifest.sites_together else None
    return () if name is None else (sites.capability_of(name, parts.swarm_id, parts.identity.peer_id),)


class Page(Protocol):
    """A node's page. url: where it is served, and link: with what lets one order there; None until it is served."""

    url: str | None
    link: str | None


class NodeView:
    """View of a running node: the one place where it is read for its user, for the page, and for the metrics.

    phase: that of its record. why_paused: empty while it trains. page: None where it serves none.
    """

    def __init__(
        self,
        parts: Parts,
        rounds: Rounds,
        finding: Finding,
        reaching: Reaching,
        *,
        page: Callable[[], Page | None],
        phase: Callable[[], Phase],
        why_paused: Callable[[], str],
    ) -> None:
        self._p = parts
        self._rounds = rounds
        self._finding = finding
        self._reaching = reaching
        self._page = page
        self._phase = phase
        self._why_paused = why_paused
        self._usage = Usage()

    def peers(self) -> list[PeerFacts]:
        """Rows of all peers that it knows, itself among them."""
        return peer_rows(self._p, self._rounds, self._phase())

    def bytes(self) -> BytesStatus:
        """Bytes of this moment; quick, however many peers there are."""
        moved = self._p.traffic_bytes()
        return BytesStatus(
            sent=moved["lanes_sent"] + moved["control_sent"],
            received=moved["lanes_received"] + moved["control_received"],
            passed_on=self._reaching.bytes_passed,
            lanes_sent=moved["lanes_sent"],
            lanes_received=moved["lanes_received"],
        )

    def document(self) -> dict[str, JsonValue]:
        """The status as JSON has it."""
        built: dict[str, JsonValue] = msgspec.to_builtins(self.status(self.peers()))
        return built

    def status(self, peers: Sequence[PeerFacts]) -> Status:
        """All that a user is shown, by the rows of its peers."""
        parts, rounds, page, training = self._p, self._rounds, self._page(), self._p.training_client
        standing, (upload, download) = rounds.standing(), parts.lanes.caps
        steps, fetched = training.steps_made, parts.state_store.fetched
        rows, phase = {row.peer: row for row in peers}, rounds.engine.phase
        missing = [str(peer) for peer in standing.missing]
        document = Status(
            peer_id=parts.identity.peer_id,
            swarm_id=parts.swarm_id.hex(),
            addresses=list(parts.host.addresses),
            reachability=self._reaching.reachability,
            proven=[*self._reaching.proven, *self._reaching.proven_lanes],
            phase=phase,
            why_paused=self._why_paused(),
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
            site=sorted(map(str, parts.site.mates())) if _site_of(parts) else None,
            members=[_member(rows[peer]) for peer in standing.members],
            peers=summary_of(peers, in_step=rounds.sharing is None or rounds.certifying is not None),
            voters=[str(peer) for peer in standing.voters],
            faults=standing.faults.value,
            rollbacks=_rollbacks(standing.rollbacks),
            amendments=_amendments(standing.amendments),
            settings=amended_settings(parts.config.manifest, standing.amended),
            bans=_bans(parts.chain.banned),
            alerts=[*parts.standstill.alerts, *self._finding.alerts],
            missing=missing,
            long_missing=parts.members.long_silent(missing),
            revoked=[str(peer) for peer in standing.missing if parts.members.is_revoked(peer)],
            trains_alone=standing.trains_alone,
            unready=sorted(map(str, standing.unready)),
            without=sorted(map(str, parts.training_client.missing)),
            stuck=standing.stuck,
            cut_off=parts.host.is_cut_off,
            names={row.peer: row.name for row in peers if row.name},
            loss=training.metric,
            metric="" if training.metric is None else training.metric_name,
            train_loss=training.loss,
            train_metric="" if training.loss is None else training.loss_metric,
            tokens_per_s=None if standing.stuck or phase in IDLE_PHASES else training.tokens_per_s or None,
            blocked_fraction=training.blocked_fraction,
            rollouts=None if rounds.sharing is None else rounds.sharing.status,
            fetched={
                what: FetchedStatus(times=one.times, bytes=one.bytes)
                for what, one in parts.state_store.catchup.fetched.items()
            },
            samples=_samples(training.sampled),
            refused=parts.host.refusals.counts() | parts.lanes.refusals.counts(),
            dashboard=None if page is None else page.url,
            dashboard_link=None if page is None else page.link,
            max_upload=upload,
            max_download=download,
            bytes=self.bytes(),
            node=self._facts(),
        )
        return checked(document)

    def _facts(self) -> NodeFacts:
        parts, manifest = self._p, self._p.config.manifest
        cores, memory = self._usage.now()
        return NodeFacts(
            swarm_name=manifest.swarm.name,
            strategy=manifest.strategy.name,
            certifies=manifest.strategy.certifies,
            workload=manifest.workload.name,
            software=SOFTWARE,
            device=parts.config.device,
            start=start_command(parts.store.folder.absolute()),
            uptime_s=self._usage.uptime_s,
            cores=cores,
            memory_bytes=memory,
            disk_free_bytes=shutil.disk_usage(parts.store.folder).free,
            peer_errors=parts.host.remote_errors,
            own_errors=parts.host.handler_errors,
        )


class Usage:
    """Memory and cores that this process and those that it started take: a trainer or an agent is one of them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._me = psutil.Process()
        self._known: dict[psutil.Process, float] = {}
        """Of each process, its seconds of processor time at the last reading."""
        self._read_at = -math.inf
        self._found = (0.0, 0)

    @property
    def uptime_s(self) -> float:
        """Seconds since this was made, with the node."""
        return self._clock() - self._began

    def now(self) -> tuple[float, int]:
        """Cores in use since the reading before, USAGE_PERIOD_S ago or more, and bytes of memory.

        Memory that processes share, such as libraries and tensors between a trainer and its node, counts once.
        """
        now = self._clock()
        since_s = now - self._read_at
        if since_s < USAGE_PERIOD_S:
            return self._found
        used: dict[psutil.Process, float] = {}
        memory = 0
        for process in (self._me, *self._children()):
            with contextlib.suppress(psutil.Error):
                times, taken = process.cpu_times(), process.memory_info()
                used[process] = times.user + times.system
                memory += taken.rss - (0 if process == self._me else getattr(taken, "shared", 0))
        # Of a process that is new, all is: it began since the reading before. At the first, nothing is known yet.
        grown = sum(seconds - self._known.get(process, 0.0) for process, seconds in used.items())
        self._found = (0.0 if math.isinf(since_s) else round(grown / since_s, 3)), memory
        self._known, self._read_at = used, now
        return self._found

    def _children(self) -> list[psutil.Process]:
        try:
            return list(self._me.children(recursive=True))
        except psutil.Error:
            return []


def _samples(sampled: Evaluated | None) -> SamplesStatus | None:
    if sampled is None:
        return None
    return SamplesStatus(round=sampled.round, texts={sample.prompt: sample.text for sample in sampled.samples})


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
