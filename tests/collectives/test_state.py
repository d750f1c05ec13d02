from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from blake3 import blake3

from shoal.collectives.commitment import merkle_root
from shoal.collectives.grid import Grid
from shoal.collectives.state import (
    CertifiedState,
    StateAssembly,
    StateHeader,
    StateKind,
    chunk_bytes,
    frozen,
    header_of,
)
from shoal.protocol.errors import LocalError, RemoteError
from shoal.protocol.messages import Term, domain_hash
from shoal.protocol.wire import canonical, decode

GRID = Grid(2500, 1000)
PIECES = [(kind, chunk) for kind in StateKind for chunk in range(3)]


def make_state(seed: int = 1) -> CertifiedState:
    generator = np.random.default_rng(seed)
    anchor, momentum = (frozen(generator.standard_normal(2500).astype(np.float32)) for _ in range(2))
    return CertifiedState(
        term=Term(0, 1), round=7, tokens=9000, layout_hash=b"L" * 32, anchor=anchor, momentum=momentum
    )


def test_digest_follows_the_documented_preimage() -> None:
    state = make_state()
    roots = [
        merkle_root([blake3(vector[c : c + 1000].tobytes()).digest() for c in (0, 1000, 2000)])
        for vector in (state.anchor, state.momentum)
    ]
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


def test_header_is_the_same_with_more_threads() -> None:
    assert header_of(make_state(), GRID, threads=3) == header_of(make_state(), GRID)


def test_header_survives_the_wire() -> None:
    header = header_of(make_state(), GRID)
    assert decode(canonical(header), StateHeader) == header


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
    assert assembly.missing() == PIECES
    order = [PIECES[i] for i in np.random.default_rng(3).permutation(6)]
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
    assert assembly.missing() == PIECES
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
    for kind, chunk in PIECES:
        if (kind, chunk) != but:
            assembly.accept(kind, chunk, chunk_bytes(state, GRID, kind, chunk))
    return assembly


def same(found: CertifiedState, state: CertifiedState) -> bool:
    return found.anchor.tobytes() == state.anchor.tobytes() and found.momentum.tobytes() == state.momentum.tobytes()


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
