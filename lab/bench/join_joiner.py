"""The joiner of `shoal bench join`, with its donors: the lanes, the chunk exchange and the catching up of a node."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import psutil  # type: ignore[import-untyped]
import trio

from shoal.collectives.outer import OuterSettings
from shoal.collectives.state import CertifiedState
from shoal.lab.bench.join_donor import (
    FETCH,
    JOINER,
    LANE,
    RAW,
    ROUND,
    SWARM,
    donor_id,
    frame_places,
    receive_message,
    send_message,
)
from shoal.lab.case import Spec
from shoal.node.option import Option, Within
from shoal.node.state.catchup import CatchUp
from shoal.node.state.errands import carry_out
from shoal.node.state.fetching import tell_nobody
from shoal.node.state.states import StateCache
from shoal.protocol.catching_up import StateSearch
from shoal.protocol.certificate import genesis
from shoal.protocol.chain import Chain
from shoal.protocol.errands import Errand
from shoal.protocol.errors import NetworkError, RemoteError
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.manifest import RoundSection
from shoal.protocol.messages import NO_HASH, VOTE_DOMAIN, Certificate, Term, Value, step_preimage
from shoal.swarm.lanes.chunks import KINDS, ChunkExchange
from shoal.swarm.lanes.frame import FRAME_LIMIT_BYTES, FrameHeader, FrameKind
from shoal.swarm.lanes.pool import LanePool

SERVING_S: Final = 8.0
"""At least so long are states fetched from training donors, and as long do these train undisturbed in between."""
DEADLINE_S: Final = 120.0
POOL_FRAMES: Final = 128
"""Bare frames land in memory that was touched before, and does not fit a cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinBench(Spec):
    """Options of `shoal bench join`. training: whether the second part runs; serving_s: for how long at least."""

    state_mb: Annotated[
        int, Option("--state-mb", help="Size of the state: 8 bytes per parameter.", check=Within(1, 16_000))
    ] = 1000
    donors: Annotated[
        int, Option("--donors", help="How many serve it, each a process of its own.", check=Within(1, 16))
    ] = 3
    repetitions: Annotated[
        int, Option("--repetitions", help="Measured transfers; one more warms up.", check=Within(1, 100))
    ] = 9
    training: Annotated[
        bool,
        Option(
            "--training/--no-training",
            help="Also measure the donors' training rate while they serve at 100 MB/s each at most.",
        ),
    ] = True
    serving_s: float = SERVING_S

    @property
    def numel(self) -> int:
        """Values of anchor and momentum each: eight bytes of state per parameter."""
        return self.state_mb * 1_000_000 // 8

    @property
    def state_bytes(self) -> int:
        """Bytes of the state."""
        return 8 * self.numel

    @property
    def chunk_values(self) -> int:
        """The manifest's default."""
        chunk_values: int = RoundSection().chunk_values
        return chunk_values


class _Sink:
    """Destination of the joiner's lanes: chunks go to the exchange, bare frames into a pool."""

    chunks: ChunkExchange

    def __init__(self, numel: int) -> None:
        self._frames = len(frame_places(4 * numel))
        self._pool = memoryview(bytearray(POOL_FRAMES * FRAME_LIMIT_BYTES))
        self._token = trio.lowlevel.current_trio_token()
        self._left = 0
        self._lock = threading.Lock()
        self.done = trio.Event()

    def expect_raw(self) -> None:
        """Expect as many bare frames as a state has."""
        self._left = self._frames
        self.done = trio.Event()

    def region(self, peer: PeerId, header: FrameHeader) -> memoryview | None:
        """Memory that a frame is received into."""
        if header.kind is not FrameKind.CONTRIBUTION:
            return self.chunks.region(peer, header)
        offset = header.chunk % POOL_FRAMES * FRAME_LIMIT_BYTES
        return self._pool[offset : offset + header.length]

    def received(self, peer: PeerId, header: FrameHeader, payload: memoryview) -> None:
        """Take a frame that is there."""
        if header.kind in KINDS:
            self.chunks.received(peer, header)
            return
        with self._lock:
            self._left -= 1
            if self._left:
                return
        self._token.run_sync_soon(self.done.set)

    def lane_closed(self, peer: PeerId, error: NetworkError | RemoteError | None) -> None:
        """Note that a lane ended."""
        self.chunks.lane_failed(peer)


class Joiner:
    """The joiner and what it asks of its donors."""

    def __init__(
        self,
        bench: JoinBench,
        folder: Path,
        calls: dict[PeerId, trio.SocketStream],
        donors: list[subprocess.Popen[bytes]],
    ) -> None:
        self._bench = bench
        self._folder = folder
        self._calls = calls
        self.donors = donors
        self._locks = {peer: trio.Lock() for peer in calls}
        self._joins = 0
        self.peers = tuple(calls)
        self._sink = _Sink(bench.numel)
        self.lanes = LanePool(
            me=JOINER,
            swarm_id=SWARM,
            sink=self._sink,
            listen=("127.0.0.1", 0),
            request=lambda peer, offer: self._call(peer, LANE, offer),
        )

    def cpu_s(self) -> float:
        """Processor time of the joiner and its donors so far."""
        return time.process_time() + self.donors_cpu_s()

    def donors_cpu_s(self) -> float:
        """Processor time of the donors so far."""
        return sum(sum(psutil.Process(donor.pid).cpu_times()[:2]) for donor in self.donors)

    async def begin(self) -> None:
        """Learn from the donors which state they have, and put it under a certificate."""
        digests = {await receive_message(call) for call in self._calls.values()}
        (digest,) = digests if len(digests) == 1 else (None,)
        if digest is None:
            raise NetworkError("the donors of the benchmark hold different states")
        self._digest = digest
        for peer in self.peers:
            await self.lanes.ensure(peer, deadline_s=DEADLINE_S)

    async def receive_raw(self) -> float:
        """Have the donors send bare frames; returns the seconds that takes."""
        self._sink.expect_raw()
        began = time.perf_counter()
        async with trio.open_nursery() as nursery:
            for number, peer in enumerate(self.peers):
                nursery.start_soon(self._call, peer, RAW, bytes((number, len(self.peers))))
        with trio.fail_after(DEADLINE_S):
            await self._sink.done.wait()
        return time.perf_counter() - began

    async def join(self) -> tuple[CertifiedState, float, float]:
        """Fetch the state as a newcomer; returns it, the seconds from the first request on, and the processor time."""
        self.become_newcomer()
        return await self.fetch()

    def become_newcomer(self) -> None:
        """Make an empty state folder, and memory ready for the state."""
        self._joins += 1
        folder = self._folder / f"join{self._joins}"
        for name in ("state", "finals"):
            (folder / name).mkdir(parents=True)
        cache = StateCache(folder, self._bench.chunk_values)
        self._sink.chunks = ChunkExchange(post=self.lanes.post, lookup=cache.lookup)
        self.catchup = CatchUp(
            ask=lambda peer, request: self._call(peer, FETCH, request),
            lanes=self.lanes,
            chunks=self._sink.chunks,
            cache=cache,
            outer=OuterSettings(),
        )
        self.catchup.shape = ("int8", self._bench.numel, self._bench.chunk_values)
        self.catchup.prepare()  # as a node does when its model is built

    async def fetch(self) -> tuple[CertifiedState, float, float]:
        """Fetch the state, once, after `become_newcomer`; returns what `join` does."""
        chain = _chain_to(self._digest)
        search = StateSearch(self.catchup.scores, lambda: self.catchup.replayed_rounds)
        cpu, began = self.cpu_s(), time.perf_counter()
        with trio.fail_after(DEADLINE_S):
            errand = Errand(search.nearer(None, chain, self.peers), search.clock)
            state: CertifiedState | None = await carry_out(errand, self.catchup.performers(tell_nobody))
        if state is None:
            raise NetworkError("no donor of the benchmark has the state")
        return state, time.perf_counter() - began, self.cpu_s() - cpu

    async def _call(self, peer: PeerId, order: bytes, body: bytes) -> bytes:
        async with self._locks[peer]:
            await send_message(self._calls[peer], order + body)
            answer = await receive_message(self._calls[peer])
        if answer is None:
            raise NetworkError(f"{peer} of the benchmark is gone")
        return answer


def _chain_to(digest: bytes) -> Chain:
    """A chain whose one certificate names that state."""
    founder = Identity.generate()
    chain = Chain(genesis(SWARM, [founder.peer_id]))
    value = Value(
        swarm=SWARM,
        term=Term(),
        round=ROUND,
        base=chain.head.hash,
        plan=NO_HASH,
        planner=founder.peer_id,
        members=(founder.peer_id,),
        bitmaps=NO_HASH,
        tokens=1,
        digest=digest,
    )
    vote = founder.sign(VOTE_DOMAIN, step_preimage(0, value.hash))
    chain.extend(Certificate(value=value, view=0, signers=(founder.peer_id,), signatures=(vote,)))
    return chain


@asynccontextmanager
async def joining(bench: JoinBench, folder: Path, *, cap: int) -> AsyncIterator[Joiner]:
    """A joiner with lanes to its donors; whatever happens, no process is left."""
    calls: dict[PeerId, trio.SocketStream] = {}
    donors: list[subprocess.Popen[bytes]] = []
    with ExitStack() as owned:
        for number in range(bench.donors):
            control = folder / f"donor{number}-{cap}.sock"
            with trio.socket.socket(trio.socket.AF_UNIX) as listener:
                await listener.bind(str(control))
                listener.listen()
                arguments = [number, bench.numel, bench.chunk_values, cap, control]
                donors.append(owned.enter_context(child_process("join_donor", *map(str, arguments))))
                with trio.move_on_after(DEADLINE_S):
                    connection, _ = await listener.accept()
                    calls[donor_id(number)] = trio.SocketStream(owned.enter_context(connection))
            if donor_id(number) not in calls:
                raise NetworkError(f"donor {number} of the benchmark did not call within {DEADLINE_S:.0f} s")
        joiner = Joiner(bench, folder / f"cap{cap}", calls, donors)
        async with trio.open_nursery() as nursery:
            await nursery.start(joiner.lanes.run)
            await joiner.begin()
            yield joiner
            nursery.cancel_scope.cancel()


@contextmanager
def child_process(module: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", f"shoal.lab.bench.{module}", *arguments]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    try:
        yield child
    finally:
        with suppress(ProcessLookupError):
            child.kill()
        assert child.stdin is not None
        child.stdin.close()
        child.wait()


@contextmanager
def bare_errors() -> Iterator[None]:
    """Raise what ended a nursery as it was."""
    try:
        yield
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None
