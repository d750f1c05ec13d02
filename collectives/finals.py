"""Reduced chunks: the bytes that everyone decodes, and the owner's signed word about each.

What an owner sends to all is

    payload = encoded chunk ‖ contributor bitmap ‖ Ed25519 signature of the ChunkStatement

The statement's other fields (lineage, chunk, owner, BLAKE3 of the bytes) are known to the receiver, so final and
statement travel as one and neither can be there without the other. Whoever copies a final passes on these very bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np

from shoal.collectives.aggregate import Aggregate, chunk_scratch
from shoal.collectives.codecs import F32, U8, Codec, Encoded, Undecodable, chunk_codec, final_chunk_codec
from shoal.collectives.commitment import bitmap, bitmap_bytes, bitmap_indices, bitmaps_root, chunk_hash, path_bytes
from shoal.collectives.dither import Dither
from shoal.collectives.grid import Grid
from shoal.collectives.memory import PayloadPool
from shoal.collectives.partition import owner_by_chunk
from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import SIGNATURE_BYTES, Identity, PeerId
from shoal.protocol.messages import ChunkStatement, Plan
from shoal.protocol.planning import split_codec


class UnsoundFinal(RemoteError):
    """A final that is not what its owner signed, or is nothing that can be applied."""

    def __init__(self, message: str, *, chunk: int, owner: PeerId) -> None:
        super().__init__(f"the final of chunk {chunk} {message}", peer=owner)
        self.chunk = chunk


@dataclass(kw_only=True, eq=False)
class FinalChunk:
    """One reduced chunk as its owner sent it: `payload` (read-only), and what can be read in it without checking.

    `sound`: it is what its owner signed, and decodes. Nothing else of it changes, but where its bytes lie (`move_to`).
    """

    payload: U8
    encoded: U8
    chunk: int
    owner: PeerId
    lineage: bytes
    bitmap: bytes
    signature: bytes
    sound: bool = False

    @cached_property
    def result(self) -> bytes:
        """BLAKE3 of the encoded chunk."""
        return chunk_hash(self.encoded.data)

    def hash_now(self) -> None:
        """Work out `result`, which is otherwise done when it is asked for."""
        _ = self.result

    def move_to(self, payload: U8) -> None:
        """Have the same bytes elsewhere from now on: in `payload`, read-only. Any thread may be reading them."""
        self.encoded, self.payload = payload[: self.encoded.size], payload

    @property
    def values_intact(self) -> bool:
        """True if the encoded values are those that came: not if they lie in a file that the disk has changed since."""
        return chunk_hash(self.encoded.data) == self.result

    @property
    def intact(self) -> bool:
        """The same of all of its bytes."""
        return self.values_intact and self.payload[self.encoded.size :].tobytes() == self.bitmap + self.signature

    @property
    def statement(self) -> ChunkStatement:
        """The owner's word, which the payload carries."""
        return ChunkStatement(
            plan=self.lineage,
            chunk=self.chunk,
            bitmap=self.bitmap,
            result=self.result,
            owner=self.owner,
            signature=self.signature,
        )


UseFinal = Callable[[FinalChunk], None]


class FinalFormat:
    """Writes and reads the final payloads of one plan. Immutable: safe in any number of threads.

    aggregate: how they are made of contributions. chunks: how many.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.lineage = plan.lineage
        self.grid = Grid.of(plan)
        self.aggregate = Aggregate.of(plan)
        self.owners = owner_by_chunk(plan)
        self.chunks = self.grid.chunks
        self._first_buffer = self.chunks - split_codec(plan.codec)[1]
        distinct = sorted({0, self._first_buffer, self.chunks - 1} - {self.chunks})
        self._final_bytes = {self._like(n): self.codec(n).encoded_bytes(self.grid.length(n)) for n in distinct}
        self._contributed_bytes = {
            self._like(n): self.contributed(n).encoded_bytes(self.grid.length(n)) for n in distinct
        }
        self._trailer_bytes = bitmap_bytes(len(plan.participants)) + SIGNATURE_BYTES
        self._standing = {
            chunk: (results.place, result) for results in plan.standing for chunk, result in results.by_chunk().items()
        }
        self._contributors = frozenset(plan.contributors())

    def codec(self, chunk: int) -> Codec:
        """The codec of a final."""
        return final_chunk_codec(self.plan.codec, self.grid, chunk)

    def contributed(self, chunk: int) -> Codec:
        """The codec of the contributions that a final is made of."""
        return chunk_codec(self.plan.codec, self.grid, chunk)

    def _like(self, chunk: int) -> tuple[bool, bool]:
        """Chunks that are alike in this have one size."""
        return chunk >= self._first_buffer, chunk + 1 == self.chunks

    def owner(self, chunk: int) -> PeerId:
        """Peer that reduces and signs `chunk`, or did so before it was evicted."""
        return self.plan.participants[self.owners[chunk]].peer

    def source(self, chunk: int) -> PeerId:
        """Peer from which the final of `chunk` is to be had."""
        place, _ = self._standing.get(chunk, (self.owners[chunk], b""))
        return self.plan.participants[place].peer

    def accepts(self, final: FinalChunk) -> bool:
        """True if a final of this lineage holds in this revision: by its owner, and not against an accepted result."""
        if self.owner(final.chunk) != final.owner:
            return False
        standing = self._standing.get(final.chunk)
        return standing is None or standing[1] == final.result

    def encoded_bytes(self, chunk: int) -> int:
        """Length in bytes of the encoded chunk."""
        return self._final_bytes[self._like(chunk)]

    def contribution_bytes(self, chunk: int) -> int:
        """Length in bytes of the payload of a contribution to `chunk`."""
        return self._contributed_bytes[self._like(chunk)] + path_bytes(chunk, self.chunks)

    def payload_bytes(self, chunk: int) -> int:
        """Length in bytes of the final payload of `chunk`."""
        return self.encoded_bytes(chunk) + self._trailer_bytes

    def draft(self, chunk: int, memory: PayloadPool) -> tuple[U8, F32]:
        """The payload of a final to be, and where to work out its mean: in it, if values are written as they lie."""
        payload = memory.take(self.payload_bytes(chunk))
        mean = self.codec(chunk).in_place(payload[: self.encoded_bytes(chunk)])
        return payload, chunk_scratch(self.grid.length(chunk)) if mean is None else mean

    def sign(
        self, identity: Identity, chunk: int, mean: F32, included: Sequence[int], payload: U8 | None = None
    ) -> FinalChunk:
        """Encode `mean`, once and for all, and sign what came out; both into the payload of a `draft`, if given."""
        size = self.encoded_bytes(chunk)
        if payload is None:
            payload = np.empty(self.payload_bytes(chunk), np.uint8)
        dither = Dither(self.plan.base, "final", identity.peer_id).chunk(chunk)
        self.codec(chunk).encode(mean, out=payload[:size], dither=dither)
        bits = bitmap(included, len(self.plan.participants))
        result = chunk_hash(payload[:size].data)
        statement = ChunkStatement.sign(identity, plan=self.lineage, chunk=chunk, bitmap=bits, result=result)
        payload[size:] = np.frombuffer(bits + statement.signature, np.uint8)
        final = self._final(chunk, identity.peer_id, payload)
        final.result, final.sound = result, True
        return final

    def read(self, chunk: int, data: Encoded) -> FinalChunk:
        """A final payload taken apart, whoever brought it; nothing that is signed is checked.

        Raises UnsoundFinal if its length is wrong, or its bitmap names who does not contribute.
        """
        owner = self.owner(chunk)
        payload = data if isinstance(data, np.ndarray) else np.frombuffer(data, np.uint8)
        if payload.shape != (self.payload_bytes(chunk),):
            raise UnsoundFinal(f"has {payload.size} bytes", chunk=chunk, owner=owner)
        final = self._final(chunk, owner, payload)
        try:
            included = bitmap_indices(final.bitmap, len(self.plan.participants))
        except RemoteError as error:
            raise UnsoundFinal(f"is malformed: {error}", chunk=chunk, owner=owner) from None
        if not self._contributors.issuperset(included):
            raise UnsoundFinal("includes who does not contribute", chunk=chunk, owner=owner)
        return final

    def verify(self, final: FinalChunk) -> None:
        """Check that these are the bytes that the owner signed, that they decode, and that they stand.

        Raises UnsoundFinal.
        """
        chunk, owner = final.chunk, final.owner
        if not final.sound:
            if not final.statement.valid():
                raise UnsoundFinal("is not what its owner signed", chunk=chunk, owner=owner)
            try:
                self.codec(chunk).check(final.encoded, self.grid.length(chunk))
            except Undecodable as error:
                raise UnsoundFinal(f"does not decode: {error}", chunk=chunk, owner=owner) from None
            final.sound = True
        if not self.accepts(final):
            raise UnsoundFinal("is not the one that stands", chunk=chunk, owner=owner)

    def verify_all(
        self, finals: Sequence[FinalChunk], threads: int, then: UseFinal | None
    ) -> list[tuple[FinalChunk, UnsoundFinal]]:
        """`verify` in `threads` threads, each calling `then` with what is sound straight after; what is not sound."""

        def check(final: FinalChunk) -> UnsoundFinal | None:
            try:
                self.verify(final)
            except UnsoundFinal as error:
                return error
            if then is not None:
                then(final)
            return None

        with ThreadPoolExecutor(threads) as pool:
            return [(final, error) for final, error in zip(finals, pool.map(check, finals), strict=True) if error]

    def open(self, chunk: int, data: Encoded) -> FinalChunk:
        """`read` and `verify`."""
        final = self.read(chunk, data)
        self.verify(final)
        return final

    def _final(self, chunk: int, owner: PeerId, payload: U8) -> FinalChunk:
        payload.flags.writeable = False
        size = self.encoded_bytes(chunk)
        trailer = payload[size:].tobytes()
        return FinalChunk(
            payload=payload,
            encoded=payload[:size],
            chunk=chunk,
            owner=owner,
            lineage=self.lineage,
            bitmap=trailer[:-SIGNATURE_BYTES],
            signature=trailer[-SIGNATURE_BYTES:],
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Finals:
    """All reduced chunks of one plan, in order."""

    plan: Plan
    chunks: tuple[FinalChunk, ...]

    @classmethod
    def open(cls, plan: Plan, payloads: Sequence[Encoded]) -> Self:
        """The finals of `plan` from all payloads in order, wherever they were kept. Raises RemoteError."""
        final_format = FinalFormat(plan)
        if len(payloads) != plan.chunks:
            raise RemoteError(f"{len(payloads)} finals of a plan of {plan.chunks} chunks")
        return cls(plan=plan, chunks=tuple(final_format.open(chunk, data) for chunk, data in enumerate(payloads)))

    @property
    def sound(self) -> bool:
        """True if every chunk was checked."""
        return all(chunk.sound for chunk in self.chunks)

    @property
    def bitmaps(self) -> tuple[bytes, ...]:
        """Per chunk, who is in it."""
        return tuple(chunk.bitmap for chunk in self.chunks)

    @property
    def bitmaps_root(self) -> bytes:
        """Hash over all bitmaps, as a Report and a certified value carry it."""
        return bitmaps_root(self.bitmaps)

    def included(self, place: int) -> tuple[bool, ...]:
        """Per chunk, whether participant number `place` is in it."""
        return tuple(bool(bits[place // 8] >> place % 8 & 1) for bits in self.bitmaps)

    @property
    def counted(self) -> tuple[PeerId, ...]:
        """Participants that are in at least one chunk."""
        counted = self._anywhere
        return tuple(p.peer for place, p in enumerate(self.plan.participants) if counted >> place & 1)

    @property
    def worked(self) -> frozenset[PeerId]:
        """Participants whose work is in at least one chunk, in a contribution of their own or of their delegate's."""
        counted = frozenset(self.counted)
        return counted.union(peer for peer, delegate in self.plan.delegates.items() if delegate in counted)

    @property
    def tokens(self) -> int:
        """Trained on by those whose contribution is in at least one chunk."""
        counted = self._anywhere
        return sum(p.tokens for place, p in enumerate(self.plan.participants) if counted >> place & 1)

    @property
    def coverage(self) -> float:
        """The share of (chunk, contributor) pairs that were included: 1.0 in an undisturbed round."""
        contributors = self.plan.contributors()
        expected = sum(1 << place for place in contributors)
        pairs = sum(
            count * (int.from_bytes(bits, "little") & expected).bit_count()
            for bits, count in Counter(self.bitmaps).items()
        )
        return pairs / (len(contributors) * len(self.chunks)) if contributors else 1.0

    @property
    def _anywhere(self) -> int:
        """The participants that are in at least one chunk, as a bitmap."""
        bits = 0
        for one in set(self.bitmaps):
            bits |= int.from_bytes(one, "little")
        return bits

    def decoded(self) -> F32:
        """The mean update as everyone decodes it: (numel,) float32. For audits; the outer step goes by chunks.

        NaN in a chunk that lies in a file which the disk has changed since.
        """
        grid = Grid.of(self.plan)
        update = np.full(grid.numel, np.nan, np.float32)
        for chunk, final in enumerate(self.chunks):
            if final.values_intact:
                codec = final_chunk_codec(self.plan.codec, grid, chunk)
                codec.decode_into(final.encoded, update[slice(*grid.span(chunk))])
        return update

    def concatenated(self) -> bytes:
        """All encoded chunks in order, without bitmaps and signatures: what an audit compares."""
        return b"".join(chunk.encoded.tobytes() for chunk in self.chunks)
