"""The evidence on a node's disk: verified before it is kept and when it is read again, bounded, and shown in parts."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from shoal.node.audits import evidence_store
from shoal.node.audits.audit_exchange import AuditServer
from shoal.node.audits.evidence_store import EvidenceStore
from shoal.protocol.audit_messages import (
    COMMITMENTS_LIMIT,
    AuditAnswer,
    Commitments,
    EvidenceHeld,
    GetCommitments,
    GetEvidence,
    GetStatements,
    Part,
    StatementsPart,
)
from shoal.protocol.certificate import genesis
from shoal.protocol.commitments import Commitment
from shoal.protocol.errors import RemoteError
from shoal.protocol.evidence import DoubleVote, digest_of, pack
from shoal.protocol.identity import Identity
from shoal.protocol.messages import VOTE_DOMAIN, Value, domain_hash, step_preimage
from shoal.protocol.peering import Refusal
from shoal.protocol.wire import canonical, decode
from tests.collectives.reduce_lab import Mesh, encode, make_plan
from tests.node.simulated_disk import Disks, Survival
from tests.protocol.lab import value_of

SWARM = domain_hash("swarm")
LIARS = [Identity.from_seed(bytes([n]) * 32) for n in range(3)]
START = genesis(SWARM, [one.peer_id for one in LIARS])


def base_of(round: int) -> Value:
    """What stands for C(round - 1)."""
    base = START
    for number in range(1, round):
        base = value_of(base, domain_hash(str(number)), base.planner)
    return base


def double_vote(liar: Identity, *, round: int = 1, view: int = 0) -> bytes:
    base = base_of(round)
    both = sorted((value_of(base, domain_hash(name), base.planner) for name in "ab"), key=lambda value: value.hash)
    signed = [liar.sign(VOTE_DOMAIN, step_preimage(view, value.hash)) for value in both]
    return pack(
        DoubleVote(
            base=base, peer=liar.peer_id, view=view, values=(both[0], both[1]), signatures=(signed[0], signed[1])
        )
    )


def evidence_store_in(folder: Path) -> EvidenceStore:
    kept_evidence = EvidenceStore(folder, SWARM)
    kept_evidence.load()
    return kept_evidence


def test_evidence_is_there_after_a_restart_and_what_was_tampered_with_is_not(tmp_path: Path) -> None:
    kept_evidence, data = evidence_store_in(tmp_path), [double_vote(liar) for liar in LIARS]
    verdicts = [kept_evidence.put(one) for one in data]
    assert [one.accused for one in verdicts if one is not None] == [liar.peer_id for liar in LIARS]
    path = tmp_path / "evidence" / digest_of(data[0]).hex()
    path.write_bytes(path.read_bytes().replace(LIARS[0].peer_id.encode(), LIARS[1].peer_id.encode()))
    (tmp_path / "evidence" / digest_of(data[1]).hex()).rename(tmp_path / "evidence" / "renamed")
    (tmp_path / "evidence" / "x.partial").write_bytes(b"cut short")
    again = evidence_store_in(tmp_path)
    assert [one.accused for one in again.verdicts] == [LIARS[2].peer_id]
    assert [file.name for file in (tmp_path / "evidence").iterdir()] == [digest_of(data[2]).hex()]


def test_the_first_evidence_is_there_after_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disks(monkeypatch).add(tmp_path / "disk", random.Random(1))
    verdict = evidence_store_in(disk.root).put(double_vote(LIARS[0]))
    disk.copy_survivors(tmp_path / "after", Survival.SYNCED)
    assert evidence_store_in(tmp_path / "after").verdicts == (verdict,)


def test_what_proves_nothing_is_not_kept(tmp_path: Path) -> None:
    kept_evidence = evidence_store_in(tmp_path)
    for bad in (b"", double_vote(LIARS[0])[:-1], double_vote(LIARS[0]) + b"\0"):
        with pytest.raises(RemoteError):
            kept_evidence.put(bad)
    assert kept_evidence.verdicts == ()
    assert not (tmp_path / "evidence").exists()


def test_one_piece_is_enough_for_a_round_unless_a_value_names_another(tmp_path: Path) -> None:
    kept_evidence = evidence_store_in(tmp_path)
    first, second = (double_vote(LIARS[0], view=view) for view in (0, 1))
    assert kept_evidence.put(first) is not None
    assert kept_evidence.put(first) is None
    assert kept_evidence.put(second) is None
    named = kept_evidence.put(second, named=True)
    assert named is not None
    assert kept_evidence.proves(digest_of(second)) == named
    assert kept_evidence.has(LIARS[0].peer_id, named.done)
    assert not kept_evidence.has(LIARS[1].peer_id, named.done)


def test_shelf_is_bounded_per_peer_and_altogether(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept_evidence = evidence_store_in(tmp_path)
    for round in range(1, 8):
        assert kept_evidence.put(double_vote(LIARS[0], round=round)) is not None
    assert sorted(one.done[1] for one in kept_evidence.verdicts) == [4, 5, 6, 7]
    monkeypatch.setattr(evidence_store, "PIECES_LIMIT", 4)
    assert kept_evidence.put(double_vote(LIARS[1], round=9)) is not None
    assert sorted(one.done[1] for one in kept_evidence.verdicts) == [5, 6, 7, 9]
    assert len(list((tmp_path / "evidence").iterdir())) == 4


def test_evidence_against_keys_that_were_never_members_takes_no_others_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evidence_store, "PIECES_LIMIT", 3)
    members = {LIARS[0].peer_id, LIARS[1].peer_id}
    strangers = [Identity.from_seed(bytes([9, n]) * 16) for n in range(5)]
    kept_evidence = EvidenceStore(tmp_path, SWARM, first=lambda peer: peer in members)
    kept_evidence.load()
    assert kept_evidence.put(double_vote(LIARS[0])) is not None
    for place, stranger in enumerate(strangers):
        assert kept_evidence.put(double_vote(stranger, round=5 + place)) is not None
    assert kept_evidence.put(double_vote(LIARS[1])) is not None
    assert kept_evidence.put(double_vote(LIARS[1], round=2)) is not None
    assert kept_evidence.put(double_vote(strangers[0], round=20)) is None
    assert {one.accused for one in kept_evidence.verdicts} == members


def test_strangers_have_a_share_of_the_room_in_which_the_newest_evidence_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strangers = [Identity.from_seed(bytes([9, n]) * 16) for n in range(8)]
    data = [double_vote(stranger, round=5 + place) for place, stranger in enumerate(strangers)]
    kept_evidence = EvidenceStore(tmp_path, SWARM, first=lambda peer: peer == LIARS[0].peer_id)
    monkeypatch.setattr(evidence_store, "STRANGERS_PIECES_LIMIT", 4)
    assert kept_evidence.put(double_vote(LIARS[0])) is not None
    assert all(kept_evidence.put(one) is not None for one in data)
    assert sorted(one.done[1] for one in kept_evidence.verdicts) == [1, 9, 10, 11, 12]
    assert kept_evidence.put(data[0]) is None, "it would be told to and fro for ever"
    assert kept_evidence.put(data[0], named=True) is not None
    assert sorted(one.done[1] for one in kept_evidence.verdicts) == [1, 5, 10, 11, 12]
    monkeypatch.setattr(evidence_store, "STRANGERS_BYTES_LIMIT", 2 * len(data[0]) + 100)
    assert kept_evidence.put(double_vote(strangers[0], round=20)) is not None
    assert sorted(one.done[1] for one in kept_evidence.verdicts) == [1, 12, 20]
    assert kept_evidence.put(double_vote(LIARS[0], round=2)) is not None, "that is no share of members"
    assert len(list((tmp_path / "evidence").iterdir())) == 4


def test_desk_shows_evidence_in_parts_and_what_owners_stated(tmp_path: Path) -> None:
    kept_evidence, data = evidence_store_in(tmp_path), double_vote(LIARS[0])
    kept_evidence.put(data)
    encoded = [encode(n, "fp32") for n in range(2)]
    plan = make_plan(encoded, (1, 1))
    mesh = Mesh(plan, encoded)
    mesh.start()
    mesh.run(0)
    finals = mesh.finals()[0]
    server = AuditServer(kept_evidence, lambda h: finals if h == plan.hash else None, lambda base: (), frozenset)
    held = server.answer(EvidenceHeld(charges=()))
    assert isinstance(held, EvidenceHeld)
    assert [(charge.digest, charge.peer, charge.round) for charge in held.charges] == [
        (digest_of(data), LIARS[0].peer_id, 1)
    ]
    assert server.answer(GetEvidence(digest=digest_of(data), offset=7)) == Part(total=len(data), data=data[7:])
    assert server.answer(GetEvidence(digest=digest_of(data), offset=1 << 40)) == Part(total=len(data), data=b"")
    assert isinstance(server.answer(GetEvidence(digest=bytes(32))), Refusal)
    stated = server.answer(GetStatements(plan=plan.hash, first=1))
    assert isinstance(stated, StatementsPart)
    assert [one.result for one in stated.statements] == [final.result for final in finals.chunks[1:]]
    assert isinstance(server.answer(GetStatements(plan=bytes(32))), Refusal)


def test_desk_shows_what_was_committed_to_in_a_round(tmp_path: Path) -> None:
    commitment = Commitment(
        peer=LIARS[0].peer_id,
        base=START.hash,
        life=domain_hash("life"),
        root=domain_hash("root"),
        seal=domain_hash("seal"),
        squares=domain_hash("squares"),
        codec="int8",
        numel=10,
        chunk_values=5,
        signature=bytes(64),
    )
    heard = {commitment.base: [commitment] * (COMMITMENTS_LIMIT + 1)}
    server = AuditServer(evidence_store_in(tmp_path), lambda plan: None, lambda base: heard.get(base, []), frozenset)
    shown = server.answer(GetCommitments(base=commitment.base))
    assert isinstance(shown, Commitments)
    assert shown.commitments == (commitment,) * COMMITMENTS_LIMIT
    assert decode(canonical(shown), AuditAnswer) == shown  # type: ignore[arg-type]
    assert server.answer(GetCommitments(base=bytes(32))) == Commitments(commitments=())
