"""A virtual swarm of members: links with delay and loss, a clock that jumps, and what they do together.

Training, reducing, applying and fetching take virtual time. A plan is reduced once all its participants are up, can
reach each other and have adopted it, and stayed so for `reduce_s`; who waits longer than `stall_s` accuses those that
are not there. What each node does by itself is in `round_node`.

The same `Ledger` as in `lab` watches every message, so each run of whole rounds is a safety test too.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from shoal.lab.errands import Then
from shoal.protocol.agreement import Broadcast, Persist
from shoal.protocol.certificate import genesis
from shoal.protocol.effects import (
    CloseOff,
    Effect,
    MemberEffect,
    Repair,
    StartReduce,
)
from shoal.protocol.errands import (
    AskEntries,
    AskHolders,
    AwaitLinks,
    CountLacking,
    FetchState,
    FindBegun,
    FindEarlier,
    Holders,
    KeepEarlier,
    LookElsewhere,
    LookUp,
    Replay,
    Request,
    TakeEntries,
)
from shoal.protocol.errors import NetworkError, RemoteError
from shoal.protocol.identity import PeerId
from shoal.protocol.inputs import (
    Amend,
    GoBack,
    HeadMoved,
    Linked,
    OfPlan,
    OfState,
    Order,
    Received,
    Reduced,
    SetPaused,
    Tick,
    Trained,
    Withdraw,
)
from shoal.protocol.manifest import Manifest
from shoal.protocol.messages import (
    Certificate,
    ChunkResults,
    Message,
    Plan,
    Ready,
    Report,
    Value,
    domain_hash,
)
from shoal.protocol.peering import ChainPart
from shoal.protocol.round import RoundMachine
from tests.protocol.lab import SWARM, Ledger, paper_identities
from tests.protocol.round_node import Node, Whole, chunk_result, report_on
from tests.round_messages import ready_with

TICK_S = 0.1
LATENCY_S = (0.002, 0.03)
BREAK_SEEN_S = 0.1
"""After this a broken connection has told everyone; a hang shows only after HANG_SEEN_S."""
HANG_SEEN_S = 8.0
ASK_S = 0.05
FETCH_S = 0.3
CHAIN_PART_LIMIT = 64

Intercept = Callable[[int, MemberEffect], Collection[int] | None]
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
        self.lives = itertools.count()
        self._reduce_s = reduce_s
        self._stall_s = stall_s
        self._keeps_contribution = keeps_contribution
        self.manifest = manifest
        self._groups: list[set[int]] | None = None
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self.nodes = [Node(self, number, identity, train_s=train_s) for number, identity in enumerate(identities)]
        founding = [node for node in self.nodes if node.peer in self.start.members]
        for node in founding:
            node.present = {other.peer: 1 for other in founding}
        for node in self.nodes:
            if node in founding:
                self.restart(node.number, seen=False)
            else:
                node.at = None
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
        for node in self.nodes:
            machine = node.machine
            where = "-" if machine is None else f"{machine.phase} view {machine.agreement.view}"
            lines.append(f"{node.number}: height {node.height} up {node.up} hung {node.hung} {where}")
        return f"at {self.now:.1f} s " + "; ".join(lines)

    # -- questions ---------------------------------------------------------------------------------------

    def number(self, peer: PeerId) -> int:
        return next(node.number for node in self.nodes if node.peer == peer)

    def lead(self, view: int = 0) -> int:
        """The number of the lead of `view` in the highest round under way."""
        node = max((n for n in self.nodes if n.machine is not None), key=lambda n: n.height)
        return self.number(node.running().agreement.lead(view))

    def value(self, round: int) -> Value:
        """The value decided in `round`."""
        return next(node.values[round] for node in self.nodes if node.height >= round)

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
        node.stop()
        if not self._keeps_contribution:
            node.contribution = None
        self.after(BREAK_SEEN_S, self._see)

    def restart(self, number: int, *, seen: bool = True) -> None:
        """Start the process; if `seen`, everyone notices after BREAK_SEEN_S."""
        node = self.nodes[number]
        if node.box is not None:
            node.box.stop()
        node.present = {node.peer: node.life + 1} if seen else node.present
        node.start()
        self._tick(node, node.life)
        if seen:
            self.after(BREAK_SEEN_S, self._see)

    def join(self, number: int) -> None:
        """A newcomer has fetched the chain and the state from the node furthest on, and starts."""
        best = max(self.running(), key=lambda node: node.height)
        node = self.nodes[number]
        node.chain, node.at = best.chain.snapshot(), best.at
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
        node.member.ask_to_leave(self.now)
        node.put(Tick())

    def pause(self, number: int) -> None:
        """The user of the node wants the accelerator."""
        self.nodes[number].put(SetPaused(True))

    def go_back(self, number: int, round: int) -> None:
        """The user of the node wants that, and it is said as long as a round can decide it."""
        self.nodes[number].put(GoBack(round))

    def amend(self, number: int, wanted: Mapping[str, object]) -> None:
        """The user of the node wants these settings in force, by section.key."""
        self.nodes[number].put(Amend(tuple(f"{key}={value}" for key, value in wanted.items())))

    def withdraw(self, number: int, kind: type[Order]) -> None:
        """The user of the node does not want that any more."""
        self.nodes[number].orders.pop(kind, None)
        self.nodes[number].put(Withdraw(kind))

    def out_of_turn(self, number: int, effects: Iterable[Effect]) -> None:
        """The node writes and says what its agreement was made to."""
        for effect in effects:
            if isinstance(effect, Persist):
                self.nodes[number].log.append(effect.record)
            elif isinstance(effect, Broadcast):
                self.broadcast(number, effect.message)

    def _see(self) -> None:
        """Everyone learns who is there; those who meet again are linked again."""
        met: list[tuple[int, int]] = []
        for node in self.running():
            before = node.present
            now = {o.peer: o.life for o in self.running() if o is node or self.reach(o.number, node.number)}
            same = {peer: life for peer, life in before.items() if now.get(peer) == life}
            for node.present in (same, now):  # a connection that broke and came back has broken
                node.put(Tick())
            met += [(node.number, self.number(peer)) for peer in now.keys() - set(same) - {node.peer}]
        for one, other in sorted({*met, *((b, a) for a, b in met)}):
            head = self.nodes[other].chain.head
            self.nodes[one].put(Linked(self.nodes[other].peer, (head.term, head.round)))
        under_way = {node.reducing.hash: node.reducing for node in self.nodes if node.reducing is not None}
        for plan in under_way.values():
            self._try_reduce(plan)

    def _tick(self, node: Node, life: int) -> None:
        if not node.awake(life, lambda: self._tick(node, life)):
            return
        machine = node.machine
        if machine is not None and node.trains and not node.paused and self.now >= node.trained_at:
            node.trains = False
            node.put(Trained(machine.round, None))
        node.put(Tick())
        self.after(TICK_S, lambda: self._tick(node, life))

    # -- messages ----------------------------------------------------------------------------------------

    def broadcast(self, number: int, message: Message, only: Collection[int] | None = None) -> None:
        """The node says this to everyone; or only to these."""
        self.ledger.sent(self.nodes[number].peer, message)
        if isinstance(message, Plan):
            self.plans[message.hash] = message
        for to in range(len(self.nodes)):
            if to != number and (only is None or to in only):
                self._send(number, to, message)

    def _send(self, number: int, to: int, message: Message) -> None:
        if self.rng.random() >= self.loss:
            peer = self.nodes[number].peer
            self.after(self.rng.uniform(*LATENCY_S), lambda: self._arrive(to, number, peer, message))

    def _arrive(self, number: int, sender: int, peer: PeerId, message: Message) -> None:
        node = self.nodes[number]
        if self.reach(sender, number) and node.awake(node.life, lambda: self._arrive(number, sender, peer, message)):
            node.put(Received(peer, message))

    def append(self, node: Node, certificate: Certificate) -> None:
        """The node's chain goes on. After a rollback it stands on a state of long ago, if it has that still."""
        value = certificate.value
        self.ledger.decided(certificate)
        self.ledger.follow(value)
        self.decided_at.setdefault(value.round, self.now)
        node.chain.extend(certificate)
        if value.rollback and node.has_old_states:
            node.at = node.chain.standing

    # -- for labs of more than rounds ----------------------------------------------------------------------

    def _contribution(self, node: Node) -> Ready:
        """What the node announces once it has trained."""
        return ready_with(
            node.chain.head,
            self._root(node),
            state=node.digest,
            tokens=100 + node.number,
            upload=1000,
            download=1000,
        )

    def _root(self, node: Node) -> bytes:
        """What the node's contribution to this round is committed to by."""
        return domain_hash("root", node.peer.encode(), node.chain.head.hash, bytes([node.life % 256]))

    def _evidence(self, node: Node) -> Mapping[bytes, PeerId]:
        """What the node has against whom, in the round that begins."""
        return {}

    def _need_evidence(self, node: Node, value: Value) -> None:
        """Evidence that a value names is lacking."""

    def _examine(self, node: Node, peer: PeerId, message: Message) -> None:
        """Look at what a peer said."""

    def _certified(self, node: Node, certificate: Certificate) -> None:
        """The round under way is decided."""

    # -- reducing ----------------------------------------------------------------------------------------

    def _takes_part(self, number: int, seen_from: int, plan: Plan) -> bool:
        node = self.nodes[number]
        holds = plan.hash in node.finals or (node.reducing is not None and node.reducing.hash == plan.hash)
        return node.up and not node.hung and holds and self.reach(number, seen_from)

    def _close_off(self, node: Node, asked: CloseOff) -> tuple[ChunkResults, ...]:
        """Everything of any revision of that plan that is final here: all chunks of it, or none."""
        plan = next((f.plan for f in reversed(node.finals.values()) if f.plan.lineage == asked.lineage), None)
        if plan is None:
            return ()
        return tuple(
            ChunkResults.of(owned.owner, {c: chunk_result(plan, c) for c in range(owned.start, owned.stop)})
            for owned in plan.owners
        )

    def _stalled(self, node: Node) -> tuple[frozenset[PeerId], frozenset[PeerId]] | None:
        """Who holds the node's reduction up, if it has been for too long."""
        plan = node.reducing
        if plan is None or self.now - node.reducing_since < self._stall_s:
            return None
        node.reducing_since = self.now
        absent = frozenset(p for p in plan.remaining if not self._takes_part(self.number(p), node.number, plan))
        return (absent, frozenset()) if absent else None

    def _whole(self, plan: Plan) -> bool:
        numbers = [self.number(peer) for peer in plan.remaining]
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
        for peer in plan.remaining:
            node = self.nodes[self.number(peer)]
            if plan.hash not in node.finals:
                self.after(self.rng.uniform(0, 0.05), partial(self._reduced, node, node.life, Whole(plan)))

    @staticmethod
    def report_of(finals: OfPlan) -> Report:
        """What every honest participant computes."""
        return report_on(finals.plan)

    def signed_report(self, plan: Plan, machine: RoundMachine) -> Report:
        """As another hears it from the participant that runs `machine`."""
        return machine.agreement.sign_report(report_on(plan))

    def _reduced(self, node: Node, life: int, finals: OfPlan) -> None:
        """All finals are there, reduced or fetched."""
        if not node.awake(life, lambda: self._reduced(node, life, finals)):
            return
        node.finals[finals.plan.hash] = finals
        if node.reducing is not None and node.reducing.hash == finals.plan.hash:
            node.reducing = None
        node.put(Reduced(finals, 0.0))

    # -- what is sought of others ------------------------------------------------------------------------

    def _donors(self, node: Node, peers: Collection[PeerId] | None = None) -> Iterator[Node]:
        for other in self.running():
            within = peers is None or other.peer in peers
            if other is not node and within and self.reach(other.number, node.number):
                yield other

    def _finals(self, node: Node, plan: bytes) -> OfPlan | None:
        """The finals of a plan, here or at anyone who can be reached."""
        return next((one.finals[plan] for one in (node, *self._donors(node)) if plan in one.finals), None)

    def _need(self, node: Node, plan: bytes) -> None:
        if plan not in node.fetching:
            node.fetching.add(plan)
            self.after(FETCH_S, partial(self._try_fetch, node, node.life, plan))

    def _try_fetch(self, node: Node, life: int, plan: bytes) -> None:
        if not node.awake(life, partial(self._try_fetch, node, life, plan)):
            return
        finals = self._finals(node, plan)
        if finals is None:
            self.after(FETCH_S, partial(self._try_fetch, node, life, plan))
        else:
            node.fetching.discard(plan)
            self._reduced(node, life, finals)

    def _perform(self, node: Node, life: int, request: Request, then: Then) -> None:
        """Have a request of an errand done; what comes of it is looked at when it has come."""
        self.after(self._takes_s(node, request), partial(self._answer, node, life, request, then))

    def _takes_s(self, node: Node, request: Request) -> float:
        if isinstance(request, Replay):
            rounds = range(request.state.round + 1, request.chain.standing.round + 1)
            lack = [round for round in rounds if request.chain.value(round).plan not in node.finals]
            return FETCH_S if lack else 0.0
        return FETCH_S if isinstance(request, FetchState) else ASK_S if isinstance(request, ASKING) else 0.0

    def _answer(self, node: Node, life: int, request: Request, then: Then) -> None:
        if node.awake(life, partial(self._answer, node, life, request, then)):
            then(ANSWERS[type(request)](self, node, request))

    def _ask_entries(self, node: Node, request: AskEntries) -> ChainPart | NetworkError:
        donor = next(self._donors(node, [request.peer]), None)
        if donor is None:
            return NetworkError("cannot be reached")
        entries = donor.chain.after(request.after, CHAIN_PART_LIMIT, request.rebases)
        return ChainPart(certificates=entries, head=donor.height)

    def _take_entries(self, node: Node, request: TakeEntries) -> int | RemoteError:
        before = node.height
        try:
            for entry in request.entries:
                assert isinstance(entry, Certificate)
                if entry.value not in node.chain:
                    self.append(node, entry)
        except RemoteError as error:
            return error
        finally:
            if node.height > before:
                node.put(HeadMoved())
        return node.height - before

    def _ask_holders(self, node: Node, request: AskHolders) -> Holders:
        holders = [d.peer for d in self._donors(node, request.peers) if holds(d, request.value)]
        return Holders(dict.fromkeys(holders, request.value), [peer for peer in request.peers if peer not in holders])

    def _fetch_state(self, node: Node, request: FetchState) -> Value | None:
        donors = self._donors(node, request.peers)
        there = any(donor.at is not None and donor.at.round >= request.value.round for donor in donors)
        return request.value if there else None

    def _replay(self, node: Node, request: Replay) -> OfState:
        state, chain = request.state, request.chain
        for round in range(state.round + 1, chain.standing.round + 1):
            finals = self._finals(node, chain.value(round).plan)
            if finals is None:
                break
            node.finals[finals.plan.hash], state = finals, chain.value(round)
        return state


def holds(node: Node, value: Value) -> bool:
    """Whether a node has the state that `value` led to: the one that it is at, or the one before."""
    return node.at is not None and node.at.round - 1 <= value.round <= node.at.round and node.chain.on_branch(value)


ASKING = AskEntries | AskHolders

ANSWERS: Mapping[type[Any], Callable[[RoundLab, Node, Any], Any]] = {
    AskEntries: RoundLab._ask_entries,
    AskHolders: RoundLab._ask_holders,
    AwaitLinks: lambda lab, node, request: None,
    Broadcast: lambda lab, node, request: lab.broadcast(
        node.number, request.message, lab.intercept(node.number, request)
    ),
    CountLacking: lambda lab, node, request: sum(plan not in node.finals for plan in request.plans),
    FetchState: RoundLab._fetch_state,
    FindBegun: lambda lab, node, request: [],
    FindEarlier: lambda lab, node, request: node.chain.value(request.round) if node.has_old_states else None,
    KeepEarlier: lambda lab, node, request: request.state.digest,
    LookElsewhere: lambda lab, node, request: {},
    LookUp: lambda lab, node, request: None,
    Replay: RoundLab._replay,
    TakeEntries: RoundLab._take_entries,
}
"""What comes of each request of an errand."""
