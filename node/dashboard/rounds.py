"""Rounds, certificates and what went wrong, as a node's event log tells them.

    round_started ── train ── contributed ── plan ── planned ── reduce ── reduced ── certify ── certified
                                               └── again with a later attempt or view, when somebody drops out

Under gossip a round ends with `stepped`; under rollouts it is one event, `rollouts`, that says how long it took.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import msgspec

from shoal.node.reporting.events import EventField

ROUND_LIMIT = 60
CERTIFICATE_LIMIT = 60
HAPPENING_LIMIT = 100
FAULTS_IN_ROUND_LIMIT = 16

Record = Mapping[str, EventField]

SEVERITY = {
    "died": "bad",
    "revoked": "bad",
    "evidence": "bad",
    "banned": "bad",
    "failed": "bad",
    "agent_died": "bad",
    "trainer_restarted": "bad",
    "suspected": "warn",
    "lost": "warn",
    "detoured": "warn",
    "evicted": "warn",
    "replanned": "warn",
    "view_changed": "warn",
    "rolled_back": "warn",
    "loop_detached": "warn",
    "departed": "info",
    "linked": "info",
    "revived": "info",
    "rebased": "info",
    "amended": "info",
    "caught_up": "info",
    "resumed": "info",
    "started": "info",
    "left": "info",
}
"""The events that people should hear of, and how bad each is."""
FAULTS = frozenset(kind for kind, severity in SEVERITY.items() if severity != "info") - {"lost", "detoured"}
"""What is marked in the round that it disturbed. Most lost links are made again, and a death has its own event."""


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """What disturbed a round. peer: about whom, if about one."""

    at: float
    kind: str
    peer: str = ""


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
    """One line of what happened. detail: text, possibly a peer's."""

    at: float
    kind: str
    severity: str
    peer: str = ""
    round: int | None = None
    detail: str = ""


class Rounds:
    """The newest rounds, certificates and happenings; `changed` gives what is new since it was last asked."""

    def __init__(self) -> None:
        self._rounds: OrderedDict[str, Round] = OrderedDict()
        self._touched: set[str] = set()
        self.certificates: list[CertificateFacts] = []
        self.happenings: list[Happening] = []
        self._new_certificates: list[CertificateFacts] = []
        self._new_happenings: list[Happening] = []
        self._current: Round | None = None

    @property
    def rounds(self) -> Sequence[Round]:
        """Oldest first."""
        return tuple(self._rounds.values())

    def hear(self, record: Record) -> None:
        """Take one event. Raises KeyError, TypeError or ValueError for one that no node of this version writes."""
        kind, at = text_of(record, "event"), number_of(record, "at")
        match kind:
            case "round_started":
                self._open(record, at)
            case "contributed" | "planned" | "reduced":
                self._mark(kind, record, at)
            case "certified":
                self._certified(record, at)
            case "stepped" | "caught_up" | "rollouts":
                self._ended(kind, record, at)
        if kind == "banned":
            for peer in texts_of(record, "peers"):
                self.happened(kind, at, peer=peer)
        elif kind == "died" and record.get("left") is True:
            self.happened("departed", at, peer=optional_text(record, "peer"))
        elif kind in SEVERITY:
            self.happened(kind, at, peer=optional_text(record, "peer"), detail=_detail(kind, record))

    def happened(self, kind: str, at: float, *, peer: str = "", detail: str = "") -> None:
        """Note a happening, and a fault in the round under way."""
        current = self._current
        happening = Happening(
            at=at,
            kind=kind,
            severity=SEVERITY[kind],
            peer=peer,
            round=None if current is None else current.round,
            detail=detail,
        )
        self.happenings = [*self.happenings, happening][-HAPPENING_LIMIT:]
        self._new_happenings = [*self._new_happenings, happening][-HAPPENING_LIMIT:]
        if kind in FAULTS and current is not None and len(current.faults) < FAULTS_IN_ROUND_LIMIT:
            current.faults.append(Fault(at=at, kind=kind, peer=peer))
            self._touched.add(current.key)

    def changed(self) -> tuple[list[Round], list[CertificateFacts], list[Happening]]:
        """What changed since the last call, in order."""
        rounds = [round for key, round in self._rounds.items() if key in self._touched]
        certificates, happenings = self._new_certificates, self._new_happenings
        self._touched, self._new_certificates, self._new_happenings = set(), [], []
        return rounds, certificates, happenings

    # -- rounds ----------------------------------------------------------------------------------------------

    def _open(self, record: Record, at: float) -> None:
        round = self._round(optional_text(record, "term") or "0.0", whole_of(record, "round"), at)
        round.role, round.members = optional_text(record, "role"), whole_of(record, "members")
        self._current = round

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

    def _mark(self, kind: str, record: Record, at: float) -> None:
        round = self._newest(whole_of(record, "round"))
        if round is None or round.ended is not None:
            return
        if kind == "contributed":
            round.contributed, round.loss = at, finite_or_none(record, "loss")
        elif kind == "reduced":
            round.reduced = at
        else:
            view, attempt = whole_of(record, "view"), whole_of(record, "attempt")
            if round.planned is not None and (view, attempt) > (round.view, round.attempt):
                self.happened("replanned", at, detail=f"view {view}, attempt {attempt}")
            round.planned, round.view, round.attempt = at, view, attempt
            round.contributors = whole_of(record, "contributors")
            known = {fault.peer for fault in round.faults if fault.kind == "evicted"}
            for peer in sorted(set(texts_of(record, "evicted")) - known):
                self.happened("evicted", at, peer=peer)

    def _certified(self, record: Record, at: float) -> None:
        number, term = whole_of(record, "round"), text_of(record, "term")
        total_s = number_of(record, "total_s")
        round = self._round(term, number, at - total_s)
        members, contributors = len(texts_of(record, "members")), whole_of(record, "contributors")
        coverage = number_of(record, "coverage")
        round.state, round.ended, round.digest = "certified", at, text_of(record, "digest")
        round.members, round.contributors, round.coverage = members, contributors, coverage
        round.tokens, round.view = whole_of(record, "tokens"), whole_of(record, "view")
        certificate = CertificateFacts(
            at=at,
            term=term,
            round=number,
            digest=round.digest,
            value=text_of(record, "value"),
            view=round.view,
            members=members,
            contributors=contributors,
            coverage=coverage,
            tokens=round.tokens,
            seconds=total_s,
        )
        self.certificates = [*self.certificates, certificate][-CERTIFICATE_LIMIT:]
        self._new_certificates = [*self._new_certificates, certificate][-CERTIFICATE_LIMIT:]

    def _ended(self, kind: str, record: Record, at: float) -> None:
        number = whole_of(record, "round")
        if kind == "rollouts":
            round = self._round("0.0", number, at - number_of(record, "seconds"))
            round.state, round.ended, round.tokens = "shared", at, whole_of(record, "tokens")
            round.loss = None
            self._current = round
            return
        found = self._newest(number)
        if found is None or found.state == "certified":
            return
        found.ended = at
        found.state = "stepped" if kind == "stepped" else "skipped"
        if kind == "stepped":
            found.partner, found.tokens = optional_text(record, "partner"), whole_of(record, "tokens")


def _detail(kind: str, record: Record) -> str:
    if kind in ("rolled_back", "rebased"):
        return f"to round {whole_of(record, 'to')}"
    if kind in ("caught_up", "resumed"):
        return f"round {whole_of(record, 'round')}"
    if kind == "evidence":
        return optional_text(record, "kind")[:300]
    if kind == "view_changed":
        return f"view {whole_of(record, 'view')}"
    if kind == "amended":
        settings = record.get("settings")
        return ", ".join(f"{key} = {value}" for key, value in settings.items()) if isinstance(settings, Mapping) else ""
    return next((str(record[key])[:300] for key in ("cause", "message", "reason") if record.get(key)), "")


# -- fields of an event, which may have been read from a file ------------------------------------------------------


def text_of(record: Record, key: str) -> str:
    """A text. Raises KeyError, TypeError."""
    value = record[key]
    if not isinstance(value, str):
        raise TypeError(f"{key} is no text")
    return value


def optional_text(record: Record, key: str) -> str:
    """A text, or "" for what is missing or null."""
    value = record.get(key)
    return value if isinstance(value, str) else ""


def number_of(record: Record, key: str) -> float:
    """A finite number. Raises KeyError, TypeError, ValueError."""
    value = record[key]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{key} is no number")
    if not math.isfinite(value):
        raise ValueError(f"{key} is not finite")
    return float(value)


def whole_of(record: Record, key: str) -> int:
    """A whole number. Raises KeyError, TypeError, ValueError."""
    return int(number_of(record, key))


def finite_or_none(record: Record, key: str) -> float | None:
    """A finite number, or None."""
    value = record.get(key)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def texts_of(record: Record, key: str) -> list[str]:
    """A list of texts. Raises KeyError, TypeError."""
    value = record[key]
    if isinstance(value, str | Mapping) or not isinstance(value, Sequence):
        raise TypeError(f"{key} is no list")
    return [str(item) for item in value]
