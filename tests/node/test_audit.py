"""The audit trail: files that anyone can read without this code, written whole, and only in test mode."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from shoal.collectives.codecs import codec
from shoal.collectives.commitment import chunk_hash, merkle_root
from shoal.collectives.contribution import EncodedContribution
from shoal.collectives.finals import Finals
from shoal.collectives.fragments import Fragments
from shoal.collectives.grid import Grid
from shoal.collectives.state import CertifiedState
from shoal.node.audit import AuditTrail
from shoal.node.state.contributions import Contributions, Made
from shoal.protocol.errors import StorageError
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Plan, Term
from shoal.protocol.wire import decode
from tests.node.ledger import GRID, Ledger, vector


def contribution(codec: str, *, round: int = 1, tokens: int = 1, seed: int = 1) -> Made:
    contributions = Contributions(Fragments(GRID), codec, 3, sender=PeerId("audited"))
    return contributions.make(round, 1, tokens, vector(seed), base=bytes(32))


def test_contribution_is_what_its_root_commits_to(tmp_path: Path) -> None:
    made = contribution("int8", round=7, tokens=640, seed=5)
    AuditTrail(tmp_path / "rounds", enabled=True).contribution(Term(1, 2), made)
    folder = tmp_path / "rounds" / "1.2-7"
    kept = f"contribution-{made.encoded.root.hex()[:16]}"
    assert sorted(path.name for path in folder.iterdir()) == ["contribution", kept]
    assert (folder / kept).samefile(folder / "contribution")
    body = msgspec.msgpack.decode((folder / "contribution").read_bytes())
    assert set(body) == {"codec", "numel", "chunk_values", "tokens", "root", "chunks"}
    assert (body["codec"], body["numel"], body["chunk_values"], body["tokens"]) == ("int8", 10_000, 4096, 640)
    assert merkle_root([chunk_hash(chunk) for chunk in body["chunks"]]) == body["root"] == made.encoded.root
    values = np.empty(body["numel"], np.float32)
    grid = Grid(body["numel"], body["chunk_values"])
    for chunk, data in enumerate(body["chunks"]):
        codec(body["codec"]).decode_into(data, values[slice(*grid.span(chunk))])
    assert values.tobytes() == made.encoded.decoded().tobytes()
    assert np.abs(values - vector(5)).max() < 0.05


def test_applied_round_can_be_decoded_again(tmp_path: Path) -> None:
    ledger = Ledger()
    ledger.certify()
    finals = ledger.finals[1]
    assert AuditTrail(tmp_path, enabled=True).applied(Term(), finals) > 0, "it takes time"
    folder = tmp_path / "0.0-1"
    assert sorted(path.name for path in folder.iterdir()) == ["applied", "finals", "plan"]
    plan = decode((folder / "plan").read_bytes(), Plan)
    assert plan == finals.plan
    body = msgspec.msgpack.decode((folder / "finals").read_bytes())
    assert set(body) == {"plan", "bitmaps", "chunks"}
    assert body["plan"] == plan.hash
    assert body["bitmaps"] == [b"\x07"] * 3
    applied = np.frombuffer((folder / "applied").read_bytes(), "<f4")
    assert applied.tobytes() == finals.decoded().tobytes()
    for chunk, data in enumerate(body["chunks"]):
        start, stop = GRID.span(chunk)
        values = np.empty(stop - start, np.float32)
        codec(plan.codec).decode_into(data, values)
        assert values.tobytes() == applied[start:stop].tobytes()


def test_disabled_trail_writes_nothing_and_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger()
    ledger.certify()
    made = contribution("fp32")

    def costly(*_: object) -> None:
        raise AssertionError("hundreds of megabytes are copied for nothing")

    for owner, name in ((Finals, "decoded"), (Finals, "bitmaps"), (EncodedContribution, "encoded")):
        monkeypatch.setattr(owner, name, property(costly))
    trail = AuditTrail(tmp_path / "rounds", enabled=False)
    assert trail.applied(Term(), ledger.finals[1]) == 0.0
    trail.contribution(Term(), made)
    assert not (tmp_path / "rounds").exists()


def test_contribution_that_is_made_again_of_the_same_round_leaves_the_first_where_it_was(tmp_path: Path) -> None:
    trail = AuditTrail(tmp_path, enabled=True)
    made = [contribution("fp32", seed=seed) for seed in (1, 2, 1)]
    for one in made:
        trail.contribution(Term(), one)
    folder = tmp_path / "0.0-1"
    for one in made:
        body = msgspec.msgpack.decode((folder / f"contribution-{one.encoded.root.hex()[:16]}").read_bytes())
        assert body["root"] == one.encoded.root
    assert msgspec.msgpack.decode((folder / "contribution").read_bytes())["root"] == made[2].encoded.root
    assert len(list(folder.iterdir())) == 3


def test_states_of_a_gossip_round_that_is_made_once_more_are_all_kept(tmp_path: Path) -> None:
    trail = AuditTrail(tmp_path, enabled=True)
    states = [CertifiedState.initial(vector(seed), bytes(32)) for seed in (1, 2, 1)]
    for state in states:
        trail.began(state)
    written = [state.anchor.tobytes() + state.momentum.tobytes() for state in states]
    assert (tmp_path / "0.0-0" / "began").read_bytes() == written[2]
    for data in written:
        assert (tmp_path / "0.0-0" / f"began-{chunk_hash(data).hex()[:16]}").read_bytes() == data
    assert len(list((tmp_path / "0.0-0").iterdir())) == 3


def test_folder_that_cannot_be_made_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "rounds").write_text("a file")
    made = contribution("fp32")
    with pytest.raises(StorageError, match="rounds"):
        AuditTrail(tmp_path / "rounds", enabled=True).contribution(Term(), made)


def test_of_what_is_made_once_more_it_stays_known_when_it_was_made_first(tmp_path: Path) -> None:
    """Else an old folder that is put back would seem to have made it after the rounds that follow it."""
    trail = AuditTrail(tmp_path, enabled=True)
    for seed in (1, 2, 1):
        trail.made_of(Term(), contribution("fp32", seed=seed), vector(seed))
    first = tmp_path / "0.0-1" / f"input-{contribution('fp32', seed=1).encoded.root.hex()[:16]}"
    (second,) = set(first.parent.iterdir()) - {first}
    assert first.stat().st_mtime_ns <= second.stat().st_mtime_ns
    assert msgspec.msgpack.decode(first.read_bytes())["learnt"] == vector(1).tobytes()
