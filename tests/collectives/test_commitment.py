from __future__ import annotations

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from shoal.collectives.commitment import (
    MerkleTree,
    bitmap,
    bitmap_indices,
    bitmaps_root,
    chunk_hash,
    merkle_root,
    path_bytes,
    path_proves,
)
from shoal.protocol.errors import LocalError, RemoteError


def plain_hash(domain: str, *parts: bytes) -> bytes:
    preimage = b"shoal/" + domain.encode() + b"\0"
    return blake3(preimage + b"".join(len(p).to_bytes(8, "little") + p for p in parts)).digest()


def items(count: int) -> list[bytes]:
    return [chunk_hash(bytes([i])) for i in range(count)]


def test_root_of_three_follows_the_documented_preimage() -> None:
    a, b, c = (plain_hash("merkle-leaf", item) for item in items(3))
    top = plain_hash("merkle-node", plain_hash("merkle-node", a, b), c)  # c has no sibling: promoted
    assert merkle_root(items(3)) == plain_hash("merkle-root", (3).to_bytes(8, "little"), top)


def test_root_of_nothing_and_of_one() -> None:
    assert merkle_root([]) == plain_hash("merkle-root", bytes(8), bytes(32))
    leaf = plain_hash("merkle-leaf", b"x")
    assert merkle_root([b"x"]) == plain_hash("merkle-root", (1).to_bytes(8, "little"), leaf)


@pytest.mark.parametrize("count", range(1, 20))
def test_every_path_proves_its_item_and_no_other(count: int) -> None:
    tree = MerkleTree(items(count))
    for index, item in enumerate(items(count)):
        path = tree.path(index)
        assert len(path) == path_bytes(index, count)
        assert path_proves(tree.root, item, index, count, path)
        assert not path_proves(tree.root, chunk_hash(b"other"), index, count, path)
        assert not path_proves(tree.root, item, (index + 1) % count, count, path) or count == 1
        assert not path_proves(tree.root, item, index, count + 1, path)
        assert not path_proves(tree.root, item, index, count, path + bytes(32))
        for bit in range(0, 8 * len(path), 37):
            changed = bytearray(path)
            changed[bit // 8] ^= 1 << bit % 8
            assert not path_proves(tree.root, item, index, count, bytes(changed))


def test_an_inner_node_does_not_pass_for_a_leaf() -> None:
    tree = MerkleTree(items(4))
    left = plain_hash("merkle-node", *(plain_hash("merkle-leaf", item) for item in items(2)))
    assert not path_proves(tree.root, left, 0, 2, tree.path(0)[32:])


def test_a_path_outside_the_tree() -> None:
    with pytest.raises(LocalError):
        MerkleTree(items(3)).path(3)
    assert not path_proves(merkle_root(items(3)), items(3)[0], 3, 3, b"")


@given(st.integers(1, 64), st.data())
def test_bitmap_gives_back_its_indices(n: int, data: st.DataObject) -> None:
    indices = sorted(data.draw(st.sets(st.integers(0, n - 1))))
    assert bitmap_indices(bitmap(indices, n), n) == tuple(indices)


def test_bitmap_is_little_endian_and_exact() -> None:
    assert bitmap([0, 3, 8], 9) == bytes([0b1001, 1])
    with pytest.raises(LocalError):
        bitmap([9], 9)
    for wrong in (b"", b"\0", b"\0\2", b"\0\0\0"):
        with pytest.raises(RemoteError):
            bitmap_indices(wrong, 9)


def test_bitmaps_root_binds_chunk_and_participant() -> None:
    one, two = bitmap([0], 2), bitmap([1], 2)
    assert len({bitmaps_root(maps) for maps in ([one, two], [two, one], [one, one], [one])}) == 4
