"""The rows of a grid of simulated peers: who is in one, what they make, and its weighted mean in two ways."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from shoal.collectives.codecs import F32
from shoal.protocol.identity import PeerId
from shoal.protocol.membership import MembershipMachine
from shoal.protocol.peering import Ack, Nack, Ping, PingRequest, Suspicion
from shoal.protocol.wire import canonical
from shoal.testnet.simulate_network import CONTROL_OVERHEAD_BYTES, ENVELOPE_BYTES

Made = tuple[F32, int]
"""Values, (numel,) float32, and the tokens they weigh."""


@dataclass(slots=True)
class Leaf:
    """A peer of a cell."""

    number: int
    id: PeerId
    cell: int
    region: int
    train_s: float
    machine: MembershipMachine
    up: bool = True
    near: frozenset[int] = frozenset()
    near_since: dict[int, float] = field(default_factory=dict)
    looked_at: float = 0.0
    silent_since: float = 0.0
    since_round: int = 0
    control_bytes: int = 0
    seat: int | None = None
    """Its number among the heads, if it is one."""


@dataclass(slots=True)
class Cell:
    """A row: `ring` is its list in the order of the hash that also decides who is its head."""

    number: int
    ring: list[tuple[bytes, int]] = field(default_factory=list)
    head: int = -1
    verdicts: dict[int, set[int]] = field(default_factory=dict)
    round: int = 0
    ready: set[int] = field(default_factory=set)
    half_at: float | None = None
    closed: bool = False
    row: tuple[F32, int] | None = None
    counted: tuple[int, ...] = ()

    def members(self) -> list[int]:
        """By number, in the order of the list."""
        return [number for _, number in self.ring]


def made_by(seed: int, number: int, round: int, numel: int) -> Made:
    """What a peer makes in a round: the same in every run of the seed."""
    values = np.random.default_rng([seed, number, round]).standard_normal(numel)
    return values.astype(np.float32), 50 + number % 101


def row_mean(made: Sequence[Made]) -> Made:
    """The token-weighted mean of a row, and its tokens: one addition after the other in float32, in the row's order."""
    total, tokens = np.zeros_like(made[0][0]), 0
    for values, weight in made:
        total += np.float32(weight) * values
        tokens += weight
    total /= np.float32(tokens)
    return total, tokens


def plain_mean(made: Sequence[Made]) -> F32:
    """The same for the judge, who shares no arithmetic with it."""
    terms = np.stack([np.float32(weight) * values for values, weight in made])
    mean: F32 = np.add.accumulate(terms, axis=0)[-1] / np.float32(sum(weight for _, weight in made))
    return mean.astype(np.float32)


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
