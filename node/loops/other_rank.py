"""A rank of a node's training loop that is not rank 0: the same calls, in which it does what rank 0 tells it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

import torch

from shoal.node.loops.loop_steps import (
    NOT_ENTERED,
    OptimizerSteps,
    Tally,
    bare,
    check_trainable,
    evaluating,
    number_of,
    tokens_of_told,
)
from shoal.node.loops.rank_group import (
    Build,
    Call,
    Entered,
    HandOver,
    Holds,
    Losses,
    Measure,
    Measured,
    Proceed,
    Raised,
    RankGroup,
    Read,
    Report,
    Waiting,
    Write,
    raise_as,
)
from shoal.node.loops.rank_spans import OwnParts, overlap
from shoal.protocol.errors import ConfigError, LocalError


class OtherRank:
    """Swarm as such a rank takes part in it: `own_loop.Swarm`, whose attributes and methods these are."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        evaluate: Callable[[torch.nn.Module], float] | None = None,
    ) -> None:
        """See `join`. Raises ConfigError if the model or the optimizer cannot be used."""
        self._model = bare(model)
        check_trainable(self._model, optimizer)
        self._steps = OptimizerSteps(optimizer)
        self._evaluate = evaluate
        self._tally = Tally()
        self._group: RankGroup | None = None
        self._entered = False
        self._parts: OwnParts
        self.peer_id = ""
        self.seed = 0
        """The node's, the same in all its ranks."""
        self.round = 0
        self.members = 0
        self.held_out: float | None = None
        self.over = False
        self.active = False

    def __enter__(self) -> Self:
        """Join with rank 0. Raises what that raises, and NetworkError where it is gone or late."""
        self._entered = True
        self._group = RankGroup()
        try:
            self._take_part("join")
        except BaseException:
            self.close()
            raise
        self._steps.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Leave the other ranks. Once is enough; the model keeps the parameters that it has."""
        self._steps.end()
        self.active = False
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def step(self, *, tokens: int, loss: torch.Tensor | float | None = None) -> bool:
        """Say that an optimizer step was made, on so many tokens of this rank's own; see `own_loop.Swarm`."""
        counted = tokens_of_told(tokens)
        made = self._steps.made()
        if not self.active:
            if not self._entered:
                raise ConfigError(NOT_ENTERED)
            return False
        if made:
            self._tally.add(made, counted, loss)
        self._take_part("step", made=made, tokens=counted if made else 0)
        return self.active

    @contextmanager
    def at_anchor(self) -> Iterator[torch.nn.Module]:
        """The model with the certified parameters of round `round` for as long as the context lasts."""
        self._take_part("at_anchor")
        yield self._model
        self._take_part("at_anchor")

    def _take_part(self, call: Call, *, made: int = 0, tokens: int = 0) -> None:
        """Do what rank 0 tells until the loop may go on.

        Raises NetworkError where it is gone or late, and what it raised itself.
        """
        group = self._group
        if group is None:
            raise LocalError(f"{call!r} after the end")
        group.send(0, Entered(call=call, made=made, tokens=tokens))
        while True:
            match order := group.order():
                case Proceed():
                    self._go_on(order)
                    return
                case Raised():
                    raise_as(order)
                case Waiting():
                    pass
                case Build():
                    self._parts = OwnParts(self._model, chunk_values=order.chunk_values)
                    group.send(0, Holds(digest=self._parts.layout.digest, spans=self._parts.held))
                case HandOver():
                    self._parts.handed = order.spans
                case Read():
                    group.send_values(0, self._parts.read(overlap(order.spans, self._parts.handed)))
                case Write():
                    self._write(order, group)
                case Measure():
                    group.send(0, Measured(value=self._measure()))
                case Report():
                    total, count = self._tally.losses()
                    if order.ends:
                        self._tally = Tally()
                    group.send(0, Losses(total=total, count=count))

    def _measure(self) -> float:
        if self._evaluate is None:
            raise ConfigError("rank 0 gave join a function to evaluate, and this rank none; give it in every rank")
        with evaluating(self._model):
            return number_of(self._evaluate(self._model))

    def _write(self, order: Write, group: RankGroup) -> None:
        spans = overlap(order.spans, self._parts.held)
        values = torch.empty(sum(stop - start for start, stop in spans), dtype=torch.float32, device="cpu")
        self._parts.write(spans, group.broadcast(values) if order.whole else group.receive_values(0, values))

    def _go_on(self, order: Proceed) -> None:
        self.peer_id, self.seed, self.round, self.members = order.peer_id, order.seed, order.round, order.members
        self.held_out, self.over, self.active = order.held_out, order.over, order.active
