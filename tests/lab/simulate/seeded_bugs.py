"""Machines with a bug, one for each promise: put into a simulation to see that the promise is judged."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np

from shoal.collectives.finals import FinalFormat
from shoal.collectives.reduce import Reduction
from shoal.lab.simulate.judge import Judge, Violation
from shoal.protocol.agreement import Agreement, AgreementEffect, Broadcast
from shoal.protocol.effects import Effect
from shoal.protocol.identity import PeerId
from shoal.protocol.membership import Event, MembershipMachine, Say
from shoal.protocol.messages import Message, Prepared, Propose, Value, Vote
from shoal.protocol.peering import Ack
from shoal.protocol.round import RoundMachine

_sign = FinalFormat.sign


class VotesTwice(RoundMachine):
    """Votes again in the same view, for a value of its own making."""

    def receive(self, sender: Any, message: Message, now: float) -> list[Effect]:
        effects = super().receive(sender, message, now)
        cast = [e.message for e in effects if isinstance(e, Broadcast) and isinstance(e.message, Vote)]
        for vote in cast:
            value, highest = self.agreement._values[vote.value], self.agreement._highest
            assert highest is not None
            other = msgspec.structs.replace(value, tokens=value.tokens + 1)
            effects.append(Broadcast(self.agreement._take_vote(other, highest.prepared)))
        return effects


class GoesBack(RoundMachine):
    """Falls back to the first view once after it moved."""

    fell = False

    def tick(self, now: float) -> list[Effect]:
        effects = super().tick(now)
        if self.agreement.view and not self.fell:
            self.fell, self.agreement.view = True, 0
        return effects


class ProposesTwice(RoundMachine):
    """Proposes another value beside the first."""

    def tick(self, now: float) -> list[Effect]:
        effects = super().tick(now)
        proposed = [e.message for e in effects if isinstance(e, Broadcast) and isinstance(e.message, Propose)]
        for message in proposed:
            value = msgspec.structs.replace(message.value, tokens=message.value.tokens + 1)
            effects.append(Broadcast(msgspec.structs.replace(message, value=value)))
        return effects


class HidesItsVote(Agreement):
    """Moves to another view and says that it voted for nothing."""

    def move_to(self, view: int) -> list[AgreementEffect]:
        self._highest = None
        return super().move_to(view)


class NeverMoves(RoundMachine):
    """Waits for its lead for ever."""

    def _watch_lead(self, now: float) -> list[Effect]:
        return []


class LeavesOneOut(Reduction):
    """Sums without waiting for the last contribution."""

    def _reduce_if_complete(self, chunk: int) -> None:
        inbox = self._inboxes.get(chunk)
        if inbox is not None and len(inbox.owing) == 1:
            inbox.owing.clear()
        super()._reduce_if_complete(chunk)


class GivesNobodyUp(MembershipMachine):
    """Suspects for ever."""

    def _overdue(self, peer: Any, watched: Any, now: float) -> list[Any]:
        watched.suspect_until = float("inf")
        return super()._overdue(peer, watched, now)


class OneVoteIsEnough(Agreement):
    """Holds a value that any one member voted for to be certified; its prepares are counted as they have to be."""

    def _certified(self, steps: dict[tuple[int, bytes], dict[PeerId, bytes]], view: int, value: Value) -> Any:
        row = steps.get((view, value.hash))
        if steps is not self._votes or not row:
            return super()._certified(steps, view, value)
        return Prepared(view, tuple(sorted(row)), tuple(row[peer] for peer in sorted(row)))


class OneLossIsDeath(MembershipMachine):
    """Gives up whoever leaves one ping unanswered, without asking others and without suspecting first.

    It takes no ping of theirs for a sign of life, either.
    """

    def on_ping(self, peer: Any, nonce: int, incarnation: int, now: float) -> list[Any]:
        return [Say(peer, Ack(nonce=nonce, incarnation=self.incarnation))]

    def _overdue(self, peer: Any, watched: Any, now: float) -> list[Any]:
        if watched.probe is not None and now >= watched.probe.deadline:
            return self._happens(peer, watched, Event.LOST, now)
        return super()._overdue(peer, watched, now)


class BlamesEverything(Judge):
    """Holds every certificate to be a violation."""

    def decided(self, certificate: object) -> None:
        raise Violation("no fork", "made up")


def anyone_decides(previous: Value, supporters: Iterable[Any], leaves: Any = (), **_: Any) -> bool:
    """One member is a quorum."""
    return bool(set(previous.members) & set(supporters))


def half_decides(previous: Value, supporters: Iterable[Any], leaves: Any = (), **_: Any) -> bool:
    """Two quorums need not meet."""
    return 2 * len(set(previous.members) & set(supporters)) >= len(previous.members)


def halved(final_format: Any, identity: Any, chunk: int, mean: Any, *rest: Any) -> Any:
    """A final of half the mean, in place of `FinalFormat.sign`."""
    return _sign(final_format, identity, chunk, mean * np.float32(0.5), *rest)
