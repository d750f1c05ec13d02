"""A member's word: what it may still say after what it said before, in this life or an earlier one.

Only its own messages are looked at here, as someone would who heard all of them, and its log at the time. What several
members said together is for `agreement.py`.
"""

from __future__ import annotations

from collections.abc import Iterable

from shoal.protocol.agreement import DurableRecord
from shoal.protocol.messages import Leave, Message, Prepare, Propose, ViewChange, Vote
from shoal.protocol.wire import canonical

Log = tuple[DurableRecord, ...]
Said = frozenset[Message]

STAGES = 4
"""Of a view: moves to it, its lead, prepares, votes."""


def move_stage(view: int) -> int:
    """Rank of moving to a view, where lower views come first."""
    return STAGES * view


def lead_stage(view: int) -> int:
    """Rank of leading a view."""
    return STAGES * view + 1


def prepare_stage(view: int) -> int:
    """Rank of accepting what is proposed in a view."""
    return STAGES * view + 2


def vote_stage(view: int) -> int:
    """Rank of voting in a view."""
    return STAGES * view + 3


def stage(message: Message) -> int:
    """Rank of saying a message, where lower views come first."""
    if isinstance(message, ViewChange):
        return move_stage(message.view)
    if isinstance(message, Prepare):
        return prepare_stage(message.view)
    if isinstance(message, Vote):
        return vote_stage(message.view)
    return lead_stage(message.view) if isinstance(message, Propose) else 1


def order_of(message: Message) -> tuple[int, bytes]:
    """Key for sorting messages: lower views first, and the same order in each run."""
    return getattr(message, "view", 0), canonical(message)


def last_view(said: Iterable[Message]) -> int:
    """The highest view that a member announced to be in."""
    return max((m.view for m in said if isinstance(m, Prepare | Vote | ViewChange)), default=0)


def still_binding(said: Said) -> Said:
    """Proposals and the leave for good, the highest vote, and of the last view the change, which carries the rest, and
    the prepare."""
    last = last_view(said)
    voted = max((m.view for m in said if isinstance(m, Vote)), default=0)
    return frozenset(
        m
        for m in said
        if not isinstance(m, Prepare | Vote | ViewChange) or m.view == (voted if isinstance(m, Vote) else last)
    )


def broken_promise(log: Log, said: Said, message: Message) -> str | None:
    """Return the promise of its sender that `message` breaks, if any; `log` is what it has on disk."""
    votes = [m for m in said if isinstance(m, Vote)]
    prepares = [m for m in said if isinstance(m, Prepare)]
    changes = [m for m in said if isinstance(m, ViewChange)]
    views = [m.view for m in votes] + [m.view for m in prepares] + [m.view for m in changes]
    if isinstance(message, Leave):
        return "a leave after signing" if views else _unwritten(log, "leave")
    if isinstance(message, Propose):
        if any(isinstance(m, Propose) and m.view == message.view for m in said):
            return "two values in one view"
        return _unwritten(log, "propose", message.view, message.value.hash)
    if any(isinstance(m, Leave) for m in said):
        return "signed after leaving"
    if isinstance(message, Prepare):
        if any(m.view == message.view for m in prepares):
            return "two prepares in one view"
        if max(views, default=0) > message.view:
            return "a prepare below a promise"
        return _unwritten(log, "prepare", message.view, message.value)
    if isinstance(message, Vote):
        if any(m.view == message.view for m in votes):
            return "two votes in one view"
        if not any((m.view, m.value) == (message.view, message.value) for m in prepares):
            return "a vote for what was not prepared"
        if max(views, default=0) > message.view:
            return "a vote below a promise"
        return _unwritten(log, "vote", message.view, message.value)
    if isinstance(message, ViewChange):
        if max(views, default=0) >= message.view:
            return "a view went back"
        cast = [(m.view, m.value) for m in votes]
        cast += [carried_by(m) for m in changes if m.prepared is not None]
        carried = None if message.prepared is None else carried_by(message)
        if carried != max(cast, default=None):
            return "a vote that was not carried"
        return _unwritten(log, "promise", message.view)
    return f"{type(message).__name__} is no message of agreement"


def carried_by(change: ViewChange) -> tuple[int, bytes]:
    """View and value of the prepare certificate that a view change carries."""
    assert change.prepared is not None
    return change.prepared.prepared.view, change.prepared.value.hash


def _unwritten(log: Log, kind: str, view: int = 0, value: bytes | None = None) -> str | None:
    held = [record.value for record in log if (record.kind, record.view) == (kind, view)]
    if value is None:
        return None if held else "sent before it was written"
    return None if any(v is not None and v.hash == value for v in held) else "sent before it was written"
