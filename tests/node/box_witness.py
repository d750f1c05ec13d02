"""What nodes let out, judged against what was on their disks by then, and against all that they let out before.

By what a message binds its sender to, whatever the steps of the agreement are:

    Propose, Prepare, Vote      a record of that kind, view and value; one value a view; none below a view promised
    ViewChange                  a record of the promise
    Leave                       a record of it, and nothing else signed in that round
    Ready of a contribution     a record that it was announced, and one contribution a round
    Report                      the finals that it tells of
    Consent                     the state that it would go back to

A record may go once the certificate of its round is there. Nothing here looks into a node: only into what its disk
is sure to give back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.node.state.store import Store
from shoal.protocol.agreement import DurableRecord
from shoal.protocol.messages import Consent, Message, Ready, Report, Term
from shoal.protocol.planning import CONTRIBUTOR
from tests.node.simulated_disk import Disk

KINDS = {"Propose": "propose", "Prepare": "prepare", "Vote": "vote", "ViewChange": "promise", "Leave": "leave"}
FILLS_VIEW = frozenset({"propose", "prepare", "vote"})

Position = tuple[Term, int]


@dataclass(frozen=True, slots=True)
class Bound:
    """What a message binds its sender to: a kind of record, in a view, for a value where there is one."""

    position: Position
    kind: str
    view: int = 0
    value: bytes = b""

    @staticmethod
    def by(message: Any) -> Bound | None:
        """None where it binds to nothing."""
        if isinstance(message, Ready):
            return Bound((message.term, message.round), "ready") if message.role == CONTRIBUTOR else None
        kind = KINDS.get(type(message).__name__)
        if kind is None:
            return None
        value = getattr(message, "value", b"") if kind in FILLS_VIEW else b""
        value = value if isinstance(value, bytes) else value.hash
        return Bound((message.term, message.round), kind, getattr(message, "view", 0), value)

    @staticmethod
    def in_record(record: DurableRecord) -> Bound:
        """What a record on disk says."""
        value = record.value.hash if record.value is not None and record.kind in FILLS_VIEW else b""
        return Bound((record.term, record.round), record.kind, record.view, value)


@dataclass(eq=False)
class Safe:
    """What a power cut would leave of a node's two logs."""

    bound: frozenset[Bound] = frozenset()
    certified: frozenset[Position] = frozenset()

    def lacks(self, bound: Bound) -> bool:
        """Whether a promise is gone, and the certificate that would end it is not there."""
        return bound not in self.bound and bound.position not in self.certified


def read_safe(logs: dict[str, bytes], scratch: Path) -> Safe:
    """As the store itself reads them."""
    scratch.mkdir(parents=True, exist_ok=True)
    for name in ("agreement.log", "chain.log"):
        (scratch / name).write_bytes(logs.get(name, b""))
    with Store(scratch) as store:
        records = frozenset(Bound.in_record(record) for record in store.durable_records())
        return Safe(records, frozenset((entry.value.term, entry.value.round) for entry in store.certificates()))


@dataclass(eq=False)
class Witness:
    """Over all lives of one node."""

    name: str
    scratch: Path
    blames: list[str] = field(default_factory=list)
    said: list[Bound] = field(default_factory=list)
    roots: dict[Position, bytes] = field(default_factory=dict)
    _logs: dict[str, bytes] = field(default_factory=dict)
    _safe: Safe = field(default_factory=Safe)
    _seen: tuple[int, int] = (0, -1)

    def safe(self, disk: Disk) -> Safe:
        """What the disk is sure to give back."""
        if self._seen != (id(disk), disk.version):
            self._seen = id(disk), disk.version
            logs = {name: data for name in ("agreement.log", "chain.log") if (data := disk.safe(name)) is not None}
            if logs != self._logs:
                self._logs, self._safe = logs, read_safe(logs, self.scratch)
        return self._safe

    def let_out(self, message: Message, disk: Disk) -> None:
        """The node gave a message to its links."""
        if isinstance(message, Report) and disk.safe("finals", f"{message.round}-{message.plan.hex()}") is None:
            self._blame(f"a report of round {message.round} before its finals were on disk")
        if isinstance(message, Consent) and disk.safe("rollback", f"{message.target.round}.safetensors") is None:
            self._blame(f"a consent to go back to {message.target} before its state was on disk")
        bound = Bound.by(message)
        if bound is None:
            return
        if self.safe(disk).lacks(bound):
            self._blame(f"{bound} was let out and is not on disk")
        if bound in self.said:
            return
        if isinstance(message, Ready) and self.roots.setdefault(bound.position, message.root) != message.root:
            self._blame(f"two contributions in one round: {bound}")
        self._check_against_earlier(bound)
        self.said.append(bound)

    def _check_against_earlier(self, bound: Bound) -> None:
        for before in (one for one in self.said if one.position == bound.position):
            two_values = before.kind == bound.kind and before.kind in FILLS_VIEW and before.view == bound.view
            below = before.kind == "promise" and bound.kind in FILLS_VIEW and bound.view < before.view
            signed = {before.kind, bound.kind} - {"ready"}
            if two_values or below or ("leave" in signed and len(signed) > 1):
                self._blame(f"{bound} after {before}")

    def back(self, disk: Disk) -> None:
        """The node is to start from this disk: all that it ever let out binds it still."""
        safe = self.safe(disk)
        for bound in filter(safe.lacks, self.said):
            self._blame(f"{bound} was let out and its disk has forgotten it")

    def _blame(self, text: str) -> None:
        self.blames.append(f"{self.name}: {text}")
