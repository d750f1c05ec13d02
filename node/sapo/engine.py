"""The engine of the strategy `rollouts`: announces what the agent makes, pulls others' groups, keeps the agent alive.

It stands where `Engine` stands for the other strategies. There is no common state and no common round: a node counts
its own, and goes on with or without others. What is new in a round is its agent's (`agent_process`); here is the
network's side of it, the choice of what is pulled (`selection`), and the account of who can be trusted (`trust`).

    agent ── Made ───► exchange ── announcement ──► others
          ── Take ───► offers of others ── selection ── pull ──► store ── Pulled ──► agent, which judges
          ── Judged ─► trust, bytes paid for, and what replaces the refused groups

A group is given to the agent once: what the store holds was made here, or pulled before, also by an earlier process of
the node. The number of the first round that has not been announced is on disk before anything of a round is announced,
so a node that comes back answers no task a second time, which others would take for a duplicate.
"""

from __future__ import annotations

import logging
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import msgspec
import trio

from shoal.node.child_process import Child, ChildDied, ChildRaised, Deaths, running_child
from shoal.node.control_client import GroupStatus, RolloutStatus
from shoal.node.options import NodeConfig
from shoal.node.outcome import Notice, PhaseChanged, Progress, Progressed, RoundShared
from shoal.node.pipe import Failed, Pause, Resume
from shoal.node.reporting import events
from shoal.node.reporting.event_log import EventLog
from shoal.node.rounds.inbox import Own
from shoal.node.sapo.agent_messages import (
    AgentReport,
    Asked,
    Begin,
    Delivered,
    Finished,
    Judged,
    Made,
    Probed,
    Pulled,
    Ready,
    RoundReport,
    Saved,
    Take,
    Teaching,
    Waiting,
    unpack_agent_report,
)
from shoal.node.sapo.groups import mean
from shoal.node.sapo.origins import Origins
from shoal.node.sapo.recent import RecentGroup, RecentGroups
from shoal.node.sapo.selection import VARIANCE_LEAST, Intake, Tasks, total_bytes
from shoal.node.sapo.store import GroupStore
from shoal.node.sapo.tasks import TaskTable
from shoal.node.sapo.trust import Trust
from shoal.node.state.store import disk_errors, write_atomically
from shoal.node.text import duration
from shoal.node.workload import WorkloadError
from shoal.protocol.chain import Position
from shoal.protocol.errors import ConfigError, LocalError, RemoteError
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.inputs import SetPaused
from shoal.protocol.manifest_rollouts import RolloutsSection
from shoal.protocol.names import Names
from shoal.protocol.offer_book import Offer
from shoal.protocol.offer_pace import OfferPace
from shoal.protocol.places import Contributors
from shoal.protocol.rollouts import Reason, assigned_seed, is_own_task
from shoal.protocol.wire import Sealer
from shoal.swarm.host import Host
from shoal.swarm.members import Members
from shoal.swarm.rollouts import ANNOUNCE_PERIOD_S, RolloutExchange

PROGRAM = ("-m", "shoal.node.sapo.agent_process")
SAMPLER_PROGRAM = ("-m", "shoal.node.sapo.sampler_process")
FOLLOWER_PROGRAM = ("-m", "shoal.node.sapo.engine_follower")
STOP_DEADLINE_S = 10.0
"""From the order to stop to the end: one piece of a round, and a file to write."""
STALL_DEADLINE_S = 1800.0
"""An agent that says nothing for so long, and does not rest, hangs: a warm-up, or half a round, must fit."""
OFFERS_LIMIT = 1024
"""Offers that are chosen from, so that a choice takes milliseconds; of more, a uniform sample."""
PULL_DEADLINE_S = 20.0
TAKE_DEADLINE_S = 20.0
"""After it, or before if the agent says so, groups that did not come, or were refused, are replaced no more."""
ANNOUNCE_DEADLINE_S = 10.0
"""So long the agent waits for others to take what it announces; what is not announced by then is not."""
UNENCODABLE = "unencodable"
"""Counted among the refusals: an accepted group that the policy has no tokens for."""
TEACHING_PERIOD_S = 15.0
"""How often the user is told of a warm-up, which takes minutes."""
OTHER_REWARDS = (
    "it announces other rewards than are scored here; if it is honest, its code for the task is another of the same "
    "`version`"
)
MARK_NAME = "announced"
MARK_LIMIT_BYTES = 32

logger = logging.getLogger(__name__)


def running_agent(threads: int, *, program: Sequence[str] = PROGRAM) -> AbstractAsyncContextManager[Child[AgentReport]]:
    """Spawn an agent; see `running_child`."""
    return running_child(
        program,
        unpack=unpack_agent_report,
        stop_s=STOP_DEADLINE_S,
        logger=logging.getLogger("shoal.agent"),
        threads=threads,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutParts:
    """The parts that the engine works with; folder: of this node's groups and of its agent's files.

    on_speed: is told how many tokens a second the agent drew in a round.

    averages: the agent is the training loop of a node whose rounds average the policies. Its rounds have no end of
    their own then, and it may wait for the swarm for as long as that takes. origins: whose groups are gone through
    again; None where nobody's are.
    """

    config: NodeConfig
    section: RolloutsSection
    identity: Identity
    boot: int
    host: Host
    members: Members
    names: Names
    folder: Path
    events: EventLog
    on_progress: Callable[[Progress], None]
    on_speed: Callable[[float], None]
    averages: bool = False
    origins: Origins | None = None


class RolloutEngine:
    """A node's rounds under `rollouts`, from its agent's start to leaving."""

    def __init__(self, parts: RolloutParts) -> None:
        self._p = parts
        self._child: Child[AgentReport] | None = None
        self._paused = False
        self._changed = trio.Event()  # the user paused, or went on; or the pace, or the agent, is another
        self._pace: OfferPace | None = None  # of a node that makes groups for others alone
        self._rests: bool | None = None  # what the agent was told; None before it was told anything
        self._silent_since = 0.0  # the agent's last word, or when it was told to go on
        self._leaving = False
        self._store: GroupStore
        self._exchange: RolloutExchange
        self._trust = Trust(self._say_ignored)
        self._intake: Intake | None = None  # of the agent that runs, once it is ready
        self._announced = 0
        self._arrived = 0  # announcements, when the agent last asked
        self._take_ends_at = 0.0
        self._take_limit_s = TAKE_DEADLINE_S
        self._taking_s = 0.0  # that the agent waited for others' groups in this round
        self._pulled_bytes = 0
        self._taught_at = -math.inf  # when the user was last told of the warm-up
        self._waited = ("", -1)  # why for its engine, and in which round
        self._made: dict[str, list[Sequence[float]]] = {}  # rewards of this round's own groups, by task family
        self._counted = RolloutStatus(role=parts.config.rollouts)  # as of the end of the last round
        self._refused: Counter[Reason] = Counter()  # by the exchange, as of the last round
        self._status = RolloutStatus(role=parts.config.rollouts)
        self._random = random.Random(parts.identity.peer_id)
        self.machine: Ready | None = None
        """The message by which the agent was ready."""
        self.recent = RecentGroups()
        self.contributors = Contributors()
        self.state_round = 0
        self.left = trio.Event()
        self.finished = False

    # -- what others call ------------------------------------------------------------------------------------

    def put(self, event: Own) -> None:
        """An input of this node's own: its user's wish to pause, or to go on."""
        if isinstance(event, SetPaused) and event.paused != self._paused:
            self._paused = event.paused
            self._changed.set()
            self._p.on_progress(PhaseChanged(phase=self.phase, round=self.state_round))
            self._p.members.announce()

    def alive(self, peers: frozenset[PeerId]) -> None:
        """Note that who is believed alive changed: nobody waits for another here."""

    def linked(self, peer: PeerId, certified: Position) -> None:
        """A link came up; announcements travel by gossip."""

    def ask_to_leave(self) -> None:
        """Leave the swarm: nobody waits for this node."""
        self._leaving = True
        self.left.set()

    @property
    def leaving(self) -> bool:
        """True once leaving was asked for."""
        return self._leaving

    @property
    def paused(self) -> bool:
        """True while the user wants the accelerator."""
        return self._paused

    @property
    def others(self) -> frozenset[PeerId]:
        """The other nodes that are here; where all are linked, those that are alive and linked."""
        members = self._p.members
        return members.present() & members.links.linked() if members.links_all else members.present()

    def newest_round(self, peer: PeerId) -> int:
        """The latest round of which a peer announced anything: later than its record says, which is seldom renewed."""
        return 0 if self.machine is None else self._exchange.book.newest_round(peer)

    @property
    def phase(self) -> str:
        """The phase of the node, for its user."""
        if self.leaving:
            return "leaving"
        if self.machine is None:
            return "joining"
        return "paused" if self._paused else "training"

    @property
    def status(self) -> RolloutStatus:
        """Counts of what was made, pulled and refused since this node started, and the newest groups."""
        groups = [_in_a_line(group, self.state_round) for group in self.recent]
        return msgspec.structs.replace(self._status, groups=groups, round=self.state_round)

    # -- the agent -------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Keep the agent going until this node leaves.

        Raises ConfigError for a policy or tasks that cannot be made, WorkloadError for what they raise later or an
        agent that dies too often, StorageError. Cancellation: the agent saves what it knows, within a deadline.
        """
        with disk_errors(self._p.folder):
            self._p.folder.mkdir(parents=True, exist_ok=True)
        self._announced = _read_mark(self._p.folder / MARK_NAME)
        self._store = await trio.to_thread.run_sync(GroupStore, self._p.folder / "groups")
        self._exchange = RolloutExchange(
            host=self._p.host,
            sealer=Sealer(self._p.identity, self._p.config.manifest.swarm_id, self._p.boot),
            swarm_id=self._p.config.manifest.swarm_id,
            holdings=self._store,
            round_number=lambda: self.state_round,
            takes_part=self._p.members.takes_part,
            rank=self._p.members.rank,
            connections=self._p.members.brief_connections(),
            pulled=self._note_pull,
            ignored=self._trust.ignored,
            blame=self._trust.fault,
        )
        if self._p.config.rollouts == "sample":
            self._pace = OfferPace(trio.current_time())
        async with trio.open_nursery() as nursery:
            await nursery.start(self._exchange.run)
            nursery.start_soon(self._pass_on_pauses)
            nursery.start_soon(self._keep_agent)
            await self.left.wait()
            nursery.cancel_scope.cancel()

    async def _keep_agent(self) -> None:
        deaths = Deaths("the agent")
        while True:
            ending = await self._run_agent()
            if isinstance(ending, ChildRaised):
                raise _failure(ending.failed, ready=self.machine is not None)
            logger.warning("the agent died: %s", ending)
            self._p.events.write(events.AgentDied(cause=str(ending)))
            too_many = await deaths.count(ending)
            if too_many is not None:
                raise WorkloadError(too_many, "")

    async def _run_agent(self) -> ChildDied | ChildRaised:
        """Run one agent from spawn to its end, and return that end."""
        by_engine = FOLLOWER_PROGRAM if self._p.averages else SAMPLER_PROGRAM
        program = PROGRAM if self._p.config.engine is None else by_engine
        async with running_agent(self._p.config.threads, program=program) as child:
            try:
                self._intake = None
                await child.send(self._begin())
                self._child, self._rests = child, None
                self._changed.set()  # it may have to rest from the start
                while True:
                    await self._follow(child, await self._next(child))
            except (ChildDied, ChildRaised) as ending:
                return ending
            except (LocalError, RemoteError) as error:
                return ChildDied(f"it is confused: {error}")
            finally:
                self._child = None

    async def _next(self, child: Child[AgentReport]) -> AgentReport:
        """The agent's next report. Raises ChildDied, ChildRaised, LocalError."""
        self._silent_since = trio.current_time()
        while True:
            since = self._silent_since
            with trio.move_on_at(math.inf if self._p.averages else since + STALL_DEADLINE_S):
                return await child.receive()
            if self._rests or self.finished:
                self._silent_since = trio.current_time()
            elif self._silent_since == since:
                raise ChildDied(f"it hung: nothing for {STALL_DEADLINE_S:g} s", waited_s=STALL_DEADLINE_S)

    def _begin(self) -> Begin:
        config, manifest, section = self._p.config, self._p.config.manifest, self._p.section
        own = {"local": config.local_groups, "external": config.external_groups, "group_size": config.group_size}
        return Begin(
            policy=manifest.workload.name,
            options=manifest.workload.options,
            seed=manifest.workload.seed,
            swarm_id=manifest.swarm_id,
            me=self._p.identity.peer_id,
            folder=str((self._p.folder / "agent").absolute()),
            role=config.rollouts,
            rollouts=msgspec.structs.replace(section, **{key: n for key, n in own.items() if n is not None}),
            learning_rate=manifest.inner.lr,
            optimizer=manifest.inner.optimizer,
            clip_norm=manifest.inner.clip_norm,
            device=config.device,
            data=None if config.data is None else str(Path(config.data).absolute()),
            threads=config.threads,
            announced=self._announced,
            rounds=None if self._p.averages else config.rounds,
            averages=str(config.data_dir.absolute()) if self._p.averages else None,
            engine=config.engine,
            evaluate_rounds=config.evaluate_rounds,
        )

    async def _pass_on_pauses(self) -> None:
        """Let the agent rest while the user wants that, or others take less than it makes."""
        while True:
            with trio.move_on_after(self._wait_s() or math.inf):
                await self._changed.wait()
            self._changed = trio.Event()
            waits = self._wait_s() > 0
            rests = self._paused or waits
            self._status = msgspec.structs.replace(self._status, waits=waits)
            if self._child is not None and rests is not self._rests:
                self._rests, self._silent_since = rests, trio.current_time()
                await self._child.send(Pause() if rests else Resume())

    def _wait_s(self) -> float:
        return 0.0 if self._pace is None else self._pace.wait_s(trio.current_time())

    def _note_pull(self, digest: bytes) -> None:
        if self._pace is not None and self._pace.pull(digest, trio.current_time()):
            self._status = msgspec.structs.replace(self._status, wanted=self._pace.pulled)
            self._changed.set()

    async def _follow(self, child: Child[AgentReport], report: AgentReport) -> None:
        match report:
            case Teaching():
                self._note_warm_up(report)
            case Ready():
                self._begun(report, pid=child.pid)
            case Made():
                await self._announce(report)
            case Asked():
                self.recent.ask(report.digest, report.question)
            case Take():
                await self._take(child, report)
            case Judged():
                await self._weigh(child, report)
            case RoundReport():
                self._finish_round(report)
                if self._pace is not None:
                    self._rests = None  # by itself, until it is told whether it may make more
                    self._changed.set()
            case Waiting():
                self._wait_for_engine(report)
            case Probed():
                self._note_held_out(report)
            case Saved():
                self._p.events.write(events.AgentSaved(round=report.round, failure=report.failure))
                if report.failure:
                    self._p.on_progress(Notice(text=f"what was learnt is not saved: {report.failure}"))
            case Finished():
                self.finished = True
                self.ask_to_leave()

    def _say_ignored(self, peer: PeerId, reason: Reason) -> None:
        """Say whose groups are no longer taken, and why: what an honest maker may not notice."""
        why = OTHER_REWARDS if reason is Reason.HINT else f"at last for `{reason}`"
        self._p.on_progress(Notice(text=f"groups of {self._p.names.of(peer)} are not taken for a while: {why}"))

    def _say_other_version(self, offer: Offer, here: str) -> None:
        task, who = offer.announcement.task, self._p.names.of(offer.origin)
        text = f"{who} has the tasks {task.family!r} in version {task.version}, and this node in {here}"
        self._p.on_progress(Notice(text=f"{text}: neither takes the other's; install the same everywhere"))

    def _wait_for_engine(self, waiting: Waiting) -> None:
        """Say once in each round why its engine gives nothing."""
        logger.warning("%s", waiting.reason)
        if (waiting.reason, self.state_round) != self._waited:
            self._waited = waiting.reason, self.state_round
            self._p.events.write(events.EngineFailed(round=self.state_round, reason=waiting.reason))
            self._p.on_progress(Notice(text=f"no groups for now: {waiting.reason}"))

    def _note_warm_up(self, teaching: Teaching) -> None:
        text = f"teaching the policy: {teaching.done} of at most {teaching.limit} updates"
        text += "" if teaching.reward is None else f", reward {teaching.reward:.2f} of the {teaching.wanted:.2f} wanted"
        text += "" if teaching.left_s is None else f", at most {duration(teaching.left_s)} left"
        self._status = msgspec.structs.replace(self._status, teaching=text)
        if trio.current_time() - self._taught_at >= TEACHING_PERIOD_S:
            self._taught_at = trio.current_time()
            self._p.on_progress(Progressed(text=text))

    def _begun(self, ready: Ready, *, pid: int) -> None:
        self.machine = ready
        self.state_round = ready.round
        self._status = msgspec.structs.replace(self._status, teaching="")
        self._store.advance(ready.round)
        self._intake = self._new_intake(ready)
        self._p.events.write(
            events.AgentStarted(
                pid=pid,
                round=ready.round,
                restored=ready.restored,
                refused=ready.refused,
                warm_up_reward=ready.reward,
            )
        )
        if ready.refused:
            self._p.on_progress(Notice(text=f"a file of the agent is not used: {ready.refused}"))
        self._p.on_progress(PhaseChanged(phase=self.phase, round=ready.round))
        self._p.members.announce()

    # -- groups ----------------------------------------------------------------------------------------------

    async def _announce(self, made: Made) -> None:
        """Announce a group of the agent's. Raises LocalError for one that is not this node's."""
        announcement, me = made.announcement, self._p.identity.peer_id
        if not is_own_task(self._p.config.manifest.swarm_id, me, announcement.round, announcement.task):
            raise LocalError("it made a group of a task that this node was not assigned")
        if announcement.round >= self._announced:
            self._announced = announcement.round + 1
            mark = str(self._announced).encode()
            await trio.to_thread.run_sync(write_atomically, self._p.folder / MARK_NAME, mark)
        self._made.setdefault(announcement.task.family, []).append(made.rewards)
        self.recent.add(
            RecentGroup(
                announcement=announcement, origin=me, group=made.group, rewards=made.rewards, came=self.state_round
            )
        )
        if announcement.reward_variance <= VARIANCE_LEAST:
            return  # nobody may draw it
        with trio.move_on_after(ANNOUNCE_DEADLINE_S) as scope:
            await self._exchange.announce(announcement, made.group)
        if scope.cancelled_caught:
            logger.warning("a group of round %d is not announced: nobody takes announcements", announcement.round)
            return
        self._status = msgspec.structs.replace(self._status, made=self._status.made + 1)
        if self._pace is not None:
            self._pace.made(announcement.digest, trio.current_time())
            self._changed.set()

    def _new_intake(self, ready: Ready) -> Intake:
        manifest, section = self._p.config.manifest, self._p.section
        return Intake(
            Tasks(swarm_id=manifest.swarm_id, table=TaskTable(ready.tasks), scorable=frozenset(ready.scorable)),
            trust=self._trust,
            seed=assigned_seed(manifest.swarm_id, self._p.identity.peer_id, manifest.workload.seed, 1),
            staleness_rounds=section.staleness_rounds,
            other_version=self._say_other_version,
        )

    def _ready_intake(self) -> Intake:
        """Return the intake of the agent that runs. Raises LocalError before it is ready."""
        if self._intake is None:
            raise LocalError("it makes rounds before it is ready")
        return self._intake

    async def _take(self, child: Child[AgentReport], take: Take) -> None:
        """Choose among others' groups, pull these, and hand them to the agent. Raises LocalError."""
        intake, offers = self._ready_intake(), await self._offers(take.wait_s)
        self._take_ends_at = trio.current_time() + TAKE_DEADLINE_S
        self._take_limit_s = TAKE_DEADLINE_S if take.limit_s is None else take.limit_s
        await self._deliver(child, intake, intake.begin(offers, take.count, self.state_round, policies=take.policies))

    async def _weigh(self, child: Child[AgentReport], judged: Judged) -> None:
        """Note what the agent found; where it refused groups, hand it others. Raises LocalError."""
        intake = self._ready_intake()
        wanted = intake.judged(judged.verdicts)
        if any(verdict.refused is not None for verdict in judged.verdicts):
            await self._deliver(child, intake, wanted)

    async def _offers(self, wait_s: float) -> list[Offer]:
        """Return what others offer and this node does not hold; waits `wait_s` at most for more to arrive."""
        ends_at = trio.current_time() + wait_s
        # Announcements come in batches of that period, so there is no sooner to know.
        while self._exchange.announcements_received == self._arrived and trio.current_time() < ends_at:  # noqa: ASYNC110
            await trio.sleep(ANNOUNCE_PERIOD_S)
        self._arrived = self._exchange.announcements_received
        origins = self._p.origins
        fresh = [
            offer
            for offer in self._exchange.at_hand()
            if offer.digest not in self._store and (origins is None or origins.may_be_taken(offer.origin))
        ]
        return self._random.sample(fresh, OFFERS_LIMIT) if len(fresh) > OFFERS_LIMIT else fresh

    async def _deliver(self, child: Child[AgentReport], intake: Intake, wanted: list[Offer]) -> None:
        """Pull the wanted groups, or in place of those that do not come others, and hand them over."""
        began = trio.current_time()
        ends_at = min(self._take_ends_at, began + self._take_limit_s)
        while wanted and (left_s := ends_at - trio.current_time()) > 0:
            limit_bytes = total_bytes(wanted)
            deadline_s = min(PULL_DEADLINE_S, left_s)
            came = await self._exchange.fetch(wanted, limit_bytes=limit_bytes, deadline_s=deadline_s)
            wanted = intake.receive(came)
        self._taking_s += trio.current_time() - began
        for offer, group in intake.pulled:
            replay = self._p.origins is not None and not self._p.origins.trains(offer.origin)
            await child.send(Pulled(offer=offer, group=group, replay=replay))
            self.recent.add(
                RecentGroup(announcement=offer.announcement, origin=offer.origin, group=group, came=self.state_round)
            )
        self._status = msgspec.structs.replace(self._status, pulled=self._status.pulled + len(intake.pulled))
        await child.send(Delivered())

    def _note_held_out(self, probed: Probed) -> None:
        self._status = msgspec.structs.replace(
            self._status, held_out_reward=probed.reward, held_out_round=probed.round, held_out_tasks=probed.tasks
        )
        self._p.events.write(
            events.HeldOutReward(
                round=probed.round,
                reward=probed.reward,
                by_family=probed.by_family,
                tasks=probed.tasks,
                seconds=round(probed.seconds, 6),
            )
        )

    def _finish_round(self, done: RoundReport) -> None:
        intake = self._ready_intake()
        self.state_round = done.round + 1
        taken = intake.end_round()
        for origin in taken.origins:
            self.contributors.note(origin)
        self._store.advance(self.state_round)
        self._trust.advance(self.state_round)
        stale = self.state_round - self._p.section.staleness_rounds
        self._exchange.expire(offered_before=stale, announced_before=self._store.oldest)
        refused = taken.rejected + (self._exchange.rejected - self._refused)
        self._refused = Counter(self._exchange.rejected)
        rejected = Counter({str(reason): count for reason, count in refused.items()})
        rejected += Counter({UNENCODABLE: done.unencodable})
        fetched = self._exchange.bytes_fetched
        pulled_bytes, self._pulled_bytes = fetched - self._pulled_bytes, fetched
        known, before = self._status, self._counted
        tasks, self._made = rewards_by_task(self._made, taken.rewards), {}
        self._status = self._counted = msgspec.structs.replace(
            known,
            tasks=known.tasks | tasks,
            reward=known.reward if done.reward is None else done.reward,
            taken=known.taken + done.external,
            pulled_bytes=fetched,
            rejected=dict(Counter(known.rejected) + rejected),
            generated_tokens=known.generated_tokens + done.generated_tokens,
        )
        self._p.events.write(
            events.Rollouts(
                round=self.state_round,
                reward=done.reward,
                own=done.local,
                external=done.external,
                external_reward=taken.reward,
                origins=dict(taken.origins.items()),
                informative=done.informative,
                made=known.made - before.made,
                pulled=known.pulled - before.pulled,
                tasks=tasks,
                tokens=done.generated_tokens,
                bytes=pulled_bytes,
                control_sent=self._p.host.traffic.bytes_sent,
                used_bytes=intake.budget.trained_bytes,
                rejected=dict(rejected),
                ignored=tuple(self._trust.all_ignored()),
                seconds=round(done.seconds, 6),
                taking_s=round(self._taking_s, 6),
                entropy=done.entropy,
                length=done.length,
                distinct=done.distinct,
                gradient_norm=done.gradient_norm,
                clipped=done.clipped,
            )
        )
        self._taking_s = 0.0
        self._p.on_speed(done.generated_tokens / done.seconds if done.seconds else 0.0)
        self._p.on_progress(
            RoundShared(
                round=self.state_round,
                reward=done.reward,
                own=done.local,
                external=done.external,
                seconds=done.seconds,
            )
        )


def _in_a_line(known: RecentGroup, now: int) -> GroupStatus:
    announced = known.announcement
    return GroupStatus(
        digest=known.digest.hex(),
        peer_id=known.origin,
        own=bool(known.rewards),
        came=known.came,
        family=announced.task.family,
        round=announced.round,
        policy=announced.policy_version,
        age=max(0, now - known.came),
        completions=announced.completions,
        reward=announced.reward_mean,
    )


def rewards_by_task(
    own: Mapping[str, Sequence[Sequence[float]]], external: Mapping[str, Sequence[Sequence[float]]]
) -> dict[str, events.TaskRewards]:
    """Rewards of groups, by task family: own ones, and those of others as this node scored them."""
    return {
        family: events.TaskRewards(
            own=len(own.get(family, ())),
            reward=mean(chain.from_iterable(own.get(family, ()))),
            external=len(external.get(family, ())),
            external_reward=mean(chain.from_iterable(external.get(family, ()))),
        )
        for family in sorted({*own, *external})
    }


def _read_mark(path: Path) -> int:
    """The first round that has not been announced. Raises ConfigError where the file does not say."""
    with disk_errors(path.parent):
        try:
            with path.open("rb") as file:
                text = file.read(MARK_LIMIT_BYTES).strip()  # a user may have written it
        except FileNotFoundError:
            return 0
    if not (text.isdigit() and len(text) < 19):
        raise ConfigError(f"{path} does not hold the number of a round; write the number of this node's rounds into it")
    return int(text)


def _failure(failed: Failed, *, ready: bool) -> ConfigError:
    """Return what ends the node where the agent raised; in one line where it is the user's to mend."""
    if failed.configuration and not ready:
        return ConfigError(failed.summary)
    return WorkloadError(failed.summary, failed.traceback)
