"""Questions between two peers: one message, and one that answers it, on a stream of its own."""

from __future__ import annotations

from typing import Any, Protocol

from shoal.protocol.errors import NetworkError
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Message
from shoal.protocol.peering import Refusal
from shoal.protocol.wire import canonical, decode
from shoal.swarm.streams import MessageStream

REQUEST_DEADLINE_S = 5.0
"""Of a short question to be heard, and of a short answer to be given and taken."""


class Asking(Protocol):
    """Channel through which questions are asked: the host."""

    async def request(
        self, peer: PeerId, protocol: str, payload: bytes, *, deadline_s: float, limit_bytes: int
    ) -> bytes:
        """One message each way."""


async def ask(
    host: Asking,
    peer: PeerId,
    protocol: str,
    question: Message,
    kind: Any,
    *,
    limit_bytes: int,
    deadline_s: float = REQUEST_DEADLINE_S,
) -> Any:
    """The answer of `peer`: a Message of `kind`, which may be a union of them.

    Raises NetworkError where none comes in time, or a Refusal; RemoteError for what is no answer.
    """
    data = await host.request(peer, protocol, canonical(question), deadline_s=deadline_s, limit_bytes=limit_bytes)
    answer = decode(data, kind | Refusal, peer=peer, limit_bytes=limit_bytes)
    if isinstance(answer, Refusal):
        raise NetworkError(f"{peer}: {answer.reason}")
    return answer


async def hear(stream: MessageStream, kind: Any, *, limit_bytes: int, deadline_s: float = REQUEST_DEADLINE_S) -> Any:
    """The question on a stream, a Message of `kind`. Raises NetworkError, or RemoteError for what is none."""
    data = await stream.receive(deadline_s=deadline_s)
    return decode(data, kind, peer=stream.peer, limit_bytes=limit_bytes)


async def answer(stream: MessageStream, message: Message, *, deadline_s: float = REQUEST_DEADLINE_S) -> None:
    """Say this in answer to a question, and close the stream. Raises NetworkError."""
    await stream.send(canonical(message), deadline_s=deadline_s)
    await stream.aclose()
