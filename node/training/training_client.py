"""The daemon's dealings with its trainer: hand it the certified state, have it train and evaluate, hear the outcome."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import trio
from blake3 import blake3

from shoal.collectives.codecs import F32
from shoal.collectives.memory import VectorPool
from shoal.collectives.state import NESTEROV_KINDS, CertifiedState, HeldState, StateKind
from shoal.node.outcome import HeldOut, StepsMade, is_held_out
from shoal.node.pipe import Pause, Resume
from shoal.node.text import MISSING_NAMED
from shoal.node.training.fair_share import NEWS_SHARE, SteadySpeed, fair_steps
from shoal.node.training.trainer import Restarted, Trainer, TrainerEvent, TrainerFailed
from shoal.node.training.trainer_messages import (
    Applied,
    Apply,
    Assignment,
    Contribution,
    Evaluate,
    Evaluated,
    Evaluating,
    Hurry,
    Initial,
    InnerSettings,
    Progress,
    Restore,
    Retune,
    Snapshot,
    SyncSettings,
    Train,
    Trained,
    WriteInitial,
)
from shoal.protocol.errors import NetworkError
from shoal.protocol.identity import PeerId
from shoal.protocol.manifest import Manifest
from shoal.protocol.messages import Term, Value

INITIAL_DEADLINE_S = 120.0
STUCK_S = 120.0
"""A trainer that makes no step for so long, and for STUCK_TIMES as long as its last one took, is waited for no more."""
STUCK_TIMES = 10
EVALUATING_S = 1800.0
"""The same while it evaluates: no step is to be expected."""
ORDERED_LIMIT = 64
"""Evaluations that are waited for at once, many more than there are."""
OUTSIDER_NUMBERS = 1 << 20
"""A peer outside the electorate draws its share of the data by hash from this many numbers above the members'."""


class TrainingClient:
    """Orders for the trainer, and what is known from its answers: loss, speed, held-out metric.

    speeds: steps/s of those of the given peers that take part, without this node's own; 0 where it is not known. With
    it a round's steps are this node's fair share, else always `inner_steps`. kinds: the vectors of a state. imaged:
    see `CertifiedState`.
    evaluate_every: in rounds; with fragments, once each of them has had one. clock: in seconds.
    """

    def __init__(
        self,
        trainer: Trainer,
        *,
        seed: int,
        inner_steps: int,
        speeds: Callable[[Sequence[PeerId]], Sequence[float]] | None = None,
        kinds: Sequence[StateKind] = NESTEROV_KINDS,
        imaged: bool = False,
        evaluate_every: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._trainer = trainer
        self._seed = seed
        self._inner_steps = inner_steps
        self._speeds = speeds
        self._kinds = kinds
        self._imaged = imaged
        self._evaluate_every = evaluate_every
        self._clock = clock
        self._steady, self._steady_steps = SteadySpeed(), SteadySpeed()
        self.step_tokens = 0.0
        """Tokens of one step as they are told to others, on average; 0 before the first contribution."""
        self.speed_is_news = False
        """True if the newest contribution changed this node's speed so that the others should hear of it at once."""
        self._is_odd = False  # the stretch under way, in which this node did not run for a while
        self._initial = trio.Event()
        self._to_apply: int | None = None  # the round of the anchor given last, until it is applied
        self._evaluated = trio.Event()
        self._evaluated.set()
        self._unevaluated: tuple[Term, int] | None = None
        self._ordered: deque[tuple[Term, int]] = deque(maxlen=ORDERED_LIMIT)
        """The states whose evaluations are ordered and not there yet, oldest first."""
        self._orders = 0
        self._wall_s = 0.0
        self._blocked_s = 0.0
        self.paused = False
        self.resting = True
        """True if the trainer has done what it was ordered to."""
        self._stepped_at = 0.0  # it told of steps, or began, without what it evaluated since
        self._evaluating_at: float | None = None  # it began to, if it has not ended
        self._step_s = 0.0  # between the last two words of steps
        self.loss: float | None = None
        self.metric: float | None = None
        self._measured = 0
        """The round after which `metric` was measured."""
        self.measured_term = Term()
        """And of which term the state was."""
        self.held_out_data = b""
        """A hash of the data that it was measured on, empty where nobody tells."""
        self.sampled: Evaluated | None = None
        """The newest evaluation of which there are samples."""
        self.tokens_per_s = 0.0
        self.missing: tuple[PeerId, ...] = ()
        """The members that did not contribute to the newest round certified here."""
        self._counted: dict[bytes, int] = {}  # contributors to the newest round certified here, by its hash
        self._steps_ordered = 0
        self.steps_made: StepsMade | None = None
        """How far the stretch under way is, as its trainer told last."""

    @property
    def blocked_fraction(self) -> float | None:
        """The share of its time in which the trainer stood still and waited for a round; None before it was timed."""
        return self._blocked_s / self._wall_s if self._wall_s else None

    @property
    def stuck(self) -> bool:
        """True if it was ordered to train, and tells of no step for so long that nobody is to wait for it."""
        if self.resting or self.paused:
            return False
        if self._evaluating_at is not None:
            return self._clock() - self._evaluating_at > EVALUATING_S
        return self._clock() - self._stepped_at > max(STUCK_S, STUCK_TIMES * self._step_s)

    @property
    def metric_name(self) -> str:
        """Meaning of `metric`, in words of the workload's."""
        return self._trainer.started.metric

    @property
    def loss_metric(self) -> str:
        """Meaning of `loss`, in the same words; empty where the workload does not say it."""
        return self._trainer.started.loss_metric

    @property
    def held_out(self) -> HeldOut | None:
        """The newest evaluation; None before there is one, or where a loop reports its training loss."""
        if self.metric is None or not is_held_out(self.metric_name):
            return None
        return HeldOut(round=self._measured, value=self.metric, metric=self.metric_name)

    @property
    def steady_tokens_per_s(self) -> float:
        """The speed of the last contributions; before the first, of what the trainer reported last, or 0."""
        return self._steady.per_s or self.tokens_per_s

    @property
    def steady_steps_per_s(self) -> float:
        """The same in steps, which the shares of nodes follow; 0 before the first contribution."""
        return self._steady_steps.per_s

    @property
    def layout_hash(self) -> bytes:
        """The hash of the parameters' names and shapes."""
        return self._trainer.layout.digest

    def heard(self, event: TrainerEvent) -> None:
        """Take note of what the trainer said."""
        now = self._clock()
        if isinstance(event, Initial):
            self._initial.set()
        elif isinstance(event, Applied):
            self._to_apply = None if event.round == self._to_apply else self._to_apply
        elif isinstance(event, Evaluating):
            self._evaluating_at = now
        elif isinstance(event, Evaluated):
            began, self._evaluating_at = self._evaluating_at, None
            self._stepped_at += 0.0 if began is None else now - max(began, self._stepped_at)
            self.metric, self._measured = event.value, event.round
            while self._ordered:  # one that a loop passed over was of an anchor that another has replaced
                self.measured_term, round = self._ordered.popleft()
                if round == event.round:
                    break
            self.held_out_data = event.data
            self.sampled = event if event.samples else self.sampled
            self._evaluated.set()
        elif isinstance(event, Progress | Contribution | Trained):
            if not self.resting:
                self._step_s = now - self._stepped_at
            self._stepped_at, self._evaluating_at = now, None
            self.loss = event.loss
            self.steps_made = None
            if isinstance(event, Progress) and self._steps_ordered:  # else it is beyond its contribution
                step = min(event.step, self._steps_ordered)
                self.steps_made = StepsMade(round=event.round, step=step, steps=self._steps_ordered)
            else:
                self._steps_ordered = 0
            self.resting |= not isinstance(event, Progress)
            if not self._is_odd:
                self._measured_speed(event)
            self._is_odd &= isinstance(event, Progress)
        elif isinstance(event, Restarted | TrainerFailed):  # nothing is under way any more
            self._is_odd = False
            self._to_apply = self._evaluating_at = None
            self._evaluated.set()
            self.resting, self.steps_made, self._steps_ordered, self._step_s = True, None, 0, 0.0

    def _measured_speed(self, event: Progress | Contribution | Trained) -> None:
        self.tokens_per_s = event.tokens_per_s
        if isinstance(event, Contribution):
            steps_per_s = event.steps / event.seconds if event.seconds > 0 else 0.0
            self.speed_is_news = self._steady.measured(event.tokens_per_s)
            self.speed_is_news |= self._steady_steps.measured(steps_per_s)
            tokens = event.tokens_per_s / steps_per_s if steps_per_s else 0.0
            if abs(tokens - self.step_tokens) > NEWS_SHARE * self.step_tokens:
                self.step_tokens = tokens
            self._wall_s, self._blocked_s = self._wall_s + event.wall_s, self._blocked_s + event.blocked_s

    def measure_anew(self) -> None:
        """Forget how fast this node was: it did not run for a while, and may have another processor, or less power.

        Until a whole stretch was made since, its speed is not known.
        """
        self._steady, self._steady_steps = SteadySpeed(), SteadySpeed()
        self.tokens_per_s, self._is_odd = 0.0, True

    async def initial_state(self, vectors: VectorPool) -> CertifiedState:
        """S(0), in memory of `vectors`: the parameters drawn from the manifest's seed; every other vector is zero.

        Raises NetworkError if it takes too long, StorageError if there is no such memory.
        """
        await self._trainer.send(WriteInitial())
        with trio.move_on_after(INITIAL_DEADLINE_S):
            await self._initial.wait()
            anchor = vectors.take(self._trainer.contribution.size)
            np.copyto(anchor, self._trainer.contribution)
            return CertifiedState.initial(anchor, self.layout_hash, self._kinds, imaged=self._imaged)
        raise NetworkError(f"the trainer wrote no initial parameters within {INITIAL_DEADLINE_S:g} s")

    async def stand_on(self, state: HeldState, anchor: F32, *, taken: int, fresh: bool = False) -> None:
        """Give the trainer the anchor of a certified state, keeping what it learnt that was not taken.

        Does not wait until it is applied, at a step's boundary: a step may take minutes, or hang, and rounds go on.
        It evaluates the anchor too, every so many rounds: once all fragments have had one, where there are several.

        `fresh`: what it learnt stands on a state that was abandoned, and goes with it.

        Cancellation: the order is given whole or not at all.
        """
        if self._to_apply is not None:
            await self._trainer.send(Hurry())
        self._to_apply = state.round
        await self._trainer.apply(Apply(round=state.round, taken=taken, fresh=fresh), anchor)
        self._unevaluated = state.term, state.round
        if state.round % self._evaluate_every == 0:
            await self._evaluate(*self._unevaluated)

    async def _evaluate(self, term: Term, round: int) -> None:
        self._unevaluated = None
        self._evaluated = trio.Event()
        self._ordered.append((term, round))
        await self._trainer.send(Evaluate(round=round))

    async def snapshot(self, round: int, path: str) -> None:
        """Have it write what it knows beside the anchor, with the inner steps of `round` in it; see `Snapshot`."""
        await self._trainer.send(Snapshot(round=round, path=path))

    async def restore_moments(self, round: int, path: str) -> None:
        """Have it take over the optimizer's moments and the buffers that it wrote there, before its first anchor."""
        await self._trainer.send(Restore(path=path, round=round, exact=False))

    async def retune(self, manifest: Manifest) -> None:
        """Go on by these settings, from the next order on."""
        self._inner_steps = manifest.sync.round_steps
        await self._trainer.send(Retune(inner=InnerSettings.of(manifest), sync=SyncSettings.of(manifest)))

    def certified(self, value: Value, contributors: int, missing: Sequence[PeerId]) -> None:
        """Note how many contributed to the round just certified, and which members did not: the next order says it."""
        self._counted, self.missing = {value.hash: contributors}, tuple(missing)

    @property
    def balances(self) -> bool:
        """True if the steps of a round follow speeds."""
        return self._speeds is not None

    async def train(
        self, previous: Value, me: PeerId, tokens: int, *, contribute: bool = True, at_once: bool = False
    ) -> None:
        """Have it make this round's inner steps on this node's own share of the data.

        A node too slow for the last round goes on where it was, so that it contributes at all: what it lacks of its
        inner steps since its last contribution is all it makes now. at_once: the step under way, or one, is the last.
        """
        self._orders += 1
        order = Train(
            order=self._orders,
            round=previous.next_round,
            steps=1 if at_once else self._fair_steps(previous.members) if contribute else self._inner_steps,
            assignment=self.assignment(previous, me),
            certified_tokens=tokens,
            contribute=contribute,
            contributors=self._counted.get(previous.hash, 0),
            missing=self.missing if previous.hash in self._counted and len(self.missing) <= MISSING_NAMED else (),
        )
        self._ordered_to_train(order)
        await self._trainer.send(order)

    async def train_round(self, round: int, me: PeerId, numbered: Sequence[PeerId], tokens: int) -> None:
        """Have it make the inner steps of a round without an electorate: shares of the data are as in `numbered`."""
        self._orders += 1
        order = Train(
            order=self._orders,
            round=round,
            steps=self._inner_steps,
            assignment=Assignment(seed=self._seed, round=round, member=share_of(me, numbered), members=len(numbered)),
            certified_tokens=tokens,
        )
        self._ordered_to_train(order)
        await self._trainer.send(order)

    def _ordered_to_train(self, order: Train) -> None:
        if self.resting:
            self._stepped_at = self._clock()
        self.resting, self._steps_ordered = False, order.steps

    def _fair_steps(self, members: Sequence[PeerId]) -> int:
        if self._speeds is None:
            return self._inner_steps
        return fair_steps(self._inner_steps, self.steady_steps_per_s, self._speeds(members))

    def assignment(self, previous: Value, me: PeerId) -> Assignment:
        """The share of the data that is `me`'s in the round after `previous`."""
        members = previous.members
        seed = _seed_of(self._seed, previous.next_term)
        return Assignment(seed=seed, round=previous.next_round, member=share_of(me, members), members=len(members))

    def is_current(self, event: Contribution) -> bool:
        """True if this is what the last order was to bring: an older one was replaced, and its steps go on in it."""
        return event.order == self._orders

    async def give_back_contribution(self) -> None:
        """Give the memory of what the trainer contributed last back: it was taken."""
        await self._trainer.give_back_contribution()

    def pseudo_gradient(self, numel: int) -> F32:
        """Last contribution of the trainer, of a fragment of so many values: (numel,) float32.

        It lies in the trainer's memory, and is read before the trainer is ordered to train again.
        """
        return self._trainer.contribution[:numel]

    async def pause(self) -> None:
        """Stop after the current step."""
        self.paused = True
        await self._trainer.send(Pause())

    async def resume(self) -> None:
        """Go on."""
        self.paused, self._stepped_at = False, self._clock()
        await self._trainer.send(Resume())

    async def evaluate_last(self, deadline_s: float) -> None:
        """Return when the anchor that was given last is evaluated, or the deadline passes."""
        with trio.move_on_after(deadline_s):
            if self._unevaluated is not None:
                await self._evaluate(*self._unevaluated)
            await self._evaluated.wait()


def share_of(me: PeerId, members: Sequence[PeerId]) -> int:
    """The number of `me`'s share of a round's data: a member's place, for others a number beyond all of them."""
    return members.index(me) if me in members else len(members) + _draw(me)


def _draw(peer: PeerId) -> int:
    return int.from_bytes(blake3(peer.encode()).digest(8), "little") % OUTSIDER_NUMBERS


def _seed_of(seed: int, term: Term) -> int:
    """Seed of a term's data, another for each term: the same again would lead to where it went back from."""
    if term == Term():
        return seed
    place = msgspec.msgpack.encode((seed, term.rebases, term.rollbacks))
    return int.from_bytes(blake3(place).digest()[:8], "little") >> 1
