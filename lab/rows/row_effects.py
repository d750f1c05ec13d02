"""Effects of a row's machine (row_round.py): orders to its node."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.lab.rows.row_messages import RowBegin, RowPlan, RowSaid
from shoal.protocol.identity import PeerId


@dataclass(frozen=True, slots=True)
class Tell:
    """Send this to `peer`: sealed by this node, or, where another is its `signer`, as it came."""

    peer: PeerId
    message: RowSaid
    signer: PeerId


@dataclass(frozen=True, slots=True)
class Begun:
    """A round of the row began: check and apply its entry, then train if `trains`, and say `trained`."""

    begin: RowBegin
    trains: bool


@dataclass(frozen=True, slots=True)
class SumRow:
    """Sum by this plan without those `gone`, places on the list, and say `summed`.

    Under a higher attempt it goes on: what others than the gone own stands.
    """

    plan: RowPlan
    attempt: int
    gone: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Report that no sum of its row has this node's contribution of `round`, as far as known; it counts in the next.

    What the certificate of the round says has the last word.
    """

    round: int


@dataclass(frozen=True, slots=True)
class RowDone:
    """The head has the row's mean: it takes it into the round of the heads, as much as `tokens`.

    `counted` are those in it, in the row's order.
    """

    round: int
    counted: tuple[PeerId, ...]
    tokens: int


@dataclass(frozen=True, slots=True)
class NoWeight:
    """The head has nothing to take into the round of the heads."""

    round: int
    reason: str


@dataclass(frozen=True, slots=True)
class TookOver:
    """Report that this node heads its row now: it joins the heads, as a newcomer."""

    turn: int


@dataclass(frozen=True, slots=True)
class Deposed:
    """Report that this node, which headed its row, was given up, and another does: it leaves the heads."""

    turn: int


@dataclass(frozen=True, slots=True)
class Out:
    """The row's list has this node no more: it may come again as a newcomer."""

    round: int


@dataclass(frozen=True, slots=True)
class Overdue:
    """Report of a wait that took too long: "list", "plan", "sum" or "certificate". Ask others for the chain."""

    what: str


RowEffect = Tell | Begun | SumRow | LeftOut | RowDone | NoWeight | TookOver | Deposed | Out | Overdue
