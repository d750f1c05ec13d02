"""The protocol's machines in the middle of their work, fed with every message that a peer can send them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from shoal.collectives.partition import deal
from shoal.protocol import gossip_messages, peering, wire
from shoal.protocol.agreement import Broadcast
from shoal.protocol.effects import StartReduce
from shoal.protocol.errors import RemoteError
from shoal.protocol.gossip_messages import Offer
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Message, Ready, Report, RoundMessage
from shoal.protocol.pairing import PairingMachine
from shoal.protocol.planning import RoundSettings
from shoal.protocol.round import RoundMachine
from tests.fuzz.samples import identity
from tests.fuzz.targets import ME, PEER, START, SWARM, Target, examples
from tests.round_messages import ready_with

PEERS = tuple(identity(n).peer_id for n in range(4))
NUMEL, CHUNK_VALUES = 10_000, 4096
SETTINGS = RoundSettings(
    numel=NUMEL, chunk_values=CHUNK_VALUES, codec="int8", grace_s=3.0, reduce_deadline_s=30.0, weight_cap=4.0
)
REBUILT_EVERY = 64
"""A machine that was fed so much is replaced by a fresh one: most of what is found is found near the beginning."""


class Renewed:
    """Makes something anew after some uses."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._uses = 0
        self._made: Any = None

    def get(self) -> Any:
        if self._uses % REBUILT_EVERY == 0:
            self._made = self._make()
        self._uses += 1
        return self._made


class Round:
    """Four round machines that got as far as reducing; what they said is in `said`, by whom."""

    def __init__(self) -> None:
        self.said: list[tuple[PeerId, Message]] = []
        self.machines = {
            peer: RoundMachine(
                identity=identity(n),
                previous=START,
                state=bytes(32),
                life=bytes([n]) * 32,
                settings=SETTINGS,
                deal=deal,
            )
            for n, peer in enumerate(PEERS)
        }
        self.reducing: set[PeerId] = set()
        for n, (peer, machine) in enumerate(self.machines.items()):
            self._take(peer, machine.peers_alive(PEERS, 0.0))
            self._take(peer, machine.ready(self._ready(n), 0.1))
        for _ in range(6):
            waiting, self.unsent = list(self.unsent), []
            for sender, message in waiting:
                for peer, machine in self.machines.items():
                    if peer != sender:
                        self._take(peer, machine.receive(sender, message, 0.2))

    unsent: list[tuple[PeerId, Message]]

    def _ready(self, n: int) -> Ready:
        chunks = -(-NUMEL // CHUNK_VALUES)
        return ready_with(START, bytes([n]) * 32, state=bytes(32), squares=(1.0,) * chunks, tokens=100, reaches=PEERS)

    def _take(self, peer: PeerId, effects: list[Any]) -> None:
        for effect in effects:
            if isinstance(effect, Broadcast):
                self.said.append((peer, effect.message))
                self.__dict__.setdefault("unsent", []).append((peer, effect.message))
            elif isinstance(effect, StartReduce):
                self.reducing.add(peer)

    def certify(self, peer: PeerId) -> Report:
        """One node's report of the plan that it follows."""
        plan = self.machines[peer].plan
        assert plan is not None
        report = Report(
            term=START.next_term,
            round=1,
            base=START.hash,
            plan=plan.hash,
            digest=bytes([7]) * 32,
            bitmaps=bytes([8]) * 32,
            tokens=400,
        )
        self._take(peer, self.machines[peer].reduced(report, 0.3))
        return report


def round_targets(rng: Any) -> Iterator[Target]:
    """The round machine in the middle of a round: every message of a round from everybody in turn."""
    first = Round()
    assert first.reducing == set(PEERS)
    for peer in PEERS:
        first.certify(peer)
    head = {"term": START.next_term, "round": 1, "base": START.hash}
    kinds = [cls for cls in _round_messages() if cls is not RoundMessage]
    made: list[Message] = [message for _, message in first.said]
    for cls in kinds:
        made += [msgspec.structs.replace(one, **head) for one in examples(cls, rng, 4)]
    samples = tuple(dict.fromkeys(wire.canonical(one) for one in made))

    for reporting in (False, True):

        def begun(reporting: bool = reporting) -> RoundMachine:
            round = Round()
            if reporting:
                for peer in PEERS:
                    round.certify(peer)
            return round.machines[ME]

        current = Renewed(begun)

        def receive(data: bytes, current: Renewed = current) -> None:
            message: Any = wire.decode(data, peering.SwarmMessage, peer=PEER)  # type: ignore[arg-type]
            machine, faults = current.get(), []
            for sender in PEERS[1:]:
                try:
                    for effect in machine.receive(sender, message, 1.0):
                        if isinstance(effect, Broadcast):
                            wire.canonical(effect.message)
                except RemoteError as fault:
                    faults.append(fault)
            if faults:
                raise faults[0]

        yield Target(f"round {'voting' if reporting else 'reducing'}", samples, receive)

    def pairing() -> PairingMachine:
        machine = PairingMachine(me=ME, swarm=SWARM, shape=("int8", NUMEL, CHUNK_VALUES), timeout_s=5.0)
        machine.begin(1)
        return machine

    paired = Renewed(pairing)

    def offered(data: bytes) -> None:
        message: Any = wire.decode(data, peering.LinkMessage, peer=PEER)  # type: ignore[arg-type]
        if not isinstance(message, peering.SwarmMessage):
            paired.get().receive(PEER, message, 1.0)

    said = [*examples(gossip_messages.GossipMessage, rng, 20), *examples(Offer, rng, 4)]
    words = [wire.canonical(one) for one in said]
    yield Target("pairing", tuple(words), offered)


def _round_messages() -> list[type[RoundMessage]]:
    found = [cls for cls in RoundMessage.__subclasses__() if cls.__module__.startswith("shoal.")]
    return sorted(found, key=lambda cls: cls.__qualname__)
