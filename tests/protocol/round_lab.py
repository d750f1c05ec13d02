"""A virtual swarm for the round machine: nodes with a shell, links with delay and loss, and a clock that jumps.

Each node stands for what a real one does around the machine: it carries out effects in order, keeps its durable log,
answers a message of an old round with the certificate, and starts the next round when it has the new state. Training
and reducing take virtual time. A plan is reduced once all its participants are up, can reach each other and have
adopted it, and stayed so for `reduce_s`; who waits longer than `stall_s` accuses those that are not there.

The same `Ledger` as in `lab` watches every message, so each run of whole rounds is a safety test too.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from shoal.protocol.agreement import (
    Broadcast,
    Decided,
    DurableRecord,
    Mismatch,
    NeedFinals,
    NeedState,
    Persist,
    Standing,
)
from shoal.protocol.amending import History, InForce, make_amendment
from shoal.protocol.bans import Register
from shoal.protocol.certificate import genesis
from shoal.protocol.effects import CloseOff, Effect, Evicted, Repair, StartReduce
from shoal.protocol.errors import ConfigError, RemoteError
from shoal.protocol.identity import PeerId
from shoal.protocol.manifest import Manifest
from shoal.protocol.messages import (
    Certificate,
    ChunkResults,
    Message,
    OwnedRange,
    Plan,
    Ready,
    Report,
    RoundMessage,
    Target,
    Value,
    domain_hash,
)
from shoal.protocol.newcomers import Newcomers
from shoal.protocol.planning import CONTRIBUTOR, JOINER, OBSERVER, TRAINING, RoundSettings, absent_ready
from shoal.protocol.probation import Probation
from shoal.protocol.round import RoundMachine
from tests.protocol.lab import SWARM, Ledger, PaperIdentity, paper_identities

TICK_S = 0.1
LATENCY_S = (0.002, 0.03)
BREAK_SEEN_S = 0.1
"""After this a broken connection has told everyone; a hang shows only after HANG_SEEN_S."""
HANG_SEEN_S = 8.0
FETCH_S = 0.3
APPLY_S = 0.05
EARLY_LIMIT_MESSAGES = 256
RETURN_LIMIT_ROUNDS = 3

SETTINGS = RoundSettings(
    numel=10_000, chunk_values=1000, codec="fp32", grace_s=3.0, reduce_deadline_s=30.0, weight_cap=4.0
)


def chunk_result(plan: Plan, chunk: int) -> bytes:
    """The hash of a final of that plan."""
    return domain_hash("result", plan.hash, str(chunk).encode())


def report_on(plan: Plan) -> Report:
    """What every honest participant computes."""
    counted = b"".join(p.root for p in plan.participants if p.weight)
    return Report(
        term=plan.term,
        round=plan.round,
        base=plan.base,
        plan=plan.hash,
        digest=domain_hash("digest", plan.hash, counted),
        bitmaps=domain_hash("bitmaps", counted),
        tokens=sum(p.tokens for p in plan.participants),
    )


def deal_evenly(bandwidths: Sequence[tuple[int, int]], chunks: int) -> tuple[OwnedRange, ...]:
    """Equal runs of chunks to everyone, the first ones a chunk more."""
    count = len(bandwidths)
    edges = [chunks * i // count for i in range(count + 1)]
    return tuple(OwnedRange(i, edges[i], edges[i + 1]) for i in range(count) if edges[i] < edges[i + 1])


@dataclass
class Node:
    """One node: its machine and shell, and what survives a crash (log, chain, certificates, finals, contribution)."""

    identity: PaperIdentity
    chain: list[Value]
    train_s: float
    paused: bool = False
    leaving: bool = False
    wrong_state: bool = False
    wish: Target | None = None
    has_old_states: bool = True
    amends: Mapping[str, object] | None = None
    log: list[DurableRecord] = field(default_factory=list)
    certificates: dict[bytes, Certificate] = field(default_factory=dict)
    finals: dict[bytes, Report] = field(default_factory=dict)
    contribution: Ready | None = None
    machine: RoundMachine | None = None
    up: bool = False
    hung: bool = False
    life: int = 0
    alive: dict[PeerId, int] = field(default_factory=dict)
    trained_at: float = 0.0
    reducing: Plan | None = None
    reducing_since: float = 0.0
    asleep: list[Callable[[], None]] = field(default_factory=list)
    early: list[tuple[PeerId, Message]] = field(default_factory=list)
    fetching: set[bytes] = field(default_factory=set)
    evictions: list[Plan] = field(default_factory=list)
    blamed: list[str] = field(default_factory=list)
    newcomers: Newcomers = field(default_factory=Newcomers)
    probation: Probation = field(default_factory=Probation)

    @property
    def peer(self) -> PeerId:
        return self.identity.peer_id

    @property
    def height(self) -> int:
        return len(self.chain) - 1

    def running(self) -> RoundMachine:
        """The machine of a node that is up."""
        assert self.machine is not None
        return self.machine


Intercept = Callable[[int, Effect], Collection[int] | None]
"""Asked before each effect of a node: None lets it pass; for a Broadcast, a collection names the only receivers."""


class RoundLab:
    """A swarm in virtual time. `run_until` moves the clock; everything else happens at `now`."""

    def __init__(
        self,
        nodes: int,
        *,
        seed: int = 0,
        founders: int | None = None,
        train_s: float = 1.0,
        reduce_s: float = 1.0,
        stall_s: float = 4.0,
        loss: float = 0.0,
        keeps_contribution: bool = True,
        manifest: Manifest | None = None,
    ) -> None:
        identities = paper_identities(nodes)
        self.start = genesis(SWARM, [i.peer_id for i in identities[: nodes if founders is None else founders]])
        self.ledger = Ledger()
        self.ledger.follow(self.start)
        self.now = 0.0
        self.loss = loss
        self.plans: dict[bytes, Plan] = {}
        self.decided_at: dict[int, float] = {}
        self.intercept: Intercept = lambda number, effect: None
        self.rng = random.Random(seed)
        self._reduce_s = reduce_s
        self._stall_s = stall_s
        self._keeps_contribution = keeps_contribution
        self.manifest = manifest
        self._groups: list[set[int]] | None = None
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        present = dict.fromkeys(self.start.members, 1)
        self.nodes = [Node(identity, [self.start], train_s, alive=dict(present)) for identity in identities]
        for number in range(len(self.start.members)):
            self.restart(number, seen=False)
        self._see()

    # -- time --------------------------------------------------------------------------------------------

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Do `action` when `delay_s` have passed."""
        self._count += 1
        heapq.heappush(self._queue, (self.now + delay_s, self._count, action))

    def run_until(self, done: Callable[[], bool], limit_s: float) -> float:
        """Let time pass until `done`; returns the seconds it took. Fails after `limit_s`."""
        began = self.now
        while not done():
            if not self._queue or self._queue[0][0] > began + limit_s:
                raise AssertionError(f"not within {limit_s} s: {self.describe()}")
            self.now, _, action = heapq.heappop(self._queue)
            action()
        return self.now - began

    def run_for(self, seconds: float) -> None:
        """Let `seconds` pass."""
        end = self.now + seconds
        while self._queue and self._queue[0][0] <= end:
            self.now, _, action = heapq.heappop(self._queue)
            action()
        self.now = end

    def describe(self) -> str:
        """Where everyone stands, for a failed assertion."""
        lines = []
        for number, node in enumerate(self.nodes):
            machine = node.machine
            where = "-" if machine is None else f"{machine.phase} view {machine.agreement.view}"
            lines.append(f"{number}: height {node.height} up {node.up} hung {node.hung} {where}")
        return f"at {self.now:.1f} s " + "; ".join(lines)

    # -- questions ---------------------------------------------------------------------------------------

    def number(self, peer: PeerId) -> int:
        return next(i for i, node in enumerate(self.nodes) if node.peer == peer)

    def lead(self, view: int = 0) -> int:
        """The number of the lead of `view` in the highest round under way."""
        node = max((n for n in self.nodes if n.machine is not None), key=lambda n: n.height)
        return self.number(node.running().agreement.lead(view))

    def value(self, round: int) -> Value:
        """The value decided in `round`."""
        return next(node.chain[round] for node in self.nodes if node.height >= round)

    def members(self, round: int) -> set[int]:
        """The numbers of those in the electorate after `round`."""
        return {self.number(peer) for peer in self.value(round).members}

    def contributors(self, round: int) -> set[int]:
        """The numbers of those whose contribution counted in `round`."""
        plan = self.plans[self.value(round).plan]
        return {self.number(p.peer) for p in plan.participants if p.weight and p.peer not in plan.evicted}

    def running(self) -> list[Node]:
        return [node for node in self.nodes if node.up and not node.hung]

    def height_of_all(self, height: int) -> Callable[[], bool]:
        """Whether every node that runs has reached `height`."""
        return lambda: all(node.height >= height for node in self.running())

    def height_of(self, numbers: Iterable[int], height: int) -> Callable[[], bool]:
        """Whether these nodes have reached `height`."""
        nodes = [self.nodes[number] for number in numbers]
        return lambda: all(node.height >= height for node in nodes)

    def reducing(self, number: int) -> Callable[[], bool]:
        """Whether the node is reducing."""
        return lambda: self.nodes[number].reducing is not None

    def planned(self, attempt: int) -> Callable[[], bool]:
        """Whether someone has made a plan of that attempt."""
        return lambda: any(plan.attempt == attempt for plan in self.plans.values())

    def down(self, number: int) -> Callable[[], bool]:
        """Whether the node's process is gone."""
        return lambda: not self.nodes[number].up

    def reach(self, a: int, b: int) -> bool:
        return self._groups is None or any({a, b} <= group for group in self._groups)

    # -- what happens to nodes ---------------------------------------------------------------------------

    def kill(self, number: int) -> None:
        """The process is gone; its connections break."""
        node = self.nodes[number]
        node.up = node.hung = False
        node.life += 1
        node.machine = node.reducing = None
        node.asleep.clear()
        node.early.clear()
        if not self._keeps_contribution:
            node.contribution = None
        self.after(BREAK_SEEN_S, self._see)

    def restart(self, number: int, *, seen: bool = True) -> None:
        """Start the process; if `seen`, everyone notices after BREAK_SEEN_S."""
        node = self.nodes[number]
        node.up = True
        node.life += 1
        node.fetching.clear()
        node.alive = {node.peer: node.life} if seen else node.alive
        node.trained_at = self.now + node.train_s * self.rng.uniform(0.8, 1.2)
        self._enter(number)
        self._tick(number, node.life)
        if seen:
            self.after(BREAK_SEEN_S, self._see)

    def join(self, number: int) -> None:
        """A newcomer has fetched the chain and the state from the node furthest on, and starts."""
        best = max(self.running(), key=lambda node: node.height)
        node = self.nodes[number]
        node.chain, node.certificates, node.finals = list(best.chain), dict(best.certificates), dict(best.finals)
        self.restart(number)

    def hang(self, number: int) -> None:
        """As by SIGSTOP: connections stay, nothing answers."""
        self.nodes[number].hung = True
        self.after(HANG_SEEN_S, self._see)

    def resume(self, number: int) -> None:
        """It wakes, and does first what arrived meanwhile."""
        node = self.nodes[number]
        node.hung = False
        waiting, node.asleep = node.asleep, []
        for action in waiting:
            self.after(0.001, action)
        self.after(BREAK_SEEN_S, self._see)

    def split(self, *groups: Iterable[int]) -> None:
        """Only those in one group reach each other; it shows after HANG_SEEN_S."""
        self._groups = [set(group) for group in groups]
        self.after(HANG_SEEN_S, self._see)

    def heal(self) -> None:
        """Everyone reaches everyone again."""
        self._groups = None
        self.after(BREAK_SEEN_S, self._see)

    def leave(self, number: int) -> None:
        """The user asks the node to leave; it goes when it may."""
        node = self.nodes[number]
        node.leaving = True
        self._carry_out(number, node.running().leave(self.now))
        self._go_if_left(number)

    def go_back(self, number: int, round: int) -> Target:
        """The user of the node wants that, and it is said as long as a round can decide it."""
        node = self.nodes[number]
        value = next(value for value in reversed(node.chain) if value.round == round and not value.rollback)
        node.wish = Target(round, value.hash)
        return node.wish

    def in_force(self, node: Node) -> InForce | None:
        """The settings of the round after the last that the node knows."""
        if self.manifest is None:
            return None
        history = History(self.manifest, node.chain[0])
        for value in node.chain[1:]:
            history.follow(value, ends_term=bool(value.rollback))
        return history.of(node.chain[-1].next_round)

    def banned(self, node: Node) -> set[PeerId]:
        """Who takes no part in the round after the last that the node knows."""
        register = Register()
        for value in node.chain:
            register.follow(value, pardons=False)
        return set(register.banned(node.chain[-1].next_round))

    def _amend(self, number: int, machine: RoundMachine) -> None:
        """Say what the node's user would amend, until that is in force."""
        node, in_force = self.nodes[number], self.in_force(self.nodes[number])
        if node.amends is None or in_force is None or not machine.agreement.member:
            return
        try:
            amendment = make_amendment(in_force, node.amends)
        except ConfigError:
            node.amends = None
        else:
            self._carry_out(number, machine.amend(amendment, asked=True, now=self.now))

    def _wish(self, number: int, machine: RoundMachine) -> None:
        node = self.nodes[number]
        target, standing = node.wish, machine.previous.state_round
        if target is None or target.round >= standing or target.certificate not in {v.hash for v in node.chain}:
            node.wish = None
        elif node.has_old_states and machine.agreement.member:
            self._holds(number, machine, target)
            if node.machine is machine:
                self._carry_out(number, machine.consent(target, asked=True, now=self.now))

    def _holds(self, number: int, machine: RoundMachine, target: Target) -> None:
        node = self.nodes[number]
        digest = next(value.digest for value in node.chain if value.hash == target.certificate)
        if node.has_old_states and machine.agreement.digest_of(target) is None:
            self._carry_out(number, machine.holds(target, digest, self.now))

    def _need_state(self, number: int, target: Target, life: int) -> None:
        node = self.nodes[number]
        machine = node.running()

        def there() -> None:
            if node.life == life and node.machine is machine:
                self._holds(number, machine, target)

        self.after(FETCH_S, there)

    def _go_if_left(self, number: int) -> None:
        node = self.nodes[number]
        if node.machine is not None and node.machine.agreement.standing is Standing.LEFT:
            life = node.life
            self.after(1.0, lambda: self.kill(number) if node.life == life else None)

    def _see(self) -> None:
        """Everyone learns who is there; those who meet again tell each other what they stand by."""
        met: list[tuple[int, int]] = []
        for number, node in enumerate(self.nodes):
            if not node.up or node.hung:
                continue
            before = node.alive
            node.alive = {
                other.peer: other.life
                for i, other in enumerate(self.nodes)
                if other.up and not other.hung and (i == number or self.reach(i, number))
            }
            same = [peer for peer, life in before.items() if node.alive.get(peer) == life]
            for seen in (same, node.alive):  # a connection that broke and came back has broken
                if node.machine is not None:
                    self._carry_out(number, node.machine.peers_alive(seen, self.now))
            for peer in node.alive.keys() - set(same) - {node.peer}:
                met.append((number, self.number(peer)))
        for one, other in sorted({*met, *((b, a) for a, b in met)}):
            self._tell_current(one, other)
        under_way = {node.reducing.hash: node.reducing for node in self.nodes if node.reducing is not None}
        for plan in under_way.values():
            self._try_reduce(plan)

    def _tell_current(self, number: int, to: int) -> None:
        node = self.nodes[number]
        if node.machine is not None:
            for message in node.machine.current():
                self.ledger.sent(node.peer, message)
                self._send(number, to, message)

    # -- messages ----------------------------------------------------------------------------------------

    def _send(self, number: int, to: int, message: Message) -> None:
        if self.rng.random() >= self.loss:
            peer = self.nodes[number].peer
            self.after(self.rng.uniform(*LATENCY_S), lambda: self._arrive(to, number, peer, message))

    def _arrive(self, number: int, sender: int, peer: PeerId, message: Message) -> None:
        node = self.nodes[number]
        if not node.up or not self.reach(sender, number):
            return
        if node.hung:
            node.asleep.append(lambda: self._arrive(number, sender, peer, message))
            return
        node.newcomers.heard(peer, message, self.now)
        base = message.value.base if isinstance(message, Certificate) else None
        if isinstance(message, RoundMessage):
            base = message.base
        if node.machine is not None and base == node.machine.previous.hash:
            self._receive(number, peer, message)
        elif base in node.certificates:
            if not isinstance(message, Certificate):
                self._send(number, sender, node.certificates[base])
        else:
            if len(node.early) < EARLY_LIMIT_MESSAGES:
                node.early.append((peer, message))
            missed = self.nodes[sender].certificates.get(node.chain[-1].hash)
            if missed is not None:
                self._send(sender, number, missed)

    def _receive(self, number: int, peer: PeerId, message: Message) -> None:
        node = self.nodes[number]
        try:
            effects = node.running().receive(peer, message, self.now)
        except RemoteError as error:
            node.blamed.append(str(error))
            return
        self._carry_out(number, effects)

    # -- a node's shell ----------------------------------------------------------------------------------

    def _enter(self, number: int) -> None:
        """Start the round after the last certificate this node knows, or fetch the state first."""
        node = self.nodes[number]
        previous, life = node.chain[-1], node.life
        has_state = previous.round == 0 or bool(previous.rollback) or previous.plan in node.finals
        if not has_state and not self._fetch(number, previous.plan):
            self.after(FETCH_S, lambda: self._enter(number) if node.life == life and node.up else None)
            node.machine = None
            return
        state = domain_hash("wrong") if node.wrong_state else previous.digest
        recent = {peer for value in node.chain[-RETURN_LIMIT_ROUNDS:] for peer in value.members} - self.banned(node)
        node.reducing = None
        node.machine = RoundMachine(
            identity=node.identity,
            previous=previous,
            state=state,
            life=domain_hash("life", node.peer.encode(), bytes([node.life % 256])),
            settings=SETTINGS,
            deal=deal_evenly,
            returners=recent,
            in_force=self.in_force(node),
            banned=self.banned(node),
        )
        node.machine.remember(node.newcomers, node.probation)
        machine = node.machine
        self._carry_out(number, machine.restore(node.log))
        if node.life != life or node.machine is not machine:
            return  # killed between two effects, or what it had on disk decides the round
        self._carry_out(number, machine.peers_alive(node.alive, self.now))
        if node.life != life:
            return
        self._announce(number, state, is_recent=node.peer in recent)
        early, node.early = node.early, []
        for peer, message in early:
            self._arrive(number, self.number(peer), peer, message)

    def _announce(self, number: int, state: bytes, *, is_recent: bool) -> None:
        node = self.nodes[number]
        machine = node.running()
        if node.leaving:
            self._carry_out(number, machine.leave(self.now))
            self._go_if_left(number)
        if not node.up:
            return
        kept = node.contribution
        if kept is not None and kept.base == machine.previous.hash:
            self._carry_out(number, machine.ready(kept, self.now))
            return
        role = OBSERVER if node.paused else TRAINING if is_recent else JOINER
        self._carry_out(number, machine.ready(absent_ready(role, machine.previous, state), self.now))

    def _root(self, number: int, machine: RoundMachine) -> bytes:
        """What the node's contribution to this round is committed to by."""
        node = self.nodes[number]
        return domain_hash("root", node.peer.encode(), machine.previous.hash, bytes([node.life % 256]))

    def _contribute(self, number: int) -> None:
        """Training is done: announce the contribution."""
        node = self.nodes[number]
        machine = node.running()
        ready = Ready(
            term=machine.previous.next_term,
            round=machine.round,
            base=machine.previous.hash,
            role=CONTRIBUTOR,
            state=domain_hash("wrong") if node.wrong_state else machine.previous.digest,
            root=self._root(number, machine),
            squares=(),
            tokens=100 + number,
            upload=1000,
            download=1000,
            reaches=(),
        )
        node.contribution = ready
        self._carry_out(number, machine.ready(ready, self.now))

    def _tick(self, number: int, life: int) -> None:
        node = self.nodes[number]
        if node.life != life or not node.up:
            return
        if node.hung:
            node.asleep.append(lambda: self._tick(number, life))
            return
        machine = node.machine
        if machine is not None:
            self._carry_out(number, machine.tick(self.now))
        if node.machine is not None:
            self._wish(number, node.machine)
        if node.machine is not None:
            self._amend(number, node.machine)
        if node.machine is not None:
            self._work(number, node.machine)
        self.after(TICK_S, lambda: self._tick(number, life))

    def _work(self, number: int, machine: RoundMachine) -> None:
        node = self.nodes[number]
        recent = {peer for value in node.chain[-RETURN_LIMIT_ROUNDS:] for peer in value.members}
        mine = node.contribution
        done = mine is not None and mine.base == machine.previous.hash
        if not done and not node.paused and node.peer in recent and self.now >= node.trained_at:
            self._contribute(number)
        if node.machine is not None:
            self._accuse(number, node.machine)

    def _accuse(self, number: int, machine: RoundMachine) -> None:
        """Say who holds the reduction up, if it has been for too long."""
        node = self.nodes[number]
        plan = node.reducing
        if plan is not None and self.now - node.reducing_since >= self._stall_s:
            node.reducing_since = self.now
            absent = [p for p in plan.remaining() if not self._takes_part(self.number(p), number, plan)]
            if absent:
                self._carry_out(number, machine.stalled(absent, (), self.now))

    def _carry_out(self, number: int, effects: Iterable[Effect]) -> None:
        node = self.nodes[number]
        life = node.life
        for effect in effects:
            only = self.intercept(number, effect)
            if node.life != life or not node.up:
                return
            if isinstance(effect, Persist):
                node.log.append(effect.record)
            elif isinstance(effect, Broadcast):
                self._broadcast(number, effect.message, only)
            elif isinstance(effect, NeedFinals):
                self._need(number, effect.value.plan, life)
            elif isinstance(effect, NeedState):
                assert effect.value.rollback
                self._need_state(number, effect.value.rollback.target, life)
            elif isinstance(effect, StartReduce | Repair):
                node.reducing, node.reducing_since = effect.plan, self.now
                self._reduce(number, effect)
            elif isinstance(effect, CloseOff):
                self._carry_out(number, node.running().closed_off(effect, self._held(node, effect), self.now))
            elif isinstance(effect, Evicted):
                node.reducing = None
                node.evictions.append(effect.plan)
            elif isinstance(effect, Decided):
                self._decided(number, effect.certificate)
            else:
                assert not isinstance(effect, Mismatch), "all compute the same here"

    def _broadcast(self, number: int, message: Message, only: Collection[int] | None) -> None:
        node = self.nodes[number]
        self.ledger.sent(node.peer, message)
        if isinstance(message, Plan):
            self.plans[message.hash] = message
        for to in range(len(self.nodes)):
            if to != number and (only is None or to in only):
                self._send(number, to, message)

    def _decided(self, number: int, certificate: Certificate) -> None:
        node = self.nodes[number]
        value = certificate.value
        self.ledger.decided(certificate)
        self.ledger.follow(value)
        self.decided_at.setdefault(value.round, self.now)
        node.certificates[value.base] = certificate
        node.chain.append(value)
        node.reducing = None
        if node.trained_at <= self.now:
            node.trained_at = self.now + node.train_s * self.rng.uniform(0.8, 1.2)
        self._broadcast(number, certificate, None)
        life, height = node.life, node.height

        def enter() -> None:
            if node.life == life and node.height == height:
                self._enter(number)

        self.after(APPLY_S, enter)

    # -- reducing ----------------------------------------------------------------------------------------

    def _takes_part(self, number: int, seen_from: int, plan: Plan) -> bool:
        node = self.nodes[number]
        holds = plan.hash in node.finals or (node.reducing is not None and node.reducing.hash == plan.hash)
        return node.up and not node.hung and holds and self.reach(number, seen_from)

    def _held(self, node: Node, asked: CloseOff) -> tuple[ChunkResults, ...]:
        """Everything of any revision of that plan that is final here: all chunks of it, or none."""
        plans = [self.plans[h] for h in node.finals if h in self.plans]
        plan = next((p for p in reversed(plans) if p.lineage == asked.lineage), None)
        if plan is None:
            return ()
        return tuple(
            ChunkResults.of(place, {c: chunk_result(plan, c) for c in range(owned.start, owned.stop)})
            for owned in plan.owners
            for place in [owned.owner]
        )

    def _whole(self, plan: Plan) -> bool:
        numbers = [self.number(peer) for peer in plan.remaining()]
        return all(self._takes_part(n, numbers[0], plan) for n in numbers)

    def _reduce(self, number: int, effect: StartReduce | Repair) -> None:
        """The node begins a reduction, or goes on with it."""
        self._try_reduce(effect.plan)

    def _try_reduce(self, plan: Plan) -> None:
        if self._whole(plan):
            self.after(self._reduce_s, lambda: self._finish(plan))

    def _finish(self, plan: Plan) -> None:
        """The last chunk is summed, if everyone stayed."""
        if not self._whole(plan):
            return
        for peer in plan.remaining():
            number = self.number(peer)
            if plan.hash in self.nodes[number].finals:
                continue
            life = self.nodes[number].life
            self.after(self.rng.uniform(0, 0.05), partial(self._reduced, number, life, plan.hash))

    @staticmethod
    def report(plan: Plan) -> Report:
        """What every honest participant computes."""
        return report_on(plan)

    def signed_report(self, plan: Plan, machine: RoundMachine) -> Report:
        """As another hears it from the participant that runs `machine`."""
        return machine.agreement.sign_report(self.report(plan))

    def _reduced(self, number: int, life: int, plan_hash: bytes) -> None:
        node = self.nodes[number]
        plan = self.plans[plan_hash]
        if node.hung:
            node.asleep.append(lambda: self._reduced(number, life, plan_hash))
        if node.life != life or not node.up or node.hung:
            return
        node.finals[plan_hash] = self.report(plan)
        if node.reducing is not None and node.reducing.hash == plan_hash:
            node.reducing = None
        if node.machine is not None and node.machine.previous.hash == plan.base:
            self._carry_out(number, node.machine.reduced(self.report(plan), self.now))

    def _fetch(self, number: int, plan_hash: bytes) -> bool:
        """Take the finals of a plan from anyone who has them and can be reached."""
        for other, donor in enumerate(self.nodes):
            if donor.up and not donor.hung and self.reach(other, number) and plan_hash in donor.finals:
                self.nodes[number].finals[plan_hash] = donor.finals[plan_hash]
                return True
        return False

    def _need(self, number: int, plan_hash: bytes, life: int) -> None:
        node = self.nodes[number]
        if plan_hash in node.fetching:
            return
        node.fetching.add(plan_hash)

        def attempt() -> None:
            if node.life != life or not node.up or node.machine is None:
                return
            if not node.hung and (plan_hash in node.finals or self._fetch(number, plan_hash)):
                node.fetching.discard(plan_hash)
                self._reduced(number, life, plan_hash)
            else:
                self.after(FETCH_S, attempt)

        self.after(FETCH_S, attempt)
