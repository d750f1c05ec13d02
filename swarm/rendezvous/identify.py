"""What libp2p's identify says of this node to those who ask: software that passes addresses on, and is not Shoal."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

from multiaddr import Multiaddr

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from libp2p.identity.identify.identify import ID as IDENTIFY_PROTOCOL
    from libp2p.identity.identify.identify import identify_handler_for


def tell_addresses(libp2p_host: Any, addresses: Callable[[], Iterable[str]]) -> None:
    """Answer identify from now on, with these addresses as they are whenever somebody asks."""
    libp2p_host.set_stream_handler(IDENTIFY_PROTOCOL, identify_handler_for(libp2p_host, use_varint_format=True))
    libp2p_host._addrs_factory = lambda _: [Multiaddr(text.rsplit("/p2p/", 1)[0]) for text in addresses()]
