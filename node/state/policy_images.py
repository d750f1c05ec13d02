"""Images of policies that this node has, of whole states or alone, and what changed from one to the other.

A node that only samples keeps the image of the newest policy, and the one before, in place of states: in nameless files
to serve them, the newest on disk to come back to it. What a file holds is believed only where its header has the
certified digest, and its chunks the hashes that this says.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from shoal.collectives.commitment import chunk_hash
from shoal.collectives.memory import VectorPool
from shoal.collectives.policy_image import U8, VALUE_BYTES, encode_changes
from shoal.collectives.state import HeldState, ImageHeader, PolicyImage, image_of_chunk
from shoal.node.state.file_memory import file_memory
from shoal.node.state.store import disk_errors
from shoal.node.state.tensor_files import TensorBytes, TensorFile, write_tensors
from shoal.protocol.errors import RemoteError, StorageError
from shoal.protocol.messages import NO_HASH, domain_hash
from shoal.protocol.wire import canonical, decode
from shoal.swarm.lanes.chunks import ChunkRef, ChunkSpace
from shoal.swarm.lanes.frame import SCOPE_BYTES

IMAGES_KEPT: Final = 2
CHANGES_KEPT: Final = 4
"""Pairs of states of which the changes are held: each takes as much as an image at most."""
REST_FROM_S: Final = 0.1
"""Changes that took longer to make are followed by a rest of as long, in which none are made for whoever asks."""
HEADER_LIMIT_BYTES: Final = 1 << 20
_SUFFIX: Final = ".image.safetensors"
_IMAGE: Final = "image"

logger = logging.getLogger(__name__)

Find = Callable[[bytes], tuple[HeldState, ImageHeader] | None]
"""Gives what this node has of the state with a digest, or with a digest that begins so, and its image's header."""


def changes_scope(since: bytes, digest: bytes) -> bytes:
    """The scope under which the changes between the images of two states are asked for, by their digests."""
    return domain_hash("changes", since, digest)[:SCOPE_BYTES]


class ImageCache:
    """This node's images: its own, in files of `folder`, and those of the states that `find_state` finds.

    `lookup` is called in lanes' threads.
    """

    def __init__(self, folder: Path, find_state: Find) -> None:
        self._folder = folder
        self._find_state = find_state
        self._memory = VectorPool(IMAGES_KEPT, partial(file_memory, folder))
        self._lock = threading.Lock()
        self._making = threading.Lock()
        self._rests_until = 0.0  # guarded by that
        # Guarded by the lock.
        self._images: dict[bytes, PolicyImage] = {}  # by scope, the newest at the end
        self._changes: dict[bytes, Sequence[bytes]] = {}  # by scope

    def room(self, header: ImageHeader) -> U8:
        """(2 · numel,) uint8 of unspecified content, for an image. Raises StorageError."""
        return self._memory.take(-(-header.numel // 2)).view(np.uint8)[: VALUE_BYTES * header.numel]

    def put(self, image: PolicyImage) -> None:
        """Keep an image to serve it; forget all but the last ones."""
        with self._lock:
            self._images.pop(image.header.digest[:SCOPE_BYTES], None)
            self._images[image.header.digest[:SCOPE_BYTES]] = image
            while len(self._images) > IMAGES_KEPT:
                del self._images[next(iter(self._images))]

    def put_changes(self, since: bytes, digest: bytes, changes: Sequence[bytes]) -> None:
        """Keep what changed in each chunk between two states, by their digests; forget all but the last ones."""
        with self._lock:
            self._changes[changes_scope(since, digest)] = changes
            while len(self._changes) > CHANGES_KEPT:
                del self._changes[next(iter(self._changes))]

    def find(self, digest: bytes) -> tuple[HeldState, ImageHeader] | None:
        """Find what is here of the state with a digest, or one that begins so, with its image's header."""
        image = self._images.get(digest[:SCOPE_BYTES])
        if image is not None and image.header.digest.startswith(digest):
            return image, image.header
        return self._find_state(digest)

    def changes(self, since: bytes, digest: bytes) -> Sequence[bytes] | None:
        """Tell what changed in each chunk between two states, None if not both are here, or others are made.

        Made once, in this thread.
        """
        scope = changes_scope(since, digest)
        with self._making:
            known = self._changes.get(scope)
            before, after = (None if one == NO_HASH else self.find(one) for one in (since, digest))
            if known is not None or before is None or after is None or before[1].grid != after[1].grid:
                return known
            began = time.monotonic()
            if began < self._rests_until:
                return None
            grid = after[1].grid
            made = tuple(
                encode_changes(
                    image_of_chunk(before[0], grid, chunk), image_of_chunk(after[0], grid, chunk), grid.length(chunk)
                )
                for chunk in range(grid.chunks)
            )
            self.put_changes(since, digest, made)
            ended = time.monotonic()
            self._rests_until = ended if ended - began < REST_FROM_S else 2 * ended - began
            return made

    def lookup(self, ref: ChunkRef) -> memoryview | None:
        """The bytes of a chunk of an image, or of changes that were asked for before; None if it is not here."""
        if ref.space is ChunkSpace.CHANGES:
            changes = self._changes.get(ref.scope, ())
            return memoryview(changes[ref.chunk]) if ref.chunk < len(changes) else None
        found = self.find(ref.scope)
        if found is None or ref.chunk >= found[1].grid.chunks:
            return None
        return image_of_chunk(found[0], found[1].grid, ref.chunk).data

    # -- disk ------------------------------------------------------------------------------------------------

    def save(self, image: PolicyImage) -> None:
        """Write an image durably, and remove older ones. Raises StorageError."""
        header = canonical(image.header).hex()
        tensor = TensorBytes(_IMAGE, "BF16", (image.header.numel,), image.halves.data)
        write_tensors(self._file(image.round), [tensor], {"header": header}, checksum=False)
        self.remove(besides=image.round)

    def remove(self, besides: int | None = None) -> None:
        """Remove the images on disk, but that of one round. Raises StorageError."""
        with disk_errors(self._folder):
            for path in self._files():
                if besides is None or path != self._file(besides):
                    path.unlink(missing_ok=True)

    def load(self, certified: Callable[[int], bytes]) -> PolicyImage | None:
        """The newest image on disk that has the certified digest of its round; None without one.

        certified: gives that of a round, NO_HASH where there is none. Raises StorageError if there is no memory.
        """
        for path in self._files():
            try:
                image = self._read(path)
            except (StorageError, RemoteError, KeyError, ValueError, OSError) as error:
                logger.warning("%s is not readable (%s) and is ignored", path, error)
                continue
            if image.header.digest == certified(image.round):
                self.put(image)
                return image
            logger.warning("%s is not the image of the state that was certified and is ignored", path)
        return None

    def _read(self, path: Path) -> PolicyImage:
        file = TensorFile(path)
        header: ImageHeader = decode(
            bytes.fromhex(file.metadata["header"]), ImageHeader, limit_bytes=HEADER_LIMIT_BYTES
        )
        values = file.array(_IMAGE)
        if file.dtype(_IMAGE) != "BF16" or values.shape != (header.numel,):
            raise ValueError("it holds another tensor")
        halves = self.room(header)
        np.copyto(halves.view("<u2"), values)
        halves.flags.writeable = False
        image = PolicyImage(header, halves)
        if any(chunk_hash(image.chunk(c).data) != header.chunk_hash(c) for c in range(header.grid.chunks)):
            raise ValueError("a chunk of it has changed")
        return image

    def _files(self) -> list[Path]:
        """The images on disk, newest first."""
        paths = (self._folder / "state").glob(f"*{_SUFFIX}")
        rounds = (path.name.removesuffix(_SUFFIX) for path in paths)
        return [self._file(round) for round in sorted((int(one) for one in rounds if one.isdecimal()), reverse=True)]

    def _file(self, round: int) -> Path:
        return self._folder / "state" / f"{round}{_SUFFIX}"
