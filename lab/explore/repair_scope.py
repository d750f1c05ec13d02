"""Scope of the exploration of a round with repairs: how large, by whom, over which contributions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import msgspec
import numpy as np

from shoal.collectives.codecs import DENSE
from shoal.collectives.contribution import EncodedContribution
from shoal.collectives.dither import Dither
from shoal.collectives.grid import Grid
from shoal.lab.explore.proofs import Proofs
from shoal.lab.explore.scope import electorate
from shoal.protocol.chain import Chain
from shoal.protocol.commitments import committed
from shoal.protocol.errors import ConfigError
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import NO_HASH, OwnedRange, Ready, domain_hash
from shoal.protocol.planning import CONTRIBUTOR, TRAINING, RoundSettings, absent_ready
from shoal.protocol.surroundings import Rules

MEMBERS_LIMIT, VIEWS_LIMIT, ATTEMPTS_LIMIT, CRASHES_LIMIT, CHUNKS_LIMIT = 5, 5, 5, 4, 4
CHUNK_VALUES = 3
STATE = domain_hash("explored state")


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairScope:
    """Bounds on the schedules. Members are numbered in the order in which they lead: member v leads view v.

    `views` are 0 to views − 1, and `attempts` how many plans a lead may make in one; `crashes` is how often a member
    may be killed and return. With `returning` only those may who are named there, each as often as it is named: scopes
    that name every choice of so many members are, together, what `crashes` is alone. Chunk c of the first plan is dealt
    to the participant `shift` + c places on, in the order of the plan. `late` is the member whose contribution comes
    too late for the plan, None if there is none. With `stale` a plan that its lead superseded may be heard late by who
    believed that lead dead for a moment. `reduced` puts arrivals off until they matter (see `repair.py`).
    Raises ConfigError for what is out of range.
    """

    members: int = 3
    views: int = 2
    attempts: int = 2
    crashes: int = 0
    returning: tuple[int, ...] = ()
    chunks: int = 2
    shift: int = 0
    late: int | None = None
    codec: str = "int8"
    stale: bool = False
    reduced: bool = True

    def __post_init__(self) -> None:
        for name, value, low, high in (
            ("members", self.members, 1, MEMBERS_LIMIT),
            ("views", self.views, 1, VIEWS_LIMIT),
            ("attempts", self.attempts, 1, ATTEMPTS_LIMIT),
            ("crashes", self.crashes, 0, CRASHES_LIMIT),
            ("chunks", self.chunks, 1, CHUNKS_LIMIT),
            ("shift", self.shift, 0, self.members - 1),
            ("late", 0 if self.late is None else self.late, 0, self.members - 1),
        ):
            if not low <= value <= high:
                raise ConfigError(f"--{name} {value}: must be from {low} to {high}")
        if any(not 0 <= member < self.members for member in self.returning):
            raise ConfigError(f"--returning {_listed(self.returning)}: must be from 0 to {self.members - 1}")
        if self.returning and len(self.returning) != self.crashes:
            raise ConfigError(f"--returning {_listed(self.returning)}: must name as many as --crashes, {self.crashes}")
        if self.codec not in DENSE:
            raise ConfigError(f"--codec {self.codec}: must be one of {', '.join(DENSE)}")

    def may_return(self, member: int) -> bool:
        """True if this member returns in any schedule."""
        return self.crashes > 0 and (not self.returning or member in self.returning)


class Returns:
    """Returns that are left, as a number: that of all together, or eight times that of each member named."""

    def __init__(self, scope: RepairScope) -> None:
        self._named = bool(scope.returning)
        self.start = sum(map(self.one, scope.returning)) if self._named else scope.crashes

    def one(self, member: int) -> int:
        """Amount that one return of a member takes off."""
        return 8**member if self._named else 1

    def allowed(self, left: int, member: int) -> bool:
        """True if a member may return while so much is left."""
        return (left // self.one(member)) % 8 > 0


def _listed(members: Sequence[int]) -> str:
    return ",".join(map(str, members))


class ScopeSetup:
    """Constants of a scope while its schedules are walked."""

    def __init__(self, scope: RepairScope) -> None:
        self.scope = scope
        self.identities, self.previous = electorate(scope.members, planner=0)
        self.peers = [identity.peer_id for identity in self.identities]
        self.chain = Chain(self.previous)
        self.proofs = Proofs(self.previous)
        self.everyone = frozenset(self.peers)
        self.number = {peer: number for number, peer in enumerate(self.peers)}
        self.grid = Grid(scope.chunks * CHUNK_VALUES - 1, CHUNK_VALUES)
        self.settings = RoundSettings(
            numel=self.grid.numel,
            chunk_values=self.grid.chunk_values,
            codec=scope.codec,
            grace_s=1.0,
            reduce_deadline_s=1.0,
            weight_cap=float(scope.members),
        )
        self.rules = Rules(settings=self.settings, staleness_rounds=1)
        self.contributions = [self._contribution(number) for number in range(scope.members)]
        self.by_root = {c.root: c for i, c in enumerate(self.contributions) if i != scope.late}
        self.readies = [self._ready(number) for number in range(scope.members)]

    def _contribution(self, number: int) -> EncodedContribution:
        # Of different magnitudes and signs, so that order and divisor show in the bits.
        values = np.random.default_rng(number).standard_normal(self.grid.numel) * 3.0**number
        dither = Dither(NO_HASH, "contribution", self.peers[number])
        return EncodedContribution.encode(values.astype(np.float32), self.grid, self.scope.codec, dither=dither)

    def life(self, number: int, which: int) -> bytes:
        """Bytes of a member's life, in place of random ones; its first is number 0."""
        return domain_hash("explored life", self.peers[number].encode(), bytes([which]))

    def _ready(self, number: int) -> Ready:
        if number == self.scope.late:
            absent = absent_ready(TRAINING, self.previous, STATE)
            return msgspec.structs.replace(absent, life=self.life(number, 0))
        encoded = self.contributions[number]
        ready = Ready(
            term=self.previous.term,
            round=self.previous.round + 1,
            base=self.previous.hash,
            role=CONTRIBUTOR,
            state=STATE,
            root=encoded.root,
            squares=encoded.squares,
            tokens=2 + number,  # no two weights alike, and none that is the sum of two others'
            upload=0,
            download=0,
            reaches=(),
            life=self.life(number, 0),
        )
        return committed(self.identities[number], ready, self.settings)

    def deal(self, rates: Sequence[tuple[int, int]], chunks: int) -> tuple[OwnedRange, ...]:
        """One chunk to each participant in turn, from the one numbered `shift` on."""
        places = [(self.scope.shift + chunk) % len(rates) for chunk in range(chunks)]
        ranges, start = [], 0
        for place, run in groupby(places):
            stop = start + sum(1 for _ in run)
            ranges.append(OwnedRange(place, start, stop))
            start = stop
        return tuple(ranges)

    def name(self, peer: PeerId) -> str:
        """Name of a member, for people."""
        return f"member {self.number[peer]}"
