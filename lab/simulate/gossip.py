"""Gossip among many simulated peers: pairs that swap one vector a round, and how far apart their weights stay.

What runs is a node's own: the proposal and its negotiation (`shoal.protocol.pairing`), the vector and the outer step
(`shoal.collectives.gossip`). Around them are the rings, the failure detector, the churn and the links that the
two-level sum has in `cells`. A vector takes the time of `Workload.model_bytes`.

*Disagreement.* A step is linear in everything but its encoding, so one run tells two things. Of a peer's `VALUES`
values the first half start apart, with variance 1, and learn nothing: what is left of that variance. The others start
alike and get a pseudo-gradient of their own with variance 1 in each step: what variance that keeps up.

Everyone's list of the living is the same, and once in `LISTS_S` takes up whom rows gave up or took; how the lists of
other rows travel is not simulated. Nor is what a newcomer waits for: it begins with the state of a living peer.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from shoal.collectives.codecs import F32
from shoal.collectives.gossip import GossipSettings, decode_vector, dither_of, encode_vector, outer_step
from shoal.collectives.grid import Grid
from shoal.lab.rows.rows import row_count
from shoal.lab.simulate.network import CONTROL_OVERHEAD_BYTES, ENVELOPE_BYTES, Network, Timeline
from shoal.lab.simulate.outcome import Workload
from shoal.lab.simulate.rings import RETRY_S, Rings
from shoal.lab.simulate.rows import Cell, Leaf
from shoal.lab.simulate.scenario import Scenario
from shoal.node.gossip.engine import TIMEOUT_MIN_S
from shoal.protocol.gossip_messages import GossipMessage, Offer, Taken
from shoal.protocol.identity import PeerId
from shoal.protocol.pairing import CANDIDATE_LIMIT, Alone, Effect, Fetch, PairingMachine, Phase, Say, pairs
from shoal.protocol.wire import HASH_BYTES, canonical

VALUES = 32
SETTINGS = GossipSettings(momentum=0.5, lr=0.7, gamma=0.6)
"""Settings of the strategy where a manifest says nothing."""
BYTES_PER_VALUE = 2
CHUNK_VALUES = 262_144
"""As in a manifest that says nothing: an offer has a hash of each chunk."""
FETCH_BYTES = 300
DRAWS = 2
LISTS_S = 1.0
LOOK_AFTER_S = 0.01

Vector = tuple[Offer, F32]


@dataclass(slots=True)
class Pairer:
    """A peer's exchanges: its weights and momentum, ``(VALUES,) float32`` both, and its vectors by round."""

    machine: PairingMachine
    weights: F32
    momentum: F32
    delta: F32
    vectors: dict[int, Vector] = field(default_factory=dict)


class Proposals:
    """The proposals of `pairing.candidates`, made once for everyone who sees the same members."""

    def __init__(self, swarm: bytes) -> None:
        self._swarm = swarm
        self._made: dict[tuple[int, int], dict[PeerId, list[PeerId]]] = {}
        self.epoch = 0

    def of(self, swarm: bytes, round: int, me: PeerId, others: Collection[PeerId]) -> list[PeerId]:
        """Whom to ask; of the same draws as there."""
        key = (self.epoch, round)
        if key not in self._made:
            self._made = {known: made for known, made in self._made.items() if known[0] == self.epoch}
            found: dict[PeerId, list[PeerId]] = {}
            for draw in range(DRAWS):
                for pair in pairs(swarm, round, others, draw=draw):
                    for one, other in (pair, pair[::-1]):
                        known = found.setdefault(one, [])
                        if other not in known and len(known) < CANDIDATE_LIMIT:
                            known.append(other)
            self._made[key] = found
        return self._made[key].get(me, [])


class GossipSwarm(Rings):
    """A run of gossip among the peers of a scenario, of so many rounds on average."""

    def __init__(self, scenario: Scenario, work: Workload) -> None:
        self.pairers: list[Pairer] = []
        self.network: Network
        super().__init__(scenario, row_count(scenario.peers), Timeline(), work)
        self.network = Network(self.timeline, random.Random(f"links {scenario.seed}"))
        self.grid = Grid(VALUES, VALUES)
        self.members = frozenset(self.numbers)
        self._listed = set(self.members)
        self.steps = self.exchanged = 0
        self.disagreement: dict[int, tuple[float, float]] = {}
        """By rounds: the variance left of 1, and the variance that pseudo-gradients of variance 1 keep up."""
        self._proposals = Proposals(self.swarm)
        self._noise = np.random.default_rng([scenario.seed, 7])
        for leaf in self.leaves:
            self._enter(leaf, None)

    # -- who comes and goes ------------------------------------------------------------------------------------

    def _enter(self, leaf: Leaf, state: Pairer | None) -> None:
        machine = PairingMachine(
            me=leaf.id,
            swarm=self.swarm,
            shape=("bf16", VALUES, VALUES),
            timeout_s=TIMEOUT_MIN_S,
            round=0 if state is None else state.machine.round,
            propose=self._proposals.of,
        )
        half = VALUES // 2
        drawn = np.zeros(VALUES, np.float32)
        drawn[:half] = self._noise.standard_normal(half)
        weights = drawn if state is None else state.weights.copy()
        momentum = np.zeros(VALUES, np.float32) if state is None else state.momentum.copy()
        self.pairers.append(Pairer(machine, weights, momentum, np.zeros(VALUES, np.float32)))
        self.network.add(leaf.region, leaf.upload, leaf.download)

    def _has_come(self, leaf: Leaf) -> None:
        donors = [other for other in self.cells[leaf.cell].ring if self.leaves[other].up and other != leaf.number]
        donor = donors[0]
        self._enter(leaf, self.pairers[donor])
        self.leaves[donor].bulk_bytes += 2 * self.work.model_bytes
        self._listed.add(leaf.id)
        self._begin(leaf)

    def _is_off(self, cell: Cell, accused: Leaf) -> None:
        if accused.number == cell.head and cell.ring:
            cell.head = cell.ring[0]
        self._listed.discard(accused.id)
        for leaf in self.leaves:
            if leaf.up and self.pairers[leaf.number].machine.partner == accused.id:
                self._follow(leaf, self.pairers[leaf.number].machine.tick(self._listed, self.timeline.now))

    def _has_vanished(self, leaf: Leaf) -> None:
        """Those who wait for it find out by a timeout, or when its row gives it up."""

    def _tell_lists(self) -> None:
        if self._listed != self.members:
            self.members = frozenset(self._listed)
            self._proposals.epoch += 1
        self.timeline.after(LISTS_S, self._tell_lists)

    # -- a peer's rounds ---------------------------------------------------------------------------------------

    def _begin(self, leaf: Leaf) -> None:
        machine = self.pairers[leaf.number].machine
        self._follow(leaf, machine.begin(machine.next_round))
        self.timeline.after(leaf.train_s * (0.9 + 0.2 * self._chance()), self._trained, leaf.number)

    def _trained(self, number: int) -> None:
        leaf, pairer = self.leaves[number], self.pairers[number]
        if not leaf.up:
            return
        half = VALUES // 2
        pairer.delta[half:] = self._noise.standard_normal(VALUES - half)
        round = pairer.machine.catch_up()
        vector = encode_vector(
            pairer.weights,
            pairer.delta,
            SETTINGS,
            grid=self.grid,
            codec_name="bf16",
            round=round,
            dither=dither_of(self.swarm, round, leaf.id),
        )
        decoded = decode_vector(vector.chunks, self.grid, "bf16")
        pairer.vectors = {r: v for r, v in pairer.vectors.items() if r >= round - 2} | {round: (vector.offer, decoded)}
        self._follow(leaf, pairer.machine.made(vector.offer, self.members, self.timeline.now))

    def _follow(self, leaf: Leaf, effects: Iterable[Effect]) -> None:
        pairer = self.pairers[leaf.number]
        for effect in effects:
            if isinstance(effect, Say):
                self._tell(leaf, self.leaves[self.numbers[effect.peer]], effect.message)
            elif isinstance(effect, Fetch):
                other = self.leaves[self.numbers[effect.peer]]
                self._send(leaf, other, FETCH_BYTES, self._asked, leaf.number, other.number, effect.offer)
            elif isinstance(effect, Alone):
                self._step(leaf, None)
        if pairer.machine.phase is Phase.SEEKING:
            self.timeline.after(pairer.machine.timeout_s + LOOK_AFTER_S, self._look, leaf.number)

    def _look(self, number: int) -> None:
        leaf = self.leaves[number]
        if leaf.up:
            self._follow(leaf, self.pairers[number].machine.tick(self.members, self.timeline.now))

    def _step(self, leaf: Leaf, vectors: tuple[F32, F32] | None) -> None:
        pairer = self.pairers[leaf.number]
        out = np.empty(VALUES, np.float32), np.empty(VALUES, np.float32)
        outer_step(pairer.weights, pairer.momentum, pairer.delta, SETTINGS, exchanged=vectors, out=out)
        pairer.weights, pairer.momentum = out
        before = self.rounds
        self.steps += 1
        self.exchanged += vectors is not None
        if int(self.rounds) > int(before):
            self.disagreement[int(self.rounds)] = self._apart()
        self._begin(leaf)

    @property
    def rounds(self) -> float:
        """Steps of each peer, on average."""
        return self.steps / self.scenario.peers

    def _apart(self) -> tuple[float, float]:
        living = np.array([self.pairers[leaf.number].weights for leaf in self.leaves if leaf.up], np.float64)
        by_value = living.var(axis=0)
        return float(by_value[: VALUES // 2].mean()), float(by_value[VALUES // 2 :].mean())

    # -- messages ----------------------------------------------------------------------------------------------

    def _heard(self, leaf: Leaf, sender: Leaf, what: str, rest: tuple[int, ...]) -> None:
        raise AssertionError(f"nobody says {what} here")

    @cached_property
    def _offer_bytes(self) -> int:
        """Of an offer of a whole model: a hash of each of its chunks."""
        values = max(1, int(self.work.model_bytes) // BYTES_PER_VALUE)
        hashes = bytes(HASH_BYTES * -(-values // CHUNK_VALUES))
        offer = Offer(round=1, codec="bf16", numel=values, chunk_values=CHUNK_VALUES, hashes=hashes)
        return len(canonical(offer)) + ENVELOPE_BYTES

    def _tell(self, leaf: Leaf, other: Leaf, message: GossipMessage) -> None:
        size = self._offer_bytes if isinstance(message, Offer) else len(canonical(message)) + ENVELOPE_BYTES
        self._send(leaf, other, size, self._told, leaf.number, other.number, message)

    def _send(self, leaf: Leaf, other: Leaf, size: int, action: object, *rest: object) -> None:
        leaf.control_bytes += size + CONTROL_OVERHEAD_BYTES
        delay = self._delay_s(leaf, other)
        while self._chance() < self.scenario.loss:
            delay += RETRY_S
        self.timeline.after(delay, action, *rest)  # type: ignore[arg-type]

    def _told(self, sender: int, to: int, message: GossipMessage) -> None:
        leaf = self.leaves[to]
        self.timeline.note(8, sender, to, message.round if isinstance(message, Offer | Taken) else 0)
        if leaf.up:
            machine = self.pairers[to].machine
            self._follow(leaf, machine.receive(self.leaves[sender].id, message, self.timeline.now))

    def _asked(self, asking: int, asked: int, offer: Offer) -> None:
        leaf = self.leaves[asked]
        vector = self.pairers[asked].vectors.get(offer.round)
        if leaf.up and vector is not None and vector[0].root == offer.root:
            leaf.bulk_bytes += self.work.model_bytes
            delay = self.network.payload_delay_s(asked, asking, self.work.model_bytes)
            self.timeline.after(delay, self._fetched, asking, asked, vector)

    def _fetched(self, number: int, other: int, vector: Vector) -> None:
        leaf, pairer = self.leaves[number], self.pairers[number]
        machine, sender = pairer.machine, self.leaves[other]
        if not leaf.up or not sender.up or machine.phase is not Phase.PAIRED or machine.partner != sender.id:
            return
        self._follow(leaf, machine.fetched(sender.id))
        self._tell(leaf, sender, Taken(round=vector[0].round))
        self._step(leaf, (pairer.vectors[machine.round][1], vector[1]))

    # -- the run -----------------------------------------------------------------------------------------------

    def run(self, limit_s: float = 10_000.0) -> None:
        """Let it happen, until there were as many steps as `rounds` of everyone."""
        for leaf in self.leaves:
            self._begin(leaf)
        self._tell_lists()
        self.begin_churn()
        wanted = self.scenario.rounds * self.scenario.peers
        self.timeline.run(limit_s, lambda: self.steps >= wanted)
