"""A node that tells its norm in two ways, for tests: every second peer hears of four times the norm, as well signed."""

from __future__ import annotations

import msgspec

from shoal.cli.main import main
from shoal.protocol import round as round_module
from shoal.protocol.commitments import committed
from shoal.protocol.identity import Identity
from shoal.protocol.messages import Ready
from shoal.protocol.peering import LinkMessage
from shoal.protocol.planning import CONTRIBUTOR, RoundSettings
from shoal.swarm.links import Links

FACTOR = 16.0
"""Of the sums of squares."""

signing: list[tuple[Identity, RoundSettings]] = []
honest_broadcast = Links.broadcast


def noted(identity: Identity, ready: Ready, settings: RoundSettings) -> Ready:
    """What signs the one word signs the other."""
    signing[:] = [(identity, settings)]
    return committed(identity, ready, settings)


def broadcast(self: Links, message: LinkMessage) -> None:
    """One word for some, another for others."""
    if not isinstance(message, Ready) or message.role != CONTRIBUTOR:
        honest_broadcast(self, message)
        return
    identity, settings = signing[0]
    louder = msgspec.structs.replace(message, squares=tuple(FACTOR * square for square in message.squares))
    words = message, committed(identity, louder, settings)
    for number, peer in enumerate(sorted(self.linked())):
        self.send(peer, words[number % 2])


if __name__ == "__main__":
    round_module.committed = noted
    Links.broadcast = broadcast  # type: ignore[method-assign]
    main()
