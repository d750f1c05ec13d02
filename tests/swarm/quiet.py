"""Strangers that say hello, and that they are alive when they are asked, and nothing else."""

from __future__ import annotations

import contextlib

from shoal.protocol.errors import NetworkError
from shoal.protocol.identity import PeerId
from shoal.protocol.peering import Ack, Full, Hello, LinkMessage, Ping, Refusal, Welcome
from shoal.protocol.wire import canonical, decode, open_envelope
from shoal.swarm.links import ENVELOPE_KIND, HELLO_PROTOCOL, MESSAGES_PROTOCOL
from shoal.swarm.streams import MessageStream
from tests.swarm.test_members import Stranger
from tests.waiting import WAIT_S


class Quiet(Stranger):
    """One of them, on a host of its own."""

    async def ask_at(self, address: str, peer: PeerId, hello: Hello) -> Welcome | Refusal | Full:
        """Say hello to whoever listens there."""
        await self.host.dial(address, deadline_s=WAIT_S)
        reply = await self.host.request(peer, HELLO_PROTOCOL, canonical(hello), deadline_s=WAIT_S)
        return decode(reply, Welcome | Refusal | Full)  # type: ignore[arg-type]

    async def _read(self, stream: MessageStream) -> None:
        with contextlib.suppress(NetworkError):
            answers = await self.host.open(stream.peer, MESSAGES_PROTOCOL, deadline_s=WAIT_S)
            while True:
                envelope = open_envelope(await stream.receive(deadline_s=None), self.swarm_id)
                if envelope.kind != ENVELOPE_KIND:
                    continue
                said = decode(envelope.payload, LinkMessage)  # type: ignore[arg-type]
                if isinstance(said, Ping):
                    ack = Ack(nonce=said.nonce, incarnation=0)
                    await answers.send(self.sealer.seal(ENVELOPE_KIND, canonical(ack)), deadline_s=WAIT_S)
