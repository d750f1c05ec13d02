"""What a pool of lanes has to know of the network around it: where it may dial, and through whom else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from shoal.protocol.errors import NetworkError
from shoal.protocol.identity import PeerId


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A way to a peer through a third: where that one is ('host:port'), and what each end says there first."""

    via: PeerId
    addresses: tuple[str, ...]
    near: bytes
    far: bytes


class LaneReach(Protocol):
    """Answers a pool's questions. From trio's thread."""

    def may_dial(self, peer: PeerId, host: str) -> bool:
        """Whether a host in `peer`'s answer may be dialled: nobody shall send a swarm against a third party."""

    def is_reached(self) -> bool:
        """Whether it makes sense to ask others to dial this node."""

    def addresses_of(self, relay: PeerId) -> tuple[str, ...]:
        """Where the lanes of a third are, that passes others' on; empty if it may not be dialled."""

    def relays(self, peer: PeerId) -> Sequence[PeerId]:
        """Who may have a way to `peer`, the best first."""

    async def way(self, relay: PeerId, peer: PeerId) -> Way:
        """A way to `peer` through `relay`. Raises NetworkError if it gives none."""


class Everywhere:
    """Where every address may be dialled and nobody relays."""

    def may_dial(self, peer: PeerId, host: str) -> bool:
        """Always."""
        return True

    def is_reached(self) -> bool:
        """As far as is known."""
        return True

    def addresses_of(self, relay: PeerId) -> tuple[str, ...]:
        """None."""
        return ()

    def relays(self, peer: PeerId) -> Sequence[PeerId]:
        """Nobody."""
        return ()

    async def way(self, relay: PeerId, peer: PeerId) -> Way:
        """There is none."""
        raise NetworkError(f"no way to {peer} through {relay}")
