"""What the event log says about rounds; the fields are listed in docs/interfaces.md."""

from __future__ import annotations

import builtins
from collections.abc import Mapping, Sequence

from shoal.collectives.finals import Finals
from shoal.node.reporting.events import EventLog
from shoal.node.training.trainer_messages import Contribution
from shoal.protocol.agreement import DurableRecord
from shoal.protocol.amending import settings_of
from shoal.protocol.bans import named
from shoal.protocol.forks import Fork
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Amendment, Certificate, Plan, Term, Value


def term_text(term: Term) -> str:
    """A term as it stands in events, folder names and status."""
    return f"{term.rebases}.{term.rollbacks}"


class RoundLog:
    """Writes the round events."""

    def __init__(self, events: EventLog) -> None:
        self._events = events

    def started(self, head: Value, role: str) -> None:
        """The round after `head` begins."""
        self._events.write(
            "round_started",
            term=term_text(head.next_term),
            round=head.next_round,
            members=len(head.members),
            role=role,
        )

    def began(self, round: int, *, members: int) -> None:
        """Strategy gossip: a round begins, with so many members in sight."""
        self._events.write("round_started", term=term_text(Term()), round=round, members=members, role="training")

    def contributed(self, event: Contribution, tokens: int) -> None:
        """This node's contribution is announced."""
        self._events.write(
            "contributed",
            round=event.round,
            tokens=tokens,
            loss=event.loss,
            steps=event.steps,
            seconds=round(event.seconds, 6),
            wall_s=round(event.wall_s, 6),
            blocked_s=round(event.blocked_s, 6),
        )

    def planned(self, plan: Plan) -> None:
        """A plan was accepted here."""
        self._events.write(
            "planned",
            round=plan.round,
            view=plan.view,
            attempt=plan.attempt,
            participants=len(plan.participants),
            contributors=len(plan.contributors()),
            evicted=plan.evicted,
            planner=plan.planner,
        )

    def reduced(self, finals: Finals, digest: bytes, seconds: float) -> None:
        """All finals of a plan are here and lead to `digest`."""
        self._events.write(
            "reduced",
            round=finals.plan.round,
            plan=finals.plan.hash.hex(),
            digest=digest.hex(),
            seconds=round(seconds, 6),
        )

    def caught_up(self, round: int) -> None:
        """The state of a round that this node did not compute is here."""
        self._events.write("caught_up", round=round)

    def persisted(self, record: DurableRecord) -> None:
        """A vote or proposal is on disk."""
        names = {"prepare": "prepared", "vote": "voted", "propose": "proposed", "promise": "view_changed"}
        if record.kind in names:
            term = term_text(record.term)
            self._events.write(names[record.kind], term=term, round=record.round, view=record.view)

    def rolled_back(self, value: Value) -> None:
        """A round decided to go back, and its term is over."""
        self._events.write("rolled_back", to=value.state_round, **_decision(value))

    def amended(self, value: Value, amendment: Amendment) -> None:
        """A round decided that other settings are in force from the next one on."""
        self._events.write("amended", settings=settings_of(amendment), **_decision(value))

    def banned(self, value: Value) -> None:
        """A round decided to go on without some who are proven to have lied."""
        bans = named(value)
        self._events.write(
            "banned",
            peers=[ban.peer for ban in bans],
            evidence=[ban.evidence.hex() for ban in bans],
            **_decision(value),
        )

    def forked(self, fork: Fork) -> None:
        """Two certificates for one position were seen; this node signs nothing more."""
        self._events.write(
            "forked",
            term=term_text(fork.term),
            round=fork.round,
            values=[fork.one.value.hash.hex(), fork.other.value.hash.hex()],
            signers=fork.signers,
        )

    def rebased(self, value: Value) -> None:
        """The authority opened another term, in which `value` stands for the certificate of its round."""
        self._events.write("rebased", to=value.state_round, **_decision(value))

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
        """Strategy gossip: the outer step of a round is made; `why` says what kept it from having a partner."""
        self._events.write(
            "stepped",
            round=round,
            members=members,
            partner=partner,
            why=why,
            tokens=tokens,
            reduce_s=builtins.round(reduce_s, 6),
            total_s=builtins.round(total_s, 6),
            **traffic,
        )

    def certified(
        self, certificate: Certificate, finals: Finals, *, times: Mapping[str, float], traffic: Mapping[str, int]
    ) -> None:
        """The round has its certificate, and its state is applied here. `traffic`: bytes since the node started.

        times: in seconds: `reduce_s`; `total_s`, until the state was applied; and `kept_s`, how long test mode then
        took to keep what is recomputed.
        """
        value = certificate.value
        self._events.write(
            "certified",
            term=term_text(value.term),
            round=value.round,
            digest=value.digest.hex(),
            value=value.hash.hex(),
            view=certificate.view,
            members=value.members,
            contributors=finals.contributors,
            coverage=finals.coverage,
            tokens=value.tokens,
            **{name: round(seconds, 6) for name, seconds in times.items()},
            **traffic,
        )


def _decision(value: Value) -> dict[str, str | int | Sequence[str]]:
    return {
        "term": term_text(value.term),
        "round": value.round,
        "digest": value.digest.hex(),
        "value": value.hash.hex(),
        "members": value.members,
    }
