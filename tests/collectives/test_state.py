from __future__ import annotations

import sys
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from blake3 import blake3

from shoal.collectives.commitment import merkle_root
from shoal.collectives.grid import Grid
from shoal.collectives.memory import VectorPool
from shoal.collectives.policy_image import image_of
from shoal.collectives.state import (
    ADAMW_KINDS,
    NESTEROV_KINDS,
    CertifiedState,
    ImageHeader,
    PolicyImage,
    StateAssembly,
    StateHeader,
    StateKind,
    chunk_bytes,
    frozen,
    header_of,
    image_of_chunk,
)
from shoal.protocol.errors import LocalError, RemoteError
from shoal.protocol.messages import Term, domain_hash
from shoal.protocol.wire import canonical, decode

GRID = Grid(2500, 1000)

KINDS = {2: NESTEROV_KINDS, 3: ADAMW_KINDS}


@pytest.fixture(params=[2, 3], ids=["nesterov", "adamw"], autouse=True)
def how_many(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test is of states of two vectors, and of three."""
    monkeypatch.setattr(sys.modules[__name__], "VECTORS", request.param)


VECTORS = 2


def pieces() -> list[tuple[StateKind, int]]:
    return [(kind, chunk) for kind in KINDS[VECTORS] for chunk in range(3)]


def make_state(seed: int = 1) -> CertifiedState:
    generator = np.random.default_rng(seed)
    vectors = [frozen(generator.standard_normal(2500).astype(np.float32)) for _ in range(VECTORS)]
    return CertifiedState.of_vectors(vectors, term=Term(0, 1), round=7, tokens=9000, layout_hash=b"L" * 32)


def test_digest_of_an_imaged_state_covers_its_image() -> None:
    plain, state = make_state(), replace(make_state(), imaged=True)
    vectors = [*map(state.vector, KINDS[VECTORS]), (state.anchor.view(np.uint32) >> 16).astype("<u2")]
    vectors[-1] += ((state.anchor.view(np.uint32) & 0xFFFF) > 0x8000).astype("<u2")  # no value lies in the middle
    roots = [merkle_root([blake3(one[c : c + 1000].tobytes()).digest() for c in (0, 1000, 2000)]) for one in vectors]
    preimage = canonical([0, 1, 7, 9000, 2500, 1000, b"L" * 32, *roots])
    header = header_of(state, GRID)
    assert header.digest == domain_hash("imaged state", preimage) != header_of(plain, GRID).digest
    assert header_of(plain, GRID).of_image is None
    image = header.of_image
    assert image is not None
    assert image.digest == header.digest
    held = PolicyImage(image, image_of(state.anchor))
    assert [blake3(image_of_chunk(held, GRID, c).tobytes()).digest() for c in range(3)] == [
        image.chunk_hash(c) for c in range(3)
    ]
    assert [image_of_chunk(held, GRID, c).tobytes() for c in range(3)] == [
        image_of_chunk(state, GRID, c).tobytes() for c in range(3)
    ]
    with pytest.raises(LocalError):
        image_of_chunk(held, GRID, 3)
    assert np.array_equal(image_of(held.anchor(VectorPool(0))), held.halves)


def test_header_with_an_image_of_other_chunks_is_none() -> None:
    header = header_of(replace(make_state(), imaged=True), GRID)
    for image in (header.image + bytes(32), bytes(32)):
        with pytest.raises(ValueError, match="exactly one hash per chunk"):
            msgspec.convert(msgspec.to_builtins(header, builtin_types=(bytes,)) | {"image": image}, StateHeader)
        fields = msgspec.to_builtins(header.of_image, builtin_types=(bytes,))
        with pytest.raises(ValueError, match="exactly one hash per chunk"):
            msgspec.convert(fields | {"image": image}, ImageHeader)


def test_state_that_was_fetched_is_imaged_as_its_header_is() -> None:
    for imaged in (False, True):
        state = replace(make_state(), imaged=imaged)
        header = header_of(state, GRID)
        assembly = StateAssembly(header, digest=header.digest)
        assembly.copy_from(state, header)
        assert header_of(assembly.finish(), GRID).digest == header.digest


def test_digest_follows_the_documented_preimage() -> None:
    state = make_state()
    roots = [
        merkle_root([blake3(vector[c : c + 1000].tobytes()).digest() for c in (0, 1000, 2000)])
        for vector in map(state.vector, KINDS[VECTORS])
    ]
    assert len(roots) == VECTORS
    preimage = canonical([0, 1, 7, 9000, 2500, 1000, b"L" * 32, *roots])
    assert header_of(state, GRID).digest == domain_hash("state", preimage)


def test_digest_changes_with_every_field_and_every_bit() -> None:
    state = make_state()
    other = np.array(state.anchor)
    other.view(np.uint32)[2499] ^= 1
    zero, minus_zero = np.zeros(2500, np.float32), -np.zeros(2500, np.float32)
    states = [
        state,
        replace(state, term=Term(1, 0)),
        replace(state, round=8),
        replace(state, tokens=9001),
        replace(state, layout_hash=b"M" * 32),
        replace(state, anchor=frozen(other)),
        replace(state, anchor=state.momentum, momentum=state.anchor),
        replace(state, anchor=frozen(zero)),
        replace(state, anchor=frozen(minus_zero)),
    ]
    digests = {header_of(s, GRID).digest for s in states} | {header_of(state, Grid(2500, 500)).digest}
    assert len(digests) == len(states) + 1


def test_second_moment_is_part_of_the_digest_in_its_own_place() -> None:
    anchor, momentum = (frozen(np.full(2500, value, np.float32)) for value in (1, 2))
    two = CertifiedState(term=Term(), round=1, tokens=1, layout_hash=bytes(32), anchor=anchor, momentum=momentum)
    three = replace(two, second_moment=momentum)
    swapped = replace(two, momentum=anchor, second_moment=momentum)
    assert len({header_of(state, GRID).digest for state in (two, three, swapped)}) == 3
    assert header_of(three, GRID).digest != header_of(replace(three, second_moment=anchor), GRID).digest


def test_header_has_a_hash_per_chunk_of_every_vector_and_no_more_than_a_message_holds() -> None:
    fields = msgspec.to_builtins(header_of(make_state(), GRID), builtin_types=(bytes,))
    many = bytes(32 * (32_000 // 3 + 1))
    for change in (
        {"second_moment": bytes(64)},
        {"numel": len(many) // 32, "chunk_values": 1, "anchor": many, "momentum": many, "second_moment": many},
    ):
        with pytest.raises(RemoteError):
            decode(canonical(fields | change), StateHeader)
    fitting = fields | {"numel": 16_000, "chunk_values": 1, "second_moment": b""}
    assert decode(canonical(fitting | {"anchor": bytes(512_000), "momentum": bytes(512_000)}), StateHeader)


def test_vector_that_a_state_does_not_have_is_refused() -> None:
    assembly = StateAssembly(header := header_of(two := make_state(), GRID), digest=header.digest)
    if VECTORS == 2:
        with pytest.raises(RemoteError):
            assembly.accept(StateKind.SECOND_MOMENT, 0, bytes(4000))
        with pytest.raises(LocalError):
            two.vector(StateKind.SECOND_MOMENT)
        assert header.chunk_hash(StateKind.SECOND_MOMENT, 0) == b""


def test_initial_state_has_zeros_beside_its_anchor() -> None:
    state = CertifiedState.initial(np.ones(5, np.float32), bytes(32), KINDS[VECTORS])
    assert (state.kinds, state.round, state.tokens, state.nbytes) == (KINDS[VECTORS], 0, 0, 20 * VECTORS)
    assert [float(state.vector(kind).sum()) for kind in state.kinds] == [5.0, *[0.0] * (VECTORS - 1)]


def test_header_is_the_same_with_more_threads() -> None:
    assert header_of(make_state(), GRID, threads=3) == header_of(make_state(), GRID)


def test_header_with_too_few_hashes_is_refused_on_decoding() -> None:
    header = header_of(make_state(), GRID)
    fields = msgspec.to_builtins(header, builtin_types=(bytes,))
    for change in ({"numel": 3001}, {"anchor": header.anchor[:-32]}, {"chunk_values": 1}):
        with pytest.raises(RemoteError):
            decode(canonical(fields | change), StateHeader)


def test_assembly_in_any_order_gives_the_state_back() -> None:
    state = make_state()
    header = header_of(state, GRID)
    assembly = StateAssembly(header, digest=header.digest)
    assert assembly.missing() == pieces()
    order = [pieces()[i] for i in np.random.default_rng(3).permutation(3 * VECTORS)]
    for done, (kind, chunk) in enumerate(order, start=1):
        assert assembly.accept(kind, chunk, chunk_bytes(state, GRID, kind, chunk))
        assert not assembly.accept(kind, chunk, chunk_bytes(state, GRID, kind, chunk))
        assert assembly.missing() == sorted(order[done:])
    result = assembly.finish()
    assert header_of(result, GRID) == header
    assert result.anchor.tobytes() == state.anchor.tobytes()
    assert not result.anchor.flags.writeable


def test_assembly_writes_nothing_but_the_certified_bytes() -> None:
    state = make_state()
    header = header_of(state, GRID)
    assembly = StateAssembly(header, digest=header.digest)
    right = bytes(chunk_bytes(state, GRID, StateKind.ANCHOR, 1))
    wrong = [right[:-1] + bytes([right[-1] ^ 1]), right[:-4], right + bytes(4), b""]
    for data in wrong:
        with pytest.raises(RemoteError):
            assembly.accept(StateKind.ANCHOR, 1, data)
    for kind, chunk in ((StateKind.MOMENTUM, 1), (StateKind.ANCHOR, 0), (StateKind.ANCHOR, 3), (StateKind.ANCHOR, -1)):
        with pytest.raises(RemoteError):
            assembly.accept(kind, chunk, right)
    assert assembly.missing() == pieces()
    with pytest.raises(LocalError):
        assembly.finish()


def test_assembly_believes_no_header_but_the_certified_one() -> None:
    header = header_of(make_state(), GRID)
    with pytest.raises(RemoteError):
        StateAssembly(header_of(make_state(2), GRID), digest=header.digest)


def test_state_refuses_vectors_that_could_change() -> None:
    good = make_state()
    for bad in (np.zeros(2500, np.float32), frozen(np.zeros(2499, np.float32)), frozen(np.zeros((50, 50), np.float32))):
        with pytest.raises(LocalError):
            replace(good, momentum=bad)
    with pytest.raises(ValueError, match="read-only"):
        good.anchor[0] = 1


def test_header_of_another_grid_is_our_bug() -> None:
    with pytest.raises(LocalError):
        header_of(make_state(), Grid(2501, 1000))


# -- chunks that are written into their place ----------------------------------------------------------------


def assembly_of(state: CertifiedState, *, but: tuple[StateKind, int]) -> StateAssembly:
    """All of a state is here but one chunk."""
    header = header_of(state, GRID)
    assembly = StateAssembly(header, digest=header.digest)
    for kind, chunk in pieces():
        if (kind, chunk) != but:
            assembly.accept(kind, chunk, chunk_bytes(state, GRID, kind, chunk))
    return assembly


def same(found: CertifiedState, state: CertifiedState) -> bool:
    return [found.vector(k).tobytes() for k in found.kinds] == [state.vector(k).tobytes() for k in state.kinds]


PIECE = (StateKind.MOMENTUM, 2)


def test_lent_place_takes_the_chunk_without_a_copy() -> None:
    state = make_state()
    assembly = assembly_of(state, but=PIECE)
    place = assembly.lend(*PIECE)
    assert place is not None
    assert place.nbytes == 2000
    assert assembly.lend(*PIECE) is None  # one writer at a time
    place[:] = chunk_bytes(state, GRID, *PIECE)
    assert assembly.missing() == [PIECE]  # nobody has vouched for it yet
    assert assembly.chunk(*PIECE) is None
    assert assembly.accept(*PIECE, place)
    assert assembly.lend(*PIECE) is None  # nor any once it is here
    memory = assembly.chunk(*PIECE)
    assert memory is not None
    found = assembly.finish()
    assert same(found, state)
    assert np.shares_memory(np.frombuffer(memory, np.float32), found.momentum)
    assert np.shares_memory(np.frombuffer(place, np.float32), found.momentum)


def test_wrong_bytes_in_a_place_are_not_the_chunk_and_the_place_can_be_had_again() -> None:
    state = make_state()
    assembly = assembly_of(state, but=PIECE)
    place = assembly.lend(*PIECE)
    assert place is not None
    place[:] = bytes(2000)
    with pytest.raises(RemoteError, match="not the certified one"):
        assembly.accept(*PIECE, place)
    assert assembly.chunk(*PIECE) is None
    with pytest.raises(LocalError, match="1 chunks of the state are still missing"):
        assembly.finish()
    assembly.give_back(*PIECE, clean=True)
    again = assembly.lend(*PIECE)
    assert again is not None
    again[:] = chunk_bytes(state, GRID, *PIECE)
    assert assembly.accept(*PIECE, again)
    assert same(assembly.finish(), state)


@pytest.mark.parametrize("given_up", [True, False])
def test_late_writer_cannot_reach_a_chunk_that_came_from_elsewhere(given_up: bool) -> None:
    """Whether its request was given up in the middle of a write, or the other's copy was simply first."""
    state = make_state()
    assembly = assembly_of(state, but=PIECE)
    place = assembly.lend(*PIECE)
    assert place is not None
    if given_up:
        assembly.give_back(*PIECE, clean=False)
        assert assembly.lend(*PIECE) is None  # two would write there
    assert assembly.accept(*PIECE, chunk_bytes(state, GRID, *PIECE))
    assert not assembly.accept(*PIECE, chunk_bytes(state, GRID, *PIECE))
    place[:] = b"!" * 2000
    served = assembly.chunk(*PIECE)
    assert served == chunk_bytes(state, GRID, *PIECE)
    found = assembly.finish()
    place[:] = b"?" * 2000
    assert same(found, state)


def test_place_given_back_clean_costs_no_second_vector() -> None:
    state = make_state()
    assembly = assembly_of(state, but=PIECE)
    place = assembly.lend(*PIECE)
    assert place is not None
    assert assembly.accept(*PIECE, chunk_bytes(state, GRID, *PIECE))
    assembly.give_back(*PIECE, clean=True)
    found = assembly.finish()
    assert same(found, state)
    assert np.shares_memory(np.frombuffer(place, np.float32), found.momentum)


def test_chunk_whose_memory_has_changed_is_not_taken_over() -> None:
    """A state may lie in a file, and the disk may have changed that since its header was worked out."""
    state = make_state()
    vectors = [state.vector(kind).copy() for kind in state.kinds]
    vectors[1][slice(*GRID.span(PIECE[1]))] += 1
    changed = CertifiedState.of_vectors(
        [frozen(vector) for vector in vectors],
        term=state.term,
        round=state.round,
        tokens=state.tokens,
        layout_hash=state.layout_hash,
    )
    header = header_of(state, GRID)
    assembly = StateAssembly(header, digest=header.digest)
    assembly.copy_from(changed, header)
    assert assembly.missing() == [(StateKind.MOMENTUM, PIECE[1])]
