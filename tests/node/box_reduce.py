"""Reductions in a box: real ones, with real payloads and signatures, over lanes made of calls on a virtual clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import trio

from shoal.collectives.contribution import EncodedContribution
from shoal.collectives.finals import Finals, UseFinal
from shoal.collectives.progress import ReduceProgress
from shoal.collectives.reduce import Reduction
from shoal.node.rounds.copying import copying_beside
from shoal.protocol.errors import LocalError, NetworkError, RemoteError
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import ChunkResults, Held, Plan, Value
from shoal.swarm.lanes.frame import FrameKind

if TYPE_CHECKING:
    from tests.node.box_life import Life

FETCH_AFTER_S = 1.0
FRAME_WAIT_S = 15.0
FRAME_RETRY_S = 0.1


class BoxReduce:
    """What an engine sees of its reductions; `done` is given the finals of each that came to its end."""

    def __init__(self, life: Life, done: Callable[[Finals, float], None]) -> None:
        self._life = life
        self._done = done
        self._reduction: Reduction | None = None
        self._posted: list[tuple[PeerId, FrameKind, int, bytes]] = []
        self._closed_to: dict[bytes, frozenset[PeerId]] = {}
        self._wanted: dict[bytes, float] = {}
        self._fetching: set[bytes] = set()
        self._jobs, self._job_queue = trio.open_memory_channel[Callable[[], Any]](1024)
        self._copying = copying_beside(life.catchup, self._jobs.send_nowait, clock=trio.current_time)
        self.rates = (0, 0)
        self.unreachable: set[PeerId] = set()
        self.begin: Callable[[Finals], UseFinal | None] = lambda finals: None
        self.excluded: Callable[..., None] = lambda *_: None

    async def run(self) -> None:
        """Do what takes a while, until cancelled."""
        async with trio.open_nursery() as nursery:
            async for job in self._job_queue:
                nursery.start_soon(self._work, job)

    async def _work(self, job: Callable[[], Any]) -> None:
        await trio.to_thread.run_sync(lambda: None)
        went = job()
        if went is not None:
            await went

    def start(self, plan: Plan, contribution: EncodedContribution | None) -> None:
        """Begin the reduction of `plan`, in place of the one under way."""
        life, place = self._life, plan.number(self._life.peer)
        counted = place is not None and plan.participants[place].weight > 0
        if counted and contribution is not None:
            life.box.contributions[contribution.root] = contribution
        self.stop()

        def on_progress(progress: ReduceProgress) -> None:
            if progress.final == progress.total:
                self._jobs.send_nowait(lambda: self._conclude(reduction))

        def post(to: PeerId, kind: FrameKind, chunk: int, payload: memoryview) -> None:
            if self._reduction is reduction:
                self._posted.append((to, kind, chunk, bytes(payload)))
                self._send(reduction, *self._posted[-1])

        reduction = Reduction(
            plan=plan,
            identity=life.identity,
            contribution=contribution if counted else None,
            post=post,
            on_progress=on_progress,
        )
        reduction.close_off(self._closed_to.get(plan.lineage, frozenset()))
        self._reduction = reduction
        self._jobs.send_nowait(reduction.start)
        for other in life.box.lives_linked_to(life):
            other.reduce.post_again(life.peer, plan.lineage)

    def post_again(self, peer: PeerId, lineage: bytes) -> None:
        """A peer begins this reduction: it may have begun it before, in an earlier life."""
        reduction = self._reduction
        if reduction is not None and reduction.lineage == lineage:
            for frame in self._posted:
                if frame[0] == peer:
                    self._send(reduction, *frame)

    def _send(self, reduction: Reduction, to: PeerId, kind: FrameKind, chunk: int, payload: bytes) -> None:
        box, me = self._life.box, self._life
        plan_order, sent_at = (reduction.plan.view, reduction.plan.attempt), trio.current_time()

        def arrive() -> None:
            receiver = box.life_of(to)
            if receiver is None or trio.current_time() - sent_at > FRAME_WAIT_S:
                return
            if not receiver.reduce.take(reduction.lineage, plan_order, me.peer, kind, chunk, payload):
                box.net.after(FRAME_RETRY_S, arrive)

        box.net.carry(me, to, arrive, ordered=False)

    def take(
        self, lineage: bytes, plan_order: tuple[int, int], sender: PeerId, kind: FrameKind, chunk: int, payload: bytes
    ) -> bool:
        """A frame arrived; False if it is of a plan that this node does not follow yet."""
        reduction = self._reduction
        if (
            reduction is None
            or reduction.lineage != lineage
            or (reduction.plan.view, reduction.plan.attempt) < plan_order
        ):
            return False
        final = kind is FrameKind.FINAL
        region = (reduction.final_region if final else reduction.contribution_region)(sender, chunk, 0, len(payload))
        if region is not None:
            region[:] = payload
            (reduction.final_received if final else reduction.contribution_received)(sender, chunk, 0, region)
        return True

    def _conclude(self, reduction: Reduction) -> None:
        finals = self._all_finals(reduction)
        if finals is None:
            return
        reduction.verify(1, self.begin(finals))
        finals = self._all_finals(reduction)
        if finals is not None and finals.sound:
            self._hand_over(finals)

    def _hand_over(self, finals: Finals) -> None:
        box = self._life.box
        box.finals.setdefault(finals.plan.hash, finals)
        self._done(box.alter_finals(self._life, finals), 0.1)

    def _all_finals(self, reduction: Reduction) -> Finals | None:
        try:
            return reduction.result() if self._reduction is reduction else None
        except LocalError:
            return None

    async def close_off(self, lineage: bytes, evicted: frozenset[PeerId]) -> tuple[ChunkResults, ...]:
        """Take nothing more from these, and tell which finals of that reduction are here."""
        await trio.lowlevel.checkpoint()
        self._closed_to[lineage] = self._closed_to.get(lineage, frozenset()) | evicted
        if self._reduction is None or self._reduction.lineage != lineage:
            return ()
        return self._reduction.close_off(evicted)

    def repair(self, plan: Plan, contribution: EncodedContribution | None, held: Mapping[PeerId, Held]) -> None:
        """Go on by a revised plan; from the start if its reduction is not under way here."""
        reduction = self._reduction
        if reduction is None or reduction.lineage != plan.lineage:
            self.start(plan, contribution)
            return
        reduction.follow(plan)
        self._copying.stop()
        self._jobs.send_nowait(lambda: reduction.repair(plan, held))

    def stop(self) -> None:
        """Close the reduction under way, if any."""
        if self._reduction is not None:
            self._reduction.close()
        self._reduction = None
        self._posted.clear()
        self._copying.stop()

    def forget(self) -> None:
        """A new round begins."""
        self.stop()
        self._closed_to.clear()
        self._wanted.clear()
        self._fetching.clear()

    def fetch(self, value: Value, peers: Sequence[PeerId]) -> None:
        """Get finals from those who have them, unless the reduction under way is about to bring them."""
        since = self._wanted.setdefault(value.plan, trio.current_time())
        under_way = self._reduction is not None and self._reduction.plan.hash == value.plan
        soon = under_way and trio.current_time() - since < FETCH_AFTER_S
        if value.plan not in self._fetching and not soon:
            self._fetching.add(value.plan)
            self._jobs.send_nowait(lambda: self._fetch(value, peers))

    async def _fetch(self, value: Value, peers: Sequence[PeerId]) -> None:
        try:
            finals = await self._life.fetch_finals(value, peers)
        except (NetworkError, RemoteError):
            self._fetching.discard(value.plan)
        else:
            self._hand_over(finals)

    def bring_up_lanes(self, peers: frozenset[PeerId], chunks: int) -> None:
        """There are lanes between all."""

    def prepare(self) -> None:
        """Memory is plenty."""

    def neighbours(self, peers: object) -> frozenset[PeerId]:
        """Nobody is waited for."""
        return frozenset()

    def complete_at(self, peers: Sequence[PeerId]) -> None:
        """What comes late is waited for; who has a delegate has all from those who have it."""
        reduction = self._reduction
        if reduction is not None and reduction.delegate is not None:
            closed_to = self._closed_to.get(reduction.lineage, frozenset())
            self._copying.complete_at = peers
            self._copying.look(reduction, (), trio.current_time(), closed_to=closed_to)

    relayed = (b"", ())
    """Nothing is led through a third here."""

    def stalled(self, *, overdue: bool = False) -> None:
        """Who stalls is dead, and heard of by its links."""
