"""One simulated agent that shares rollouts: what `shoal.swarm.rollouts` is around the same machines, in virtual time.

Offers, what is asked for again, how a group is pulled, what is chosen, judged and paid for are those of a node:
`OfferBook`, `OfferCatchUp`, `GroupPull`, `Intake` and `Judge`. Generating is a time, gossip a delay and a chance.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from shoal.node.sapo.engine import PULL_DEADLINE_S
from shoal.node.sapo.groups import JudgedGroup
from shoal.node.sapo.judge import Judge
from shoal.node.sapo.selection import Intake, Tasks, total_bytes
from shoal.node.sapo.tasks import Config, Task, TaskFamily
from shoal.node.sapo.trust import Trust
from shoal.protocol.errors import RemoteError
from shoal.protocol.group_pull import Ask, Budget, Came, GivenUp, GroupPull, LeftAlone, Tally, Wait
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.limits import TokenBucket
from shoal.protocol.offer_book import BookLimits, Offer
from shoal.protocol.offer_catch_up import ANSWERS_PER_TURN, OfferCatchUp
from shoal.protocol.rollouts import (
    BATCH_LIMIT_ITEMS,
    CHUNK_LIMIT_BYTES,
    HELD_LIMIT_ITEMS,
    AnnouncementBatch,
    CatchUpRequest,
    GroupChunk,
    GroupRequest,
    RolloutError,
    RolloutGroup,
    announce_group,
    decode_batch,
    encode_batch,
    encode_group,
    peek_announcement,
    seal_announcement,
)
from shoal.protocol.wire import Sealer, canonical
from shoal.swarm.rollouts import ANNOUNCE_PERIOD_S, BUSY_PAUSE_S, CATCH_UP_DEADLINE_S, ExchangeLimits

if TYPE_CHECKING:
    from shoal.lab.simulate.rollouts import RolloutSwarm

LIMITS = ExchangeLimits(
    book=BookLimits(offers=192, offers_per_peer=64, per_second=20.0, burst=40.0),
    served_bytes_per_second=4e5,
    served_bytes_burst=8e5,
)
"""Smaller than a node's, so that few agents reach them."""
OWN_GROUPS, WANTED_GROUPS, COMPLETIONS = 2, 2, 10
KEPT_ROUNDS = 32
FLOOD = 60
"""Announcements more in a round, of who floods."""
SLOW_LIMIT = 4.0
"""A slow agent generates at most so many times slower; what it moves is as slow as its fault says."""


class Endings(TaskFamily):
    """Texts that end in a digit; one in two does in the right one. Scored by that digit alone."""

    name = "endings"
    version = "1"
    scoring = "direct"

    def check(self, config: Config) -> None:
        """Any."""

    def question(self, config: Config, seed: int, index: int) -> str:
        """The text that is asked."""
        return f"End in {seed % 10}"

    def score(self, task: Task, text: str) -> float:
        """1 for the right end."""
        return float(text.endswith(str(task.ref.seed % 10)))


@dataclass(frozen=True, slots=True)
class Question:
    """A request that is answered, number `number` of who asks."""

    number: int
    what: GroupRequest | CatchUpRequest


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to it."""

    number: int
    what: GroupChunk | AnnouncementBatch


Pulling = tuple[Offer, GroupPull]


@dataclass(slots=True)
class Fetch:
    """Groups on their way. ends_at: what has not come by then is left out."""

    ends_at: float
    left: list[Offer]
    budget: Budget
    pulls: dict[bytes, GroupPull] = field(default_factory=dict)
    came: dict[bytes, bytes] = field(default_factory=dict)


class Agent:
    """One of them by number. What is on disk survives: `held`, `round` and the groups it made of its next round."""

    def __init__(self, swarm: RolloutSwarm, number: int, identity: Identity, train_s: float) -> None:
        self.swarm = swarm
        self.number = number
        self.identity = identity
        self.id = identity.peer_id
        self.train_s = train_s
        self.held: OrderedDict[bytes, bytes] = OrderedDict()
        self.round = 0
        self.rounds_done = 0
        self.life = 0
        self.up = self.hung = self.gone = self.vanished = False
        self.lies: set[str] = set()
        self.disturbed_at = 0.0
        self.rng = random.Random(f"agent {swarm.scenario.seed} {number}")

    @property
    def running(self) -> bool:
        """True if its process is there and runs."""
        return self.up and not self.hung

    # -- lives -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Bring the process up, with what is on disk."""
        self.up, self.hung = True, False
        self.life += 1
        self.round += self.life > 1  # what was announced in a round is not announced again
        self.started_at = self.swarm.timeline.now
        swarm = self.swarm
        self.sealer = Sealer(self.identity, swarm.swarm_id, self.life)
        self.book = swarm.components.offer_book(swarm.swarm_id, self.id, LIMITS.book)
        missing = partial(self.book.missing, count=BATCH_LIMIT_ITEMS)
        self.catch_up: OfferCatchUp = swarm.components.catch_up(boot=self.life, missing=missing)
        self.left_alone = LeftAlone(LIMITS.pause_s)
        self.tally = Tally()
        source = swarm.source
        self.judge = Judge(
            swarm_id=swarm.swarm_id,
            source=source,
            score=lambda pairs: [ENDINGS.score(task, text) for task, text in pairs],
        )
        self.intake = Intake(
            Tasks(swarm_id=swarm.swarm_id, table=source.table, scorable=source.scorable),
            trust=Trust(),
            seed=self.rng.getrandbits(32),
        )
        self.taken: list[JudgedGroup] = []
        self.outbox: list[tuple[bool, bytes]] = []
        self.fetching: Fetch | None = None
        self.asked: dict[int, tuple[int, Pulling | None]] = {}
        self._served: dict[int, TokenBucket] = {}
        self._questions = 0
        self._turn: dict[int, int] = {}
        self.after(ANNOUNCE_PERIOD_S, self._publish)
        self.after(self.catch_up.period_s, self._ask_around)
        self._begin_round()

    def stop(self) -> None:
        """The process is gone."""
        self.up = self.hung = False
        self.life += 1
        self.disturbed()

    def disturbed(self) -> None:
        """Something befell it, or is over."""
        self.disturbed_at = self.swarm.timeline.now

    def after(self, delay_s: float, action: object, *arguments: object) -> None:
        """Call `action` in this life; if the process hangs then, when it runs again."""
        self.swarm.timeline.after(delay_s, self._due, self.life, action, arguments)

    def _due(self, life: int, action: object, arguments: tuple[object, ...]) -> None:
        if life != self.life:
            return
        if self.hung:
            self.swarm.timeline.after(0.2, self._due, life, action, arguments)
        else:
            action(*arguments)  # type: ignore[operator]

    # -- rounds ------------------------------------------------------------------------------------------------

    def _begin_round(self) -> None:
        self.book.expire(self.round - KEPT_ROUNDS)
        self.catch_up.expire(self.round - KEPT_ROUNDS)
        took_s = (
            self.train_s * self.rng.uniform(0.8, 1.2) * min(SLOW_LIMIT, self.swarm.network.slowed.get(self.number, 1.0))
        )
        for index in range(OWN_GROUPS):
            self.after(took_s * (index + 1) / (OWN_GROUPS + 1), self._offer, self.round, index)
        if "flood" in self.lies:
            for index in range(OWN_GROUPS, OWN_GROUPS + FLOOD):
                self.after(took_s / 2, self._offer, self.round, index, 8)
        self.after(took_s, self._gather)

    def _offer(self, round: int, index: int, text_bytes: int | None = None) -> None:
        if round != self.round:
            return
        task = self.swarm.source.table.assigned(self.swarm.swarm_id, self.id, round, index)
        size = text_bytes or self.rng.randrange(400, 15_000)
        texts = [self.rng.randbytes(size).hex() + str((task.seed + i % 2) % 10) for i in range(COMPLETIONS)]
        group = RolloutGroup(origin=self.id, round=round, policy_version=round, task=task, completions=tuple(texts))
        data = encode_group(group)
        rewards = tuple(float(i % 2 == 0) for i in range(COMPLETIONS))
        announcement = announce_group(
            group, data, (1.0, *[0.0] * (COMPLETIONS - 1)) if "hint" in self.lies else rewards
        )
        self.held[announcement.digest] = data
        sealed = seal_announcement(self.sealer, announcement)
        sequence = peek_announcement(sealed).seq
        self.catch_up.note(sequence, sealed, round, self.swarm.timeline.now)
        self.outbox.append((True, sealed))
        self.swarm.judge.announced(self, sequence, announcement.digest, texts, index)

    def _gather(self) -> None:
        offers = [offer for offer in self.book.offers() if offer.digest not in self.held]
        self._gather_ends_at = self.swarm.timeline.now + PULL_DEADLINE_S
        self._fetch(self.intake.begin(offers, WANTED_GROUPS, self.round))

    def _fetch(self, wanted: Sequence[Offer]) -> None:
        now = self.swarm.timeline.now
        if not wanted or now >= self._gather_ends_at:
            self._finish()
            return
        self.fetching = Fetch(self._gather_ends_at, list(wanted), Budget(total_bytes(wanted)))
        self.after(self._gather_ends_at - now, self._fetched, self.fetching)
        self._pull_more(self.fetching)

    def _pull_more(self, fetch: Fetch) -> None:
        while fetch.left and len(fetch.pulls) < LIMITS.fetches:
            offer = fetch.left.pop(0)
            fetch.pulls[offer.digest] = pull = self.swarm.components.pull(
                offer,
                servers=partial(self._servers, offer),
                deadline_s=LIMITS.group_deadline_s,
                budget=fetch.budget,
                tally=self.tally,
            )
            self._step(fetch, offer, pull)
        if not fetch.left and not fetch.pulls:
            self._fetched(fetch)

    def _servers(self, offer: Offer, now: float) -> list[PeerId]:
        holders = dict.fromkeys((offer.origin, *self.book.holders(offer.digest)))
        allowed = self.left_alone.allowed(holders, now)
        return [peer for peer in allowed if self.swarm.connected(self.number, self.swarm.numbers[peer])]

    def _step(self, fetch: Fetch, offer: Offer, pull: GroupPull) -> None:
        """Go on with a group."""
        now = self.swarm.timeline.now
        if fetch is not self.fetching:
            return
        step = pull.next(now)
        if isinstance(step, Ask):
            number = self._question(self.swarm.numbers[step.peer], step.request, (offer, pull))
            self.swarm.judge.asks(self, step)
            until = min(step.until, now + LIMITS.chunk_deadline_s)
            self.after(max(0.0, until - now), self._overdue, number)
        elif isinstance(step, Wait):
            self.after(BUSY_PAUSE_S, self._step, fetch, offer, pull)
        else:
            del fetch.pulls[offer.digest]
            if isinstance(step, Came):
                self.swarm.judge.pulled(self, offer, step.data)
                self.held[offer.digest] = step.data
                self.outbox.append((False, offer.digest))
                fetch.came[offer.digest] = step.data
            else:
                assert isinstance(step, GivenUp)
            self.after(0.0, self._pull_more, fetch)

    def _fetched(self, fetch: Fetch) -> None:
        """All of it came, or the time is over."""
        if fetch is not self.fetching:
            return
        self.fetching = None
        for number, (other, pulling) in list(self.asked.items()):
            if pulling is not None:
                del self.asked[number]
                self.swarm.judge.lost(self, other, pulling[1].close())
        wanted = self.intake.receive(fetch.came)
        if not wanted or self.swarm.timeline.now >= self._gather_ends_at:
            wanted = self._judge()
        self._fetch(wanted)

    def _judge(self) -> list[Offer]:
        """Judge what came, and return what replaces the groups that were refused."""
        judged = self.judge.judge(self.intake.pulled)
        self.taken += [one.group for one in judged if one.group is not None]
        return self.intake.judged([one.verdict for one in judged])

    def _finish(self) -> None:
        groups, self.taken = self.taken, []
        self.swarm.judge.trained(self, groups)
        self.round += 1
        self.rounds_done += 1
        self._begin_round()

    # -- announcements -----------------------------------------------------------------------------------------

    def _publish(self) -> None:
        self.after(ANNOUNCE_PERIOD_S, self._publish)
        per_period = BATCH_LIMIT_ITEMS if "flood" in self.lies else int(LIMITS.book.per_second * ANNOUNCE_PERIOD_S)
        batch_items = max(1, min(BATCH_LIMIT_ITEMS, per_period))
        news, self.outbox = self.outbox[:batch_items], self.outbox[batch_items:]
        held = [data for is_announcement, data in news if not is_announcement]
        if "held" in self.lies:
            held += [offer.digest for offer in self.book.offers()][-HELD_LIMIT_ITEMS:]
        announcements = tuple(data for is_announcement, data in news if is_announcement)
        if announcements or held:
            batch = encode_batch(AnnouncementBatch(announcements=announcements, held=tuple(held)))
            self.swarm.publish(self, batch)

    def hear(self, sender: int, data: bytes) -> None:
        """A gossip message of `sender`'s."""
        peer = self.swarm.agents[sender].id
        try:
            batch = decode_batch(data, peer=peer)
        except RolloutError:
            return
        self._receive(sender, batch)
        for digest in batch.held:
            self.book.note_holder(digest, peer)

    def _receive(self, sender: int, batch: AnnouncementBatch, *, asked_for: bool = False) -> int:
        agent, news = self.swarm.agents[sender], 0
        for sealed in batch.announcements:
            try:
                offer = self.book.receive(
                    sealed,
                    peer=agent.id,
                    now=self.swarm.timeline.now,
                    round_number=self.round,
                    asked_for=asked_for,
                )
            except RolloutError as error:
                self.swarm.refused(str(error.reason))
                continue
            if offer is not None:
                news += 1
                self.swarm.judge.heard(self, sender, offer)
        return news

    def _ask_around(self) -> None:
        reachable = {agent.id for agent in self.swarm.agents if self.swarm.connected(self.number, agent.number)}
        self._turn = {self.swarm.numbers[peer]: ANSWERS_PER_TURN for peer in self.catch_up.begin_turn(reachable)}
        for other in list(self._turn):
            self._ask_for_missing(other)
        self.after(CATCH_UP_DEADLINE_S if self._turn else 0.0, self._turn_over, self._turn)

    def _ask_for_missing(self, other: int) -> None:
        self._turn[other] -= 1
        self._question(other, self.catch_up.request(self.swarm.agents[other].id), None)

    def _turn_over(self, turn: dict[int, int]) -> None:
        if turn is self._turn:
            self._turn = {}
            self.asked = {number: row for number, row in self.asked.items() if row[1] is not None}
            self.catch_up.end_turn()
            self.after(self.catch_up.period_s, self._ask_around)

    # -- questions ---------------------------------------------------------------------------------------------

    def _question(self, other: int, what: GroupRequest | CatchUpRequest, pulling: Pulling | None) -> int:
        self._questions += 1
        self.asked[self._questions] = other, pulling
        self.swarm.call(self, other, Question(self._questions, what), len(canonical(what)))
        return self._questions

    def _overdue(self, number: int) -> None:
        other, pulling = self.asked.pop(number, (0, None))
        if pulling is not None:
            self._failed(other, pulling)

    def _failed(self, other: int, pulling: Pulling) -> None:
        self.left_alone.pass_over(self.swarm.agents[other].id, self.swarm.timeline.now)
        self.swarm.judge.failed(self, other)
        self.swarm.judge.lost(self, other, pulling[1].failed())
        self._go_on(pulling)

    def _go_on(self, pulling: Pulling) -> None:
        offer, pull = pulling
        if self.fetching is not None and self.fetching.pulls.get(offer.digest) is pull:
            self._step(self.fetching, offer, pull)

    def reply(self, sender: int, reply: Reply) -> None:
        """An answer came."""
        row = self.asked.pop(reply.number, None)
        if row is None:
            return
        other, pulling = row
        if isinstance(reply.what, AnnouncementBatch):
            more = self.catch_up.came(reply.what, self._receive(other, reply.what, asked_for=True))
            if more and self._turn.get(other, 0) > 0:
                self._ask_for_missing(other)
                return
            self._turn.pop(other, None)
            if not self._turn:
                self._turn_over(self._turn)
            return
        assert pulling is not None
        try:
            pulling[1].answered(reply.what)
        except RemoteError:
            self._failed(other, pulling)
        else:
            self._go_on(pulling)

    def answer(self, sender: int, question: Question) -> None:
        """`sender` asks something."""
        if isinstance(question.what, CatchUpRequest):
            batch = self.catch_up.answer(question.what, self.swarm.timeline.now)
            size = sum(map(len, batch.announcements))
            self.swarm.call(self, sender, Reply(question.number, batch), size)
        else:
            chunk = self._chunk(sender, question.what)
            self.swarm.ship(self, sender, Reply(question.number, chunk), len(chunk.data) + 100)

    def _chunk(self, sender: int, request: GroupRequest) -> GroupChunk:
        now = self.swarm.timeline.now
        quota = self._served.get(sender)
        if quota is None:
            quota = self._served[sender] = TokenBucket(LIMITS.served_bytes_per_second, LIMITS.served_bytes_burst, now)
        group = self.held.get(request.digest)
        if group is None or request.offset >= len(group):
            return GroupChunk(status="absent")
        data = group[request.offset : request.offset + CHUNK_LIMIT_BYTES]
        if not quota.take(len(data), now):
            return GroupChunk(status="busy")
        if "group" in self.lies:
            data = bytes([data[0] ^ 1]) + data[1:]
        return GroupChunk(status="chunk", data=data)


ENDINGS = Endings()
