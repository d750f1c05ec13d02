"""Errands of a member (`shoal.protocol.errands`), carried out beside the engine.

Whatever waits for a peer is a job of `run`, and what comes of it is put to the engine as an input. What peers give of
the chain is handed over too, request by request. So chain and state change in the engine's task only, which waits for
nobody.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

import trio

from shoal.node.rounds.inbox import Own, in_turn
from shoal.node.state.asking import ask_in_turn
from shoal.node.state.state_store import StateStore
from shoal.protocol.agreement import Broadcast
from shoal.protocol.errands import Errand, InTurn, LookUp, ReplaceChain, Request, TakeEntries
from shoal.protocol.errors import LocalError, NetworkError, RemoteError
from shoal.protocol.identity import PeerId
from shoal.swarm.links import Links

ERRANDS_LIMIT = 512
"""More than peers that can be asked at once: an errand for each, one for the state, one for S(0), one to compare."""

Performers = Mapping[type[Any], Callable[[Any], Awaitable[Any]]]
"""Functions that carry out requests, by type of request."""


async def carry_out(errand: Errand, performers: Performers) -> Any:
    """All requests of an errand, one after the other; what came of it. Cancellation: what was handed over stands."""
    came: Any = None
    while (request := errand.go_on(came, trio.current_time())) is not None:
        try:
            came = await _do(request, performers)
        except (NetworkError, RemoteError) as error:
            came = error
    return errand.outcome


async def _do(request: Request, performers: Performers) -> Any:
    if isinstance(request, InTurn):
        errand_of = request.errand
        await ask_in_turn(request.peers, lambda peer: carry_out(errand_of(peer), performers), apart_s=request.apart_s)
        return None
    perform = performers.get(type(request))
    if perform is None:
        raise LocalError(f"nothing here does {type(request).__name__}")
    return await perform(request)


class Errands:
    """Carries errands out. `run` is a task beside the engine; `begin` is called in the engine's task.

    elsewhere: carries out requests about who may be linked soon, and the places where a peer may be. put: takes what
    comes of an errand, as an input of the engine's. look_up: called beside the engine once the state at the head is to
    be had, with the peers that may have what this node's own contribution is settled by.
    """

    def __init__(
        self,
        state_store: StateStore,
        links: Links,
        *,
        elsewhere: Performers,
        put: Callable[[Own], None],
        look_up: Callable[[Sequence[PeerId]], Awaitable[None]],
    ) -> None:
        self._state_store = state_store
        self._links = links
        self._put = put
        self._look_up = look_up
        self._jobs, self._job_queue = trio.open_memory_channel[Errand](ERRANDS_LIMIT)
        self._performers: Performers = {
            **state_store.performers,
            **elsewhere,
            TakeEntries: self._take,
            ReplaceChain: self._replace,
            Broadcast: self._broadcast,
            LookUp: self._settle,
        }

    async def run(self) -> None:
        """Do what waits for peers, until cancelled.

        Raises ConfigError when the swarm's parameters are not this workload's, or this node has to choose between
        chains and cannot. Cancellation: what was put stands.
        """
        async with trio.open_nursery() as nursery:
            async for errand in self._job_queue:
                nursery.start_soon(self._carry_out, errand)

    def begin(self, errand: Errand) -> None:
        """Have an errand carried out; what comes of it is put to the engine."""
        self._jobs.send_nowait(errand)

    async def _carry_out(self, errand: Errand) -> None:
        outcome = await carry_out(errand, self._performers)
        if outcome is not None:
            self._put(outcome)

    async def _broadcast(self, request: Broadcast) -> None:
        self._links.broadcast(request.message)  # type: ignore[arg-type]

    async def _settle(self, request: LookUp) -> None:
        await self._look_up(request.peers)

    # -- the chain, in the engine's task -----------------------------------------------------------------------

    async def _take(self, request: TakeEntries) -> int:
        new: int = await in_turn(self._put, partial(self._state_store.take, request)) if request.entries else 0
        return new

    async def _replace(self, request: ReplaceChain) -> None:
        await in_turn(self._put, partial(self._state_store.replace, request))
