"""The end of a walk with liars: the network is calm, what is said is heard, nobody dies, and the liars go on."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping, Sequence

from shoal.lab.explore.liar import Liar, one_of
from shoal.lab.explore.member import Members, copy_of
from shoal.lab.explore.scope import Scope
from shoal.protocol.agreement import (
    Agreement,
    AgreementEffect,
    Broadcast,
    Decided,
    Mismatch,
    NeedFinals,
    Persist,
)
from shoal.protocol.errors import LocalError, RemoteError
from shoal.protocol.messages import Message

LIES_PER_MEMBER = 3
"""Messages of a liar that each member hears in each view."""


class Calm:
    """Goes on with copies of the honest members' machines."""

    def __init__(
        self,
        scope: Scope,
        members: Members,
        liars: Sequence[Liar],
        machines: Mapping[int, Agreement],
        rng: random.Random,
    ) -> None:
        self.path: list[str] = []
        self._scope, self._members, self._liars, self._rng = scope, members, liars, rng
        self._machines = {position: copy_of(machine) for position, machine in machines.items()}
        self._said: dict[int, set[Message]] = {position: set() for position in self._machines}
        self._waiting: deque[tuple[int, Message]] = deque()
        self._blamed: str | None = None

    def decides(self) -> str | None:
        """Return why nothing is decided by the first view that an honest member leads; None if something is.

        Returns None too if the honest that have not left are no quorum.
        """
        up = [i for i, machine in self._machines.items() if machine.votes and machine.standing.value != "left"]
        peers = [self._members.peers[i] for i in up]
        if not self._members.outweigh(peers, ()):
            return None
        for position, machine in self._machines.items():
            for message in machine.current():
                self._tell(position, message)
            self._act(position, machine.resume())
        self._deliver()
        view = 1 + max(machine.view for machine in self._machines.values())
        while self._undecided():
            self.path.append(f"and the others calm down, in view {view}")
            for position in up:
                self._act(position, self._machines[position].move_to(view))
                self._lie(position)
            self._deliver()
            self._lead(view)
            self._deliver()
            if view % self._scope.members in up and self._undecided():
                return self._blamed or "no decision"
            view += 1
        return self._blamed

    def _undecided(self) -> bool:
        return all(machine.certificate is None for machine in self._machines.values())

    def _lead(self, view: int) -> None:
        position = view % self._scope.members
        machine = self._machines.get(position)
        if machine is not None and machine.free_to_plan:
            value = self._members.values.fresh(self._members.peers[position], 0, machine.leaves)
            self._act(position, machine.propose(value))

    def _lie(self, receiver: int) -> None:
        said = [frozenset(self._said.get(i, ())) for i in range(self._scope.everyone)]
        for liar in self._liars:
            alphabet = liar.alphabet(said)
            for _ in range(LIES_PER_MEMBER):
                self._hear(receiver, liar.position, one_of(alphabet, self._rng))

    def _deliver(self) -> None:
        while self._waiting:
            sender, message = self._waiting.popleft()
            for receiver in self._machines:
                if receiver != sender:
                    self._hear(receiver, sender, message)

    def _hear(self, receiver: int, sender: int, message: Message) -> None:
        try:
            self._act(receiver, self._machines[receiver].receive(self._members.peers[sender], message))
        except RemoteError as error:
            if sender not in self._scope.lying:
                self.path.append(f"member {receiver} blames member {sender}: {error}")
                self._blamed = "an honest member was blamed"

    def _act(self, position: int, effects: list[AgreementEffect]) -> None:
        for effect in effects:
            if isinstance(effect, Broadcast):
                self._tell(position, effect.message)
            elif isinstance(effect, NeedFinals):
                self._act(position, self._machines[position].computed(self._members.values.report(effect.value)))
            elif not isinstance(effect, Persist | Decided | Mismatch):
                raise LocalError(f"nothing here does {type(effect).__name__}")

    def _tell(self, position: int, message: Message) -> None:
        self._said[position].add(message)
        self._waiting.append((position, message))
