"""The rows of a grid of simulated peers: who is in one, what they make and sum, and the same again for the judge."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from shoal.collectives.codecs import F32, Codec
from shoal.collectives.grid import Grid
from shoal.collectives.summing import Term
from shoal.collectives.two_level import row_mean, row_owners
from shoal.protocol.identity import PeerId
from shoal.protocol.membership import MembershipMachine
from shoal.protocol.peering import Ack, Nack, Ping, PingRequest, Suspicion
from shoal.protocol.wire import canonical
from shoal.testnet.simulate.network import CONTROL_OVERHEAD_BYTES, ENVELOPE_BYTES

ROW_CHUNKS = 1024
"""So finely is a row's work dealt."""

Made = tuple[F32, int]
"""Values, (numel,) float32, and the tokens they weigh."""


@dataclass(slots=True)
class Leaf:
    """A peer of a cell. Rates are in bytes/s."""

    number: int
    id: PeerId
    cell: int
    region: int
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
    since_round: int = 0
    control_bytes: int = 0
    bulk_bytes: float = 0.0
    seat: int | None = None
    """Its number among the heads, if it is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowWork:
    """What a row's sum costs each of its members: bytes sent, and the time of the slowest of them."""

    sent: tuple[float, ...]
    took_s: float


@dataclass(slots=True)
class Cell:
    """A row: `ring` is its list, by number; `counted` are those whose contributions are summed in the round."""

    number: int
    ring: list[int] = field(default_factory=list)
    head: int = -1
    verdicts: dict[int, set[int]] = field(default_factory=dict)
    round: int = 0
    ready: set[int] = field(default_factory=set)
    half_at: float | None = None
    closed: bool = False
    attempt: int = 0
    due_at: float = 0.0
    work: RowWork | None = None
    row: tuple[F32, int] | None = None
    summers: tuple[int, ...] = ()
    counted: tuple[int, ...] = ()


def made_by(seed: int, number: int, round: int, numel: int) -> Made:
    """What a peer makes in a round: the same in every run of the seed."""
    values = np.random.default_rng([seed, number, round]).standard_normal(numel)
    return values.astype(np.float32), 50 + number % 101


def summed_row(how: Codec, grid: Grid, made: Sequence[Made]) -> Made:
    """The token-weighted mean of a row, chunk by chunk, and its tokens. made: what counts, in the row's order."""
    values = np.empty(grid.numel, np.float32)
    for chunk in range(grid.chunks):
        here = slice(*grid.span(chunk))
        terms = [Term(place, weight, how.encode(own[here])) for place, (own, weight) in enumerate(made)]
        values[here] = row_mean(how, terms, grid.length(chunk)).values
    return values, sum(weight for _, weight in made)


def plain_row(how: Codec, grid: Grid, made: Sequence[Made]) -> F32:
    """The same for the judge, who shares no sum with it."""
    heard = np.empty((len(made), grid.numel), np.float32)
    for chunk in range(grid.chunks):
        here = slice(*grid.span(chunk))
        for place, (own, _) in enumerate(made):
            how.decode_into(how.encode(own[here]), heard[place, here])
    weights = np.array([weight for _, weight in made], np.float32)
    mean: F32 = np.add.accumulate(heard * weights[:, None], axis=0)[-1] / np.float32(sum(w for _, w in made))
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
