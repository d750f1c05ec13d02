"""All lanes of one node: the dialling, and how many there are. Trio owns their lifetime.

    ensure(peer) ─ LaneOffer over libp2p ─► the peer's answer(): keys, id, addresses   (the id waits here)
                 ─ TCP, id ‖ sealed hello ─► listener: authenticates, answers with its hello
    both sides hand the socket to a Lane's threads

Every dial has fresh keys; only addresses from the peer's own answer, which came over its authenticated channel, are
dialled.

Either side's lane serves both directions. Where both dialled at once there are lanes to spare: the side with
the lower PeerId, and only it, retires the surplus in order (CLOSE after what is queued, so nothing is lost). Worn
lanes go first, then those through a third, then the ones the other side dialled. One side that decides cannot disagree
with itself.

All lanes to a peer send from one queue. How many a node wants is measured while it sends (`count`): it dials what
it lacks, and when lanes gained nothing it says, by a summons, how many it wants again. Who wants more than the other
side gets them.

A node that cannot reach a peer summons it: asks it, over libp2p, to dial. A summoned node never summons back. Where
neither reaches the other the two meet at a third, and then try to do without it: what is tried, and in which order,
`shoal.swarm.reaching.reach` says.
"""

from __future__ import annotations

import logging
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import trio

from shoal.protocol.errors import NetworkError, RemoteError
from shoal.protocol.identity import PeerId
from shoal.swarm.lanes.count import LaneCount
from shoal.swarm.lanes.dial import LaneDialler, Request
from shoal.swarm.lanes.frame import FrameHeader, FrameKind
from shoal.swarm.lanes.lane import JOIN_DEADLINE_S, FrameSink, Lane
from shoal.swarm.lanes.limits import STALL_DEADLINE_S, LaneLimits, RateLimit
from shoal.swarm.lanes.listener import ConnectionHandler, LaneListener, addresses_of
from shoal.swarm.lanes.queue import Later
from shoal.swarm.lanes.seal import (
    LANES_PER_PEER_LIMIT,
    LaneKeys,
    LaneOffer,
    LanePunch,
    LaneSummons,
    LaneVia,
    Opener,
    Sealer,
    decode_request,
    encode_handshake,
)
from shoal.swarm.lanes.shared import SharedOffer
from shoal.swarm.lanes.socket import Moved
from shoal.swarm.lanes.table import LaneTable, Pair
from shoal.swarm.limits import Refusals
from shoal.swarm.reaching.dial_back_probes import DialBackProbes
from shoal.swarm.reaching.punching import Puncher
from shoal.swarm.reaching.reach import Reach, Step

if TYPE_CHECKING:
    from trio_typing import TaskStatus

LANE_COUNT_LIMIT = 4096  # lanes of a node
JOB_LIMIT = LANE_COUNT_LIMIT
MEETINGS_LIMIT, PEER_MEETINGS_LIMIT = 256, 8
"""Ways through a third that others want this node to take at once: all together, half of them where they do not come
first, and one peer. Each is a connection, to wherever the peer says."""
CLOSER_LIMIT = 8  # threads that wait for lanes to close in order
SUMMONED_DIAL_DEADLINE_S = 15.0
HUGE_LANES = 16
"""So many lanes have buffers in huge pages, which are taken whole: of many most carry little."""
RETIRE_DEADLINE_S = 2 * STALL_DEADLINE_S
"""Time for a retired lane to send what it has in hand: long on a slow link; nobody waits, and a stall ends it."""
LOOK_PERIOD_S = 0.25
WIDEN_DEADLINE_S = 15.0
WIDEN_RETRY_S = 15.0

logger = logging.getLogger(__name__)


class LanePool:
    """The lanes of the node `me`.

    request: sends bytes to a peer's `answer` over the authenticated libp2p channel and returns the reply; raises
    NetworkError or RemoteError.

    Use from trio's thread only; the sink is called in the lanes' threads.
    """

    def __init__(
        self,
        *,
        me: PeerId,
        swarm_id: bytes,
        sink: FrameSink,
        listen: tuple[str, int],
        request: Request,
        limits: LaneLimits | None = None,
    ) -> None:
        self.addresses: tuple[str, ...] = ()  # 'host:port', once started
        self._me = me
        self._sink = sink
        self._listeners: list[trio.SocketListener] = []
        self._listener = LaneListener(me=me, swarm_id=swarm_id, listen=listen, adopt=self._adopt)
        self._dialler = LaneDialler(me=me, swarm_id=swarm_id, request=request, adopt=self._adopt)
        self._request = request
        self._limits = limits or LaneLimits()
        self._up = False
        self._trio: trio.lowlevel.TrioToken | None = None  # once running
        self._dialling: dict[PeerId, trio.Lock] = {}
        self._summoned: set[PeerId] = set()
        self._meetings: Counter[PeerId] = Counter()
        self.share: Callable[[Lane, SharedOffer], None] | None = None  # as the lanes'
        self._adopted = trio.Event()  # set, and replaced, whenever a lane comes up
        self._jobs, self._job_queue = trio.open_memory_channel[Callable[[], Awaitable[object]]](JOB_LIMIT)
        self._closers = trio.CapacityLimiter(CLOSER_LIMIT)
        self._table = LaneTable(self._new_pair)

    async def run(self, *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Listen, and own all lanes, until cancelled. Runs once.

        Raises ConfigError if the listening address cannot be had.

        Cancellation: all lanes are aborted and their threads have ended when this returns.
        """
        self._listeners = await self._listener.open()
        self._trio = trio.lowlevel.current_trio_token()
        try:
            async with trio.open_nursery() as nursery:
                try:
                    self.renew_addresses()
                    nursery.start_soon(self._listener.serve, self._listeners)
                    self._up = True
                    task_status.started()
                    async for job in self._job_queue:
                        nursery.start_soon(job)
                finally:
                    # Inside the nursery: retiring lanes wait in threads until they are aborted.
                    self._up = False
                    for lane in self._table.all():
                        lane.abort("this node is stopping")
        finally:
            self._jobs.close()
            self._job_queue.close()
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(self._join_all)

    def renew_addresses(self) -> None:
        """Look anew at which addresses this machine has; what listens there stays."""
        self.addresses = addresses_of(self._listeners)

    def use(
        self,
        reach: Reach,
        *,
        dial_back_probes: DialBackProbes,
        handlers: Sequence[ConnectionHandler],
        puncher: Puncher | None = None,
    ) -> None:
        """Go by what `reach` says, make holes, and take knocks, and what is the handlers', at the listener."""
        self._dialler.reach, self._dialler.puncher = reach, puncher
        self._listener.dial_back_probes, self._listener.handlers = dial_back_probes, handlers

    def prefer(self, comes_first: Callable[[PeerId], bool], is_known: Callable[[str], bool]) -> None:
        """Leave half of the room for whom this says that it comes first, and connections from its addresses."""
        self._listener.comes_first, self._listener.is_known = comes_first, is_known

    async def answer(self, peer: PeerId, offer: bytes) -> bytes:
        """Answer `peer`'s lane request; to be called with what its `request` sent over the libp2p channel.

        Raises RemoteError if it is malformed or too many, NetworkError if no lane can be taken now.
        """
        self._check_up()
        asked = decode_request(offer, peer=peer)
        if isinstance(asked, LaneSummons):
            self._obey_summons(peer, asked.lanes)
            return b""
        self._check_room(peer)
        if asked.via is not None and not self._dialler.reach.facts.addresses_of(PeerId(asked.via.relay)):
            raise NetworkError(f"{asked.via.relay} is not linked, or does not relay; it cannot be met there")
        if asked.punch is not None:
            return await self._answer_hole(peer, asked, asked.punch)
        if asked.via is not None:
            self._check_meetings(peer)
        answer = self._listener.accept(peer, asked, self.addresses)
        self._table.pair(peer).asked_for = asked.lanes
        if asked.via is not None:
            self._meetings[peer] += 1
            self._jobs.send_nowait(partial(self._meet, peer, asked.via))
        return encode_handshake(answer)

    async def comes(self, peer: PeerId, *, within_s: float) -> bool:
        """Leave it to `peer` to dial for so long; returns whether there are as many lanes as the limits begin with."""
        with trio.move_on_after(within_s):
            while not self._satisfied(peer, self._limits.lanes_per_peer):
                await self._adopted.wait()
        return self._satisfied(peer, self._limits.lanes_per_peer)

    async def ensure(self, peer: PeerId, *, deadline_s: float) -> None:
        """Have as many usable lanes to `peer` as the limits begin with, dialling where they lack.

        Raises NetworkError if that fails or takes longer, RemoteError if the peer's answer breaks the protocol.

        Cancellation: lanes that came up stay.
        """
        with trio.move_on_after(deadline_s):
            await self._ensure(peer, self._limits.lanes_per_peer, may_summon=True)
            return
        raise NetworkError(f"no lane to {peer} within {deadline_s} s")

    def post(self, peer: PeerId, header: FrameHeader, payload: memoryview | bytes | Later) -> None:
        """Queue a frame for the lanes to `peer`; never blocks, keeps `payload` by reference.

        Raises NetworkError if there is no usable lane or the frame's scope has no room in the queue.
        """
        for lane in self.lanes_of(peer):
            if lane.usable:
                try:
                    lane.post(header, payload)
                except NetworkError as error:
                    if lane.usable:
                        raise
                    logger.debug("it has begun to close since: %s", error)
                else:
                    return
        raise NetworkError(f"there is no lane to {peer} that takes a frame")

    def drop(self, peer: PeerId) -> None:
        """Abort all lanes to `peer` and forget what was agreed with it. Returns at once.

        A frame that is being delivered at this moment may still reach the sink, before its `lane_closed`; a dial
        under way goes on.
        """
        for lane in self.lanes_of(peer):
            lane.abort("dropped here")
        self._listener.forget(peer)
        self._table.pair(peer).asked_for = 1

    def end_from(self, hosts: Collection[str]) -> None:
        """Abort all lanes whose own end is at one of these addresses, which this machine does not have any more."""
        for lane in self._table.all():
            if (ends := lane.ends) is not None and ends[0] in hosts:
                lane.abort("this machine's address is another one")

    def end_towards(self, peer: PeerId, host: str) -> None:
        """Abort the lanes to `peer` whose other end is at an address that it has left."""
        for lane in self.lanes_of(peer):
            if (ends := lane.ends) is not None and ends[1] == host:
                lane.abort("its address is another one")

    def cap(self, *, upload: int | None, download: int | None) -> None:
        """Cap what lanes move from now on, in bytes per second; None is no cap.

        Lanes over which frames are handed over in memory end where there was no cap before; those that are made again
        do without. Raises ConfigError, and changes nothing, if a cap is too low.
        """
        was_capped = self._limits.capped
        RateLimit(download)  # is checked before the first one is changed
        self._limits.upload.change(upload)
        self._limits.download.change(download)
        if self._limits.capped and not was_capped:
            for peer in self.connected():
                for lane in self.lanes_of(peer):
                    if lane.uses_memory:
                        lane.abort("its bytes are to be limited")

    def connected(self) -> frozenset[PeerId]:
        """The peers that frames can be posted to."""
        return self._table.connected()

    def queued_bytes(self, peer: PeerId) -> int:
        """Bytes of payload posted to `peer` and not yet given to the kernel. From any thread."""
        pair = self._table.known(peer)
        return 0 if pair is None else pair.queue.queued_bytes

    def waiting(self, peer: PeerId, scope: bytes) -> frozenset[tuple[FrameKind, int]]:
        """Of what was posted to `peer` itself: see `FrameQueue.waiting`. From any thread."""
        pair = self._table.known(peer)
        if pair is None:
            return frozenset()
        with pair.queue.changed:
            return pair.queue.waiting(scope)

    def sent_bytes(self, peer: PeerId) -> int:
        """Bytes of payload given to the kernel for `peer`, over all remembered lanes. From any thread."""
        return self._table.sent_bytes(peer)

    def moved(self, peer: PeerId) -> Moved:
        """Traffic between this node and `peer`, over all remembered lanes. From any thread."""
        return self._table.moved(peer)

    @property
    def refusals(self) -> Refusals:
        """Counts of what was turned away at the lanes' port."""
        return self._listener.refusals

    @property
    def upload(self) -> RateLimit:
        """The cap on all that this node uploads, for whoever sends beside its lanes too."""
        return self._limits.upload

    @property
    def caps(self) -> tuple[int | None, int | None]:
        """The caps on what is uploaded and on what is downloaded now, in bytes per second."""
        return self._limits.upload.bytes_per_s, self._limits.download.bytes_per_s

    @property
    def bytes_sent(self) -> int:
        """Bytes on the wire so far, of all lanes there ever were."""
        return self._table.bytes_sent

    @property
    def bytes_received(self) -> int:
        """Bytes on the wire so far, of all lanes there ever were."""
        return self._table.bytes_received

    def lanes_of(self, peer: PeerId) -> list[Lane]:
        """Those to one peer, usable or ending."""
        return self._table.of(peer)

    # Which lanes there are

    def _adopt(
        self, stream: trio.SocketStream, keys: LaneKeys, sealer: Sealer, opener: Opener, *, dialled: bool
    ) -> None:
        """Hand an authenticated connection to a lane's threads. No checkpoint inside: it happens or it does not."""
        self._check_up()
        self._check_room(keys.peer)
        pair = self._table.pair(keys.peer)
        lane = Lane(
            socket.socket(fileno=stream.socket.detach()),
            peer=keys.peer,
            sealer=sealer,
            opener=opener,
            sink=self._sink,
            limits=self._limits,
            dialled=dialled,
            queue=pair.queue,
            huge=len(self._table.all()) < HUGE_LANES,
            ended=self._table.remove,
        )
        self._table.add(lane, pair)
        lane.relayed, lane.id, lane.share = keys.relayed, keys.lane_id, self.share
        lane.start()
        self._adopted.set()
        self._adopted = trio.Event()
        self._settle(keys.peer)
        if keys.relayed and lane.usable:
            self._punch(keys.peer, pair.count.wanted)

    def _new_pair(self, peer: PeerId) -> Pair:
        count = LaneCount(least=self._limits.lanes_per_peer, limit=self._limits.lanes_per_peer_limit)
        pair = Pair(queue=self._limits.queue(), count=count)
        pair.queue.observe = partial(self._look, peer, pair)
        return pair

    def _settle(self, peer: PeerId) -> None:
        """Retire lanes to spare, if the decision is this node's."""
        if self._me > peer:
            return
        usable = self._table.usable(peer)
        usable.sort(key=lambda lane: (lane.worn, lane.relayed, not lane.dialled))  # stable: older lanes first
        for lane in usable[max(self._wanted(peer), self._table.pair(peer).asked_for) :]:
            self._retire(lane)

    def _retire(self, lane: Lane) -> None:
        lane.begin_close()
        close = partial(lane.close, deadline_s=RETIRE_DEADLINE_S)
        self._jobs.send_nowait(partial(trio.to_thread.run_sync, close, limiter=self._closers))

    def _wanted(self, peer: PeerId) -> int:
        return self._table.pair(peer).count.wanted

    def _check_up(self) -> None:
        if not self._up:
            raise NetworkError("this node's lanes are not up")

    def _check_room(self, peer: PeerId) -> None:
        """When a lane is agreed on, and when it comes: those agreed on may come all at once."""
        if len(self.lanes_of(peer)) >= 2 * LANES_PER_PEER_LIMIT:
            raise RemoteError(f"more than {2 * LANES_PER_PEER_LIMIT} lanes", peer=peer)
        if len(self._table.all()) >= LANE_COUNT_LIMIT // (1 if self._listener.comes_first(peer) else 2):
            raise NetworkError(f"this node has {len(self._table.all())} lanes already")

    def _join_all(self) -> None:
        for lane in self._table.all():
            if not lane.join(JOIN_DEADLINE_S):
                logger.error("a thread of the lane to %s does not end", lane.peer)

    # Dialling

    async def _ensure(self, peer: PeerId, lanes: int, *, may_summon: bool) -> None:
        if self._satisfied(peer, lanes):
            return  # even while more are being dialled
        lock = self._dialling.setdefault(peer, trio.Lock())
        try:
            async with lock:
                while not self._satisfied(peer, lanes):
                    self._check_up()
                    self._check_room(peer)
                    await self._bring_up(peer, asked=not may_summon)
        finally:
            if not lock.locked():
                self._dialling.pop(peer, None)

    def _satisfied(self, peer: PeerId, lanes: int) -> bool:
        return sum(not lane.worn for lane in self._table.usable(peer)) >= lanes

    async def _bring_up(self, peer: PeerId, *, asked: bool) -> None:
        """Bring up one lane, by the first step that leads to one. Raises what the last one does."""
        steps = {
            Step.DIAL: self._dialler.dial,
            Step.ASK: self._be_dialled,
            Step.PUNCH: self._dialler.punch_alone,
            Step.RELAY: self._dialler.dial_through,
        }
        in_vain: Step | None = None
        reason = NetworkError(f"nothing leads to {peer}")
        while (step := self._dialler.reach.next_step(peer, in_vain, asked=asked)) is not None:
            try:
                await self._offer(peer, steps[step])
                return
            except NetworkError as error:
                logger.debug("%s: %s", step.value, error)
                in_vain, reason = step, error
        raise reason

    async def _offer(self, peer: PeerId, dial: Callable[[PeerId, int], Awaitable[None]]) -> None:
        """Dial, which tells the peer how many lanes are wanted; that may be fewer by the time it has heard it."""
        pair = self._table.pair(peer)
        lanes = pair.count.wanted
        try:
            await dial(peer, lanes)
        finally:
            pair.told = max(pair.told, lanes)
            if lanes > pair.count.wanted:
                self._follow_count(peer)

    async def _be_dialled(self, peer: PeerId, lanes: int) -> None:
        """Ask `peer` to dial, and wait until it did. Raises NetworkError where it takes too long."""
        before = set(self.lanes_of(peer))
        with trio.move_on_after(self._dialler.reach.ask_s(peer)):
            await self._request(peer, encode_handshake(LaneSummons(lanes=lanes)))
            while before.issuperset(self.lanes_of(peer)):
                await self._adopted.wait()
            return
        raise NetworkError(f"{peer} does not dial")

    def _check_meetings(self, peer: PeerId) -> None:
        share = 1 if self._listener.comes_first(peer) else 2
        if self._meetings[peer] >= PEER_MEETINGS_LIMIT or self._meetings.total() >= MEETINGS_LIMIT // share:
            raise NetworkError(f"{self._meetings.total()} ways through others are being taken already")

    async def _meet(self, peer: PeerId, via: LaneVia) -> None:
        """Go where another wants to meet this node."""
        try:
            stream = await self._dialler.meet(via)
            await self._listener.meet(stream)
        except (NetworkError, trio.BrokenResourceError) as error:
            logger.debug("%s", error)
        finally:
            self._meetings -= Counter({peer: 1})

    def _punch(self, peer: PeerId, lanes: int) -> None:
        """A lane to `peer` came up through a third: try to do without, if that is for this node to begin."""
        if self._dialler.reach.begins(peer):
            self._jobs.send_nowait(partial(self._dialler.punch, peer, lanes))

    async def _answer_hole(self, peer: PeerId, offer: LaneOffer, punch: LanePunch) -> bytes:
        """Answer an offer to punch a hole; this node punches when the answer is sent."""
        puncher = self._dialler.puncher
        if puncher is None:
            raise NetworkError("this node makes no holes")

        def make(address: str) -> bytes:
            return encode_handshake(self._listener.accept(peer, offer, (address,)))

        return await puncher.answer(peer, PeerId(punch.relay), punch.address, make, self._listener.meet)

    def _obey_summons(self, peer: PeerId, lanes: int) -> None:
        self._table.pair(peer).asked_for = lanes
        self._settle(peer)
        if peer in self._summoned or self._satisfied(peer, lanes):
            return
        try:
            self._jobs.send_nowait(partial(self._dial_summoned, peer, lanes))
        except trio.WouldBlock:
            raise NetworkError("too many summonses at once") from None
        self._summoned.add(peer)

    async def _dial_summoned(self, peer: PeerId, lanes: int) -> None:
        try:
            with trio.move_on_after(SUMMONED_DIAL_DEADLINE_S):
                await self._ensure(peer, lanes, may_summon=False)
        except (NetworkError, RemoteError) as error:
            logger.debug("summoned in vain: %s", error)
        finally:
            self._summoned.discard(peer)

    # The number of lanes

    def _look(self, peer: PeerId, pair: Pair) -> None:
        """Measure, now and then. Called in the lanes' threads."""
        now = time.monotonic()
        if now < pair.next_look:
            return
        pair.next_look = now + LOOK_PERIOD_S
        lanes, moved = len(self._table.usable(peer)), self.moved(peer)
        with pair.queue.changed:
            before = pair.count.wanted
            pair.count.sample(now, lanes=lanes, busy_since=pair.queue.busy_since, moved=moved)
            wanted = pair.count.wanted
        if self._trio is not None and (wanted != before or (lanes < wanted and now >= pair.next_widening)):
            with suppress(trio.RunFinishedError):
                self._trio.run_sync_soon(self._follow_count, peer)

    def _follow_count(self, peer: PeerId) -> None:
        """Have as many lanes as are wanted now."""
        if not self._up:
            return
        self._settle(peer)
        pair = self._table.pair(peer)
        surplus = len(self._table.usable(peer)) - pair.count.wanted
        with suppress(trio.WouldBlock):
            if self._me > peer and (surplus > 0 or pair.told > pair.count.wanted):
                self._jobs.send_nowait(partial(self._tell_wanted, peer, pair))
            if surplus < 0 and time.monotonic() >= pair.next_widening:
                pair.next_widening = time.monotonic() + WIDEN_DEADLINE_S + WIDEN_RETRY_S
                self._jobs.send_nowait(partial(self._widen, peer, pair))

    async def _tell_wanted(self, peer: PeerId, pair: Pair) -> None:
        """Have the peer, which decides, retire what neither side wants any more."""
        lanes = pair.count.wanted
        try:
            with trio.fail_after(WIDEN_DEADLINE_S):
                await self._request(peer, encode_handshake(LaneSummons(lanes=lanes)))
            pair.told = lanes
        except (NetworkError, RemoteError, trio.TooSlowError) as error:
            logger.debug("%s keeps lanes to spare: %r", peer, error)

    async def _widen(self, peer: PeerId, pair: Pair) -> None:
        """Dial the lanes that are wanted and not there."""
        try:
            with trio.fail_after(WIDEN_DEADLINE_S):
                await self._ensure(peer, pair.count.wanted, may_summon=True)
        except (NetworkError, RemoteError, trio.TooSlowError) as error:
            logger.debug("no more lanes to %s: %r", peer, error)
            with pair.queue.changed:
                pair.count.give_up(time.monotonic())
            self._follow_count(peer)
        else:
            pair.next_widening = 0.0
