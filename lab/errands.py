"""Errands of a member (`shoal.protocol.errands`), carried out by drivers that are called back, in virtual time.

What `shoal.node.state.errands` is for a node: the simulator and the tests' swarms say what each request comes to; whose
turn is next, and who is waited for no longer, is here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from shoal.protocol.errands import Errand, InTurn, Request
from shoal.protocol.identity import PeerId

Then = Callable[[Any], None]
"""Called once, with what a request came to: a NetworkError or RemoteError, if it failed."""
Perform = Callable[[Request, Then], None]


class Errands:
    """Errands of one process. perform: has a request done. `look` is called now and then, as time passes."""

    def __init__(self, perform: Perform, clock: Callable[[], float]) -> None:
        self.perform = perform
        self.clock = clock
        self.turns: list[_Turns] = []

    def begin(self, errand: Errand, then: Then) -> _UnderWay:
        """Carry an errand out, request after request; call `then` with what came of it."""
        under_way = _UnderWay(self, errand, then)
        under_way.go_on(None)
        return under_way

    def look(self) -> None:
        """Go on without those who do not answer."""
        for turns in list(self.turns):
            turns.look()

    def stop(self) -> None:
        """The process ended."""
        self.turns.clear()


class _UnderWay:
    """An errand that is carried out, until it is over or given up."""

    def __init__(self, errands: Errands, errand: Errand, then: Then) -> None:
        self._errands = errands
        self._errand = errand
        self._then = then
        self._turns: _Turns | None = None
        self._given_up = False

    def go_on(self, came: Any) -> None:
        if self._given_up:
            return
        request = self._errand.go_on(came, self._errands.clock())
        if request is None:
            self._then(self._errand.outcome)
        elif isinstance(request, InTurn):
            self._turns = _Turns(self._errands, request, self.go_on)
            self._turns.look()
        else:
            self._errands.perform(request, self.go_on)

    def give_up(self) -> None:
        self._given_up = True
        if self._turns is not None:
            self._turns.end()


class _Turns:
    """Errands for one peer after the other, as `shoal.node.state.asking` has it."""

    def __init__(self, errands: Errands, request: InTurn, then: Then) -> None:
        self._errands = errands
        self._request = request
        self._then = then
        self._left = deque(request.peers)
        self._under_way: dict[PeerId, _UnderWay | None] = {}
        self._next_at, self._until = float("-inf"), float("inf")
        self._over = False
        errands.turns.append(self)

    def look(self) -> None:
        now = self._errands.clock()
        while self._left and self._next_at <= now < self._until:
            peer = self._left.popleft()
            self._next_at = now + self._request.apart_s
            self._under_way[peer] = None
            begun = self._errands.begin(self._request.errand(peer), partial(self._came, peer))
            if peer in self._under_way:
                self._under_way[peer] = begun
        if not self._over and (now >= self._until or not (self._left or self._under_way)):
            self.end()
            self._then(None)

    def _came(self, peer: PeerId, worth_s: float | None) -> None:
        del self._under_way[peer]
        now = self._errands.clock()
        self._next_at = now
        if worth_s is not None:
            self._until = min(self._until, now + worth_s)
        self.look()

    def end(self) -> None:
        """Nobody is waited for any more."""
        self._over = True
        self._left.clear()
        for begun in self._under_way.values():
            if begun is not None:
                begun.give_up()
        self._under_way.clear()
        self._errands.turns = [one for one in self._errands.turns if one is not self]
