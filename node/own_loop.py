"""Your own training loop as a node of a swarm: any model, any optimizer of torch, your data, your schedule.

    from shoal.node.own_loop import join

    with join(model, optimizer, "swarm.toml", data_dir="node") as swarm:
        for batch in loader:
            loss = model(batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            swarm.step(tokens=batch.numel(), loss=loss)

`join` starts the node's daemon, or attaches to the one that runs on the data folder, and returns when the model stands
on the swarm's state. From then on `swarm.step`, called after every optimizer step, is where the swarm may act: it
counts the work, writes this node's contribution when enough steps are made, waits for the round, and moves the
parameters to the new common ones, in place. What was learnt beside a round is kept. Nothing else of the loop is
touched: not the optimizer's moments, the learning rate, random numbers, counters, or parameters that need no
gradient. These do not travel: of a model with LoRA adapters the adapters alone do. Floating buffers (running means)
do: each round gives all nodes the mean of them.

Processes of `torch.distributed` that train one model, by DDP or in parts, are one node: all make these calls, and rank
0 speaks with the daemon (`shoal.node.loops.rank_group`).

What it joined, and each round with its members and losses, goes to the logger `shoal.loop`; to stderr, where the
program has set up no logging.

Steps that the optimizer did not make, such as those a GradScaler skips, are noticed and not counted. If the daemon
ends, training goes on locally, with a warning.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import blake3
import torch

from shoal.node.loops.loop_client import Anchor, AnchorHere, LoopClient, Order
from shoal.node.loops.loop_daemon import LOG_NAME, LoopDaemon, found_or_started
from shoal.node.loops.loop_snapshots import LoopSnapshots
from shoal.node.loops.loop_steps import (
    NOT_ENTERED,
    OptimizerSteps,
    Tally,
    TrainedParameters,
    bare,
    check_trainable,
    evaluating,
    mean_of,
    number_of,
    tokens_of_told,
)
from shoal.node.loops.rank_group import (
    Alone,
    Leader,
    Measure,
    Proceed,
    RankGroup,
    Waiting,
    restarted,
    starts_again,
    world_size,
)
from shoal.node.loops.step_watch import StepWatch
from shoal.node.options import DEFAULT_DATA_DIR
from shoal.node.outcome import HELD_OUT_LOSS, NOT_FINITE, TRAINING_LOSS
from shoal.node.own_frames import print_without_shoal
from shoal.node.pipe import Pause, Resume, Stop
from shoal.node.text import count, duration, who_contributed
from shoal.node.training.accounts import Accounts, Flat
from shoal.node.training.flat_parameters import FlatParameters
from shoal.node.training.trainer_messages import (
    Contribution,
    Evaluate,
    Evaluated,
    Evaluating,
    Hurry,
    Initial,
    Progress,
    Restore,
    Retune,
    Snapshot,
    Train,
    Trained,
    WriteInitial,
)
from shoal.protocol.errors import ConfigError, LocalError, NetworkError, ShoalError
from shoal.protocol.identity import Identity
from shoal.protocol.names import called, short

if TYPE_CHECKING:
    from shoal.node.loops.other_rank import OtherRank

JOIN_DEADLINE_S = 600.0
WAIT_S = 1.0
"""A wait for orders looks up so often: at the daemon, and at Ctrl-C."""
LIVENESS_PERIOD_S = 30.0
"""A daemon that orders nothing for so long is asked for a sign of life."""
JOINING_PERIOD_S = 9.0
"""The same while it joins: by then it knows that it finds nobody (`shoal.node.discovery.finding.ALONE_S`)."""
WARNING_PERIOD_S = 60.0
"""Between two times that the user is warned of one thing, such as what the daemon says."""
UNSTEPPED_S = 60.0
"""So long after a step the user is told, while the node is to train, that there was none since."""
WEIGHTLESS = (
    "step(tokens=0) weighs nothing, and no round counts this work: give step() the number of tokens or samples that "
    "each of the %s steps was made on"
)
UNSTEPPED = (
    "step() was not called for %.0f s: call it once after each optimizer step. Until then this node contributes "
    "nothing, and the others' rounds wait for it for two minutes, or for ten times as long as its steps take; then "
    "they go on without it. If this is a long evaluation, all is well after it"
)
NEVER_STEPPED = (
    "step() was never called: of the %d optimizer steps that this loop made the swarm has none; call it once after each"
)
VAIN_CALLS = 20
"""So many calls of step() in a row, before each of which the optimizer made no step, are told of: a loss scaler that
looks for its scale skips fewer."""
VAIN = (
    "before the last %d calls of step() the optimizer that join() was given made no step, so they count nothing: give "
    "join() the optimizer that the loop uses, not one made before it"
)
ENTERED = "a swarm is joined once; call join() again for another `with`"
NEWER = (
    "parameter %r is trained here and by nobody else: it was frozen, or not there, when join() was called, so nothing "
    "of it travels. Have all that is to be trained in the model, unfrozen, before join(), in a swarm founded with it"
)
NO_ROUND = (
    "this loop ended after %d of the %d steps of its first round: the swarm has nothing of it, and at_anchor() gives "
    "what the loop joined with; train longer, or found a swarm with fewer `inner_steps` in its [sync]"
)
LAST_STEPS = "the last %s of this loop ended no round: the model has what was learnt in them, at_anchor() has it not"
NOT_CERTIFIED = (
    "the last %s of this loop are in no round that was certified before it ended: the model has what was learnt in "
    "them, at_anchor() has it not; train on until the round is over"
)
PAUSED = (
    "this node is paused, and step() waits: `shoal resume --data-dir %s` goes on, `shoal status --data-dir %s` says why"
)
PAUSE_TOLD_S = 2.0
"""A pause is told when it has lasted so long: a node that waited for its loop is paused until the loop is there."""
LONG_EVALUATION_S = 5.0
"""After an evaluation that took so long there is no other before a step is made: else, where it takes longer than the
others' rounds, there would always be a newer state to evaluate."""
SILENCES_LIMIT = 3
PROGRESS_PERIOD_S = 1.0

logger = logging.getLogger("shoal.loop")


class SwarmWarning(UserWarning):
    """Line that a node has for its user while a training loop waits for it."""


class Swarm:
    """Swarm as one training process takes part in it; a context manager. Use from the thread that trains.

    talks: whether it says that it joined, and each round.
    """

    talks = True

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        manifest: Path | str,
        *,
        data_dir: Path | str | None = None,
        peers: Sequence[str] = (),
        evaluate: Callable[[torch.nn.Module], float] | None = None,
        options: Sequence[str] = (),
        wait_s: float = JOIN_DEADLINE_S,
    ) -> None:
        """See `join`. Raises ConfigError if the model or the optimizer cannot be used."""
        self._model = bare(model)
        check_trainable(self._model, optimizer)
        self._flat: Flat = FlatParameters(self._model, frozen=False)
        self._ranks = Alone()
        self._steps = OptimizerSteps(optimizer)
        self._trained = TrainedParameters(self._model)
        self._manifest = manifest
        self._data_dir = _data_folder(data_dir)
        self._peers, self._options, self._wait_s = tuple(peers), tuple(options), wait_s
        self._evaluate = evaluate
        self._metric = TRAINING_LOSS if evaluate is None else HELD_OUT_LOSS
        self._tally = Tally()
        self._held: deque[Order] = deque()
        self._order: Train | None = None
        self._order_steps = 0
        self._evaluation_s = 0.0  # of the newest, if no step was made since
        self._vain_calls = 0
        self._round_steps = 0  # of a round, as it was ordered
        self._contributed = False
        self._contributed_steps = 0  # in the newest contribution
        self._steps_wanted = 0  # until the order's contribution, or its end
        self._overlapping = False  # beyond its contribution
        self._paused = False
        self._paused_at, self._pause_told = 0.0, False
        self._names: Mapping[str, str] = {}  # of those that did not contribute
        self._alone = False  # as was said: without a quorum
        self._last_loss: float | None = None
        self._weightless_steps = 0  # of the newest contribution, if it has no weight
        self._warned_at: dict[str, float] = {}  # by what was said
        self._device = next(self._model.parameters()).device
        self._daemon: LoopDaemon | None = None
        self._client: LoopClient | None = None
        self._watch = StepWatch(
            period_s=UNSTEPPED_S, is_wanted=self._is_to_train, tell=lambda seconds: self._warn(UNSTEPPED, seconds)
        )
        self._stepped = False
        self._entered = False
        self._accounts: Accounts
        self._snapshots: LoopSnapshots
        self.peer_id = ""
        """This node's name in the swarm, once joined."""
        self.round = 0
        """The round whose state the model stands on."""
        self.members = 0
        """Members of the round under way, this node among them if it is one."""
        self.held_out: float | None = None
        """Held-out loss of the newest state that `evaluate` was given; None before there was one."""
        self._held_out_round = 0
        self._told = -1  # the newest round of which the log has a line
        self.over = False
        """True if the daemon has ended in order: its rounds are done, or it was told to leave."""

    # -- life ------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        """Join; returns when there are steps to be made.

        Raises ConfigError, one line that says what to do, and NetworkError if the swarm is not reached in time.
        """
        if self._entered:
            raise ConfigError(ENTERED)
        self._entered = True
        atexit.register(self._at_exit)
        if self.talks:
            _be_heard()
        try:
            if world_size() > 1:
                self._ranks = Leader(RankGroup())
            with self._ranks.call("join", self._proceed):
                self._join()
        except BaseException as error:
            self._end(failed=isinstance(error, Exception))
            if isinstance(error, ShoalError) and not isinstance(error, LocalError):
                raise error.with_traceback(None) from None  # its line says all
            raise
        self._steps.begin()
        self._tally = Tally()
        if self.talks:
            self._watch.begin()
        return self

    def _join(self) -> None:
        """Attach to the daemon, and stand on the swarm's state. Raises ConfigError, NetworkError."""
        ends_at = time.monotonic() + self._wait_s
        self._daemon = self._found()
        buffers = self._flat.layout.buffers  # which begin where a chunk does
        chunk_values = self._daemon.manifest.round.chunk_values if buffers else 1
        self._flat = _flat(self._model, self._ranks, chunk_values)
        self._client = client = self._daemon.attach(
            layout=self._flat.layout, metric=self._metric, device=str(self._device)
        )
        if restarted() and client.waits_s is not None:
            self._daemon.adopt()
        self.peer_id = client.peer_id
        self._accounts = Accounts(self._flat, sync=client.sync, contributions=client.contributions)
        self._snapshots = LoopSnapshots(self._accounts, self._flat.layout, self._device, client.send)
        self._obey(ends_at=ends_at)
        if self._client is None:
            raise ConfigError(self._daemon.last_words() or "the node ended before there was anything to train")

    def _proceed(self) -> Proceed:
        """The facts that the other ranks are to know when a call is over."""
        return Proceed(
            peer_id=self.peer_id,
            seed=self.seed,
            round=self.round,
            members=self.members,
            held_out=self.held_out,
            over=self.over,
            active=self.active,
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(failed=isinstance(error, Exception))

    def close(self) -> None:
        """Leave the swarm in order with a daemon that `join` started; detach from one that ran before. Once is enough.

        The model keeps the parameters that it has.
        """
        self._end(failed=False)

    def _at_exit(self) -> None:
        self._end(failed=isinstance(getattr(sys, "last_value", None), Exception))

    def _end(self, *, failed: bool) -> None:
        """Leave or detach. failed: by an error, after which torchrun may start the loop again: it will attach anew."""
        atexit.unregister(self._at_exit)
        self._watch.end()
        unsaid = 0 if self._stepped else self._steps.made()
        self._steps.end()
        client, self._client = self._client, None
        daemon, self._daemon = self._daemon, None
        if unsaid and self.talks and client is not None:
            logger.warning(NEVER_STEPPED, unsaid)
        parts = self._told >= 0 and client is not None and not client.ended
        leaves = daemon is not None and daemon.leaves
        if failed and starts_again():
            daemon, leaves = None, False
        try:
            self._ranks.close()
            if daemon is not None:
                daemon.ask_to_leave()
        finally:
            if client is not None:
                client.close()
            if daemon is not None:
                daemon.end()
            if parts and client is not None:
                self._say_parted(client.waits_s, leaves=leaves)
                if not failed:
                    self._say_unfinished()

    def _say_parted(self, waits_s: float | None, *, leaves: bool) -> None:
        """Say what becomes of the node: it left, or it waits so long for a loop."""
        if leaves:
            logger.info("this node has left the swarm")
            return
        logger.info(
            "the node on %s stays in the swarm, and waits %sfor a loop; `shoal leave --data-dir %s` ends it",
            self._data_dir,
            "" if waits_s is None else f"{duration(waits_s)} ",
            self._data_dir,
        )

    def _say_unfinished(self) -> None:
        """Say which steps are the loop's alone: those since the newest contribution, and its own while it waits."""
        steps = self._accounts.steps
        if self._accounts.waiting:
            logger.warning(NOT_CERTIFIED, count(self._contributed_steps + steps, "step"))
        elif not steps:
            return
        elif self._contributed:
            logger.info(LAST_STEPS, count(steps, "step"))
        else:
            logger.warning(NO_ROUND, steps, self._round_steps)

    def _is_to_train(self) -> bool:
        """True if the daemon waits for steps, as far as a thread beside the loop can tell."""
        client = self._client
        return self._order is not None and client is not None and not (client.paused or client.ended)

    def _status(self) -> Mapping[str, object]:
        """The daemon's status; nothing where it gives none."""
        assert self._daemon is not None
        with suppress(NetworkError):
            return self._daemon.status() or {}
        return {}

    def _names_of(self, peers: Sequence[str]) -> list[str]:
        """The names of other nodes, asked of the daemon where one is new."""
        if not self._names.keys() >= set(peers):
            names = self._status().get("names")
            self._names = {peer: called(peer, names if isinstance(names, dict) else {}) for peer in peers}
        return [self._names[peer] for peer in peers]

    def _say_joined(self) -> None:
        """Say that this node takes part, by which name, and where its page is."""
        assert self._daemon is not None
        status = self._status()
        names, page = status.get("names"), status.get("dashboard")
        name = called(self.peer_id, names if isinstance(names, dict) else {})
        where = f"; its page is {page}" if isinstance(page, str) else ""
        found = "" if self._daemon.leaves else f", which ran on {self._data_dir} before,"
        logger.info("this node%s takes part as %s (%s)%s", found, name, short(self.peer_id), where)

    def _say_paused(self) -> None:
        """Say once that step() waits, and what ends that; not of a node that merely waited for this loop."""
        if self.talks and not self._pause_told and time.monotonic() - self._paused_at >= PAUSE_TOLD_S:
            self._pause_told = True
            logger.warning(PAUSED, self._data_dir, self._data_dir)

    def _found(self) -> LoopDaemon:
        """The daemon to attach to."""
        return found_or_started(
            self._manifest, self._data_dir, peers=self._peers, options=self._options, wait_s=self._wait_s
        )

    @property
    def active(self) -> bool:
        """True if there is a daemon to train for; without one the loop trains locally."""
        return self._client is not None

    @property
    def seed(self) -> int:
        """`node_seed` of this node."""
        return _seed_of(self.peer_id)

    # -- what the loop calls ---------------------------------------------------------------------------------

    def step(self, *, tokens: int, loss: torch.Tensor | float | None = None) -> bool:
        """Say that an optimizer step was made, on so many tokens (or samples); returns whether the swarm is there.

        Call it after every `optimizer.step()`: with gradients accumulated over several batches once, with the tokens
        of all of them. A step that the optimizer did not make counts nothing. `loss` is the mean loss of the step, for
        reports. May wait for the other nodes, and changes the parameters when a round is done.

        Raises FloatingPointError if the parameters are no longer finite; such are never contributed. ConfigError before
        joining.
        """
        counted = tokens_of_told(tokens)
        made, self._stepped = self._steps.made(), True
        if self._client is None:
            if not self._entered:
                raise ConfigError(NOT_ENTERED)
            return False
        self._vain_calls = 0 if made else self._vain_calls + 1
        if self._vain_calls >= VAIN_CALLS:
            self._warn(VAIN, self._vain_calls)
        self._watch.called(waits=True)
        self._tally.trained()
        with self._ranks.call("step", self._proceed, made=made, tokens=counted if made else 0) as of_all:
            if made:
                self._count(made, of_all, loss)
                self._warn_of_newer()
            self._obey()
        self._tally.resumed()
        self._watch.called(waits=False)
        return self._client is not None

    @contextmanager
    def at_anchor(self) -> Iterator[torch.nn.Module]:
        """The model with the certified parameters of round `round` for as long as the context lasts, then as it was.

        For an evaluation or a checkpoint of what the swarm has in common. What is changed inside, of parameters and of
        buffers that travel, is changed back. Of several ranks each makes this call; where one fails inside, nothing is
        changed back, as the others may never come.
        """
        if not hasattr(self, "_accounts"):
            raise ConfigError("at_anchor() comes after joining: call it within `with join(...) as swarm:`")
        with self._anchored(lambda: self._ranks.call("at_anchor", self._proceed)):
            yield self._model

    @contextmanager
    def _anchored(self, call: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
        """Have the anchor in the model for the block. call: a context in which all ranks come to its begin and end."""
        base = self._accounts.base
        assert base is not None
        with call():
            local = self._accounts.local()
            self._flat.scatter(base)
        failed = True
        try:
            yield
            failed = False
        finally:
            if not failed or self._ranks.size == 1:
                with call():
                    self._flat.scatter(local)

    # -- counting --------------------------------------------------------------------------------------------

    def _count(self, made: int, tokens: int, loss: torch.Tensor | float | None) -> None:
        for number in range(made):
            self._accounts.count(0 if number else tokens)
        self._tally.add(made, tokens, loss)
        self._evaluation_s = 0.0
        self._order_steps += made
        order = self._order
        if order is None or self._client is None:
            return
        if self._overlapping:
            self._order = order if self._accounts.goes_on else None
        elif self._order_steps >= self._steps_wanted:
            self._finish(order, self._client)
        elif self._tally.since_report_s >= PROGRESS_PERIOD_S:
            rate = self._tally.rate_since_report()
            self._client.send(
                Progress(round=order.round, step=self._tally.steps, loss=self._tally.mean_loss(), tokens_per_s=rate)
            )

    def _finish(self, order: Train, client: LoopClient) -> None:
        """Report the steps of an order, which are made, with a contribution if it is to end in one."""
        tally = self._tally
        (total, told), seconds = self._ranks.losses(*tally.losses(), ends=order.contribute), tally.seconds
        loss = mean_of(total, told)
        if not order.contribute:
            self._order = None
            client.send(
                Trained(
                    round=order.round,
                    steps=self._order_steps,
                    loss=loss,
                    seconds=seconds,
                    tokens_per_s=tally.tokens_per_s(),
                )
            )
            return
        try:
            written = self._accounts.contribute(client.contribution, order.round)
        except FloatingPointError as error:
            raise FloatingPointError(f"{error}; the swarm's state is as it was") from None
        self._tally = Tally()
        self._last_loss, self._contributed = loss if told else None, True
        self._contributed_steps = tally.steps
        self._overlapping = self._accounts.goes_on
        if not self._overlapping:
            self._order = None
        self._snapshots.withdraw()
        self._weightless_steps = 0 if written.tokens else tally.steps
        self._warn_if_weightless()
        client.send(
            Contribution(
                number=written.number,
                order=order.order,
                round=order.round,
                tokens=written.tokens,
                steps=tally.steps,
                loss=loss,
                seconds=seconds,
                tokens_per_s=tally.tokens_per_s(),
                wall_s=self._tally.began - tally.began,
                blocked_s=tally.blocked_s,
            )
        )

    def _warn_if_weightless(self) -> None:
        """Warn while the newest contribution counts for nothing: with every round, and in a wait for one."""
        if self._weightless_steps:
            self._warn(WEIGHTLESS, self._weightless_steps)

    def _warn_of_newer(self) -> None:
        """Warn of what this loop trains alone. Of several ranks none has all parameters, or always the same tensors."""
        if self._ranks.size == 1 and self._is_due("newer") and (name := self._trained.newer()) is not None:
            logger.warning(NEWER, name)

    def _warn(self, text: str, value: float) -> None:
        if self._is_due(text):
            logger.warning(text, value)

    def _is_due(self, what: str) -> bool:
        """True once a `WARNING_PERIOD_S`: then the user is to be told."""
        now = time.monotonic()
        due = now - self._warned_at.get(what, -math.inf) >= WARNING_PERIOD_S
        if due:
            self._warned_at[what] = now
        return due

    # -- orders ----------------------------------------------------------------------------------------------

    def _obey(self, *, ends_at: float | None = None) -> None:
        """Follow the daemon's orders, until there are steps to be made and none is left.

        Raises NetworkError if that is not before `ends_at`, in seconds of the monotonic clock.
        """
        quiet_since, silences = time.monotonic(), 0
        period_s = LIVENESS_PERIOD_S if ends_at is None else JOINING_PERIOD_S
        while self._client is not None:
            client = self._client
            idle = self._paused or self._order is None
            began = time.monotonic()
            order = self._next_order(client, WAIT_S if idle else 0.0)
            if idle:
                self._ranks.tell(Waiting())
            if self._paused:
                self._say_paused()
            now = time.monotonic()
            if idle and not self._paused and self._accounts.waiting:
                self._tally.blocked_s += now - began
            if order is not None:
                self._follow(order, client)
                quiet_since, silences = time.monotonic(), 0
            elif client.gone and self._held:
                self._follow(self._held.popleft(), client)  # the last anchor, for which no more steps are made
            elif client.gone and ends_at is not None:
                self._client = self._order = None  # `_join` says why
            elif client.gone:
                self._go_on_alone(client)
            elif not idle:
                return
            elif ends_at is not None and now > ends_at:
                raise self._no_part()
            elif now - quiet_since >= period_s:
                silences = 0 if self._hears() else silences + 1
                quiet_since = time.monotonic()
                if silences >= SILENCES_LIMIT:
                    client.close()

    def _no_part(self) -> NetworkError:
        """Return the error for a loop that had nothing to do for too long, with the reason."""
        if self._paused:
            return NetworkError(
                f"this node is paused since before the loop began, {self._wait_s:g} s ago; say "
                f"`shoal resume --data-dir {self._data_dir}`, and start the loop again"
            )
        assert self._daemon is not None
        alerts: Sequence[str] = ()
        with suppress(NetworkError):
            alerts = _alerts_in(self._daemon.status())
        why = next(iter(alerts), "is any member reachable?")
        return NetworkError(
            f"no part in the swarm's rounds after {self._wait_s:g} s; {why}; the node's log is "
            f"{self._data_dir / LOG_NAME}"
        )

    def _next_order(self, client: LoopClient, wait_s: float) -> Order | None:
        """The next order; those that come with an anchor wait with it until the steps of overlap are made."""
        overlapping = self._order is not None and self._accounts.overlap_left > 0 and not self._paused
        if self._held and not overlapping:
            return self._held.popleft()
        while (order := client.receive(wait_s)) is not None:
            anchor = isinstance(order, AnchorHere) and not order.fresh
            if not (overlapping and (self._held or anchor)) or isinstance(order, Pause | Resume):
                return order
            self._held.append(order)
        return None

    def _hears(self) -> bool:
        """True if the daemon answers; says what it waits for."""
        assert self._daemon is not None
        try:
            status = self._daemon.status()
        except NetworkError as error:
            logger.warning("%s", error)
            return False
        if status is None:
            return False
        logger.info("waiting for the swarm: round %s, %s", status.get("round"), status.get("doing"))
        self._warn_if_weightless()
        alerts = _alerts_in(status)
        if alerts and self._is_due("alerts"):
            for alert in alerts:
                warnings.warn(alert, SwarmWarning, stacklevel=2)
        return True

    def _go_on_alone(self, client: LoopClient) -> None:
        """Train locally from here on: the daemon is gone."""
        assert self._daemon is not None
        self.over = not self._daemon.failed() and client.ended_in_order
        self._client, self._order = None, None
        if self.over:
            logger.info("the node has left the swarm; training goes on locally")
        else:
            why = self._daemon.last_words() or f"see {self._daemon.log_path}"
            text = "the node is gone (%s); training goes on locally, and nothing is shared: start the script again"
            logger.warning(text, why)

    def _follow(self, order: Order, client: LoopClient) -> None:
        match order:
            case AnchorHere():
                self._stand_on_anchor(client)
            case Train():
                self._begin(order)
            case Evaluate():
                self._report_evaluation(order, client)
            case WriteInitial():
                self._accounts.write_initial(client.contribution)
                client.send(Initial())
            case Snapshot():
                self._snapshots.write(order)
            case Restore():
                client.send(self._snapshots.restore(order))
            case Retune():
                self._accounts.retune(order.sync)  # the optimizer is its user's
            case Pause():
                self._paused, self._paused_at = True, self._paused_at if self._paused else time.monotonic()
            case Resume():
                self._paused, self._pause_told = False, False
            case Hurry():
                pass  # the daemon waits for no anchor: each is copied when it comes
            case Stop():
                client.close()
            case _:
                raise LocalError(f"the daemon sent {type(order).__name__} out of turn")

    def _stand_on_anchor(self, client: LoopClient) -> None:
        self._order = None
        anchor = client.take_anchor()
        if anchor is not None:
            self._apply(anchor, client)

    def _apply(self, anchor: Anchor, client: LoopClient) -> None:
        try:
            self._accounts.apply(anchor.values, round=anchor.round, taken=anchor.taken, fresh=anchor.fresh)
        except BaseException:  # say, no memory: of what stands on half of an anchor nothing may be shared
            self._client = None
            client.close()
            raise
        self.round = anchor.round

    def _begin(self, order: Train) -> None:
        self._order, self._order_steps, self._overlapping = order, 0, False
        self.members = order.assignment.members
        if order.contribute:
            self._alone = False
        elif self.talks and not self._alone:
            self._alone = True
            logger.warning(
                "no quorum in round %d: training goes on locally until the others are back; "
                "`shoal status --data-dir %s` says who is missing",
                order.round,
                self._data_dir,
            )
        if self.talks and self.round > self._told:
            if self._told < 0:
                self._say_joined()
            self._told = self.round
            self._say_round(order.contributors, order.missing)
        self._round_steps = order.steps
        self._steps_wanted = max(1, order.steps - self._accounts.steps) if order.contribute else order.steps

    def _say_round(self, contributors: int, missing: Sequence[str]) -> None:
        """Say on which round's state the loop trains on, by whom, and how good it is; each loss by its own word."""
        absent = self._names_of(missing) if missing else ()
        who = who_contributed(contributors, self.members, absent) if contributors else count(self.members, "member")
        said = [] if self._last_loss is None else [f"training loss {self._last_loss:.4g}"]
        if self.held_out is not None:
            older = "" if self._held_out_round == self.round else f" (round {self._held_out_round})"
            said.append(f"held-out loss {self.held_out:.4g}{older}")
        logger.info("round %d: %s", self.round, ", ".join((who, *said)))

    def _report_evaluation(self, order: Evaluate, client: LoopClient) -> None:
        """The user's evaluation of the anchor, or the loss that this node trained at last."""
        if order.round != self.round:
            return  # of an anchor that another has replaced
        value = self._last_loss
        if self._evaluate is not None and self._evaluation_s >= LONG_EVALUATION_S:
            return
        if self._evaluate is not None:
            client.send(Evaluating(round=order.round))
            began = time.monotonic()
            with self._anchored(nullcontext):
                self._ranks.tell(Measure())
                with evaluating(self._model):
                    value = number_of(self._evaluate(self._model))
                self.held_out = value = self._ranks.mean(value)
                self._held_out_round = self.round
                if not math.isfinite(value):
                    self._warn(NOT_FINITE, value)
            self._evaluation_s = time.monotonic() - began
        if value is not None:
            client.send(Evaluated(round=order.round, value=value))


def _alerts_in(status: Mapping[str, object] | None) -> Sequence[str]:
    """Lines that a daemon's status has for its user."""
    alerts = (status or {}).get("alerts")
    return [str(alert) for alert in alerts] if isinstance(alerts, list) else []


def _be_heard() -> None:
    """Where the program has set up no logging, let what this module says go to stderr."""
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("shoal: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)


def node_seed(data_dir: Path | str | None = None) -> int:
    """A 31-bit number of the node of this data folder: shuffle data with it, or all nodes learn from the same batches.

    Makes the node's key if there is none.
    """
    folder = _data_folder(data_dir)
    return _seed_of(Identity.load_or_create(folder / "node.key").peer_id)


def _seed_of(peer_id: str) -> int:
    return int.from_bytes(blake3.blake3(peer_id.encode()).digest(4), "little") >> 1


def _data_folder(given: Path | str | None) -> Path:
    """Return the folder in which `shoal run` would keep this node's things."""
    named = given or os.environ.get("SHOAL_DATA_DIR")
    return Path(named) if named else DEFAULT_DATA_DIR


def _flat(model: torch.nn.Module, ranks: Alone, chunk_values: int) -> Flat:
    """The model's parameters as one vector, on a grid of such chunks, whichever rank has them. Raises ConfigError."""
    if not isinstance(ranks, Leader):
        return FlatParameters(model, frozen=False, chunk_values=chunk_values)
    from shoal.node.loops.rank_spans import GroupFlat  # takes seconds, seldom needed

    return GroupFlat(model, ranks, chunk_values=chunk_values)


def join(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    manifest: Path | str,
    *,
    data_dir: Path | str | None = None,
    peers: Sequence[str] = (),
    evaluate: Callable[[torch.nn.Module], float] | None = None,
    options: Sequence[str] = (),
    wait_s: float = JOIN_DEADLINE_S,
) -> Swarm | OtherRank:
    """Make this process the trainer of a node of the swarm; to be used as a context manager.

    manifest: path of the manifest of a swarm whose workload is `own-loop`; or its link, `shoal:…`, or the whole line
    that `shoal link` prints, with which the manifest is fetched. data_dir: the node's folder; if a node runs on it, the
    loop attaches to that one, else one is started, with `peers` (addresses to join through) and further `options` of
    `shoal run`. evaluate: returns a held-out loss of the model it is given, always on the same data; without it the
    mean training loss is reported. wait_s: how long to wait for a part in the rounds,
    from this call on, also while a manifest is asked for.

    The optimizer must hold the model's parameters, which are float32 where they need a gradient. The first founder's
    parameters, as they are at this call, are the swarm's first state. Where processes of `torch.distributed` train one
    model (DDP, `fully_shard`, HSDP), they are one node: each makes the same calls, and rank 0 speaks with the swarm.

    Raises ConfigError; entering the context raises NetworkError too, if the swarm is not reached in time.
    """
    if world_size() > 1 and torch.distributed.get_rank():
        from shoal.node.loops.other_rank import (
            OtherRank,  # takes seconds, and only a node of several processes needs it
        )

        return OtherRank(model, optimizer, evaluate=evaluate)
    print_without_shoal()
    try:
        return Swarm(
            model,
            optimizer,
            manifest,
            data_dir=data_dir,
            peers=peers,
            evaluate=evaluate,
            options=options,
            wait_s=wait_s,
        )
    except ConfigError as error:
        raise error.with_traceback(None) from None


__all__ = ["ConfigError", "NetworkError", "ShoalError", "Swarm", "SwarmWarning", "join", "node_seed"]
