"""Signing with the authority's key at the node where it is, as a member asks for it.

Apart from the key itself (`authority.py`), which commands read that start no node.
"""

from __future__ import annotations

from collections.abc import Collection

import trio

from shoal.node.rounds.authority import Authority
from shoal.node.rounds.engine_parts import EngineParts
from shoal.protocol.errors import ConfigError
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Amendment, Rebase


async def signed_amendment(parts: EngineParts, amendment: Amendment) -> bytes:
    """The word of the authority at this node that members may consent to it. Raises ConfigError without the key."""
    return await trio.to_thread.run_sync(_authority(parts).sign_amendment, parts.state_store.head.swarm, amendment)


async def signed_rebase(parts: EngineParts, forget: Collection[PeerId], alive: Collection[PeerId]) -> Rebase:
    """The rebase after the head without those in `forget`, signed at this node. alive: who is here.

    Raises ConfigError where nothing asks for one, it makes no sense, or the key is elsewhere; StorageError.
    """
    standstill = parts.standstill
    if not forget and not standstill.alerts:
        raise ConfigError(
            "nothing keeps this swarm from going on with all its members; name who is gone for good: "
            "`shoal rebase --forget PEER`"
        )
    fork = standstill.fork
    here = set(alive) - set(fork.signers if fork else ())  # who lied goes though it is here
    chain = parts.state_store.chain
    return await trio.to_thread.run_sync(_authority(parts).rebase, chain.head, chain.voters, forget, here)


def _authority(parts: EngineParts) -> Authority:
    swarm = parts.config.manifest.swarm
    return Authority(parts.store.folder, authority=swarm.authority, node=parts.identity)
