"""Messages of a row's members in a round of it; what each does about them is in row_round.py.

    message    from                    to                        until
    RowBegin   the head, passed on     its row, down a tree      each below has heard it
    RowReady   a member                the head                  the head has heard it
    RowPlan    the head                its row                   each has heard it
    RowLoss    the head                who sums                  each has heard it
    RowHead    the next head           its row                   each has heard it
    RowAsk     who lacks the list      who began                 the answer, a RowBegin with the list in full
    RowHeard   who got one of these    whoever delivered it      –

No daemon says these yet, so they are on no list of the wire and may still change.

*Stamps.* Each has a `turn`: the number on the row's list (row_list.py) of the head that it is about. Heads follow each
other in the order of the list, and numbers are given once; so what is of a lower (turn, term, round) is stale, whoever
says it, and who was cut off as head gives way to who took its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec

from shoal.protocol.messages import WEIGHT_LIMIT, Attempt, Count, Entry, Hash, Peer, RoundMessage, Term, domain_hash

ROW_LIMIT = 1024
"""Members of a row: three times as many as ten thousand make in 32 rows."""
TURN_LIMIT = 1 << 32

Turn = Annotated[int, msgspec.Meta(ge=0, lt=TURN_LIMIT)]
RowPlace = Annotated[int, msgspec.Meta(ge=0, lt=ROW_LIMIT)]
RowPeers = Annotated[tuple[Peer, ...], msgspec.Meta(max_length=ROW_LIMIT)]
RowPlaces = Annotated[tuple[RowPlace, ...], msgspec.Meta(max_length=ROW_LIMIT)]
What = Literal["rowbegin", "rowready", "rowplan", "rowloss", "rowhead"]

Stamp = tuple[int, Term, int]
"""(turn, term, round), compared in this order."""


class RowMessage(RoundMessage, frozen=True, kw_only=True):
    """A message of one round of one row, under the head of `turn`."""

    turn: Turn

    @property
    def stamp(self) -> Stamp:
        """Stamp: of two messages, the one with the higher is newer."""
        return self.turn, self.term, self.round


class RowBegin(RowMessage, frozen=True, kw_only=True):
    """The head begins a round. `entry` is what the chain was extended by, none after the genesis.

    The list is the last round's without `gone`, then `came`, who weigh nothing in this round; `list` is its hash. `row`
    and `numbers` have it in full, for who asked; `next_number` is then that of the next newcomer.
    """

    list: Hash
    gone: RowPeers = ()
    came: RowPeers = ()
    row: RowPeers = ()
    numbers: Annotated[tuple[Turn, ...], msgspec.Meta(max_length=ROW_LIMIT)] = ()
    next_number: Turn = 0
    entry: Entry | None = None

    def __post_init__(self) -> None:
        value = None if self.entry is None else self.entry.value
        if value and (value.hash, value.next_term, value.next_round) != (self.base, self.term, self.round):
            raise ValueError("the entry of another round")


class RowAsk(RowMessage, frozen=True, kw_only=True):
    """The sender does not know the list of the round, or not that it began."""


class RowReady(RowMessage, frozen=True, kw_only=True):
    """The sender's contribution is fixed: its tokens, and `root` over its encoded chunks. Without tokens it has none.

    Rates are in bytes/s, 0 where unknown. `life` is drawn when a process starts: who was restarted has another.
    """

    tokens: Annotated[int, msgspec.Meta(ge=0, le=WEIGHT_LIMIT)]
    upload: Count
    download: Count
    root: Hash
    life: Hash


class RowTerm(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One who sums: its place on the list, its tokens, 0 if it does not count, and its rates in bytes/s."""

    place: RowPlace
    tokens: Annotated[int, msgspec.Meta(ge=0, le=WEIGHT_LIMIT)]
    upload: Count
    download: Count


class RowPlan(RowMessage, frozen=True, kw_only=True):
    """Plan of a row: who sums and who counts, by places on the list of hash `list`; one for every turn and round.

    The owner of each chunk follows from `two_level.row_owners` of these rates. `roots` is the hash over the roots of
    those that count, in this order.
    """

    list: Hash
    terms: Annotated[tuple[RowTerm, ...], msgspec.Meta(min_length=1, max_length=ROW_LIMIT)]
    roots: Hash

    def __post_init__(self) -> None:
        if any(one.place >= other.place for one, other in zip(self.terms, self.terms[1:], strict=False)):
            raise ValueError("terms out of order")


class RowLoss(RowMessage, frozen=True, kw_only=True):
    """The plan again, number `attempt`, without those at these places of the list; with all of earlier attempts."""

    attempt: Annotated[int, msgspec.Meta(ge=1, lt=1 << 16)]
    gone: Annotated[tuple[RowPlace, ...], msgspec.Meta(min_length=1, max_length=ROW_LIMIT)]

    def __post_init__(self) -> None:
        if any(one >= other for one, other in zip(self.gone, self.gone[1:], strict=False)):
            raise ValueError("places out of order")


class RowHead(RowMessage, frozen=True, kw_only=True):
    """The sender is head now, and the row has no weight in this round. `gone` are those it knows to be gone."""

    gone: RowPeers


class RowHeard(RowMessage, frozen=True, kw_only=True):
    """The sender has this message, and need not be told again."""

    what: What
    attempt: Attempt = 0


FromHead = RowBegin | RowPlan | RowLoss | RowHead
RowSaid = FromHead | RowReady | RowAsk | RowHeard


def roots_hash(roots: Sequence[bytes]) -> bytes:
    """Hash that names the contributions that count."""
    return domain_hash("row roots", *roots)
