"""Each kind of evidence: made of what was signed, checked by its bytes and the SwarmId alone, and refused otherwise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import pytest

from shoal.collectives.contribution import EncodedContribution
from shoal.collectives.finals import FinalChunk, FinalFormat
from shoal.collectives.proofs import is_unsound, is_wrong, verify_evidence
from shoal.protocol.certificate import genesis
from shoal.protocol.commitments import Commitment, commitment_of, committed, seal_of
from shoal.protocol.errors import RemoteError
from shoal.protocol.evidence import (
    CopiedCommitment,
    DoubleCommitment,
    DoubleResult,
    DoubleVote,
    Evidence,
    UnsoundContribution,
    WrongSum,
    digest_of,
    pack,
)
from shoal.protocol.messages import VOTE_DOMAIN, ChunkStatement, Plan, Ready, Value, domain_hash, step_preimage
from shoal.protocol.planning import RoundSettings
from tests.collectives.reduce_lab import (
    CODECS,
    GRID,
    Mesh,
    crafted,
    encode,
    identity,
    make_plan,
    peer,
)
from tests.protocol.lab import value_of
from tests.round_messages import ready_with

SWARM = domain_hash("this swarm")
BASE = genesis(SWARM, [peer(n) for n in range(3)])
LIFE = domain_hash("life")
OWNER = 1


def settings(codec: str = "fp32") -> RoundSettings:
    return RoundSettings(
        numel=GRID.numel, chunk_values=GRID.chunk_values, codec=codec, grace_s=1, reduce_deadline_s=1, weight_cap=4
    )


def ready(encoded: EncodedContribution, n: int, *, life: bytes = LIFE, base: Value = BASE) -> Ready:
    return ready_with(base, encoded.root, seal=seal_of(encoded.top, peer(n)), squares=encoded.squares, life=life)


def commitment(announced: Ready, n: int, codec: str = "fp32") -> Commitment:
    signed = commitment_of(peer(n), committed(identity(n), announced, settings(codec)), settings(codec))
    assert signed is not None
    assert signed.valid()
    return signed


@dataclass
class Round:
    """A finished reduction of three, on BASE."""

    plan: Plan
    finals: tuple[FinalChunk, ...]
    contributions: list[EncodedContribution]

    def owned(self) -> FinalChunk:
        return next(final for final in self.finals if final.owner == peer(OWNER))

    def payloads(self, chunk: int) -> dict[int, np.ndarray]:
        return {n: np.frombuffer(one.payload(chunk), np.uint8) for n, one in enumerate(self.contributions)}

    def attachment(self, chunk: int) -> bytes:
        return b"".join(bytes(one.payload(chunk)) for one in self.contributions)

    def statement(self, shift: float) -> ChunkStatement:
        """What the owner signs if it adds so much to the first value of its sum."""
        final, final_format = self.owned(), FinalFormat(self.plan)
        mean = np.empty(GRID.length(final.chunk), np.float32)
        final_format.codec(final.chunk).decode_into(final.encoded, mean)
        mean[0] += np.float32(shift)
        return final_format.sign(identity(OWNER), final.chunk, mean, (0, 1, 2)).statement


def finished(codec: str = "fp32") -> Round:
    contributions = [encode(n, codec) for n in range(3)]
    plan = make_plan(contributions, (1, 2, 3), base=BASE.hash)
    mesh = Mesh(plan, contributions)
    mesh.start()
    mesh.run(0)
    return Round(plan, mesh.finals()[0].chunks, contributions)


# -- wrong sums ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS)
def test_right_sum_in_every_codec_proves_nothing(codec: str) -> None:
    round = finished(codec)
    for final in round.finals:
        assert not is_wrong(round.plan, final.statement, round.payloads(final.chunk))
        evidence = WrongSum(base=BASE, plan=round.plan, statement=final.statement)
        with pytest.raises(RemoteError, match="a sum that is right"):
            verify_evidence(pack(evidence, round.attachment(final.chunk)), SWARM)


@pytest.mark.parametrize("codec", CODECS)
def test_wrong_sum_is_proven_by_its_bytes_alone(codec: str) -> None:
    round = finished(codec)
    statement = round.statement(1000.0)
    data = pack(WrongSum(base=BASE, plan=round.plan, statement=statement), round.attachment(statement.chunk))
    verdict = verify_evidence(data, SWARM)
    assert (verdict.accused, verdict.kind, verdict.digest) == (peer(OWNER), "wrongsum", digest_of(data))
    assert verdict.done == (BASE.next_term, 1)


def test_sum_with_an_undecodable_contribution_in_it_is_wrong() -> None:
    round = finished()
    final = round.owned()
    bad = crafted(round.contributions[0], {final.chunk: b"\xff" * 8}, commit=True)
    plan = make_plan([bad, *round.contributions[1:]], (1, 2, 3), base=BASE.hash)
    statement = ChunkStatement.sign(
        identity(OWNER), plan=plan.hash, chunk=final.chunk, bitmap=final.bitmap, result=final.result
    )
    payloads = {**round.payloads(final.chunk), 0: np.frombuffer(bad.payload(final.chunk), np.uint8)}
    assert is_wrong(plan, statement, payloads)


def test_sum_without_those_whom_the_bitmap_leaves_out_is_right() -> None:
    """One whose bytes were not what it had committed to: what counts is whom the owner says that it counted."""
    good = [encode(n, "fp32") for n in range(3)]
    sent = [*good[:2], crafted(good[2], dict.fromkeys(range(GRID.chunks), b"\x00" * 8), commit=False)]
    plan = make_plan(good, (1, 2, 3), base=BASE.hash)
    mesh = Mesh(plan, sent)
    mesh.start()
    mesh.run(0)
    for final in (final for final in mesh.reductions[peer(OWNER)].result().chunks if final.owner == peer(OWNER)):
        assert final.bitmap == b"\x03"
        payloads = {n: np.frombuffer(good[n].payload(final.chunk), np.uint8) for n in (0, 1)}
        assert not is_wrong(plan, final.statement, payloads)


def test_wrong_sum_needs_the_payloads_that_were_committed_to() -> None:
    round = finished()
    statement = round.owned().statement
    attachment = bytearray(round.attachment(statement.chunk))
    attachment[0] ^= 1
    with pytest.raises(RemoteError, match="committed to"):
        verify_evidence(pack(WrongSum(base=BASE, plan=round.plan, statement=statement), bytes(attachment)), SWARM)
    with pytest.raises(RemoteError, match="another size"):
        verify_evidence(pack(WrongSum(base=BASE, plan=round.plan, statement=statement), b"x"), SWARM)


# -- the others ----------------------------------------------------------------------------------------------


def double_vote() -> DoubleVote:
    one, other = (value_of(BASE, domain_hash(name), peer(0)) for name in ("one", "other"))
    first, second = sorted((one, other), key=lambda value: value.hash)
    signatures = [identity(1).sign(VOTE_DOMAIN, step_preimage(2, value.hash)) for value in (first, second)]
    return DoubleVote(
        base=BASE, peer=peer(1), view=2, values=(first, second), signatures=(signatures[0], signatures[1])
    )


def double_result() -> DoubleResult:
    round = finished()
    first, second = sorted((round.owned().statement, round.statement(1.0)), key=lambda one: (one.result, one.bitmap))
    return DoubleResult(base=BASE, plan=round.plan, statements=(first, second))


def double_commitment() -> DoubleCommitment:
    first, second = sorted((commitment(ready(encode(n, "fp32"), 1), 1) for n in (1, 2)), key=lambda one: one.root)
    return DoubleCommitment(base=BASE, commitments=(first, second))


def copied_commitment() -> CopiedCommitment:
    taken = ready(encode(2, "fp32"), 2)  # with the seal of who made it
    return CopiedCommitment(base=BASE, commitment=commitment(taken, 1), top=encode(2, "fp32").top)


def wrong_sum() -> WrongSum:
    round = finished()
    return WrongSum(base=BASE, plan=round.plan, statement=round.statement(1.0))


def unsound() -> UnsoundContribution:
    bad = crafted(encode(1, "fp32"), {2: b"\xff" * 8}, commit=True)
    return UnsoundContribution(base=BASE, commitment=commitment(ready(bad, 1), 1), chunk=2)


MAKERS: tuple[Callable[[], Evidence], ...] = (
    double_vote,
    double_result,
    double_commitment,
    copied_commitment,
    unsound,
    wrong_sum,
)


def packed(evidence: Evidence) -> bytes:
    attachment = b""
    if isinstance(evidence, WrongSum):
        attachment = finished().attachment(evidence.statement.chunk)
    if isinstance(evidence, UnsoundContribution):
        attachment = bytes(crafted(encode(1, "fp32"), {2: b"\xff" * 8}, commit=True).payload(evidence.chunk))
    return pack(evidence, attachment)


@pytest.mark.parametrize("make", MAKERS)
def test_evidence_of_every_kind_convicts_who_signed(make: Callable[[], Evidence]) -> None:
    assert verify_evidence(packed(make()), SWARM).accused == peer(1)


@pytest.mark.parametrize("make", MAKERS)
def test_evidence_about_another_swarm_is_refused(make: Callable[[], Evidence]) -> None:
    with pytest.raises(RemoteError, match="another swarm"):
        verify_evidence(packed(make()), domain_hash("another swarm"))


@pytest.mark.parametrize("make", MAKERS)
def test_evidence_on_a_base_that_was_not_signed_is_refused(make: Callable[[], Evidence]) -> None:
    """The same words, said to be of another swarm's round of the same number."""
    other = genesis(domain_hash("another swarm"), [peer(n) for n in range(3)])
    moved = msgspec.structs.replace(make(), base=other)
    with pytest.raises(RemoteError):
        verify_evidence(packed(moved), domain_hash("another swarm"))


def forged(evidence: Evidence) -> Evidence:
    """The same with signatures that somebody else made, or that are of something else."""
    zero = bytes(64)
    if isinstance(evidence, DoubleVote):
        return msgspec.structs.replace(evidence, signatures=(evidence.signatures[0], zero))
    if isinstance(evidence, DoubleResult):
        first, second = evidence.statements
        return msgspec.structs.replace(evidence, statements=(first, msgspec.structs.replace(second, signature=zero)))
    if isinstance(evidence, DoubleCommitment):
        first_one, second_one = evidence.commitments
        second_one = msgspec.structs.replace(second_one, signature=zero)
        return msgspec.structs.replace(evidence, commitments=(first_one, second_one))
    if isinstance(evidence, WrongSum):
        return msgspec.structs.replace(evidence, statement=msgspec.structs.replace(evidence.statement, signature=zero))
    return msgspec.structs.replace(evidence, commitment=msgspec.structs.replace(evidence.commitment, signature=zero))


@pytest.mark.parametrize("make", MAKERS)
def test_evidence_that_the_accused_did_not_sign_is_refused(make: Callable[[], Evidence]) -> None:
    with pytest.raises(RemoteError, match="did not sign"):
        verify_evidence(packed(forged(make())), SWARM)


@pytest.mark.parametrize("make", MAKERS)
def test_evidence_has_one_encoding_and_no_bytes_to_spare(make: Callable[[], Evidence]) -> None:
    data = packed(make())
    for changed in (data + b"\0", data[:-1], b"\xff" * 4 + data[4:], b"", data[:3]):
        with pytest.raises(RemoteError):
            verify_evidence(changed, SWARM)


def test_two_votes_for_one_value_or_in_two_views_prove_nothing() -> None:
    evidence = double_vote()
    value, other = evidence.values
    again = msgspec.structs.replace(evidence, values=(value, value), signatures=(evidence.signatures[0],) * 2)
    with pytest.raises(RemoteError, match="one value"):
        verify_evidence(pack(again), SWARM)
    elsewhere = identity(1).sign(VOTE_DOMAIN, step_preimage(3, other.hash))
    with pytest.raises(RemoteError, match="did not sign"):
        verify_evidence(pack(msgspec.structs.replace(evidence, signatures=(evidence.signatures[0], elsewhere))), SWARM)


def test_node_that_was_restarted_may_commit_to_something_else() -> None:
    one, other = ready(encode(1, "fp32"), 1), ready(encode(2, "fp32"), 1, life=domain_hash("another life"))
    first, second = sorted((commitment(one, 1), commitment(other, 1)), key=lambda each: each.root)
    with pytest.raises(RemoteError, match="restarted"):
        verify_evidence(pack(DoubleCommitment(base=BASE, commitments=(first, second))), SWARM)


def test_commitment_with_an_endless_codec_is_refused_before_its_signature_is_checked() -> None:
    evidence = double_commitment()
    named = [msgspec.structs.replace(one, codec="x" * 33) for one in evidence.commitments]
    with pytest.raises(RemoteError, match="length <= 32"):
        verify_evidence(pack(DoubleCommitment(base=BASE, commitments=(named[0], named[1]))), SWARM)


def test_commitment_with_its_own_seal_is_no_copy() -> None:
    encoded = encode(1, "fp32")
    evidence = CopiedCommitment(base=BASE, commitment=commitment(ready(encoded, 1), 1), top=encoded.top)
    with pytest.raises(RemoteError, match="seal is right"):
        verify_evidence(pack(evidence), SWARM)
    with pytest.raises(RemoteError, match="not the one under the root"):
        verify_evidence(pack(msgspec.structs.replace(evidence, top=domain_hash("made up"))), SWARM)


@pytest.mark.parametrize("codec", CODECS)
def test_sums_of_squares_are_held_to_what_was_signed(codec: str) -> None:
    honest = encode(1, codec)
    lying = replace(honest, squares=(honest.squares[0] * 1.001, *honest.squares[1:]))
    payload = np.frombuffer(honest.payload(0), np.uint8)
    assert not is_unsound(commitment(ready(honest, 1), 1, codec), 0, payload, honest.squares)
    assert is_unsound(commitment(ready(lying, 1), 1, codec), 0, payload, lying.squares)
    with pytest.raises(RemoteError, match="not committed to"):
        is_unsound(commitment(ready(honest, 1), 1, codec), 0, payload, lying.squares)
