"""Links and time in a box: calls that are due later, and who is linked with whom."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import trio

from shoal.protocol.errors import NetworkError
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Message

if TYPE_CHECKING:
    from tests.node.box_life import Life
    from tests.node.swarm_in_a_box import Box

LATENCY_S = (0.002, 0.02)


class Net:
    """Calls that are due later; between two lives in the order in which they were made, where that matters."""

    def __init__(self, box: Box) -> None:
        self._box = box
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._changed = trio.Event()
        self._last: dict[tuple[int, PeerId], float] = {}
        self.slow: dict[tuple[PeerId, PeerId], float] = {}
        """Seconds that messages and frames between a sender and a receiver take more."""

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Make a call so much later."""
        self.at(trio.current_time() + seconds, call)

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Make a call at that time."""
        heapq.heappush(self._due, (when, next(self._numbers), call))
        self._changed.set()

    def carry(self, sender: Life, to: PeerId, arrive: Callable[[], None], *, ordered: bool = True) -> None:
        """Something is on its way from a life to a node, whoever lives there when it arrives."""
        when = trio.current_time() + self._box.rng.uniform(*LATENCY_S) + self.slow.get((sender.peer, to), 0.0)
        if ordered:
            key = (id(sender), to)
            when = self._last[key] = max(when, self._last.get(key, 0.0))
        self.at(when, arrive)

    def hasten(self) -> None:
        """What is slow no longer holds up what is said after it."""
        self.slow.clear()
        self._last.clear()

    async def run(self) -> None:
        """Make the calls, until cancelled."""
        while True:
            if self._due and self._due[0][0] <= trio.current_time():
                heapq.heappop(self._due)[2]()
                continue
            self._changed = trio.Event()
            with trio.move_on_at(self._due[0][0] if self._due else float("inf")):
                await self._changed.wait()


class BoxLinks:
    """A life's links: whom it is linked with is the box's to say."""

    def __init__(self, life: Life) -> None:
        self._life = life

    def linked(self) -> frozenset[PeerId]:
        """The peers that messages can be sent to."""
        return frozenset(other.peer for other in self._life.box.lives_linked_to(self._life))

    def send(self, peer: PeerId, message: Message) -> None:
        """Let a message out to one peer."""
        self._let_out(message, [peer])

    def broadcast(self, message: Message) -> None:
        """Let a message out to everyone, be it nobody."""
        self._let_out(message, sorted(self.linked()))

    def _let_out(self, message: Message, peers: Sequence[PeerId]) -> None:
        life = self._life
        if life.disk.dead:
            return
        life.witness.let_out(message, life.disk)
        life.box.let_out(life, message)
        for peer in peers:
            life.box.net.carry(life, peer, partial(self._arrive, peer, message))

    def _arrive(self, peer: PeerId, message: Message) -> None:
        receiver = self._life.box.life_of(peer)
        if receiver is not None and self._life.peer in receiver.links.linked():
            receiver.engine.hear(self._life.peer, message)

    def charge(self, peer: PeerId, handled_s: float) -> None:
        """Time is virtual here: none is anybody's."""

    async def drain(self, *, deadline_s: float) -> None:
        """Nothing is queued here."""
        await trio.lowlevel.checkpoint()


@dataclass
class BoxStream:
    """A stream for one question of `peer` and its answer."""

    peer: PeerId
    question: bytes
    answer: bytes | None = None

    async def receive(self, *, deadline_s: float) -> bytes:
        """The question."""
        await trio.lowlevel.checkpoint()
        return self.question

    async def send(self, data: bytes, *, deadline_s: float) -> None:
        """The answer."""
        await trio.lowlevel.checkpoint()
        self.answer = data

    async def aclose(self) -> None:
        """Nothing is left to do."""
        await trio.lowlevel.checkpoint()


class BoxHost:
    """The part of a life's host by which it asks others, and answers them. `handlers`: by protocol."""

    def __init__(self, life: Life) -> None:
        self._life = life
        self.handlers: dict[str, Callable[[Any], Awaitable[None]]] = {}
        life.host = self

    def serve(self, protocol: str, handler: Callable[[Any], Awaitable[None]], *, limit_bytes: int) -> None:
        """Answer by this handler from now on."""
        self.handlers[protocol] = handler

    async def request(
        self, peer: PeerId, protocol: str, payload: bytes, *, deadline_s: float, limit_bytes: int
    ) -> bytes:
        """The answer of a linked peer. Raises NetworkError if it ends before, or takes too long."""
        await trio.sleep(self._life.box.rng.uniform(*LATENCY_S))
        donor = self._life.donor(peer)
        stream = BoxStream(self._life.peer, payload)
        with trio.move_on_after(deadline_s):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._until_over, donor, nursery)
                await donor.host.handlers[protocol](stream)
                nursery.cancel_scope.cancel()
        if stream.answer is None:
            raise NetworkError(f"{peer} does not answer")
        return stream.answer

    @staticmethod
    async def _until_over(donor: Life, nursery: trio.Nursery) -> None:
        await donor.over.wait()
        nursery.cancel_scope.cancel()
