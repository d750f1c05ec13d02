"""Rows in memory: machines of one row joined by a network that delays, loses and cuts, in virtual time.

`certify` is the round of the heads, of which nothing is here but that it ends; the sum of a row takes `SUM_S` from when
all that sum have begun, and ends only while all of them live and reach each other.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from shoal.lab.rows.row_effects import Begun, RowDone, RowEffect, SumRow, Tell
from shoal.lab.rows.row_head import RowSettings
from shoal.lab.rows.row_list import Roster
from shoal.lab.rows.row_messages import RowPlan, RowSaid, Stamp
from shoal.lab.rows.row_round import RowRound
from shoal.protocol.certificate import genesis
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Certificate, Value

DELAY_S = 0.05
SUM_S = 2.0
TOKENS = 100
SETTINGS = RowSettings(grace_s=3.0, train_deadline_s=30.0, sum_deadline_s=20.0)


def peers(count: int, first: int = 0) -> list[PeerId]:
    return [PeerId(f"12D3KooW{number:044d}") for number in range(first, first + count)]


def chain(rounds: int) -> list[Value]:
    """Values of rounds 0 to `rounds`."""
    values = [genesis(bytes(32), peers(4))]
    for round in range(1, rounds + 1):
        values.append(msgspec.structs.replace(values[0], round=round, base=values[-1].hash))
    return values


def certificate(value: Value) -> Certificate:
    return Certificate(value=value, view=0, signers=(), signatures=())


CHAIN = chain(60)


@dataclass
class RowLab:
    """A row of so many; `machines` and `told`, all effects with their time, are for tests to look at."""

    count: int = 9
    seed: int = 1
    loss: float = 0.0
    train_s: tuple[float, float] = (1.0, 2.0)
    machine: Callable[..., RowRound] = RowRound
    now: float = 0.0
    told: list[tuple[float, PeerId, RowEffect]] = field(default_factory=list)
    said: list[tuple[PeerId, PeerId, RowSaid]] = field(default_factory=list)
    dead: set[PeerId] = field(default_factory=set)
    cut: set[PeerId] = field(default_factory=set)
    drop: Callable[[PeerId, PeerId, RowSaid], bool] = lambda sender, to, message: False

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.row = peers(self.count)
        self.machines: dict[PeerId, RowRound] = {}
        self.lives: dict[PeerId, int] = {}
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._asked = 0
        self._wakes: dict[PeerId, float] = {}
        self.sums: dict[tuple[Stamp, int], tuple[RowPlan, tuple[int, ...], set[PeerId]]] = {}
        self.lists: dict[bytes, tuple[PeerId, ...]] = {}
        self.trains: Callable[[PeerId], float | None] = lambda peer: self.rng.uniform(*self.train_s)
        for peer in self.row:
            self.start(peer, Roster.dealt(self.row))

    def start(self, peer: PeerId, roster: Roster) -> None:
        life = self.lives[peer] = self.lives.get(peer, 0) + 1
        self.dead.discard(peer)
        self.machines[peer] = self.machine(
            me=peer, roster=roster, life=bytes([life]) * 32, now=self.now, upload=10, download=10, settings=SETTINGS
        )
        self._wake_up(peer)

    # -- time --------------------------------------------------------------------------------------------------

    def at(self, time: float, action: Callable[..., None], *arguments: Any) -> None:
        self._asked += 1
        heapq.heappush(self._queue, (time, self._asked, action, arguments))

    def run(self, seconds: float) -> None:
        """Let so much time pass; machines are ticked when they ask for it."""
        until = self.now + seconds
        while self._queue and self._queue[0][0] <= until:
            time, _, action, arguments = heapq.heappop(self._queue)
            self.now = max(self.now, time)
            action(*arguments)
        self.now = until

    def _wake_up(self, peer: PeerId) -> None:
        """Have the machine ticked when it asks for it."""
        at = max(self.machines[peer].next_at, self.now)
        if at < self._wakes.get(peer, math.inf):
            self._wakes[peer] = at
            self.at(at, self._tick, peer)

    def _tick(self, peer: PeerId) -> None:
        self._wakes.pop(peer, None)
        if peer not in self.dead:
            self.take(peer, self.machines[peer].tick(self.now))

    # -- what happens ------------------------------------------------------------------------------------------

    def begin(self, round: int, peer: PeerId | None = None) -> None:
        """The heads begin a round: the head of this row does."""
        head = self.row[0] if peer is None else peer
        value = CHAIN[round - 1]
        self.take(head, self.machines[head].begin(value, certificate(value) if value.round else None, self.now))

    def give_up(self, gone: Iterable[PeerId], at: Iterable[PeerId]) -> None:
        """The row's verdict, as it is heard."""
        for peer in at:
            self.take(peer, self.machines[peer].gave_up(gone, self.now))

    def tell(self, signer: PeerId, to: PeerId, message: RowSaid, via: PeerId | None = None) -> list[RowEffect]:
        """A message from outside. Raises RemoteError as the machine does."""
        return self.take(to, self.machines[to].receive(signer, message, self.now, via=via))

    def take(self, peer: PeerId, effects: list[RowEffect]) -> list[RowEffect]:
        for effect in effects:
            self.told.append((self.now, peer, effect))
            if isinstance(effect, Tell):
                self._send(peer, effect)
            elif isinstance(effect, Begun):
                took_s = self.trains(peer) if effect.trains else None
                if took_s is not None:
                    self.at(self.now + took_s, self._trained, peer, self.lives[peer], effect.begin.stamp)
            elif isinstance(effect, SumRow):
                self._sums(peer, effect)
        self._wake_up(peer)
        return effects

    def _send(self, peer: PeerId, tell: Tell) -> None:
        self.said.append((peer, tell.peer, tell.message))
        lost = self.rng.random() < self.loss or self.drop(peer, tell.peer, tell.message)
        if not lost and not {peer, tell.peer} & self.cut and tell.peer in self.machines:
            delay_s = DELAY_S * self.rng.uniform(0.5, 6.0 if self.loss else 1.5)
            self.at(self.now + delay_s, self._arrive, peer, tell)

    def _arrive(self, via: PeerId, tell: Tell) -> None:
        if tell.peer not in self.dead and not {via, tell.peer} & self.cut:
            machine = self.machines[tell.peer]
            message = msgspec.msgpack.decode(msgspec.msgpack.encode(tell.message), type=type(tell.message))
            self.take(tell.peer, machine.receive(tell.signer, message, self.now, via=via))

    def _trained(self, peer: PeerId, life: int, stamp: Stamp) -> None:
        machine = self.machines[peer]
        if peer not in self.dead and self.lives[peer] == life and machine.stamp == stamp:
            root = self.row.index(peer).to_bytes(32, "little") if peer in self.row else bytes(32)
            self.take(peer, machine.trained(TOKENS, root, self.now))

    def _sums(self, peer: PeerId, effect: SumRow) -> None:
        key = effect.plan.stamp, effect.attempt
        plan, gone, begun = self.sums.setdefault(key, (effect.plan, effect.gone, set()))
        assert (plan, gone) == (effect.plan, effect.gone), "two plans of one attempt"
        row = self.lists.setdefault(plan.list, self.machines[peer].list.row)
        assert row == self.machines[peer].list.row, "two lists of one plan"
        begun.add(peer)
        if begun.issuperset({*self.summing(plan, gone), self.machines[peer].head}):
            self.at(self.now + SUM_S, self._summed, key)

    def summing(self, plan: RowPlan, gone: Collection[int]) -> list[PeerId]:
        """Who sums under an attempt."""
        return [self.lists[plan.list][term.place] for term in plan.terms if term.place not in gone]

    def _summed(self, key: tuple[Stamp, int]) -> None:
        _, _, begun = self.sums[key]
        if not begun & (self.dead | self.cut):
            for peer in begun:
                self.take(peer, self.machines[peer].summed(*key, self.now))

    # -- what came of it ---------------------------------------------------------------------------------------

    def effects(self, kind: type, *, of: PeerId | None = None) -> list[Any]:
        return [effect for _, peer, effect in self.told if isinstance(effect, kind) and of in (None, peer)]

    def words(self, kind: type, *, to: PeerId | None = None) -> list[Any]:
        return [message for _, other, message in self.said if isinstance(message, kind) and to in (None, other)]

    def done(self, round: int) -> RowDone | None:
        return next((done for done in self.effects(RowDone) if done.round == round), None)
