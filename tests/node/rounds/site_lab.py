"""The exchange of a node that is of no site, for tests of what stands around it."""

from __future__ import annotations

from typing import Any

from shoal.node.rounds.site_exchange import OfferedWork, SiteExchange
from shoal.protocol.wire import SwarmId


def no_site() -> SiteExchange:
    nothing: Any = None
    return SiteExchange(
        nothing,
        OfferedWork(lambda ref: None),
        nothing,
        name=None,
        swarm=SwarmId(bytes(32)),
        linked=frozenset,
        record_of=lambda peer: None,
    )
