"""The rows of a grid of simulated peers: who is in one, what they make and sum, and the same again for the judge."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from shoal.collectives.aggregate import Term
from shoal.collectives.codecs import F32, U8, Codec
from shoal.collectives.grid import Grid
from shoal.lab.rows.row_messages import RowPlan
from shoal.lab.rows.two_level import row_mean, row_owners
from shoal.lab.simulate.network import CONTROL_OVERHEAD_BYTES, ENVELOPE_BYTES
from shoal.protocol.identity import PeerId
from shoal.protocol.membership import MembershipMachine
from shoal.protocol.peering import Ack, Nack, Ping, PingRequest, Suspicion
from shoal.protocol.wire import canonical

ROW_CHUNKS = 1024
"""So finely is a row's work dealt."""

Made = tuple[F32, int]
"""Values, (numel,) float32, and the tokens they weigh."""
Given = tuple[list[U8], int]
"""The same as it travels: the values encoded, chunk by chunk."""


@dataclass(slots=True)
class Leaf:
    """A peer of a cell. Rates are in bytes/s; delays_s: one way to each region, without jitter."""

    number: int
    id: PeerId
    cell: int
    region: int
    delays_s: Sequence[float]
    train_s: float
    upload: float
    download: float
    machine: MembershipMachine
    up: bool = True
    near: frozenset[int] = frozenset()
    near_since: dict[int, float] = field(default_factory=dict)
    looked_at: float = 0.0
    silent_since: float = 0.0
    arranged_at: float = 0.0
    """When it got the neighbours that it has."""
    control_bytes: int = 0
    seat: int | None = None
    """Its number among the heads, if it is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowWork:
    """Cost of a row's sum to each of its members: bytes sent, and the time of the slowest of them."""

    sent: tuple[float, ...]
    took_s: float


@dataclass(slots=True)
class RowSum:
    """The chunks of a row under way, by the plan that its members follow: `summers` by number, in the plan's order.

    They move from when all have begun under the attempt who live and are not `gone`, by place on the list; `due_at` is
    when the last that began so is over. `left` are the summers that are not gone, and `waiting` has those of them, and
    the `head`, that have not begun.
    """

    plan: RowPlan
    summers: tuple[int, ...]
    head: int
    began_at: float
    attempt: int = 0
    gone: tuple[int, ...] = ()
    due_at: float | None = None
    left: tuple[int, ...] = field(init=False)
    waiting: set[int] = field(init=False)

    def __post_init__(self) -> None:
        self.attempted(self.attempt, self.gone)

    def attempted(self, attempt: int, gone: tuple[int, ...]) -> None:
        """The plan goes on, without more of those who sum; nobody has begun under that attempt yet."""
        both = zip(self.plan.terms, self.summers, strict=True)
        self.attempt, self.gone = attempt, gone
        self.left = tuple(number for term, number in both if term.place not in gone)
        self.waiting = {*self.left, self.head}

    def work(self, model_bytes: float, *, anew: bool = False) -> RowWork:
        """The cost of this sum, or with `anew` that of one from which nobody has gone."""
        rates = [(term.upload, term.download) for term in self.plan.terms]
        gone = [] if anew else [at for at, term in enumerate(self.plan.terms) if term.place in self.gone]
        return row_work(rates, model_bytes, gone=gone)


@dataclass(slots=True)
class Cell:
    """A row as the simulation knows it: `ring` is its list, by number; `row` what its head has of the round, if it has.

    `counted` are those in it, `given` is what they sent, and `round` is that of all three.
    """

    number: int
    ring: list[int] = field(default_factory=list)
    head: int = -1
    verdicts: dict[int, set[int]] = field(default_factory=dict)
    sum: RowSum | None = None
    round: int = 0
    row: tuple[F32, int] | None = None
    counted: tuple[int, ...] = ()
    given: list[Given] = field(default_factory=list)


def made_by(seed: int, number: int, round: int, numel: int) -> Made:
    """Values and tokens that a peer makes in a round: the same in every run of the seed."""
    values = np.random.default_rng([seed, number, round]).standard_normal(numel)
    return values.astype(np.float32), tokens_of(number)


def tokens_of(number: int) -> int:
    """Of how many tokens."""
    return 50 + number % 101


def given_by(how: Codec, grid: Grid, made: Made) -> Given:
    """The part that a peer sends of what it made."""
    values, tokens = made
    return [how.encode(values[slice(*grid.span(chunk))]) for chunk in range(grid.chunks)], tokens


def summed_row(how: Codec, grid: Grid, given: Sequence[Given]) -> Made:
    """The token-weighted mean of a row, chunk by chunk, and its tokens. given: what counts, in the row's order."""
    values = np.empty(grid.numel, np.float32)
    for chunk in range(grid.chunks):
        terms = [Term(place, weight, own[chunk]) for place, (own, weight) in enumerate(given)]
        values[slice(*grid.span(chunk))] = row_mean(how, terms, grid.length(chunk)).values
    return values, sum(weight for _, weight in given)


def plain_row(how: Codec, grid: Grid, given: Sequence[Given]) -> F32:
    """The same for the judge, who shares no sum with it."""
    heard = np.empty((len(given), grid.numel), np.float32)
    for chunk in range(grid.chunks):
        here = slice(*grid.span(chunk))
        for place, (own, _) in enumerate(given):
            how.decode_into(own[chunk], heard[place, here])
    weights = np.array([weight for _, weight in given], np.float32)
    mean: F32 = np.add.accumulate(heard * weights[:, None], axis=0)[-1] / np.float32(sum(w for _, w in given))
    return mean.astype(np.float32)


def row_work(rates: Sequence[tuple[float, float]], model_bytes: float, *, gone: Collection[int] = ()) -> RowWork:
    """Contributions to the owners of their chunks, and the means from there; rates as in `row_owners`.

    Of who is `gone` the others take over what it owned. Every member sends and receives as much.
    """
    whole = [(int(upload), int(download)) for upload, download in rates]
    owners = row_owners(whole, ROW_CHUNKS, gone=gone)
    shares = [0] * len(rates)
    for owner in owners:
        shares[owner] += 1
    others = len(rates) - len(gone) - 1
    sent = tuple(
        0.0 if place in gone else model_bytes * (1 + (others - 1) * share / ROW_CHUNKS)
        for place, share in enumerate(shares)
    )
    slowest = max(moved / min(rate) for moved, rate in zip(sent, rates, strict=True)) if others else 0.0
    return RowWork(sent=sent, took_s=slowest)


def message_sizes() -> dict[type, int]:
    """Bytes of the detector's messages, sealed and on the wire."""
    peer = PeerId("1" * 52)
    samples = (
        Ping(nonce=2**61, incarnation=1),
        Ack(nonce=2**61, incarnation=1),
        PingRequest(target=peer, nonce=2**61),
        Nack(target=peer, nonce=2**61),
        Suspicion(peer=peer, incarnation=1),
    )
    return {type(one): len(canonical(one)) + ENVELOPE_BYTES + CONTROL_OVERHEAD_BYTES for one in samples}
