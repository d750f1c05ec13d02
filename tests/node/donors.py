"""Nodes that others catch up from, in memory: real librarians, shelves and exchanges, over lanes made of calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import trio

from shoal.node.catchup import CatchUp, Librarian
from shoal.node.states import StateShelf
from shoal.protocol.certificate import Chain
from shoal.protocol.errors import NetworkError
from shoal.protocol.identity import PeerId
from shoal.protocol.peering import FetchAnswer, FetchRequest
from shoal.protocol.wire import canonical, decode
from shoal.swarm.chunks import ChunkExchange
from shoal.swarm.frame import BULK_KINDS, FrameHeader, FrameKind
from tests.node.ledger import GRID, OUTER, Ledger

ME = PeerId("me")

Spoil = Callable[[FrameHeader, bytes], bytes | None]
"""What becomes of a STATE frame's payload on its way: other bytes, or None if it is lost."""


@dataclass
class Donor:
    """One who serves what `ledger` certified, up to `rounds`, unless the test makes it do something else."""

    peer: PeerId
    chain: Chain
    shelf: StateShelf
    answer: Callable[[FetchRequest], FetchAnswer | bytes] = field(init=False)
    spoil: Spoil = lambda header, data: data
    asked: list[FetchRequest] = field(default_factory=list)
    has_lane: bool = True

    def __post_init__(self) -> None:
        self.answer = Librarian(chain=self.chain, shelf=self.shelf).answer


class World:
    """Me, and those I may ask."""

    def __init__(self, folder: Path, ledger: Ledger) -> None:
        self.folder = folder
        self.ledger = ledger
        self.donors: dict[PeerId, Donor] = {}
        self.exchanges: dict[PeerId, ChunkExchange] = {}
        self.frames: list[tuple[PeerId, PeerId, FrameHeader]] = []
        self.shelf = self._shelf("me")
        self.exchanges[ME] = ChunkExchange(post=self._poster(ME), lookup=self.shelf.lookup)
        self.catchup = CatchUp(
            ask=self._ask,
            lanes=SimpleNamespace(ensure=self._ensure),  # type: ignore[arg-type]
            chunks=self.exchanges[ME],
            shelf=self.shelf,
            outer=OUTER,
        )
        self.catchup.shape = (ledger.codec, GRID.numel, GRID.chunk_values)

    def _shelf(self, name: str) -> StateShelf:
        folder = self.folder / name
        for part in ("state", "finals"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        return StateShelf(folder, GRID.chunk_values)

    def donor(self, peer: PeerId, *, rounds: int | None = None) -> Donor:
        """One more donor, which knows the first `rounds` rounds (all, unless given)."""
        ledger = self.ledger
        newest = ledger.chain.head.round if rounds is None else rounds
        shelf = self._shelf(f"donor{len(self.donors)}")
        for state in ledger.states[: newest + 1]:
            shelf.put(state, shelf.header(state))
        for round, finals in ledger.finals.items():
            if round <= newest:
                shelf.put_finals(finals)
        self.donors[peer] = donor = Donor(peer, ledger.chain_to(newest), shelf)
        self.exchanges[peer] = ChunkExchange(post=self._poster(peer), lookup=shelf.lookup)
        return donor

    def chunks_from(self, peer: PeerId) -> int:
        """STATE frames that a donor sent."""
        return sum(sender == peer and header.kind is FrameKind.STATE for sender, _, header in self.frames)

    async def _ask(self, peer: PeerId, request: bytes) -> bytes:
        await trio.lowlevel.checkpoint()
        donor = self.donors.get(peer)
        if donor is None:
            raise NetworkError(f"{peer} is not connected")
        question: FetchRequest = decode(request, FetchRequest)  # type: ignore[arg-type]
        donor.asked.append(question)
        answer = donor.answer(question)
        return answer if isinstance(answer, bytes) else canonical(answer)

    async def _ensure(self, peer: PeerId, *, deadline_s: float) -> None:
        await trio.lowlevel.checkpoint()
        if not self.donors[peer].has_lane:
            raise NetworkError(f"no lane to {peer} within {deadline_s} s")

    def _poster(self, sender: PeerId) -> Callable[[PeerId, FrameHeader, memoryview | bytes], None]:
        def post(to: PeerId, header: FrameHeader, payload: memoryview | bytes) -> None:
            self.frames.append((sender, to, header))
            data: bytes | None = bytes(payload)
            if header.kind is FrameKind.STATE:
                data = self.donors[sender].spoil(header, bytes(payload))
            if data is not None:
                self._deliver(sender, to, replace(header, length=len(data)), data)

        return post

    def _deliver(self, sender: PeerId, to: PeerId, header: FrameHeader, data: bytes) -> None:
        exchange = self.exchanges[to]
        if header.kind in BULK_KINDS:
            region = exchange.region(sender, header)
            if region is None:
                return
            region[:] = data
        exchange.received(sender, header)


def flipped(data: bytes, at: int = 0) -> bytes:
    """`data` with one bit changed."""
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
