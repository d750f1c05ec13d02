"""Commitments: one hash for many chunks, a short proof that a chunk belongs to it, and contributor bitmaps.

The tree is binary over the leaves in order. A node without a sibling is promoted unchanged; leaves, nodes and the
root are hashed under different domains and the root binds the number of leaves, so no inner node passes for a leaf
and no tree for one of another size.

    leaf  = H("merkle-leaf", item)    node = H("merkle-node", left, right)    root = H("merkle-root", count u64, top)

with H the `domain_hash` of the messages (BLAKE3-256, length-prefixed). The tree of nothing has 32 zero bytes on top.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

from blake3 import blake3

from shoal.protocol.errors import LocalError, RemoteError
from shoal.protocol.messages import CHUNK_LIMIT, NO_HASH, domain_hash
from shoal.protocol.wire import HASH_BYTES


def chunk_hash(data: bytes | bytearray | memoryview) -> bytes:
    """BLAKE3-256 of a chunk's bytes, under no domain: what anyone can compute with `b3sum`."""
    return blake3(data).digest()


class MerkleTree:
    """The tree over `items`, kept whole so that it can give proofs."""

    __slots__ = ("_levels", "root", "top")

    def __init__(self, items: Sequence[bytes]) -> None:
        level = [_leaf(item) for item in items]
        self._levels = [level]
        while len(level) > 1:
            pairs = [_node(level[i], level[i + 1]) for i in range(0, len(level) - 1, 2)]
            level = pairs + level[len(level) & ~1 :]
            self._levels.append(level)
        self.top = level[0] if level else NO_HASH
        """The hash right under the root."""
        self.root = root_over(len(items), self.top)

    def path(self, index: int) -> bytes:
        """The siblings from leaf `index` up, joined: `path_bytes(index, count)` bytes. Raises LocalError."""
        if not 0 <= index < len(self._levels[0]):
            raise LocalError(f"leaf {index} is not among {len(self._levels[0])}")
        siblings = []
        for level in self._levels[:-1]:
            if index ^ 1 < len(level):
                siblings.append(level[index ^ 1])
            index >>= 1
        return b"".join(siblings)


def merkle_root(items: Sequence[bytes]) -> bytes:
    """The root over `items` in order."""
    return MerkleTree(items).root


@lru_cache(maxsize=CHUNK_LIMIT)
def path_bytes(index: int, count: int) -> int:
    """Length in bytes of the proof of leaf `index` among `count`; it depends on nothing else."""
    size = 0
    while count > 1:
        size += HASH_BYTES * (index ^ 1 < count)
        index, count = index >> 1, (count + 1) >> 1
    return size


def path_proves(root: bytes, item: bytes, index: int, count: int, path: bytes) -> bool:
    """True if `path` shows that `item` is number `index` of the `count` items under `root`."""
    top = path_top(item, index, count, path)
    return top is not None and root_over(count, top) == root


def path_top(item: bytes, index: int, count: int, path: bytes) -> bytes | None:
    """The hash right under the root, by the path of one item; None if it is no path of that place."""
    if not 0 <= index < count or len(path) != path_bytes(index, count):
        return None
    top, at, level = _leaf(item), 0, count
    while level > 1:
        if index ^ 1 < level:
            sibling = path[at : at + HASH_BYTES]
            top = _node(sibling, top) if index & 1 else _node(top, sibling)
            at += HASH_BYTES
        index, level = index >> 1, (level + 1) >> 1
    return top


def _leaf(item: bytes) -> bytes:
    return domain_hash("merkle-leaf", item)


def _node(left: bytes, right: bytes) -> bytes:
    return domain_hash("merkle-node", left, right)


def root_over(count: int, top: bytes) -> bytes:
    """The root of a tree of `count` items whose levels end in `top`."""
    return domain_hash("merkle-root", count.to_bytes(8, "little"), top)


# --- contributor bitmaps ---


def bitmap_bytes(n: int) -> int:
    """Length in bytes of a bitmap of `n` participants."""
    return (n + 7) // 8


def bitmap(indices: Iterable[int], n: int) -> bytes:
    """Bit i, little-endian, set for each i in `indices` of `n` participants. Raises LocalError."""
    bits = 0
    for index in indices:
        if not 0 <= index < n:
            raise LocalError(f"participant {index} is not among {n}")
        bits |= 1 << index
    return bits.to_bytes(bitmap_bytes(n), "little")


def bitmap_indices(bits: bytes, n: int) -> tuple[int, ...]:
    """The participants in a bitmap of `n`, ascending. Raises RemoteError if it is not one of `n`."""
    value = int.from_bytes(bits, "little")
    if len(bits) != bitmap_bytes(n) or value >> n:
        raise RemoteError(f"{bits.hex()} is no bitmap of {n} participants")
    return tuple(i for i in range(n) if value >> i & 1)


def bitmaps_root(bitmaps: Sequence[bytes]) -> bytes:
    """The root over the contributor bitmaps of all chunks, in order: what a certified value carries."""
    return merkle_root(bitmaps)
