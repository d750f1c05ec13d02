"""The serving side of catching up: what this node has of the chain, of states and of finals, for whoever asks.

A held state never changes, so serving one costs the rounds that go on nothing but bandwidth. Asking for a header begins
a transfer: from then on the state is held for as long as chunks of it are asked for, within the limits of the cache,
however many rounds pass meanwhile. Finals are served from memory, and from disk if they are only there; so are states
that are kept to go back to.
"""

from __future__ import annotations

from functools import partial

import trio

from shoal.node.state.earlier_states import EarlierStates
from shoal.node.state.states import StateCache
from shoal.protocol.chain import Chain
from shoal.protocol.peering import (
    FetchAnswer,
    FetchRequest,
    FinalsAnswer,
    GetChain,
    GetHeader,
    HeaderAnswer,
    Refusal,
)
from shoal.protocol.wire import canonical, decode
from shoal.swarm.streams import MessageStream

FETCH_PROTOCOL = "/shoal/fetch/1"
REQUEST_DEADLINE_S = 10.0
ANSWER_LIMIT_BYTES = 4 << 20  # of an answer to a fetch


class StateServer:
    """Answers other nodes' fetch requests from this node's chain and cache, and by what `earlier` keeps on disk."""

    def __init__(self, *, chain: Chain, cache: StateCache, earlier: EarlierStates | None = None) -> None:
        self._chain = chain
        self._cache = cache
        self._earlier = earlier

    async def serve(self, stream: MessageStream) -> None:
        """Answer one request. Raises RemoteError when it is malformed."""
        data = await stream.receive(deadline_s=REQUEST_DEADLINE_S)
        request: FetchRequest = decode(data, FetchRequest, peer=stream.peer)  # type: ignore[arg-type]
        await stream.send(canonical(await self.look_up(request)), deadline_s=REQUEST_DEADLINE_S)
        await stream.aclose()

    async def look_up(self, request: FetchRequest) -> FetchAnswer:
        """Answer a request from what this node has, on disk too."""
        if isinstance(request, GetHeader) and self._earlier is not None:
            await self._earlier.hold(request.round)
        if isinstance(request, GetChain | GetHeader):
            return self.answer(request)
        return await trio.to_thread.run_sync(partial(self.answer, request))

    def answer(self, request: FetchRequest) -> FetchAnswer:
        """Answer a request from what this node has. Blocks for finals that are on disk."""
        if isinstance(request, GetChain):
            return self._chain.part(request.after, request.rebases)
        if isinstance(request, GetHeader):
            header = self._cache.begin_serving(request.round)
            return Refusal(reason="not held here") if header is None else HeaderAnswer(header=canonical(header))
        plan = self._cache.served_plan(request.plan)
        return Refusal(reason="not held here") if plan is None else FinalsAnswer(plan=plan)
