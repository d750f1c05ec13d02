"""Rounds, certificates and what went wrong, as a node's event log tells them.

    round_started ── train ── contributed ── plan ── planned ── reduce ── reduced ── certify ── certified
                                               └── again with a later attempt or view, when somebody drops out

Under gossip a round ends with `stepped`; under rollouts it is one event, `rollouts`, that says how long it took.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from math import isfinite

import msgspec

from shoal.node.happenings import DEPARTED, EVICTED, REPLANNED, SEVERITY, words_of
from shoal.node.reporting import events
from shoal.node.reporting.events import Event, name_of

ROUND_LIMIT = 60
CERTIFICATE_LIMIT = 60
HAPPENING_LIMIT = 100
FAULTS_IN_ROUND_LIMIT = 16
DETAIL_LIMIT_CHARS = 300
ALIKE_LIMIT = 6
ALIKE_S = 1.0
"""Of more than so many happenings of one kind within that time, the others are counted by the last: a thousand nodes
that die at once are told in a few lines, and push nothing else out of sight."""

FAULTS = frozenset(kind for kind, severity in SEVERITY.items() if severity != "info") - {
    name_of(kind) for kind in (events.Lost, events.Detoured, events.Parted, events.Stranded)
}
"""Events that are marked in the round they disturbed. Most lost links are made again, and a death has its own event."""


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """Disturbance of a round. peer: about whom, if about one. text: in words, with the PeerId."""

    at: float
    kind: str
    peer: str = ""
    text: str = ""


class Round(msgspec.Struct, kw_only=True):
    """One round here. Times are the wall clock's, None until it came so far.

    state: open, certified, stepped (gossip), shared (rollouts), or skipped: its state came from others.
    """

    key: str
    term: str
    round: int
    state: str = "open"
    role: str = ""
    members: int = 0
    contributors: int | None = None
    coverage: float | None = None
    tokens: int | None = None
    loss: float | None = None
    began: float
    contributed: float | None = None
    planned: float | None = None
    reduced: float | None = None
    ended: float | None = None
    view: int = 0
    attempt: int = 0
    digest: str = ""
    partner: str = ""
    faults: list[Fault] = []


class CertificateFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A certificate that this node has."""

    at: float
    term: str
    round: int
    digest: str
    value: str
    view: int
    members: int
    contributors: int
    coverage: float
    tokens: int
    seconds: float


class Happening(msgspec.Struct, frozen=True, kw_only=True):
    """One line of what happened. text: in words, with the PeerId of whom it is about.

    detail: text, possibly a peer's. more: others of its kind that it stands for too.
    """

    at: float
    kind: str
    severity: str
    text: str
    peer: str = ""
    round: int | None = None
    detail: str = ""
    more: int = 0


class Rounds:
    """The newest rounds, certificates and happenings; `changed` gives what is new since it was last asked."""

    def __init__(self) -> None:
        self._rounds: OrderedDict[str, Round] = OrderedDict()
        self._touched: set[str] = set()
        self.certificates: list[CertificateFacts] = []
        self.happenings: list[Happening] = []
        self._new_certificates: list[CertificateFacts] = []
        self._new_happenings: list[Happening] = []
        self._alike: dict[str, tuple[float, int]] = {}
        """Of each kind, since when there were how many within `ALIKE_S`."""
        self._current: Round | None = None

    @property
    def rounds(self) -> Sequence[Round]:
        """Rounds, the oldest first."""
        return tuple(self._rounds.values())

    def hear(self, event: Event) -> None:
        """Take one event."""
        match event:
            case events.RoundStarted():
                self._current = round = self._round(event.term, event.round, event.at)
                round.role, round.members = event.role, event.members
            case events.Contributed() | events.Planned() | events.Reduced():
                self._mark(event)
            case events.Certified():
                self._certified(event)
            case events.Rollouts():
                self._current = round = self._round(event.term, event.round, event.at - event.seconds)
                round.state, round.ended, round.tokens = "shared", event.at, event.tokens
            case events.Stepped() | events.CaughtUp():
                self._ended(event)
        match event:
            case events.Banned():
                for peer in event.peers:
                    self.happened(event.name, event.at, peer=peer)
            case events.Died(left=True):
                self.happened(DEPARTED, event.at, peer=event.peer)
            case _ if event.name in SEVERITY:
                peer = getattr(event, "peer", "")
                self.happened(event.name, event.at, peer=peer, detail=_detail(event))

    def happened(self, kind: str, at: float, *, peer: str = "", detail: str = "") -> None:
        """Note a happening, and a fault in the round under way."""
        current = self._current
        happening = Happening(
            at=at,
            kind=kind,
            severity=SEVERITY[kind],
            text=words_of(kind, peer),
            peer=peer,
            round=None if current is None else current.round,
            detail=detail,
        )
        if not self._counted(happening):
            self.happenings = [*self.happenings, happening][-HAPPENING_LIMIT:]
            self._new_happenings = [*self._new_happenings, happening][-HAPPENING_LIMIT:]
        if kind in FAULTS and current is not None and len(current.faults) < FAULTS_IN_ROUND_LIMIT:
            current.faults.append(Fault(at=at, kind=kind, peer=peer, text=happening.text))
            self._touched.add(current.key)

    def _counted(self, happening: Happening) -> bool:
        """True if it is one of many alike, and counted by the last of them that viewers have not been told of yet."""
        began, alike = self._alike.get(happening.kind, (happening.at, 0))
        if happening.at - began >= ALIKE_S:
            began, alike = happening.at, 0
        self._alike[happening.kind] = began, alike + 1
        if alike < ALIKE_LIMIT:
            return False
        last = next((known for known in reversed(self._new_happenings) if known.kind == happening.kind), None)
        if last is None:
            return False
        fuller = msgspec.structs.replace(last, more=last.more + 1)
        self.happenings, self._new_happenings = (
            [fuller if known is last else known for known in kept] for kept in (self.happenings, self._new_happenings)
        )
        return True

    def changed(self) -> tuple[list[Round], list[CertificateFacts], list[Happening]]:
        """Rounds, certificates and happenings that changed since the last call, in order."""
        rounds = [round for key, round in self._rounds.items() if key in self._touched]
        certificates, happenings = self._new_certificates, self._new_happenings
        self._touched, self._new_certificates, self._new_happenings = set(), [], []
        return rounds, certificates, happenings

    # -- rounds ----------------------------------------------------------------------------------------------

    def _round(self, term: str, number: int, at: float) -> Round:
        key = f"{term}/{number}"
        if key not in self._rounds:
            self._rounds[key] = Round(key=key, term=term, round=number, began=at)
            while len(self._rounds) > ROUND_LIMIT:
                gone, _ = self._rounds.popitem(last=False)
                self._touched.discard(gone)
        self._touched.add(key)
        return self._rounds[key]

    def _newest(self, number: int) -> Round | None:
        """The newest round with this number."""
        found = next((round for round in reversed(self._rounds.values()) if round.round == number), None)
        if found is not None:
            self._touched.add(found.key)
        return found

    def _mark(self, event: events.Contributed | events.Planned | events.Reduced) -> None:
        round, at = self._newest(event.round), event.at
        if round is None or round.ended is not None:
            return
        match event:
            case events.Contributed():
                round.contributed = at
                round.loss = event.loss if event.loss is not None and isfinite(event.loss) else None
            case events.Reduced():
                round.reduced = at
            case events.Planned():
                if round.planned is not None and (event.view, event.attempt) > (round.view, round.attempt):
                    self.happened(REPLANNED, at, detail=f"view {event.view}, attempt {event.attempt}")
                round.planned, round.view, round.attempt = at, event.view, event.attempt
                round.contributors = event.contributors
                known = {fault.peer for fault in round.faults if fault.kind == EVICTED}
                for peer in sorted(set(event.evicted) - known):
                    self.happened(EVICTED, at, peer=peer)

    def _certified(self, event: events.Certified) -> None:
        round = self._round(event.term, event.round, event.at - event.total_s)
        round.state, round.ended, round.digest = "certified", event.at, event.digest
        round.members, round.contributors, round.coverage = len(event.members), event.contributors, event.coverage
        round.tokens, round.view = event.tokens, event.view
        certificate = CertificateFacts(
            at=event.at,
            term=event.term,
            round=event.round,
            digest=event.digest,
            value=event.value,
            view=event.view,
            members=len(event.members),
            contributors=event.contributors,
            coverage=event.coverage,
            tokens=event.tokens,
            seconds=event.total_s,
        )
        self.certificates = [*self.certificates, certificate][-CERTIFICATE_LIMIT:]
        self._new_certificates = [*self._new_certificates, certificate][-CERTIFICATE_LIMIT:]

    def _ended(self, event: events.Stepped | events.CaughtUp) -> None:
        """Note that a round ended without a certificate of this node's."""
        round = self._newest(event.round)
        if round is None or round.state == "certified":
            return
        round.ended = event.at
        if isinstance(event, events.Stepped):
            round.state, round.partner, round.tokens = "stepped", event.partner or "", event.tokens
        else:
            round.state = "skipped"


def _detail(event: Event) -> str:
    match event:
        case events.RolledBack() | events.Rebased():
            return f"to round {event.to}"
        case events.CaughtUp() | events.Resumed():
            return f"round {event.round}"
        case events.ViewChanged():
            return f"view {event.view}"
        case events.Amended():
            return ", ".join(f"{key} = {value}" for key, value in event.settings.items())
        case events.Evidence():
            return event.kind[:DETAIL_LIMIT_CHARS]
        case events.AgentDied() | events.TrainerRestarted() | events.LoopDetached():
            return event.cause[:DETAIL_LIMIT_CHARS]
        case events.Failed():
            return event.message[:DETAIL_LIMIT_CHARS]
        case events.Left():
            return event.reason[:DETAIL_LIMIT_CHARS]
    return ""
