"""Events about rounds, for the event log."""

from __future__ import annotations

import builtins
from collections.abc import Mapping, Sequence
from typing import Final, TypedDict

from shoal.collectives.finals import Finals
from shoal.node.reporting import events
from shoal.node.reporting.event_log import EventLog
from shoal.node.training.trainer_messages import Contribution
from shoal.protocol.agreement import DurableRecord
from shoal.protocol.amending import settings_of
from shoal.protocol.bans import named
from shoal.protocol.forks import Fork
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Amendment, Certificate, Plan, Term, Value

_SIGNED: Final[Mapping[str, type[events.Signed]]] = {
    "prepare": events.Prepared,
    "vote": events.Voted,
    "propose": events.Proposed,
    "promise": events.ViewChanged,
}
"""Event of each kind of record of the agreement."""


def term_text(term: Term) -> str:
    """A term as it stands in events, folder names and status."""
    return f"{term.rebases}.{term.rollbacks}"


class RoundLog:
    """Writes the round events."""

    def __init__(self, log: EventLog) -> None:
        self._log = log

    def started(self, head: Value, role: str) -> None:
        """Write that the round after `head` begins."""
        self._log.write(
            events.RoundStarted(
                term=term_text(head.next_term), round=head.next_round, members=len(head.members), role=role
            )
        )

    def began(self, round: int, *, members: int) -> None:
        """Write that a gossip round begins, with so many members in sight."""
        self._log.write(events.RoundStarted(term=term_text(Term()), round=round, members=members, role="training"))

    def contributed(self, event: Contribution, tokens: int) -> None:
        """Write that this node's contribution is announced."""
        self._log.write(
            events.Contributed(
                round=event.round,
                tokens=tokens,
                loss=event.loss,
                steps=event.steps,
                seconds=round(event.seconds, 6),
                wall_s=round(event.wall_s, 6),
                blocked_s=round(event.blocked_s, 6),
            )
        )

    def planned(self, plan: Plan) -> None:
        """Write that a plan was accepted here."""
        self._log.write(
            events.Planned(
                round=plan.round,
                view=plan.view,
                attempt=plan.attempt,
                participants=len(plan.participants),
                contributors=len(plan.contributors()),
                evicted=tuple(plan.evicted),
                planner=plan.planner,
            )
        )

    def reduced(self, finals: Finals, digest: bytes, seconds: float) -> None:
        """Write that all finals of a plan are here and lead to `digest`."""
        self._log.write(
            events.Reduced(
                round=finals.plan.round,
                plan=finals.plan.hash.hex(),
                digest=digest.hex(),
                seconds=round(seconds, 6),
            )
        )

    def caught_up(self, round: int) -> None:
        """Write that the state of a round that this node did not compute is here."""
        self._log.write(events.CaughtUp(round=round))

    def persisted(self, record: DurableRecord) -> None:
        """Write that a vote or proposal is on disk."""
        kind = _SIGNED.get(record.kind)
        if kind is not None:
            self._log.write(kind(term=term_text(record.term), round=record.round, view=record.view))

    def rolled_back(self, value: Value) -> None:
        """Write that a round decided to go back, and its term is over."""
        self._log.write(events.RolledBack(to=value.state_round, **_decision(value)))

    def amended(self, value: Value, amendment: Amendment) -> None:
        """Write that a round decided that other settings are in force from the next one on."""
        self._log.write(events.Amended(settings=settings_of(amendment), **_decision(value)))

    def banned(self, value: Value) -> None:
        """Write that a round decided to go on without some who are proven to have lied."""
        bans = named(value)
        self._log.write(
            events.Banned(
                peers=tuple(ban.peer for ban in bans),
                evidence=tuple(ban.evidence.hex() for ban in bans),
                **_decision(value),
            )
        )

    def forked(self, fork: Fork) -> None:
        """Write that two certificates for one position were seen; this node signs nothing more."""
        self._log.write(
            events.Forked(
                term=term_text(fork.term),
                round=fork.round,
                values=(fork.one.value.hash.hex(), fork.other.value.hash.hex()),
                signers=tuple(fork.signers),
            )
        )

    def rebased(self, value: Value) -> None:
        """Write that the authority opened another term, in which `value` stands for the certificate of its round."""
        self._log.write(events.Rebased(to=value.state_round, **_decision(value)))

    def stepped(
        self,
        round: int,
        *,
        members: Sequence[PeerId],
        partner: PeerId | None,
        why: str,
        tokens: int,
        reduce_s: float,
        total_s: float,
        traffic: dict[str, int],
    ) -> None:
        """Write that the outer step of a gossip round is made; `why` says what kept it from having a partner."""
        self._log.write(
            events.Stepped(
                round=round,
                members=tuple(members),
                partner=partner,
                why=why,
                tokens=tokens,
                reduce_s=builtins.round(reduce_s, 6),
                total_s=builtins.round(total_s, 6),
                **traffic,
            )
        )

    def certified(
        self,
        certificate: Certificate,
        finals: Finals,
        *,
        me: PeerId,
        times: Mapping[str, float],
        traffic: Mapping[str, int],
    ) -> None:
        """Write that the round has its certificate, and its state is applied. `traffic`: bytes since the node started.

        me: this node, which it may have counted. times: in seconds: `reduce_s`; `total_s`, until the state was applied;
        and `kept_s`, how long test mode then took to keep what is recomputed.
        """
        value = certificate.value
        self._log.write(
            events.Certified(
                term=term_text(value.term),
                round=value.round,
                digest=value.digest.hex(),
                value=value.hash.hex(),
                view=certificate.view,
                members=tuple(value.members),
                contributors=len(finals.worked),
                counted=me in finals.worked,
                coverage=finals.coverage,
                tokens=value.tokens,
                reduce_s=round(times["reduce_s"], 6),
                total_s=round(times["total_s"], 6),
                kept_s=round(times["kept_s"], 6),
                **traffic,
            )
        )


class _Decided(TypedDict):
    """The fields of every `Decision`."""

    term: str
    round: int
    digest: str
    value: str
    members: tuple[str, ...]


def _decision(value: Value) -> _Decided:
    return _Decided(
        term=term_text(value.term),
        round=value.round,
        digest=value.digest.hex(),
        value=value.hash.hex(),
        members=tuple(value.members),
    )
