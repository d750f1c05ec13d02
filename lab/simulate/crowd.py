"""Followers beside simulated members: swarms beyond the members that one plan has.

    the first peers      members, each as `simulation` has it: 64, or as many as there are seats
    all others           followers: of each the `Member` that nodes run, as a follower, with the catching up and the
                         parents that are its own, its neighbours by `Neighbours`, and its places by `has_room`

What is modelled is around them: a link is made in two round trips, a question and its answer are calls, the finals of a
round and a state are one payload each, on the lines that all share. A follower that dies breaks its links, or falls
silent, each half the time; of who is silent the others know after `SILENT_S`.

Judged are: a follower's state is the reference's, bit for bit; it takes part in nothing; nobody gives to more than
FOLLOWERS_LIMIT followers; and at the end all who live have the state of the last round within `FOLLOWED_S`.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Final

import msgspec

from shoal.collectives.finals import FinalFormat, Finals
from shoal.collectives.partition import deal
from shoal.lab.box import Box, Surroundings, do_by, nothing
from shoal.lab.errands import Errands, Then
from shoal.lab.simulate.judge import Violation
from shoal.lab.simulate.obtaining import State
from shoal.lab.simulate.outcome import Components, Outcome
from shoal.lab.simulate.peer import SimulatedPeer
from shoal.lab.simulate.scenario import FLAT_LIMIT_PEERS, Churn, Scenario
from shoal.lab.simulate.simulation import Simulation
from shoal.lab.simulate.states import Header, next_state, state_digest
from shoal.node.state.state_server import REQUEST_DEADLINE_S
from shoal.protocol import errands, peering
from shoal.protocol.backoff import Backoff
from shoal.protocol.catching_up import check_header, on_branch
from shoal.protocol.chain import Chain
from shoal.protocol.donors import DonorScores
from shoal.protocol.effects import (
    Adopt,
    Blame,
    Examine,
    FindWork,
    Rejoin,
    ResumeWork,
    Seek,
    SettleWork,
    StandOnHead,
    StopReduction,
)
from shoal.protocol.errors import LocalError, NetworkError, RemoteError
from shoal.protocol.followers import AWAIT_S, FOLLOWERS_LIMIT, Waiting, has_room
from shoal.protocol.identity import PeerId
from shoal.protocol.inputs import HeadMoved, Loaded, Tick
from shoal.protocol.member import Member
from shoal.protocol.messages import NO_HASH, Entry, Value
from shoal.protocol.neighbours import NEIGHBOUR_LIMIT, Neighbours
from shoal.protocol.surroundings import Rules
from shoal.protocol.wire import canonical
from shoal.swarm.dialling import DIAL_BACKOFF_LIMIT_S, DIAL_BACKOFF_S

TICK_S: Final = 1.0
"""Of a follower, beside a tick for everything that ends: as in a node at rest."""
KNOWN_PEERS: Final = 128
"""Of the others a follower knows so many; a node knows those that its neighbours do, and more by gossip."""
SILENT_S: Final = 30.0
"""Until a link of who vanished without a word is ended at the other end."""
FOLLOWED_S: Final = 120.0
"""After the last round is certified, time for the followers to have its state."""
FINALS_KEPT: Final = 6
"""Of the newest rounds, as members keep them there."""
Answer = Callable[[Any, int], None]
LookUp = Callable[[int, Answer], None]
"""Called with who is asked, and what takes the answer and its size in bytes back."""

QUESTION_BYTES: Final = 300
ANSWER_BYTES: Final = 600
"""Of an answer without entries."""


class Crowd(Simulation):
    """The members of a scenario with many peers, and the followers around them."""

    def __init__(self, scenario: Scenario, components: Components | None = None) -> None:
        members = min(scenario.peers, scenario.seats)
        flat = msgspec.structs.replace(scenario, peers=members, seats=FLAT_LIMIT_PEERS, churn=Churn())
        self.churn = scenario.churn.share_per_round
        self.everyone = scenario.peers
        self.followers: dict[int, Follower] = {}
        self.waiting: dict[int, Waiting] = {}
        self.answers: dict[int, dict[PeerId, Callable[[], None]]] = {}
        self.lags_s: list[float] = []
        self.most_served = 0
        self.died = 0
        self._rng = random.Random(f"crowd {scenario.seed}")
        self._followed_until = float("inf")
        self._look_at, self._is_done = 0.0, False
        self._entry_bytes: dict[bytes, int] = {}
        self._opened: dict[bytes, list[tuple[Finals, Finals]]] = {}
        self._next_number = members
        super().__init__(flat, components or Components())

    # -- who is there ----------------------------------------------------------------------------------------

    def id_of(self, number: int) -> PeerId:
        """The PeerId of a member or follower, also of one that is gone."""
        return self._ids[number]

    def is_member(self, number: int) -> bool:
        """True for the members of the scenario."""
        return number < len(self.peers)

    def is_up(self, number: int) -> bool:
        """True if its process runs."""
        return self.peers[number].running if self.is_member(number) else number in self.followers

    def chain_of(self, number: int) -> Chain:
        """The chain of one who is up."""
        return self.peers[number].disk.ledger if self.is_member(number) else self.followers[number].chain

    def is_current(self, number: int) -> bool:
        """True if one who is up has the state at its head."""
        member = self.is_member(number)
        return self.peers[number].peer_rounds.obtaining.current if member else self.followers[number].current

    def state_of(self, number: int) -> State | None:
        """The state that one has."""
        member = self.is_member(number)
        return self.peers[number].peer_rounds.obtaining.held if member else self.followers[number].held

    def finals_of(self, number: int, plan: bytes) -> Finals | None:
        """The finals of a plan, as one has them."""
        return (self.peers[number].disk if self.is_member(number) else self.followers[number]).finals.get(plan)

    def links_of(self, number: int) -> set[int]:
        """The followers that a member gives to, or all whom a follower is linked with."""
        return self._member_links.setdefault(number, set()) if self.is_member(number) else self.followers[number].links

    def __post_init__(self) -> None:
        super().__post_init__()
        self._member_links: dict[int, set[int]] = {}
        self._ids = {peer.number: peer.id for peer in self.peers}

    def join(self, *, blank: bool = True) -> None:
        """A follower starts; blank: with no state."""
        number, self._next_number = self._next_number, self._next_number + 1
        self.network.settle(self._rng)
        follower = self.followers[number] = Follower(self, number, blank=blank)
        self.numbers[follower.id], self._ids[number] = number, follower.id
        pool = range(number + 1)
        known = {one for one in self._rng.sample(pool, min(KNOWN_PEERS, len(pool))) if self.is_up(one)} - {number}
        follower.known = {self.id_of(one): one for one in (*known, self._rng.randrange(len(self.peers)))}
        self.timeline.after(self._rng.uniform(0.0, TICK_S), follower.start)

    def die(self, number: int) -> None:
        """A follower dies, with or without a word."""
        follower = self.followers.pop(number, None)
        if follower is None:
            return
        self.died += 1
        follower.stop()
        self.waiting.pop(number, None)
        self.answers.pop(number, None)
        delay_s = 0.1 if self._rng.random() < 0.5 else SILENT_S
        for other in sorted(follower.links):
            self.timeline.after(delay_s, self.unlink, other, number)

    def unlink(self, one: int, other: int) -> None:
        """The link of `one`, if it is up, with `other` is gone."""
        if self.is_up(one):
            self.links_of(one).discard(other)
            self.waiting.get(one, Waiting()).gone(self.id_of(other))
            if not self.is_member(one):
                self.followers[one].lost(other)

    def dial(self, number: int, other: int) -> bool:
        """Link a follower with another peer, if that is up and has a place; the other end's rules."""
        if not self.is_up(other):
            return False
        links = self.links_of(other)
        if self.is_member(other):
            room = has_room({self.id_of(one) for one in links}, self.id_of(number))
        else:
            target = self.followers[other]
            room = number in links or len(links) < NEIGHBOUR_LIMIT - target.kept_places()
        if room:
            links.add(number)
            self.followers[number].links.add(other)
            if not self.is_member(other):
                self.followers[other].changed = True
        for one in (links, self.followers[number].links):
            self._note_served(one)
        return room

    def _note_served(self, links: Collection[int]) -> None:
        self.most_served = max(self.most_served, len(links))
        if len(links) > FOLLOWERS_LIMIT:
            raise Violation("bounded followers", f"{len(links)} are given to; the limit is {FOLLOWERS_LIMIT}")

    # -- what is asked ---------------------------------------------------------------------------------------

    def later(self, sender: int, to: int, size: int, call: Callable[[], None]) -> None:
        """A question or an answer arrives."""
        self.timeline.after(self.network.call_delay_s(sender, to, size), call)

    def entries_bytes(self, entries: Sequence[Entry]) -> int:
        """Of entries on the wire."""
        sizes = self._entry_bytes
        return ANSWER_BYTES + sum(
            sizes.get(e.value.hash) or sizes.setdefault(e.value.hash, len(canonical(e))) for e in entries
        )

    def part(self, number: int, after: int, rebases: int) -> peering.ChainPart:
        """An answer about one's chain."""
        return self.chain_of(number).part(after, rebases)

    def wait(self, number: int, who: PeerId, after: int, rebases: int, answer: Callable[[], None]) -> bool:
        """One waits at `number`; False where there is no place. answer: called once."""
        waiting = self.waiting.setdefault(number, Waiting())
        if not waiting.come(who, after, rebases, self.timeline.now):
            return False
        if len(waiting) > FOLLOWERS_LIMIT:
            raise Violation("bounded followers", f"{len(waiting)} wait at {number}; the limit is {FOLLOWERS_LIMIT}")
        self.answers.setdefault(number, {})[who] = answer
        self.timeline.after(AWAIT_S, self.look, number)
        self.look(number)
        return True

    def look(self, number: int) -> None:
        """Answer those who wait at `number`, if there is something to say."""
        waiting = self.waiting.get(number)
        if waiting is None or not len(waiting) or not self.is_up(number):
            return
        for who in waiting.due(self.chain_of(number), self.timeline.now, current=self.is_current(number)):
            self.answers[number].pop(who)()

    def opened(self, finals: Finals) -> Finals:
        """Finals as who fetched them checks and reads them, once for all who have the very same. Raises RemoteError."""
        known = self._opened.setdefault(finals.plan.hash, [])
        same = next((opened for given, opened in known if finals is given or finals is opened), None)
        if same is None:
            form = FinalFormat(finals.plan)
            chunks = tuple(form.open(final.chunk, bytes(final.payload)) for final in finals.chunks)
            same = Finals(plan=finals.plan, chunks=chunks)
            known.append((finals, same))
        return same

    # -- the run ---------------------------------------------------------------------------------------------

    def held(self, peer: SimulatedPeer) -> None:
        """A member has the state of another round."""
        self.look(peer.number)

    def decided(self, peer: SimulatedPeer, value: Value) -> None:
        """A member extended its chain: the followers start with the first, and come and go with every other."""
        before = self._best
        super().decided(peer, value)
        if self._best == before:
            return
        if before == 0:
            for _ in range(self.everyone - len(self.peers)):
                self.join(blank=False)
        elif self.churn and self._best < self.scenario.rounds:
            going = [n for n in self.followers if self._rng.random() < self.churn]
            for number in going:
                self.timeline.after(self._rng.uniform(0.0, 4.0), self.die, number)
                self.timeline.after(self._rng.uniform(0.0, 4.0), self.join)

    def followed(self, value: Value) -> None:
        """A follower has the state of a round."""
        self.lags_s.append(self.timeline.now - self.decided_at[value.round])

    def _done(self) -> bool:
        now = self.timeline.now
        if self._best >= self.scenario.rounds and now >= self._look_at:  # it is asked after every event
            self._look_at = now + TICK_S
            self._is_done = super()._done() and self._have_followed(now)
        return self._is_done

    def _have_followed(self, now: float) -> bool:
        self._followed_until = min(self._followed_until, now + FOLLOWED_S)
        behind = [n for n, one in self.followers.items() if one.started and one.round < self.scenario.rounds]
        if behind and now > self._followed_until:
            raise Violation("progress", f"{len(behind)} followers lack the last round {FOLLOWED_S} s after it")
        return not behind

    def _outcome(self, wall_s: float, violation: str, detail: str) -> Outcome:
        flat = super()._outcome(wall_s, violation, detail)
        now, members = max(self.timeline.now, 1e-9), len(self.peers)
        inside, control = (
            sum(place.control_bytes for place in places)
            for places in (self.network.places[:members], self.network.places[members:])
        )
        lags = sorted(self.lags_s)
        return dataclasses.replace(
            flat,
            peers=self.everyone,
            followers=len(self.followers),
            followers_died=self.died,
            followed_s_p50=round(lags[len(lags) // 2], 3) if lags else 0.0,
            followed_s_p99=round(lags[min(len(lags) - 1, int(0.99 * len(lags)))], 3) if lags else 0.0,
            most_served=self.most_served,
            control_bytes_per_peer_per_s=round(inside / members / now, 1),
            control_bytes_per_follower_per_s=round(control / max(1, self.everyone - members) / now, 1),
        )


class Follower(Surroundings):
    """One follower in its only life; what its member looks at is here too."""

    follows = is_follower = True

    def __init__(self, swarm: Crowd, number: int, *, blank: bool) -> None:
        self.swarm = swarm
        self.number = number
        identity = swarm.keys.identity(number)
        self.id = identity.peer_id
        self.chain = Chain(swarm.genesis, swarm.authority.peer_id, manifest=swarm.manifest)
        self.held: State | None = None if blank else State(swarm.genesis, swarm.zero)
        self.finals: dict[bytes, Finals] = {}
        self.links: set[int] = set()
        self.known: dict[PeerId, int] = {}
        self.changed = True
        self.started = False
        self._over = False
        self._dialled: dict[int, Backoff] = {}
        self._dial_at: dict[int, float] = {}
        self._asked: dict[int, tuple[int, Then]] = {}
        self._questions = 0
        self._neighbours = Neighbours(me=self.id, rng=random.Random(f"{swarm.scenario.seed} {number}"))
        self.replayed_rounds = swarm.components.work.replayed_rounds
        self._errands = Errands(self._perform, lambda: swarm.timeline.now)
        self.member = Member(identity=identity, surroundings=self, deal=deal, scores=DonorScores())
        self._box = Box(self.member, partial(do_by, DOERS, self), lambda: swarm.timeline.now)

    # -- what its member looks at ------------------------------------------------------------------------------

    @property
    def current(self) -> bool:
        """True if the state at the head is here."""
        return self.held is not None and self.held.value.hash == self.chain.standing.hash

    @property
    def digest(self) -> bytes:
        """Of the state at the head."""
        return self.chain.standing.digest

    @property
    def made(self) -> bool:
        """It makes nothing."""
        return False

    @property
    def round(self) -> int:
        """The round of its state; -1 without one."""
        return -1 if self.held is None else self.held.round

    def bound_in(self, position: object) -> list[Any]:
        """It signs nothing."""
        return []

    def alive(self) -> frozenset[PeerId]:
        """Those linked."""
        return frozenset(self.linked())

    def linked(self) -> list[PeerId]:
        """Peers that can be asked."""
        return [self.swarm.id_of(other) for other in sorted(self.links) if self.swarm.is_up(other)]

    def rules(self, round: int) -> Rules:
        """Those of the swarm."""
        return Rules(settings=self.swarm.settings, staleness_rounds=self.swarm.staleness_rounds)

    def new_life(self) -> bytes:
        """None is wanted of who signs nothing."""
        return NO_HASH

    def kept_places(self) -> int:
        """Places that are for whom it dials itself."""
        return self._neighbours.kept_places([self.swarm.id_of(other) for other in self.links])

    # -- its life ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """The process starts."""
        if not self._over:
            self.started = True
            self._box.put(Loaded())
            self.tick()

    def stop(self) -> None:
        """The process is gone."""
        self._over = True
        self._box.stop()
        self._errands.stop()
        self._asked.clear()

    def tick(self) -> None:
        """Do what is due, and come again."""
        if not self._over:
            self._dial()
            self._errands.look()
            self._box.put(Tick())
            self.swarm.timeline.after(TICK_S, self.tick)

    def _dial(self) -> None:
        now, swarm = self.swarm.timeline.now, self.swarm
        if not self.changed and not any(at <= now for at in self._dial_at.values()):
            return
        chosen = self._neighbours.choose(
            known={peer for peer, number in self.known.items() if swarm.is_up(number)},
            linked=[swarm.id_of(other) for other in self.links if swarm.is_up(other)],
            dialled=(),
            may_dial=lambda peer: now >= self._dial_at.get(self.known[peer], 0.0),
            is_proven=lambda peer: swarm.is_member(self.known[peer]),
        )
        self.changed = bool(chosen)
        self._dial_at = {number: at for number, at in self._dial_at.items() if at > now}
        for peer in chosen:
            number = self.known[peer]
            backoff = self._dialled.setdefault(number, Backoff(DIAL_BACKOFF_S, DIAL_BACKOFF_LIMIT_S))
            self._dial_at[number] = now + backoff.next_s()
            swarm.timeline.after(2 * swarm.network.delay_s(self.number, number), self._met, number)

    def _met(self, number: int) -> None:
        if self._over or number in self.links:
            return
        if len(self.links) < NEIGHBOUR_LIMIT and self.swarm.dial(self.number, number):
            self._dialled.pop(number, None)
            self._dial_at.pop(number, None)
            self._box.put(Tick())

    def lost(self, other: int) -> None:
        """The link with `other` is gone, and what was asked of it."""
        self.changed = True
        for question, (asked, then) in list(self._asked.items()):
            if asked == other:
                del self._asked[question]
                then(NetworkError("its link is gone"))
        self._box.put(Tick())

    # -- errands -----------------------------------------------------------------------------------------------

    def seek(self, effect: Seek) -> None:
        """Carry an errand out."""
        self._errands.begin(effect.errand, self._sought)

    def _sought(self, outcome: Any) -> None:
        if not self._over:
            self._box.put(Tick() if outcome is None else outcome)

    def _perform(self, request: errands.Request, then: Then) -> None:
        perform = PERFORMERS.get(type(request))
        if perform is None:
            raise LocalError(f"nothing simulated does {type(request).__name__}")
        perform(self, request, then)

    def ask(self, peer: PeerId, limit_s: float, then: Then, look_up: LookUp) -> None:
        """Ask a linked peer: `look_up` is called there, with what takes the answer and its size back.

        `then` gets the answer, or a NetworkError after `limit_s` or with the link.
        """
        swarm, other = self.swarm, self.swarm.numbers[peer]
        if other not in self.links:
            then(NetworkError("is not linked"))
            return
        self._questions += 1
        question = self._questions
        self._asked[question] = other, then
        swarm.timeline.after(limit_s, self._answered, question, NetworkError("does not answer"))

        def answer(came: Any, size: int) -> None:
            swarm.later(other, self.number, size, partial(self._answered, question, came))

        def arrive() -> None:
            if swarm.is_up(other) and self.number in swarm.links_of(other):
                look_up(other, answer)

        swarm.later(self.number, other, QUESTION_BYTES, arrive)

    def _answered(self, question: int, came: Any) -> None:
        found = self._asked.pop(question, None)
        if found is not None and not self._over:
            found[1](came)

    def ask_entries(self, request: errands.AskEntries, then: Then) -> None:
        """As a request says."""

        def look_up(other: int, answer: Answer) -> None:
            part = self.swarm.part(other, request.after, request.rebases)
            answer(part, self.swarm.entries_bytes(part.certificates))

        self.ask(request.peer, REQUEST_DEADLINE_S, then, look_up)

    def await_entries(self, request: errands.AwaitEntries, then: Then) -> None:
        """As a request says."""

        def look_up(other: int, answer: Answer) -> None:
            def now() -> None:
                if self.swarm.is_up(other):
                    part = self.swarm.part(other, request.after, request.rebases)
                    answer(part, self.swarm.entries_bytes(part.certificates))

            if not self.swarm.wait(other, self.id, request.after, request.rebases, now):
                answer(NetworkError("others wait there"), ANSWER_BYTES)

        self.ask(request.peer, AWAIT_S + REQUEST_DEADLINE_S, then, look_up)

    def take_entries(self, request: errands.TakeEntries, then: Then) -> None:
        """As a request says."""
        before, new = self.chain.head, 0
        came: RemoteError | None = None
        try:
            for entry in request.entries:
                new += entry.value not in self.chain and self.chain.extend(entry, trusted=request.trusted)
        except RemoteError as error:
            came = error
        if self.chain.head != before:
            self._box.put(HeadMoved())
        then(new if came is None else came)

    def ask_holders(self, request: errands.AskHolders, then: Then) -> None:
        """Ask all, and go on once the first has answered, or all have."""
        silent, found, others = set(request.peers), dict[PeerId, Header](), list[PeerId]()
        over = False

        def end() -> None:
            nonlocal over
            if not over and not self._over:
                over = True
                then(errands.Holders(found, others))

        def came(peer: PeerId, answer: Any) -> None:
            silent.discard(peer)
            try:
                if not isinstance(answer, Header):
                    raise NetworkError("holds none")
                check_header(answer, request.value, request.certified, peer)
                found[peer] = answer
                self.swarm.timeline.after(errands.HEADER_TIMEOUT_S, end)
            except (NetworkError, RemoteError):
                others.append(peer)
            if not silent:
                end()

        def look_up(other: int, answer: Answer) -> None:
            state = self.swarm.state_of(other)
            held = state is not None and state.value.hash == request.value.hash
            answer(Header.of(state.value, state.values) if held and state else None, ANSWER_BYTES)

        for peer in request.peers:
            self.ask(peer, REQUEST_DEADLINE_S, partial(came, peer), look_up)
        if not request.peers:
            end()

    def fetch_state(self, request: errands.FetchState, then: Then) -> None:
        """The state of the first holder that gives it, in one payload."""
        value, size = request.value, self.swarm.state_bytes
        left = sorted(request.holders)

        def look_up(other: int, answer: Answer) -> None:
            state = self.swarm.state_of(other)
            if state is None or state.value.hash != value.hash:
                answer(None, ANSWER_BYTES)
                return
            delay_s = self.swarm.network.payload_delay_s(other, self.number, size)
            self.swarm.timeline.after(delay_s, answer, state, ANSWER_BYTES)

        def came(state: Any) -> None:
            if isinstance(state, State) and state_digest(value.base, state.values) == request.header.digest:
                then(state)
            else:
                next_one()

        def next_one() -> None:
            if left:
                self.ask(left.pop(0), FOLLOWED_S, came, look_up)
            else:
                then(None)

        next_one()

    def replay(self, request: errands.Replay, then: Then) -> None:
        """Replay rounds along the chain as far as their finals can be had, of one peer after the other."""
        state = request.state
        assert isinstance(state, State)
        if state.round >= request.chain.standing.round or not on_branch(request.chain, state):
            then(state)
            return
        value = request.chain.value(state.round + 1)
        left = [peer for peer in request.peers if self.swarm.numbers[peer] in self.links]
        size = self.swarm.components.work.model_bytes

        def look_up(other: int, answer: Answer) -> None:
            finals = self.swarm.finals_of(other, value.plan)
            if finals is None:
                answer(None, ANSWER_BYTES)
                return
            delay_s = self.swarm.network.payload_delay_s(other, self.number, size)
            self.swarm.timeline.after(delay_s, answer, finals, ANSWER_BYTES)

        def came(finals: Any) -> None:
            if not isinstance(finals, Finals) or finals.plan.hash != value.plan:
                next_one()
                return
            mine = self.swarm.opened(finals)
            fragment = self.swarm.fragments.of_round(value.round)
            after = State(value, next_state(state.values, mine.decoded(), fragment))
            if state_digest(value.base, after.values) != value.digest:
                next_one()
                return
            self._keep(value.plan, mine)
            self.replay(errands.Replay(after, request.chain, request.peers), then)

        def next_one() -> None:
            if left:
                self.ask(left.pop(0), REQUEST_DEADLINE_S + AWAIT_S, came, look_up)
            else:
                then(state)

        next_one()

    def _keep(self, plan: bytes, finals: Finals) -> None:
        self.finals[plan] = finals
        while len(self.finals) > FINALS_KEPT:
            del self.finals[next(iter(self.finals))]

    def adopt(self, effect: Adopt) -> None:
        """Hold a state, and let those know who wait for it."""
        assert isinstance(effect.state, State)
        value = effect.state.value
        if effect.state.values.tobytes() != self.swarm.judge.states[value.hash].tobytes():
            raise Violation("the reference", f"follower {self.number} holds another state of round {value.round}")
        self.held = effect.state
        self.swarm.followed(value)
        self.swarm.look(self.number)


def _at_once(came: Any) -> Callable[[Follower, Any, Then], None]:
    """A request that comes to the same at once."""
    return lambda follower, request, then: then(came)


PERFORMERS: Mapping[type[Any], Callable[[Follower, Any, Then], None]] = {
    errands.AskEntries: Follower.ask_entries,
    errands.AskHolders: Follower.ask_holders,
    errands.AwaitEntries: Follower.await_entries,
    errands.AwaitLinks: lambda follower, request, then: follower.swarm.timeline.after(request.limit_s, then, None),
    errands.CountLacking: lambda follower, request, then: then(sum(p not in follower.finals for p in request.plans)),
    errands.FetchState: Follower.fetch_state,
    errands.FindBegun: _at_once(()),
    errands.LookElsewhere: _at_once({}),
    errands.LookUp: _at_once(None),
    errands.Replay: Follower.replay,
    errands.TakeEntries: Follower.take_entries,
}
"""The method that carries out each request of a follower's errand; another one is an error."""

DOERS: Mapping[type[Any], Callable[[Any, Any], Any]] = {
    Adopt: Follower.adopt,
    Blame: nothing,
    Examine: nothing,
    FindWork: lambda follower, effect: False,
    Rejoin: nothing,
    ResumeWork: nothing,
    Seek: Follower.seek,
    SettleWork: nothing,
    StandOnHead: nothing,
    StopReduction: nothing,
}
"""The method that carries out each effect of a follower's member; that it takes part in anything is an error."""


def run_crowd(scenario: Scenario, components: Components | None = None) -> Outcome:
    """The outcome of a scenario with followers."""
    return Crowd(scenario, components).run()
