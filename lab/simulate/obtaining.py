"""Carries out the errands of a simulated peer's member (`shoal.protocol.errands`), in virtual time.

In a node `shoal.node.state.errands` and `catchup` do this: which state, from whom and when again is decided by the
member that nodes run. Certificates are checked one against the one before, finals by their owners' signatures, state
chunks by a header that has the certified digest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from shoal.collectives.codecs import F32
from shoal.collectives.finals import FinalChunk, FinalFormat, Finals
from shoal.lab.errands import Errands, Then
from shoal.lab.simulate.donations import OBTAIN_LIMIT_S
from shoal.lab.simulate.fetching import REQUEST_BYTES, Fetching, Job
from shoal.lab.simulate.judge import Violation
from shoal.lab.simulate.states import Cache, Header, next_state, state_digest
from shoal.lab.simulate.talk import (
    Answer,
    ChainPart,
    ChunkFrame,
    FinalsAnswer,
    GetChain,
    GetFinals,
    GetHeader,
    HeaderAnswer,
)
from shoal.node.state.state_server import REQUEST_DEADLINE_S
from shoal.protocol import peering
from shoal.protocol.agreement import Broadcast
from shoal.protocol.catching_up import check_header, on_branch
from shoal.protocol.donors import DonorScores
from shoal.protocol.errands import (
    HEADER_TIMEOUT_S,
    AskEntries,
    AskHolders,
    AwaitEntries,
    AwaitLinks,
    CountLacking,
    Errand,
    FetchState,
    FindBegun,
    FindEarlier,
    Holders,
    KeepEarlier,
    LookElsewhere,
    LookUp,
    ReplaceChain,
    Replay,
    Request,
    TakeEntries,
    Warn,
)
from shoal.protocol.errors import LocalError, NetworkError, RemoteError
from shoal.protocol.followers import AWAIT_S
from shoal.protocol.identity import PeerId
from shoal.protocol.inputs import HeadMoved, Input, Tick
from shoal.protocol.messages import NO_HASH, Entry, Term, Value
from shoal.swarm.lanes.frame import SCOPE_BYTES

if TYPE_CHECKING:
    from shoal.lab.simulate.peer import SimulatedPeer

FETCH_PERIOD_S = 1.0
"""Between two attempts to have finals that are wanted and that nobody gave."""

GotFinals = Callable[[Finals | None], None]


@dataclass(frozen=True, slots=True, eq=False)
class State:
    """A state, and the value that certifies it."""

    value: Value
    values: F32

    @property
    def term(self) -> Term:
        """In which term the round was that led to it."""
        return self.value.term

    @property
    def round(self) -> int:
        """The round that led to it."""
        return self.value.round


class Obtaining:
    """Errands of a peer, in one of its lives. put: takes what comes of them, as an input of the member's."""

    def __init__(
        self,
        peer: SimulatedPeer,
        *,
        scores: DonorScores,
        put: Callable[[Input], None],
        computed: Callable[[bytes], Finals | None],
    ) -> None:
        self._peer = peer
        self._swarm = peer.swarm
        self._disk = peer.disk
        self._put = put
        self._computed = computed
        self._scores = scores
        self._lacks_since: float | None = None
        self._errands = Errands(self._perform, lambda: self.now)
        self._questions: list[_Question] = []
        self._awaiting: list[tuple[float, Then]] = []
        self._polls: list[_Poll] = []
        self._waiting: dict[bytes, list[GotFinals]] = {}
        self._sought: dict[bytes, list[Then]] = {}
        self._unfinished: tuple[Value, Header, dict[int, bytes]] | None = None
        self.cache = Cache()
        self.transfers: dict[bytes, Fetching] = {}
        if self.current and self.held is not None:
            self.serve(self.held)

    @property
    def now(self) -> float:
        """Virtual time."""
        return self._swarm.timeline.now

    @property
    def current(self) -> bool:
        """True if the state at the head is here."""
        return not self._disk.blank and self._disk.held == self._disk.ledger.standing.hash

    @property
    def held(self) -> State | None:
        """The state that is here; None if there is none."""
        disk = self._disk
        if disk.blank:
            return None
        return State(disk.held_value, disk.state)

    def hold(self, state: State) -> None:
        """Have a state on disk, and serve it."""
        self._disk.take(state.value, state.values)
        self.serve(state)
        self._swarm.held(self._peer)

    def serve(self, state: State) -> None:
        """Have a state for others. Raises Violation if it is another than the certified one."""
        self.cache.put(state.value, state.values, self.now)
        if state.values.tobytes() != self._swarm.judge.states[state.value.hash].tobytes():
            name = f"peer {self._peer.number} holds another state of round {state.round}"
            raise Violation("the reference", name)

    def begin_serving(self, round: int) -> Header | None:
        """The header of a state that is served from now on: from disk, if it is kept there to be gone back to."""
        header, ledger = self.cache.begin_serving(round, self.now), self._disk.ledger
        if header is None and round <= ledger.standing.round:
            value = ledger.value(round)
            if value.hash in self._disk.kept:
                self.serve(State(value, self._disk.kept[value.hash]))
                header = self.cache.begin_serving(round, self.now)
        return header

    def stop(self) -> None:
        """The process ended."""
        for fetching in self.transfers.values():
            fetching.stop()
        self._waiting.clear()
        self._sought.clear()
        self._errands.stop()
        self._questions.clear()
        self._awaiting.clear()
        self._polls.clear()

    def tick(self, now: float) -> None:
        """Go on without those who do not answer, and look how long the state at the head is lacking."""
        self._swarm.donations.check(self._peer, now)
        self._answered(lambda question: now >= question.until, NetworkError("does not answer"))
        self._look_at_links(now)
        self._errands.look()
        for poll in list(self._polls):
            poll.look(now)
        if self.current:
            self._lacks_since = None
        elif self._lacks_since is None or self._swarm.is_troubled(now):
            self._lacks_since = now
        elif now - self._lacks_since > OBTAIN_LIMIT_S:
            raise Violation("no wait too long", f"peer {self._peer.number} lacks its state for {OBTAIN_LIMIT_S} s")

    # -- errands -----------------------------------------------------------------------------------------------

    def begin(self, errand: Errand) -> None:
        """Carry an errand out, request after request."""
        self._errands.begin(errand, self._over)

    def _perform(self, request: Request, then: Then) -> None:
        perform = PERFORMERS.get(type(request))
        if perform is None:
            raise LocalError(f"nothing simulated does {type(request).__name__}")
        perform(self, request, then)

    def _over(self, outcome: Input | None) -> None:
        if outcome is not None:
            self._put(outcome)
        elif self._disk.ledger.admitted is not None:
            self._put(Tick())  # who follows may have another wait to begin

    def _numbers(self, peers: Sequence[PeerId]) -> list[int]:
        return [self._swarm.numbers[peer] for peer in peers]

    def _broadcast(self, request: Broadcast, then: Then) -> None:
        self._swarm.say(self._peer, request.message)
        then(None)

    def _look_up(self, request: LookUp, then: Then) -> None:
        then(None)  # how much of its own work was counted is not modelled

    def _count_lacking(self, request: CountLacking, then: Then) -> None:
        then(sum(self._computed(plan) is None for plan in request.plans))

    def _find_begun(self, request: FindBegun, then: Then) -> None:
        then([] if self._unfinished is None else [(self._unfinished[0].round, self._unfinished[1].digest)])

    def _ask_entries(self, request: AskEntries, then: Then) -> None:
        other, asked = self._swarm.numbers[request.peer], GetChain(request.after, request.rebases)
        if other not in self._peer.watch.links:
            then(NetworkError("is not linked"))
            return
        self._questions.append(_Question(other, asked, self.now + REQUEST_DEADLINE_S, then))
        self._swarm.call(self._peer, other, asked, REQUEST_BYTES)

    def _await_entries(self, request: AwaitEntries, then: Then) -> None:
        other, asked = self._swarm.numbers[request.peer], GetChain(request.after, request.rebases, waits=True)
        if other not in self._peer.watch.links:
            then(NetworkError("is not linked"))
            return
        self._questions.append(_Question(other, asked, self.now + AWAIT_S + REQUEST_DEADLINE_S, then))
        self._swarm.call(self._peer, other, asked, REQUEST_BYTES)

    def has_no_place(self, sender: int, asked: GetChain) -> None:
        """Others wait there."""
        error = NetworkError("others wait there")
        self._answered(lambda question: (question.other, question.asked) == (sender, asked), error)

    def told_chain(self, sender: int, part: ChainPart) -> None:
        """Somebody answered with entries of the chain."""
        answer = peering.ChainPart(certificates=part.entries, head=part.head)
        self._answered(lambda question: (question.other, question.asked) == (sender, part.asked), answer)

    def _answered(self, wanted: Callable[[_Question], bool], came: peering.ChainPart | NetworkError) -> None:
        answered = [question for question in self._questions if wanted(question)]
        self._questions = [question for question in self._questions if question not in answered]
        for question in answered:
            question.then(came)

    def _take_entries(self, request: TakeEntries, then: Then) -> None:
        head, new = self._disk.ledger.head, 0
        came: RemoteError | None = None
        try:
            for entry in request.entries:
                new += entry.value not in self._disk.ledger and self.extend(entry)
        except RemoteError as error:
            came = error
        if self._disk.ledger.head != head:
            self._put(HeadMoved())
        then(new if came is None else came)

    def _replace_chain(self, request: ReplaceChain, then: Then) -> None:
        theirs, disk = request.theirs, self._disk
        if theirs.head.term.rebases > disk.ledger.head.term.rebases:
            disk.replace(theirs, request.height)
            for entry in theirs.entries[request.height :]:
                self._swarm.judge.decided(entry)
            disk.blank = disk.blank or disk.held_value.round > theirs.up_to(request.height).head.state_round
            self._stand_on_branch()
            self._put(HeadMoved())
        then(None)

    def _await_links(self, request: AwaitLinks, then: Then) -> None:
        self._awaiting.append((self.now + request.limit_s, then))
        self._look_at_links(self.now)

    def _look_at_links(self, now: float) -> None:
        """Of those who wait for links, let go on whose time is up, or all if everyone that there is is linked."""
        known = self._peer.watch.wanted()
        complete = known <= set(self._peer.watch.links)
        over = [one for one in self._awaiting if complete or now >= one[0]]
        self._awaiting = [one for one in self._awaiting if one not in over]
        for _, then in over:
            then(None)

    def _look_elsewhere(self, request: LookElsewhere, then: Then) -> None:
        then({})  # every peer is in one place

    def _warn(self, request: Warn, then: Then) -> None:
        then(None)  # no user reads it

    def _find_earlier(self, request: FindEarlier, then: Then) -> None:
        value, values = self._disk.ledger.value(request.round), self._disk.earlier(request.round)
        then(None if values is None else State(value, values))

    def _keep_earlier(self, request: KeepEarlier, then: Then) -> None:
        state = request.state
        assert isinstance(state, State)
        self._disk.kept[state.value.hash] = state.values
        self.serve(state)
        then(state_digest(state.value.base, state.values))

    def extend(self, entry: Entry) -> bool:
        """Have an entry of the chain on disk; a state of a branch that it abandons gives way to an earlier one."""
        disk = self._disk
        if not disk.append(entry):
            return False
        self._swarm.judge.decided(entry)
        self._stand_on_branch()
        return True

    def _stand_on_branch(self) -> None:
        """A state of what was abandoned gives way to an earlier one, if that is here."""
        disk = self._disk
        held, standing = self.held, disk.ledger.standing
        if held is not None and not on_branch(disk.ledger, held):
            values = disk.earlier(standing.round)
            if values is None:
                disk.blank = True
            else:
                self.hold(State(standing, values))

    def over(self, waiting: _Poll) -> None:
        """Nobody is waited for any more."""
        self._polls = [one for one in self._polls if one is not waiting]

    def _replay(self, request: Replay, then: Then) -> None:
        """Replay rounds along the chain as far as their finals can be had."""
        state = request.state
        assert isinstance(state, State)
        if state.round >= request.chain.standing.round or not on_branch(request.chain, state):
            then(state)
        else:
            value = request.chain.value(state.round + 1)
            self.finals(value.plan, partial(self._replay_one, request, state, value, then))

    def _replay_one(self, request: Replay, state: State, value: Value, then: Then, finals: Finals | None) -> None:
        if finals is None:
            then(state)
            return
        after = State(value, next_state(state.values, finals.decoded(), self._swarm.fragments.of_round(value.round)))
        if state_digest(value.base, after.values) != value.digest:
            raise Violation("the reference", f"peer {self._peer.number} replays round {value.round} to another state")
        self.serve(after)
        self._replay(Replay(after, request.chain, request.peers), then)

    # -- a whole state -----------------------------------------------------------------------------------------

    def _ask_holders(self, request: AskHolders, then: Then) -> None:
        asked = self._numbers(request.peers)
        poll = _Poll(self, request.value, asked, then, self.now)
        self._polls.append(poll)
        for other in asked:
            self._swarm.call(self._peer, other, GetHeader(request.value.round), REQUEST_BYTES)
        poll.look(self.now)

    def header(self, donor: int, value: Value, answer: Answer) -> Header:
        """Header of a donor's state of `value`. Raises NetworkError if it holds none, RemoteError if another."""
        peer = self._swarm.peers[donor].id
        if not isinstance(answer, HeaderAnswer) or answer.round != value.round:
            raise RemoteError("answers a request for a header with something else", peer=peer)
        if answer.header is None:
            raise NetworkError("no state of that round")
        check_header(answer.header, value, value.digest if value.round else NO_HASH, peer)
        return answer.header

    def holders(self, found: Mapping[int, Header], others: Sequence[int]) -> Holders:
        """Peers that hold a state, and peers that do not."""
        peers = self._swarm.peers
        return Holders({peers[other].id: header for other, header in found.items()}, [peers[o].id for o in others])

    def offended(self, other: int, error: RemoteError) -> None:
        """`other` said something else than what is certified."""
        self._scores.offended(self._swarm.peers[other].id, self.now)
        self._swarm.blamed(self._peer.number, other, str(error))

    def _fetch_state(self, request: FetchState, then: Then) -> None:
        value, header = request.value, request.header
        assert isinstance(header, Header)
        if header.digest in self._sought:  # to go back to it, and to catch up: who wants the same waits for it
            self._sought[header.digest].append(then)
            return
        self._sought[header.digest] = [then]
        came: dict[int, bytes] = {}
        if self._unfinished is not None and self._unfinished[1] == header:
            came = self._unfinished[2]
        self._unfinished = value, header, came

        def accept(chunk: int, data: bytes) -> None:
            header.check(chunk, data)
            came[chunk] = data

        self._swarm.donations.transfers += 1
        self.fetch(
            Job(
                scope=header.digest[:SCOPE_BYTES],
                sizes=[self._swarm.state_chunk_bytes] * len(header.hashes),
                here=frozenset(came),
                question=GetHeader(value.round),
                agrees=partial(self._agrees, value),
                known=frozenset(self._numbers(sorted(request.holders))),
                accept=accept,
                ended=partial(self._fetched_state, value, header, came),
            ),
            self._numbers(request.peers),
        )

    def _agrees(self, value: Value, donor: int, answer: Answer) -> None:
        self.header(donor, value, answer)

    def _fetched_state(self, value: Value, header: Header, came: dict[int, bytes], done: bool) -> None:
        waiting = self._sought.pop(header.digest, [])
        if not done:
            for then in waiting:
                then(None)
            return
        self._unfinished = None
        state = State(value, header.assembled(came[chunk] for chunk in range(len(header.hashes))))
        self._swarm.donations.obtained += 1
        self.serve(state)
        for then in waiting:
            then(state)

    # -- finals ------------------------------------------------------------------------------------------------

    def finals(self, plan: bytes, then: GotFinals) -> None:
        """Call `then` with the finals of a plan, from here or from several of those who have them; None: nobody has."""
        held = self._computed(plan)
        if held is not None:
            then(held)
            return
        if plan in self._waiting:  # who wants the same waits for it
            self._waiting[plan].append(then)
            return
        self._waiting[plan] = [then]
        chain = self._disk.ledger
        round = next((value.round for value in self._disk.chain if value.plan == plan), chain.head.next_round)
        found: dict[int, FinalChunk] = {}
        known: list[FinalFormat] = []

        def agrees(donor: int, answer: Answer) -> None:
            if not isinstance(answer, FinalsAnswer) or answer.plan is None:
                raise NetworkError("no finals of that plan")
            if answer.plan.hash != plan:
                raise RemoteError("names another plan", peer=self._swarm.peers[donor].id)
            if not known:
                known.append(FinalFormat(answer.plan))

        def accept(chunk: int, data: bytes) -> None:
            found[chunk] = known[0].open(chunk, data)

        def ended(done: bool) -> None:
            finals: Finals | None = None
            if done:
                finals = Finals(plan=known[0].plan, chunks=tuple(found[c] for c in range(len(found))))
                if self._peer.disk.ledger.admitted is not None:  # who waits at this peer takes them from here
                    self._disk.keep_finals(finals)
            for waiting in self._waiting.pop(plan, []):
                waiting(finals)

        job = Job(
            scope=plan[:SCOPE_BYTES],
            sizes=[int(self._swarm.chunk_bytes)] * self._swarm.fragments.of_round(round).grid.chunks,
            question=GetFinals(plan),
            agrees=agrees,
            accept=accept,
            ended=ended,
        )
        self.fetch(job, sorted(self._peer.watch.links))

    def copy_finals(
        self,
        final_format: FinalFormat,
        chunks: Sequence[int],
        donors: Sequence[PeerId],
        take: Callable[[FinalChunk], None],
        ended: Callable[[bool], None],
    ) -> Fetching:
        """Have some finals of a plan from these; `take` is given each, and `ended` whether all came."""
        plan = final_format.plan

        def agrees(donor: int, answer: Answer) -> None:
            if not isinstance(answer, FinalsAnswer) or answer.plan is None:
                raise NetworkError("no finals of that plan")

        job = Job(
            scope=plan.hash[:SCOPE_BYTES],
            sizes=[int(self._swarm.chunk_bytes)] * plan.chunks,
            here=frozenset(range(plan.chunks)).difference(chunks),
            question=GetFinals(plan.hash),
            agrees=agrees,
            accept=lambda chunk, data: take(final_format.open(chunk, data)),
            ended=ended,
        )
        return self.fetch(job, self._numbers(donors))

    # -- transfers ---------------------------------------------------------------------------------------------

    def fetches(self, round: int) -> bool:
        """True if the state of a round is on its way."""
        return any(one.job.question == GetHeader(round) and not one.over for one in self.transfers.values())

    def fetch(self, job: Job, others: Sequence[int]) -> Fetching:
        """Begin a transfer from these."""
        self.transfers = {scope: one for scope, one in self.transfers.items() if not one.over}
        fetching = self.transfers[job.scope] = Fetching(self._peer, job, self._scores)
        fetching.begin(others)
        return fetching

    def told(self, sender: int, answer: Answer) -> None:
        """Somebody answered whether a state or finals are held."""
        question = GetHeader(answer.round) if isinstance(answer, HeaderAnswer) else GetFinals(answer.wanted)
        for poll in list(self._polls):
            if isinstance(answer, HeaderAnswer) and answer.round == poll.value.round:
                poll.told(sender, answer)
        for fetching in list(self.transfers.values()):
            if fetching.job.question == question:
                fetching.told(sender, answer)

    def frame(self, sender: int, frame: ChunkFrame) -> None:
        """Bytes of a chunk came."""
        fetching = self.transfers.get(frame.scope)
        if fetching is not None:
            fetching.frame(sender, frame)

    def linked(self, other: int) -> None:
        """There is a lane to `other`."""
        for fetching in list(self.transfers.values()):
            fetching.linked(other)

    def lane_broke(self, other: int) -> None:
        """There is none any more."""
        self._answered(lambda question: question.other == other, NetworkError("its lane broke"))
        for fetching in list(self.transfers.values()):
            fetching.lane_broke(other)


PERFORMERS: Mapping[type[Any], Callable[[Obtaining, Any, Then], None]] = {
    AskEntries: Obtaining._ask_entries,
    AskHolders: Obtaining._ask_holders,
    AwaitEntries: Obtaining._await_entries,
    AwaitLinks: Obtaining._await_links,
    Broadcast: Obtaining._broadcast,
    CountLacking: Obtaining._count_lacking,
    FetchState: Obtaining._fetch_state,
    FindBegun: Obtaining._find_begun,
    FindEarlier: Obtaining._find_earlier,
    KeepEarlier: Obtaining._keep_earlier,
    LookElsewhere: Obtaining._look_elsewhere,
    LookUp: Obtaining._look_up,
    Replay: Obtaining._replay,
    ReplaceChain: Obtaining._replace_chain,
    TakeEntries: Obtaining._take_entries,
    Warn: Obtaining._warn,
}
"""The method that carries out each request of an errand."""


@dataclass(frozen=True, slots=True, eq=False)
class _Question:
    """A request for entries of the chain to which no answer has come."""

    other: int
    asked: GetChain
    until: float
    then: Then


class _Poll:
    """Poll of the peers that hold the state of a round, among those who say so soon enough."""

    def __init__(
        self,
        obtaining: Obtaining,
        value: Value,
        asked: Sequence[int],
        then: Then,
        now: float,
    ) -> None:
        self.value = value
        self._obtaining = obtaining
        self._asked = asked
        self._then = then
        self._until = now + REQUEST_DEADLINE_S
        self._found: dict[int, Header] = {}
        self._others: list[int] = []
        self._silent = set(asked)
        self._over = False

    def told(self, sender: int, answer: HeaderAnswer) -> None:
        """An answer came."""
        if sender not in self._silent:
            return
        self._silent.discard(sender)
        now = self._obtaining.now
        try:
            self._found[sender] = self._obtaining.header(sender, self.value, answer)
        except NetworkError:
            self._others.append(sender)
        except RemoteError as error:
            self._obtaining.offended(sender, error)
        else:
            self._until = min(self._until, now + HEADER_TIMEOUT_S)
        self.look(now)

    def look(self, now: float) -> None:
        """Go on when all have answered, or the rest had its time."""
        if not self._over and (not self._silent or now >= self._until):
            self._over = True
            self._obtaining.over(self)
            found = {other: self._found[other] for other in self._asked if other in self._found}
            self._then(self._obtaining.holders(found, self._others))
