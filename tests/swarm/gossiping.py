"""Gossip between the hosts of a test."""

from __future__ import annotations

import trio

from shoal.swarm.gossip import GossipMessage
from shoal.swarm.host import Host
from shoal.swarm.streams import Mailbox

REPUBLISH_S = 3.0


async def published(host: Host, box: Mailbox[GossipMessage], data: bytes, *, topic: str = "news") -> GossipMessage:
    """Publish `data` until it arrives: gossip promises no more to one whose mesh is still growing."""
    while True:
        await host.publish(topic, data)
        with trio.move_on_after(REPUBLISH_S):
            while (message := await box.receive()).data != data:
                pass  # an earlier one that arrived twice
            return message
