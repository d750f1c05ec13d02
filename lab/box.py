"""A member in a box: feeds the member that nodes run with inputs, and has its effects done one after the other.

Explorers, and the tests' swarms in virtual time, drive members by this. What an effect comes to is theirs to say: a
table of functions by kind of effect. One that is not in the table is an error.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from shoal.protocol.effects import MemberEffect
from shoal.protocol.errors import LocalError, RemoteError
from shoal.protocol.forks import Fork
from shoal.protocol.identity import PeerId
from shoal.protocol.inputs import Input, OfState
from shoal.protocol.member import Member
from shoal.protocol.messages import Value

Doers = Mapping[type[Any], Callable[[Any, Any], Any]]
"""By kind of effect, what does it for whoever drives the member, and what it comes to."""

LATER = object()
"""Result of an effect that takes a while: whoever carries it out calls `done` later."""


def do_by(doers: Doers, here: object, effect: MemberEffect) -> Any:
    """Carry out `effect` and return its result. Raises LocalError if nothing does it."""
    do = doers.get(type(effect))
    if do is None:
        raise LocalError(f"nothing here does {type(effect).__name__}")
    return do(here, effect)


def nothing(here: object, effect: MemberEffect) -> None:
    """An effect without a counterpart."""


class Box:
    """Drives one member: `do` does an effect and returns what it comes to, `clock` tells the time in seconds.

    An input that comes while another is under way waits for it.
    """

    def __init__(self, member: Member, do: Callable[[MemberEffect], Any], clock: Callable[[], float]) -> None:
        self.member = member
        self._do = do
        self._clock = clock
        self._inputs: deque[Input] = deque()
        self._under_way = self._stopped = False

    def put(self, event: Input) -> None:
        """Feed the member, after what it is being fed."""
        if self._stopped:
            return
        self._inputs.append(event)
        if not self._under_way:
            self._take_all()

    @property
    def idle(self) -> bool:
        """True if an input would be taken at once."""
        return not (self._stopped or self._under_way)

    def done(self, result: Any = None) -> None:
        """An effect that took a while is done; go on with the next."""
        if not self._stopped:
            self._go_on(self.member.done(result, self._clock()))
            self._take_all()

    def stop(self) -> None:
        """The process ends: no effect after the one under way is done, and nothing is taken any more."""
        self._stopped = True
        self._inputs.clear()

    def _take_all(self) -> None:
        while self._inputs and not self._under_way:
            self._go_on(self.member.take(self._inputs.popleft(), self._clock()))

    def _go_on(self, effect: MemberEffect | None) -> None:
        self._under_way, result = True, None
        try:
            while effect is not None and result is not LATER and not self._stopped:
                effect, result = self._step(effect)
        finally:
            self._under_way = result is LATER

    def _step(self, effect: MemberEffect) -> tuple[MemberEffect | None, Any]:
        """Do an effect; the next one, and what this one came to."""
        try:
            result = self._do(effect)
        except RemoteError as error:
            return self.member.failed(error, self._clock()), None
        over = result is LATER or self._stopped
        return (effect if over else self.member.done(result, self._clock())), result


class Surroundings:
    """Surroundings of a member where nothing is out of the ordinary, as far as they are the same everywhere."""

    held: OfState | None = None
    replayed_rounds = 0
    donors: Collection[PeerId] = ()
    paused = False
    follows = is_follower = takes_images = False
    resting = True
    waits_alone = cut_off = stuck = False
    forks: Sequence[Fork] = ()

    def suspected(self) -> frozenset[PeerId]:
        """Nobody."""
        return frozenset()

    def leaving(self) -> Collection[PeerId]:
        """Nobody."""
        return ()

    def site_mates(self) -> Collection[PeerId]:
        """Nobody."""
        return ()

    @staticmethod
    def is_revoked(peer: PeerId) -> bool:
        """Nobody is."""
        return False

    @staticmethod
    def may_join(peer: PeerId) -> bool:
        """Everyone may."""
        return True

    @staticmethod
    def key_is_elsewhere(head: Value) -> bool:
        """No key is in two places."""
        return False
