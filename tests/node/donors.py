"""Nodes that others catch up from, in memory: real state servers, caches and exchanges, over lanes made of calls."""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import trio
from msgspec.structs import replace

from shoal.collectives.state import CertifiedState
from shoal.node.state.catchup import CatchUp
from shoal.node.state.errands import carry_out
from shoal.node.state.fetching import OnProgress
from shoal.node.state.state_server import StateServer
from shoal.node.state.states import StateCache
from shoal.protocol.catching_up import StateSearch
from shoal.protocol.chain import Chain
from shoal.protocol.errands import Errand
from shoal.protocol.errors import NetworkError
from shoal.protocol.identity import PeerId
from shoal.protocol.peering import FetchAnswer, FetchRequest
from shoal.protocol.wire import canonical, decode
from shoal.swarm.lanes.chunks import ChunkExchange
from shoal.swarm.lanes.frame import BULK_KINDS, FrameHeader, FrameKind
from shoal.swarm.lanes.queue import Later, due
from shoal.swarm.lanes.socket import Moved
from tests.node.ledger import Ledger

ME = PeerId("me")

Spoil = Callable[[FrameHeader, bytes], bytes | None]
"""What becomes of a STATE frame's payload on its way: other bytes, or None if it is lost."""


@dataclass
class Donor:
    """One who serves what `ledger` certified, up to `rounds`, unless the test makes it do something else."""

    peer: PeerId
    chain: Chain
    cache: StateCache
    answer: Callable[[FetchRequest], FetchAnswer | bytes] = field(init=False)
    spoil: Spoil = lambda header, data: data
    asked: list[FetchRequest] = field(default_factory=list)
    has_lane: bool = True
    dead: bool = False
    """It answers nothing any more, and what it had sent and is not here yet does not come."""

    def __post_init__(self) -> None:
        self.answer = StateServer(chain=self.chain, cache=self.cache).answer


@contextmanager
def logged() -> Iterator[list[str]]:
    """All that is logged meanwhile of what is sought and fetched."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    loggers = [logging.getLogger(name) for name in ("shoal.protocol.catching_up", "shoal.node.state")]
    levels = [one.level for one in loggers]
    for one in loggers:
        one.addHandler(handler)
        one.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        for one, level in zip(loggers, levels, strict=True):
            one.removeHandler(handler)
            one.setLevel(level)


class World:
    """Me, and those I may ask.

    Lanes deliver at once, unless `line` gives their pace: see `Line`.
    """

    def __init__(self, folder: Path, ledger: Ledger) -> None:
        self.folder = folder
        self.ledger = ledger
        self.donors: dict[PeerId, Donor] = {}
        self.exchanges: dict[PeerId, ChunkExchange] = {}
        self.frames: list[tuple[PeerId, PeerId, FrameHeader]] = []
        self.line: Line | None = None
        self.restart()

    def restart(self) -> None:
        """Be a new process over the same folder."""
        self.cache = self._cache("me")
        self.exchanges[ME] = ChunkExchange(post=self._poster(ME), lookup=self.cache.lookup)
        self.catchup = CatchUp(
            ask=self._ask,
            lanes=SimpleNamespace(ensure=self._ensure, moved=lambda peer: Moved()),  # type: ignore[arg-type]
            chunks=self.exchanges[ME],
            cache=self.cache,
            outer=self.ledger.outer,
        )
        self.catchup.amended = self.ledger.chain.amended
        self.catchup.shape = (self.ledger.codec, self.ledger.grid.numel, self.ledger.grid.chunk_values)

    def _cache(self, name: str) -> StateCache:
        folder = self.folder / name
        for part in ("state", "finals"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        return StateCache(
            folder, self.ledger.grid.chunk_values, clock=trio.current_time if _in_trio() else time.monotonic
        )

    def donor(self, peer: PeerId, *, rounds: int | None = None) -> Donor:
        """One more donor, which knows the first `rounds` rounds (all, unless given)."""
        ledger = self.ledger
        newest = ledger.chain.standing.round if rounds is None else rounds
        cache = self._cache(f"donor{len(self.donors)}")
        for state in ledger.states[: newest + 1]:
            cache.put(state, cache.header(state))
        for round, finals in ledger.finals.items():
            if round <= newest:
                cache.put_finals(finals)
        self.donors[peer] = donor = Donor(
            peer, ledger.chain_to(ledger.chain.height if rounds is None else rounds), cache
        )
        self.exchanges[peer] = ChunkExchange(post=self._poster(peer), lookup=cache.lookup)
        return donor

    def share(self, donor: Donor) -> None:
        """Have a donor of another world in this one too: the same cache, and lanes of its own."""
        self.donors[donor.peer] = donor
        self.exchanges[donor.peer] = ChunkExchange(post=self._poster(donor.peer), lookup=donor.cache.lookup)

    def certify(self) -> None:
        """Everybody but me certifies one round more."""
        certificate, state = self.ledger.certify(), self.ledger.state
        header, finals = self.ledger.header(state.round), self.ledger.finals[state.round]
        for donor in self.donors.values():
            donor.chain.extend(certificate)
            donor.cache.put(state, header)
            donor.cache.put_finals(finals)

    def kill(self, peer: PeerId) -> None:
        """A donor dies: its lane breaks."""
        self.donors[peer].dead = True
        self.exchanges[ME].lane_failed(peer)

    def chunks_from(self, peer: PeerId) -> int:
        """STATE frames that a donor sent."""
        return sum(sender == peer and header.kind is FrameKind.STATE for sender, _, header in self.frames)

    async def advance(
        self, state: CertifiedState | None, chain: Chain, peers: Sequence[PeerId], on_chunk: OnProgress
    ) -> CertifiedState:
        """A state nearer to the head of `chain`. Raises NetworkError, with all that was logged, if there is none."""
        search = StateSearch(self.catchup.scores, lambda: self.catchup.replayed_rounds)
        errand = Errand(search.nearer(state, chain, peers), search.clock)
        with logged() as lines:
            found: CertifiedState | None = await carry_out(errand, self.catchup.performers(on_chunk))
        if found is None:
            raise NetworkError("; ".join(lines))
        return found

    async def _ask(self, peer: PeerId, request: bytes) -> bytes:
        await trio.lowlevel.checkpoint()
        donor = self.donors.get(peer)
        if donor is None or donor.dead:
            raise NetworkError(f"{peer} is not connected")
        question: FetchRequest = decode(request, FetchRequest)  # type: ignore[arg-type]
        donor.asked.append(question)
        answer = donor.answer(question)
        return answer if isinstance(answer, bytes) else canonical(answer)

    async def _ensure(self, peer: PeerId, *, deadline_s: float) -> None:
        await trio.lowlevel.checkpoint()
        if not self.donors[peer].has_lane or self.donors[peer].dead:
            raise NetworkError(f"no lane to {peer} within {deadline_s} s")

    def _poster(self, sender: PeerId) -> Callable[[PeerId, FrameHeader, memoryview | bytes | Later], None]:
        def post(to: PeerId, header: FrameHeader, payload: memoryview | bytes | Later) -> None:
            header, payload = due(header, payload)
            self.frames.append((sender, to, header))
            data: bytes | None = bytes(payload)
            if header.kind is FrameKind.STATE:
                data = self.donors[sender].spoil(header, bytes(payload))
            if data is None or (to != ME and self.donors[to].dead):
                return
            header = replace(header, length=len(data))
            if self.line is None or header.kind is not FrameKind.STATE:
                self.deliver(sender, to, header, data)
            else:
                self.line.put(sender, to, header, data)

        return post

    def deliver(self, sender: PeerId, to: PeerId, header: FrameHeader, data: bytes) -> None:
        """As a lane's thread does it."""
        if sender != ME and self.donors[sender].dead:
            return
        exchange = self.exchanges[to]
        if header.kind in BULK_KINDS:
            region = exchange.region(sender, header)
            if region is None:
                return
            region[:] = data
        exchange.received(sender, header)


class Line:
    """What comes to me comes over one line of `bytes_per_s`, or, by `rates`, over each donor's own, frame by frame."""

    def __init__(
        self, world: World, *, bytes_per_s: float = math.inf, rates: dict[PeerId, float] | None = None
    ) -> None:
        self._world = world
        self._bytes_per_s = bytes_per_s
        self._rates = rates
        self._waiting: dict[PeerId | None, deque[tuple[PeerId, PeerId, FrameHeader, bytes]]] = defaultdict(deque)
        self._changed = trio.Event()
        world.line = self

    def put(self, sender: PeerId, to: PeerId, header: FrameHeader, data: bytes) -> None:
        """A frame sets out."""
        self._waiting[sender if self._rates else None].append((sender, to, header, data))
        self._changed.set()

    async def run(self) -> None:
        """Deliver until cancelled."""
        if self._rates is None:
            await self._carry(None, self._bytes_per_s)
        async with trio.open_nursery() as nursery:
            for peer, rate in (self._rates or {}).items():
                nursery.start_soon(self._carry, peer, rate)

    async def _carry(self, queue: PeerId | None, bytes_per_s: float) -> None:
        while True:
            while not self._waiting[queue]:
                self._changed = trio.Event() if self._changed.is_set() else self._changed
                await self._changed.wait()
            sender, to, header, data = self._waiting[queue].popleft()
            await trio.sleep(len(data) / bytes_per_s)
            self._world.deliver(sender, to, header, data)


def _in_trio() -> bool:
    try:
        trio.lowlevel.current_task()
    except RuntimeError:
        return False
    return True


def flipped(data: bytes, at: int = 0) -> bytes:
    """`data` with one bit changed."""
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
