"""A virtual swarm in which some lie, and the others watch: audits, evidence and bans over real machines and reductions.

What a node does about it in `node/audits/auditing.py` is done here in virtual time: each honest node hears what is
said, recomputes the chunks that it draws, verifies what others found, and tells its machine. Nobody is told who lies.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import msgspec
import numpy as np

from shoal.collectives.codecs import F32, U8
from shoal.collectives.commitment import bitmap_indices
from shoal.collectives.contribution import EncodedContribution
from shoal.collectives.finals import FinalChunk, FinalFormat
from shoal.collectives.progress import ReduceProgress
from shoal.collectives.proofs import is_unsound, is_wrong, verify_evidence
from shoal.collectives.reduce import Reduction
from shoal.protocol.auditing import beacon, drawn, ticket
from shoal.protocol.bans import named
from shoal.protocol.commitments import seal_of
from shoal.protocol.errors import RemoteError
from shoal.protocol.evidence import Evidence, Verdict, WrongSum, pack
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.inputs import Proven
from shoal.protocol.messages import (
    VOTE_DOMAIN,
    Certificate,
    Message,
    Plan,
    Ready,
    Report,
    Value,
    Vote,
    domain_hash,
    step_preimage,
)
from shoal.protocol.witness import Witness
from shoal.swarm.lanes.frame import FrameKind
from tests.collectives.reduce_lab import crafted
from tests.collectives.swarm_lab import GRID, Bench, SwarmLab
from tests.protocol.lab import SWARM
from tests.protocol.round_node import SETTINGS, Node

Lie = Literal["sums", "nan", "copies", "squares", "votes", "results"]

AUDIT_S = 0.3
HEARSAY_S = 0.2
CHUNKS_AUDITED = 2


class LyingFormat(FinalFormat):
    """Signs what nobody's contributions come to."""

    def sign(
        self, identity: Identity, chunk: int, mean: F32, included: Iterable[int], payload: U8 | None = None
    ) -> FinalChunk:
        mean[0] += 1
        return super().sign(identity, chunk, mean, list(included), payload)


@dataclass
class Watch:
    """What one honest node saw and holds."""

    witness: Witness = field(default_factory=Witness)
    held: dict[bytes, bytes] = field(default_factory=dict)
    verdicts: dict[bytes, Verdict] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)


class LiarsLab(SwarmLab):
    """`lies` says who lies how; `deaf` nodes hear of no evidence but what a proposed value names."""

    def __init__(self, nodes: int, *, lies: dict[int, Lie], deaf: Iterable[int] = (), seed: int = 0) -> None:
        self.lies = lies
        self.deaf = set(deaf)
        self.watches = {number: Watch() for number in range(nodes) if number not in lies}
        self.encoded: dict[int, EncodedContribution] = {}
        super().__init__(nodes, seed=seed)

    # -- lying -------------------------------------------------------------------------------------------

    def _contribution(self, node: Node) -> Ready:
        number, lie, head = node.number, self.lies.get(node.number), node.chain.head
        drawn_in = [number, head.next_round, node.life]  # who was killed makes another contribution
        values = np.random.default_rng(drawn_in).standard_normal(GRID.numel).astype(np.float32)
        encoded = EncodedContribution.encode(values, GRID, SETTINGS.codec)
        if lie == "nan":
            encoded = crafted(encoded, dict.fromkeys(range(GRID.chunks), b"\xff" * 8), commit=True)
        if lie == "squares":
            encoded = replace(encoded, squares=tuple(square / 100 for square in encoded.squares))
        seal = seal_of(encoded.top, node.peer)
        victim = self.nodes[0].contribution
        if lie == "copies" and victim is not None and victim.base == head.hash:
            encoded, seal = self.contributions[victim.root], victim.seal
        self.contributions[encoded.root] = encoded
        ready = super()._contribution(node)
        return msgspec.structs.replace(ready, root=encoded.root, seal=seal, squares=encoded.squares)

    def _open(self, number: int, plan: Plan, contribution: EncodedContribution | None) -> Bench:
        bench = super()._open(number, plan, contribution)
        reduction = bench.reduction
        if self.lies.get(number) == "sums":
            honest = reduction._sum
            reduction._sum = lambda final_format, chunk, inbox: honest(LyingFormat(final_format.plan), chunk, inbox)  # type: ignore[method-assign]
        elif self.lies.get(number) == "results":
            honest_post = reduction._post

            def post(to: PeerId, kind: FrameKind, chunk: int, payload: memoryview) -> None:
                if kind is FrameKind.FINAL and self.number(to) == 0:
                    payload = self._another_final(number, reduction, chunk, payload)
                honest_post(to, kind, chunk, payload)

            reduction._post = post
        elif number in self.watches:
            told = reduction._on_progress

            def on_progress(progress: ReduceProgress) -> None:
                for exclusion in progress.excluded:
                    self._excluded(number, plan, progress.chunk or 0, exclusion.peer, exclusion.payload)
                told(progress)

            reduction._on_progress = on_progress
        return bench

    def _another_final(self, number: int, reduction: Reduction, chunk: int, payload: memoryview) -> memoryview:
        """What the owner tells one of the others."""
        final_format = reduction.final_format
        final = final_format.read(chunk, bytes(payload))
        mean = np.empty(final_format.grid.length(chunk), np.float32)
        final_format.codec(final.chunk).decode_into(final.encoded, mean)
        mean[0] += 1
        included = bitmap_indices(final.bitmap, len(final_format.plan.participants))
        return final_format.sign(self.nodes[number].identity, chunk, mean, included).payload.data

    def broadcast(self, number: int, message: Message, only: Collection[int] | None = None) -> None:
        super().broadcast(number, message, only)
        if isinstance(message, Vote) and self.lies.get(number) == "votes":
            self._vote_again(number, message)

    def _vote_again(self, number: int, vote: Vote) -> None:
        """Vote for another value in the same view as well, and propose it, so that everybody knows it."""
        node = self.nodes[number]
        value = node.running().agreement._values[vote.value]
        other = msgspec.structs.replace(value, digest=domain_hash("another digest"))
        signature = node.identity.sign(VOTE_DOMAIN, step_preimage(vote.view, other.hash))
        for watch in self.watches.values():  # the value came in a proposal of its accomplice's
            about = watch.witness._rounds.get(value.base)
            if about is not None:
                about.values[other.hash] = other
        for to in self.watches:
            self._send(number, to, msgspec.structs.replace(vote, value=other.hash, signature=signature))

    # -- watching ----------------------------------------------------------------------------------------

    def _evidence(self, node: Node) -> Mapping[bytes, PeerId]:
        watch = self.watches.get(node.number)
        if watch is None:
            return {}
        watch.witness.begin(node.chain.head, SETTINGS)
        accused = {verdict.digest: verdict.accused for verdict in watch.verdicts.values()}
        return {digest: peer for digest, peer in accused.items() if peer not in node.chain.banned}

    def _need_evidence(self, node: Node, value: Value) -> None:
        if node.number in self.watches:
            self.after(HEARSAY_S, lambda: self._find(node.number, [ban.evidence for ban in named(value)]))

    def _examine(self, node: Node, peer: PeerId, message: Message) -> None:
        watch = self.watches.get(node.number)
        if watch is None:
            return
        for evidence in watch.witness.hear(peer, message):
            self._found(node.number, evidence, b"")
        if isinstance(message, Report):
            self._compare(node.number, peer, message)

    def _compare(self, number: int, peer: PeerId, report: Report) -> None:
        """Who came to something else from the same plan shows what the owners signed."""
        mine, theirs = (self.results.get((n, report.plan)) for n in (number, self.number(peer)))
        if mine is None or theirs is None or self.report_of(mine).digest == report.digest:
            return
        statements = [[final.statement for final in finals.chunks] for finals in (mine, theirs)]
        for evidence in self.watches[number].witness.compare(mine.plan, *statements):
            self._found(number, evidence, b"")

    def _excluded(self, number: int, plan: Plan, chunk: int, peer: PeerId, payload: bytes) -> None:
        witness, place = self.watches[number].witness, plan.number(peer)
        assert place is not None
        commitment = witness.commitment(plan.base, peer, plan.participants[place].root)
        charge = None if commitment is None else witness.unsound(commitment, chunk)
        if charge is not None and payload:
            self._found(number, charge, payload)

    def _certified(self, node: Node, certificate: Certificate) -> None:
        if node.number in self.watches:
            self.after(AUDIT_S, lambda: self._audit(node.number, certificate))

    def _audit(self, number: int, certificate: Certificate) -> None:
        """As a node does, but that everybody shows everything at once."""
        value, witness, me = certificate.value, self.watches[number].witness, self.nodes[number]
        finals = self.results.get((number, value.plan))
        base = witness.base(value.base)
        plan = None if finals is None else witness.origin(finals.plan) or self.plans.get(finals.plan.lineage)
        if finals is None or plan is None or base is None:
            return
        stated = [(final.result, final.bitmap) for final in finals.chunks]
        for chunk in drawn(ticket(me.identity, beacon(value.hash, stated)), len(stated), CHUNKS_AUDITED):
            final, payloads = finals.chunks[chunk], {}
            for place, participant in enumerate(plan.participants):
                if int.from_bytes(final.bitmap, "little") >> place & 1:
                    payload = np.frombuffer(self.contributions[participant.root].payload(chunk), np.uint8)
                    payloads[place] = payload
                    commitment = witness.commitment(plan.base, participant.peer, participant.root)
                    if commitment is not None and is_unsound(commitment, chunk, payload, witness.squares(commitment)):
                        charge = witness.unsound(commitment, chunk)
                        assert charge is not None
                        self._found(number, charge, payload.tobytes())
            if is_wrong(plan, final.statement, payloads):
                attachment = b"".join(payloads[place].tobytes() for place in sorted(payloads))
                self._found(number, WrongSum(base=base, plan=plan, statement=final.statement), attachment)
        for root, alike in witness.alike(plan.base).items():
            top = self.contributions[root].top
            for commitment in alike:
                charge_of_copy = witness.copied(commitment, top)
                if charge_of_copy is not None and seal_of(top, commitment.peer) != commitment.seal:
                    self._found(number, charge_of_copy, b"")

    # -- evidence ----------------------------------------------------------------------------------------

    def _found(self, number: int, evidence: Evidence, attachment: bytes) -> None:
        data = pack(evidence, attachment)
        self.after(0.001, lambda: self._take(number, data))

    def _take(self, number: int, data: bytes, *, named: bool = False) -> None:
        """Verify, keep, tell the machine and the others."""
        watch, node = self.watches[number], self.nodes[number]
        try:
            verdict = verify_evidence(data, SWARM)
        except RemoteError as error:
            watch.refused.append(str(error))
            return
        known = any((one.accused, one.done) == (verdict.accused, verdict.done) for one in watch.verdicts.values())
        if verdict.digest in watch.verdicts or (known and not named):
            return
        watch.verdicts[verdict.digest], watch.held[verdict.digest] = verdict, data
        if verdict.accused not in node.chain.banned:
            node.put(Proven(verdict.digest, verdict.accused))
        for other in self.watches:
            if other != number and other not in self.deaf:
                self.after(self.rng.uniform(0, HEARSAY_S), lambda other=other: self._take(other, data))  # type: ignore[misc]

    def _find(self, number: int, digests: Iterable[bytes]) -> None:
        for digest in digests:
            for watch in list(self.watches.values()):
                if digest in watch.held and digest not in self.watches[number].held:
                    self._take(number, watch.held[digest], named=True)

    # -- what came of it ---------------------------------------------------------------------------------

    def accused(self) -> set[int]:
        """The numbers of all against whom anybody honest holds evidence."""
        return {self.number(v.accused) for watch in self.watches.values() for v in watch.verdicts.values()}

    def bans(self) -> dict[int, int]:
        """By number of the banned, the round that decided it."""
        chain = max((node.values for node in self.nodes), key=len)
        return {self.number(ban.peer): value.round for value in chain for ban in named(value)}
