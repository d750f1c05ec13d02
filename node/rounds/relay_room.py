"""Flow control through a relay: the sender asks it how much it has let go, and sends as much more.

    S ── AskLetGo(scope, to) ──► R
    S ◄── LetGo(bytes) ────────  R

Only while frames are kept back (`shoal.collectives.frame_relay`), PERIOD_S after the last answer. A relay that does not
say, as one of an earlier release, is sent another window after each question: it bounds by itself what it takes.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection
from typing import Annotated

import trio
from msgspec import Meta

from shoal.collectives.traffic import PlanTraffic
from shoal.protocol.errors import NetworkError, RemoteError
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Message, Peer
from shoal.protocol.peering import Refusal
from shoal.swarm.host import Host
from shoal.swarm.lanes.frame import SCOPE_BYTES
from shoal.swarm.questions import answer, ask, hear
from shoal.swarm.streams import MessageStream

LET_GO_PROTOCOL = "/shoal/let-go/1"
PERIOD_S = 0.05
MESSAGE_LIMIT_BYTES = 256

logger = logging.getLogger(__name__)


class AskLetGo(Message, frozen=True, kw_only=True):
    """Asks how much of the sender's frames for `to`, in this reduction, the receiver holds no more."""

    scope: Annotated[bytes, Meta(min_length=SCOPE_BYTES, max_length=SCOPE_BYTES)]
    to: Peer


class LetGo(Message, frozen=True, kw_only=True):
    """So many bytes of payload, since the reduction began."""

    size: Annotated[int, Meta(ge=0, lt=1 << 62)]


LetGoReply = LetGo | Refusal


class RelayRoom:
    """Both ends of it, for one node; `run` it.

    linked: who may ask. until_relayed: returns while others pass frames on; nothing is kept back else.
    """

    def __init__(
        self,
        host: Host,
        traffic: PlanTraffic,
        linked: Callable[[], Collection[PeerId]],
        until_relayed: Callable[[], Awaitable[None]],
    ) -> None:
        self._host = host
        self._traffic = traffic
        self._linked = linked
        self._until_relayed = until_relayed
        self._asked: set[tuple[PeerId, PeerId, bytes]] = set()
        host.serve(LET_GO_PROTOCOL, self._serve)

    async def run(self) -> None:
        """Ask for whom something is kept back, until cancelled."""
        async with trio.open_nursery() as nursery:
            while True:
                await self._until_relayed()
                await trio.sleep(PERIOD_S)
                for way in self._traffic.kept_back():
                    if way not in self._asked:
                        self._asked.add(way)
                        nursery.start_soon(self._ask, *way)

    async def _ask(self, peer: PeerId, relay: PeerId, scope: bytes) -> None:
        size: int | None = None
        try:
            question = AskLetGo(scope=scope, to=peer)
            reply: LetGo = await ask(
                self._host, relay, LET_GO_PROTOCOL, question, LetGo, limit_bytes=MESSAGE_LIMIT_BYTES
            )
            size = reply.size
        except (NetworkError, RemoteError) as error:
            logger.debug("%s does not tell what it has let go of frames for %s: %s", relay, peer, error)
        finally:
            self._asked.discard((peer, relay, scope))
        self._traffic.hear_let_go(peer, relay, scope, size)

    async def _serve(self, stream: MessageStream) -> None:
        asked: AskLetGo = await hear(stream, AskLetGo, limit_bytes=MESSAGE_LIMIT_BYTES)
        if stream.peer in self._linked():
            reply: LetGoReply = LetGo(size=self._traffic.let_go(asked.scope, stream.peer, PeerId(asked.to)))
        else:
            reply = Refusal(reason="this node passes frames on for members only")
        await answer(stream, reply)
