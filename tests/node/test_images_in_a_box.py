"""Samplers beside real engines in a box: the policy's image reaches them, by what changed, and checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.collectives.commitment import chunk_hash
from shoal.collectives.policy_image import encode_changes, image_of
from shoal.collectives.state import CertifiedState, PolicyImage, image_of_chunk
from shoal.node.state.catchup import CatchUp
from tests.node.box_life import NUMEL, Life
from tests.node.simulated_disk import Disks
from tests.node.swarm_in_a_box import Box, disks

__all__ = ["disks"]

MEMBERS = 3
FIRST, SECOND, THIRD = 3, 4, 5
LINKS = {FIRST: (0,), SECOND: (FIRST, 1), THIRD: (FIRST, SECOND)}
"""Whom each sampler dials: of the third no member is a neighbour."""
WHOLE = 2 * NUMEL


def box_of(tmp_path: Path, disks: Disks) -> Box:
    return Box(tmp_path, disks, nodes=6, founders=MEMBERS, followers=LINKS, images=True)


def times(life: Life, what: str) -> int:
    found = life.catchup.fetched.get(what) if life.up else None
    return 0 if found is None else found.times


def holds_image(life: Life) -> bool:
    return life.up and isinstance(life.state_store.state, PolicyImage)


def assert_certified(life: Life) -> None:
    """A sampler holds an image with the certified digest, and its chunks have the hashes that this covers."""
    image = life.state_store.state
    assert isinstance(image, PolicyImage)
    assert image.header.digest == life.chain.digest(image.round)
    for chunk in range(image.header.grid.chunks):
        assert chunk_hash(image.chunk(chunk).data) == image.header.chunk_hash(chunk)
    state = life.box.node(0).cache.state(image.round)
    if state is not None:
        assert image.halves.tobytes() == image_of(state.anchor).tobytes()


def test_what_changed_reaches_samplers_through_samplers(tmp_path: Path, disks: Disks) -> None:
    box = box_of(tmp_path, disks)

    async def course(box: Box) -> None:
        box.start_all()
        await box.until(lambda: all(times(box.node(number), "changes") >= 3 for number in LINKS))
        for number in LINKS:
            life = box.node(number)
            assert_certified(life)
            came = life.catchup.fetched["changes"]
            assert came.bytes < came.times * WHOLE / 20, "a few places change in a round"
        box.node(FIRST).cut()
        behind = box.node(0).round
        await box.until_round(behind + 3, 0, 1, 2, SECOND, THIRD)
        box.start(FIRST)
        await box.until_round(behind + 5)
        assert times(box.node(FIRST), "state") == 0, "it came back to its image"
        assert_certified(box.node(FIRST))

    box.run(course)


def tells_other_changes(life: Life) -> None:
    """What it says leads to another image."""
    images = life.cache.images
    right = images.changes

    def lies(since: bytes, digest: bytes) -> Sequence[bytes] | None:
        before, after = images.find(since), images.find(digest)
        if right(since, digest) is None or before is None or after is None:
            return None
        grid = after[1].grid
        other = [image_of(np.full(grid.length(chunk), 2.0, np.float32)) for chunk in range(grid.chunks)]
        told = tuple(
            encode_changes(image_of_chunk(before[0], grid, chunk), one, grid.length(chunk))
            for chunk, one in enumerate(other)
        )
        images.put_changes(since, digest, told)
        return told

    images.changes = lies  # type: ignore[method-assign]


def serves_another_image(life: Life) -> None:
    """Of changes it tells nothing, and the chunks are others."""
    images = life.cache.images
    images.changes = lambda since, digest: None  # type: ignore[method-assign]
    right = images.lookup

    def lies(ref: Any) -> memoryview | None:
        data = right(ref)
        return None if data is None else memoryview(bytes([data[0] ^ 1]) + bytes(data[1:]))

    images.lookup = lies  # type: ignore[method-assign]


@pytest.mark.parametrize("lie", [tells_other_changes, serves_another_image])
def test_parent_that_lies_costs_a_sampler_no_round_and_nothing_of_it_is_taken(
    tmp_path: Path, disks: Disks, lie: Callable[[Life], None]
) -> None:
    box = box_of(tmp_path, disks)

    async def course(box: Box) -> None:
        box.start_all()
        await box.until(lambda: all(holds_image(box.node(number)) for number in LINKS))
        lie(box.node(FIRST))
        for _ in range(3):
            await box.until_round(box.node(0).round + 2)
            for number in LINKS:
                assert_certified(box.node(number))

    box.run(course)


def test_where_finals_are_fewer_bytes_the_state_is_kept_until_they_are_not(
    tmp_path: Path, disks: Disks, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = box_of(tmp_path, disks)

    async def course(box: Box) -> None:
        with monkeypatch.context() as cheap:
            cheap.setattr(CatchUp, "finals_bytes", 1.0)
            box.start_all()
            await box.until(lambda: all(times(box.node(number), "finals") >= 2 for number in LINKS))
            assert all(isinstance(box.node(number).state_store.state, CertifiedState) for number in LINKS)
            assert not any(times(box.node(number), what) for number in LINKS for what in ("image", "changes"))
        await box.until(lambda: all(times(box.node(number), "changes") for number in LINKS))
        finals = [times(box.node(number), "finals") for number in LINKS]
        await box.until_round(box.node(0).round + 3)
        assert finals == [times(box.node(number), "finals") for number in LINKS]
        for number in LINKS:
            assert_certified(box.node(number))
            left = {path.name.partition(".")[2] for path in (box.node(number).disk.root / "state").iterdir()}
            assert left <= {"image.safetensors"}, "nothing else is on disk"

    box.run(course)
