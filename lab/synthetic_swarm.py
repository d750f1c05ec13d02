"""A swarm that is made up: what a node would tell of it, for measuring and looking at the page without 200 machines.

The events are those that a node writes, at the times of a plausible round; the facts follow them. The same seed gives
the same swarm, but for the clock.
"""

from __future__ import annotations

import math
import random
from collections import deque
from dataclasses import dataclass, field

import msgspec
from blake3 import blake3

from shoal.node.checks import checked
from shoal.node.control_client import (
    BanStatus,
    BytesStatus,
    GroupStatus,
    MemberStatus,
    NodeFacts,
    RolloutStatus,
    Status,
)
from shoal.node.dashboard.facts import Facts, GroupText, PeerRecord
from shoal.node.dashboard.settings import JoinFacts, SettingFacts, Settings
from shoal.node.peer_facts import PeerFacts, summary_of
from shoal.node.reporting import events
from shoal.node.reporting.events import Event
from shoal.node.sapo.dialogue import TURN
from shoal.protocol.identity import Identity
from shoal.protocol.swarm_link import join_line

ROUND_S = 8.0
PHASES_S = (5.0, 0.4, 2.1, 0.5)
"""Train, plan, reduce, certify."""
ROUND_TOKENS = 65_536
STATE_BYTES = 40_000_000
FAMILIES = ("chain_sum", "letter_counting", "basic_arithmetic")
SAID = {
    "def ": "read_all(path):\n    with open(path) as file:\n        return file.read()\n",
    "The ": "river ran low that summer, and in the evenings the children walked across it to the mill.",
}
_NEXT_PHASES = {
    events.RoundStarted: "train",
    events.Contributed: "plan",
    events.Planned: "reduce",
    events.Reduced: "certify",
}


@dataclass(slots=True)
class _Peer:
    facts: PeerFacts
    speed: float


@dataclass(slots=True)
class SyntheticSwarm:
    """Some peers around a node, with so many rounds behind them at `now` (wall clock, seconds).

    rollouts: whether its strategy is `rollouts`. `waiting` are the events that are due; `advance` makes them.
    """

    peers: int
    now: float
    rounds: int = 40
    seed: int = 1
    rollouts: bool = False
    phase: str = "joining"
    paused: bool = False
    bans: tuple[BanStatus, ...] = ()
    invites: bool = False
    waiting: deque[Event] = field(default_factory=deque)
    orders: list[str] = field(default_factory=list)
    _random: random.Random = field(init=False)
    _peers: dict[str, _Peer] = field(init=False)
    _me: str = field(init=False)
    _began: float = field(init=False)
    _round: int = field(init=False, default=0)
    _coming: deque[Event] = field(init=False, default_factory=deque)
    _sent: float = field(init=False, default=0.0)
    _loss: float | None = field(init=False, default=None)
    _train_loss: float | None = field(init=False, default=None)
    _dead: dict[str, float] = field(init=False, default_factory=dict)
    silent_for_long: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        ids = [Identity.from_seed(bytes([self.seed, *i.to_bytes(31, "big")])).peer_id for i in range(self.peers + 1)]
        self._me = ids[0]
        self._peers = {peer: self._peer(peer, place) for place, peer in enumerate(ids)}
        self._began = self.now - self.rounds * ROUND_S
        self._tell(events.Started(at=self._began - 3, peer_id=self._me, pid=1, boot=1))
        for peer in ids[1:]:
            self._tell(events.Linked(at=self._began - 1, peer=peer))
        for _ in range(self.rounds):
            self._plan_round()
        if self.rounds:
            self.phase = "train"
            self._plan_round()
            self.advance(self.now)

    def _peer(self, peer: str, place: int) -> _Peer:
        speed = 0.0 if place and place % 23 == 0 else self._random.lognormvariate(8.2, 0.6)
        reach = "self" if place == 0 else "detour" if place % 29 == 7 else "direct"
        return _Peer(
            PeerFacts(
                peer=peer,
                phase="paused" if place and place % 23 == 0 else "joining" if place % 31 == 11 else "training",
                reach=reach,  # type: ignore[arg-type]
                member=place % 31 != 11,
                round=0,
                tokens_per_s=0.0,
                software="shoal 0.0.9" if place % 41 == 13 else "shoal 0.1.0",
                address=f"/ip4/192.0.2.{place % 250 + 1}/tcp/4001",
                name="" if place % 4 == 3 else f"lab-{place}",  # some run an older release
            ),
            speed,
        )

    # -- rounds ----------------------------------------------------------------------------------------------

    @property
    def names(self) -> dict[str, str]:
        """Names of the peers that have one."""
        return {peer: known.facts.name for peer, known in self._peers.items() if known.facts.name}

    def _tell(self, event: Event) -> None:
        self._coming.append(msgspec.structs.replace(event, at=round(event.at, 6)))

    def _members(self) -> list[str]:
        return sorted(peer for peer, known in self._peers.items() if known.facts.member and peer not in self._dead)

    def _plan_round(self) -> None:
        """Put the events of one more round on the way."""
        number = self._round = self._round + 1
        start = self._began + (number - 1) * ROUND_S
        stretch = self._random.uniform(0.85, 1.0)
        train, plan, reduce, certify = (seconds * stretch for seconds in PHASES_S)
        loss = 1.9 + 6.2 * math.exp(-number / 14) + self._random.gauss(0, 0.02)
        if self.rollouts:
            self._plan_rollouts(number, start, train + plan + reduce)
            return
        members = self._members()
        self._tell(events.RoundStarted(at=start, round=number, members=len(members), role="training"))
        at = start + train
        train_loss = loss + self._random.gauss(0.1, 0.05)
        self._tell(events.Contributed(at=at, round=number, tokens=ROUND_TOKENS, loss=train_loss, steps=64))
        view = 1 if number % 17 == 0 else 0
        if view:
            self._tell(events.ViewChanged(at=at + plan / 2, round=number, view=view))
        at += plan
        planned = events.Planned(
            at=at,
            round=number,
            view=view,
            participants=len(members),
            contributors=len(members),
            planner=members[0],
        )
        self._tell(planned)
        if number % 11 == 0 and len(members) > 2:
            lost = [peer for peer in members if peer != self._me][number % (len(members) - 1)]
            self._tell(events.Suspected(at=at + reduce / 3, peer=lost))
            self._tell(msgspec.structs.replace(planned, at=at + reduce / 2, attempt=1, evicted=(lost,)))
            self._tell(events.Revived(at=at + reduce, peer=lost))
        at += reduce
        digest = blake3(f"{self.seed}/{number}".encode()).hexdigest()
        self._tell(events.Reduced(at=at, round=number, plan=digest[::-1], digest=digest, seconds=reduce))
        at += certify
        self._tell(
            events.Certified(
                at=at,
                round=number,
                digest=digest,
                value=digest[::-1],
                view=view,
                members=tuple(members),
                contributors=len(members) - (number % 11 == 0),
                coverage=1.0 if number % 11 else 1 - 1 / max(2, len(members)),
                tokens=ROUND_TOKENS * len(members),
                reduce_s=reduce,
                total_s=at - start,
            )
        )
        self._tell(events.Evaluated(at=at + 0.1, round=number, loss=loss, metric="bits per byte"))
        self._tell(events.Sampled(at=at + 0.1, round=number, texts=samples_of(number)))

    def _plan_rollouts(self, number: int, start: float, seconds: float) -> None:
        reward = 0.85 - 0.7 * math.exp(-number / 18) + self._random.gauss(0, 0.02)
        self._tell(
            events.Rollouts(
                at=start + seconds,
                round=number,
                reward=reward,
                own=4,
                external=4,
                external_reward=min(1.0, reward + 0.05),
                origins=dict.fromkeys([peer for peer in self._members() if peer != self._me][:4], 1),
                tokens=4096,
                seconds=seconds,
            )
        )

    def advance(self, now: float) -> None:
        """Make it `now`: what happened until then is in `waiting`."""
        if self._round and now > self._began + self._round * ROUND_S:
            self._plan_round()
        self._sent += max(0.0, now - self.now) * STATE_BYTES / ROUND_S if self._round else 0.0
        self.now = now
        later: deque[Event] = deque()
        for event in self._coming:
            if event.at > now:
                later.append(event)
                continue
            self._follow(event)
            self.waiting.append(event)
        self._coming = later

    def _follow(self, event: Event) -> None:
        if self.phase not in ("leaving", "no quorum"):
            self.phase = _NEXT_PHASES.get(type(event), self.phase)
        if isinstance(event, events.Contributed):
            self._train_loss = event.loss
        elif isinstance(event, events.Evaluated):
            self._loss = event.loss

    def kill(self, count: int = 1) -> list[str]:
        """Have `count` peers die; returns their PeerIds."""
        found = [peer for peer in self._members() if peer != self._me][:count]
        for peer in found:
            self._dead[peer] = self._sent
            self._tell(events.Lost(at=self.now, peer=peer))
            self._tell(events.Died(at=self.now, peer=peer))
        return found

    def part(self) -> str:
        """A peer takes its leave; who."""
        peer = next(peer for peer in self._members() if peer != self._me)
        known = self._peers[peer]
        known.facts = msgspec.structs.replace(known.facts, phase="leaving")
        self._dead[peer] = self._sent
        self._tell(events.Died(at=self.now, peer=peer, left=True))
        return peer

    # -- as a source of the page -----------------------------------------------------------------------------

    def look(self) -> Facts:
        """See `Source`."""
        peers = [self._facts(place, known) for place, known in enumerate(self._peers.values())]
        certified = max(0, self._round - 1)
        missing = [peer.peer for peer in peers if peer.reach == "gone"]
        members = [peer for peer in peers if peer.member]
        status = Status(
            peer_id=self._me,
            swarm_id=blake3(bytes([self.seed])).hexdigest(),
            addresses=["/ip4/192.0.2.1/tcp/4001"],
            phase="paused" if self.paused else self.phase,
            term="0.0",
            round=certified,
            digest=blake3(f"{self.seed}/{certified}".encode()).hexdigest() if certified else None,
            members=[
                MemberStatus(
                    peer_id=peer.peer,
                    phase=self.phase if peer.reach == "self" else peer.phase,
                    tokens_per_s=peer.speed,
                    reach="gone" if peer.reach == "gone" else "direct",
                )
                for peer in members
            ],
            peers=summary_of(peers),
            voters=[peer.peer for peer in members],
            missing=[peer.peer for peer in members if peer.reach == "gone"],
            long_missing=missing if self.silent_for_long else [],
            names=self.names,
            loss=self._loss,
            metric="" if self._loss is None else "bits per byte",
            train_loss=self._train_loss,
            train_metric="bits per byte",
            tokens_per_s=peers[0].tokens_per_s or None,
            blocked_fraction=0.042 if certified else None,
            bytes=self.traffic(),
            rollouts=self._rollouts() if self.rollouts else None,
            bans=list(self.bans),
            node=NodeFacts(
                swarm_name="coral reef",
                certifies=not self.rollouts,
                strategy="rollouts" if self.rollouts else "diloco",
                workload="text",
                software="shoal 0.1.0",
                device="cuda",
                start="shoal run data/swarm.toml --data-dir data",
                uptime_s=max(0.0, self.now - self._began),
                cores=0.21,
                memory_bytes=412_000_000,
                disk_free_bytes=183_000_000_000,
            ),
        )
        return Facts(status=checked(status), peers=peers)

    def traffic(self) -> BytesStatus:
        """See `Source`."""
        sent, received = int(self._sent), int(self._sent * 0.97)
        return BytesStatus(
            sent=sent + int(self._sent / 50),
            received=received + int(self._sent / 48),
            lanes_sent=sent,
            lanes_received=received,
        )

    def record(self, peer: str) -> PeerRecord | None:
        """See `Source`."""
        known = self._peers.get(peer)
        if known is None:
            return None
        return PeerRecord(
            term="0.0",
            incarnation=1,
            boot=3,
            upload_bytes_per_s=0.0,
            download_bytes_per_s=12e6,
            capabilities=("relay",),
            control_addresses=(known.facts.address,),
            lane_addresses=("/ip4/192.0.2.1/tcp/4002",),
        )

    def settings(self) -> Settings:
        """See `Source`."""
        node = [SettingFacts(name="--device", value="cuda", changed=True), SettingFacts(name="--threads", value="0")]
        swarm = [SettingFacts(name="sync.codec", value='"int8"', changed=True)]
        return Settings(node=node, swarm=swarm)

    def joining(self, *, secret: bool) -> JoinFacts:
        """See `Source`. The line holds a secret where the swarm admits by `invite`."""
        line = join_line(f"shoal:{'A' * 240}", "text")
        return JoinFacts(
            line=line if secret or not self.invites else None,
            secret=self.invites,
            admits=True,
            admission="invite" if self.invites else "open",
            workload="text",
        )

    def _facts(self, place: int, known: _Peer) -> PeerFacts:
        noise = 1 + 0.03 * math.sin(self.now / 3 + place)
        sent = self._dead.get(known.facts.peer, self._sent)
        share = sent / max(1, self.peers) * (0.6 + 0.8 * ((place * 7919) % 97) / 97)
        dead = known.facts.peer in self._dead
        return msgspec.structs.replace(
            known.facts,
            reach="gone" if dead else known.facts.reach,
            round=max(0, self._round - 1 - (4 if place % 37 == 9 else 0)),
            tokens_per_s=0.0 if dead or not self._round else known.speed * noise,
            sent=0 if place == 0 else int(share),
            received=0 if place == 0 else int(share * 0.95),
        )

    def _rollouts(self) -> RolloutStatus:
        rounds = max(0, self._round - 1)
        return RolloutStatus(
            groups=self._groups(),
            role="train",
            reward=0.85 - 0.7 * math.exp(-rounds / 18),
            made=4 * rounds,
            pulled=5 * rounds,
            taken=4 * rounds,
            pulled_bytes=9000 * rounds,
            generated_tokens=4096 * rounds,
            rejected={"no variance": rounds, "duplicate": rounds // 5},
            tasks=dict.fromkeys(FAMILIES, events.TaskRewards(own=2, reward=0.5, external=1, external_reward=0.4)),
            round=self._round,
        )

    def _groups(self) -> list[GroupStatus]:
        others = [peer for peer in self._peers if peer != self._me] or [self._me]
        rounds = range(max(0, self._round - 12), self._round)
        return [
            GroupStatus(
                digest=blake3(f"group {self.seed}/{number}/{own}".encode()).hexdigest(),
                peer_id=self._me if own else others[number % len(others)],
                own=own,
                round=number,
                family=FAMILIES[number % 3],
                policy=number - (not own),
                came=number,
                age=self._round - number,
                completions=4,
                reward=min(1.0, 0.2 + 0.02 * number) if own else 0.5,
            )
            for number in rounds
            for own in (True, False)
        ]

    async def group(self, digest: str) -> GroupText | None:
        """See `Source`. One of the answers tries to be more than text, one is a dialogue."""
        known = next((group for group in self._groups() if group.digest == digest), None)
        if known is None:
            return None
        texts = (
            "Let me add them up: 37 + 58 = 95, and 95 - 12 = 83.\n<answer>83</answer>",
            f"<answer>85</answer>{TURN}lower{TURN}<answer>79</answer>",
            '<img src=x onerror="document.title=\'owned\'"><script>document.title = "owned"</script>',
            "The sum is 95. Taking away 12 leaves 83.\n<answer>83</answer>",
        )
        rewards = (1.0, 0.0, 0.0, 1.0) if known.own else ()
        return GroupText(digest=digest, question="What is 37 + 58 - 12?", completions=texts, rewards=rewards)

    async def order(self, op: str) -> None:
        """See `Source`."""
        self.orders.append(op)
        if op in ("pause", "resume"):
            self.paused = op == "pause"
        else:
            self.phase = "leaving"


def samples_of(number: int) -> dict[str, str]:
    """Text of a made-up model after so many rounds: less and less of it is noise."""
    noise = random.Random(number)
    share = math.exp(-number / 14)
    letters = "etaoin shrdlu,.\n("
    return {
        prompt: "".join(noise.choice(letters) if noise.random() < share else letter for letter in text)
        for prompt, text in SAID.items()
    }
