"""Weighing the work of others: what a contribution does to the loss on the data that its member was assigned.

    certified round ─► whom the ticket draws ─► its whole contribution, chunk by chunk, over the lanes
                       S(e−1), while it is held ─► a process of its own: the loss before and after ─► local scores

See useful_work.py for what that says, and what not. Only where a contribution is of all parameters and is what inner
steps moved: with one fragment, and no gradients.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import trio

from shoal.collectives.codecs import F32, U8, chunk_codec
from shoal.collectives.grid import Grid
from shoal.collectives.state import CertifiedState
from shoal.node.audits.work_process import WorkReply, WorkRequest, unpack_reply
from shoal.node.child_process import ChildDied, ChildRaised, running_child
from shoal.node.loops.loop_messages import OWN_LOOP
from shoal.node.parts import Parts
from shoal.node.reporting.events import Weighed
from shoal.node.state.store import disk_errors
from shoal.protocol.auditing import drawn_work
from shoal.protocol.errors import LocalError, NetworkError
from shoal.protocol.identity import PeerId
from shoal.protocol.manifest import Manifest
from shoal.protocol.messages import Plan, Value

CHUNKS_AT_ONCE: Final = 8
WEIGH_DEADLINE_S: Final = 600.0
WEIGHED_PREFIX: Final = "shoal-work-"
"""Of the folder in which what is weighed lies meanwhile."""
PROGRAM: Final = ("-m", "shoal.node.audits.work_process")

logger = logging.getLogger("shoal.work")


Sound = Callable[[Plan, int, Sequence[int]], Awaitable[Mapping[int, U8]]]
"""Gets payloads of a participant, by its place, of these chunks: those that are shown and are what was committed to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighing:
    """Contribution to weigh: that of participant `place`, on the parameters that the round after `base` began with."""

    base: Value
    plan: Plan
    place: int
    anchor: F32

    @property
    def peer(self) -> PeerId:
        """Contributor whose work is weighed."""
        return self.plan.participants[self.place].peer


class WorkAudit:
    """Weighs the work of others for one node. useless: called with a peer whose work did not help."""

    def __init__(self, parts: Parts, sound: Sound, useless: Callable[[PeerId], None]) -> None:
        self._p = parts
        self._sound = sound
        self._useless = useless
        self._newest: CertifiedState | None = None  # of the round that was drawn from last; the cache may let it go
        self._share = parts.config.manifest.audits.work if _can_weigh(parts.config.manifest) else 0.0
        for left in parts.store.folder.glob(f"{WEIGHED_PREFIX}*"):  # by a node that did not live to weigh it
            shutil.rmtree(left, ignore_errors=True)

    def drawn(self, base: Value, plan: Plan, mark: bytes) -> Weighing | None:
        """Draw the contribution to weigh in a certified round, by this node's ticket; it holds on to the state."""
        places = plan.contributors()
        number = drawn_work(mark, len(places), self._share)
        before, self._newest = self._newest, self._p.cache.state(plan.round) if self._share else None
        state = self._p.cache.state(base.state_round)
        if state is None and before is not None and (before.term, before.round) == (base.term, base.state_round):
            state = before
        if number is None or state is None or state.numel != plan.numel:
            return None
        drawn = Weighing(base=base, plan=plan, place=places[number], anchor=state.anchor)
        return None if drawn.peer == self._p.identity.peer_id else drawn

    async def weigh(self, drawn: Weighing) -> None:
        """Fetch the contribution, have it weighed, and report the outcome.

        Raises NetworkError if it cannot be had or weighed, StorageError. Cancellation ends the process that weighs.
        """
        plan, grid = drawn.plan, Grid.of(drawn.plan)
        contribution = np.empty(grid.numel, np.float32)
        for first in range(0, grid.chunks, CHUNKS_AT_ONCE):
            chunks = range(first, min(first + CHUNKS_AT_ONCE, grid.chunks))
            payloads = await self._sound(plan, drawn.place, chunks)
            for chunk in chunks:
                if chunk not in payloads:
                    raise NetworkError(f"{drawn.peer} does not show all of its contribution; it is not weighed")
                how = chunk_codec(plan.codec, grid, chunk)
                encoded = payloads[chunk][: how.encoded_bytes(grid.length(chunk))]
                how.decode_into(encoded, contribution[slice(*grid.span(chunk))])
        reply = await self._losses(drawn, contribution)
        if not isinstance(reply, WorkReply):
            raise NetworkError(f"the work of {drawn.peer} in round {plan.round} cannot be weighed: {reply}")
        useful = reply.after < reply.before
        if not useful:
            self._useless(drawn.peer)
        self._p.events.write(
            Weighed(peer=drawn.peer, round=plan.round, before=reply.before, after=reply.after, useful=useful)
        )

    async def _losses(self, drawn: Weighing, contribution: F32) -> WorkReply | str:
        config = self._p.config
        with disk_errors(self._p.store.folder):
            folder = tempfile.TemporaryDirectory(prefix=WEIGHED_PREFIX, dir=self._p.store.folder)
        with folder as name:
            paths = [Path(name) / kind for kind in ("anchor", "contribution")]
            for path, vector in zip(paths, (drawn.anchor, contribution), strict=True):
                await trio.to_thread.run_sync(_write, path, vector)
            wanted = WorkRequest(
                workload=config.manifest.workload.name,
                options=config.manifest.workload.options,
                data=config.data,
                seed=config.manifest.workload.seed,
                assignment=self._p.training_client.assignment(drawn.base, drawn.peer),
                chunk_values=drawn.plan.chunk_values,
                anchor=str(paths[0]),
                contribution=str(paths[1]),
            )
            return await _ask(wanted)


def _can_weigh(manifest: Manifest) -> bool:
    whole = manifest.sync.fragments == 1 and not manifest.sync.exchanges_gradients
    return whole and manifest.workload.name != OWN_LOOP


def _write(path: Path, vector: F32) -> None:
    with disk_errors(path.parent):
        path.write_bytes(np.asarray(vector, "<f4").data)


async def _ask(wanted: WorkRequest) -> WorkReply | str:
    """The losses, or why there are none. Cancellation ends the process that weighs."""
    with trio.move_on_after(WEIGH_DEADLINE_S):
        async with running_child(PROGRAM, unpack=unpack_reply, stop_s=0, logger=logger, threads=1) as child:
            try:
                await child.send(wanted)
                reply = await child.receive()
                assert isinstance(reply, WorkReply)
                return reply
            except (ChildDied, ChildRaised, LocalError) as error:
                return str(error)
    return f"it took more than {WEIGH_DEADLINE_S:g} s"
