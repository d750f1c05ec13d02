"""The deterministic simulator: a swarm of the project's own machines in virtual time over a modelled network.

    scenario ─► peers (disk, watch, course) ─► messages and payloads over `Network`, in the order of `Timeline`
                                            └─► everything that is said is judged by `Judge`

What runs is what nodes run, unchanged: the failure detector, the member with all that it decides in and between its
rounds, its chain, its logs and the files of its work with what reads them again, what it contributes and carries on,
the reduction and its pace. What is modelled is around them: links and their loss, bandwidth, training as a time, when
a write is done, catching up. A scenario and its seed give the same events in the same order, and so the same
`trace_digest`; no clock is read but for `wall_s`.

Not simulated: bans, forwarding through a third peer, and rollouts, which have no common rounds.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, get_args

import msgspec
import numpy as np
from blake3 import blake3

from shoal.collectives.codecs import F32
from shoal.collectives.fragments import Fragments
from shoal.collectives.grid import Grid
from shoal.lab.simulate.calm import Calm
from shoal.lab.simulate.disk import Disks, check_written, unheard
from shoal.lab.simulate.judge import LOSS_BORNE_SHARE, PROGRESS_S, Violation
from shoal.lab.simulate.network import ENVELOPE_BYTES, IN_FLIGHT_S, Network, Timeline, Wall
from shoal.lab.simulate.outcome import Components, Outcome
from shoal.lab.simulate.peer import SimulatedPeer
from shoal.lab.simulate.residuals import Residuals
from shoal.lab.simulate.scenario import FLAT_LIMIT_PEERS, PHASE_LIMIT_S, Fault, Kind, Scenario
from shoal.lab.simulate.standins import KeyRing
from shoal.lab.simulate.states import chunks_of
from shoal.lab.simulate.talk import LaneMessage, with_flipped_digest
from shoal.lab.simulate.undo import Undo
from shoal.lab.simulate.watch import Hello, Reset
from shoal.protocol.certificate import genesis
from shoal.protocol.durable import DurableRecord
from shoal.protocol.identity import PeerId
from shoal.protocol.lateness import HALF_LIFE_S, LATE_LIMIT_S
from shoal.protocol.manifest import Manifest, validate_manifest
from shoal.protocol.membership import TICK_S, State, detection_bound_s
from shoal.protocol.messages import Entry, Message, Ready, Report, Value, domain_hash
from shoal.protocol.planning import RoundSettings
from shoal.protocol.seats import are_few, counted_in, longest_wait
from shoal.protocol.wire import canonical

SIMULATED_TICK_S = 0.2
CHUNK_VALUES = 4
SPARSE = "topk2-3"
"""Of what few values a chunk has."""
MIXING = 0.5
"""Share of its own values that a peer keeps where rounds are of fragments, and it trains on beside them."""
STALENESS_ROUNDS = 3
BACK_VALUES = 4
"""Who lives, and was taken for dead since its signature was lost, stands in the line again after so many values."""
ROUND_LIMIT_S = 60.0
"""Beyond `PROGRESS_S`, each round that is still to come may take so long when nothing is wrong any more."""
AUTHORITY = 1_000_000
"""The number of the key that may rebase."""
REBASES_LIMIT = 3
UNDER_WAY_LIMIT = 8192
"""Messages and timers of one peer."""
LATE_REMEMBERED_S = 4 * HALF_LIFE_S
"""So long after it woke, how late a peer answered then is remembered by those who give it up."""
TICKS_LATE_S = 4 * (SIMULATED_TICK_S - TICK_S)
"""Beyond the detector's bound, since the simulator's ticks are longer."""


def settled_s(peers: int) -> float:
    """Seconds after a fault from which on nobody has a reason any more to give one of so many living peers up.

    Who is given up was silent for no longer than the detector's bound, and what it said before had `IN_FLIGHT_S` to
    arrive. That holds of one that was slow as well: control messages wait behind nothing, so once it is quick again it
    is heard. A margin of 2 s is for what is sent in between.
    """
    return IN_FLIGHT_S + detection_bound_s(peers, calm=True) + TICKS_LATE_S + 2.0


class NoQuorum(Exception):
    """Members left or died for good, and the rest cannot certify without them: that is for a rebase to mend.

    A promise to leave counts where everyone who could certify has heard it, and only there: whoever knows nothing of it
    may hold the leaver for one that was merely cut off, and signs elsewhere. A promise that was lost is no violation.
    """


@dataclass
class Simulation:
    """A run of one scenario. `run` gives its outcome; everything is public for tests to look at."""

    scenario: Scenario
    components: Components = field(default_factory=Components)

    def __post_init__(self) -> None:
        scenario = self.scenario
        self.tick_s = SIMULATED_TICK_S
        self.rng = random.Random(f"swarm {scenario.seed}")
        self._churn = random.Random(f"churn {scenario.seed}")
        self.died = self.departed = 0
        self.timeline = Timeline()
        self.network = Network(self.timeline, random.Random(f"network {scenario.seed}"), loss=scenario.loss)
        self.disks = Disks()
        self.keys = KeyRing(scenario.seed, real=scenario.real_keys)
        self.peers: list[SimulatedPeer] = []
        self.numbers: dict[str, int] = {}
        work = self.components.work
        self.chunk_bytes = work.model_bytes / work.chunks
        self.state_bytes = work.state_bytes
        self.grid = Grid(work.chunks * CHUNK_VALUES - 1, CHUNK_VALUES)
        self.fragments = Fragments(self.grid, scenario.fragments)
        few = are_few(scenario.seats)
        everyone = scenario.peers + sum(fault.kind == "join" for fault in scenario.fault)
        self.staleness_rounds = longest_wait(everyone, scenario.seats) if few else STALENESS_ROUNDS
        self.error_feedback = 0.95 if scenario.sparse else 1.0
        self.mixing = MIXING if scenario.fragments > 1 else None
        self.settings = RoundSettings(
            numel=self.grid.numel,
            chunk_values=CHUNK_VALUES,
            codec=SPARSE if scenario.sparse else ("fp32", "int8", "bf16")[scenario.seed % 3],
            grace_s=3.0,
            reduce_deadline_s=work.reduce_deadline_s,
            weight_cap=4.0,
            seats=scenario.seats,
            sites=scenario.site > 1,
        )
        self.quiet_at = scenario.quiet_at_s
        self.disturbed_at = 0.0
        self.found_after_s: list[float] = []
        self.false_evictions = 0
        self.blames: dict[str, int] = {}
        self.decided_at: dict[int, float] = {}
        self.met: Counter[str] = Counter()
        self._sizes: dict[type, int] = {}
        self._encoded: dict[int, tuple[Message, int, int]] = {}
        self._best = 0
        self._late: SimulatedPeer | None = None
        self.calm = Calm(self)
        self._enlisted_at: dict[PeerId, float] = {}
        self._out_of_line: dict[int, int] = {}
        self.waited_outside = self.most_between_turns = 0
        self._counted_at: dict[int, int] = {}
        self.most_links_outside = 0
        self._armed: dict[int, list[Fault]] = {}
        self._struck: list[Fault] = []
        swarm_id = domain_hash("simulated swarm", str(scenario.seed).encode())
        self.authority = self.keys.identity(AUTHORITY)
        named = scenario.voters > 0
        founders = [self.keys.identity(number).peer_id for number in range(scenario.voters or scenario.peers)]
        self.manifest = self._manifest(founders, [self.keys.identity(number).peer_id for number in range(everyone)])
        self.genesis = genesis(swarm_id, founders)
        self.zero = np.zeros(self.grid.numel, np.float32)
        self.judge = self.components.judge(
            self.genesis,
            self.zero,
            self.fragments,
            staleness_rounds=self.staleness_rounds,
            voters=founders if named else (),
            lying=scenario.lying,
            seats=scenario.seats,
            outside=scenario.outside,
        )
        self.residuals = Residuals(
            self.judge,
            staleness_rounds=self.staleness_rounds,
            error_feedback=self.error_feedback,
            mixing=self.mixing,
            averages=few,
        )
        self.donations = self.components.donations(self.tick_s)
        for number in range(scenario.peers):
            self._add().disk.blank = number >= len(founders)
        for peer in self.peers:
            peer.disk.known |= set(range(scenario.peers)) - {peer.number}

    def _manifest(self, founders: list[PeerId], everyone: list[PeerId]) -> Manifest:
        """Manifest with the settings that may be amended, by which the rounds are run, and with the named voters."""
        named, few = self.scenario.voters > 0, are_few(self.settings.seats)
        names = ("grace_s", "weight_cap", "reduce_deadline_s")
        tables: dict[str, object] = {
            "swarm": {
                "name": "simulated",
                "founders": founders if named else founders[:1],
                "authority": self.authority.peer_id,
            }
            | ({"admission": "allowlist", "allow": everyone} if few and len(everyone) <= FLAT_LIMIT_PEERS else {}),
            "workload": {"name": "regression"},
            "sync": {"inner_steps": 1},
            "round": {name: getattr(self.settings, name) for name in names}
            | {"staleness_rounds": self.staleness_rounds},
        }
        if named or few:
            tables["membership"] = {"voters": "named" if named else "contributors", "seats": self.settings.seats}
        if self.settings.sites:
            tables["membership"] = {**dict(tables.get("membership", {})), "sites": "together"}  # type: ignore[call-overload]
        if self.scenario.outside:
            tables["membership"] = {"voters": "named", "seats": self.settings.seats, "waiting": "outside"}
        if named:
            tables["agreement"] = {"faults": "lying" if self.scenario.lying else "crash"}
        return validate_manifest(tables, source="the simulation")

    # -- peers -------------------------------------------------------------------------------------------------

    def _add(self) -> SimulatedPeer:
        number, rng = len(self.peers), self.rng
        place = self.network.places[self.network.settle(rng)]
        site = self.site_of(number)
        if site is not None:  # who is of one site is in one place
            place.region = self.network.places[site * self.scenario.site].region
        disk = self.disks.add(self.genesis, self.zero, self.authority.peer_id, self.manifest)
        train_s = rng.uniform(*self.components.work.train_s)
        peer = SimulatedPeer(self, number, self.keys.identity(number), disk, train_s)
        self.peers.append(peer)
        self.numbers[peer.id] = number
        return peer

    def start(self, peer: SimulatedPeer) -> None:
        """The process of `peer` starts."""
        peer.start()
        peer.disturbed_at = self.timeline.now
        self.timeline.after(self.tick_s * (peer.number % 10) / 10, peer.tick, peer.life)

    def join(self) -> None:
        """A newcomer starts, who knows the addresses of everyone and the genesis."""
        peer = self._add()
        peer.disk.known |= set(range(len(self.peers))) - {peer.number}
        peer.disk.blank = True
        self.start(peer)

    def check_links(self, peer: SimulatedPeer, limit: int) -> None:
        """Raises Violation if a peer that follows has more links than that."""
        found = len(peer.watch.links)
        self.most_links_outside = max(self.most_links_outside, found)
        if found > limit:
            raise Violation("bounded followers", f"peer {peer.number} follows with {found} links")

    def part_links(self, peer: SimulatedPeer, others: Iterable[int]) -> None:
        """A peer that follows now ends links that it does not want, which both ends say."""
        for other in others:
            peer.watch.parted(other)
            self.timeline.after(self.network.delay_s(peer.number, other), self._parted, peer.number, peer.life, other)

    def _parted(self, number: int, life: int, other: int) -> None:
        if self.peers[other].running and self.peers[other].watch.links.get(number) == life:
            self.peers[other].watch.parted(number)

    def depart(self, number: int, life: int) -> None:
        """A peer that asked to leave says goodbye and goes."""
        peer = self.peers[number]
        if peer.life != life or not peer.up:
            return
        links = sorted({*peer.watch.links, *peer.watch.resting})
        peer.stop()
        peer.gone = True
        self.departed += 1
        self._falls_silent(peer)
        for other in links:
            if self.peers[other].running:
                self.timeline.after(self.network.delay_s(number, other), self._goodbye, number, other)

    def _goodbye(self, number: int, other: int) -> None:
        if self.peers[other].running:
            self.peers[other].watch.left(number)

    @property
    def state_chunk_bytes(self) -> int:
        """Payload of a chunk of a state."""
        return max(1, int(self.state_bytes / len(chunks_of(self.zero))))

    def site_of(self, number: int) -> int | None:
        """The number of the site that a peer is of; None where each is apart."""
        return number // self.scenario.site if self.settings.sites else None

    # -- messages ----------------------------------------------------------------------------------------------

    def size_of(self, message: object) -> int:
        """Bytes of a sealed message of this kind."""
        size = self._sizes.get(type(message))
        if size is None:
            size = self._sizes[type(message)] = len(canonical(message)) + ENVELOPE_BYTES
        return size

    def _measured(self, message: Message) -> tuple[int, int]:
        """Sealed size and a mark of the contents; remembered, for peers say the same thing again and again."""
        known = self._encoded.get(id(message))
        if known is None or known[0] is not message:
            data = canonical(message)
            mark = int.from_bytes(blake3(data).digest(8), "little", signed=True)
            if len(self._encoded) > 4096:
                self._encoded.clear()
            known = self._encoded[id(message)] = (message, len(data) + ENVELOPE_BYTES, mark)
        return known[1], known[2]

    def say(self, peer: SimulatedPeer, message: Message) -> None:
        """To everyone linked."""
        self.tell(peer, sorted(peer.watch.links), message)

    def tell(self, peer: SimulatedPeer, to: Iterable[int], message: Message) -> None:
        """To some, as a liar may have it."""
        self.judge.sent(peer.id, message)
        check_written(peer.id, peer.disk, message)
        if isinstance(message, Ready):
            self.residuals.announced(peer.id, message)
        if isinstance(message, Report) and "report" in peer.lies:
            message = with_flipped_digest(message)
        self._post(peer, to, message)

    def say_falsely(self, peer: SimulatedPeer, messages: Iterable[Message]) -> None:
        """Send messages that no machine said."""
        for message in messages:
            self._post(peer, sorted(peer.watch.links), message)

    def _post(self, peer: SimulatedPeer, to: Iterable[int], message: Message) -> None:
        size, mark = self._measured(message)
        for other in to:
            delay = self.network.message_delay_s(peer.number, other, size)
            if delay < 1e9:
                self.timeline.after(delay, self._arrive, peer.number, peer.life, other, message, mark)

    def send(self, peer: SimulatedPeer, to: int, message: object, size: int) -> None:
        """One message of the links, or a request, to one peer."""
        delay = self.network.message_delay_s(peer.number, to, size)
        if delay < 1e9:
            self.timeline.after(delay, self._arrive, peer.number, peer.life, to, message, size)

    def call(self, peer: SimulatedPeer, to: int, message: LaneMessage, size: int) -> None:
        """A short request, or its answer, over a stream of its own: nothing of it is lost but to a partition."""
        delay = self.network.call_delay_s(peer.number, to, size)
        self.timeline.after(delay, self._arrive, peer.number, peer.life, to, message, size)

    def ship(self, peer: SimulatedPeer, to: int, message: object, size: float) -> float:
        """Send over a lane, lost where a partition stands when it arrives; the time of arrival is returned."""
        delay = self.network.payload_delay_s(peer.number, to, size)
        self.timeline.after(delay, self._arrive, peer.number, peer.life, to, message, int(size))
        return self.timeline.now + delay

    def _is_lost(self, sender: int, life: int, to: int) -> bool:
        """True if bulk does not arrive: a partition stands, or the process that sent it ended while it was queued."""
        source, now = self.peers[sender], self.timeline.now
        ended = (source.life != life or not source.up) and now - source.silent_since > IN_FLIGHT_S
        return ended or (bool(self.network.walls) and not self.network.passes(sender, to))

    def _arrive(self, sender: int, life: int, to: int, message: object, mark: int) -> None:
        target = self.peers[to]
        if isinstance(message, LaneMessage) and self._is_lost(sender, life, to):
            return
        self.timeline.note(_kind_of(message), sender, to, mark)
        if target.running and not isinstance(message, LaneMessage | Hello | Reset):
            target.watch.wake(sender, life)
        if self.timeline.waiting > UNDER_WAY_LIMIT * len(self.peers):
            raise Violation("bounded queues", f"{self.timeline.waiting} messages under way")
        if not target.up:
            if target.host_up:
                self._refuse(sender, life, to)
        elif isinstance(message, Hello):
            target.receive(sender, message)
        elif isinstance(message, Reset):
            if target.running and target.life == mark:
                target.watch.reset(sender, message)
        elif target.watch.links.get(sender) == life:
            target.receive(sender, message)
        elif target.running and not isinstance(message, LaneMessage) and not target.watch.keep(sender, life, message):
            self._refuse(sender, life, to)

    def _refuse(self, sender: int, life: int, to: int) -> None:
        """There is no such connection, says the machine of `to`."""
        delay, target = self.network.message_delay_s(to, sender, 0), self.peers[to]
        if self.peers[sender].running and delay < 1e9:
            self.timeline.after(delay, self._arrive, to, target.life, sender, Reset(not target.up), life)

    # -- what training is --------------------------------------------------------------------------------------

    def trained_at(self, peer: SimulatedPeer) -> float:
        """The moment at which the contribution that a peer begins now is made; infinity if that is not known yet."""
        took_s = peer.train_s * self.rng.uniform(0.9, 1.1)
        return self.timeline.now + took_s * self.network.slowed.get(peer.number, 1.0)

    def made(self, peer: SimulatedPeer, round: int, again: int = 0) -> tuple[F32, int]:
        """The product of training: the values, (numel,) float32 of the round's fragment, and the tokens.

        again: how often that was trained before.
        """
        seed = [self.scenario.seed, peer.number, round, peer.life, *((again,) if again else ())]
        values = np.random.default_rng(seed).standard_normal(self.fragments.of_round(round).numel)
        return values.astype(np.float32), 100 + 7 * peer.number

    # -- what peers tell ---------------------------------------------------------------------------------------

    def decided(self, peer: SimulatedPeer, value: Value) -> None:
        """A peer extended its chain to `value`."""
        height, last = peer.disk.height, self.decided_at.get(self._best, 0.0)
        self.met["amended"] += bool(value.amended)
        self.met["voters changed"] += value.hash in self.judge.changes_of_voters
        if height > self._best:
            self.calm.decided(value)
            self._check_waiting(peer, value)
            self._note_turns(value, height)
            if self.scenario.outside and height < self.scenario.rounds:
                self._come_and_go(self.timeline.now - last)
        self._best = max(self._best, height)
        self.decided_at.setdefault(height, self.timeline.now)

    def _note_turns(self, value: Value, height: int) -> None:
        """Note for how many rounds anybody without a vote who stays has waited until it was counted, or does now."""
        for peer in self.peers[self.scenario.voters :] if self.scenario.outside else ():
            if not peer.running or peer.id in counted_in(value):
                self._counted_at.pop(peer.number, None)
            if peer.running:
                since = self._counted_at.setdefault(peer.number, height)
                self.most_between_turns = max(self.most_between_turns, height - since)

    def _come_and_go(self, round_s: float) -> None:
        """Of those without a vote a share dies for good in the time of a round, and as many newcomers join."""
        share = self.scenario.churn.share_per_round
        going = [peer for peer in self.peers[self.scenario.voters :] if peer.running and self._churn.random() < share]
        for peer in going:
            self.timeline.after(self._churn.uniform(0.0, round_s), self._die, peer, peer.life)
            self.timeline.after(self._churn.uniform(0.0, round_s), self.join)

    def _die(self, peer: SimulatedPeer, life: int) -> None:
        if peer.running and peer.life == life:
            self.disturbed_at = self.timeline.now
            self.died += 1
            self._kill(peer, silently=True, forgets=False)

    def _check_waiting(self, peer: SimulatedPeer, value: Value) -> None:
        """Raises Violation if one who stays waits outside for too long, or does not come back into the line."""
        now, waiting, line = self.timeline.now, self.judge.waiting[value.hash], peer.disk.ledger.line
        self._enlisted_at = {p: self._enlisted_at.get(p, now) for p in waiting}
        for one in (self.peers[self.numbers[p]] for p in waiting):
            if not one.running or one.disturbed_at > self._enlisted_at[one.id]:
                continue
            self.waited_outside = max(self.waited_outside, waiting[one.id])
            self._out_of_line[one.number] = 0 if one.id in line else self._out_of_line.get(one.number, 0) + 1
            if waiting[one.id] > self.judge.longest_wait or self._out_of_line[one.number] > BACK_VALUES:
                raise Violation("waiting outside", f"peer {one.number} waits for {waiting[one.id]} rounds")

    def held(self, peer: SimulatedPeer) -> None:
        """A peer has the state of another round, which whoever waits for that at it is told."""
        peer.peer_rounds.waits.look()

    def blamed(self, number: int, sender: int, why: str) -> None:
        """A peer refused what another sent: only liars may be refused, or those who were behind."""
        self.blames[why] = self.blames.get(why, 0) + 1

    def found_dead(self, observer: SimulatedPeer, number: int) -> None:
        """A peer gives another up."""
        target, now = self.peers[number], self.timeline.now
        if not target.running:
            if observer.disturbed_at < target.silent_since:
                self.found_after_s.append(now - target.silent_since)
        elif not self.network.walls and now - max(target.disturbed_at, self.disturbed_at) > settled_s(len(self.peers)):
            self.false_evictions += 1
            since_s = now - max(observer.disturbed_at, self.quiet_at)
            if since_s > settled_s(len(self.peers)) and not self._may_look_dead():
                raise Violation("no false eviction", f"peer {observer.number} gives up peer {number}, which lives")

    def _may_look_dead(self) -> bool:
        """True if something goes on that may make a living peer look dead after the last fault."""
        return self.scenario.loss > LOSS_BORNE_SHARE or bool(self.network.lossy or self.judge.liars)

    def is_troubled(self, now: float) -> bool:
        """True if some fault is not over, or has been for a moment only."""
        return now < self.quiet_at

    # -- faults ------------------------------------------------------------------------------------------------

    def _strike(self, fault: Fault) -> None:
        peer = None if fault.peer is None or fault.peer >= len(self.peers) else self.peers[fault.peer]
        if fault.phase is not None and fault.peer is not None and fault not in self._struck:
            self._armed[fault.peer] = [*self._armed.get(fault.peer, ()), fault]
            self.timeline.after(PHASE_LIMIT_S, self._strike_at_last, fault)
            return
        self.disturbed_at = self.timeline.now
        self.timeline.note(1000, _FAULTS.index(fault.kind), fault.peer or 0, int(fault.at_s * 1000))
        if fault.kind == "partition":
            self._part(fault)
        elif fault.kind == "join":
            self.join()
        elif fault.kind == "outage":
            for each in [peer for peer in self.peers if peer.up]:
                self._strike_peer(msgspec.structs.replace(fault, kind="crash"), each)
        elif peer is not None and not peer.gone:
            self._strike_peer(fault, peer)

    def look_at_phase(self, peer: SimulatedPeer) -> None:
        """Something happened at `peer`: strike if a fault waits for the phase that it is in."""
        for fault in self._armed.get(peer.number, ()):
            if peer.up and fault.phase in peer.peer_rounds.phases:
                self.met[f"struck: {fault.phase}"] += 1
                self._strike_at_last(fault)

    def _strike_at_last(self, fault: Fault) -> None:
        assert fault.peer is not None
        waiting = self._armed.get(fault.peer, [])
        if fault in waiting:
            self._armed[fault.peer] = [other for other in waiting if other is not fault]
            self._struck.append(fault)
            self.timeline.after(fault.into_s, self._strike, fault)

    def _part(self, fault: Fault) -> None:
        one, rest = fault.groups[0], [i for group in fault.groups[1:] for i in group]
        walls = [self.network.part(one, rest)]
        if not fault.one_way:
            walls.append(self.network.part(rest, one))
            walls += [self.network.part(a, b) for a in fault.groups[1:] for b in fault.groups[1:] if a != b]
        if fault.duration_s is not None:
            self.timeline.after(fault.duration_s, self._heal, walls)

    def _heal(self, walls: list[Wall]) -> None:
        self.disturbed_at = self.timeline.now
        self.network.walls = [wall for wall in self.network.walls if not any(wall is gone for gone in walls)]

    def _strike_peer(self, fault: Fault, peer: SimulatedPeer) -> None:
        network, undo = self.network, Undo(self, peer)
        if fault.kind in ("kill", "crash"):
            if not peer.up:
                return
            if fault.torn is None:
                self._kill(peer, silently=fault.kind == "crash", forgets=fault.forgets)
            else:
                peer.disk.tears = fault.torn
            action: Callable[[], None] = undo.restart
        elif fault.kind == "stop":
            if not peer.running:
                return
            peer.hung = True
            self._falls_silent(peer)
            undo.life = peer.life
            action = undo.resume
        elif fault.kind == "slow":
            network.slowed[peer.number] = fault.factor
            action = undo.quicken
        elif fault.kind == "lossy":
            network.lossy[peer.number] = fault.share
            action = undo.mend
        elif fault.kind == "pause":
            if not peer.up:
                return
            peer.pause()
            undo.life = peer.life
            action = undo.go_on
        elif fault.kind == "lie":
            assert fault.lie is not None
            peer.lies.add(fault.lie)
            self.judge.liars.add(peer.id)
            action = undo.come_clean
        elif fault.kind == "finish":
            peer.rounds = fault.round
            return
        elif fault.kind == "trainer":
            if peer.running:
                peer.peer_rounds.trainer_restarted()
            return
        elif fault.kind == "amend":
            if peer.running and peer.peer_rounds.amend(fault.setting):
                self.met["amendment ordered"] += 1
            return
        elif fault.kind == "voters":
            wanted = [(fault.adds, "true"), (fault.removes, "false")]
            named = [(i, votes) for i, votes in wanted if i is not None]
            settings = [f"voters.{self.keys.identity(i).peer_id}={votes}" for i, votes in named]
            if peer.running and peer.peer_rounds.change_voters(*settings):
                self.met["voters ordered"] += 1
            return
        elif fault.kind == "rollback":
            if peer.running and peer.peer_rounds.go_back(fault.back):
                self.met["rollback ordered"] += 1
            return
        else:
            if peer.up:
                peer.peer_rounds.ask_to_leave()
            return
        if fault.duration_s is not None:
            self.timeline.after(fault.duration_s, action)

    def _kill(self, peer: SimulatedPeer, *, silently: bool, forgets: bool) -> None:
        links, life = sorted({*peer.watch.links, *peer.watch.resting}), peer.life
        peer.stop()
        peer.host_up = not silently
        if forgets:
            peer.disk.forget_work()
        self._falls_silent(peer)
        for other in () if silently else links:
            self.hang_up(peer.number, life, other)

    def dies_writing(self, peer: SimulatedPeer, entry: Entry | tuple[DurableRecord, ...]) -> None:
        """The power fails at `peer` in the middle of a write to one of its logs."""
        self.met["torn log"] += 1
        peer.disk.tear(entry)
        self._kill(peer, silently=True, forgets=False)

    def hang_up(self, number: int, life: int, other: int) -> None:
        """A connection of that life of a peer is closed; the other end sees it unless a partition stands between."""
        if self.network.passes(number, other):
            self.timeline.after(self.network.delay_s(number, other), self._break, number, life, other)

    def _break(self, number: int, life: int, other: int) -> None:
        if self.peers[other].running:
            self.peers[other].watch.broke(number, life)

    def _falls_silent(self, peer: SimulatedPeer) -> None:
        """From here on everyone who watches it has the detector's bound to give it up."""
        now = self.timeline.now
        peer.silent_since = peer.disturbed_at = now
        for observer in self.peers:
            if observer.running and observer.watch.machine.state_of(peer.id) is State.ALIVE:
                bound_s = self._silence_bound_s(late_s=0.0)
                self.timeline.after(bound_s, self._check_found, observer, observer.life, peer, now)

    def _silence_bound_s(self, *, late_s: float) -> float:
        """Seconds of silence until a peer is given up, where answers came so late shortly before, or meanwhile."""
        return detection_bound_s(len(self.peers), late_s, calm=True) + TICKS_LATE_S + IN_FLIGHT_S

    def _check_found(self, observer: SimulatedPeer, life: int, peer: SimulatedPeer, since: float) -> None:
        silent = peer.silent_since == since and not peer.running
        undisturbed = (
            observer.life == life
            and observer.running
            and max(observer.disturbed_at, self.disturbed_at, observer.woke_at + LATE_REMEMBERED_S) <= since
        )
        if not silent or not undisturbed or self.judge.liars:
            return
        state, now = observer.watch.machine.state_of(peer.id), self.timeline.now
        if state is State.DEAD or state is None:
            return
        if_late = since + self._silence_bound_s(late_s=LATE_LIMIT_S)
        if now < if_late and any(since - other.woke_at < LATE_REMEMBERED_S for other in self.peers):
            self.timeline.at(if_late, self._check_found, observer, life, peer, since)
            return
        raise Violation(
            "no wait too long",
            f"peer {observer.number} holds peer {peer.number} for {state.value} {now - since:.1f} s after its silence",
        )

    # -- the run -----------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Let it happen, to the last round or the first violation."""
        began = time.perf_counter()
        violation = detail = ""
        with self.keys.in_use(), unheard():
            try:
                self._run()
            except NoQuorum:
                pass
            except Violation as broken:
                violation, detail = broken.kind, broken.detail
        self.disks.clear()
        return self._outcome(time.perf_counter() - began, violation, detail)

    def _run(self) -> None:
        for fault in self.scenario.fault:
            if fault.kind == "finish" and not fault.at_s and fault.peer is not None:
                self.peers[fault.peer].rounds = fault.round
        for peer in self.peers:
            self.start(peer)
        for fault in self.scenario.fault:
            self.timeline.at(fault.at_s, self._strike, fault)
        timeline, rounds = self.timeline, self.scenario.rounds
        timeline.run(self.quiet_at, lambda: False)
        limit = self.quiet_at
        while not self._done():
            if timeline.now >= limit:
                if limit > self.quiet_at:
                    self.stands_still(PROGRESS_S)
                limit = timeline.now + PROGRESS_S + ROUND_LIMIT_S * (rounds if self._best >= rounds else 0)
            height = self._best
            timeline.run(limit, lambda height=height: self._best > height or self._done())  # type: ignore[misc]
            if self._best > height and self._best < rounds:
                limit = timeline.now + PROGRESS_S

    def stands_still(self, waited_s: float) -> None:
        """Nothing came of so long a time. Raises Violation if there is a quorum; else NoQuorum, unless
        somebody rebases."""
        head = max((peer.disk.ledger.head for peer in self.peers), key=lambda value: (value.term, value.round))
        if self.judge.outweigh(head, [peer.id for peer in self.peers if peer.running], self._leaves_heard_by_all(head)):
            behind = [peer.number for peer in self.peers if peer.running and not self._has(peer, self._best)]
            raise Violation("progress", f"none for {waited_s} s after round {self._best}; behind are {behind}")
        if not self.scenario.rebases or self.met["rebased"] >= REBASES_LIMIT or not self._rebase():
            raise NoQuorum

    def _rebase(self) -> bool:
        """The authority, at the member whose chain is the longest, has those go on who run; False if nobody can."""
        running = [peer for peer in self.peers if peer.running and peer.id in peer.disk.ledger.voters]
        able = [peer for peer in running if peer.peer_rounds.can_rebase]
        there = max(able, key=lambda peer: peer.disk.height, default=None)
        if there is None:
            return False
        self.met["rebased"] += 1
        stay = [peer.id for peer in running if peer.id in there.disk.ledger.voters]
        there.peer_rounds.rebase(stay)
        return True

    def _leaves_heard_by_all(self, head: Value) -> set[PeerId]:
        """The promises to leave in the round after `head` that every running member of it has heard."""
        members = [peer for peer in self.peers if peer.running and peer.id in head.members]
        machines = [peer.peer_rounds.machine for peer in members]
        heard = [m.agreement.leaves if m is not None and m.previous.hash == head.hash else set() for m in machines]
        return set.intersection(*heard) if heard else set()

    def _done(self) -> bool:
        if self._best < self.scenario.rounds or self.calm.awaited():
            return False
        if self._late is None or not self._is_late(self._late):
            self._late = next(filter(self._is_late, self.peers), None)
        return self._late is None

    def _is_late(self, peer: SimulatedPeer) -> bool:
        """True if a peer that runs has not the state of the last round, or is on its way out."""
        return peer.running and (not self._has(peer, self.scenario.rounds) or peer.peer_rounds.goes)

    def _has(self, peer: SimulatedPeer, round: int) -> bool:
        """True if a peer has the state of a round, or of a later one; if some wait outside, be it behind its head."""
        if self.scenario.outside and not peer.disk.blank:
            return peer.disk.held_value.round >= round
        return peer.disk.height >= round and peer.peer_rounds.obtaining.current

    def _outcome(self, wall_s: float, violation: str, detail: str) -> Outcome:
        now = max(self.timeline.now, 1e-9)
        times = [0.0, *(self.decided_at[r] for r in sorted(self.decided_at))]
        gaps = [b - max(a, min(self.quiet_at, b)) for a, b in pairwise(times)]
        found = sorted(self.found_after_s)
        control = sum(place.control_bytes for place in self.network.places)
        outside = self.network.places[self.scenario.voters :] if self.scenario.outside else ()
        without_vote = sum(place.control_bytes for place in outside)
        return Outcome(
            peers=self.scenario.peers,
            rounds_certified=min(self._best, self.scenario.rounds),
            forks=self.judge.forks,
            wrong_values=self.judge.wrong_values,
            stalled_rounds=sum(1 for gap in gaps if gap > ROUND_LIMIT_S) + max(0, self.scenario.rounds - self._best),
            detect_s_p99=round(found[min(len(found) - 1, int(0.99 * len(found)))], 3) if found else 0.0,
            control_bytes_per_peer_per_s=round(control / len(self.peers) / now, 1),
            events=self.timeline.events,
            wall_s=round(wall_s, 3),
            trace_digest=self.timeline.digest(),
            virtual_s=round(now, 3),
            deaths_found=len(found),
            false_evictions=self.false_evictions,
            blamed=sum(self.blames.values()),
            states_fetched=self.donations.obtained,
            followers=len(outside),
            followers_died=self.died,
            control_bytes_per_follower_per_s=round(without_vote / max(1, len(outside)) / now, 1),
            waited_rounds=self.waited_outside,
            turn_rounds=self.most_between_turns,
            work_lost=self.residuals.lost,
            waited_limit_rounds=self.judge.longest_wait if outside else 0,
            most_links_outside=self.most_links_outside,
            met=dict(self.met + Counter({"work carried on": self.residuals.carried, "calm rounds": self.calm.rounds})),
            violation=violation,
            detail=detail,
        )


_FAULTS = get_args(Kind)
_KINDS: dict[type, int] = {}


def _kind_of(message: Any) -> int:
    """A number for the kind of a message that is the same in every run: a hash of its name."""
    kind = type(message)
    known = _KINDS.get(kind)
    if known is None:
        known = _KINDS[kind] = int.from_bytes(blake3(kind.__name__.encode()).digest(2), "little") % 1000
    return known


def run_scenario(scenario: Scenario, components: Components | None = None) -> Outcome:
    """The outcome of one scenario of up to `FLAT_LIMIT_PEERS` peers; of more it is `crowd.run_crowd`."""
    return Simulation(scenario, components or Components()).run()
