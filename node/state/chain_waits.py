"""Both ends of a follower's wait for what follows on its chain (`shoal.protocol.followers`).

Who waits is answered once an entry and the state at the head are here. A node that does not know the protocol refuses
the stream, and is waited at no more for a while.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

import trio

from shoal.node.state.state_server import ANSWER_LIMIT_BYTES
from shoal.node.state.state_store import StateStore
from shoal.protocol.errands import AwaitEntries
from shoal.protocol.errors import RemoteError
from shoal.protocol.followers import AWAIT_S, FOLLOWERS_LIMIT, Waiting
from shoal.protocol.identity import PeerId
from shoal.protocol.peering import ChainPart, GetChain, Refusal
from shoal.swarm.host import Host
from shoal.swarm.questions import REQUEST_DEADLINE_S, answer, ask, hear
from shoal.swarm.streams import MessageStream

WAIT_PROTOCOL = "/shoal/await-chain/1"
QUESTION_LIMIT_BYTES = 1024


class ChainWaits:
    """Waits of one node's, and at it. linked: who may wait here."""

    def __init__(self, host: Host, state_store: StateStore, linked: Callable[[], Collection[PeerId]]) -> None:
        self._host = host
        self._state_store = state_store
        self._linked = linked
        self._waiting = Waiting()
        self._to_answer: dict[PeerId, trio.Event] = {}
        state_store.on_current = self._look
        host.serve(WAIT_PROTOCOL, self._serve, limit_bytes=ANSWER_LIMIT_BYTES)

    # -- at others -------------------------------------------------------------------------------------------

    @property
    def performers(self) -> Mapping[type[Any], Callable[[Any], Awaitable[Any]]]:
        """Functions that carry out an errand's requests."""
        return {AwaitEntries: self._await_entries}

    async def _await_entries(self, request: AwaitEntries) -> ChainPart:
        question = GetChain(after=request.after, rebases=request.rebases)
        part: ChainPart = await ask(
            self._host,
            request.peer,
            WAIT_PROTOCOL,
            question,
            ChainPart,
            limit_bytes=ANSWER_LIMIT_BYTES,
            deadline_s=AWAIT_S + REQUEST_DEADLINE_S,
        )
        return part

    # -- here ------------------------------------------------------------------------------------------------

    async def _serve(self, stream: MessageStream) -> None:
        """Answer one who waits, after AWAIT_S at the latest. Raises RemoteError when its question is malformed."""
        if stream.peer not in self._linked():
            raise RemoteError("waits without having been admitted", peer=stream.peer)
        asked: GetChain = await hear(stream, GetChain, limit_bytes=QUESTION_LIMIT_BYTES)
        await answer(stream, await self._answer(stream.peer, asked))

    async def _answer(self, peer: PeerId, asked: GetChain) -> ChainPart | Refusal:
        if not self._waiting.come(peer, asked.after, asked.rebases, trio.current_time()):
            return Refusal(reason=f"{FOLLOWERS_LIMIT} wait here already")
        if (earlier := self._to_answer.get(peer)) is not None:
            earlier.set()
        to_answer = self._to_answer[peer] = trio.Event()
        try:
            self._look()
            with trio.move_on_after(AWAIT_S):
                await to_answer.wait()
        finally:
            if self._to_answer.get(peer) is to_answer:
                del self._to_answer[peer]
                self._waiting.gone(peer)
        return self._state_store.chain.part(asked.after, asked.rebases)

    def _look(self) -> None:
        """Answer those to whom there is something to say."""
        store = self._state_store
        for peer in self._waiting.due(store.chain, trio.current_time(), current=store.current):
            self._to_answer[peer].set()
