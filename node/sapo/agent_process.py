"""The agent: a child process that holds a node's policy, makes its rounds, and judges what others offer.

Run by the daemon as ``python -P -m shoal.node.sapo.agent_process SOCKET`` with one inherited descriptor, the socket
pair of `agent_messages`. It opens nothing that a peer could reach and has no keys: peers' text is scored here, or in
the sandbox that it starts.

Two threads. The main one generates, judges and trains. The other reads the socket, and when the daemon is gone (end of
stream) ends the process at once. What that loses is at most the rounds since the last file of `learner_state`.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final

import torch

from shoal.node.sapo import learner_state
from shoal.node.sapo.agent_messages import (
    PEERS_LIMIT,
    AgentReport,
    Ask,
    Begin,
    Delivered,
    Done,
    Finished,
    Made,
    Offered,
    Order,
    Pulled,
    Ready,
    Saved,
    Want,
    unpack_order,
)
from shoal.node.sapo.averaging import Averaging
from shoal.node.sapo.families import load_family
from shoal.node.sapo.groups import JudgedGroup
from shoal.node.sapo.grpo import GrpoSettings
from shoal.node.sapo.learner import Learner, LearnerSettings, RoundReport
from shoal.node.sapo.offers import build_intake, rollout_of, total_bytes
from shoal.node.sapo.policies import PolicyLimits, load_policy
from shoal.node.sapo.scoring import Scorer
from shoal.node.sapo.selection import SelectionSettings
from shoal.node.sapo.tasks import TaskChoice, TaskSource
from shoal.node.sapo.updates import UpdateSettings
from shoal.node.sapo.warm_up import warm_up
from shoal.node.training.trainer_messages import SUMMARY_LIMIT_CHARS, Framing, Pause, Resume, Stop, frame_of
from shoal.node.training.trainer_process import describe
from shoal.protocol.errors import LocalError, StorageError
from shoal.protocol.identity import PeerId
from shoal.protocol.rollouts import assigned_seed, encode_group
from shoal.protocol.wire import SwarmId

SAVE_ROUNDS: Final = 4
ORDER_QUEUE_LIMIT: Final = 2048
READ_BYTES: Final = 64 << 10
JUDGE_WAIT_S: Final = 10.0
TAKE_DEADLINE_S: Final = 20.0
"""After it, groups that did not come, or were refused, are replaced no more in this round."""
EXIT_ORPHANED: Final = 3
EXIT_CONFUSED: Final = 4
EXIT_FAILED: Final = 5


class Stopped(Exception):
    """The daemon wants the process to end."""


class DaemonLine:
    """The agent's end of the socket pair: sends from the main thread, reads in its own."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._orders: queue.Queue[Order] = queue.Queue(ORDER_QUEUE_LIMIT)
        self._stopping = False
        self._goes_on = threading.Event()
        self._goes_on.set()
        threading.Thread(target=self._read, name="daemon", daemon=True).start()

    def send(self, report: AgentReport) -> None:
        """Send a report; a daemon that is gone ends the process."""
        try:
            self._connection.sendall(frame_of(report))
        except OSError:
            os._exit(EXIT_ORPHANED)

    def next(self) -> Order:
        """Wait for an answer or an order. Raises Stopped."""
        order = self._orders.get()
        if isinstance(order, Stop):
            raise Stopped
        return order

    def rest(self) -> None:
        """Between two pieces of work: wait while the node is paused. Raises Stopped."""
        self._goes_on.wait()
        if self._stopping:
            raise Stopped

    def _read(self) -> None:
        framing = Framing()
        try:
            while data := self._connection.recv(READ_BYTES):
                for frame in framing.feed(data):
                    self._take(unpack_order(frame))
        except OSError:
            pass
        except (LocalError, queue.Full) as error:
            print(f"agent: the daemon's orders cannot be followed: {error}", file=sys.stderr, flush=True)
            os._exit(EXIT_CONFUSED)
        os._exit(EXIT_ORPHANED)

    def _take(self, order: Order) -> None:
        if isinstance(order, Pause):
            self._goes_on.clear()
            return
        if isinstance(order, Stop):
            self._stopping = True
        if isinstance(order, Stop | Resume):
            self._goes_on.set()
        if not isinstance(order, Resume):
            self._orders.put_nowait(order)


class LineSharing:
    """`Sharing` through the daemon: own groups are announced there, others' come from there and are judged here."""

    def __init__(self, begin: Begin, line: DaemonLine, *, source: TaskSource, scorer: Scorer) -> None:
        section = begin.rollouts
        self.round = 0
        self.origins: Counter[str] = Counter()
        self.external_rewards: list[float] = []
        self.used_bytes = 0
        self._me = begin.me
        self._line = line
        self._intake = build_intake(
            swarm_id=SwarmId(begin.swarm_id),
            source=source,
            score=scorer.score_each,
            seed=_seed_of(begin, 1),
            selection=SelectionSettings(
                weighting="uniform" if section.sampling == "uniform" else "informative",
                staleness_rounds=section.staleness_rounds,
            ),
        )
        self._suspects: set[PeerId] = set()
        self._counted: Counter[str] = Counter()

    def offer(self, groups: Sequence[JudgedGroup]) -> None:
        """See `Sharing`."""
        for group in groups:
            try:
                encoded = encode_group(rollout_of(group, self._me))
            except LocalError as error:
                print(f"agent: a group is not shared: {error}", file=sys.stderr, flush=True)
                continue
            self._intake.judge.note_own(group.texts)
            self._line.send(Made(group=encoded, rewards=group.rewards))
        self._line.rest()

    def take(self, count: int, *, wait_s: float = 0.0) -> list[JudgedGroup]:
        """See `Sharing`. wait_s: how long to wait for offers."""
        self._line.rest()
        self._line.send(Ask(wait_s=wait_s))
        offered = self._line.next()
        if not isinstance(offered, Offered):
            raise LocalError(f"the daemon answered Ask with {type(offered).__name__}")
        for peer, reason in offered.faults:
            self._intake.trust.fault(peer, reason)
        self._suspects.update(peer for peer, _ in offered.faults)
        self._suspects.update(offer.origin for offer in offered.offers)
        wanted = self._intake.begin(offered.offers, count, self.round)
        ends_at = time.monotonic() + TAKE_DEADLINE_S
        while wanted and time.monotonic() < ends_at:
            limit_bytes = total_bytes(wanted)
            self._line.send(Want(digests=tuple(offer.digest for offer in wanted), limit_bytes=limit_bytes))
            wanted = self._intake.receive(self._delivered())
        groups = self._intake.finish()
        for group in groups:
            assert group.origin is not None
            self.origins[group.origin] += 1
            self.external_rewards += group.rewards
        return groups

    def done(self, report: RoundReport, *, seconds: float, unencodable: int) -> Done:
        """What the daemon is told of a round; what it counts begins anew."""
        rejected = Counter({str(reason): count for reason, count in self._intake.rejected().items()})
        rejected["unencodable"] = unencodable
        news, self._counted = rejected - self._counted, rejected
        ignored = sorted(peer for peer in self._suspects if self._intake.trust.ignored(peer))[:PEERS_LIMIT]
        self._suspects = set(ignored)
        rewards, self.external_rewards = self.external_rewards, []
        origins, self.origins = self.origins, Counter()
        budget = self._intake.budget
        return Done(
            round=report.round,
            reward=report.reward if report.local else None,
            local=report.local,
            external=report.external,
            external_reward=sum(rewards) / len(rewards) if rewards else None,
            informative=report.informative,
            generated_tokens=report.generated_tokens,
            seconds=seconds,
            origins=dict(origins),
            rejected=dict(news),
            ignored=tuple(ignored),
            used_bytes=budget.trained_bytes,
            wasted_bytes=budget.wasted_bytes,
        )

    def _delivered(self) -> dict[bytes, bytes]:
        came: dict[bytes, bytes] = {}
        while isinstance(order := self._line.next(), Pulled):
            came[order.digest] = order.group
        if not isinstance(order, Delivered):
            raise LocalError(f"the daemon answered Want with {type(order).__name__}")
        return came


class Agent:
    """One node's agent, from `Begin` to its end."""

    def __init__(self, begin: Begin, line: DaemonLine, *, source: TaskSource, scorer: Scorer) -> None:
        """Builds the policy, and restores it or warms it up. Raises ConfigError."""
        self._begin = begin
        self._line = line
        self._folder = Path(begin.folder)
        self._sharing = LineSharing(begin, line, source=source, scorer=scorer)
        section = begin.rollouts
        factory = load_policy(begin.policy, begin.options)
        policy = factory.build(
            PolicyLimits(
                seed=begin.seed,
                completion_tokens=section.completion_tokens,
                temperature=section.temperature,
                device=begin.device,
                data=begin.data,
            )
        )
        self.learner = Learner(
            policy,
            LearnerSettings(
                local=section.local,
                external=section.external if begin.role == "train" else 0,
                group_size=section.group_size,
                trains=begin.role == "train",
                updates=UpdateSettings(
                    learning_rate=begin.learning_rate,
                    gradient_limit=begin.clip_norm,
                    grpo=GrpoSettings(external=section.external_terms),
                ),
            ),
            draw=lambda round, index: source.draw(SwarmId(begin.swarm_id), begin.me, round, index),
            score=partial(scorer.score_many, own=True),
            sharing=self._sharing,
            seed=_seed_of(begin, 0),
        )
        restored, refused = learner_state.restore(self.learner, self._folder, policy=begin.policy)
        reward = None
        if restored is None and begin.role != "judge" and factory.warm_up is not None:
            choices = choices_of(begin)
            report = warm_up(
                policy, choices, factory.warm_up, score=partial(scorer.score_many, own=True), seed=begin.seed
            )
            reward = report.reward
        # A task of a round that was announced is not answered a second time: others would take that for a duplicate.
        self.learner.round = max(self.learner.round, begin.announced)
        self._saved_round = self.learner.round if restored is not None else -1
        line.send(
            Ready(
                round=self.learner.round,
                restored=restored,
                refused="; ".join(refused)[:SUMMARY_LIMIT_CHARS],
                reward=reward,
            )
        )

    def run(self) -> None:
        """Make rounds until stopped, or until all are made; save what was learnt. Raises what the policy raises."""
        self._save()  # the warm-up
        try:
            if self._begin.averages is None:
                self._make_rounds()
            else:
                with Averaging(self.learner, Path(self._begin.averages)) as averaging:
                    self._make_rounds(averaging)
        except Stopped:
            self._save()
            return
        self._save()
        self._line.send(Finished())
        while True:
            self._line.next()

    def _make_rounds(self, averaging: Averaging | None = None) -> None:
        """Until all are made, or there is no node any more to average with. Raises Stopped."""
        rounds = self._begin.rounds
        while rounds is None or self.learner.round < rounds:
            self._line.rest()
            report = self._make_round()
            if self.learner.round - self._saved_round >= SAVE_ROUNDS:
                self._save()
            if averaging is not None and not averaging.count(report, group_size=self._begin.rollouts.group_size):
                if not averaging.over:  # the node does not answer; if it is still there, it starts another agent
                    self._save()
                    os._exit(EXIT_ORPHANED)
                return

    def _make_round(self) -> RoundReport:
        began = time.monotonic()
        self._sharing.round = self.learner.round
        report = self._judge_round() if self._begin.role == "judge" else self.learner.run_round()
        unencodable = self.learner.unencodable.total()
        self._line.send(self._sharing.done(report, seconds=time.monotonic() - began, unencodable=unencodable))
        return report

    def _judge_round(self) -> RoundReport:
        groups = self._sharing.take(max(1, self._begin.rollouts.external), wait_s=JUDGE_WAIT_S)
        self.learner.round += 1
        return RoundReport(
            round=self.learner.round - 1,
            reward=0.0,
            local=0,
            external=len(groups),
            informative=len(groups),
            generated_tokens=0,
        )

    def _save(self) -> None:
        """Write what was learnt since the last time, if anything was."""
        if self._saved_round == self.learner.round:
            return
        failure = ""
        try:
            learner_state.save(self.learner, self._folder, policy=self._begin.policy)
        except StorageError as error:
            failure = str(error)[:SUMMARY_LIMIT_CHARS]
        self._saved_round = self.learner.round
        self._line.send(Saved(round=self.learner.round, failure=failure))


def choices_of(begin: Begin) -> list[TaskChoice]:
    """The families that the swarm draws from. Raises ConfigError for one that is not to be had here."""
    return [
        TaskChoice(family=load_family(entry.family), config=entry.config, weight=entry.weight)
        for entry in begin.rollouts.tasks
    ]


def _seed_of(begin: Begin, purpose: int) -> int:
    """A seed that no other node has, and that follows from the swarm's, so that runs can be repeated."""
    return assigned_seed(SwarmId(begin.swarm_id), begin.me, begin.seed, purpose)


def serve(descriptor: int) -> int:
    """Serve one daemon over an inherited descriptor; return the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the daemon's to interpret
    line = DaemonLine(socket.socket(fileno=descriptor))
    try:
        begin = line.next()
        if not isinstance(begin, Begin):
            raise LocalError(f"{type(begin).__name__} before Begin")
        if begin.threads:
            torch.set_num_threads(begin.threads)
        source = TaskSource(choices_of(begin))
        with Scorer(source) as scorer:
            Agent(begin, line, source=source, scorer=scorer).run()
    except Stopped:
        return 0
    except Exception as error:  # the boundary of the user's code: whatever it raised goes to the user
        line.send(describe(error))
        return EXIT_FAILED
    return 0


if __name__ == "__main__":
    status = serve(int(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # all is written; taking torch down in order would only take time
