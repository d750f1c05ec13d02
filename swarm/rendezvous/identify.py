"""What libp2p's identify says of this node to those who ask: software that passes addresses on, and is not Shoal."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from multiaddr import Multiaddr


def tell_addresses(libp2p_host: Any, addresses: Callable[[], Iterable[str]]) -> None:
    """Say from now on that the node listens at these addresses, as they are whenever somebody asks."""
    libp2p_host._addrs_factory = lambda _: [Multiaddr(text.rsplit("/p2p/", 1)[0]) for text in addresses()]
