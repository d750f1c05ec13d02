"""Messages: hashes are what they always were and cover all that is said, and what plans and results make of theirs."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.protocol.certificate import genesis
from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import Identity
from shoal.protocol.messages import (
    CHUNK_LIMIT,
    NO_HASH,
    STATEMENT_DOMAIN,
    VOTE_DOMAIN,
    ChunkResults,
    ChunkStatement,
    Held,
    Moved,
    Moves,
    OwnedRange,
    Participant,
    Plan,
    Relay,
    Rollback,
    Target,
    Term,
    Value,
    domain_hash,
    step_preimage,
)
from shoal.protocol.wire import HASH_BYTES, MESSAGE_LIMIT_BYTES, canonical, decode

ALICE = Identity.from_seed(bytes(32))
BOB = Identity.from_seed(bytes([1]) * 32)
MEMBERS = tuple(sorted((ALICE.peer_id, BOB.peer_id)))
START = genesis(bytes(range(32)), [ALICE.peer_id, BOB.peer_id])
TERM = Term(1, 2)


def filled(number: int) -> bytes:
    return bytes([number]) * HASH_BYTES


VALUE = Value(
    swarm=filled(1),
    term=TERM,
    round=7,
    base=filled(2),
    plan=filled(3),
    planner=ALICE.peer_id,
    members=MEMBERS,
    leaves=(BOB.peer_id,),
    leave_signatures=(bytes(64),),
    bitmaps=filled(4),
    tokens=12345,
    digest=filled(5),
)
TARGET = Target(3, filled(9))
BACK = msgspec.structs.replace(VALUE, rollback=Rollback(TARGET, MEMBERS, (bytes(64), bytes(64))))
PLAN = Plan(
    term=TERM,
    round=7,
    base=filled(2),
    view=3,
    attempt=1,
    planner=ALICE.peer_id,
    participants=(
        Participant(MEMBERS[0], 10, 11, filled(6), life=filled(30)),
        Participant(MEMBERS[1], 0, 0, NO_HASH, life=filled(31)),
    ),
    owners=(OwnedRange(1, 0, 3), OwnedRange(0, 3, 4)),
    evicted=(),
    codec="int8",
    numel=1000,
    chunk_values=256,
)
RESULTS = ChunkResults.of(1, {0: filled(20), 9: filled(21), 8: filled(22)})
REVISED = msgspec.structs.replace(
    PLAN, attempt=2, evicted=(MEMBERS[0],), origin=PLAN.hash, standing=(RESULTS,), relays=(Relay(0, 1, 2),)
)
STATEMENT = ChunkStatement.sign(ALICE, plan=PLAN.hash, chunk=3, bitmap=b"\x05", result=filled(7))
MOVES = Moves(
    (Moved(ALICE.peer_id, -1, NO_HASH, bytes(64)), Moved(BOB.peer_id, 3, VALUE.hash, bytes(64))),
    (BOB.peer_id,),
    (bytes(64),),
)
HELD = Held(term=TERM, round=7, base=filled(2), lineage=PLAN.hash, evicted=(BOB.peer_id,), chunks=(RESULTS,))


# -- hashes --------------------------------------------------------------------------------------------------


def test_hashes_are_what_they_always_were() -> None:
    """Golden values: a change here forks every running swarm."""
    assert VALUE.hash.hex() == GOLDEN_VALUE
    assert msgspec.structs.replace(VALUE, leave_signatures=msgspec.UNSET).hash.hex() == GOLDEN_VALUE_OF_FIRST_EDITION
    assert PLAN.hash.hex() == GOLDEN_PLAN
    assert REVISED.hash.hex() == GOLDEN_REVISED_PLAN
    assert START.hash.hex() == GOLDEN_GENESIS
    assert step_preimage(3, filled(1)).hex() == "9203c420" + "01" * 32


GOLDEN_VALUE = "820a46305dc3bac6e7d67d9b6d6bc342f10b56f42a89eebc35faec86d6995f01"
GOLDEN_VALUE_OF_FIRST_EDITION = "4a56b9237e85c8888ee6d391e1f41e430744dd7a11c7fd8d30d1ca045a341e07"
GOLDEN_PLAN = "365b6f718692668ca9b28b2cdfde18b4ecd2d7b9eb55e858ea08878e7fdc82f9"
GOLDEN_REVISED_PLAN = "12243865e1ec66323d237adb4b88c4b8243f6bbebccb42478afb222f3681313f"
GOLDEN_GENESIS = "609e54e668bcc4b8dbdc4fb0c7084df9d8e9613d77a6f7e467603e4e5a87cf1f"


@pytest.mark.parametrize("field", Value.__struct_fields__)
def test_hash_of_a_value_covers_every_field(field: str) -> None:
    other: dict[str, object] = {
        "term": Term(1, 3),
        "round": 8,
        "planner": BOB.peer_id,
        "members": MEMBERS[:1],
        "leaves": (),
        "tokens": 12346,
        "leave_signatures": (filled(9) * 2,),
        "report_signatures": (filled(9) * 2,),
    }
    changed = msgspec.structs.replace(VALUE, **{field: other.get(field, filled(99))})
    assert changed.hash != VALUE.hash


def test_hash_of_a_plan_is_the_same_whichever_quorum_entered_its_view() -> None:
    assert msgspec.structs.replace(PLAN, moves=MOVES).hash == PLAN.hash


@pytest.mark.parametrize("field", [name for name in Plan.__struct_fields__ if name not in ("term", "moves")])
def test_hash_of_a_plan_covers_every_field(field: str) -> None:
    other: dict[str, object] = {
        "planner": BOB.peer_id,
        "participants": PLAN.participants[:1],
        "owners": PLAN.owners[:1],
        "evicted": (BOB.peer_id,),
        "codec": "fp32",
        "base": filled(99),
        "origin": filled(99),
        "standing": (RESULTS,),
        "relays": (Relay(0, 1, 2),),
        "clips": (65536, 65535),
    }
    changed = msgspec.structs.replace(PLAN, **{field: other.get(field, 42)})
    assert changed.hash != PLAN.hash


def test_domains_and_part_boundaries_separate_hashes() -> None:
    hashes = {
        domain_hash("a", b"bc"),
        domain_hash("ab", b"c"),
        domain_hash("a", b"b", b"c"),
        domain_hash("a", b"bc", b""),
        domain_hash("a"),
        domain_hash("a", b""),
    }
    assert len(hashes) == 6
    assert len({VOTE_DOMAIN, STATEMENT_DOMAIN}) == 2


# -- plans and their revisions -------------------------------------------------------------------------------


def test_lineage_is_the_hash_of_the_plan_that_all_revisions_have_in_common() -> None:
    assert PLAN.lineage == PLAN.hash
    assert REVISED.lineage == PLAN.hash != REVISED.hash
    again = msgspec.structs.replace(REVISED, attempt=3, origin=REVISED.lineage)
    assert again.lineage == PLAN.hash


def test_evicted_keep_their_places_and_their_weight_but_do_not_remain() -> None:
    assert REVISED.contributors() == PLAN.contributors() == (0,)
    assert REVISED.number(MEMBERS[0]) == 0
    assert PLAN.remaining == MEMBERS
    assert REVISED.remaining == MEMBERS[1:]


# -- results -------------------------------------------------------------------------------------------------


@given(st.dictionaries(st.integers(0, CHUNK_LIMIT - 1), st.integers(0, 255).map(filled), max_size=40))
def test_results_come_back_by_chunk(results: dict[int, bytes]) -> None:
    packed = ChunkResults.of(5, results)
    assert packed.by_chunk() == results
    assert list(packed.by_chunk()) == sorted(results)
    assert packed.place == 5
    again = decode(canonical(packed), ChunkResults)
    assert again == packed
    assert len(packed.chunks) == (max(results) // 8 + 1 if results else 0)


def test_results_are_packed_by_bits_in_chunk_order() -> None:
    assert ChunkResults(1, b"\x01\x03", filled(20) + filled(22) + filled(21)) == RESULTS
    assert ChunkResults.of(0, {}) == ChunkResults(0, b"", b"")


@pytest.mark.parametrize(("chunks", "count"), [(b"", 1), (b"\x01", 0), (b"\x01", 2), (b"\x00\x81", 1), (b"\xff", 9)])
def test_results_that_are_not_one_for_each_chunk_are_no_results(chunks: bytes, count: int) -> None:
    with pytest.raises(ValueError, match="exactly one result"):
        ChunkResults(0, chunks, filled(1) * count)
    with pytest.raises(RemoteError):
        decode(canonical([0, chunks, filled(1) * count]), ChunkResults)


def test_results_of_a_full_grid_fit_a_message() -> None:
    packed = ChunkResults.of(0, dict.fromkeys(range(CHUNK_LIMIT), filled(1)))
    held = msgspec.structs.replace(HELD, chunks=(packed,))
    assert decode(canonical(held), Held) == held
    half = CHUNK_LIMIT // 2  # of an owner that was lost, every other chunk dealt anew
    owners = (*(OwnedRange(c % 2, c, c + 1) for c in range(half)), OwnedRange(1, half, CHUNK_LIMIT))
    plan = msgspec.structs.replace(REVISED, owners=owners, standing=(packed,))
    assert len(canonical(plan)) < MESSAGE_LIMIT_BYTES
    assert decode(canonical(plan), Plan) == plan


# -- statements and terms ------------------------------------------------------------------------------------


def test_statement_holds_only_as_signed() -> None:
    assert STATEMENT.valid()
    for changes in (
        {"plan": filled(1)},
        {"chunk": 4},
        {"bitmap": b"\x07"},
        {"result": filled(1)},
        {"owner": BOB.peer_id},
        {"signature": bytes(64)},
    ):
        assert not msgspec.structs.replace(STATEMENT, **changes).valid()


def test_vote_signature_is_no_statement_signature() -> None:
    preimage = canonical([PLAN.hash, 3, b"\x05", filled(7)])
    crossed = msgspec.structs.replace(STATEMENT, signature=ALICE.sign(VOTE_DOMAIN, preimage))
    assert not crossed.valid()


def test_terms_compare_rebases_before_rollbacks() -> None:
    assert Term(0, 9) < Term(1, 0) < Term(1, 1) < Term(2, 0)
    assert decode(canonical(Term(3, 4)), Term) == Term(3, 4)


# -- terms -------------------------------------------------------------------------------------------------------


def test_value_without_a_rollback_is_encoded_without_the_field() -> None:
    assert b"rollback" not in canonical(VALUE)
    assert b"rollback" in canonical(BACK)
    assert VALUE.hash != BACK.hash


def test_what_comes_after_a_value_is_the_next_round_or_the_next_term() -> None:
    assert (VALUE.next_term, VALUE.next_round, VALUE.state_round) == (TERM, 8, 7)
    assert (BACK.next_term, BACK.next_round, BACK.state_round) == (Term(TERM.rebases, TERM.rollbacks + 1), 4, 3)
    assert sorted([Term(1, 0), Term(0, 7), Term(1, 1), Term()]) == [Term(), Term(0, 7), Term(1, 0), Term(1, 1)]
