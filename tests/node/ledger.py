"""A swarm's history made by hand for tests: plans, finals, certificates and states that hold, without any network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from shoal.collectives.codecs import F32
from shoal.collectives.finals import FinalFormat, Finals
from shoal.collectives.fragments import Fragments
from shoal.collectives.grid import Grid
from shoal.collectives.outer import OuterSettings, advance
from shoal.collectives.state import NESTEROV_KINDS, CertifiedState, StateHeader, StateKind, frozen, header_of
from shoal.node.state.states import StateCache
from shoal.protocol.amending import make_amend_consent, make_amendment, with_amendment
from shoal.protocol.certificate import genesis
from shoal.protocol.chain import Chain
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.manifest import Manifest
from shoal.protocol.messages import (
    VOTE_DOMAIN,
    Amendment,
    Certificate,
    Participant,
    Plan,
    Target,
    Term,
    Value,
    step_preimage,
)
from shoal.protocol.terms import make_consent, make_rollback
from shoal.protocol.wire import SwarmId
from tests.round_messages import plan_with

SWARM = SwarmId(bytes(range(32)))
GRID = Grid(10_000, 4096)
"""Three chunks, the last one ragged."""
OUTER = OuterSettings()
TOKENS = 100


def identity(n: int) -> Identity:
    return Identity.from_seed(bytes([n]) * 32)


AUTHORITY = identity(99)


def vector(seed: int, numel: int = GRID.numel) -> F32:
    return np.random.default_rng(seed).standard_normal(numel).astype(np.float32)


def state_of(
    round: int,
    *,
    seed: int = 0,
    grid: Grid = GRID,
    layout: bytes = b"L" * 32,
    kinds: Sequence[StateKind] = NESTEROV_KINDS,
) -> CertifiedState:
    """Some state of that round. A second moment, where there is one, is not negative."""
    vectors = [frozen(vector(2 * seed, grid.numel)), frozen(vector(2 * seed + 1, grid.numel))]
    if len(kinds) == 3:
        vectors.append(frozen(np.square(vector(2 * seed + 1001, grid.numel))))
    return CertifiedState.of_vectors(vectors, term=Term(), round=round, tokens=1000 * round, layout_hash=layout)


def plan_of(who: Sequence[Identity], previous: Value, *, codec: str = "int8", grid: Grid = GRID) -> Plan:
    """A plan over all of `who` with equal weights; the first plans."""
    return plan_with(
        (Participant(one.peer_id, TOKENS, TOKENS, bytes([n]) * 32) for n, one in enumerate(who)),
        grid,
        after=previous,
        codec=codec,
    )


def finals_of(plan: Plan, who: Sequence[Identity], *, seed: int, included: Sequence[int] | None = None) -> Finals:
    """Finals of `plan` around random means, each signed by the chunk's owner."""
    final_format = FinalFormat(plan)
    mean = vector(seed, plan.numel)
    places = range(len(who)) if included is None else included
    payloads = []
    for chunk, owner in enumerate(final_format.owners):
        values = mean[slice(*final_format.grid.span(chunk))]
        payloads.append(final_format.sign(who[owner], chunk, values, list(places)).payload.tobytes())
    return Finals.open(plan, payloads)


def save_finals(cache: StateCache, finals: Finals) -> None:
    """Have `finals` on disk."""
    cache.finals_writer(finals).finish()


def certificate_of(value: Value, signers: Sequence[Identity], *, view: int = 0) -> Certificate:
    """`value` with the votes of `signers`."""
    preimage = step_preimage(view, value.hash)
    return Certificate(
        value=value,
        view=view,
        signers=tuple(one.peer_id for one in signers),
        signatures=tuple(one.sign(VOTE_DOMAIN, preimage) for one in signers),
    )


@dataclass
class Ledger:
    """What three founders certified, round after round."""

    founders: tuple[Identity, ...] = field(default_factory=lambda: tuple(identity(n) for n in (1, 2, 3)))
    codec: str = "int8"
    grid: Grid = GRID
    outer: OuterSettings = OUTER
    states: list[CertifiedState] = field(default_factory=list)
    finals: dict[int, Finals] = field(default_factory=dict)
    chain: Chain = field(init=False)
    manifest: Manifest | None = None
    _amendment: Amendment | None = None

    def __post_init__(self) -> None:
        self.states = self.states or [state_of(0, grid=self.grid, kinds=self.outer.kinds)]
        self.chain = self.empty_chain()

    @property
    def peers(self) -> tuple[PeerId, ...]:
        return tuple(one.peer_id for one in self.founders)

    @property
    def state(self) -> CertifiedState:
        """The newest."""
        return self.states[-1]

    def empty_chain(self) -> Chain:
        """A chain with nothing but the founders in it."""
        begin = genesis(SWARM, [one.peer_id for one in self.founders])
        return Chain(begin, AUTHORITY.peer_id, manifest=self.manifest)

    def chain_to(self, round: int) -> Chain:
        """The chain as it was after that round."""
        chain = self.empty_chain()
        for certificate in self.chain.after(0, round):
            chain.extend(certificate)
        return chain

    def header(self, round: int) -> StateHeader:
        return header_of(self.states[round], self.grid)

    def amend(self, wanted: Mapping[str, object]) -> Certificate:
        """Certify a round more, with which these settings are in force from the next one on."""
        assert self.chain.in_force is not None
        self._amendment = make_amendment(self.chain.in_force, wanted)
        return self.certify()

    def _with_amendment(self, value: Value) -> Value:
        amendment, self._amendment = self._amendment, None
        if amendment is None:
            return value
        head = self.chain.head
        consents = [(one.peer_id, make_amend_consent(one, head, amendment, asked=True)) for one in self.founders]
        return with_amendment(value, consents)

    def certify(self, rounds: int = 1) -> Certificate:
        """Certify that many rounds more; the certificate of the last."""
        for _ in range(rounds):
            previous = self.chain.head
            amended = self.chain.amended(previous.next_round)
            outer = self.outer if amended is None else OuterSettings.of(amended)
            codec = self.codec if amended is None else amended.sync.plan_codec
            grid = Fragments(self.grid, outer.fragments).of_round(previous.next_round).grid
            plan = plan_of(self.founders, previous, codec=codec, grid=grid)
            finals = finals_of(plan, self.founders, seed=100 + plan.round)
            after, header = advance(self.state, finals, outer)
            value = self._with_amendment(self.value(plan, finals, header.digest))
            certificate = certificate_of(value, self.founders)
            self.chain.extend(certificate)
            self.states.append(after)
            self.finals[plan.round] = finals
        return certificate

    def go_back(self, round: int) -> Certificate:
        """Certify that the next round goes back to this one; what comes after is certified from there."""
        target = self.chain.value(round)
        where = Target(round, target.hash)
        consents = {one.peer_id: make_consent(one, self.chain.head, where, asked=True) for one in self.founders}
        digest = self.header(round).digest
        value = make_rollback(self.chain.head, self.founders[0].peer_id, where, consents, digest=digest)
        certificate = certificate_of(value, self.founders)
        self.chain.extend(certificate)
        del self.states[round + 1 :]
        return certificate

    def value(self, plan: Plan, finals: Finals, digest: bytes) -> Value:
        """What would be voted on after these finals."""
        previous = self.chain.head
        return Value(
            swarm=previous.swarm,
            term=previous.next_term,
            round=plan.round,
            base=previous.hash,
            plan=plan.hash,
            planner=plan.planner,
            members=tuple(sorted(self.peers)),
            bitmaps=finals.bitmaps_root,
            tokens=finals.tokens,
            digest=digest,
        )


def forged(certificate: Certificate) -> Certificate:
    """The same certificate with one bit of one signature changed."""
    first, *others = certificate.signatures
    return Certificate(
        value=certificate.value,
        view=certificate.view,
        signers=certificate.signers,
        signatures=(bytes([first[0] ^ 1]) + first[1:], *others),
    )
