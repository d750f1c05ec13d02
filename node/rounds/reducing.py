"""The reductions of a round: one under way at a time, its lanes, its stalls; and finals fetched when there was none.

Whatever way the finals of a plan come, they are handed to `done`, with the seconds they took.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import trio

from shoal.collectives.contribution import EncodedContribution
from shoal.collectives.finals import Finals, UseFinal
from shoal.collectives.frame_relay import RelayWatch
from shoal.collectives.memory import PayloadPool
from shoal.collectives.partition import dialling_order, dials_first, expected_owners, owners_in, partners
from shoal.collectives.progress import Exclusion, ReduceProgress
from shoal.collectives.reduce import Kept, Reduction
from shoal.collectives.traffic import PlanTraffic, Routes
from shoal.node.control_groups import usable_cores
from shoal.node.holds import Holds
from shoal.node.rounds.copying import copying_beside
from shoal.node.rounds.pace import NOBODY, Pace, Stall, Told, planned_ways
from shoal.node.state.catchup import CatchUp
from shoal.protocol.backoff import Backoff
from shoal.protocol.errors import LocalError, NetworkError, RemoteError
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.messages import NO_HASH, ChunkResults, Held, Plan, RelayedWay, Value
from shoal.protocol.timeouts import CROWD, in_crowd
from shoal.swarm.lanes.frame import SCOPE_BYTES
from shoal.swarm.lanes.pool import LanePool

LANE_DEADLINE_S = 5.0
LEFT_SHARE = 0.5
"""Of that time, in which a lane that is another's to make is left to that one."""
LANES_AT_ONCE = 16
"""Lanes that are being made, at most: on a crowded machine none of many is done before its deadline, all in vain."""
LANE_HEAD_START_S = 0.5  # for lanes, before the first payload is posted
LOOK_PERIOD_S = 0.1
MEND_RETRY_S = 0.5  # between tries to replace a lane that failed
TELL_S = 1.0
"""Time for a peer to say what it lacks, once there is a lane to it again, before it is sent everything."""
RELAYED_PATH_S = 10.0
RELAYED_PATH_LIMIT_S = 640.0
"""Longest time for which a peer reached through another is not dialled: doubled whenever that leads to nothing."""
UNREACHABLE_LIMIT = 1024
"""Peers that are remembered as out of reach. When there are more, all are tried again: most will be long gone."""
VERIFY_THREADS = min(4, usable_cores())
SPARE_BYTES = 256 << 20
"""Memory of payloads of one size kept from one reduction to the next."""
NEIGHBOUR_LOOK_S = 0.002
NEIGHBOUR_SHARE, NEIGHBOUR_LIMIT_S = 0.25, 0.5
"""So long, of what the reduction took and at most, nodes of this machine are given to get what is posted to them."""
JOB_LIMIT = 256
FETCH_TIMEOUT_S = 30.0
"""So long finals that a vote lacks are left to a reduction in which nobody stalls; then they are fetched too."""
LINEAGE_LIMIT = 64
"""Lineages of a round of which evictions are remembered; a lead plans anew only after somebody was lost."""

Done = Callable[[Finals, float], None]


@dataclass(slots=True)
class _RelayedPath:
    """A peer that plans had reached through another: until when it is left at that, and for how long the next time."""

    until: float
    backoff: Backoff


logger = logging.getLogger(__name__)


class ReductionDriver:
    """Starts and stops reductions for the engine. late_s: as of `Pace`."""

    def __init__(
        self,
        *,
        identity: Identity,
        lanes: LanePool,
        traffic: PlanTraffic,
        catchup: CatchUp,
        holds: Holds,
        done: Done,
        late_s: Callable[[], float],
    ) -> None:
        self._identity = identity
        self._lanes = lanes
        self._traffic = traffic
        self._catchup = catchup
        self._holds = holds
        self._done = done
        self._late_s = late_s
        self._jobs, self._job_queue = trio.open_memory_channel[Callable[[], Awaitable[None]]](JOB_LIMIT)
        self._memory = PayloadPool(SPARE_BYTES)
        self._reduction: Reduction | None = None
        self._nodes = 0
        """That reduce together, or are about to."""
        self._owners = frozenset[PeerId]()
        """Those of them that own chunks."""
        self._making = trio.CapacityLimiter(LANES_AT_ONCE)
        self._rates_by_peer: dict[PeerId, tuple[int, int]] = {}
        self._delegates: Mapping[PeerId, PeerId] = {}
        """As the last plan had them: how the next one will deal the chunks."""
        self._under_way, self._passes_on = trio.Event(), trio.Event()
        self._pace: Pace | None = None
        self._relaying: RelayWatch | None = None
        self.relayed: tuple[bytes, tuple[RelayedWay, ...]] = (NO_HASH, ())
        """Report of this node, as a relay under the plan of that hash, on what it passes on."""
        self._stall, self._told = NOBODY, Told()
        self._started = 0.0
        self._fetching: set[bytes] = set()
        self._wanted: dict[bytes, float] = {}
        """By plan, since when its finals are needed for a vote, in this round."""
        self._copying = copying_beside(catchup, self._jobs.send_nowait)
        self._mending: set[PeerId] = set()
        self._bringing_up = trio.CancelScope()
        self.unreachable: set[PeerId] = set()
        """Peers to whom no lane could be had the last time it was tried, or over whose lanes nothing moved."""
        self._kept: dict[bytes, Kept] = {}
        self._handed_over: Plan | None = None
        self._closed_to: dict[bytes, frozenset[PeerId]] = {}
        """By lineage, of this round: a plan may be heard after its evictions, and one that was left may be taken up."""
        self._relayed: frozenset[PeerId] = frozenset()
        self._relayed_paths: dict[PeerId, _RelayedPath] = {}
        self.excluded: Callable[[Plan, int, Exclusion], None] = lambda plan, chunk, exclusion: None
        """Called in lanes' threads for who is left out of a chunk of this node's, with the plan that began it."""
        self.begin: Callable[[Finals], UseFinal | None] = lambda finals: None
        """Called with all finals of a reduction before they are checked. What it returns is called with each that was,
        in other threads, while it is in the cache."""
        self.rates = (0, 0)
        """Bytes/s up and down that the last reductions measured; 0 is unknown."""

    async def run(self) -> None:
        """Own the work that goes on beside the engine. Cancellation closes the reduction under way."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._look_after)
                while True:
                    nursery.start_soon(await self._job_queue.receive())  # in no variable: it holds its reduction
        finally:
            self._reduction = None
            self._traffic.close()

    def start(self, plan: Plan, contribution: EncodedContribution | None) -> None:
        """Begin the reduction of `plan`, in place of the one under way."""
        token = trio.lowlevel.current_trio_token()

        def on_progress(progress: ReduceProgress) -> None:
            for exclusion in progress.excluded:
                logger.warning("chunk %d: %s left out: %s", progress.chunk, exclusion.peer, exclusion.reason)
                self.excluded(plan, progress.chunk or 0, exclusion)
            self._holds.at_in_thread(plan.round, "reduce", progress.final / progress.total)
            if progress.final == progress.total:
                token.run_sync_soon(self._finished, plan.lineage)  # a cycle with it would keep its memory

        place = plan.number(self._identity.peer_id)
        counted = place is not None and plan.participants[place].weight > 0
        reduction = Reduction(
            plan=plan,
            identity=self._identity,
            contribution=contribution if counted else None,
            post=partial(self._traffic.post, plan.lineage[:SCOPE_BYTES]),
            on_progress=on_progress,
            memory=self._memory,
            kept=self._kept.setdefault(plan.lineage, Kept()),
        )
        closed_to = self._closed_to.get(plan.lineage)
        if closed_to is not None:
            reduction.close_off(closed_to)
        routes = Routes(plan, self._identity.peer_id)
        self._traffic.begin(reduction, routes)
        self._note_relayed(routes)
        if self._relayed:
            self._jobs.send_nowait(partial(self._try_all_again, self._relayed))
        self._copying.stop()
        self._reduction, self._handed_over, self._nodes = reduction, None, len(plan.participants)
        self._rates_by_peer = {one.peer: (one.upload, one.download) for one in plan.participants}
        self._delegates = plan.delegates
        self._under_way.set()
        self._started = time.monotonic()
        self._begin_pace(reduction)
        self._jobs.send_nowait(partial(self._run_reduction, reduction))

    async def close_off(self, lineage: bytes, evicted: frozenset[PeerId]) -> tuple[ChunkResults, ...]:
        """Take nothing more from these, close their lanes, and tell which finals of that reduction are here."""
        self._copying.stop()
        for peer in evicted:
            self._lanes.drop(peer)
        if lineage in self._closed_to or len(self._closed_to) < LINEAGE_LIMIT:
            self._closed_to[lineage] = self._closed_to.get(lineage, frozenset()) | evicted
        if self._reduction is None or self._reduction.lineage != lineage:
            return ()
        return await trio.to_thread.run_sync(self._reduction.close_off, evicted)

    def repair(self, plan: Plan, contribution: EncodedContribution | None, held: Mapping[PeerId, Held]) -> None:
        """Go on by a revised plan; from the start if its reduction is not under way here."""
        reduction = self._reduction
        if reduction is None or reduction.lineage != plan.lineage:
            self.start(plan, contribution)
            return
        reduction.follow(plan)  # before frames of this revision are let in
        routes = Routes(plan, self._identity.peer_id)
        self._traffic.revise(plan, routes)
        for peer in routes.via.keys() - self._relayed:
            self._give_up_on(peer)
        self._note_relayed(routes)
        self._keep_rates()
        self._pace = self._relaying = None
        self._stall = NOBODY  # what stalled did so under another plan
        self._told.begin()
        self._copying.stop()
        self._jobs.send_nowait(partial(self._run_repair, reduction, plan, held))

    def stop(self) -> None:
        """Close the reduction under way, if any."""
        self._traffic.end()
        self._copying.stop()
        self._keep_rates()
        self._reduction = self._pace = self._relaying = None
        if self._under_way.is_set():
            self._under_way = trio.Event()
        if self._passes_on.is_set():  # else somebody waits for this one
            self._passes_on = trio.Event()

    def _note_relayed(self, routes: Routes) -> None:
        self._relayed = frozenset(routes.via)
        if self._relayed:
            self._passes_on.set()

    def forget(self) -> None:
        """A new round: whatever was being fetched for the old one is of no interest."""
        self.stop()
        self._fetching.clear()
        self._wanted.clear()
        self._kept.clear()
        self._closed_to.clear()
        now = time.monotonic()
        self._relayed_paths = {
            peer: one for peer, one in self._relayed_paths.items() if now - one.until < RELAYED_PATH_LIMIT_S
        }
        if len(self.unreachable) > UNREACHABLE_LIMIT:
            self.unreachable.clear()

    def prepare(self) -> None:
        """Have memory made while everyone trains, for as many payloads as the last round took."""
        self._jobs.send_nowait(partial(trio.to_thread.run_sync, self._memory.prepare))

    def bring_up_lanes(self, peers: frozenset[PeerId], chunks: int) -> None:
        """Have lanes to those with whom this node is going to exchange payloads, while everyone trains.

        That is with owners of `chunks`, as they are going to be dealt if all `peers` take part: another lane is made
        when something is posted to it. Who was reached through another is left to the next plan, which says whether to
        try.
        """
        me, self._nodes = self._identity.peer_id, len(peers) + 1
        delegates = {peer: to for peer, to in self._delegates.items() if to in {*peers, me}}
        others = {*peers, me} - delegates.keys()
        self._owners = expected_owners(others, self._rates_by_peer, chunks)
        wanted = partners(peers, self._owners, me, delegates) - self._relayed_paths.keys()
        self._bringing_up.cancel()
        self._bringing_up = trio.CancelScope()
        around = dialling_order(wanted, {*peers, me}, me)
        self._jobs.send_nowait(partial(self._bring_up_lanes, around, self._bringing_up))

    async def _bring_up_lanes(self, peers: Sequence[PeerId], scope: trio.CancelScope) -> None:
        """One after another: nobody waits, and many who begin together have little time for each."""
        with scope:
            for peer in filter(self._dials, peers):
                await self._try_lane(peer)  # in vain it says nothing yet of who is out of reach

    def _finished(self, lineage: bytes) -> None:
        """All finals are here: check what their owners signed, and hand them over."""
        reduction = self._reduction
        if reduction is not None and reduction.lineage == lineage:
            self._keep_rates()
            self._jobs.send_nowait(partial(self._conclude, reduction, time.monotonic() - self._started))

    async def _conclude(self, reduction: Reduction, seconds: float) -> None:
        finals = self._all_finals(reduction)
        apply = None if finals is None else self.begin(finals)
        await self._let_neighbours_finish(reduction, seconds)
        for error in await trio.to_thread.run_sync(reduction.verify, VERIFY_THREADS, apply):
            logger.warning("round %d: %s", reduction.plan.round, error)
        finals = self._all_finals(reduction)
        # If not all are sound, some came while others were checked: completion is told again for them, and once they
        # are checked there whoever looks first hands over.
        if finals is not None and finals.sound and self._handed_over is not finals.plan:
            self._handed_over = finals.plan
            self._done(finals, seconds)

    def _all_finals(self, reduction: Reduction) -> Finals | None:
        """Those of the reduction under way; None if it is another, or somebody else's revision took some back."""
        if self._reduction is not reduction or reduction.final_chunks != reduction.plan.chunks:
            return None
        try:
            return reduction.result()
        except LocalError:  # just now
            return None

    async def _let_neighbours_finish(self, reduction: Reduction, seconds: float) -> None:
        """Leave the processor to nodes of this machine that have yet to get something from here.

        A reduction lasts until the last has all, and what comes next here would take a core or two from it.
        """
        with trio.move_on_after(min(seconds * NEIGHBOUR_SHARE, NEIGHBOUR_LIMIT_S)):
            while True:
                lanes = [lane for peer in reduction.plan.remaining for lane in self._lanes.lanes_of(peer)]
                if self._reduction is not reduction or not any(lane.neighbour_waits for lane in lanes):
                    return
                await trio.sleep(NEIGHBOUR_LOOK_S)

    def neighbours(self, peers: Iterable[PeerId]) -> frozenset[PeerId]:
        """Those of `peers` to whom a lane is open within this machine."""
        return frozenset(peer for peer in peers if any(lane.is_local for lane in self._lanes.lanes_of(peer)))

    async def _run_reduction(self, reduction: Reduction) -> None:
        self._owners = owners_in(reduction.plan)
        plan = reduction.plan
        others = partners(plan.remaining, self._owners, self._identity.peer_id, plan.delegates)
        hops, are_up = {self._traffic.next_hop(peer) for peer in others}, trio.Event()
        left = {peer for peer in hops & others if not self._dials(peer)}  # who only relays leaves it to this node
        self._jobs.send_nowait(partial(self._have_lanes, hops, are_up, left))
        with trio.move_on_after(LANE_HEAD_START_S):  # who has none then is owed what is posted, and nobody waits for it
            await are_up.wait()
        if self._reduction is reduction:
            await trio.to_thread.run_sync(reduction.start)

    async def _have_lanes(self, peers: Iterable[PeerId], are_up: trio.Event, left: Collection[PeerId] = ()) -> None:
        """Have a lane to each of `peers` if it can be had; to those of `left` it is theirs to make one, at first."""
        async with trio.open_nursery() as nursery:
            for peer in peers:
                nursery.start_soon(self._have_left_lane if peer in left else self.ensure_lane, peer)
        are_up.set()

    async def _have_left_lane(self, peer: PeerId) -> None:
        if not await self._comes(peer):
            await self.ensure_lane(peer, share=1 - LEFT_SHARE)

    # -- peers that are reached through another --------------------------------------------------------------

    def _give_up_on(self, peer: PeerId) -> None:
        """Nothing moves over what lanes there are to `peer`: the next plans are to know it from the start."""
        self._lanes.drop(peer)
        self._note_unreachable(peer)
        self._put_off(peer)

    def _note_unreachable(self, peer: PeerId) -> None:
        if len(self.unreachable) > UNREACHABLE_LIMIT:
            self.unreachable.clear()
        self.unreachable.add(peer)

    def _put_off(self, peer: PeerId) -> None:
        if len(self._relayed_paths) > UNREACHABLE_LIMIT:  # plans name whom they like
            self._relayed_paths.clear()
        now, last = time.monotonic(), self._relayed_paths.get(peer)
        recent = last is not None and now - last.until < RELAYED_PATH_LIMIT_S
        again = last.backoff if last is not None and recent else Backoff(RELAYED_PATH_S, RELAYED_PATH_LIMIT_S)
        self._relayed_paths[peer] = _RelayedPath(now + again.next_s(), again)

    async def _try_all_again(self, peers: Iterable[PeerId]) -> None:
        async with trio.open_nursery() as nursery:
            for peer in peers:
                nursery.start_soon(self._try_again, peer)

    async def _try_again(self, peer: PeerId) -> None:
        """Dial a peer that is reached through another, if it is time: the two may have come within reach."""
        relayed_path = self._relayed_paths.get(peer)
        if relayed_path is None or time.monotonic() >= relayed_path.until:
            self._put_off(peer)  # not two at once, and longer the next time
            await self.ensure_lane(peer)

    async def _run_repair(self, reduction: Reduction, plan: Plan, held: Mapping[PeerId, Held]) -> None:
        if self._reduction is reduction:
            await trio.to_thread.run_sync(reduction.repair, plan, held)
            self._begin_pace(reduction)

    async def until_relayed(self) -> None:
        """Return while a reduction is under way in which others pass frames on for this node, or when one begins."""
        await self._passes_on.wait()

    async def _look_after(self) -> None:
        """See who stalls; send again, over a new lane, what those lack whose lane failed."""
        while True:
            await self._under_way.wait()
            await trio.sleep(in_crowd(LOOK_PERIOD_S, self._nodes))
            self._look()

    def _look(self) -> None:
        reduction, now = self._reduction, time.monotonic()
        if self._pace is not None:
            self._stall = self._pace.look(now)
            if self._relaying is not None:
                self.relayed = self._relaying.plan.hash, self._relaying.look(now)
            if reduction is not None and reduction.plan.hash not in self._fetching:
                closed_to = self._closed_to.get(reduction.lineage, frozenset())
                self._copying.look(reduction, self._pace.quiet(), now, closed_to=closed_to)
        for peer in self._traffic.owed() - self._mending:
            if reduction is not None:
                self._mending.add(peer)
                self._jobs.send_nowait(partial(self._post_again, reduction, peer))

    def complete_at(self, peers: Sequence[PeerId]) -> None:
        """These hold all finals of the plan of the reduction under way: what comes late is had from them."""
        self._copying.complete_at = peers

    async def _post_again(self, reduction: Reduction, peer: PeerId) -> None:
        try:
            while self._reduction is reduction:
                if await self.ensure_lane(self._traffic.next_hop(peer)):
                    await trio.to_thread.run_sync(self._traffic.resume, peer, TELL_S)
                    return
                await trio.sleep(MEND_RETRY_S)
        finally:
            self._mending.discard(peer)

    async def ensure_lane(self, peer: PeerId, *, share: float = 1.0) -> bool:
        """Have a lane to `peer`, if it can be had; a peer without one stalls, and that is noticed.

        share: of the time that a lane is given.
        """
        is_up = await self._try_lane(peer, share=share)
        if not is_up:
            self._note_unreachable(peer)
        return is_up

    async def _try_lane(self, peer: PeerId, *, share: float = 1.0) -> bool:
        try:
            async with self._making:
                await self._lanes.ensure(peer, deadline_s=share * in_crowd(LANE_DEADLINE_S, self._nodes))
        except (NetworkError, RemoteError) as error:
            logger.debug("no lane: %s", error)
            return False
        self.unreachable.discard(peer)
        return True

    def _dials(self, peer: PeerId) -> bool:
        """True if this node is to make a lane to `peer`, and not to leave it to that one: in a crowd, where it counts.

        A lane that both make is work for both, of which they have too much there. Once something is to be sent over one
        that is not there, it is made by who has to send.
        """
        return self._nodes <= CROWD or dials_first(self._identity.peer_id, peer, self._owners)

    async def _comes(self, peer: PeerId) -> bool:
        """Leave it to `peer` for a while to make a lane; returns whether it did."""
        came = await self._lanes.comes(peer, within_s=LEFT_SHARE * in_crowd(LANE_DEADLINE_S, self._nodes))
        if came:
            self.unreachable.discard(peer)
        return came

    def _begin_pace(self, reduction: Reduction) -> None:
        if self._reduction is reduction:
            me, now = self._identity.peer_id, time.monotonic()
            self._pace = Pace(reduction, self._lanes, me, now, late_s=self._late_s)
            self._stall = NOBODY
            self._told.begin()
            self._relaying = self._watch_ways(reduction, self._pace.stall_s)

    def _watch_ways(self, reduction: Reduction, stall_s: float) -> RelayWatch | None:
        """Look at what this node passes on, if the plan that is followed has it pass anything on."""
        account, holding = self._traffic.account, self._traffic.holding
        if account is None or account.final_format.plan != reduction.plan:
            return None
        planned = planned_ways(reduction.plan, account.ways)
        return RelayWatch(account, reduction, holding, stall_s=stall_s, planned=planned, late_s=self._late_s)

    def _keep_rates(self) -> None:
        if self._pace is not None:
            upload, download = self._pace.rates()
            self.rates = (upload or self.rates[0], download or self.rates[1])

    def stalled(self, *, overdue: bool = False) -> Stall | None:
        """Stall of the reduction, if it is to be told now. overdue: it has had its time."""
        reduction, now = self._reduction, time.monotonic()
        if reduction is None:
            return None
        if reduction.final_chunks == reduction.plan.chunks:
            self._stall, overdue = NOBODY, False
        stall = self._pace.overdue(self._stall) if overdue and self._pace is not None else self._stall
        return stall if self._told.is_due(stall, now, nodes=len(reduction.plan.participants)) else None

    def fetch(self, value: Value, peers: Sequence[PeerId]) -> None:
        """Get the finals of a plan from those who have them, unless a reduction of this node's is about to bring them.

        To be called again and again while they are needed.
        """
        since = self._wanted.setdefault(value.plan, time.monotonic())
        if value.plan not in self._fetching and not self._brings(value.plan, since):
            self._copying.stop()
            self._fetching.add(value.plan)
            self._jobs.send_nowait(partial(self._fetch, value, peers))

    def _brings(self, plan: bytes, since: float) -> bool:
        """True if the reduction under way will have the finals of `plan`, which a vote needs, by itself.

        Once a value is proposed nothing is repaired any more. Who owes a final and died when others had it never sends
        it; and if they are no quorum without this node, nobody goes on until it has it from them.
        """
        under_way = self._reduction is not None and self._reduction.plan.hash == plan
        stalls = (self._stall.peers | self._stall.late) - {self._identity.peer_id}
        return under_way and (self._copying.under_way or not stalls) and time.monotonic() - since < FETCH_TIMEOUT_S

    async def _fetch(self, value: Value, peers: Sequence[PeerId]) -> None:
        started = time.monotonic()
        try:
            finals = await self._catchup.finals(value.plan, peers)
        except (NetworkError, RemoteError) as error:
            logger.info("round %d: %s", value.round, error)
            self._fetching.discard(value.plan)
            return
        plan = finals.plan
        if (plan.term, plan.round, plan.base) != (value.term, value.round, value.base):
            logger.warning("round %d: the lead proposes a plan of another round", value.round)
            return  # and it stays among those fetched: once is enough
        self._done(finals, time.monotonic() - started)
