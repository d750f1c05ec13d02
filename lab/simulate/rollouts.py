"""Simulated swarms that share rollouts, judged: the machines of the exchange in virtual time over a modelled network.

    agent ─► announcements over gossip, which loses some ─► offers ─► chosen, pulled, judged, paid for ─► next round
                                                       └─► what is missing is asked for

What must hold, beside what every simulation promises of queues:

    the reference        what an agent trains on is what its origin made, and was pulled under its own name
    no lost announcement when `CALM_S` have passed since the last fault, every live agent has heard every announcement
                         that a live one made in this life up to `SETTLE_S` ago
    bytes                an agent receives no more than the groups it trains on and 5 %; what liars sent, and what came
                         in part from servers that were struck, is counted beside that
    one pull             nobody pulls a group twice
    left alone           whoever failed as a server is not turned to for `pause_s`
    bounded queues       offers, holders, history, questions and pulls stay within their limits
    no wait too long     a round's pulls end at their deadline

The first that does not hold raises `Violation`. Faults are those of `scenario`; "held", "group" and "hint" are the lies
that concern this exchange: to serve what one does not have, to serve other bytes, to announce other rewards.
"""

from __future__ import annotations

import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shoal.lab.simulate.agents import ENDINGS, LIMITS, Agent, Question, Reply
from shoal.lab.simulate.judge import Violation
from shoal.lab.simulate.network import Network, Timeline, Wall
from shoal.lab.simulate.outcome import Components, Outcome
from shoal.lab.simulate.scenario import Fault, Scenario
from shoal.lab.simulate.standins import KeyRing
from shoal.node.sapo.groups import JudgedGroup
from shoal.node.sapo.tasks import TaskChoice, TaskSource
from shoal.protocol.group_pull import Ask
from shoal.protocol.offer_book import HOLDER_LIMIT, ORIGIN_LIMIT, Offer
from shoal.protocol.offer_catch_up import HISTORY_LIMIT
from shoal.protocol.rollouts import digest_of
from shoal.protocol.wire import SwarmId
from shoal.swarm.rollouts import OUTBOX_LIMIT_ITEMS

SETTLE_S = 40.0
"""A full turn of asking everybody, and what an origin waits before it answers."""
CALM_S = 60.0
"""After the last fault the run goes on for so long."""
LOST_AFTER_S = 10.0
"""A connection to a machine that is gone without a word ends after so long."""
ALLOWANCE = 0.05
TRAIN_S = (4.0, 8.0)
CHECK_S = 1.0
SLACK_S = 1.0
LIMIT_S = 600.0

Life = tuple[int, int]
"""An agent by number, and its life."""


@dataclass
class ExchangeJudge:
    """Knows what was announced, heard, asked and received."""

    swarm: RolloutSwarm
    _made: dict[Life, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))
    _texts: dict[tuple[str, int, int], tuple[str, ...]] = field(default_factory=dict)
    _false: set[bytes] = field(default_factory=set)
    _heard: dict[Life, set[tuple[int, int, int]]] = field(default_factory=lambda: defaultdict(set))
    _failed_at: dict[tuple[Life, int], float] = field(default_factory=dict)
    _pulled: dict[int, set[bytes]] = field(default_factory=lambda: defaultdict(set))
    _excused: Counter[Life] = field(default_factory=Counter)
    trained_groups: int = 0

    @property
    def _now(self) -> float:
        return self.swarm.timeline.now

    def announced(self, agent: Agent, sequence: int, digest: bytes, texts: Sequence[str], index: int) -> None:
        """An agent announces a group."""
        self._made[agent.number, agent.life][sequence] = self._now
        self._texts[agent.id, agent.round, index] = tuple(texts)
        if "hint" in agent.lies:
            self._false.add(digest)

    def heard(self, agent: Agent, sender: int, offer: Offer) -> None:
        """An agent took up an offer of `sender`'s."""
        self._heard[agent.number, agent.life].add((sender, offer.boot, offer.sequence))

    def asks(self, agent: Agent, ask: Ask) -> None:
        """An agent asks a server for a part of a group."""
        server = self.swarm.numbers[ask.peer]
        failed_at = self._failed_at.get(((agent.number, agent.life), server), float("-inf"))
        if not ask.request.offset and self._now < failed_at + LIMITS.pause_s:
            raise Violation("left alone", f"agent {agent.number} turns to agent {server}, who has just failed")

    def failed(self, agent: Agent, server: int) -> None:
        """A server did not answer, or sent wrong bytes."""
        self._failed_at[(agent.number, agent.life), server] = self._now

    def lost(self, agent: Agent, server: int, size: int) -> None:
        """So many bytes of a group came from `server`, and the group did not."""
        if self.swarm.is_struck(server) or self.swarm.is_struck(agent.number):
            self._excused[agent.number, agent.life] += size

    def pulled(self, agent: Agent, offer: Offer, data: bytes) -> None:
        """A group is here."""
        if digest_of(data) != offer.digest:
            raise Violation("the reference", f"agent {agent.number} takes other bytes for a group")
        if offer.digest in self._pulled[agent.number]:
            raise Violation("one pull", f"agent {agent.number} pulled a group again")
        self._pulled[agent.number].add(offer.digest)
        if offer.digest in self._false:
            self._excused[agent.number, agent.life] += len(data)

    def trained(self, agent: Agent, groups: Sequence[JudgedGroup]) -> None:
        """A round is over: an agent learns from these groups of others."""
        for group in groups:
            if self._texts.get((str(group.origin), group.round, group.task.ref.index)) != group.texts:
                raise Violation("the reference", f"agent {agent.number} trains on what nobody made")
        self.trained_groups += len(groups)
        trained, excused = agent.intake.budget.trained_bytes, self._excused[agent.number, agent.life]
        if agent.tally.fetched_bytes > (1 + ALLOWANCE) * trained + excused:
            received = f"{agent.tally.fetched_bytes} bytes, trained on {trained}, {excused} excused"
            raise Violation("bytes", f"agent {agent.number} received {received}")

    def check(self, agent: Agent) -> None:
        """Raises Violation for what has grown beyond its limit, or waits for too long."""
        holders = max(map(len, agent.book._holders.values()), default=0)
        pulls = 0 if agent.fetching is None else len(agent.fetching.pulls)
        sizes = {
            "offers": (len(agent.book), LIMITS.book.offers),
            "origins": (len(agent.book._origins), ORIGIN_LIMIT),
            "holders of a group": (holders, HOLDER_LIMIT),
            "announcements kept": (len(agent.catch_up), HISTORY_LIMIT),
            "announcements to be published": (len(agent.outbox), OUTBOX_LIMIT_ITEMS),
            "pulls": (pulls, LIMITS.fetches),
            "questions": (len(agent.asked), LIMITS.fetches + len(self.swarm.agents)),
        }
        for name, (found, limit) in sizes.items():
            if found > limit:
                raise Violation("bounded queues", f"{found} {name} at agent {agent.number}; the limit is {limit}")
        late_s = 0.0 if agent.fetching is None else self._now - max(agent.fetching.ends_at, agent.disturbed_at)
        if late_s > SLACK_S:
            raise Violation("no wait too long", f"agent {agent.number} pulls for {late_s:.1f} s beyond its deadline")

    def check_end(self) -> None:
        """Raises Violation for an announcement that is lost."""
        live = [agent for agent in self.swarm.agents if agent.running]
        for agent in live:
            heard = self._heard[agent.number, agent.life]
            for origin in live:
                made = self._made[origin.number, origin.life] if origin is not agent else {}
                old = [sequence for sequence, at in made.items() if at <= self._now - SETTLE_S]
                lost = [sequence for sequence in old if (origin.number, origin.life, sequence) not in heard]
                if lost:
                    told = f"{len(lost)} of {len(old)} of agent {origin.number}'s"
                    raise Violation("no lost announcement", f"agent {agent.number} never heard {told}")


class RolloutSwarm:
    """A run of one scenario of agents that share rollouts; `rounds` is how many each makes at least."""

    def __init__(self, scenario: Scenario, components: Components | None = None) -> None:
        self.scenario = scenario
        self.components = components or Components()
        self.timeline = Timeline()
        self.network = Network(self.timeline, random.Random(f"network {scenario.seed}"), loss=scenario.loss)
        self.rng = random.Random(f"agents {scenario.seed}")
        self.keys = KeyRing(scenario.seed, real=scenario.real_keys)
        self.swarm_id = SwarmId(digest_of(f"rollouts {scenario.seed}".encode()))
        self.source = TaskSource([TaskChoice(family=ENDINGS, config={})])
        self.agents: list[Agent] = []
        self.numbers: dict[str, int] = {}
        self.judge = ExchangeJudge(self)
        self.refusals: Counter[str] = Counter()
        for _ in range(scenario.peers):
            self._add()

    def _add(self) -> Agent:
        number = len(self.agents)
        self.network.settle(self.rng)
        agent = Agent(self, number, self.keys.identity(number), self.rng.uniform(*TRAIN_S))
        self.agents.append(agent)
        self.numbers[agent.id] = number
        return agent

    # -- the network -------------------------------------------------------------------------------------------

    def connected(self, one: int, other: int) -> bool:
        """True if `one` holds a connection to `other`: a wall or a machine that vanished is not noticed at once."""
        there = self.agents[other]
        lately = not there.gone and there.vanished and self.timeline.now - there.disturbed_at < LOST_AFTER_S
        return one != other and (there.up or lately)

    def is_struck(self, number: int) -> bool:
        """True if something befalls an agent, or lately did."""
        agent = self.agents[number]
        slow = number in self.network.slowed or number in self.network.lossy
        lately = self.timeline.now - max(agent.disturbed_at, self.disturbed_at) < LIMITS.group_deadline_s
        return bool(agent.lies) or not agent.running or slow or bool(self.network.walls) or lately

    disturbed_at = float("-inf")

    def publish(self, agent: Agent, batch: bytes) -> None:
        """Gossip: to each of the others, or not."""
        for other in self.agents:
            if self.connected(agent.number, other.number):
                delay = self.network.message_delay_s(agent.number, other.number, len(batch))
                if delay < 1e9:
                    self.timeline.after(delay, self._arrive, agent.number, other.number, other.life, batch)

    def call(self, agent: Agent, other: int, message: Question | Reply, size: int) -> None:
        """A short message over a stream."""
        delay = self.network.call_delay_s(agent.number, other, size)
        self.timeline.after(delay, self._arrive, agent.number, other, self.agents[other].life, message)

    def ship(self, agent: Agent, other: int, message: Reply, size: int) -> None:
        """A long one."""
        delay = self.network.payload_delay_s(agent.number, other, size)
        self.timeline.after(delay, self._arrive, agent.number, other, self.agents[other].life, message)

    def _arrive(self, sender: int, to: int, life: int, message: bytes | Question | Reply) -> None:
        agent = self.agents[to]
        kind, mark = (1, len(message)) if isinstance(message, bytes) else (2, message.number)
        self.timeline.note(kind, sender, to, mark)
        if not agent.up or agent.life != life or not self.network.passes(sender, to):
            return
        if agent.hung:
            if not isinstance(message, bytes):
                self.timeline.after(0.2, self._arrive, sender, to, life, message)
        elif isinstance(message, bytes):
            agent.hear(sender, message)
        elif isinstance(message, Question):
            agent.answer(sender, message)
        else:
            agent.reply(sender, message)

    def refused(self, reason: str) -> None:
        """An announcement was refused."""
        self.refusals[reason] += 1

    # -- faults ------------------------------------------------------------------------------------------------

    def _strike(self, fault: Fault) -> None:
        self.disturbed_at = self.timeline.now
        if fault.kind == "partition":
            walls = [self.network.part(fault.groups[0], [i for group in fault.groups[1:] for i in group])]
            if not fault.one_way:
                walls.append(self.network.part([i for group in fault.groups[1:] for i in group], fault.groups[0]))
            self._until_over(fault, self._heal, walls)
        elif fault.kind == "join":
            self._add().start()
        elif fault.peer is not None and fault.peer < len(self.agents) and not self.agents[fault.peer].gone:
            self._strike_agent(fault, self.agents[fault.peer])

    def _strike_agent(self, fault: Fault, agent: Agent) -> None:
        agent.disturbed()
        if fault.kind in ("kill", "crash", "leave"):
            if agent.up:
                agent.stop()
            agent.vanished, agent.gone = fault.kind == "crash", fault.kind == "leave"
            if not agent.gone:
                self._until_over(fault, self._restart, agent)
        elif fault.kind == "stop":
            agent.hung = agent.up
            self._until_over(fault, self._resume, agent, agent.life)
        elif fault.kind == "slow":
            self.network.slowed[agent.number] = fault.factor
            self._until_over(fault, self.network.slowed.pop, agent.number, None)
        elif fault.kind == "lossy":
            self.network.lossy[agent.number] = fault.share
            self._until_over(fault, self.network.lossy.pop, agent.number, None)
        elif fault.lie is not None:
            agent.lies.add(fault.lie)
            self._until_over(fault, agent.lies.discard, fault.lie)

    def _until_over(self, fault: Fault, undo: Callable[..., object], *arguments: object) -> None:
        if fault.duration_s is not None:
            self.timeline.after(fault.duration_s, self._undo, undo, arguments)

    def _undo(self, undo: Callable[..., object], arguments: tuple[object, ...]) -> None:
        self.disturbed_at = self.timeline.now
        undo(*arguments)

    def _heal(self, walls: Sequence[Wall]) -> None:
        self.network.walls = [wall for wall in self.network.walls if not any(wall is gone for gone in walls)]

    def _restart(self, agent: Agent) -> None:
        if not agent.up and not agent.gone:
            agent.disturbed()
            agent.start()

    def _resume(self, agent: Agent, life: int) -> None:
        if agent.life == life:
            agent.disturbed()
            agent.hung = False

    # -- the run -----------------------------------------------------------------------------------------------

    def _check(self) -> None:
        for agent in self.agents:
            if agent.running:
                self.judge.check(agent)
        self.timeline.after(CHECK_S, self._check)

    @property
    def rounds_done(self) -> int:
        """Number of rounds that the slowest running agent has made."""
        return min((agent.rounds_done for agent in self.agents if agent.running), default=0)

    def run(self) -> Outcome:
        """Let it happen until everyone has made its rounds and the announcements have settled."""
        began = time.perf_counter()
        violation = detail = ""
        with self.keys.in_use():
            try:
                self._run()
            except Violation as broken:
                violation, detail = broken.kind, broken.detail
        return self._outcome(time.perf_counter() - began, violation, detail)

    def _run(self) -> None:
        for agent in self.agents:
            agent.start()
        for fault in self.scenario.fault:
            self.timeline.at(fault.at_s, self._strike, fault)
        self._check()
        quiet_at, rounds = self.scenario.quiet_at_s, self.scenario.rounds
        self.timeline.run(quiet_at + CALM_S, lambda: False)
        live = any(agent.running for agent in self.agents)
        self.timeline.run(quiet_at + LIMIT_S, lambda: not live or self.rounds_done >= rounds)
        if live and self.rounds_done < rounds:
            raise Violation("progress", f"an agent made {self.rounds_done} rounds in {LIMIT_S} s")
        self.judge.check_end()

    def _outcome(self, wall_s: float, violation: str, detail: str) -> Outcome:
        now = max(self.timeline.now, 1e-9)
        control = sum(place.control_bytes for place in self.network.places)
        return Outcome(
            peers=self.scenario.peers,
            rounds_certified=min(self.rounds_done, self.scenario.rounds) if any(a.running for a in self.agents) else 0,
            forks=0,
            wrong_values=int(violation == "the reference"),
            stalled_rounds=0,
            detect_s_p99=0.0,
            control_bytes_per_peer_per_s=round(control / len(self.agents) / now, 1),
            events=self.timeline.events,
            wall_s=round(wall_s, 3),
            trace_digest=self.timeline.digest(),
            virtual_s=round(now, 3),
            deaths_found=0,
            false_evictions=0,
            blamed=sum(self.refusals.values()),
            groups_trained=self.judge.trained_groups,
            violation=violation,
            detail=detail,
        )
