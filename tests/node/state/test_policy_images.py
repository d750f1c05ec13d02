"""Images that a node has: changes made once, what is forgotten, and files that are believed or not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shoal.collectives.policy_image import apply_changes, image_of
from shoal.collectives.state import CertifiedState, PolicyImage, header_of, image_of_chunk
from shoal.node.state import policy_images
from shoal.node.state.policy_images import CHANGES_KEPT, IMAGES_KEPT, changes_scope
from shoal.node.state.states import StateCache
from shoal.protocol.messages import NO_HASH
from shoal.swarm.lanes.chunks import ChunkRef, ChunkSpace
from shoal.swarm.lanes.frame import SCOPE_BYTES
from tests.node.ledger import GRID, state_of


def imaged(round: int) -> CertifiedState:
    return replace(state_of(round, seed=round), imaged=True)


def image_of_round(round: int) -> PolicyImage:
    state = imaged(round)
    header = header_of(state, GRID).of_image
    assert header is not None
    return PolicyImage(header, image_of(state.anchor))


def digest(round: int) -> bytes:
    return header_of(imaged(round), GRID).digest


@pytest.fixture
def cache(tmp_path: Path) -> StateCache:
    for name in ("state", "finals"):
        (tmp_path / name).mkdir()
    return StateCache(tmp_path, GRID.chunk_values)


def hold(cache: StateCache, *rounds: int) -> None:
    for round in rounds:
        cache.put(imaged(round), header_of(imaged(round), GRID))


def test_changes_between_states_and_images_lead_from_one_to_the_other(cache: StateCache) -> None:
    hold(cache, 1, 2)
    told = cache.images.changes(digest(1), digest(2))
    assert told is not None
    for chunk in range(GRID.chunks):
        ref = ChunkRef(ChunkSpace.CHANGES, changes_scope(digest(1), digest(2)), chunk)
        assert cache.lookup(ref) == told[chunk]
        before = image_of_chunk(imaged(1), GRID, chunk)
        after = apply_changes(before, told[chunk], GRID.length(chunk))
        assert after.tobytes() == image_of_round(2).chunk(chunk).tobytes()
    assert cache.images.changes(digest(1), digest(2)) is told, "they are made once"
    cache.images.put(image_of_round(3))
    assert cache.images.changes(digest(2), digest(3)) is not None
    assert cache.lookup(ref._replace(chunk=GRID.chunks)) is None


def test_what_is_not_here_or_not_imaged_has_no_changes(cache: StateCache) -> None:
    hold(cache, 1)
    plain = state_of(5, seed=5)
    cache.put(plain, header_of(plain, GRID))
    for since, to in ((digest(1), digest(2)), (digest(2), digest(1)), (NO_HASH, digest(1))):
        assert cache.images.changes(since, to) is None
    assert cache.images.changes(digest(1), header_of(plain, GRID).digest) is None
    assert cache.images.find(header_of(plain, GRID).digest) is None


def test_chunks_of_images_are_served_under_the_digest(cache: StateCache) -> None:
    hold(cache, 1)
    cache.images.put(image_of_round(2))
    for round in (1, 2):
        for chunk in range(GRID.chunks):
            found = cache.lookup(ChunkRef(ChunkSpace.IMAGE, digest(round)[:SCOPE_BYTES], chunk))
            assert found == image_of_round(round).chunk(chunk).data
        assert cache.lookup(ChunkRef(ChunkSpace.IMAGE, digest(round)[:SCOPE_BYTES], GRID.chunks)) is None
    assert cache.lookup(ChunkRef(ChunkSpace.IMAGE, digest(3)[:SCOPE_BYTES], 0)) is None


def test_no_more_is_kept_than_the_limits_say(cache: StateCache) -> None:
    rounds = range(1, IMAGES_KEPT + 4)
    for round in rounds:
        cache.images.put(image_of_round(round))
    assert [round for round in rounds if cache.images.find(digest(round)) is not None] == list(rounds)[-IMAGES_KEPT:]
    for number in range(CHANGES_KEPT + 3):
        cache.images.put_changes(bytes([number]) * 32, NO_HASH, (b"\0",))
    refs = [
        ChunkRef(ChunkSpace.CHANGES, changes_scope(bytes([number]) * 32, NO_HASH), 0)
        for number in range(CHANGES_KEPT + 3)
    ]
    assert [cache.lookup(ref) is not None for ref in refs] == [False] * 3 + [True] * CHANGES_KEPT


def test_who_made_changes_for_long_rests_as_long(cache: StateCache, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def encode(*_: object) -> bytes:
        now[0] += 2.0
        return b"\0"

    monkeypatch.setattr(policy_images, "encode_changes", encode)
    monkeypatch.setattr(policy_images.time, "monotonic", lambda: now[0])
    hold(cache, 1, 2)
    made = cache.images.changes(digest(1), digest(2))
    took = now[0]
    assert made is not None
    assert cache.images.changes(digest(2), digest(1)) is None
    assert cache.images.changes(digest(1), digest(2)) is made
    now[0] = 2 * took
    assert cache.images.changes(digest(2), digest(1)) is not None


def test_an_image_takes_the_place_of_states_and_finals_on_disk(cache: StateCache, tmp_path: Path) -> None:
    for round in (0, 1, 2):
        cache.save_state(imaged(round))
    (tmp_path / "finals" / f"2-{bytes(32).hex()}").write_bytes(b"")
    for round in (3, 4):
        cache.save_state(image_of_round(round))
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["4.image.safetensors"]
    assert not list((tmp_path / "finals").iterdir())
    assert (tmp_path / "state" / "4.image.safetensors").stat().st_size < 2 * GRID.numel + 8192
    image = StateCache(tmp_path, GRID.chunk_values).images.load(digest)
    assert image is not None
    assert (image.round, image.tokens, image.term) == (4, 4000, image_of_round(4).term)
    assert image.halves.tobytes() == image_of_round(4).halves.tobytes()
    assert not image.halves.flags.writeable
    cache.save_state(imaged(5))
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["5.safetensors"]


def test_holding_an_image_lets_go_of_states(cache: StateCache) -> None:
    hold(cache, 1, 2)
    cache.hold_image(image_of_round(3))
    assert cache.held_rounds() == []
    assert cache.digest(image_of_round(3)) == digest(3)


def a_chunk(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def the_header(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"header":"8', b'"header":"9', 1))


def the_end(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


@pytest.mark.parametrize("damage", [a_chunk, the_header, the_end])
def test_a_file_that_is_not_the_certified_image_is_none(
    cache: StateCache, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    cache.save_state(image_of_round(4))
    assert cache.images.load(lambda round: digest(3)) is None, "of another state"
    assert cache.images.load(digest) is not None
    damage(tmp_path / "state" / "4.image.safetensors")
    assert cache.images.load(digest) is None


def test_memory_of_an_image_is_two_bytes_a_value(cache: StateCache) -> None:
    assert cache.images.room(image_of_round(1).header).nbytes == 2 * GRID.numel
    assert cache.images.room(image_of_round(1).header).dtype == np.uint8
