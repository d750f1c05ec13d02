"""Chain and state of a simulated peer from others: what `shoal.node.state.catchup` and `state_sync` are in a node.

    behind by few rounds whose finals can be had ─── replay them, one after the other
    else ─── the headers that peers hold now ─► one round ─► its chunks, from all of them at once ─► replay the rest

Certificates are checked one against the one before, finals by their owners' signatures, state chunks by a header that
has the certified digest. While this goes on the peer takes part in no round; what it cannot have now is tried again.
Where rounds are shorter than this takes, the peer says that it comes, and looks whether the chain stands still before
it begins a round (`protocol.newcomers`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from shoal.collectives.finals import FinalChunk, FinalFormat, Finals
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
from shoal.node.state.catchup import ASKED_LIMIT, HEADER_TIMEOUT_S
from shoal.node.state.state_server import REQUEST_DEADLINE_S
from shoal.node.state.state_store import PURSUIT_LIMIT
from shoal.node.state.state_sync import RETRY_S
from shoal.node.state.transfer import DonorScores
from shoal.protocol.errors import NetworkError, RemoteError
from shoal.protocol.messages import Certificate, Value
from shoal.protocol.newcomers import coming
from shoal.swarm.lanes.frame import SCOPE_BYTES

if TYPE_CHECKING:
    from shoal.lab.simulate.peer import SimulatedPeer

FETCH_PERIOD_S = 1.0
"""A request for certificates that nobody answers goes to another peer after this long."""

Then = Callable[[], None]
GotHolders = Callable[[dict[int, Header], list[int]], None]
GotFinals = Callable[[Finals | None], None]


class Obtaining:
    """What a peer lacks, in one of its lives. `ready` is called whenever the state at the head is here again."""

    def __init__(self, peer: SimulatedPeer, *, ready: Then, moved: Then, computed: Callable[[bytes], Finals | None]):
        self._peer = peer
        self._swarm = peer.swarm
        self._disk = peer.disk
        self._ready = ready
        self._moved = moved
        self._computed = computed
        self._scores = DonorScores()
        self._busy = False
        self._due_at = float("-inf")
        self._asked = 0
        self._lacks_since: float | None = None
        self._poll: _Poll | None = None
        self._waiting: dict[bytes, list[GotFinals]] = {}
        self._unfinished: tuple[Value, Header, dict[int, bytes]] | None = None
        self._began_at = 0.0
        self._took_s: float | None = None  # to come to the state at the head, the last time
        self._awaited = False
        self._pursuits = 0
        self._confirming = False  # the state is here, and somebody is asked whether the chain went on
        self.cache = Cache()
        self.transfers: dict[bytes, Fetching] = {}
        if self.current:
            self._put()

    @property
    def now(self) -> float:
        """Virtual time."""
        return self._swarm.timeline.now

    @property
    def current(self) -> bool:
        """Whether the state at the head is here."""
        return self._disk.held == self._disk.ledger.head.hash

    # -- when --------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """The state at the head is not here: ask how far others are, and get it."""
        others = sorted(self._peer.watch.links)
        if self._busy or self.current:
            return
        if others:
            self._asked += 1
            self._ask_chain(others[self._asked % len(others)])
        else:
            self._advance()

    def ahead(self, sender: int) -> None:
        """`sender` is in a later round."""
        if not self._busy and self.now >= self._due_at:
            self._ask_chain(sender)

    def stop(self) -> None:
        """The process ended."""
        for fetching in self.transfers.values():
            fetching.stop()
        self._waiting.clear()

    def tick(self, now: float) -> None:
        """Try again what could not be had, and look how long that has gone on."""
        self._swarm.donations.check(self._peer, now)
        if self.current:
            self._lacks_since = None
            if self._confirming and now >= self._due_at:
                self._confirmed()
            return
        if self._lacks_since is None or self._swarm.is_troubled(now):
            self._lacks_since = now
        elif now - self._lacks_since > OBTAIN_LIMIT_S:
            raise Violation("no wait too long", f"peer {self._peer.number} lacks its state for {OBTAIN_LIMIT_S} s")
        if self._poll is not None:
            self._poll.look(now)
        if now >= self._due_at:
            self.begin()

    def _ask_chain(self, other: int) -> None:
        self._due_at = self.now + FETCH_PERIOD_S
        self._swarm.call(self._peer, other, GetChain(self._disk.height), REQUEST_BYTES)

    # -- certificates ------------------------------------------------------------------------------------------

    def told_chain(self, part: ChainPart) -> None:
        """Extend the chain by what holds and leads further, and get the state there."""
        if self._busy:
            return
        if self._extends(part.certificates):
            self._moved()
        if not self.current:
            self._advance()
        elif self._confirming:
            self._confirmed()

    def _extends(self, certificates: Sequence[Certificate]) -> bool:
        disk = self._disk
        height = disk.height
        try:
            for certificate in certificates:
                if certificate.value not in disk.ledger:
                    disk.append(certificate)
                    self._swarm.judge.decided(certificate)
        except RemoteError:
            pass  # those before it count
        return disk.height > height

    # -- the state at the head ---------------------------------------------------------------------------------

    def _advance(self) -> None:
        self._busy = True
        if not self._confirming:
            self._begin_attempt()
        self._confirming = False
        held = self._place_held()
        behind = len(self._disk.chain) - 1 - (held or 0)
        if held is not None and behind <= self._swarm.components.work.replayed_rounds:
            self._replay(self._replayed)
        else:
            self._choose()

    def _begin_attempt(self) -> None:
        head = self._disk.ledger.head
        quick = self._took_s is not None and self._took_s <= self._swarm.settings.grace_s / 2
        self._awaited = quick and self._peer.id not in head.members
        self._began_at, self._pursuits = self.now, 0
        if self._awaited:
            self._swarm.say(self._peer, coming(head))

    def _place_held(self) -> int | None:
        """Where in the chain the state is that is here; None if there is none."""
        if self._disk.blank:
            return None
        return next(i for i, value in enumerate(self._disk.chain) if value.hash == self._disk.held)

    def _replayed(self) -> None:
        if self.current:
            self._end()
        else:
            self._choose()

    def _end(self) -> None:
        self._busy = False
        self._due_at = self.now + RETRY_S
        if not self.current:
            return
        self._pursuits += 1
        others = sorted(self._peer.watch.links)
        if self._awaited and others and self._pursuits < PURSUIT_LIMIT:
            self._confirming = True
            self._ask_chain(others[self._asked % len(others)])
        else:
            self._confirmed()

    def _confirmed(self) -> None:
        """The state is that of the last round, as far as anybody said."""
        self._confirming = False
        self._took_s = self.now - self._began_at
        self._ready()

    def _replay(self, then: Then) -> None:
        """Replay rounds along the chain as far as their finals can be had."""
        held = self._place_held()
        if held is None or self.current:
            then()
        else:
            value = self._disk.chain[held + 1]
            self.finals(value.plan, partial(self._replay_one, value, then))

    def _replay_one(self, value: Value, then: Then, finals: Finals | None) -> None:
        if finals is None:
            then()
            return
        state = next_state(self._disk.state, finals.decoded(), self._swarm.fragments.of_round(value.round))
        if state_digest(value.base, state) != value.digest:
            raise Violation("the reference", f"peer {self._peer.number} replays round {value.round} to another state")
        self._disk.take(value, state)
        self._put()
        self._replay(then)

    def _put(self) -> None:
        disk = self._disk
        value = next(value for value in disk.chain if value.hash == disk.held)
        self.cache.put(value, disk.state, self.now)
        reference = self._swarm.judge.states[value.hash]
        if disk.state.tobytes() != reference.tobytes():
            raise Violation("the reference", f"peer {self._peer.number} holds another state of round {value.round}")

    def decided(self) -> None:
        """The peer's own round led to the state at the head."""
        self._put()

    # -- a whole state -----------------------------------------------------------------------------------------

    def _choose(self) -> None:
        """Which state to fetch: one that came in part, or the newest that most of those hold who hold any."""
        goal = self._disk.ledger.head
        begun = None if self._unfinished is None else self._unfinished[0]
        lasts = begun is not None and goal.round <= begun.round + self._swarm.components.work.replayed_rounds
        if begun is not None and begun in self._disk.chain and lasts:
            self._holders(begun, sorted(self._peer.watch.links), partial(self._choose_begun, begun))
        else:
            self._choose_newest()

    def _choose_begun(self, value: Value, found: dict[int, Header], others: list[int]) -> None:
        if found:
            self._fetch_state(value, found)
        else:
            self._choose_newest()

    def _choose_newest(self) -> None:
        self._holders(self._disk.ledger.head, sorted(self._peer.watch.links), self._choose_older)

    def _choose_older(self, newest: dict[int, Header], others: list[int]) -> None:
        chain, held = self._disk.chain, self._place_held() or 0
        if others and len(chain) - 2 > max(0, held):
            self._holders(chain[-2], others, partial(self._chosen, newest))
        else:
            self._chosen(newest, {}, others)

    def _chosen(self, newest: dict[int, Header], older: dict[int, Header], others: list[int]) -> None:
        chain = self._disk.chain
        if len(newest) >= len(older) and newest:
            self._fetch_state(chain[-1], newest)
        elif older:
            self._fetch_state(chain[-2], older)
        else:
            self._end()

    def _holders(self, value: Value, others: Sequence[int], then: GotHolders) -> None:
        ranked = self._scores.ranked([self._swarm.peers[other].id for other in others], self.now)[:ASKED_LIMIT]
        asked = [self._swarm.numbers[peer] for peer in ranked]
        self._poll = _Poll(self, value, asked, then, self.now)
        for other in asked:
            self._swarm.call(self._peer, other, GetHeader(value.round), REQUEST_BYTES)
        self._poll.look(self.now)

    def polled(self) -> None:
        """Enough is known of who holds what."""
        self._poll = None

    def header(self, donor: int, value: Value, answer: Answer) -> Header:
        """What a donor says the state of `value` is. Raises NetworkError if it holds none, RemoteError if another."""
        peer = self._swarm.peers[donor].id
        if not isinstance(answer, HeaderAnswer) or answer.round != value.round:
            raise RemoteError("answers a request for a header with something else", peer=peer)
        if answer.header is None:
            raise NetworkError("no state of that round")
        if answer.header.digest != value.digest:
            raise RemoteError("offers another state for the certified one", peer=peer)
        return answer.header

    def offended(self, other: int, error: RemoteError) -> None:
        """`other` said something else than what is certified."""
        self._scores.offended(self._swarm.peers[other].id, self.now)
        self._swarm.blamed(self._peer.number, other, str(error))

    def _fetch_state(self, value: Value, found: dict[int, Header]) -> None:
        header = next(iter(found.values()))
        came: dict[int, bytes] = {}
        if self._unfinished is not None and self._unfinished[1] == header:
            came = self._unfinished[2]
        self._unfinished = value, header, came

        def accept(chunk: int, data: bytes) -> None:
            header.check(chunk, data)
            came[chunk] = data

        self._swarm.donations.transfers += 1
        self._fetch(
            Job(
                scope=header.digest[:SCOPE_BYTES],
                sizes=[self._swarm.state_chunk_bytes] * len(header.hashes),
                here=frozenset(came),
                question=GetHeader(value.round),
                agrees=partial(self._agrees, value),
                known=frozenset(found),
                accept=accept,
                ended=partial(self._fetched_state, value, header, came),
            ),
            sorted(self._peer.watch.links),
        )

    def _agrees(self, value: Value, donor: int, answer: Answer) -> None:
        self.header(donor, value, answer)

    def _fetched_state(self, value: Value, header: Header, came: dict[int, bytes], done: bool) -> None:
        if done:
            self._unfinished = None
            self._disk.take(value, header.assembled(came[chunk] for chunk in range(len(header.hashes))))
            self._swarm.donations.obtained += 1
            self._put()
            self._replay(self._end)
        else:
            self._end()

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
        self._fetch(job, sorted(self._peer.watch.links))

    # -- transfers ---------------------------------------------------------------------------------------------

    def _fetch(self, job: Job, others: Sequence[int]) -> None:
        self.transfers = {scope: one for scope, one in self.transfers.items() if not one.over}
        fetching = self.transfers[job.scope] = Fetching(self._peer, job, self._scores)
        fetching.begin(others)

    def told(self, sender: int, answer: Answer) -> None:
        """Somebody answered whether a state or finals are held."""
        question = GetHeader(answer.round) if isinstance(answer, HeaderAnswer) else GetFinals(answer.wanted)
        if self._poll is not None and isinstance(answer, HeaderAnswer) and answer.round == self._poll.value.round:
            self._poll.told(sender, answer)
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
        for fetching in list(self.transfers.values()):
            fetching.lane_broke(other)


class _Poll:
    """Who holds the state of a round, of those who say so soon enough."""

    def __init__(
        self,
        obtaining: Obtaining,
        value: Value,
        asked: Sequence[int],
        then: GotHolders,
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
        if not self._silent or now >= self._until:
            self._obtaining.polled()
            self._then({other: self._found[other] for other in self._asked if other in self._found}, self._others)
