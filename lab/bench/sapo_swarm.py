"""A swarm that shares rollouts within one process: what a node runs between generating and training, but the network.

Groups are encoded, announced under signature, entered into each receiver's offer book, chosen, pulled by digest and
judged by the modules that a node uses. Gossip and pulls are function calls, in the order of the agents.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Protocol

from blake3 import blake3

from shoal.node.sapo.groups import JudgedGroup, announced
from shoal.node.sapo.judge import Judge, Score
from shoal.node.sapo.selection import Intake, Tasks
from shoal.node.sapo.tasks import TaskSource
from shoal.node.sapo.trust import Trust
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.offer_book import Offer, OfferBook
from shoal.protocol.rollouts import RolloutError, seal_announcement
from shoal.protocol.wire import Sealer, SwarmId

ROUND_S: Final = 1.0
"""Duration of a round by the clock of the quotas, which nothing else uses."""
KEPT_ROUNDS: Final = 4
"""For so many rounds a group can be chosen, and is held for those who pull it."""


class Listener(Protocol):
    """One that hears announcements."""

    @property
    def peer_id(self) -> PeerId:
        """PeerId of the listener."""

    def hear(self, data: bytes, *, sender: PeerId) -> None:
        """Receive an announcement that `sender` published."""


class SharedMemory:
    """Memory that all agents reach: the listeners to announcements, and the groups that are held, by digest.

    delay: rounds after which others hear of what is published.
    """

    def __init__(self, seed: int, *, delay: int = 0) -> None:
        self.swarm_id = SwarmId(blake3(b"shoal bench sapo" + seed.to_bytes(8, "big")).digest())
        self.announced_bytes = 0
        self.pulled_bytes = 0
        self._delay = delay
        self._round = 0
        self._listeners: list[Listener] = []
        self._unheard: deque[tuple[int, list[bytes], PeerId]] = deque()
        self._held: dict[bytes, tuple[int, bytes]] = {}

    def join(self, listener: Listener) -> None:
        """Deliver to it what others publish from here on."""
        self._listeners.append(listener)

    def publish(self, sealed: Iterable[bytes], *, sender: PeerId) -> None:
        """Give sealed announcements to everybody else."""
        self._unheard.append((self._round, list(sealed), sender))
        self._let_hear()

    def _let_hear(self) -> None:
        while self._unheard and self._unheard[0][0] + self._delay <= self._round:
            _, sealed, sender = self._unheard.popleft()
            self._give(sealed, sender)

    def _give(self, sealed: Sequence[bytes], sender: PeerId) -> None:
        for data in sealed:
            for listener in self._listeners:
                if listener.peer_id != sender:
                    self.announced_bytes += len(data)
                    listener.hear(data, sender=sender)

    def hold(self, digest: bytes, data: bytes, round_number: int) -> None:
        """Have a group ready for those who pull it."""
        self._held[digest] = (round_number, data)

    def held(self, digest: bytes) -> bytes | None:
        """Return a group without counting it as pulled."""
        return self._held[digest][1] if digest in self._held else None

    def fetch(self, offers: Sequence[Offer]) -> Mapping[bytes, bytes]:
        """The groups of these offers that are held."""
        found = {offer.digest: self._held[offer.digest][1] for offer in offers if offer.digest in self._held}
        self.pulled_bytes += sum(map(len, found.values()))
        return found

    def begin_round(self, round_number: int) -> None:
        """Drop the groups that nobody chooses any more, and let all hear of those that have waited."""
        self._round = round_number
        oldest = round_number - KEPT_ROUNDS - self._delay
        self._held = {digest: held for digest, held in self._held.items() if held[0] >= oldest}
        self._let_hear()


class MemberSharing:
    """One agent's `Sharing`. `begin_round` comes ahead of each of its rounds."""

    def __init__(
        self,
        shared: SharedMemory,
        identity: Identity,
        source: TaskSource,
        *,
        score: Score,
        seed: int,
    ) -> None:
        """score: of others' text. seed: of the choice among offers, all alike."""
        self._shared = shared
        self._sealer = Sealer(identity, shared.swarm_id, boot=0)
        self._book = OfferBook(shared.swarm_id, identity.peer_id)
        self._trust = Trust()
        self._judge = Judge(swarm_id=shared.swarm_id, source=source, score=score)
        self._intake = Intake(
            Tasks(swarm_id=shared.swarm_id, table=source.table, scorable=source.scorable),
            trust=self._trust,
            seed=seed,
            staleness_rounds=KEPT_ROUNDS,
        )
        self._round = 0
        self._refused: Counter[str] = Counter()

    @property
    def peer_id(self) -> PeerId:
        """PeerId of this agent."""
        return self._sealer.peer_id

    def begin_round(self, round_number: int) -> None:
        """Forget the offers that are too old for this round."""
        self._round = round_number
        self._book.expire(round_number - KEPT_ROUNDS)

    def offer(self, groups: Sequence[JudgedGroup]) -> None:
        """Announce the groups whose rewards vary; from the others nobody learns anything."""
        sealed = []
        for group in groups:
            self._judge.note_own(group.task, group.texts)
            if len(set(group.rewards)) == 1:
                continue
            announcement, data = announced(group, self.peer_id)
            self._shared.hold(announcement.digest, data, self._round)
            sealed.append(seal_announcement(self._sealer, announcement))
        self._shared.publish(sealed, sender=self.peer_id)

    def take(self, count: int) -> list[JudgedGroup]:
        """Choose, pull and judge."""
        offers, fetch = self._book.offers(), self._shared.fetch
        return collect(self._intake, self._judge, fetch, offers, count=count, round_number=self._round)

    def hear(self, data: bytes, *, sender: PeerId) -> None:
        """Receive an announcement that `sender` published."""
        try:
            self._book.receive(data, peer=sender, now=self._round * ROUND_S, round_number=self._round)
        except RolloutError as error:
            self._refused[str(error.reason)] += 1
            self._trust.fault(sender, error.reason)

    def rejected(self) -> Counter[str]:
        """Refusals since the start, by reason; offers without variance are not among them, since none are chosen."""
        return self._refused + Counter({str(reason): count for reason, count in self._intake.rejected.items()})

    @property
    def trained_bytes(self) -> int:
        """Bytes of the groups that were pulled and judged well."""
        return self._intake.budget.trained_bytes


Fetch = Callable[[Sequence[Offer]], Mapping[bytes, bytes]]


def collect(
    intake: Intake, judge: Judge, fetch: Fetch, offers: Iterable[Offer], *, count: int, round_number: int
) -> list[JudgedGroup]:
    """Return up to `count` judged groups of these offers, pulled by `fetch`."""
    groups: list[JudgedGroup] = []
    wanted = intake.begin(offers, count, round_number)
    while wanted:
        while wanted:
            wanted = intake.receive(fetch(wanted))
        judged = judge.judge(intake.pulled)
        groups += [one.group for one in judged if one.group is not None]
        wanted = intake.judged([one.verdict for one in judged])
    return groups
