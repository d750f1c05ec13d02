"""Records: only what a node says about itself, only the newest, and never more than the book holds."""

from __future__ import annotations

import msgspec
import pytest

from shoal.protocol import records
from shoal.protocol.errors import LocalError, RemoteError
from shoal.protocol.identity import Identity
from shoal.protocol.records import (
    NODE_RECORD_KIND,
    RECORD_LIMIT,
    RECORD_TTL_S,
    NodeRecord,
    RecordBook,
    open_record,
    renewal_s,
    seal_record,
    step_capability,
)
from shoal.protocol.wire import Sealer, SwarmId, canonical

ALICE = Identity.from_seed(bytes(range(32)))
BOB = Identity.from_seed(bytes(32))
SWARM = SwarmId(bytes(range(32)))


def record_of(identity: Identity = ALICE, *, boot: int = 1, **values: object) -> NodeRecord:
    record = NodeRecord(peer=identity.peer_id, boot=boot, phase="training", tokens_per_s=100.0)
    return msgspec.structs.replace(record, **values)


def sealed_raw(record: object, identity: Identity = ALICE, boot: int = 1, swarm: SwarmId = SWARM) -> bytes:
    """What a node that does not keep the rules could seal."""
    return Sealer(identity, swarm, boot).seal(NODE_RECORD_KIND, canonical(record))


def test_record_arrives_as_it_was_sealed() -> None:
    full = NodeRecord(
        peer=ALICE.peer_id,
        boot=4,
        incarnation=2,
        control_addresses=("/ip4/192.0.2.1/tcp/4001",),
        lane_addresses=("192.0.2.1:4002", "[2001:db8::1]:4002"),
        software="shoal 0.1.0",
        capabilities=("relay",),
        tokens_per_s=1234.5,
        upload_bytes_per_s=1e6,
        download_bytes_per_s=2e6,
        phase="joining",
        term=(1, 2),
        round=17,
    )
    book = RecordBook(SWARM)
    data = seal_record(Sealer(ALICE, SWARM, 4), full)
    assert book.receive(data, 0.0) == full
    assert book.get(ALICE.peer_id) == full
    assert book.sealed(ALICE.peer_id) == data
    assert full.certified == ((1, 2), 17)


def test_certified_compares_term_before_round() -> None:
    ahead = [record_of(term=(1, 0), round=1), record_of(term=(0, 3), round=9), record_of(term=(0, 3), round=10)]
    assert [record.round for record in sorted(ahead, key=lambda record: record.certified)] == [9, 10, 1]


def test_book_keeps_the_newest_and_drops_replays() -> None:
    book = RecordBook(SWARM)
    first_life, second_life = Sealer(ALICE, SWARM, 1), Sealer(ALICE, SWARM, 2)
    old = [seal_record(first_life, record_of(round=n)) for n in range(3)]
    new = seal_record(second_life, record_of(boot=2, round=9))
    assert book.receive(old[1], 0.0) == record_of(round=1)
    assert book.receive(old[0], 1.0) is None
    assert book.receive(old[1], 1.0) is None
    assert book.receive(old[2], 1.0) == record_of(round=2)
    assert book.receive(new, 2.0) == record_of(boot=2, round=9)
    for data in old:
        assert book.receive(data, 3.0) is None
    assert book.records() == (record_of(boot=2, round=9),)


def test_forged_record_is_refused_unless_it_is_old_all_the_same() -> None:
    book, sealer = RecordBook(SWARM), Sealer(ALICE, SWARM, 1)
    old, known, new = (seal_record(sealer, record_of(round=n)) for n in range(3))
    forged = {data: msgspec.msgpack.encode([*msgspec.msgpack.decode(data)[:-1], bytes(64)]) for data in (old, new)}
    assert book.receive(known, 0.0) == record_of(round=1)
    assert book.receive(forged[old], 1.0) is None
    with pytest.raises(RemoteError, match="did not sign"):
        book.receive(forged[new], 2.0, peer=BOB.peer_id)
    assert book.records() == (record_of(round=1),)
    assert book.receive(new, 3.0) == record_of(round=2)


def test_replay_does_not_prolong_a_record() -> None:
    book = RecordBook(SWARM)
    data = seal_record(Sealer(ALICE, SWARM, 1), record_of())
    book.receive(data, 0.0)
    book.receive(data, RECORD_TTL_S - 1)
    assert book.expire(RECORD_TTL_S) == (ALICE.peer_id,)


def test_record_is_renewed_so_that_gossip_passes_one_a_second_and_long_before_it_is_forgotten() -> None:
    assert [renewal_s(records) for records in (1, 120, 150)] == [120.0, 120.0, 150.0]
    assert renewal_s(RECORD_LIMIT) == RECORD_TTL_S / 3


def test_record_says_the_same_whatever_its_rates_and_progress() -> None:
    record = NodeRecord(peer=ALICE.peer_id, boot=1, phase="training", round=3, tokens_per_s=8.0)
    later = msgspec.structs.replace(record, round=4, term=(1, 0), tokens_per_s=9.0, upload_bytes_per_s=1.0)
    assert later.says_the_same(record)
    for change in (
        {"phase": "paused"},
        {"incarnation": 1},
        {"boot": 2},
        {"tokens_per_s": 0.0},
        {"control_addresses": ("/ip4/1.2.3.4/tcp/1",)},
    ):
        assert not msgspec.structs.replace(later, **change).says_the_same(record)  # type: ignore[arg-type]


def test_steps_a_second_are_tokens_a_second_by_what_a_step_is_said_to_have() -> None:
    def speed(*capabilities: str) -> float:
        return msgspec.structs.replace(record_of(), tokens_per_s=1000.0, capabilities=capabilities).steps_per_s

    assert speed("relay", *step_capability(249.7), "name.shoal") == 4.0
    assert (step_capability(0.0), step_capability(0.2)) == ((), ("step.1",))
    assert (speed(*step_capability(1e300)), step_capability(1e300)) == (1000 / (10**12 - 1), ("step.999999999999",))
    for unknown in ("step.0", "step.", "step.-1", "step.1e3", "step.01", "steps.4", "step.1000000000000"):
        assert speed(unknown) == 0.0, unknown


def test_book_forgets_what_nobody_renews() -> None:
    book = RecordBook(SWARM)
    alice, bob = Sealer(ALICE, SWARM, 1), Sealer(BOB, SWARM, 1)
    book.receive(seal_record(alice, record_of()), 0.0)
    book.receive(seal_record(bob, record_of(BOB)), 10.0)
    book.receive(seal_record(alice, record_of(round=1)), 20.0)
    assert book.expire(RECORD_TTL_S + 9.9) == ()
    assert book.expire(RECORD_TTL_S + 10.0) == (BOB.peer_id,)
    assert book.records() == (record_of(round=1),)


def test_book_is_bounded_and_the_nearest_to_expiry_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "RECORD_LIMIT", 3)
    book = RecordBook(SWARM)
    peers = [Identity.from_seed(bytes([index]) * 32) for index in range(5)]
    for now, peer in enumerate(peers):
        book.receive(seal_record(Sealer(peer, SWARM, 1), record_of(peer)), float(now))
        assert len(book) <= 3
    assert {record.peer for record in book.records()} == {peer.peer_id for peer in peers[2:]}
    book.forget(peers[4].peer_id)
    assert book.get(peers[4].peer_id) is None
    assert book.sealed(peers[4].peer_id) is None


def test_book_refuses_forgeries_and_blames_who_delivered_them() -> None:
    book = RecordBook(SWARM)
    good = seal_record(Sealer(ALICE, SWARM, 1), record_of())
    forgeries = [
        sealed_raw(record_of(ALICE), identity=BOB),  # about another
        sealed_raw(record_of(boot=7)),  # another life than its envelope's
        sealed_raw(record_of(), swarm=SwarmId(bytes(32))),
        Sealer(ALICE, SWARM, 1).seal("vote", canonical(record_of())),
        good[:-1] + bytes([good[-1] ^ 1]),
        good.replace(b"training", b"trainink"),
        good + bytes(records.RECORD_LIMIT_BYTES),
    ]
    for data in forgeries:
        with pytest.raises(RemoteError) as caught:
            book.receive(data, 0.0, peer=BOB.peer_id)
        assert caught.value.peer == BOB.peer_id
    assert len(book) == 0


OUT_OF_RANGE: list[dict[str, object]] = [
    {"lane_addresses": ["a b"]},
    {"lane_addresses": ["\x1b[2J"]},
    {"software": "\x1b]0;title"},
    {"phase": "dreaming"},
    {"round": -1},
]


@pytest.mark.parametrize("values", OUT_OF_RANGE)
def test_record_out_of_range_is_refused_by_both_ends(values: dict[str, object]) -> None:
    tables = msgspec.to_builtins(record_of()) | values
    with pytest.raises(RemoteError):
        open_record(sealed_raw(tables), SWARM, 0.0)
    with pytest.raises(LocalError):
        seal_record(Sealer(ALICE, SWARM, 1), record_of(**values))


def test_node_seals_records_about_its_present_self_only() -> None:
    for record in (record_of(BOB), record_of(boot=2)):
        with pytest.raises(LocalError, match="about itself"):
            seal_record(Sealer(ALICE, SWARM, 1), record)


def test_strangers_records_push_out_nobodys_that_is_to_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "RECORD_LIMIT", 2)
    book = RecordBook(SWARM, keep=lambda: {ALICE.peer_id})
    book.receive(seal_record(Sealer(ALICE, SWARM, 1), record_of()), 0.0)
    strangers = [Identity.from_seed(bytes([n]) * 32) for n in range(1, 20)]
    for at, one in enumerate(strangers, 1):
        assert book.receive(seal_record(Sealer(one, SWARM, 1), record_of(one)), float(at)) is not None
    assert {record.peer for record in book.records()} == {ALICE.peer_id, strangers[-1].peer_id}
    assert book.order(ALICE.peer_id) == (1, 1)
